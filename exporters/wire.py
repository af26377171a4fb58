"""The bytes of a version.

A delta travels as a *payload*: the concatenation of chunks of at most 256 KiB, each of which can
be checked alone. All numbers are little-endian. A chunk is

====== ======= ==========================================================================
offset type    meaning
====== ======= ==========================================================================
0      4 bytes magic ``53 54 44 01``: "STD" and the wire version, 1
4      u8      kind: 0 meta, 1 rows, 2 dense
5      u8      length t of the table's name in bytes (rows; else 0)
6      u16     dim of the table (rows; else 0)
8      u64     version of the delta
16     u32     index of this chunk, from 0
20     u32     number of chunks of the delta
24     u32     rows: number n of rows. Meta, dense: offset of the piece, in bytes or floats
28     u32     rows: number m of removed keys. Meta, dense: length of the piece, same unit
32     t bytes the table's name in UTF-8, padded with zeros to a multiple of 8
..     body    rows: n keys (u64), m removed keys (u64), n * dim values (float32)
..             meta: bytes of a JSON object. Dense: float32
====== ======= ==========================================================================

Chunks come in this order: meta, at least one; rows, tables in order of their names, keys strictly
ascending within a table, removed keys strictly ascending and none of them also written; dense, if
the delta carries dense weights (one chunk of length 0 for a vector of length 0). So equal deltas
have equal bytes, and the *checksum* of a version, SHA-256 over its payload in lower-case hex,
names its content.

The meta object holds ``since``, ``generation``, ``step``, ``watermark`` (ms), ``positions``
(``"topic/partition"`` to next offset), ``dims`` (every table of the model) and ``rows`` (rows that
a table holds at this version, where known). Readers pass over members that they don't know.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from exporters.errors import Corrupt
from exporters.version import (
    MAX_INT,
    TABLE_NAME,
    Delta,
    DenseInfo,
    Half,
    Head,
    TableInfo,
    TableRows,
    check_delta,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

__all__ = [
    "CHUNK_BYTES",
    "Chunk",
    "Delta",
    "DenseInfo",
    "Half",
    "Head",
    "Kind",
    "TableInfo",
    "TableRows",
    "checksum_of",
    "cut_chunks",
    "decode_chunks",
    "encode_chunk",
    "encode_chunks",
]

WIRE_VERSION = 1
CHUNK_BYTES = 256 * 1024

_MAGIC = b"STD" + bytes([WIRE_VERSION])
_HEADER = struct.Struct("<4sBBHQIIII")


def _no_keys() -> NDArray[np.uint64]:
    return np.empty(0, np.uint64)


def _no_rows() -> NDArray[np.float32]:
    return np.empty((0, 0), np.float32)


def _no_floats() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


class Kind(IntEnum):
    """What a chunk carries."""

    META = 0
    ROWS = 1
    DENSE = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunk:
    """A piece of a delta or of a snapshot.

    Rows: `table`, `keys` u64[n], `values` f32[n, dim], `removed` u64[m]. Dense: `dense` f32[k] at
    `offset` floats. Meta: `meta` bytes at `offset`.
    """

    index: int
    kind: Kind
    table: str = ""
    keys: NDArray[np.uint64] = field(default_factory=_no_keys)
    values: NDArray[np.float32] = field(default_factory=_no_rows)
    removed: NDArray[np.uint64] = field(default_factory=_no_keys)
    offset: int = 0
    dense: NDArray[np.float32] = field(default_factory=_no_floats)
    meta: bytes = b""


_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    since: _Number
    generation: _Number
    step: _Number
    watermark: Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
    positions: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    dims: dict[str, Annotated[int, msgspec.Meta(ge=1, le=65535)]]
    rows: dict[str, _Number] = {}


def cut_chunks(delta: Delta, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut a delta into chunks that are views of its arrays, each within `max_bytes` as bytes.

    Raises
    ------
    ValueError
        The delta breaks a rule, or a single row does not fit into a chunk.
    """
    check_delta(delta)
    chunks: list[Chunk] = []
    meta = msgspec.json.encode(
        _Meta(
            since=delta.since,
            generation=delta.generation,
            step=delta.step,
            watermark=delta.watermark,
            positions=dict(delta.positions),
            dims=dict(delta.dims),
            rows=dict(delta.rows),
        ),
        order="deterministic",
    )
    room = max_bytes - _HEADER.size
    if room < 8:
        raise ValueError(f"chunks of {max_bytes} bytes are too small to hold anything")
    for at in range(0, len(meta), room):
        piece = meta[at : at + room]
        chunks.append(Chunk(index=len(chunks), kind=Kind.META, offset=at, meta=piece))
    for name in sorted(delta.tables):
        chunks.extend(cut_rows(name, delta.tables[name], first=len(chunks), max_bytes=max_bytes))
    if delta.dense is not None:
        chunks.extend(cut_dense(delta.dense, first=len(chunks), max_bytes=max_bytes))
    return chunks


def cut_rows(
    name: str, rows: TableRows, *, first: int = 0, max_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Cut a table's rows, then its removed keys, into chunks with indices from `first`."""
    dim = rows.values.shape[1]
    room = max_bytes - _HEADER.size - _padded(len(name))
    per_row = 8 + 4 * dim
    if room < per_row:
        raise ValueError(f"table {name!r}: a row of dim {dim} does not fit into a chunk")
    row = gone = 0
    while row < len(rows.keys) or gone < len(rows.removed):
        n = min(len(rows.keys) - row, room // per_row)
        m = min(len(rows.removed) - gone, (room - n * per_row) // 8)
        yield Chunk(
            index=first,
            kind=Kind.ROWS,
            table=name,
            keys=rows.keys[row : row + n],
            values=rows.values[row : row + n],
            removed=rows.removed[gone : gone + m],
        )
        row, gone, first = row + n, gone + m, first + 1


def cut_dense(
    dense: NDArray[np.float32], *, first: int = 0, max_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Cut the dense weights into chunks with indices from `first`; at least one."""
    room = (max_bytes - _HEADER.size) // 4
    for at in range(0, max(1, len(dense)), room):
        yield Chunk(index=first, kind=Kind.DENSE, offset=at, dense=dense[at : at + room])
        first += 1


def encode_chunk(chunk: Chunk, *, version: int, count: int) -> bytes:
    """Return the bytes of one chunk out of `count` of the delta `version`."""
    name = chunk.table.encode()
    dim, first, second = 0, chunk.offset, 0
    if chunk.kind is Kind.ROWS:
        dim, first, second = chunk.values.shape[1], len(chunk.keys), len(chunk.removed)
        body = b"".join(
            (
                name.ljust(_padded(len(name)), b"\0"),
                chunk.keys.astype("<u8", copy=False).tobytes(),
                chunk.removed.astype("<u8", copy=False).tobytes(),
                chunk.values.astype("<f4", copy=False).tobytes(),
            )
        )
    elif chunk.kind is Kind.DENSE:
        second = len(chunk.dense)
        body = chunk.dense.astype("<f4", copy=False).tobytes()
    else:
        second = len(chunk.meta)
        body = chunk.meta
    head = _HEADER.pack(
        _MAGIC, chunk.kind, len(name), dim, version, chunk.index, count, first, second
    )
    return head + body


def encode_chunks(delta: Delta, max_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """Return the payload of a delta, in chunks of at most `max_bytes`."""
    chunks = cut_chunks(delta, max_bytes)
    return [encode_chunk(chunk, version=delta.version, count=len(chunks)) for chunk in chunks]


def checksum_of(delta: Delta) -> str:
    """Return the checksum of a delta: SHA-256 over its payload, in hex."""
    digest = hashlib.sha256()
    chunks = cut_chunks(delta)
    for chunk in chunks:
        digest.update(encode_chunk(chunk, version=delta.version, count=len(chunks)))
    return digest.hexdigest()


def decode_chunks(
    chunks: Iterable[bytes], *, checksum: str | None = None, max_bytes: int = CHUNK_BYTES
) -> Delta:
    """Put a delta together from the chunks of its payload, in order.

    No array is made larger than the bytes given.

    Raises
    ------
    Corrupt
        The bytes break the layout, a chunk is missing, or the checksum is another one.
    """
    digest = hashlib.sha256()
    parts: list[Chunk] = []
    version = count = 0
    for data in chunks:
        digest.update(data)
        part, part_version, part_count = _decode_chunk(data, max_bytes)
        if not parts:
            version, count = part_version, part_count
        if (part_version, part_count, part.index) != (version, count, len(parts)):
            raise Corrupt(
                f"chunk {len(parts)} of version {version}: found chunk {part.index} of"
                f" {part_count} of version {part_version}"
            )
        parts.append(part)
    if not parts or len(parts) != count:
        raise Corrupt(f"version {version}: {len(parts)} chunks of {count}")
    if checksum is not None and digest.hexdigest() != checksum:
        raise Corrupt(f"version {version}: the payload's checksum is not {checksum}")
    return _assemble(version, parts)


def _padded(length: int) -> int:
    return (length + 7) // 8 * 8


def _decode_chunk(data: bytes, max_bytes: int) -> tuple[Chunk, int, int]:
    if not _HEADER.size <= len(data) <= max_bytes:
        raise Corrupt(f"a chunk of {len(data)} bytes; {_HEADER.size} to {max_bytes} are allowed")
    magic, kind, length, dim, version, index, count, first, second = _HEADER.unpack_from(data)
    if magic[:3] != _MAGIC[:3]:
        raise Corrupt(f"not a chunk: it begins with {magic!r}")
    if magic != _MAGIC:
        raise Corrupt(f"wire version {magic[3]}; this reader knows {WIRE_VERSION}: upgrade it")
    if not 0 < version <= MAX_INT or index >= count:
        raise Corrupt(f"chunk {index} of {count} of version {version}: out of range")
    at = _HEADER.size
    if kind == Kind.ROWS:
        size = at + _padded(length) + 8 * (first + second) + 4 * first * dim
    elif kind in (Kind.META, Kind.DENSE) and length == 0 and dim == 0:
        size = at + second * (4 if kind == Kind.DENSE else 1)
    else:
        raise Corrupt(f"version {version}, chunk {index}: kind {kind} with name or dim")
    if size != len(data):
        raise Corrupt(f"version {version}, chunk {index}: {len(data)} bytes, {size} expected")
    if kind == Kind.META:
        part = Chunk(index=index, kind=Kind.META, offset=first, meta=data[at:])
    elif kind == Kind.DENSE:
        floats = np.frombuffer(data, "<f4", second, at).astype(np.float32, copy=False)
        part = Chunk(index=index, kind=Kind.DENSE, offset=first, dense=floats)
    else:
        try:
            name = data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"version {version}, chunk {index}: table name: {error}") from error
        if not TABLE_NAME.fullmatch(name) or any(data[at + length : at + _padded(length)]):
            raise Corrupt(f"version {version}, chunk {index}: table name {name!r}")
        at += _padded(length)
        keys = np.frombuffer(data, "<u8", first, at)
        removed = np.frombuffer(data, "<u8", second, at + 8 * first)
        values = np.frombuffer(data, "<f4", first * dim, at + 8 * (first + second))
        part = Chunk(
            index=index,
            kind=Kind.ROWS,
            table=name,
            keys=keys.astype(np.uint64, copy=False),
            values=values.astype(np.float32, copy=False).reshape(first, dim),
            removed=removed.astype(np.uint64, copy=False),
        )
    return part, version, count


def _assemble(version: int, parts: list[Chunk]) -> Delta:
    order = [(part.kind, part.table) for part in parts]
    if order != sorted(order) or order[0][0] is not Kind.META:
        raise Corrupt(f"version {version}: chunks are not in the order meta, rows, dense")
    raw = bytearray()
    groups: dict[str, list[Chunk]] = {}
    floats: list[NDArray[np.float32]] = []
    size = 0
    for part in parts:
        if part.kind is Kind.ROWS:
            groups.setdefault(part.table, []).append(part)
            continue
        if part.offset != (len(raw) if part.kind is Kind.META else size):
            raise Corrupt(f"version {version}, chunk {part.index}: a piece is missing before it")
        if part.kind is Kind.META:
            raw += part.meta
        else:
            floats.append(part.dense)
            size += len(part.dense)
    try:
        meta = msgspec.json.decode(bytes(raw), type=_Meta)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"version {version}: meta: {error}") from error
    tables: dict[str, TableRows] = {}
    for name, group in groups.items():
        if any(part.values.shape[1] != meta.dims.get(name) for part in group):
            raise Corrupt(f"version {version}, table {name!r}: dim differs from the meta")
        tables[name] = TableRows(
            np.concatenate([part.keys for part in group]),
            np.concatenate([part.values for part in group]),
            np.concatenate([part.removed for part in group]),
        )
    delta = Delta(
        version=version,
        since=meta.since,
        generation=meta.generation,
        step=meta.step,
        watermark=meta.watermark,
        positions=meta.positions,
        tables=tables,
        dense=np.concatenate(floats) if floats else None,
        dims=meta.dims,
        rows=meta.rows,
    )
    try:
        check_delta(delta)
    except ValueError as error:
        raise Corrupt(f"version {version}: {error}") from error
    return delta
