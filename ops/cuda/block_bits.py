"""Quantised blocks as kernels read them, 32 values at a time; and the types whose codes are bits of the block.

A block is a number of units of 32 values.  A unit has 8 words of four codes, in 2 or 4 segments: runs of values that
lie side by side in the row and share a scale.

    value = d * code + m            Q4_0, unit 0 of 1, two segments

    word      0    1    2    3  |  4    5    6    7
    value     0-3  4-7  8-11 12-15 16-19  ...  28-31        segment s starts at value at(u, s)
              low nibbles       |  high nibbles

    words(block, u) -> 8 words      codes are signed bytes
    scale(block, u, s) -> (d, m)    of segment s
    at(u, s)                        first value of segment s in the block
    pair(block, i) -> 2 words       2 i and 2 i + 1 of a block of one unit: values 8 i ... 8 i + 7, for attention, whose
                                    lanes read eight values each

Types whose codes name levels or points of a grid are in block_points.py, the table of all in blocks.py.
"""
import dataclasses
from collections.abc import Callable

import numpy as np
from numpy import float32 as f32

from ggjit.ops.core.types import BY_NAME, Type
from ggjit.ops.cuda.compiler.core import device, ld_f16, ld_i8, ld_i32, ld_i32_2, ld_u8, table

LOW, THREES, ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
ZERO = f32(0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A type's words, scale and at; see above."""
    type: Type
    segments: int               # of a unit: 2 of 16 values, or 4 of 8
    words: Callable
    scale: Callable
    at: Callable
    mins: bool = True           # False: m is always 0
    pair: Callable | None = None


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


def nibble_pair(word, q_offs):
    """Two words of eight nibbles; their upper halves are not cleared."""
    @device
    def pair(p, i):
        q, shift = p + q_offs + 8 * (i & 1), 4 * (i >> 1)
        return word(q) >> shift, word(q + 4) >> shift
    return pair


def _four_bits_pair(word, q_offs):
    nibbles = nibble_pair(word, q_offs)

    @device
    def pair(p, i):
        a, b = nibbles(p, i)
        return a & LOW, b & LOW
    return pair


def _five_bits_pair(word, q_offs, h_offs):
    four_bits_pair = _four_bits_pair(word, q_offs)

    @device
    def pair(p, i):
        h, (a, b) = word(p + h_offs), four_bits_pair(p, i)
        return a | fifth_bits(h, 2 * i), b | fifth_bits(h, 2 * i + 1)
    return pair


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
def _q8_pair(p, i):
    return ld_i32_2(p + 2 + 8 * i), ld_i32_2(p + 6 + 8 * i)


@device
def q8_scale(p, u, s):
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


# ---------------------------------------------------------------- five codes of three values a byte
power_of_3 = table(np.array([1, 3, 9, 27, 81], np.int32))


@device
def _digit(byte, power):
    """A byte is a fraction of 256 in base 3; its digits are 0, 1, 2."""
    return ((byte & 255) * power & 255) * 3 >> 8


@device
def _tq1_0_word(p, u, half, j):
    """Codes 16 half + 4 j ... + 3 of unit u: digit n of four bytes.

    units 0 to 4    digit u of 32 bytes
    5 to 7          two digits of the next 16 bytes, of the last unit one; its other half: all four of 4 bytes
    """
    at, n = p + 16 * half + 4 * j, u
    if u > 4:
        at, n = p + 32 + 4 * j, 2 * (u - 5) + half
        if u == 7 and half == 1:
            at, n = p + 48, j
    x, power = ld_i32_2(at), power_of_3(n)
    return (_digit(x, power) | _digit(x >> 8, power) << 8 | _digit(x >> 16, power) << 16 | _digit(x >> 24, power) << 24)


@device
def _tq1_0_words(p, u):
    return (_tq1_0_word(p, u, 0, 0), _tq1_0_word(p, u, 0, 1), _tq1_0_word(p, u, 0, 2), _tq1_0_word(p, u, 0, 3),
            _tq1_0_word(p, u, 1, 0), _tq1_0_word(p, u, 1, 1), _tq1_0_word(p, u, 1, 2), _tq1_0_word(p, u, 1, 3))


BITS = (
    Blocks(BY_NAME["q8_0"], 2, _q8_words, q8_scale, halves_at, mins=False, pair=_q8_pair),
    Blocks(BY_NAME["q4_0"], 2, _four_bits(nibbles_2, 2), _centred(8), halves_at,
           pair=_four_bits_pair(ld_i32_2, 2)),
    Blocks(BY_NAME["q4_1"], 2, _four_bits(nibbles_4, 4), _with_min, halves_at,
           pair=_four_bits_pair(ld_i32, 4)),
    Blocks(BY_NAME["q5_0"], 2, _five_bits(nibbles_2, ld_i32_2, 6, 2), _centred(16), halves_at,
           pair=_five_bits_pair(ld_i32_2, 6, 2)),
    Blocks(BY_NAME["q5_1"], 2, _five_bits(nibbles_4, ld_i32, 8, 4), _with_min, halves_at,
           pair=_five_bits_pair(ld_i32, 8, 4)),
    Blocks(BY_NAME["q2_K"], 4, _q2_K_words, _q2_K_scale, octet_at),
    Blocks(BY_NAME["q3_K"], 4, _q3_K_words, _q3_K_scale, octet_at),
    Blocks(BY_NAME["q4_K"], 2, _q4_K_words, k4_scale, k4_at),
    Blocks(BY_NAME["q5_K"], 2, _q5_K_words, k4_scale, k4_at),
    Blocks(BY_NAME["q6_K"], 4, _q6_K_words, _q6_K_scale, octet_at),
    Blocks(BY_NAME["q1_0"], 2, _q1_0_words, _centred(1), halves_at),
    Blocks(BY_NAME["q2_0"], 2, _q2_0_words, _centred(1), halves_at),
    Blocks(BY_NAME["tq2_0"], 4, _tq2_0_words, _centred(1, 64), octet_at),
    Blocks(BY_NAME["tq1_0"], 2, _tq1_0_words, _centred(1, 52), halves_at))
