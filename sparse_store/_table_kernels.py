"""Kernels of one table: index, admission, initial rows, pooling, sums. State is `TableArrays`.

A table is cut into shards by `shard_of`, a range of each key's hash. A shard has an index, entries
and rows of its own, so that one thread per shard needs no lock; where a key lies decides nothing.

Index: groups of eight cells, one cache line each. A cell is 0 when empty, else the upper half of
its key's hash `mix(key ^ seed)`, and the number of its entry plus one in the lower 32 bits. A
key's walk starts at its home, `upper half * groups >> 32`, and goes on group by group while they
are full; it ends at the first group that has room. Homes rise with hashes, so growth is a stream:
cells move in their order from `old` to `cells`, some at a time. While it lasts, keys whose home
in `old` is below `tally[MOVED]` are in `cells`, all others in `old`. After the last home lie as
many groups again, for walks that run over; untouched they cost nothing. Removal moves a member of
a later group back into the hole when its walk passed there, so walks never grow stale. Every
64-bit pattern is a legal key.

Entries are records of counted keys; one with `row >= 0` owns that row of `rows` (values, then
slots), one with -1 is a candidate, one with -2 is free. Numbers of entries and rows never reach a
caller's eyes, so their order decides nothing.

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

Memory decides the speed: a batch goes through in blocks of 128 keys, each in passes that first
ask for the cache lines that the next pass needs.

Callers see to shapes, dtypes, bounds and capacity: kernels check nothing, and allocate nothing but
a block. A batch's inputs come as rows of `jobs` (`JOB_*`), with the addresses of their arrays, so
that one call serves all inputs of a table; `faces` [inputs, 2] has the address of each input's
array of rows or gradients, and how many samples that has. Whoever makes a job keeps its arrays.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, njit, types
from numba.core import cgutils
from numpy.typing import NDArray

intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
pointer_to: Any = types.CPointer
function_in: Any = cgutils.get_or_insert_function

Whole = int | np.int64  # what the type checker is told of a number that is int64 when compiled

FREE: Final = -2
CANDIDATE: Final = -1

# Places in `TableArrays.tally`.
USED: Final = 0  # one above the highest entry ever numbered
FREE_ENTRIES: Final = 1
USED_ROWS: Final = 2  # one above the highest row ever numbered
FREE_ROWS: Final = 3
ROWS: Final = 4
CANDIDATES: Final = 5
ADMITTED: Final = 6
FIRST: Final = 7  # the shard's lowest entry
FIRST_ROW: Final = 8
GROUPS: Final = 9  # homes in `cells`
OLD_GROUPS: Final = 10  # homes in `old`, 0 when nothing moves
MOVED: Final = 11  # groups of `old` that are in `cells` already, ALL_MOVED when nothing moves
TALLIES: Final = 12
ALL_MOVED: Final = 1 << 40

# Columns of a job: one input of a batch.
JOB_IDS: Final = 0  # address of uint64 [n]
JOB_COUNT: Final = 1  # n
JOB_SPLITS: Final = 2  # address of int64 [B + 1]
JOB_SAMPLES: Final = 3  # B
JOB_WEIGHTS: Final = 4  # address of float32 [n], 0 for ones
JOB_MODE: Final = 5
JOB_LENGTH: Final = 6  # length of a sequence, -1 to pool
JOB_START: Final = 7  # where its ids begin among those of the table's inputs
JOB_PLAIN: Final = 8  # 1: one id in every sample, without weights
JOB_FIELDS: Final = 9

ZEROS: Final = 0
NORMAL: Final = 1
UNIFORM: Final = 2

SUM: Final = 0
MEAN: Final = 1
SQRTN: Final = 2

BLOCK: Final = 128
AHEAD: Final = 24  # rows asked for before they are read
LINE: Final = 16  # float32 in a cache line
WIDE: Final = 8  # float32 in a vector
CELLS: Final = 8  # in a group
GROUP_BYTES: Final = 64
RECORD_BYTES: Final = 32
LARGEST: Final = np.float32(3.4028234663852886e38)  # that is finite
ROW_PLACE: Final = 7  # of `row` in a record, by 4 bytes


class TableArrays(NamedTuple):
    """One shard's memory; `records`, `rows` and the lists of free ones are shared by all shards.

    A record has key (uint64), stamp, changed (int64), count (uint32) and row (int32); `changed` is
    the step that last touched it in any way. Free entries stand in `free_entries` from the
    shard's first on, free rows likewise.
    """

    cells: NDArray[np.uint64]
    old: NDArray[np.uint64]
    records: NDArray[Any]
    rows: NDArray[np.float32]
    free_entries: NDArray[np.int32]
    free_rows: NDArray[np.int32]
    tally: NDArray[np.int64]


# ---- what the language has no words for; places in memory are addresses, int64, so that helpers
# ---- pass no arrays: each array passed on costs a count of references, several times a key


def _wide(builder: Any, address: Any, kind: Any, lanes: int) -> Any:
    return builder.inttoptr(address, ir.VectorType(kind, lanes).as_pointer())


def _load(builder: Any, pointer: Any, align: int) -> Any:
    loaded = builder.load(pointer)
    loaded.align = align
    return loaded


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = ir.VectorType(scalar.type, lanes)
    none = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(none, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, none, zeros)


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@intrinsic
def words_at(typing: Any, address: Any) -> Any:
    """words_at(address): a pointer to uint64."""
    return pointer_to(types.uint64)(types.int64), _pointer


@intrinsic
def numbers_at(typing: Any, address: Any) -> Any:
    """numbers_at(address): a pointer to int64."""
    return pointer_to(types.int64)(types.int64), _pointer


@intrinsic
def halves_at(typing: Any, address: Any) -> Any:
    """halves_at(address): a pointer to int32."""
    return pointer_to(types.int32)(types.int64), _pointer


@intrinsic
def floats_at(typing: Any, address: Any) -> Any:
    """floats_at(address): a pointer to float32."""
    return pointer_to(types.float32)(types.int64), _pointer


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
def matching(typing: Any, group: Any, half: Any) -> Any:
    """matching(group, half): bit i is set when cell i of a group is of a hash's upper half."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        cells = _load(builder, _wide(builder, args[0], word, CELLS), 8)
        halves = builder.lshr(cells, ir.Constant(cells.type, [32] * CELLS))
        same = builder.icmp_unsigned("==", halves, _splat(builder, args[1], CELLS))
        used = builder.icmp_unsigned("!=", cells, ir.Constant(cells.type, [0] * CELLS))
        return builder.zext(builder.bitcast(builder.and_(same, used), ir.IntType(CELLS)), word)

    return types.uint64(types.int64, types.uint64), code


@intrinsic
def vacant(typing: Any, group: Any) -> Any:
    """vacant(group): bit i is set when cell i of a group is empty."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        cells = _load(builder, _wide(builder, args[0], word, CELLS), 8)
        empty = builder.icmp_unsigned("==", cells, ir.Constant(cells.type, [0] * CELLS))
        return builder.zext(builder.bitcast(empty, ir.IntType(CELLS)), word)

    return types.uint64(types.int64), code


@intrinsic
def lowest(typing: Any, bits: Any) -> Any:
    """lowest(bits): the place of the lowest set bit, of bits that are not 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), code


@intrinsic
def copy8(typing: Any, to: Any, source: Any) -> Any:
    """copy8(to, source): copy eight floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, value = (_wide(builder, address, ir.FloatType(), WIDE) for address in args)
        builder.store(_load(builder, value, 4), into).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def add8(typing: Any, to: Any, weight: Any, source: Any) -> Any:
    """add8(to, weight, source): to[i] += weight * source[i], for eight floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = _wide(builder, args[0], ir.FloatType(), WIDE)
        value = _load(builder, _wide(builder, args[2], ir.FloatType(), WIDE), 4)
        product = builder.fmul(_splat(builder, args[1], WIDE), value)
        builder.store(builder.fadd(_load(builder, into, 4), product), into).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), code


@intrinsic
def begin8(typing: Any, to: Any, source: Any) -> Any:
    """begin8(to, source): to[i] = 0 + source[i], for eight floats; -0 becomes 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, value = (_wide(builder, address, ir.FloatType(), WIDE) for address in args)
        value = _load(builder, value, 4)
        zero = ir.Constant(value.type, [0.0] * WIDE)
        builder.store(builder.fadd(zero, value), into).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def divide8(typing: Any, to: Any, source: Any, below: Any) -> Any:
    """divide8(to, source, below): to[i] = source[i] / below, for eight floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(builder, _wide(builder, args[1], ir.FloatType(), WIDE), 4)
        quotient = builder.fdiv(value, _splat(builder, args[2], WIDE))
        builder.store(quotient, _wide(builder, args[0], ir.FloatType(), WIDE)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), code


@intrinsic
def share8(typing: Any, to: Any, weight: Any, source: Any, below: Any) -> Any:
    """share8(to, weight, source, below): to[i] += weight * (source[i] / below), for eight."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = _wide(builder, args[0], ir.FloatType(), WIDE)
        value = _load(builder, _wide(builder, args[2], ir.FloatType(), WIDE), 4)
        quotient = builder.fdiv(value, _splat(builder, args[3], WIDE))
        product = builder.fmul(_splat(builder, args[1], WIDE), quotient)
        builder.store(builder.fadd(_load(builder, into, 4), product), into).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.float32), code


@intrinsic
def tame8(typing: Any, source: Any, most: Any) -> Any:
    """tame8(source, most): whether eight floats are all within ±most; NaN is not."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(builder, _wide(builder, args[0], ir.FloatType(), WIDE), 4)
        kind = ir.FunctionType(value.type, [value.type])
        size = function_in(builder.module, kind, f"llvm.fabs.v{WIDE}f32")
        most = _splat(builder, args[1], WIDE)
        within = builder.fcmp_ordered("<=", builder.call(size, [value]), most)
        every = ir.IntType(WIDE)((1 << WIDE) - 1)
        return builder.icmp_unsigned("==", builder.bitcast(within, ir.IntType(WIDE)), every)

    return types.boolean(types.int64, types.float32), code


# ---- rows of floats, by address; sizes in floats


@njit(cache=True, nogil=True)
def ask(source: Whole, size: Whole) -> None:
    """Prefetch a row."""
    for d in range(0, size, LINE):
        prefetch(source + 4 * d)


@njit(cache=True, nogil=True)
def clear(to: Whole, size: Whole) -> None:
    """Set a row to zero."""
    for d in range(size):
        floats_at(to)[d] = np.float32(0.0)


@njit(cache=True, nogil=True)
def copy(to: Whole, source: Whole, size: Whole) -> None:
    """Copy a row."""
    d = np.int64(0)
    while d + WIDE <= size:
        copy8(to + 4 * d, source + 4 * d)
        d += WIDE
    while d < size:
        floats_at(to)[d] = floats_at(source)[d]
        d += 1


@njit(cache=True, nogil=True)
def begin(to: Whole, source: Whole, size: Whole) -> None:
    """Set a row to 0 + source: what `clear` and `add` with a weight of one make of it."""
    d = np.int64(0)
    while d + WIDE <= size:
        begin8(to + 4 * d, source + 4 * d)
        d += WIDE
    while d < size:
        floats_at(to)[d] = np.float32(0.0) + floats_at(source)[d]
        d += 1


@njit(cache=True, nogil=True)
def add(to: Whole, weight: np.float32, source: Whole, size: Whole) -> None:
    """Add weight * source to a row."""
    d = np.int64(0)
    while d + WIDE <= size:
        add8(to + 4 * d, weight, source + 4 * d)
        d += WIDE
    while d < size:
        floats_at(to)[d] = floats_at(to)[d] + weight * floats_at(source)[d]
        d += 1


@njit(cache=True, nogil=True, error_model="numpy")
def divide(to: Whole, source: Whole, size: Whole, below: np.float32) -> None:
    """Set a row to source / below."""
    d = np.int64(0)
    while d + WIDE <= size:
        divide8(to + 4 * d, source + 4 * d, below)
        d += WIDE
    while d < size:
        floats_at(to)[d] = floats_at(source)[d] / below
        d += 1


@njit(cache=True, nogil=True, error_model="numpy")
def add_share(to: Whole, weight: np.float32, source: Whole, size: Whole, below: np.float32) -> None:
    """Add weight * (source / below) to a row."""
    d = np.int64(0)
    while d + WIDE <= size:
        share8(to + 4 * d, weight, source + 4 * d, below)
        d += WIDE
    while d < size:
        floats_at(to)[d] = floats_at(to)[d] + weight * (floats_at(source)[d] / below)
        d += 1


@njit(cache=True, nogil=True)
def is_tame(source: Whole, size: Whole, most: np.float32) -> bool:
    """Say whether a row is all within ±most."""
    tame = True
    d = np.int64(0)
    while d + WIDE <= size:
        tame = tame and tame8(source + 4 * d, most)
        d += WIDE
    while d < size:
        tame = bool(tame and abs(floats_at(source)[d]) <= most)
        d += 1
    return tame


# ---- index


@njit(cache=True, nogil=True)
def mix(x: np.uint64) -> np.uint64:
    """Scramble 64 bits, one to one (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def shard_of(h: np.uint64, shards: Whole) -> Whole:
    """Return the shard of a key whose hash is h."""
    return np.int64(((h & np.uint64(0xFFFFFFFF)) * np.uint64(shards)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def home_of(half: np.uint64, groups: Whole) -> Whole:
    """Return the group at which a walk begins, of a hash's upper half."""
    return np.int64((half * np.uint64(groups)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def entry_at(cell: Whole) -> Whole:
    """Return the entry that a cell names, -1 for an empty one."""
    return np.int64(words_at(cell)[0] & np.uint64(0xFFFFFFFF)) - 1


@njit(cache=True, nogil=True)
def seek(cells: Whole, groups: Whole, records: Whole, half: np.uint64, key: np.uint64) -> Whole:
    """Return the cell of a key, or -1 - (a cell where it can be entered); both by address."""
    at = cells + home_of(half, groups) * GROUP_BYTES
    while True:
        bits = matching(at, half)
        while bits != np.uint64(0):
            cell: Whole = at + 8 * lowest(bits)
            if words_at(records + entry_at(cell) * RECORD_BYTES)[0] == key:
                return cell
            bits &= bits - np.uint64(1)
        bits = vacant(at)
        if bits != np.uint64(0):
            free: Whole = -1 - (at + 8 * lowest(bits))
            return free
        at += GROUP_BYTES


@njit(cache=True, nogil=True)
def home_cells(
    cells: Whole,
    old: Whole,
    groups: Whole,
    old_groups: Whole,
    moved: Whole,
    h: np.uint64,
) -> Whole:
    """Return the group at which a walk begins, by address."""
    half = h >> np.uint64(32)
    home = home_of(half, old_groups)
    if home >= moved:
        return old + home * GROUP_BYTES
    return cells + home_of(half, groups) * GROUP_BYTES


@njit(cache=True, nogil=True)
def foresee(records: Whole, group: Whole, h: np.uint64) -> None:
    """Prefetch the record that a walk from this group most likely ends at."""
    bits = matching(group, h >> np.uint64(32))
    if bits != np.uint64(0):
        prefetch(records + entry_at(group + 8 * lowest(bits)) * RECORD_BYTES)


@njit(cache=True, nogil=True)
def find(
    cells: Whole,
    old: Whole,
    records: Whole,
    groups: Whole,
    old_groups: Whole,
    moved: Whole,
    h: np.uint64,
    key: np.uint64,
) -> Whole:
    """Return a key's cell, or -1 - (a cell where it can be entered); both by address."""
    half = h >> np.uint64(32)
    if home_of(half, old_groups) >= moved:
        return seek(old, old_groups, records, half, key)
    return seek(cells, groups, records, half, key)


@njit(cache=True, nogil=True)
def take_entry(
    tally: Whole,
    free_entries: Whole,
    records: Whole,
    cell: Whole,
    h: np.uint64,
    key: np.uint64,
) -> Whole:
    """Number an absent key as a candidate, and index it. Needs room for one entry."""
    numbers = numbers_at(tally)
    numbers[CANDIDATES] = numbers[CANDIDATES] + 1
    if numbers[FREE_ENTRIES] > 0:
        numbers[FREE_ENTRIES] = numbers[FREE_ENTRIES] - 1
        entry = np.int64(halves_at(free_entries)[numbers[FIRST] + numbers[FREE_ENTRIES]])
    else:
        entry = numbers[USED]
        numbers[USED] = entry + 1
    words_at(cell)[0] = (h & ~np.uint64(0xFFFFFFFF)) | np.uint64(entry + 1)
    words_at(records + entry * RECORD_BYTES)[0] = key
    halves_at(records + entry * RECORD_BYTES)[ROW_PLACE] = np.int32(CANDIDATE)
    return entry


@njit(cache=True, nogil=True)
def take_row(tally: Whole, free_rows: Whole, records: Whole, entry: Whole) -> Whole:
    """Turn a candidate into the owner of a row. Needs room for one row; its values are junk."""
    numbers = numbers_at(tally)
    if numbers[FREE_ROWS] > 0:
        numbers[FREE_ROWS] = numbers[FREE_ROWS] - 1
        row = np.int64(halves_at(free_rows)[numbers[FIRST_ROW] + numbers[FREE_ROWS]])
    else:
        row = numbers[USED_ROWS]
        numbers[USED_ROWS] = row + 1
    halves_at(records + entry * RECORD_BYTES)[ROW_PLACE] = np.int32(row)
    numbers[CANDIDATES] = numbers[CANDIDATES] - 1
    numbers[ROWS] = numbers[ROWS] + 1
    return row


@njit(cache=True, nogil=True)
def unindex(cells: Whole, groups: Whole, half: np.uint64, entry: Whole) -> None:
    """Empty the cell of an entry that is there; later members of walks through it move back."""
    wanted = (half << np.uint64(32)) | np.uint64(entry + 1)
    words = words_at(cells)
    group: Whole = home_of(half, groups)
    hole: Whole = np.int64(-1)
    while hole < 0:
        for cell in range(group * CELLS, group * CELLS + CELLS):
            if words[cell] == wanted:
                hole = cell
        group += 1
    group -= 1
    full = vacant(cells + group * GROUP_BYTES) == np.uint64(0)
    words[hole] = np.uint64(0)
    later = group
    while full:
        # Walks that ran over this full group may have members further on.
        later += 1
        full = vacant(cells + later * GROUP_BYTES) == np.uint64(0)
        for cell in range(later * CELLS, later * CELLS + CELLS):
            value = words[cell]
            if value != np.uint64(0) and home_of(value >> np.uint64(32), groups) <= group:
                words[hole] = value
                words[cell] = np.uint64(0)
                hole, group = cell, later
                break


@njit(cache=True, nogil=True)
def migrate(arrays: TableArrays, most: Whole) -> None:
    """Move about that many groups from `old` to `cells`, up to where no walk passes."""
    tally = arrays.tally
    old, cells = np.int64(arrays.old.ctypes.data), np.int64(arrays.cells.ctypes.data)
    groups, old_groups = tally[GROUPS], tally[OLD_GROUPS]
    group = tally[MOVED]
    stop = min(group + most, old_groups)
    while True:
        words = words_at(old + group * GROUP_BYTES)
        for cell in range(CELLS):
            value = words[cell]
            if value != np.uint64(0):
                at = cells + home_of(value >> np.uint64(32), groups) * GROUP_BYTES
                bits = vacant(at)
                while bits == np.uint64(0):
                    at += GROUP_BYTES
                    bits = vacant(at)
                words_at(at)[lowest(bits)] = value
        full = vacant(old + group * GROUP_BYTES) == np.uint64(0)
        group += 1
        if group >= stop and not full:
            break
    if group >= old_groups:
        tally[OLD_GROUPS] = 0
        tally[MOVED] = ALL_MOVED
    else:
        tally[MOVED] = group


@njit(cache=True, nogil=True)
def remove(arrays: TableArrays, seed: np.uint64, entries: NDArray[np.int64]) -> None:
    """Take distinct entries of the shard, in use, out of index, entries and rows."""
    cells, old = np.int64(arrays.cells.ctypes.data), np.int64(arrays.old.ctypes.data)
    records, tally = np.int64(arrays.records.ctypes.data), arrays.tally
    groups, old_groups, moved = tally[GROUPS], tally[OLD_GROUPS], tally[MOVED]
    free_entries, free_rows = arrays.free_entries, arrays.free_rows
    for low in range(0, entries.size, BLOCK):
        high = min(low + BLOCK, entries.size)
        for i in range(low, high):
            prefetch(records + entries[i] * RECORD_BYTES)
        for i in range(low, high):
            h = mix(words_at(records + entries[i] * RECORD_BYTES)[0] ^ seed)
            prefetch(home_cells(cells, old, groups, old_groups, moved, h))
        for i in range(low, high):
            entry = entries[i]
            half = mix(words_at(records + entry * RECORD_BYTES)[0] ^ seed) >> np.uint64(32)
            if home_of(half, old_groups) >= moved:
                unindex(old, old_groups, half, entry)
            else:
                unindex(cells, groups, half, entry)
            row = halves_at(records + entry * RECORD_BYTES)[ROW_PLACE]
            if row >= 0:
                free_rows[tally[FIRST_ROW] + tally[FREE_ROWS]] = row
                tally[FREE_ROWS] += 1
                tally[ROWS] -= 1
            else:
                tally[CANDIDATES] -= 1
            halves_at(records + entry * RECORD_BYTES)[ROW_PLACE] = np.int32(FREE)
            free_entries[tally[FIRST] + tally[FREE_ENTRIES]] = entry
            tally[FREE_ENTRIES] += 1


@njit(cache=True, nogil=True)
def locate(
    arrays: TableArrays,
    seed: np.uint64,
    shard: Whole,
    shards: Whole,
    keys: NDArray[np.uint64],
    entries: NDArray[np.int64],
) -> None:
    """Write the entry, -1 for none, of each key [n] of the shard. Keys may repeat."""
    cells, old = np.int64(arrays.cells.ctypes.data), np.int64(arrays.old.ctypes.data)
    records, tally = np.int64(arrays.records.ctypes.data), arrays.tally
    groups, old_groups, moved = tally[GROUPS], tally[OLD_GROUPS], tally[MOVED]
    hashes, places = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    homes = np.empty(BLOCK, np.int64)
    for low in range(0, keys.size, BLOCK):
        mine = 0
        for i in range(low, min(low + BLOCK, keys.size)):
            h = mix(keys[i] ^ seed)
            hashes[mine], places[mine] = h, i
            mine += 1 if shard_of(h, shards) == shard else 0
        for q in range(mine):
            homes[q] = home_cells(cells, old, groups, old_groups, moved, hashes[q])
            prefetch(homes[q])
        for q in range(mine):
            foresee(records, homes[q], hashes[q])
        for q in range(mine):
            h, key = hashes[q], keys[places[q]]
            cell = find(cells, old, records, groups, old_groups, moved, h, key)
            entries[places[q]] = entry_at(cell) if cell >= 0 else -1


@njit(cache=True, nogil=True)
def insert(
    arrays: TableArrays,
    seed: np.uint64,
    shard: Whole,
    shards: Whole,
    keys: NDArray[np.uint64],
    with_rows: bool,
    entries: NDArray[np.int64],
) -> Whole:
    """Enter those keys [n] that are the shard's, with rows or without; write their entries.

    Returns -1, or the position of the first key that was there before (nothing after it is done).
    Counts, stamps, steps, values and slots are the caller's to fill.
    """
    cells, old = np.int64(arrays.cells.ctypes.data), np.int64(arrays.old.ctypes.data)
    records, tally = np.int64(arrays.records.ctypes.data), arrays.tally
    groups, old_groups, moved = tally[GROUPS], tally[OLD_GROUPS], tally[MOVED]
    numbers = np.int64(tally.ctypes.data)
    free_entries = np.int64(arrays.free_entries.ctypes.data)
    free_rows = np.int64(arrays.free_rows.ctypes.data)
    for low in range(0, keys.size, BLOCK):
        high = min(low + BLOCK, keys.size)
        for i in range(low, high):
            prefetch(home_cells(cells, old, groups, old_groups, moved, mix(keys[i] ^ seed)))
        for i in range(low, high):
            h = mix(keys[i] ^ seed)
            if shard_of(h, shards) == shard:
                cell = find(cells, old, records, groups, old_groups, moved, h, keys[i])
                if cell >= 0:
                    return np.int64(i)
                entry = take_entry(numbers, free_entries, records, -1 - cell, h, keys[i])
                entries[i] = entry
                if with_rows:
                    take_row(numbers, free_rows, records, entry)
    return np.int64(-1)


@njit(cache=True, nogil=True)
def select(
    arrays: TableArrays,
    with_rows: bool,
    since: Whole,
    latest: Whole,
    entries: NDArray[np.int64],
) -> Whole:
    """Write the rows, or candidates, changed after `since` and stamped `latest` or before."""
    records = arrays.records
    found = 0
    for entry in range(arrays.tally[FIRST], arrays.tally[USED]):
        record = records[entry]
        kind = record.row >= 0 if with_rows else record.row == CANDIDATE
        if kind and record.changed > since and record.stamp <= latest:
            entries[found] = entry
            found += 1
    return np.int64(found)


@njit(cache=True, nogil=True)
def copy_out(
    arrays: TableArrays,
    entries: NDArray[np.int64],
    keys: NDArray[np.uint64],
    counts: NDArray[np.uint32],
    stamps: NDArray[np.int64],
    changed: NDArray[np.int64],
    values: NDArray[np.float32],
    slots: NDArray[np.float32],
) -> None:
    """Copy entries [n] into columns [n]; values and slots [n, k] too, of those that have a row."""
    records = arrays.records
    base, width = np.int64(arrays.rows.ctypes.data), 4 * arrays.rows.shape[1]
    dim, rest = values.shape[1], slots.shape[1]
    at, after = np.int64(values.ctypes.data), np.int64(slots.ctypes.data)
    for low in range(0, entries.size, BLOCK):
        high = min(low + BLOCK, entries.size)
        for i in range(low, high):
            prefetch(np.int64(records.ctypes.data) + entries[i] * RECORD_BYTES)
        for i in range(low, high):
            if dim > 0:
                ask(base + np.int64(records[entries[i]].row) * width, dim + rest)
        for i in range(low, high):
            entry = entries[i]
            keys[i] = records[entry].key
            counts[i] = records[entry].count
            stamps[i] = records[entry].stamp
            changed[i] = records[entry].changed
            if dim > 0:
                row = base + np.int64(records[entry].row) * width
                copy(at + 4 * dim * i, row, dim)
                copy(after + 4 * rest * i, row + 4 * dim, rest)


@njit(cache=True, nogil=True)
def are_finite(floats: NDArray[np.float32]) -> bool:
    """Say whether an array [n, k] has neither NaN nor infinity."""
    return is_tame(np.int64(floats.ctypes.data), np.int64(floats.size), LARGEST)


# ---- a step


@njit(cache=True, nogil=True)
def initial(
    seed: np.uint64, key: np.uint64, kind: Whole, scale: np.float64, out: NDArray[np.float32]
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
def check(jobs: NDArray[np.int64]) -> Whole:
    """Fill `JOB_PLAIN`; return -1, or the first job whose splits or lengths are not right."""
    for j in range(jobs.shape[0]):
        samples, length = jobs[j, JOB_SAMPLES], jobs[j, JOB_LENGTH]
        splits = numbers_at(jobs[j, JOB_SPLITS])
        good = splits[0] == 0 and splits[samples] == jobs[j, JOB_COUNT]
        plain = jobs[j, JOB_COUNT] == samples and length < 0 and jobs[j, JOB_WEIGHTS] == 0
        for b in range(samples):
            size = splits[b + 1] - splits[b]
            good = good and size >= 0 and (length < 0 or size <= length)
            plain = plain and size == 1
        if not good:
            return np.int64(j)
        jobs[j, JOB_PLAIN] = 1 if plain else 0
    return np.int64(-1)


@njit(cache=True, nogil=True)
def dedupe(
    jobs: NDArray[np.int64],
    seed: np.uint64,
    shard: Whole,
    shards: Whole,
    first: Whole,
    scratch: NDArray[np.uint64],
    generation: np.uint64,
    keys: NDArray[np.uint64],
    inverse: NDArray[np.int32],
) -> Whole:
    """Number the shard's distinct ids from `first` on, by first occurrence; return the end.

    Writes key and occurrences into `keys` [:, 2] at those numbers, and `inverse` at the place of
    each of its ids. `scratch` is a power of two of cells above their number; a cell of another
    `generation` (1 to 65,535) is empty: generation, 16 bits of the hash, number, from the top.
    """
    mask = np.uint64(scratch.size - 1)
    cells = np.int64(scratch.ctypes.data)
    found = first
    lane = np.empty(BLOCK, np.uint64)
    places = np.empty(BLOCK, np.int64)
    for j in range(jobs.shape[0]):
        size = jobs[j, JOB_COUNT]
        start = jobs[j, JOB_START]
        ids = words_at(jobs[j, JOB_IDS])
        for low in range(0, size, BLOCK):
            mine = 0
            for i in range(low, min(low + BLOCK, size)):
                h = mix(ids[i] ^ seed)
                lane[mine], places[mine] = h, i
                mine += 1 if shard_of(h, shards) == shard else 0
                prefetch(cells + 8 * np.int64((h >> np.uint64(32)) & mask))
            for q in range(mine):
                h = lane[q]
                i = places[q]
                key = ids[i]
                at = (h >> np.uint64(32)) & mask
                mark = (generation << np.uint64(48)) | ((h & np.uint64(0xFFFF)) << np.uint64(32))
                while True:
                    cell = scratch[at]
                    if cell >> np.uint64(48) != generation:
                        scratch[at] = mark | np.uint64(found)
                        keys[found, 0] = key
                        keys[found, 1] = np.uint64(1)
                        inverse[start + i] = found
                        found += 1
                        break
                    if cell >> np.uint64(32) == mark >> np.uint64(32):
                        number = np.int64(cell & np.uint64(0xFFFFFFFF))
                        if keys[number, 0] == key:
                            keys[number, 1] += np.uint64(1)
                            inverse[start + i] = number
                            break
                    at = (at + np.uint64(1)) & mask
    return found


@njit(cache=True, nogil=True)
def touch(
    arrays: TableArrays,
    seed: np.uint64,
    keys: NDArray[np.uint64],
    rows: NDArray[np.int32],
    first: Whole,
    end: Whole,
    clock: Whole,
    step: Whole,
    needed: Whole,
    kind: Whole,
    scale: np.float64,
    slot_start: NDArray[np.float32],
) -> None:
    """Count, stamp and where due admit the shard's keys first to end; write their rows or -1.

    Changes `arrays`; needs room for as many entries, rows and cells. `slot_start` [slots * dim].
    """
    most = np.int64(0xFFFFFFFF)
    cells, old = np.int64(arrays.cells.ctypes.data), np.int64(arrays.old.ctypes.data)
    records, tally = np.int64(arrays.records.ctypes.data), arrays.tally
    groups, old_groups, moved = tally[GROUPS], tally[OLD_GROUPS], tally[MOVED]
    numbers = np.int64(tally.ctypes.data)
    free_entries = np.int64(arrays.free_entries.ctypes.data)
    free_rows = np.int64(arrays.free_rows.ctypes.data)
    table, entries = arrays.rows, arrays.records
    dim = table.shape[1] - slot_start.size
    homes, hashes = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    for low in range(first, end, BLOCK):
        high = min(low + BLOCK, end)
        for u in range(low, high):
            h = mix(keys[u, 0] ^ seed)
            hashes[u - low] = h
            homes[u - low] = home_cells(cells, old, groups, old_groups, moved, h)
            prefetch(homes[u - low])
        for u in range(low, high):
            foresee(records, homes[u - low], hashes[u - low])
        for u in range(low, high):
            h, key = hashes[u - low], keys[u, 0]
            seen = np.int64(keys[u, 1])
            cell = find(cells, old, records, groups, old_groups, moved, h, key)
            if cell >= 0:
                entry = entry_at(cell)
                seen += np.int64(entries[entry].count)
            else:
                entry = take_entry(numbers, free_entries, records, -1 - cell, h, key)
            entries[entry].count = np.uint32(min(seen, most))
            entries[entry].stamp = clock
            entries[entry].changed = step
            row: Whole = np.int64(entries[entry].row)
            if row < 0 and seen >= needed:
                row = take_row(numbers, free_rows, records, entry)
                tally[ADMITTED] += 1
                initial(seed, key, kind, scale, table[row, :dim])
                table[row, dim:] = slot_start
            rows[u] = row


@njit(cache=True, nogil=True)
def read(
    arrays: TableArrays,
    seed: np.uint64,
    shard: Whole,
    shards: Whole,
    keys: NDArray[np.uint64],
    out: NDArray[np.float32],
    found: NDArray[np.bool_],
) -> None:
    """Write the values [n, dim] of the shard's keys [n], zeros without a row, and `found` [n]."""
    cells, old = np.int64(arrays.cells.ctypes.data), np.int64(arrays.old.ctypes.data)
    records, tally = np.int64(arrays.records.ctypes.data), arrays.tally
    groups, old_groups, moved = tally[GROUPS], tally[OLD_GROUPS], tally[MOVED]
    dim = out.shape[1]
    width = 4 * arrays.rows.shape[1]
    table, into = np.int64(arrays.rows.ctypes.data), np.int64(out.ctypes.data)
    hashes, places = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    homes = np.empty(BLOCK, np.int64)
    for low in range(0, keys.size, BLOCK):
        mine = 0
        for i in range(low, min(low + BLOCK, keys.size)):
            h = mix(keys[i] ^ seed)
            hashes[mine], places[mine] = h, i
            mine += 1 if shard_of(h, shards) == shard else 0
        for q in range(mine):
            homes[q] = home_cells(cells, old, groups, old_groups, moved, hashes[q])
            prefetch(homes[q])
        for q in range(mine):
            foresee(records, homes[q], hashes[q])
        for q in range(mine):
            h, key = hashes[q], keys[places[q]]
            cell = find(cells, old, records, groups, old_groups, moved, h, key)
            row = np.int64(-1)
            if cell >= 0:
                row = np.int64(halves_at(records + entry_at(cell) * RECORD_BYTES)[ROW_PLACE])
            homes[q] = row
            if row >= 0:
                ask(table + row * width, dim)
        for q in range(mine):
            i = places[q]
            found[i] = homes[q] >= 0
            if homes[q] >= 0:
                copy(into + 4 * dim * i, table + homes[q] * width, dim)
            else:
                clear(into + 4 * dim * i, dim)


@njit(cache=True, nogil=True, error_model="numpy")
def divisor(start: Whole, stop: Whole, weights: Whole, mode: Whole) -> np.float32:
    """Return what a pooled sum is divided by: 1, sum of w, or root of the sum of w squared.

    `weights` is an address, 0 for ones. A sum that is zero (nothing to pool, or weights that
    cancel) is given back as 0.
    """
    one = np.float32(1.0)
    if mode == SUM:
        return one
    total = np.float32(0.0)
    for i in range(start, stop):
        w = floats_at(weights)[i] if weights != 0 else one
        total += w if mode == MEAN else w * w
    return np.float32(np.sqrt(total)) if mode == SQRTN else total


@njit(cache=True, nogil=True, error_model="numpy")
def pull(
    jobs: NDArray[np.int64],
    faces: NDArray[np.int64],
    table: NDArray[np.float32],
    dim: Whole,
    numbers: NDArray[np.int32],
    inverse: NDArray[np.int32],
    part: Whole,
    parts: Whole,
) -> None:
    """Write rows into every input's face, for the part's share of its samples.

    Sample b reads ids splits[b]..splits[b+1], in that order: sum of w * row in float32, then
    divided by `divisor`. A key without a row reads as zeros and counts in the divisor. Sequences
    keep rows apart. The rest of a face becomes zero.
    """
    one, zero = np.float32(1.0), np.float32(0.0)
    width = 4 * table.shape[1]
    base = np.int64(table.ctypes.data)
    block = np.empty(BLOCK, np.int64)
    for j in range(jobs.shape[0]):
        samples, length, mode = jobs[j, JOB_SAMPLES], jobs[j, JOB_LENGTH], jobs[j, JOB_MODE]
        start, weights, plain = jobs[j, JOB_START], jobs[j, JOB_WEIGHTS], jobs[j, JOB_PLAIN]
        splits = numbers_at(jobs[j, JOB_SPLITS])
        size = dim if length < 0 else dim * length
        out, total = faces[j, 0], faces[j, 1]
        low, high = total * part // parts, total * (part + 1) // parts
        last = min(high, samples)
        if plain == 1:
            # The general path below, without what is known: one id, weight and divisor of one.
            for front in range(low, last, BLOCK):
                back = min(front + BLOCK, last)
                for b in range(front, back):
                    row = np.int64(numbers[inverse[start + b]])
                    block[b - front] = row
                    if row >= 0:
                        ask(base + row * width, dim)
                for b in range(front, back):
                    at = out + 4 * size * b
                    if block[b - front] >= 0:
                        begin(at, base + block[b - front] * width, dim)
                    else:
                        clear(at, size)
            for b in range(max(low, samples), high):
                clear(out + 4 * size * b, size)
            continue
        asked = start + splits[min(low, samples)]
        most = start + splits[last] if last > low else asked
        for b in range(low, last):
            end = start + splits[b + 1]
            upto = min(end + AHEAD, most)
            while asked < upto:
                row = np.int64(numbers[inverse[asked]])
                if row >= 0:
                    ask(base + row * width, dim)
                asked += 1
            at = out + 4 * size * b
            clear(at, size)
            if length >= 0:
                for i in range(start + splits[b], end):
                    row = np.int64(numbers[inverse[i]])
                    if row >= 0:
                        copy(at, base + row * width, dim)
                    at += 4 * dim
                continue
            below = divisor(splits[b], splits[b + 1], weights, mode)
            if below == zero:
                continue
            for i in range(splits[b], splits[b + 1]):
                row = np.int64(numbers[inverse[start + i]])
                if row >= 0:
                    w = floats_at(weights)[i] if weights != 0 else one
                    add(at, w, base + row * width, dim)
            if below != one:
                divide(at, at, dim, below)
        for b in range(max(low, samples), high):
            clear(out + 4 * size * b, size)


@njit(cache=True, nogil=True, error_model="numpy")
def sum_gradients(
    jobs: NDArray[np.int64],
    faces: NDArray[np.int64],
    dim: Whole,
    numbers: NDArray[np.int32],
    inverse: NDArray[np.int32],
    first: Whole,
    end: Whole,
    sums: NDArray[np.float32],
    most: np.float32,
) -> Whole:
    """Sum the gradients of keys first to end into `sums` (flat, dim to a key), by occurrence.

    Each occurrence adds w * (gradient / divisor), as float32. Keys without a row stay zero.
    Returns -1, or the first key whose sums are not all within ±most.
    """
    one, zero = np.float32(1.0), np.float32(0.0)
    into = np.int64(sums.ctypes.data)
    size = 4 * dim
    clear(into + size * first, (end - first) * dim)
    for j in range(jobs.shape[0]):
        samples, length, mode = jobs[j, JOB_SAMPLES], jobs[j, JOB_LENGTH], jobs[j, JOB_MODE]
        start, weights, plain = jobs[j, JOB_START], jobs[j, JOB_WEIGHTS], jobs[j, JOB_PLAIN]
        splits = numbers_at(jobs[j, JOB_SPLITS])
        grads = faces[j, 0]
        if plain == 1:
            for b in range(samples):
                u = np.int64(inverse[start + b])
                if first <= u < end and numbers[u] >= 0:
                    add(into + size * u, one, grads + size * b, dim)
            continue
        for b in range(samples):
            at: Whole = grads + (size * b if length < 0 else size * length * b)
            below = one
            if length < 0:
                below = divisor(splits[b], splits[b + 1], weights, mode)
                if below == zero:
                    continue
            for i in range(splits[b], splits[b + 1]):
                u = np.int64(inverse[start + i])
                if first <= u < end and numbers[u] >= 0:
                    w = floats_at(weights)[i] if weights != 0 else one
                    if below == one:
                        add(into + size * u, w, at, dim)
                    else:
                        add_share(into + size * u, w, at, dim, below)
                if length >= 0:
                    at += size
    for number in range(first, end):
        if not is_tame(into + size * number, dim, most):
            return np.int64(number)
    return np.int64(-1)
