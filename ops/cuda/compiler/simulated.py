"""The functions of `intrinsics.py` in plain Python, for the simulator.

Every load and store is checked against the simulated memory, alignment and races included; `simulator.py` schedules the
threads.
"""
import ctypes
import math
import sys
import types

import numpy as np

from ggjit.ops.cuda.compiler.simulator import WARP, check, current, reads, reads_shared, wrote, wrote_shared

f32 = np.float32
local = types.SimpleNamespace(array=np.empty)


def _scalar(ctype, convert):
    """(load, store) of global memory, of shared memory, and the load of constants."""
    nbytes, at = ctypes.sizeof(ctype), ctype.from_address

    def loader(reads):
        def load(addr):
            check(addr, nbytes, nbytes)
            reads(addr)
            return convert(at(int(addr)).value)
        return load

    def storer(wrote):
        def store(addr, value):
            check(addr, nbytes, nbytes)
            wrote(addr, lambda: at(int(addr)).value == value)
            at(int(addr)).value = value
        return store

    def constant(addr):
        known = current().block.launch.constants
        if addr not in known:
            check(addr, nbytes, nbytes)
            known[addr] = convert(at(int(addr)).value)
        return known[addr]
    return (loader(reads), storer(wrote)), (loader(reads_shared), storer(wrote_shared)), constant


(ld_f32, st_f32), (lds_f32, sts_f32), ldc_f32 = _scalar(ctypes.c_float, f32)
(ld_i64, st_i64), (lds_i64, sts_i64), ldc_i64 = _scalar(ctypes.c_int64, int)
(ld_i32, st_i32), (lds_i32, sts_i32), ldc_i32 = _scalar(ctypes.c_int32, int)
(ld_i16, st_i16), _, _ = _scalar(ctypes.c_int16, int)
(ld_u16, st_u16), _, _ = _scalar(ctypes.c_uint16, int)
(ld_i8, st_i8), _, _ = _scalar(ctypes.c_int8, int)
(ld_u8, _), _, _ = _scalar(ctypes.c_uint8, int)


def st_i64_any(addr, value):
    check(addr, 8, 8)
    ctypes.c_int64.from_address(int(addr)).value = value


def half_bits(x):
    with np.errstate(all="ignore"):
        return int(np.float16(x).view(np.uint16))


def half_value(bits):
    return f32(np.uint16(bits).view(np.float16))


def bf16_bits(x):
    bits = int(f32(x).view(np.uint32))
    if x != x:
        return bits >> 16 | 64
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def bf16_value(bits):
    return np.uint32(bits << 16).view(f32)


def ld_f16(addr):
    return half_value(ld_u16(addr))


def st_f16(addr, x):
    st_u16(addr, half_bits(x))


def ld_bf16(addr):
    return bf16_value(ld_u16(addr))


def st_bf16(addr, x):
    st_u16(addr, bf16_bits(x))


def _signed(x):
    """The low 32 bits as an int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def ld_i32_2(addr):
    return _signed(ld_u16(addr) | ld_u16(addr + 2) << 16)


def ld_i32x4(addr):
    check(addr, 16, 16)
    return tuple(ld_i32(addr + 4 * i) for i in range(4))


def ld_f32x4(addr):
    check(addr, 16, 16)
    return tuple(ld_f32(addr + 4 * i) for i in range(4))


def sts_i32x4(addr, v):
    check(addr, 16, 16)
    for i in range(4):
        sts_i32(addr + 4 * i, v[i])


def shared(nbytes):
    """An allocation for each calling function, as on the device (intrinsics.py)."""
    key = object()
    return lambda: current().block.shared((key, sys._getframe(1).f_code), nbytes)


def table(values):
    return lambda i: int(values[i])


def device(f):
    """Device functions are plain functions here."""
    return f


def thread():
    return current().number


def n_threads():
    return current().block.launch.block[0]


def block():
    return current().block.index[0]


def n_blocks():
    return current().block.launch.grid[0]


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


def to_i32(x):
    return 0 if x != x else int(min(max(float(x), -2147483648.0), 2147483647.0))


# ---------------------------------------------------------------- arithmetic
def _bytes_of(words):
    """int32 words -> their signed bytes, little end first."""
    return np.array([w & 0xFFFFFFFF for w in words], np.uint32).view(np.int8).astype(np.int64)


def dp4a(a, b, c):
    return int(c) + int(_bytes_of([a]) @ _bytes_of([b]))


def _once_per_warp(name, given, compute):
    """This lane's entry of compute(all lanes' values), a list; the first lane to resume computes it for the warp."""
    lane = current()
    values = lane.wait(name, given)
    if len(values) == WARP:                     # one list for the whole warp
        values.append(compute(values))
    return values[WARP][lane.lane]


def _fragments(d):
    """The four results of every lane, of a 16 x 8 matrix: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)."""
    return [(d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1])
            for g, t in (divmod(lane, 4) for lane in range(WARP))]


def _mma(name, value):
    """m16n8k16 of 16-bit floats, fragments as the PTX ISA has them, g = lane / 4, t = lane % 4, two values a word:

        A 16 x 16    a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)         (row, word of the row)
        B 16 x 8     b0 (t, g), b1 (t + 4, g)                                           (word of the column, column)
    """
    def compute(words):
        a, b, c = np.zeros((16, 16), f32), np.zeros((16, 8), f32), np.zeros((16, 8), f32)
        for lane, (a0, a1, a2, a3, b0, b1, *cs) in enumerate(words):
            g, t = divmod(lane, 4)
            for row, word, bits in ((g, t, a0), (g + 8, t, a1), (g, t + 4, a2), (g + 8, t + 4, a3)):
                a[row, 2 * word:2 * word + 2] = value(bits & 0xFFFF), value(bits >> 16 & 0xFFFF)
            for word, bits in ((t, b0), (t + 4, b1)):
                b[2 * word:2 * word + 2, g] = value(bits & 0xFFFF), value(bits >> 16 & 0xFFFF)
            c[g, 2 * t:2 * t + 2], c[g + 8, 2 * t:2 * t + 2] = cs[:2], cs[2:]
        return _fragments(c + a @ b)
    return lambda *words: _once_per_warp(name, words, compute)


mma_f16, mma_bf16 = _mma("mma_f16", half_value), _mma("mma_bf16", bf16_value)


def _mma_i8(words):
    """m16n8k16 of bytes, four a word: a0 (g, t), a1 (g + 8, t), b0 (t, g)."""
    a, b = np.zeros((16, 16), np.int64), np.zeros((16, 8), np.int64)
    for lane, (a0, a1, b0) in enumerate(words):
        g, t = divmod(lane, 4)
        a[g, 4 * t:4 * t + 4], a[g + 8, 4 * t:4 * t + 4] = _bytes_of([a0]), _bytes_of([a1])
        b[4 * t:4 * t + 4, g] = _bytes_of([b0])
    return [tuple(map(int, r)) for r in _fragments(a @ b)]


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
    return lambda *x: f32(f(*(f32(v) for v in x)))


exp, expm1, log, log1p = (_function(f) for f in (np.exp, np.expm1, np.log, np.log1p))
sqrt, sin, cos, tanh = (_function(f) for f in (np.sqrt, np.sin, np.cos, np.tanh))
power, atan2 = _function(np.power), _function(np.arctan2)
fabs, floor, ceil, trunc = (_function(f) for f in (np.abs, np.floor, np.ceil, np.trunc))
fmin, fmax = _function(np.fmin), _function(np.fmax)


def _libm(name):
    return lambda x: f32(getattr(math, name)(float(x)))


erf, erfc = _libm("erf"), _libm("erfc")


def round_away(x):
    return np.trunc(f32(x) + np.copysign(f32(0.5), f32(x)))
