"""Avro's binary form decoded the plain way, as strictly as the specification reads.

The twin of the check in `consumers._decode_kernels`, and an oracle for what fastavro returns.
"""

import struct
from typing import Any


class Refused(Exception):
    """The bytes are no value of the schema."""


class Reader:
    def __init__(self, data: bytes, errors: str) -> None:
        self.data = data
        self.errors = errors
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0:
            raise Refused("range")
        if count > len(self.data) - self.at:
            raise Refused("truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def long(self) -> int:
        bits = shift = 0
        while True:
            [byte] = self.take(1)
            bits |= (byte & 0x7F) << shift
            shift += 7
            if bits >= 2**64 or (shift == 70 and byte >= 0x80):
                raise Refused("range")
            if byte < 0x80:
                return (bits >> 1) ^ -(bits & 1)

    def bounded(self, low: int, high: int) -> int:
        value = self.long()
        if not low <= value <= high:
            raise Refused("range")
        return value

    def value(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self.value(schema[self.bounded(0, len(schema) - 1)])
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind == "null":
            return None
        if kind == "boolean":
            [byte] = self.take(1)
            if byte > 1:
                raise Refused("range")
            return byte == 1
        if kind == "int":
            return self.bounded(-(2**31), 2**31 - 1)
        if kind == "long":
            return self.long()
        if kind == "float":
            return struct.unpack("<f", self.take(4))[0]
        if kind == "double":
            return struct.unpack("<d", self.take(8))[0]
        if kind == "bytes":
            return self.take(self.long())
        if kind == "string":
            return self.take(self.long()).decode(errors=self.errors)
        if kind == "fixed":
            return self.take(schema["size"])
        if kind == "enum":
            return schema["symbols"][self.bounded(0, len(schema["symbols"]) - 1)]
        if kind == "array":
            return list(self.items(schema["items"]))
        if kind == "map":
            pairs = [(k, v) for k, v in self.items({"type": "pair", "values": schema["values"]})]
            return dict(pairs)
        if kind == "pair":
            return self.value("string"), self.value(schema["values"])
        return {field["name"]: self.value(field["type"]) for field in schema["fields"]}

    def items(self, schema: Any) -> list[Any]:
        found = []
        while count := self.long():
            end = None
            if count < 0:
                count = -count
                if count == 2**63:
                    raise Refused("range")
                size = self.long()
                if size < 0:
                    raise Refused("range")
                if size > len(self.data) - self.at:
                    raise Refused("truncated")
                end = self.at + size
            if count > len(self.data) - self.at:
                raise Refused("truncated")
            found += [self.value(schema) for _ in range(count)]
            if end not in (None, self.at):
                raise Refused("range")
        return found


def decode(schema: Any, data: bytes, errors: str = "strict") -> Any:
    """The value that `data` is, the whole of it; `errors` tells what to do with broken UTF-8."""
    reader = Reader(data, errors)
    value = reader.value(schema)
    if reader.at != len(data):
        raise Refused("trailing")
    return value
