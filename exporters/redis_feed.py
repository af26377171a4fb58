"""Reads a model out of Redis, for replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from exporters import redis_layout
from exporters.errors import Gap
from exporters.notes import Note, Notes, judge
from exporters.redis_session import Session
from exporters.sink import Slice
from exporters.wire import CHUNK_BYTES, decode_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from exporters.sink import Published
    from exporters.version import Delta, Head

__all__ = ["RedisFeed"]

BUCKETS_AT_ONCE = 256
CHUNKS_AT_ONCE = 16
DENSE_AT_ONCE = 1 << 22


class RedisFeed:
    """The reading side of a model in Redis.

    Parameters
    ----------
    url
        Where it is.
    model
        Name of the model.
    timeout_s
        Bound on connecting and on each answer.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float = 5.0) -> None:
        self._keys = redis_layout.Keys(model)
        self._session = Session(url, name=model, timeout_s=timeout_s)
        self._timeout_ms = int(timeout_s * 1000)

    def read_head(self) -> Head | None:
        """Return the head with what the notes tell of it, or None.

        Raises
        ------
        Corrupt
            It breaks the layout.
        SinkUnavailable
            Not reached.
        """
        fields = self._session.call("HGETALL", self._keys.head)
        head = redis_layout.head_from(dict(zip(fields[::2], fields[1::2], strict=True)))
        if head is None:
            return None
        names = [
            self._keys.group(group, what) for group in range(head.groups) for what in Notes._fields
        ]
        found = self._session.many([("GET", name) for name in names])
        notes = [None if raw is None else Note.decode(raw) for raw in found]
        return judge(head, [Notes(*notes[at : at + 2]) for at in range(0, len(notes), 2)])

    def read_rows(self, head: Head) -> Iterator[Slice]:
        """Yield all rows of the head's epoch as they are at the time of reading.

        Raises
        ------
        Corrupt
            A bucket breaks the layout.
        """
        for name, info in sorted(head.tables.items()):
            for group in range(head.groups):
                buckets = range(group, info.buckets, head.groups)
                for at in range(0, len(buckets), BUCKETS_AT_ONCE):
                    names = [
                        self._keys.bucket(group, head.epoch, name, bucket)
                        for bucket in buckets[at : at + BUCKETS_AT_ONCE]
                    ]
                    notes, fields = self._read_buckets(group, names)
                    keys, values = redis_layout.decode_bucket(fields, info.dim)
                    yield Slice(name, keys, values, notes)

    def _read_buckets(self, group: int, names: list[str]) -> tuple[Notes, list[bytes]]:
        reads = [("GET", self._keys.group(group, what)) for what in Notes._fields]
        reads += [("HGETALL", name) for name in names]
        pending, filling, *found = self._session.many([("MULTI",), *reads, ("EXEC",)])[-1]
        notes = Notes(*(None if raw is None else Note.decode(raw) for raw in (pending, filling)))
        return notes, [field for bucket in found for field in bucket]

    def read_dense(self, head: Head) -> NDArray[np.float32] | None:
        """Return the head's dense weights, or None when they are gone or there are none."""
        if head.dense is None:
            return None
        key, size = self._keys.dense(head.dense.version), 4 * head.dense.size
        if self._session.call("STRLEN", key) != size:
            return None
        pieces = [
            self._session.call("GETRANGE", key, at, min(at + DENSE_AT_ONCE, size) - 1)
            for at in range(0, size, DENSE_AT_ONCE)
        ]
        data = b"".join(pieces)
        return np.frombuffer(data, "<f4").astype(np.float32) if len(data) == size else None

    def follow(self, after: int, *, wait_ms: int, limit: int) -> list[Published]:
        """Return version `after` itself, if it is there, and at most `limit` above it.

        Raises
        ------
        Corrupt
            A stream entry breaks the layout.
        """
        log, wait = self._keys.log, max(1, min(wait_ms, self._timeout_ms // 2))
        if not self._session.call(
            *("XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", log, f"{after}-0")
        ):
            return []
        found = self._session.call("XRANGE", log, f"{after}-0", "+", "COUNT", limit + 1)
        return [redis_layout.published_from(entry, fields) for entry, fields in found]

    def read_delta(self, published: Published) -> Delta:
        """Return the delta of a published version.

        Raises
        ------
        Gap
            Redis has trimmed the payload.
        Corrupt
            The payload isn't what the checksum says.
        """
        return decode_chunks(
            self._chunks(published), checksum=published.checksum, max_bytes=CHUNK_BYTES
        )

    def close(self) -> None:
        """Let go of the connection."""
        self._session.close()

    def _chunks(self, published: Published) -> Iterator[bytes]:
        for at in range(0, published.chunks, CHUNKS_AT_ONCE):
            names = [
                self._keys.payload(published.version, index)
                for index in range(at, min(at + CHUNKS_AT_ONCE, published.chunks))
            ]
            found: Sequence[bytes | None] = self._session.call("MGET", *names)
            for data in found:
                if data is None:
                    raise Gap(f"the payload of version {published.version} is gone")
                yield data
