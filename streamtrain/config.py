"""One YAML file into frozen, strictly checked structs; every mistake is named with its path.

The leaves own their structs and this module only composes them. `streamtrain.yaml12` reads the
text, `streamtrain.strict` converts it.
"""

import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

import consumers.config
import exporters.config
import sparse_store.config
from streamtrain.errors import ConfigError
from streamtrain.strict import convert, joined
from streamtrain.yaml12 import parse

T = TypeVar("T")

_SECRET: Final = re.compile(r"password|secret|token|credential", re.IGNORECASE)

Duration = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "duration"})]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Adam(_Struct, frozen=True, kw_only=True):
    """Keras' Adam for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.001


class Sgd(_Struct, frozen=True, kw_only=True):
    """Keras' SGD for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.01
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class Adagrad(_Struct, frozen=True, kw_only=True):
    """Keras' Adagrad for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.01


DenseOptimizer = Annotated[
    Adam | Sgd | Adagrad,
    msgspec.Meta(extra={"choices": {"adam": Adam, "sgd": Sgd, "adagrad": Adagrad}}),
]


class Model(_Struct, frozen=True, kw_only=True):
    """Which Keras model is trained, and under which name it is published."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "model"
    build: Annotated[str, msgspec.Meta(pattern=r"^[\w.]+:\w+$")] = "streamtrain.models:deepfm"
    optimizer: DenseOptimizer = Adam()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


class Batch(_Struct, frozen=True, kw_only=True):
    """How samples are gathered into one step."""

    size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 2048
    wait: Annotated[int | None, msgspec.Meta(extra={"unit": "duration"})] = 50
    shapes: list[Annotated[int, msgspec.Meta(ge=1, le=65_536)]] = msgspec.field(
        default_factory=lambda: [64, 256, 1024, 2048]
    )


class Clock(_Struct, frozen=True, kw_only=True):
    """How far one step may raise the clock."""

    max_step: Duration = 3_600_000


class Validation(_Struct, frozen=True, kw_only=True):
    """Progressive validation over the newest ``window`` predictions."""

    window: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 50_000


class Checkpoint(_Struct, frozen=True, kw_only=True):
    """Where cuts are written, how often, and how many are kept."""

    dir: str
    every: Duration = 60_000
    keep: Annotated[int, msgspec.Meta(ge=1)] = 5


class DeadLetters(_Struct, frozen=True, kw_only=True):
    """The file that takes messages which could not be learned from."""

    file: str


class Shutdown(_Struct, frozen=True, kw_only=True):
    """How long a clean end may take to ship the last delta."""

    deadline: Duration = 30_000


class Telemetry(_Struct, frozen=True, kw_only=True):
    """Where metrics and health are answered; ``null`` turns them off."""

    listen: Annotated[str, msgspec.Meta(pattern=r"^[^:]*(:[^:]+)*:\d{1,5}$")] | None = (
        "127.0.0.1:9464"
    )


class Config(_Struct, frozen=True, kw_only=True):
    """The whole configuration of a trainer."""

    sample: consumers.config.Sample
    features: dict[str, consumers.config.Feature]
    source: consumers.config.Source
    checkpoint: Checkpoint
    model: Model = Model()
    threads: Literal["auto"] | Annotated[int, msgspec.Meta(ge=1, le=1024)] = "auto"
    tables: dict[str, sparse_store.config.Table] = {}
    batch: Batch = Batch()
    clock: Clock = Clock()
    validation: Validation = Validation()
    export: exporters.config.Export = exporters.config.Export()
    dead_letters: DeadLetters | None = None
    shutdown: Shutdown = Shutdown()
    telemetry: Telemetry = Telemetry()


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration file.

    Parameters
    ----------
    path : str or Path
        The YAML file. Relative file names inside it are taken from its own folder.
    overrides : sequence of str
        ``a.b=value`` pairs that replace what the file says; values are YAML scalars.

    Raises
    ------
    ConfigError
        The file can't be read or has mistakes; each is named with its path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    return loads(text, overrides, base=path.resolve().parent, name=str(path))


def loads(
    text: str,
    overrides: Sequence[str] = (),
    *,
    base: Path | None = None,
    name: str = "config",
) -> Config:
    """Check a configuration given as YAML text; see `load`."""
    raw = parse(text, name)
    if not isinstance(raw, dict):
        raise ConfigError([f"{name}: expected a mapping of sections such as `source:`"])
    for pair in overrides:
        _override(raw, pair)
    mistakes: list[str] = []
    config = convert(raw, Config, "", mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    assert isinstance(config, Config)
    config = _named_tables(config)
    if base is not None:
        config = _anchored(config, base)
    mistakes = _cross_check(config)
    if mistakes:
        raise ConfigError(mistakes)
    return config


def effective(config: Config) -> str:
    """Return the whole configuration, defaults included, as one line of JSON without secrets."""
    return json.dumps(_hide(_builtins(config)))


def signature(config: Config) -> dict[str, Any]:
    """Return what a cut must agree with, as ``path: value``.

    Rates, eviction and admission are left out: they may change between two runs. So are places
    and paces (brokers, folders, periods, batch size), which say nothing about the learned state.
    """
    tables = {}
    for name, table in config.tables.items():
        shown = _builtins(msgspec.structs.replace(table, init=table.start))
        tables[name] = {key: shown[key] for key in ("dim", "unadmitted", "init", "optimizer")}
    model = _builtins(config.model)
    whole = {
        "model": {key: model[key] for key in ("build", "seed", "optimizer")},
        "sample": _builtins(config.sample),
        "features": _builtins(config.features),
        "tables": tables,
    }
    flat: dict[str, Any] = {}
    _flatten("", whole, flat)
    return {path: value for path, value in flat.items() if not path.endswith((".rate", ".alpha"))}


def _builtins(value: Any, choices: Mapping[str, Any] | None = None) -> Any:
    """Turn structs into mappings; one that was chosen among several is shown under its name."""
    if isinstance(value, msgspec.Struct):
        hints = typing.get_type_hints(type(value), include_extras=True)
        fields = {
            name: _builtins(getattr(value, name), _choices(hints[name]))
            for name in value.__struct_fields__
        }
        for name, kind in (choices or {}).items():
            if type(value) is kind:
                return {name: fields}
        return fields
    if isinstance(value, dict):
        return {key: _builtins(child, choices) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_builtins(child, choices) for child in value]
    return value


def _choices(hint: Any) -> Mapping[str, Any] | None:
    """Return the choices of a field, or of the items of a list of them."""
    if typing.get_origin(hint) is Annotated:
        for note in typing.get_args(hint)[1:]:
            if isinstance(note, msgspec.Meta) and note.extra and "choices" in note.extra:
                return typing.cast("Mapping[str, Any]", note.extra["choices"])
    for inner in typing.get_args(hint):
        found = _choices(inner)
        if found is not None:
            return found
    return None


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    """Spread a tree into ``path: leaf``; lists of mappings are spread by index too."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            _flatten(joined(path, key), child, into)
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for n, child in enumerate(value):
            _flatten(path if len(value) == 1 else f"{path}[{n}]", child, into)
    else:
        into[path] = value


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "***"
            if _SECRET.search(str(key))
            and not str(key).endswith(("_env", "_file"))
            and child is not None
            else _hide(child)
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(child) for child in value]
    return value


def _override(raw: dict[Any, Any], pair: str) -> None:
    path, equals, text = pair.partition("=")
    if not equals or not path:
        raise ConfigError([f"--set {pair}: write it as a.b=value"])
    *parents, last = path.split(".")
    where = raw
    for parent in parents:
        child = where.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError([f"--set {pair}: `{parent}` is not a section"])
        where = child
    where[last] = parse(text, f"--set {path}")


def _named_tables(config: Config) -> Config:
    tables = {
        name: msgspec.structs.replace(table, name=name) for name, table in config.tables.items()
    }
    return msgspec.structs.replace(config, tables=tables)


def _anchored(config: Config, base: Path) -> Config:
    """Take every relative file name from the folder of the configuration file."""
    replace = msgspec.structs.replace

    def files(struct: Any, *fields: str) -> Any:
        named = {f: getattr(struct, f) for f in fields}
        return replace(struct, **{f: str(base / n) for f, n in named.items() if n is not None})

    avro = files(config.source.decode.avro, "schema")
    avro = replace(avro, writers=[str(base / name) for name in avro.writers])
    if avro.registry is not None:
        avro = replace(avro, registry=files(avro.registry, "ca"))
    kafka = config.source.kafka
    if kafka is not None and kafka.security is not None:
        security = files(kafka.security, "ca", "certificate", "key", "password_file")
        kafka = replace(kafka, security=security)
    decode = replace(config.source.decode, avro=avro)
    letters = config.dead_letters
    return replace(
        config,
        checkpoint=files(config.checkpoint, "dir"),
        source=replace(config.source, kafka=kafka, decode=decode),
        dead_letters=None if letters is None else files(letters, "file"),
    )


def _cross_check(config: Config) -> list[str]:
    mistakes = []
    used: set[str] = set()
    if not config.features:
        mistakes.append("features: at least one is needed")
    for name, feature in config.features.items():
        for table in feature.tables:
            used.add(table)
            if table not in config.tables:
                known = ", ".join(config.tables) or "none"
                mistakes.append(
                    f"features.{name}.tables: no table `{table}` under `tables` (there: {known})"
                )
    mistakes += [
        f"tables.{table}: no feature uses it; name it under some feature's `tables` or remove it"
        for table in config.tables
        if table not in used
    ]
    if not config.sample.labels:
        mistakes.append("sample.labels: at least one label is needed")
    if config.batch.shapes != sorted(set(config.batch.shapes)):
        mistakes.append("batch.shapes: must rise without repeats")
    elif not config.batch.shapes or config.batch.shapes[-1] < config.batch.size:
        mistakes.append(
            f"batch.shapes: the largest must be at least batch.size ({config.batch.size})"
        )
    return mistakes
