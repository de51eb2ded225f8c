"""Quantised blocks as kernels read them: 32 values at a time.

A block is a number of units of 32 values.  A unit has 8 words of four codes, in 2 or 4 segments: runs of values that
lie side by side in the row and share a scale.

    value = d * code + m            Q4_0, unit 0 of 1, two segments

    word      0    1    2    3  |  4    5    6    7
    value     0-3  4-7  8-11 12-15 16-19  ...  28-31        segment s starts at value at(u, s)
              low nibbles       |  high nibbles

    words(block, u) -> 8 words      codes are signed bytes
    scale(block, u, s) -> (d, m)    of segment s
    at(u, s)                        first value of segment s in the block
"""
import dataclasses
from collections.abc import Callable

import numpy as np
from numpy import float32 as f32

from ggjit.ops.core.types import BY_NAME, Type
from ggjit.ops.cuda.compiler.core import (
    bits_f32,
    device,
    ld_f16,
    ld_i8,
    ld_i32,
    ld_i32_2,
    ld_u8,
    ld_u16,
    low_f16,
    popcount,
    table,
)
from ggjit.ops.types import fp4, iq4_nl
from ggjit.ops.types.shared.iq_grids import GRIDS

LOW, THREES, ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
ZERO = f32(0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    type: Type
    segments: int               # of a unit: 2 of 16 values, or 4 of 8
    words: Callable
    scale: Callable
    at: Callable
    mins: bool = True           # False: m is always 0


# ---------------------------------------------------------------- blocks of 32: one unit, segments of 16
@device
def halves_at(u, s):
    return 32 * u + 16 * s


@device
def eight_words(p):
    return (ld_i32_2(p), ld_i32_2(p + 4), ld_i32_2(p + 8), ld_i32_2(p + 12), ld_i32_2(p + 16), ld_i32_2(p + 20),
            ld_i32_2(p + 24), ld_i32_2(p + 28))


def _nibbles(word):
    """Sixteen bytes: values 0-15 in the low nibbles, 16-31 in the high ones.  word: loads four bytes."""
    @device
    def words(p):
        a, b, c, d = word(p), word(p + 4), word(p + 8), word(p + 12)
        return (a & LOW, b & LOW, c & LOW, d & LOW, (a >> 4) & LOW, (b >> 4) & LOW, (c >> 4) & LOW, (d >> 4) & LOW)
    return words


nibbles_2, nibbles_4 = _nibbles(ld_i32_2), _nibbles(ld_i32)         # at multiples of 2 or 4 bytes


@device
def fifth_bits(h, i):
    """Bits 4 i ... 4 i + 3 of h as bit 4 of four bytes."""
    x = (h >> (4 * i)) & 15
    return ((x & 1) << 4) | ((x & 2) << 11) | ((x & 4) << 18) | ((x & 8) << 25)


def _five_bits(nibbles, word, q_offs, h_offs):
    @device
    def words(p, u):
        h = word(p + h_offs)
        w = nibbles(p + q_offs)
        return (w[0] | fifth_bits(h, 0), w[1] | fifth_bits(h, 1), w[2] | fifth_bits(h, 2), w[3] | fifth_bits(h, 3),
                w[4] | fifth_bits(h, 4), w[5] | fifth_bits(h, 5), w[6] | fifth_bits(h, 6), w[7] | fifth_bits(h, 7))
    return words


def _four_bits(nibbles, q_offs):
    @device
    def words(p, u):
        return nibbles(p + q_offs)
    return words


def _centred(zero, d_offs=0):
    """d code - d zero"""
    @device
    def scale(p, u, s):
        d = ld_f16(p + d_offs)
        return d, d * f32(-zero)
    return scale


@device
def _with_min(p, u, s):
    return ld_f16(p), ld_f16(p + 2)


@device
def _q8_words(p, u):
    return eight_words(p + 2)


@device
def _q8_scale(p, u, s):
    return ld_f16(p), ZERO


# ---------------------------------------------------------------- blocks of 256: 8 units
#   Q4_K, Q5_K    unit u: bytes 16 u ... 16 u + 15; values 64 (u / 2) + 16 (u % 2) in the low nibbles, 32 further on
#                 in the high ones
@device
def k4_at(u, s):
    return (u >> 1) * 64 + (u & 1) * 16 + 32 * s


@device
def k4_scale(p, u, s):
    """Twelve bytes of 6-bit scales and mins (ops/types/shared/k_quants.py)."""
    j, q = 2 * (u >> 1) + s, p + 4
    if j < 4:
        sc, m = ld_u8(q + j) & 63, ld_u8(q + j + 4) & 63
    else:
        both = ld_u8(q + j + 4)
        sc = (both & 15) | (ld_u8(q + j - 4) >> 6) << 4
        m = (both >> 4) | (ld_u8(q + j) >> 6) << 4
    return ld_f16(p) * f32(sc), -ld_f16(p + 2) * f32(m)


@device
def _q4_K_words(p, u):
    return nibbles_4(p + 16 + 16 * u)


@device
def _q5_K_words(p, u):
    w, h, b = nibbles_4(p + 48 + 16 * u), p + 16 + 16 * (u & 1), 2 * (u >> 1)
    h0, h1, h2, h3 = ld_i32(h) >> b, ld_i32(h + 4) >> b, ld_i32(h + 8) >> b, ld_i32(h + 12) >> b
    return (w[0] | (h0 & ONES) << 4, w[1] | (h1 & ONES) << 4, w[2] | (h2 & ONES) << 4, w[3] | (h3 & ONES) << 4,
            w[4] | (h0 >> 1 & ONES) << 4, w[5] | (h1 >> 1 & ONES) << 4, w[6] | (h2 >> 1 & ONES) << 4,
            w[7] | (h3 >> 1 & ONES) << 4)


#   Q2_K, Q3_K, Q6_K    unit u: half u / 4 of 128 values, bytes 8 (u % 4) ... + 7; segments of 8 values, 32 apart
@device
def octet_at(u, s):
    return (u >> 2) * 128 + (u & 3) * 8 + 32 * s


def _two_bits(word):
    @device
    def words(p):
        a, b = word(p), word(p + 4)
        return (a & THREES, b & THREES, (a >> 2) & THREES, (b >> 2) & THREES, (a >> 4) & THREES, (b >> 4) & THREES,
                (a >> 6) & THREES, (b >> 6) & THREES)
    return words


two_bits_2, two_bits_4 = _two_bits(ld_i32_2), _two_bits(ld_i32)


@device
def _q2_K_words(p, u):
    return two_bits_4(p + 16 + 32 * (u >> 2) + 8 * (u & 3))


@device
def _q2_K_scale(p, u, s):
    both = ld_u8(p + 8 * (u >> 2) + 2 * s + ((u & 3) >> 1))
    return ld_f16(p + 80) * f32(both & 15), -ld_f16(p + 82) * f32(both >> 4)


@device
def _q3_K_words(p, u):
    w, h, b = two_bits_2(p + 32 + 32 * (u >> 2) + 8 * (u & 3)), p + 8 * (u & 3), 4 * (u >> 2)
    x, y = ld_i32_2(h) >> b, ld_i32_2(h + 4) >> b
    return (w[0] | (x & ONES) << 2, w[1] | (y & ONES) << 2, w[2] | (x >> 1 & ONES) << 2, w[3] | (y >> 1 & ONES) << 2,
            w[4] | (x >> 2 & ONES) << 2, w[5] | (y >> 2 & ONES) << 2, w[6] | (x >> 3 & ONES) << 2,
            w[7] | (y >> 3 & ONES) << 2)


@device
def _q3_K_scale(p, u, s):
    j = 8 * (u >> 2) + 2 * s + ((u & 3) >> 1)
    low = ld_u8(p + 96 + (j & 7)) >> (4 * (j >> 3)) & 15
    top = ld_u8(p + 104 + (j & 3)) >> (2 * (j >> 2)) & 3
    d = ld_f16(p + 108) * f32((low | top << 4) - 32)
    return d, d * f32(-4)


@device
def _q6_K_words(p, u):
    q, h = p + 64 * (u >> 2) + 8 * (u & 3), p + 128 + 32 * (u >> 2) + 8 * (u & 3)
    a, b, c, d, x, y = ld_i32_2(q), ld_i32_2(q + 4), ld_i32_2(q + 32), ld_i32_2(q + 36), ld_i32_2(h), ld_i32_2(h + 4)
    return (a & LOW | (x & THREES) << 4, b & LOW | (y & THREES) << 4,
            c & LOW | (x >> 2 & THREES) << 4, d & LOW | (y >> 2 & THREES) << 4,
            a >> 4 & LOW | (x >> 4 & THREES) << 4, b >> 4 & LOW | (y >> 4 & THREES) << 4,
            c >> 4 & LOW | (x >> 6 & THREES) << 4, d >> 4 & LOW | (y >> 6 & THREES) << 4)


@device
def _q6_K_scale(p, u, s):
    d = ld_f16(p + 208) * f32(ld_i8(p + 192 + 8 * (u >> 2) + 2 * s + ((u & 3) >> 1)))
    return d, d * f32(-32)


# ---------------------------------------------------------------- one to two bits (ops/types/ternary.py)
@device
def four_bits(x):
    """Bits 0 ... 3 of x, each in a byte of its own."""
    return (x & 1) | (x & 2) << 7 | (x & 4) << 14 | (x & 8) << 21


@device
def _q1_0_words(p, u):
    x = ld_i32_2(p + 2 + 4 * u)
    return (2 * four_bits(x), 2 * four_bits(x >> 4), 2 * four_bits(x >> 8), 2 * four_bits(x >> 12),
            2 * four_bits(x >> 16), 2 * four_bits(x >> 20), 2 * four_bits(x >> 24), 2 * four_bits(x >> 28))


@device
def four_pairs(x):
    """Bits 0 ... 7 of x as four codes of two bits."""
    return (x & 3) | (x & 12) << 6 | (x & 48) << 12 | (x & 192) << 18


@device
def _q2_0_words(p, u):
    a, b = ld_i32_2(p + 2 + 8 * u), ld_i32_2(p + 6 + 8 * u)
    return (four_pairs(a), four_pairs(a >> 8), four_pairs(a >> 16), four_pairs(a >> 24),
            four_pairs(b), four_pairs(b >> 8), four_pairs(b >> 16), four_pairs(b >> 24))


@device
def _tq2_0_words(p, u):
    return two_bits_2(p + 32 * (u >> 2) + 8 * (u & 3))


# ---------------------------------------------------------------- codes that name one of 16 levels
def _levels(levels):
    """named(x): the levels of four nibbles, one a byte."""
    level = table(np.array(levels, np.int32) & 255)

    @device
    def named(x):
        return level(x & 15) | level(x >> 8 & 15) << 8 | level(x >> 16 & 15) << 16 | level(x >> 24 & 15) << 24
    return named


named_iq4, named_fp4 = _levels(iq4_nl.LEVELS), _levels(fp4.LEVELS)


def _named(named, word, q_offs):
    """Sixteen bytes a unit, as `_nibbles`."""
    @device
    def words(p, u):
        q = p + q_offs + 16 * u
        a, b, c, d = word(q), word(q + 4), word(q + 8), word(q + 12)
        return (named(a), named(b), named(c), named(d), named(a >> 4), named(b >> 4), named(c >> 4), named(d >> 4))
    return words


@device
def ld_i32_1(p):
    """Four bytes anywhere."""
    return ld_u8(p) | ld_u8(p + 1) << 8 | ld_u8(p + 2) << 16 | ld_u8(p + 3) << 24


@device
def _iq4_xs_scale(p, u, s):
    low, high = ld_u8(p + 4 + (u >> 1)) >> (4 * (u & 1)) & 15, ld_u16(p + 2) >> (2 * u) & 3
    return ld_f16(p) * f32((low | high << 4) - 32), ZERO


@device
def _mxfp4_scale(p, u, s):
    """2^(e - 128)"""
    e = ld_u8(p)
    return bits_f32((e - 1) << 23 if e >= 2 else 0x00200000 << e), ZERO


@device
def _nvfp4_words(p, u):
    q = p + 4 + 16 * u
    a, b, c, d = ld_i32(q), ld_i32(q + 4), ld_i32(q + 8), ld_i32(q + 12)
    return (named_fp4(a), named_fp4(b), named_fp4(a >> 4), named_fp4(b >> 4),
            named_fp4(c), named_fp4(d), named_fp4(c >> 4), named_fp4(d >> 4))


@device
def _nvfp4_scale(p, u, s):
    """Half of four bits of exponent (bias 7) and three of fraction; 0x7F is 0."""
    x = ld_u8(p + 2 * u + s)
    if x == 0x7F:
        return ZERO, ZERO
    exponent, fraction = x >> 3 & 15, x & 7
    if exponent == 0:
        return f32(fraction) * f32(2.0 ** -10), ZERO
    return bits_f32(exponent + 119 << 23 | fraction << 20), ZERO


# ---------------------------------------------------------------- codes that name points of a grid (ops/types/iq.py)
def _grid(points):
    return table(np.ascontiguousarray(points, np.int8).view(np.int32).ravel())


iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s = (_grid(GRIDS[name]) for name in "iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s".split())
# 8 point + 1, behind them 8 point - 1
iq1 = _grid(np.concatenate([8 * GRIDS["iq1_s"] + np.int8(1), 8 * GRIDS["iq1_s"] - np.int8(1)]))
N_IQ1 = len(GRIDS["iq1_s"])


@device
def negated(w, s):
    """The four bytes of w, none 0, negated where bits 0 ... 3 of s are set."""
    m = four_bits(s)
    return (w ^ m * 255) + m


@device
def eight_signs(s):
    """Seven signs and the eighth, which makes their number even."""
    s &= 127
    return s | (popcount(s) & 1) << 7


def _signed_points(point_and_signs, grid, per_point):
    """words(p, u) of four runs of eight values.  point_and_signs(p, u, i) -> points of run i (a second one where they
    have four values), and its eight signs."""
    @device
    def run(p, u, i):
        a, b, s = point_and_signs(p, u, i)
        if per_point == 8:
            return negated(grid(2 * a), s), negated(grid(2 * a + 1), s >> 4)
        return negated(grid(a), s), negated(grid(b), s >> 4)

    @device
    def words(p, u):
        a, b, c, d = run(p, u, 0), run(p, u, 1), run(p, u, 2), run(p, u, 3)
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]
    return words


@device
def _iq2_xxs_run(p, u, i):
    return ld_u8(p + 2 + 8 * u + i), 0, eight_signs(ld_i32_2(p + 6 + 8 * u) >> (7 * i))


@device
def _iq2_xs_run(p, u, i):
    word = ld_u16(p + 2 + 8 * u + 2 * i)
    return word & 511, 0, eight_signs(word >> 9)


@device
def _iq2_s_run(p, u, i):
    high = ld_u8(p + 66 + u) >> (2 * i) & 3
    return ld_u8(p + 2 + 4 * u + i) | high << 8, 0, ld_u8(p + 34 + 4 * u + i)


@device
def _iq3_xxs_run(p, u, i):
    q = p + 2 + 8 * u + 2 * i
    return ld_u8(q), ld_u8(q + 1), eight_signs(ld_i32_2(p + 66 + 4 * u) >> (7 * i))


@device
def _iq3_s_run(p, u, i):
    q, high = p + 2 + 8 * u + 2 * i, ld_u8(p + 66 + u) >> (2 * i)
    return ld_u8(q) | (high & 1) << 8, ld_u8(q + 1) | (high & 2) << 7, ld_u8(p + 74 + 4 * u + i)


def _odd_scale(of, d_offs, factor):
    """d factor (2 s + 1)"""
    factor = f32(factor)

    @device
    def scale(p, u, s):
        return ld_f16(p + d_offs) * factor * f32(2 * of(p, u, s) + 1), ZERO
    return scale


def _upper_four(offs, step):
    @device
    def of(p, u, s):
        return ld_u8(p + offs + step * u) >> 4
    return of


def _nibble(offs):
    @device
    def of(p, u, s):
        return ld_u8(p + offs + u) >> (4 * s) & 15
    return of


@device
def _iq3_s_nibble(p, u, s):
    return ld_u8(p + 106 + (u >> 1)) >> (4 * (u & 1)) & 15


def _iq1_words(points_offs, high_offs, high_step, is_m):
    @device
    def at(p, u, i):
        """Where the two words of run i stand: upper bits and shift are of the group (S) or of the run (M)."""
        high = ld_u16(p + high_offs + high_step * u)
        down = high >> 15
        if is_m:
            down = high >> (4 * i + 3) & 1
        return 2 * ((ld_u8(p + points_offs + 4 * u + i) | (high >> ((4 if is_m else 3) * i) & 7) << 8) + N_IQ1 * down)

    @device
    def words(p, u):
        a, b, c, d = at(p, u, 0), at(p, u, 1), at(p, u, 2), at(p, u, 3)
        return iq1(a), iq1(a + 1), iq1(b), iq1(b + 1), iq1(c), iq1(c + 1), iq1(d), iq1(d + 1)
    return words


@device
def _iq1_s_bits(p, u, s):
    return ld_u16(p + 34 + 2 * u) >> 12 & 7


@device
def _iq1_m_scale(p, u, s):
    """d: the upper four bits of four words of scales."""
    q = p + 48
    d = low_f16(ld_u16(q) >> 12 | ld_u16(q + 2) >> 12 << 4 | ld_u16(q + 4) >> 12 << 8 | ld_u16(q + 6) >> 12 << 12)
    return d * f32(0.125) * f32(2 * (ld_u16(q + 2 * (u >> 1)) >> (6 * (u & 1) + 3 * s) & 7) + 1), ZERO


def _signed(name, words, scale):
    """Codes with their signs, scales of 16 values or more, in the row's order."""
    return Blocks(BY_NAME[name], 2, words, scale, halves_at, mins=False)


BLOCKS = {b.type: b for b in (
    Blocks(BY_NAME["q8_0"], 2, _q8_words, _q8_scale, halves_at, mins=False),
    Blocks(BY_NAME["q4_0"], 2, _four_bits(nibbles_2, 2), _centred(8), halves_at),
    Blocks(BY_NAME["q4_1"], 2, _four_bits(nibbles_4, 4), _with_min, halves_at),
    Blocks(BY_NAME["q5_0"], 2, _five_bits(nibbles_2, ld_i32_2, 6, 2), _centred(16), halves_at),
    Blocks(BY_NAME["q5_1"], 2, _five_bits(nibbles_4, ld_i32, 8, 4), _with_min, halves_at),
    Blocks(BY_NAME["q2_K"], 4, _q2_K_words, _q2_K_scale, octet_at),
    Blocks(BY_NAME["q3_K"], 4, _q3_K_words, _q3_K_scale, octet_at),
    Blocks(BY_NAME["q4_K"], 2, _q4_K_words, k4_scale, k4_at),
    Blocks(BY_NAME["q5_K"], 2, _q5_K_words, k4_scale, k4_at),
    Blocks(BY_NAME["q6_K"], 4, _q6_K_words, _q6_K_scale, octet_at),
    Blocks(BY_NAME["q1_0"], 2, _q1_0_words, _centred(1), halves_at),
    Blocks(BY_NAME["q2_0"], 2, _q2_0_words, _centred(1), halves_at),
    Blocks(BY_NAME["tq2_0"], 4, _tq2_0_words, _centred(1, 64), octet_at),
    _signed("iq4_nl", _named(named_iq4, ld_i32_2, 2), _q8_scale),
    _signed("iq4_xs", _named(named_iq4, ld_i32, 8), _iq4_xs_scale),
    _signed("mxfp4", _named(named_fp4, ld_i32_1, 1), _mxfp4_scale),
    _signed("nvfp4", _nvfp4_words, _nvfp4_scale),
    _signed("iq2_xxs", _signed_points(_iq2_xxs_run, iq2_xxs, 8), _odd_scale(_upper_four(9, 8), 0, 0.125)),
    _signed("iq2_xs", _signed_points(_iq2_xs_run, iq2_xs, 8), _odd_scale(_nibble(66), 0, 0.125)),
    _signed("iq2_s", _signed_points(_iq2_s_run, iq2_s, 8), _odd_scale(_nibble(74), 0, 0.125)),
    _signed("iq3_xxs", _signed_points(_iq3_xxs_run, iq3_xxs, 4), _odd_scale(_upper_four(69, 4), 0, 0.25)),
    _signed("iq3_s", _signed_points(_iq3_s_run, iq3_s, 4), _odd_scale(_iq3_s_nibble, 0, 1)),
    _signed("iq1_s", _iq1_words(2, 34, 2, False), _odd_scale(_iq1_s_bits, 0, 0.125)),
    _signed("iq1_m", _iq1_words(0, 32, 2, True), _iq1_m_scale))}


@device
def byte_of(word, i):
    """Byte i of a word, signed, as a float."""
    return f32(((word >> (8 * i) & 255) ^ 128) - 128)


@device
def put_word(put, dst, size, word, d, m):
    put(dst, d * byte_of(word, 0) + m)
    put(dst + size, d * byte_of(word, 1) + m)
    put(dst + 2 * size, d * byte_of(word, 2) + m)
    put(dst + 3 * size, d * byte_of(word, 3) + m)


def unpacker(type, put, size):
    """unpack(dst, block, u): the 32 values of unit u to their places in a row of float elements of `size` bytes.

    dst: where value 0 of the block goes.
    """
    b = BLOCKS[type]
    words, scale, at, four = b.words, b.scale, b.at, b.segments == 4

    @device
    def segment(dst, block, u, s, w0, w1):
        d, m = scale(block, u, s)
        p = dst + size * at(u, s)
        put_word(put, p, size, w0, d, m)
        put_word(put, p + 4 * size, size, w1, d, m)

    @device
    def unpack(dst, block, u):
        w = words(block, u)
        if four:
            segment(dst, block, u, 0, w[0], w[1])
            segment(dst, block, u, 1, w[2], w[3])
            segment(dst, block, u, 2, w[4], w[5])
            segment(dst, block, u, 3, w[6], w[7])
        else:
            segment(dst, block, u, 0, w[0], w[1])
            segment(dst + 8 * size, block, u, 0, w[2], w[3])
            segment(dst, block, u, 1, w[4], w[5])
            segment(dst + 8 * size, block, u, 1, w[6], w[7])
    return unpack
