"""Optimizer kernels: one step per distinct row, in place, float32 in a written order.

Each takes `values` [rows, dim], `slots` [rows, slots * dim], `rows` [u] (a key's row, or -1 for
a key without one, which is passed over), `sums` [u, dim] (its gradients summed) and `params`,
whose order the docstring gives. Rows are distinct, so the order of u changes nothing.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(
    values: NDArray[np.float32],
    slots: NDArray[np.float32],
    rows: NDArray[np.int32],
    sums: NDArray[np.float32],
    params: NDArray[np.float32],
) -> None:
    """Adagrad; params = rate, epsilon, clip (0: none), l2, decay, floor; slot = accumulator.

    With clip: norm = root of the sum of squares in float64, in order; when above clip, scale =
    float32(clip / norm), else 1. Then per coordinate g = sum * scale + l2 * v;
    a = max(a * decay, floor) + g * g; v = v - rate * g / root(a + epsilon).
    """
    rate, epsilon, clip, l2, decay, floor = (
        params[0],
        params[1],
        params[2],
        params[3],
        params[4],
        params[5],
    )
    dim = values.shape[1]
    for u in range(rows.size):
        row = rows[u]
        if row < 0:
            continue
        scale = np.float32(1.0)
        if clip > np.float32(0.0):
            total = np.float64(0.0)
            for d in range(dim):
                wide = np.float64(sums[u, d])
                total += wide * wide
            norm = np.sqrt(total)
            if norm > np.float64(clip):
                scale = np.float32(np.float64(clip) / norm)
        for d in range(dim):
            g = sums[u, d] * scale + l2 * values[row, d]
            a = max(slots[row, d] * decay, floor) + g * g
            slots[row, d] = a
            values[row, d] -= rate * g / np.sqrt(a + epsilon)


@njit(cache=True, nogil=True, error_model="numpy")
def ftrl(
    values: NDArray[np.float32],
    slots: NDArray[np.float32],
    rows: NDArray[np.int32],
    sums: NDArray[np.float32],
    params: NDArray[np.float32],
) -> None:
    """FTRL-proximal; params = alpha, beta, l1, l2; slots = z [dim], then n [dim].

    Per coordinate m = n + g * g; z = z + (g - (root(m) - root(n)) / alpha * v); n = m; then
    v = 0 when |z| <= l1, else (±l1 - z) / ((beta + root(n)) / alpha + l2), ± the sign of z.
    """
    alpha, beta, l1, l2 = params[0], params[1], params[2], params[3]
    zero = np.float32(0.0)
    dim = values.shape[1]
    for u in range(rows.size):
        row = rows[u]
        if row < 0:
            continue
        for d in range(dim):
            g = sums[u, d]
            n = slots[row, dim + d]
            m = n + g * g
            root = np.sqrt(m)
            z = slots[row, d] + (g - (root - np.sqrt(n)) / alpha * values[row, d])
            slots[row, d] = z
            slots[row, dim + d] = m
            if abs(z) <= l1:
                values[row, d] = zero
            else:
                edge = l1 if z > zero else -l1
                values[row, d] = (edge - z) / ((beta + root) / alpha + l2)
