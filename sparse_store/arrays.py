"""A table's memory: columns of entries, how they are made and how they grow."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store._table_kernels import (
    CANDIDATES,
    FREE,
    ROWS,
    TALLIES,
    TableArrays,
    reindex,
)
from sparse_store.errors import TableFull

_LEAST_ENTRIES = 64
_MOST_ENTRIES = 2**31 - 2


class Block(NamedTuple):
    """Entries as columns: keys, counts, stamps, changed [n]; values and slots [n, k].

    For candidates k is 0.
    """

    keys: NDArray[np.uint64]
    counts: NDArray[np.uint32]
    stamps: NDArray[np.int64]
    changed: NDArray[np.int64]
    values: NDArray[np.float32]
    slots: NDArray[np.float32]

    def take(self, order: NDArray[np.intp]) -> "Block":
        """Return these positions, copied."""
        return Block(
            self.keys[order],
            self.counts[order],
            self.stamps[order],
            self.changed[order],
            self.values[order],
            self.slots[order],
        )

    def by_key(self) -> "Block":
        """Return everything in order of key, copied."""
        return self.take(np.argsort(self.keys))


def still(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, the form in which kernels take what they only read."""
    view = array.view()
    view.flags.writeable = False
    return view


def born(dim: int, slots: int) -> TableArrays:
    """Return the memory of an empty table."""
    return TableArrays(
        cells=np.full(2 * _LEAST_ENTRIES, -1, np.int32),
        keys=np.empty(_LEAST_ENTRIES, np.uint64),
        row_of=np.full(_LEAST_ENTRIES, FREE, np.int32),
        counts=np.empty(_LEAST_ENTRIES, np.uint32),
        stamps=np.empty(_LEAST_ENTRIES, np.int64),
        changed=np.empty(_LEAST_ENTRIES, np.int64),
        free_entries=np.empty(_LEAST_ENTRIES, np.int32),
        values=np.empty((_LEAST_ENTRIES, dim), np.float32),
        slots=np.empty((_LEAST_ENTRIES, slots), np.float32),
        free_rows=np.empty(_LEAST_ENTRIES, np.int32),
        tally=np.zeros(TALLIES, np.int64),
    )


def has_room(arrays: TableArrays, keys: int) -> bool:
    """Say whether that many unknown keys could all become entries with rows."""
    rows = int(arrays.tally[ROWS])
    entries = rows + int(arrays.tally[CANDIDATES])
    return (
        entries + keys <= min(arrays.keys.size, _cell_bound(arrays.cells.size))
        and rows + keys <= arrays.values.shape[0]
    )


def with_room(arrays: TableArrays, seed: np.uint64, *, entries: int, rows: int) -> TableArrays:
    """Return memory for that many more entries and rows; columns are copied where they grow.

    Columns and index grow by doubling; the index is filled to 70 % at most.

    Raises
    ------
    TableFull
    """
    rows += int(arrays.tally[ROWS])
    entries += int(arrays.tally[ROWS] + arrays.tally[CANDIDATES])
    if entries > _MOST_ENTRIES:
        raise TableFull(
            f"{entries} entries are more than an index can number, {_MOST_ENTRIES}; bound the "
            "table by evict.rows and admit.candidates"
        )
    if entries > arrays.keys.size:
        size = _doubled(arrays.keys.size, entries)
        arrays = arrays._replace(
            keys=_longer(arrays.keys, size),
            row_of=_longer(arrays.row_of, size),
            counts=_longer(arrays.counts, size),
            stamps=_longer(arrays.stamps, size),
            changed=_longer(arrays.changed, size),
            free_entries=_longer(arrays.free_entries, size),
        )
    if rows > arrays.values.shape[0]:
        size = _doubled(arrays.values.shape[0], rows)
        arrays = arrays._replace(
            values=_longer(arrays.values, size),
            slots=_longer(arrays.slots, size),
            free_rows=_longer(arrays.free_rows, size),
        )
    if entries > _cell_bound(arrays.cells.size):
        size = arrays.cells.size
        while entries > _cell_bound(size):
            size *= 2
        arrays = arrays._replace(cells=np.full(size, -1, np.int32))
        reindex(arrays, seed)
    return arrays


def _cell_bound(cells: int) -> int:
    return cells * 7 // 10


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    longer = np.empty((size, *array.shape[1:]), array.dtype)
    longer[: array.shape[0]] = array
    return longer
