"""Codecs of container files that come by pyarrow: files are written here, byte by byte."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from consumers.container import Container
from consumers.errors import SourceCorrupt, SourceUnavailable
from tests.test_consumers.clicks import SCHEMA, click, decoder, encode

SYNC = bytes(range(16))


def number(value: int) -> bytes:
    bits, out = value << 1, bytearray()
    while bits >= 0x80:
        out.append(bits & 0x7F | 0x80)
        bits >>= 7
    return bytes([*out, bits])


def text(value: bytes) -> bytes:
    return number(len(value)) + value


def compressed(codec: str, plain: bytes) -> bytes:
    if codec == "zstandard":
        return bytes(pyarrow.Codec("zstd").compress(plain, asbytes=True))
    if codec == "lz4":
        size = len(plain).to_bytes(4, "little")
        return size + bytes(pyarrow.Codec("lz4_raw").compress(plain, asbytes=True))
    checksum = zlib.crc32(plain).to_bytes(4, "big")
    return bytes(pyarrow.Codec("snappy").compress(plain, asbytes=True)) + checksum


def header(codec: str) -> bytes:
    import json

    return (
        b"Obj\x01" + number(2)
        + text(b"avro.schema") + text(json.dumps(SCHEMA).encode())
        + text(b"avro.codec") + text(codec.encode()) + number(0) + SYNC
    )  # fmt: skip


def block(count: int, data: bytes) -> bytes:
    return number(count) + text(data) + SYNC


def write(path: Path, codec: str, blocks: Sequence[tuple[int, bytes]]) -> Path:
    path.write_bytes(header(codec) + b"".join(block(count, data) for count, data in blocks))
    return path


def read(path: Path) -> list[Any]:
    with Container(path) as container:
        blocks = decoder().written_by(container.schema, name="file")
        return [
            found.record
            for _, block in container.blocks()
            for found in blocks.records(block.data, block.records)
        ]


RECORDS = [click(n) for n in range(40)]
PLAIN = b"".join(encode(record) for record in RECORDS)
every_codec = pytest.mark.parametrize("codec", ["snappy", "zstandard", "lz4"])


@every_codec
def test_files_are_read(tmp_path: Path, codec: str) -> None:
    data = compressed(codec, PLAIN)
    assert len(data) < len(PLAIN)
    path = write(tmp_path / "a.avro", codec, [(40, data), (0, compressed(codec, b"")), (40, data)])
    assert read(path) == RECORDS * 2


@every_codec
def test_damage_is_seen_and_its_place_told(tmp_path: Path, codec: str) -> None:
    """Every proper part of a block is refused, and of the checksummed codec every changed byte."""
    data = compressed(codec, PLAIN)
    start = len(header(codec))
    parts = [data[:n] for n in range(0, len(data), 7)] + [data + b"\0"]
    if codec == "snappy":
        parts += [
            data[:n] + bytes([data[n] ^ 0x55]) + data[n + 1 :] for n in range(0, len(data), 5)
        ]
    for part in parts:
        path = write(tmp_path / "a.avro", codec, [(40, part)])
        with pytest.raises(SourceCorrupt, match=f"damaged at byte {start}: {codec} says"):
            read(path)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("snappy", b"\xff\xff\xff\xff\x07" + b"\0" * 20),
        ("snappy", b"\xff\xff\xff\xff\xff\xff" + b"\0" * 20),
        ("lz4", b"\xff\xff\xff\x7f" + b"\0" * 20),
    ],
)
def test_a_size_in_the_data_is_bounded_before_memory_is_taken(
    tmp_path: Path, codec: str, data: bytes
) -> None:
    with pytest.raises(SourceCorrupt, match="can't become|no size|don't make|within a sequence"):
        read(write(tmp_path / "a.avro", codec, [(1, data)]))


def test_a_codec_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(SourceCorrupt, match="with lzo, which can't be read; write it with one of"):
        read(write(tmp_path / "a.avro", "lzo", []))


def test_a_pyarrow_without_the_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.avro", "snappy", [])
    monkeypatch.setattr("consumers.container._arrow_has", lambda codec: False)
    with pytest.raises(SourceUnavailable, match="the installed pyarrow was built without"):
        read(path)
