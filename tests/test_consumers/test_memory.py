"""The source over memory."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import Batch, Partition
from consumers.memory import Memory
from tests.contracts.source import (
    Maker,
    Opener,
    Records,
    SourceContract,
    drain,
    ids,
    never,
    picture,
)
from tests.test_consumers.clicks import click, decoder, encode


class TestMemoryContract(SourceContract):
    @pytest.fixture
    def maker(self) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            messages = {
                Partition("clicks", p): [encode(record) for record in part]
                for p, part in enumerate(records)
            }
            return lambda: Memory(messages, decoder())

        return make


class TestEndlessMemoryContract(SourceContract):
    finite = False

    @pytest.fixture
    def maker(self) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            messages = {
                Partition("clicks", p): [encode(record) for record in part]
                for p, part in enumerate(records)
            }
            return lambda: Memory(messages, decoder(), finite=False)

        return make


P = [Partition("clicks", p) for p in range(4)]


@given(
    rows=st.lists(
        st.lists(st.sampled_from(["good", "good", "bad", "none", "torn"]), max_size=25),
        min_size=1,
        max_size=3,
    ),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    where=st.integers(0, 1000),
)
def test_batches_are_a_function_of_messages_and_sizes(
    rows: list[list[str]], sizes: list[int], where: int
) -> None:
    """Replay equals live, and restore equals going on, whatever bad messages lie between."""
    number = itertools.count()

    def value(kind: str) -> bytes | None:
        made = encode(click(next(number), ts=-1)) if kind == "bad" else encode(click(next(number)))
        return {"none": None, "torn": made[:-1]}.get(kind, made)

    messages = {P[p]: [value(kind) for kind in some] for p, some in enumerate(rows)}
    count = sum(len(some) for some in rows)

    def batches(position: Any, skip: int, consumed: int, finite: bool = True) -> list[Batch]:
        source = Memory(messages, decoder(), finite=finite)
        source.open(position)
        return drain(source, itertools.islice(itertools.cycle(sizes), skip, None), consumed)

    whole = batches(None, 0, count)
    assert sum(batch.columns.size for batch in whole) == sum(some.count("good") for some in rows)
    if not whole:
        return
    full = whole[:-1]
    assert all(
        batch.columns.size == size
        for batch, size in zip(full, itertools.cycle(sizes), strict=False)
    )
    k = where % len(whole)
    rest = whole[k + 1 :]
    again = batches(whole[k].position, k + 1, sum(batch.consumed for batch in rest))
    assert [picture(batch) for batch in again] == [picture(batch) for batch in rest]
    live = batches(None, 0, sum(batch.consumed for batch in full), finite=False)
    assert [picture(batch) for batch in live] == [picture(batch) for batch in full]


def test_partitions_take_turns() -> None:
    messages = {P[p]: [encode(click(10 * p + i)) for i in range(2 + p)] for p in range(3)}
    source = Memory(messages, decoder())
    source.open(None)
    [batch] = drain(source, 100, 9)
    assert ids(batch) == [0, 10, 20, 1, 11, 21, 12, 22, 23]


def test_messages_that_come_later_and_partitions_too() -> None:
    source = Memory({P[0]: []}, decoder(), finite=False)
    source.open(None)
    assert source.batch(1, None, never) is None
    timer = threading.Timer(0.05, source.append, [P[1], encode(click(7))])
    timer.start()
    [batch] = drain(source, 1, 1)
    timer.join()
    assert ids(batch) == [7]
    assert dict(batch.position) == {P[0]: 0, P[1]: 1}
