"""A trainer in miniature: cuts, deltas and starts in the order of the design, without learning.

What is durable (cuts, log, generation) lives in `Disk`; sinks outlive the trainer in any case. All
the rest dies with a `Crash`, which may come wherever `maybe` is called and after each shipped
piece.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exporters import (
    Delta,
    FenceTaken,
    Publisher,
    SinkRefused,
    SinkUnavailable,
    Snapshot,
    TableRows,
    keys_above,
    pick,
    plan,
)
from tests.doubles.memory_log import MemoryLog, Shelf
from tests.doubles.memory_sink import MemoryServer, MemorySink

DIM = 2
DIMS = {"a": DIM, "b": 1}
KEYS = 14
CHUNK_BYTES = 110


class Crash(Exception):
    """The process dies here."""


@dataclass
class Disk:
    """What a trainer leaves behind."""

    cuts: list[dict[str, Any]] = field(default_factory=list)
    shelf: Shelf = field(default_factory=dict)
    generation: int = 0
    max_bytes: int = 1 << 30
    versions: dict[str, dict[str, dict[int, bytes]]] = field(default_factory=dict)
    """By checksum the rows that a version stands for, to check sinks by."""

    def lose(self) -> None:
        """Lose the volume; the next start is a `--fresh` one."""
        self.cuts, self.shelf, self.generation = [], {}, 0


def row(table: str, value: tuple[int, int]) -> np.ndarray:
    """Return the row that a change made at (generation, step) leaves."""
    return np.array([value[0] * 1000 + value[1], 0.5][: DIMS[table]], np.float32)


class Source:
    """Snapshots from the newest cut and the log's tail."""

    def __init__(self, disk: Disk, log: MemoryLog) -> None:
        self.disk, self.log = disk, log

    def snapshot(self, at_least: int) -> Snapshot | None:
        newest = self.log.newest()
        if newest is None or newest.version < at_least or not self.disk.cuts:
            return None
        cut = max(self.disk.cuts, key=lambda c: (c["generation"], c["step"]))
        tables: dict[str, dict[int, np.ndarray]] = {name: {} for name in DIMS}
        for (table, key), value in cut["store"].items():
            tables[table][key] = row(table, value)
        dense = np.array([cut["dense"]], np.float32)
        version, entries = cut["version"], self.log.entries()
        first = pick(entries, version)
        if first is None or first.step < cut["step"]:
            return None
        while version < newest.version:
            entry = pick(entries, version)
            if entry is None:
                return None
            try:
                delta = self.log.read(entry.version)
            except KeyError:
                return None
            apply(tables, delta)
            if delta.dense is not None:
                dense = delta.dense
            version = entry.version
        return Snapshot(
            version=version,
            step=newest.step,
            watermark=newest.watermark,
            positions={},
            dense=dense,
            dims=DIMS,
            counts={name: len(rows) for name, rows in tables.items()},
            rows=iter(
                [
                    (
                        name,
                        np.array(sorted(rows), np.uint64),
                        np.array([rows[k] for k in sorted(rows)], np.float32),
                    )
                    for name, rows in tables.items()
                    if rows
                ]
            ),
        )


def apply(tables: Mapping[str, dict[int, np.ndarray]], delta: Delta) -> None:
    """Apply a delta to plain dicts."""
    for name, rows in delta.tables.items():
        for key, values in zip(rows.keys.tolist(), rows.values, strict=True):
            tables[name][key] = values
        for key in rows.removed.tolist():
            tables[name].pop(key, None)


class Trainer:
    """One process, from start to crash."""

    def __init__(
        self,
        disk: Disk,
        sinks: list[MemorySink],
        maybe: Callable[[float], None],
        *,
        on_step: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self.disk, self.maybe = disk, maybe
        maybe(0.05)
        cut = max(disk.cuts, key=lambda c: (c["generation"], c["step"]), default=None)
        if cut is None:
            self.store: dict[tuple[str, int], tuple[int, int]] = {}
            self.changed: dict[tuple[str, int], int] = {}
            self.cursor, self.version, self.step, self.dense = -1, 0, 0, 0.0
        else:
            self.__dict__.update(copy.deepcopy({k: cut[k] for k in cut if k != "generation"}))
        self.acked: tuple[int, int] | None = None
        log = MemoryLog(disk.shelf, chunk_bytes=CHUNK_BYTES, max_bytes=disk.max_bytes)
        heads = self._take_fences(sinks, cut)
        if cut is None:
            self.cut(prune=False)
        maybe(0.05)
        repair = plan(log.entries(), heads, self.version)
        self.publisher = Publisher(
            log,
            sinks,
            generation=self.generation,
            floor=self.version,
            snapshots=Source(disk, log),
            snapshot_sinks=repair.snapshot_sinks,
            on_step=on_step,
            now=now,
        )
        for head in heads.values():
            if head is not None:
                self.publisher.note_head(head.version)
        if repair.needed:
            for table, keys in keys_above(log, repair.m).items():
                for key in keys.tolist():
                    self.changed[table, key] = self.step
            self.cursor = min(self.cursor, self.step - 1)
            self.delta(since=repair.m)
            self.boundary()

    def _take_fences(self, sinks: list[MemorySink], cut: dict[str, Any] | None) -> dict[str, Any]:
        known = [self.disk.generation, cut["generation"] if cut else 0]
        for sink in sinks:
            try:
                known.append(sink.read_fence() or 0)
            except (SinkUnavailable, SinkRefused):
                continue
        self.generation = 1 + max(known)
        heads = {}
        again = True
        while again:
            again = False
            self.disk.generation = self.generation
            self.maybe(0.05)
            for sink in sinks:
                try:
                    heads[sink.name] = sink.take_fence(self.generation)
                except FenceTaken as error:
                    self.generation, again = error.fence + 1, True
                    break
                except (SinkUnavailable, SinkRefused):
                    heads.pop(sink.name, None)
                self.maybe(0.05)
        return heads

    def boundary(self) -> None:
        """D3: what was written is acknowledged, at a later boundary."""
        if self.acked is not None:
            self.cursor, self.version = self.acked
            self.acked = None

    def train(self, rng: random.Random) -> None:
        """Change a row or remove one."""
        self.step += 1
        key = (rng.choice(["a", "a", "b"]), rng.randrange(KEYS))
        if rng.random() < 0.3:
            if self.store.pop(key, None) is not None:
                self.changed[key] = self.step
        else:
            self.store[key] = (self.generation, self.step)
            self.changed[key] = self.step
        self.dense = float(self.generation * 1000 + self.step)

    def delta(self, since: int | None = None) -> None:
        """D1, D2."""
        changed = [key for key, step in self.changed.items() if step > self.cursor]
        upto = self.step
        tables = {}
        for name, dim in DIMS.items():
            here = [k for k in changed if k[0] == name and k in self.store]
            gone = [k[1] for k in changed if k[0] == name and k not in self.store]
            tables[name] = TableRows(
                np.array([k[1] for k in here], np.uint64),
                np.array([row(name, self.store[k]) for k in here], np.float32).reshape(-1, dim),
                np.array(gone, np.uint64),
            )
        draft = Delta(
            version=0,
            since=0,
            generation=0,
            step=self.step,
            watermark=self.step,
            positions={"t/0": self.step},
            tables=tables,
            dense=np.array([self.dense], np.float32),
            dims=DIMS,
            rows={name: sum(k[0] == name for k in self.store) for name in DIMS},
        )
        self.maybe(0.03)
        log = self.publisher.log
        before = log.newest()
        try:
            written = self.publisher.append(draft, since)
        finally:
            if (entry := log.newest()) is not None and entry is not before:
                rows = {name: self.wanted(name) for name in DIMS}
                assert self.disk.versions.setdefault(entry.checksum, rows) == rows
        self.maybe(0.03)
        self.acked = (upto, written.version)

    def cut(self, *, prune: bool = True) -> None:
        """C2 to C6, two cuts kept."""
        cut = copy.deepcopy(
            {
                name: getattr(self, name)
                for name in ("store", "changed", "cursor", "version", "step", "dense")
            }
        )
        cut["generation"] = self.generation
        self.maybe(0.03)
        self.disk.cuts.append(cut)
        self.maybe(0.03)
        self.disk.cuts.sort(key=lambda c: (c["generation"], c["step"]))
        del self.disk.cuts[:-2]
        if prune:
            self.publisher.prune(self.disk.cuts[0]["version"])

    def wanted(self, table: str) -> dict[int, bytes]:
        """Return what a sink should hold for a table."""
        return {
            key: row(table, value).tobytes()
            for (name, key), value in self.store.items()
            if name == table
        }


def ship(publisher: Publisher, check: Callable[[MemorySink], None]) -> None:
    """Let each sink do one piece; a snapshot that is held is released."""
    for shipper in publisher.shippers:
        if shipper.status.held:
            shipper.accept_small()
        before = shipper.head
        try:
            shipper.tick()
        finally:
            if shipper.head != before and isinstance(shipper.sink, MemorySink):
                check(shipper.sink)


def sinks_of(servers: list[MemoryServer]) -> list[MemorySink]:
    """Return new sink objects, as a new process makes them."""
    return [MemorySink(server, name=f"sink{i}") for i, server in enumerate(servers)]
