"""Bytes to columns against those who do the same: ``make bench-consume``.

A click of 1 label, 1 event time, 13 nullable floats, 26 long ids and an array of 20 of them in the
mean, about 500 bytes, in batches of 2048. Everything that is compared runs in turn, in the same
process or beside it, one thread each; what is measured is that thread's CPU time, so that a busy
neighbour doesn't decide. A figure is the median over the turns of theirs divided by ours.
``QUICK=1`` takes fewer turns.
"""

import io
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import numpy as np

from consumers.avro import AvroDecoder, warm_up
from consumers.config import Feature, Label, Sample, TimeField
from consumers.features import Spec
from consumers.files import Files

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench"
QUICK = bool(os.environ.get("QUICK"))
TURNS = 5 if QUICK else 21
BATCH = 2048
BATCHES = 4
PEERS = ["pyruhvro==0.4.0", "pyarrow"]


class Result(NamedTuple):
    """One figure: how many times their cost ours is, or the like."""

    name: str
    value: float
    hold: float
    reach: float
    samples: list[float]
    peers: dict[str, float]


# data


def schema(strings: int = 0) -> dict[str, Any]:
    """The record; ``strings`` of the ids are text."""
    return {
        "type": "record",
        "name": "Click",
        "fields": [
            {"name": "label", "type": "int"},
            {"name": "ts", "type": "long"},
            *({"name": f"d{i}", "type": ["null", "float"]} for i in range(13)),
            *({"name": f"c{i}", "type": "string" if i < strings else "long"} for i in range(26)),
            {"name": "hist", "type": {"type": "array", "items": "long"}},
        ],
    }


def records(count: int, strings: int = 0) -> Iterator[dict[str, Any]]:
    """Seeded clicks; ids are any 64 bits, texts have 12 to 40 bytes."""
    source = np.random.default_rng(7)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    for n in range(count):
        record: dict[str, Any] = {"label": int(source.random() < 0.1), "ts": 1_700_000_000_000 + n}
        floats = source.standard_normal(13).astype(np.float32)
        nulls = source.random(13) < 0.1
        for i in range(13):
            record[f"d{i}"] = None if nulls[i] else float(floats[i])
        ids = source.integers(-(2**63), 2**63 - 1, 26)
        for i in range(26):
            if i < strings:
                picked = source.integers(0, len(letters), source.integers(12, 41))
                record[f"c{i}"] = "".join(letters[k] for k in picked)
            else:
                record[f"c{i}"] = int(ids[i])
        record["hist"] = source.integers(-(2**63), 2**63 - 1, source.poisson(20)).tolist()
        yield record


def spec() -> Spec:
    """Every field is used."""
    features = {f"d{i}": Feature(dense=[]) for i in range(13)}
    features |= {f"c{i}": Feature(tables=[f"c{i}"]) for i in range(26)}
    features["hist"] = Feature(tables=["c0"], pool="mean")
    return Spec(Sample(time=TimeField(field="ts"), labels={"label": Label()}), features)


def encode(parsed: Any, record: dict[str, Any]) -> bytes:
    """Write one record as a bare message."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, parsed, record)
    return out.getvalue()


# contestants


def cpu_us(work: Callable[[], int]) -> float:
    """Microseconds of this thread's CPU per message of ``work``, which returns how many it did."""
    start = time.thread_time()
    count = work()
    return (time.thread_time() - start) / count * 1e6


def in_turn(contestants: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Let each run once, then each again; the first turn warms up and doesn't count."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(TURNS + 1):
        for name, run in contestants.items():
            figure = run()
            if turn:
                figures[name].append(figure)
    return figures


def ratio(
    name: str, figures: dict[str, list[float]], peer: str, hold: float, reach: float
) -> Result:
    """How many times as long the peer takes as we do."""
    samples = [theirs / ours for ours, theirs in zip(figures["ours"], figures[peer], strict=True)]
    medians = {who: statistics.median(values) for who, values in figures.items()}
    return Result(name, statistics.median(samples), hold, reach, samples, medians)


def peer_python() -> Path:
    """Return the Python of the peers' environment, which is made when it isn't there."""
    home = BUILD / "peers-consume"
    python = home / "bin" / "python"
    stamp = home / ".installed"
    if not stamp.exists():
        print("making the peers' environment ...", flush=True)
        venv.create(home, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *PEERS], check=True)
        stamp.touch()
    return python


@contextmanager
def pyruhvro(shape: dict[str, Any], values: Sequence[bytes]) -> Iterator[Callable[[], float]]:
    """Start the peer beside us; what comes back asks it for one pass."""
    with tempfile.TemporaryDirectory() as folder:
        described, held = Path(folder) / "schema.avsc", Path(folder) / "messages"
        described.write_text(json.dumps(shape), encoding="utf-8")
        held.write_bytes(b"".join(struct.pack("<I", len(v)) + v for v in values))
        worker = subprocess.Popen(
            [str(peer_python()), str(ROOT / "benchmarks" / "peer_pyruhvro.py"), described, held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert int(worker.stdout.readline()) == min(BATCH, len(values))

        def run() -> float:
            print(file=worker.stdin, flush=True)
            return float(worker.stdout.readline())  # type: ignore[union-attr]

        try:
            yield run
        finally:
            worker.stdin.close()
            worker.wait(10)


def avro(strings: int) -> list[Result]:
    """Compare decoders of Avro; ``strings`` of the ids are text."""
    shape = schema(strings)
    parsed = fastavro.parse_schema(shape)
    values = [encode(parsed, record) for record in records(BATCH * BATCHES, strings)]
    batches = [values[i : i + BATCH] for i in range(0, len(values), BATCH)]
    decoder = AvroDecoder(shape, spec())

    def ours() -> int:
        for batch in batches:
            columns, _ = decoder.columns(batch)
            assert columns.size == BATCH
        return len(values)

    def by_fastavro() -> int:
        for value in values:
            fastavro.schemaless_reader(io.BytesIO(value), parsed, None)
        return len(values)

    with pyruhvro(shape, values) as peer:
        figures = in_turn(
            {
                "ours": lambda: cpu_us(ours),
                "fastavro": lambda: cpu_us(by_fastavro),
                "pyruhvro": peer,
            }
        )
    if strings:
        return [ratio("consume.avro.strings.vs_fastavro", figures, "fastavro", 20, 30)]
    return [
        ratio("consume.avro.vs_fastavro", figures, "fastavro", 35, 50),
        ratio("consume.avro.vs_pyruhvro", figures, "pyruhvro", 2.5, 3.5),
    ]


def replay() -> list[Result]:
    """Compare readers of Avro files: ours gives batches with positions, theirs gives records."""
    shape = schema()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clicks.avro")
        with Path(path).open("wb") as out:
            fastavro.writer(out, fastavro.parse_schema(shape), records(BATCH * BATCHES))
        decoder = AvroDecoder(shape, spec())

        def ours() -> int:
            count = 0
            source = Files([path], decoder)
            source.open(None)
            while not source.exhausted:
                batch = source.batch(BATCH, None, lambda: False)
                count += 0 if batch is None else batch.columns.size
            source.close()
            assert count == BATCH * BATCHES
            return count

        def by_fastavro() -> int:
            with Path(path).open("rb") as file:
                return sum(1 for _ in fastavro.reader(file))

        figures = in_turn({"ours": lambda: cpu_us(ours), "fastavro": lambda: cpu_us(by_fastavro)})
    return [ratio("replay.avro_files.vs_fastavro", figures, "fastavro", 20, 30)]


# report


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "fastavro": fastavro.__version__,
        "peers": PEERS,
        "quick": QUICK,
    }


def report(results: Sequence[Result]) -> None:
    """Print the table and write the JSON."""
    print(f"{'':36} {'median':>7} {'hold':>6} {'reach':>6}   µs per sample")
    for r in results:
        peers = ", ".join(f"{who} {value:.2f}" for who, value in r.peers.items())
        print(f"{r.name:36} {r.value:7.2f} {r.hold:6g} {r.reach:6g}   {peers}")
    BUILD.mkdir(parents=True, exist_ok=True)
    found = [
        {"name": r.name, "value": r.value, "unit": "ratio", "samples": r.samples} for r in results
    ]
    path = BUILD / "consume.json"
    path.write_text(json.dumps({"machine": machine(), "results": found}, indent=1), "utf-8")
    print(f"written to {path.relative_to(ROOT)}")


def main() -> int:
    """Run everything, print the table, write the JSON."""
    warm_up()
    results = [*avro(strings=0), *avro(strings=10), *replay()]
    report(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
