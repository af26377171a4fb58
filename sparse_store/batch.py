"""A batch on its way through tables: what is asked, in the kernels' form, and who carries it.

Pooling is `Keys.pool` or, with `Keys.length`, none. Kernels take all inputs of a table at once:
as rows of numbers, with the addresses of their arrays, which the plan keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_store import _table_kernels as kernels
from sparse_store.arrays import address_of, still
from sparse_store.errors import BadInput

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


class Input(NamedTuple):
    """`Keys` with contiguous arrays of the right types; `weights` None for ones."""

    table: str
    ids: NDArray[np.uint64]
    splits: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    mode: int
    length: int | None

    @property
    def size(self) -> int:
        """Samples B."""
        return self.splits.size - 1


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A resolved batch, until the next `resolve`. Made by a store.

    Attributes
    ----------
    step
        The step that it began.
    inputs
        By name, in the order given.
    names, jobs
        By table that the batch asks: its inputs, and the kernels' form of them.
    """

    step: int
    inputs: Mapping[str, Input]
    names: Mapping[str, Sequence[str]]
    jobs: Mapping[str, NDArray[np.int64]]


class Crew:
    """Threads that kernels run in: the caller's, and as many more as it takes.

    Kernels give the interpreter free while they run.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._others = None if size == 1 else ThreadPoolExecutor(size - 1, "sparse_store")

    def each(self, work: Callable[[int], None], *, alone: bool = False) -> None:
        """Run work(0) to work(size - 1), all at once, or `alone` in the caller's thread.

        Returns when all are over; raises what one of them raised.
        """
        if self._others is None or alone:
            for number in range(self.size):
                work(number)
            return
        others = [self._others.submit(work, number) for number in range(1, self.size)]
        try:
            work(0)
        finally:
            for other in others:
                other.exception()
        for other in others:
            other.result()


def checked_ids(ids: NDArray[np.uint64], where: str) -> NDArray[np.uint64]:
    """Return ids as contiguous, read-only uint64 [n], or raise `BadInput`."""
    array = np.ascontiguousarray(ids)
    if array.ndim != 1 or array.dtype not in (np.uint64, np.int64):
        raise BadInput(f"{where}: ids are {array.dtype} {array.shape}; give uint64 or int64 [n]")
    checked: NDArray[np.uint64] = still(array.view(np.uint64))
    return checked


def checked_input(name: str, keys: Keys) -> Input:
    """Return `keys` in the kernels' form, or raise `BadInput`; `jobs_of` looks at the splits."""
    ids = np.ascontiguousarray(keys.ids)
    if ids.ndim != 1 or ids.dtype not in (np.uint64, np.int64):
        checked_ids(ids, f"input {name!r}")
    splits = np.ascontiguousarray(keys.row_splits)
    if splits.dtype != np.int64 or splits.ndim != 1 or splits.size == 0:
        raise BadInput(
            f"input {name!r}: row_splits is {splits.dtype} {splits.shape}; give int64 [B + 1]"
        )
    if keys.pool not in _MODES:
        raise BadInput(f"input {name!r}: pool is {keys.pool!r}; give one of {[*_MODES]}")
    weights = None
    if keys.weights is not None:
        weights = np.ascontiguousarray(keys.weights)
        if weights.dtype != np.float32 or weights.shape != ids.shape:
            raise BadInput(
                f"input {name!r}: weights are {weights.dtype} {weights.shape}; give float32 "
                f"[{ids.size}], one per id"
            )
        if keys.length is not None:
            raise BadInput(f"input {name!r}: a sequence keeps its rows apart; it takes no weights")
    return Input(keys.table, ids, splits, weights, _MODES[keys.pool], keys.length)


def jobs_of(inputs: Mapping[str, Input], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the kernels' form of a table's inputs, or raise `BadInput`."""
    rows = []
    start = 0
    for name in names:
        entry = inputs[name]
        if entry.length is not None and entry.length < 0:
            _refuse(name, entry)
        rows.append(
            (
                address_of(entry.ids),
                entry.ids.size,
                address_of(entry.splits),
                entry.size,
                0 if entry.weights is None else address_of(entry.weights),
                entry.mode,
                -1 if entry.length is None else entry.length,
                start,
                0,
            )
        )
        start += entry.ids.size
    jobs = np.array(rows, np.int64)
    wrong = int(kernels.check(jobs))
    if wrong >= 0:
        _refuse(names[wrong], inputs[names[wrong]])
    return jobs


def faces_of(
    plan: Plan,
    arrays: Mapping[str, NDArray[np.float32]],
    dims: Mapping[str, int],
    *,
    writable: bool,
) -> dict[str, NDArray[np.int64]]:
    """Return, by table, address and samples of each input's array; dims are by table.

    Raises
    ------
    BadInput
        An input has no array of its shape.
    """
    faces = {}
    for table, names in plan.names.items():
        dim = dims[table]
        rows = []
        for name in names:
            array = arrays.get(name)
            entry = plan.inputs[name]
            if array is None:
                raise BadInput(f"input {name!r} has no array; there are {[*arrays]}")
            tail = (dim,) if entry.length is None else (entry.length, dim)
            shape = array.shape
            if array.dtype != np.float32 or shape[1:] != tail or shape[0] < entry.size:
                raise BadInput(
                    f"input {name!r}: the array is {array.dtype} {shape}; give float32 "
                    f"{(entry.size, *tail)}, or longer"
                )
            flags = array.flags
            if not flags.c_contiguous or (writable and not flags.writeable):
                raise BadInput(
                    f"input {name!r}: the array must be C-contiguous{' and writable' * writable}"
                )
            rows.append((address_of(array), shape[0]))
        faces[table] = np.array(rows, np.int64)
    return faces


def _refuse(name: str, entry: Input) -> None:
    splits, ids = entry.splits, entry.ids.size
    if splits[0] != 0 or splits[-1] != ids or bool(np.any(splits[1:] < splits[:-1])):
        raise BadInput(
            f"input {name!r}: row_splits must rise from 0 to {ids}, the number of ids; it goes "
            f"from {splits[0]} to {splits[-1]}"
        )
    longest = int(np.max(splits[1:] - splits[:-1], initial=0))
    raise BadInput(
        f"input {name!r}: a list of {longest} ids, and the sequence holds {entry.length}; cap lists "
        "before"
    )
