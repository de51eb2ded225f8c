"""The quantiser behind IQ2 and IQ3: magnitudes are points of a grid times a scale, signs are kept apart.

    x[i] ~ sign[i] scale (2 code[i] + 1)        one scale for `run` values, the codes of `size` values are a grid point

Scales around a first guess are tried, one in each lane: their sums do not depend on each other.  Everything is float32
in ggml's order.  What is found for 256 values lies in scratch memory, from where a type file packs it:

    POINTS int32 [256 / size]   SIGNS bytes [32], bit i: value i of 8 is negative   CODES bytes [256 / run], 0 ... 15

(ggml: quantize_row_iq2_xxs_impl, quantize_row_iq2_xs_impl, ..._iq2_s_impl, ..._iq3_xxs_impl, ..._iq3_s_impl.)
"""
import dataclasses
import math

from numba import types

from ggjit.ops.native import simd
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import splat_const
from ggjit.ops.native.mem import ld_i32, ld_u8, st_f16, st_f32, st_i32, zero_bytes
from ggjit.ops.native.simd import B, V
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.quant_grid import Grid, entry_of, make_nearest

QK, MAX_TRIALS = 256, 32
ROW = 4 * MAX_TRIALS                    # bytes of one number of every trial
POINTS, SIGNS, CODES, SCALES = 0, 256, 288, 320
WEIGHTS, ROOTS, SIZES, LEVELS, BEST = 384, 512, 640, 768, 800       # of a run: w, sqrt w, |x|, scratch, best words
INVERSES, SUMS_X, SUMS_Q, WORDS = 832, 832 + ROW, 832 + 2 * ROW, 832 + 3 * ROW
scratch = qs.make_stack(WORDS + 8 * ROW)   # words: [groups of the run][trials]
OFF = 1 << 30                           # flag of a word: the codes were not a grid point, and this is a neighbour
LOST, ANY, ALL = range(3)


@dataclasses.dataclass(frozen=True)
class Search:
    """What the types do differently.

    run        values that share a scale, 16 or 32
    n_steps    2 n_steps + 1 scales are tried; their inverses are `step` apart, in codes of the largest value
    tiny       below, a run counts as zeros
    spread     sigma^2 = spread mean x^2; w = importance sqrt(sigma^2 + x^2)
    base       without importances w = base sigma^2 + x^2
    fudge      d is stored times this
    even       signs: eight values have an even number of minus signs, of which seven are kept
    fit        the first guess is a fit, else the largest value
    again      points searched again with the best scale: LOST those off the grid; ANY all, where one is; ALL
    """
    grid: Grid
    run: int
    n_steps: int
    step: float
    tiny: float
    spread: int = 2
    base: float = 0.0
    fudge: float = 1.0
    even: bool = False
    fit: bool = False
    again: int = LOST


# ---------------------------------------------------------------- weights and signs
def _make_weigh(search):
    n, base = search.run, search.base

    @exact
    def weigh(x, importances, sigma2, s):
        """w and sqrt w of a run"""
        if importances != 0:
            qs.importance(x, importances, n, sigma2, s + WEIGHTS)
        else:
            for i in range(n):
                square = qs.at(x, i) * qs.at(x, i)
                st_f32(s + WEIGHTS + 4 * i, qs.f32(base) * sigma2 + square if base else square)
        for i in range(n):
            st_f32(s + ROOTS + 4 * i, qs.f32(math.sqrt(qs.at(s + WEIGHTS, i))))
    return weigh


@exact
def _split(x, w, sizes):
    """Write the absolute values of the eight values x to `sizes`; returns their sign bits."""
    signs = types.int64(0)
    for i in range(8):
        v = qs.at(x, i)
        negative = not v >= qs.ZERO
        st_f32(sizes + 4 * i, -v if negative else v)
        signs |= types.int64(negative) << i
    return signs


@exact
def _split_even(x, w, sizes):
    """As _split, with an even number of minus signs: where it is odd, the value of least weight changes its sign."""
    signs = _split(x, w, sizes)
    odd = signs ^ signs >> 4
    odd ^= odd >> 2
    if (odd ^ odd >> 1) & 1:
        least, j = qs.at(w, 0) * qs.at(x, 0) * qs.at(x, 0), 0
        for i in range(1, 8):
            v = qs.at(w, i) * qs.at(x, i) * qs.at(x, i)
            if v < least:
                least, j = v, i
        st_f32(sizes + 4 * j, -qs.at(sizes, j))
        signs ^= 1 << j
    return signs & 127


# ---------------------------------------------------------------- trials: lanes are scales
_shl = simd.make_ir(lambda *t: t[0], lambda b, x, n: b.shl(x, n))
_lshr = simd.make_ir(lambda *t: t[0], lambda b, x, n: b.lshr(x, n))


def _make_round(top):
    """float32 lanes -> int32: nearest_int, then clipped to 0 ... top"""
    def build(b, x):
        n = x.type.count

        def c(k):
            return splat_const("i32", k, n)
        q = b.bitcast(b.fadd(x, splat_const("f32", float(qs.MAGIC), n)), simd.vec_ir("i32", n))
        q = b.sub(b.and_(q, c(0x7FFFFF)), c(0x400000))
        q = b.select(b.icmp_signed("<", q, c(top)), q, c(top))
        return b.select(b.icmp_signed(">", q, c(0)), q, c(0))
    return simd.make_ir(lambda t: V("i32", t.n), build)


def _make_trials(search):
    """(words, losses): the two passes over all scales, W at a time."""
    size, bits, groups = search.grid.size, search.grid.bits, search.run // search.grid.size
    end = -(-4 * (2 * search.n_steps + 1) // B) * B         # bytes of a row in use
    round_codes, mask = _make_round(search.grid.n_levels - 1), (1 << bits) - 1

    @exact
    def round_words(s):
        """The codes of every group of sizes, at every inverse scale: round((inverse size - 1) / 2)."""
        half, one = simd.splat(qs.f32(0.5)), simd.splat(qs.ONE)
        for v in range(0, end, B):
            inverse = simd.ldf(s + INVERSES + v)
            for g in range(groups):
                word = simd.zeroi()
                for i in range(size):
                    x = simd.splat(qs.at(s + SIZES, size * g + i))
                    code = round_codes(simd.fmul(half, simd.fsub(simd.fmul(inverse, x), one)))
                    word = simd.ior(word, _shl(code, simd.splati(types.int32(bits * i))))
                simd.sti(s + WORDS + ROW * g + v, word)

    @exact
    def sum_words(s):
        """sum w x q and sum w q q of the words, q = 2 code + 1"""
        for v in range(0, end, B):
            sumqx, sumq2 = simd.zerof(), simd.zerof()
            for g in range(groups):
                word = simd.ldi(s + WORDS + ROW * g + v)
                for i in range(size):
                    code = simd.iand(_lshr(word, simd.splati(types.int32(bits * i))), simd.splati(types.int32(mask)))
                    q = simd.i2f(simd.iadd(simd.iadd(code, code), simd.splati(types.int32(1))))
                    w = qs.at(s + WEIGHTS, size * g + i)
                    sumqx = simd.fadd(sumqx, simd.fmul(simd.splat(w * qs.at(s + SIZES, size * g + i)), q))
                    sumq2 = simd.fadd(sumq2, simd.fmul(simd.fmul(simd.splat(w), q), q))
            simd.stf(s + SUMS_X + v, sumqx)
            simd.stf(s + SUMS_Q + v, sumq2)
    return round_words, sum_words


def _make_snap(search):
    """snap(word, group, scale, table, s): the word if it is a point, else its best neighbour, marked OFF."""
    size, nearest = search.grid.size, make_nearest(search.grid, 2)

    @exact
    def snap(word, g, scale, table, s):
        entry = entry_of(table, word)
        if entry >= 0:
            return word
        offs = 4 * size * g
        return nearest(table, entry, s + SIZES + offs, s + ROOTS + offs, scale, qs.ONE) | OFF
    return snap


def _make_best_trial(search, snap):
    """best_trial(high, scale, table, s) -> scale: that of the best trial, whose words are left in BEST."""
    groups, n_steps, step, top = (search.run // search.grid.size, search.n_steps, search.step,
                                  2 * search.grid.n_levels - 1)
    round_words, sum_words = _make_trials(search)
    nothing = OFF if search.again == ANY else 0

    @exact
    def best_trial(high, scale, table, s):
        for t in range(MAX_TRIALS):
            st_f32(s + INVERSES + 4 * t, (qs.f32(top) + qs.f32(t - n_steps) * qs.f32(step)) / high)
        round_words(s)
        for t in range(2 * n_steps + 1):
            trial = qs.ONE / qs.at(s + INVERSES, t)
            for g in range(groups):
                p = s + WORDS + ROW * g + 4 * t
                st_i32(p, types.int32(snap(types.int64(ld_i32(p)), g, trial, table, s)))
        sum_words(s)
        best, which = qs.ZERO, -1
        for t in range(2 * n_steps + 1):
            sumqx, sumq2 = qs.at(s + SUMS_X, t), qs.at(s + SUMS_Q, t)
            if sumq2 > qs.ZERO and sumqx * sumqx > best * sumq2:
                scale = sumqx / sumq2
                best, which = scale * sumqx, t
        for g in range(groups):
            word = ld_i32(s + WORDS + ROW * g + 4 * which) if which >= 0 else types.int32(nothing)
            st_i32(s + BEST + 4 * g, word)
        return scale
    return best_trial


def _make_refine(search, snap):
    """refine(scale, table, s) -> scale: words of BEST are searched again with the best scale, then it is refitted."""
    size, bits, groups, again = search.grid.size, search.grid.bits, search.run // search.grid.size, search.again
    top, mask = search.grid.n_levels - 1, (1 << search.grid.bits) - 1

    @exact
    def refine(scale, table, s):
        lost = types.int64(0)
        for g in range(groups):
            lost |= types.int64(ld_i32(s + BEST + 4 * g)) & OFF
        if not scale > qs.ZERO or (lost == 0 and again != ALL):
            return scale
        inverse = qs.ONE / scale
        sumqx, sumq2 = qs.ZERO, qs.ZERO
        for g in range(groups):
            word = types.int64(ld_i32(s + BEST + 4 * g))
            if again != LOST or word & OFF:
                word = 0
                for i in range(size):
                    code = qs.nearest_int(qs.f32(0.5) * (inverse * qs.at(s + SIZES, size * g + i) - qs.ONE))
                    word |= qs.clip(code, 0, top) << bits * i
                word = snap(word, g, scale, table, s)
                st_i32(s + BEST + 4 * g, types.int32(word))
            for i in range(size):
                w, q = qs.at(s + WEIGHTS, size * g + i), qs.f32(2 * (word >> bits * i & mask) + 1)
                sumqx += w * qs.at(s + SIZES, size * g + i) * q
                sumq2 += w * q * q
        return sumqx / sumq2 if sumq2 > qs.ZERO else scale
    return refine


# ---------------------------------------------------------------- runs and super-blocks
def _make_run(search):
    """one_run(x, importances, sigma2, table, s, j) -> scale >= 0 of run j, its points and signs in their places."""
    n, size, n_levels, even, fit, tiny = (search.run, search.grid.size, search.grid.n_levels, search.even, search.fit,
                                          search.tiny)
    weigh, snap, split = _make_weigh(search), _make_snap(search), _split_even if even else _split
    best_trial, refine = _make_best_trial(search, snap), _make_refine(search, snap)

    @exact
    def one_run(x, importances, sigma2, table, s, j):
        weigh(x, importances, sigma2, s)
        signs = s + SIGNS + n // 8 * j
        for i in range(n // 8):
            qs.put(signs, i, split(x + 32 * i, s + WEIGHTS + 32 * i, s + SIZES + 32 * i))
        high = qs.at(s + SIZES, 0)
        for i in range(1, n):
            high = qs.at(s + SIZES, i) if not high > qs.at(s + SIZES, i) else high
        scale, zeros = high / qs.f32(2 * n_levels - 1), high < qs.f32(tiny)
        if fit and not zeros:
            scale = qs.search_positive(n, n_levels + 1, s + SIZES, s + LEVELS, s + WEIGHTS)
            high = scale * qs.f32(n_levels)
            zeros = high <= qs.ZERO
        if zeros:
            zero_bytes(signs, n // 8)
            return qs.ZERO
        scale = refine(best_trial(high, scale, table, s), table, s)
        if scale < qs.ZERO:
            scale = -scale
            for i in range(n // 8):
                qs.put(signs, i, ld_u8(signs + i) ^ (127 if even else 255))
        for g in range(n // size):
            word = types.int64(ld_i32(s + BEST + 4 * g)) & (OFF - 1)
            st_i32(s + POINTS + 4 * (n // size * j + g), entry_of(table, word))
        return scale
    return one_run


def make_quantise(search, nbytes, pack):
    """GridQuantizer's quantise; pack(s, block address) writes all bytes but the first two, which are d."""
    n, even, spread, fudge, one_run = search.run, search.even, search.spread, search.fudge, _make_run(search)

    @exact
    def quantise(src, dst, k, importances, table):
        s = scratch()
        for i in range(k // QK):
            x, to = src + 4 * QK * i, dst + nbytes * i
            sigma2 = qs.f32(spread) * qs.sum_squares(x, QK) / qs.f32(QK)
            zero_bytes(s, SCALES)
            high = qs.ZERO
            for j in range(QK // n):
                w = importances + 4 * (QK * i + n * j) if importances != 0 else 0
                scale = one_run(x + 4 * n * j, w, sigma2, table, s, j)
                st_f32(s + SCALES + 4 * j, scale)
                high = scale if not high > scale else high
            zero_bytes(to, nbytes)
            if high == qs.ZERO and even:
                continue
            d = high / qs.f32(31)
            st_f16(to, d * qs.f32(fudge))
            inverse = qs.ONE / d
            for j in range(QK // n):
                code = qs.nearest_int(qs.f32(0.5) * (inverse * qs.at(s + SCALES, j) - qs.ONE))
                qs.put(s + CODES, j, qs.clip(code, 0, 15) if high != qs.ZERO else 0)
            pack(s, to)
    return quantise
