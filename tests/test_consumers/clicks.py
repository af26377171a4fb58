"""Messages for the tests of this folder: a click with a number that tells it from all others."""

import io
from collections.abc import Mapping
from typing import Any

import fastavro

from consumers import config
from consumers.avro import AvroDecoder
from consumers.features import Spec

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "click", "type": "int"},
        {"name": "user", "type": ["null", "string"], "default": None},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
        {"name": "price", "type": ["null", "double"], "default": None},
    ],
}
PARSED = fastavro.parse_schema(SCHEMA)
START_MS = 1_700_000_000_000

SAMPLE = config.Sample(time=config.TimeField(field="ts"), labels={"click": config.Label()})
SPEC = Spec(
    SAMPLE,
    {
        "id": config.Feature(tables=["id"]),
        "user": config.Feature(tables=["user"]),
        "tags": config.Feature(tables=["tag"]),
        "price": config.Feature(dense=[]),
    },
)


def decoder() -> AvroDecoder:
    return AvroDecoder(SCHEMA, SPEC)


def click(number: int, **fields: Any) -> dict[str, Any]:
    """A good record; `ts=-1` makes it one that decodes but is no sample."""
    record = {
        "id": number,
        "ts": START_MS + number,
        "click": number % 2,
        "user": f"u{number % 7}",
        "tags": [f"t{i}" for i in range(number % 4)],
        "price": number / 4,
    }
    return record | fields


def encode(record: Mapping[str, Any], schema: Any = PARSED) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, record)
    return out.getvalue()
