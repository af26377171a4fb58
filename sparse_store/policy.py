"""Admission and eviction as rules over arrays; nothing here knows layout, threads or time."""

import numpy as np
from numpy.typing import NDArray

from sparse_store.config import Always, Count


def needed(admit: Always | Count) -> int:
    """Return how many sightings admit a key."""
    return 1 if isinstance(admit, Always) else admit.count


def horizon(clock: int, ttl: int) -> int:
    """Return the stamp below which an entry is dead, in ms.

    `clock - ttl`, rounded down to a multiple of ttl/64: so it moves 64 times per ttl and each
    move is worth a pass over the table.
    """
    grain = max(1, ttl // 64)
    return (clock - ttl) // grain * grain


def kept(bound: int) -> int:
    """Return how many stay once a bound was passed: 95 % of it, but at least one of any."""
    return max(min(bound, 1), bound * 95 // 100)


def oldest(stamps: NDArray[np.int64], keys: NDArray[np.uint64], leave: int) -> NDArray[np.int64]:
    """Return the positions of the `leave` smallest by (stamp, key), in no promised order.

    `stamps` and `keys` are [n], keys distinct, 0 <= leave <= n.
    """
    if leave <= 0:
        return np.empty(0, np.int64)
    edge = np.partition(stamps, leave - 1)[leave - 1]
    below = np.flatnonzero(stamps < edge)
    level = np.flatnonzero(stamps == edge)
    level = level[np.argsort(keys[level], kind="stable")]
    return np.concatenate([below, level[: leave - below.size]])
