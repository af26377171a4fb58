"""From decoded records to columns, by the description of samples and features.

A :class:`Layout` is compiled once: everything that a schema can tell is checked there, by name.
What only a value can tell (a NaN, a missing label) makes one record a fault and leaves the others
alone. This module knows no format: whoever decodes says of which kind each field is.

Keys
----
An integer is its 64-bit two's complement pattern, a boolean 0 or 1. A string, an enum symbol and
bytes are FarmHash Fingerprint64 of the value's (UTF-8) bytes, nothing mixed in. A bucket is the
number of bounds at or below the value. Null is no id at all.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from consumers._feature_columns import (
    BucketColumn,
    DenseColumn,
    Fault,
    Faults,
    FieldType,
    Fingerprints,
    IdColumn,
    Kind,
    LabelColumn,
    Record,
    Records,
    TimeColumn,
    WeightColumn,
    pick,
)
from consumers.config import Feature, Sample
from consumers.errors import SpecError
from consumers.source import Columns

__all__ = [
    "Fault",
    "Faults",
    "FieldType",
    "Fingerprints",
    "Kind",
    "Layout",
    "Record",
    "Records",
    "Spec",
]


class Spec(NamedTuple):
    """What a sample is made of, as configured."""

    sample: Sample
    features: Mapping[str, Feature]


class Layout:
    """The compiled description.

    Parameters
    ----------
    fields
        Every field of a record, by name.
    spec
        Description of samples and features.
    fingerprints
        Hash of byte strings, ``uint64`` each.

    Raises
    ------
    SpecError
        A field is missing or of a kind that can't serve; names the feature and the field.
    """

    def __init__(
        self, fields: Mapping[str, FieldType], spec: Spec, fingerprints: Fingerprints
    ) -> None:
        sample = spec.sample
        unit = sample.time.unit
        self._time = TimeColumn(pick(fields, "sample.time", sample.time.field, ("int",)), unit)
        self._weight: WeightColumn | None = None
        if sample.weight is not None:
            field = pick(fields, "sample.weight", sample.weight, ("int", "float"))
            self._weight = WeightColumn(field)
        if not sample.labels:
            raise SpecError("sample.labels is empty; name at least one label")
        self._labels = {
            task: LabelColumn(
                pick(fields, f"label {task!r}", label.field or task, ("int", "float", "bool")),
                label.at_least,
                binary=label.loss == "binary",
            )
            for task, label in sample.labels.items()
        }
        self._ids: dict[str, IdColumn | BucketColumn] = {}
        self._dense: dict[str, DenseColumn] = {}
        for name, feature in spec.features.items():
            where = f"feature {name!r}"
            if feature.dense is not None:
                self._dense[name] = DenseColumn(where, name, feature, fields)
            elif not feature.tables:
                raise SpecError(f"{where} has neither tables nor dense; give it one of them")
            elif feature.buckets is not None:
                self._ids[name] = BucketColumn(where, name, feature, fields)
            else:
                self._ids[name] = IdColumn(where, name, feature, fields, fingerprints)

    @property
    def dense_widths(self) -> dict[str, int]:
        """Number of floats of each dense feature."""
        return {name: column.width for name, column in self._dense.items()}

    def time_ms(self, record: Record) -> int | None:
        """Return the event time of one record in ms, None where it has no valid one."""
        return self._time.of(record)

    def columns(self, records: Records) -> tuple[Columns, Faults]:
        """Turn records into samples.

        Returns
        -------
        Columns
            The records without a fault, in order.
        Faults
            By index into ``records``; of several faults of a record the first.
        """
        faults: Faults = {}
        times = self._time.column(records, faults)
        labels = {task: label.column(records, task, faults) for task, label in self._labels.items()}
        weight = np.ones(len(records), np.float32)
        if self._weight is not None:
            weight = self._weight.column(records, faults)
        everything = Columns(
            size=len(records),
            time_ms=times,
            labels=labels,
            weight=weight,
            ids={name: column.column(records, faults) for name, column in self._ids.items()},
            dense={name: column.column(records, faults) for name, column in self._dense.items()},
        )
        if not faults:
            return everything, faults
        good = np.array([i for i in range(len(records)) if i not in faults], np.int64)
        return everything.take(good), faults
