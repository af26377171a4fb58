"""A log that keeps its deltas in memory: the same answers as the directory, without the disk."""

from __future__ import annotations

import hashlib

from exporters.log import Log
from exporters.sink import Entry
from exporters.version import Delta
from exporters.wire import CHUNK_BYTES, decode_chunks, encode_chunks

Shelf = dict[int, tuple[Entry, list[bytes]]]


class MemoryLog(Log):
    """A log on a `shelf` that outlives it, as the directory does.

    What another process puts on the shelf later, this one does not see.
    """

    def __init__(
        self, shelf: Shelf, *, max_bytes: int = 1 << 30, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._shelf = shelf
        self._entries = tuple(shelf[version][0] for version in sorted(shelf))

    def append(self, delta: Delta) -> Entry:
        newest = self.newest()
        assert newest is None or delta.version > newest.version
        payload = encode_chunks(delta, self._chunk_bytes)
        entry = Entry(
            version=delta.version,
            since=delta.since,
            generation=delta.generation,
            step=delta.step,
            checksum=hashlib.sha256(b"".join(payload)).hexdigest(),
            bytes=sum(map(len, payload)),
            watermark=delta.watermark,
        )
        self._shelf[delta.version] = (entry, payload)
        self._entries = (*self._entries, entry)
        return entry

    def read(self, version: int) -> Delta:
        return decode_chunks(self._shelf[version][1])

    def prune(self, below: int) -> int:
        gone = [entry.version for entry in self._entries if entry.version < below]
        for version in gone:
            self._shelf.pop(version, None)
        self._entries = tuple(entry for entry in self._entries if entry.version >= below)
        return len(gone)
