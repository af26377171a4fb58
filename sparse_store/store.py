"""The face of a sparse store: it validates, and hands on to its tables.

One thread writes. A step is `resolve`, any number of `pull`, then `push` or `abandon`; the
*boundary* is what lies between that and the next `resolve`, and only there may a reader look.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store import optim, policy
from sparse_store._table_kernels import JOB_COUNT, are_finite
from sparse_store.arrays import Block
from sparse_store.batch import (
    Crew,
    Keys,
    Plan,
    checked_ids,
    checked_input,
    faces_of,
    jobs_of,
)
from sparse_store.config import Count, Evict, Ftrl, Table, validated
from sparse_store.errors import (
    BadAck,
    BadInput,
    ClockFell,
    ConfigChanged,
    NonFinite,
    StalePlan,
    StepOpen,
    StoreCorrupt,
    UnknownReader,
    UnknownTable,
)
from sparse_store.files import Chain, Frozen, Header
from sparse_store.table import LiveTable

__all__ = [
    "Change",
    "Dump",
    "Explained",
    "Frozen",
    "Keys",
    "Plan",
    "Rows",
    "SparseStore",
    "warm_up",
]

_SMALL: Final = 4096  # ids

_log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """A table's share of a change: keys rising [n], values [n, dim], keys removed, rising [m]."""

    keys: NDArray[np.uint64]
    values: NDArray[np.float32]
    removed: NDArray[np.uint64]


class Change(NamedTuple):
    """What a reader has not acknowledged: the steps (since, until], by table. Copies."""

    since: int
    until: int
    tables: dict[str, Rows]


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """What a store knows of a key.

    `count` is sightings, `stamp` the clock (ms) and `changed_at` the step of the last one; both
    None for an unknown key. `values`, `slots` and their L2 norm `norm` are None without a row.
    """

    admitted: bool
    reason: str
    count: int
    stamp: int | None
    changed_at: int | None
    norm: float | None
    values: NDArray[np.float32] | None
    slots: NDArray[np.float32] | None


class Dump(NamedTuple):
    """A whole table by rising key. Slots are [n, slots * dim]."""

    keys: NDArray[np.uint64]
    values: NDArray[np.float32]
    slots: NDArray[np.float32]
    counts: NDArray[np.uint32]
    stamps: NDArray[np.int64]
    changed_at: NDArray[np.int64]
    candidate_keys: NDArray[np.uint64]
    candidate_counts: NDArray[np.uint32]
    candidate_stamps: NDArray[np.int64]
    candidate_changed_at: NDArray[np.int64]


class SparseStore:
    """Embedding tables that learn from a stream.

    Parameters
    ----------
    tables
        At least one, each name once.
    seed
        Decides initial values, with the table's name.
    threads
        How many of them run the kernels of a step, the caller's among them. Tables are cut into
        as many ranges of hashes, each one thread's own; no result depends on it.
    readers
        Named cursors. A tombstone is kept until every reader has acknowledged it.

    Examples
    --------
    >>> from sparse_store.config import Adagrad
    >>> store = SparseStore([Table("item", dim=2, optimizer=Adagrad(rate=0.5))], seed=7)
    >>> plan = store.resolve(
    ...     {"item": Keys("item", np.array([3, 9], np.uint64), np.array([0, 2]))}, clock=1000
    ... )
    >>> out = {"item": np.empty((1, 2), np.float32)}
    >>> store.pull(plan, out)
    >>> store.push(plan, {"item": np.ones((1, 2), np.float32)})
    >>> store.rows("item"), store.peek("serving").tables["item"].keys.tolist()
    (2, [3, 9])
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int,
        threads: int = 1,
        readers: Sequence[str] = ("serving", "checkpoint"),
    ) -> None:
        if threads < 1:
            raise BadInput(f"threads is {threads}; give 1 or more")
        if not readers:
            raise BadInput("a store needs a reader; nobody would ever free its tombstones")
        self._seed = seed
        self._crew = Crew(threads)
        self._step = 0
        self._clock = 0
        self._cursors = dict.fromkeys(readers, 0)
        self._latest: Plan | None = None
        self._open = False
        self._live: dict[str, LiveTable] = {}
        for table in _distinct_tables(tables):
            self._live[table.name] = LiveTable(table, seed=seed, born_at=0, shards=threads)

    # ---- what it is

    @property
    def step(self) -> int:
        """Number of the last resolved batch; 0 at birth."""
        return self._step

    @property
    def clock(self) -> int:
        """Event time in ms of the last resolved batch."""
        return self._clock

    @property
    def seed(self) -> int:
        """The seed given at birth."""
        return self._seed

    @property
    def tables(self) -> Mapping[str, Table]:
        """Tables by name."""
        return MappingProxyType({name: live.config for name, live in self._live.items()})

    # ---- a step

    def resolve(self, inputs: Mapping[str, Keys], *, clock: int) -> Plan:
        """Begin a step: move the horizons, then count, stamp and admit the batch's keys.

        Parameters
        ----------
        inputs
            By name of input. Several may name one table; keys are shared among them.
        clock
            Event time in ms, not below the last one.

        Raises
        ------
        ClockFell, UnknownTable, BadInput
            Before anything has moved.
        """
        if self._step and clock < self._clock:
            raise ClockFell(f"clock {clock} ms is below the store's {self._clock}; it only rises")
        checked = {name: checked_input(name, keys) for name, keys in inputs.items()}
        by_table: dict[str, list[str]] = {}
        for name, entry in checked.items():
            by_table.setdefault(self._table(entry.table).config.name, []).append(name)
        jobs = {table: jobs_of(checked, names) for table, names in by_table.items()}
        self._step += 1
        self._clock = clock
        for live in self._live.values():
            live.collect(clock=clock, step=self._step)
        self._latest = Plan(self._step, checked, by_table, jobs)
        self._open = True
        for table, rows in jobs.items():
            live = self._live[table]
            live.batch.begin(int(rows[:, JOB_COUNT].sum()), live.config.dim)

        def resolve(shard: int) -> None:
            for table, rows in jobs.items():
                self._live[table].resolve(rows, shard, clock=clock, step=self._step)

        self._crew.each(resolve, alone=_is_small(self._latest))
        return self._latest

    def pull(self, plan: Plan, out: Mapping[str, NDArray[np.float32]]) -> None:
        """Write the batch's rows, pooled or in sequence, into `out`.

        Parameters
        ----------
        plan
            The latest one; may be pulled again, also after its push.
        out
            For every input a writable C-contiguous float32 array [at least B, dim], or
            [at least B, length, dim]. Samples beyond B become zeros. Other names are let be.

        Raises
        ------
        StalePlan, BadInput
        """
        self._must_be_latest(plan)
        faces = faces_of(plan, out, self._dims, writable=True)

        def pull(part: int) -> None:
            for table, jobs in plan.jobs.items():
                self._live[table].pull(jobs, faces[table], part, self._crew.size)

        self._crew.each(pull, alone=_is_small(plan))

    def push(self, plan: Plan, grads: Mapping[str, NDArray[np.float32]]) -> None:
        """End a step: one optimizer step per distinct key with a row, over all inputs of a table.

        Gradients of a key are summed as float32 in order of occurrence: inputs in the order of
        the mapping given to `resolve`, samples in order, ids in order.

        Parameters
        ----------
        plan
            The latest one, not pushed yet.
        grads
            For every input of the plan, shapes as in `pull`. Samples beyond B are not read.

        Raises
        ------
        StalePlan, BadInput
        NonFinite
            A summed gradient is not finite or beyond 1e15. No table has moved, and the plan
            stays open: push again without the offending sample, or abandon.
        """
        self._must_be_latest(plan)
        if not self._open:
            raise StalePlan(f"the plan of step {plan.step} was pushed or abandoned; resolve again")
        faces = faces_of(plan, grads, self._dims, writable=False)
        wild: list[tuple[str, int]] = []

        def add_up(shard: int) -> None:
            for table, jobs in plan.jobs.items():
                number = self._live[table].sum(jobs, faces[table], shard)
                if number >= 0:
                    wild.append((table, number))

        def learn(shard: int) -> None:
            for table in plan.jobs:
                self._live[table].learn(shard)

        small = _is_small(plan)
        self._crew.each(add_up, alone=small)
        if wild:
            table, number = min(wild, key=self._place_of)
            raise NonFinite(
                f"table {table!r}, key {self._live[table].batch.keys[number, 0]}: the summed gradient "
                f"of step {plan.step} is not within ±{optim.LARGEST_GRADIENT:g}; nothing was moved, "
                "push again without the sample, or abandon"
            )
        self._crew.each(learn, alone=small)
        self._open = False

    def abandon(self, plan: Plan) -> None:
        """End a step without learning from it. Its counts, stamps and admissions stay."""
        self._must_be_latest(plan)
        if not self._open:
            raise StalePlan(f"the plan of step {plan.step} was pushed or abandoned already")
        self._open = False

    # ---- reading

    def lookup(
        self,
        table: str,
        ids: NDArray[np.uint64],
        *,
        out: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows [n, dim], zeros for a key without one, and where there is one [n].

        Changes nothing, creates nothing. The rows are `out` when that is given: float32 [n, dim],
        C-contiguous and writable.

        Raises
        ------
        UnknownTable, BadInput
        """
        live = self._table(table)
        checked = checked_ids(ids, f"lookup in {table!r}")
        shape = (checked.size, live.config.dim)
        if out is None:
            out = np.empty(shape, np.float32)
        flags = out.flags
        if out.dtype != np.float32 or out.shape != shape or not flags.c_contiguous:
            raise BadInput(f"lookup in {table!r}: out is {out.dtype} {out.shape}; give {shape}")
        if not flags.writeable:
            raise BadInput(f"lookup in {table!r}: out can't be written")
        values, found = out, np.empty(checked.size, np.bool_)
        self._crew.each(
            lambda shard: live.read(checked, shard, values, found), alone=checked.size < _SMALL
        )
        return values, found

    def count(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Return sightings of each id since it was first seen or last removed; 0: unknown."""
        return self._table(table).counts(checked_ids(ids, f"count in {table!r}"))

    def rows(self, table: str) -> int:
        """Return how many keys have a row."""
        return self._table(table).rows

    def entries(self, table: str) -> int:
        """Return how many keys are counted: rows and candidates."""
        live = self._table(table)
        return live.rows + live.candidates

    def metrics(self) -> dict[str, dict[str, int]]:
        """Return, by table, rows, candidates and tombstones now; admitted, evicted, forgotten."""
        return {
            name: {
                "rows": live.rows,
                "candidates": live.candidates,
                "tombstones": len(live.graves),
                "admitted": live.standing.admitted,
                "evicted": live.standing.evicted,
                "forgotten": live.standing.forgotten,
            }
            for name, live in self._live.items()
        }

    def explain(self, table: str, key: int) -> Explained:
        """Return what is known of a key, and why it has a row or none."""
        live = self._table(table)
        key &= 2**64 - 1
        found = live.entry(key)
        if found is None:
            buried = live.graves.last(key)
            reason = "never seen, or forgotten" if buried is None else f"removed at step {buried}"
            return Explained(False, reason, 0, None, None, None, None, None)
        with_row, entry = found
        seen, stamp, changed = int(entry.counts[0]), int(entry.stamps[0]), int(entry.changed[0])
        if not with_row:
            wanted = policy.needed(live.config.admit)
            reason = f"candidate: seen {seen} times, admitted at {wanted}"
            return Explained(False, reason, seen, stamp, changed, None, None, None)
        values, slots = entry.values[0], entry.slots[0]
        rule = live.config.admit
        reason = "admitted at first sight"
        if isinstance(rule, Count):
            reason = f"admitted: seen {seen} times, the rule asks for {rule.count}"
        norm = float(np.sqrt(np.sum(values.astype(np.float64) ** 2)))
        return Explained(True, reason, seen, stamp, changed, norm, values, slots)

    def dump(self, table: str) -> Dump:
        """Return a whole table, copied and sorted: for tests and verification."""
        live = self._table(table)
        rows, candidates = live.all(rows=True).by_key(), live.all(rows=False).by_key()
        return Dump(
            rows.keys,
            rows.values,
            rows.slots,
            rows.counts,
            rows.stamps,
            rows.changed,
            candidates.keys,
            candidates.counts,
            candidates.stamps,
            candidates.changed,
        )

    # ---- readers

    def cursor(self, reader: str) -> int:
        """Return the step up to which a reader has acknowledged."""
        if reader not in self._cursors:
            raise UnknownReader(f"no reader {reader!r}; there are {[*self._cursors]}")
        return self._cursors[reader]

    def peek(self, reader: str) -> Change:
        """Return rows touched and keys that lost their row since the reader's cursor.

        A key that was removed and came back is a row, not a removal. Moves nothing.

        Raises
        ------
        UnknownReader, StepOpen
        NonFinite
            A row is not finite; nobody may have it.
        """
        since = self.cursor(reader)
        self._must_be_boundary("peek")
        tables = {}
        for name, live in self._live.items():
            rows = live.all(rows=True, since=since).by_key()
            _refuse_wild(name, rows)
            tables[name] = Rows(rows.keys, rows.values, live.removed(since, rows_only=True))
        return Change(since, self._step, tables)

    def ack(self, reader: str, until: int) -> None:
        """Move a reader's cursor up to `until`; tombstones that all readers passed are dropped.

        Raises
        ------
        UnknownReader
        BadAck
            `until` is below the cursor or above the store's step.
        """
        cursor = self.cursor(reader)
        if not cursor <= until <= self._step:
            raise BadAck(
                f"reader {reader!r} can't acknowledge step {until}: its cursor is {cursor}, the "
                f"store is at {self._step}"
            )
        if self._open and until == self._step:
            raise StepOpen(f"step {until} is not over; push or abandon its plan before ack")
        self._cursors[reader] = until
        for live in self._live.values():
            live.graves.forget(min(self._cursors.values()))

    def mark_changed(self, keys: Mapping[str, NDArray[np.uint64]], *, reader: str) -> None:
        """Repair after a restore: let `reader` see these keys again, whatever they are now.

        A key with a row is stamped changed at the current step; one without gets a tombstone of
        that step. Cursors at the step, the reader's and others', go back by one, so that the new
        stamps also reach the next freeze.

        Raises
        ------
        UnknownReader, UnknownTable, StepOpen, BadInput
            Before anything has changed.
        """
        self.cursor(reader)
        self._must_be_boundary("mark_changed")
        checked = {
            name: checked_ids(ids, f"mark_changed in {name!r}") for name, ids in keys.items()
        }
        live = {name: self._table(name) for name in checked}
        for name, ids in checked.items():
            if ids.size:
                live[name].mark(ids, step=self._step)
        if not any(ids.size for ids in checked.values()):
            return
        for name, cursor in self._cursors.items():
            self._cursors[name] = min(cursor, self._step - 1)

    # ---- save and load

    def freeze(self, reader: str) -> Frozen:
        """Copy every entry touched and every key removed since the reader's cursor.

        Takes time by what changed (and one pass over a column of steps). The result is free of
        the store: write it in any thread, and `ack(reader, frozen.until)` once it is durable.

        Raises
        ------
        UnknownReader, StepOpen
        NonFinite
            A row is not finite; nobody may have it.
        """
        since = self.cursor(reader)
        self._must_be_boundary("freeze")
        # Whoever loads this holds it, so for that store the reader has seen it.
        cursors = {**self._cursors, reader: self._step}
        header = Header(self._seed, self._step, self._clock, cursors)
        seen = min(cursors.values())
        parts = [live.part(since, seen) for live in self._live.values()]
        for part in parts:
            _refuse_wild(part.table.name, part.rows)
        return Frozen(header, parts, since=since)

    @classmethod
    def load(
        cls,
        folders: Sequence[Path],
        *,
        tables: Sequence[Table] | None = None,
        seed: int | None = None,
        threads: int = 1,
        drop: Iterable[str] = (),
    ) -> "SparseStore":
        """Build a store from a base and its increments, in order.

        Parameters
        ----------
        folders
            Each written by `Frozen.write` or `merge`.
        tables
            The tables wanted. None: those saved. A new one starts empty. Changed rates, clips,
            admission and eviction are taken and logged.
        seed
            Must be the one saved. None: that one.
        threads
            As for a new store.
        drop
            Saved tables to leave behind. One that is also in `tables` starts again, empty.

        Raises
        ------
        ConfigChanged
            A saved table is missing from `tables` and `drop`, or its dim, kind of optimizer,
            initial values or seed differ.
        ChainBroken, StoreCorrupt
        """
        chain = Chain(folders)
        header = chain.header
        if seed is not None and seed != header.seed:
            raise ConfigChanged(f"seed was {header.seed} and is {seed}; initial values would jump")
        wanted = [*chain.tables.values()] if tables is None else [*tables]
        left = set(drop)
        _refuse_changes(chain.tables, {table.name: table for table in wanted}, left)
        wanted = [table for table in wanted if tables is not None or table.name not in left]
        store = cls(wanted, seed=header.seed, threads=threads, readers=[*header.cursors])
        store._step, store._clock = header.step, header.clock
        store._cursors = dict(header.cursors)
        for name, live in store._live.items():
            if name not in chain.tables or name in left:
                live.born = header.step
                continue
            live.revive(chain.standing(name), chain.tombs(name))
            for with_rows, block in chain.entries(name):
                twice = live.insert(block, rows=with_rows)
                if twice is not None:
                    raise StoreCorrupt(f"table {name!r}: key {twice} was saved twice")
        return store

    # ---- within

    @property
    def _dims(self) -> dict[str, int]:
        return {name: live.config.dim for name, live in self._live.items()}

    def _table(self, name: str) -> LiveTable:
        live = self._live.get(name)
        if live is None:
            raise UnknownTable(f"no table {name!r}; there are {[*self._live]}")
        return live

    def _place_of(self, found: tuple[str, int]) -> tuple[int, int]:
        """Where a table stands, and where a key of its batch came first: the same for any shards."""
        table, number = found
        inverse = self._live[table].batch.inverse
        return [*self._live].index(table), int(np.argmax(inverse == number))

    def _must_be_latest(self, plan: Plan) -> None:
        if plan is not self._latest:
            raise StalePlan(
                f"the plan of step {plan.step} is not this store's latest; its rows may have moved"
            )

    def _must_be_boundary(self, what: str) -> None:
        if self._open:
            raise StepOpen(
                f"{what} needs a step boundary, and step {self._step} is resolved but not pushed; "
                "push or abandon its plan first"
            )


def _is_small(plan: Plan) -> bool:
    """Say whether a batch is so small that waking threads would take longer than its work."""
    return sum(int(jobs[:, JOB_COUNT].sum()) for jobs in plan.jobs.values()) < _SMALL


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, by running a small store through its life.

    Takes seconds when nothing is cached and about a tenth of one when all is. Without it the
    first steps of a process pay.
    """
    once, never = (
        Table("once", dim=1, admit=Count(1), evict=Evict(ttl=1)),
        Table("never", dim=1, optimizer=Ftrl()),
    )
    store = SparseStore([once, never], seed=0)
    ids = np.arange(100, dtype=np.uint64)
    splits = np.array([0, 100], np.int64)
    inputs = {"once": Keys("once", ids, splits), "never": Keys("never", ids, splits, length=100)}
    plan = store.resolve(inputs, clock=0)
    out = {"once": np.empty((1, 1), np.float32), "never": np.empty((1, 100, 1), np.float32)}
    store.pull(plan, out)
    store.push(plan, out)
    store.lookup("once", ids)
    store.count("once", ids)
    store.peek("serving")
    dump = store.dump("once")
    saved = Block(dump.keys, dump.counts, dump.stamps, dump.changed_at, dump.values, dump.slots)
    LiveTable(once, seed=0, born_at=0).insert(saved, rows=True)
    store.resolve({}, clock=1000)


def _distinct_tables(tables: Sequence[Table]) -> list[Table]:
    checked = [validated(table) for table in tables]
    names = [table.name for table in checked]
    if not names:
        raise BadInput("a store needs at least one table")
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"table {name!r} is given {names.count(name)} times")
    return checked


def _refuse_wild(name: str, rows: Block) -> None:
    if are_finite(rows.values) and are_finite(rows.slots):
        return
    wild = ~(np.isfinite(rows.values).all(axis=1) & np.isfinite(rows.slots).all(axis=1))
    raise NonFinite(
        f"table {name!r}: the row of key {rows.keys[wild][0]} is not finite, nor are "
        f"{int(wild.sum()) - 1} others; it may neither be published nor saved. Go back to the "
        "last cut with lower rates or a clip"
    )


def _refuse_changes(
    saved: Mapping[str, Table], wanted: Mapping[str, Table], drop: set[str]
) -> None:
    unknown = drop - saved.keys()
    if unknown:
        raise ConfigChanged(f"drop names {sorted(unknown)}, and the saved tables are {[*saved]}")
    for name, old in saved.items():
        if name in drop:
            continue
        if name not in wanted:
            raise ConfigChanged(
                f"table {name!r} was saved and is no longer configured; configure it, or drop it"
            )
        new = wanted[name]
        fixed = {
            "dim": (old.dim, new.dim),
            "optimizer": (optim.kind(old.optimizer), optim.kind(new.optimizer)),
            "init": (old.start, new.start),
        }
        for field, (before, after) in fixed.items():
            if before != after:
                raise ConfigChanged(
                    f"table {name!r}: {field} was {before} and is {after}; saved rows don't fit. "
                    "Set it back, or drop the table to start it again"
                )
        if old != new:
            _log.info("table %r: takes over %s, was %s", name, new, old)
