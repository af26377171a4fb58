"""Framed messages: which schema wrote them, and what begins with something else."""

import uuid
from typing import Any

import fastavro
import pytest

from consumers import Message, Partition, RegistryUnavailable
from consumers._framing import frame
from consumers.avro import AvroDecoder
from consumers.config import Avro, Registry
from consumers.errors import DecodeError
from consumers.memory import Memory
from tests.contracts.source import ids, never
from tests.test_consumers.clicks import SCHEMA, SPEC, click, encode

P0 = Partition("clicks", 0)
OLDER = {**SCHEMA, "fields": [f for f in SCHEMA["fields"] if f["name"] not in ("user", "price")]}
PARSED_OLDER = fastavro.parse_schema(OLDER)
GUID = uuid.UUID("89791762-2336-4186-9674-299b90a802e2")


class Known:
    """Schemas by key; a key that maps to an error raises it."""

    def __init__(self, **schemas: Any) -> None:
        self.schemas: dict[str, Any] = {key.replace("_", "-", 1): s for key, s in schemas.items()}
        self.asked: list[str] = []

    def schema(self, key: str) -> Any:
        self.asked.append(key)
        found = self.schemas.get(key, DecodeError("unknown_schema", f"no {key}"))
        if isinstance(found, Exception):
            raise found
        return found


def by_id(number: int, record: dict[str, Any], schema: Any = None) -> bytes:
    body = encode(record) if schema is None else encode(record, schema)
    return b"\x00" + number.to_bytes(4, "big") + body


def older(number: int) -> dict[str, Any]:
    return {k: v for k, v in click(number).items() if k not in ("user", "price")}


def decoder(schemas: Any) -> AvroDecoder:
    return AvroDecoder(SCHEMA, SPEC, framing="confluent", schemas=schemas)


def messages(*values: bytes | None) -> list[Message]:
    return [Message(P0, 10 + i, value) for i, value in enumerate(values)]


def test_messages_of_several_schemas_stay_in_order() -> None:
    known = Known(id_1=SCHEMA, id_2=OLDER)
    values = [
        by_id(1, click(0)), by_id(2, older(1), PARSED_OLDER), by_id(1, click(2))[:-1],
        by_id(2, older(3), PARSED_OLDER), None, b"", by_id(1, click(6)), b"\x02abc",
        by_id(3, click(8)), by_id(1, click(9, ts=-1)), b"\x00\x00\x00\x00\x01",
    ]  # fmt: skip
    made = decoder(known)
    for _ in range(2):
        decoded = made.decode(messages(*values))
        assert decoded.good.tolist() == [0, 1, 3, 6]
        assert decoded.columns.ids["id"].keys.tolist() == [0, 1, 3, 6]
        assert decoded.columns.ids["user"].row_splits.tolist() == [0, 1, 1, 1, 2]
        assert [(bad.offset - 10, bad.reason) for bad in decoded.bad] == [
            (2, "truncated"), (4, "tombstone"), (5, "empty"), (7, "bad_magic"),
            (8, "unknown_schema"), (9, "time"), (10, "truncated"),
        ]  # fmt: skip
        assert [bad.value for bad in decoded.bad] == [values[b.offset - 10] for b in decoded.bad]
    assert known.asked.count("id-1") == known.asked.count("id-2") == 1


def test_guids_and_headers() -> None:
    known = Known(id_7=SCHEMA)
    known.schemas[f"guid-{GUID}"] = SCHEMA
    given = [
        Message(P0, 0, b"\x01" + GUID.bytes + encode(click(0))),
        Message(P0, 1, encode(click(1)), schema_id=b"\x01" + GUID.bytes),
        Message(P0, 2, encode(click(2)), schema_id=b"\x00\x00\x00\x00\x07"),
        Message(P0, 3, encode(click(3)), schema_id=b"\x00\x00\x00\x00\x07\x00"),
        Message(P0, 4, b"\x01" + GUID.bytes[:-1]),
    ]
    made = decoder(known)
    assert made.header == "__value_schema_id"
    decoded = made.decode(given)
    assert decoded.columns.ids["id"].keys.tolist() == [0, 1, 2]
    assert [(bad.reason, bad.detail) for bad in decoded.bad] == [
        ("bad_magic", "header __value_schema_id is 000000000700"),
        ("bad_magic", "no confluent frame; it begins with 0189791762233641"),
    ]


def test_single_objects() -> None:
    made = AvroDecoder(SCHEMA, SPEC, framing="single_object", writers=[OLDER])
    assert made.header is None

    def framed(body: bytes, schema: Any) -> bytes:
        canonical = fastavro.schema.to_parsing_canonical_form(schema)
        crc = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
        return b"\xc3\x01" + bytes.fromhex(crc) + body

    decoded = made.decode(
        messages(
            framed(encode(click(0)), SCHEMA),
            framed(encode(older(1), PARSED_OLDER), OLDER),
            framed(b"", "int"),
            by_id(1, click(3)),
            b"\xc3\x01\x00",
        )
    )
    assert decoded.columns.ids["id"].keys.tolist() == [0, 1]
    assert [bad.reason for bad in decoded.bad] == ["unknown_schema", "bad_magic", "bad_magic"]
    # the specification's own example: bytes on the wire are little-endian
    assert "8f5c393f1ad57572" in decoded.bad[0].detail


def test_a_schema_that_does_not_fit_is_refused_by_message() -> None:
    bad: Any = {"type": "record", "name": "Click", "fields": [{"name": "x", "type": "no.Such"}]}
    decoded = decoder(Known(id_1=bad)).decode(messages(by_id(1, click(0)), by_id(1, click(1))))
    assert [b.reason for b in decoded.bad] == ["schema", "schema"]
    assert "schema id-1 is no valid Avro schema" in decoded.bad[0].detail


def test_a_registry_that_is_down_pauses_and_loses_nothing() -> None:
    """To quarantine what can't be looked up would throw a whole stream away in one outage."""
    known = Known(id_1=RegistryUnavailable("registry doesn't answer"))
    source = Memory({P0: [by_id(1, click(n)) for n in range(5)]}, decoder(known))
    source.open(None)
    assert source.batch(3, None, never) is None
    assert source.batch(3, 0, never) is None
    assert source.trouble() == "registry doesn't answer"
    assert source.lag() == {P0: 5}
    known.schemas["id-1"] = SCHEMA
    batch = source.batch(3, None, never)
    assert batch is not None
    assert (ids(batch), dict(batch.position)) == ([0, 1, 2], {P0: 3})
    assert source.trouble() is None


def test_frames_of_confluents_client() -> None:
    """Its own serialisers are the oracle."""
    from confluent_kafka.schema_registry.serde import SchemaId

    plain = SchemaId("AVRO", 7, str(GUID)).id_to_bytes()
    assert frame("confluent", plain + b"x", None) == ("id-7", 5)
    guid = SchemaId("AVRO", 7, str(GUID)).guid_to_bytes()
    assert frame("confluent", guid + b"x", None) == (f"guid-{GUID}", 17)
    assert frame("confluent", b"x", guid) == (f"guid-{GUID}", 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"framing": "confluent"}, "needs a registry"),
        ({"registry": Registry(url="http://r")}, "no other framing takes one"),
        ({"writers": ["a.avsc"]}, "belong to framing single_object"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Avro(schema="a.avsc", **fields)
