"""What a machine and the services around it are like, and what stands in the way.

Imports what it looks at only when it does: it has to run where a package is not ours.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamtrain import clock
from streamtrain._siblings import strangers
from streamtrain.errors import StreamtrainError
from streamtrain.threads import available

if TYPE_CHECKING:
    from streamtrain.config import Config

_LIBRARIES: Final = (
    "streamtrain", "tensorflow", "keras", "numba", "numpy", "confluent-kafka", "redis",
    "fastavro", "pyarrow", "msgspec",
)  # fmt: skip
_LITTLE_SPACE: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    what : str
    said : str
        How it is; with the cure when it is not well.
    ok : bool
    """

    what: str
    said: str
    ok: bool = True


def machine() -> Iterator[Finding]:
    """Look at versions, CPU, threads, memory, kernels, and whether our packages are ours."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name in _LIBRARIES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            cure = f"pip install {name}"
            yield Finding(name, f"not installed; cure: {cure}", ok=name == "streamtrain")
    found = strangers()
    yield Finding("packages", "; ".join(found) or "all four are ours", ok=not found)
    yield _cpu()
    yield Finding("threads", f"{available()} of {os.cpu_count()} processors (affinity and cgroup)")
    yield Finding("onednn", os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1"))
    yield _cache()
    if not found:
        yield _kernels()


def services(config: "Config") -> Iterator[Finding]:
    """Reach everything that a configuration names; changes nothing there."""
    yield _looked("schema", lambda: _schema(config))
    if config.source.kafka is None:
        yield Finding("kafka", "none is configured: only `replay` will do")
    else:
        yield _looked("kafka", lambda: _kafka(config))
    if config.export.redis is None:
        yield Finding("redis", "none is configured: versions go to the log alone")
    else:
        yield _looked("redis", lambda: _redis(config))
    yield _looked("checkpoints", lambda: _checkpoints(config))
    yield _looked("model", lambda: _model(config))


class _NotWell(StreamtrainError):
    pass


def _looked(what: str, look: Callable[[], str]) -> Finding:
    """Return what `look` says, or why it can't."""
    from consumers.errors import ConsumerError
    from exporters.errors import ExportError
    from sparse_store.errors import SparseStoreError

    try:
        return Finding(what, look())
    except (StreamtrainError, ConsumerError, ExportError, SparseStoreError, OSError) as error:
        return Finding(what, str(error), ok=False)


def _schema(config: "Config") -> str:
    from streamtrain import assembly

    assembly.decoder(config)
    return f"{config.source.decode.avro.schema} has every field that is named"


def _kafka(config: "Config") -> str:
    from streamtrain import assembly

    source = assembly.kafka_source(config)
    try:
        start = source.open(None)
        topics = ", ".join(
            f"{topic} ({sum(p.topic == topic for p in start)} partitions)"
            for topic in sorted({p.topic for p in start})
        )
    finally:
        source.close()
    return f"{config.source.kafka.brokers if config.source.kafka else ''} has {topics}"


def _redis(config: "Config") -> str:
    from streamtrain import assembly

    (sink,) = assembly.sinks(config)
    try:
        dims = {name: table.dim for name, table in config.tables.items()}
        problems = sink.check(dims)
        head = sink.read_head()
    finally:
        sink.close()
    if problems:
        raise _NotWell("; ".join(problems))
    held = "holds nothing of" if head is None else f"holds version {head.version} of"
    return f"{sink.name} {held} the model {config.model.name}"


def _checkpoints(config: "Config") -> str:
    folder = Path(config.checkpoint.dir)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _NotWell(f"{folder}: {there} can't be written to; name another checkpoint.dir")
    free = shutil.disk_usage(there).free
    if free < _LITTLE_SPACE:
        raise _NotWell(f"{folder}: only {free >> 20} MiB are free; cuts and log need room")
    if there != folder:
        return f"{folder} will be made; {free >> 30} GiB free"
    from streamtrain.cut import Checkpoints

    cut = Checkpoints(folder, keep=1).newest()
    newest = "no cut yet" if cut is None else f"newest {cut.path.name}"
    return f"{folder}: {newest}; {free >> 30} GiB free"


def _model(config: "Config") -> str:
    from streamtrain import assembly
    from streamtrain.dense import resolve_build
    from streamtrain.models.spec import ModelSpecError

    try:
        built = resolve_build(config.model.build)(assembly.inputs(config).spec)
    except ModelSpecError as error:
        raise _NotWell(str(error)) from error
    return f"{config.model.build} builds, {built.count_params():,} dense weights"


def _cpu() -> Finding:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Finding("cpu", platform.processor() or platform.machine())
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = [f for f in facts.get("flags", "").split() if f.startswith(("avx", "fma", "amx"))]
    name = facts.get("model name", platform.machine())
    return Finding("cpu", f"{name}; {' '.join(sorted(flags)) or 'no vector extensions listed'}")


def _cache() -> Finding:
    """Look where compiled kernels are kept: without such a place every start compiles anew."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(__file__).resolve().parent.parent / "sparse_store"
    folder = Path(named) if named else package / "__pycache__"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            "kernel cache",
            f"{folder} can't be written to ({error.strerror}): every start compiles anew. Cure: set "
            "NUMBA_CACHE_DIR to a folder that is kept",
            ok=False,
        )
    kept = sum(1 for _ in folder.rglob("*.nbc"))
    return Finding("kernel cache", f"{folder}, {kept} kernels of the store in it")


def _kernels() -> Finding:
    return _looked("kernels", _compiled)


def _compiled() -> str:
    """Take one step of a tiny store: the kernels load or compile, and give what they should."""
    import numpy as np

    from sparse_store.config import Adagrad, Table
    from sparse_store.store import Keys, SparseStore

    before = clock.monotonic()
    store = SparseStore([Table(name="t", dim=2, optimizer=Adagrad(rate=0.5))], seed=7)
    keys = Keys("t", np.array([0, 2**64 - 1], np.uint64), np.array([0, 2]))
    plan = store.resolve({"t": keys}, clock=1000)
    out = {"t": np.empty((1, 2), np.float32)}
    store.pull(plan, out)
    store.push(plan, {"t": np.ones((1, 2), np.float32)})
    rows, found = store.lookup("t", np.array([0, 2**64 - 1], np.uint64))
    if not found.all() or not (rows < -0.3).all():
        raise _NotWell(f"a step of the store gave {rows.tolist()}; please report this")
    return f"work; the first step took {clock.monotonic() - before:.1f} s"
