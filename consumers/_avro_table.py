"""The operation table that turns encoded Avro records into raw columns.

Compiled once per schema of the writer. Where the reader's schema differs, Avro's rules of schema
resolution are worked into the table: promotions, renamed and missing fields, defaults, enum
symbols. What can't be resolved becomes an operation that refuses the message, at the place where
the message would need it. The rules are fastavro's, which has the last word on every message that
the table refuses.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers import _decode_kernels as kernels
from consumers._avro_schema import AvroSchema, Schema
from consumers._raw_columns import Slot, Slots
from consumers.errors import SpecError

_NAMED = frozenset({"record", "error", "enum", "fixed"})
_PROMOTIONS = frozenset(
    {
        ("int", "long"),
        ("int", "float"),
        ("int", "double"),
        ("long", "float"),
        ("long", "double"),
        ("float", "double"),
        ("string", "bytes"),
        ("bytes", "string"),
    }
)
_NUMBERS = {
    "int": kernels.OP_GET_INT,
    "long": kernels.OP_GET_LONG,
    "boolean": kernels.OP_GET_BOOL,
    "float": kernels.OP_GET_FLOAT,
    "double": kernels.OP_GET_DOUBLE,
    "null": kernels.OP_GET_NULL,
}
# In place of a reader's schema: the reader doesn't know the field, so its content is passed over.
_UNKNOWN = "unknown"


class NotCovered(SpecError):
    """A schema that the operation table can't express; the message says what and where."""


class OperationTable(NamedTuple):
    """What :func:`consumers._decode_kernels.decode_many` runs: int64[k, 4] and int64[s, 2]."""

    operations: NDArray[np.int64]
    symbols: NDArray[np.int64]


class _Place(NamedTuple):
    """Where a value goes at this point of the walk; ``inside``: it is an item of the list."""

    slot: Slot
    inside: bool = False


_Wanted = Mapping[str, _Place]
"""Places by dotted path below the value at hand; its own is at the empty path."""


def compile_table(writer: AvroSchema, reader: AvroSchema | None, slots: Slots) -> OperationTable:
    """Compile the table for messages of one schema.

    Parameters
    ----------
    writer
        What the messages were written with.
    reader
        What the slots are named by; None where it is the writer's.
    slots
        The fields that are wanted.

    Raises
    ------
    NotCovered
        A default value is of a form that only fastavro can tell the meaning of.
    """
    compiler = _Compiler(writer, reader, slots.columns)
    wanted = {name: _Place(slot) for name, slot in slots.by_field.items()}
    compiler.value(writer.parsed, (reader or writer).parsed, wanted)
    compiler.end()
    symbols = compiler.symbols or [(0, 0)]
    return OperationTable(np.array(compiler.rows, np.int64), np.array(symbols, np.int64))


class _Compiler:
    """Walks over both schemas at once and writes down the operations."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema | None, columns: int) -> None:
        self.rows: list[list[int]] = []
        self.symbols: list[tuple[int, int]] = []
        self._writer_names = writer.named
        self._reader_names = (reader or writer).named
        self._resolves = reader is not None
        self._columns = columns
        self._depth = 0
        self._landing = 0  # rows from here on aren't the target of a jump

    def end(self) -> None:
        """Write the last operation."""
        self._row(kernels.OP_END)

    def value(self, writer: Schema, reader: Schema, wanted: _Wanted) -> None:
        """Write the operations of one value; ``reader`` may be ``_UNKNOWN``."""
        writer = _node(writer, self._writer_names)
        if isinstance(writer, list):
            self._union(writer, reader, wanted)
            return
        if reader != _UNKNOWN:
            reader = self._chosen(writer, reader)
            if reader is None:
                self._row(kernels.OP_FAIL)
                return
        kind = _kind(writer)
        if kind in ("record", "error"):
            self._record(writer, reader, wanted)
        elif kind == "array":
            item = _UNKNOWN if reader == _UNKNOWN else reader["items"]
            self._array(writer["items"], item, wanted)
        elif kind == "map":
            self._map(writer, reader)
        elif kind == "null":
            self._nulls(wanted)
        else:
            self._scalar(kind, writer, reader, wanted.get(""))

    def _scalar(self, kind: str, writer: Schema, reader: Schema, place: _Place | None) -> None:
        if kind in _NUMBERS:
            self._put(_NUMBERS[kind], place)
        elif kind == "fixed":
            self._put(kernels.OP_GET_FIXED, place, writer["size"])
        elif kind == "enum":
            self._put(kernels.OP_GET_ENUM, place, len(writer["symbols"]))
            self._row(kernels.OP_FAIL, len(self.symbols))
            self.symbols += [
                (0, 0) if symbol is None else (_fingerprint_bits(symbol.encode()), 1)
                for symbol in _resolved_symbols(writer, reader)
            ]
        else:
            is_text = reader != _UNKNOWN and "string" in (kind, _kind(reader))
            self._put(kernels.OP_GET_TEXT if is_text else kernels.OP_GET_BYTES, place)

    def _record(self, writer: Schema, reader: Schema, wanted: _Wanted) -> None:
        if reader == _UNKNOWN:
            for field in writer["fields"]:
                self.value(field["type"], _UNKNOWN, {})
            return
        by_name = {field["name"]: field for field in reader["fields"]}
        by_alias = {
            alias: field for field in reader["fields"] for alias in field.get("aliases", ())
        }
        missing = dict(by_name)
        for field in writer["fields"]:
            known = by_name.get(field["name"], by_alias.get(field["name"]))
            if known is None:
                self.value(field["type"], _UNKNOWN, {})
            else:
                missing.pop(known["name"], None)
                self.value(field["type"], known["type"], _below(wanted, known["name"]))
        for name, field in missing.items():
            if "default" in field:
                self._default(name, field["type"], field["default"], _below(wanted, name))
            else:
                self._row(kernels.OP_FAIL)

    def _array(self, item: Schema, reader: Schema, wanted: _Wanted) -> None:
        inside = {path: _Place(place.slot, inside=True) for path, place in wanted.items()}
        place = inside.get("")
        if (
            place is not None
            and not place.slot.is_real
            and _kind(_node(item, self._writer_names)) == "long"
            and self._chosen("long", reader) is not None
        ):
            self._row(kernels.OP_LONG_ITEMS, kernels.ITEM, place.slot.row)
            return
        start = self._open_blocks()
        self.value(item, reader, inside)
        self._close_blocks(start)

    def _map(self, writer: Schema, reader: Schema) -> None:
        start = self._open_blocks()
        known = reader != _UNKNOWN
        self._put(kernels.OP_GET_TEXT if known else kernels.OP_GET_BYTES, None)
        self.value(writer["values"], reader["values"] if known else _UNKNOWN, {})
        self._close_blocks(start)

    def _open_blocks(self) -> int:
        start = len(self.rows)
        self._row(kernels.OP_BLOCK, self._depth)
        self._depth += 1
        self._landing = len(self.rows)
        return start

    def _close_blocks(self, start: int) -> None:
        self._depth -= 1
        self._row(kernels.OP_LOOP, self._depth, start + 1)
        self.rows[start][2] = self._landing = len(self.rows)

    def _union(self, branches: list[Schema], reader: Schema, wanted: _Wanted) -> None:
        place = wanted.get("")
        if place is not None and self._is_maybe_float(branches, reader, place):
            many = 1 if _kind(branches[0]) == "null" else -1
            self._run(kernels.OP_MAYBE_FLOATS, place.slot.row, many)
            return
        start = len(self.rows)
        self._row(kernels.OP_UNION, len(branches))
        for _ in branches:
            self._row(kernels.OP_JUMP)
        leave = []
        for i, branch in enumerate(branches):
            self.rows[start + 1 + i][1] = self._landing = len(self.rows)
            self.value(branch, self._of_branch(branch, reader), wanted)
            leave.append(len(self.rows))
            self._row(kernels.OP_JUMP)
        for row in leave:
            self.rows[row][1] = len(self.rows)
        self._landing = len(self.rows)

    def _of_branch(self, branch: Schema, reader: Schema) -> Schema:
        """Return what a branch of the writer's union is read by."""
        return reader if self._resolves or reader == _UNKNOWN else branch

    def _is_maybe_float(self, branches: list[Schema], reader: Schema, place: _Place) -> bool:
        nodes = [_node(branch, self._writer_names) for branch in branches]
        return (
            sorted(map(_kind, nodes)) == ["float", "null"]
            and place.slot.is_real
            and not place.slot.is_list
            and reader != _UNKNOWN
            and all(self._chosen(node, self._of_branch(node, reader)) is not None for node in nodes)
        )

    def _chosen(self, writer: Schema, reader: Schema) -> Schema | None:
        """Return what of the reader's schema a value is read by, None where nothing fits."""
        node = _node(reader, self._reader_names)
        if not isinstance(node, list):
            return node if self._fits(writer, node) else None
        for branch in node:
            found = _node(branch, self._reader_names)
            if self._fits(writer, found):
                return found
        return None

    def _fits(self, writer: Schema, reader: Schema) -> bool:
        if isinstance(writer, list) or isinstance(reader, list):
            return True
        kind = _kind(writer)
        if kind != _kind(reader):
            return (kind, _kind(reader)) in _PROMOTIONS
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            return self._fits(
                _node(writer[inner], self._writer_names), _node(reader[inner], self._reader_names)
            )
        if kind not in _NAMED:
            return True
        if kind == "fixed" and writer["size"] != reader["size"]:
            return False
        short = writer["name"].split(".")[-1]
        names = {reader["name"].split(".")[-1], *reader.get("aliases", ())}
        return short in names or writer["name"] in names

    def _default(self, name: str, kind: Schema, value: Any, wanted: _Wanted) -> None:
        """Write the operations that put a default value in place."""
        if not wanted:
            return
        place = wanted.get("")
        if value is None:
            self._nulls(wanted)
        elif place is None:
            if not isinstance(value, dict):
                raise NotCovered(f"field {name!r}: its default {value!r} isn't a record")
            for below in {path.split(".")[0] for path in wanted}:
                if below not in value:
                    raise NotCovered(f"field {name!r}: its default {value!r} has no {below!r}")
                self._default(f"{name}.{below}", kind, value[below], _below(wanted, below))
        elif place.slot.is_list and not place.inside:
            if not isinstance(value, list):
                raise NotCovered(f"field {name!r}: its default {value!r} isn't a list")
            inside = {"": _Place(place.slot, inside=True)}
            for item in value:
                self._default(name, kind, item, inside)
        else:
            self._put(kernels.OP_GET_CONST, place, _constant(name, value, place.slot))

    def _nulls(self, wanted: _Wanted) -> None:
        for place in wanted.values():
            if place.slot.is_list and not place.inside:
                self._row(kernels.OP_GET_NULL, kernels.LIST, self._columns + place.slot.row)
            else:
                self._put(kernels.OP_GET_NULL, place)

    def _put(self, operation: int, place: _Place | None, argument: int = 0) -> None:
        """Write an operation that gives one value."""
        if place is None:
            self._row(operation, kernels.NOWHERE, 0, argument)
            return
        slot = place.slot
        if slot.is_list:
            code = kernels.REAL_ITEM if slot.is_real else kernels.ITEM
        else:
            code = kernels.REAL if slot.is_real else kernels.CELL
        if operation == kernels.OP_GET_LONG and code == kernels.CELL:
            self._run(kernels.OP_LONGS, slot.row, 1)
            return
        if operation == kernels.OP_GET_CONST:  # bits are bits
            code = {kernels.REAL: kernels.CELL, kernels.REAL_ITEM: kernels.ITEM}.get(code, code)
        self._row(operation, code, slot.row, argument)

    def _run(self, operation: int, column: int, many: int) -> None:
        """Write one value of a run, which joins the run before it where it can."""
        last = self.rows[-1] if len(self.rows) > self._landing else [-1, 0, 0, 0]
        count = last[3]
        if (
            last[0] == operation
            and (count > 0) is (many > 0)
            and last[2] + abs(count) == column
            and abs(count) < kernels.MAX_RUN
        ):
            last[3] += many
        else:
            self._row(operation, kernels.CELL, column, many)

    def _row(self, operation: int, place: int = 0, column: int = 0, argument: int = 0) -> None:
        self.rows.append([operation, place, column, argument])


def _node(schema: Schema, named: Mapping[str, Any]) -> Schema:
    """Return a union, a primitive's name, or the dict of a complex type; names resolved."""
    while True:
        if isinstance(schema, list):
            return schema
        kind = schema if isinstance(schema, str) else schema["type"]
        if isinstance(kind, str) and kind not in named:
            return schema if kind in _NAMED or kind in ("array", "map") else kind
        schema = named[kind] if isinstance(kind, str) else kind


def _kind(node: Schema) -> str:
    if isinstance(node, list):
        return "union"
    kind: str = node if isinstance(node, str) else node["type"]
    return kind


def _below(wanted: _Wanted, name: str) -> dict[str, _Place]:
    """Return what is wanted of a field, by path below it."""
    found = {}
    for path, place in wanted.items():
        head, _, rest = path.partition(".")
        if head == name:
            found[rest] = place
    return found


def _resolved_symbols(writer: Schema, reader: Schema) -> Iterator[str | None]:
    """Yield, for each symbol of the writer, what the reader takes it for."""
    for symbol in writer["symbols"]:
        if reader == _UNKNOWN or symbol in reader["symbols"]:
            yield symbol
        else:
            yield reader.get("default") or None


def _fingerprint_bits(value: bytes) -> int:
    """Return the fingerprint as the int64 of the same bits."""
    return int(kernels.fingerprint64_many([value]).view(np.int64)[0])


def _constant(name: str, value: Any, slot: Slot) -> int:
    """Return the bits of a default value."""
    if slot.is_real and isinstance(value, int | float):
        return int(np.array([value], np.float64).view(np.int64)[0])
    if slot.is_hashed and isinstance(value, str) and value.isascii():
        return _fingerprint_bits(value.encode())
    if not (slot.is_real or slot.is_hashed) and isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    raise NotCovered(f"field {name!r}: its default {value!r}")
