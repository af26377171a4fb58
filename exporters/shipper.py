"""Ships versions to one sink, a piece at a time, at the sink's own pace.

States, each left by one `tick`::

    unfenced ──S3──▶ fenced ──entry to take──▶ shipping: D4 … D4, D5 ──▶ fenced
        ▲              │ └──needs a snapshot──▶ the same, into a new epoch
        └──────────────┴── fence gone or lower, head moved by itself, notes behind: the sink lost
                           time. Take the fence again, read the head again

What a sink at head h is given is decided from the log alone. If the log knows h and picking from h
reaches the newest entry, shipping what is picked leaves the sink with exactly the newest version's
rows, whatever was half written before: an entry holds absolute rows, and the repair of a restart
holds every key of every entry above its m. Otherwise the sink gets a snapshot.

Sending a piece again is harmless, so a piece that failed stays the current one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from exporters.errors import (
    FenceLost,
    FenceTaken,
    HeadMismatch,
    LogCorrupt,
    OutcomeUnknown,
    SinkLostTime,
    SinkRefused,
    SinkUnavailable,
    SnapshotHeld,
    StaleGeneration,
)
from exporters.job import Job, Piece, delta_job, snapshot_job
from exporters.log import Log, covers, knows, pick
from exporters.sink import Status
from exporters.wire import Kind, encode_chunk

if TYPE_CHECKING:
    from exporters.sink import Sink, Snapshot, SnapshotSource
    from exporters.version import Head

__all__ = ["OnStep", "Shipper", "nothing"]

OnStep = Callable[[str], None]

BURST_S = 0.25

_logger = logging.getLogger(__name__)


def nothing(step: str) -> None:
    """Take note of no step."""


class Shipper:
    """Ships the log's entries, and snapshots where those don't do, to one sink.

    Parameters
    ----------
    sink, log, snapshots
        Where to, where from, and where whole models come from.
    generation
        Ours. The fence must be it for anything to be written.
    needs_snapshot
        Begin with a snapshot, whatever the head.
    seen
        Told the version of each head that is met.
    on_step
        Told "D4" after each chunk and "D5" after each commit; what it raises goes through.
    now
        Monotonic seconds.
    max_rows_per_s
        Bound on rows written, or None.
    epoch_grace_s
        How long the rows of the former epoch stay after a snapshot, for clients that still read
        there.
    held_retry_s
        Time until a snapshot that was held is looked at again.
    """

    def __init__(
        self,
        sink: Sink,
        log: Log,
        *,
        generation: int,
        snapshots: SnapshotSource,
        needs_snapshot: bool = False,
        seen: Callable[[int], None] = lambda version: None,
        on_step: OnStep = nothing,
        now: Callable[[], float] = time.monotonic,
        max_rows_per_s: int | None = None,
        epoch_grace_s: float = 10.0,
        held_retry_s: float = 30.0,
    ) -> None:
        self.sink = sink
        self.wake = threading.Event()
        self._log = log
        self._generation = generation
        self._snapshots = snapshots
        self._seen = seen
        self._on_step = on_step
        self._now = now
        self._max_rows_per_s = max_rows_per_s
        self._epoch_grace_s = epoch_grace_s
        self._held_retry_s = held_retry_s
        self._needs_snapshot = needs_snapshot
        self._marked = False
        self._accept_small = False
        self._fenced = False
        self._connected = False
        self._head: Head | None = None
        self._job: Job | None = None
        self._reason = "not yet asked"
        self._held_until: float | None = None
        self._held_reason = ""
        self._pace_until = 0.0
        self._trim_due = False
        self._drop_at: float | None = None

    @property
    def head(self) -> Head | None:
        """The sink's head as last seen."""
        return self._head

    @property
    def behind(self) -> int:
        """Log entries above the sink's head."""
        head = self._head
        return sum(head is None or e.version > head.version for e in self._log.entries())

    @property
    def to_go(self) -> int:
        """Log entries that the gate counts: those above the head, or above a snapshot on its way.

        A sink that waits for a snapshot has none: closing the gate for it would keep back the
        very delta that the snapshot is to be made with.
        """
        job = self._job
        if job is not None and job.since is None:
            return sum(e.version > job.head.version for e in self._log.entries())
        return 0 if self._needs_snapshot or self._marked else self.behind

    @property
    def holds(self) -> int | None:
        """Version from which on the log must keep its entries for this sink.

        None: it holds nothing, since it gets a snapshot. 0: everything, its head is not known.
        """
        job, head = self._job, self._head
        if job is not None and job.since is None and not self._marked:
            return job.head.version
        if self._needs_snapshot or self._marked:
            return None
        return head.version if head is not None else 0

    @property
    def status(self) -> Status:
        """How the sink stands."""
        return Status(
            sink=self.sink.name,
            connected=self._connected,
            fenced=self._fenced,
            head=self._head,
            needs_snapshot=self._needs_snapshot,
            held=self._held_until is not None,
            behind=self.behind,
            reason=self._reason,
        )

    def mark(self) -> None:
        """Have the sink take a snapshot, begun anew; it holds no log entries from now on."""
        self._marked = True

    def accept_small(self) -> None:
        """Let the next snapshot through however few rows it has."""
        self._accept_small = True
        self._held_until = None
        self.wake.set()

    def tick(self) -> bool:
        """Do the sink's next piece of work and tell whether there was any.

        Raises
        ------
        StaleGeneration
            A newer trainer owns the model; this one has to end.
        """
        try:
            busy = self._advance()
        except (SinkUnavailable, OutcomeUnknown) as error:
            self._trouble(str(error), connected=False)
            return False
        except SinkRefused as error:
            self._trouble(str(error), connected=True)
            return False
        except SnapshotHeld as error:
            self._trouble(str(error), connected=True)
            self._held_until = self._now() + self._held_retry_s
            self._held_reason = str(error)
            return False
        except FenceLost as error:
            if error.observed is not None and error.observed > self._generation:
                raise StaleGeneration(
                    f"{error}; a newer trainer than generation {self._generation} owns the model"
                ) from error
            self._lost_time(str(error))
            return False
        except (SinkLostTime, HeadMismatch) as error:
            self._lost_time(str(error))
            return False
        self._connected = True
        self._reason = "" if self._held_until is None else self._held_reason
        return busy

    def _advance(self) -> bool:
        if not self._fenced:
            self._take_fence()
            return True
        if self._pace_until - self._now() > BURST_S:
            return False
        if self._marked:
            self._needs_snapshot = True
            self._job = None
            self._marked = False
        if self._job is None:
            self._job = self._next_job()
        if self._job is not None:
            self._step(self._job)
            return True
        return self._tidy() or self._look()

    def _take_fence(self) -> None:
        try:
            head = self.sink.take_fence(self._generation)
        except FenceTaken as error:
            raise StaleGeneration(
                f"sink {self.sink.name!r}: generation {error.fence} holds the fence; this trainer"
                f" is generation {self._generation} and ends"
            ) from error
        self._fenced = True
        self._job = None
        self._evaluate(head)

    def _evaluate(self, head: Head | None) -> None:
        """Decide from the log whether the sink can go on from this head."""
        self._head = head
        # What was held was held against another head; an empty sink has nothing to protect.
        self._held_until = None
        if head is None:
            self._needs_snapshot = True
            return
        self._seen(head.version)
        entries = self._log.entries()
        if not (
            knows(entries, head)
            and covers(entries, head.version)
            and head.groups == self.sink.groups
        ):
            self._needs_snapshot = True

    def _next_job(self) -> Job | None:
        entries = self._log.entries()
        at = self._head.version if self._head is not None else 0
        if not entries or entries[-1].version <= at:
            return None
        if not self._needs_snapshot:
            entry = pick(entries, at)
            if entry is not None and self._head is not None:
                try:
                    return delta_job(entry, self._log.read(entry.version), self._head, self.sink)
                except (KeyError, LogCorrupt) as error:
                    _logger.warning("sink needs snapshot: sink=%s reason=%s", self.sink.name, error)
            self._needs_snapshot = True
        if self._held_until is not None and self._now() < self._held_until:
            return None
        snapshot = self._snapshots.snapshot(at + 1)
        return None if snapshot is None else self._snapshot_job(snapshot)

    def _snapshot_job(self, snapshot: Snapshot) -> Job | None:
        entry = next((e for e in self._log.entries() if e.version == snapshot.version), None)
        before = self._head
        if entry is None or (before is not None and snapshot.version <= before.version):
            return None
        if before is not None and 2 * snapshot.total < before.rows and not self._accept_small:
            raise SnapshotHeld(
                f"sink {self.sink.name!r}: the snapshot of version {snapshot.version} has"
                f" {snapshot.total} rows where {before.rows} are served, and is held. Restore the"
                " lost state, or release the snapshot"
            )
        self._held_until = None
        # Rows of an attempt that never came to its flip must not mix with this one.
        keep = before.epoch if before is not None else 0
        self.sink.drop_old_epochs(keep, generation=self._generation)
        self._drop_at = None
        return snapshot_job(entry, snapshot, self.sink)

    def _step(self, job: Job) -> None:
        if job.current is None:
            job.current = next(job.chunks, None)
        if job.current is None:
            self._commit(job)
            return
        self._send(job, job.current)
        job.current = None
        self._on_step("D4")

    def _send(self, job: Job, piece: Piece) -> None:
        head, chunk, generation = job.head, piece.chunk, self._generation
        if piece.payload:
            data = encode_chunk(chunk, version=head.version, count=job.count)
            self.sink.put_payload(chunk.index, data, head, generation=generation)
        elif chunk.kind is Kind.DENSE:
            self.sink.put_dense(chunk, head, generation=generation)
        else:
            self.sink.put(chunk, head, generation=generation)
            if self._max_rows_per_s is not None:
                cost = (len(chunk.keys) + len(chunk.removed)) / self._max_rows_per_s
                self._pace_until = max(self._pace_until, self._now()) + cost

    def _commit(self, job: Job) -> None:
        outcome = self.sink.commit(
            job.head,
            since=job.since,
            generation=self._generation,
            expect=self._head,
            chunks=job.count,
        )
        # In this order another thread that asks what the log must keep never sees a gap.
        self._head = job.head
        if job.since is None:
            self._needs_snapshot = self._accept_small = False
            self._drop_at = self._now() + self._epoch_grace_s
        self._job = None
        self._seen(job.head.version)
        self._trim_due = True
        _logger.log(
            logging.INFO if job.since is None else logging.DEBUG,
            "%s: sink=%s version=%d since=%s",
            outcome,
            self.sink.name,
            job.head.version,
            job.since,
        )
        self._on_step("D5")

    def _tidy(self) -> bool:
        if self._trim_due:
            self.sink.trim(generation=self._generation)
            self._trim_due = False
            return True
        if self._drop_at is not None and self._now() >= self._drop_at and self._head is not None:
            self.sink.drop_old_epochs(self._head.epoch, generation=self._generation)
            self._drop_at = None
            return True
        return False

    def _look(self) -> bool:
        """Read fence and head back: a sink that lost time says so only when it is asked."""
        fence = self.sink.read_fence()
        if fence != self._generation:
            raise FenceLost(self.sink.name, fence)
        head = self.sink.read_head()
        if head != self._head or (head is not None and not head.whole):
            if self._needs_snapshot and self._head == head:
                return False
            raise SinkLostTime(
                f"sink {self.sink.name!r}: its head moved by itself, or rows under it are missing"
            )
        return False

    def _trouble(self, reason: str, *, connected: bool) -> None:
        if reason != self._reason:
            _logger.warning("not shipping: sink=%s reason=%s", self.sink.name, reason)
        self._reason = reason
        self._connected = connected

    def _lost_time(self, reason: str) -> None:
        self._trouble(reason, connected=True)
        self._fenced = False
        self._job = None
