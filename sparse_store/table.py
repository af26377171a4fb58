"""One live table: what a step does to it, and what readers get to see.

Nothing here validates; `store` does. Everything handed out is a copy.
"""

import hashlib
import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store import optim, policy
from sparse_store._table_kernels import ADMITTED, CANDIDATE, CANDIDATES, ROWS, USED
from sparse_store.arrays import Block, born, has_room, still, with_room
from sparse_store.config import Count, Normal, Table, Uniform
from sparse_store.tombs import Graveyard, Tombs


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


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a table is beside its entries; small enough for a manifest.

    `born` is the step at which it began, 0 or later; with its name that tells it from another
    table. `horizon` and `forget_horizon` (ms) are those that entries were last held against. The
    rest are totals since birth.
    """

    born: int
    horizon: int | None
    forget_horizon: int | None
    admitted: int
    evicted: int
    forgotten: int


class Part(NamedTuple):
    """A table's share of a frozen store: copies; entries in no order, removed keys sorted."""

    table: Table
    standing: Standing
    rows: Block
    candidates: Block
    removed: NDArray[np.uint64]
    tombs: Tombs


def seed_of(seed: int, name: str) -> int:
    """Return a table's own 64-bit seed, from the store's seed and the table's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def start_of(table: Table) -> tuple[int, float]:
    """Return the kernel's kind and scale of a table's initial values."""
    init = table.start
    if isinstance(init, Normal):
        return kernels.NORMAL, init.normal / math.sqrt((2**32 - 1) / 3)
    if isinstance(init, Uniform):
        return kernels.UNIFORM, init.uniform / 2**24
    return kernels.ZEROS, 0.0


class LiveTable:
    """The entries of one table. A single thread writes; nothing reads meanwhile."""

    __slots__ = (
        "_evicted",
        "_forget_horizon",
        "_forgotten",
        "_horizon",
        "_kind",
        "_scale",
        "_seed",
        "_slot_start",
        "arrays",
        "born",
        "config",
        "graves",
    )

    def __init__(self, config: Table, *, seed: int, born_at: int) -> None:
        self.config = config
        self.born = born_at
        self.graves = Graveyard()
        self._horizon: int | None = None
        self._forget_horizon: int | None = None
        self._evicted = 0
        self._forgotten = 0
        self._seed = np.uint64(seed_of(seed, config.name))
        self._kind, self._scale = start_of(config)
        self._slot_start = still(optim.slot_start(config.optimizer, config.dim))
        self.arrays = born(config.dim, self._slot_start.size)

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
            self._horizon,
            self._forget_horizon,
            int(self.arrays.tally[ADMITTED]),
            self._evicted,
            self._forgotten,
        )

    # ---- a step

    def collect(self, *, clock: int, step: int) -> None:
        """Move the horizons to `clock` and bury what is dead or beyond a bound, as of `step`."""
        evict = self.config.evict
        horizon = None if evict.ttl is None else policy.horizon(clock, evict.ttl)
        if horizon is not None and (self._horizon is None or horizon > self._horizon):
            self._bury(self._older(horizon, rows=True), rows=True, step=step)
        self._horizon = horizon
        if evict.rows is not None and self.rows > evict.rows:
            leave = self.rows - policy.kept(evict.rows)
            self._bury(self._oldest(leave, rows=True), rows=True, step=step)

        admit = self.config.admit
        horizon = policy.horizon(clock, admit.forget) if isinstance(admit, Count) else None
        if horizon is not None and (self._forget_horizon is None or horizon > self._forget_horizon):
            self._bury(self._older(horizon, rows=False), rows=False, step=step)
        self._forget_horizon = horizon
        # A rule that admits at first sight needs no candidates; an earlier rule may have left some.
        bound = admit.candidates if isinstance(admit, Count) and admit.count > 1 else 0
        if self.candidates > bound:
            leave = self.candidates - policy.kept(bound)
            self._bury(self._oldest(leave, rows=False), rows=False, step=step)

    def resolve(self, ids: NDArray[np.uint64], *, clock: int, step: int) -> Distinct:
        """Count, stamp and where due admit the keys of a batch; ids [n] may repeat.

        Raises
        ------
        TableFull
        """
        cells = np.full(1 << max(3, (2 * ids.size).bit_length()), -1, np.int32)
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
            np.int64(clock),
            np.int64(step),
            np.int64(policy.needed(self.config.admit)),
            np.int64(self._kind),
            np.float64(self._scale),
            self._slot_start,
        )
        return Distinct(keys, still(rows), still(inverse))

    def learn(self, distinct: Distinct, sums: NDArray[np.float32]) -> None:
        """Take one optimizer step per key with a row; sums [u, dim]."""
        arrays = self.arrays
        optim.step(self.config.optimizer, arrays.values, arrays.slots, distinct.rows, sums)

    # ---- readers

    def lookup(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows [n, dim], zeros where there is none, and where there is one [n]."""
        rows = self._rows_at(self._locate(ids))
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

    def entry(self, key: int) -> tuple[bool, Block] | None:
        """Return whether a key has a row, and its entry alone in a block; None if unknown."""
        entries = self._locate(np.array([key], np.uint64))
        if entries[0] < 0:
            return None
        rows = bool(self.arrays.row_of[entries[0]] >= 0)
        return rows, self._block(entries, rows=rows)

    def all(self, *, rows: bool, since: int | None = None) -> Block:
        """Return rows or candidates touched after step `since` (None: all), in no order."""
        mask = self._are(rows=rows)
        if since is not None:
            mask &= self.arrays.changed[: mask.size] > since
        return self._block(np.flatnonzero(mask), rows=rows)

    def removed(self, since: int, *, rows_only: bool) -> NDArray[np.uint64]:
        """Return, sorted, keys removed after step `since` and not back.

        `rows_only`: keys that lost a row and have none now; else keys without an entry now.
        """
        keys = self.graves.after(since, rows_only=rows_only)
        entries = self._locate(keys)
        return keys[self._rows_at(entries) < 0] if rows_only else keys[entries < 0]

    def mark(self, keys: NDArray[np.uint64], *, step: int) -> None:
        """Stamp rows as changed at `step`; a key without one gets a tombstone. May repeat."""
        keys = np.unique(keys)
        entries = self._locate(keys)
        rows = self._rows_at(entries) >= 0
        self.arrays.changed[entries[rows]] = step
        if not rows.all():
            self.graves.bury(keys[~rows], rows=True, step=step)

    # ---- save and load

    def part(self, since: int, seen: int) -> Part:
        """Copy what was touched after step `since`, and tombstones of steps after `seen`."""
        return Part(
            self.config,
            self.standing,
            self.all(rows=True, since=since),
            self.all(rows=False, since=since),
            self.removed(since, rows_only=False),
            self.graves.columns().after(seen),
        )

    def revive(self, standing: Standing, tombs: Tombs) -> None:
        """Take over what a table was beside its entries."""
        self.born = standing.born
        self._horizon = standing.horizon
        self._forget_horizon = standing.forget_horizon
        self._evicted = standing.evicted
        self._forgotten = standing.forgotten
        self.arrays.tally[ADMITTED] = standing.admitted
        self.graves.restore(tombs)

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
        return row_of >= 0 if rows else row_of == CANDIDATE

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
        self.graves.bury(self.arrays.keys[entries], rows=rows, step=step)
        kernels.remove(self.arrays, self._seed, still(entries))
        if rows:
            self._evicted += entries.size
        else:
            self._forgotten += entries.size

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
        """Entries of ids, -1 for none: as an index that is the last place, to be masked after."""
        entries = np.empty(ids.size, np.int64)
        kernels.locate(self.arrays, self._seed, still(ids), entries)
        return entries

    def _rows_at(self, entries: NDArray[np.int64]) -> NDArray[np.int32]:
        rows = self.arrays.row_of[entries]
        rows[entries < 0] = -1
        return rows

    def _make_room(self, keys: NDArray[np.uint64]) -> None:
        """Grow until every one of these distinct keys could become an entry with a row."""
        if has_room(self.arrays, keys.size):
            return
        entries = self._locate(keys)
        self.arrays = with_room(
            self.arrays,
            self._seed,
            entries=int(np.count_nonzero(entries < 0)),
            rows=int(np.count_nonzero(self._rows_at(entries) < 0)),
        )
