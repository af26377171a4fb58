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
from itertools import count as counting
from itertools import repeat
from typing import Protocol

from consumers.avro import EncodedBlock, WriterDecoder, together
from consumers.container import Block, Container
from consumers.errors import DecodeError, PositionLost, SourceCorrupt, SpecError
from consumers.gather import Gathering
from consumers.source import Batch, Decoded, Decoder, Message, Partition

_AT_ONCE = 2000
_AT_ONCE_BYTES = 8 << 20


class FileDecoder(Decoder, Protocol):
    """A decoder that makes others, for what was written with other schemas."""

    def written_by(self, schema: object, *, name: str) -> WriterDecoder:
        """Return a decoder of blocks that were written with another schema."""
        ...


class _Block:
    """The records of a block that are still to come."""

    def __init__(self, first: int, values: list[bytes], times_ms: list[int]) -> None:
        self.first = first
        self.values = values
        self.times_ms = times_ms
        self.next = 0

    @property
    def is_done(self) -> bool:
        return self.next == len(self.values)

    def take(self, partition: Partition, most: int, below: int | None) -> list[Message]:
        """Take records while their time is below a bound; the next one always comes."""
        end = min(self.next + most, len(self.values))
        if below is not None:
            stop = self.next + 1
            while stop < end and self.times_ms[stop] < below:
                stop += 1
            end = stop
        start, self.next = self.next, end
        return list(
            map(Message, repeat(partition), counting(self.first + start), self.values[start:end])
        )


class _ByFile:
    """Decodes each message by the schema of its file."""

    def __init__(self, decoder: Decoder) -> None:
        self._of_nothing = decoder
        self.decoders: dict[Partition, WriterDecoder] = {}

    def decode(self, messages: Sequence[Message]) -> Decoded:
        partitions = [message.partition for message in messages]
        if not partitions:
            return self._of_nothing.decode(messages)
        if partitions.count(partitions[0]) == len(partitions):
            return self.decoders[partitions[0]].decode(messages)
        groups: dict[Partition, list[int]] = {}
        for i, partition in enumerate(partitions):
            groups.setdefault(partition, []).append(i)
        return together(
            messages,
            [
                (members, self.decoders[partition].decode([messages[i] for i in members]))
                for partition, members in groups.items()
            ],
        )


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
        self._merge = merge and len(paths) > 1
        self._held: dict[Partition, int] = {}
        self._containers: list[Container] = []
        self._blocks: list[Iterator[_Block]] = []
        self._current: list[_Block] = []
        self._heads: list[tuple[int, int]] = []  # time of the next record, and its file
        self._by_file = _ByFile(decoder)
        self._gathering = Gathering(
            self._by_file, self._fetch, ended=self._ended, timed=False, now=now
        )

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
            name = f"schema of {container.path}"
            writer = self._decoder.written_by(container.schema, name=name)
            self._by_file.decoders[partition] = writer
            self._blocks.append(self._read(container, writer, full[partition]))
            self._current.append(_Block(0, [], []))
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
        self._containers, self._blocks, self._current, self._heads = [], [], [], []

    def _ended(self) -> bool:
        return not self._heads

    def _fetch(self, count: int, timeout_s: float) -> list[Message]:
        del timeout_s  # a file never makes anybody wait
        fetched: list[Message] = []
        while self._heads and len(fetched) < count:
            _, file = heapq.heappop(self._heads)
            below = None
            if (
                self._heads and self._merge
            ):  # of equal times the file that was named first goes first
                time_ms, other = self._heads[0]
                below = time_ms + (file < other)
            block = self._current[file]
            fetched += block.take(self._partitions[file], count - len(fetched), below)
            self._advance(file)
        return fetched

    def _advance(self, file: int) -> None:
        block: _Block | None = self._current[file]
        if block is not None and block.is_done:
            block = next(self._blocks[file], None)
        if block is not None:
            self._current[file] = block
            time_ms = block.times_ms[block.next] if self._merge else 0
            heapq.heappush(self._heads, (time_ms, file))

    def _read(self, container: Container, writer: WriterDecoder, start: int) -> Iterator[_Block]:
        for blocks in _gathered(container.blocks(skip=start)):
            cut = writer.timed if self._merge else writer.split
            for block in _cut(container, cut, blocks):
                block.next = min(max(0, start - block.first), len(block.values))
                if not block.is_done:
                    yield block


def _gathered(blocks: Iterator[tuple[int, Block]]) -> Iterator[list[tuple[int, Block]]]:
    """Yield blocks several at a time; those before a damaged one come before its error."""
    held: list[tuple[int, Block]] = []
    records = size = 0
    while True:
        try:
            found = next(blocks, None)
        except SourceCorrupt:
            if held:
                yield held
            raise
        if found is None:
            break
        held.append(found)
        records += found[1].records
        size += len(found[1].data)
        if records >= _AT_ONCE or size >= _AT_ONCE_BYTES:
            yield held
            held, records, size = [], 0, 0
    if held:
        yield held


def _cut(
    container: Container,
    cut: Callable[[bytes, int], EncodedBlock],
    blocks: Sequence[tuple[int, Block]],
) -> Iterator[_Block]:
    """Cut blocks into records, all at once unless one is damaged."""
    data = b"".join(block.data for _, block in blocks)
    try:
        whole = cut(data, sum(block.records for _, block in blocks))
    except DecodeError:
        whole = None
    if whole is not None and _fit(blocks, whole.values):
        yield _Block(blocks[0][0], whole.values, whole.times_ms)
        return
    for first, block in blocks:  # one of them is damaged: find it
        try:
            found = cut(block.data, block.records)
        except DecodeError as error:
            raise SourceCorrupt(
                f"{container.path} is damaged in the block at byte {block.offset}: "
                f"{error.detail}; restore the file, or leave it out of the run"
            ) from error
        yield _Block(first, found.values, found.times_ms)


def _fit(blocks: Sequence[tuple[int, Block]], values: Sequence[bytes]) -> bool:
    """Whether each block ends where one of its records does, and not amid another's."""
    start = 0
    for _, block in blocks:
        end = start + block.records
        if sum(map(len, values[start:end])) != len(block.data):
            return False
        start = end
    return True
