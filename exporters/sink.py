"""What a sink must do, and where snapshots come from.

A sink serves one model. It keeps, under one *fence* (the generation that may write):

- rows, under an *epoch*; an epoch bears the version of the snapshot that began it, so rows of a
  delta have ``version > epoch`` and those of a snapshot ``version == epoch``;
- payload chunks and dense weights of versions about to be published;
- the *head*, moved by one atomic step that also makes the version visible to those who follow.

Rules that every sink keeps, and that the contract tests check:

1. Nothing is written unless the fence is the writer's generation, checked together with the write.
2. Each write notes how far it has come, and each write checks that note before it adds to it. A
   note that is behind what was acknowledged means that the sink lost time: `SinkLostTime`. A
   note that moved also stops a write that was sent long ago and arrives late.
3. Before the head moves, the notes are sealed as complete. A head without a sealed note lost
   rows on the way: it is shown with ``whole=False``.
4. Sending again what was sent before changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from exporters.notes import Notes
    from exporters.version import Delta, Head
    from exporters.wire import Chunk

__all__ = [
    "Entry",
    "Feed",
    "Published",
    "Sink",
    "Slice",
    "Snapshot",
    "SnapshotSource",
    "Status",
    "TableSlice",
]

TableSlice = tuple[str, NDArray[np.uint64], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot:
    """The whole model at the version of a log entry.

    Parameters
    ----------
    version
        A version that the log holds.
    step, watermark, positions
        As in that entry.
    dense
        All dense weights, or None when the model has none.
    dims
        The dim of every table.
    counts
        Rows of every table, known before `rows` is read.
    rows
        Slices of tables, ``(table, keys u64[n], values f32[n, dim])``, read once and in any order.
    """

    version: int
    step: int
    watermark: int
    positions: Mapping[str, int]
    dense: NDArray[np.float32] | None
    dims: Mapping[str, int]
    counts: Mapping[str, int]
    rows: Iterator[TableSlice]

    @property
    def total(self) -> int:
        """Rows over all tables."""
        return sum(self.counts.get(name, 0) for name in self.dims)


class SnapshotSource(Protocol):
    """Makes snapshots, away from the training thread.

    A snapshot has to be *exactly* its version: rows that were learned but not yet published must
    not be in it. If the trainer went back to an older cut, no log entry would name their keys and
    nothing would ever repair them. So a cut will do only with at least one log entry after
    `cut.version`, the first of which was frozen at the cut's step or later (that entry holds all
    that the cut had not published); else wait for the next delta.
    """

    def snapshot(self, at_least: int) -> Snapshot | None:
        """Return the model at the version of the newest log entry, which is >= `at_least`.

        None: not yet, ask again.
        """


class Sink(Protocol):
    """One place to ship versions to. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """Name for logs and status."""

    @property
    def groups(self) -> int:
        """Hash slots that the sink spreads rows over; a head of another number is rewritten."""

    def buckets(self, table: str, rows: int) -> int:
        """Return the number of buckets for a table of `rows` rows in a new epoch."""

    def order(self, table: str, keys: NDArray[np.uint64], head: Head) -> NDArray[np.int64]:
        """Return the order i64[n] in which a table's keys u64[n] are best written."""

    def check(self, dims: Mapping[str, int]) -> list[str]:
        """Return what would make the sink costly for tables of these dims, one sentence each.

        Raises
        ------
        SinkUnfit
            It may drop rows silently, and its config does not allow that.
        SinkUnavailable, SinkRefused
            It can't be asked.
        """

    def take_fence(self, generation: int) -> Head | None:
        """S3: raise the fence to `generation` and answer the head; again by the same: the same.

        Raises
        ------
        FenceTaken
            The fence is at or above `generation`, and not by this sink object's own doing.
        SinkUnavailable, SinkRefused
            Not reached, refusing to write, or not known whether raised; ask again.
        """

    def read_fence(self) -> int | None:
        """Return the lowest generation over all fence keys; None when one is gone."""

    def read_head(self) -> Head | None:
        """Return the head, or None. `Head.whole` and `Head.half` say what the notes tell."""

    def put(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        """D4: write rows and removals of one chunk of the version that will have this `head`.

        Raises
        ------
        FenceLost, SinkLostTime, SinkUnavailable, SinkRefused
            Nothing was written, or (not reached) the same may be sent again.
        """

    def put_payload(self, index: int, data: bytes, head: Head, *, generation: int) -> None:
        """D4: keep chunk `index` of the version's payload. Raises as `put`."""

    def put_dense(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        """D4: keep a piece of the version's dense weights. Raises as `put`."""

    def commit(
        self, head: Head, *, since: int | None, generation: int, expect: Head | None, chunks: int
    ) -> Literal["published", "already"]:
        """D5: publish `head` in one step.

        A delta (`since` is a number): the head must be in the same epoch and
        ``since <= head < version``. A snapshot (`since` is None): the head must be `expect`, and
        the epoch changes to that of `head`. A head with this version, generation and checksum
        already: "already". `chunks` payload chunks must be there.

        Raises
        ------
        HeadMismatch
            The head is another one.
        FenceLost, SinkLostTime, SinkUnavailable, SinkRefused
            The head was not moved.
        OutcomeUnknown
            The connection broke; commit again to learn.
        """

    def trim(self, *, generation: int) -> None:
        """Drop payloads beyond the sink's bound, and what was never published."""

    def drop_old_epochs(self, keep: int, *, generation: int) -> None:
        """Drop rows of all epochs but `keep`, in slices, while the fence is ours.

        Raises
        ------
        SinkLostTime
            `keep` is not the head's epoch (0: no head); also as `put`.
        """

    def close(self) -> None:
        """Let go of connections. The sink may be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a sink says of one version to those who follow.

    `since` is None for a snapshot: rows then live in a new `epoch`.
    """

    version: int
    since: int | None
    epoch: int
    generation: int
    checksum: str
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a sink stands. `reason` is empty while all is well."""

    sink: str
    connected: bool
    fenced: bool
    head: Head | None
    needs_snapshot: bool
    held: bool
    behind: int
    reason: str


class Slice(NamedTuple):
    """Rows as they were at one moment, and the notes at that same moment."""

    table: str
    keys: NDArray[np.uint64]
    values: NDArray[np.float32]
    notes: Notes


class Feed(Protocol):
    """The reading side of a sink, as a replica uses it. Used by one thread at a time."""

    def read_head(self) -> Head | None:
        """Return the head, or None."""

    def read_rows(self, head: Head) -> Iterator[Slice]:
        """Yield all rows of the head's epoch as they are at the time of reading.

        The notes are read together with each slice. Read apart, they would not tell of a sink that
        was ahead while the slice was read and went back in time right after.
        """

    def read_dense(self, head: Head) -> NDArray[np.float32] | None:
        """Return the head's dense weights, or None when they are gone or there are none."""

    def follow(self, after: int, *, wait_ms: int, limit: int) -> list[Published]:
        """Return version `after` itself, if it is there, and at most `limit` above it.

        Waits for one above; nothing when none comes. That the version held is in the same stream
        is what proves that those above follow on.
        """

    def read_delta(self, published: Published) -> Delta:
        """Return the delta of a published version.

        Raises
        ------
        Gap
            The sink has trimmed the payload.
        Corrupt
            The payload isn't what the checksum says.
        """

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the log says of one of its files. `bytes` is the size of the file."""

    version: int
    since: int
    generation: int
    step: int
    checksum: str
    bytes: int
    watermark: int
