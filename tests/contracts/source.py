"""What every source of samples must do: inherit, and say how a source over given records is made.

A record is a click of `tests.test_consumers.clicks`; one with `ts=-1` decodes but is no sample.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from consumers import Batch, Partition, PositionLost, Source
from tests.test_consumers.clicks import click

Records = Sequence[Mapping[str, Any]]
Opener = Callable[[], Source]
Maker = Callable[[Sequence[Records]], Opener]

PATIENCE_S = 20.0


def never() -> bool:
    return False


def drain(
    source: Source, size: int | Iterator[int], messages: int, wait_ms: int | None = None
) -> list[Batch]:
    """Batches until so many messages are consumed."""
    batches: list[Batch] = []
    consumed = 0
    deadline = time.monotonic() + PATIENCE_S
    while consumed < messages:
        batch = source.batch(size if isinstance(size, int) else next(size), wait_ms, never)
        if batch is not None:
            batches.append(batch)
            consumed += batch.consumed
        assert time.monotonic() < deadline, f"{consumed} of {messages} messages came"
    return batches


def ids(batch: Batch) -> list[int]:
    assert np.array_equal(batch.columns.ids["id"].row_splits, np.arange(batch.columns.size + 1))
    return [int(key) for key in batch.columns.ids["id"].keys]


def picture(batch: Batch) -> tuple[Any, ...]:
    """Everything that must be the same when a batch is read again."""
    origins = [batch.partitions[i] for i in batch.partition_index.tolist()]
    return (
        ids(batch), origins, batch.offsets.tolist(), dict(batch.position), batch.bad,
        batch.consumed, batch.columns.labels["click"].tobytes(),
        batch.columns.dense["price"].tobytes(), batch.columns.time_ms.tolist(),
        batch.columns.ids["tags"].keys.tolist(), batch.columns.ids["tags"].row_splits.tolist(),
    )  # fmt: skip


def rows(partitions: int, each: int, bad_every: int = 0) -> list[list[dict[str, Any]]]:
    """Records numbered through all partitions; each `bad_every`-th is no sample."""
    numbers = iter(range(partitions * each))
    return [
        [
            click(n, ts=-1) if bad_every and n % bad_every == bad_every - 1 else click(n)
            for n in (next(numbers) for _ in range(each))
        ]
        for _ in range(partitions)
    ]


class SourceContract:
    """A subclass gives the fixture `maker`."""

    finite = True
    """Whether the source ends behind its last message."""

    ordered = True
    """Whether the order of messages across partitions is the same each time."""

    @pytest.fixture
    def maker(self) -> Maker:
        """From records per partition to a function that returns a new source over them."""
        raise NotImplementedError

    def test_every_message_is_a_sample_or_bad(self, maker: Maker) -> None:
        source = maker(rows(3, 50, bad_every=7))()
        try:
            start = source.open(None)
            assert sorted(start.values()) == [0, 0, 0]
            batches = drain(source, 16, 150, wait_ms=50)
            learned = [n for batch in batches for n in ids(batch)]
            bad = [b for batch in batches for b in batch.bad]
            assert sorted(learned) == [n for n in range(150) if n % 7 != 6]
            assert len(bad) == 21
            assert {b.reason for b in bad} == {"time"}
            assert all(b.value for b in bad)
            for batch in batches:
                assert batch.consumed == batch.columns.size + len(batch.bad)
            assert dict(batches[-1].position) == dict.fromkeys(start, 50)
        finally:
            source.close()

    def test_origins_and_positions_are_those_of_the_messages(self, maker: Maker) -> None:
        records = rows(3, 30, bad_every=5)
        source = maker(records)()
        try:
            position = dict(source.open(None))
            number_of: dict[tuple[Partition, int], int] = {}
            for batch in drain(source, 8, 90, wait_ms=50):
                seen: dict[Partition, int] = {}
                for i, n in enumerate(ids(batch)):
                    origin = batch.partitions[batch.partition_index[i]]
                    assert batch.offsets[i] >= seen.get(origin, position[origin])
                    seen[origin] = int(batch.offsets[i]) + 1
                    number_of[origin, int(batch.offsets[i])] = n
                for b in batch.bad:
                    origin = Partition(b.topic, b.partition)
                    seen[origin] = max(seen.get(origin, 0), b.offset + 1)
                position |= seen
                assert dict(batch.position) == position
            held = [sorted(r["id"] for r in part if r["ts"] >= 0) for part in records]
            got: dict[Partition, list[int]] = {}
            for (origin, _), n in sorted(number_of.items()):
                got.setdefault(origin, []).append(n)
            assert sorted(got.values()) == sorted(held)
        finally:
            source.close()

    def test_without_a_wait_batches_are_full(self, maker: Maker) -> None:
        source = maker(rows(1, 100, bad_every=4))()
        try:
            source.open(None)
            batches = drain(source, 10, 100 if self.finite else 90)
            assert [batch.columns.size for batch in batches[:7]] == [10] * 7
            if self.finite:
                assert [batch.columns.size for batch in batches[7:]] == [5]
                assert source.exhausted
                assert source.batch(10, None, never) is None
            else:
                assert source.batch(10, None, never) is None
                assert not source.exhausted
        finally:
            source.close()

    def test_reopened_at_a_batch_the_next_ones_are_the_same(self, maker: Maker) -> None:
        """Restore is load, then seek: the samples after a cut must be those that came before."""
        opener = maker(rows(3 if self.ordered else 1, 60, bad_every=6))
        total = 180 if self.ordered else 60
        first = opener()
        try:
            first.open(None)
            batches = drain(first, 7, total - 10)
        finally:
            first.close()
        for k in (0, len(batches) // 2, len(batches) - 2):
            again = opener()
            try:
                opened = again.open(batches[k].position)
                assert dict(opened) == dict(batches[k].position)
                rest = sum(batch.consumed for batch in batches[k + 1 :])
                for old, new in zip(batches[k + 1 :], drain(again, 7, rest), strict=True):
                    assert picture(new) == picture(old)
            finally:
                again.close()

    def test_sizes_may_differ_from_call_to_call(self, maker: Maker) -> None:
        source = maker(rows(1, 60, bad_every=9))()
        try:
            source.open(None)
            sizes = (1, 5, 2, 13, 3, 20)
            batches = [drain(source, size, 1)[0] for size in sizes]
            assert [batch.columns.size for batch in batches] == list(sizes)
            learned = [n for batch in batches for n in ids(batch)]
            assert learned == [n for n in range(60) if n % 9 != 8][: sum(sizes)]
        finally:
            source.close()

    def test_what_was_not_handed_over_is_in_no_position(self, maker: Maker) -> None:
        """A caller that stops in mid-batch must lose nothing, and may then ask for less."""
        source = maker(rows(1, 40, bad_every=5))()
        try:
            source.open(None)
            deadline = time.monotonic() + PATIENCE_S
            asked = 0

            def stop() -> bool:  # lets messages come in, then stops
                nonlocal asked
                asked += 1
                return asked > (1 if self.finite else 3)

            while not asked:
                assert source.batch(36, None, stop) is None
                assert time.monotonic() < deadline
            [batch] = drain(source, 6, 1)
            assert ids(batch) == [0, 1, 2, 3, 5, 6]
            assert list(batch.position.values()) == [7]
            [batch] = drain(source, 2, 1)
            assert ids(batch) == [7, 8]
        finally:
            source.close()

    def test_with_a_wait_what_is_there_comes(self, maker: Maker) -> None:
        source = maker(rows(1, 5))()
        try:
            source.open(None)
            batches = drain(source, 1000, 5, wait_ms=30)
            assert [n for batch in batches for n in ids(batch)] == [0, 1, 2, 3, 4]
            assert source.batch(1000, 30, never) is None
        finally:
            source.close()

    def test_with_a_wait_a_batch_may_hold_bad_messages_alone(self, maker: Maker) -> None:
        source = maker([[click(0, ts=-1), click(1, ts=-1)]])()
        try:
            source.open(None)
            batches = drain(source, 10, 2, wait_ms=50)
            assert sum(len(batch.bad) for batch in batches) == 2
            for batch in batches:
                assert batch.columns.size == 0
                assert batch.columns.dense["price"].shape == (0, 1)
                assert batch.columns.ids["id"].row_splits.tolist() == [0]
                assert batch.partitions == ()
        finally:
            source.close()

    def test_stop_ends_a_call(self, maker: Maker) -> None:
        source = maker(rows(1, 5))()
        try:
            source.open(None)
            assert source.batch(3, None, lambda: True) is None
            [batch] = drain(source, 3, 1)
            assert ids(batch) == [0, 1, 2]
        finally:
            source.close()

    def test_a_partition_that_the_position_does_not_name_starts_at_its_beginning(
        self, maker: Maker
    ) -> None:
        opener = maker(rows(2, 10))
        first = opener()
        try:
            full = first.open(None)
        finally:
            first.close()
        known = min(full)
        source = opener()
        try:
            opened = source.open({known: 4})
            assert dict(opened) == {p: 4 if p == known else 0 for p in full}
            batches = drain(source, 4, 16, wait_ms=50)
            assert sum(batch.columns.size for batch in batches) == 16
        finally:
            source.close()

    @pytest.mark.parametrize("offset", [11, 1 << 40, -5])
    def test_a_position_beyond_the_end_is_refused(self, maker: Maker, offset: int) -> None:
        """Reading on from somewhere else would train twice or skip, and nobody would see it."""
        opener = maker(rows(1, 10))
        first = opener()
        try:
            [partition] = first.open(None)
        finally:
            first.close()
        source = opener()
        try:
            with pytest.raises(PositionLost, match=rf"\b10\b.*{offset}|{offset}.*\b10\b"):
                source.open({partition: offset})
        finally:
            source.close()

    def test_a_partition_that_is_gone_is_refused(self, maker: Maker) -> None:
        opener = maker(rows(1, 3))
        first = opener()
        try:
            [partition] = first.open(None)
        finally:
            first.close()
        source = opener()
        try:
            with pytest.raises(PositionLost):
                source.open({partition: 0, Partition(partition.topic, 99): 5})
        finally:
            source.close()

    def test_lag_counts_what_is_in_no_batch(self, maker: Maker) -> None:
        source = maker(rows(2, 10))()
        try:
            source.open(None)
            assert sum(source.lag().values()) == 20
            [batch] = drain(source, 5, 1)
            assert sum(source.lag().values()) == 15
            drain(source, 15, 15)
            assert sum(source.lag().values()) == 0
            assert source.trouble() is None
            source.commit(batch.position)
        finally:
            source.close()

    def test_a_batch_of_nothing_is_refused(self, maker: Maker) -> None:
        source = maker(rows(1, 1))()
        try:
            source.open(None)
            with pytest.raises(ValueError, match="ask for 1"):
                source.batch(0, None, never)
        finally:
            source.close()
