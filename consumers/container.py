"""Avro container files, read block by block.

::

    "Obj" 0x01 | metadata: map of bytes | sync: 16 bytes | block, block, ...
    block: count: long | size: long | size bytes, compressed by the codec | sync: 16 bytes

A block is handed out only once its sync marker is seen to be right, and every size is held
against the file's before anything is read. Blocks can be skipped without being decompressed.
Every codec that Avro files are written with can be read: null, deflate, bzip2 and xz by the
standard library, snappy (whose checksum is held against the data), zstandard and lz4 by pyarrow.
"""

import bz2
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

from consumers.errors import SourceCorrupt, SourceUnavailable

MAGIC = b"Obj\x01"
MAX_BLOCK = 1 << 30
"""Bytes of a block, compressed or not; more is taken for damage."""

CODECS = ("null", "deflate", "bzip2", "xz", "snappy", "zstandard", "lz4")

_ARROW_NAMES = {"snappy": "snappy", "zstandard": "zstd", "lz4": "lz4_raw"}
# What a byte of compressed data can become at most; a size told by the data is held against it.
_SNAPPY_GROWTH = 64
_LZ4_GROWTH = 256
_SYNC = 16
_MAX_METADATA = 64 << 20


class Block(NamedTuple):
    """``records`` of them in ``data``; the block begins at byte ``offset`` of the file."""

    offset: int
    records: int
    data: bytes


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Container:
    """An open container file.

    Parameters
    ----------
    path
        The file. It is opened at once; use as a context manager, or call :meth:`close`.

    Raises
    ------
    SourceUnavailable
        The file can't be opened.
    SourceCorrupt
        It is no Avro container, its header is damaged, or its codec is unknown.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self._file: IO[bytes] = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise SourceUnavailable(f"{path}: {error.strerror}") from error
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def blocks(self, skip: int = 0) -> Iterator[tuple[int, Block]]:
        """Yield blocks from the current one on, with the number of their first record.

        Parameters
        ----------
        skip
            Blocks that lie wholly below this record number are passed over.

        Raises
        ------
        SourceCorrupt
            A block is damaged; names the file and the byte where the block begins.
        """
        for number, offset, count, data in self._walk(skip):
            if data is not None:
                yield number, Block(offset, count, self._decompress(offset, data))

    def records(self) -> int:
        """Count the records from the current block to the end, reading none of them."""
        return sum(count for _, _, count, _ in self._walk(None))

    def _walk(self, skip: int | None) -> Iterator[tuple[int, int, int, bytes | None]]:
        """Yield first record, offset, record count and bytes of each block.

        Of a block below record ``skip`` there are no bytes, nor of any when it is None.
        """
        number = 0
        while (offset := self._file.tell()) < self._size:
            count = self._long()
            size = self._long()
            if count < 0 or not 0 <= size <= min(MAX_BLOCK, self._size - self._file.tell()):
                raise self._corrupt(offset, f"a block of {count} records in {size} bytes")
            data = None
            if skip is None or number + count <= skip:
                self._file.seek(size, os.SEEK_CUR)
            else:
                data = self._file.read(size)
            if self._file.read(_SYNC) != self._sync:
                raise self._corrupt(offset, "the sync marker behind the block is wrong")
            yield number, offset, count, data
            number += count

    def _read_header(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise SourceCorrupt(f"{self.path} is no Avro container file: its first bytes differ")
        metadata: dict[str, bytes] = {}
        while count := self._long():
            if count < 0:
                count = -count
                self._long()
            for _ in range(count):
                key = self._bytes().decode("utf-8", "replace")
                metadata[key] = self._bytes()
        self._sync = self._file.read(_SYNC)
        if len(self._sync) != _SYNC:
            raise self._corrupt(self._file.tell(), "the header is cut off")
        self._codec = metadata.get("avro.codec", b"null").decode("utf-8", "replace")
        if self._codec not in CODECS:
            raise SourceCorrupt(
                f"{self.path} is compressed with {self._codec}, which can't be read; "
                f"write it with one of {', '.join(CODECS)}"
            )
        if self._codec in _ARROW_NAMES and not _arrow_has(self._codec):
            raise SourceUnavailable(
                f"{self.path} is compressed with {self._codec}, which the installed pyarrow was "
                "built without; install pyarrow from PyPI or conda-forge"
            )
        try:
            self.schema: Any = json.loads(metadata["avro.schema"])
        except (KeyError, ValueError) as error:
            raise SourceCorrupt(f"{self.path}: the header holds no schema") from error

    def _decompress(self, offset: int, data: bytes) -> bytes:
        if self._codec == "null":
            return data
        if self._codec in _ARROW_NAMES:
            try:
                return _decompress_by_arrow(self._codec, data)
            except (OSError, ValueError) as error:  # what pyarrow raises for damaged data
                raise self._corrupt(offset, f"{self._codec} says: {error}") from error
        decompressor: _Decompressor
        if self._codec == "deflate":
            decompressor = zlib.decompressobj(-15)
        elif self._codec == "bzip2":
            decompressor = bz2.BZ2Decompressor()
        else:
            decompressor = lzma.LZMADecompressor()
        try:
            plain = decompressor.decompress(data, MAX_BLOCK)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise self._corrupt(offset, f"{self._codec} says: {error}") from error
        # Writers are known to leave part of zlib's checksum behind deflate's end.
        leftover = self._codec != "deflate" and decompressor.unused_data
        if not decompressor.eof or leftover:
            raise self._corrupt(offset, f"its {self._codec} data doesn't end where the block does")
        return plain

    def _long(self) -> int:
        offset = self._file.tell()
        bits = 0
        for i in range(10):
            byte = self._file.read(1)
            if not byte:
                raise self._corrupt(offset, "the file ends inside a number")
            bits |= (byte[0] & 0x7F) << (7 * i)
            if byte[0] < 0x80:
                return (bits >> 1) ^ -(bits & 1)
        raise self._corrupt(offset, "a number of more than ten bytes")

    def _bytes(self) -> bytes:
        offset = self._file.tell()
        size = self._long()
        if not 0 <= size <= min(_MAX_METADATA, self._size - self._file.tell()):
            raise self._corrupt(offset, f"{size} bytes of metadata")
        return self._file.read(size)

    def _corrupt(self, offset: int, what: str) -> SourceCorrupt:
        return SourceCorrupt(
            f"{self.path} is damaged at byte {offset}: {what}; "
            "restore the file, or leave it out of the run"
        )


def _arrow_has(codec: str) -> bool:
    import pyarrow

    return bool(pyarrow.Codec.is_available(_ARROW_NAMES[codec]))


def _decompress_by_arrow(codec: str, data: bytes) -> bytes:
    """Decompress a block; OSError or ValueError where it is damaged."""
    import pyarrow

    if len(data) < 4:
        raise ValueError(f"{len(data)} bytes are no block")
    if codec == "zstandard":
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            plain: bytes = stream.read(MAX_BLOCK + 1)
        if len(plain) > MAX_BLOCK:
            raise ValueError(f"it holds more than {MAX_BLOCK} bytes")
        return plain
    if codec == "lz4":  # four bytes of size, then a block
        size = int.from_bytes(data[:4], "little")
        if _lz4_size(data[4:]) != size:  # pyarrow doesn't look how much there really is
            raise ValueError(f"its sequences don't make {size} bytes")
        return _sized(codec, data[4:], size, _LZ4_GROWTH)
    body = data[:-4]
    plain = _sized(codec, body, _snappy_size(body), _SNAPPY_GROWTH)
    if zlib.crc32(plain) != int.from_bytes(data[-4:], "big"):
        raise ValueError("the checksum is wrong")
    return plain


def _sized(codec: str, data: bytes, size: int, growth: int) -> bytes:
    import pyarrow

    if size > min(MAX_BLOCK, growth * len(data)):
        raise ValueError(f"{len(data)} bytes can't become {size}")
    if size == 0:
        return b""
    plain: bytes = pyarrow.Codec(_ARROW_NAMES[codec]).decompress(data, size, asbytes=True)
    return plain


def _lz4_size(data: bytes) -> int:
    """Add up what the sequences of an LZ4 block become."""
    at = total = 0
    try:
        while True:
            token = data[at]
            literals, at = _lz4_length(data, at + 1, token >> 4)
            at += literals
            total += literals
            if at == len(data):
                return total
            match, at = _lz4_length(data, at + 2, token & 15)
            total += match + 4
    except IndexError:
        raise ValueError("it ends within a sequence") from None


def _lz4_length(data: bytes, at: int, length: int) -> tuple[int, int]:
    if length == 15:
        while True:
            length += data[at]
            at += 1
            if data[at - 1] != 255:
                break
    return length, at


def _snappy_size(data: bytes) -> int:
    size = 0
    for i, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return size
    raise ValueError("no size")
