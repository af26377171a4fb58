"""Follows a model in a serving process.

A thread reads the sink's feed and applies each delta as a whole between two lookups. What a lookup
answers is always of one version: lookups and deltas take turns.

A replica begins, and begins anew after a gap or a snapshot, with a copy (`exporters.replica_copy`).
Until the new copy is ready the old one goes on answering.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from exporters.errors import (
    Corrupt,
    Duplicate,
    Gap,
    NotReady,
    SinkError,
    StaleGeneration,
)
from exporters.redis_feed import RedisFeed
from exporters.replica_copy import read_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from exporters.replica_state import ReplicaState
    from exporters.sink import Feed, Published

__all__ = ["Looked", "Replica"]

AT_ONCE = 64

_logger = logging.getLogger(__name__)


class Looked(NamedTuple):
    """Rows f32[n, dim] and found bool[n] by table, all of one `version`."""

    version: int
    tables: dict[str, tuple[NDArray[np.float32], NDArray[np.bool_]]]


class Replica:
    """A model's rows and dense weights, kept up to date by a thread.

    Parameters
    ----------
    source
        The URL of a Redis, or a feed.
    model
        Name of the model.
    poll_s
        How long one look at the feed waits for something new.
    retry_s
        Pause after the feed could not be read.
    patience_s
        How long a head below the version held is waited for, before a new copy is taken.
    now
        Monotonic seconds.
    """

    def __init__(
        self,
        source: str | Feed,
        *,
        model: str,
        poll_s: float = 0.2,
        retry_s: float = 0.5,
        patience_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        feed = RedisFeed(source, model=model) if isinstance(source, str) else source
        self._feed: Feed = feed
        self._model = model
        self._poll_ms = max(1, int(poll_s * 1000))
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._now = now
        self._changed = threading.Condition()
        self._state: ReplicaState | None = None
        self._next: ReplicaState | None = None
        self._begin = True
        self._unseen = 0
        self._behind_since: float | None = None
        self._reason = "not started"
        self._current_at: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """The version that lookups answer from."""
        return self._served().version

    @property
    def tables(self) -> dict[str, int]:
        """The dim of every table."""
        return self._served().tables

    @property
    def dense(self) -> NDArray[np.float32] | None:
        """The dense weights as one vector, not to be written to; None when there are none."""
        return self._served().dense

    @property
    def watermark(self) -> int:
        """The clock of the version, ms."""
        return self._served().watermark

    @property
    def staleness_s(self) -> float:
        """Seconds since the replica last knew that it held the newest version; or infinity."""
        at = self._current_at
        return float("inf") if at is None else self._now() - at

    @property
    def reason(self) -> str:
        """Why the replica is not ready or not up to date; empty while all is well."""
        return self._reason

    def lookup(self, table: str, ids: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows f32[n, dim], zeros for unknown ids, and found bool[n].

        Parameters
        ----------
        table
            Name of the table.
        ids
            uint64[n]; int64 stands for the same bits.

        Raises
        ------
        NotReady
            No version is held yet.
        UnknownTable
            The model has no such table.
        """
        keys = _keys(ids)
        with self._changed:
            return self._served().lookup(table, keys)

    def lookups(self, ids: Mapping[str, ArrayLike]) -> Looked:
        """Look up several tables at one version. Raises as `lookup`."""
        keys = {table: _keys(some) for table, some in ids.items()}
        with self._changed:
            state = self._served()
            found = {table: state.lookup(table, some) for table, some in keys.items()}
            return Looked(state.version, found)

    def rows(self, table: str) -> int:
        """Return how many rows of a table are held. Raises as `lookup`."""
        with self._changed:
            return self._served().rows(table)

    def wait_for(self, version: int, timeout_s: float) -> int:
        """Wait until at least `version` is held, and return the version that is.

        Raises
        ------
        NotReady
            It did not come in time; the text says what the replica waits for.
        """
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._state is not None and self._state.version >= version, timeout_s
            )
            if not arrived or self._state is None:
                held = "nothing" if self._state is None else f"version {self._state.version}"
                raise NotReady(
                    f"model {self._model!r}: version {version} did not come in {timeout_s:g} s;"
                    f" {held} is held ({self._reason or 'all is well'})"
                )
            return self._state.version

    def start(self, timeout_s: float = 30.0) -> Self:
        """Start to follow, and wait until there is a version to answer from.

        Raises
        ------
        NotReady
            None came in time. The replica goes on trying; `stop` ends that.
        """
        if self._thread is None:
            self._stop.clear()
            self._reason = "reading the first copy"
            self._thread = threading.Thread(
                target=self._run, name=f"replica-{self._model}", daemon=True
            )
            self._thread.start()
        if timeout_s > 0:
            self.wait_for(0, timeout_s)
        return self

    def stop(self) -> None:
        """Stop following; lookups go on to answer from what is held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._reason = "stopped"

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def tick(self) -> bool:
        """Do one piece of following here and now; tell whether anything came of it.

        For programs that don't want a thread, and for tests.
        """
        try:
            if self._begin:
                self._next = read_copy(self._feed, self._model, self._stop.is_set)
                self._begin = False
                if self._serve_if_ready():
                    self._current_at = self._now()
                return True
            return self._follow(self._next or self._state)
        except (Gap, Corrupt, StaleGeneration) as error:
            self._begin_anew(str(error))
        except (SinkError, NotReady) as error:
            self._trouble(str(error))
        return False

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self.tick()
            except Exception as error:
                _logger.exception("following failed: model=%s", self._model)
                self._begin_anew(f"{type(error).__name__}: {error}")
                busy = False
            if not busy and self._reason:
                self._stop.wait(self._retry_s)
        self._feed.close()

    def _served(self) -> ReplicaState:
        state = self._state
        if state is None:
            raise NotReady(f"model {self._model!r} holds no version yet: {self._reason}")
        return state

    def _follow(self, state: ReplicaState | None) -> bool:
        if state is None:
            self._begin_anew("nothing is held")
            return False
        fresh = self._feed.follow(state.version, wait_ms=self._poll_ms, limit=AT_ONCE)
        if not fresh:
            self._look(state)
            return False
        self._unseen = 0
        asked_at = self._now()
        if (fresh[0].version, fresh[0].checksum) != (state.version, state.checksum):
            # Trimmed; or Redis went back in time, and what came since is not of this timeline.
            self._begin_anew(f"the stream has no version {state.version} such as is held")
            return False
        for published in fresh[1:]:
            if not self._take(state, published):
                return False
        self._serve_if_ready()
        if len(fresh) <= AT_ONCE and state is self._state:
            self._is_current(asked_at)
        return True

    def _take(self, state: ReplicaState, published: Published) -> bool:
        if published.since is None or published.epoch != state.epoch:
            self._begin_anew(f"snapshot {published.version} began epoch {published.epoch}")
            return False
        try:
            prepared = state.prepare(self._feed.read_delta(published), published.checksum)
        except Duplicate:
            return True
        # Only what must be seen at once keeps lookups waiting.
        with self._changed:
            state.commit(prepared)
            self._changed.notify_all()
        return True

    def _look(self, state: ReplicaState) -> None:
        """Nothing new came: see by the head whether that is because there is nothing."""
        head = self._feed.read_head()
        if head is None:
            self._trouble(f"model {self._model!r} has no head any more")
        elif head.epoch != state.epoch:
            self._begin_anew(f"the head is in epoch {head.epoch}, the rows are of {state.epoch}")
        elif head.version < state.version:
            self._wait_for_head(head.version, state.version)
        elif head.version > state.version:
            # Published since the look at the stream; or the stream is gone.
            self._unseen += 1
            if self._unseen > 1:
                self._begin_anew(f"the stream doesn't lead from {state.version} to the head")
        elif head.checksum != state.checksum:
            self._begin_anew(f"version {head.version} has another content by now")
        elif state is self._state:
            self._unseen = 0
            self._is_current(self._now())
        else:
            self._trouble(f"rows of version {state.target} are being written; waiting for it")

    def _wait_for_head(self, head: int, held: int) -> None:
        """After a fail-over the trainer soon ships again what was lost; a new copy costs more."""
        self._trouble(f"the head went back to {head}; {held} is held")
        if self._behind_since is None:
            self._behind_since = self._now()
        elif self._now() - self._behind_since > self._patience_s:
            self._begin_anew(f"the head stays at {head}, below {held}: begun anew")

    def _serve_if_ready(self) -> bool:
        state = self._next
        if state is None:
            return False
        if state.version >= state.target and state.dense_missing:
            self._begin_anew("the dense weights were gone before they were read")
        if self._next is None or not state.serves:
            return False
        with self._changed:
            self._state, self._next = state, None
            self._reason = ""
            self._changed.notify_all()
        _logger.info("serving: model=%s version=%d", self._model, state.version)
        return True

    def _is_current(self, at: float) -> None:
        self._reason = ""
        self._current_at = at
        self._behind_since = None

    def _begin_anew(self, reason: str) -> None:
        self._begin, self._next, self._unseen, self._behind_since = True, None, 0, None
        self._trouble(reason)

    def _trouble(self, reason: str) -> None:
        if reason != self._reason:
            _logger.warning("not up to date: model=%s reason=%s", self._model, reason)
        self._reason = reason


def _keys(ids: ArrayLike) -> NDArray[np.uint64]:
    keys = np.asarray(ids)
    if keys.ndim != 1:
        raise ValueError(f"ids must be one flat array, got shape {keys.shape}")
    if keys.dtype == np.int64:
        return keys.view(np.uint64)
    if keys.dtype != np.uint64 and keys.size:
        raise TypeError(f"ids must be uint64 or int64, got {keys.dtype}")
    return keys.astype(np.uint64, copy=False)
