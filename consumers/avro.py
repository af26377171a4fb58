"""Avro in its binary form: a message is one encoded record, behind a frame if there is one.

A batch of messages runs through an operation table (:mod:`consumers._avro_table`) into columns,
with no Python object per field. What the table refuses goes the general way, record by record
through fastavro: that way tells why a message is bad, and has the last word.

fastavro alone accepts what the specification forbids: a negative enum or union index (taken as
the last symbol or branch), numbers beyond 32 bits in an ``int``, any byte as a boolean, bytes
behind the record. So on the general way each message is first walked over by a compiled check, and
fastavro sees only what is well formed. Both ways bound every count and length by the size of the
message.
"""

import io
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import fastavro
import numpy as np
from numpy.typing import NDArray

from consumers import _decode_kernels as kernels
from consumers._avro_schema import AvroSchema, Schema, read_schema
from consumers._avro_table import NotCovered, OperationTable, compile_table
from consumers._framing import SCHEMA_HEADER, Framing, crc_key, frame
from consumers._raw_columns import RawDecoder, RawLayout
from consumers.config import Avro
from consumers.errors import DecodeError, SpecError
from consumers.features import Layout, Record, Spec
from consumers.source import Bad, Columns, Decoded, Message

logger = logging.getLogger(__name__)

_VALUE_OF = itemgetter(Message._fields.index("value"))
_RECORD_OF = itemgetter(Message._fields.index("record"))
_STATUS = {
    kernels.TRUNCATED: "truncated",
    kernels.TRAILING: "trailing",
    kernels.OUT_OF_RANGE: "range",
}


def warm_up() -> None:
    """Compile the decoder's kernels, or load them, so that the first batch needn't wait for it."""
    kernels.warm_up()


class Schemas(Protocol):
    """Where schemas are looked up; :class:`consumers.registry.RegistrySchemas` is one."""

    def schema(self, key: str) -> Schema:
        """Return the schema of a frame.

        Raises
        ------
        RegistryUnavailable
            It can't be had at the moment.
        DecodeError
            There is none.
        """
        ...


class AvroDecoder:
    """Decode messages into samples that are described by one schema.

    One thread at a time may use it, and what it made.

    Parameters
    ----------
    schema
        The schema of the messages, in JSON form; framed ones may have been written with others.
    spec
        What samples are made of.
    framing
        What stands before the records.
    schemas
        Where the schemas that frames name are looked up.
    writers
        Further schemas that single objects may be written with.

    Raises
    ------
    SpecError
        The schema is invalid, or doesn't fit the description.
    """

    def __init__(
        self,
        schema: Schema,
        spec: Spec,
        *,
        framing: Framing = "bare",
        schemas: Schemas | None = None,
        writers: Sequence[Schema] = (),
    ) -> None:
        self._framing = framing
        self._schemas = schemas
        self._schema = AvroSchema(schema)
        self.layout = Layout(self._schema.fields, spec, kernels.fingerprint64_many)
        raw = RawLayout(self._schema.fields, spec)
        self._samples = _Samples(
            self.layout,
            raw,
            RawDecoder(raw.slots),
            RawLayout.of_times(self._schema.fields, spec),
            tuple(p for p in raw.slots.by_field if "." in p),
        )
        self._own = WriterDecoder(self._schema, None, self._samples)
        self._by_key: dict[str, WriterDecoder | DecodeError] = {}
        if framing == "single_object":
            self._by_key[crc_key(self._schema)] = self._own
            for n, writer in enumerate(writers):
                made = self.written_by(writer, name=f"writers[{n}]")
                self._by_key[crc_key(AvroSchema(writer))] = made

    @classmethod
    def from_config(
        cls, config: Avro, spec: Spec, *, schemas: Schemas | None = None
    ) -> "AvroDecoder":
        """Read the schemas that the config names."""
        return cls(
            read_schema(config.schema),
            spec,
            framing=config.framing,
            schemas=schemas,
            writers=[read_schema(path) for path in config.writers],
        )

    @property
    def header(self) -> str | None:
        """The header that ``schema_id`` of a message should hold, None where none is read."""
        return SCHEMA_HEADER if self._framing == "confluent" else None

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Decode each message for itself; what can't be decoded comes back as bad.

        Raises
        ------
        RegistryUnavailable
            The schema of a message can't be had at the moment: decode them all again later.
        """
        if self._framing == "bare":
            return self._own.decode(messages)
        groups: dict[str, list[int]] = {}
        bodies: list[Message] = []
        for i, message in enumerate(messages):
            key, body = self._unframed(message)
            groups.setdefault(key, []).append(i)
            bodies.append(body)
        parts = [
            (members, self._writer(key).decode([bodies[i] for i in members]))
            for key, members in groups.items()
        ]
        return together(messages, parts) if parts else self._own.decode(messages)

    def columns(self, values: Sequence[bytes | None]) -> tuple[Columns, NDArray[np.int64]]:
        """Decode values by columns alone, and tell which became samples; nothing of the others.

        Raises
        ------
        ValueError
            The schema needs the general way.
        """
        return self._own.columns(values)

    def written_by(self, schema: Schema, *, name: str) -> "WriterDecoder":
        """Return a decoder of what was written with another schema.

        Raises
        ------
        SpecError
            The schema is invalid.
        """
        writer = AvroSchema(schema, name=name)
        reader = None if writer.same_as(self._schema) else self._schema
        return WriterDecoder(writer, reader, self._samples)

    def _unframed(self, message: Message) -> tuple[str, Message]:
        """Take a message out of its frame; the key is empty for what needs no schema."""
        if message.record is not None or not message.value:
            return "", message
        try:
            found = frame(self._framing, message.value, message.schema_id)
            self._writer(found.key)
        except DecodeError as fault:
            return "", message._replace(record=fault)
        body = message.value[found.size :]
        if not body:
            return "", message._replace(record=DecodeError("truncated", "nothing but a frame"))
        return found.key, message._replace(value=body)

    def _writer(self, key: str) -> "WriterDecoder":
        """Return the decoder for a key; raises DecodeError or RegistryUnavailable."""
        if not key:
            return self._own
        known = self._by_key.get(key)
        if known is None:
            if self._schemas is None:
                raise DecodeError("unknown_schema", f"no known schema has the key {key}")
            schema = self._schemas.schema(key)
            try:
                known = self.written_by(schema, name=f"schema {key}")
            except SpecError as error:
                known = DecodeError("schema", str(error))
            self._by_key[key] = known
        if isinstance(known, DecodeError):
            raise DecodeError(known.reason, known.detail)
        return known


class EncodedRecord(NamedTuple):
    """One record out of a block: its bytes, and what they hold or why they can't be used."""

    value: bytes
    record: Record | DecodeError


class EncodedBlock(NamedTuple):
    """The records of a block: their bytes, and event times in ms, 0 where there is no valid one."""

    values: list[bytes]
    times_ms: list[int]


class _Samples(NamedTuple):
    """The description of samples, compiled for either way, and what decodes for it.

    ``times`` knows event times alone; ``paths`` lead to fields of records within the record.
    """

    layout: Layout
    raw: RawLayout
    decoder: RawDecoder
    times: RawLayout
    paths: tuple[str, ...]


class WriterDecoder:
    """Decode what was written with one schema; made by :class:`AvroDecoder`."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema | None, samples: _Samples) -> None:
        self._writer = writer
        self._reader = None if reader is None else reader.parsed
        self._samples = samples
        self._table: OperationTable | None = None
        self._times_table: OperationTable | None = None
        try:
            self._table = compile_table(writer, reader, samples.raw.slots)
        except NotCovered as reason:
            logger.warning(
                "decoding Avro record by record, some twenty times slower than by columns: %s",
                reason,
            )
        if self._table is not None:
            times = samples.times
            self._times_table = compile_table(writer, reader, times.slots)

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Decode each message for itself; what can't be decoded comes back as bad."""
        records = list(map(_RECORD_OF, messages))
        if self._table is None or records.count(None) != len(records):
            return self.decode_plainly(messages)
        columns, good = self.columns(list(map(_VALUE_OF, messages)))
        if len(good) == len(messages):
            return Decoded(columns, good, ())
        is_good = np.zeros(len(messages), np.bool_)
        is_good[good] = True
        left = np.flatnonzero(~is_good)
        rest = self.decode_plainly([messages[i] for i in left.tolist()])
        if not len(rest.good):
            return Decoded(columns, good, rest.bad)
        both = np.concatenate([good, left[rest.good]])
        order = np.argsort(both)
        return Decoded(Columns.concat([columns, rest.columns]).take(order), both[order], rest.bad)

    def decode_plainly(self, messages: Sequence[Message]) -> Decoded:
        """Do what :meth:`decode` does record by record: slower, and the measure of it."""
        faults: dict[int, tuple[str, str]] = {}
        records: list[Record] = []
        at: list[int] = []
        for i, found in enumerate(self._records(messages)):
            if isinstance(found, DecodeError):
                faults[i] = (found.reason, found.detail)
            else:
                records.append(found)
                at.append(i)
        columns, record_faults = self._samples.layout.columns(records)
        faults.update({at[i]: fault for i, fault in record_faults.items()})
        bad = tuple(
            Bad(*messages[i].partition, messages[i].offset, *faults[i], messages[i].value)
            for i in sorted(faults)
        )
        good = np.array([i for i in range(len(messages)) if i not in faults], np.int64)
        return Decoded(columns, good, bad)

    def records(self, block: bytes, count: int) -> list[EncodedRecord]:
        """Return the ``count`` records that ``block`` consists of, laid end to end.

        Raises
        ------
        DecodeError
            The block doesn't hold exactly so many well-formed records.
        """
        values = self._split(block, count)
        return [EncodedRecord(value, self._read(value)) for value in values]

    def split(self, block: bytes, count: int) -> EncodedBlock:
        """Do what :meth:`timed` does, but for the event times, which are all 0."""
        return EncodedBlock(self._split(block, count), [0] * count)

    def _split(self, block: bytes, count: int) -> list[bytes]:
        if not 0 <= count <= len(block):
            raise DecodeError("range", f"{count} records can't fit into {len(block)} bytes")
        status, found, stop, ends = kernels.split_block(self._writer.program, block, count)
        if status != kernels.OK:
            fault = _malformed(status, stop, len(block))
            raise DecodeError(fault.reason, f"record {found} of {count}: {fault.detail}")
        starts = [0, *ends.tolist()]
        return [block[a:b] for a, b in itertools.pairwise(starts)]

    def timed(self, block: bytes, count: int) -> EncodedBlock:
        """Return the ``count`` records that ``block`` consists of, with their event times.

        Raises
        ------
        DecodeError
            The block doesn't hold exactly so many well-formed records.
        """
        values = self._split(block, count)
        times = np.zeros(count, np.int64)
        if self._times_table is not None:
            size, raw = RawDecoder(self._samples.times.slots).decode(*self._times_table, values)
            times[raw.rows[:size]] = self._samples.times.times_ms(raw, size)
            return EncodedBlock(values, times.tolist())
        records = [self._read(value) for value in values]
        layout = self._samples.layout
        return EncodedBlock(
            values,
            [0 if isinstance(r, DecodeError) else layout.time_ms(r) or 0 for r in records],
        )

    def columns(self, values: Sequence[bytes | None]) -> tuple[Columns, NDArray[np.int64]]:
        """Decode values by columns alone, and tell which became samples; nothing of the others.

        Raises
        ------
        ValueError
            The schema needs the general way.
        """
        if self._table is None:
            raise ValueError("the schema can't be decoded by columns; call decode()")
        decoder, layout = self._samples.decoder, self._samples.raw
        size, raw = decoder.decode(self._table.operations, self._table.symbols, values)
        columns, wrong = layout.columns(raw, size)
        rows = raw.rows[:size]
        return columns, rows if columns.size == size else rows[~wrong]

    def _records(self, messages: Sequence[Message]) -> Iterator[Record | DecodeError]:
        values = [m.value or b"" for m in messages if m.record is None]
        status, stops = kernels.check_records(self._writer.program, values)
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
                yield self._read(message.value)

    def _read(self, value: bytes) -> Record | DecodeError:
        """Decode one well-formed record, or say why its content can't be used."""
        try:
            record: dict[str, Any] = fastavro.schemaless_reader(  # type: ignore[assignment]
                io.BytesIO(value), self._writer.parsed, self._reader
            )
        except UnicodeDecodeError as error:
            return DecodeError("not_utf8", str(error))
        except Exception as error:  # noqa: BLE001 - fastavro lets out whatever its code meets
            return DecodeError("schema", f"{type(error).__name__}: {error}")
        for path in self._samples.paths:
            record[path] = _dig(record, path.split("."))
        return record


def together(
    messages: Sequence[Message], parts: Sequence[tuple[Sequence[int], Decoded]]
) -> Decoded:
    """Put what was decoded in groups of messages, named by their indexes, back in order."""
    bad: dict[int, Bad] = {}
    good: list[NDArray[np.int64]] = []
    for members, part in parts:
        at = np.array(members, np.int64)
        good.append(at[part.good])
        is_bad = np.ones(len(at), np.bool_)
        is_bad[part.good] = False
        for i, found in zip(at[is_bad].tolist(), part.bad, strict=True):
            bad[i] = replace(found, value=messages[i].value)
    both = np.concatenate(good)
    columns = Columns.concat([part.columns for _, part in parts])
    if len(parts) > 1:
        order = np.argsort(both)
        columns, both = columns.take(order), both[order]
    return Decoded(columns, both, tuple(bad[i] for i in sorted(bad)))


def _dig(value: Any, path: Sequence[str]) -> Any:
    """Return what a path leads to: of an array, one for each item."""
    if not path or value is None:
        return value
    if isinstance(value, list):
        return [_dig(item, path) for item in value]
    return _dig(value[path[0]], path[1:])


def _malformed(status: int, stop: int, size: int) -> DecodeError:
    reason = _STATUS[status]
    words = {
        "truncated": "the record isn't complete",
        "trailing": "the record ends before the value does",
        "range": "a number, length or index is out of its range",
    }[reason]
    return DecodeError(reason, f"{words}, at byte {stop} of {size}")
