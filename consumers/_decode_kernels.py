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
that a count from the wire can't make a walk longer than the message.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Longs = NDArray[np.int64]

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

OK: Final = 0
TRUNCATED: Final = 1
TRAILING: Final = 2
OUT_OF_RANGE: Final = 3

MAX_DEPTH: Final = 32

K0: Final = np.uint64(0xC3A5C85C97CB3127)
K1: Final = np.uint64(0xB492B66FBE98F273)
K2: Final = np.uint64(0x9AE16A3B2F90404F)


@njit(cache=True, nogil=True)
def _fetch64(data: Bytes, at: np.int64) -> np.uint64:
    """Eight bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian uint64."""
    value = np.uint64(0)
    for i in range(8):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return value


@njit(cache=True, nogil=True)
def _fetch32(data: Bytes, at: np.int64) -> np.uint64:
    """Four bytes of ``uint8[:]`` at ``at`` (int64) as a little-endian uint64 below 2**32."""
    value = np.uint64(0)
    for i in range(4):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return value


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
def _fingerprint_many(data: Bytes, offsets: Longs, out: NDArray[np.uint64]) -> None:
    """Fingerprint64 of ``data[offsets[i]:offsets[i + 1]]`` into ``out[i]``.

    ``data`` uint8[:], ``offsets`` int64[n + 1] rising within ``data``, ``out`` uint64[n].
    """
    for i in range(len(out)):
        at = offsets[i]
        size = offsets[i + 1] - at
        if size <= 16:
            out[i] = _short(data, at, size)
        elif size <= 64:
            out[i] = _medium(data, at, size)
        else:
            out[i] = _long(data, at, size)


@njit(cache=True, nogil=True)
def _varint(data: Bytes, at: np.int64, end: np.int64) -> tuple[int, np.int64, np.int64]:
    """Read a zigzag varint of ``uint8[:]`` at ``at``: (status, value int64, next position)."""
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

    ``program`` int64[n, 3], ``data`` uint8[:], ``counts`` int64[MAX_DEPTH] scratch, mutated.
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
            if value > end - after:
                return TRUNCATED, at
            counts[program[pc, 1]] = value
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


def _joined(values: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    # A bytearray, since a read-only array would be another kernel signature.
    return np.frombuffer(bytearray().join(values), np.uint8), offsets


def fingerprint64_many(values: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return FarmHash Fingerprint64 of each value, ``uint64[n]``."""
    out = np.empty(len(values), np.uint64)
    if len(values):
        data, offsets = _joined(values)
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
        data, offsets = _joined(values)
        _check_many(program, data, offsets, np.zeros(MAX_DEPTH, np.int64), status, stops)
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
    data = np.frombuffer(bytearray(block), np.uint8)
    outcome = _split_block(program, data, np.zeros(MAX_DEPTH, np.int64), ends)
    return int(outcome[0]), int(outcome[1]), int(outcome[2]), ends


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, before the first message comes."""
    fingerprint64_many([b"", b"x" * 20, b"x" * 100])
    program = np.array([[OP_END, 0, 0]], np.int64)
    check_records(program, [b""])
    split_block(program, b"", 0)
