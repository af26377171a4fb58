"""What stands before an Avro record and says which schema wrote it.

::

    confluent       0x00 | id: 4 bytes, big-endian | record
                    0x01 | guid: 16 bytes          | record
                    header ``__value_schema_id`` with one of these prefixes | record
    single_object   0xC3 0x01 | CRC-64-AVRO of the schema: 8 bytes, little-endian | record

A schema is named by a key: ``id-7``, ``guid-…`` or ``crc-…``.
"""

import uuid
from typing import Literal, NamedTuple

import fastavro

from consumers._avro_schema import AvroSchema
from consumers.errors import DecodeError

Framing = Literal["bare", "confluent", "single_object"]

SCHEMA_HEADER = "__value_schema_id"
"""Header of a Kafka message that may hold the schema's id."""

_ID_SIZE = 5
_GUID_SIZE = 17
_CRC_SIZE = 10


class Frame(NamedTuple):
    """Key of the schema, and how many bytes stand before the record."""

    key: str
    size: int


def frame(framing: Framing, value: bytes, header: bytes | None) -> Frame:
    """Read the frame of a message.

    Raises
    ------
    DecodeError
        ``bad_magic``: the value begins with something else.
    """
    if framing == "single_object":
        if value[:2] == b"\xc3\x01" and len(value) >= _CRC_SIZE:
            return Frame(f"crc-{value[2:_CRC_SIZE].hex()}", _CRC_SIZE)
    elif header is not None:
        found = _confluent(header)
        if found is not None and found.size == len(header):
            return Frame(found.key, 0)
        raise DecodeError("bad_magic", f"header {SCHEMA_HEADER} is {header[:20].hex()}")
    else:
        found = _confluent(value)
        if found is not None:
            return found
    raise DecodeError("bad_magic", f"no {framing} frame; it begins with {value[:8].hex()}")


def crc_key(schema: AvroSchema) -> str:
    """Return the key that a single-object frame names a schema by."""
    canonical = fastavro.schema.to_parsing_canonical_form(schema.parsed)
    return f"crc-{fastavro.schema.fingerprint(canonical, 'CRC-64-AVRO')}"


def _confluent(prefix: bytes) -> Frame | None:
    if prefix[:1] == b"\x00" and len(prefix) >= _ID_SIZE:
        return Frame(f"id-{int.from_bytes(prefix[1:_ID_SIZE], 'big')}", _ID_SIZE)
    if prefix[:1] == b"\x01" and len(prefix) >= _GUID_SIZE:
        return Frame(f"guid-{uuid.UUID(bytes=prefix[1:_GUID_SIZE])}", _GUID_SIZE)
    return None
