"""The world of the crash model: volumes, servers, and processes that are the real code.

Everything under a `Process` is real, from the store to the shippers, but for TensorFlow (a sum),
threads (slots that run when told) and Redis (a server in memory that is as strict). What outlives
a process is a volume, with cuts and log, and the servers.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from consumers.source import Bad, Batch, Columns, Ids, Partition
from exporters.errors import SinkUnavailable
from exporters.replica import Replica
from exporters.version import Delta, Head
from sparse_store.config import Adagrad, Always, Count, Evict, Ftrl, Table
from sparse_store.store import SparseStore
from streamtrain.cut import Checkpoints, Cut
from streamtrain.dead_letters import DeadLetters
from streamtrain.timeline import Parts, Timeline
from streamtrain.trainer import Sparse, Task, Trainer
from tests.doubles.beside import Later
from tests.doubles.dense import SumDense
from tests.doubles.memory_sink import MemoryFeed, MemoryServer, MemorySink, State

CLICKS = Partition("clicks", 0)
SINKS = 2
KEPT_CUTS = 2

# A table that counts before it admits and forgets, one whose rows live shortly, one with a bound.
TABLES = [
    Table(
        "user",
        dim=2,
        optimizer=Adagrad(rate=0.5),
        admit=Count(2, candidates=4, forget=50),
        evict=Evict(ttl=100),
    ),
    Table("item", dim=1, optimizer=Ftrl(alpha=0.5, l1=0.1), admit=Always(), evict=Evict(ttl=40)),
    Table("tag", dim=1, evict=Evict(rows=3)),
]
SPARSE = [
    Sparse("user", "user", "user", "sum", None),
    Sparse("user.item", "user", "item", "mean", None),
    Sparse("tag", "tag", "tag", "sum", None),
]
DIMS = {table.name: table.dim for table in TABLES}

Served = dict[str, dict[int, bytes]]


class Crash(BaseException):
    """The process dies here."""


class Content(NamedTuple):
    """What a version stands for: the rows of every table, and the dense weights."""

    rows: Served
    dense: bytes


@dataclass
class Volume:
    """A directory of cuts with its log, and the dead letters that go with it.

    `versions`: what its log has ever held, checksums by version.
    """

    folder: Path
    versions: dict[int, str] = field(default_factory=dict)

    @property
    def cuts(self) -> Path:
        return self.folder / "cuts"

    @property
    def letters(self) -> Path:
        return self.folder / "bad.jsonl"


class Stream:
    """A source that hands over nothing itself: its batches are made by the model."""

    exhausted = False

    def __init__(self) -> None:
        self.committed: int | None = None

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:
        return {CLICKS: 0} if position is None else dict(position)

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        raise NotImplementedError

    def lag(self) -> Mapping[Partition, int]:
        return {}

    def trouble(self) -> str | None:
        return None

    def commit(self, position: Mapping[Partition, int]) -> None:
        self.committed = position[CLICKS]

    def close(self) -> None:
        pass


class Told(NamedTuple):
    """What the model says of one sample: ids of both features, and whether it is a bad message."""

    users: tuple[int, ...]
    tags: tuple[int, ...]


def batch_of(samples: list[Told], *, first: int, time_ms: int, serial: int, bad: int = 0) -> Batch:
    """Make a batch at offset `first`; `serial` makes it differ from any other in what it teaches."""
    size = len(samples)

    def ids(lists: list[tuple[int, ...]]) -> Ids:
        keys = np.array([key for each in lists for key in each], np.uint64)
        return Ids(keys, np.cumsum([0, *map(len, lists)]).astype(np.int64), None)

    offsets = np.arange(first, first + size)
    return Batch(
        columns=Columns(
            size=size,
            ids={"user": ids([s.users for s in samples]), "tag": ids([s.tags for s in samples])},
            dense={},
            labels={"click": np.full(size, 1 + serial % 11, np.float32)},
            weight=np.ones(size, np.float32),
            time_ms=np.full(size, time_ms, np.int64),
        ),
        position={CLICKS: first + size + bad},
        partitions=(CLICKS,),
        partition_index=np.zeros(size, np.int32),
        offsets=offsets,
        bad=tuple(
            Bad(CLICKS.topic, 0, first + size + i, "empty", f"serial {serial}", b"")
            for i in range(bad)
        ),
        consumed=size + bad,
        append_time_ms=None,
    )


def new_trainer(cut: Cut | None) -> Trainer:
    """Build a trainer as `streamtrain.assembly` does, with a sum in the place of TensorFlow."""
    store = (
        SparseStore(TABLES, seed=3)
        if cut is None
        else SparseStore.load(cut.parts(), tables=TABLES, seed=3)
    )
    dense = SumDense({s.name: (DIMS[s.table],) for s in SPARSE})
    trainer = Trainer(
        store,
        dense,
        sparse=SPARSE,
        dense_inputs=[],
        tasks=[Task("click", "squared", 1.0)],
        window=20,
        clock_max_step_ms=1_000,
    )
    if cut is not None:
        dense.restore(cut.dense())
        trainer.restore(cut.state()["trainer"])
        for task, state in cut.validation().items():
            trainer.validation[task].restore(state)
    return trainer


def twin_of(batches: tuple[Batch, ...]) -> Trainer:
    """Learn batches from birth in memory alone: no cut, no reader, no repair."""
    trainer = new_trainer(None)
    trainer.position = {CLICKS: 0}
    for batch in batches:
        trainer.step(batch)
    return trainer


def rows_in(store: SparseStore) -> Served:
    """Return what a sink should hold."""
    served = {}
    for name in store.tables:
        dump = store.dump(name)
        served[name] = {
            key: row.tobytes() for key, row in zip(dump.keys.tolist(), dump.values, strict=True)
        }
    return served


def assert_same_trainers(one: Trainer, other: Trainer) -> None:
    """Compare all that was learned, bit by bit; when a row was last shown is no part of that."""
    assert one.state() == other.state()
    assert (one.store.step, one.store.clock) == (other.store.step, other.store.clock or 0)
    for name in DIMS:
        a, b = one.store.dump(name), other.store.dump(name)
        for what in a._fields:
            if not what.endswith("changed_at"):
                assert getattr(a, what).tobytes() == getattr(b, what).tobytes(), (name, what)
        ours, theirs = one.store.metrics()[name], other.store.metrics()[name]
        assert {**ours, "tombstones": 0} == {**theirs, "tombstones": 0}
    assert one.dense.vector().tobytes() == other.dense.vector().tobytes()
    for task, progressive in one.validation.items():
        for what, array in progressive.state().items():
            assert array.tobytes() == other.validation[task].state()[what].tobytes(), (task, what)


class Process:
    """One trainer process on a volume, and what the model remembers of it."""

    def __init__(self, world: World, volume: Volume, *, fresh: bool, uid: int) -> None:
        self.world = world
        self.volume = volume
        self.uid = uid
        self.batches: tuple[Batch, ...] = ()
        self.draft: Content | None = None
        self.floor = 0
        self.busy: list[str] = []
        self.logging: Later[Delta] = Later()
        self.cutting: Later[Cut | None] = Later()
        self.letters = DeadLetters(volume.letters)
        self.source = Stream()
        self.checkpoints = Checkpoints(volume.cuts, keep=KEPT_CUTS, on_step=self._reached)
        self.sinks = [
            MemorySink(server, name=f"sink{i}", keep_payloads=3)
            for i, server in enumerate(world.servers)
        ]
        self.timeline = Timeline(
            self.checkpoints,
            Parts(self.source, [*self.sinks], self._trainer, {"process": uid}),
            logging_=self.logging,
            cutting=self.cutting,
            signature={},
            letters=self.letters,
            fresh=fresh,
            log_max_bytes=world.log_max_bytes,
            on_step=self._reached,
            now=lambda: world.seconds,
        )

    # ---- what its threads do

    def start(self) -> None:
        """S1 to S6."""
        with self.thread("train"):
            self.timeline.start()

    def learn(self, samples: list[Told], pause: int, bad: int) -> None:
        """Learn one batch, and write its dead letters."""
        trainer = self.timeline.trainer
        batch = batch_of(
            samples,
            first=trainer.position[CLICKS],
            time_ms=(trainer.clock or 1_000) + pause,
            serial=self.world.serial(),
            bad=bad,
        )
        with self.thread("train"):
            trainer.step(batch)
            self.letters.write(batch.bad)
            self.batches = (*self.batches, batch)

    def boundary(self, *, export: bool, cut: bool) -> None:
        """D3, C5, D1, C2."""
        with self.thread("train"):
            self.timeline.boundary(export_due=export, cut_due=cut)

    def write(self, what: str) -> None:
        """Do what waits beside: D2 ("log"), or C3, C4, C6 and C7 ("cut")."""
        with self.thread(what):
            (self.logging if what == "log" else self.cutting).run()

    def ship(self, sink: int) -> bool:
        """One piece of D4, or D5, or a look."""
        with self.thread(f"ship{sink}"):
            return self.timeline.publisher.shippers[sink].tick()

    def finish(self, *, patient: bool) -> None:
        """End as after SIGTERM."""
        self.logging.patient = patient
        with self.thread("train"):
            self.timeline.finish(lambda: 0.0)

    def die(self) -> None:
        """Let go of files, as the kernel does for a dead process."""
        self.letters.close()
        self.checkpoints.unlock()

    def idle(self, thread: str) -> bool:
        """Tell whether a thread may do something now."""
        return thread not in self.busy

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Be in a thread of this process."""
        assert name not in self.busy
        self.busy.append(name)
        try:
            yield
        finally:
            self.busy.remove(name)

    # ---- what the model learns of it

    def _trainer(self, cut: Cut | None) -> Trainer:
        trainer = new_trainer(cut)
        if cut is not None:
            state = cut.state()
            self.batches = self.world.learned_at(state["environment"]["process"], cut.step)
            assert_same_trainers(trainer, twin_of(self.batches))
        return trainer

    def _reached(self, step: str) -> None:
        """Note what becomes durable, then let the world act: interleave, or kill."""
        self.world.seen[step] += 1
        if step == "D1":
            self.draft = self.content()
        elif step == "D2":
            entry = self.timeline.publisher.log.newest()
            assert entry is not None
            self.world.note_version(
                self.volume, entry.version, entry.checksum, self.draft or self.content()
            )
            self.draft = None
        elif step == "C2":
            self.world.note_moment(self.uid, self.timeline.trainer.store.step, self.batches)
        elif step == "S5":
            self.floor = self.timeline.version
        elif step == "S6":
            self._check_letters()
        elif step == "D5":
            self._check_published(self.sinks[int(self.busy[-1][-1])])
        elif step == "C7":
            self.world.check_commit(self)
        self.world.reached(self, step)

    def content(self) -> Content:
        """Return what a version that is frozen now stands for."""
        trainer = self.timeline.trainer
        return Content(rows_in(trainer.store), trainer.dense.vector().tobytes())

    def _check_published(self, sink: MemorySink) -> None:
        """What an older trainer published after the cut that this one began from is undone.

        But for a repair of its own that bridges from before that cut: it holds no more than a cut.
        """
        head = sink.server.state.head
        assert head is not None
        [entry] = [e for e in self.timeline.publisher.log.entries() if e.version == head.version]
        ours = entry.generation == self.timeline.generation
        assert ours or entry.version <= self.floor or entry.since < self.floor

    def _check_letters(self) -> None:
        """Each bad message behind the position has its line, once, and none stands after them."""
        wanted = [
            (bad.offset, bad.detail, bad.reason) for batch in self.batches for bad in batch.bad
        ]
        lines = [json.loads(line) for line in self.volume.letters.read_text().splitlines()]
        found = [(line["offset"], line["detail"], line["reason"]) for line in lines]
        assert found[len(found) - len(wanted) :] == wanted


@dataclass
class Fuse:
    """Something that happens once a step was reached so many times."""

    step: str
    left: int
    act: Callable[[Process], None]


@dataclass
class Watch:
    """What the model remembers of a server, to hold it to its word."""

    server: MemoryServer
    replica: Replica
    saved: State | None = None
    head: Head | None = None
    may_shrink: bool = False


class World:
    """Volumes, servers and processes, and the laws that hold among them."""

    def __init__(self, folder: Path, *, log_max_bytes: int) -> None:
        self.folder = folder
        self.log_max_bytes = log_max_bytes
        self.servers = [MemoryServer() for _ in range(SINKS)]
        self.watches = [Watch(server, self._replica(i)) for i, server in enumerate(self.servers)]
        for number, server in enumerate(self.servers):
            server.before_write = functools.partial(self.writing, number)
        self.seen: Counter[str] = Counter()
        self.fuses: list[Fuse] = []
        self.seconds = 0.0
        self.calm = log_max_bytes > 1 << 20
        """Nothing but processes has been lost so far."""
        self.live: Process | None = None
        self.zombies: list[Process] = []
        self.image: Volume | None = None
        self._backup: tuple[Volume, list[State]] | None = None
        self.contents: dict[str, Content] = {}
        self._moments: dict[tuple[int, int], tuple[Batch, ...]] = {}
        self._serial = 0
        self._volumes = 0
        self._uids = 0
        self.volume = self.new_volume()

    def _replica(self, number: int) -> Replica:
        feed = MemoryFeed(self.servers[number])
        feed.between = lambda: self.reading(number)
        return Replica(feed, model="crash", now=lambda: self.seconds)

    # ---- memory

    def serial(self) -> int:
        """Return a number that was never returned before."""
        self._serial += 1
        return self._serial

    def note_moment(self, uid: int, step: int, batches: tuple[Batch, ...]) -> None:
        """Remember what a cut that is frozen now holds."""
        self._moments[uid, step] = batches

    def learned_at(self, uid: int, step: int) -> tuple[Batch, ...]:
        """Return the batches that a cut of a process was made of."""
        return self._moments[uid, step]

    def note_version(self, volume: Volume, version: int, checksum: str, content: Content) -> None:
        """Remember a version; its number was never used for anything else in its volume."""
        assert volume.versions.setdefault(version, checksum) == checksum, "version used twice"
        assert self.contents.setdefault(checksum, content) == content, "checksum used twice"

    def check_commit(self, process: Process) -> None:
        """A position is shown only once a cut holds it."""
        cut = process.checkpoints.newest()
        assert cut is not None
        [[_, _, offset]] = cut.state()["trainer"]["position"]
        assert process.source.committed == offset

    # ---- what happens at steps

    def reached(self, process: Process, step: str) -> None:
        """Check, then blow the fuses whose time has come."""
        if step == "S6":
            # Neither S4 nor an older trainer lets a start pass over a cut.
            newest = process.checkpoints.newest()
            assert newest is not None
            assert newest.order == process.timeline.cut.order
        self.check()
        self._burn(process, step)

    def writing(self, number: int, what: str) -> None:
        """Blow the fuses at a write that is about to arrive at a server."""
        del what
        if self.live is not None and self.live.busy:
            self._burn(self.live, f"write {number}")

    def reading(self, number: int) -> None:
        """Blow the fuses at a moment when a replica reads a server's rows."""
        if self.live is not None:
            self._burn(self.live, f"read {number}")

    def _burn(self, process: Process, step: str) -> None:
        for fuse in [f for f in self.fuses if f.step == step and process is self.live]:
            fuse.left -= 1
            if fuse.left == 0:
                self.fuses.remove(fuse)
                fuse.act(process)

    # ---- volumes

    def new_volume(self) -> Volume:
        """Return an empty volume at a path of its own."""
        self._volumes += 1
        folder = self.folder / f"volume{self._volumes}"
        folder.mkdir()
        return Volume(folder)

    def copy_volume(self, volume: Volume) -> Volume:
        """Return a copy as it would be found after a crash at this very moment."""
        copy = self.new_volume()
        shutil.copytree(volume.folder, copy.folder, dirs_exist_ok=True)
        copy.versions = dict(volume.versions)
        return copy

    def back_up(self) -> None:
        """Copy the volume and all servers at one moment; replicas live elsewhere."""
        self._backup = self.copy_volume(self.volume), [server.save() for server in self.servers]

    def restore(self) -> None:
        """Go back to the backup, with all that a trainer could know of what came after it."""
        if self._backup is not None:
            volume, states = self._backup
            self.volume = self.copy_volume(volume)
            for watch, state in zip(self.watches, states, strict=True):
                watch.server.restore(state)
                self.lost_time(watch)

    def tear_newest_cut(self) -> None:
        """Let the newest cut go bad on the disk."""
        newest = Checkpoints(self.volume.cuts, keep=1).newest()
        if newest is not None:
            (newest.path / "dense.npz").write_bytes(b"torn")

    def lose_entry(self) -> None:
        """Let the newest file but one of the log go missing."""
        entries = sorted(self.volume.cuts.glob("log/delta-*"))
        if len(entries) > 1:
            self.calm = False
            entries[-2].unlink()

    def lost_time(self, watch: Watch) -> None:
        """A server lost time by our own doing: its head may be anywhere now."""
        self.calm = False
        watch.head = watch.server.state.head

    # ---- processes

    def process(self, *, fresh: bool = False) -> Process:
        """Make the next live process; it has done nothing yet."""
        self._uids += 1
        self.live = Process(self, self.volume, fresh=fresh, uid=self._uids)
        return self.live

    def bury(self) -> None:
        """The live process is no more."""
        if self.live is not None:
            self.live.die()
            # What it had begun to write is left half written.
            (self.live.volume.cuts / "tmp-half").mkdir(exist_ok=True)
            if (self.live.volume.cuts / "log").exists():
                (self.live.volume.cuts / "log" / "tmp-half").write_bytes(b"half")
        self.live = None

    # ---- laws

    def check(self) -> None:
        """What must hold at any time."""
        for watch in self.watches:
            self._check_head(watch)
            self._check_served(watch)
            self._check_replica(watch)

    def _check_head(self, watch: Watch) -> None:
        before, head = watch.head, watch.server.state.head
        watch.head = head
        if before is None or head is before:
            return
        assert head is not None, "a head is gone"
        assert head.version >= before.version, "a head went down"
        if head.version == before.version:
            assert head.checksum == before.checksum, "a head changed under its number"
        if head.epoch != before.epoch:
            self.seen["snapshot over a head"] += 1
            assert not self.calm, "a snapshot where deltas would have done"
            assert watch.may_shrink or 2 * head.rows >= before.rows, "a snapshot emptied serving"
            watch.may_shrink = False

    def _check_served(self, watch: Watch) -> None:
        """A head that is whole, with nothing half written above it, stands for its version."""
        head = MemorySink(watch.server).show_head()
        if head is None or not head.whole or head.half is not None:
            return
        content = self.contents[head.checksum]
        for table in DIMS:
            assert watch.server.table(table) == content.rows[table], (head.version, table)
        assert head.dense is not None
        assert bytes(watch.server.state.dense[head.dense.version]) == content.dense

    def _check_replica(self, watch: Watch) -> None:
        """Lookups are answered from exactly one version."""
        state = watch.replica._state
        if state is None:
            return
        content = self.contents[state.checksum]
        for table in DIMS:
            held = state._tables[table]
            rows = {key: held._rows[at].tobytes() for key, at in held._at.items()}
            assert rows == content.rows[table], ("replica", state.version, table)
        assert state.dense is not None
        assert state.dense.tobytes() == content.dense

    def reachable(self, server: MemoryServer) -> bool:
        """Tell whether a server answers."""
        try:
            MemorySink(server).read_fence()
        except SinkUnavailable:
            return False
        return True
