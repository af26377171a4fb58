"""The types of a batch: taking samples out of columns, and joining columns."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from consumers.source import Columns, Ids


def columns(rows: list[Any], *, weighted: bool) -> Columns:
    """Columns whose samples are (number, its ids)."""
    splits = np.cumsum([0] + [len(keys) for _, keys in rows])
    flat = [key for _, keys in rows for key in keys]
    keys = np.array(flat, np.uint64)
    weights = (keys % np.uint64(5)).astype(np.float32) if weighted else None
    numbers = np.array([number for number, _ in rows], np.float32)
    return Columns(
        size=len(rows),
        ids={"x": Ids(keys, splits, weights)},
        dense={"d": np.stack([numbers, -numbers], axis=1)},
        labels={"y": numbers},
        weight=numbers,
        time_ms=numbers.astype(np.int64),
    )


def rows_of(columns: Columns) -> list[Any]:
    ids = columns.ids["x"]
    assert ids.keys.dtype == np.uint64
    assert ids.row_splits.dtype == np.int64
    assert len(ids.row_splits) == columns.size + 1
    assert ids.row_splits[-1] == len(ids.keys)
    if ids.weights is not None:
        assert ids.weights.tolist() == [key % 5 for key in ids.keys.tolist()]
    numbers = columns.weight.tolist()
    assert columns.dense["d"].tolist() == [[n, -n] for n in numbers]
    assert columns.labels["y"].tolist() == numbers
    assert columns.time_ms.tolist() == numbers
    bounds = ids.row_splits.tolist()
    return [
        (n, ids.keys[a:b].tolist()) for n, a, b in zip(numbers, bounds, bounds[1:], strict=False)
    ]


rows = st.lists(
    st.tuples(st.integers(0, 1000), st.lists(st.integers(0, 2**64 - 1), max_size=3)), max_size=8
)


@given(rows, st.booleans(), st.data())
def test_take(some: list[Any], weighted: bool, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(some) - 1), max_size=8) if some else st.just([]))
    taken = columns(some, weighted=weighted).take(np.array(index, np.int64))
    assert rows_of(taken) == [some[i] for i in index]


@given(st.lists(rows, min_size=1, max_size=4), st.booleans())
def test_concat(parts: list[list[Any]], weighted: bool) -> None:
    joined = Columns.concat([columns(part, weighted=weighted) for part in parts])
    assert rows_of(joined) == [row for part in parts for row in part]
    assert (joined.ids["x"].weights is None) is (not weighted)
