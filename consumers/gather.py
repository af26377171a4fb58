"""Gathering messages into batches, the same way for every source.

Messages are kept as they came until their batch is handed over, so that a caller who gave up, or
who now asks for another size, loses nothing. They are decoded in chunks of exactly as many as
samples are missing, which makes a batch a function of the order of messages alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from consumers.errors import RegistryUnavailable
from consumers.source import Bad, Batch, Columns, Decoded, Decoder, Message, Partition

PATIENCE_S = 0.2
"""How long a call waits before it answers that nothing is complete yet."""

POLL_S = 0.05
"""How long one fetch may block; ``stop`` is asked in between."""

BAD_FLOOR = 1000
"""A batch closes early at ``max(size, BAD_FLOOR)`` bad messages."""


class Gathering:
    """The messages of the batch to come, and the position behind the last one.

    Parameters
    ----------
    decoder
        Turns messages into samples.
    fetch
        Takes a count and seconds; returns at most so many messages, in order, having waited at
        most so long for the first.
    ended
        Whether ``fetch`` will never return anything again.
    timed
        Whether messages carry the time of their log.
    now
        Clock for ``wait_ms``, in seconds.
    """

    def __init__(
        self,
        decoder: Decoder,
        fetch: Callable[[int, float], Sequence[Message]],
        *,
        ended: Callable[[], bool],
        timed: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.position: dict[Partition, int] = {}
        self.trouble: str | None = None
        self._decoder = decoder
        self._fetch = fetch
        self._ended = ended
        self._timed = timed
        self._now = now
        self._messages: list[Message] = []
        self._first_at = 0.0
        self._parts: list[Decoded] = []
        self._decoded = 0
        self._good = 0

    @property
    def staged(self) -> Mapping[Partition, int]:
        """Messages fetched but not handed over, per partition."""
        return Counter(message.partition for message in self._messages)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is staged."""
        return not self._messages

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        """Do what :meth:`consumers.source.Source.batch` promises.

        Raises
        ------
        ValueError
            ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"a batch of {size} samples was asked for; ask for 1 at least")
        if self._good > size:
            self._forget_decoded()
        patience = self._now() + PATIENCE_S
        while True:
            missing = size - self._good
            bad = self._decoded - self._good
            if missing <= 0 or bad >= max(size, BAD_FLOOR):
                return self._hand_over()
            pending = len(self._messages) - self._decoded
            if pending >= missing:
                if not self._decode(missing):
                    return None
                continue
            if stop():
                return None
            if self._ended() or self._is_late(wait_ms):
                if not self._decode(pending):
                    return None
                return self._hand_over() if self._messages else None
            if self._now() >= patience:
                return None
            self._stage(self._fetch(missing - pending, self._timeout(wait_ms)))

    def _is_late(self, wait_ms: int | None) -> bool:
        return (
            wait_ms is not None
            and bool(self._messages)
            and self._now() >= self._first_at + wait_ms / 1000
        )

    def _timeout(self, wait_ms: int | None) -> float:
        if wait_ms is None or not self._messages:
            return POLL_S
        return min(POLL_S, max(0.0, self._first_at + wait_ms / 1000 - self._now()))

    def _stage(self, messages: Sequence[Message]) -> None:
        if messages and not self._messages:
            self._first_at = self._now()
        self._messages.extend(messages)

    def _decode(self, count: int) -> bool:
        """Decode staged messages; False when they have to wait for their schema."""
        if count:
            chunk = self._messages[self._decoded : self._decoded + count]
            try:
                part = self._decoder.decode(chunk)
            except RegistryUnavailable as error:
                self.trouble = str(error)
                time.sleep(POLL_S)
                return False
            self._parts.append(part)
            self._decoded += len(chunk)
            self._good += part.columns.size
        self.trouble = None
        return True

    def _forget_decoded(self) -> None:
        self._parts = []
        self._decoded = self._good = 0

    def _hand_over(self) -> Batch:
        taken, self._messages = self._messages[: self._decoded], self._messages[self._decoded :]
        parts = self._parts
        self._forget_decoded()
        last = {message.partition: message.offset for message in taken}
        self.position.update((partition, offset + 1) for partition, offset in last.items())
        good: list[Message] = []
        bad: list[Bad] = []
        base = 0
        for part in parts:
            size = len(part.good) + len(part.bad)
            if part.bad:
                good += [taken[base + i] for i in part.good.tolist()]
                bad += part.bad
            else:
                good += taken[base : base + size]
            base += size
        index: dict[Partition, int] = {}
        where = [index.setdefault(message.partition, len(index)) for message in good]
        return Batch(
            columns=Columns.concat([part.columns for part in parts]),
            position=dict(self.position),
            partitions=tuple(index),
            partition_index=np.array(where, np.int32),
            offsets=np.array([message.offset for message in good], np.int64),
            bad=tuple(bad),
            consumed=len(taken),
            append_time_ms=(
                np.array([message.append_time_ms for message in good], np.int64)
                if self._timed
                else None
            ),
        )
