"""Samples out of memory: for tests, and for whoever has the messages at hand already."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from consumers.errors import PositionLost
from consumers.gather import Gathering
from consumers.source import Batch, Decoder, Message, Partition


class Memory:
    """A source over lists of message values; the offset of a message is its index.

    Partitions take turns: the next message comes from the partition with the lowest next offset,
    the first of those in the order given. So the order is a function of the position.

    Parameters
    ----------
    messages
        Values per partition; None is a tombstone.
    decoder
        Turns messages into samples.
    finite
        Whether the source ends behind its last message; else it waits for :meth:`append`.
    now
        Clock for ``wait_ms``, in seconds.
    """

    def __init__(
        self,
        messages: Mapping[Partition, Sequence[bytes | None]],
        decoder: Decoder,
        *,
        finite: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._values = {partition: list(values) for partition, values in messages.items()}
        self._finite = finite
        self._next: dict[Partition, int] = {}
        self._more = threading.Condition()
        self._gathering = Gathering(decoder, self._fetch, ended=self._ended, timed=False, now=now)

    @property
    def exhausted(self) -> bool:
        """Whether a finite source has handed over all that it has."""
        return self._ended() and self._gathering.is_empty

    def append(self, partition: Partition, *values: bytes | None) -> None:
        """Add messages behind the last one; from any thread."""
        with self._more:
            self._values.setdefault(partition, []).extend(values)
            self._more.notify_all()

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:
        """Start at ``position``, or at the first message of each partition."""
        full = dict.fromkeys(self._values, 0) | dict(position or {})
        for partition, offset in full.items():
            held = len(self._values.get(partition, ()))
            if partition not in self._values or not 0 <= offset <= held:
                raise PositionLost(
                    f"offset {offset} of {partition.topic}/{partition.number} doesn't exist: "
                    f"the partition holds {held} messages"
                )
        self._next = full
        self._gathering.position = dict(full)
        return dict(full)

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        """Return the next batch, or None when it isn't complete yet."""
        return self._gathering.batch(size, wait_ms, stop)

    def lag(self) -> Mapping[Partition, int]:
        """Messages of each partition that are in no batch yet."""
        position = self._gathering.position
        return {p: len(values) - position.get(p, 0) for p, values in self._values.items()}

    def trouble(self) -> str | None:
        """Why messages have to wait for their schema; memory itself doesn't fail."""
        return self._gathering.trouble

    def commit(self, position: Mapping[Partition, int]) -> None:
        """Do nothing: nobody watches."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _ended(self) -> bool:
        return self._finite and not any(self._left().values())

    def _left(self) -> dict[Partition, int]:
        return {p: len(values) - self._next.get(p, 0) for p, values in self._values.items()}

    def _fetch(self, count: int, timeout_s: float) -> list[Message]:
        with self._more:
            if not any(self._left().values()):
                self._more.wait(timeout_s)
            for partition in self._values.keys() - self._next.keys():
                self._next[partition] = self._gathering.position[partition] = 0
            fetched: list[Message] = []
            while len(fetched) < count:
                waiting = [p for p, left in self._left().items() if left]
                if not waiting:
                    break
                partition = min(waiting, key=self._next.__getitem__)
                offset = self._next[partition]
                fetched.append(Message(partition, offset, self._values[partition][offset]))
                self._next[partition] = offset + 1
            return fetched
