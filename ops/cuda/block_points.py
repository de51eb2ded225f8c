"""Quantised blocks whose codes name one of 16 levels, or a point of a grid; their form is in block_bits.py."""
import numpy as np
from numpy import float32 as f32

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.cuda.block_bits import ZERO, Blocks, four_bits, halves_at, nibble_pair, q8_scale
from ggjit.ops.cuda.compiler.core import (
    bits_f32,
    device,
    ld_f16,
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


iq4_nibbles = nibble_pair(ld_i32_2, 2)


@device
def _iq4_pair(p, i):
    a, b = iq4_nibbles(p, i)
    return named_iq4(a), named_iq4(b)


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
        """Byte offset of the point of run i; upper bits and shift are those of the group (S) or of the run (M)."""
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


def _signed(name, words, scale, pair=None):
    """Blocks of a type without offsets, whose codes are signed and in the order of the row."""
    return Blocks(BY_NAME[name], 2, words, scale, halves_at, mins=False, pair=pair)


POINTS = (
    _signed("iq4_nl", _named(named_iq4, ld_i32_2, 2), q8_scale, _iq4_pair),
    _signed("iq4_xs", _named(named_iq4, ld_i32, 8), _iq4_xs_scale),
    _signed("mxfp4", _named(named_fp4, ld_i32_1, 1), _mxfp4_scale),
    _signed("nvfp4", _nvfp4_words, _nvfp4_scale),
    _signed("iq2_xxs", _signed_points(_iq2_xxs_run, iq2_xxs, 8), _odd_scale(_upper_four(9, 8), 0, 0.125)),
    _signed("iq2_xs", _signed_points(_iq2_xs_run, iq2_xs, 8), _odd_scale(_nibble(66), 0, 0.125)),
    _signed("iq2_s", _signed_points(_iq2_s_run, iq2_s, 8), _odd_scale(_nibble(74), 0, 0.125)),
    _signed("iq3_xxs", _signed_points(_iq3_xxs_run, iq3_xxs, 4), _odd_scale(_upper_four(69, 4), 0, 0.25)),
    _signed("iq3_s", _signed_points(_iq3_s_run, iq3_s, 4), _odd_scale(_iq3_s_nibble, 0, 1)),
    _signed("iq1_s", _iq1_words(2, 34, 2, False), _odd_scale(_iq1_s_bits, 0, 0.125)),
    _signed("iq1_m", _iq1_words(0, 32, 2, True), _iq1_m_scale))
