"""What every source of samples promises, and the types that it hands over.

The contract
------------
* A **position** maps each partition to the *next* offset to read. Whoever holds what was learned
  holds the position; a source never stores it and never decides by what a broker remembers.
* ``open`` comes first and once. With a position it continues exactly there, and a partition that
  the position doesn't name starts at its beginning (a topic of which it names none: by the start
  policy, since that is its first start). Without one it follows the start policy of
  its config, and pins it: the resolved position holds numbers, so that a restart before the
  first batch begins at the same place.
* ``batch`` hands over the samples of the next messages. Every message is either one good sample
  or one :class:`Bad`; a bad one never harms its neighbours. The position of a batch stands
  behind exactly the messages of this and all earlier batches. What was fetched but not handed
  over is in no position.
* With ``wait_ms=None`` batches are a pure function of the order of messages and the sizes asked
  for: opened at the position of batch k, a source yields the same batches k+1, k+2, ... Such a
  batch has exactly ``size`` samples, but for the last of a finite source, and but for one that
  closes early because as many messages as ``max(size, 1000)`` were bad: a poisoned stream shows
  itself instead of filling memory.
* Offsets of a partition rise, with gaps: a gap isn't a loss.
* ``trouble`` and ``lag`` never raise and never block for long; they may be a little old.
* One thread calls a source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from consumers.errors import DecodeError

REASONS: Mapping[str, str] = {
    "tombstone": "the message has no value",
    "empty": "the value has no bytes",
    "truncated": "the value ends before the record does",
    "trailing": "bytes are left behind the record",
    "range": "a number, length, enum or union index out of its range",
    "not_utf8": "a string that isn't UTF-8",
    "bad_magic": "the value doesn't begin as the framing says",
    "unknown_schema": "nobody knows the schema that the value was written with",
    "schema": "the value doesn't fit the schema",
    "time": "no event time, or one out of range",
    "label": "no label, or one that the loss can't use",
    "weight": "a sample weight that is negative or not finite",
    "weights": "weights of ids which don't match the ids, are negative or not finite",
    "width": "an array of floats with another number of entries than the feature has",
    "non_finite": "a NaN or infinity among the floats, once they are 32 bits wide",
}
"""Reasons of a :class:`Bad`, with what they mean."""


class Partition(NamedTuple):
    """One ordered stream of messages: a Kafka partition, or a file (its path, number 0)."""

    topic: str
    number: int


class Message(NamedTuple):
    """One message as fetched.

    ``record`` is the value decoded already, where the source had to look into it, or why it
    could not be. ``schema_id`` is the header that names the value's schema, where one is asked for.
    ``append_time_ms`` is the time that the log gives to the message, -1 where it gives none.
    """

    partition: Partition
    offset: int
    value: bytes | None
    append_time_ms: int = -1
    record: Mapping[str, Any] | DecodeError | None = None
    schema_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class Bad:
    """One message that became no sample; ``reason`` is a key of :data:`REASONS`."""

    topic: str
    partition: int
    offset: int
    reason: str
    detail: str
    value: bytes | None


class Ids(NamedTuple):
    """Ids of one feature over a batch of B samples.

    Attributes
    ----------
    keys
        ``uint64[n]``, those of sample i at ``row_splits[i]:row_splits[i + 1]``.
    row_splits
        ``int64[B + 1]``, starts at 0.
    weights
        ``float32[n]``, finite and not negative, or None for all 1.
    """

    keys: NDArray[np.uint64]
    row_splits: NDArray[np.int64]
    weights: NDArray[np.float32] | None

    def take(self, index: NDArray[np.int64]) -> "Ids":
        """Return the ids of the samples named by ``index``, in its order; a copy."""
        lengths = np.diff(self.row_splits)[index]
        splits = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=splits[1:])
        at = np.arange(splits[-1]) + np.repeat(self.row_splits[:-1][index] - splits[:-1], lengths)
        weights = None if self.weights is None else self.weights[at]
        return Ids(self.keys[at], splits, weights)

    @staticmethod
    def concat(parts: "Sequence[Ids]") -> "Ids":
        """Join the ids of several batches; all have weights, or none has."""
        ends = np.cumsum([0] + [len(part.keys) for part in parts])
        splits = [part.row_splits[1:] + end for part, end in zip(parts, ends, strict=False)]
        weights = [part.weights for part in parts if part.weights is not None]
        return Ids(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([np.zeros(1, np.int64), *splits]),
            np.concatenate(weights) if weights else None,
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Good samples, one array per thing.

    Attributes
    ----------
    size
        Number of samples, B.
    ids
        Per feature with ids.
    dense
        Per dense feature ``float32[B, k]``, finite.
    labels
        Per task ``float32[B]``, finite.
    weight
        ``float32[B]``, finite and not negative.
    time_ms
        ``int64[B]``, event time in ms since 1970.
    """

    size: int
    ids: Mapping[str, Ids]
    dense: Mapping[str, NDArray[np.float32]]
    labels: Mapping[str, NDArray[np.float32]]
    weight: NDArray[np.float32]
    time_ms: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> "Columns":
        """Return the samples named by ``index``, in its order; a copy."""
        return Columns(
            size=len(index),
            ids={name: ids.take(index) for name, ids in self.ids.items()},
            dense={name: values[index] for name, values in self.dense.items()},
            labels={name: values[index] for name, values in self.labels.items()},
            weight=self.weight[index],
            time_ms=self.time_ms[index],
        )

    @staticmethod
    def concat(parts: "Sequence[Columns]") -> "Columns":
        """Join the samples of at least one batch, in order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return Columns(
            size=sum(part.size for part in parts),
            ids={name: Ids.concat([part.ids[name] for part in parts]) for name in first.ids},
            dense={
                name: np.concatenate([part.dense[name] for part in parts]) for name in first.dense
            },
            labels={
                name: np.concatenate([part.labels[name] for part in parts]) for name in first.labels
            },
            weight=np.concatenate([part.weight for part in parts]),
            time_ms=np.concatenate([part.time_ms for part in parts]),
        )


class Decoded(NamedTuple):
    """Messages turned into samples: ``good[i]`` is the message that sample i came from."""

    columns: Columns
    good: NDArray[np.int64]
    bad: tuple[Bad, ...]


class Decoder(Protocol):
    """What turns messages into samples."""

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Decode each message for itself; ``good`` rises, and every other message is bad."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of some messages, and what became of the others.

    Attributes
    ----------
    columns
        The good samples, B of them.
    position
        The next offset of every partition of the source, after this batch.
    partitions
        The partitions that samples of this batch came from.
    partition_index
        ``int32[B]``, index into ``partitions``.
    offsets
        ``int64[B]``.
    bad
        Messages that became no sample, in order.
    consumed
        Messages that this batch stands for: ``B + len(bad)``.
    append_time_ms
        ``int64[B]``, -1 where unknown; None where the source has no such time.
    """

    columns: Columns
    position: Mapping[Partition, int]
    partitions: tuple[Partition, ...]
    partition_index: NDArray[np.int32]
    offsets: NDArray[np.int64]
    bad: tuple[Bad, ...]
    consumed: int
    append_time_ms: NDArray[np.int64] | None


class Source(Protocol):
    """A stream of samples with a position; the module's docstring has the whole contract."""

    @property
    def exhausted(self) -> bool:
        """Whether a finite source has handed over all that it has."""
        ...

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:
        """Start reading at ``position``, or where the config says; return it in full.

        Raises
        ------
        SourceUnavailable
            Nothing answers, or a topic or file is missing.
        PositionLost
            The position lies beyond the end, or a partition of it is gone.
        """
        ...

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        """Return the next batch, or None when it isn't complete yet.

        Parameters
        ----------
        size
            Good samples wanted, at least 1; may differ from call to call.
        wait_ms
            None: full batches only, or the rest of a finite source. A number: what is there so
            many ms after its first message came, and then maybe bad messages alone.
        stop
            Asked several times a second; once true, None comes back soon.
        """
        ...

    def lag(self) -> Mapping[Partition, int]:
        """Messages of each partition that are in no batch yet."""
        ...

    def trouble(self) -> str | None:
        """Why the source can't be read at the moment, or None."""
        ...

    def commit(self, position: Mapping[Partition, int]) -> None:
        """Show a position to others, such as lag dashboards; nobody starts from it."""
        ...

    def close(self) -> None:
        """Let go of everything within seconds. A closed source isn't used again."""
        ...
