"""The operation table against the general way, fastavro and a plain decoder: same columns, or both
refuse."""

import logging
import random
from collections.abc import Sequence
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import Columns, Message, Partition
from consumers._avro_schema import AvroSchema
from consumers._decode_kernels import OP_LONG_ITEMS, OP_LONGS, OP_MAYBE_FLOATS, fingerprint64
from consumers.avro import AvroDecoder, WriterDecoder
from consumers.config import Clip, Feature, Label, Log1p, Sample, TimeField
from consumers.errors import SpecError
from consumers.features import Spec
from tests.reference import avro as plain
from tests.reference.avro_random import Schemas, Writer, damage
from tests.test_consumers.clicks import encode

P0 = Partition("clicks", 0)
SAMPLE = Sample(time=TimeField(field="ts"), labels={"y": Label()})
HEAD = [{"name": "ts", "type": "long"}, {"name": "y", "type": "boolean"}]
seeds = st.integers(0, 2**32)


def messages(values: Sequence[bytes | None]) -> list[Message]:
    return [Message(P0, i, value) for i, value in enumerate(values)]


def same(a: Columns, b: Columns) -> None:
    """Equal to the bit, dtypes and order of features too."""
    assert a.size == b.size
    assert list(a.ids) == list(b.ids)
    assert list(a.dense) == list(b.dense)
    assert list(a.labels) == list(b.labels)
    for name, ids in a.ids.items():
        for x, y in zip(ids, b.ids[name], strict=True):
            assert (x is None) == (y is None), name
            if x is not None and y is not None:
                assert x.dtype == y.dtype
                assert x.tobytes() == y.tobytes(), name
    for field in ("dense", "labels"):
        for name, values in getattr(a, field).items():
            other = getattr(b, field)[name]
            assert (values.dtype, values.shape) == (other.dtype, other.shape)
            assert values.tobytes() == other.tobytes(), name
    assert a.weight.tobytes() == b.weight.tobytes()
    assert a.time_ms.dtype == b.time_ms.dtype
    assert a.time_ms.tolist() == b.time_ms.tolist()


def by_columns(decoder: WriterDecoder, values: Sequence[bytes | None]) -> Columns:
    """Decode by the table alone, held against the general way message by message."""
    columns, good = decoder.columns(values)
    plainly = decoder.decode_plainly(messages(values))
    assert good.tolist() == plainly.good.tolist(), plainly.bad
    same(columns, plainly.columns)
    whole = decoder.decode(messages(values))
    assert whole.bad == plainly.bad
    same(whole.columns, plainly.columns)
    return columns


def spec_for(source: random.Random, schema: AvroSchema, sample: Sample = SAMPLE) -> Spec:
    """Use every field that can be used, in every way that it can be used."""
    features: dict[str, Feature] = {}
    weights = [n for n, f in schema.fields.items() if f.kind in ("int", "float")]
    for name, field in schema.fields.items():
        made: list[Feature] = []
        if field.kind in ("int", "bool", "string", "bytes"):
            padding = {"int": 0, "bool": 1, "string": "a", "bytes": None}[field.kind]
            made += [Feature(tables=["t"]), Feature(tables=["t"], padding=padding, max=2)]
            if field.is_list:
                made += [
                    Feature(tables=["t"], sequence=2, padding=padding),
                    Feature(tables=["t"], max=1),
                ]
            same_form = [n for n in weights if schema.fields[n].is_list is field.is_list]
            if same_form:
                made.append(Feature(tables=["t"], weights=source.choice(same_form), max=2))
        if field.kind in ("int", "float", "bool"):
            width = source.randint(1, 3) if field.is_list else None
            steps = source.choice(
                [[], [], [Log1p()], [Clip(clip=(-1, 1))], [Log1p(), Clip(clip=(0, 2))]]
            )
            made.append(Feature(dense=steps, width=width))
        if field.kind in ("int", "float") and not field.is_list:
            made.append(Feature(tables=["t"], buckets=[-1, 0, 2.5]))
        for i, feature in enumerate(made):
            if source.random() < 0.7:
                features[f"{name}_{i}"] = msgspec.structs.replace(feature, field=name)
    return Spec(sample, features)


def random_schema(source: random.Random) -> Any:
    schema = Schemas(source).record()
    at = source.randint(0, len(schema["fields"]))
    return schema | {"fields": [*schema["fields"][:at], *HEAD, *schema["fields"][at:]]}


def dig(value: Any, path: list[str]) -> Any:
    if not path or value is None:
        return value
    if isinstance(value, list):
        return [dig(item, path) for item in value]
    return dig(value[path[0]], path[1:])


@given(seeds)
def test_random_schemas_data_and_damage(seed: int) -> None:
    """What one way refuses the other must, and the columns of the rest are equal to the bit."""
    source = random.Random(seed)
    schema = random_schema(source)
    spec = spec_for(source, AvroSchema(schema))
    decoder = AvroDecoder(schema, spec)
    writer = Writer(source)
    values = [writer.value(schema) for _ in range(12)]
    values += [damage(source, value) for value in values for _ in range(3)]
    source.shuffle(values)
    columns = by_columns(decoder._own, [*values, None, b""])
    records: list[Any] = []
    for value in values:
        try:
            if value:
                records.append(plain.decode(schema, value))
                for path in decoder._samples.paths:
                    records[-1][path] = dig(records[-1], path.split("."))
        except (plain.Refused, UnicodeDecodeError):
            pass
    expected, _ = decoder.layout.columns(records)
    same(columns, expected)


@given(seeds)
def test_every_proper_prefix_is_refused(seed: int) -> None:
    source = random.Random(seed)
    schema = random_schema(source)
    decoder = AvroDecoder(schema, Spec(SAMPLE, {}))
    value = Writer(source).value(schema)
    columns, good = decoder._own.columns([value[:n] for n in range(len(value))])
    assert (columns.size, good.tolist()) == (0, [])
    _, good = decoder._own.columns([value + bytes([n]) for n in range(3)])
    assert good.tolist() == []


# schema resolution


def evolved(source: random.Random, schema: Any, where: str = "") -> Any:
    """A reader's schema that differs from the writer's, mostly so that it can be resolved."""
    if isinstance(schema, list):
        branches = [evolved(source, branch, "union") for branch in schema]
        return branches if source.random() < 0.9 else branches[0]
    if isinstance(schema, str):
        wider = {"int": ["long", "float", "double", "string"], "long": ["double", "int"],
                 "float": ["double"], "string": ["bytes"], "bytes": ["string"]}  # fmt: skip
        kind = source.choice(wider.get(schema, [schema])) if source.random() < 0.3 else schema
        if kind != "null" and source.random() < 0.15 and where != "union":
            return source.choice([["null", kind], [kind, "null"]])
        return kind
    kind = schema["type"]
    if kind == "enum" and source.random() < 0.5:
        kept = schema["symbols"][: source.randint(1, len(schema["symbols"]))]
        return {**schema, "symbols": kept} | ({"default": kept[0]} if source.random() < 0.5 else {})
    if kind == "array":
        return {**schema, "items": evolved(source, schema["items"])}
    if kind == "map":
        return {**schema, "values": evolved(source, schema["values"])}
    if kind != "record":
        return schema
    fields = []
    for field in schema["fields"]:
        if field["name"] in ("ts", "y", "solid"):
            fields.append(field)
        elif source.random() > 0.15:
            fields.append({**field, "type": evolved(source, field["type"])})
            if source.random() < 0.1:
                fields[-1] |= {"name": field["name"] + "new", "aliases": [field["name"]]}
    for name, extra in [
        ("added", {"type": "long", "default": 7}),
        ("maybe", {"type": ["null", "string"], "default": None}),
        ("text", {"type": "string", "default": "abc"}),
        ("half", {"type": "double", "default": 0.5}),
        ("many", {"type": {"type": "array", "items": "int"}, "default": [1, 2]}),
        ("none", {"type": {"type": "array", "items": "double"}, "default": []}),
        ("lost", {"type": "int"}),
    ]:
        if source.random() < (0.02 if name == "lost" else 0.1):
            fields.append({"name": name, **extra})
    if source.random() < 0.3:
        source.shuffle(fields)
    return {**schema, "fields": fields}


@given(seeds)
def test_random_readers(seed: int) -> None:
    source = random.Random(seed)
    written = random_schema(source)
    read = evolved(source, written)
    try:
        AvroSchema(read)
    except SpecError:  # an array whose items lost all their bytes
        return
    spec = spec_for(source, AvroSchema(read))
    decoder = AvroDecoder(read, spec).written_by(written, name="writer")
    writer = Writer(source)
    values = [writer.value(written) for _ in range(10)]
    values += [damage(source, value) for value in values]
    by_columns(decoder, values)


# what is particular about the table


def schema_of(*fields: tuple[str, Any], **defaults: Any) -> dict[str, Any]:
    described = [*HEAD, *({"name": name, "type": kind} for name, kind in fields)]
    for field in described:
        if field["name"] in defaults:
            field["default"] = defaults[str(field["name"])]
    return {"type": "record", "name": "R", "fields": described}


def encoded(schema: Any, *records: dict[str, Any]) -> list[bytes]:
    return [encode({"ts": 5, "y": True} | r, fastavro.parse_schema(schema)) for r in records]


def test_runs_give_what_single_operations_give() -> None:
    """The operations of a run skip the choice of an operation, and nothing else."""
    fields: list[tuple[str, Any]] = [(f"a{i}", "long") for i in range(70)]
    fields += [(f"b{i}", ["null", "float"]) for i in range(3)]
    fields += [(f"c{i}", ["float", "null"]) for i in range(70)]
    fields += [("d", {"type": "array", "items": "long"})]
    schema = schema_of(*fields)
    features = {n: Feature(tables=["t"]) for n, _ in fields if n[0] in "ad"}
    features |= {n: Feature(dense=[]) for n, _ in fields if n[0] in "bc"}
    decoder = AvroDecoder(schema, Spec(SAMPLE, features))
    table = decoder._own._table
    assert table is not None
    operations = table.operations[:, 0].tolist()
    assert operations.count(OP_LONGS) == 3  # the event time, and 70 in two runs
    assert operations.count(OP_MAYBE_FLOATS) == 3
    assert operations.count(OP_LONG_ITEMS) == 1
    source = random.Random(5)
    writer = Writer(source)
    values = [writer.value(schema) for _ in range(60)]
    values += [damage(source, value) for value in values for _ in range(5)]
    values += [value[:n] for value in values[:2] for n in range(len(value))]
    assert by_columns(decoder._own, values).size > 40


def test_a_union_index_may_take_more_bytes_than_it_needs() -> None:
    schema = schema_of(("x", ["null", "float"]), ("z", ["float", "null"]))
    decoder = AvroDecoder(schema, Spec(SAMPLE, {n: Feature(dense=[]) for n in "xz"}))
    head, one = b"\x0a\x01", b"\x00\x00\x80\x3f"
    values = [
        head + b"\x82\x00" + one + b"\x80\x00" + one,
        head + b"\x80\x00" + b"\x82\x80\x00",
        head + b"\x84\x00" + one + b"\x02",
        head + b"\x81\x00" + b"\x02",
        head + b"\x80" * 10 + b"\x00" + b"\x02",
        head + b"\x00\x82",
    ]
    columns = by_columns(decoder._own, values)
    assert columns.dense["x"].tolist() == [[1.0], [0.0]]
    assert columns.dense["z"].tolist() == [[1.0], [0.0]]


def test_a_list_longer_than_any_before_finds_room() -> None:
    schema = schema_of(("x", {"type": "array", "items": "long"}), ("z", {"type": "array", "items": "string"}))  # fmt: skip
    decoder = AvroDecoder(schema, Spec(SAMPLE, {n: Feature(tables=["t"]) for n in "xz"}))
    for size in (1, 5_000, 100, 40_000):
        values = encoded(
            schema, {"x": [1], "z": ["a"]}, {"x": list(range(size)), "z": ["b"] * size}
        )
        columns = by_columns(decoder._own, values)
        assert columns.ids["x"].row_splits.tolist() == [0, 1, 1 + size]


def test_a_count_asks_for_no_memory() -> None:
    """Ten bytes that tell of 2**40 items must not be believed."""
    schema = schema_of(("x", {"type": "array", "items": "long"}))
    decoder = AvroDecoder(schema, Spec(SAMPLE, {"x": Feature(tables=["t"])}))
    huge = b"\x0a\x01" + Writer(random.Random(1)).long(2**40)
    assert by_columns(decoder._own, [huge, huge + b"\x02" * 50]).size == 0
    assert decoder._samples.decoder._room < 10_000


def test_fields_of_records_within() -> None:
    inner = {"type": "record", "name": "U", "fields": [
        {"name": "id", "type": "long"}, {"name": "tags", "type": {"type": "array", "items": "string"}},
    ]}  # fmt: skip
    item = {"type": "record", "name": "I", "fields": [
        {"name": "id", "type": "string"}, {"name": "score", "type": ["null", "double"]},
    ]}  # fmt: skip
    schema = schema_of(
        ("user", ["null", inner]), ("hist", {"type": "array", "items": ["null", item]})
    )
    features = {
        "user": Feature(field="user.id", tables=["u"]),
        "tags": Feature(field="user.tags", tables=["t"]),
        "hist": Feature(field="hist.id", tables=["i"], sequence=2),
        "scores": Feature(field="hist.score", dense=[], width=2),
    }
    decoder = AvroDecoder(schema, Spec(SAMPLE, features))
    items = [{"id": "a", "score": 0.5}, {"id": "b", "score": None}]
    columns = by_columns(
        decoder._own,
        encoded(
            schema,
            {"user": {"id": 7, "tags": ["x", "y"]}, "hist": items},
            {"user": None, "hist": [None, items[0]]},
        ),
    )
    assert columns.ids["user"].keys.tolist() == [7]
    assert columns.ids["tags"].row_splits.tolist() == [0, 2, 2]
    assert columns.ids["hist"].keys.tolist() == [fingerprint64(v) for v in (b"a", b"b", b"a")]
    assert columns.dense["scores"].tolist() == [[0.5, 0.0], [0.0, 0.5]]
    with pytest.raises(SpecError, match="'hist.id' is string; here it must be int"):
        AvroDecoder(schema, Spec(SAMPLE, {"x": Feature(field="hist.id", dense=[], width=2)}))


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("long", -3, [2**64 - 3]),
        ("boolean", True, [1]),
        ("string", "abc", [fingerprint64(b"abc")]),
        ("bytes", "abc", [fingerprint64(b"abc")]),
        (["null", "long"], None, []),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "b", [fingerprint64(b"b")]),
        (
            {"type": "array", "items": "string"},
            ["a", "b"],
            [fingerprint64(b"a"), fingerprint64(b"b")],
        ),
    ],
)
def test_defaults(kind: Any, default: Any, expected: list[int]) -> None:
    written = schema_of()
    read = schema_of(("x", kind), x=default)
    spec = Spec(SAMPLE, {"x": Feature(tables=["t"])})
    decoder = AvroDecoder(read, spec).written_by(written, name="writer")
    columns = by_columns(decoder, encoded(written, {}))
    assert columns.ids["x"].keys.tolist() == expected


def test_what_the_table_does_not_cover_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A silent change to a way that is twenty times slower would look like a slow cluster."""
    read = schema_of(("x", "bytes"), x="\u00ff")
    spec = Spec(SAMPLE, {"x": Feature(tables=["t"])})
    written = schema_of()
    with caplog.at_level(logging.WARNING):
        decoder = AvroDecoder(read, spec).written_by(written, name="writer")
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "decoding Avro record by record, some twenty times slower than by columns: "
        "field 'x': its default 'ÿ'"
    )
    decoded = decoder.decode(messages(encoded(written, {})))
    assert decoded.columns.ids["x"].keys.tolist() == [fingerprint64(b"\xff")]
