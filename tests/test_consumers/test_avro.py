"""Avro messages: what is refused and why, what schema resolution bridges, logical types."""

import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from consumers import Message, Partition
from consumers._avro_schema import AvroSchema
from consumers.avro import AvroDecoder, read_schema, warm_up
from consumers.config import Avro, Feature, Sample, TimeField
from consumers.config import Label as LabelConfig
from consumers.errors import DecodeError, SpecError
from consumers.features import Spec
from tests.test_consumers.clicks import (
    PARSED,
    SCHEMA,
    SPEC,
    START_MS,
    click,
    decoder,
    encode,
)

P0 = Partition("clicks", 0)


def messages(*values: bytes | None) -> list[Message]:
    return [Message(P0, 10 + i, value) for i, value in enumerate(values)]


def reasons(*values: bytes | None) -> list[str]:
    decoded = decoder().decode(messages(*values))
    assert decoded.columns.size == len(decoded.good) == len(values) - len(decoded.bad)
    return [bad.reason for bad in decoded.bad]


def test_good_and_bad_keep_their_places() -> None:
    """One bad record must not end its batch: that has lost a sixth of a stream unnoticed."""
    good = [encode(click(n)) for n in range(4)]
    decoded = decoder().decode(messages(good[0], None, good[1], good[2][:-3], good[3], b""))
    assert decoded.good.tolist() == [0, 2, 4]
    assert decoded.columns.ids["id"].keys.tolist() == [0, 1, 3]
    assert [(bad.offset, bad.reason) for bad in decoded.bad] == [
        (11, "tombstone"),
        (13, "truncated"),
        (15, "empty"),
    ]
    assert decoded.bad[1].value == good[2][:-3]
    where = good[2].index(b"\x02\x00\x00\x00\x00\x00\x00\xe0\x3f") + 1
    assert decoded.bad[1].detail == (
        f"the record isn't complete, at byte {where} of {len(good[2]) - 3}"
    )


def test_every_proper_prefix_is_refused() -> None:
    value = encode(click(3))
    assert reasons(*(value[:n] for n in range(1, len(value)))) == ["truncated"] * (len(value) - 1)


def test_bytes_behind_the_record() -> None:
    assert reasons(encode(click(3)) + b"\0") == ["trailing"]


def test_a_string_that_is_no_utf8() -> None:
    value = encode(click(1, user="abcd")).replace(b"abcd", b"ab\xff\xfe")
    assert reasons(value, encode(click(2))) == ["not_utf8"]


def test_no_messages() -> None:
    warm_up()
    decoded = decoder().decode([])
    assert decoded.columns.size == 0
    assert decoded.bad == ()


def test_a_record_decoded_before_is_taken_as_it_is() -> None:
    given = [
        Message(P0, 0, b"bytes of another schema", record=click(5)),
        Message(P0, 1, b"?", record=DecodeError("schema", "no such symbol")),
        Message(P0, 2, encode(click(6))),
    ]
    decoded = decoder().decode(given)
    assert decoded.columns.ids["id"].keys.tolist() == [5, 6]
    [bad] = decoded.bad
    assert (bad.reason, bad.detail, bad.value) == ("schema", "no such symbol", b"?")


# schemas


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields],
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("string", "must be a record"),
        ({"type": "record", "name": "R", "fields": [{"name": "x"}]}, "no valid Avro schema"),
        (record(("x", "no.such.Type")), "no valid Avro schema"),
        (record(("next", ["null", "R"])), "record R contains itself"),
        (record(("x", {"type": "array", "items": "null"})), "items without bytes"),
        (record(("x", {"type": "array", "items": record(name="Nothing")})), "items without bytes"),
    ],
)
def test_schemas_that_are_refused(schema: Any, message: str) -> None:
    """A recursive schema lets a message overflow the stack; an array of nulls, the memory."""
    with pytest.raises(SpecError, match=message):
        AvroSchema(schema)


def nested(depth: int) -> Any:
    return "int" if depth == 0 else {"type": "array", "items": nested(depth - 1)}


def test_arrays_of_arrays_end_somewhere() -> None:
    AvroSchema(record(("x", nested(32))))
    with pytest.raises(SpecError, match="nested deeper than 32"):
        AvroSchema(record(("x", nested(33))))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("int", ("int", False)),
        ("long", ("int", False)),
        (["null", "long"], ("int", False)),
        (["int", "null", "long"], ("int", False)),
        (["null", "int", "double"], ("float", False)),
        (["string", "int"], ("other", False)),
        ("null", ("other", False)),
        ("boolean", ("bool", False)),
        ({"type": "string", "logicalType": "uuid"}, ("string", False)),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, ("string", False)),
        ({"type": "fixed", "name": "F", "size": 2}, ("bytes", False)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4}, ("other", False)),
        ({"type": "array", "items": ["null", "string"]}, ("string", True)),
        (["null", {"type": "array", "items": "double"}], ("float", True)),
        (["null", "int", {"type": "array", "items": "int"}], ("other", False)),
        ({"type": "array", "items": {"type": "array", "items": "int"}}, ("other", True)),
        ({"type": "map", "values": "int"}, ("other", False)),
        (record(("y", "int"), name="Inner"), ("other", False)),
    ],
)
def test_kinds_of_fields(kind: Any, expected: tuple[str, bool]) -> None:
    field = AvroSchema(record(("x", kind))).fields["x"]
    assert (field.kind, field.is_list) == expected


def test_a_float_as_an_id_is_refused_by_name() -> None:
    spec = Spec(SPEC.sample, {"price": Feature(tables=["price"])})
    with pytest.raises(SpecError, match="feature 'price': field 'price' is null or double"):
        AvroDecoder(SCHEMA, spec)


def test_time_stamps_stay_numbers() -> None:
    """A conversion to dates has cost eight hours, and an exception at the ends of the range."""
    values = [encode(click(0, ts=ts)) for ts in (START_MS, 2**63 - 1, -(2**63))]
    plain = {**SCHEMA, "fields": [*SCHEMA["fields"]]}
    plain["fields"][1] = {"name": "ts", "type": "long"}
    parsed = fastavro.parse_schema(plain)
    values[1:] = [encode(click(0, ts=ts), parsed) for ts in (2**63 - 1, -(2**63))]
    decoded = decoder().decode(messages(*values))
    assert decoded.columns.time_ms.tolist() == [START_MS]
    assert [bad.reason for bad in decoded.bad] == ["time", "time"]


def test_schema_files(tmp_path: Path) -> None:
    path = tmp_path / "click.avsc"
    with pytest.raises(SpecError, match="click.avsc: No such file"):
        read_schema(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(SpecError, match="click.avsc is no JSON"):
        read_schema(path)
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    made = AvroDecoder.from_config(Avro(schema=str(path)), SPEC)
    assert made.decode(messages(encode(click(1)))).columns.size == 1


# schema resolution, as it happens when a file was written with another schema


def with_field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    base = [("ts", "long"), ("y", "int")]
    schema = record(*base)
    schema["fields"].append({"name": name, "type": kind, **more})
    return schema


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols), **more}


@pytest.mark.parametrize(
    ("written", "read", "value", "expected"),
    [
        (with_field("x", "int"), with_field("x", "long"), 7, 7),
        (with_field("x", "int"), with_field("x", "double"), 7, 7.0),
        (with_field("x", "int"), with_field("x", ["null", "int"]), 7, 7),
        (with_field("x", ["null", "int"]), with_field("x", ["int", "null"]), None, None),
        (with_field("x", "string"), with_field("x", "bytes"), "a", b"a"),
        (with_field("old", "int"), with_field("x", "int", aliases=["old"]), 7, 7),
        (with_field("other", "int"), with_field("x", ["null", "int"], default=None), 7, None),
        (with_field("other", "int"), with_field("x", "int", default=3), 7, 3),
        (with_field("x", enum("a", "b")), with_field("x", enum("a", "b", "c")), "b", "b"),
        (with_field("x", enum("a", "b")), with_field("x", enum("a", default="a")), "b", "a"),
        (with_field("x", enum("a", "b")), with_field("x", enum("a")), "b", DecodeError),
        (with_field("other", "int"), with_field("x", "int"), 7, DecodeError),
        (with_field("x", "long"), with_field("x", "int"), 7, DecodeError),
        (with_field("x", "int"), with_field("x", "string"), 7, DecodeError),
    ],
)
def test_resolution(written: Any, read: Any, value: Any, expected: Any) -> None:
    spec = Spec(Sample(time=TimeField(field="ts"), labels={"y": LabelConfig()}), {})
    reader = AvroDecoder(read, spec).written_by(written, name="file.avro")
    field = written["fields"][-1]["name"]
    payload = encode({"ts": 1, "y": 0, field: value}, fastavro.parse_schema(written))
    [found] = reader.records(payload, 1)
    assert found.value == payload
    if expected is DecodeError:
        assert isinstance(found.record, DecodeError)
        assert found.record.reason == "schema"
    else:
        assert not isinstance(found.record, DecodeError)
        assert found.record["x"] == expected
        assert type(found.record["x"]) is type(expected)


def test_blocks_that_hold_something_else() -> None:
    reader = decoder().written_by(PARSED, name="file.avro")
    block = encode(click(1)) + encode(click(2))
    assert [found.record for found in reader.records(block, 2)] == [click(1), click(2)]
    assert reader.records(b"", 0) == []
    for count, message in [(1, "record 1 of 1"), (3, "record 2 of 3"), (1 << 60, "can't fit")]:
        with pytest.raises(DecodeError, match=message):
            reader.records(block, count)
    with pytest.raises(DecodeError, match="can't fit"):
        reader.records(block, -1)
