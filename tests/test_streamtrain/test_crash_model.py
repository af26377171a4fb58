"""Whatever crashes, wherever, and whatever is lost meanwhile: serving ends equal to the trainer.

A state machine over the real trainer, store, cuts, start, repair, log and shippers. The numbered
steps (D1 to D5, C1 to C7, S1 to S6) are where things happen: a crash, a failing disk, a fail-over,
or a piece of another thread's work. See `crash_world` for what is real and what holds at any time.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from exporters import wire
from exporters.errors import StaleGeneration
from streamtrain.cut import Checkpoints
from streamtrain.errors import EmptyStartRefused, Superseded
from tests.doubles.memory_sink import MemorySink
from tests.test_streamtrain.crash_world import (
    DIMS,
    SINKS,
    Crash,
    Fuse,
    Process,
    Told,
    World,
    rows_in,
)

CHUNK_BYTES = 110

USERS = st.sampled_from([0, 1, 2, 3, 4, 2**63, 2**64 - 1])
TAGS = st.sampled_from([0, 1, 2, 3, 2**64 - 1])
SAMPLES = st.lists(
    st.builds(Told, st.lists(USERS, max_size=3).map(tuple), st.lists(TAGS, max_size=2).map(tuple)),
    min_size=1,
    max_size=3,
)
PAUSES = st.sampled_from([0, 1, 1, 5, 20, 60, 300])
SERVERS = st.integers(0, SINKS - 1)
ORDERS = st.sampled_from(["log ships cut", "cut ships log", "log ships", "cut"])
STEPS = [
    *("D1", "D2", "D3", "D4", "D5"),
    *("C1", "C2", "C3", "C4", "C5", "C6", "C7"),
    *("S1", "S2", "S3", "S4", "S5", "S6"),
    *(f"{what} {i}" for i in range(SINKS) for what in ("write", "read")),
]
ACTS = [
    "crash",
    "disk full",
    "learn",
    "boundary",
    "write log",
    "write cut",
    *(f"{what} {i}" for i in range(SINKS) for what in ("ship", "save", "rewind", "down")),
    *("wake", "image 0"),
]
VOLUMES = st.sampled_from(
    [
        *["as it was"] * 6,
        *("outdated", "outdated, a sink away", "restored", "restored"),
        *("torn", "lost", "hole"),
    ]
)
FATES = [
    *(
        "down",
        "down",
        "full",
        "save",
        "save",
        "rewind",
        "rewind",
        "wipe",
        "image",
        "image",
        "backup",
    ),
    *(f"break {when} write {n}" for when in ("before", "after") for n in (0, 1, 3)),
]


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut versions into several pieces; don't wait for a disk, since no power is cut here."""
    monkeypatch.setattr(wire.cut_chunks, "__defaults__", (CHUNK_BYTES,))
    for cut in (wire.cut_rows, wire.cut_dense):
        monkeypatch.setattr(
            cut, "__kwdefaults__", {**(cut.__kwdefaults__ or {}), "max_bytes": CHUNK_BYTES}
        )
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class CrashMachine(RuleBasedStateMachine):
    """Rules are what operators, networks and the kernel do; laws are in `World.check`."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    @initialize(log_max_bytes=st.sampled_from([1 << 30, 1 << 30, 9_000]), gentle=st.booleans())
    def begin(self, log_max_bytes: int, gentle: bool) -> None:
        """Begin a model; where it is gentle, processes and connections break, but nothing is lost."""
        self.world = World(self.folder, log_max_bytes=log_max_bytes)
        self.gentle = gentle
        self._start(fresh=False)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world") and sys.exc_info()[0] is None:
                self.settle()
        finally:
            if hasattr(self, "world"):
                for process in (self.world.live, *self.world.zombies):
                    if process is not None:
                        process.die()
            shutil.rmtree(self.folder)

    # ---- the life of a process

    def guard(self, act: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Do something; a crash ends the live process, and so does a newer trainer."""
        try:
            act(*args, **kwargs)
        except Crash:
            self.world.bury()
        except (StaleGeneration, Superseded):
            # Somewhere a newer trainer took over: one on another volume, or a fence that we
            # could not see when we started.
            self.world.seen["superseded"] += 1
            self.world.bury()
        self.world.check()

    def do(self, act: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Let the live process, if there is one, do something."""
        if self.world.live is not None:
            self.guard(act, self.world.live, *args, **kwargs)

    @precondition(lambda self: self.world.live is None)
    @rule(
        fresh=st.sampled_from([False, False, False, False, True]),
        volume=VOLUMES,
    )
    def start(self, fresh: bool, volume: str) -> None:
        if self.gentle:
            volume = "torn" if volume in ("torn", "lost", "hole") else "as it was"
        self._start(fresh=fresh and not self.gentle, volume=volume)

    def _start(self, *, fresh: bool, volume: str = "as it was") -> None:
        """Start on what is found: the volume as it was, damaged, an older copy of it, or nothing."""
        world = self.world
        if volume.startswith("outdated") and world.image is not None:
            # A process that hangs goes on with the other one.
            world.calm = False
            world.volume = world.copy_volume(world.image)
            if volume == "outdated, a sink away":
                # It may come back with a head that has the number of another version here.
                world.servers[-1].down = True
        elif volume == "lost":
            world.calm = False
            world.volume = world.new_volume()
        elif volume == "torn":
            world.tear_newest_cut()
        elif volume == "hole":
            world.lose_entry()
        elif volume == "restored":
            world.restore()
        whole = Checkpoints(world.volume.cuts, keep=1).newest()
        strangers = Checkpoints(world.volume.cuts, keep=1).strangers()
        heads = [server.state.head for server in world.servers]
        down = [not world.reachable(server) for server in world.servers]
        process = world.process(fresh=fresh)
        world.calm = world.calm and not fresh
        for watch in world.watches:
            watch.may_shrink = watch.may_shrink or fresh
        try:
            process.start()
        except EmptyStartRefused:
            assert not fresh
            assert whole is None or process.checkpoints.newest() is None
            assert strangers or any(down) or any(head is not None for head in heads)
            world.seen["empty start refused"] += 1
            world.bury()
        except (Crash, StaleGeneration, Superseded):
            world.bury()
        else:
            assert fresh or whole is not None or not (strangers or any(down))
        world.check()

    @precondition(lambda self: self.world.live is not None)
    @rule(samples=SAMPLES, pause=PAUSES, bad=st.sampled_from([0, 0, 1]))
    def learn(self, samples: list[Told], pause: int, bad: int) -> None:
        self.do(Process.learn, samples, pause, bad)

    @precondition(lambda self: self.world.live is not None)
    @rule(export=st.booleans(), cut=st.booleans(), beside=st.permutations(["log", "cut", "", ""]))
    def boundary(self, export: bool, cut: bool, beside: list[str]) -> None:
        """Pass a boundary; some of what it began is done beside, in any order, and some is not."""
        self.do(Process.boundary, export=export, cut=cut)
        for what in filter(None, beside[:2]):
            self.do(Process.write, what)

    @precondition(lambda self: self.world.live is not None)
    @rule(
        sink=SERVERS,
        pieces=st.sampled_from([1, 2, 3, 5, 9, 30]),
        seconds=st.sampled_from([0.0, 0.0, 11.0, 31.0]),
    )
    def ship(self, sink: int, pieces: int, seconds: float) -> None:
        self.world.seconds += seconds
        for _ in range(pieces):
            self.do(Process.ship, sink)

    @precondition(lambda self: self.world.live is not None)
    @rule(
        batches=st.lists(st.tuples(SAMPLES, PAUSES), min_size=1, max_size=4),
        cuts=st.booleans(),
        pieces=st.sampled_from([0, 4, 12]),
        order=ORDERS,
    )
    def work(
        self, batches: list[tuple[list[Told], int]], cuts: bool, pieces: int, order: str
    ) -> None:
        """Go on for a while as a daemon does, with some of the work beside or all of it."""
        for n, (samples, pause) in enumerate(batches):
            self.do(Process.learn, samples, pause, 0)
            self.do(Process.boundary, export=True, cut=cuts and n == 0)
            for what in order.split():
                if what != "ships":
                    self.do(Process.write, what)
                    continue
                for _ in range(pieces):
                    for sink in range(SINKS):
                        self.do(Process.ship, sink)

    @precondition(lambda self: self.world.live is not None)
    @rule(
        how=st.sampled_from(["crash", "crash", "hang", "finish", "finish in haste", "settle"]),
        batches=st.lists(st.tuples(SAMPLES, PAUSES), max_size=4),
        pieces=st.sampled_from([0, 2, 12]),
        order=ORDERS,
        volume=VOLUMES,
        wakes=st.sampled_from(["never", "S1", "S2", "S3", "S5"]),
    )
    def end(
        self,
        how: str,
        batches: list[tuple[list[Told], int]],
        pieces: int,
        order: str,
        volume: str,
        wakes: str,
    ) -> None:
        """Work for a while, and then end one way or another."""
        self.work(batches, cuts=True, pieces=pieces, order=order)
        process = self.world.live
        if process is None:
            return
        if how == "hang":
            self._hang(process, volume, wakes)
        elif how == "settle":
            self.settle()
        else:
            if how != "crash":
                self.do(Process.finish, patient=how == "finish")
            self.world.bury()

    def _hang(self, process: Process, volume: str, wakes: str) -> None:
        """Stop for long, while nobody respects the lock any more and a newer trainer starts."""
        world = self.world
        if wakes != "never":
            self.do(Process.boundary, export=True, cut=True)
            self.arm(wakes, 1, "wake")
        if world.live is None:
            return
        process.checkpoints.unlock()
        for older in world.zombies[:-1]:
            older.die()
        world.zombies = [*world.zombies[-1:], process]
        world.live = None
        self.start(fresh=False, volume=volume)

    @rule(
        step=st.sampled_from(STEPS),
        left=st.sampled_from([1, 1, 2, 3, 5]),
        act=st.sampled_from(ACTS),
    )
    def arm(self, step: str, left: int, act: str) -> None:
        """Let something happen right after a numbered step, or right before a write arrives."""
        fuse = Fuse(step, left, lambda process: self.happen(act, process, step))
        self.world.fuses = [*self.world.fuses[-2:], fuse]

    def happen(self, act: str, process: Process, step: str) -> None:
        self.world.seen[f"at {step}: {act}"] += 1
        what, _, number = act.partition(" ")
        started = hasattr(process.timeline, "_drafted") and not step.startswith("S")
        if act == "crash":
            raise Crash
        if act == "disk full":
            if step == "C3":
                raise OSError(28, "No space left on device")
        elif act == "wake":
            for zombie in list(self.world.zombies):
                for each in ("write cut", "write log"):
                    if zombie in self.world.zombies:
                        self.zombie_acts(zombie, each)
        elif what in FATES:
            self.befall(int(number), what)
        elif what == "ship":
            if started and process.idle(f"ship{number}"):
                process.ship(int(number))
        elif started and act == "learn" and process.idle("train"):
            process.learn([Told((1, 2), (3,))], 5, 0)
        elif started and act == "boundary" and process.idle("train"):
            process.boundary(export=True, cut=True)
        elif started and what == "write" and process.idle(number):
            process.write(number)

    # ---- two trainers

    @precondition(lambda self: self.world.zombies and self.world.live is not None)
    @rule(
        acts=st.lists(
            st.sampled_from(
                [*("write log", "write cut", "ship 0", "ship 1"), *(["learn", "boundary"] * 2)]
            ),
            min_size=1,
            max_size=8,
        )
    )
    def wake(self, acts: list[str]) -> None:
        for act in acts:
            for zombie in list(self.world.zombies):
                self.zombie_acts(zombie, act)
        self.world.check()

    def zombie_acts(self, zombie: Process, act: str) -> None:
        """An older trainer goes on where it was; it must change nothing that a newer one owns."""
        world = self.world
        number = act.partition(" ")[2]
        owned = [(server.state.fence or 0) > zombie.timeline.generation for server in world.servers]
        before = [
            (server.state.head, server.state.rows, server.state.dense) for server in world.servers
        ]
        try:
            if act == "learn":
                zombie.learn([Told((1, 3), (2,))], 5, 0)
            elif act == "boundary":
                zombie.boundary(export=True, cut=True)
            elif act.startswith("write"):
                zombie.write(number)
            else:
                zombie.ship(int(number))
        except AssertionError:
            raise
        except (Crash, Exception) as error:  # noqa: BLE001
            # However it ends: a newer trainer may have taken the very files away that it reads.
            world.seen[f"older trainer: {type(error).__name__}"] += 1
            zombie.die()
            world.zombies.remove(zombie)
        for server, was, mine in zip(world.servers, before, owned, strict=True):
            if mine:
                assert (server.state.head, server.state.rows, server.state.dense) == was

    # ---- what befalls servers and volumes

    @rule(sink=SERVERS, what=st.sampled_from([*FATES]))
    def befall(self, sink: int, what: str) -> None:
        """Outages, refusals, fail-overs to a server that is behind or empty; and a copy of the volume."""
        watch = self.world.watches[sink]
        server = watch.server
        if what in ("down", "full"):
            setattr(server, what, not getattr(server, what))
        elif what.startswith("break"):
            # The connection, at a later write, before or after it took effect.
            server.fail_in = int(what.split()[-1])
            server.fail_after_applying = "after" in what
        elif what == "image":
            self.world.image = self.world.copy_volume(self.world.volume)
        elif what == "backup":
            self.world.back_up()
        elif what == "save":
            watch.saved = server.save()
        elif self.gentle:
            return
        elif what == "rewind" and watch.saved is not None:
            server.restore(watch.saved)
            self.world.lost_time(watch)
        elif what == "wipe":
            server.wipe()
            self.world.lost_time(watch)

    @rule(sink=SERVERS, pieces=st.sampled_from([1, 3, 9]))
    def follow(self, sink: int, pieces: int) -> None:
        for _ in range(pieces):
            self.guard(self.world.watches[sink].replica.tick)
        self.world.check()

    # ---- the end

    def settle(self) -> None:
        """After the dust has settled, sinks and replicas are what the trainer is."""
        world = self.world
        world.fuses.clear()
        for server in world.servers:
            server.down = server.full = False
            server.fail_in = None
        for _ in range(SINKS + 2):
            if world.live is None:
                self._start(fresh=False)
            if world.live is None:
                self._start(fresh=True)
            if world.live is None:
                continue
            self.do(self._drain)
            if world.live is not None:
                break
        assert world.live is not None, "no trainer can start, though all is well"
        self._compare(world.live)

    def _drain(self, process: Process) -> None:
        self._quiet(process)
        assert process.timeline.publisher.may_begin(), "publishing has stalled"
        process.learn([Told((1, 2), (3,)), Told((1,), ())], 1, 0)
        process.boundary(export=True, cut=False)
        self._quiet(process)

    def _quiet(self, process: Process) -> None:
        """Let everything that has work do it, and release snapshots that are held."""
        for _ in range(3):
            process.write("log")
            process.write("cut")
            process.boundary(export=False, cut=False)
        for i, shipper in enumerate(process.timeline.publisher.shippers):
            idle = 0
            for _ in range(1_000):
                busy = process.ship(i)
                if shipper.status.held:
                    self._release(process, i)
                idle = 0 if busy else idle + 1
                if idle > 4:
                    break
            else:
                raise AssertionError(f"sink {i} never comes to rest: {shipper.status}")

    def _release(self, process: Process, sink: int) -> None:
        """A snapshot is held exactly where it has under half of the rows that are served."""
        shipper = process.timeline.publisher.shippers[sink]
        newest = process.timeline.publisher.log.newest()
        assert newest is not None
        rows = sum(len(rows) for rows in self.world.contents[newest.checksum].rows.values())
        head = self.world.servers[sink].state.head
        if head is None or head != shipper.head:
            return  # The server lost time, and the next looks will tell.
        assert "is held" in shipper.status.reason
        if 2 * rows < head.rows:
            self.world.seen["snapshot held and released"] += 1
            self.world.watches[sink].may_shrink = True
            shipper.accept_small()
        else:
            # It was an older version that was too small: the next look finds one that is not.
            self.world.seconds += 31

    def _compare(self, process: Process) -> None:
        world, store = self.world, process.timeline.trainer.store
        newest = process.timeline.publisher.log.newest()
        assert newest is not None
        wanted = rows_in(store)
        assert sum(map(len, wanted.values())) > 0
        for watch, status in zip(world.watches, process.timeline.publisher.status, strict=True):
            assert (status.reason, status.behind, status.needs_snapshot) == ("", 0, False)
            head = MemorySink(watch.server).show_head()
            assert head is not None
            assert head.whole
            assert head.half is None
            assert (head.version, head.checksum) == (newest.version, newest.checksum)
            assert {name: info.rows for name, info in head.tables.items()} == {
                name: len(rows) for name, rows in wanted.items()
            }
            for table in DIMS:
                assert watch.server.table(table) == wanted[table]
            for _ in range(20):
                watch.replica.tick()
                # One that is ahead of a head that went back has patience for a while.
                world.seconds += 10
            assert watch.replica.reason == ""
            assert watch.replica.version == newest.version
        world.check()


def test_serving_ends_equal_to_the_trainer_whatever_happens() -> None:
    run_state_machine_as_test(CrashMachine)
