"""Random runs of crashes, outages and sinks that lose time: whatever happened, sinks end equal.

The model grew out of the one that found the order of the steps; here the code under it is the real
publisher, shipper, repair and wire.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from exporters import StaleGeneration, wire
from exporters.replica import Replica
from tests.doubles.memory_sink import MemoryFeed, MemoryServer, MemorySink
from tests.test_exporters.trainer_model import (
    CHUNK_BYTES,
    DIMS,
    Crash,
    Disk,
    Trainer,
    ship,
    sinks_of,
)

RUNS = 60


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut versions into several pieces, so that a crash can come between them."""
    for name in ("cut_chunks", "cut_rows", "cut_dense"):
        cut = functools.partial(getattr(wire, name), max_bytes=CHUNK_BYTES)
        monkeypatch.setattr(f"exporters.job.{name}", cut)


class Weather:
    """What befalls a server, between two pieces of work and in the midst of one."""

    def __init__(self, rng: random.Random, server: MemoryServer) -> None:
        self.rng, self.server = rng, server
        self.saved = server.save()
        server.before_write = self.squall

    def change(self) -> None:
        a = self.rng.random()
        if a < 0.10:
            self.server.down = not self.server.down
        elif a < 0.16:
            self.server.full = not self.server.full
        elif a < 0.17:
            self.server.wipe()
        elif a < 0.40:
            self.server.fail_in = self.rng.randrange(6)
            self.server.fail_after_applying = self.rng.random() < 0.5

    def squall(self, what: str) -> None:
        """A fail-over to a server that is a few writes or more behind."""
        a = self.rng.random()
        if a < 0.1:
            self.saved = self.server.save()
        elif a < (0.2 if what == "flip" else 0.12):
            self.server.restore(self.saved)

    def clear(self) -> None:
        self.server.down = self.server.full = False
        self.server.fail_in = None
        self.server.before_write = lambda what: None


class Run:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.servers = [MemoryServer() for _ in range(2)]
        self.weather = [Weather(self.rng, server) for server in self.servers]
        self.disk = Disk(max_bytes=self.rng.choice([1 << 30, 4000]))
        self.clock = 0.0
        self.calm = False
        self.trainer: Trainer | None = None
        self.zombies: list[Trainer] = []
        self.commits = 0
        feed = MemoryFeed(self.servers[0])
        feed.between = self.between
        self.replica = Replica(feed, model="m", now=self.now)
        self.followed = 0

    def maybe(self, p: float) -> None:
        if not self.calm and self.rng.random() < p:
            raise Crash

    def now(self) -> float:
        self.clock += self.rng.choice([0.1, 1.0, 5.0])
        return self.clock

    def check(self, sink: MemorySink) -> None:
        """A head that is whole stands for exactly the rows of its version."""
        head = sink.server.state.head
        if head is None or not MemorySink(sink.server).show_head().whole:
            return
        self.commits += 1
        for table, rows in self.disk.versions[head.checksum].items():
            here = sink.server.table(table)
            if MemorySink(sink.server).show_head().half is None:
                assert here == rows, (head.version, table)

    def between(self) -> None:
        """Go on shipping while the replica reads a copy."""
        if self.trainer is not None:
            for _ in range(self.rng.randint(0, 4)):
                ship(self.trainer.publisher, self.check)

    def follow(self, times: int) -> None:
        """What a replica serves is, row by row, a version that was published."""
        for _ in range(times):
            self.replica.tick()
            state = self.replica._state
            if state is not None:
                self.followed += 1
                for table, rows in self.disk.versions[state.checksum].items():
                    held = {
                        key: state._tables[table]._rows[at].tobytes()
                        for key, at in state._tables[table]._at.items()
                    }
                    assert held == rows, ("replica", state.version, table)

    def start(self) -> Trainer:
        return Trainer(
            self.disk,
            sinks_of(self.servers),
            self.maybe,
            on_step=lambda step: self.maybe(0.02),
            now=self.now,
        )

    def work(self) -> None:
        if self.trainer is None:
            self.trainer = self.start()
        trainer = self.trainer
        for _ in range(self.rng.randint(1, 10)):
            trainer.boundary()
            if self.rng.random() < 0.2:
                trainer.cut()
            trainer.train(self.rng)
            if self.rng.random() < 0.5 and trainer.publisher.may_begin():
                trainer.delta()
            for _ in range(self.rng.randint(0, 12)):
                ship(trainer.publisher, self.check)
            self.follow(self.rng.randint(0, 3))
            for zombie in list(self.zombies):
                try:
                    ship(zombie.publisher, self.check)
                except StaleGeneration:
                    self.zombies.remove(zombie)
        self.maybe(0.1)

    def storm(self, rounds: int) -> None:
        for _ in range(rounds):
            for each in self.weather:
                each.change()
            if self.trainer is None:
                self.disaster()
            try:
                self.work()
            except (Crash, StaleGeneration):
                if self.trainer is not None:
                    self.zombies = [self.trainer]
                self.trainer = None

    def disaster(self) -> None:
        """While no trainer runs, an entry of the log goes missing, or the whole volume does."""
        a = self.rng.random()
        if a < 0.05 and self.disk.shelf:
            del self.disk.shelf[self.rng.choice(sorted(self.disk.shelf))]
        elif a < 0.07:
            self.disk.lose()

    def settle(self) -> Trainer:
        for each in self.weather:
            each.clear()
        self.calm = True
        while True:  # a fence above ours, at a sink that was away, ends a trainer; once per sink
            trainer = self.trainer or self.start()
            try:
                self.ship(trainer, 300)
                trainer.boundary()
                trainer.cut()
                trainer.train(self.rng)
                trainer.delta()
                self.ship(trainer, 600)
            except StaleGeneration:
                self.trainer = None
            else:
                return trainer

    def ship(self, trainer: Trainer, times: int) -> None:
        for _ in range(times):
            ship(trainer.publisher, self.check)


@pytest.mark.parametrize("seed", range(RUNS))
def test_sinks_equal_the_trainer_whatever_happened(seed: int) -> None:
    run = Run(seed)
    run.storm(rounds=40)
    trainer = run.settle()
    run.follow(50)
    assert run.commits > 0
    assert run.followed > 0
    assert run.replica.reason == ""
    newest = trainer.publisher.log.newest()
    assert newest is not None
    for server in run.servers:
        head = server.state.head
        assert head is not None
        assert head.version == newest.version
        for table in DIMS:
            assert server.table(table) == trainer.wanted(table)
        assert head.dense is not None
        dense = np.frombuffer(bytes(server.state.dense[head.dense.version]), np.float32)
        assert dense.tolist() == [trainer.dense]
    assert run.replica.version == newest.version
    assert run.replica.dense is not None
    assert run.replica.dense.tolist() == [trainer.dense]
