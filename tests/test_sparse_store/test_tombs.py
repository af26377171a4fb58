"""Tombstones: what readers are told of removals, and that saving keeps it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_store.tombs import Graveyard

BURIALS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.sets(st.integers(0, 9), min_size=1, max_size=4))
)


def graveyard(burials: list[tuple[int, bool, set[int]]]) -> tuple[Graveyard, list[tuple]]:
    """A graveyard and the same as (step, rows, key), steps being sums of what is drawn."""
    graves, plain, step = Graveyard(), [], 0
    for pause, rows, keys in burials:
        step += pause
        graves.bury(np.array(sorted(keys), np.uint64), rows=rows, step=step)
        plain += [(step, rows, key) for key in sorted(keys)]
    return graves, plain


@given(BURIALS, st.integers(-1, 20), st.booleans())
def test_a_reader_sees_what_was_buried_after_its_cursor(burials, since, rows_only) -> None:
    graves, plain = graveyard(burials)
    wanted = {key for step, rows, key in plain if step > since and (rows or not rows_only)}
    assert graves.after(since, rows_only=rows_only).tolist() == sorted(wanted)
    for key in range(10):
        steps = [step for step, rows, k in plain if rows and k == key]
        assert graves.last(key) == (max(steps) if steps else None)


@given(BURIALS, st.integers(-1, 20))
def test_forgetting_saving_and_restoring(burials, upto) -> None:
    graves, plain = graveyard(burials)
    graves.forget(upto)
    kept = [tomb for tomb in plain if tomb[0] > upto]
    assert len(graves) == len(kept)
    again = Graveyard()
    again.restore(graves.columns())
    for tombs in (graves.columns(), again.columns()):
        columns = (tombs.steps.tolist(), tombs.rows.tolist(), tombs.keys.tolist())
        assert [*zip(*columns, strict=True)] == kept
    cut = graves.columns().after(upto + 1)
    assert cut.steps.tolist() == [step for step, _, _ in kept if step > upto + 1]
