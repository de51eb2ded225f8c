"""IQ4_NL and IQ4_XS: codes of 4 bits that name one of 16 uneven levels.

    IQ4_NL  blocks of 32: d f16 | 16 bytes of nibbles              w = d level[q]
    IQ4_XS  super-blocks of 8 x 32: d f16 | upper bits of s, 2 bytes | lower nibbles of s, 4 bytes | 8 x 16 bytes
            w = d (s[j] - 32) level[q], s of 6 bits

The levels are ggml's kvalues_iq4nl.
"""
import itertools

import numpy as np
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native import simd
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, nibbles_ir, splat_const
from ggjit.ops.native.mem import ld_f32, ld_u8, st_f16, st_f32, st_i16, zero_bytes
from ggjit.ops.native.simd import (
    IR,
    B,
    V,
    W,
    const_ir,
    fadd,
    fmul,
    ldf,
    load_ir,
    splat,
    splat_ir,
    stf,
    vec_ir,
    zerof,
)
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.blocks import lookup16_ir, twice_ir
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.k_quants import half_at

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_NL, IQ4_XS = BY_NAME["iq4_nl"], BY_NAME["iq4_xs"]
QK = 256
TRIALS = 16                             # the first guess and 7 to each side of it
WEIGHTS, SCALES, INVERSES, SUMS_X, SUMS_Q = 256, 384, 448, 512, 576
stack = qs.make_stack(640)              # L 256 | w 128 | scales 32 | pad | of the trials: inverses 64, sums 64, 64


# ---------------------------------------------------------------- unpacking
def _levels_ir(b, addr):
    return lookup16_ir(b, LEVELS, concat_ir(b, *nibbles_ir(b, load_ir(b, addr, vec_ir("i8", 16)))))


def _nl_codes_ir(b, p):
    return _levels_ir(b, b.add(p, i64(2)))


def _xs_scales_ir(b, p):
    low = load_ir(b, b.add(p, i64(4)), vec_ir("i8", 4))
    low, high = nibbles_ir(b, low)
    low = b.zext(b.shuffle_vector(low, high, const_ir("i32", [0, 4, 1, 5, 2, 6, 3, 7])), vec_ir("i16", 8))
    top = splat_ir(b, load_ir(b, b.add(p, i64(2)), IR["i16"]), 8)
    top = b.and_(b.lshr(top, const_ir("i16", range(0, 16, 2))), splat_const("i16", 3, 8))
    s = b.or_(low, b.shl(top, splat_const("i16", 4, 8)))
    return twice_ir(b, b.sub(s, splat_const("i16", 32, 8)))


# ---------------------------------------------------------------- quantisation
def _first_above(low, high):
    """The least float32 that best_index_int8 takes for the upper one of two levels: a tie goes up."""
    x, low, high = np.float32((low + high) / 2), np.float32(low), np.float32(high)
    while not x - low < high - x:
        x = np.nextafter(x, low)
    return float(np.nextafter(x, high))


BOUNDS = [_first_above(*pair) for pair in itertools.pairwise(LEVELS)]


def _make_choose(elem, choices):
    """float32 lanes -> what stands in `choices` for the nearest level; for a NaN the last."""
    def build(b, x):
        n = x.type.count
        out = splat_const(elem, choices[0], n)
        for bound, choice in zip(BOUNDS, choices[1:], strict=True):
            below = b.fcmp_ordered("<", x, splat_const("f32", bound, n))
            out = b.select(below, out, splat_const(elem, choice, n))
        return out
    return simd.make_ir(lambda t: V(elem, t.n), build)


_nearest_level, _nearest_code = _make_choose("f32", [float(q) for q in LEVELS]), _make_choose("i8", range(16))
_store_codes = simd.make_store("i8", W)


@exact
def _codes(x, inverse, L):
    for v in range(0, 128, B):
        _store_codes(L + v // 4, _nearest_code(fmul(splat(inverse), ldf(x + v))))


@exact
def _fit(x, w, s, end):
    """sum w q x and sum w q q of 32 values for the levels q that the inverse scales give, a trial in each lane."""
    for v in range(0, end, B):
        inverse, sumqx, sumq2 = ldf(s + INVERSES + v), zerof(), zerof()
        for j in range(32):
            q = _nearest_level(fmul(inverse, splat(qs.at(x, j))))
            wq = fmul(splat(qs.at(w, j)), q)
            sumqx = fadd(sumqx, fmul(wq, splat(qs.at(x, j))))
            sumq2 = fadd(sumq2, fmul(wq, q))
        stf(s + SUMS_X + v, sumqx)
        stf(s + SUMS_Q + v, sumq2)


@exact
def _search(x, w, L, n_tries, s):
    """Scale of one block of 32; without tries the first codes are left in L."""
    largest, lowest = qs.first_largest(x, 32), qs.f32(LEVELS[0])
    if abs(largest) < qs.TINY:
        zero_bytes(L, 32)
        return qs.ZERO
    first = qs.ONE / ((-largest if n_tries > 0 else largest) / lowest)
    if n_tries < 0:
        _codes(x, first, L)
    st_f32(s + INVERSES, first)
    for t in range(1, TRIALS):
        st_f32(s + INVERSES + 4 * t, (qs.f32(t - 1 - n_tries) + lowest) / largest)
    _fit(x, w, s, 4 * TRIALS if n_tries > 0 else B)
    sumqx, sumq2 = qs.at(s + SUMS_X, 0), qs.at(s + SUMS_Q, 0)
    d = sumqx / sumq2 if sumq2 > qs.ZERO else qs.ZERO
    return qs.best_trial(s + SUMS_X, s + SUMS_Q, 1, 2 * n_tries + 2, d, d * sumqx)[0]


@exact
def _weights(x, weights, sigma2, w):
    """Importance times magnitude, or the squares where there is none."""
    if weights != 0:
        qs.importance(x, weights, 32, sigma2, w)
    else:
        for j in range(32):
            st_f32(w + 4 * j, qs.at(x, j) * qs.at(x, j))


@exact
def _pack(L, dst):
    for j in range(16):
        qs.put(dst, j, ld_u8(L + j) | ld_u8(L + j + 16) << 4)


@exact
def _final_codes(x, d, L):
    _codes(x, qs.ONE / d if d != qs.ZERO else qs.ZERO, L)


def _make_nl(n_tries):
    """quantize_row_iq4_nl_impl: n_tries 7 for files, -1 for from_float (quantize_row_iq4_nl_ref)."""
    @exact
    def quantise(src, dst, k, weights):
        s = stack()
        for i in range(k // 32):
            x, to = src + 128 * i, dst + 18 * i
            w = weights + 128 * i if weights != 0 else 0
            _weights(x, w, qs.f32(2) * qs.mean_square(x, 32), s + WEIGHTS)
            d = _search(x, s + WEIGHTS, s, n_tries, s)
            st_f16(to, d)
            if n_tries > 0:
                _final_codes(x, d, s)
            _pack(s, to + 2)
    return quantise


@exact
def _xs(src, dst, k, weights):
    """quantize_row_iq4_nl_impl over super-blocks, 7 tries."""
    s = stack()
    for i in range(k // QK):
        x, to = src + 4 * QK * i, dst + 136 * i
        sigma2 = qs.f32(2) * qs.mean_square(x, QK)
        for j in range(8):
            w = weights + 4 * QK * i + 128 * j if weights != 0 else 0
            _weights(x + 128 * j, w, sigma2, s + WEIGHTS)
            st_f32(s + SCALES + 4 * j, _search(x + 128 * j, s + WEIGHTS, s + 32 * j, 7, s))
        d = -qs.first_largest(s + SCALES, 8) / qs.f32(32)
        st_f16(to, d)
        inverse = qs.ONE / d if d != qs.ZERO else qs.ZERO
        upper = types.int64(0)
        for j in range(8):
            code = qs.clip(qs.nearest_int(inverse * ld_f32(s + SCALES + 4 * j)), -32, 31)
            _final_codes(x + 128 * j, d * qs.f32(code), s + 32 * j)
            code += 32
            lower = to + 4 + j // 2
            qs.put(lower, 0, (code & 15) << 4 | (ld_u8(lower) & 15) if j % 2 else code & 15)
            upper |= code >> 4 << (2 * j)
            _pack(s + 32 * j, to + 8 + 16 * j)
        st_i16(to + 2, types.int16(upper))


def _unweighted(quantise):
    @exact
    def quantise_plain(src, dst, k):
        quantise(src, dst, k, 0)
    return quantise_plain


def _traits():
    files, here = _make_nl(7), _make_nl(-1)
    nl = Plain(IQ4_NL, lambda b, p: [_nl_codes_ir(b, p)], signed=True)
    yield nl.traits(_unweighted(here), quantize=_unweighted(files), quantize_weighted=files)
    yield Super(IQ4_XS, lambda b, p: [_levels_ir(b, b.add(p, i64(8 + 16 * g))) for g in range(8)], _xs_scales_ir,
                half_at(0), signed=True).traits(_unweighted(_xs), quantize_weighted=_xs)


TRAITS = tuple(_traits())
