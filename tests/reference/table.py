"""What a sparse store is: dicts, Python integers, float32 scalars, and no cleverness.

It shares configuration and argument types with the store and not one rule: hashes, horizons,
bounds, sums and readers are written here a second time. Everything is done eagerly, by walking
over all entries.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sparse_store.batch import Keys
from sparse_store.config import Always, Normal, Table, Uniform
from tests.reference import optim
from tests.reference.optim import F

MASK = 2**64 - 1


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed_of(seed: int, name: str) -> int:
    """A table's own seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def initial(table: Table, table_seed: int, key: int) -> list[np.float32]:
    """First values of a row."""
    row = []
    for element in range(table.dim):
        base = mix(key ^ mix(table_seed))
        h = mix((base + (element + 1) * 0x9E3779B97F4A7C15) & MASK)
        if isinstance(table.start, Normal):
            total = sum((h >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
            row.append(F((total - 131070) * (table.start.normal / math.sqrt((2**32 - 1) / 3))))
        elif isinstance(table.start, Uniform):
            row.append(F((2 * (h >> 40) + 1 - 2**24) * (table.start.uniform / 2**24)))
        else:
            row.append(F(0))
    return row


@dataclass
class Entry:
    """A counted key; `values` is None for a candidate."""

    count: int
    stamp: int
    changed: int
    values: list[np.float32] | None = None
    slots: list[np.float32] | None = None


@dataclass
class TwinTable:
    """One table and what was removed from it: (step, was it a row, key)."""

    config: Table
    seed: int
    entries: dict[int, Entry] = field(default_factory=dict)
    removals: list[tuple[int, bool, int]] = field(default_factory=list)
    admitted: int = 0
    evicted: int = 0
    forgotten: int = 0

    def rows(self) -> dict[int, Entry]:
        """Keys with a row, ascending."""
        return {k: e for k, e in sorted(self.entries.items()) if e.values is not None}

    def candidates(self) -> dict[int, Entry]:
        """Keys without one, ascending."""
        return {k: e for k, e in sorted(self.entries.items()) if e.values is None}

    def collect(self, clock: int, step: int) -> None:
        """Drop the dead, then what is over a bound."""
        evict, admit = self.config.evict, self.config.admit
        if evict.ttl is not None:
            self._drop_dead(self.rows(), clock, evict.ttl, step)
        if evict.rows is not None and len(self.rows()) > evict.rows:
            self._drop_oldest(self.rows(), max(1, evict.rows * 95 // 100), step)
        if isinstance(admit, Always):
            return
        self._drop_dead(self.candidates(), clock, admit.forget, step)
        if len(self.candidates()) > admit.candidates:
            self._drop_oldest(self.candidates(), max(1, admit.candidates * 95 // 100), step)

    def sight(self, key: int, times: int, clock: int, step: int) -> None:
        """Count a key, and admit it where due."""
        entry = self.entries.setdefault(key, Entry(0, 0, 0))
        entry.count = min(entry.count + times, 2**32 - 1)
        entry.stamp, entry.changed = clock, step
        admit = self.config.admit
        if entry.values is None and (isinstance(admit, Always) or entry.count >= admit.count):
            entry.values = initial(self.config, self.seed, key)
            entry.slots = optim.slot_start(self.config.optimizer, self.config.dim)
            self.admitted += 1

    def _drop_dead(self, among: Mapping[int, Entry], clock: int, ttl: int, step: int) -> None:
        grain = max(1, ttl // 64)
        horizon = math.floor((clock - ttl) / grain) * grain
        for key, entry in among.items():
            if entry.stamp < horizon:
                self._drop(key, step)

    def _drop_oldest(self, among: Mapping[int, Entry], kept: int, step: int) -> None:
        order = sorted(among, key=lambda key: (among[key].stamp, key))
        for key in order[: len(among) - kept]:
            self._drop(key, step)

    def _drop(self, key: int, step: int) -> None:
        was_row = self.entries.pop(key).values is not None
        self.removals.append((step, was_row, key))
        if was_row:
            self.evicted += 1
        else:
            self.forgotten += 1


class TwinStore:
    """The store's face, as far as it decides anything."""

    def __init__(self, tables: list[Table], *, seed: int, readers: tuple[str, ...]) -> None:
        self.tables = {t.name: TwinTable(t, seed_of(seed, t.name)) for t in tables}
        self.step = 0
        self.clock = 0
        self.cursors = dict.fromkeys(readers, 0)

    def resolve(self, inputs: Mapping[str, Keys], clock: int) -> None:
        """Begin a step."""
        self.step += 1
        self.clock = clock
        for name, table in self.tables.items():
            table.collect(clock, self.step)
            times: dict[int, int] = {}
            for keys in inputs.values():
                if keys.table == name:
                    for key in keys.ids.tolist():
                        times[key] = times.get(key, 0) + 1
            for key, count in times.items():
                table.sight(key, count, clock, self.step)

    def pull(self, keys: Keys, size: int) -> np.ndarray:
        """One input's array of `size` samples."""
        table = self.tables[keys.table]
        dim = table.config.dim
        shape = (size, dim) if keys.length is None else (size, keys.length, dim)
        out = np.zeros(shape, np.float32)
        for b, (ids, weights) in enumerate(samples(keys)):
            if keys.length is not None:
                for place, key in enumerate(ids):
                    out[b, place] = self._row(table, key)
                continue
            below = divisor(weights, keys.pool)
            if below == 0:
                continue
            for key, w in zip(ids, weights, strict=True):
                row = self._row(table, key)
                for d in range(dim):
                    out[b, d] = out[b, d] + w * row[d]
            if keys.pool != "sum":
                for d in range(dim):
                    out[b, d] = out[b, d] / below
        return out

    def push(self, inputs: Mapping[str, Keys], grads: Mapping[str, np.ndarray]) -> None:
        """Sum by key in order of occurrence, then one step per key."""
        sums: dict[tuple[str, int], list[np.float32]] = {}
        for name, keys in inputs.items():
            table = self.tables[keys.table]
            for b, (ids, weights) in enumerate(samples(keys)):
                below = F(1) if keys.length is not None else divisor(weights, keys.pool)
                for place, (key, w) in enumerate(zip(ids, weights, strict=True)):
                    if below == 0 or table.entries[key].values is None:
                        continue
                    total = sums.setdefault((keys.table, key), [F(0)] * table.config.dim)
                    for d in range(table.config.dim):
                        g = grads[name][b, place, d] if keys.length else grads[name][b, d]
                        total[d] = total[d] + w * (g / below)
        for name, table in self.tables.items():
            for key, entry in table.entries.items():
                if entry.changed != self.step or entry.values is None or entry.slots is None:
                    continue
                total = sums.get((name, key), [F(0)] * table.config.dim)
                entry.values, entry.slots = optim.step(
                    table.config.optimizer, entry.values, entry.slots, total
                )

    def peek(self, reader: str) -> dict[str, tuple[dict[int, Entry], list[int]]]:
        """By table, rows and removed keys since the reader's cursor."""
        since = self.cursors[reader]
        change = {}
        for name, table in self.tables.items():
            rows = {k: e for k, e in table.rows().items() if e.changed > since}
            gone = {k for step, was_row, k in table.removals if was_row and step > since}
            change[name] = (rows, sorted(gone - table.rows().keys()))
        return change

    def ack(self, reader: str, until: int) -> None:
        """Move a cursor; what all have seen is forgotten."""
        self.cursors[reader] = until
        seen = min(self.cursors.values())
        for table in self.tables.values():
            table.removals = [removal for removal in table.removals if removal[0] > seen]

    def mark_changed(self, keys: Mapping[str, list[int]]) -> None:
        """Let readers see these keys again."""
        for name, some in keys.items():
            for key in set(some):
                entry = self.tables[name].entries.get(key)
                if entry is None or entry.values is None:
                    self.tables[name].removals.append((self.step, True, key))
                else:
                    entry.changed = self.step
        if any(keys.values()):
            for reader, cursor in self.cursors.items():
                self.cursors[reader] = min(cursor, self.step - 1)

    def freeze(self, reader: str) -> TwinStore:
        """The store that loading what `reader` was given must make."""
        twin = copy.deepcopy(self)
        twin.ack(reader, self.step)
        return twin

    @staticmethod
    def _row(table: TwinTable, key: int) -> list[np.float32]:
        entry = table.entries.get(key)
        return [F(0)] * table.config.dim if entry is None or not entry.values else entry.values


def samples(keys: Keys) -> list[tuple[list[int], list[np.float32]]]:
    """Ids and weights by sample."""
    found = []
    for low, high in zip(keys.row_splits[:-1].tolist(), keys.row_splits[1:].tolist(), strict=True):
        weights = [F(1)] * (high - low) if keys.weights is None else list(keys.weights[low:high])
        found.append((keys.ids[low:high].tolist(), weights))
    return found


def divisor(weights: list[np.float32], pool: str) -> np.float32:
    """What a pooled sum is divided by."""
    if pool == "sum":
        return F(1)
    total = F(0)
    for w in weights:
        total = total + (w if pool == "mean" else w * w)
    return np.sqrt(total) if pool == "sqrtn" else total
