"""From a configuration to objects: the only place that names concrete sources and sinks."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from consumers.avro import AvroDecoder
from consumers.features import Spec
from consumers.files import Files
from consumers.source import Source
from exporters.sink import Sink
from sparse_store.config import Table
from sparse_store.store import SparseStore
from streamtrain.config import Config, signature
from streamtrain.cut import Cut
from streamtrain.dense import DenseStep, limit_threads, resolve_build
from streamtrain.errors import ConfigError
from streamtrain.models.spec import InputSpec, ModelSpec, ModelSpecError
from streamtrain.threads import available
from streamtrain.trainer import Sparse, Task, Trainer

_log = logging.getLogger(__name__)

_BAD_URL = (
    "export.redis: not a valid URL; write redis://:PASSWORD@HOST:PORT/0 with the password "
    "percent-encoded"
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model is fed: its specification, and where each input comes from."""

    spec: ModelSpec
    sparse: tuple[Sparse, ...]
    dense: tuple[str, ...]


def inputs(config: Config) -> Inputs:
    """Derive the model's inputs from features and tables, in the order of the configuration."""
    specs: dict[str, InputSpec] = {}
    sparse: list[Sparse] = []
    dense: list[str] = []
    for feature, f in config.features.items():
        if f.dense is not None:
            specs[feature] = InputSpec(feature, "dense", (f.width or 1,), feature)
            dense.append(feature)
        for n, table in enumerate(f.tables):
            name = feature if n == 0 else f"{feature}.{table}"
            dim = config.tables[table].dim
            shape = (dim,) if f.sequence is None else (f.sequence, dim)
            kind = "pooled" if f.sequence is None else "sequence"
            specs[name] = InputSpec(name, kind, shape, feature, table)  # type: ignore[arg-type]
            sparse.append(Sparse(name, feature, table, f.pool, f.sequence))
        if f.sequence is not None:
            mask = f"{feature}.mask"
            specs[mask] = InputSpec(mask, "mask", (f.sequence,), feature)
    spec = ModelSpec(specs, tuple(config.sample.labels), config.model.seed)
    return Inputs(spec, tuple(sparse), tuple(dense))


def trainer(config: Config, cut: Cut | None) -> Trainer:
    """Build the trainer: empty, or as a cut has it.

    Raises
    ------
    ConfigError
        The configuration does not fit the cut; every difference is named.
    """
    if cut is not None:
        _refuse_changes(config, cut)
    threads = available() if config.threads == "auto" else config.threads
    limit_threads(threads)
    found = inputs(config)
    labels = config.sample.labels
    try:
        dense = DenseStep(
            resolve_build(config.model.build),
            found.spec,
            optimizer=config.model.optimizer,
            losses={task: label.loss for task, label in labels.items()},
            shapes=config.batch.shapes,
        )
        if cut is not None:
            dense.restore(cut.dense())
    except ModelSpecError as error:
        raise ConfigError([str(error)]) from error
    built = Trainer(
        _store(list(config.tables.values()), config.model.seed, threads, cut),
        dense,
        sparse=found.sparse,
        dense_inputs=found.dense,
        tasks=[Task(name, label.loss, label.weight) for name, label in labels.items()],
        window=config.validation.window,
        clock_max_step_ms=config.clock.max_step,
    )
    if cut is not None:
        built.restore(cut.state()["trainer"])
        for task, state in cut.validation().items():
            built.validation[task].restore(state)
    return built


def kafka_source(config: Config) -> Source:
    """Build the live source.

    Raises
    ------
    ConfigError
        There is no ``source.kafka``, or a secret it names is missing.
    """
    from consumers.kafka import KafkaSource

    kafka = config.source.kafka
    if kafka is None:
        raise ConfigError(["source.kafka: missing; `run` needs a topic to read"])
    found = decoder(config)
    return KafkaSource(kafka, found, header=found.header)


def files_source(config: Config, paths: Sequence[str]) -> Source:
    """Build a source over Avro container files."""
    return Files(paths, decoder(config))


def decoder(config: Config) -> AvroDecoder:
    """Build what turns message values into samples."""
    avro = config.source.decode.avro
    schemas = None
    if avro.registry is not None:
        from consumers.registry import RegistrySchemas

        # Beside the cuts: a start must not depend on the registry being up.
        schemas = RegistrySchemas(avro.registry, cache=Path(config.checkpoint.dir) / "schemas")
    return AvroDecoder.from_config(avro, Spec(config.sample, config.features), schemas=schemas)


def sinks(config: Config, environment: Mapping[str, str] = os.environ) -> list[Sink]:
    """Build the sinks that versions are shipped to; the log alone needs none."""
    redis = config.export.redis
    if redis is None:
        return []
    from exporters.redis_sink import RedisSink

    try:
        url = redis.resolve_url(environment)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    try:
        urlsplit(url).port  # noqa: B018  raises on what is no number
    except ValueError:
        # The error's own text would show a piece of the password.
        raise ConfigError([_BAD_URL]) from None
    return [
        RedisSink(
            url,
            model=config.model.name,
            expected_rows=redis.expected_rows,
            groups=redis.groups,
            keep_versions=redis.keep_versions,
            stream_bytes=redis.stream_bytes,
            allow_eviction=redis.allow_eviction,
        )
    ]


def environment(config: Config) -> dict[str, Any]:
    """Return what a result's bits depend on beside config and samples; kept in every cut."""
    return {
        **{name: version(name) for name in ("tensorflow", "keras", "numpy", "numba")},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1"),
        "cpu": _cpu_flags(),
        "threads": available() if config.threads == "auto" else config.threads,
    }


def _cpu_flags() -> str:
    """Return the vector extensions of this CPU: with them, kernels choose other orders of sums."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return " ".join(sorted(f for f in set(line.split()) if f.startswith(("avx", "fma", "amx"))))


def warn_of_another_environment(config: Config, cut: Cut) -> None:
    """Say where the bit promise ends: after a change of library, CPU or threads."""
    before, now = cut.state().get("environment", {}), environment(config)
    changed = [f"{k}: {before.get(k)} -> {v}" for k, v in now.items() if before.get(k) != v]
    if changed:
        _log.warning(
            "this cut was written in another environment (%s): learning goes on exactly once, but "
            "no longer bit for bit as there",
            "; ".join(changed),
        )


def _store(tables: list[Table], seed: int, threads: int, cut: Cut | None) -> SparseStore:
    if cut is not None:
        return SparseStore.load(cut.parts(), tables=tables, seed=seed, threads=threads)
    return SparseStore(tables, seed=seed, threads=threads)


def _refuse_changes(config: Config, cut: Cut) -> None:
    """Compare with the configuration that the cut was learned under."""
    before, now = cut.state()["signature"], signature(config)
    mistakes = [
        f"{path}: {cut.path.name} was learned with {_shown(before, path)}, the configuration says "
        f"{_shown(now, path)}; put it back, or use another checkpoint.dir"
        for path in sorted(before.keys() | now.keys())
        if _shown(before, path) != _shown(now, path)
    ]
    if mistakes:
        raise ConfigError(mistakes)


def _shown(values: Mapping[str, Any], path: str) -> str:
    return repr(values[path]) if path in values else "nothing"
