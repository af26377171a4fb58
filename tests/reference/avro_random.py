"""Random Avro schemas, and random messages of a schema written out the plain way.

The writer knows every form that the specification allows and nobody writes: numbers in more bytes
than they need, arrays in several blocks, block counts below zero.
"""

import random
import struct
from typing import Any

_PRIMITIVES = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
_TEXTS = [
    "",
    "a",
    "größe",
    "日本語",
    "x" * 8,
    "\U0001f600" * 3,
    "plain text of some length",
    "é" * 40,
]


class Schemas:
    """Makes schemas; names of types are numbered."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self._count = 0

    def record(self, depth: int = 0, fields: int = 4) -> dict[str, Any]:
        return {
            "type": "record",
            "name": self._name("R"),
            "fields": [
                {"name": f"f{i}", "type": self.type(depth)}
                for i in range(self.random.randint(0 if depth else 1, fields))
            ],
        }

    def type(self, depth: int) -> Any:
        kinds = [*_PRIMITIVES, *_PRIMITIVES, "enum", "fixed"]
        if depth < 3:
            kinds += ["array", "array", "array", "map", "union", "union", "union", "record"]
        kind = self.random.choice(kinds)
        if kind in _PRIMITIVES:
            return kind
        if kind == "enum":
            symbols = [f"s{i}" for i in range(self.random.randint(1, 4))]
            return {"type": "enum", "name": self._name("E"), "symbols": symbols}
        if kind == "fixed":
            return {"type": "fixed", "name": self._name("F"), "size": self.random.randint(1, 20)}
        if kind == "array":
            return {"type": "array", "items": self._solid(depth + 1)}
        if kind == "map":
            return {"type": "map", "values": self.type(depth + 1)}
        if kind == "record":
            return self.record(depth + 1)
        return self._union(depth)

    def _union(self, depth: int) -> list[Any]:
        found: dict[str, Any] = {}
        for branch in ["null", *(self.type(depth + 1) for _ in range(self.random.randint(1, 2)))]:
            if not isinstance(branch, list):
                named = isinstance(branch, dict) and branch["type"] in ("record", "enum", "fixed")
                kind = branch if isinstance(branch, str) else branch["type"]
                found.setdefault(branch["name"] if named else kind, branch)
        branches = list(found.values())
        self.random.shuffle(branches)
        return branches

    def _solid(self, depth: int) -> Any:
        """A type that takes a byte at least."""
        while True:
            kind = self.type(depth)
            if kind != "null" and not (isinstance(kind, dict) and kind["type"] == "record"):
                return kind
            if isinstance(kind, dict):
                return {**kind, "fields": [*kind["fields"], {"name": "solid", "type": "int"}]}

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"


class Writer:
    """Writes random values of a schema; a field called ``ts`` is mostly an event time."""

    def __init__(self, source: random.Random) -> None:
        self.random = source

    def long(self, value: int) -> bytes:
        bits = (value << 1) ^ (value >> 63)
        out = bytearray()
        while bits >= 0x80:
            out.append(bits & 0x7F | 0x80)
            bits >>= 7
        out.append(bits)
        if len(out) < 10 and self.random.random() < 0.02:  # longer than need be
            out[-1] |= 0x80
            out.append(0)
        return bytes(out)

    def number(self, bits: int) -> int:
        most = 2 ** (bits - 1)
        choice = self.random.random()
        if choice < 0.1:
            return self.random.choice([-most, most - 1])
        if choice < 0.5:
            return self.random.randint(-2, 3)
        return self.random.randrange(-most, most) >> self.random.randrange(bits)

    def real(self, width: int) -> bytes:
        code = "<f" if width == 4 else "<d"
        if self.random.random() < 0.01:
            return struct.pack(code, self.random.choice([float("nan"), float("inf"), -0.0]))
        if width == 8 and self.random.random() < 0.01:
            return struct.pack(code, 1e300)
        return struct.pack(code, self.random.gauss(0, 100))

    def value(self, schema: Any) -> bytes:
        if isinstance(schema, list):
            index = self.random.randrange(len(schema))
            return self.long(index) + self.value(schema[index])
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind == "null":
            return b""
        if kind == "boolean":
            return bytes([self.random.randrange(2)])
        if kind in ("int", "long"):
            return self.long(self.number(32 if kind == "int" else 64))
        if kind in ("float", "double"):
            return self.real(4 if kind == "float" else 8)
        if kind in ("bytes", "string"):
            value = self.random.choice(_TEXTS).encode()
            if kind == "bytes":
                value = self.random.randbytes(self.random.choice([0, 1, 7, 15, 33, 70, 200]))
            elif self.random.random() < 0.02:
                value = self.random.choice(
                    [b"\xff", b"\xc0\x80", b"ab\xed\xa0\x80", b"\xf4\x90\x80\x80"]
                )
            return self.long(len(value)) + value
        if kind == "fixed":
            return self.random.randbytes(schema["size"])
        if kind == "enum":
            return self.long(self.random.randrange(len(schema["symbols"])))
        if kind == "array":
            return self._blocks(schema["items"], keyed=False)
        if kind == "map":
            return self._blocks(schema["values"], keyed=True)
        return b"".join(
            self.long(self.random.randrange(2**40))
            if field["name"] == "ts" and self.random.random() < 0.98
            else self.value(field["type"])
            for field in schema["fields"]
        )

    def _blocks(self, item: Any, *, keyed: bool) -> bytes:
        out = b""
        for _ in range(self.random.choice([0, 1, 1, 1, 2])):
            count = self.random.randint(1, 4)
            block = b"".join(
                (self.value("string") if keyed else b"") + self.value(item) for _ in range(count)
            )
            if self.random.random() < 0.3:
                out += self.long(-count) + self.long(len(block)) + block
            else:
                out += self.long(count) + block
        return out + self.long(0)


def damage(source: random.Random, value: bytes) -> bytes:
    """Change a few bytes, or cut or lengthen the value."""
    out = bytearray(value)
    for _ in range(source.randint(1, 2)):
        if not out:
            break
        at = source.randrange(len(out))
        choice = source.random()
        if choice < 0.7:
            out[at] = source.choice([0, 1, 2, 3, 0x7F, 0x80, 0xFF, source.randrange(256)])
        elif choice < 0.8:
            del out[at:]
        elif choice < 0.9:
            out.insert(at, source.randrange(256))
        else:
            out += source.randbytes(1)
    return bytes(out)
