"""Avro in its binary form, bare: a message is one encoded record and nothing else.

fastavro alone accepts what the specification forbids: a negative enum or union index (taken as
the last symbol or branch), numbers beyond 32 bits in an ``int``, any byte as a boolean, bytes
behind the record. So each message is first walked over by a compiled check that costs about a
microsecond, and fastavro sees only what is well formed. The check also bounds every count and
length by the size of the message.
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import fastavro
import numpy as np

from consumers import _decode_kernels as kernels
from consumers._avro_schema import AvroSchema, Schema, read_schema
from consumers.config import Avro
from consumers.errors import DecodeError
from consumers.features import Layout, Record, Spec
from consumers.source import Bad, Decoded, Message

_STATUS = {
    kernels.TRUNCATED: "truncated",
    kernels.TRAILING: "trailing",
    kernels.OUT_OF_RANGE: "range",
}


def warm_up() -> None:
    """Compile the decoder's kernels, or load them, so that the first batch needn't wait for it."""
    kernels.warm_up()


class AvroDecoder:
    """Decode messages of one schema into samples.

    Parameters
    ----------
    schema
        The schema of the messages, in JSON form.
    spec
        What samples are made of.

    Raises
    ------
    SpecError
        The schema is invalid, or doesn't fit the description.
    """

    def __init__(self, schema: Schema, spec: Spec) -> None:
        self._schema = AvroSchema(schema)
        self.layout = Layout(self._schema.fields, spec, kernels.fingerprint64_many)

    @classmethod
    def from_config(cls, config: Avro, spec: Spec) -> "AvroDecoder":
        """Read the schema that the config names."""
        return cls(read_schema(config.schema), spec)

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Decode each message for itself; what can't be decoded comes back as bad."""
        faults: dict[int, tuple[str, str]] = {}
        records: list[Record] = []
        at: list[int] = []
        for i, found in enumerate(self._records(messages)):
            if isinstance(found, DecodeError):
                faults[i] = (found.reason, found.detail)
            else:
                records.append(found)
                at.append(i)
        columns, record_faults = self.layout.columns(records)
        faults.update({at[i]: fault for i, fault in record_faults.items()})
        bad = tuple(
            Bad(*messages[i].partition, messages[i].offset, *faults[i], messages[i].value)
            for i in sorted(faults)
        )
        good = np.array([i for i in range(len(messages)) if i not in faults], np.int64)
        return Decoded(columns, good, bad)

    def written_by(self, schema: Schema, *, name: str) -> "BlockDecoder":
        """Return a decoder of blocks that were written with another schema."""
        writer = AvroSchema(schema, name=name)
        return BlockDecoder(writer, None if writer.same_as(self._schema) else self._schema)

    def _records(self, messages: Sequence[Message]) -> Iterator[Record | DecodeError]:
        values = [m.value or b"" for m in messages if m.record is None]
        status, stops = kernels.check_records(self._schema.program, values)
        checked = zip(status.tolist(), stops.tolist(), strict=True)
        for message in messages:
            if message.record is not None:
                yield message.record
                continue
            outcome, stop = next(checked)
            if message.value is None:
                yield DecodeError("tombstone", "the message has no value")
            elif not message.value:
                yield DecodeError("empty", "the value has no bytes")
            elif outcome != kernels.OK:
                yield _malformed(outcome, stop, len(message.value))
            else:
                yield _read(message.value, self._schema.parsed, None)


class EncodedRecord(NamedTuple):
    """One record out of a block: its bytes, and what they hold or why they can't be used."""

    value: bytes
    record: Record | DecodeError


class BlockDecoder:
    """Decode blocks of records laid end to end, as Avro files hold them."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema | None) -> None:
        self._writer = writer
        self._reader = None if reader is None else reader.parsed

    def records(self, block: bytes, count: int) -> list[EncodedRecord]:
        """Return the ``count`` records that ``block`` consists of.

        Raises
        ------
        DecodeError
            The block doesn't hold exactly so many well-formed records.
        """
        if not 0 <= count <= len(block):
            raise DecodeError("range", f"{count} records can't fit into {len(block)} bytes")
        status, found, stop, ends = kernels.split_block(self._writer.program, block, count)
        if status != kernels.OK:
            fault = _malformed(status, stop, len(block))
            raise DecodeError(fault.reason, f"record {found} of {count}: {fault.detail}")
        starts = [0, *ends.tolist()]
        values = [block[a:b] for a, b in itertools.pairwise(starts)]
        return [
            EncodedRecord(value, _read(value, self._writer.parsed, self._reader))
            for value in values
        ]


def _malformed(status: int, stop: int, size: int) -> DecodeError:
    reason = _STATUS[status]
    words = {
        "truncated": "the record isn't complete",
        "trailing": "the record ends before the value does",
        "range": "a number, length or index is out of its range",
    }[reason]
    return DecodeError(reason, f"{words}, at byte {stop} of {size}")


def _read(value: bytes, writer: Schema, reader: Schema | None) -> Record | DecodeError:
    """Decode one well-formed record, or say why its content can't be used."""
    try:
        record: Record = fastavro.schemaless_reader(  # type: ignore[assignment]
            io.BytesIO(value), writer, reader
        )
    except UnicodeDecodeError as error:
        return DecodeError("not_utf8", str(error))
    except Exception as error:  # noqa: BLE001 - fastavro lets out whatever its code meets
        return DecodeError("schema", f"{type(error).__name__}: {error}")
    return record
