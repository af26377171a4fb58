"""From records to columns: what a schema refuses, what a value refuses, and the keys."""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from consumers._decode_kernels import fingerprint64, fingerprint64_many
from consumers.config import Clip, Feature, Label, Log1p, Sample, TimeField
from consumers.errors import SpecError
from consumers.features import FieldType, Layout, Spec
from consumers.source import REASONS, Columns

FIELDS = {
    name: FieldType(kind, is_list=is_list, words=words)  # type: ignore[arg-type]
    for name, kind, is_list, words in [
        ("ts", "int", False, "long"),
        ("y", "int", False, "int"),
        ("rating", "float", False, "double"),
        ("w", "float", False, "float"),
        ("n", "int", False, "long"),
        ("flag", "bool", False, "boolean"),
        ("s", "string", False, "string"),
        ("b", "bytes", False, "bytes"),
        ("f", "float", False, "double"),
        ("ns", "int", True, "array of long"),
        ("ss", "string", True, "array of string"),
        ("fs", "float", True, "array of float"),
        ("deep", "other", False, "map"),
    ]
}
TIME = TimeField(field="ts")
LABELS = {"y": Label()}


def layout(
    features: dict[str, Feature] | None = None,
    *,
    time: TimeField = TIME,
    labels: dict[str, Label] | None = None,
    weight: str | None = None,
) -> Layout:
    sample = Sample(time=time, weight=weight, labels=LABELS if labels is None else labels)
    return Layout(FIELDS, Spec(sample, features or {}), fingerprint64_many)


def record(**fields: Any) -> dict[str, Any]:
    return dict.fromkeys(FIELDS) | {"ts": 5, "y": 1} | fields


def made(layout: Layout, *records: dict[str, Any]) -> tuple[Columns, dict[int, str]]:
    columns, faults = layout.columns(records)
    assert columns.size == len(records) - len(faults)
    assert {fault.reason for fault in faults.values()} <= set(REASONS)
    return columns, {i: fault.reason for i, fault in faults.items()}


def ids(feature: Feature, *records: dict[str, Any]) -> list[list[int]]:
    columns, faults = made(layout({"x": feature}), *records)
    assert not faults
    keys, splits, _ = columns.ids["x"]
    assert keys.dtype == np.uint64
    assert splits.dtype == np.int64
    return [keys[a:b].tolist() for a, b in itertools.pairwise(splits)]


# keys


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("n", 0, 0),
        ("n", -1, 2**64 - 1),
        ("n", -(2**63), 2**63),
        ("n", 2**63 - 1, 2**63 - 1),
        ("flag", True, 1),
        ("s", "größe", fingerprint64("größe".encode())),
        ("s", "", fingerprint64(b"")),
        ("b", b"\xff\x00", fingerprint64(b"\xff\x00")),
    ],
)
def test_keys(field: str, value: Any, key: int) -> None:
    feature = Feature(field=field, tables=["t"])
    assert ids(feature, record(**{field: value})) == [[key]]
    assert ids(feature, record(**{field: value}), record()) == [[key], []]


def test_a_feature_is_called_like_its_field_unless_told() -> None:
    columns, _ = made(layout({"n": Feature(tables=["t"])}), record(n=3))
    assert columns.ids["n"].keys.tolist() == [3]


@pytest.mark.parametrize(
    ("feature", "value", "expected"),
    [
        (Feature(), [3, 1, 2, 3], [3, 1, 2, 3]),
        (Feature(), [], []),
        (Feature(), None, []),
        (Feature(), [None, 1, None], [1]),
        (Feature(max=2), [3, 1, 2], [3, 1]),
        (Feature(max=2), [3], [3]),
        (Feature(sequence=2), [3, 1, 2], [1, 2]),
        (Feature(sequence=2), [3], [3]),
        (Feature(padding=0), [0, 5, 0, 6], [5, 6]),
        (Feature(padding=0, max=2), [0, 5, 0, 6, 7], [5, 6]),
        (Feature(padding=-1, sequence=2), [5, 6, 7, -1, -1], [6, 7]),
    ],
)
def test_lists(feature: Feature, value: Any, expected: list[int]) -> None:
    """An empty list is no id: neither a phantom id 0 nor an error."""
    feature = msgspec.structs.replace(feature, field="ns", tables=["t"])
    got = ids(feature, record(ns=[9]), record(ns=value), record(ns=[8]))
    assert got == [[9], expected, [8]]


def test_padding_of_single_values_and_strings() -> None:
    assert ids(Feature(field="n", tables=["t"], padding=0), record(n=0), record(n=1)) == [[], [1]]
    feature = Feature(field="s", tables=["t"], padding="")
    assert ids(feature, record(s=""), record(s="a")) == [[], [fingerprint64(b"a")]]


def test_weights_go_with_their_ids() -> None:
    feature = Feature(field="ns", tables=["t"], weights="fs", padding=0, max=2)
    columns, faults = made(
        layout({"x": feature}),
        record(ns=[0, 1, None, 2, 3], fs=[9.0, 0.5, 9.0, 2.0, 9.0]),
        record(ns=[1, 2], fs=None),
        record(ns=None, fs=None),
        record(ns=[1], fs=[1.0, 2.0]),
        record(ns=[1], fs=[math.nan]),
        record(ns=[1], fs=[-1.0]),
        record(ns=[1], fs=[None]),
        record(ns=[1], fs=[1e39]),
        record(ns=None, fs=[1.0]),
        record(ns=[4], fs=[0.0]),
    )
    assert faults == dict.fromkeys(range(3, 9), "weights")
    keys, splits, weights = columns.ids["x"]
    assert keys.tolist() == [1, 2, 1, 2, 4]
    assert weights is not None
    assert weights.dtype == np.float32
    assert weights.tolist() == [0.5, 2.0, 1.0, 1.0, 0.0]
    assert splits.tolist() == [0, 2, 4, 4, 5]


def test_buckets() -> None:
    feature = Feature(field="f", buckets=[1, 5, 20], tables=["t"])
    values = [-3.0, 0.999, 1.0, 4.0, 5.0, 20.0, 1e300]
    assert ids(feature, *(record(f=value) for value in values)) == [
        [0], [0], [1], [1], [2], [3], [3],
    ]  # fmt: skip
    columns, faults = made(layout({"x": feature}), record(), record(f=math.nan), record(f=1.0))
    assert faults == {1: "non_finite"}
    assert columns.ids["x"].row_splits.tolist() == [0, 0, 1]


# floats


@pytest.mark.parametrize(
    ("steps", "value", "expected"),
    [
        ([], 2.5, 2.5),
        ([], None, 0.0),
        ([Log1p()], math.e - 1, 1.0),
        ([Log1p()], -(math.e - 1), -1.0),
        ([Clip(clip=(0, 10))], 11.0, 10.0),
        ([Clip(clip=(0, 10))], -1.0, 0.0),
        ([Log1p(), Clip(clip=(0, 1))], 100.0, 1.0),
        ([Clip(clip=(0, 1)), Log1p()], 100.0, math.log(2)),
        ([Log1p()], 1e300, math.log(1e300)),
    ],
)
def test_dense_steps(steps: list[Any], value: float | None, expected: float) -> None:
    columns, faults = made(layout({"f": Feature(dense=steps)}), record(f=value))
    assert not faults
    assert columns.dense["f"].dtype == np.float32
    assert columns.dense["f"].tolist() == [[pytest.approx(expected, rel=1e-6)]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_not_finite_is_no_sample(value: float) -> None:
    """One infinity in a batch makes every weight of the model NaN."""
    columns, faults = made(
        layout({"f": Feature(dense=[])}), record(f=1.0), record(f=value), record(f=2.0)
    )
    assert faults == {1: "non_finite"}
    assert columns.dense["f"].tolist() == [[1.0], [2.0]]
    _, faults = made(layout({"f": Feature(dense=[Clip(clip=(0, 1))])}), record(f=value))
    assert faults == ({} if math.isfinite(value) else {0: "non_finite"})


def test_floats_of_an_array() -> None:
    compiled = layout({"fs": Feature(dense=[], width=2), "n": Feature(dense=[])})
    assert compiled.dense_widths == {"fs": 2, "n": 1}
    columns, faults = made(
        compiled,
        record(fs=[1.0, 2.0], n=7),
        record(fs=[1.0]),
        record(fs=[1.0, 2.0, 3.0]),
        record(fs=None),
        record(fs=[None, 1.0]),
    )
    assert faults == {1: "width", 2: "width"}
    assert columns.dense["fs"].tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 1.0]]
    assert columns.dense["n"].tolist() == [[7.0], [0.0], [0.0]]


# event time, labels, weight


@pytest.mark.parametrize(
    ("unit", "value", "ms"),
    [
        ("s", 1_700_000_000, 1_700_000_000_000),
        ("ms", 1_700_000_000_123, 1_700_000_000_123),
        ("us", 1_700_000_000_123_999, 1_700_000_000_123),
        ("ms", 0, 0),
        ("ms", -1, None),
        ("us", -1, None),
        ("s", 2**62, None),
        ("ms", 2**63 - 1, None),
        ("ms", -(2**63), None),
        ("ms", None, None),
    ],
)
def test_event_time(unit: Any, value: int | None, ms: int | None) -> None:
    compiled = layout(time=TimeField(field="ts", unit=unit))
    columns, faults = made(compiled, record(ts=value))
    assert compiled.time_ms(record(ts=value)) == ms
    assert columns.time_ms.tolist() == ([] if ms is None else [ms])
    assert faults == ({0: "time"} if ms is None else {})


@pytest.mark.parametrize(
    ("label", "value", "expected"),
    [
        (Label(), 1, 1.0),
        (Label(), 0, 0.0),
        (Label(), 2, None),
        (Label(), -1, None),
        (Label(), None, None),
        (Label(field="flag"), True, 1.0),
        (Label(field="rating"), 0.25, 0.25),
        (Label(field="rating"), math.nan, None),
        (Label(field="rating", at_least=4), 4.0, 1.0),
        (Label(field="rating", at_least=4), 3.9, 0.0),
        (Label(field="rating", at_least=4), math.inf, None),
        (Label(field="rating", at_least=4), None, None),
        (Label(field="rating", loss="squared"), -7.5, -7.5),
        (Label(field="rating", loss="squared"), 1e39, None),
    ],
)
def test_labels(label: Label, value: Any, expected: float | None) -> None:
    columns, faults = made(
        layout(labels={"y": label}),
        record(**{label.field or "y": value}),
        record(y=1, **_right(label)),
    )
    assert faults == ({0: "label"} if expected is None else {})
    assert columns.labels["y"].dtype == np.float32
    assert columns.labels["y"].tolist()[:-1] == ([] if expected is None else [expected])


def _right(label: Label) -> dict[str, Any]:
    return {} if label.field is None else {label.field: True if label.field == "flag" else 1.0}


def test_sample_weight() -> None:
    values = [2.0, None, 0.0, -1.0, math.nan, math.inf, 1e39]
    columns, faults = made(layout(weight="w"), *(record(w=value) for value in values))
    assert columns.weight.tolist() == [2.0, 1.0, 0.0]
    assert faults == dict.fromkeys(range(3, 7), "weight")
    columns, _ = made(layout(), record(w=7.0))
    assert columns.weight.tolist() == [1.0]


def test_a_record_with_several_faults_counts_once() -> None:
    compiled = layout({"f": Feature(dense=[])}, weight="w")
    _, faults = made(compiled, record(ts=-1, y=7, w=-1.0, f=math.nan))
    assert faults == {0: "time"}


def test_no_records() -> None:
    compiled = layout({"n": Feature(tables=["t"]), "f": Feature(dense=[])})
    columns, faults = made(compiled)
    assert not faults
    assert columns.dense["f"].shape == (0, 1)
    assert columns.ids["n"].row_splits.tolist() == [0]
    assert columns.time_ms.dtype == np.int64


# what a schema refuses


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature(field="nn", tables=["t"]), "feature 'x': the schema has no field 'nn'; did you"),
        (Feature(field="zzz", tables=["t"]), "no field 'zzz'; there are ts, y"),
        (Feature(field="f", tables=["t"]), "'f' is double, and a float can't be an id"),
        (Feature(field="fs", tables=["t"]), "'fs' is array of float, and a float can't be an id"),
        (Feature(field="deep", tables=["t"]), "'deep' is map; here it must be"),
        (Feature(field="n"), "neither tables nor dense"),
        (Feature(field="n", tables=["t"], dense=[]), "make two features"),
        (Feature(field="n", tables=["t"], sequence=3), "a sequence needs an array"),
        (Feature(field="ns", tables=["t"], sequence=3, max=3), "neither max nor weights"),
        (Feature(field="ns", tables=["t"], weights="w"), "both or none is a list"),
        (Feature(field="ns", tables=["t"], weights="ss"), "'ss' is array of string"),
        (Feature(field="s", tables=["t"], padding=0), "padding 0 can't be a value"),
        (Feature(field="n", tables=["t"], padding="0"), "padding '0' can't be a value"),
        (Feature(field="n", tables=["t"], width=2), "width belongs to dense"),
        (Feature(field="s", dense=[]), "'s' is string; here it must be int or float"),
        (Feature(field="fs", dense=[]), "say by width"),
        (Feature(field="f", dense=[], width=2), "single number"),
        (Feature(field="f", dense=[], max=2), "dense takes no max"),
        (Feature(field="f", dense=[Clip(clip=(1, 0))]), "reversed"),
        (Feature(field="f", tables=["t"], buckets=[]), "must be numbers that rise"),
        (Feature(field="f", tables=["t"], buckets=[1, 1]), "must be numbers that rise"),
        (Feature(field="f", tables=["t"], buckets=[math.nan]), "must be numbers that rise"),
        (Feature(field="fs", tables=["t"], buckets=[1]), "not an array"),
        (Feature(field="f", tables=["t"], buckets=[1], max=1), "buckets take no"),
    ],
)
def test_features_that_cannot_be(feature: Feature, message: str) -> None:
    """Found when the trainer starts, by name, and not when the first odd sample comes."""
    with pytest.raises(SpecError, match=message):
        layout({"x": feature})


def test_samples_that_cannot_be() -> None:
    with pytest.raises(SpecError, match=r"sample\.time: .* did you mean 'ts'"):
        layout(time=TimeField(field="tss"))
    with pytest.raises(SpecError, match=r"sample\.time: field 'f' is double; here it must be int"):
        layout(time=TimeField(field="f"))
    with pytest.raises(SpecError, match=r"label 'buy': the schema has no field 'buy'"):
        layout(labels={"buy": Label()})
    with pytest.raises(SpecError, match=r"label 'y': field 's' is string"):
        layout(labels={"y": Label(field="s")})
    with pytest.raises(SpecError, match="name at least one label"):
        layout(labels={})
    with pytest.raises(SpecError, match=r"sample\.weight: field 's'"):
        layout(weight="s")
