"""Quantising one block of 32 values by one thread, byte-equal to ggml's reference quantisers.

    QUANTIZE[type](get)(src, step, dst)     elements at src, src + step, ... read by get -> one block at dst

The K-quants' searches are left to the CPU, as in ggml.
"""
import numpy as np
from numpy import float32 as f32

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.cuda.compiler.core import device, fabs, round_away, st_f16, st_i8, st_i16, table, to_i32
from ggjit.ops.types import iq4_nl
from ggjit.ops.types.shared.quant_search import TINY

ZERO, ONE, HALF = f32(0), f32(1), f32(0.5)


@device
def inverse(d):
    return ONE / d if d != ZERO else ZERO


def _first_largest(get):
    """The first of the values of largest size, with its sign."""
    @device
    def largest(src, step):
        size, value = ZERO, ZERO
        for i in range(32):
            x = get(src + i * step)
            if fabs(x) > size:
                size, value = fabs(x), x
        return value
    return largest


def _range(get):
    @device
    def low_and_high(src, step):
        low = high = get(src)
        for i in range(1, 32):
            x = get(src + i * step)
            low = x if x < low else low
            high = x if x > high else high
        return low, high
    return low_and_high


def _q8_0(get):
    largest = _first_largest(get)

    @device
    def quantize(src, step, dst):
        d = fabs(largest(src, step)) / f32(127)
        k = inverse(d)
        st_f16(dst, d)
        for i in range(32):
            st_i8(dst + 2 + i, to_i32(round_away(get(src + i * step) * k)))
    return quantize


def _code(n_bits, zero):
    top = (1 << n_bits) - 1
    zero = f32(zero)

    @device
    def code(x, k):
        q = to_i32(x * k + zero)
        return q if q < top else top
    return code


def _nibbles(get, n_bits, with_min):
    """4 or 5 bits a value: d [m] [fifth bits] and sixteen bytes of nibbles."""
    largest, low_and_high = _first_largest(get), _range(get)
    zero = f32(1 << (n_bits - 1))
    code = _code(n_bits, HALF if with_min else zero + HALF)
    q_offs = 2 + 2 * with_min + 4 * (n_bits == 5)
    h_offs, five, steps = 2 + 2 * with_min, n_bits == 5, f32((1 << n_bits) - 1)

    @device
    def quantize(src, step, dst):
        base = ZERO
        if with_min:
            base, high = low_and_high(src, step)
            d = (high - base) / steps
            st_f16(dst + 2, base)
        else:
            d = largest(src, step) / -zero
        k = inverse(d)
        st_f16(dst, d)
        fifth = 0
        for i in range(16):
            x, y = code(get(src + i * step) - base, k), code(get(src + (i + 16) * step) - base, k)
            st_i8(dst + q_offs + i, (x & 15) | (y & 15) << 4)
            fifth |= (x >> 4) << i | (y >> 4) << (i + 16)
        if five:
            st_i16(dst + h_offs, fifth & 0xFFFF)
            st_i16(dst + h_offs + 2, fifth >> 16 & 0xFFFF)
    return quantize


level = table(np.array(iq4_nl.LEVELS, np.int32))


@device
def nearest_level(x):
    """Number of the nearest level; a tie goes up."""
    low, high = 0, 15
    while high - low > 1:
        middle = (low + high) // 2
        if x < f32(level(middle)):
            high = middle
        else:
            low = middle
    if x <= f32(level(0)) or x >= f32(level(15)):
        return 0 if x <= f32(level(0)) else 15
    return low if x - f32(level(low)) < f32(level(high)) - x else high


def _iq4_nl(get):
    """d fits the codes of the first guess by least squares, weights x^2."""
    largest = _first_largest(get)

    @device
    def quantize(src, step, dst):
        top, sumqx, sumq2 = largest(src, step), ZERO, ZERO
        tiny = fabs(top) < TINY
        k = ZERO if tiny else ONE / (top / f32(level(0)))
        for i in range(16):
            x, y = get(src + i * step), get(src + (i + 16) * step)
            st_i8(dst + 2 + i, 0 if tiny else nearest_level(k * x) | nearest_level(k * y) << 4)
        for i in range(32):
            x = get(src + i * step)
            q = f32(level(nearest_level(k * x)))
            sumqx += x * x * q * x
            sumq2 += x * x * q * q
        st_f16(dst, sumqx / sumq2 if sumq2 > ZERO and not tiny else ZERO)
    return quantize


QUANTIZE = {BY_NAME["q8_0"]: _q8_0, BY_NAME["iq4_nl"]: _iq4_nl,
            BY_NAME["q4_0"]: lambda get: _nibbles(get, 4, False), BY_NAME["q4_1"]: lambda get: _nibbles(get, 4, True),
            BY_NAME["q5_0"]: lambda get: _nibbles(get, 5, False), BY_NAME["q5_1"]: lambda get: _nibbles(get, 5, True)}
