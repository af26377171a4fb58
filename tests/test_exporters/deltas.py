"""Deltas to test with: made by hypothesis, and one that is fixed for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from exporters import Delta, TableRows

KEYS = st.one_of(
    st.integers(0, 6),
    st.integers(0, 2**64 - 1),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]),
)
NAMES = st.sampled_from(["user", "item", "a", "user_bias", "x.y-z", "T" * 128])


@st.composite
def table_rows(draw: st.DrawFn, dim: int, keys: st.SearchStrategy[int] = KEYS) -> TableRows:
    """Rows of one table, of any bits."""
    chosen = draw(st.sets(keys, max_size=20))
    gone = {key for key in chosen if draw(st.booleans())}
    written = np.array(sorted(chosen - gone), np.uint64)
    bits = draw(nps.arrays(np.uint32, (len(written), dim)))
    return TableRows(written, bits.view(np.float32), np.array(sorted(gone), np.uint64))


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    """Deltas of any content."""
    dims = draw(st.dictionaries(NAMES, st.integers(1, 9), max_size=4))
    tables = {name: draw(table_rows(dim)) for name, dim in dims.items() if draw(st.booleans())}
    floats = nps.arrays(np.uint32, st.integers(0, 100))
    dense = draw(st.none() | floats.map(lambda bits: bits.view(np.float32)))
    since = draw(st.integers(0, 2**40))
    return Delta(
        version=since + draw(st.integers(1, 2**40)),
        since=since,
        generation=draw(st.integers(0, 2**40)),
        step=draw(st.integers(0, 2**40)),
        watermark=draw(st.integers(-(2**50), 2**50)),
        positions=draw(st.dictionaries(st.text(max_size=9), st.integers(0, 2**63 - 1))),
        tables=tables,
        dense=dense,
        dims=dims,
        rows=draw(st.dictionaries(NAMES, st.integers(0, 2**40), max_size=3)),
    )


def same(a: Delta, b: Delta) -> bool:
    """Tell whether two deltas are equal, bit for bit; a table without a change counts as none."""

    def plain(delta: Delta) -> object:
        return (
            (delta.version, delta.since, delta.generation, delta.step, delta.watermark),
            dict(delta.positions),
            dict(delta.dims),
            dict(delta.rows),
            None if delta.dense is None else delta.dense.tobytes(),
            {
                name: (rows.keys.tolist(), rows.values.tobytes(), rows.removed.tolist())
                for name, rows in delta.tables.items()
                if len(rows.keys) or len(rows.removed)
            },
        )

    return plain(a) == plain(b)


def golden() -> Delta:
    """The delta in tests/data/exporters_1, which must be read for ever."""
    keys = np.array([0, 1, 255, 2**63, 2**64 - 1], np.uint64)
    values = np.array([[k + d / 8 for d in range(3)] for k in range(5)], np.float32)
    return Delta(
        version=42,
        since=40,
        generation=7,
        step=1234,
        watermark=1_700_000_000_000,
        positions={"clicks/0": 99, "clicks/1": 2**40},
        tables={
            "user": TableRows(keys, values, np.array([2, 2**64 - 2], np.uint64)),
            "item": TableRows(
                np.array([5], np.uint64), np.array([[-0.5]], np.float32), np.empty(0, np.uint64)
            ),
        },
        dense=np.array([1.5, -2.25, 0.0, np.inf], np.float32),
        dims={"user": 3, "item": 1, "quiet": 8},
        rows={"user": 5, "item": 1, "quiet": 0},
    )
