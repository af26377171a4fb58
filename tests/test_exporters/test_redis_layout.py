"""Names and bytes in Redis, against plain Python and the client's own packing."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import Corrupt, DenseInfo, Head, TableInfo
from exporters.redis_layout import (
    Keys,
    buckets_for,
    buckets_of,
    decode_bucket,
    entry_fields,
    head_fields,
    head_from,
    mix,
    published_from,
    row_commands,
)
from tests.reference import wire as reference

KEYS = st.integers(0, 2**64 - 1)
HEAD = Head(
    version=42,
    generation=7,
    epoch=40,
    checksum="0123456789abcdef" * 4,
    watermark=-5,
    step=9,
    positions={"clicks/0": 2**40},
    tables={"user": TableInfo(16, 200_000, 19_999_999), "a.b-c": TableInfo(1, 1, 0)},
    dense=DenseInfo(41, 1000),
    groups=3,
)


def test_mix_keeps_its_vectors() -> None:
    """The page gives them to readers in other languages."""
    keys = [0, 1, 2, 2**63, 2**64 - 1]
    assert [f"{z:016x}" for z in mix(np.array(keys, np.uint64)).tolist()] == [
        "0000000000000000",
        "5692161d100b05e5",
        "dbd238973a2b148a",
        "25c26ea579cea98a",
        "b4d055fcf2cbbd7b",
    ]


@given(st.lists(KEYS, max_size=50), st.integers(1, 2**31))
def test_buckets_are_those_of_plain_numbers(keys: list[int], buckets: int) -> None:
    found = buckets_of(np.array(keys, np.uint64), buckets)
    assert found.tolist() == [reference.mix(key) % buckets for key in keys]


def test_a_bucket_is_made_for_a_hundred_rows() -> None:
    assert [buckets_for(rows) for rows in (0, 1, 100, 101, 20_000_000)] == [1, 1, 1, 2, 200_000]


def test_buckets_fill_evenly() -> None:
    counts = np.bincount(buckets_of(np.arange(100_000, dtype=np.uint64), 1000), minlength=1000)
    assert counts.min() > 50
    assert counts.max() < 160


@given(st.lists(st.tuples(KEYS, st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_row_commands_are_what_a_client_would_send(
    shape: list[tuple[int, int]], data: st.DataObject
) -> None:
    def packed(*words: bytes) -> bytes:
        parts = [b"*%d\r\n" % len(words)]
        parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        return b"".join(parts)

    dim, version = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 2**33))
    names = [f"st:{{m/00}}:1:t:{number:05x}" for number in range(len(shape))]
    starts = np.cumsum([0, *[count for _, count in shape]])
    n = int(starts[-1])
    keys = np.array([first + i for first, _ in shape for i in range(1)] * n, np.uint64)[:n]
    values = np.random.default_rng(n).normal(size=(n, dim)).astype(np.float32)
    stamp = struct.pack("<I", version % 2**32)
    sets, deletes = [], []
    for i, name in enumerate(names):
        fields = []
        for at in range(starts[i], starts[i + 1]):
            fields += [struct.pack("<Q", int(keys[at])), stamp + values[at].tobytes()]
        sets.append(packed(b"HSET", name.encode(), *fields))
        deletes.append(packed(b"HDEL", name.encode(), *fields[::2]))
    assert row_commands(names, starts, keys, values, version) == sets
    assert row_commands(names, starts, keys, None, version) == deletes


@given(st.dictionaries(KEYS, st.lists(st.floats(width=32), min_size=3, max_size=3), max_size=9))
def test_a_bucket_reads_back(rows: dict[int, list[float]]) -> None:
    fields: list[bytes] = []
    for key, row in rows.items():
        fields += [struct.pack("<Q", key), struct.pack("<I3f", 9, *row)]
    keys, values = decode_bucket(fields, 3)
    assert keys.tolist() == list(rows)
    assert values.tobytes() == b"".join(struct.pack("<3f", *row) for row in rows.values())


@pytest.mark.parametrize(
    "fields", [[b"1234567", b"x" * 16], [b"12345678", b"x" * 15], [b"12345678", b""]]
)
def test_a_bucket_of_other_sizes_is_refused(fields: list[bytes]) -> None:
    with pytest.raises(Corrupt, match="other sizes"):
        decode_bucket(fields, 3)


@pytest.mark.parametrize("head", [HEAD, replace(HEAD, dense=None, positions={}, tables={})])
def test_a_head_reads_back(head: Head) -> None:
    raw = {name.encode(): value.encode() for name, value in head_fields(head).items()}
    assert head_from(raw) == head
    assert head_from({}) is None
    assert head_from({**raw, b"later": b"?"}) == head
    for name in raw.keys() - {b"dense", b"dense_size"}:
        with pytest.raises(Corrupt):
            head_from({k: v for k, v in raw.items() if k != name})


@pytest.mark.parametrize("since", [None, 41])
def test_a_stream_entry_reads_back(since: int | None) -> None:
    fields = entry_fields(HEAD, since=since, chunks=3)
    words = [word.encode() for pair in fields.items() for word in pair]
    found = published_from(b"42-0", words)
    assert (found.version, found.since, found.epoch, found.chunks) == (42, since, 40, 3)
    assert (found.generation, found.checksum) == (7, HEAD.checksum)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "snapshot"},
        {"kind": "?"},
        {"chunks": "-1"},
        {"chunks": "99999999999"},
        {"since": ""},
    ],
)
def test_a_stream_entry_that_makes_no_sense_is_refused(change: dict[str, str]) -> None:
    fields = {**entry_fields(HEAD, since=41, chunks=3), **change}
    with pytest.raises(Corrupt, match="42-0"):
        published_from(b"42-0", [word.encode() for pair in fields.items() for word in pair])
    with pytest.raises(Corrupt):
        published_from(b"42-0", [b"kind"])


def test_names() -> None:
    keys = Keys("ctr")
    assert keys.bucket(7, 40, "user", 31) == "st:{ctr/07}:40:user:0001f"
    assert keys.bucket(0, 1, "t", 0xABCDEF) == "st:{ctr/00}:1:t:abcdef"
    assert keys.payload(42, 0) == "st:{ctr}:d:42:0"
    assert keys.epoch_of(b"st:{ctr/07}:40:user:0001f") == 40
    for other in (b"st:{ctr/00}:fence", b"st:{ctr2/00}:40:user:0", b"st:{ctr/00}:x:user:0", b""):
        assert keys.epoch_of(other) is None
    for bad in ("", "a b", "a}b", "ä", "a/b", "*"):
        with pytest.raises(ValueError, match="model"):
            Keys(bad)
