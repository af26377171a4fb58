"""Kernels of one table: index, admission, initial rows, pooling. State is `TableArrays`.

Index: open addressing over `cells`, a power of two of them, each the number of an entry or -1.
A key's walk starts at `mix(key ^ seed) & (cells - 1)` and goes up by one; removal shifts later
members of the walk back, so there are no tombstones and a walk ends at the first -1. Every
64-bit pattern is a legal key: whether a cell is used is told by the cell, never by the key.

Entries are keys that are counted; an entry with `row_of >= 0` owns that row of `values` and
`slots`, one with -1 is a candidate, one with -2 is free. Numbers of entries and rows never
reach a caller's eyes, so their order decides nothing.

Initial values are a pure function of table seed, key and element (all arithmetic modulo 2^64):

    mix(x)  = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
              x ^ (x >> 31)
    h       = mix(mix(key ^ mix(seed)) + (element + 1) * 0x9E3779B97F4A7C15)
    normal  : (sum of the four 16-bit parts of h - 131070) * scale
    uniform : (2 * (h >> 40) + 1 - 2^24) * scale

in float64, rounded once to float32; `scale` is s / sqrt((2^32 - 1) / 3) for a standard deviation
s, and u / 2^24 for a bound u. The sum of four uniforms is a bell that ends at 3.46 deviations;
it needs neither logarithm nor cosine, so its bits are the same on every machine.

Golden values: mix(0x9E3779B97F4A7C15) = 0xE220A8397B1DCDAF, as splitmix64 has it. A table's seed
is the first 8 bytes, little-endian, of the SHA-256 of `<store seed>:<table name>`, so for seed 7
and `item` it is 0x489FDB74D9831277; there, the first three elements of key 1 are, as float32 bits,
0xBCA63994 0xBB6BD607 0x3C8A8551 under normal 0.01, 0xBCF3B86B 0xBCF95B0B 0x3D209FCE under
uniform 0.05.

Callers see to shapes, dtypes, bounds and capacity: kernels check nothing and allocate nothing.
Arrays that a kernel only reads come in marked read-only, so that each kernel has one signature.
"""

from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FREE: Final = -2
CANDIDATE: Final = -1

# Places in `TableArrays.tally`.
USED: Final = 0  # entries ever numbered
FREE_ENTRIES: Final = 1
USED_ROWS: Final = 2  # rows ever numbered
FREE_ROWS: Final = 3
ROWS: Final = 4
CANDIDATES: Final = 5
ADMITTED: Final = 6
TALLIES: Final = 7

ZEROS: Final = 0
NORMAL: Final = 1
UNIFORM: Final = 2

SUM: Final = 0
MEAN: Final = 1
SQRTN: Final = 2


class TableArrays(NamedTuple):
    """One table's memory. `changed` is the step that last touched an entry in any way."""

    cells: NDArray[np.int32]
    keys: NDArray[np.uint64]
    row_of: NDArray[np.int32]
    counts: NDArray[np.uint32]
    stamps: NDArray[np.int64]
    changed: NDArray[np.int64]
    free_entries: NDArray[np.int32]
    values: NDArray[np.float32]
    slots: NDArray[np.float32]
    free_rows: NDArray[np.int32]
    tally: NDArray[np.int64]


@njit(cache=True, nogil=True)
def mix(x: np.uint64) -> np.uint64:
    """Scramble 64 bits, one to one (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def find(arrays: TableArrays, seed: np.uint64, key: np.uint64) -> np.int64:
    """Return the key's entry, or -1."""
    mask = np.uint64(arrays.cells.size - 1)
    at = mix(key ^ seed) & mask
    while True:
        entry = arrays.cells[at]
        if entry < 0:
            return np.int64(-1)
        if arrays.keys[entry] == key:
            return np.int64(entry)
        at = (at + np.uint64(1)) & mask


@njit(cache=True, nogil=True)
def reindex(arrays: TableArrays, seed: np.uint64) -> None:
    """Fill `cells` (all -1) with every entry in use."""
    mask = np.uint64(arrays.cells.size - 1)
    for entry in range(arrays.tally[USED]):
        if arrays.row_of[entry] != FREE:
            at = mix(arrays.keys[entry] ^ seed) & mask
            while arrays.cells[at] >= 0:
                at = (at + np.uint64(1)) & mask
            arrays.cells[at] = entry


@njit(cache=True, nogil=True)
def take_entry(arrays: TableArrays, seed: np.uint64, key: np.uint64) -> np.int64:
    """Number an absent key and index it as a candidate. Needs room for one entry."""
    tally = arrays.tally
    if tally[FREE_ENTRIES] > 0:
        tally[FREE_ENTRIES] -= 1
        entry = np.int64(arrays.free_entries[tally[FREE_ENTRIES]])
    else:
        entry = np.int64(tally[USED])
        tally[USED] += 1
    arrays.keys[entry] = key
    arrays.row_of[entry] = CANDIDATE
    tally[CANDIDATES] += 1
    mask = np.uint64(arrays.cells.size - 1)
    at = mix(key ^ seed) & mask
    while arrays.cells[at] >= 0:
        at = (at + np.uint64(1)) & mask
    arrays.cells[at] = entry
    return entry


@njit(cache=True, nogil=True)
def take_row(arrays: TableArrays, entry: np.int64) -> np.int64:
    """Turn a candidate into the owner of a row. Needs room for one row; its values are junk."""
    tally = arrays.tally
    if tally[FREE_ROWS] > 0:
        tally[FREE_ROWS] -= 1
        row = np.int64(arrays.free_rows[tally[FREE_ROWS]])
    else:
        row = np.int64(tally[USED_ROWS])
        tally[USED_ROWS] += 1
    arrays.row_of[entry] = row
    tally[CANDIDATES] -= 1
    tally[ROWS] += 1
    return row


@njit(cache=True, nogil=True)
def initial(
    seed: np.uint64, key: np.uint64, kind: np.int64, scale: np.float64, out: NDArray[np.float32]
) -> None:
    """Write the first values of a key's row into `out` [dim]. Formula in the module docstring."""
    if kind == ZEROS:
        out[:] = np.float32(0.0)
        return
    base = mix(key ^ mix(seed))
    step = np.uint64(0)
    low = np.uint64(0xFFFF)
    for element in range(out.size):
        step += np.uint64(0x9E3779B97F4A7C15)
        h = mix(base + step)
        if kind == NORMAL:
            total = (
                np.int64(h & low)
                + np.int64((h >> np.uint64(16)) & low)
                + np.int64((h >> np.uint64(32)) & low)
                + np.int64(h >> np.uint64(48))
            )
            out[element] = np.float32(np.float64(total - np.int64(131070)) * scale)
        else:
            odd = np.int64(2) * np.int64(h >> np.uint64(40)) + np.int64(1) - np.int64(1 << 24)
            out[element] = np.float32(np.float64(odd) * scale)


@njit(cache=True, nogil=True)
def dedupe(
    ids: NDArray[np.uint64],
    cells: NDArray[np.int32],
    distinct: NDArray[np.uint64],
    occurrences: NDArray[np.int64],
    inverse: NDArray[np.int32],
) -> np.int64:
    """Number distinct ids in order of first occurrence; return how many there are.

    `ids` [n]; `cells` all -1, a power of two above n; outputs `distinct` [n], `occurrences` [n]
    (only the first u of each are written) and `inverse` [n].
    """
    mask = np.uint64(cells.size - 1)
    found = np.int64(0)
    for i in range(ids.size):
        key = ids[i]
        at = mix(key) & mask
        while True:
            number = np.int64(cells[at])
            if number < 0:
                cells[at] = found
                distinct[found] = key
                occurrences[found] = 1
                inverse[i] = found
                found += 1
                break
            if distinct[number] == key:
                occurrences[number] += 1
                inverse[i] = number
                break
            at = (at + np.uint64(1)) & mask
    return found


@njit(cache=True, nogil=True)
def touch(
    arrays: TableArrays,
    seed: np.uint64,
    keys: NDArray[np.uint64],
    occurrences: NDArray[np.int64],
    rows: NDArray[np.int32],
    clock: np.int64,
    step: np.int64,
    needed: np.int64,
    kind: np.int64,
    scale: np.float64,
    slot_start: NDArray[np.float32],
) -> None:
    """Count, stamp and where due admit distinct keys [u]; write their rows [u], -1 for none.

    Changes `arrays`; needs room for u entries, rows and cells. `slot_start` [slots * dim].
    """
    most = np.int64(0xFFFFFFFF)
    for u in range(keys.size):
        entry = find(arrays, seed, keys[u])
        seen = occurrences[u]
        if entry < 0:
            entry = take_entry(arrays, seed, keys[u])
        else:
            seen += np.int64(arrays.counts[entry])
        arrays.counts[entry] = np.uint32(min(seen, most))
        arrays.stamps[entry] = clock
        arrays.changed[entry] = step
        row = np.int64(arrays.row_of[entry])
        if row < 0 and seen >= needed:
            row = take_row(arrays, entry)
            arrays.tally[ADMITTED] += 1
            initial(seed, keys[u], kind, scale, arrays.values[row])
            arrays.slots[row, :] = slot_start
        rows[u] = row


@njit(cache=True, nogil=True)
def remove(arrays: TableArrays, seed: np.uint64, entries: NDArray[np.int64]) -> None:
    """Take distinct entries in use out of index, entries and rows."""
    tally = arrays.tally
    cells = arrays.cells
    mask = np.uint64(cells.size - 1)
    for i in range(entries.size):
        entry = entries[i]
        hole = mix(arrays.keys[entry] ^ seed) & mask
        while cells[hole] != entry:
            hole = (hole + np.uint64(1)) & mask
        at = hole
        while True:
            at = (at + np.uint64(1)) & mask
            other = cells[at]
            if other < 0:
                break
            home = mix(arrays.keys[other] ^ seed) & mask
            # `other` may move into the hole unless its walk starts after the hole.
            if ((at - home) & mask) >= ((at - hole) & mask):
                cells[hole] = other
                hole = at
        cells[hole] = -1
        row = arrays.row_of[entry]
        if row >= 0:
            arrays.free_rows[tally[FREE_ROWS]] = row
            tally[FREE_ROWS] += 1
            tally[ROWS] -= 1
        else:
            tally[CANDIDATES] -= 1
        arrays.row_of[entry] = FREE
        arrays.free_entries[tally[FREE_ENTRIES]] = entry
        tally[FREE_ENTRIES] += 1


@njit(cache=True, nogil=True)
def locate(
    arrays: TableArrays, seed: np.uint64, keys: NDArray[np.uint64], entries: NDArray[np.int64]
) -> None:
    """Write the entry of each key [n], -1 for none. Keys may repeat."""
    for i in range(keys.size):
        entries[i] = find(arrays, seed, keys[i])


@njit(cache=True, nogil=True)
def insert(
    arrays: TableArrays,
    seed: np.uint64,
    keys: NDArray[np.uint64],
    with_rows: bool,
    entries: NDArray[np.int64],
) -> np.int64:
    """Enter distinct keys [n], all with a row or all without; write their entries.

    Returns -1, or the position of the first key that was there before (nothing after it is done).
    Counts, stamps, steps, values and slots are the caller's to fill.
    """
    for i in range(keys.size):
        if find(arrays, seed, keys[i]) >= 0:
            return np.int64(i)
        entries[i] = take_entry(arrays, seed, keys[i])
        if with_rows:
            take_row(arrays, entries[i])
    return np.int64(-1)


@njit(cache=True, nogil=True, error_model="numpy")
def divisor(
    start: np.int64, stop: np.int64, weights: NDArray[np.float32], weighted: bool, mode: np.int64
) -> np.float32:
    """Return what a pooled sum is divided by: 1, sum of w, or root of the sum of w squared.

    A sum that is zero (nothing to pool, or weights that cancel) is given back as 0.
    """
    one = np.float32(1.0)
    if mode == SUM:
        return one
    total = np.float32(0.0)
    for i in range(start, stop):
        w = weights[i] if weighted else one
        total += w if mode == MEAN else w * w
    return np.float32(np.sqrt(total)) if mode == SQRTN else total


@njit(cache=True, nogil=True, error_model="numpy")
def pool(
    values: NDArray[np.float32],
    rows: NDArray[np.int32],
    inverse: NDArray[np.int32],
    splits: NDArray[np.int64],
    weights: NDArray[np.float32],
    weighted: bool,
    mode: np.int64,
    out: NDArray[np.float32],
) -> None:
    """Write pooled rows into `out` [>= B, dim]; the rest of it becomes zero.

    Sample b reads ids splits[b]..splits[b+1], in that order: sum of w * row in float32, then
    divided by `divisor`. A key without a row reads as zeros and counts in the divisor.
    """
    zero = np.float32(0.0)
    one = np.float32(1.0)
    size = splits.size - 1
    dim = values.shape[1]
    for b in range(out.shape[0]):
        for d in range(dim):
            out[b, d] = zero
        if b >= size:
            continue
        below = divisor(splits[b], splits[b + 1], weights, weighted, mode)
        if below == zero:
            continue
        for i in range(splits[b], splits[b + 1]):
            row = rows[inverse[i]]
            if row >= 0:
                w = weights[i] if weighted else one
                for d in range(dim):
                    out[b, d] += w * values[row, d]
        if mode != SUM:
            for d in range(dim):
                out[b, d] /= below


@njit(cache=True, nogil=True, error_model="numpy")
def pool_back(
    rows: NDArray[np.int32],
    inverse: NDArray[np.int32],
    splits: NDArray[np.int64],
    weights: NDArray[np.float32],
    weighted: bool,
    mode: np.int64,
    grads: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    """Add gradients [>= B, dim] of pooled rows to `sums` [u, dim], in order of occurrence.

    Each occurrence adds w * (gradient / divisor), as float32. Keys without a row add nothing.
    """
    one = np.float32(1.0)
    for b in range(splits.size - 1):
        below = divisor(splits[b], splits[b + 1], weights, weighted, mode)
        if below == np.float32(0.0):
            continue
        for i in range(splits[b], splits[b + 1]):
            u = inverse[i]
            if rows[u] >= 0:
                w = weights[i] if weighted else one
                for d in range(sums.shape[1]):
                    sums[u, d] += w * (grads[b, d] / below)


@njit(cache=True, nogil=True)
def place(
    values: NDArray[np.float32],
    rows: NDArray[np.int32],
    inverse: NDArray[np.int32],
    splits: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """Write each sample's rows in order into `out` [>= B, L, dim]; the rest becomes zero."""
    size = splits.size - 1
    for b in range(out.shape[0]):
        out[b] = np.float32(0.0)
        if b >= size:
            continue
        for i in range(splits[b], splits[b + 1]):
            row = rows[inverse[i]]
            if row >= 0:
                out[b, i - splits[b]] = values[row]


@njit(cache=True, nogil=True)
def place_back(
    rows: NDArray[np.int32],
    inverse: NDArray[np.int32],
    splits: NDArray[np.int64],
    grads: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    """Add gradients [>= B, L, dim] of sequences to `sums` [u, dim], in order of occurrence."""
    for b in range(splits.size - 1):
        for i in range(splits[b], splits[b + 1]):
            u = inverse[i]
            if rows[u] >= 0:
                for d in range(sums.shape[1]):
                    sums[u, d] += grads[b, i - splits[b], d]


@njit(cache=True, nogil=True)
def first_wild(rows: NDArray[np.int32], sums: NDArray[np.float32], most: np.float32) -> np.int64:
    """Return the first u with a row whose sums [u, dim] are not all within ±most, or -1."""
    for u in range(rows.size):
        if rows[u] >= 0:
            for d in range(sums.shape[1]):
                if not abs(sums[u, d]) <= most:
                    return np.int64(u)
    return np.int64(-1)
