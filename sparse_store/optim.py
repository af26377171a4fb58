"""Optimizers as numbers: how many slots a row has, their first values, and one step."""

import numpy as np
from numpy.typing import NDArray

from sparse_store._optim_kernels import adagrad, ftrl
from sparse_store.config import Adagrad, Ftrl

LARGEST_GRADIENT = np.float32(1e15)
"""Beyond this a summed gradient's square would soon bring a row's slots to float32's end, 3e38."""


def kind(optimizer: Adagrad | Ftrl) -> str:
    """Name what decides the layout of slots."""
    return "adagrad" if isinstance(optimizer, Adagrad) else "ftrl"


def slot_start(optimizer: Adagrad | Ftrl, dim: int) -> NDArray[np.float32]:
    """Return the first slots of a row, float32 [slots * dim]."""
    if isinstance(optimizer, Adagrad):
        return np.full(dim, optimizer.initial, np.float32)
    return np.zeros(2 * dim, np.float32)


def parameters(optimizer: Adagrad | Ftrl) -> NDArray[np.float32]:
    """Return the kernel's parameters in its order."""
    o = optimizer
    if isinstance(o, Adagrad):
        numbers = [o.rate, o.epsilon, o.clip or 0.0, o.l2, o.decay, o.floor]
    else:
        numbers = [o.alpha, o.beta, o.l1, o.l2]
    return np.array(numbers, np.float32)


def step(
    optimizer: Adagrad | Ftrl,
    rows: NDArray[np.float32],
    numbers: NDArray[np.int32],
    keys: tuple[int, int],
    sums: NDArray[np.float32],
    dim: int,
) -> None:
    """Take one step, in place, on the row of each key from keys[0] to keys[1].

    `rows` [n, width] has values, then slots; `numbers` [u] a key's row, -1 for none; `sums` is
    flat, dim to a key.
    """
    kernel = adagrad if isinstance(optimizer, Adagrad) else ftrl
    kernel(rows, numbers, np.int64(keys[0]), np.int64(keys[1]), sums, dim, parameters(optimizer))
