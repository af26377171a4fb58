"""Avro container files: nothing damaged is handed out, and what is damaged is named."""

from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.container import Container
from consumers.errors import SourceCorrupt, SourceUnavailable
from tests.test_consumers.clicks import PARSED, click, decoder

RECORDS = [click(n) for n in range(60)]


def write(path: Path, codec: str = "null", interval: int = 300) -> Path:
    with path.open("wb") as out:
        fastavro.writer(out, PARSED, RECORDS, codec=codec, sync_interval=interval)
    return path


def read(path: Path, skip: int = 0) -> list[Any]:
    found = []
    with Container(path) as container:
        blocks = decoder().written_by(container.schema, name="file")
        for number, block in container.blocks(skip):
            assert number == (found[-1]["id"] + 1 if found else number)
            found += [r.record for r in blocks.records(block.data, block.records)]
    return found


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_codecs(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a.avro", codec)
    assert read(path) == RECORDS
    with Container(path) as container:
        assert container.records() == len(RECORDS)


@pytest.mark.parametrize("skip", [0, 1, 30, 59, 60, 61])
def test_whole_blocks_are_skipped(tmp_path: Path, skip: int) -> None:
    found = read(write(tmp_path / "a.avro"), skip)
    assert found == RECORDS[len(RECORDS) - len(found) :]
    assert len(RECORDS) - len(found) <= skip
    assert (skip < 60) is bool(found)
    if 30 <= skip < 60:
        assert len(found) < len(RECORDS)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", SourceCorrupt, "no Avro container file"),
        (b"{}", SourceCorrupt, "no Avro container file"),
        (b"Obj\x01", SourceCorrupt, "damaged at byte 4: the file ends inside a number"),
        (b"Obj\x01" + b"\xff" * 20, SourceCorrupt, "a number of more than ten bytes"),
        (b"Obj\x01\x02\xfe\xff\xff\xff\x0f", SourceCorrupt, "bytes of metadata"),
        (b"Obj\x01\x00" + b"s" * 15, SourceCorrupt, "the header is cut off"),
        (b"Obj\x01\x00" + b"s" * 16, SourceCorrupt, "holds no schema"),
        (b"Obj\x01\x02\x14avro.codec\x0csnazzy\x00" + b"s" * 16, SourceCorrupt, "with snazzy"),
    ],
)
def test_headers(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    path = tmp_path / "a.avro"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        Container(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="none.avro: No such file"):
        Container(tmp_path / "none.avro")


def test_binary_metadata(tmp_path: Path) -> None:
    """Apache's own sample files carry it, and fastavro can't open them."""
    path = write(tmp_path / "a.avro")
    content = path.read_bytes()
    assert content[:5] == b"Obj\x01\x04"
    path.write_bytes(b"Obj\x01\x06\x04\xff\xfe\x04\x80\x81" + content[5:])
    assert read(path) == RECORDS


def test_two_files_glued_together(tmp_path: Path) -> None:
    """Their sync markers differ: read on, and blocks of another schema would be samples."""
    first, second = write(tmp_path / "a.avro"), write(tmp_path / "b.avro")
    glued = tmp_path / "c.avro"
    glued.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(SourceCorrupt, match=f"at byte {first.stat().st_size}"):
        read(glued)


def places(path: Path) -> tuple[list[int], list[int]]:
    """Byte and first record of each block."""
    with Container(path) as container:
        blocks = list(container.blocks())
    return [block.offset for _, block in blocks], [number for number, _ in blocks]


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_every_cut_is_seen(tmp_path: Path, codec: str) -> None:
    """All that a torn file may do is end exactly behind a block."""
    path = write(tmp_path / "a.avro", codec)
    content = path.read_bytes()
    starts, numbers = places(path)
    held = dict(zip(starts, numbers, strict=True))
    for size in range(starts[0], len(content)):
        path.write_bytes(content[:size])
        if size in held:
            assert read(path) == RECORDS[: held[size]]
        else:
            with pytest.raises(SourceCorrupt, match="damaged at byte"):
                read(path)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_broken_sync_marker_hands_out_nothing_of_its_block(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    path = write(tmp_path_factory.mktemp("sync") / "a.avro")
    content = bytearray(path.read_bytes())
    starts, numbers = places(path)
    which = at % (len(starts) - 1) + 1
    content[starts[which] - 1 - at % 16] ^= flip
    path.write_bytes(content)
    with Container(path) as container:
        blocks = container.blocks()
        assert [next(blocks)[0] for _ in range(which - 1)] == numbers[: which - 1]
        with pytest.raises(SourceCorrupt, match=f"at byte {starts[which - 1]}: the sync marker"):
            next(blocks)
