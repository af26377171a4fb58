"""A batch on its way through tables: what is asked, which rows that means, and the pooling.

Pooling is `Keys.pool` or, with `Keys.length`, none. `pull_into` and `sum_gradients` are each
other's transposes; both take rows and occurrences in one fixed order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store.arrays import still
from sparse_store.errors import BadInput
from sparse_store.table import Distinct

_MODES = {"sum": kernels.SUM, "mean": kernels.MEAN, "sqrtn": kernels.SQRTN}


class Keys(NamedTuple):
    """The ids of one input of a batch of B samples.

    Attributes
    ----------
    table
        Where they are looked up.
    ids
        uint64 [n], or int64, taken bit by bit; every pattern is a key. May repeat.
    row_splits
        int64 [B + 1]: sample b has ids[row_splits[b]:row_splits[b + 1]].
    weights
        float32 [n], finite, or None for ones. Not for sequences.
    pool
        `sum` of w * row; `mean`: that over the sum of w; `sqrtn`: over the root of the sum of
        w * w. No ids, or a divisor of zero, give zeros. A key without a row is zeros and counts.
    length
        None to pool; else rows are kept apart in [B, length, dim], zeros after the last.
    """

    table: str
    ids: NDArray[np.uint64]
    row_splits: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None
    pool: str = "sum"
    length: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """Checked `Keys`: arrays contiguous and read-only, `weights` empty for ones."""

    table: str
    ids: NDArray[np.uint64]
    splits: NDArray[np.int64]
    weights: NDArray[np.float32]
    weighted: bool
    mode: int
    length: int | None

    @property
    def size(self) -> int:
        """Samples B."""
        return self.splits.size - 1


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A resolved batch: which rows its ids mean, until the next `resolve`. Made by a store.

    Attributes
    ----------
    step
        The step that it began.
    inputs
        By name, in the order given.
    distinct
        By table: its keys in this batch and their rows.
    inverse
        By input: for each id the number of its key in `distinct`, int32 [n].
    """

    step: int
    inputs: Mapping[str, Input]
    distinct: Mapping[str, Distinct]
    inverse: Mapping[str, NDArray[np.int32]]


def checked_ids(ids: NDArray[np.uint64], where: str) -> NDArray[np.uint64]:
    """Return ids as contiguous, read-only uint64 [n], or raise `BadInput`."""
    array = np.ascontiguousarray(ids)
    if array.ndim != 1 or array.dtype not in (np.uint64, np.int64):
        raise BadInput(f"{where}: ids are {array.dtype} {array.shape}; give uint64 or int64 [n]")
    checked: NDArray[np.uint64] = still(array.view(np.uint64))
    return checked


def checked_input(name: str, keys: Keys) -> Input:
    """Return `keys` in the kernels' form, or raise `BadInput`."""
    where = f"input {name!r}"
    ids = checked_ids(keys.ids, where)
    splits = _splits(keys.row_splits, ids.size, where)
    if keys.pool not in _MODES:
        raise BadInput(f"{where}: pool is {keys.pool!r}; give one of {[*_MODES]}")
    weights = np.empty(0, np.float32)
    if keys.weights is not None:
        weights = np.ascontiguousarray(keys.weights)
        if weights.dtype != np.float32 or weights.shape != ids.shape:
            raise BadInput(
                f"{where}: weights are {weights.dtype} {weights.shape}; give float32 [{ids.size}], "
                "one per id"
            )
        if keys.length is not None:
            raise BadInput(f"{where}: a sequence keeps its rows apart; it takes no weights")
    if keys.length is not None:
        longest = int(np.max(splits[1:] - splits[:-1], initial=0))
        if longest > keys.length:
            raise BadInput(
                f"{where}: a list of {longest} ids, and the sequence holds {keys.length}; cap lists "
                "before"
            )
    return Input(
        table=keys.table,
        ids=ids,
        splits=still(splits),
        weights=still(weights),
        weighted=keys.weights is not None,
        mode=_MODES[keys.pool],
        length=keys.length,
    )


def check_arrays(
    plan: Plan,
    arrays: Mapping[str, NDArray[np.float32]],
    dims: Mapping[str, int],
    *,
    writable: bool,
) -> None:
    """Raise `BadInput` unless every input has an array of its shape; dims are by table."""
    for name, entry in plan.inputs.items():
        if name not in arrays:
            raise BadInput(f"input {name!r} has no array; there are {[*arrays]}")
        array = arrays[name]
        tail: tuple[int, ...] = (dims[entry.table],)
        if entry.length is not None:
            tail = (entry.length, *tail)
        fits = array.ndim == 1 + len(tail) and array.shape[1:] == tail
        if array.dtype != np.float32 or not fits or array.shape[0] < entry.size:
            raise BadInput(
                f"input {name!r}: the array is {array.dtype} {array.shape}; give float32 "
                f"{(entry.size, *tail)}, or longer"
            )
        if not array.flags.c_contiguous or (writable and not array.flags.writeable):
            raise BadInput(
                f"input {name!r}: the array must be C-contiguous{' and writable' * writable}"
            )


def pull_into(plan: Plan, name: str, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write one input's rows, pooled or in sequence, into `out`; values are the table's."""
    entry = plan.inputs[name]
    rows, inverse = plan.distinct[entry.table].rows, plan.inverse[name]
    if entry.length is not None:
        kernels.place(still(values), rows, inverse, entry.splits, out)
        return
    kernels.pool(
        still(values),
        rows,
        inverse,
        entry.splits,
        entry.weights,
        entry.weighted,
        np.int64(entry.mode),
        out,
    )


def sum_gradients(
    plan: Plan, grads: Mapping[str, NDArray[np.float32]], dims: Mapping[str, int]
) -> dict[str, NDArray[np.float32]]:
    """Return, by table, the gradients of its distinct keys [u, dim]; zeros without a row.

    Float32 sums in order of occurrence: inputs as in the plan, samples in order, ids in order.
    """
    sums = {
        table: np.zeros((distinct.keys.size, dims[table]), np.float32)
        for table, distinct in plan.distinct.items()
    }
    for name, entry in plan.inputs.items():
        rows, inverse = plan.distinct[entry.table].rows, plan.inverse[name]
        grad, total = still(grads[name]), sums[entry.table]
        if entry.length is not None:
            kernels.place_back(rows, inverse, entry.splits, grad, total)
            continue
        kernels.pool_back(
            rows,
            inverse,
            entry.splits,
            entry.weights,
            entry.weighted,
            np.int64(entry.mode),
            grad,
            total,
        )
    return {table: still(total) for table, total in sums.items()}


def _splits(row_splits: NDArray[np.int64], ids: int, where: str) -> NDArray[np.int64]:
    splits = np.ascontiguousarray(row_splits)
    if splits.dtype != np.int64 or splits.ndim != 1 or splits.size == 0:
        raise BadInput(f"{where}: row_splits is {splits.dtype} {splits.shape}; give int64 [B + 1]")
    if splits[0] != 0 or splits[-1] != ids or bool(np.any(splits[1:] < splits[:-1])):
        raise BadInput(
            f"{where}: row_splits must rise from 0 to {ids}, the number of ids; it goes from "
            f"{splits[0]} to {splits[-1]}"
        )
    return splits
