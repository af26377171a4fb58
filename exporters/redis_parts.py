"""What is there of payloads and dense weights, and what may go; no input or output.

The hash ``st:{ctr}:parts`` has a field per payload, ``d:<version>`` = ``chunks bytes published``,
and one per dense vector, ``dense:<version>`` = ``floats published``; published is 0 or 1. Through
it the commit knows that all pieces are there, and versions that were begun and never published
are found again and dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from exporters.errors import SinkLostTime

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from exporters.redis_layout import Keys
    from exporters.redis_session import Command

__all__ = ["Doomed", "Parts"]

MAX_VERSIONS = 1 << 16
"""Versions that the stream keeps at most, however small they are."""


class _Payload(NamedTuple):
    chunks: int
    size: int
    published: bool


class Doomed(NamedTuple):
    """What may go: keys, fields of the parts hash, and stream entries below a version."""

    keys: list[str]
    fields: list[str]
    stream_below: int | None


class Parts:
    """The writer's view of the parts hash.

    Parameters
    ----------
    keys
        Names.
    keep_versions
        Dense vectors to keep.
    stream_bytes
        Payload bytes to keep.
    """

    def __init__(self, keys: Keys, *, keep_versions: int, stream_bytes: int) -> None:
        self._keys = keys
        self._keep_versions = keep_versions
        self._stream_bytes = stream_bytes
        self.loaded = False
        self._payloads: dict[int, _Payload] = {}
        self._dense: dict[int, bool] = {}

    def forget(self) -> None:
        """Forget all: the sink may hold something else by now."""
        self.loaded = False
        self._payloads.clear()
        self._dense.clear()

    def load(self, fields: Mapping[bytes, bytes]) -> None:
        """Take over what the sink's hash says; fields that make no sense are passed over."""
        for field, value in fields.items():
            what, _, version = field.partition(b":")
            numbers = [int(word) for word in value.split(b" ") if word.isdigit()]
            if not version.isdigit() or len(numbers) != {b"d": 3, b"dense": 2}.get(what):
                continue
            if what == b"d":
                found = _Payload(numbers[0], numbers[1], bool(numbers[2]))
                self._payloads.setdefault(int(version), found)
            else:
                self._dense.setdefault(int(version), bool(numbers[1]))
        self.loaded = True

    def payload_field(self, version: int) -> str:
        """Return the field of a payload."""
        return f"d:{version}"

    def dense_field(self, version: int) -> str:
        """Return the field of a dense vector."""
        return f"dense:{version}"

    def add_payload(
        self, version: int, index: int, data: bytes, found: bytes | None
    ) -> list[Command]:
        """Return the commands that keep a chunk, given what its field holds.

        Raises
        ------
        SinkLostTime
            Chunks before this one are missing.
        """
        chunks, size, *_ = self._numbers(found, 3)
        if index == 0:
            chunks, size = 0, 0
        if chunks == index:
            size += len(data)
        elif chunks != index + 1:
            raise SinkLostTime(f"version {version} has {chunks} payload chunks, {index} were kept")
        self._payloads[version] = _Payload(index + 1, size, published=False)
        field = self.payload_field(version)
        return [
            ("SET", self._keys.payload(version, index), data),
            ("HSET", self._keys.parts, field, f"{index + 1} {size} 0"),
        ]

    def add_dense(
        self, version: int, offset: int, dense: NDArray[np.float32], found: bytes | None
    ) -> list[Command]:
        """Return the commands that keep a piece of the dense weights. Raises as `add_payload`."""
        floats = self._numbers(found, 2)[0] if offset else 0
        if floats not in (offset, offset + len(dense)):
            raise SinkLostTime(f"version {version} has {floats} dense weights, {offset} were kept")
        self._dense[version] = False
        key, field = self._keys.dense(version), self.dense_field(version)
        data = dense.astype("<f4", copy=False).tobytes()
        begin: Command = ("DEL", key) if offset == 0 else ("EXISTS", key)
        return [
            begin,
            ("SETRANGE", key, 4 * offset, data),
            ("HSET", self._keys.parts, field, f"{offset + len(dense)} 0"),
        ]

    def published(self, version: int) -> None:
        """Take note that a version was published."""
        if (found := self._payloads.get(version)) is not None:
            self._payloads[version] = found._replace(published=True)
        if version in self._dense:
            self._dense[version] = True

    def doomed(self, head: int) -> Doomed | None:
        """Return what may go when the head is at version `head`; None: nothing."""
        keep: set[int] = set()
        size, below = 0, None
        out = sorted((v for v, p in self._payloads.items() if p.published), reverse=True)
        for version in out:
            size += self._payloads[version].size
            if keep and (size > self._stream_bytes or len(keep) >= MAX_VERSIONS):
                below = min(keep)
                break
            keep.add(version)
        payloads = [v for v in self._payloads if v <= head and v not in keep]
        shown = sorted(v for v, published in self._dense.items() if published)
        dense = [v for v in self._dense if v <= head and v not in shown[-self._keep_versions :]]
        if not payloads and not dense:
            return None
        keys = [
            self._keys.payload(version, index)
            for version in payloads
            for index in range(self._payloads[version].chunks)
        ]
        fields = [self.payload_field(v) for v in payloads] + [self.dense_field(v) for v in dense]
        return Doomed(keys + [self._keys.dense(v) for v in dense], fields, below)

    def dropped(self, doomed: Doomed) -> None:
        """Take note that it went."""
        for field in doomed.fields:
            what, _, version = field.partition(":")
            (self._payloads if what == "d" else self._dense).pop(int(version), None)

    def _numbers(self, found: bytes | None, count: int) -> list[int]:
        words = (found or b"").split(b" ")
        if len(words) != count or not all(word.isdigit() for word in words):
            return [0] * count
        return [int(word) for word in words]
