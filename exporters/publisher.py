"""Gives versions their numbers, writes them to the log, and ships them.

The training thread calls `may_begin`, `append` and `prune`; one thread per sink runs its `Shipper`.
What the two sides share is the log, which locks itself, and the shippers' published attributes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from exporters.shipper import OnStep, Shipper, nothing
from exporters.version import Delta, TableRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from exporters.log import Log
    from exporters.sink import Sink, SnapshotSource, Status

__all__ = ["GATE_ENTRIES", "Publisher"]

GATE_ENTRIES = 2

_logger = logging.getLogger(__name__)


class Publisher:
    """Publishes one model: the log first, then each sink at its own pace.

    Parameters
    ----------
    log, sinks
        Where versions go. No sinks: the log is all there is.
    generation
        Ours; stamped on what is appended.
    floor
        The version of the cut that was loaded; numbers are given above it.
    snapshots
        Where whole models come from.
    snapshot_sinks
        Names of sinks that need a snapshot to begin with.
    on_step
        Told "D2", "D4", "D5" after these steps; what it raises goes through.
    now
        Monotonic seconds.
    idle_s
        How often a sink without work is looked at.
    max_rows_per_s
        Bound on rows written per second and sink, or None.

    Raises
    ------
    ValueError
        Two sinks of one name.
    """

    def __init__(
        self,
        log: Log,
        sinks: Sequence[Sink],
        *,
        generation: int,
        floor: int,
        snapshots: SnapshotSource,
        snapshot_sinks: Collection[str] = (),
        on_step: OnStep = nothing,
        now: Callable[[], float] = time.monotonic,
        idle_s: float = 0.2,
        max_rows_per_s: int | None = None,
    ) -> None:
        names = [sink.name for sink in sinks]
        if len(set(names)) != len(names):
            raise ValueError(f"sinks must have different names, got {names}")
        self.log = log
        self._generation = generation
        self._floor = floor
        self._on_step = on_step
        self._now = now
        self._idle_s = idle_s
        self._highest = floor
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._fatal: BaseException | None = None
        self.shippers = [
            Shipper(
                sink,
                log,
                generation=generation,
                snapshots=snapshots,
                needs_snapshot=sink.name in snapshot_sinks,
                seen=self.note_head,
                on_step=on_step,
                now=now,
                max_rows_per_s=max_rows_per_s,
            )
            for sink in sinks
        ]

    @property
    def fatal(self) -> BaseException | None:
        """What ended a shipping thread, to be raised by the training thread; or None."""
        return self._fatal

    @property
    def status(self) -> list[Status]:
        """How each sink stands."""
        return [shipper.status for shipper in self.shippers]

    def note_head(self, version: int) -> None:
        """Take note of a head that was seen: no version at or below it is given out any more."""
        with self._lock:
            self._highest = max(self._highest, version)

    def next_version(self) -> int:
        """Return the number that the next version gets."""
        newest = self.log.newest()
        with self._lock:
            return 1 + max(self._highest, newest.version if newest is not None else 0)

    def append(self, draft: Delta, since: int | None = None) -> Delta:
        """D2: number a draft and write it to the log.

        Parameters
        ----------
        draft
            Its version, since and generation are given here; its keys need not be sorted.
        since
            The repair's m; None: the delta follows the newest version.

        Returns
        -------
        Delta
            As written.
        """
        newest = self.log.newest()
        if since is None:
            since = max(self._floor, newest.version if newest is not None else 0)
        delta = replace(
            draft,
            version=max(self.next_version(), since + 1),
            since=since,
            generation=self._generation,
            tables={name: _ordered(rows) for name, rows in draft.tables.items()},
        )
        self.log.append(delta)
        for shipper in self.shippers:
            shipper.wake.set()
        self._on_step("D2")
        return delta

    def may_begin(self) -> bool:
        """Tell whether a delta may be begun: the sink furthest ahead is nearly done."""
        return not self.shippers or min(s.to_go for s in self.shippers) < GATE_ENTRIES

    def prune(self, oldest_cut: int) -> int:
        """C6: drop log entries that neither a kept cut nor a sink needs, and return how many.

        A sink that holds the log beyond its bound is marked: it gets a snapshot.

        Parameters
        ----------
        oldest_cut
            The version of the oldest cut that is kept.
        """
        while True:
            below = min([oldest_cut, *(s.holds for s in self.shippers if s.holds is not None)])
            dropped = self.log.prune(below)
            if self.log.bytes <= self.log.max_bytes or below >= oldest_cut:
                return dropped
            for shipper in self.shippers:
                if shipper.holds == below:
                    _logger.warning("log is full, sink needs snapshot: sink=%s", shipper.sink.name)
                    shipper.mark()

    def tick(self) -> bool:
        """Do one piece of work for each sink, here and now; tell whether there was any."""
        busy = [shipper.tick() for shipper in self.shippers]
        return any(busy)

    def start(self) -> Self:
        """Start one thread per sink."""
        for shipper in self.shippers:
            thread = threading.Thread(
                target=self._run, args=(shipper,), name=f"ship-{shipper.sink.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self

    def drain(self, timeout_s: float) -> bool:
        """Wait until every sink that can be reached has what the log has; False: it did not."""
        until = self._now() + timeout_s
        while any(s.behind and s.status.connected for s in self.shippers):
            if self._fatal is not None or self._now() >= until:
                return False
            self._stop.wait(0.01)
        return True

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the threads, each after its current piece, and let go of the sinks."""
        self._stop.set()
        until = self._now() + timeout_s
        for shipper in self.shippers:
            shipper.wake.set()
        for thread in self._threads:
            thread.join(max(0.0, until - self._now()))
        for shipper, thread in zip(self.shippers, self._threads, strict=False):
            if not thread.is_alive():
                shipper.sink.close()
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self, shipper: Shipper) -> None:
        try:
            while not self._stop.is_set():
                if not shipper.tick():
                    shipper.wake.wait(self._idle_s)
                    shipper.wake.clear()
        except BaseException as error:
            self._fatal = error
            _logger.exception("shipping ended: sink=%s", shipper.sink.name)


def _ordered(rows: TableRows) -> TableRows:
    keys, values, removed = rows
    if not bool(np.all(keys[1:] > keys[:-1])):
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    return TableRows(keys, values, np.sort(removed))
