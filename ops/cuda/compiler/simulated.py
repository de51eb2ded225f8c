"""The functions of `intrinsics.py` in plain Python, for the simulator.

Every load and store is checked against the simulated memory, alignment and races included; `simulator.py` schedules the
threads.
"""
import ctypes
import itertools
import math
import sys
import types

import numpy as np

from ggjit.ops.cuda.compiler.requests import GLOBAL, SHARED, note, watching
from ggjit.ops.cuda.compiler.simulator import (
    WARP,
    SimulationFault,
    check,
    constants,
    current,
    last,
    reads,
    reads_shared,
    watched,
    written,
    wrote,
    wrote_shared,
)

f32 = np.float32
local = types.SimpleNamespace(array=lambda n, type: [None] * n)         # None: reading it before it is set is an error


def _scalar(ctype, convert=None):
    """(load, store) of global memory, of shared memory, and the load of constants."""
    nbytes, at = ctypes.sizeof(ctype), ctype.from_address
    mask, known = nbytes - 1, {}
    constants.append(known)

    def value_at(addr):
        if addr & mask or not last[0] <= addr <= last[1] - nbytes:
            check(addr, nbytes, nbytes)
        return convert(at(addr).value) if convert else at(addr).value

    def load(addr):
        if addr in written or watched[0]:
            reads(addr)
        if watching[0]:
            note(GLOBAL, addr, nbytes)
        return value_at(addr)

    def load_shared(addr):
        reads_shared(addr & -4)                 # words are what is written
        if watching[0]:
            note(SHARED, addr, nbytes)
        return value_at(addr)

    def storer(wrote, space):
        def store(addr, value):
            if watching[0]:
                note(space, addr, nbytes)
            if addr & mask or not last[0] <= addr <= last[1] - nbytes:
                check(addr, nbytes, nbytes)
            wrote(addr, lambda: at(addr).value == value)
            at(addr).value = value
        return store

    def constant(addr):
        value = known.get(addr)
        if value is None:
            value = known[addr] = value_at(addr)
        return value
    return (load, storer(wrote, GLOBAL)), (load_shared, storer(wrote_shared, SHARED)), constant


(ld_f32, st_f32), (lds_f32, sts_f32), ldc_f32 = _scalar(ctypes.c_float, f32)
(ld_i64, st_i64), (lds_i64, sts_i64), ldc_i64 = _scalar(ctypes.c_int64)
(ld_i32, st_i32), (lds_i32, sts_i32), ldc_i32 = _scalar(ctypes.c_int32)
(ld_i16, st_i16), _, _ = _scalar(ctypes.c_int16)
(ld_u16, st_u16), (lds_u16, _), _ = _scalar(ctypes.c_uint16)
(ld_i8, st_i8), (lds_i8, _), _ = _scalar(ctypes.c_int8)
(ld_u8, _), (lds_u8, _), _ = _scalar(ctypes.c_uint8)


def st_i64_any(addr, value):
    check(addr, 8, 8)
    ctypes.c_int64.from_address(int(addr)).value = value


_ALL = np.arange(1 << 16, dtype=np.uint16)
half_value = list(_ALL.view(np.float16).astype(f32)).__getitem__        # of 16 bits
bf16_value = list((_ALL.astype(np.uint32) << 16).view(f32)).__getitem__
_SIGNED = [*range(128), *range(-128, 0)]                                # of a byte


def half_bits(x):
    return int(np.float16(x).view(np.uint16))


def bf16_bits(x):
    bits = int(f32(x).view(np.uint32))
    if x != x:
        return bits >> 16 | 64
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def ld_f16(addr):
    return half_value(ld_u16(addr))


def st_f16(addr, x):
    st_u16(addr, half_bits(x))


def lds_f16(addr):
    return half_value(lds_u16(addr))


def ld_bf16(addr):
    return bf16_value(ld_u16(addr))


def st_bf16(addr, x):
    st_u16(addr, bf16_bits(x))


def _signed(x):
    """The low 32 bits as an int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def ld_i32_2(addr):
    return _signed(ld_u16(addr) | ld_u16(addr + 2) << 16)


def lds_i32_2(addr):
    return _signed(lds_u16(addr) | lds_u16(addr + 2) << 16)


def _four(ctype):
    """(the array at an address of four checked elements)"""
    at = (ctype * 4).from_address

    def load(addr):
        check(addr, 16, 16)
        if watching[0]:
            note(GLOBAL, addr, 16)
        if written or watched[0]:
            for i in range(4):
                reads(addr + 4 * i)
        return at(addr)
    return load


_four_i32, _four_f32 = _four(ctypes.c_int32), _four(ctypes.c_float)


def ld_i32x4(addr):
    return tuple(_four_i32(addr))


def ld_f32x4(addr):
    return tuple(map(f32, _four_f32(addr)))


def sts_i32x4(addr, v):
    check(addr, 16, 16)
    if watching[0]:
        note(SHARED, addr, 16)
    words = (ctypes.c_int32 * 4).from_address(addr)
    for i in range(4):
        wrote_shared(addr + 4 * i, lambda i=i: words[i] == v[i])
        words[i] = v[i]


def lds_i32x4(addr):
    check(addr, 16, 16)
    if watching[0]:
        note(SHARED, addr, 16)
    for i in range(4):
        reads_shared(addr + 4 * i)
    return tuple((ctypes.c_int32 * 4).from_address(addr))


# ---------------------------------------------------------------- copies that go on beside the thread
def copy_16(to, source, n):
    """What lies at `to` is unknown until `copies_but` has waited for it."""
    check(to, 16, 16)
    if n > 0:
        check(source, int(min(n, 16)), 1)
        check(source - source % 16, 1)
    if source % 16:
        raise SimulationFault(f"a copy from {source % 16} past a multiple of 16")
    if watching[0]:
        note(SHARED, to, 16)
        if n > 0:
            note(GLOBAL, source, 16)
    for i in range(4):
        wrote_shared(to + 4 * i, lambda: False)
        if 4 * i < n:
            reads(source + 4 * i)
    ctypes.memset(to, 0xFF, 16)
    current().copies[-1].append((to, source, int(max(0, min(n, 16)))))


def copies_end():
    current().copies.append([])


def copies_but(n):
    def wait():
        lane = current()
        n_done = max(0, len(lane.copies) - 1 - n)
        for to, source, nbytes in itertools.chain(*lane.copies[:n_done]):
            for i in range(4):
                wrote_shared(to + 4 * i, lambda: False)
            ctypes.memset(to, 0, 16)
            ctypes.memmove(to, source, nbytes)
        del lane.copies[:n_done]
    return wait


def shared(nbytes, aligned=16):
    """An allocation for each calling function, as on the device (intrinsics.py)."""
    key = object()
    return lambda: current().block.shared((key, sys._getframe(1).f_code), nbytes, aligned)


def table(values):
    return lambda i: int(values[i])


def device(f):
    """Device functions are plain functions here."""
    return f


def thread():
    return current().number


def n_threads():
    return current().block.n_threads


def block():
    return current().block.index[0]


def n_blocks():
    return current().block.n_blocks


def block_y():
    return current().block.index[1]


def block_z():
    return current().block.index[2]


def sync():
    current().wait("block")


# ---------------------------------------------------------------- bits
def f32_bits(x):
    return int(f32(x).view(np.int32))


def bits_f32(x):
    return np.int32(x).view(f32)


def low_f16(x):
    return half_value(x & 0xFFFF)


def high_f16(x):
    return half_value(x >> 16 & 0xFFFF)


def low_bf16(x):
    return bf16_value(x & 0xFFFF)


def high_bf16(x):
    return bf16_value(x >> 16 & 0xFFFF)


def round_f16(x):
    return half_value(half_bits(x))


def pack_f16(low, high):
    return _signed(half_bits(low) | half_bits(high) << 16)


def pack_bf16(low, high):
    return _signed(bf16_bits(low) | bf16_bits(high) << 16)


def permute(a, b, selector):
    eight = (a & 0xFFFFFFFF) | (b & 0xFFFFFFFF) << 32
    return _signed(sum((eight >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4)))


def to_i32(x):
    return 0 if x != x else int(min(max(float(x), -2147483648.0), 2147483647.0))


# ---------------------------------------------------------------- arithmetic
def dp4a(a, b, c):
    return (c + _SIGNED[a & 255] * _SIGNED[b & 255] + _SIGNED[a >> 8 & 255] * _SIGNED[b >> 8 & 255]
            + _SIGNED[a >> 16 & 255] * _SIGNED[b >> 16 & 255] + _SIGNED[a >> 24 & 255] * _SIGNED[b >> 24 & 255])


def fma_f16(a, b, c):
    """Rounded once: the product of two halves is a float64."""
    def half(word, shift):
        return float(half_value(word >> shift & 0xFFFF))
    low, high = (half_bits(half(a, s) * half(b, s) + half(c, s)) for s in (0, 16))
    return _signed(low | high << 16)


def _once_per_warp(name, given, compute):
    """This lane's entry of compute(all lanes' values), a list; the first lane to resume computes it for the warp."""
    lane = current()
    values = lane.wait(name, given)
    if len(values) == WARP:                     # one list for the whole warp
        values.append(compute(values))
    return values[WARP][lane.lane]


G, T = np.divmod(np.arange(WARP), 4)


def _words(given, n):
    return np.array([[w & 0xFFFFFFFF for w in words[:n]] for words in given], np.uint32)


def _fragments(d):
    """The four results of every lane, of a 16 x 8 matrix: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)."""
    return np.stack([d[G, 2 * T], d[G, 2 * T + 1], d[G + 8, 2 * T], d[G + 8, 2 * T + 1]], 1)


def _mma(name, halves):
    """m16n8k16 of 16-bit floats, fragments as the PTX ISA has them, g = lane / 4, t = lane % 4, two values a word:

        A 16 x 16    a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)         (row, word of the row)
        B 16 x 8     b0 (t, g), b1 (t + 4, g)                                           (word of the column, column)
    """
    def compute(given):
        h, a, b = halves(_words(given, 6)), np.empty((16, 8, 2), f32), np.empty((8, 8, 2), f32)
        a[G, T], a[G + 8, T], a[G, T + 4], a[G + 8, T + 4] = h[:, 0], h[:, 1], h[:, 2], h[:, 3]
        b[G, T], b[G, T + 4] = h[:, 4], h[:, 5]
        d = _fragments(a.reshape(16, 16) @ b.reshape(8, 16).T) + np.array([words[6:] for words in given], f32)
        return [tuple(results) for results in d]
    return lambda *words: _once_per_warp(name, words, compute)


mma_f16 = _mma("mma_f16", lambda w: w.view(np.float16).reshape(*w.shape, 2).astype(f32))
mma_bf16 = _mma("mma_bf16", lambda w: (w.view(np.uint16).astype(np.uint32) << 16).view(f32).reshape(*w.shape, 2))


def ldmatrix_t(addr):
    """Row r of matrix i is at the address of lane 8 i + r."""
    rows = lds_i32x4(addr)

    def compute(given):
        h = _words(given, 4).view(np.uint16).reshape(4, 8, 8).astype(np.int64)             # matrix, row, column
        return [tuple(_signed(int(m[2 * t, g] | m[2 * t + 1, g] << 16)) for m in h) for g, t in zip(G, T, strict=True)]
    return _once_per_warp("ldmatrix", rows, compute)


def _mma_i8(given):
    """m16n8k16 of bytes, four a word: a0 (g, t), a1 (g + 8, t), b0 (t, g)."""
    h = _words(given, 3).view(np.int8).reshape(WARP, 3, 4).astype(np.int64)
    a, b = np.empty((16, 4, 4), np.int64), np.empty((8, 4, 4), np.int64)
    a[G, T], a[G + 8, T], b[G, T] = h[:, 0], h[:, 1], h[:, 2]
    return [tuple(results) for results in _fragments(a.reshape(16, 16) @ b.reshape(8, 16).T).tolist()]


def mma_i8(a0, a1, b0):
    return _once_per_warp("mma_i8", (a0, a1, b0), _mma_i8)


def shfl_xor(x, mask):
    lane = current()
    return lane.wait(f"shfl_xor {mask}", x)[lane.lane ^ mask]


def shfl(x, lane):
    return current().wait("shfl", x)[lane]


def ballot(predicate):
    return _once_per_warp("ballot", bool(predicate), lambda ps: [sum(p << i for i, p in enumerate(ps))] * WARP)


def popcount(x):
    return int(x).bit_count()


def _butterfly(name, combine):
    """The same tree as on the device: lane i is combined with i ^ 16, i ^ 8, ..."""
    def compute(level):
        for step in (16, 8, 4, 2, 1):
            level = [combine(level[i], level[i ^ step]) for i in range(WARP)]
        return level
    return lambda x: _once_per_warp(name, x, compute)


warp_sum, warp_max = _butterfly("warp_sum", lambda x, y: x + y), _butterfly("warp_max", max)


# ---------------------------------------------------------------- functions of float32
def _function(f):
    return lambda x: f(f32(x))


def _of_two(f):
    return lambda x, y: f(f32(x), f32(y))


exp, expm1, log, log1p = (_function(f) for f in (np.exp, np.expm1, np.log, np.log1p))
sqrt, sin, cos, tanh = (_function(f) for f in (np.sqrt, np.sin, np.cos, np.tanh))
power = _of_two(np.power)
fabs, floor, ceil, trunc = (_function(f) for f in (np.abs, np.floor, np.ceil, np.trunc))
fmin, fmax = _of_two(np.fmin), _of_two(np.fmax)


def _libm(name):
    return lambda x: f32(getattr(math, name)(float(x)))


erf, erfc = _libm("erf"), _libm("erfc")


def round_away(x):
    return np.trunc(f32(x) + np.copysign(f32(0.5), f32(x)))
