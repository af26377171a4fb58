"""A table's memory: reserved once as address space, and touched as it fills.

Records and rows are never copied to grow: their arrays are as long as the machine's memory could
ever fill, and pages come into being when they are first written. Only the index is built anew,
half as large again, and its cells move over some at a time.
"""

import mmap
import os
import resource
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparse_store._table_kernels import (
    ALL_MOVED,
    CANDIDATES,
    CELLS,
    FIRST,
    FIRST_ROW,
    GROUPS,
    MOVED,
    OLD_GROUPS,
    ROWS,
    TALLIES,
    USED,
    USED_ROWS,
    TableArrays,
    migrate,
)
from sparse_store.errors import TableFull

RECORD: Final = np.dtype(
    [("key", "u8"), ("stamp", "i8"), ("changed", "i8"), ("count", "u4"), ("row", "i4")],
    align=True,
)
_MOST_ENTRIES: Final = 2**31 - 2
_LEAST_GROUPS: Final = 16
_SLICE: Final = 8_192  # groups moved in a step, at least
_WITHOUT_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE
_SMALL: Final = 4 << 20  # bytes at the front of a reservation that stay in small pages


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


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's first element lies."""
    address: int = array.__array_interface__["data"][0]
    return address


def reserved(count: int, dtype: DTypeLike, *, width: int | None = None) -> NDArray[Any]:
    """Return a zero array [count] or [count, width] whose pages come into being when written.

    Shorter, by halves, where the system grants less. Big ones ask for huge pages; the front stays
    in small ones, so that a small table costs little.

    Raises
    ------
    TableFull
        Not even one page is granted.
    """
    kind = np.dtype(dtype)
    size = kind.itemsize * (width or 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _WITHOUT_RESERVE
    memory = None
    while memory is None:
        try:
            memory = mmap.mmap(-1, max(count * size, mmap.PAGESIZE), flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            if count * size <= mmap.PAGESIZE:
                raise TableFull(f"the system grants no memory: {error}") from error
            count //= 2
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) > 2 * _SMALL:
        memory.madvise(mmap.MADV_HUGEPAGE, _SMALL)
    array = np.frombuffer(memory, kind, count * (width or 1))
    return array if width is None else array.reshape(count, width)


def born(width: int, *, shards: int = 1) -> list[TableArrays]:
    """Return the memory of an empty table, by shard; `width` is that of values and slots."""
    records = reserved(_fitting(RECORD.itemsize), RECORD)
    rows = reserved(_fitting(4 * width), np.float32, width=width)
    free_entries = reserved(records.size, np.int32)
    free_rows = reserved(rows.shape[0], np.int32)
    entries = min(records.size, free_entries.size) // shards
    numbers = min(rows.shape[0], free_rows.size) // shards
    made = []
    for shard in range(shards):
        tally = np.zeros(TALLIES, np.int64)
        tally[[FIRST, USED]] = shard * entries
        tally[[FIRST_ROW, USED_ROWS]] = shard * numbers
        tally[GROUPS], tally[MOVED] = _LEAST_GROUPS, ALL_MOVED
        cells = _cells(_LEAST_GROUPS)
        old = np.zeros(CELLS, np.uint64)
        made.append(TableArrays(cells, old, records, rows, free_entries, free_rows, tally))
    return made


def with_room(arrays: TableArrays, keys: int, *, shards: int = 1) -> TableArrays:
    """Return a shard's memory with room for that many unknown keys, all with rows.

    The index is filled to three quarters, and replaced by one half as large again, or more. Cells
    move over in slices: some with each call, all at once when the keys to come wouldn't wait.

    Raises
    ------
    TableFull
    """
    tally = arrays.tally
    entries = int(tally[ROWS] + tally[CANDIDATES]) + keys
    most = min(arrays.records.size, arrays.free_entries.size) // shards
    if entries > most or int(tally[ROWS]) + keys > _most_rows(arrays) // shards:
        raise TableFull(
            f"{entries} entries of a share of one in {shards} are more than memory or the index "
            f"can hold, {most}; bound the table by evict.rows and admit.candidates, or lift a limit "
            "on address space"
        )
    if tally[OLD_GROUPS]:
        old = int(tally[OLD_GROUPS])
        # The share that moved keeps pace with the old index' way from full to crammed.
        full, crammed = _bound(old), _crammed(old)
        due = old * (entries - keys - full) // (crammed - full)
        migrate(arrays, max(_SLICE, due - int(tally[MOVED])))
        if entries > crammed or entries > _bound(int(tally[GROUPS])):
            while tally[OLD_GROUPS]:
                migrate(arrays, old)
        if not tally[OLD_GROUPS]:
            arrays = arrays._replace(old=np.zeros(CELLS, np.uint64))
    if entries > _bound(int(tally[GROUPS])) and not tally[OLD_GROUPS]:
        before = int(tally[GROUPS])
        groups = before + before // 2
        while entries > _bound(groups):
            groups += groups // 2
        arrays = arrays._replace(cells=_cells(groups), old=arrays.cells)
        tally[GROUPS], tally[OLD_GROUPS], tally[MOVED] = groups, before, 0
        return with_room(arrays, keys, shards=shards)
    return arrays


def used(shards: Sequence[TableArrays]) -> int:
    """Return how many entries were ever numbered, of all shards."""
    return sum(int(arrays.tally[USED] - arrays.tally[FIRST]) for arrays in shards)


def _bound(groups: int) -> int:
    return groups * CELLS * 3 // 4


def _crammed(groups: int) -> int:
    return groups * CELLS * 15 // 16


def _most_rows(arrays: TableArrays) -> int:
    return int(min(arrays.rows.shape[0], arrays.free_rows.size))


def _cells(groups: int) -> NDArray[np.uint64]:
    # As many groups again for walks that run over the end.
    cells = reserved(2 * groups * CELLS, np.uint64)
    if cells.size < 2 * groups * CELLS:
        raise TableFull(f"the system grants no memory for an index of {groups * CELLS} cells")
    return cells


def _fitting(size: int) -> int:
    """Return how many things of that many bytes one reservation should hold."""
    return max(1, min(_MOST_ENTRIES, _grantable() // size))


@cache
def _grantable() -> int:
    """Bytes for one reservation: the machine's memory, or a 64th where address space is counted."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    strict = Path("/proc/sys/vm/overcommit_memory")
    if limit != resource.RLIM_INFINITY:
        return min(memory, limit) // 64
    if strict.exists() and strict.read_text(encoding="ascii").strip() == "2":
        return memory // 64
    return memory
