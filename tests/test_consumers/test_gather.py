"""How messages become batches: deadlines, patience, and streams that are all bad."""

from collections.abc import Sequence

import pytest

from consumers.gather import BAD_FLOOR, PATIENCE_S, Gathering
from consumers.source import Batch, Message, Partition
from tests.contracts.source import ids, never
from tests.test_consumers.clicks import click, decoder, encode

P0 = Partition("clicks", 0)
BAD = b"\xff"


class Feed:
    """A source of messages with a clock of its own: each fetch waits, and then brings some."""

    def __init__(self, arrivals: Sequence[tuple[float, list[bytes]]]) -> None:
        self.arrivals = list(arrivals)
        self.now = 100.0
        self.offset = 0
        self.waits: list[float] = []

    def fetch(self, count: int, timeout_s: float) -> list[Message]:
        self.waits.append(timeout_s)
        if not self.arrivals or self.arrivals[0][0] > self.now + timeout_s:
            self.now += timeout_s
            return []
        at, values = self.arrivals[0]
        self.now = max(self.now, at)
        taken, rest = values[:count], values[count:]
        self.arrivals[:1] = [(at, rest)] if rest else []
        fetched = [Message(P0, self.offset + i, value, 7) for i, value in enumerate(taken)]
        self.offset += len(fetched)
        return fetched

    def gathering(self) -> Gathering:
        made = Gathering(
            decoder(), self.fetch, ended=lambda: False, timed=True, now=lambda: self.now
        )
        made.position = {P0: 0}
        return made


def good(*numbers: int) -> list[bytes]:
    return [encode(click(n)) for n in numbers]


def got(batch: Batch | None) -> list[int]:
    assert batch is not None
    return ids(batch)


def test_the_wait_counts_from_the_first_message() -> None:
    feed = Feed([(100.1, good(0)), (100.12, good(1)), (100.151, good(2)), (100.2, good(3))])
    gathering = feed.gathering()
    batch = gathering.batch(10, 50, never)
    assert got(batch) == [0, 1]
    assert feed.now == pytest.approx(100.15)
    assert batch is not None
    assert batch.append_time_ms is not None
    assert batch.append_time_ms.tolist() == [7, 7]


def test_without_a_message_patience_ends_a_call() -> None:
    feed = Feed([])
    gathering = feed.gathering()
    for wait_ms in (None, 0, 50, 10_000):
        before = feed.now
        assert gathering.batch(10, wait_ms, never) is None
        assert feed.now - before == pytest.approx(PATIENCE_S, abs=0.051)


@pytest.mark.parametrize("wait_ms", [None, 1000])
def test_a_trickle_does_not_hold_the_caller(wait_ms: int | None) -> None:
    """Checkpoints and signals are seen to between calls: a call must end though messages come."""
    feed = Feed([(100 + 0.04 * n, good(n)) for n in range(100)])
    gathering = feed.gathering()
    assert gathering.batch(90, wait_ms, never) is None
    assert feed.now < 100.3
    assert gathering.position == {P0: 0}
    calls = 1
    batch = None
    while batch is None:
        batch = gathering.batch(90, wait_ms, never)
        calls += 1
    assert calls > 4
    assert got(batch) == list(range(90 if wait_ms is None else 26))


def test_no_wait_takes_what_is_there() -> None:
    feed = Feed([(100, good(0, 1, 2)), (100.01, good(3))])
    assert got(feed.gathering().batch(10, 0, never)) == [0, 1, 2]


def test_only_as_many_are_fetched_as_are_missing() -> None:
    """What is fetched beyond a batch would be read again after every restart."""
    feed = Feed([(100, [*good(0), BAD, *good(1, 2, 3)])])
    gathering = feed.gathering()
    assert got(gathering.batch(3, None, never)) == [0, 1, 2]
    assert feed.offset == 4
    assert gathering.is_empty


def test_a_poisoned_stream_shows_itself() -> None:
    """With a full batch as the only end, a stream of garbage would fill memory in silence."""
    feed = Feed([(100, [*good(0), *[BAD] * 5000])])
    gathering = feed.gathering()
    batch = gathering.batch(10, None, never)
    assert got(batch) == [0]
    assert batch is not None
    assert BAD_FLOOR <= len(batch.bad) < BAD_FLOOR + 10
    assert batch.position == {P0: batch.consumed}
    large = gathering.batch(2000, None, never)
    assert large is not None
    assert len(large.bad) == 2000


def test_a_smaller_size_cuts_what_was_decoded_already() -> None:
    feed = Feed([(100, [*good(0, 1, 2), BAD, *good(3, 4)])])
    gathering = feed.gathering()
    assert gathering.batch(6, None, never) is None
    assert gathering.staged == {P0: 6}
    assert got(gathering.batch(2, None, never)) == [0, 1]
    assert gathering.position == {P0: 2}
    batch = gathering.batch(2, None, never)
    assert got(batch) == [2, 3]
    assert batch is not None
    assert [bad.offset for bad in batch.bad] == [3]
    assert got(gathering.batch(1, None, never)) == [4]
    assert gathering.is_empty
