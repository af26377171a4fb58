"""One live table: what a step does to it, and what readers get to see.

Nothing here validates; `store` does. Everything handed out is a copy, but `Batch`.
"""

import hashlib
import math
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store import optim, policy
from sparse_store._table_kernels import ADMITTED, CANDIDATES, ROWS
from sparse_store.arrays import Block, born, still, used, with_room
from sparse_store.config import Count, Normal, Table, Uniform
from sparse_store.tombs import Graveyard, Tombs

_ALWAYS: Final = -(2**63)
_NEVER: Final = 2**63 - 1


class Batch:
    """A batch's ids of one table, each key once; its arrays are used again by the next one.

    Shard s numbers its keys, by first occurrence, from `first[s]` up to `end[s]`.

    Attributes
    ----------
    keys
        uint64 [:, 2], by number: the key, and how often it occurs.
    numbers
        int32, by number: the key's row, -1 for a key without one.
    inverse
        int32 [n]: the number of each id's key, ids as the table's inputs have them in turn.
    sums
        float32, flat, dim to a number: gradients summed.
    """

    __slots__ = (
        "_generation",
        "_room",
        "_scratch",
        "end",
        "first",
        "inverse",
        "keys",
        "numbers",
        "sums",
    )

    def __init__(self, shards: int) -> None:
        self.first = [0] * shards
        self.end = [0] * shards
        self._room = -1
        self._generation = 0
        self._scratch: list[NDArray[np.uint64]] = []

    def begin(self, ids: int, dim: int) -> None:
        """Make room for that many ids, and forget the batch before."""
        shards = len(self.first)
        if ids > self._room:
            self._room = max(1024, ids + ids // 4)
            total = self._room * shards
            self.keys = np.empty((total, 2), np.uint64)
            self.numbers = np.empty(total, np.int32)
            self.inverse = np.empty(self._room, np.int32)
            self.sums = np.empty(total * dim, np.float32)
            self.first = [shard * self._room for shard in range(shards)]
            self._scratch = [np.empty(0, np.uint64)] * shards
        self.end = list(self.first)
        cells = 1 << (ids + ids // 8).bit_length()
        self._generation += 1
        if cells > self._scratch[0].size or self._generation == 2**16:
            cells = max(cells, self._scratch[0].size)
            self._scratch = [np.zeros(cells, np.uint64) for _ in range(shards)]
            self._generation = 1

    def dedupe(self, jobs: NDArray[np.int64], seed: np.uint64, shard: int) -> None:
        """Number a shard's keys."""
        end = kernels.dedupe(
            jobs,
            seed,
            np.int64(shard),
            np.int64(len(self.first)),
            np.int64(self.first[shard]),
            self._scratch[shard],
            np.uint64(self._generation),
            self.keys,
            self.inverse,
        )
        self.end[shard] = int(end)


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
    """The entries of one table, in shards. A single thread writes, or one per shard in a step."""

    __slots__ = (
        "_evicted",
        "_forget_horizon",
        "_forgotten",
        "_horizon",
        "_kind",
        "_needed",
        "_scale",
        "_seed",
        "_slot_start",
        "batch",
        "born",
        "config",
        "graves",
        "shards",
    )

    def __init__(self, config: Table, *, seed: int, born_at: int, shards: int = 1) -> None:
        self.config = config
        self.born = born_at
        self.graves = Graveyard()
        self._horizon: int | None = None
        self._forget_horizon: int | None = None
        self._evicted = 0
        self._forgotten = 0
        self._seed = np.uint64(seed_of(seed, config.name))
        self._kind, self._scale = start_of(config)
        self._needed = policy.needed(config.admit)
        self._slot_start = still(optim.slot_start(config.optimizer, config.dim))
        self.shards = born(config.dim + self._slot_start.size, shards=shards)
        self.batch = Batch(shards)

    @property
    def rows(self) -> int:
        """Rows now."""
        return self._tally(ROWS)

    @property
    def candidates(self) -> int:
        """Counted keys without a row now."""
        return self._tally(CANDIDATES)

    @property
    def memory(self) -> NDArray[np.float32]:
        """Rows by number, [n, width]: values, then slots."""
        return self.shards[0].rows

    @property
    def standing(self) -> Standing:
        """What goes into a manifest."""
        return Standing(
            self.born,
            self._horizon,
            self._forget_horizon,
            self._tally(ADMITTED),
            self._evicted,
            self._forgotten,
        )

    # ---- a step

    def collect(self, *, clock: int, step: int) -> None:
        """Move the horizons to `clock` and bury what is dead or beyond a bound, as of `step`."""
        evict = self.config.evict
        horizon = None if evict.ttl is None else policy.horizon(clock, evict.ttl)
        if horizon is not None and (self._horizon is None or horizon > self._horizon):
            self._bury(self._select(rows=True, latest=horizon - 1), rows=True, step=step)
        self._horizon = horizon
        if evict.rows is not None and self.rows > evict.rows:
            leave = self.rows - policy.kept(evict.rows)
            self._bury(self._oldest(leave, rows=True), rows=True, step=step)

        admit = self.config.admit
        horizon = policy.horizon(clock, admit.forget) if isinstance(admit, Count) else None
        if horizon is not None and (self._forget_horizon is None or horizon > self._forget_horizon):
            self._bury(self._select(rows=False, latest=horizon - 1), rows=False, step=step)
        self._forget_horizon = horizon
        # A rule that admits at first sight needs no candidates; an earlier rule may have left some.
        bound = admit.candidates if isinstance(admit, Count) and admit.count > 1 else 0
        if self.candidates > bound:
            leave = self.candidates - policy.kept(bound)
            self._bury(self._oldest(leave, rows=False), rows=False, step=step)

    def resolve(self, jobs: NDArray[np.int64], shard: int, *, clock: int, step: int) -> None:
        """Count, stamp and where due admit a shard's keys of a batch that was begun.

        Raises
        ------
        TableFull
        """
        batch = self.batch
        batch.dedupe(jobs, self._seed, shard)
        first, end = batch.first[shard], batch.end[shard]
        arrays = with_room(self.shards[shard], end - first, shards=len(self.shards))
        self.shards[shard] = arrays
        kernels.touch(
            arrays,
            self._seed,
            batch.keys,
            batch.numbers,
            np.int64(first),
            np.int64(end),
            np.int64(clock),
            np.int64(step),
            np.int64(self._needed),
            np.int64(self._kind),
            np.float64(self._scale),
            self._slot_start,
        )

    def pull(
        self, jobs: NDArray[np.int64], faces: NDArray[np.int64], part: int, parts: int
    ) -> None:
        """Write rows into the faces of a batch's inputs: this part's share of the samples."""
        kernels.pull(
            jobs,
            faces,
            self.memory,
            np.int64(self.config.dim),
            self.batch.numbers,
            self.batch.inverse,
            np.int64(part),
            np.int64(parts),
        )

    def sum(self, jobs: NDArray[np.int64], faces: NDArray[np.int64], shard: int) -> int:
        """Sum the gradients of a shard's keys; return -1, or the number of one gone wild."""
        batch = self.batch
        return int(
            kernels.sum_gradients(
                jobs,
                faces,
                np.int64(self.config.dim),
                batch.numbers,
                batch.inverse,
                np.int64(batch.first[shard]),
                np.int64(batch.end[shard]),
                batch.sums,
                optim.LARGEST_GRADIENT,
            )
        )

    def learn(self, shard: int) -> None:
        """Take one optimizer step per key of a shard with a row, by what was summed."""
        batch = self.batch
        optim.step(
            self.config.optimizer,
            self.memory,
            batch.numbers,
            (batch.first[shard], batch.end[shard]),
            batch.sums,
            self.config.dim,
        )

    # ---- readers

    def read(
        self,
        ids: NDArray[np.uint64],
        shard: int,
        values: NDArray[np.float32],
        found: NDArray[np.bool_],
    ) -> None:
        """Write the rows [n, dim] of a shard's ids, zeros without one, and `found` [n]."""
        kernels.read(
            self.shards[shard],
            self._seed,
            np.int64(shard),
            np.int64(len(self.shards)),
            ids,
            values,
            found,
        )

    def counts(self, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Return the sightings of each id [n]; 0 for an unknown one."""
        entries = self._locate(ids)
        counts: NDArray[np.uint32] = self._records["count"][entries]
        counts[entries < 0] = 0
        return counts

    def entry(self, key: int) -> tuple[bool, Block] | None:
        """Return whether a key has a row, and its entry alone in a block; None if unknown."""
        entries = self._locate(np.array([key], np.uint64))
        if entries[0] < 0:
            return None
        rows = bool(self._records["row"][entries[0]] >= 0)
        return rows, self._block(entries, rows=rows)

    def all(self, *, rows: bool, since: int | None = None) -> Block:
        """Return rows or candidates touched after step `since` (None: all), in no order."""
        after = _ALWAYS if since is None else since
        return self._block(self._select(rows=rows, since=after), rows=rows)

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
        self._records["changed"][entries[rows]] = step
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
        self.shards[0].tally[ADMITTED] = standing.admitted
        self.graves.restore(tombs)

    def insert(self, block: Block, *, rows: bool) -> int | None:
        """Enter saved rows or candidates; None, or the key that was there already."""
        keys = still(np.ascontiguousarray(block.keys))
        entries = np.empty(keys.size, np.int64)
        for shard, arrays in enumerate(self.shards):
            roomy = with_room(arrays, keys.size, shards=len(self.shards))
            self.shards[shard] = roomy
            bad = kernels.insert(
                roomy,
                self._seed,
                np.int64(shard),
                np.int64(len(self.shards)),
                keys,
                rows,
                entries,
            )
            if bad >= 0:
                return int(keys[bad])
        records = self._records
        records["count"][entries] = block.counts
        records["stamp"][entries] = block.stamps
        records["changed"][entries] = block.changed
        if rows:
            numbers = records["row"][entries]
            self.memory[numbers, : self.config.dim] = block.values
            self.memory[numbers, self.config.dim :] = block.slots
        return None

    # ---- within

    @property
    def _records(self) -> NDArray[np.void]:
        return self.shards[0].records

    def _tally(self, place: int) -> int:
        return sum(int(arrays.tally[place]) for arrays in self.shards)

    def _select(
        self, *, rows: bool, since: int = _ALWAYS, latest: int = _NEVER
    ) -> NDArray[np.int64]:
        """Entries with a row, or candidates, changed after `since`, stamped `latest` or before."""
        entries = np.empty(used(self.shards), np.int64)
        found = 0
        for arrays in self.shards:
            found += int(
                kernels.select(arrays, rows, np.int64(since), np.int64(latest), entries[found:])
            )
        return entries[:found]

    def _oldest(self, leave: int, *, rows: bool) -> NDArray[np.int64]:
        entries = self._select(rows=rows)
        records = self._records
        stamps, keys = records["stamp"][entries], records["key"][entries]
        return entries[policy.oldest(stamps, keys, leave)]

    def _bury(self, entries: NDArray[np.int64], *, rows: bool, step: int) -> None:
        if entries.size == 0:
            return
        self.graves.bury(self._records["key"][entries], rows=rows, step=step)
        for arrays in self.shards:
            first, above = arrays.tally[kernels.FIRST], arrays.tally[kernels.USED]
            own = entries[(entries >= first) & (entries < above)]
            kernels.remove(arrays, self._seed, still(own))
        if rows:
            self._evicted += entries.size
        else:
            self._forgotten += entries.size

    def _block(self, entries: NDArray[np.int64], *, rows: bool) -> Block:
        size = entries.size
        dim, rest = (self.config.dim, self._slot_start.size) if rows else (0, 0)
        block = Block(
            np.empty(size, np.uint64),
            np.empty(size, np.uint32),
            np.empty(size, np.int64),
            np.empty(size, np.int64),
            np.empty((size, dim), np.float32),
            np.empty((size, rest), np.float32),
        )
        kernels.copy_out(self.shards[0], entries, *block)
        return block

    def _locate(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Entries of ids, -1 for none: as an index that is the last place, to be masked after."""
        entries = np.empty(ids.size, np.int64)
        for shard, arrays in enumerate(self.shards):
            kernels.locate(
                arrays,
                self._seed,
                np.int64(shard),
                np.int64(len(self.shards)),
                still(ids),
                entries,
            )
        return entries

    def _rows_at(self, entries: NDArray[np.int64]) -> NDArray[np.int32]:
        rows: NDArray[np.int32] = self._records["row"][entries]
        rows[entries < 0] = -1
        return rows
