"""One live table: its memory and growth, what a step does to it, and what readers get to see.

Nothing here validates; `store` does. Everything handed out is a copy.
"""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store import optim, policy
from sparse_store._table_kernels import (
    ADMITTED,
    CANDIDATES,
    FREE,
    NORMAL,
    ROWS,
    TALLIES,
    UNIFORM,
    USED,
    ZEROS,
    TableArrays,
)
from sparse_store.config import Count, Normal, Table, Uniform
from sparse_store.errors import TableFull

_LEAST_ENTRIES = 64
_MOST_ENTRIES = 2**31 - 2


class Distinct(NamedTuple):
    """A batch's ids of one table, each key once.

    Attributes
    ----------
    keys
        uint64 [u], in order of first occurrence.
    rows
        int32 [u], the row of each, -1 for a key without one.
    inverse
        int32 [n], the number of each occurrence's key.
    """

    keys: NDArray[np.uint64]
    rows: NDArray[np.int32]
    inverse: NDArray[np.int32]


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
        return Block(*(column[order] for column in self))


class Tombs(NamedTuple):
    """Removed keys as columns [n], by rising step; `rows` tells rows from candidates."""

    keys: NDArray[np.uint64]
    steps: NDArray[np.int64]
    rows: NDArray[np.bool_]


class Standing(NamedTuple):
    """What a table is beside its entries; small enough for a manifest."""

    born: int
    horizon: int | None
    forget_horizon: int | None
    admitted: int
    evicted: int
    forgotten: int


class Part(NamedTuple):
    """A table's share of a frozen store: copies, in no order."""

    table: Table
    standing: Standing
    rows: Block
    candidates: Block
    removed: NDArray[np.uint64]
    tombs: Tombs


def still(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, the form in which kernels take what they only read."""
    view = array.view()
    view.flags.writeable = False
    return view


def seed_of(seed: int, name: str) -> int:
    """Return a table's own 64-bit seed, from the store's seed and the table's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def start_of(table: Table) -> tuple[int, float]:
    """Return the kernel's kind and scale of a table's initial values."""
    init = table.start
    if isinstance(init, Normal):
        return NORMAL, init.normal / math.sqrt((2**32 - 1) / 3)
    if isinstance(init, Uniform):
        return UNIFORM, init.uniform / 2**24
    return ZEROS, 0.0


class LiveTable:
    """The entries of one table. A single thread writes; nothing reads meanwhile."""

    __slots__ = (
        "_kind",
        "_scale",
        "_seed",
        "_slot_start",
        "_tombs",
        "arrays",
        "born",
        "config",
        "evicted",
        "forget_horizon",
        "forgotten",
        "horizon",
    )

    def __init__(self, config: Table, *, seed: int, born: int) -> None:
        self.config = config
        self.born = born
        self.horizon: int | None = None
        self.forget_horizon: int | None = None
        self.evicted = 0
        self.forgotten = 0
        self._seed = np.uint64(seed_of(seed, config.name))
        self._kind, self._scale = start_of(config)
        self._slot_start = still(optim.slot_start(config.optimizer, config.dim))
        self._tombs: list[tuple[int, bool, NDArray[np.uint64]]] = []
        self.arrays = TableArrays(
            cells=np.full(2 * _LEAST_ENTRIES, -1, np.int32),
            keys=np.empty(_LEAST_ENTRIES, np.uint64),
            row_of=np.full(_LEAST_ENTRIES, FREE, np.int32),
            counts=np.empty(_LEAST_ENTRIES, np.uint32),
            stamps=np.empty(_LEAST_ENTRIES, np.int64),
            changed=np.empty(_LEAST_ENTRIES, np.int64),
            free_entries=np.empty(_LEAST_ENTRIES, np.int32),
            values=np.empty((_LEAST_ENTRIES, config.dim), np.float32),
            slots=np.empty((_LEAST_ENTRIES, self._slot_start.size), np.float32),
            free_rows=np.empty(_LEAST_ENTRIES, np.int32),
            tally=np.zeros(TALLIES, np.int64),
        )

    @property
    def rows(self) -> int:
        """Rows now."""
        return int(self.arrays.tally[ROWS])

    @property
    def candidates(self) -> int:
        """Counted keys without a row now."""
        return int(self.arrays.tally[CANDIDATES])

    @property
    def standing(self) -> Standing:
        """What goes into a manifest."""
        return Standing(
            self.born,
            self.horizon,
            self.forget_horizon,
            int(self.arrays.tally[ADMITTED]),
            self.evicted,
            self.forgotten,
        )

    # ---- a step

    def resolve(self, ids: NDArray[np.uint64], *, clock: int, step: int) -> Distinct:
        """Count, stamp and where due admit the keys of a batch; ids [n] may repeat."""
        cells = np.full(_power_above(2 * ids.size), -1, np.int32)
        keys = np.empty(ids.size, np.uint64)
        occurrences = np.empty(ids.size, np.int64)
        inverse = np.empty(ids.size, np.int32)
        size = kernels.dedupe(still(ids), cells, keys, occurrences, inverse)
        keys = still(keys[:size].copy())
        rows = np.empty(size, np.int32)
        self._make_room(keys)
        kernels.touch(
            self.arrays,
            self._seed,
            keys,
            still(occurrences[:size]),
            rows,
            clock,
            step,
            policy.needed(self.config.admit),
            self._kind,
            self._scale,
            self._slot_start,
        )
        return Distinct(keys, still(rows), still(inverse))

    def learn(self, distinct: Distinct, sums: NDArray[np.float32]) -> None:
        """Take one optimizer step per key with a row; sums [u, dim]."""
        arrays = self.arrays
        optim.step(self.config.optimizer, arrays.values, arrays.slots, distinct.rows, sums)

    def collect(self, *, clock: int, step: int) -> None:
        """Move the horizons to `clock` and bury what is dead or beyond a bound, as of `step`."""
        evict = self.config.evict
        horizon = None if evict.ttl is None else policy.horizon(clock, evict.ttl)
        if horizon is not None and (self.horizon is None or horizon > self.horizon):
            self._bury(self._older(horizon, rows=True), rows=True, step=step)
        self.horizon = horizon
        if evict.rows is not None and self.rows > evict.rows:
            leave = self.rows - policy.kept(evict.rows)
            self._bury(self._oldest(leave, rows=True), rows=True, step=step)

        admit = self.config.admit
        horizon = policy.horizon(clock, admit.forget) if isinstance(admit, Count) else None
        if horizon is not None and (self.forget_horizon is None or horizon > self.forget_horizon):
            self._bury(self._older(horizon, rows=False), rows=False, step=step)
        self.forget_horizon = horizon
        # A rule that admits at first sight needs no candidates; an earlier rule may have left some.
        bound = admit.candidates if isinstance(admit, Count) and admit.count > 1 else 0
        if self.candidates > bound:
            leave = self.candidates - (policy.kept(bound) if bound else 0)
            self._bury(self._oldest(leave, rows=False), rows=False, step=step)

    # ---- readers

    def lookup(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows [n, dim], zeros where there is none, and where there is one [n]."""
        entries = self._locate(ids)
        rows = np.where(entries >= 0, self.arrays.row_of[entries], -1)
        found = rows >= 0
        values = self.arrays.values[rows]
        values[~found] = 0.0
        return values, found

    def counts(self, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Return the sightings of each id [n]; 0 for an unknown one."""
        entries = self._locate(ids)
        counts = self.arrays.counts[entries]
        counts[entries < 0] = 0
        return counts

    def entry(self, key: int) -> Block | None:
        """Return a key's entry, alone in its block, or None."""
        entries = self._locate(np.array([key], np.uint64))
        if entries[0] < 0:
            return None
        return self._block(entries, rows=bool(self.arrays.row_of[entries[0]] >= 0))

    def all(self, *, rows: bool, since: int | None = None) -> Block:
        """Return rows or candidates touched after step `since` (None: all), in no order."""
        used = self.arrays.tally[USED]
        mask = self._are(rows=rows)
        if since is not None:
            mask &= self.arrays.changed[:used] > since
        return self._block(np.flatnonzero(mask), rows=rows)

    def removed(self, since: int, *, rows_only: bool) -> NDArray[np.uint64]:
        """Return, sorted, keys removed after step `since` and not back.

        `rows_only`: keys that lost a row and have none now; else keys without an entry now.
        """
        keys = [k for step, was, k in self._tombs if step > since and (was or not rows_only)]
        if not keys:
            return np.empty(0, np.uint64)
        distinct = np.unique(np.concatenate(keys))
        entries = self._locate(distinct)
        gone = entries < 0
        if rows_only:
            gone |= self.arrays.row_of[entries] < 0
        return distinct[gone]

    def last_buried(self, key: int) -> int | None:
        """Return the step at which a key last lost its row, as far as is still remembered."""
        for step, was, keys in reversed(self._tombs):
            if was and bool(np.any(keys == np.uint64(key))):
                return step
        return None

    def mark(self, keys: NDArray[np.uint64], *, step: int) -> None:
        """Stamp rows as changed at `step`; a key without one gets a tombstone."""
        keys = np.unique(keys)
        entries = self._locate(keys)
        rows = (entries >= 0) & (self.arrays.row_of[entries] >= 0)
        self.arrays.changed[entries[rows]] = step
        if not rows.all():
            self._tombs.append((step, True, keys[~rows]))

    # ---- tombstones

    @property
    def tombstones(self) -> int:
        """Tombstones still kept."""
        return sum(keys.size for _, _, keys in self._tombs)

    @property
    def tombs(self) -> Tombs:
        """Tombstones still kept, as columns."""
        sizes = [keys.size for _, _, keys in self._tombs]
        steps = np.array([step for step, _, _ in self._tombs], np.int64)
        rows = np.array([was for _, was, _ in self._tombs], np.bool_)
        keys = [keys for _, _, keys in self._tombs]
        return Tombs(
            np.concatenate([np.empty(0, np.uint64), *keys]),
            np.repeat(steps, sizes),
            np.repeat(rows, sizes),
        )

    def forget_tombs(self, upto: int) -> None:
        """Drop tombstones of steps that every reader has seen."""
        self._tombs = [tomb for tomb in self._tombs if tomb[0] > upto]

    # ---- save and load

    def part(self, since: int, upto: int) -> Part:
        """Copy what changed after step `since`; tombstones after step `upto` alone are kept."""
        tombs = self.tombs
        needed = tombs.steps > upto
        return Part(
            self.config,
            self.standing,
            self.all(rows=True, since=since),
            self.all(rows=False, since=since),
            self.removed(since, rows_only=False),
            Tombs(*(column[needed] for column in tombs)),
        )

    def revive(self, standing: Standing, tombs: Tombs) -> None:
        """Take over what a manifest says; before any `insert`."""
        self.born = standing.born
        self.horizon = standing.horizon
        self.forget_horizon = standing.forget_horizon
        self.evicted = standing.evicted
        self.forgotten = standing.forgotten
        self.arrays.tally[ADMITTED] = standing.admitted
        edges = np.flatnonzero((np.diff(tombs.steps) != 0) | (tombs.rows[1:] != tombs.rows[:-1]))
        bounds = [0, *(int(edge) + 1 for edge in edges), tombs.keys.size]
        self._tombs = [
            (int(tombs.steps[low]), bool(tombs.rows[low]), tombs.keys[low:high].copy())
            for low, high in zip(bounds[:-1], bounds[1:], strict=True)
            if low < high
        ]

    def insert(self, block: Block, *, rows: bool) -> int | None:
        """Enter saved rows or candidates; None, or the key that was there already."""
        keys = still(block.keys)
        self._make_room(keys)
        entries = np.empty(keys.size, np.int64)
        bad = kernels.insert(self.arrays, self._seed, keys, rows, entries)
        if bad >= 0:
            return int(keys[bad])
        arrays = self.arrays
        arrays.counts[entries] = block.counts
        arrays.stamps[entries] = block.stamps
        arrays.changed[entries] = block.changed
        if rows:
            numbers = arrays.row_of[entries]
            arrays.values[numbers] = block.values
            arrays.slots[numbers] = block.slots
        return None

    # ---- within

    def _are(self, *, rows: bool) -> NDArray[np.bool_]:
        row_of = self.arrays.row_of[: self.arrays.tally[USED]]
        return row_of >= 0 if rows else row_of == kernels.CANDIDATE

    def _older(self, horizon: int, *, rows: bool) -> NDArray[np.int64]:
        stamps = self.arrays.stamps[: self.arrays.tally[USED]]
        return np.flatnonzero(self._are(rows=rows) & (stamps < horizon))

    def _oldest(self, leave: int, *, rows: bool) -> NDArray[np.int64]:
        entries = np.flatnonzero(self._are(rows=rows))
        arrays = self.arrays
        return entries[policy.oldest(arrays.stamps[entries], arrays.keys[entries], leave)]

    def _bury(self, entries: NDArray[np.int64], *, rows: bool, step: int) -> None:
        if entries.size == 0:
            return
        self._tombs.append((step, rows, self.arrays.keys[entries]))
        kernels.remove(self.arrays, self._seed, still(entries))
        if rows:
            self.evicted += entries.size
        else:
            self.forgotten += entries.size

    def _block(self, entries: NDArray[np.int64], *, rows: bool) -> Block:
        arrays = self.arrays
        if rows:
            numbers = arrays.row_of[entries]
            values, slots = arrays.values[numbers], arrays.slots[numbers]
        else:
            values = slots = np.empty((entries.size, 0), np.float32)
        return Block(
            arrays.keys[entries],
            arrays.counts[entries],
            arrays.stamps[entries],
            arrays.changed[entries],
            values,
            slots,
        )

    def _locate(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        entries = np.empty(ids.size, np.int64)
        kernels.locate(self.arrays, self._seed, still(ids), entries)
        return entries

    def _make_room(self, keys: NDArray[np.uint64]) -> None:
        """Grow until every one of these distinct keys could become an entry with a row."""
        arrays = self.arrays
        live = self.rows + self.candidates
        spare_entries = arrays.keys.size - live
        spare_rows = arrays.values.shape[0] - self.rows
        spare_cells = arrays.cells.size * 7 // 10 - live
        if keys.size <= min(spare_entries, spare_rows, spare_cells):
            return
        entries = self._locate(keys)
        unknown = int(np.count_nonzero(entries < 0))
        rowless = unknown + int(np.count_nonzero(arrays.row_of[entries[entries >= 0]] < 0))
        if live + unknown > _MOST_ENTRIES:
            raise TableFull(
                f"table {self.config.name!r}: {live} entries and {unknown} new ones are more than "
                f"{_MOST_ENTRIES}; bound it by evict.rows and admit.candidates"
            )
        if unknown > spare_entries:
            size = _grown(arrays.keys.size, live + unknown)
            arrays = arrays._replace(
                keys=_longer(arrays.keys, size),
                row_of=_longer(arrays.row_of, size),
                counts=_longer(arrays.counts, size),
                stamps=_longer(arrays.stamps, size),
                changed=_longer(arrays.changed, size),
                free_entries=_longer(arrays.free_entries, size),
            )
        if rowless > spare_rows:
            size = _grown(arrays.values.shape[0], self.rows + rowless)
            arrays = arrays._replace(
                values=_longer(arrays.values, size),
                slots=_longer(arrays.slots, size),
                free_rows=_longer(arrays.free_rows, size),
            )
        if unknown > spare_cells:
            size = arrays.cells.size
            while live + unknown > size * 7 // 10:
                size *= 2
            arrays = arrays._replace(cells=np.full(size, -1, np.int32))
            kernels.reindex(arrays, self._seed)
        self.arrays = arrays


def _power_above(size: int) -> int:
    return 1 << max(3, size.bit_length())


def _grown(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    longer = np.empty((size, *array.shape[1:]), array.dtype)
    longer[: array.shape[0]] = array
    return longer
