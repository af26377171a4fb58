"""The copy that a replica begins with.

Rows go on changing while they are read, so the copy is *fuzzy*: the head is noted, all rows are
read as they are, and the deltas since that head heal it. From the largest version on that was
begun while rows were read, all rows are of one version; only then the copy serves. A half-written
version can't be seen in the rows themselves, since a removal leaves no trace there: the notes, read
together with each slice, tell of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporters.errors import NotReady
from exporters.notes import judge
from exporters.replica_state import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable

    from exporters.sink import Feed
    from exporters.version import Head

__all__ = ["read_copy"]


def read_copy(feed: Feed, model: str, stopped: Callable[[], bool]) -> ReplicaState:
    """Read head, rows and head again.

    Returns
    -------
    ReplicaState
        At the version of the head read first; it serves from its `target` on.

    Raises
    ------
    NotReady
        There is nothing to copy, or it changed on the way: try again.
    """
    before = feed.read_head()
    if before is None:
        raise NotReady(f"model {model!r} has no head: nothing was published yet")
    state = ReplicaState(before)
    for table, keys, values, notes in feed.read_rows(before):
        if stopped():
            raise NotReady("stopped")
        state.fill(table, keys, values)
        _heed(state, judge(before, [notes]))
    state.dense = feed.read_dense(before)
    state.dense_missing = before.dense is not None and state.dense is None
    after = feed.read_head()
    if after is None or after.epoch != before.epoch or after.version < before.version:
        raise NotReady("the head changed while rows were read; read again")
    state.target = max(state.target, after.version)
    _heed(state, before)
    _heed(state, after)
    return state


def _heed(state: ReplicaState, head: Head) -> None:
    """Take from what was seen while reading how far the copy must go before it serves."""
    if not head.whole:
        raise NotReady("rows under the head are missing until its next snapshot")
    if head.half is not None:
        state.target = max(state.target, head.half.version)
