"""Bytes of a delta: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import Corrupt, Delta, TableRows
from exporters.wire import CHUNK_BYTES, checksum_of, decode_chunks, encode_chunks
from tests.reference.wire import read_payload
from tests.test_exporters.deltas import deltas, golden, same

DATA = Path(__file__).parent.parent / "data" / "exporters_1"
SIZES = st.integers(220, 2000)


@given(deltas(), SIZES)
def test_what_is_encoded_is_decoded(delta: Delta, size: int) -> None:
    chunks = encode_chunks(delta, size)
    assert all(len(chunk) <= size for chunk in chunks)
    checksum = hashlib.sha256(b"".join(chunks)).hexdigest()
    assert same(decode_chunks(chunks, checksum=checksum), delta)


@given(deltas(), SIZES)
def test_a_reader_of_the_page_reads_the_same(delta: Delta, size: int) -> None:
    assert read_payload(encode_chunks(delta))["checksum"] == checksum_of(delta)
    found = read_payload(encode_chunks(delta, size))
    assert found["version"] == delta.version
    assert found["dense"] == (None if delta.dense is None else delta.dense.tobytes())
    for name, rows in delta.tables.items():
        wanted = dict(zip(rows.keys.tolist(), [r.tobytes() for r in rows.values], strict=True))
        assert found["rows"].get(name, {}) == wanted
        assert found["removed"].get(name, []) == rows.removed.tolist()
    assert found["meta"]["since"] == delta.since
    assert found["meta"]["positions"] == dict(delta.positions)
    assert found["meta"]["dims"] == dict(delta.dims)


@given(deltas())
def test_equal_deltas_have_equal_bytes(delta: Delta) -> None:
    """The checksum names a content, whatever the order in which its dicts were filled."""

    def backwards(mapping: dict) -> dict:
        return dict(reversed(list(mapping.items())))

    other = replace(
        delta,
        positions=backwards(dict(delta.positions)),
        tables=backwards(dict(delta.tables)),
        dims=backwards(dict(delta.dims)),
        rows=backwards(dict(delta.rows)),
    )
    assert encode_chunks(delta) == encode_chunks(other)


def test_the_golden_payload_is_read_and_written_for_ever() -> None:
    data = (DATA / "payload.bin").read_bytes()
    lengths = [int(word) for word in (DATA / "payload.lengths").read_text().split()]
    chunks = [data[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    assert same(decode_chunks(chunks), golden())
    assert encode_chunks(golden(), 128) == chunks
    assert checksum_of(golden()) == (DATA / "checksum").read_text().strip()


def test_every_truncation_is_refused() -> None:
    chunks = encode_chunks(golden(), 128)
    for index, chunk in enumerate(chunks):
        for length in range(len(chunk)):
            with pytest.raises(Corrupt):
                decode_chunks([*chunks[:index], chunk[:length], *chunks[index + 1 :]])
            with pytest.raises(Corrupt):
                decode_chunks([*chunks[:index], chunk[:length]])
    for index in range(len(chunks)):
        with pytest.raises(Corrupt):
            decode_chunks(chunks[:index] + chunks[index + 1 :])


def test_every_flipped_bit_is_refused_by_the_checksum() -> None:
    (chunk,) = encode_chunks(replace(golden(), tables={}, dense=None))
    checksum = hashlib.sha256(chunk).hexdigest()
    for bit in range(8 * len(chunk)):
        flipped = bytearray(chunk)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_chunks([bytes(flipped)], checksum=checksum)


@given(st.data())
def test_changed_bytes_are_refused_or_make_a_sound_delta(data: st.DataObject) -> None:
    """Without a checksum, too, no other error comes out than Corrupt."""
    chunks = encode_chunks(golden(), 128)
    index = data.draw(st.integers(0, len(chunks) - 1))
    changed = bytearray(chunks[index])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    chunks[index] = bytes(changed)
    try:
        found = decode_chunks(chunks)
    except Corrupt:
        return
    encode_chunks(found)


@given(st.permutations(range(6)))
def test_chunks_in_another_order_are_refused(order: list[int]) -> None:
    chunks = encode_chunks(golden(), 128)
    if order != sorted(order):
        with pytest.raises(Corrupt):
            decode_chunks([chunks[i] for i in order])


def test_chunks_of_two_versions_are_refused() -> None:
    a = encode_chunks(golden(), 128)
    b = encode_chunks(replace(golden(), version=43), 128)
    with pytest.raises(Corrupt, match="version 43"):
        decode_chunks([a[0], *b[1:]])


def test_a_later_wire_version_is_named() -> None:
    (chunk,) = encode_chunks(replace(golden(), tables={}, dense=None))
    with pytest.raises(Corrupt, match="wire version 2"):
        decode_chunks([chunk[:3] + b"\x02" + chunk[4:]])
    with pytest.raises(Corrupt, match="not a chunk"):
        decode_chunks([b"GET / HTTP/1.1" + bytes(40)])


def test_claimed_sizes_allocate_nothing() -> None:
    head = struct.pack("<4sBBHQIIII", b"STD\x01", 1, 4, 65535, 1, 0, 1, 2**32 - 1, 2**32 - 1)
    with pytest.raises(Corrupt, match="expected"):
        decode_chunks([head + b"user\0\0\0\0"])
    with pytest.raises(Corrupt, match="262144"):
        decode_chunks([bytes(CHUNK_BYTES + 1)])


def test_no_chunks_are_no_delta() -> None:
    with pytest.raises(Corrupt):
        decode_chunks([])


def test_meta_may_hold_what_a_later_writer_adds() -> None:
    (chunk,) = encode_chunks(replace(golden(), tables={}, dense=None))
    body = chunk[32:].replace(b'{"dims"', b'{"colour":"red","dims"', 1)
    head = chunk[:28] + struct.pack("<I", len(body))
    assert decode_chunks([head + body]).version == 42


U = np.uint64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 40}, "not a range"),
        ({"since": -1}, "not a range"),
        ({"dims": {"item": 1}}, "no dim"),
        ({"dims": {"user": 2, "item": 1}}, r"float32 \[5, 2\]"),
        ({"dims": {"user": 3, "item": 1, "a b": 1}}, "'a b'"),
        ({"dense": np.zeros(3)}, "dense"),
        ({"dense": np.zeros((3, 1), np.float32)}, "dense"),
    ],
)
def test_a_delta_that_breaks_a_rule_is_not_encoded(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode_chunks(replace(golden(), **change))


@pytest.mark.parametrize(
    ("keys", "removed", "text"),
    [
        ([2, 1], [], "strictly ascending"),
        ([1, 1], [], "strictly ascending"),
        ([1, 2], [4, 3], "removed keys"),
        ([1, 2], [0, 2], "both written and removed"),
    ],
)
def test_keys_have_an_order(keys: list[int], removed: list[int], text: str) -> None:
    values = np.zeros((len(keys), 3), np.float32)
    rows = TableRows(np.array(keys, U), values, np.array(removed, U))
    with pytest.raises(ValueError, match=text):
        encode_chunks(replace(golden(), tables={"user": rows}))


def test_a_row_must_fit_into_a_chunk() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_chunks(golden(), 50)
