"""What one optimizer step on one row is: plain loops over float32 scalars, in the written order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparse_store.config import Adagrad, Ftrl

F = np.float32


def slot_start(optimizer: Adagrad | Ftrl, dim: int) -> list[np.float32]:
    """First slots of a row."""
    if isinstance(optimizer, Adagrad):
        return [F(optimizer.initial)] * dim
    return [F(0)] * (2 * dim)


def step(
    optimizer: Adagrad | Ftrl,
    values: Sequence[np.float32],
    slots: Sequence[np.float32],
    sums: Sequence[np.float32],
) -> tuple[list[np.float32], list[np.float32]]:
    """Values and slots after one step with the summed gradient `sums`."""
    if isinstance(optimizer, Adagrad):
        return _adagrad(optimizer, values, slots, sums)
    return _ftrl(optimizer, values, slots, sums)


def _adagrad(
    o: Adagrad,
    values: Sequence[np.float32],
    slots: Sequence[np.float32],
    sums: Sequence[np.float32],
) -> tuple[list[np.float32], list[np.float32]]:
    scale = F(1)
    if o.clip is not None:
        norm = math.sqrt(sum_in_order([float(g) * float(g) for g in sums]))
        if norm > float(F(o.clip)):
            scale = F(float(F(o.clip)) / norm)
    new_values, accumulators = [], []
    for value, accumulator, total in zip(values, slots, sums, strict=True):
        g = total * scale + F(o.l2) * value
        a = max(accumulator * F(o.decay), F(o.floor)) + g * g
        accumulators.append(a)
        new_values.append(value - F(o.rate) * g / np.sqrt(a + F(o.epsilon)))
    return new_values, accumulators


def _ftrl(
    o: Ftrl,
    values: Sequence[np.float32],
    slots: Sequence[np.float32],
    sums: Sequence[np.float32],
) -> tuple[list[np.float32], list[np.float32]]:
    dim = len(values)
    alpha, beta, l1, l2 = F(o.alpha), F(o.beta), F(o.l1), F(o.l2)
    new_values, zs, ns = [], [], []
    for value, z, n, g in zip(values, slots[:dim], slots[dim:], sums, strict=True):
        m = n + g * g
        z = z + (g - (np.sqrt(m) - np.sqrt(n)) / alpha * value)
        zs.append(z)
        ns.append(m)
        if abs(z) <= l1:
            new_values.append(F(0))
        else:
            edge = l1 if z > 0 else -l1
            new_values.append((edge - z) / ((beta + np.sqrt(m)) / alpha + l2))
    return new_values, zs + ns


def sum_in_order(numbers: Sequence[float]) -> float:
    """Sum left to right; the builtin `sum` compensates from Python 3.12 on."""
    total = 0.0
    for number in numbers:
        total += number
    return total
