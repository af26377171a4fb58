"""Random runs of crashes, outages and sinks that lose time: whatever happened, sinks end equal.

The model grew out of the one that found the order of the steps; here the code under it is the real
publisher, shipper, repair and wire.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from exporters import StaleGeneration
from tests.doubles.memory_sink import MemoryServer
from tests.test_exporters.trainer_model import DIMS, Crash, Disk, Trainer, ship, sinks_of

RUNS = 60


class Weather:
    """What befalls a server."""

    def __init__(self, rng: random.Random, server: MemoryServer) -> None:
        self.rng, self.server = rng, server
        self.saved = server.save()

    def change(self) -> None:
        a = self.rng.random()
        if a < 0.10:
            self.server.down = not self.server.down
        elif a < 0.16:
            self.server.full = not self.server.full
        elif a < 0.22:
            self.saved = self.server.save()
        elif a < 0.25:
            self.server.restore(self.saved)
        elif a < 0.26:
            self.server.wipe()
        elif a < 0.40:
            self.server.fail_in = self.rng.randrange(6)
            self.server.fail_after_applying = self.rng.random() < 0.5

    def clear(self) -> None:
        self.server.down = self.server.full = False
        self.server.fail_in = None


@pytest.mark.parametrize("seed", range(RUNS))
def test_sinks_end_equal_to_the_trainer(seed: int) -> None:
    rng = random.Random(seed)
    servers = [MemoryServer() for _ in range(2)]
    weather = [Weather(rng, server) for server in servers]
    disk = Disk()
    clock = 0.0
    calm = False

    def maybe(p: float) -> None:
        if not calm and rng.random() < p:
            raise Crash

    def tick_clock() -> float:
        nonlocal clock
        clock += rng.choice([0.1, 1.0, 5.0])
        return clock

    def start() -> Trainer:
        return Trainer(
            disk, sinks_of(servers), maybe, on_step=lambda step: maybe(0.03), now=tick_clock
        )

    trainer: Trainer | None = None
    zombies: list[Trainer] = []
    for _ in range(40):
        for each in weather:
            each.change()
        try:
            if trainer is None:
                trainer = start()
            for _ in range(rng.randint(1, 10)):
                trainer.boundary()
                if rng.random() < 0.2:
                    trainer.cut()
                trainer.train(rng)
                if rng.random() < 0.5 and trainer.publisher.may_begin():
                    trainer.delta()
                for _ in range(rng.randint(0, 4)):
                    ship(trainer.publisher)
                for zombie in zombies:
                    try:
                        ship(zombie.publisher)
                    except StaleGeneration:
                        zombies.remove(zombie)
                        break
            maybe(0.1)
        except Crash:
            if trainer is not None:
                zombies = [trainer]
            trainer = None
    for each in weather:
        each.clear()
    calm = True
    if trainer is None:
        trainer = start()
    for _ in range(100):
        ship(trainer.publisher)
    trainer.boundary()
    trainer.train(rng)
    trainer.delta()
    for _ in range(400):
        ship(trainer.publisher)
    newest = disk.log.newest()
    assert newest is not None
    for server in servers:
        head = server.state.head
        assert head is not None
        assert head.version == newest.version
        for table in DIMS:
            assert server.table(table) == trainer.wanted(table)
        assert head.dense is not None
        dense = np.frombuffer(bytes(server.state.dense[head.dense.version]), np.float32)
        assert dense.tolist() == [trainer.dense]
