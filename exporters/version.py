"""A version of the model: what changed, what a sink says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["Delta", "DenseInfo", "Half", "Head", "TableInfo", "TableRows", "check_delta"]

MAX_INT = 2**53 - 1  # exact in JSON readers and in a Redis script
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


class TableRows(NamedTuple):
    """What changed in a table: `keys` u64[n] with `values` f32[n, dim], and `removed` u64[m]."""

    keys: NDArray[np.uint64]
    values: NDArray[np.float32]
    removed: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Delta:
    """What covers the versions (since, version]: absolute rows, removals, dense weights.

    Parameters
    ----------
    version, since
        The range. A draft has zeros here until the publisher gives it numbers.
    generation, step
        Who made it, and at the boundary of which step.
    watermark
        The clock at that boundary, ms.
    positions
        ``"topic/partition"`` to next offset.
    tables
        What changed, by table. Tables without a change may be left out.
    dense
        All dense weights as one vector, or None when they did not change.
    dims
        The dim of every table of the model.
    rows
        Rows that each table holds at this version, where known.
    """

    version: int
    since: int
    generation: int
    step: int
    watermark: int
    positions: Mapping[str, int]
    tables: Mapping[str, TableRows]
    dense: NDArray[np.float32] | None
    dims: Mapping[str, int]
    rows: Mapping[str, int] = field(default_factory=dict)


class TableInfo(NamedTuple):
    """A table as a sink keeps it: `dim`, number of `buckets` in this epoch, `rows` held."""

    dim: int
    buckets: int
    rows: int


class DenseInfo(NamedTuple):
    """The dense weights in force: the `version` that wrote them, and their `size` in floats."""

    version: int
    size: int


class Half(NamedTuple):
    """A version above the head whose rows are partly written, and the generation it is of."""

    version: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest version published in a sink.

    `generation` and `checksum` are those of the version's log entry, by which the log knows it;
    they are not the fence. An epoch bears the version of the snapshot that began it, so
    ``version == epoch`` is a head that a snapshot made.

    `whole` and `half` are what the sink saw when it was asked, not a part of the version: False
    means that rows of this version were lost before it was published (a fail-over in between).
    """

    version: int
    generation: int
    epoch: int
    checksum: str
    watermark: int
    step: int
    positions: Mapping[str, int]
    tables: Mapping[str, TableInfo]
    dense: DenseInfo | None = None
    groups: int = 1
    whole: bool = field(default=True, compare=False)
    half: Half | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Rows over all tables."""
        return sum(info.rows for info in self.tables.values())


def check_delta(delta: Delta) -> None:
    """Refuse a delta that breaks the rules of the wire.

    Raises
    ------
    ValueError
        Says which rule, and where.
    """
    if not 0 <= delta.since < delta.version <= MAX_INT:
        raise ValueError(f"delta covers ({delta.since}, {delta.version}]: not a range of versions")
    for name in delta.dims:
        if not TABLE_NAME.fullmatch(name):
            raise ValueError(f"table {name!r}: a name is letters, digits, '_', '.' and '-'")
    for name, rows in delta.tables.items():
        if name not in delta.dims:
            raise ValueError(f"table {name!r} has rows but no dim")
        if rows.keys.dtype != np.uint64 or rows.removed.dtype != np.uint64:
            raise ValueError(f"table {name!r}: keys must be uint64")
        if rows.values.dtype != np.float32 or rows.values.shape != (
            len(rows.keys),
            delta.dims[name],
        ):
            raise ValueError(
                f"table {name!r}: values must be float32 [{len(rows.keys)}, {delta.dims[name]}],"
                f" got {rows.values.dtype} {list(rows.values.shape)}"
            )
        for what, keys in (("keys", rows.keys), ("removed keys", rows.removed)):
            if keys.ndim != 1 or not bool(np.all(keys[1:] > keys[:-1])):
                raise ValueError(f"table {name!r}: {what} must be strictly ascending")
        if len(rows.keys) and len(rows.removed):
            at = np.minimum(np.searchsorted(rows.keys, rows.removed), len(rows.keys) - 1)
            if bool(np.any(rows.keys[at] == rows.removed)):
                raise ValueError(f"table {name!r}: a key is both written and removed")
    if delta.dense is not None and (delta.dense.dtype != np.float32 or delta.dense.ndim != 1):
        raise ValueError("dense weights must be one float32 vector")
