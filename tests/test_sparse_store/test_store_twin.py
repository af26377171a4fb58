"""The store against its twin: random steps, readers, cuts, restores, merges, repairs."""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparse_store import store as store_module
from sparse_store.config import Adagrad, Always, Count, Evict, Ftrl, Normal, Table, Uniform
from sparse_store.files import merge, rows_of
from sparse_store.store import Keys, SparseStore
from tests.reference.table import TwinStore

SMALL = store_module._SMALL
READERS = ("serving", "checkpoint")
TABLES = [
    Table("plain", dim=11),
    Table(
        "short",
        dim=2,
        init=Uniform(0.5),
        optimizer=Adagrad(rate=0.5, clip=1.0, l2=0.01, decay=0.9, floor=0.05),
        admit=Always(),
        evict=Evict(ttl=50, rows=6),
    ),
    Table(
        "linear",
        dim=1,
        optimizer=Ftrl(alpha=0.5, l1=0.2, l2=0.1),
        admit=Count(3, candidates=6, forget=40),
        evict=Evict(ttl=200),
    ),
    Table(
        "bounded",
        dim=1,
        init=Normal(1.0),
        admit=Count(2, candidates=3, forget=1000),
        evict=Evict(rows=4),
    ),
]
KEYS = st.sampled_from([0, 1, 2, 3, 7, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 10**18, 5, 6])


@st.composite
def asked(draw) -> Keys:
    lists = draw(st.lists(st.lists(KEYS, max_size=4), max_size=5))
    ids = np.array([key for some in lists for key in some], np.uint64)
    splits = np.cumsum([0, *(len(some) for some in lists)]).astype(np.int64)
    weights = None
    length = draw(st.sampled_from([None, None, 4, 5]))
    if length is None and draw(st.booleans()):
        weights = np.random.default_rng(draw(st.integers(0, 9))).normal(size=ids.size)
        weights = np.where(weights < -1, 0, weights).astype(np.float32)
    return Keys(
        table=draw(st.sampled_from([table.name for table in TABLES])),
        ids=ids,
        row_splits=splits,
        weights=weights,
        pool=draw(st.sampled_from(["sum", "mean", "sqrtn"])),
        length=length,
    )


class StoreMachine(RuleBasedStateMachine):
    """Every rule acts on both; the invariant compares all that they hold, bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.names = count()
        self.chain: list[Path] = []

    @initialize(seed=st.integers(0, 3), threads=st.integers(1, 3), crowd=st.booleans())
    def start(self, seed: int, threads: int, crowd: bool) -> None:
        """`crowd`: threads run even for these small batches."""
        self.threads = threads
        store_module._SMALL = 0 if crowd else SMALL
        self.store = SparseStore(TABLES, seed=seed, threads=threads, readers=READERS)
        self.twin = TwinStore(TABLES, seed=seed, readers=READERS)
        self.saved = self.twin

    def teardown(self) -> None:
        shutil.rmtree(self.folder)
        store_module._SMALL = SMALL

    @rule(
        asks=st.lists(asked(), max_size=4),
        pause=st.sampled_from([0, 1, 1, 5, 30, 300]),
        padding=st.integers(0, 2),
        seed=st.integers(0, 2**32 - 1),
        learns=st.sampled_from([True, True, True, False]),
    )
    def step(self, asks: list[Keys], pause: int, padding: int, seed: int, learns: bool) -> None:
        inputs = {f"input{i}": keys for i, keys in enumerate(asks)}
        clock = self.store.clock + pause
        plan = self.store.resolve(inputs, clock=clock)
        self.twin.resolve(inputs, clock)
        random = np.random.default_rng(seed)
        out, grads = {}, {}
        for name, keys in inputs.items():
            wanted = self.twin.pull(keys, keys.row_splits.size - 1 + padding)
            out[name] = np.full(wanted.shape, np.nan, np.float32)
            grads[name] = random.normal(size=wanted.shape).astype(np.float32)
        self.store.pull(plan, out)
        for name, keys in inputs.items():
            wanted = self.twin.pull(keys, out[name].shape[0])
            np.testing.assert_array_equal(bits(out[name]), bits(wanted))
        if learns:
            self.store.push(plan, grads)
            self.twin.push(inputs, grads)
        else:
            self.store.abandon(plan)

    @rule(keys=st.lists(KEYS, max_size=5), table=st.sampled_from(TABLES))
    def look_up(self, keys: list[int], table: Table) -> None:
        ids = np.array(keys, np.uint64)
        values, found = self.store.lookup(table.name, ids)
        rows = self.twin.tables[table.name].rows()
        assert found.tolist() == [key in rows for key in keys]
        wanted = [rows[key].values if key in rows else [0] * table.dim for key in keys]
        np.testing.assert_array_equal(
            bits(values), bits(np.array(wanted, np.float32).reshape(-1, table.dim))
        )
        entries = self.twin.tables[table.name].entries
        counts = [entries[key].count if key in entries else 0 for key in keys]
        assert self.store.count(table.name, ids).tolist() == counts
        for key in keys:
            known = self.store.explain(table.name, key)
            assert known.admitted == (key in rows)
            assert known.count == (entries[key].count if key in entries else 0)

    @rule(reader=st.sampled_from(READERS), acks=st.booleans())
    def read(self, reader: str, acks: bool) -> None:
        change = self.store.peek(reader)
        wanted = self.twin.peek(reader)
        assert (change.since, change.until) == (self.twin.cursors[reader], self.twin.step)
        for name, (rows, removed) in wanted.items():
            found = change.tables[name]
            assert found.keys.tolist() == [*rows]
            values = np.array([entry.values for entry in rows.values()], np.float32)
            np.testing.assert_array_equal(
                bits(found.values), bits(values.reshape(found.values.shape))
            )
            assert found.removed.tolist() == removed
        # The checkpoint's cursor moves with cuts alone, or the chain would have a hole.
        if acks and reader == "serving":
            self.store.ack(reader, change.until)
            self.twin.ack(reader, change.until)

    @rule(torn=st.sampled_from([False, False, True]))
    def cut(self, torn: bool) -> None:
        frozen = self.store.freeze("checkpoint")
        if torn:
            return
        self.chain.append(self.folder / str(next(self.names)))
        frozen.write(self.chain[-1])
        self.saved = self.twin.freeze("checkpoint")
        self.store.ack("checkpoint", frozen.until)
        self.twin.ack("checkpoint", frozen.until)

    @precondition(lambda self: self.chain)
    @rule()
    def crash(self) -> None:
        self.threads = self.threads % 3 + 1
        self.store = SparseStore.load(self.chain, threads=self.threads)
        self.twin = self.saved.freeze("checkpoint")

    @precondition(lambda self: len(self.chain) > 1)
    @rule()
    def compact(self) -> None:
        into = self.folder / str(next(self.names))
        merge(self.chain, into)
        self.chain = [into]

    @precondition(lambda self: self.chain)
    @rule(table=st.sampled_from(TABLES))
    def stream(self, table: Table) -> None:
        keys = [key for keys, _ in rows_of(self.chain, table.name) for key in keys.tolist()]
        assert keys == [*self.saved.tables[table.name].rows()]

    @rule(keys=st.dictionaries(st.sampled_from([t.name for t in TABLES]), st.lists(KEYS)))
    def repair(self, keys: dict[str, list[int]]) -> None:
        self.store.mark_changed(
            {name: np.array(some, np.uint64) for name, some in keys.items()}, reader="serving"
        )
        self.twin.mark_changed(keys)

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "store"):
            compare(self.store, self.twin)


def bits(array: np.ndarray) -> np.ndarray:
    """A float array's bits, so that -0 is not 0."""
    return np.ascontiguousarray(array).view(np.uint32)


def compare(store: SparseStore, twin: TwinStore) -> None:
    """Assert that a store holds what its twin holds."""
    assert store.step == twin.step
    assert store.clock == twin.clock
    assert {reader: store.cursor(reader) for reader in READERS} == twin.cursors
    for name, table in twin.tables.items():
        rows, candidates = table.rows(), table.candidates()
        dump = store.dump(name)
        assert dump.keys.tolist() == [*rows]
        assert dump.counts.tolist() == [entry.count for entry in rows.values()]
        assert dump.stamps.tolist() == [entry.stamp for entry in rows.values()]
        assert dump.changed_at.tolist() == [entry.changed for entry in rows.values()]
        values = np.array([entry.values for entry in rows.values()], np.float32)
        slots = np.array([entry.slots for entry in rows.values()], np.float32)
        np.testing.assert_array_equal(bits(dump.values), bits(values.reshape(dump.values.shape)))
        np.testing.assert_array_equal(bits(dump.slots), bits(slots.reshape(dump.slots.shape)))
        assert dump.candidate_keys.tolist() == [*candidates]
        assert dump.candidate_counts.tolist() == [e.count for e in candidates.values()]
        assert dump.candidate_stamps.tolist() == [e.stamp for e in candidates.values()]
        assert dump.candidate_changed_at.tolist() == [e.changed for e in candidates.values()]
        assert store.metrics()[name] == {
            "rows": len(rows),
            "candidates": len(candidates),
            "tombstones": len(table.removals),
            "admitted": table.admitted,
            "evicted": table.evicted,
            "forgotten": table.forgotten,
        }


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=30)


def test_the_comparison_can_fail() -> None:
    store = SparseStore(TABLES, seed=1, readers=READERS)
    twin = TwinStore(TABLES, seed=1, readers=READERS)
    keys = Keys("plain", np.array([1], np.uint64), np.array([0, 1]))
    store.abandon(store.resolve({"a": keys}, clock=0))
    twin.resolve({"a": keys}, 0)
    compare(store, twin)
    values = twin.tables["plain"].entries[1].values
    assert values is not None
    values[2] = np.nextafter(values[2], np.float32(1))
    with pytest.raises(AssertionError):
        compare(store, twin)
