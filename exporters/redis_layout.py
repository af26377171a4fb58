"""How a model lies in Redis: names of keys, bytes of rows, fields of the head; pure.

Wire version 1, for a model ``ctr``. Numbers in text are decimal, numbers in bytes little-endian.

======================================= ======= ===================================================
key                                     type    holds
======================================= ======= ===================================================
``st:{ctr}:head``                       hash    the newest published version, see `head_fields`
``st:{ctr}:log``                        stream  an entry ``<version>-0`` per published version
``st:{ctr}:d:<version>:<n>``            string  chunk n of a version's payload
``st:{ctr}:dense:<version>``            string  dense weights that this version wrote, float32
``st:{ctr}:fence``                      string  the generation that may write
``st:{ctr}:owner``                      hash    who that is: shown, and tells a repeated request
``st:{ctr}:parts``                      hash    what is there of payloads and dense weights
``st:{ctr/00}:<epoch>:<table>:<00000>`` hash    a bucket of rows: key (8 bytes) to value
``st:{ctr/00}:fence``                   string  the fence again, beside the group's rows
``st:{ctr/00}:pending``, ``:filling``   string  notes, see `exporters.notes`
======================================= ======= ===================================================

A key's *bucket* is ``mix(key) mod buckets``, written in hex with at least five digits; its group,
the two digits after the slash, is ``bucket mod groups``. `mix` is the finaliser of SplitMix64.
A row's value is the version that wrote it (u32, modulo 2^32) and ``dim`` float32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from exporters.errors import Corrupt
from exporters.sink import Published
from exporters.version import MAX_INT, TABLE_NAME, DenseInfo, Head, TableInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["Keys", "buckets_of", "decode_bucket", "head_fields", "head_from", "mix", "row_commands"]

WIRE = 1
ROWS_PER_BUCKET = 100
EXPECTED_ROWS = 1_000_000
MAX_BUCKETS = 1 << 31

_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


class Keys:
    """Names of a model's keys.

    Raises
    ------
    ValueError
        The model's name has other characters than letters, digits, '_', '.' and '-'.
    """

    def __init__(self, model: str) -> None:
        if not _MODEL.fullmatch(model):
            raise ValueError(f"model {model!r}: a name is letters, digits, '_', '.' and '-'")
        self.model = model
        tag = f"st:{{{model}}}"
        self.head = f"{tag}:head"
        self.log = f"{tag}:log"
        self.fence = f"{tag}:fence"
        self.owner = f"{tag}:owner"
        self.parts = f"{tag}:parts"
        self.epochs = f"st:{{{model}/*}}:*:*:*"
        """Pattern that matches the buckets of all epochs."""

    def payload(self, version: int, index: int) -> str:
        """Return the key of chunk `index` of a version's payload."""
        return f"st:{{{self.model}}}:d:{version}:{index}"

    def dense(self, version: int) -> str:
        """Return the key of the dense weights that `version` wrote."""
        return f"st:{{{self.model}}}:dense:{version}"

    def group(self, group: int, what: str) -> str:
        """Return a key of a group: "fence", "pending" or "filling"."""
        return f"{self._group(group)}:{what}"

    def bucket(self, group: int, epoch: int, table: str, bucket: int) -> str:
        """Return the key of a bucket."""
        return f"{self._group(group)}:{epoch}:{table}:{bucket:05x}"

    def epoch_of(self, name: bytes) -> int | None:
        """Return the epoch of a bucket's key; None: it is no bucket of this model."""
        tag, _, rest = name.partition(b"}:")
        words = rest.split(b":")
        if not tag.startswith(f"st:{{{self.model}/".encode()) or len(words) != 3:
            return None
        return int(words[0]) if words[0].isdigit() else None

    def _group(self, group: int) -> str:
        return f"st:{{{self.model}/{group:02d}}}"


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return keys u64[n] with their bits mixed: the finaliser of SplitMix64, modulo 2^64.

    ``z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31``

    >>> [hex(z) for z in mix(np.array([0, 1, 2**64 - 1], np.uint64)).tolist()]
    ['0x0', '0x5692161d100b05e5', '0xb4d055fcf2cbbd7b']
    """
    z = keys ^ (keys >> np.uint64(30))
    z = z * np.uint64(0xBF58476D1CE4E5B9)
    z = z ^ (z >> np.uint64(27))
    z = z * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def buckets_of(keys: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Return the buckets of keys u64[n] as i64[n]."""
    return (mix(keys) % np.uint64(buckets)).astype(np.int64)


def buckets_for(rows: int) -> int:
    """Return the number of buckets for a table of so many rows: about a hundred rows in each."""
    return max(1, -(-rows // ROWS_PER_BUCKET))


def row_commands(
    names: Sequence[str],
    starts: NDArray[np.int64],
    keys: NDArray[np.uint64],
    values: NDArray[np.float32] | None,
    version: int,
) -> list[bytes]:
    """Return the bytes of one command per bucket: HSET of rows, or HDEL without `values`.

    The rows are written as one block of bytes of fixed width by NumPy; a loop over rows in Python
    would cost more than Redis does.

    Parameters
    ----------
    names
        The key of each bucket.
    starts
        i64[len(names) + 1]: bucket i has the rows ``starts[i]:starts[i + 1]``.
    keys, values
        u64[n] and f32[n, dim], in order of buckets.
    version
        The version that writes.
    """
    n = len(keys)
    field = np.empty((n, 14), np.uint8)
    field[:, :4] = np.frombuffer(b"$8\r\n", np.uint8)
    field[:, 4:12] = keys.astype("<u8").view(np.uint8).reshape(n, 8)
    field[:, 12:] = np.frombuffer(b"\r\n", np.uint8)
    verb, per_row, block = b"$4\r\nHDEL\r\n", 1, field
    if values is not None:
        width = 4 + 4 * values.shape[1]
        prefix = f"${width}\r\n".encode()
        value = np.empty((n, len(prefix) + width + 2), np.uint8)
        at = len(prefix)
        value[:, :at] = np.frombuffer(prefix, np.uint8)
        stamp = np.array([version & 0xFFFFFFFF], "<u4").view(np.uint8)
        value[:, at : at + 4] = stamp
        rows = np.ascontiguousarray(values, "<f4")
        value[:, at + 4 : at + width] = rows.view(np.uint8).reshape(n, width - 4)
        value[:, at + width :] = np.frombuffer(b"\r\n", np.uint8)
        verb, per_row, block = b"$4\r\nHSET\r\n", 2, np.concatenate([field, value], axis=1)
    raw, stride = block.tobytes(), block.shape[1]
    commands = []
    for name, start, stop in zip(names, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        key = name.encode()
        begin = b"*%d\r\n%b$%d\r\n%b\r\n" % (2 + per_row * (stop - start), verb, len(key), key)
        commands.append(begin + raw[start * stride : stop * stride])
    return commands


def decode_bucket(
    fields: Sequence[bytes], dim: int
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Return keys u64[n] and values f32[n, dim] from what HGETALL answers, field by field.

    Raises
    ------
    Corrupt
        A field or a value is of another size.
    """
    keys, values = b"".join(fields[::2]), b"".join(fields[1::2])
    n, width = len(fields) // 2, 4 + 4 * dim
    if set(map(len, fields[::2])) - {8} or set(map(len, fields[1::2])) - {width}:
        raise Corrupt(f"a bucket holds other sizes than 8 bytes of key and {width} of value")
    rows = np.frombuffer(values, np.uint8).reshape(n, width)[:, 4:]
    floats = np.ascontiguousarray(rows).view("<f4").astype(np.float32, copy=False)
    return np.frombuffer(keys, "<u8").astype(np.uint64), floats.reshape(n, dim)


_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    dim: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    buckets: Annotated[int, msgspec.Meta(ge=1, le=MAX_BUCKETS)]
    rows: _Number


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    version: _Number
    generation: _Number
    epoch: _Number
    step: _Number
    watermark: Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    groups: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    tables: dict[str, _Table]
    positions: dict[str, int]
    dense: _Number | None = None
    dense_size: _Number = 0


def head_fields(head: Head) -> dict[str, str]:
    """Return the head as the fields of its hash.

    ``wire`` (1), ``version``, ``generation``, ``epoch``, ``checksum``, ``watermark``, ``step``,
    ``groups``, ``layout`` ("buckets"), ``dtype`` ("float32"), ``positions`` and ``tables`` (JSON
    objects: partition to next offset; name to ``dim``, ``buckets``, ``rows``), and ``dense`` and
    ``dense_size`` (the version that wrote the dense weights, their number) if there are any.
    """
    tables = {name: info._asdict() for name, info in head.tables.items()}
    fields = {
        "wire": str(WIRE),
        "version": str(head.version),
        "generation": str(head.generation),
        "epoch": str(head.epoch),
        "checksum": head.checksum,
        "watermark": str(head.watermark),
        "step": str(head.step),
        "groups": str(head.groups),
        "layout": "buckets",
        "dtype": "float32",
        "positions": msgspec.json.encode(dict(head.positions), order="deterministic").decode(),
        "tables": msgspec.json.encode(tables, order="deterministic").decode(),
    }
    if head.dense is not None:
        fields["dense"] = str(head.dense.version)
        fields["dense_size"] = str(head.dense.size)
    return fields


def head_from(fields: Mapping[bytes, bytes]) -> Head | None:
    """Return the head from the fields of its hash; None when there are none.

    Raises
    ------
    Corrupt
        A field is missing or breaks its bounds, or the wire version is another one.
    """
    if not fields:
        return None
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        if (text.get("wire"), text.get("layout"), text.get("dtype")) != (
            str(WIRE),
            "buckets",
            "float32",
        ):
            raise Corrupt(
                f"the head is of wire version {text.get('wire')}, layout {text.get('layout')},"
                f" dtype {text.get('dtype')}; this version reads {WIRE}, buckets, float32"
            )
        raw = {name: value for name, value in text.items() if name in _Fields.__struct_fields__}
        plain: dict[str, object] = dict(raw)
        for name in ("positions", "tables"):
            plain[name] = msgspec.json.decode(text.get(name, ""))
        found = msgspec.convert(plain, _Fields, strict=False)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise Corrupt(f"the head can't be read: {error}") from error
    if not all(TABLE_NAME.fullmatch(name) for name in found.tables):
        raise Corrupt(f"the head names tables {sorted(found.tables)}")
    tables = {name: TableInfo(t.dim, t.buckets, t.rows) for name, t in found.tables.items()}
    return Head(
        version=found.version,
        generation=found.generation,
        epoch=found.epoch,
        checksum=found.checksum,
        watermark=found.watermark,
        step=found.step,
        positions=found.positions,
        tables=tables,
        dense=None if found.dense is None else DenseInfo(found.dense, found.dense_size),
        groups=found.groups,
    )


def entry_fields(head: Head, *, since: int | None, chunks: int) -> dict[str, str]:
    """Return the fields of a stream entry; `since` None: a snapshot.

    ``kind`` ("delta" or "snapshot"), ``since`` (delta), ``epoch``, ``generation``, ``checksum``,
    ``chunks``, ``watermark``, ``step``.
    """
    fields = {
        "kind": "snapshot" if since is None else "delta",
        "epoch": str(head.epoch),
        "generation": str(head.generation),
        "checksum": head.checksum,
        "chunks": str(chunks),
        "watermark": str(head.watermark),
        "step": str(head.step),
    }
    if since is not None:
        fields["since"] = str(since)
    return fields


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["delta", "snapshot"]
    epoch: _Number
    generation: _Number
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    chunks: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
    since: _Number | None = None


def published_from(identity: bytes, fields: Sequence[bytes]) -> Published:
    """Return what a stream entry says.

    Raises
    ------
    Corrupt
        A field is missing or breaks its bounds.
    """
    try:
        version = int(identity.split(b"-")[0])
        words = [word.decode() for word in fields]
        raw = dict(zip(words[::2], words[1::2], strict=True))
        entry = msgspec.convert(raw, _Entry, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise Corrupt(f"the stream entry {identity!r} can't be read: {error}") from error
    if (entry.kind == "snapshot") != (entry.since is None):
        raise Corrupt(f"the stream entry {identity!r}: since doesn't fit its kind")
    return Published(
        version=version,
        since=entry.since,
        epoch=entry.epoch,
        generation=entry.generation,
        checksum=entry.checksum,
        chunks=entry.chunks,
    )
