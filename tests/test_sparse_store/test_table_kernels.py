"""Kernels of a table: golden values, the index against a dict, pooling and its transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_store import _table_kernels as kernels
from sparse_store.arrays import address_of, born, still, used, with_room
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
    """The index alone, over memory that grows as a table's does, in some shards."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = born(2, shards=shards)

    def insert(self, keys: list[int]) -> None:
        array = still(np.array(keys, np.uint64))
        entries = np.empty(len(keys), np.int64)
        for shard, arrays in enumerate(self.shards):
            self.shards[shard] = with_room(arrays, len(keys), shards=len(self.shards))
            rest = (np.int64(shard), np.int64(len(self.shards)), array, True, entries)
            assert kernels.insert(self.shards[shard], SEED, *rest) == -1
        self.records["stamp"][entries] = [key % 1000 for key in keys]

    @property
    def records(self) -> np.ndarray:
        return self.shards[0].records

    def locate(self, keys: list[int]) -> np.ndarray:
        entries = np.empty(len(keys), np.int64)
        array = still(np.array(keys, np.uint64))
        for shard, arrays in enumerate(self.shards):
            rest = (np.int64(shard), np.int64(len(self.shards)), array, entries)
            kernels.locate(arrays, SEED, *rest)
        return entries

    def remove(self, keys: list[int]) -> None:
        entries = self.locate(keys)
        for arrays in self.shards:
            first, above = arrays.tally[kernels.FIRST], arrays.tally[kernels.USED]
            own = entries[(entries >= first) & (entries < above)]
            kernels.remove(arrays, SEED, still(own))

    def equals(self, wanted: set[int], asked: list[int]) -> None:
        entries = self.locate(asked)
        assert [entry >= 0 for entry in entries] == [key in wanted for key in asked]
        for key, entry in zip(asked, entries.tolist(), strict=True):
            if entry >= 0:
                assert self.records["stamp"][entry] == key % 1000
        assert self.cells() == len(wanted)

    def cells(self) -> int:
        """Cells in use, in the index and in the one that it grows out of."""
        found = 0
        for arrays in self.shards:
            groups, old = int(arrays.tally[kernels.GROUPS]), int(arrays.tally[kernels.OLD_GROUPS])
            found += np.count_nonzero(arrays.cells[: 2 * groups * kernels.CELLS])
            if old:
                moved = int(arrays.tally[kernels.MOVED])
                found += np.count_nonzero(
                    arrays.old[moved * kernels.CELLS : 2 * old * kernels.CELLS]
                )
        return found


@given(
    st.lists(st.tuples(st.booleans(), st.sets(ANY_KEY | st.integers(0, 40), max_size=60))),
    st.integers(1, 3),
)
def test_the_index_equals_a_set(turns: list[tuple[bool, set[int]]], shards: int) -> None:
    index, wanted, seen = Index(shards), set(), set(EDGES)
    for inserts, keys in turns:
        seen |= keys
        if inserts:
            index.insert(sorted(keys - wanted))
            wanted |= keys
        else:
            index.remove(sorted(keys & wanted))
            wanted -= keys
        index.equals(wanted, sorted(seen))


def unmix(x: int) -> int:
    """The key whose hash is x: splitmix64's finaliser backwards."""
    mask = 2**64 - 1
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return x ^ (x >> 30) ^ (x >> 60)


def at_home(half: int, size: int) -> list[int]:
    """Keys whose hashes share their upper half: hostile ids, or bad luck."""
    keys = [unmix(half << 32 | low * 2654435761 % 2**32) ^ int(SEED) for low in range(size)]
    assert {twin.mix(key ^ int(SEED)) >> 32 for key in keys} == {half}
    return keys


@pytest.mark.parametrize("half", [0, 2**31, 2**32 - 1])
def test_removal_keeps_walks_whole(half: int) -> None:
    """Keys of one home fill groups behind it, beyond the last home too: every one may go."""
    keys = at_home(half, 30)
    neighbours = at_home(min(half + 2**28, 2**32 - 1) - 5, 12)
    for gone in keys:
        index = Index()
        index.insert(keys + neighbours)
        index.remove([gone])
        index.equals({*keys, *neighbours} - {gone}, keys + neighbours)
    index = Index()
    index.insert(keys + neighbours)
    left = {*keys, *neighbours}
    for gone in sorted(left):
        index.remove([gone])
        left.discard(gone)
        index.equals(left, keys + neighbours)


def test_keys_of_one_hash_are_none_the_less_kept() -> None:
    """No key may be lost below capacity, however its hash falls (hostile ids of one home)."""
    index = Index()
    keys = at_home(2**32 - 1, 3000)
    for low in range(0, len(keys), 100):
        index.insert(keys[low : low + 100])
    index.equals(set(keys), keys)


@pytest.mark.parametrize("size", [95, 96, 97, 143, 144, 145, 1023, 1024, 1025])
def test_around_growth(size: int) -> None:
    """96 of 128 cells (three quarters) are the first limit; then an index grows by half."""
    index = Index()
    for low in range(0, size, 7):
        index.insert([k * 2**40 for k in range(low, min(low + 7, size))])
    keys = [k * 2**40 for k in range(size + 5)]
    index.equals(set(keys[:size]), keys)
    groups = int(index.shards[0].tally[kernels.GROUPS])
    assert size <= groups * 8 * 3 // 4
    assert groups * 8 <= max(128, 1.5 * size / 0.75 + 16)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_index_grows_in_slices(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While cells move, every key is found, new ones are entered and old ones leave."""
    monkeypatch.setattr("sparse_store.arrays._SLICE", 4)
    index, wanted = Index(shards), set()
    moving = 0
    for turn in range(600):
        fresh = {turn * 10 + k for k in range(3)}
        index.insert(sorted(fresh))
        wanted |= fresh
        if turn % 3 == 0:
            gone = {turn * 10 // 2 // 10 * 10, turn * 10} & wanted
            index.remove(sorted(gone))
            wanted -= gone
        moving += any(arrays.tally[kernels.OLD_GROUPS] for arrays in index.shards)
        if turn % 20 == 0:
            index.equals(wanted, list(range(turn * 10 + 10)))
    index.equals(wanted, list(range(6010)))
    assert moving > 20


def test_memory_is_flat_under_churn() -> None:
    """Removed entries and rows are used again before new ones are numbered."""
    index = Index()
    for turn in range(50):
        keys = list(range(turn * 60, turn * 60 + 60))
        index.insert(keys)
        index.remove(keys)
    assert used(index.shards) == 60
    assert index.shards[0].tally[kernels.USED_ROWS] == 60
    assert index.shards[0].tally[kernels.GROUPS] == 16
    assert index.shards[0].tally[kernels.ROWS] == 0


def test_a_key_entered_twice_is_named() -> None:
    index = Index()
    index.insert([5])
    entries = np.empty(3, np.int64)
    keys = still(np.array([4, 5, 6], np.uint64))
    rest = (np.int64(0), np.int64(1), keys, True, entries)
    assert kernels.insert(index.shards[0], SEED, *rest) == 1


@given(
    st.lists(st.lists(ANY_KEY | st.integers(0, 3), max_size=100), max_size=4),
    st.integers(1, 3),
    st.integers(1, 2**16 - 1),
)
def test_dedupe_numbers_by_first_occurrence(
    inputs: list[list[int]], shards: int, generation: int
) -> None:
    arrays = [np.array(some, np.uint64) for some in inputs]
    ids = [key for some in inputs for key in some]
    n = len(ids)
    jobs = np.zeros((len(inputs), kernels.JOB_FIELDS), np.int64)
    for row, array in zip(jobs, arrays, strict=True):
        row[[kernels.JOB_IDS, kernels.JOB_COUNT]] = address_of(array), array.size
    jobs[1:, kernels.JOB_START] = np.cumsum(jobs[:-1, kernels.JOB_COUNT])
    keys = np.zeros((n * shards + 1, 2), np.uint64)
    inverse = np.full(n, -1, np.int32)
    numbered = []
    for shard in range(shards):
        scratch = np.full(1 << max(1, n.bit_length()), 2**64 - 1, np.uint64)
        scratch &= np.uint64((generation - 1) << 48 | 2**48 - 1)
        first = shard * n
        rest = (np.int64(shards), np.int64(first), scratch, np.uint64(generation), keys, inverse)
        end = kernels.dedupe(jobs, SEED, np.int64(shard), *rest)
        numbered += range(first, end)
        own = [k for k in ids if twin.mix(k ^ int(SEED)) % 2**32 * shards >> 32 == shard]
        assert keys[first:end, 0].tolist() == list(dict.fromkeys(own))
    assert keys[inverse, 0].tolist() == ids
    for number in numbered:
        assert keys[number, 1] == ids.count(int(keys[number, 0]))


@pytest.mark.parametrize("mode", [kernels.SUM, kernels.MEAN, kernels.SQRTN])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim", [3, 8, 19])
def test_the_way_back_is_the_transpose(mode: int, weighted: bool, dim: int) -> None:
    """<pool(v), g> = <v, sums(g)> for any v and g: what Keras' gradient of it would be."""
    random = np.random.default_rng(mode)
    splits = np.array([0, 3, 3, 7, 9], np.int64)
    inverse = random.integers(0, 5, 9).astype(np.int32)
    numbers = np.array([2, -1, 0, 1, 3], np.int32)
    weights = random.random(9).astype(np.float32)
    table = random.normal(size=(4, dim + 2)).astype(np.float32)
    grads = random.normal(size=(4, dim)).astype(np.float32)
    out, sums = np.empty((4, dim), np.float32), np.empty(5 * dim, np.float32)
    where = address_of(weights) if weighted else 0
    jobs = np.array([[0, 9, address_of(splits), 4, where, mode, -1, 0, 0]], np.int64)
    assert kernels.check(jobs) == -1
    width = np.int64(dim)
    for part in range(3):
        faces = np.array([[address_of(out), 4]], np.int64)
        share = (np.int64(part), np.int64(3))
        kernels.pull(jobs, faces, table, width, numbers, inverse, *share)
    faces = np.array([[address_of(grads), 4]], np.int64)
    found = [
        kernels.sum_gradients(
            jobs, faces, width, numbers, inverse, np.int64(low), np.int64(high), sums, np.float32(9)
        )
        for low, high in ((0, 2), (2, 5))
    ]
    assert found == [-1, -1]
    with_row = numbers >= 0
    by_key = sums.reshape(5, dim)
    assert float((out * grads).sum()) == pytest.approx(
        float((table[numbers[with_row], :dim] * by_key[with_row]).sum()), rel=1e-4
    )
    assert not by_key[~with_row].any()


def test_plain_batches_equal_the_general_path() -> None:
    """One id to a sample skips divisors; an explicit weight of one goes the long way."""
    random = np.random.default_rng(3)
    splits = np.arange(41, dtype=np.int64)
    inverse, numbers = random.integers(0, 9, 40).astype(np.int32), np.arange(9, dtype=np.int32)
    numbers[4] = -1
    table = random.normal(size=(9, 24)).astype(np.float32)
    table[2, :5] = -0.0
    ones = np.ones(40, np.float32)
    grads = random.normal(size=(40, 12)).astype(np.float32)
    found = []
    for where, plain in ((0, 1), (address_of(ones), 0)):
        for mode in (kernels.SUM, kernels.MEAN, kernels.SQRTN):
            jobs = np.array([[0, 40, address_of(splits), 40, where, mode, -1, 0, 0]], np.int64)
            assert kernels.check(jobs) == -1
            assert jobs[0, kernels.JOB_PLAIN] == plain
            out, sums = np.empty((40, 12), np.float32), np.empty(9 * 12, np.float32)
            dim, none = np.int64(12), np.int64(0)
            faces = np.array([[address_of(out), 40]], np.int64)
            kernels.pull(jobs, faces, table, dim, numbers, inverse, none, np.int64(1))
            faces = np.array([[address_of(grads), 40]], np.int64)
            kernels.sum_gradients(
                jobs, faces, dim, numbers, inverse, none, np.int64(9), sums, np.float32(99)
            )
            found.append((out.tobytes(), sums.tobytes()))
    assert len(set(found)) == 1
