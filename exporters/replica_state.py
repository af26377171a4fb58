"""A model at one version in memory, and the rule by which deltas move it; no input or output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exporters.errors import Corrupt, Duplicate, Gap, StaleGeneration, UnknownTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from exporters.version import Delta, Head, TableRows

__all__ = ["Applied", "ReplicaState", "RowTable"]


class Applied(NamedTuple):
    """A delta was applied: the `version` now held, rows `written` and `removed`."""

    version: int
    written: int
    removed: int


class RowTable:
    """Rows of one table by key."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._at: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = np.zeros((64, dim), np.float32)

    def __len__(self) -> int:
        return len(self._at)

    def write(self, keys: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Write rows; keys are unique."""
        at, free = self._at, self._free
        slots = []
        for key in keys.tolist():
            slot = at.get(key)
            if slot is None:
                slot = free.pop() if free else len(at)
                at[key] = slot
            slots.append(slot)
        # Free places are below the end, so the end is where the next new row goes.
        need = len(at) + len(free)
        if need > len(self._rows):
            grown = np.zeros((max(need, 2 * len(self._rows)), self.dim), np.float32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[slots] = values

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove rows and return how many there were."""
        count = 0
        for key in keys.tolist():
            slot = self._at.pop(key, None)
            if slot is not None:
                self._free.append(slot)
                count += 1
        return count

    def lookup(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows f32[n, dim], zeros where there is none, and found bool[n]."""
        get = self._at.get
        slots = np.array([get(key, -1) for key in keys.tolist()], np.int64)
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
        """Apply a delta as a whole; when it raises, nothing has changed.

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
        return self._take(delta, checksum)

    def _take(self, delta: Delta, checksum: str) -> Applied:
        written = removed = 0
        tables = {name: self._tables.get(name) or RowTable(d) for name, d in delta.dims.items()}
        for name, rows in delta.tables.items():
            written += len(rows.keys)
            removed += self._change(tables[name], rows)
        self._tables = tables
        if delta.dense is not None:
            self.dense, self.dense_missing = delta.dense, False
        self.version, self.checksum = delta.version, checksum
        self.generation, self.step = delta.generation, delta.step
        self.watermark, self.positions = delta.watermark, delta.positions
        return Applied(delta.version, written, removed)

    def _change(self, table: RowTable, rows: TableRows) -> int:
        removed = table.remove(rows.removed)
        table.write(rows.keys, rows.values)
        return removed

    def _table(self, name: str) -> RowTable:
        try:
            return self._tables[name]
        except KeyError:
            raise UnknownTable(
                f"no table {name!r} in the model; it has {sorted(self._tables)}"
            ) from None
