"""A model at one version in memory, and the rule by which deltas move it; no input or output."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exporters.errors import Corrupt, Duplicate, Gap, StaleGeneration, UnknownTable
from exporters.version import TableRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from exporters.version import Delta, Head

__all__ = ["Applied", "Prepared", "ReplicaState", "RowTable"]


class Applied(NamedTuple):
    """A delta was applied: the `version` now held, rows `written` and `removed`."""

    version: int
    written: int
    removed: int


class _Change(NamedTuple):
    """A change to a table, worked out and not made yet."""

    keys: list[int]
    slots: list[int]
    values: NDArray[np.float32]
    removed: list[int]
    grown: NDArray[np.float32] | None


class Prepared(NamedTuple):
    """A delta worked out for a state, and not taken yet."""

    delta: Delta
    checksum: str
    tables: dict[str, RowTable]
    changes: dict[str, _Change]


class RowTable:
    """Rows of one table by key."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._at: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = np.zeros((64, dim), np.float32)

    def __len__(self) -> int:
        return len(self._at)

    def prepare(self, rows: TableRows) -> _Change:
        """Work out a change; keys are unique and not among the removed. Nothing is changed."""
        at, end = self._at, len(self._at) + len(self._free)
        keys, removed = rows.keys.tolist(), rows.removed.tolist()
        if at.keys().isdisjoint(keys):
            new = len(keys)
            slots = []
        else:
            found = [at.get(key, -1) for key in keys]
            new = found.count(-1)
            slots = found
        reused = self._free[len(self._free) - min(new, len(self._free)) :]
        fresh = [*reversed(reused), *range(end, end + new - len(reused))]
        if slots:
            places = iter(fresh)
            slots = [next(places) if slot < 0 else slot for slot in slots]
        else:
            slots = fresh
        grown = None
        if (need := end + new - len(reused)) > len(self._rows):
            grown = np.zeros((max(need, 2 * len(self._rows)), self.dim), np.float32)
            grown[: len(self._rows)] = self._rows
        return _Change(keys, slots, rows.values, removed, grown)

    def commit(self, change: _Change) -> int:
        """Make a change that was worked out just before; return how many rows were removed."""
        if change.grown is not None:
            self._rows = change.grown
        before = len(self._at)
        self._at.update(zip(change.keys, change.slots, strict=True))
        reused = min(len(self._at) - before, len(self._free))
        del self._free[len(self._free) - reused :]
        self._rows[change.slots] = change.values
        gone = [slot for key in change.removed if (slot := self._at.pop(key, None)) is not None]
        self._free.extend(gone)
        return len(gone)

    def write(self, keys: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Write rows; keys are unique."""
        self.commit(self.prepare(TableRows(keys, values, keys[:0])))

    def lookup(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows f32[n, dim], zeros where there is none, and found bool[n]."""
        slots = np.fromiter(
            map(self._at.get, keys.tolist(), itertools.repeat(-1)), np.int64, len(keys)
        )
        found = slots >= 0
        rows = self._rows[slots]
        rows[~found] = 0.0
        return rows, found


class ReplicaState:
    """All tables at one version. Not for several threads at once.

    Parameters
    ----------
    head
        The head that the rows were read under. Rows may be newer than it until `target`.
    """

    def __init__(self, head: Head) -> None:
        self.version = head.version
        self.epoch = head.epoch
        self.generation = head.generation
        self.checksum = head.checksum
        self.watermark = head.watermark
        self.step = head.step
        self.positions: Mapping[str, int] = head.positions
        self.target = head.version
        """The version from which on all rows are of one version; below it nothing is served."""
        self.dense: NDArray[np.float32] | None = None
        self.dense_missing = False
        self._tables = {name: RowTable(info.dim) for name, info in head.tables.items()}

    @property
    def serves(self) -> bool:
        """Whether all that is held is of one version."""
        return self.version >= self.target and not self.dense_missing

    @property
    def tables(self) -> dict[str, int]:
        """The dim of every table."""
        return {name: table.dim for name, table in self._tables.items()}

    def rows(self, table: str) -> int:
        """Return the number of rows in a table."""
        return len(self._table(table))

    def fill(self, table: str, keys: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Take rows that were read from the head's epoch."""
        self._table(table).write(keys, values)

    def lookup(
        self, table: str, keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows f32[n, dim], zeros for unknown keys, and found bool[n].

        Raises
        ------
        UnknownTable
            The model has no such table.
        """
        return self._table(table).lookup(keys)

    def apply(self, delta: Delta, checksum: str) -> Applied:
        """Apply a delta as a whole; when it raises, nothing has changed. Raises as `prepare`."""
        return self.commit(self.prepare(delta, checksum))

    def prepare(self, delta: Delta, checksum: str) -> Prepared:
        """Work out a delta while lookups go on; `commit` it before any other.

        Raises
        ------
        Duplicate
            The version held is the delta's or above.
        Gap
            The delta begins above the version held.
        StaleGeneration
            The delta is of an older trainer than the version held.
        Corrupt
            The delta has another content than the same version held, or another dim.
        """
        if delta.version == self.version and checksum != self.checksum:
            raise Corrupt(
                f"version {delta.version} has two contents: {self.checksum} is held, {checksum}"
                " was sent"
            )
        if delta.version <= self.version:
            raise Duplicate(f"version {delta.version}: {self.version} is held")
        if delta.since > self.version:
            raise Gap(f"the delta covers ({delta.since}, {delta.version}]: {self.version} is held")
        if delta.generation < self.generation:
            raise StaleGeneration(
                f"version {delta.version} is of generation {delta.generation}, older than"
                f" {self.generation}, which wrote version {self.version}"
            )
        for name, dim in delta.dims.items():
            if name in self._tables and self._tables[name].dim != dim:
                raise Corrupt(f"table {name!r} changed its dim to {dim} without a snapshot")
        tables = {name: self._tables.get(name) or RowTable(d) for name, d in delta.dims.items()}
        changes = {name: tables[name].prepare(rows) for name, rows in delta.tables.items()}
        return Prepared(delta, checksum, tables, changes)

    def commit(self, prepared: Prepared) -> Applied:
        """Take a delta that was worked out."""
        delta = prepared.delta
        written = sum(len(change.keys) for change in prepared.changes.values())
        removed = sum(
            prepared.tables[name].commit(change) for name, change in prepared.changes.items()
        )
        self._tables = prepared.tables
        if delta.dense is not None:
            self.dense, self.dense_missing = delta.dense, False
        self.version, self.checksum = delta.version, prepared.checksum
        self.generation, self.step = delta.generation, delta.step
        self.watermark, self.positions = delta.watermark, delta.positions
        return Applied(delta.version, written, removed)

    def _table(self, name: str) -> RowTable:
        try:
            return self._tables[name]
        except KeyError:
            raise UnknownTable(
                f"no table {name!r} in the model; it has {sorted(self._tables)}"
            ) from None
