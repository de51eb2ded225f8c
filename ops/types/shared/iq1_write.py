"""How IQ1_S and IQ1_M are written: the sums of a split (ops/types/shared/quant_ternary.py), d, and the bytes (iq.py).

IQ1_S has one scale and one shift for 32 values, IQ1_M a scale for 16 and a shift for 8 of them.
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.isa import W
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import ld_i32, ld_u8, st_f16, st_f32, st_i16
from ggjit.ops.native.simd import fadd, fmul, fsub, ldf, splat, stf
from ggjit.ops.types.shared import quant_ternary as qt
from ggjit.ops.types.shared.iq_grids import GRIDS
from ggjit.ops.types.shared.quant_grid import Grid, GridQuantizer
from ggjit.ops.types.shared.quant_search import ONE, ZERO, at, f32, put

GRID = Grid(GRIDS["iq1_s"], 3)


# ---------------------------------------------------------------- IQ1_S
@exact
def _s_minus(kind, g):
    return kind


@exact
def _s_sum_up(x, s):
    sx, sw = ZERO, ZERO
    st_f32(s + qt.SUMS, sx)
    st_f32(s + qt.SUMS + qt.ROW, sw)
    for j in range(32):
        i = types.int64(ld_u8(s + qt.ORDER + j))
        sx += at(s + qt.WEIGHTS, i) * at(x, i)
        sw += at(s + qt.WEIGHTS, i)
        st_f32(s + qt.SUMS + 4 * (j + 1), sx)
        st_f32(s + qt.SUMS + qt.ROW + 4 * (j + 1), sw)


@exact
def _thrice(below, at_one, above, p0, p1, p2):
    """below p0 + at_one p1 + above p2"""
    return fadd(fadd(fmul(below, splat(p0)), fmul(at_one, splat(p1))), fmul(above, splat(p2)))


@exact
def _s_sums(s, i1, i2):
    x1, w1 = at(s + qt.SUMS, i1), at(s + qt.SUMS + qt.ROW, i1)
    x2, w2 = ldf(s + qt.SUMS + 4 * i2), ldf(s + qt.SUMS + qt.ROW + 4 * i2)
    below, here, above = splat(x1), fsub(x2, splat(x1)), fsub(splat(at(s + qt.SUMS, 32)), x2)
    wbelow, where, wabove = splat(w1), fsub(w2, splat(w1)), fsub(splat(at(s + qt.SUMS + qt.ROW, 32)), w2)
    for kind in range(2):
        shift = f32(-qt.SHIFT) if kind else f32(qt.SHIFT)
        p0, p1, p2 = shift - ONE, shift, shift + ONE
        row = s + qt.TRIALS + 8 * W * kind
        stf(row, _thrice(below, here, above, p0, p1, p2))
        stf(row + 4 * W, _thrice(fmul(wbelow, splat(p0)), fmul(where, splat(p1)), fmul(wabove, splat(p2)), p0, p1, p2))


@exact
def _s_finish(x, importances, sigma2, s, high, to):
    st_f16(to, high / f32(15) * f32(1.125))
    for j in range(8):
        word = types.int64(ld_u8(s + qt.CODES + j)) << 12 | types.int64(ld_u8(s + qt.KINDS + j)) << 15
        for g in range(4):
            point = types.int64(ld_i32(s + qt.POINTS + 4 * (4 * j + g)))
            put(to + 2, 4 * j + g, point)
            word |= point >> 8 << 3 * g
        st_i16(to + 34 + 2 * j, types.int16(word))


# ---------------------------------------------------------------- IQ1_M
@exact
def _m_minus(kind, g):
    return kind >> (1 - g) & 1


@exact
def _m_sum_up(x, s):
    """Four running sums: w x of the first and of the second half, then w of both."""
    for row in range(4):
        st_f32(s + qt.SUMS + qt.ROW * row, ZERO)
    for j in range(16):
        i = types.int64(ld_u8(s + qt.ORDER + j))
        w = at(s + qt.WEIGHTS, i)
        for half in range(2):
            px = s + qt.SUMS + qt.ROW * half
            pw = px + 2 * qt.ROW
            mine = i // 8 == half
            st_f32(px + 4 * (j + 1), at(px, j) + w * at(x, i) if mine else at(px, j))
            st_f32(pw + 4 * (j + 1), at(pw, j) + w if mine else at(pw, j))


@exact
def _m_half(s, half, i1, i2, shift):
    """The sums of a half: total p2 - (S[i1] + S[i2]), and the same with squares of p."""
    px = s + qt.SUMS + qt.ROW * half
    pw = px + 2 * qt.ROW
    p0, p1, p2 = shift - ONE, shift, shift + ONE
    sumqx = fsub(splat(at(px, 16) * p2), fadd(splat(at(px, i1)), ldf(px + 4 * i2)))
    first = splat(at(pw, 16) * p2 * p2 + at(pw, i1) * (p0 * p0 - p1 * p1))
    return sumqx, fadd(first, fmul(ldf(pw + 4 * i2), splat(p1 * p1 - p2 * p2)))


@exact
def _m_sums(s, i1, i2):
    for kind in range(4):
        x0, q0 = _m_half(s, 0, i1, i2, f32(-qt.SHIFT) if kind & 2 else f32(qt.SHIFT))
        x1, q1 = _m_half(s, 1, i1, i2, f32(-qt.SHIFT) if kind & 1 else f32(qt.SHIFT))
        row = s + qt.TRIALS + 8 * W * kind
        stf(row, fadd(x0, x1))
        stf(row + 4 * W, fadd(q0, q1))


@exact
def _m_refit(x, importances, sigma2, s, d):
    """The scale d of least error for the chosen codes and scales."""
    sumqx, sumq2 = ZERO, ZERO
    for j in range(16):
        qt.weigh(x + 64 * j, importances + 64 * j if importances != 0 else 0, 16, sigma2, s + qt.WEIGHTS)
        kind, scale = types.int64(ld_u8(s + qt.KINDS + j)), f32(2 * types.int64(ld_u8(s + qt.CODES + j)) + 1)
        for i in range(16):
            word = types.int64(ld_i32(s + qt.FOUND + 4 * (2 * j + i // 8)))
            w, q = at(s + qt.WEIGHTS, i), qt.level(word, i % 8, _m_minus(kind, i // 8)) * scale
            sumqx += w * q * at(x, 16 * j + i)
            sumq2 += w * q * q
    return sumqx / sumq2 if sumq2 > ZERO else d


@exact
def _m_finish(x, importances, sigma2, s, high, to):
    for j in range(16):
        kind, word = types.int64(ld_u8(s + qt.KINDS + j)), types.int64(0)
        for g in range(2):
            point = types.int64(ld_i32(s + qt.POINTS + 4 * (2 * j + g)))
            put(to, 2 * j + g, point)
            word |= (point >> 8 | _m_minus(kind, g) << 3) << 4 * g
        put(to + 32, j, word)
    d = _m_refit(x, importances, sigma2, s, high / f32(15)) if high != ZERO else ZERO
    st_f16(s + qt.TRIALS, d * f32(1.1125))
    bits = types.int64(ld_u8(s + qt.TRIALS)) | types.int64(ld_u8(s + qt.TRIALS + 1)) << 8
    for i in range(4):
        word = (bits >> 4 * i & 15) << 12
        for j in range(4):
            word |= types.int64(ld_u8(s + qt.CODES + 4 * i + j)) << 3 * j
        st_i16(to + 48 + 2 * i, types.int16(word))


# ---------------------------------------------------------------- the types
def _writer(name, ternary, needs_importances=False):
    return GridQuantizer(GRID, qt.make_quantise(ternary, BY_NAME[name].nbytes), needs_importances)


WRITERS = {
    "iq1_s": _writer("iq1_s", qt.Ternary(GRID, 32, 1e-12, 2, _s_minus, _s_sum_up, _s_sums, _s_finish), True),
    "iq1_m": _writer("iq1_m", qt.Ternary(GRID, 16, 1e-7, 4, _m_minus, _m_sum_up, _m_sums, _m_finish))}
