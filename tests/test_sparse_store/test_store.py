"""The store's face: boundaries of a batch, of a step and of a table; what is refused and why."""

from __future__ import annotations

import doctest
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparse_store import (
    Adagrad,
    Always,
    BadAck,
    BadInput,
    ClockFell,
    Count,
    Evict,
    Ftrl,
    NonFinite,
    StalePlan,
    StepOpen,
    Table,
    UnknownReader,
    UnknownTable,
    Zeros,
)
from sparse_store import (
    store as store_module,
)
from sparse_store.arrays import used
from sparse_store.store import Keys, SparseStore

TOP = 2**64 - 1


def keys_of(table: str, lists: list[list[int]], **rest) -> Keys:
    ids = np.array([key for some in lists for key in some], np.uint64)
    splits = np.cumsum([0, *(len(some) for some in lists)]).astype(np.int64)
    return Keys(table, ids, splits, **rest)


def ids(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


class Trained:
    """A store of one table `t`, and a step in one line."""

    def __init__(self, table: Table | None = None, **rest) -> None:
        self.table = table or Table("t", dim=2, **rest)
        self.store = SparseStore([self.table], seed=7)

    def step(
        self, lists: list[list[int]], *, clock: int = 0, grad: float = 1.0, **rest
    ) -> np.ndarray:
        plan = self.store.resolve({"f": keys_of("t", lists, **rest)}, clock=clock)
        out = np.full((len(lists), self.table.dim), np.nan, np.float32)
        self.store.pull(plan, {"f": out})
        self.store.push(plan, {"f": np.full_like(out, grad)})
        return out

    def has(self, *keys: int) -> list[bool]:
        return self.store.lookup("t", ids(*keys))[1].tolist()


def test_the_docstring_s_example_runs() -> None:
    assert doctest.testmod(store_module).failed == 0
    assert doctest.testmod(store_module).attempted > 0


# boundaries of a batch


def test_a_batch_of_nothing() -> None:
    trained = Trained()
    assert trained.step([]).shape == (0, 2)
    np.testing.assert_array_equal(trained.step([[], []]), np.zeros((2, 2)))
    plan = trained.store.resolve({}, clock=0)
    trained.store.pull(plan, {})
    trained.store.push(plan, {})
    assert (trained.store.step, trained.store.rows("t")) == (3, 0)


def test_any_64_bits_are_a_key() -> None:
    trained = Trained()
    edges = [0, 1, 2**63 - 1, 2**63, TOP - 2, TOP - 1, TOP]
    trained.step([edges])
    assert trained.has(*edges) == [True] * 7
    assert trained.has(2, 3) == [False, False]
    assert trained.store.peek("serving").tables["t"].keys.tolist() == edges


def test_int64_ids_are_taken_bit_by_bit() -> None:
    """Avro longs arrive as int64; -1 and 2^64 - 1 are one key."""
    trained = Trained()
    signed = np.array([-1, -(2**63)], np.int64)
    plan = trained.store.resolve(
        {"f": Keys("t", signed.view(np.uint64), np.array([0, 2]))}, clock=0
    )
    trained.store.abandon(plan)
    assert trained.store.lookup("t", signed)[1].tolist() == [True, True]
    assert trained.has(TOP, 2**63) == [True, True]


def test_one_key_everywhere_takes_one_step() -> None:
    """Ids [7, 7, 7] with gradients of 1: Adagrad moves once, by a sum of 3."""
    trained = Trained(optimizer=Adagrad(rate=0.5, initial=0.1), init=Zeros())
    trained.step([[7, 7], [7]])
    values, slots = trained.store.explain("t", 7).values, trained.store.explain("t", 7).slots
    assert slots.tolist() == pytest.approx([9.1, 9.1])
    assert values.tolist() == pytest.approx([-0.5 * 3 / 9.1**0.5] * 2, rel=1e-6)
    assert trained.store.count("t", ids(7)).tolist() == [3]


def test_features_share_a_table_s_rows_and_step() -> None:
    store = SparseStore([Table("t", dim=1, init=Zeros())], seed=1)
    inputs = {"a": keys_of("t", [[5], [6]]), "b": keys_of("t", [[5, 5], []], length=2)}
    plan = store.resolve(inputs, clock=0)
    grads = {"a": np.ones((2, 1), np.float32), "b": np.full((2, 2, 1), 10, np.float32)}
    store.push(plan, grads)
    assert store.dump("t").slots[:, 0].tolist() == pytest.approx([0.1 + 21**2, 0.1 + 1])
    assert store.dump("t").counts.tolist() == [3, 1]


def test_samples_beyond_the_batch_are_padding() -> None:
    trained = Trained(init=Zeros())
    plan = trained.store.resolve({"f": keys_of("t", [[1]])}, clock=0)
    out = np.full((3, 2), np.nan, np.float32)
    trained.store.pull(plan, {"f": out, "dense": np.empty(0)})
    assert not out.any()
    grads = np.array([[1, 1], [np.nan, np.inf], [5, 5]], np.float32)
    trained.store.push(plan, {"f": grads})
    assert trained.store.dump("t").slots.tolist() == [pytest.approx([1.1, 1.1])]


def test_sequences_keep_rows_apart() -> None:
    trained = Trained()
    trained.step([[1], [2]])
    plan = trained.store.resolve({"f": keys_of("t", [[1, 2], [], [2]], length=3)}, clock=0)
    out = np.full((4, 3, 2), np.nan, np.float32)
    trained.store.pull(plan, {"f": out})
    (one, two), _ = trained.store.lookup("t", ids(1, 2))
    wanted = np.zeros((4, 3, 2), np.float32)
    wanted[0, 0], wanted[0, 1], wanted[2, 0] = one, two, two
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("pool", "wanted"), [("sum", 7.0), ("mean", 7 / 4), ("sqrtn", 7 / 10**0.5)]
)
def test_pooling_weighs(pool: str, wanted: float) -> None:
    """Rows 1 and 2 with weights 1 and 3; no ids and weights that cancel give zeros."""
    store = SparseStore([Table("t", dim=1, optimizer=Adagrad(rate=1.0, initial=0.0))], seed=1)
    store.abandon(store.resolve({"f": keys_of("t", [[1, 2]])}, clock=0))
    store._live["t"].memory[:2, 0] = [1, 2]
    weights = np.array([1, 3, 2, -2], np.float32)
    plan = store.resolve(
        {"f": keys_of("t", [[1, 2], [], [1, 1]], pool=pool, weights=weights)}, clock=0
    )
    out = np.empty((3, 1), np.float32)
    store.pull(plan, {"f": out})
    assert out[:, 0].tolist() == pytest.approx([wanted, 0, 0])


def test_distinct_keys_may_come_in_any_order() -> None:
    one, other = Trained(), Trained()
    one.step([[k] for k in range(200)])
    other.step([[k] for k in reversed(range(200))])
    np.testing.assert_array_equal(one.store.dump("t").values, other.store.dump("t").values)


def test_a_lookup_may_write_into_an_array_of_the_caller() -> None:
    trained = Trained()
    trained.step([[1], [2]])
    out = np.full((3, 2), np.nan, np.float32)
    values, found = trained.store.lookup("t", ids(2, 5, 1), out=out)
    assert values is out
    assert found.tolist() == [True, False, True]
    np.testing.assert_array_equal(out, trained.store.lookup("t", ids(2, 5, 1))[0])
    still_out = out.view()
    still_out.flags.writeable = False
    for wrong in (out[:2], out.astype(np.float64), np.asfortranarray(out), still_out):
        with pytest.raises(BadInput, match="lookup in 't': out"):
            trained.store.lookup("t", ids(2, 5, 1), out=wrong)


# admission and eviction


def test_counting_admits_within_a_batch_and_across() -> None:
    trained = Trained(admit=Count(3))
    assert not trained.step([[1], [1]]).any()
    assert (trained.has(1), trained.store.entries("t"), trained.store.rows("t")) == ([False], 1, 0)
    assert trained.store.explain("t", 1).reason == "candidate: seen 2 times, admitted at 3"
    assert trained.step([[1, 1]]).any(), "all occurrences of the admitting batch read the row"
    assert trained.store.count("t", ids(1)).tolist() == [4]
    assert trained.step([[2, 2, 2]]).any(), "three sightings in one batch are enough"


def test_the_admitting_batch_trains_the_new_row() -> None:
    trained = Trained(admit=Count(2), init=Zeros())
    trained.step([[1], [1]])
    assert trained.store.dump("t").slots[0].tolist() == pytest.approx([4.1, 4.1])


def test_gradients_of_unadmitted_keys_go_nowhere() -> None:
    trained = Trained(admit=Count(3), init=Zeros())
    trained.step([[1], [1]], grad=5.0)
    trained.step([[1]], grad=1.0)
    assert trained.store.dump("t").slots[0].tolist() == pytest.approx([1.1, 1.1])


def test_a_mean_counts_keys_without_a_row() -> None:
    trained = Trained(admit=Count(2))
    trained.step([[1, 1]])
    row = trained.store.lookup("t", ids(1))[0][0]
    np.testing.assert_array_equal(trained.step([[1, 2]], pool="mean")[0], row / np.float32(2))


@pytest.mark.parametrize(("clock", "alive"), [(6400, True), (6499, True), (6500, False)])
def test_the_horizon_moves_by_a_64th_of_the_ttl(clock: int, alive: bool) -> None:
    """A ttl of 6400 has a grain of 100: stamp 0 lives until clock - 6400 reaches 100."""
    trained = Trained(evict=Evict(ttl=6400))
    trained.step([[1]], clock=0)
    trained.step([[2]], clock=clock)
    assert trained.has(1) == [alive]


def test_ttl_equal_to_the_age_stays() -> None:
    trained = Trained(evict=Evict(ttl=10))
    trained.step([[1]], clock=100)
    trained.step([[2]], clock=110)
    assert trained.has(1) == [True]
    trained.step([[2]], clock=111)
    assert trained.has(1) == [False]
    assert trained.store.explain("t", 1).reason == "removed at step 3"


def test_a_dead_key_in_the_batch_starts_again() -> None:
    """Horizons move before the batch is read: the old row, slots and count are gone."""
    trained = Trained(evict=Evict(ttl=10))
    first = trained.step([[1]], clock=0)
    again = trained.step([[1]], clock=1000)
    np.testing.assert_array_equal(first, again)
    assert trained.store.count("t", ids(1)).tolist() == [1]
    change = trained.store.peek("serving").tables["t"]
    assert (change.keys.tolist(), change.removed.tolist()) == ([1], [])


def test_an_evicted_key_counts_from_nothing() -> None:
    trained = Trained(admit=Count(2), evict=Evict(ttl=10))
    trained.step([[1, 1]], clock=0)
    trained.step([[1]], clock=1000)
    assert trained.has(1) == [False]
    assert trained.store.peek("serving").tables["t"].removed.tolist() == [1]


def test_a_bound_on_rows_drops_the_longest_untouched() -> None:
    trained = Trained(evict=Evict(rows=20))
    trained.step([list(range(10, 30))], clock=5)
    assert trained.store.rows("t") == 20
    trained.step([[10, 50]], clock=6)
    assert trained.store.rows("t") == 21, "a bound is kept at boundaries"
    trained.step([[10]], clock=7)
    assert trained.store.rows("t") == 19
    assert trained.has(10, 11, 12, 13, 50) == [True, False, False, True, True]
    assert trained.store.metrics()["t"]["evicted"] == 2


def test_candidates_are_bounded_and_age() -> None:
    trained = Trained(admit=Count(2, candidates=20, forget=100))
    trained.step([list(range(21))], clock=5)
    trained.step([[0]], clock=6)
    assert trained.store.metrics()["t"]["candidates"] == 20
    assert trained.store.count("t", ids(0, 1, 2)).tolist() == [1, 0, 1]
    trained.step([[99]], clock=500)
    metrics = trained.store.metrics()["t"]
    assert (metrics["candidates"], metrics["forgotten"]) == (1, 22)
    assert trained.store.peek("serving").tables["t"].removed.tolist() == [], "never had a row"


def test_memory_is_flat_under_eviction() -> None:
    trained = Trained(evict=Evict(ttl=1))
    for turn in range(100):
        trained.step([list(range(turn * 40, turn * 40 + 40))], clock=turn * 10)
        trained.store.ack("serving", trained.store.step)
        trained.store.ack("checkpoint", trained.store.step)
    assert used(trained.store._live["t"].shards) <= 80
    assert trained.store.metrics()["t"]["tombstones"] == 0


# readers


def test_readers_have_cursors_of_their_own() -> None:
    trained = Trained()
    trained.step([[1]])
    trained.store.ack("serving", 1)
    trained.step([[2]])
    assert trained.store.peek("serving").tables["t"].keys.tolist() == [2]
    change = trained.store.peek("checkpoint")
    assert (change.since, change.until, change.tables["t"].keys.tolist()) == (0, 2, [1, 2])


def test_what_is_handed_out_is_a_copy() -> None:
    trained = Trained()
    trained.step([[1]])
    change, frozen = trained.store.peek("serving"), trained.store.freeze("checkpoint")
    before = change.tables["t"].values.copy()
    trained.step([[1]], grad=100.0)
    np.testing.assert_array_equal(change.tables["t"].values, before)
    np.testing.assert_array_equal(frozen._parts[0].rows.values, before)


def test_a_tombstone_waits_for_every_reader() -> None:
    trained = Trained(evict=Evict(ttl=1))
    trained.step([[1]], clock=0)
    trained.step([[2]], clock=100)
    trained.store.ack("checkpoint", 2)
    assert trained.store.peek("serving").tables["t"].removed.tolist() == [1]
    trained.store.ack("serving", 2)
    assert trained.store.metrics()["t"]["tombstones"] == 0


def test_marked_keys_are_seen_again() -> None:
    trained = Trained()
    trained.step([[1], [2]])
    trained.store.ack("serving", 1)
    trained.store.mark_changed({"t": ids(2, 2, 77)}, reader="serving")
    change = trained.store.peek("serving")
    assert change.tables["t"].keys.tolist() == [1, 2] or change.tables["t"].keys.tolist() == [2]
    assert change.tables["t"].removed.tolist() == [77]
    assert change.until == 1
    trained.store.ack("serving", change.until)
    assert trained.store.peek("serving").tables["t"].keys.tolist() == []


def test_marks_at_step_0_are_seen() -> None:
    store = SparseStore([Table("t", dim=1)], seed=1)
    store.mark_changed({"t": ids(5)}, reader="serving")
    assert store.peek("serving").tables["t"].removed.tolist() == [5]


# what is refused


def test_the_clock_only_rises() -> None:
    trained = Trained()
    trained.step([[1]], clock=-50)
    trained.step([[1]], clock=-50)
    with pytest.raises(ClockFell, match="-51 ms is below the store's -50"):
        trained.step([[2]], clock=-51)
    assert (trained.store.step, trained.has(2)) == (2, [False])


def test_a_plan_is_pushed_once_and_only_the_latest() -> None:
    trained = Trained()
    keys = {"f": keys_of("t", [[1]])}
    grads = {"f": np.ones((1, 2), np.float32)}
    old = trained.store.resolve(keys, clock=0)
    new = trained.store.resolve(keys, clock=0)
    for use in (trained.store.push, trained.store.pull):
        with pytest.raises(StalePlan, match="step 1 is not this store's latest"):
            use(old, grads)
    trained.store.push(new, grads)
    with pytest.raises(StalePlan, match="pushed or abandoned"):
        trained.store.push(new, grads)
    with pytest.raises(StalePlan, match="pushed or abandoned"):
        trained.store.abandon(new)
    trained.store.pull(new, grads)
    with pytest.raises(StalePlan):
        Trained().store.pull(new, grads)


def test_readers_look_at_boundaries_only() -> None:
    trained = Trained()
    plan = trained.store.resolve({"f": keys_of("t", [[1]])}, clock=0)
    for look in (
        lambda: trained.store.peek("serving"),
        lambda: trained.store.freeze("checkpoint"),
        lambda: trained.store.ack("serving", 1),
        lambda: trained.store.mark_changed({"t": ids(1)}, reader="serving"),
    ):
        with pytest.raises(StepOpen, match="push or abandon"):
            look()
    trained.store.ack("serving", 0)
    trained.store.abandon(plan)
    assert trained.store.peek("serving").tables["t"].keys.tolist() == [1]


def test_an_ack_goes_neither_back_nor_ahead() -> None:
    trained = Trained()
    trained.step([[1]])
    trained.step([[1]])
    trained.store.ack("serving", 1)
    trained.store.ack("serving", 1)
    for until in (0, 3):
        with pytest.raises(BadAck, match=f"step {until}: its cursor is 1, the store is at 2"):
            trained.store.ack("serving", until)
    with pytest.raises(UnknownReader, match="no reader 'nobody'"):
        trained.store.ack("nobody", 1)


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf, 2e15])
def test_a_wild_gradient_moves_no_table(wild: float) -> None:
    """Both tables or neither, and the same plan can be pushed again without the sample."""
    store = SparseStore([Table("a", dim=1), Table("b", dim=1)], seed=1)
    plan = store.resolve({"a": keys_of("a", [[1]]), "b": keys_of("b", [[8], [9]])}, clock=0)
    before = store.dump("a").values, store.dump("b").values
    good = {"a": np.ones((1, 1), np.float32), "b": np.ones((2, 1), np.float32)}
    bad = {**good, "b": np.array([[1], [wild]], np.float32)}
    with pytest.raises(NonFinite, match="table 'b', key 9"):
        store.push(plan, bad)
    np.testing.assert_array_equal(store.dump("a").values, before[0])
    np.testing.assert_array_equal(store.dump("b").values, before[1])
    store.push(plan, good)
    assert not np.array_equal(store.dump("a").values, before[0])


def test_a_row_that_went_wild_is_neither_published_nor_saved() -> None:
    trained = Trained()
    trained.step([[1], [2]])
    trained.store._live["t"].memory[1, 3] = np.inf
    with pytest.raises(NonFinite, match="key 2 is not finite"):
        trained.store.peek("serving")
    with pytest.raises(NonFinite, match="key 2 is not finite"):
        trained.store.freeze("checkpoint")


SPLITS = np.array([0, 2], np.int64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (Keys("t", np.array([1.0, 2.0]), SPLITS), "ids are float64"),
        (Keys("t", np.array([1, 2], np.int32), SPLITS), "ids are int32"),
        (Keys("t", np.zeros((2, 1), np.uint64), SPLITS), r"\(2, 1\)"),
        (Keys("t", ids(1, 2), np.array([0, 2], np.int32)), "row_splits is int32"),
        (Keys("t", ids(1, 2), np.empty(0, np.int64)), r"give int64 \[B \+ 1\]"),
        (
            Keys("t", ids(1, 2), np.array([0, 1])),
            "from 0 to 2, the number of ids; it goes from 0 to 1",
        ),
        (Keys("t", ids(1, 2), np.array([1, 2])), "it goes from 1 to 2"),
        (Keys("t", ids(1, 2), np.array([0, 3, 2])), "must rise"),
        (Keys("t", ids(1, 2), SPLITS, pool="max"), "pool is 'max'"),
        (Keys("t", ids(1, 2), SPLITS, weights=np.ones(2)), "weights are float64"),
        (Keys("t", ids(1, 2), SPLITS, weights=np.ones(3, np.float32)), "one per id"),
        (Keys("t", ids(1, 2), SPLITS, weights=np.ones(2, np.float32), length=2), "no weights"),
        (Keys("t", ids(1, 2), SPLITS, length=1), "a list of 2 ids, and the sequence holds 1"),
    ],
)
def test_a_bad_input_is_named_and_changes_nothing(keys: Keys, message: str) -> None:
    trained = Trained()
    with pytest.raises(BadInput, match=message) as raised:
        trained.store.resolve({"fine": keys_of("t", [[1]]), "feature": keys}, clock=5)
    assert "input 'feature'" in str(raised.value)
    assert (trained.store.step, trained.store.clock, trained.store.entries("t")) == (0, 0, 0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.empty((2, 2)), "float64"),
        (np.empty((1, 2), np.float32), r"\(1, 2\); give float32 \(2, 2\)"),
        (np.empty((2, 3), np.float32), r"\(2, 3\)"),
        (np.empty((2, 1, 2), np.float32), r"\(2, 1, 2\)"),
        (np.empty((2, 2), np.float32, order="F"), "C-contiguous"),
        (np.empty((2, 4), np.float32)[:, ::2], "C-contiguous"),
    ],
)
def test_arrays_of_another_shape_are_refused(array: np.ndarray, message: str) -> None:
    trained = Trained()
    plan = trained.store.resolve({"f": keys_of("t", [[1], [2]])}, clock=0)
    for use in (trained.store.pull, trained.store.push):
        with pytest.raises(BadInput, match=message):
            use(plan, {"f": array})
        with pytest.raises(BadInput, match="'f' has no array"):
            use(plan, {"g": array})


def test_pull_needs_a_writable_array_and_push_does_not() -> None:
    """TensorFlow's arrays come read-only."""
    trained = Trained()
    plan = trained.store.resolve({"f": keys_of("t", [[1]])}, clock=0)
    array = np.ones((1, 2), np.float32)
    array.flags.writeable = False
    with pytest.raises(BadInput, match="writable"):
        trained.store.pull(plan, {"f": array})
    trained.store.push(plan, {"f": array})


def test_unknown_tables_are_named() -> None:
    trained = Trained()
    with pytest.raises(UnknownTable, match="no table 'u'; there are \\['t'\\]"):
        trained.store.resolve({"f": keys_of("u", [[1]])}, clock=0)
    for ask in (
        lambda: trained.store.lookup("u", ids(1)),
        lambda: trained.store.count("u", ids(1)),
        lambda: trained.store.rows("u"),
        lambda: trained.store.explain("u", 1),
        lambda: trained.store.mark_changed({"u": ids(1)}, reader="serving"),
    ):
        with pytest.raises(UnknownTable):
            ask()


def test_a_store_needs_tables_readers_and_threads() -> None:
    table = Table("t", dim=1)
    with pytest.raises(BadInput, match="at least one table"):
        SparseStore([], seed=1)
    with pytest.raises(BadInput, match="'t' is given 2 times"):
        SparseStore([table, table], seed=1)
    with pytest.raises(BadInput, match="reader"):
        SparseStore([table], seed=1, readers=())
    with pytest.raises(BadInput, match="threads is 0"):
        SparseStore([table], seed=1, threads=0)


def test_explain_says_what_is_known() -> None:
    trained = Trained(admit=Always(), optimizer=Ftrl(alpha=1.0))
    trained.step([[3, 3]], clock=9)
    known = trained.store.explain("t", 3)
    assert (known.admitted, known.count, known.stamp, known.changed_at) == (True, 2, 9, 1)
    assert known.norm == pytest.approx(float(np.linalg.norm(known.values)))
    assert known.slots.shape == (4,)
    unknown = trained.store.explain("t", -1)
    assert (unknown.admitted, unknown.count, unknown.values) == (False, 0, None)


# the process


def test_the_configuration_needs_neither_numba_nor_arrow() -> None:
    code = (
        "import sparse_store, sys\n"
        "assert not {'numba', 'pyarrow'} & sys.modules.keys()\n"
        "sparse_store.warm_up()\n"
        "assert 'numba' in sys.modules"
    )
    root = Path(store_module.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


def test_nothing_is_logged_per_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Trained().step([[1]])
    assert caplog.records == []


def test_a_limit_on_address_space_leaves_room_for_the_rest() -> None:
    """Rows are reserved, not taken; where even that is counted, a store must not take it all."""
    code = (
        "import resource, numpy as np\n"
        "limit = 16 << 30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "from sparse_store.config import Table\n"
        "from sparse_store.store import Keys, SparseStore\n"
        "store = SparseStore([Table(name, dim=16) for name in 'abcd'], seed=1)\n"
        "keys = Keys('d', np.arange(500, dtype=np.uint64), np.arange(501))\n"
        "store.abandon(store.resolve({'x': keys}, clock=0))\n"
        "assert store.rows('d') == 500\n"
        "assert np.zeros(1 << 30, np.uint8).sum() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
