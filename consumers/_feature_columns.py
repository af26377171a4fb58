"""One column of a batch each: event time, label, ids, bucket, floats.

A column is made from a field once, which checks what the schema can tell, and then from records,
which notes the faults of single values.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.config import Feature, Log1p
from consumers.errors import SpecError
from consumers.source import Ids

Kind = Literal["int", "float", "bool", "string", "bytes", "other"]
Record = Mapping[str, Any]
Records = Sequence[Record]
Fingerprints = Callable[[Sequence[bytes]], NDArray[np.uint64]]

# The end of year 9999: what lies beyond it, or before 1970, is no event time but garbage.
LATEST_TIME_MS = 253_402_300_799_999

UNITS_PER_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000)}
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class FieldType(NamedTuple):
    """What a format says of a field: its kind, whether it is a list, and its type in words."""

    kind: Kind
    is_list: bool
    words: str


class Fault(NamedTuple):
    """Why a record is no sample; ``reason`` is a key of ``consumers.source.REASONS``."""

    reason: str
    detail: str


Faults = dict[int, Fault]


class TimeColumn:
    """Event time in ms."""

    def __init__(self, field: str, unit: str) -> None:
        self._field = field
        self._times, self._per_ms = UNITS_PER_MS[unit]

    def of(self, record: Record) -> int | None:
        value = record[self._field]
        if value is None:
            return None
        ms: int = value * self._times // self._per_ms
        return ms if 0 <= ms <= LATEST_TIME_MS else None

    def column(self, records: Records, faults: Faults) -> NDArray[np.int64]:
        times = [self.of(record) for record in records]
        for i, time in enumerate(times):
            if time is None:
                value = records[i][self._field]
                faults.setdefault(i, Fault("time", f"{self._field} is {value!r}"))
        return np.array([time or 0 for time in times], np.int64)


class LabelColumn:
    """Label of one task."""

    def __init__(self, field: str, at_least: float | None, *, binary: bool) -> None:
        self._field = field
        self._at_least = at_least
        self._binary = binary

    def column(self, records: Records, task: str, faults: Faults) -> NDArray[np.float32]:
        values = [record[self._field] for record in records]
        labels = np.array([np.nan if value is None else value for value in values], np.float64)
        right = np.abs(labels) <= _FLOAT32_MAX
        if self._at_least is not None:
            labels = np.where(right, labels >= self._at_least, np.nan)
        elif self._binary:
            right &= (labels >= 0) & (labels <= 1)
        for i in np.flatnonzero(~right):
            fault = Fault("label", f"label {task!r}: {self._field} is {values[i]!r}")
            faults.setdefault(int(i), fault)
            labels[i] = 0.0
        return labels.astype(np.float32)


class WeightColumn:
    """Weight of each sample; null counts as 1."""

    def __init__(self, field: str) -> None:
        self._field = field

    def column(self, records: Records, faults: Faults) -> NDArray[np.float32]:
        values = [record[self._field] for record in records]
        weights = np.array([1.0 if value is None else value for value in values], np.float64)
        for i in np.flatnonzero(~((weights >= 0) & (weights <= _FLOAT32_MAX))):
            faults.setdefault(int(i), Fault("weight", f"{self._field} is {values[i]!r}"))
            weights[i] = 0.0
        return weights.astype(np.float32)


class IdColumn:
    """Ids of one feature."""

    def __init__(
        self,
        where: str,
        name: str,
        feature: Feature,
        fields: Mapping[str, FieldType],
        fingerprints: Fingerprints,
    ) -> None:
        if feature.width is not None:
            raise SpecError(f"{where}: width belongs to dense features; take it out")
        kinds: tuple[Kind, ...] = ("int", "bool", "string", "bytes")
        self._field = pick(fields, where, feature.field or name, kinds, lists=True)
        field = fields[self._field]
        self._is_list = field.is_list
        self._hashed = field.kind in ("string", "bytes")
        self._is_string = field.kind == "string"
        self._fingerprints = fingerprints
        self._padding = feature.padding
        if self._padding is not None and isinstance(self._padding, str) != self._is_string:
            raise SpecError(
                f"{where}: padding {self._padding!r} can't be a value of field "
                f"{self._field!r}, which is {field.words}"
            )
        if feature.sequence is not None:
            if not self._is_list:
                raise SpecError(
                    f"{where}: a sequence needs an array, but field {self._field!r} "
                    f"is {field.words}"
                )
            if feature.max is not None or feature.weights is not None:
                raise SpecError(f"{where}: a sequence takes neither max nor weights")
        self._keep = _kept(feature)
        self._weights: str | None = None
        if feature.weights is not None:
            self._weights = pick(fields, where, feature.weights, ("int", "float"), lists=True)
            if fields[self._weights].is_list != self._is_list:
                raise SpecError(
                    f"{where}: field {self._field!r} is {field.words}, but its weights "
                    f"{self._weights!r} are {fields[self._weights].words}; both or none is a list"
                )

    def column(self, records: Records, faults: Faults) -> Ids:
        values = [record[self._field] for record in records]
        if self._weights is not None:
            return self._weighted(values, records, self._weights, faults)
        if not self._is_list:
            if self._padding is None and None not in values:
                return Ids(self._keys(values), np.arange(len(values) + 1, dtype=np.int64), None)
            values = [[value] for value in values]
        padding, keep = self._padding, self._keep
        rows = [
            [v for v in value if v is not None and v != padding][keep] if value else ()
            for value in values
        ]
        return Ids(self._keys(list(chain.from_iterable(rows))), _splits(rows), None)

    def _weighted(self, values: list[Any], records: Records, field: str, faults: Faults) -> Ids:
        rows: list[list[Any]] = []
        weights: list[list[float]] = []
        for i, value in enumerate(values):
            ids = _as_list(value, self._is_list)
            given = records[i][field]
            factors = [1.0] * len(ids) if given is None else _as_list(given, self._is_list)
            fault = _misfit(field, ids, factors)
            if fault is not None:
                faults.setdefault(i, fault)
                ids, factors = [], []
            kept = [
                pair
                for pair in zip(ids, factors, strict=True)
                if pair[0] is not None and pair[0] != self._padding
            ][self._keep]
            rows.append([pair[0] for pair in kept])
            weights.append([pair[1] for pair in kept])
        flat = np.array(list(chain.from_iterable(weights)), np.float64).astype(np.float32)
        return Ids(self._keys(list(chain.from_iterable(rows))), _splits(rows), flat)

    def _keys(self, flat: list[Any]) -> NDArray[np.uint64]:
        if not self._hashed:
            return np.array(flat, np.int64).view(np.uint64)
        # Avro gives the default of a bytes field as text, a character for each byte.
        code = "utf-8" if self._is_string else "latin-1"
        return self._fingerprints([v.encode(code) if isinstance(v, str) else v for v in flat])


class BucketColumn:
    """Numbers turned into the index of the bucket that they fall into."""

    def __init__(
        self, where: str, name: str, feature: Feature, fields: Mapping[str, FieldType]
    ) -> None:
        self._field = pick(fields, where, feature.field or name, ("int", "float"))
        self._bounds = np.array(feature.buckets, np.float64)
        rising = np.all(np.diff(self._bounds) > 0) and np.all(np.isfinite(self._bounds))
        if not len(self._bounds) or not rising:
            raise SpecError(f"{where}: buckets {feature.buckets} must be numbers that rise")
        extra = (feature.max, feature.weights, feature.sequence, feature.padding, feature.width)
        if any(given is not None for given in extra):
            raise SpecError(f"{where}: buckets take no max, weights, sequence, padding or width")

    def column(self, records: Records, faults: Faults) -> Ids:
        values = [record[self._field] for record in records]
        given = np.array([value is not None for value in values], np.bool_)
        numbers = np.array([0.0 if value is None else value for value in values], np.float64)
        for i in np.flatnonzero(~np.isfinite(numbers)):
            faults.setdefault(int(i), Fault("non_finite", f"{self._field} is {values[i]!r}"))
        keys = np.searchsorted(self._bounds, numbers[given], side="right").astype(np.uint64)
        splits = np.zeros(len(values) + 1, np.int64)
        np.cumsum(given, out=splits[1:])
        return Ids(keys, splits, None)


class DenseColumn:
    """Floats of one feature; null counts as 0."""

    def __init__(
        self, where: str, name: str, feature: Feature, fields: Mapping[str, FieldType]
    ) -> None:
        if feature.tables or feature.buckets is not None:
            raise SpecError(
                f"{where} has dense beside tables or buckets; "
                "make two features of it with the same field"
            )
        extra = (feature.max, feature.weights, feature.sequence, feature.padding)
        if any(given is not None for given in extra):
            raise SpecError(f"{where}: dense takes no max, weights, sequence or padding")
        kinds: tuple[Kind, ...] = ("int", "float", "bool")
        self._field = pick(fields, where, feature.field or name, kinds, lists=True)
        self._is_list = fields[self._field].is_list
        if self._is_list and feature.width is None:
            raise SpecError(
                f"{where}: field {self._field!r} is {fields[self._field].words}; "
                "say by width how many floats it holds"
            )
        if not self._is_list and feature.width not in (None, 1):
            raise SpecError(f"{where}: field {self._field!r} is a single number, so width is 1")
        self.width = feature.width or 1
        self._steps = list(feature.dense or ())
        for step in self._steps:
            if not isinstance(step, Log1p) and not step.clip[0] <= step.clip[1]:
                raise SpecError(f"{where}: clip {list(step.clip)} has its bounds reversed")

    def column(self, records: Records, faults: Faults) -> NDArray[np.float32]:
        values = [record[self._field] for record in records]
        rows = self._rows(values, faults)
        right = np.isfinite(rows)
        if self._steps:
            rows = np.where(right, rows, 0.0)
        for step in self._steps:
            if isinstance(step, Log1p):
                rows = np.sign(rows) * np.log1p(np.abs(rows))
            else:
                rows = np.clip(rows, step.clip[0], step.clip[1])
        right &= np.abs(rows) <= _FLOAT32_MAX
        for i in np.flatnonzero(~right.all(axis=1)):
            faults.setdefault(int(i), Fault("non_finite", f"{self._field} is {values[i]!r}"))
            rows[i] = 0.0
        return rows.astype(np.float32)

    def _rows(self, values: list[Any], faults: Faults) -> NDArray[np.float64]:
        if not self._is_list:
            flat = [0.0 if value is None else value for value in values]
            return np.array(flat, np.float64).reshape(-1, 1)
        rows = np.zeros((len(values), self.width), np.float64)
        for i, value in enumerate(values):
            if value is None:
                continue
            if len(value) != self.width:
                detail = f"{self._field} has {len(value)} entries, not {self.width}"
                faults.setdefault(i, Fault("width", detail))
                continue
            rows[i] = [0.0 if item is None else item for item in value]
        return rows


def pick(
    fields: Mapping[str, FieldType],
    where: str,
    name: str,
    kinds: tuple[Kind, ...],
    *,
    lists: bool = False,
) -> str:
    """Return the name of a field that is there and of one of these kinds, or say what is wrong."""
    field = fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, fields, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(fields)}"
        raise SpecError(f"{where}: the schema has no field {name!r}{meant}")
    if field.kind == "float" and "float" not in kinds and "string" in kinds:
        raise SpecError(
            f"{where}: field {name!r} is {field.words}, and a float can't be an id; "
            "cut it into buckets, or take it as dense"
        )
    if field.kind not in kinds or (field.is_list and not lists):
        wanted = " or ".join(kinds)
        raise SpecError(
            f"{where}: field {name!r} is {field.words}; here it must be {wanted}"
            f"{', or an array of such' if lists else ', not an array'}"
        )
    return name


def _kept(feature: Feature) -> slice:
    if feature.sequence is not None:
        return slice(-feature.sequence, None)
    return slice(0, feature.max)


def _as_list(value: Any, is_list: bool) -> list[Any]:
    if value is None:
        return []
    return list(value) if is_list else [value]


def _misfit(field: str, ids: list[Any], factors: list[Any]) -> Fault | None:
    if len(ids) != len(factors):
        return Fault("weights", f"{field} has {len(factors)} entries for {len(ids)} ids")
    for factor in factors:
        if factor is None or not 0 <= factor <= _FLOAT32_MAX:
            return Fault("weights", f"{field} holds {factor!r}")
    return None


def _splits(rows: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
    splits = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=splits[1:])
    return splits
