"""Avro schemas: parsed, described field by field, and compiled into the check of a message.

Logical types are left aside: a time stamp stays the integer that it is on the wire, so no zone
and no calendar can move it; a decimal is no feature, since equal numbers may differ in bytes. A
recursive schema is refused, as is an array of items without bytes: a message of such a schema
could ask for more memory or stack than there is.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

from consumers import _decode_kernels as kernels
from consumers.errors import SpecError
from consumers.features import FieldType, Kind

Schema = Any
"""A schema in Avro's JSON form: a string, a list or a dict."""

_KINDS: Mapping[str, Kind] = {
    "boolean": "bool",
    "int": "int",
    "long": "int",
    "float": "float",
    "double": "float",
    "string": "string",
    "enum": "string",
    "bytes": "bytes",
    "fixed": "bytes",
}
_LOGICAL = "logical-type"


def read_schema(path: str | Path) -> Schema:
    """Read a schema from a JSON file.

    Raises
    ------
    SpecError
        No such file, or no JSON in it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"Avro schema {path}: {error.strerror}; check decode.avro.schema"
        ) from error
    except ValueError as error:
        raise SpecError(f"Avro schema {path} is no JSON: {error}") from error


class AvroSchema:
    """A schema, parsed and compiled once.

    Parameters
    ----------
    schema
        A record schema in its JSON form.
    name
        What to call it in errors.

    Raises
    ------
    SpecError
        The schema is invalid, no record, recursive, or has arrays of items without bytes.
    """

    def __init__(self, schema: Schema, *, name: str = "schema") -> None:
        self.named: dict[str, Any] = {}
        try:
            self.parsed: Any = fastavro.parse_schema(_plain(schema), named_schemas=self.named)
        except Exception as error:  # fastavro raises its own, KeyError, TypeError and others
            raise SpecError(f"{name} is no valid Avro schema: {error}") from error
        if not isinstance(self.parsed, dict) or self.parsed.get("type") != "record":
            raise SpecError(f"{name} must be a record with fields")
        compiler = _Compiler(self.named, name)
        compiler.add(self.parsed)
        compiler.rows.append([kernels.OP_END, 0, 0])
        self.program = np.array(compiler.rows, np.int64)
        self.fields = dict(_described(self.parsed, self.named, "", is_list=False))

    def same_as(self, other: "AvroSchema") -> bool:
        """Whether both read and name everything alike."""
        return bool(
            fastavro.schema.to_parsing_canonical_form(self.parsed)
            == fastavro.schema.to_parsing_canonical_form(other.parsed)
        )


class _Compiler:
    """Turns a parsed schema into the program of the check."""

    def __init__(self, named: Mapping[str, Any], name: str) -> None:
        self.rows: list[list[int]] = []
        self._named = named
        self._name = name
        self._open: list[str] = []
        self._depth = 0

    def add(self, schema: Schema) -> int:
        """Append the program of one type; return the least number of bytes it takes."""
        if isinstance(schema, list):
            return self._union(schema)
        if isinstance(schema, str):
            if schema in self._named:
                return self.add(self._named[schema])
            return self._primitive(schema)
        kind = schema["type"]
        if kind == "record" or kind == "error":
            return self._record(schema)
        if kind == "array":
            return self._blocks(schema["items"], is_map=False)
        if kind == "map":
            return self._blocks(schema["values"], is_map=True)
        if kind == "enum":
            self.rows.append([kernels.OP_INT, 0, len(schema["symbols"]) - 1])
            return 1
        if kind == "fixed":
            self.rows.append([kernels.OP_SKIP, schema["size"], 0])
            return int(schema["size"])
        return self.add(kind)

    def _primitive(self, name: str) -> int:
        rows, least = {
            "null": ([], 0),
            "boolean": ([[kernels.OP_BOOL, 0, 0]], 1),
            "int": ([[kernels.OP_INT, -(2**31), 2**31 - 1]], 1),
            "long": ([[kernels.OP_LONG, 0, 0]], 1),
            "float": ([[kernels.OP_SKIP, 4, 0]], 4),
            "double": ([[kernels.OP_SKIP, 8, 0]], 8),
            "bytes": ([[kernels.OP_BYTES, 0, 0]], 1),
            "string": ([[kernels.OP_BYTES, 0, 0]], 1),
        }[name]
        self.rows += rows
        return least

    def _record(self, schema: Schema) -> int:
        if schema["name"] in self._open:
            raise SpecError(
                f"{self._name}: record {schema['name']} contains itself; flatten it, "
                "a recursive schema isn't supported"
            )
        self._open.append(schema["name"])
        least = sum(self.add(field["type"]) for field in schema["fields"])
        self._open.pop()
        return least

    def _union(self, branches: list[Schema]) -> int:
        start = len(self.rows)
        self.rows.append([kernels.OP_UNION, len(branches), 0])
        self.rows += [[kernels.OP_JUMP, 0, 0] for _ in branches]
        leave = []
        for i, branch in enumerate(branches):
            self.rows[start + 1 + i][1] = len(self.rows)
            self.add(branch)
            leave.append(len(self.rows))
            self.rows.append([kernels.OP_JUMP, 0, 0])
        for row in leave:
            self.rows[row][1] = len(self.rows)
        return 1

    def _blocks(self, item: Schema, *, is_map: bool) -> int:
        depth = self._depth
        if depth == kernels.MAX_DEPTH:
            raise SpecError(f"{self._name}: arrays nested deeper than {kernels.MAX_DEPTH}")
        self._depth += 1
        start = len(self.rows)
        self.rows.append([kernels.OP_BLOCK, depth, 0])
        least = self._primitive("string") if is_map else 0
        least += self.add(item)
        self._depth -= 1
        if least == 0:
            raise SpecError(
                f"{self._name} has an array of items without bytes, so that a message of ten "
                "bytes could hold 2**63 of them; give the items a type with content"
            )
        self.rows.append([kernels.OP_LOOP, depth, start + 1])
        self.rows[start][2] = len(self.rows)
        return 1


def _plain(schema: Schema) -> Schema:
    """Return the schema with its logical types renamed, so that they are kept but not applied."""
    if isinstance(schema, list):
        return [_plain(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        (_LOGICAL if key == "logicalType" else key): (
            value if key in ("default", "symbols", "aliases") else _plain(value)
        )
        for key, value in schema.items()
    }


def _described(
    record: Schema, named: Mapping[str, Any], prefix: str, *, is_list: bool
) -> Iterator[tuple[str, FieldType]]:
    """Describe the fields of a record, and by dotted path those of records within."""
    for field in record["fields"]:
        name = prefix + field["name"]
        found = _field_type(field["type"], named)
        if is_list and found.is_list:
            found = found._replace(kind="other")  # lists of lists have no place in a sample
        yield name, found._replace(is_list=is_list or found.is_list)
        inner, inside = _branches(field["type"], named), is_list
        if len(inner) == 1 and inner[0]["type"] == "array" and not is_list:
            inner, inside = _branches(inner[0]["items"], named), True
        if len(inner) == 1 and inner[0]["type"] in ("record", "error"):
            yield from _described(inner[0], named, f"{name}.", is_list=inside)


def _field_type(schema: Schema, named: Mapping[str, Any]) -> FieldType:
    """Describe a field for the layout: null branches count for nothing."""
    words = _words(schema)
    branches = _branches(schema, named)
    arrays = [b for b in branches if isinstance(b, dict) and b["type"] == "array"]
    if not arrays:
        return FieldType(_kind(branches), is_list=False, words=words)
    if len(branches) > 1:
        return FieldType("other", is_list=False, words=words)
    return FieldType(_kind(_branches(arrays[0]["items"], named)), is_list=True, words=words)


def _branches(schema: Schema, named: Mapping[str, Any]) -> list[Schema]:
    """Return the types other than null that a value may have, names resolved."""
    if isinstance(schema, list):
        return [found for branch in schema for found in _branches(branch, named)]
    if isinstance(schema, str):
        return [] if schema == "null" else [named.get(schema, {"type": schema})]
    if isinstance(schema["type"], (list, dict)) or schema["type"] in named:
        return _branches(schema["type"], named)
    return [] if schema["type"] == "null" else [schema]


def _kind(branches: list[Schema]) -> Kind:
    kinds = {
        "other" if branch.get(_LOGICAL) == "decimal" else _KINDS.get(branch["type"], "other")
        for branch in branches
    }
    if kinds == {"int", "float"}:
        return "float"
    if len(kinds) != 1:
        return "other"
    kind: Kind = kinds.pop()
    return kind


def _words(schema: Schema) -> str:
    if isinstance(schema, list):
        return " or ".join(_words(branch) for branch in schema)
    if isinstance(schema, str):
        return schema
    if schema["type"] == "array":
        return f"array of {_words(schema['items'])}"
    if _LOGICAL in schema:
        return f"{_words(schema['type'])} ({schema[_LOGICAL]})"
    return _words(schema["type"])
