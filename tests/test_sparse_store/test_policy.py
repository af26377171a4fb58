"""Admission and eviction rules against sorting and long arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_store import policy
from sparse_store.config import Always, Count


def test_sightings_needed() -> None:
    assert (policy.needed(Always()), policy.needed(Count(1)), policy.needed(Count(7))) == (1, 1, 7)


@given(st.integers(-(10**15), 10**15), st.integers(1, 10**12))
def test_the_horizon_is_rounded_down_to_its_grain(clock: int, ttl: int) -> None:
    grain = max(1, ttl // 64)
    horizon = policy.horizon(clock, ttl)
    assert horizon == math.floor(Fraction(clock - ttl, grain)) * grain
    assert clock - ttl - grain < horizon <= clock - ttl, "an entry never dies before its ttl"


@given(st.integers(1, 10**9))
def test_a_bound_leaves_95_percent(bound: int) -> None:
    kept = policy.kept(bound)
    assert 1 <= kept <= bound
    assert kept == max(1, math.floor(Fraction(bound * 95, 100)))


def test_a_bound_of_nothing_keeps_nothing() -> None:
    assert policy.kept(0) == 0


@given(st.data(), st.lists(st.integers(0, 6), max_size=60))
def test_the_oldest_leave_in_order_of_stamp_and_key(data: st.DataObject, stamps: list[int]) -> None:
    n = len(stamps)
    keys = data.draw(
        st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n, unique=True), label="keys"
    )
    leave = data.draw(st.integers(0, n), label="leave")
    found = policy.oldest(np.array(stamps, np.int64), np.array(keys, np.uint64), leave)
    wanted = sorted(range(n), key=lambda i: (stamps[i], keys[i]))[:leave]
    assert sorted(found.tolist()) == sorted(wanted)
