"""Kernels of the decoder: FarmHash Fingerprint64, and a check of Avro's binary form.

The check walks over encoded records by a *program*, an ``int64[n, 3]`` array whose rows are
operation and two operands; ``consumers.avro`` compiles a schema into one. The program counter
starts at row 0, and unless told otherwise the next row follows:

====== ================= ============================================================
 op     operands          meaning
====== ================= ============================================================
 INT    lo, hi            a varint whose value lies in [lo, hi]
 LONG                     a varint of 64 bits
 BOOL                     one byte, 0 or 1
 SKIP   n                 n bytes
 BYTES                    a varint length, then so many bytes
 UNION  k                 a varint index below k; the next k rows are JUMPs, take that one
 JUMP   target            go to row ``target``
 BLOCK  depth, end        a block count; 0: go to row ``end``
 LOOP   depth, body       one item is done: go to row ``body``, or for the next block count
                          to the BLOCK in the row before ``body``
 END                      the record is complete
====== ================= ============================================================

Every item that a block count stands for must take a byte at least (the compiler sees to it), so
that a count from the wire can't make a walk longer than the message. A block that tells its size
in bytes must have that size: readers which skip it go by the size, and others by the count.

Decoding into columns runs over an *operation table*, ``int64[n, 4]``: operation, place, column
and argument. It knows the operations above where they mean the same (a JUMP's target, a LOOP's
body and the like stand at the same operands), and these:

============ =================== ==========================================================
 op           argument            meaning
============ =================== ==========================================================
 GET_LONG                         a varint of 64 bits
 GET_INT                          a varint of 32 bits
 GET_BOOL                         one byte, 0 or 1
 GET_FLOAT                        four bytes
 GET_DOUBLE                       eight bytes
 GET_TEXT                         a string: its UTF-8 is checked, its fingerprint is the value
 GET_BYTES                        bytes: their fingerprint is the value
 GET_FIXED    size                so many bytes: their fingerprint is the value
 GET_ENUM     number of symbols   a varint index; the value stands in ``symbols`` from row
                                  ``table[pc + 1, 1]`` on, flagged 0 where it has none. The
                                  next row isn't run
 GET_NULL                         nothing; the value is null
 GET_CONST    bits                nothing; the value is the argument
 LONGS        how many            as many longs into as many columns from this one on
 MAYBE_FLOATS how many, or        as many unions of null and float into as many columns; -how
              -how many           many where null is the second branch
 LONG_ITEMS                       a whole array of longs into a list
 FAIL                             the message can't be used
============ =================== ==========================================================

Places: NOWHERE drops the value (no fingerprint is made), CELL and REAL put it into the cell of a
column as an integer or as a float64 (one that isn't finite makes the message unusable), ITEM and REAL_ITEM append it to a list; LIST takes only null, for the whole list at
row ``column`` of the nulls. LONGS, MAYBE_FLOATS
and LONG_ITEMS give what the operations that they stand for would give.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, types
from numpy.typing import NDArray

if TYPE_CHECKING:

    def intrinsic(function: Any) -> Any:
        """Stand for Numba's decorator, whose own types say what the function generates."""
        return function

else:
    from numba.extending import intrinsic

Bytes = NDArray[np.uint8]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class RawArrays(NamedTuple):
    """Columns of n messages as they are filled, C of them with one value and L lists.

    Attributes
    ----------
    cells
        ``int64[C, >= n]``; integers, and fingerprints as their bits.
    reals
        ``float64`` view of ``cells``: a column is one or the other.
    nulls
        ``uint8[C + L, >= n]``: 1 where a value or a whole list is null.
    items, real_items
        ``int64[L, room]`` and its ``float64`` view: the items of each list, laid end to end.
    item_nulls
        ``uint8[L, room]``.
    splits
        ``int64[L, n + 1]``: where the list of each row begins and ends.
    rows
        ``int64[n]``: the message that a row came from.
    ends
        ``int64[L]``: items of each list so far.
    """

    cells: Longs
    reals: Doubles
    nulls: Bytes
    items: Longs
    real_items: Doubles
    item_nulls: Bytes
    splits: Longs
    rows: Longs
    ends: Longs


OP_INT: Final = 0
OP_LONG: Final = 1
OP_BOOL: Final = 2
OP_SKIP: Final = 3
OP_BYTES: Final = 4
OP_UNION: Final = 5
OP_JUMP: Final = 6
OP_BLOCK: Final = 7
OP_LOOP: Final = 8
OP_END: Final = 9

OP_GET_LONG: Final = 10
OP_GET_INT: Final = 11
OP_GET_BOOL: Final = 12
OP_GET_FLOAT: Final = 13
OP_GET_DOUBLE: Final = 14
OP_GET_TEXT: Final = 15
OP_GET_BYTES: Final = 16
OP_GET_FIXED: Final = 17
OP_GET_ENUM: Final = 18
OP_GET_NULL: Final = 19
OP_GET_CONST: Final = 20
OP_LONGS: Final = 21
OP_MAYBE_FLOATS: Final = 22
OP_LONG_ITEMS: Final = 23
OP_FAIL: Final = 24

NOWHERE: Final = 0
CELL: Final = 1
REAL: Final = 2
ITEM: Final = 3
REAL_ITEM: Final = 4
LIST: Final = 5

OK: Final = 0
TRUNCATED: Final = 1
TRAILING: Final = 2
OUT_OF_RANGE: Final = 3

MAX_DEPTH: Final = 32

MAX_RUN: Final = 64
"""Values that one LONGS or MAYBE_FLOATS may stand for."""

PADDING: Final = 1024
"""Bytes that must follow the messages: a run is read before its end is looked at."""

FLOAT32_MAX: Final = 3.4028234663852886e38
ALL_BITS: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
HIGH_BITS: Final = np.uint64(0x8080808080808080)
K0: Final = np.uint64(0xC3A5C85C97CB3127)
K1: Final = np.uint64(0xB492B66FBE98F273)
K2: Final = np.uint64(0x9AE16A3B2F90404F)


def _loader(width: int, result: Any) -> Any:
    """Make the code of an unaligned little-endian load of ``width`` bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        kind = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}.get(result)
        kind = kind or ir.IntType(width)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
        value.align = 1
        if result is types.uint64 and width < 64:
            return builder.zext(value, ir.IntType(64))
        return value

    return generate


@intrinsic
def _fetch64(typing_context: Any, data: Any, at: Any) -> Any:
    """Eight bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian uint64."""
    return types.uint64(data, types.int64), _loader(64, types.uint64)


@intrinsic
def _fetch32(typing_context: Any, data: Any, at: Any) -> Any:
    """Four bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian uint64 below 2**32."""
    return types.uint64(data, types.int64), _loader(32, types.uint64)


@intrinsic
def _fetch8(typing_context: Any, data: Any, at: Any) -> Any:
    """One byte of ``uint8[:]`` at ``at`` (int64) as a uint64."""
    return types.uint64(data, types.int64), _loader(8, types.uint64)


@intrinsic
def _fetch_float(typing_context: Any, data: Any, at: Any) -> Any:
    """Four bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian float32."""
    return types.float32(data, types.int64), _loader(32, types.float32)


@intrinsic
def _fetch_double(typing_context: Any, data: Any, at: Any) -> Any:
    """Eight bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian float64."""
    return types.float64(data, types.int64), _loader(64, types.float64)


@intrinsic
def _trailing_zeros(typing_context: Any, value: Any) -> Any:
    """Number of zero bits below the lowest one of a uint64 that isn't 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _seven_of_eight(typing_context: Any, value: Any) -> Any:
    """The low 7 bits of each byte of a uint64, moved together: 56 bits.

    One instruction where the CPU has BMI2. The kernel cache is kept apart by CPU features.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        value = arguments[0]
        if get_host_cpu_features().get("bmi2"):
            gather = builder.module.declare_intrinsic(
                "llvm.x86.bmi.pext.64", fnty=ir.FunctionType(word, [word, word])
            )
            return builder.call(gather, [value, ir.Constant(word, 0x7F7F7F7F7F7F7F7F)])
        for shift, low in (
            (1, 0x007F007F007F007F),
            (2, 0x00003FFF00003FFF),
            (4, 0x000000000FFFFFFF),
        ):
            kept = builder.and_(value, ir.Constant(word, low))
            high = ir.Constant(word, low << (8 * shift))
            moved = builder.lshr(builder.and_(value, high), ir.Constant(word, shift))
            value = builder.or_(kept, moved)
        return value

    return types.uint64(types.uint64), generate


@njit(cache=True, nogil=True)
def _rotate(value: np.uint64, shift: np.uint64) -> np.uint64:
    """Rotate a uint64 right by ``shift`` (uint64, 1 to 63)."""
    return (value >> shift) | (value << (np.uint64(64) - shift))


@njit(cache=True, nogil=True)
def _shift_mix(value: np.uint64) -> np.uint64:
    """FarmHash's ShiftMix of a uint64."""
    return value ^ (value >> np.uint64(47))


@njit(cache=True, nogil=True)
def _hash_16(u: np.uint64, v: np.uint64, mul: np.uint64) -> np.uint64:
    """FarmHash's HashLen16 with a multiplier; all uint64."""
    a = (u ^ v) * mul
    a ^= a >> np.uint64(47)
    b = (v ^ a) * mul
    b ^= b >> np.uint64(47)
    return b * mul


@njit(cache=True, nogil=True)
def _weak_32(data: Bytes, at: np.int64, a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """FarmHash's WeakHashLen32WithSeeds over 32 bytes at ``at``; seeds and results uint64."""
    a += _fetch64(data, at)
    z = _fetch64(data, at + 24)
    b = _rotate(b + a + z, np.uint64(21))
    c = a
    a += _fetch64(data, at + 8)
    a += _fetch64(data, at + 16)
    b += _rotate(a, np.uint64(44))
    return a + z, b + c


@njit(cache=True, nogil=True)
def _short(data: Bytes, at: np.int64, size: np.int64) -> np.uint64:
    """Fingerprint64 of at most 16 bytes at ``at``; ``at`` and ``size`` int64."""
    length = np.uint64(size)
    mul = K2 + length * np.uint64(2)
    if size >= 8:
        a = _fetch64(data, at) + K2
        b = _fetch64(data, at + size - 8)
        c = _rotate(b, np.uint64(37)) * mul + a
        d = (_rotate(a, np.uint64(25)) + b) * mul
        return _hash_16(c, d, mul)
    if size >= 4:
        first = _fetch32(data, at)
        return _hash_16(length + (first << np.uint64(3)), _fetch32(data, at + size - 4), mul)
    if size > 0:
        y = np.uint64(data[at]) + (np.uint64(data[at + (size >> 1)]) << np.uint64(8))
        z = length + (np.uint64(data[at + size - 1]) << np.uint64(2))
        return _shift_mix((y * K2) ^ (z * K0)) * K2
    return K2


@njit(cache=True, nogil=True)
def _medium(data: Bytes, at: np.int64, size: np.int64) -> np.uint64:
    """Fingerprint64 of 17 to 64 bytes at ``at``; ``at`` and ``size`` int64."""
    mul = K2 + np.uint64(size) * np.uint64(2)
    first = K1 if size <= 32 else K2
    a = _fetch64(data, at) * first
    b = _fetch64(data, at + 8)
    c = _fetch64(data, at + size - 8) * mul
    d = _fetch64(data, at + size - 16) * K2
    y = _rotate(a + b, np.uint64(43)) + _rotate(c, np.uint64(30)) + d
    z = _hash_16(y, a + _rotate(b + K2, np.uint64(18)) + c, mul)
    if size <= 32:
        return z
    e = _fetch64(data, at + 16) * mul
    f = _fetch64(data, at + 24)
    g = (y + _fetch64(data, at + size - 32)) * mul
    h = (z + _fetch64(data, at + size - 24)) * mul
    return _hash_16(
        _rotate(e + f, np.uint64(43)) + _rotate(g, np.uint64(30)) + h,
        e + _rotate(f + a, np.uint64(18)) + g,
        mul,
    )


@njit(cache=True, nogil=True)
def _long(data: Bytes, at: np.int64, size: np.int64) -> np.uint64:
    """Fingerprint64 of more than 64 bytes at ``at``; ``at`` and ``size`` int64."""
    seed = np.uint64(81)
    y = seed * K1 + np.uint64(113)
    z = _shift_mix(y * K2 + np.uint64(113)) * K2
    v0 = v1 = w0 = w1 = np.uint64(0)
    x = seed * K2 + _fetch64(data, at)
    end = at + ((size - 1) // 64) * 64
    last = at + size - 64
    while at != end:
        x = _rotate(x + y + v0 + _fetch64(data, at + 8), np.uint64(37)) * K1
        y = _rotate(y + v1 + _fetch64(data, at + 48), np.uint64(42)) * K1
        x ^= w1
        y += v0 + _fetch64(data, at + 40)
        z = _rotate(z + w0, np.uint64(33)) * K1
        v0, v1 = _weak_32(data, at, v1 * K1, x + w0)
        w0, w1 = _weak_32(data, at + 32, z + w1, y + _fetch64(data, at + 16))
        z, x = x, z
        at += 64
    mul = K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 += np.uint64((size - 1) & 63)
    v0 += w0
    w0 += v0
    x = _rotate(x + y + v0 + _fetch64(data, last + 8), np.uint64(37)) * mul
    y = _rotate(y + v1 + _fetch64(data, last + 48), np.uint64(42)) * mul
    x ^= w1 * np.uint64(9)
    y += v0 * np.uint64(9) + _fetch64(data, last + 40)
    z = _rotate(z + w0, np.uint64(33)) * mul
    v0, v1 = _weak_32(data, last, v1 * mul, x + w0)
    w0, w1 = _weak_32(data, last + 32, z + w1, y + _fetch64(data, last + 16))
    z, x = x, z
    return _hash_16(_hash_16(v0, w0, mul) + _shift_mix(y) * K0 + z, _hash_16(v1, w1, mul) + x, mul)


@njit(cache=True, nogil=True)
def _fingerprint(data: Bytes, at: np.int64, size: np.int64) -> np.uint64:
    """Fingerprint64 of ``size`` bytes of ``uint8[:]`` at ``at``; both int64."""
    if size <= 16:
        return _short(data, at, size)
    if size <= 64:
        return _medium(data, at, size)
    return _long(data, at, size)


@njit(cache=True, nogil=True)
def _fingerprint_many(data: Bytes, offsets: Longs, out: NDArray[np.uint64]) -> None:
    """Fingerprint64 of ``data[offsets[i]:offsets[i + 1]]`` into ``out[i]``.

    ``data`` uint8[:], ``offsets`` int64[n + 1] rising within ``data``, ``out`` uint64[n].
    """
    for i in range(len(out)):
        out[i] = _fingerprint(data, offsets[i], offsets[i + 1] - offsets[i])


@njit(cache=True, nogil=True)
def _number(data: Bytes, at: np.int64) -> tuple[np.uint64, np.int64, np.uint64]:
    """Read a varint of ``uint8[:]`` at ``at``: (bits uint64, next position, 1 where malformed).

    Reads up to ten bytes, whatever ends before: the caller compares the position afterwards.
    """
    word = _fetch64(data, at)
    stops = ~word & HIGH_BITS
    if stops != np.uint64(0):
        used = _trailing_zeros(stops) + np.uint64(1)
        bits = _seven_of_eight(word & (ALL_BITS >> (np.uint64(64) - used)))
        return bits, at + np.int64(used >> np.uint64(3)), np.uint64(0)
    ninth = _fetch8(data, at + 8)
    tenth = _fetch8(data, at + 9)
    more = ninth >> np.uint64(7)
    bits = _seven_of_eight(word)
    bits |= (ninth & np.uint64(0x7F)) << np.uint64(56)
    bits |= (tenth & more) << np.uint64(63)
    return bits, at + 9 + np.int64(more), more & np.uint64(tenth > np.uint64(1))


@njit(cache=True, nogil=True)
def _signed(bits: np.uint64) -> np.int64:
    """The int64 that a zigzag number (uint64) stands for."""
    return np.int64((bits >> np.uint64(1)) ^ (np.uint64(0) - (bits & np.uint64(1))))


@njit(cache=True, nogil=True)
def _varint(data: Bytes, at: np.int64, end: np.int64) -> tuple[int, np.int64, np.int64]:
    """Read a zigzag varint of ``uint8[:]`` at ``at``: (status, value int64, next position)."""
    if end - at >= 10:
        bits, after, wrong = _number(data, at)
        if wrong != np.uint64(0):
            return OUT_OF_RANGE, np.int64(0), at
        return OK, _signed(bits), after
    bits = np.uint64(0)
    for i in range(10):
        if at + i >= end:
            return TRUNCATED, np.int64(0), at
        byte = np.uint64(data[at + i])
        if i == 9 and byte > np.uint64(1):
            return OUT_OF_RANGE, np.int64(0), at
        bits |= (byte & np.uint64(0x7F)) << np.uint64(7 * i)
        if byte < np.uint64(0x80):
            half = np.int64(bits >> np.uint64(1))
            return OK, (-half - 1 if bits & np.uint64(1) else half), at + i + 1
    return OUT_OF_RANGE, np.int64(0), at


@njit(cache=True, nogil=True)
def _walk(
    program: Longs, data: Bytes, at: np.int64, end: np.int64, counts: Longs
) -> tuple[int, np.int64]:
    """Walk over one record at ``at``: (status, position behind it or of the fault).

    ``program`` int64[n, 3], ``data`` uint8[:], ``counts`` int64[2 * MAX_DEPTH] scratch, mutated.
    The caller ensures that the program is one that ``consumers.avro`` compiled.
    """
    pc = np.int64(0)
    while True:
        op = program[pc, 0]
        if op == OP_END:
            return OK, at
        if op == OP_JUMP:
            pc = program[pc, 1]
            continue
        if op == OP_SKIP:
            if program[pc, 1] > end - at:
                return TRUNCATED, at
            at += program[pc, 1]
            pc += 1
            continue
        if op == OP_BOOL:
            if at >= end:
                return TRUNCATED, at
            if data[at] > 1:
                return OUT_OF_RANGE, at
            at += 1
            pc += 1
            continue
        if op == OP_LOOP:
            depth = program[pc, 1]
            counts[depth] -= 1
            if counts[depth] == 0 and at != counts[MAX_DEPTH + depth] >= 0:
                return OUT_OF_RANGE, at
            pc = program[pc, 2] if counts[depth] > 0 else program[pc, 2] - 1
            continue
        status, value, after = _varint(data, at, end)
        if status != OK:
            return status, at
        if op == OP_INT:
            if value < program[pc, 1] or value > program[pc, 2]:
                return OUT_OF_RANGE, at
            pc += 1
        elif op == OP_LONG:
            pc += 1
            while program[pc, 0] == OP_LONG and end - after >= 10:
                _, stop, wrong = _number(data, after)
                if wrong != np.uint64(0):
                    return OUT_OF_RANGE, after
                after = stop
                pc += 1
        elif op == OP_BYTES:
            if value < 0:
                return OUT_OF_RANGE, at
            if value > end - after:
                return TRUNCATED, at
            after += value
            pc += 1
        elif op == OP_UNION:
            if value < 0 or value >= program[pc, 1]:
                return OUT_OF_RANGE, at
            pc += 1 + value
        else:  # OP_BLOCK; a negative count is followed by the block's size in bytes
            stop = np.int64(-1)
            if value < 0:
                value = -value
                if value < 0:
                    return OUT_OF_RANGE, at
                status, size, after = _varint(data, after, end)
                if status != OK:
                    return status, at
                if size < 0:
                    return OUT_OF_RANGE, at
                if size > end - after:
                    return TRUNCATED, at
                stop = after + size
            if value > end - after:
                return TRUNCATED, at
            counts[program[pc, 1]] = value
            counts[MAX_DEPTH + program[pc, 1]] = stop
            pc = program[pc, 2] if value == 0 else pc + 1
        at = after


@njit(cache=True, nogil=True)
def _check_many(
    program: Longs, data: Bytes, offsets: Longs, counts: Longs, status: Longs, stops: Longs
) -> None:
    """Check that each ``data[offsets[i]:offsets[i + 1]]`` is exactly one record.

    Arrays as in :func:`_walk`, ``offsets`` int64[n + 1]. ``status`` and ``stops`` (int64[n])
    take the outcome and where it showed, relative to the message.
    """
    for i in range(len(status)):
        start, end = offsets[i], offsets[i + 1]
        outcome, at = _walk(program, data, start, end, counts)
        if outcome == OK and at != end:
            outcome = TRAILING
        status[i] = outcome
        stops[i] = at - start


@njit(cache=True, nogil=True)
def _split_block(
    program: Longs, data: Bytes, counts: Longs, ends: Longs
) -> tuple[int, int, np.int64]:
    """Find where each of ``len(ends)`` records laid end to end in ``data`` ends.

    Arrays as in :func:`_walk`; ``ends`` int64[n] is mutated. Returns (status, records found,
    position); bytes behind the last record are TRAILING.
    """
    at = np.int64(0)
    for i in range(len(ends)):
        outcome, at = _walk(program, data, at, np.int64(len(data)), counts)
        if outcome != OK:
            return outcome, i, at
        ends[i] = at
    return (OK if at == len(data) else TRAILING), len(ends), at


@njit(cache=True, nogil=True)
def _is_utf8(data: Bytes, at: np.int64, end: np.int64) -> bool:
    """Whether ``data[at:end]`` (uint8[:], int64) is UTF-8; eight readable bytes must follow it."""
    while end - at >= 8 and _fetch64(data, at) & HIGH_BITS == np.uint64(0):
        at += 8
    if at == end:
        return True
    if end - at < 8:
        kept = ALL_BITS >> (np.uint64(64) - np.uint64(8) * np.uint64(end - at))
        if _fetch64(data, at) & kept & HIGH_BITS == np.uint64(0):
            return True
    while at < end:
        lead = np.int64(data[at])
        at += 1
        if lead < 0x80:
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        if more > end - at:
            return False
        low, high = 0x80, 0xBF
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:
            high = 0x9F
        elif lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
        for _ in range(more):
            byte = np.int64(data[at])
            if byte < low or byte > high:
                return False
            low, high = 0x80, 0xBF
            at += 1
    return True


@njit(cache=True, nogil=True)
def _decode_many(
    table: Longs, symbols: Longs, data: Bytes, offsets: Longs, raw: RawArrays, counts: Longs
) -> tuple[np.int64, bool]:
    """Decode each message ``data[offsets[i]:offsets[i + 1]]`` that is exactly one record.

    ``table`` int64[k, 4] as the module tells, ``symbols`` int64[s, 2] (value, whether it has one),
    ``data`` uint8[:] with PADDING bytes behind the last message, ``offsets`` int64[n + 1],
    ``counts`` int64[2 * MAX_DEPTH] scratch. Mutates ``raw`` (whose ``nulls``, ``item_nulls`` and
    ``splits[:, 0]`` are 0) and ``counts``. Returns the number of messages that could be used,
    which fill the rows in order, and whether all went into ``raw``: False asks for longer lists.
    """
    cells, reals, nulls = raw.cells, raw.reals, raw.nulls
    items, real_items, item_nulls = raw.items, raw.real_items, raw.item_nulls
    splits, rows, ends = raw.splits, raw.rows, raw.ends
    lists = len(ends)
    room = items.shape[1]
    for k in range(lists):
        ends[k] = 0
    row = np.int64(0)
    for i in range(len(offsets) - 1):
        at = offsets[i]
        end = offsets[i + 1]
        good = end > at
        pc = np.int64(0)
        while good:
            op = table[pc, 0]
            place = table[pc, 1]
            column = table[pc, 2]
            value = np.int64(0)
            real = 0.0
            null = False
            if op == OP_LONGS:
                wrong = np.uint64(0)
                # Unsigned, so that no index needs a look whether it counts from the end.
                for k in range(np.uint64(column), np.uint64(column + table[pc, 3])):
                    bits, at, fault = _number(data, at)
                    wrong |= fault
                    cells[k, np.uint64(row)] = _signed(bits)
                good = wrong == np.uint64(0) and at <= end
                pc += 1
                continue
            if op == OP_MAYBE_FLOATS:
                many = table[pc, 3]
                null_index = np.uint64(0)
                if many < 0:
                    many = -many
                    null_index = np.uint64(2)
                finite = True
                for k in range(np.uint64(column), np.uint64(column + many)):
                    index = _fetch8(data, at)
                    taken = np.float64(_fetch_float(data, at + 1))
                    null = index == null_index
                    if null or index == null_index ^ np.uint64(2):
                        # No branch: nulls come at random.
                        taken = np.float64(0.0) if null else taken
                        finite = finite and taken - taken == 0.0
                        reals[k, np.uint64(row)] = taken
                        nulls[k, np.uint64(row)] = np.uint8(null)
                        at += 1 if null else 5
                        continue
                    at += 1
                    # Another index, or one of these in more bytes than it needs.
                    bits, at, wrong = _number(data, at - 1)
                    if wrong != np.uint64(0) or at > end or bits & ~np.uint64(2):
                        good = False
                        break
                    null = bits == null_index
                    taken = np.float64(0.0)
                    if not null:
                        taken = np.float64(_fetch_float(data, at))
                        at += 4
                    finite = finite and taken - taken == 0.0
                    reals[k, row] = taken
                    nulls[k, row] = np.uint8(null)
                good = good and finite and at <= end
                pc += 1
                continue
            if op == OP_END:
                good = at == end
                break
            if op == OP_JUMP:
                pc = place
                continue
            if op == OP_LOOP:
                counts[place] -= 1
                if counts[place] > 0:
                    pc = column
                else:
                    pc = column - 1
                    good = counts[MAX_DEPTH + place] < 0 or counts[MAX_DEPTH + place] == at
                continue
            if op == OP_LONG_ITEMS:
                good = False
                filled = ends[column]
                while True:
                    bits, at, wrong = _number(data, at)
                    many = _signed(bits)
                    if wrong != np.uint64(0) or at > end:
                        break
                    if many == 0:
                        good = True
                        break
                    stop = np.int64(-1)
                    if many < 0:
                        many = -many
                        bits, at, wrong = _number(data, at)
                        size = _signed(bits)
                        stop = at + size
                        if many < 0 or wrong != np.uint64(0) or size < 0 or size > end - at:
                            break
                    if many > end - at:
                        break
                    if many > room - filled:
                        return row, False
                    for _ in range(many):
                        bits, at, fault = _number(data, at)
                        wrong |= fault
                        if at > end:
                            break
                        items[np.uint64(column), np.uint64(filled)] = _signed(bits)
                        filled += 1
                    if wrong != np.uint64(0) or at > end or at != stop >= 0:
                        break
                ends[column] = filled
                pc += 1
                continue
            if op == OP_GET_NULL:
                null = True
            elif op == OP_GET_CONST:
                value = table[pc, 3]
            elif op == OP_FAIL:
                good = False
            elif op == OP_GET_FLOAT:
                real = np.float64(_fetch_float(data, at))
                at += 4
            elif op == OP_GET_DOUBLE:
                real = _fetch_double(data, at)
                at += 8
            elif op == OP_GET_BOOL:
                value = np.int64(_fetch8(data, at))
                good = value <= 1
                at += 1
                real = np.float64(value)
            elif op == OP_GET_FIXED:
                size = table[pc, 3]
                good = size <= end - at
                if good and place != NOWHERE:
                    value = np.int64(_fingerprint(data, at, size))
                at += size
            else:
                bits, at, wrong = _number(data, at)
                value = _signed(bits)
                if wrong != np.uint64(0) or at > end:
                    good = False
                elif op == OP_GET_LONG:
                    real = np.float64(value)
                elif op == OP_GET_INT:
                    good = value == np.int64(np.int32(value))
                    real = np.float64(value)
                elif op in (OP_GET_TEXT, OP_GET_BYTES):
                    size = value
                    good = size >= 0 and size <= end - at
                    if good and op == OP_GET_TEXT:
                        good = _is_utf8(data, at, at + size)
                    if good and place != NOWHERE:
                        value = np.int64(_fingerprint(data, at, size))
                    at += size
                elif op == OP_GET_ENUM:
                    good = value >= 0 and value < table[pc, 3]
                    pc += 1
                    if good:
                        entry = table[pc, 1] + value
                        value = symbols[entry, 0]
                        good = symbols[entry, 1] != 0
                elif op == OP_UNION:
                    good = value >= 0 and value < place
                    pc += 1 + value
                    continue
                else:  # OP_BLOCK
                    stop = np.int64(-1)
                    if value < 0:
                        value = -value
                        bits, at, wrong = _number(data, at)
                        size = _signed(bits)
                        good = value >= 0 and wrong == np.uint64(0)
                        good = good and size >= 0 and size <= end - at
                        stop = at + size
                    good = good and value <= end - at
                    counts[place] = value
                    counts[MAX_DEPTH + place] = stop
                    pc = column if value == 0 else pc + 1
                    continue
            pc += 1
            good = good and at <= end
            if not good or place == NOWHERE:
                continue
            if place == CELL:
                cells[column, row] = value
                if null:
                    nulls[column, row] = 1
            elif place == REAL:
                good = real - real == 0.0
                reals[column, row] = real
                if null:
                    nulls[column, row] = 1
            elif place == LIST:
                nulls[column, row] = 1
            else:
                filled = ends[column]
                if filled == room:
                    return row, False
                if place == ITEM:
                    items[column, filled] = value
                else:
                    real_items[column, filled] = real
                if null:
                    item_nulls[column, filled] = 1
                ends[column] = filled + 1
        if good:
            for k in range(lists):
                splits[k, row + 1] = ends[k]
            rows[row] = i
            row += 1
        else:
            for k in range(nulls.shape[0]):
                nulls[k, row] = 0
            for k in range(lists):
                for n in range(splits[k, row], ends[k]):
                    item_nulls[k, n] = 0
                ends[k] = splits[k, row]
    return row, True


@njit(cache=True, nogil=True)
def _compact(values: Longs, nulls: Bytes, out: Longs, splits: Longs) -> np.int64:
    """Make lists of no or one item out of cells: all int64[n], ``nulls`` uint8[n].

    Mutates ``out`` and ``splits`` (int64[n + 1]); returns the number of items.
    """
    filled = np.int64(0)
    splits[0] = 0
    for i in range(len(values)):
        if nulls[i] == 0:
            out[filled] = values[i]
            filled += 1
        splits[i + 1] = filled
    return filled


@njit(cache=True, nogil=True)
def _select(
    values: Longs,
    nulls: Bytes,
    splits: Longs,
    factors: Doubles,
    padding: Longs,
    keep: np.int64,
    out: Longs,
    out_splits: Longs,
    weights: Floats,
) -> np.int64:
    """Keep, of each list, what is neither null nor padding, at most so many of it.

    ``values`` int64[m], ``nulls`` uint8[m], ``splits`` int64[n + 1], ``factors`` float64[m] or
    [0] for none, ``padding`` int64[1] or [0] for none. ``keep`` > 0 takes the first, < 0 the last
    so many, 0 all. Mutates ``out`` int64[m], ``out_splits`` int64[n + 1] and ``weights``
    float32[len(factors)]; returns the number of items kept.
    """
    filled = np.int64(0)
    out_splits[0] = 0
    for i in range(len(splits) - 1):
        start = filled
        skip = np.int64(0)
        if keep < 0:
            for k in range(splits[i], splits[i + 1]):
                if nulls[k] == 0 and (len(padding) == 0 or values[k] != padding[0]):
                    skip += 1
            skip += keep
        for k in range(splits[i], splits[i + 1]):
            if nulls[k] != 0 or (len(padding) != 0 and values[k] == padding[0]):
                continue
            if skip > 0:
                skip -= 1
                continue
            if keep > 0 and filled - start == keep:
                break
            out[filled] = values[k]
            if len(factors) != 0:
                weights[filled] = np.float32(factors[k])
            filled += 1
        out_splits[i + 1] = filled
    return filled


@njit(cache=True, nogil=True)
def _spread_weights(
    splits: Longs,
    given: Doubles,
    given_nulls: Bytes,
    given_splits: Longs,
    missing: Bytes,
    out: Doubles,
    wrong: Flags,
) -> None:
    """Lay the weights of lists beside their items: 1 where a list has none.

    ``splits`` int64[n + 1] of the items; ``given`` float64[m], ``given_nulls`` uint8[m] and
    ``given_splits`` int64[n + 1] the weights; ``missing`` uint8[n] where there are none. Mutates
    ``out`` float64[items] and ``wrong`` bool[n]: true where the numbers differ, or a weight is
    null, negative or doesn't fit into float32.
    """
    for i in range(len(splits) - 1):
        size = splits[i + 1] - splits[i]
        start = given_splits[i]
        fits = missing[i] != 0 or given_splits[i + 1] - start == size
        for k in range(size):
            factor = 1.0
            if fits and missing[i] == 0:
                factor = given[start + k]
                if given_nulls[start + k] != 0 or not 0.0 <= factor <= FLOAT32_MAX:
                    fits = False
            out[splits[i] + k] = factor if fits else 0.0
        if not fits:
            wrong[i] = True


def _shown(value: bytes) -> NDArray[np.uint8]:
    """Return bytes as an array: read-only like any other, or kernels had a second signature."""
    if value:
        return np.frombuffer(value, np.uint8)
    empty = np.empty(0, np.uint8)
    empty.flags.writeable = False
    return empty


def joined(values: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Lay messages end to end, with PADDING behind them: ``uint8[:]``, ``int64[n + 1]`` offsets."""
    # Joined first: that loop is tight enough to wait for many cold messages at once.
    data = b"".join([*values, bytes(PADDING)])
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return np.frombuffer(data, np.uint8), offsets


def fingerprint64_many(values: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return FarmHash Fingerprint64 of each value, ``uint64[n]``."""
    out = np.empty(len(values), np.uint64)
    if len(values):
        data, offsets = joined(values)
        _fingerprint_many(data, offsets, out)
    return out


def fingerprint64(value: bytes) -> int:
    """Return FarmHash Fingerprint64 of the bytes of ``value``.

    The same as TensorFlow's ``tf.fingerprint``, BigQuery's ``FARM_FINGERPRINT`` read as unsigned,
    and Guava's ``farmHashFingerprint64``.

    Examples
    --------
    >>> hex(fingerprint64(b""))
    '0x9ae16a3b2f90404f'
    """
    return int(fingerprint64_many([value])[0])


def check_records(
    program: NDArray[np.int64], values: Sequence[bytes]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Check each value against a program: status and byte position of the fault, both [n]."""
    status = np.zeros(len(values), np.int64)
    stops = np.zeros(len(values), np.int64)
    if len(values):
        data, offsets = joined(values)
        _check_many(program, data, offsets, np.zeros(2 * MAX_DEPTH, np.int64), status, stops)
    return status, stops


def split_block(
    program: NDArray[np.int64], block: bytes, count: int
) -> tuple[int, int, int, NDArray[np.int64]]:
    """Find the ends of ``count`` records in ``block``.

    Returns
    -------
    tuple
        Status, number of whole records found, byte position of the fault, ``int64[count]`` ends.
    """
    ends = np.zeros(count, np.int64)
    data = _shown(block)
    outcome = _split_block(program, data, np.zeros(2 * MAX_DEPTH, np.int64), ends)
    return int(outcome[0]), int(outcome[1]), int(outcome[2]), ends


def raw_arrays(*, columns: int, lists: int, messages: int, room: int) -> RawArrays:
    """Make columns for so many messages, and ``room`` items in each list; nothing is null."""
    # Rows of a length that is no power of two fall into different sets of the CPU's cache.
    stride = (messages | 63) + 9
    cells = np.empty((columns, stride), np.int64)
    items = np.empty((lists, room), np.int64)
    return RawArrays(
        cells,
        cells.view(np.float64),
        np.zeros((columns + lists, stride), np.uint8),
        items,
        items.view(np.float64),
        np.zeros((lists, room), np.uint8),
        np.zeros((lists, messages + 1), np.int64),
        np.empty(messages, np.int64),
        np.empty(lists, np.int64),
    )


def decode_many(
    table: Longs, symbols: Longs, data: Bytes, offsets: Longs, raw: RawArrays
) -> tuple[int, bool]:
    """Decode messages into raw columns.

    Parameters
    ----------
    table, symbols
        The operation table, int64[k, 4] and int64[s, 2].
    data, offsets
        The messages, laid end to end, with PADDING bytes behind the last; int64[n + 1] offsets.
    raw
        Filled; its ``nulls``, ``item_nulls`` and ``splits[:, 0]`` must be 0.

    Returns
    -------
    tuple
        Number of messages that could be used, and whether their lists fitted into ``raw``.
    """
    counts = np.empty(2 * MAX_DEPTH, np.int64)
    size, done = _decode_many(table, symbols, data, offsets, raw, counts)
    return int(size), bool(done)


def compact(values: Longs, nulls: Bytes) -> tuple[Longs, Longs]:
    """Make lists of no or one item out of ``int64[n]`` cells: items and ``int64[n + 1]`` splits."""
    out = np.empty(len(values), np.int64)
    splits = np.empty(len(values) + 1, np.int64)
    filled = _compact(values, nulls, out, splits)
    return out[:filled], splits


def select(
    values: Longs,
    nulls: Bytes,
    splits: Longs,
    factors: Doubles | None,
    padding: int | None,
    keep: int,
) -> tuple[Longs, Longs, Floats | None]:
    """Keep, of each list, what is neither null nor ``padding``: items, splits, weights.

    ``keep`` > 0 keeps the first so many of each list, < 0 the last so many, 0 all.
    """
    out = np.empty(len(values), np.int64)
    out_splits = np.empty(len(splits), np.int64)
    weights = np.empty(0 if factors is None else len(values), np.float32)
    unwanted = np.array([] if padding is None else [padding], np.int64)
    given = np.empty(0) if factors is None else factors
    filled = _select(
        values, nulls, splits, given, unwanted, np.int64(keep), out, out_splits, weights
    )
    return out[:filled], out_splits, None if factors is None else weights[:filled]


def spread_weights(
    splits: Longs,
    given: Doubles,
    given_nulls: Bytes,
    given_splits: Longs,
    missing: Bytes,
    wrong: Flags,
) -> Doubles:
    """Lay weights beside the items of lists, ``float64[items]``; marks rows in ``wrong``."""
    out = np.empty(splits[-1], np.float64)
    _spread_weights(splits, given, given_nulls, given_splits, missing, out, wrong)
    return out


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, before the first message comes."""
    fingerprint64_many([b"", b"x" * 20, b"x" * 100])
    program = np.array([[OP_END, 0, 0]], np.int64)
    check_records(program, [b""])
    split_block(program, b"", 0)
    table = np.array([[OP_GET_LONG, ITEM, 0, 0], [OP_END, 0, 0, 0]], np.int64)
    raw = raw_arrays(columns=1, lists=1, messages=1, room=1)
    decode_many(table, np.zeros((1, 2), np.int64), *joined([b"\0"]), raw)
    nulls = raw.item_nulls[0, :1]
    values, splits = compact(raw.items[0, :1], nulls)
    factors = spread_weights(splits, np.ones(1), nulls, splits, nulls, np.zeros(1, np.bool_))
    select(values, nulls, splits, factors, 7, 1)
