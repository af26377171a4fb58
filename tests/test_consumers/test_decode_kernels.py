"""FarmHash against TensorFlow's, and the check of Avro's form against a plain decoder."""

import io
import random
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers._avro_schema import AvroSchema
from consumers._decode_kernels import (
    OK,
    OUT_OF_RANGE,
    TRAILING,
    TRUNCATED,
    check_records,
    fingerprint64,
    fingerprint64_many,
    split_block,
)
from tests.reference.avro import Refused, decode

NAMES = {OK: "ok", TRUNCATED: "truncated", TRAILING: "trailing", OUT_OF_RANGE: "range"}


def test_fingerprints_are_those_of_tensorflow() -> None:
    """Every length has a path of its own up to 64, and multiples of 64 were wrong elsewhere."""
    import tensorflow as tf

    source = random.Random(7)
    values = [source.randbytes(n) for n in range(301) for _ in range(3)]
    values += [source.randbytes(n) for n in (511, 512, 513, 4096, 100_000)]
    values += [b"\0" * n for n in range(130)]
    expected = tf.fingerprint(tf.constant(values), "farmhash64").numpy()
    assert np.array_equal(fingerprint64_many(values), expected.copy().view("<u8").ravel())
    buckets = tf.strings.to_hash_bucket_fast(tf.constant(values), 1_000_003).numpy()
    assert [fingerprint64(value) % 1_000_003 for value in values] == buckets.tolist()


def test_golden_fingerprints() -> None:
    """Keys are what models are stored by: these numbers must never change."""
    assert fingerprint64(b"") == 0x9AE16A3B2F90404F
    assert fingerprint64(b"a") == 12917804110809363939
    assert fingerprint64("größe".encode()) == 7130186473359472984
    assert fingerprint64(b"x" * 65) == fingerprint64_many([b"y", b"x" * 65])[1]
    assert fingerprint64_many([]).shape == (0,)


SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "large", "type": "long"},
        {"name": "single", "type": "float"},
        {"name": "double", "type": "double"},
        {"name": "text", "type": "string"},
        {"name": "raw", "type": "bytes"},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 3}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["a", "b", "c"]}},
        {"name": "maybe", "type": ["null", "int", "string"]},
        {"name": "list", "type": {"type": "array", "items": ["null", "long"]}},
        {"name": "map", "type": {"type": "map", "values": {"type": "array", "items": "Hash"}}},
        {
            "name": "inner",
            "type": {
                "type": "record",
                "name": "Inner",
                "fields": [
                    {"name": "kind", "type": "Kind"},
                    {"name": "pairs", "type": {"type": "array", "items": {
                        "type": "record", "name": "Pair", "fields": [
                            {"name": "id", "type": "int"}, {"name": "nothing", "type": "null"}]}}},
                ],
            },
        },
    ],
}  # fmt: skip
COMPILED = AvroSchema(SCHEMA)


def resolved(schema: Any, named: dict[str, Any]) -> Any:
    """The schema with names of types replaced by the types, as the plain decoder wants it."""
    if isinstance(schema, list):
        return [resolved(branch, named) for branch in schema]
    if isinstance(schema, str):
        return named.get(schema, schema)
    done = {
        key: resolved(value, named) if key in ("items", "values", "type") else value
        for key, value in schema.items()
    }
    if "fields" in done:
        done["fields"] = [
            {"name": field["name"], "type": resolved(field["type"], named)}
            for field in done["fields"]
        ]
    if "name" in done:
        named[done["name"]] = done
    return done


PLAIN = resolved(SCHEMA, {})

records = st.fixed_dictionaries(
    {
        "flag": st.booleans(),
        "small": st.integers(-(2**31), 2**31 - 1),
        "large": st.integers(-(2**63), 2**63 - 1),
        "single": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
        "text": st.text(max_size=5),
        "raw": st.binary(max_size=5),
        "hash": st.binary(min_size=3, max_size=3),
        "kind": st.sampled_from("abc"),
        "maybe": st.none() | st.integers(-5, 5) | st.text(max_size=2),
        "list": st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=4),
        "map": st.dictionaries(
            st.text(max_size=2), st.lists(st.binary(min_size=3, max_size=3), max_size=2), max_size=2
        ),
        "inner": st.fixed_dictionaries(
            {
                "kind": st.sampled_from("abc"),
                "pairs": st.lists(
                    st.fixed_dictionaries({"id": st.integers(-9, 9), "nothing": st.none()}),
                    max_size=3,
                ),
            }
        ),
    }
)


def encode(record: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, COMPILED.parsed, record)
    return out.getvalue()


def checked(value: bytes, schema: AvroSchema = COMPILED) -> str:
    status, _ = check_records(schema.program, [value])
    return NAMES[int(status[0])]


def plainly(value: bytes) -> str:
    try:
        decode(PLAIN, value, errors="replace")  # fastavro refuses such text, the check doesn't
    except Refused as reason:
        return str(reason)
    return "ok"


@given(records)
def test_what_is_well_formed_passes_and_no_part_of_it_does(record: Any) -> None:
    value = encode(record)
    assert decode(PLAIN, value) == record
    prefixes = [value[:n] for n in range(len(value) + 1)]
    status, stops = check_records(COMPILED.program, prefixes)
    assert [NAMES[s] for s in status] == ["truncated"] * len(value) + ["ok"]
    assert all(stop <= len(prefix) for stop, prefix in zip(stops, prefixes, strict=True))
    assert checked(value + b"\0") == "trailing"


@given(records, st.data())
def test_damage_is_seen_as_the_plain_decoder_sees_it(record: Any, data: st.DataObject) -> None:
    value = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(value) - 1))
        value[at] = data.draw(st.sampled_from([0, 1, 2, 3, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    expected = plainly(bytes(value))
    assert checked(bytes(value)) == expected
    if expected == "ok":
        try:
            got = fastavro.schemaless_reader(io.BytesIO(value), COMPILED.parsed, None)
        except UnicodeDecodeError:
            return
        assert repr(got) == repr(decode(PLAIN, bytes(value)))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "01", "range"),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "04", "range"),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "02", "ok"),
        (["null", "int"], "0102", "range"),
        (["null", "int"], "04", "range"),
        (["null", "int"], "0202", "ok"),
        ("int", "feffffffff7f", "range"),
        ("int", "feffffff0f", "ok"),
        ("int", "ffffffff0f", "ok"),
        ("int", "8080808010", "range"),
        ("long", "ffffffffffffffffff01", "ok"),
        ("long", "ffffffffffffffffff02", "range"),
        ("long", "c08080808080808080808000", "range"),
        ("long", "80", "truncated"),
        ("boolean", "02", "range"),
        ("bytes", "01", "range"),
        ("bytes", "0401", "truncated"),
        ("string", "feffffffffffffffff01", "truncated"),
        ({"type": "array", "items": "int"}, "0304020400", "ok"),
        ({"type": "array", "items": "int"}, "02020000", "trailing"),
        ({"type": "array", "items": "int"}, "020204060400", "ok"),
        ({"type": "array", "items": "int"}, "030302", "range"),
        ({"type": "array", "items": "int"}, "ffffffffffffffffff010000", "range"),
        ({"type": "array", "items": "int"}, "feffffffffffffffff01", "truncated"),
        ({"type": "map", "values": "int"}, "0202610200", "ok"),
        ({"type": "fixed", "name": "F", "size": 2}, "01", "truncated"),
    ],
)
def test_known_malformations(kind: Any, value: str, expected: str) -> None:
    """fastavro takes most of these; Avro's own decoders refuse them."""
    schema = AvroSchema({"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]})
    assert checked(bytes.fromhex(value), schema) == expected


@given(st.lists(records, max_size=5), st.integers(-1, 1))
def test_blocks_are_cut_where_records_end(many: list[Any], more: int) -> None:
    values = [encode(record) for record in many]
    block = b"".join(values)
    status, found, _, ends = split_block(COMPILED.program, block, len(values))
    assert (NAMES[status], found) == ("ok", len(values))
    assert ends.tolist() == np.cumsum([len(value) for value in values]).tolist()
    if more and len(values) + more >= 0:
        status, *_ = split_block(COMPILED.program, block, len(values) + more)
        assert NAMES[status] == ("truncated" if more > 0 else "trailing")
