"""Optimizer kernels: one step per distinct row, in place, float32 in a written order.

Each takes `rows` [n, width] (a row's values, then its slots), `numbers` [u] (the row of each
distinct key, or -1 for a key without one, which is passed over), `first` and `end` (the keys to
take), `sums` (flat; dim to a key: its gradients summed), `dim`, and `params`, whose order the
docstring gives. Rows are distinct, so their order changes nothing.

Rows go through in blocks that fit the first cache: copied in, one flat loop over all coordinates
of the block, which the compiler turns into vectors, copied back.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, njit, types
from numba.core import cgutils
from numpy.typing import NDArray

intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
pointer_to: Any = types.CPointer
function_in: Any = cgutils.get_or_insert_function

Whole = int | np.int64  # what the type checker is told of a number that is int64 when compiled

BLOCK: Final = 1024  # float32 of one kind in a block
LINE: Final = 64  # bytes
WIDE: Final = 8  # float32 in a vector


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """prefetch(address): ask for the cache line there. Reads nothing."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = function_in(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(args[0], byte)
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def copy8(typing: Any, to: Any, source: Any) -> Any:
    """copy8(to, source): copy eight floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), WIDE).as_pointer()
        into, address = (builder.inttoptr(place, vector) for place in args)
        value = builder.load(address)
        value.align = 4
        builder.store(value, into).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def floats_at(typing: Any, address: Any) -> Any:
    """floats_at(address): a pointer to float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return pointer_to(types.float32)(types.int64), code


@njit(cache=True, nogil=True)
def copy(to: Whole, source: Whole, size: Whole) -> None:
    """Copy a row, by address."""
    d = np.int64(0)
    while d + WIDE <= size:
        copy8(to + 4 * d, source + 4 * d)
        d += WIDE
    while d < size:
        floats_at(to)[d] = floats_at(source)[d]
        d += 1


@njit(cache=True, nogil=True)
def next_block(
    rows: NDArray[np.float32],
    numbers: NDArray[np.int32],
    u: Whole,
    end: Whole,
    picked: NDArray[np.int64],
) -> tuple[Whole, Whole]:
    """Pick the next keys that have a row; return how many, and the key after the last.

    The rows of the block after this one are asked for.
    """
    size = np.int64(0)
    while u < end and size < picked.size:
        if numbers[u] >= 0:
            picked[size] = u
            size += 1
        u += 1
    width = 4 * rows.shape[1]
    base = np.int64(rows.ctypes.data)
    for later in range(u, min(u + picked.size, end)):
        if numbers[later] >= 0:
            start = base + np.int64(numbers[later]) * width
            for d in range(0, width, LINE):
                prefetch(start + d)
    return size, u


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(
    rows: NDArray[np.float32],
    numbers: NDArray[np.int32],
    first: Whole,
    end: Whole,
    sums: NDArray[np.float32],
    dim: Whole,
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
    width = 4 * rows.shape[1]
    base, sums_at = np.int64(rows.ctypes.data), np.int64(sums.ctypes.data)
    size_of = 4 * dim
    picked = np.empty(max(1, BLOCK // dim), np.int64)
    values = np.empty(picked.size * dim, np.float32)
    slots = np.empty(picked.size * dim, np.float32)
    totals = np.empty(picked.size * dim, np.float32)
    values_at, slots_at = np.int64(values.ctypes.data), np.int64(slots.ctypes.data)
    totals_at = np.int64(totals.ctypes.data)
    u = first
    while u < end:
        size, u = next_block(rows, numbers, u, end, picked)
        for q in range(size):
            start = base + np.int64(numbers[picked[q]]) * width
            copy(values_at + size_of * q, start, dim)
            copy(slots_at + size_of * q, start + size_of, dim)
            copy(totals_at + size_of * q, sums_at + size_of * picked[q], dim)
        if clip > np.float32(0.0):
            for q in range(size):
                total = np.float64(0.0)
                for d in range(q * dim, q * dim + dim):
                    wide = np.float64(totals[d])
                    total += wide * wide
                norm = np.sqrt(total)
                if norm > np.float64(clip):
                    scale = np.float32(np.float64(clip) / norm)
                    for d in range(q * dim, q * dim + dim):
                        totals[d] *= scale
        for i in range(size * dim):
            g = totals[i] + l2 * values[i]
            a = max(slots[i] * decay, floor) + g * g
            slots[i] = a
            values[i] -= rate * g / np.sqrt(a + epsilon)
        for q in range(size):
            start = base + np.int64(numbers[picked[q]]) * width
            copy(start, values_at + size_of * q, dim)
            copy(start + size_of, slots_at + size_of * q, dim)


@njit(cache=True, nogil=True, error_model="numpy")
def ftrl(
    rows: NDArray[np.float32],
    numbers: NDArray[np.int32],
    first: Whole,
    end: Whole,
    sums: NDArray[np.float32],
    dim: Whole,
    params: NDArray[np.float32],
) -> None:
    """FTRL-proximal; params = alpha, beta, l1, l2; slots = z [dim], then n [dim].

    Per coordinate m = n + g * g; z = z + (g - (root(m) - root(n)) / alpha * v); n = m; then
    v = 0 when |z| <= l1, else (±l1 - z) / ((beta + root(n)) / alpha + l2), ± the sign of z.
    """
    alpha, beta, l1, l2 = params[0], params[1], params[2], params[3]
    zero = np.float32(0.0)
    width = 4 * rows.shape[1]
    base, sums_at = np.int64(rows.ctypes.data), np.int64(sums.ctypes.data)
    size_of = 4 * dim
    picked = np.empty(max(1, BLOCK // dim), np.int64)
    values = np.empty(picked.size * dim, np.float32)
    zs = np.empty(picked.size * dim, np.float32)
    ns = np.empty(picked.size * dim, np.float32)
    totals = np.empty(picked.size * dim, np.float32)
    values_at, totals_at = np.int64(values.ctypes.data), np.int64(totals.ctypes.data)
    zs_at, ns_at = np.int64(zs.ctypes.data), np.int64(ns.ctypes.data)
    u = first
    while u < end:
        size, u = next_block(rows, numbers, u, end, picked)
        for q in range(size):
            start = base + np.int64(numbers[picked[q]]) * width
            copy(values_at + size_of * q, start, dim)
            copy(zs_at + size_of * q, start + size_of, dim)
            copy(ns_at + size_of * q, start + 2 * size_of, dim)
            copy(totals_at + size_of * q, sums_at + size_of * picked[q], dim)
        for i in range(size * dim):
            g = totals[i]
            n = ns[i]
            m = n + g * g
            root = np.sqrt(m)
            z = zs[i] + (g - (root - np.sqrt(n)) / alpha * values[i])
            zs[i] = z
            ns[i] = m
            edge = l1 if z > zero else -l1
            moved = (edge - z) / ((beta + root) / alpha + l2)
            values[i] = zero if abs(z) <= l1 else moved
        for q in range(size):
            start = base + np.int64(numbers[picked[q]]) * width
            copy(start, values_at + size_of * q, dim)
            copy(start + size_of, zs_at + size_of * q, dim)
            copy(start + 2 * size_of, ns_at + size_of * q, dim)
