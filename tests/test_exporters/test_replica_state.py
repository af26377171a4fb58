"""Whatever order deltas come in, a replica is at a version that was published, row for row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import (
    Corrupt,
    Delta,
    Duplicate,
    Gap,
    Head,
    StaleGeneration,
    TableInfo,
    TableRows,
    UnknownTable,
)
from exporters.replica_state import Applied, ReplicaState, RowTable

KEYS = st.one_of(st.integers(0, 5), st.sampled_from([2**63, 2**64 - 1]))
TABLE = dict[int, float]


def state_at(version: int, rows: TABLE, generation: int = 1) -> ReplicaState:
    head = Head(
        version=version,
        generation=generation,
        epoch=1,
        checksum=f"{version}",
        watermark=0,
        step=0,
        positions={},
        tables={"t": TableInfo(1, 1, len(rows))},
    )
    state = ReplicaState(head)
    keys = np.array(sorted(rows), np.uint64)
    state.fill("t", keys, np.array([[rows[k]] for k in sorted(rows)], np.float32).reshape(-1, 1))
    return state


def between(old: TABLE, new: TABLE, since: int, version: int, generation: int = 1) -> Delta:
    """Make the delta that leads from one content to another."""
    written = {k: v for k, v in new.items() if old.get(k) != v}
    return Delta(
        version=version,
        since=since,
        generation=generation,
        step=version,
        watermark=version,
        positions={"p/0": version},
        tables={
            "t": TableRows(
                np.array(sorted(written), np.uint64),
                np.array([[written[k]] for k in sorted(written)], np.float32).reshape(-1, 1),
                np.array(sorted(set(old) - set(new)), np.uint64),
            )
        },
        dense=np.array([version], np.float32),
        dims={"t": 1},
    )


def content(state: ReplicaState) -> TABLE:
    universe = np.array([*range(6), 2**63, 2**64 - 1], np.uint64)
    rows, found = state.lookup("t", universe)
    assert not rows[~found].any()
    return {
        int(k): float(v) for k, v, f in zip(universe.tolist(), rows[:, 0], found, strict=True) if f
    }


CONTENTS = st.lists(
    st.dictionaries(KEYS, st.integers(-4, 4).map(float), max_size=8), min_size=2, max_size=8
)


@given(CONTENTS, st.data())
def test_any_sequence_of_deltas_leaves_a_published_version(
    contents: list[TABLE], data: st.DataObject
) -> None:
    """Deltas over one step or several, in order or not, repeated or lost."""
    state = state_at(1, contents[0])
    versions = list(enumerate(contents, start=1))
    for _ in range(data.draw(st.integers(1, 20))):
        since, old = data.draw(st.sampled_from(versions[:-1]))
        version, new = data.draw(st.sampled_from(versions[since:]))
        # What a delta over several steps holds is all that changed in any of them.
        delta = between(old, new, since, version)
        for step in range(since, version):
            middle = between(contents[step - 1], contents[step], step, step + 1).tables["t"]
            delta = replace(delta, tables={"t": joined(delta.tables["t"], middle, new)})
        before, held = state.version, content(state)
        try:
            applied = state.apply(delta, f"{version}")
        except Duplicate:
            assert version <= before
        except Gap:
            assert since > before
        else:
            assert since <= before < version
            assert applied.version == state.version == version
            assert content(state) == new
            assert state.dense is not None
            assert state.dense.tolist() == [version]
            continue
        assert state.version == before
        assert content(state) == held


def joined(a: TableRows, b: TableRows, new: TABLE) -> TableRows:
    keys = {*a.keys.tolist(), *b.keys.tolist(), *a.removed.tolist(), *b.removed.tolist()}
    written = sorted(keys & set(new))
    return TableRows(
        np.array(written, np.uint64),
        np.array([[new[k]] for k in written], np.float32).reshape(-1, 1),
        np.array(sorted(keys - set(new)), np.uint64),
    )


def test_the_four_answers() -> None:
    state = state_at(3, {1: 1.0}, generation=2)
    assert state.apply(between({1: 1.0}, {2: 2.0}, 3, 5, 2), "5") == Applied(5, 1, 1)
    with pytest.raises(Duplicate, match="5 is held"):
        state.apply(between({}, {}, 3, 5, 2), "5")
    with pytest.raises(Duplicate):
        state.apply(between({}, {}, 1, 4, 2), "4")
    with pytest.raises(Gap, match=r"\(6, 7\]"):
        state.apply(between({}, {}, 6, 7, 2), "7")
    with pytest.raises(StaleGeneration, match="generation 1"):
        state.apply(between({}, {}, 5, 6, 1), "6")
    with pytest.raises(Corrupt, match="two contents"):
        state.apply(between({}, {9: 1.0}, 3, 5, 2), "other")
    with pytest.raises(Corrupt, match="dim"):
        state.apply(replace(between({}, {}, 5, 6, 2), tables={}, dims={"t": 2}), "6")
    assert content(state) == {2: 2.0}


def test_tables_come_and_go_with_a_delta() -> None:
    state = state_at(1, {1: 1.0})
    rows = TableRows(np.array([7], np.uint64), np.ones((1, 2), np.float32), np.empty(0, np.uint64))
    delta = replace(between({}, {}, 1, 2), tables={"new": rows}, dims={"new": 2})
    state.apply(delta, "2")
    assert state.tables == {"new": 2}
    assert state.rows("new") == 1
    with pytest.raises(UnknownTable, match=r"no table 't'.*\['new'\]"):
        state.lookup("t", np.array([1], np.uint64))


def test_it_serves_from_its_target_on() -> None:
    state = state_at(1, {})
    state.target, state.dense_missing = 3, True
    assert not state.serves
    state.apply(replace(between({}, {}, 1, 3), dense=None), "3")
    assert not state.serves
    state.apply(between({}, {}, 3, 4), "4")
    assert state.serves


SOME = st.sets(st.integers(0, 200), max_size=90)


@given(st.lists(st.tuples(SOME, SOME), max_size=12))
def test_a_table_is_a_dict_of_rows(steps: list[tuple[set[int], set[int]]]) -> None:
    table, model = RowTable(2), {}
    for number, (written, removed) in enumerate(steps):
        keys, gone = sorted(written), sorted(removed - written)
        values = np.array([[key, number] for key in keys], np.float32).reshape(-1, 2)
        rows = TableRows(np.array(keys, np.uint64), values, np.array(gone, np.uint64))
        change = table.prepare(rows)
        assert len(table) == len(model)
        assert table.commit(change) == len(set(gone) & set(model))
        model = {k: v for k, v in model.items() if k not in gone}
        model.update(zip(keys, values.tolist(), strict=True))
        assert len(table) == len(model)
    rows, found = table.lookup(np.arange(201, dtype=np.uint64))
    assert found.tolist() == [k in model for k in range(201)]
    assert rows.tolist() == [model.get(k, [0.0, 0.0]) for k in range(201)]
