"""The quantiser behind IQ1: all splits of sorted values into three groups are tried, then codes become grid points.

    x[i] ~ scale (code[i] - 1 +- 1/8)       one scale for `run` values, a sign of the shift for some; codes are 0, 1, 2,
                                            eight of them are a point

Once the values are sorted and their weights summed up, the sums of a split (i1, i2) take a few operations: codes are 0
before place i1, 1 from there, 2 from i2 on.  W splits are tried at a time, and one wins only if it is better than all
before it in ggml's order.  What is found for 256 values lies in scratch memory, from where a type file packs it:

    FOUND int32 [32], words   POINTS int32 [32]   KINDS bytes [256 / run]   CODES bytes [256 / run], 0 ... 7

(ggml: quantize_row_iq1_s_impl, quantize_row_iq1_m_impl, iq1_find_best_neighbour2.)
"""
import dataclasses
import math
from collections.abc import Callable

from llvmlite import ir
from numba import types

from ggjit.ops.native.isa import W
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import IR_I64, ld_i32, ld_u8, st_f32, st_i32, zero_bytes
from ggjit.ops.native.simd import ldf, make_ir, splat_ir
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.quant_grid import LARGEST, Grid, entry_of, make_nearest

QK, SHIFT = 256, 0.125
# scratch: what is found (words and points int32 [32], kind and code of a run, its scale), then what a run needs
FOUND, POINTS, KINDS, CODES, SCALES = 0, 128, 256, 272, 288
WEIGHTS, ORDER, TRIALS = 384, 512, 576
SUMS, ROW = 1088, 256                   # running sums, float32 [n + 1 + W] each: x w, or those of both halves; then w
scratch = qs.make_stack(SUMS + 4 * ROW)
NAN = qs.f32(math.nan)


@dataclasses.dataclass(frozen=True)
class Ternary:
    """What the two types do differently.

    grid        of 8 codes 0, 1, 2
    run         values that share a scale
    tiny        below, a run counts as zeros
    n_kinds     ways to choose the signs of the shifts
    minus       (kind, group) -> 1 where the shift is -1/8
    sum_up      (x, s): running sums of the sorted values, rows from s + SUMS; behind them are NaN, never better
    sums        (s, i1, i2): W sums of w x q and W of w q q for the splits (i1, i2 ... i2 + W - 1), a kind after the
                other, to s + TRIALS
    finish      (x, importances, sigma2, s, high, block address): d and all other bytes
    """
    grid: Grid
    run: int
    tiny: float
    n_kinds: int
    minus: Callable
    sum_up: Callable
    sums: Callable
    finish: Callable


# ---------------------------------------------------------------- splits
@exact
def weigh(x, importances, n, sigma2, w):
    if importances != 0:
        qs.importance(x, importances, n, sigma2, w)
    else:
        for i in range(n):
            st_f32(w + 4 * i, qs.at(x, i) * qs.at(x, i))


@exact
def _sort(x, n, order):
    """Numbers of the values by size, equal ones in their order; NaN has no place, some number stands there.

    By counting: of an insertion sort inlined here, `while j > 0 and ...`, LLVM 22 dropped the `j > 0`.
    """
    for i in range(n):
        qs.put(order, i, i)
    for i in range(n):
        place, v = 0, qs.at(x, i)
        for j in range(i):
            place += qs.at(x, j) <= v
        for j in range(i + 1, n):
            place += qs.at(x, j) < v
        qs.put(order, place, i)


def _better_ir(b, sumqx, sumq2, best):
    """1 where q > 0 and x x > best q in any lane"""
    positive = b.fcmp_ordered(">", sumq2, ir.Constant(sumq2.type, None))
    better = b.fcmp_ordered(">", b.fmul(sumqx, sumqx), b.fmul(splat_ir(b, best, W), sumq2))
    lanes = b.bitcast(b.and_(positive, better), ir.IntType(W))
    return b.zext(b.icmp_unsigned("!=", lanes, ir.IntType(W)(0)), IR_I64)


_better = make_ir(lambda *ts: types.int64, _better_ir)


def _make_best_split(t):
    n, n_kinds, sums = t.run, t.n_kinds, t.sums

    @exact
    def best_split(s, scale):
        """(scale, i1, i2, kind) of the best split; i1 = -1 where there is none."""
        best, best1, best2, best_kind = qs.f32(-LARGEST), -1, -1, 0
        for i1 in range(n + 1):
            for i2 in range(i1, n + 1, W):
                sums(s, i1, i2)
                better = 0
                for kind in range(n_kinds):
                    row = s + TRIALS + 8 * W * kind
                    better |= _better(ldf(row), ldf(row + 4 * W), best)
                if better == 0:
                    continue
                for i in range(W):
                    for kind in range(n_kinds):
                        row = s + TRIALS + 8 * W * kind
                        sumqx, sumq2 = qs.at(row, i), qs.at(row, W + i)
                        if sumq2 > qs.ZERO and sumqx * sumqx > best * sumq2:
                            scale = sumqx / sumq2
                            best, best1, best2, best_kind = scale * sumqx, i1, i2 + i, kind
        return scale, best1, best2, best_kind
    return best_split


@exact
def level(word, i, minus):
    """The value that the two-bit code i of the word stands for."""
    return qs.f32((word >> 2 * i & 3) - 1) + (qs.f32(-SHIFT) if minus else qs.f32(SHIFT))


@exact
def _offset(minus):
    return qs.f32(-1 - SHIFT) if minus else qs.f32(SHIFT - 1)


def _make_run(t):
    n, groups, n_kinds, minus, tiny, sum_up = t.run, t.run // 8, t.n_kinds, t.minus, t.tiny, t.sum_up
    best_split, nearest, first_word = _make_best_split(t), make_nearest(t.grid, 1), int(t.grid.words[0])

    @exact
    def snap(x, scale, kind, s, table, words):
        """Words -> points of the grid; returns whether they were."""
        exactly = True
        for g in range(groups):
            word = types.int64(ld_i32(words + 4 * g))
            entry = entry_of(table, word)
            if entry < 0:
                exactly = False
                word = nearest(table, entry, x + 32 * g, s + WEIGHTS + 32 * g, scale, _offset(minus(kind, g)))
                st_i32(words + 4 * g, types.int32(word))
        return exactly

    @exact
    def refit(x, scale, kind, s, words):
        sumqx, sumq2 = qs.ZERO, qs.ZERO
        for g in range(groups):
            word = types.int64(ld_i32(words + 4 * g))
            for i in range(8):
                w, q = qs.at(s + WEIGHTS, 8 * g + i), level(word, i, minus(kind, g))
                sumqx += w * q * qs.at(x, 8 * g + i)
                sumq2 += w * q * q
        return sumqx / sumq2 if sumqx > qs.ZERO and sumq2 > qs.ZERO else scale

    @exact
    def one_run(x, importances, sigma2, table, s, j):
        """scale >= 0 of run j; its words, points and kind in their places"""
        words = s + FOUND + 4 * groups * j
        for g in range(groups):
            st_i32(words + 4 * g, types.int32(first_word))
        weigh(x, importances, n, sigma2, s + WEIGHTS)
        high = abs(qs.at(x, 0))
        for i in range(1, n):
            high = abs(qs.at(x, i)) if not high > abs(qs.at(x, i)) else high
        if high < qs.f32(tiny):
            return qs.ZERO
        _sort(x, n, s + ORDER)
        sum_up(x, s)
        scale, i1, i2, kind = best_split(s, high)
        if i1 < 0:
            return qs.ZERO
        zero_bytes(words, 4 * groups)
        for i in range(n):
            to = types.int64(ld_u8(s + ORDER + i))
            code = types.int64(i >= i1) + types.int64(i >= i2)
            code = 2 - code if scale < qs.ZERO else code
            word = words + 4 * (to // 8)
            st_i32(word, types.int32(types.int64(ld_i32(word)) | code << 2 * (to % 8)))
        if scale < qs.ZERO:
            scale, kind = -scale, n_kinds - 1 - kind
        if not snap(x, scale, kind, s, table, words):
            scale = refit(x, scale, kind, s, words)
        qs.put(s + KINDS, j, kind)
        for g in range(groups):
            st_i32(s + POINTS + 4 * (groups * j + g), entry_of(table, types.int64(ld_i32(words + 4 * g))))
        return scale
    return one_run


def make_quantise(t, nbytes):
    """GridQuantizer's quantise."""
    n, finish, one_run = t.run, t.finish, _make_run(t)

    @exact
    def quantise(src, dst, k, importances, table):
        s = scratch()
        for i in range(ROW):                # four rows of ROW bytes
            st_f32(s + SUMS + 4 * i, NAN)
        for i in range(k // QK):
            x, to = src + 4 * QK * i, dst + nbytes * i
            here = importances + 4 * QK * i if importances != 0 else 0
            sigma2 = qs.f32(2) * qs.sum_squares(x, QK) / qs.f32(QK)
            zero_bytes(s, SCALES)
            high = qs.ZERO
            for j in range(QK // n):
                w = here + 4 * n * j if here != 0 else 0
                scale = one_run(x + 4 * n * j, w, sigma2, table, s, j)
                st_f32(s + SCALES + 4 * j, scale)
                high = scale if not high > scale else high
            if high == qs.ZERO:
                zero_bytes(s + KINDS, CODES - KINDS)
            else:
                inverse = qs.ONE / (high / qs.f32(15))
                for j in range(QK // n):
                    code = qs.nearest_int(qs.f32(0.5) * (inverse * qs.at(s + SCALES, j) - qs.ONE))
                    qs.put(s + CODES, j, qs.clip(code, 0, 7))
            zero_bytes(to, nbytes)
            finish(x, here, sigma2, s, high, to)
    return quantise
