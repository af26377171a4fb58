"""A log that keeps its deltas in memory: the same answers as the directory, without the disk."""

from __future__ import annotations

from exporters.log import Log
from exporters.sink import Entry
from exporters.version import Delta
from exporters.wire import checksum_of, decode_chunks, encode_chunks


class MemoryLog(Log):
    """Holds payloads by version; `copy()` is what a restarted process finds."""

    def __init__(self, *, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self._entries = ()
        self._payloads: dict[int, list[bytes]] = {}

    def append(self, delta: Delta) -> Entry:
        newest = self.newest()
        assert newest is None or delta.version > newest.version
        payload = encode_chunks(delta)
        entry = Entry(
            version=delta.version,
            since=delta.since,
            generation=delta.generation,
            step=delta.step,
            checksum=checksum_of(delta),
            bytes=sum(map(len, payload)),
            watermark=delta.watermark,
        )
        self._payloads[delta.version] = payload
        self._entries = (*self._entries, entry)
        return entry

    def read(self, version: int) -> Delta:
        return decode_chunks(self._payloads[version])

    def prune(self, below: int) -> int:
        gone = [entry.version for entry in self._entries if entry.version < below]
        for version in gone:
            del self._payloads[version]
        self._entries = tuple(entry for entry in self._entries if entry.version >= below)
        return len(gone)
