"""What every sink must do, as tests that a test class of each sink inherits.

The subclass says how to make a sink object on the place under test, and how to look at that place
past the sink: its rows, and losing or rolling back what it holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from exporters import (
    Delta,
    DenseInfo,
    FenceLost,
    FenceTaken,
    HeadMismatch,
    Sink,
    SinkLostTime,
    TableInfo,
    TableRows,
)
from exporters.sink import Feed
from exporters.version import Half, Head
from exporters.wire import Kind, cut_chunks, encode_chunk, encode_chunks

Rows = dict[int, tuple[int, list[float]]]
"""By key the version that wrote a row, and the row."""

TOP = 2**64 - 1
CHUNK = 150
DIMS = {"user": 2}


def delta(
    version: int,
    since: int,
    rows: dict[int, list[float]],
    removed: tuple[int, ...] = (),
    dense: list[float] | None = None,
    generation: int = 1,
) -> Delta:
    """Make a delta of one table."""
    keys = sorted(rows)
    values = np.array([rows[key] for key in keys], np.float32).reshape(-1, 2)
    return Delta(
        version=version,
        since=since,
        generation=generation,
        step=version * 10,
        watermark=version * 1000,
        positions={"clicks/0": version},
        tables={"user": TableRows(np.array(keys, np.uint64), values, np.array(removed, np.uint64))},
        dense=None if dense is None else np.array(dense, np.float32),
        dims=DIMS,
    )


def checksum(what: Delta) -> str:
    """Return the checksum over the small chunks that are sent here."""
    return hashlib.sha256(b"".join(encode_chunks(what, CHUNK))).hexdigest()


def head_of(what: Delta, epoch: int, buckets: int = 3, dense: DenseInfo | None = None) -> Head:
    """Make the head that a version will have."""
    if what.dense is not None:
        dense = DenseInfo(what.version, len(what.dense))
    return Head(
        version=what.version,
        generation=what.generation,
        epoch=epoch,
        checksum=checksum(what),
        watermark=what.watermark,
        step=what.step,
        positions=what.positions,
        tables={"user": TableInfo(2, buckets, 5)},
        dense=dense,
    )


def send(sink: Sink, what: Delta, head: Head, *, generation: int, payload: bool = True) -> int:
    """D4: send all pieces; return the number of payload chunks."""
    chunks = cut_chunks(what, CHUNK)
    for chunk in chunks:
        if chunk.kind is Kind.ROWS:
            sink.put(chunk, head, generation=generation)
        if chunk.kind is Kind.DENSE:
            sink.put_dense(chunk, head, generation=generation)
        if payload:
            data = encode_chunk(chunk, version=head.version, count=len(chunks))
            sink.put_payload(chunk.index, data, head, generation=generation)
    return len(chunks) if payload else 0


def snapshot(sink: Sink, what: Delta, *, generation: int, expect: Head | None = None) -> Head:
    """Publish a delta's rows as a snapshot."""
    head = head_of(what, epoch=what.version)
    send(sink, what, head, generation=generation, payload=False)
    assert (
        sink.commit(head, since=None, generation=generation, expect=expect, chunks=0) == "published"
    )
    return head


def follow_on(sink: Sink, what: Delta, before: Head, *, generation: int) -> Head:
    """Publish a delta upon a head."""
    head = head_of(what, epoch=before.epoch, dense=before.dense)
    chunks = send(sink, what, head, generation=generation)
    assert (
        sink.commit(head, since=what.since, generation=generation, expect=before, chunks=chunks)
        == "published"
    )
    return head


class SinkContract:
    """Inherit it, and give the five methods below a body."""

    def make(self, place: Any) -> Sink:
        """Return a new sink object on the place, as another process would."""
        raise NotImplementedError

    def make_feed(self, place: Any) -> Feed:
        """Return the reading side."""
        raise NotImplementedError

    def rows(self, place: Any, epoch: int) -> Rows:
        """Return the rows of table "user" in an epoch, looked at past the sink."""
        raise NotImplementedError

    def save(self, place: Any) -> Any:
        """Return all that the place holds."""
        raise NotImplementedError

    def restore(self, place: Any, saved: Any) -> None:
        """Put the place back to what was saved."""
        raise NotImplementedError

    @pytest.fixture
    def place(self) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def sink(self, place: Any) -> Sink:
        sink = self.make(place)
        assert sink.read_fence() is None
        assert sink.take_fence(1) is None
        return sink

    # The fence

    def test_a_fence_is_taken_by_the_larger_generation_only(self, place: Any, sink: Sink) -> None:
        assert sink.read_fence() == 1
        other = self.make(place)
        with pytest.raises(FenceTaken, match="generation 1") as caught:
            other.take_fence(1)
        assert caught.value.fence == 1
        assert other.take_fence(2) is None
        assert sink.read_fence() == 2

    def test_a_fence_asked_for_again_is_answered_again(self, sink: Sink) -> None:
        """The answer may have been lost on its way."""
        head = snapshot(sink, delta(3, 0, {1: [1, 2]}), generation=1)
        assert sink.take_fence(1) == head

    def test_an_older_trainer_writes_neither_rows_nor_head(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
        newer = self.make(place)
        assert newer.take_fence(2) == first
        what = delta(2, 1, {1: [9, 9]}, dense=[1.0])
        head = head_of(what, epoch=1)
        chunks = cut_chunks(what, CHUNK)
        with pytest.raises(FenceLost) as caught:
            sink.put(chunks[1], head, generation=1)
        assert caught.value.observed == 2
        with pytest.raises(FenceLost):
            sink.put_payload(0, b"x", head, generation=1)
        with pytest.raises(FenceLost):
            sink.put_dense(chunks[2], head, generation=1)
        with pytest.raises(FenceLost):
            sink.commit(head, since=1, generation=1, expect=first, chunks=0)
        with pytest.raises(FenceLost):
            sink.drop_old_epochs(1, generation=1)
        assert self.rows(place, 1) == {1: (1, [1.0, 1.0])}
        assert newer.read_head() == first

    def test_an_older_trainer_is_stopped_in_the_midst_of_a_version(
        self, place: Any, sink: Sink
    ) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {k: [k, k] for k in range(1, 20)})
        head = head_of(what, epoch=1)
        pieces = [c for c in cut_chunks(what, CHUNK) if c.kind is Kind.ROWS]
        sink.put(pieces[0], head, generation=1)
        newer = self.make(place)
        seen = newer.take_fence(2)
        assert seen == first
        assert seen is not None
        assert seen.half == Half(2, 1)
        with pytest.raises(FenceLost):
            sink.put(pieces[1], head, generation=1)
        assert len(self.rows(place, 1)) == len(pieces[0].keys)

    def test_a_fence_that_is_gone_stops_writes(self, place: Any) -> None:
        empty = self.save(place)
        sink = self.make(place)
        sink.take_fence(4)
        self.restore(place, empty)
        head = head_of(delta(1, 0, {}), epoch=1)
        with pytest.raises(FenceLost) as caught:
            sink.put_payload(0, b"x", head, generation=4)
        assert caught.value.observed is None
        assert sink.read_fence() is None

    # Publishing

    def test_a_sink_without_a_head_takes_a_snapshot_only(self, sink: Sink) -> None:
        what = delta(1, 0, {1: [1, 2]})
        head = head_of(what, epoch=1)
        chunks = send(sink, what, head, generation=1)
        with pytest.raises(HeadMismatch, match="no head"):
            sink.commit(head, since=0, generation=1, expect=None, chunks=chunks)
        assert snapshot(sink, what, generation=1) == sink.read_head()

    def test_rows_of_a_delta_are_absolute_and_carry_their_version(
        self, place: Any, sink: Sink
    ) -> None:
        head = snapshot(sink, delta(5, 0, {0: [1, 2], 7: [3, 4], TOP: [5, 6]}), generation=1)
        follow_on(sink, delta(6, 5, {7: [8, 9], 8: [0, 0]}, removed=(0,)), head, generation=1)
        assert self.rows(place, 5) == {
            7: (6, [8.0, 9.0]),
            8: (6, [0.0, 0.0]),
            TOP: (5, [5.0, 6.0]),
        }

    def test_the_head_reads_back_as_written(self, sink: Sink) -> None:
        head = snapshot(sink, delta(5, 0, {1: [1, 2]}, dense=[1.5, 2.5]), generation=1)
        seen = sink.read_head()
        assert seen == head
        assert seen is not None
        assert seen.whole
        assert seen.half is None
        assert seen.dense == DenseInfo(5, 2)

    def test_a_commit_may_be_repeated(self, sink: Sink) -> None:
        """Its answer may have been lost on its way."""
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {1: [1, 1]})
        head = follow_on(sink, what, first, generation=1)
        for _ in range(2):
            assert sink.commit(head, since=1, generation=1, expect=first, chunks=3) == "already"
        other = replace(head, checksum="0" * 64)
        with pytest.raises(HeadMismatch):
            sink.commit(other, since=1, generation=1, expect=first, chunks=3)
        seen = sink.read_head()
        assert seen == head
        assert seen is not None
        assert seen.whole

    @pytest.mark.parametrize("since", [0, 1, 2, 3, 4])
    def test_a_delta_needs_since_at_or_below_the_head(self, sink: Sink, since: int) -> None:
        first = snapshot(sink, delta(2, 0, {}), generation=1)
        what = delta(5, since, {})
        head = head_of(what, epoch=2)
        chunks = send(sink, what, head, generation=1)
        if since <= 2:
            assert (
                sink.commit(head, since=since, generation=1, expect=first, chunks=chunks)
                == "published"
            )
        else:
            with pytest.raises(HeadMismatch, match="head is at 2"):
                sink.commit(head, since=since, generation=1, expect=first, chunks=chunks)

    def test_a_version_at_or_below_the_head_is_refused(self, sink: Sink) -> None:
        first = snapshot(sink, delta(5, 0, {}), generation=1)
        for version in (4, 5):
            what = delta(version, 1, {3: [0, 1]})
            head = head_of(what, epoch=5)
            chunks = send(sink, what, head, generation=1)
            with pytest.raises(HeadMismatch):
                sink.commit(head, since=1, generation=1, expect=first, chunks=chunks)
        assert sink.read_head() == first

    def test_a_delta_of_another_epoch_is_refused(self, sink: Sink) -> None:
        first = snapshot(sink, delta(5, 0, {}), generation=1)
        what = delta(6, 5, {})
        head = head_of(what, epoch=4)
        chunks = send(sink, what, head, generation=1)
        with pytest.raises(HeadMismatch):
            sink.commit(head, since=5, generation=1, expect=first, chunks=chunks)

    def test_a_snapshot_lives_in_its_own_epoch_until_the_flip(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {1: [1, 1], 2: [2, 2]}), generation=1)
        what = delta(4, 0, {1: [9, 9]})
        head = head_of(what, epoch=4)
        send(sink, what, head, generation=1, payload=False)
        seen = sink.read_head()
        assert seen == first
        assert seen is not None
        assert seen.whole
        assert seen.half is None
        assert len(self.rows(place, 1)) == 2
        sink.commit(head, since=None, generation=1, expect=first, chunks=0)
        assert sink.read_head() == head
        assert self.rows(place, 4) == {1: (4, [9.0, 9.0])}
        sink.drop_old_epochs(4, generation=1)
        assert self.rows(place, 1) == {}
        assert self.rows(place, 4) == {1: (4, [9.0, 9.0])}

    def test_a_snapshot_needs_the_expected_head(self, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        second = follow_on(sink, delta(2, 1, {}), first, generation=1)
        what = delta(4, 0, {})
        head = head_of(what, epoch=4)
        send(sink, what, head, generation=1, payload=False)
        for expect in (None, first, replace(second, generation=9), replace(second, epoch=2)):
            with pytest.raises(HeadMismatch):
                sink.commit(head, since=None, generation=1, expect=expect, chunks=0)
        assert sink.read_head() == second

    def test_epochs_are_dropped_only_around_the_head(self, place: Any, sink: Sink) -> None:
        """Else a sink that went back in time would lose the rows that it serves."""
        snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
        with pytest.raises(SinkLostTime):
            sink.drop_old_epochs(2, generation=1)
        assert len(self.rows(place, 1)) == 1

    # Pieces

    def test_pieces_sent_twice_change_nothing(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {k: [k, k] for k in range(9)}, dense=[0.5] * 70)
        head = head_of(what, epoch=1)
        chunks = cut_chunks(what, CHUNK)
        for chunk in chunks:
            for _ in range(2):
                if chunk.kind is Kind.ROWS:
                    sink.put(chunk, head, generation=1)
                if chunk.kind is Kind.DENSE:
                    sink.put_dense(chunk, head, generation=1)
                data = encode_chunk(chunk, version=2, count=len(chunks))
                sink.put_payload(chunk.index, data, head, generation=1)
        sink.commit(head, since=1, generation=1, expect=first, chunks=len(chunks))
        assert len(self.rows(place, 1)) == 9
        feed = self.make_feed(place)
        published = feed.follow(1, wait_ms=1, limit=10)[-1]
        assert checksum(feed.read_delta(published)) == head.checksum
        dense = feed.read_dense(head)
        assert dense is not None
        assert dense.tolist() == [0.5] * 70

    def test_a_version_is_not_published_without_all_its_pieces(self, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {1: [1, 1]}, dense=[1.0, 2.0])
        head = head_of(what, epoch=1)
        chunks = cut_chunks(what, CHUNK)
        sink.put(chunks[1], head, generation=1)
        for chunk in chunks:
            data = encode_chunk(chunk, version=2, count=3)
            sink.put_payload(chunk.index, data, head, generation=1)
        with pytest.raises(SinkLostTime):
            sink.commit(head, since=1, generation=1, expect=first, chunks=3)
        sink.put_dense(chunks[2], head, generation=1)
        with pytest.raises(SinkLostTime):
            sink.commit(head, since=1, generation=1, expect=first, chunks=4)
        sink.commit(head, since=1, generation=1, expect=first, chunks=3)

    def test_a_piece_after_a_missing_one_is_refused(self, sink: Sink) -> None:
        snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {}, dense=[1.0] * 40)
        head = head_of(what, epoch=1)
        with pytest.raises(SinkLostTime):
            sink.put_payload(1, b"x", head, generation=1)
        pieces = [c for c in cut_chunks(what, CHUNK) if c.kind is Kind.DENSE]
        with pytest.raises(SinkLostTime):
            sink.put_dense(pieces[1], head, generation=1)

    # Lost time

    def test_rows_lost_by_a_fail_over_are_noticed_by_the_next_piece(
        self, place: Any, sink: Sink
    ) -> None:
        snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {k: [k, k] for k in range(20)})
        head = head_of(what, epoch=1)
        pieces = [c for c in cut_chunks(what, CHUNK) if c.kind is Kind.ROWS]
        sink.put(pieces[0], head, generation=1)
        saved = self.save(place)
        sink.put(pieces[1], head, generation=1)
        self.restore(place, saved)
        with pytest.raises(SinkLostTime):
            sink.put(pieces[2], head, generation=1)
        seen = sink.take_fence(1)
        assert seen is not None
        assert (seen.version, seen.whole, seen.half) == (1, True, Half(2, 1))
        sink.put(pieces[0], head, generation=1)

    def test_rows_lost_by_a_fail_over_are_noticed_before_the_commit(
        self, place: Any, sink: Sink
    ) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        what = delta(2, 1, {1: [1, 1]})
        head = head_of(what, epoch=1)
        saved = self.save(place)
        chunks = send(sink, what, head, generation=1)
        self.restore(place, saved)
        with pytest.raises(SinkLostTime):
            sink.commit(head, since=1, generation=1, expect=first, chunks=chunks)

    def test_a_head_back_in_time_reads_back_as_it_was(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        saved = self.save(place)
        follow_on(sink, delta(2, 1, {}), first, generation=1)
        self.restore(place, saved)
        assert sink.read_head() == first

    def test_a_head_over_an_unfinished_snapshot_is_not_whole(self, place: Any, sink: Sink) -> None:
        """A fail-over back beyond a flip, whose old epoch may have been dropped."""
        first = snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
        what = delta(4, 0, {1: [9, 9]})
        head = head_of(what, epoch=4)
        send(sink, what, head, generation=1, payload=False)
        # The flip is refused, but the notes of the snapshot are sealed by then.
        with pytest.raises(HeadMismatch):
            sink.commit(head, since=None, generation=1, expect=None, chunks=0)
        seen = sink.read_head()
        assert seen == first
        assert seen is not None
        assert not seen.whole

    def test_a_version_shipped_again_below_one_begun_keeps_that_in_mind(
        self, place: Any, sink: Sink
    ) -> None:
        """Else a follower would take a row of the larger version for one of the smaller."""
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        later = delta(3, 2, {1: [3, 3]})
        piece = next(c for c in cut_chunks(later, CHUNK) if c.kind is Kind.ROWS)
        sink.put(piece, head_of(later, epoch=1), generation=1)
        follow_on(sink, delta(2, 1, {}), first, generation=1)
        seen = sink.read_head()
        assert seen is not None
        assert (seen.version, seen.whole, seen.half) == (2, True, Half(3, 1))

    # Followers

    def test_followers_see_each_version_once_and_whole(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {1: [1, 1]}, dense=[7.0]), generation=1)
        what = delta(2, 1, {1: [2, 2]}, removed=(5,))
        second = follow_on(sink, what, first, generation=1)
        feed = self.make_feed(place)
        seen = feed.follow(0, wait_ms=1, limit=10)
        assert [(p.version, p.since, p.epoch) for p in seen] == [(1, None, 1), (2, 1, 1)]
        assert feed.follow(1, wait_ms=1, limit=10) == seen
        assert feed.follow(2, wait_ms=1, limit=10) == []
        assert feed.follow(0, wait_ms=1, limit=1)[-1].version <= 2
        assert checksum(feed.read_delta(seen[1])) == second.checksum == seen[1].checksum
        head = feed.read_head()
        assert head == second
        assert head is not None
        rows = {
            (table, key): row.tolist()
            for table, keys, values, _ in feed.read_rows(head)
            for key, row in zip(keys.tolist(), values, strict=True)
        }
        assert rows == {("user", 1): [2.0, 2.0]}
        dense = feed.read_dense(head)
        assert dense is not None
        assert dense.tolist() == [7.0]

    def test_what_was_never_published_is_trimmed(self, place: Any, sink: Sink) -> None:
        first = snapshot(sink, delta(1, 0, {}), generation=1)
        undone = delta(2, 1, {1: [1, 1]}, dense=[1.0])
        send(sink, undone, head_of(undone, epoch=1), generation=1)
        head = follow_on(sink, delta(3, 1, {1: [2, 2]}), first, generation=1)
        sink.trim(generation=1)
        feed = self.make_feed(place)
        *_, last = feed.follow(1, wait_ms=1, limit=10)
        assert last.version == 3
        assert checksum(feed.read_delta(last)) == head.checksum
        assert feed.read_dense(replace(head, dense=DenseInfo(2, 1))) is None

    def test_the_last_two_dense_vectors_stay(self, place: Any, sink: Sink) -> None:
        head = snapshot(sink, delta(1, 0, {}, dense=[1.0]), generation=1)
        for version in range(2, 6):
            head = follow_on(
                sink, delta(version, version - 1, {}, dense=[float(version)]), head, generation=1
            )
            sink.trim(generation=1)
        feed = self.make_feed(place)
        for version in range(1, 6):
            found = feed.read_dense(replace(head, dense=DenseInfo(version, 1)))
            assert (found is not None) == (version >= 4)
