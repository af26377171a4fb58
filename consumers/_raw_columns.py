"""From raw columns to samples: what :mod:`consumers.features` does to records, a batch at a time.

Raw columns hold the fields as a format gives them, nulls apart. A sample that
:meth:`RawLayout.columns` leaves out is one in which ``Layout.columns`` finds a fault, and every
other one is the same to the bit; whoever decodes asks ``Layout`` about the former, for the reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from consumers import _decode_kernels as kernels
from consumers._feature_columns import LATEST_TIME_MS, UNITS_PER_MS, FieldType
from consumers.config import DenseStep, Feature, Label, Log1p
from consumers.features import Spec
from consumers.source import Columns, Ids

_FLOAT32_MAX = kernels.FLOAT32_MAX

Flags = NDArray[np.bool_]


class Slot(NamedTuple):
    """Where the values of a field stand: in a column of cells, or in a list.

    ``is_real``: as float64, else as int64. ``is_hashed``: those are the bits of fingerprints.
    """

    row: int
    is_list: bool
    is_real: bool
    is_hashed: bool


class Slots:
    """Slots of the fields that are wanted, in their order, integers before floats."""

    def __init__(self, wanted: Mapping[str, FieldType]) -> None:
        self.by_field: dict[str, Slot] = {}
        self.columns = self.lists = 0
        for is_real in (False, True):
            for name, field in wanted.items():
                if (field.kind == "float") is is_real:
                    self._add(name, field, is_real=is_real)

    def _add(self, name: str, field: FieldType, *, is_real: bool) -> None:
        index = self.lists if field.is_list else self.columns
        hashed = field.kind in ("string", "bytes")
        self.by_field[name] = Slot(index, field.is_list, is_real, hashed)
        if field.is_list:
            self.lists += 1
        else:
            self.columns += 1


class RawDecoder:
    """Decodes values into raw columns, and remembers how long the lists of a batch get."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._room = 0

    def decode(
        self, table: NDArray[np.int64], symbols: NDArray[np.int64], values: Sequence[bytes | None]
    ) -> tuple[int, kernels.RawArrays]:
        """Decode messages, no value like an empty one; return how many could be used."""
        given: Any = values
        try:
            data, offsets = kernels.joined(given)
        except TypeError:  # there is a None
            data, offsets = kernels.joined([value or b"" for value in values])
        # An item takes a byte at least, so this bounds what a count in a message can ask for.
        most = int(offsets[-1]) + 1
        while True:
            raw = kernels.raw_arrays(
                columns=self._slots.columns,
                lists=self._slots.lists,
                messages=len(values),
                room=self._room,
            )
            size, fits = kernels.decode_many(table, symbols, data, offsets, raw)
            if fits:
                return size, raw
            self._room = min(max(2 * self._room, 1024), max(most, self._room + 1))


def used_fields(spec: Spec) -> set[str]:
    """Return the names of all fields that samples are made of."""
    sample = spec.sample
    names = {sample.time.field, sample.weight}
    names |= {label.field or task for task, label in sample.labels.items()}
    names |= {feature.field or name for name, feature in spec.features.items()}
    names |= {feature.weights for feature in spec.features.values()}
    return {name for name in names if name is not None}


class _Batch(NamedTuple):
    """Raw columns of ``size`` samples, read by the names of fields."""

    raw: kernels.RawArrays
    size: int
    slots: Slots
    has_null: Flags

    def longs(self, field: str) -> NDArray[np.int64]:
        return self.raw.cells[self.slots.by_field[field].row, : self.size]

    def reals(self, field: str) -> NDArray[np.float64]:
        slot = self.slots.by_field[field]
        if slot.is_real:
            return self.raw.reals[slot.row, : self.size]
        return self.longs(field).astype(np.float64)

    def nulls(self, field: str) -> NDArray[np.uint8]:
        return self.raw.nulls[self._row(field), : self.size]

    def is_null(self, field: str) -> Flags | None:
        """Where a value, or a whole list, is null; None if nowhere."""
        row = self._row(field)
        return self.raw.nulls[row, : self.size] != 0 if self.has_null[row] else None

    def splits(self, field: str) -> NDArray[np.int64]:
        return self.raw.splits[self.slots.by_field[field].row, : self.size + 1]

    def items(self, field: str) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Items of a list field, floats as their bits, and which of them are null."""
        index = self.slots.by_field[field].row
        end = self.raw.splits[index, self.size]
        return self.raw.items[index, :end], self.raw.item_nulls[index, :end]

    def real_items(self, field: str) -> NDArray[np.float64]:
        items, _ = self.items(field)
        return (
            items.view(np.float64)
            if self.slots.by_field[field].is_real
            else items.astype(np.float64)
        )

    def as_lists(self, field: str) -> "_Lists":
        """Values of any field as lists; a single value is a list of one."""
        slot = self.slots.by_field[field]
        if slot.is_list:
            values, nulls = self.items(field)
            splits = self.splits(field)
        else:
            values, splits = kernels.compact(self.longs(field), self.nulls(field))
            nulls = np.zeros(len(values), np.uint8)
        reals = values.view(np.float64) if slot.is_real else values.astype(np.float64)
        return _Lists(values, reals, nulls, splits)

    def _row(self, field: str) -> int:
        slot = self.slots.by_field[field]
        return slot.row + (self.slots.columns if slot.is_list else 0)


class _Lists(NamedTuple):
    values: NDArray[np.int64]
    reals: NDArray[np.float64]
    nulls: NDArray[np.uint8]
    splits: NDArray[np.int64]


class RawLayout:
    """The description of samples, compiled for raw columns.

    Parameters
    ----------
    fields
        Every field of a record, by name.
    spec
        Description of samples and features, found right for these fields by ``Layout``.
    """

    def __init__(self, fields: Mapping[str, FieldType], spec: Spec) -> None:
        used = used_fields(spec)
        self.slots = Slots({name: field for name, field in fields.items() if name in used})
        slots = self.slots.by_field
        self._spec = spec
        self._ids_of: dict[str, int | _PickedIds | _BucketIds] = {}
        self._dense_lists: dict[str, Feature] = {}
        groups: dict[str, list[str]] = {}
        for name, feature in spec.features.items():
            field = feature.field or name
            if feature.dense is not None:
                if slots[field].is_list:
                    self._dense_lists[name] = feature
                else:
                    groups.setdefault(repr(feature.dense), []).append(name)
            elif feature.buckets is not None:
                self._ids_of[name] = _BucketIds(field, feature.buckets)
            else:
                picked = _PickedIds(field, feature, slots[field], fields[field])
                self._ids_of[name] = slots[field].row if picked.is_plain_cell else picked
        self._dense = [self._dense_group(names) for names in groups.values()]

    @classmethod
    def of_times(cls, fields: Mapping[str, FieldType], spec: Spec) -> "RawLayout":
        """Return one for :meth:`times_ms` alone, which wants no other field."""
        sample = msgspec.structs.replace(spec.sample, weight=None, labels={})
        return cls(fields, Spec(sample, {}))

    def columns(self, raw: kernels.RawArrays, size: int) -> tuple[Columns, Flags]:
        """Turn the first ``size`` rows into samples.

        Returns
        -------
        Columns
            The rows without a fault, in order; may be views of ``raw``.
        wrong
            ``bool[size]``: the rows with a fault.
        """
        has_null = raw.nulls[:, :size].max(axis=1, initial=0) != 0
        batch = _Batch(raw, size, self.slots, has_null)
        wrong = np.zeros(size, np.bool_)
        sample = self._spec.sample
        everything = Columns(
            size=size,
            time_ms=self._times(batch, wrong),
            labels={
                task: _labels(batch, label.field or task, label, wrong)
                for task, label in sample.labels.items()
            },
            weight=self._weights(batch, wrong),
            ids=self._ids(batch, wrong),
            dense=self._floats(batch, wrong),
        )
        if not wrong.any():
            return everything, wrong
        return everything.take(np.flatnonzero(~wrong)), wrong

    def times_ms(self, raw: kernels.RawArrays, size: int) -> NDArray[np.int64]:
        """Return the event time of each row in ms, 0 where it has no valid one."""
        field = self.slots.by_field[self._spec.sample.time.field]
        has_null = np.zeros(len(raw.nulls), np.bool_)
        has_null[field.row] = True
        return self._times(_Batch(raw, size, self.slots, has_null), np.zeros(size, np.bool_))

    def _times(self, batch: _Batch, wrong: Flags) -> NDArray[np.int64]:
        time = self._spec.sample.time
        times, per_ms = UNITS_PER_MS[time.unit]
        values = batch.longs(time.field)
        # Divides rather than multiplies: the product may not fit.
        latest = LATEST_TIME_MS // times if times > 1 else LATEST_TIME_MS * per_ms + per_ms - 1
        off = (values < 0) | (values > latest)
        null = batch.is_null(time.field)
        if null is not None:
            off |= null
        if off.any():
            wrong |= off
            values = np.where(off, 0, values)
        return values * times // per_ms if (times, per_ms) != (1, 1) else values

    def _weights(self, batch: _Batch, wrong: Flags) -> NDArray[np.float32]:
        field = self._spec.sample.weight
        if field is None:
            return np.ones(batch.size, np.float32)
        weights = batch.reals(field)
        null = batch.is_null(field)
        if null is not None:
            weights = np.where(null, 1.0, weights)
        return _fitting(weights, (weights >= 0) & (weights <= _FLOAT32_MAX), wrong)

    def _ids(self, batch: _Batch, wrong: Flags) -> dict[str, Ids]:
        found: dict[str, Ids] = {}
        # Many features are one id for each sample: those share their splits.
        ones = np.arange(batch.size + 1, dtype=np.int64)
        cells = batch.raw.cells.view(np.uint64)
        for name, column in self._ids_of.items():
            if not isinstance(column, int):
                found[name] = column.column(batch, wrong)
            elif batch.has_null[column]:
                values, splits = kernels.compact(
                    batch.raw.cells[column, : batch.size], batch.raw.nulls[column, : batch.size]
                )
                found[name] = Ids(values.view(np.uint64), splits, None)
            else:
                found[name] = Ids(cells[column, : batch.size], ones, None)
        return found

    def _floats(self, batch: _Batch, wrong: Flags) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        for group in self._dense:
            if group.rows is None:
                values = np.array([batch.reals(field) for field in group.fields])
            else:
                values = batch.raw.reals[group.rows, : batch.size]
            values = _stepped(values, group.steps)
            columns = _narrowed(values, None, wrong, axis=0)
            found |= zip(group.names, columns.reshape(*columns.shape, 1), strict=True)
        for name, feature in self._dense_lists.items():
            rows = _dense_rows(batch, feature.field or name, feature.width or 1, wrong)
            finite = np.isfinite(rows)
            values = _stepped(np.where(finite, rows, 0.0), feature.dense or [])
            found[name] = _narrowed(values, finite, wrong, axis=1)
        if len(self._dense) + len(self._dense_lists) == 1:
            return found
        return {name: found[name] for name in self._spec.features if name in found}

    def _dense_group(self, names: list[str]) -> "_DenseGroup":
        features = [self._spec.features[name] for name in names]
        fields = [feature.field or name for name, feature in zip(names, features, strict=True)]
        slots = [self.slots.by_field[field] for field in fields]
        rows = _rows(slot.row for slot in slots) if all(s.is_real for s in slots) else None
        return _DenseGroup(names, fields, features[0].dense or [], rows)


class _DenseGroup(NamedTuple):
    """Single floats with the same steps, and their columns if all are floats already."""

    names: list[str]
    fields: list[str]
    steps: list[DenseStep]
    rows: Any


class _PickedIds:
    """Ids of a feature of which some are left out, or which come in lists."""

    def __init__(self, field: str, feature: Feature, slot: Slot, kind: FieldType) -> None:
        self._field = field
        self._weights = feature.weights
        self._is_list = slot.is_list
        self._keep = -feature.sequence if feature.sequence is not None else feature.max or 0
        self._padding = _padding_bits(feature.padding, kind)
        self.is_plain_cell = not slot.is_list and self._padding is None and feature.weights is None

    def column(self, batch: _Batch, wrong: Flags) -> Ids:
        if self._weights is None and self._is_list and self._padding is None:
            values, nulls = batch.items(self._field)
            splits = batch.splits(self._field)
            if self._takes_all(splits) and not nulls.any():
                return Ids(values.view(np.uint64), splits, None)
        lists = batch.as_lists(self._field)
        factors = None
        if self._weights is not None:
            given = batch.as_lists(self._weights)
            missing = batch.nulls(self._weights)
            factors = kernels.spread_weights(
                lists.splits, given.reals, given.nulls, given.splits, missing, wrong
            )
        values, splits, weights = kernels.select(
            lists.values, lists.nulls, lists.splits, factors, self._padding, self._keep
        )
        return Ids(values.view(np.uint64), splits, weights)

    def _takes_all(self, splits: NDArray[np.int64]) -> bool:
        return not self._keep or bool(np.diff(splits).max(initial=0) <= abs(self._keep))


class _BucketIds:
    """Numbers turned into the index of the bucket that they fall into."""

    def __init__(self, field: str, bounds: Sequence[float]) -> None:
        self._field = field
        self._bounds = np.array(bounds, np.float64)

    def column(self, batch: _Batch, wrong: Flags) -> Ids:
        del wrong  # a number that isn't finite came into no raw column
        keys = np.searchsorted(self._bounds, batch.reals(self._field), side="right")
        kept, splits = kernels.compact(keys.astype(np.int64), batch.nulls(self._field))
        return Ids(kept.view(np.uint64), splits, None)


def _padding_bits(padding: int | str | None, field: FieldType) -> int | None:
    """Return the cell that padding would be, None where no value is padding."""
    if isinstance(padding, str):
        return int(kernels.fingerprint64_many([padding.encode()]).view(np.int64)[0])
    if padding is None or field.kind == "bytes" or not -(2**63) <= padding < 2**63:
        return None
    return padding


def _labels(batch: _Batch, field: str, label: Label, wrong: Flags) -> NDArray[np.float32]:
    labels = batch.reals(field)
    right = np.abs(labels) <= _FLOAT32_MAX
    null = batch.is_null(field)
    if null is not None:
        right &= ~null
    if label.at_least is not None:
        labels = (labels >= label.at_least).astype(np.float64)
    elif label.loss == "binary":
        right &= (labels >= 0) & (labels <= 1)
    return _fitting(labels, right, wrong)


def _dense_rows(batch: _Batch, field: str, width: int, wrong: Flags) -> NDArray[np.float64]:
    values = batch.real_items(field)
    splits = batch.splits(field)
    fits = np.diff(splits) == width
    if fits.all():
        return values.reshape(batch.size, width)
    null = batch.is_null(field)
    wrong |= ~fits if null is None else ~(fits | null)
    rows = np.zeros((batch.size, width), np.float64)
    rows[fits] = values[splits[:-1][fits, np.newaxis] + np.arange(width)]
    return rows


def _stepped(values: NDArray[np.float64], steps: Sequence[DenseStep]) -> NDArray[np.float64]:
    for step in steps:
        if isinstance(step, Log1p):
            values = np.sign(values) * np.log1p(np.abs(values))
        else:
            values = np.clip(values, step.clip[0], step.clip[1])
    return values


def _narrowed(
    values: NDArray[np.float64], finite: Flags | None, wrong: Flags, *, axis: int
) -> NDArray[np.float32]:
    """Make finite values float32; mark where one doesn't fit, or where one wasn't ``finite``."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    fits = narrow.size == 0 or (narrow.min() > -_FLOAT32_MAX and narrow.max() < _FLOAT32_MAX)
    if fits and (finite is None or finite.all()):
        return narrow
    right = np.abs(values) <= _FLOAT32_MAX
    if finite is not None:
        right &= finite
    wrong |= ~np.all(right, axis=axis)
    return np.where(right, values, 0.0).astype(np.float32)


def _fitting(values: NDArray[np.float64], right: Flags, wrong: Flags) -> NDArray[np.float32]:
    if not right.all():
        wrong |= ~right
        values = np.where(right, values, 0.0)
    return values.astype(np.float32)


def _rows(indexes: Iterable[int]) -> Any:
    """Return what picks these rows: a slice where they follow each other."""
    found = list(indexes)
    if found and found == list(range(found[0], found[0] + len(found))):
        return slice(found[0], found[0] + len(found))
    return np.array(found, np.int64)
