"""How fast is the sparse store, beside the limit of the memory and beside its peers?

``make bench-store`` (``QUICK=1``: small tables, under a minute). A batch is 2048 samples of 26 ids,
dim 16, exact Adagrad, stamps and counters on. The limit, ``np.take`` of rows that are known, and
the peers alternate with us in one run; every figure is a ratio of medians, or says its unit. What
one thread does is timed by that thread's own clock, all else by the wall's. Peers get the same ids
as indices into tables that need no hash at all.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store.arrays import born, still, with_room
from sparse_store.config import Adagrad, Evict, Table
from sparse_store.store import Keys, SparseStore, warm_up

SAMPLES, FEATURES, DIM = 2048, 26, 16
IDS = SAMPLES * FEATURES
SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: number to key, one to one
SPLITS = np.arange(SAMPLES + 1, dtype=np.int64)
OUT = Path("build/bench/store.json")


class Size(NamedTuple):
    """How much a run does."""

    rows: int
    growth: int
    rounds: int


FULL, QUICK = Size(10_000_000, 20_000_000, 30), Size(1_000_000, 1_500_000, 12)


class Results:
    """Figures by name, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, value: float, unit: str, samples: list[float] | None = None) -> None:
        """Keep and print one."""
        print(f"{name:44s} {value:10.3f} {unit}", flush=True)
        kept = [round(sample, 6) for sample in samples or []]
        self.rows.append({"name": name, "value": round(value, 6), "unit": unit, "samples": kept})

    def ratio(self, name: str, us: list[float], other: list[float]) -> None:
        """Keep how many times as fast as the other we are."""
        self.add(
            name,
            statistics.median(other) / statistics.median(us),
            "ratio",
            [b / a for a, b in zip(us, other, strict=False)],
        )

    def write(self) -> None:
        """Write the file."""
        OUT.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        OUT.write_text(json.dumps({"machine": machine, "results": self.rows}, indent=1))


def zipf(rows: int, seed: int) -> NDArray[np.int64]:
    """IDS numbers below `rows`, Zipf 1.05, the frequent ones spread over the table."""
    random = np.random.default_rng(seed)
    a = 1.0 - 1.05
    ranks = (1.0 - random.random(IDS) * (1.0 - (rows + 1.0) ** a)) ** (1.0 / a)
    numbers = np.minimum(ranks.astype(np.int64) - 1, rows - 1).clip(0)
    return np.random.default_rng(7).permutation(rows)[numbers]


def uniform(rows: int, seed: int) -> NDArray[np.int64]:
    """IDS numbers below `rows`."""
    return np.random.default_rng(100 + seed).integers(0, rows, IDS)


def keys_of(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys of numbers."""
    return numbers.astype(np.uint64) * SPREAD


def inputs_of(numbers: NDArray[np.int64]) -> dict[str, Keys]:
    """A batch's inputs."""
    keys = keys_of(numbers).reshape(FEATURES, SAMPLES)
    return {f"f{i}": Keys("t", keys[i].copy(), SPLITS) for i in range(FEATURES)}


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alone(work: Callable[[], object]) -> float:
    """Seconds of this thread that it takes: what one thread does, whoever else wants the core."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def aligned(rows: int) -> NDArray[np.float32]:
    """Touched memory for rows."""
    return np.full((rows, DIM), 0.1, np.float32)


class Ours:
    """A store of `rows` rows, and a step on it."""

    def __init__(self, rows: int, threads: int) -> None:
        table = Table("t", dim=DIM, optimizer=Adagrad(), evict=Evict(ttl=10**12))
        self.store = SparseStore([table], seed=1, threads=threads)
        for low in range(0, rows, IDS):
            keys = keys_of(np.arange(low, min(low + IDS, rows)))
            splits = np.arange(keys.size + 1, dtype=np.int64)
            self.store.abandon(self.store.resolve({"a": Keys("t", keys, splits)}, clock=0))
        random = np.random.default_rng(5)
        self.out = {f"f{i}": np.zeros((SAMPLES, DIM), np.float32) for i in range(FEATURES)}
        self.grads = {
            name: (random.standard_normal(out.shape) * 0.01).astype(np.float32)
            for name, out in self.out.items()
        }

    def step(self, inputs: dict[str, Keys]) -> None:
        """Resolve, pull, push."""
        plan = self.store.resolve(inputs, clock=self.store.clock + 1)
        self.store.pull(plan, self.out)
        self.store.push(plan, self.grads)


def against_the_limit(size: Size, results: Results) -> None:
    """A step's reads, and a whole step, against np.take of the same rows."""
    table, out = aligned(size.rows), np.empty((IDS, DIM), np.float32)
    ours = {threads: Ours(size.rows, threads) for threads in (1, 2)}
    clocks = {1: alone, 2: timed}
    for name, draw in (("zipf", zipf), ("uniform", uniform)):
        numbers = [draw(size.rows, seed) for seed in range(8)]
        keys = [keys_of(some) for some in numbers]
        inputs = [inputs_of(some) for some in numbers]
        for threads, one in ours.items():
            clock = clocks[threads]
            takes, looks, steps, singles = [], [], [], []
            for turn in range(size.rounds + 2):
                i = turn % 8
                take = clock(partial(np.take, table, numbers[i], axis=0, out=out, mode="clip"))
                look = clock(partial(one.store.lookup, "t", keys[i], out=out))
                step = clock(partial(one.step, inputs[i]))
                single = clock(partial(ours[1].step, inputs[i])) if threads > 1 else step
                if turn >= 2:
                    takes.append(take)
                    looks.append(look)
                    steps.append(step)
                    singles.append(single)
            results.ratio(f"store.lookup.{name}.{threads}t.vs_take", looks, takes)
            results.ratio(f"store.step.{name}.{threads}t.vs_take", steps, takes)
            if threads > 1:
                results.ratio(f"store.step.{name}.second_thread_raw", steps, singles)


def index(size: Size, results: Results) -> None:
    """Keys per second of the index' own kernels, one thread, at a load of three quarters."""
    rows = size.rows
    keys = still(keys_of(np.arange(rows)))
    some = still(keys_of(np.random.default_rng(0).integers(0, rows, 1_000_000)))
    asked = np.random.default_rng(0).integers(0, rows, 1_000_000)
    table, out = aligned(rows), np.empty((asked.size, DIM), np.float32)
    entries = np.empty(max(rows, some.size), np.int64)
    seed, one, none = np.uint64(9), np.int64(1), np.int64(0)
    hits, inserts, takes, by_take = [], [], [], []
    for _ in range(max(3, size.rounds // 10)):
        shard = with_room(born(2 * DIM)[0], rows)
        shard.cells[: 8 * int(shard.tally[kernels.GROUPS])] = 0  # touched before, as the limit's
        shard.records["key"][:rows] = 0
        insert = alone(
            lambda shard=shard: kernels.insert(shard, seed, none, one, keys, True, entries)
        )
        inserts.append(insert / rows)
        for _ in range(3):
            take = alone(lambda: np.take(table, asked, axis=0, out=out, mode="clip"))
            takes.append(take / asked.size)
            hit = alone(
                lambda shard=shard: kernels.locate(
                    shard, seed, none, one, some, entries[: some.size]
                )
            )
            hits.append(hit / some.size)
        by_take.append(statistics.median(takes[-3:]))
    results.ratio("store.index_hit.vs_take", hits, takes)
    results.ratio("store.index_insert.vs_take", inserts, by_take)


def growth(size: Size, results: Results) -> None:
    """From empty: the worst step's share of growing, and the bytes that a row costs beside."""
    ours = Ours(0, 1)
    live = ours.store._live["t"]  # noqa: SLF001
    worst, beside = [], []
    before = resident()
    marks = [size.growth * part // 20 for part in (4, 6, 8, 12, 16)]
    for low in range(0, size.growth, IDS):
        keys = keys_of(np.arange(low, low + IDS))
        shard = live.shards[0]
        before_step = alone(lambda shard=shard: live.shards.__setitem__(0, with_room(shard, IDS)))
        worst.append(1e3 * before_step)
        inputs = {"a": Keys("t", keys, np.arange(IDS + 1, dtype=np.int64))}
        ours.store.abandon(ours.store.resolve(inputs, clock=0))
        rows = live.rows
        if marks and rows >= marks[0]:
            marks.pop(0)
            beside.append((resident() - before) / rows - 8 * DIM)
    results.add("store.growth.worst_slice_ms", max(worst), "ms", sorted(worst)[-20:])
    results.add("store.overhead_bytes_per_row", statistics.mean(beside), "bytes", beside)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def freezing(size: Size, results: Results) -> None:
    """Freeze of 100,000 changed rows; save and load against as many bytes of plain file."""
    ours = Ours(size.rows, 1)
    store = ours.store
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder)
        frozen = store.freeze("checkpoint")
        save = timed(lambda: frozen.write(path / "base"))
        store.ack("checkpoint", frozen.until)
        written = sum(file.stat().st_size for file in (path / "base").iterdir())
        disk = timed(lambda: plain_write(path / "plain", written))
        results.ratio("store.save.vs_disk", [save], [disk])
        load = timed(lambda: SparseStore.load([path / "base"]))
        disk = timed(lambda: plain_read(path / "plain", written))
        results.ratio("store.load.vs_disk", [load], [disk])
    samples = []
    for turn in range(5):
        numbers = np.random.default_rng(turn).choice(size.rows, min(100_000, size.rows), False)
        keys = keys_of(numbers)
        inputs = {"a": Keys("t", keys, np.arange(keys.size + 1, dtype=np.int64))}
        store.abandon(store.resolve(inputs, clock=store.clock + 1))
        samples.append(1e3 * timed(lambda: store.freeze("checkpoint")))
        store.ack("checkpoint", store.step)
    results.add("store.freeze_ms", statistics.median(samples), "ms", samples)


def plain_write(path: Path, size: int) -> None:
    """Write and fsync that many bytes."""
    chunk = bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def plain_read(path: Path, size: int) -> None:
    """Read a file into a fresh buffer."""
    with path.open("rb", buffering=0) as file:
        file.readinto(bytearray(size))


# ---- peers, each in a virtual environment and a process of its own

PEERS = {"torch": ["torch"], "tfvar": ["tensorflow"]}
TORCH = """
import torch
from torch import nn
torch.set_num_threads(2)
bag = nn.EmbeddingBag(rows, 16, sparse=True, mode="sum")
optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.05)
offsets, grads = torch.arange(ids), torch.randn(ids, 16) * 0.01
def step(numbers):
    optimizer.zero_grad()
    bag(torch.from_numpy(numbers), offsets).backward(grads)
    optimizer.step()
"""
TFVAR = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(2)
table = tf.Variable(tf.random.normal([rows, 16], stddev=0.01))
slots = tf.Variable(tf.fill([rows, 16], 0.1))
grads = tf.random.normal([ids, 16], stddev=0.01)
@tf.function(input_signature=[tf.TensorSpec([ids], tf.int64)])
def one(numbers):
    unique, inverse = tf.unique(numbers)
    out = tf.gather(tf.gather(table, unique), inverse)
    sums = tf.math.unsorted_segment_sum(grads, inverse, tf.size(unique))
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=table.handle, accum=slots.handle, lr=0.05, epsilon=1e-7, grad=sums, indices=unique)
    return out
def step(numbers):
    one(tf.constant(numbers))
"""
LOOP = """
import sys, time
import numpy as np
rows, ids = int(sys.argv[1]), int(sys.argv[2])
{setup}
batches = [np.load(path) for path in sys.argv[3:]]
for numbers in batches[:3]:
    step(numbers)
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    step(batches[int(line)])
    print(time.perf_counter() - start, flush=True)
"""


class Peer:
    """A peer in its own process that takes a step when it is told."""

    def __init__(self, python: Path, setup: str, rows: int, batches: list[Path]) -> None:
        command = [str(python), "-c", LOOP.format(setup=setup), str(rows), str(IDS)]
        self.process = subprocess.Popen(
            [*command, *map(str, batches)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise OSError(f"{python} did not start the peer")

    def step(self, batch: int) -> float:
        """Seconds of one step."""
        if self.process.stdin is not None:
            self.process.stdin.write(f"{batch}\n")
            self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        stdout = self.process.stdout
        return "" if stdout is None else stdout.readline().strip()


def environment(name: str, packages: list[str]) -> Path | None:
    """The Python of a peer's virtual environment, made when missing; None: it can't be made."""
    if name == "tfvar":
        return Path(sys.executable)
    folder = Path("build/bench") / name
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            install = [str(python), "-m", "pip", "install", "-q"]
            subprocess.run([*install, "numpy"], check=True)
            # Only the builds without CUDA, which are not on PyPI; numpy is there already.
            cpu = ["--index-url", "https://download.pytorch.org/whl/cpu"]
            subprocess.run([*install, "--retries", "1", *cpu, *packages], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"peer {name} is left out: {error}", file=sys.stderr)
            return None
        (folder / "ready").touch()
    return python


def running(size: Size, folder: Path, quick: bool) -> Iterator[tuple[str, Peer]]:
    """The peers that can be started."""
    batches = []
    for seed in range(8):
        batches.append(folder / f"{seed}.npy")
        np.save(batches[-1], zipf(size.rows, seed))
    for name, packages in PEERS.items():
        if quick and name != "tfvar" and not (Path("build/bench") / name / "ready").exists():
            print(f"peer {name} is left out: its environment isn't made in a quick run")
            continue
        python = environment(name, packages)
        if python is not None:
            setup = TORCH if name == "torch" else TFVAR
            yield name, Peer(python, setup, size.rows, batches)


def peers(size: Size, results: Results, quick: bool) -> None:
    """A whole step, two threads, beside the peers'."""
    ours = Ours(size.rows, 2)
    inputs = [inputs_of(zipf(size.rows, seed)) for seed in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        for name, peer in running(size, Path(folder), quick):
            us, them = [], []
            for turn in range(size.rounds + 2):
                mine = timed(lambda i=turn % 8: ours.step(inputs[i]))
                other = peer.step(turn % 8)
                if turn >= 2:
                    us.append(mine)
                    them.append(other)
            peer.process.kill()
            peer.process.wait()
            results.ratio(f"store.step.zipf.2t.vs_{name}", us, them)


def main() -> None:
    """Run what was asked for, all by default."""
    parts: dict[str, Callable[[Size, Results], None]] = {
        "limit": against_the_limit,
        "index": index,
        "growth": growth,
        "freeze": freezing,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {[*parts, 'peers']}")
    asked = parser.parse_args().parts or [*parts, "peers"]
    quick = bool(os.environ.get("QUICK"))
    size = QUICK if quick else FULL
    results = Results()
    warm_up()
    for part in asked:
        if part == "peers":
            peers(size, results, quick)
        else:
            parts[part](size, results)
        results.write()


if __name__ == "__main__":
    main()
