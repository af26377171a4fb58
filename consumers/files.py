"""Samples out of Avro container files, merged by event time.

The merge takes, of the records at the heads of all files, the one with the lowest (event time,
index of the file); within a file the order stays. A record without a valid event time
goes first. So the order of messages is a function of files and position.

A position names each file by its path as given, number 0, and counts records. A record that is
whole but can't be used is a bad message; a damaged block ends the run with its place, since what
stands behind it can't be told.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from consumers.avro import WriterDecoder
from consumers.container import Container
from consumers.errors import DecodeError, PositionLost, SourceCorrupt, SpecError
from consumers.features import Layout
from consumers.gather import Gathering
from consumers.source import Batch, Decoder, Message, Partition


class FileDecoder(Decoder, Protocol):
    """A decoder that reads what was written with another schema, and knows event times."""

    @property
    def layout(self) -> Layout:
        """The description of samples; it knows event times."""
        ...

    def written_by(self, schema: object, *, name: str) -> WriterDecoder:
        """Return a decoder of blocks that were written with another schema."""
        ...


class _Head(NamedTuple):
    """The next record of a file. Compared by time, then file; a file has one head at most."""

    time_ms: int
    file: int
    message: Message


class Files:
    """A finite source over Avro container files.

    Parameters
    ----------
    paths
        The files; at least one, each once.
    decoder
        Turns records into samples; their schemas may differ from the decoder's as far as Avro's
        schema resolution bridges it.
    merge
        False reads one file after the other.
    now
        Clock for ``wait_ms``, in seconds.

    Raises
    ------
    SpecError
        No path, or one given twice.
    """

    def __init__(
        self,
        paths: Sequence[str],
        decoder: FileDecoder,
        *,
        merge: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not paths:
            raise SpecError("no files to read samples from; name at least one")
        twice = sorted({path for path in paths if list(paths).count(path) > 1})
        if twice:
            raise SpecError(f"{', '.join(twice)}: named more than once")
        self._partitions = [Partition(str(path), 0) for path in paths]
        self._decoder = decoder
        self._merge = merge
        self._held: dict[Partition, int] = {}
        self._containers: list[Container] = []
        self._records: list[Iterator[_Head]] = []
        self._heads: list[_Head] = []
        self._gathering = Gathering(decoder, self._fetch, ended=self._ended, timed=False, now=now)

    @property
    def exhausted(self) -> bool:
        """Whether every record has been handed over."""
        return self._ended() and self._gathering.is_empty

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:
        """Start at ``position``, or at the first record of each file.

        Raises
        ------
        SourceUnavailable
            A file can't be opened.
        SourceCorrupt
            A header is damaged, or a block before or at the position.
        PositionLost
            A file holds fewer records than the position says, or isn't among the paths.
        """
        full = dict.fromkeys(self._partitions, 0) | dict(position or {})
        for partition in full.keys() - set(self._partitions):
            raise PositionLost(
                f"the position names {partition.topic}, which isn't among the files; add it"
            )
        for partition in self._partitions:
            with Container(partition.topic) as container:
                held = container.records()
            self._held[partition] = held
            if not 0 <= full[partition] <= held:
                raise PositionLost(
                    f"{partition.topic} holds {held} records, but the position "
                    f"is {full[partition]}; is it the same file?"
                )
        self._gathering.position = dict(full)
        for file, partition in enumerate(self._partitions):
            container = Container(partition.topic)
            self._containers.append(container)
            self._records.append(self._read(file, container, full[partition]))
            self._advance(file)
        return dict(full)

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        """Return the next batch, or None when it isn't complete yet.

        Raises
        ------
        SourceCorrupt
            A block is damaged. No record of it, and no later one of the file, was handed over.
        """
        return self._gathering.batch(size, wait_ms, stop)

    def lag(self) -> Mapping[Partition, int]:
        """Records of each file that are in no batch yet."""
        position = self._gathering.position
        return {p: held - position.get(p, 0) for p, held in self._held.items()}

    def trouble(self) -> str | None:
        """Return None: a file that can't be read is an error, not a state."""
        return None

    def commit(self, position: Mapping[Partition, int]) -> None:
        """Do nothing: nobody watches."""

    def close(self) -> None:
        """Close the files."""
        for container in self._containers:
            container.close()
        self._containers, self._records, self._heads = [], [], []

    def _ended(self) -> bool:
        return not self._heads

    def _fetch(self, count: int, timeout_s: float) -> list[Message]:
        del timeout_s  # a file never makes anybody wait
        fetched: list[Message] = []
        while self._heads and len(fetched) < count:
            head = heapq.heappop(self._heads)
            fetched.append(head.message)
            self._advance(head.file)
        return fetched

    def _advance(self, file: int) -> None:
        head = next(self._records[file], None)
        if head is not None:
            heapq.heappush(self._heads, head)

    def _read(self, file: int, container: Container, start: int) -> Iterator[_Head]:
        partition = self._partitions[file]
        decoder = self._decoder.written_by(container.schema, name=f"schema of {container.path}")
        for first, block in container.blocks(skip=start):
            try:
                records = decoder.records(block.data, block.records)
            except DecodeError as error:
                raise SourceCorrupt(
                    f"{container.path} is damaged in the block at byte {block.offset}: "
                    f"{error.detail}; restore the file, or leave it out of the run"
                ) from error
            for number, found in enumerate(records, first):
                if number < start:
                    continue
                time_ms = 0
                if self._merge and not isinstance(found.record, DecodeError):
                    time_ms = self._decoder.layout.time_ms(found.record) or 0
                message = Message(partition, number, found.value, record=found.record)
                yield _Head(time_ms, file, message)
