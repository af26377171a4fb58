"""Kernels of a table: golden values, the index against a dict, pooling and its transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_store import _table_kernels as kernels
from sparse_store.arrays import born, has_room, still, with_room
from sparse_store.config import Normal, Table, Uniform, Zeros
from sparse_store.table import seed_of, start_of
from tests.reference import table as twin

SEED = np.uint64(99)
EDGES = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
ANY_KEY = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))


def row_of(table: Table, seed: int, key: int) -> np.ndarray:
    kind, scale = start_of(table)
    out = np.full(table.dim, np.nan, np.float32)
    kernels.initial(
        np.uint64(seed_of(seed, table.name)), np.uint64(key), np.int64(kind), np.float64(scale), out
    )
    return out


def test_mix_is_splitmix64() -> None:
    """The first numbers that the published generator gives from seed 0."""
    golden = 0x9E3779B97F4A7C15
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = [kernels.mix(np.uint64(golden * i % 2**64)) for i in (1, 2, 3)]
    assert [int(x) for x in found] == wanted


@given(ANY_KEY)
def test_mix_equals_its_twin(x: int) -> None:
    assert int(kernels.mix(np.uint64(x))) == twin.mix(x)


@pytest.mark.parametrize(
    ("init", "key", "bits"),
    [
        (Normal(0.01), 0, [0xBC90A9BE, 0xBCBA19A7, 0x3C353F02]),
        (Normal(0.01), 1, [0xBCA63994, 0xBB6BD607, 0x3C8A8551]),
        (Normal(0.01), 2**64 - 1, [0x3C54C1A7, 0xBBEE1AE3, 0xBC9FDA67]),
        (Uniform(0.05), 0, [0xBCBC05D5, 0xBD1C07F1, 0x3C82CEEB]),
        (Uniform(0.05), 1, [0xBCF3B86B, 0xBCF95B0B, 0x3D209FCE]),
        (Zeros(), 1, [0, 0, 0]),
    ],
)
def test_initial_values_are_golden(init: Normal, key: int, bits: list[int]) -> None:
    """A saved candidate gets its row after an upgrade: the bits may never change."""
    assert seed_of(7, "item") == 0x489FDB74D9831277
    row = row_of(Table("item", dim=3, init=init), 7, key)
    assert row.view(np.uint32).tolist() == bits


@given(ANY_KEY, st.integers(0, 5), st.sampled_from([Normal(0.3), Uniform(2.0), Zeros()]))
def test_initial_values_equal_their_twin(key: int, seed: int, init: Normal) -> None:
    table = Table("t", dim=5, init=init)
    wanted = np.array(twin.initial(table, twin.seed_of(seed, "t"), key), np.float32)
    np.testing.assert_array_equal(row_of(table, seed, key).view("u4"), wanted.view("u4"))


def test_initial_values_have_the_promised_spread() -> None:
    normal = np.concatenate(
        [row_of(Table("t", dim=64, init=Normal(0.5)), 1, k) for k in range(999)]
    )
    assert abs(float(normal.mean())) < 0.01
    assert float(normal.std()) == pytest.approx(0.5, rel=0.01)
    assert float(np.abs(normal).max()) < 0.5 * 2 * math.sqrt(3)
    flat = np.concatenate([row_of(Table("t", dim=64, init=Uniform(0.5)), 1, k) for k in range(999)])
    assert float(np.abs(flat).max()) < 0.5
    assert float(flat.std()) == pytest.approx(0.5 / math.sqrt(3), rel=0.01)
    assert len(np.unique(flat)) > 0.99 * flat.size


def test_tables_elements_and_seeds_draw_apart() -> None:
    rows = [
        row_of(Table(n, dim=4, init=Normal(1.0)), s, k)
        for n in "ab"
        for s in (1, 2)
        for k in (3, 4)
    ]
    assert len({float(x) for row in rows for x in row}) == 8 * 4


class Index:
    """The index alone, over memory that grows as a table's does."""

    def __init__(self) -> None:
        self.arrays = born(1, 1)

    def insert(self, keys: list[int]) -> None:
        array = still(np.array(keys, np.uint64))
        if not has_room(self.arrays, len(keys)):
            self.arrays = with_room(self.arrays, SEED, entries=len(keys), rows=len(keys))
        entries = np.empty(len(keys), np.int64)
        assert kernels.insert(self.arrays, SEED, array, True, entries) == -1
        self.arrays.stamps[entries] = [key % 1000 for key in keys]

    def locate(self, keys: list[int]) -> np.ndarray:
        entries = np.empty(len(keys), np.int64)
        kernels.locate(self.arrays, SEED, still(np.array(keys, np.uint64)), entries)
        return entries

    def remove(self, keys: list[int]) -> None:
        kernels.remove(self.arrays, SEED, still(self.locate(keys)))

    def equals(self, wanted: set[int], asked: list[int]) -> None:
        entries = self.locate(asked)
        assert [entry >= 0 for entry in entries] == [key in wanted for key in asked]
        for key, entry in zip(asked, entries.tolist(), strict=True):
            if entry >= 0:
                assert self.arrays.stamps[entry] == key % 1000
        assert np.count_nonzero(self.arrays.cells >= 0) == len(wanted)


@given(st.lists(st.tuples(st.booleans(), st.sets(ANY_KEY | st.integers(0, 40), max_size=60))))
def test_the_index_equals_a_set(turns: list[tuple[bool, set[int]]]) -> None:
    index, wanted, seen = Index(), set(), set(EDGES)
    for inserts, keys in turns:
        seen |= keys
        if inserts:
            index.insert(sorted(keys - wanted))
            wanted |= keys
        else:
            index.remove(sorted(keys & wanted))
            wanted -= keys
        index.equals(wanted, sorted(seen))


def test_removal_keeps_walks_whole_round_the_end_of_the_index() -> None:
    """Keys that all start at the last cell: every removal must shift across the wrap."""
    cells = born(1, 1).cells.size
    keys = [k for k in range(20_000) if twin.mix(k ^ int(SEED)) % cells == cells - 1][:12]
    assert len(keys) == 12
    for gone in keys:
        index = Index()
        index.insert(keys)
        index.remove([gone])
        index.equals(set(keys) - {gone}, keys)


@pytest.mark.parametrize(
    "size", [63, 64, 65, 88, 89, 90, 127, 128, 129, 179, 180, 1023, 1024, 1025]
)
def test_around_growth(size: int) -> None:
    """64 entries and 89 of 128 cells (70 %) are the first limits; then they double."""
    index = Index()
    for low in range(0, size, 7):
        index.insert([k * 2**40 for k in range(low, min(low + 7, size))])
    keys = [k * 2**40 for k in range(size + 5)]
    index.equals(set(keys[:size]), keys)
    assert size <= index.arrays.cells.size * 7 // 10
    assert index.arrays.keys.size < 2 * max(size, 64)


def test_memory_is_flat_under_churn() -> None:
    """Removed entries and rows are used again before anything grows."""
    index = Index()
    for turn in range(50):
        keys = list(range(turn * 60, turn * 60 + 60))
        index.insert(keys)
        index.remove(keys)
    assert index.arrays.keys.size == 64
    assert index.arrays.values.shape[0] == 64
    assert index.arrays.tally[kernels.ROWS] == 0


def test_a_key_entered_twice_is_named() -> None:
    index = Index()
    index.insert([5])
    entries = np.empty(3, np.int64)
    keys = still(np.array([4, 5, 6], np.uint64))
    assert kernels.insert(index.arrays, SEED, keys, True, entries) == 1


@given(st.lists(ANY_KEY | st.integers(0, 3), max_size=100))
def test_dedupe_numbers_by_first_occurrence(ids: list[int]) -> None:
    n = len(ids)
    cells = np.full(1 << max(3, (2 * n).bit_length()), -1, np.int32)
    distinct, occurrences = np.empty(n, np.uint64), np.empty(n, np.int64)
    inverse = np.empty(n, np.int32)
    size = kernels.dedupe(still(np.array(ids, np.uint64)), cells, distinct, occurrences, inverse)
    wanted = list(dict.fromkeys(ids))
    assert distinct[:size].tolist() == wanted
    assert occurrences[:size].tolist() == [ids.count(key) for key in wanted]
    assert inverse.tolist() == [wanted.index(key) for key in ids]


@pytest.mark.parametrize("mode", [kernels.SUM, kernels.MEAN, kernels.SQRTN])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_way_back_is_the_transpose(mode: int, weighted: bool) -> None:
    """<pool(v), g> = <v, pool_back(g)> for any v and g: what Keras' gradient of it would be."""
    random = np.random.default_rng(mode)
    splits = still(np.array([0, 3, 3, 7, 9], np.int64))
    inverse = still(random.integers(0, 5, 9).astype(np.int32))
    rows = still(np.array([2, -1, 0, 1, 3], np.int32))
    weights = still(random.random(9).astype(np.float32) if weighted else np.empty(0, np.float32))
    values = still(random.normal(size=(4, 3)).astype(np.float32))
    grads = still(random.normal(size=(4, 3)).astype(np.float32))
    out, sums = np.empty((4, 3), np.float32), np.zeros((5, 3), np.float32)
    kernels.pool(values, rows, inverse, splits, weights, weighted, np.int64(mode), out)
    kernels.pool_back(rows, inverse, splits, weights, weighted, np.int64(mode), grads, sums)
    with_row = rows >= 0
    assert float((out * grads).sum()) == pytest.approx(
        float((values[rows[with_row]] * sums[with_row]).sum()), rel=1e-5
    )
    assert not sums[~with_row].any()
