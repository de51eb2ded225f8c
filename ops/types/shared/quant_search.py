"""The searches behind ggml's quantisers: scales (and minima) that lose least, for a run of up to 256 values.

Arrays travel as addresses: float32 x and w (weights), bytes L (the codes found).  Everything is float32, one operation
after the other in ggml's order and without fastmath: the codes must be equal to the byte.  Lanes are trials: each has a
scale of its own, and its sums run over the values one after the other.

    search_scale       x ~ scale (L - nmax)             make_qx_quants with rmse_type 1 (Q6_K, Q5_0, Q3_K weighted)
    refine_scale       the same, code by code           make_q3_quants (Q3_K)
    search_scale_min   x ~ scale L - min                make_qkx2_quants, make_qkx3_quants (Q2_K, Q4_K, Q5_K, Q4_1)
    search_positive    x ~ scale L, x >= 0              make_qp_quants (the scales themselves, weighted)
"""
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import splat_const
from ggjit.ops.native.mem import IR_I64, call_intrinsic, f32_bits, ld_f32, ld_i8, ld_u8, st_f32, st_i8
from ggjit.ops.native.simd import (
    IR,
    B,
    V,
    W,
    fadd,
    fdiv,
    fmul,
    fsub,
    i2f,
    ldf,
    make_ir,
    splat,
    stf,
    suffix,
    vec_ir,
    vmax,
    vmin,
    zerof,
)

f32 = types.float32
ZERO, ONE = f32(0), f32(1)
TINY = f32(1e-15)                       # GROUP_MAX_EPS: below, a run counts as zeros
MAGIC = f32(12582912.0)                 # 1.5 * 2^23: adding it leaves the nearest integer in the mantissa


def make_stack(nbytes):
    """Intrinsic: address of `nbytes` of the calling function's stack, 64-byte aligned."""
    @intrinsic
    def stack(typingctx):
        def codegen(context, b, sig, args):
            place = cgutils.alloca_once(b, ir.ArrayType(IR["i8"], nbytes))
            place.align = 64
            return b.ptrtoint(place, IR_I64)
        return types.int64(), codegen
    return stack


@exact
def nearest_int(x):
    """x rounded to the nearest integer, halves to even; |x| <= 4194303 (others give some integer)."""
    return types.int64((f32_bits(x + MAGIC) & 0x7FFFFF) - 0x400000)


@exact
def clip(x, low, high):
    return max(low, min(high, x))


@exact
def put(L, i, code):
    st_i8(L + i, types.int8(code))


@exact
def at(x, i):
    return ld_f32(x + 4 * i)


@exact
def first_largest(x, n):
    """The first value of largest size."""
    size, value = ZERO, ZERO
    for i in range(n):
        a = abs(at(x, i))
        if a > size:
            size, value = a, at(x, i)
    return value


@exact
def weight(x, w, i):
    return at(w, i) if w != 0 else at(x, i) * at(x, i)


# ---------------------------------------------------------------- trials
def _nearest_ir(b, x):
    n = x.type.count
    q = b.bitcast(b.fadd(x, splat_const("f32", float(MAGIC), n)), vec_ir("i32", n))
    return b.sub(b.and_(q, splat_const("i32", 0x7FFFFF, n)), splat_const("i32", 0x400000, n))


nearest_ints = make_ir(lambda t: V("i32", t.n), _nearest_ir)        # nearest_int of every lane
_where_above = make_ir(lambda *t: t[0], lambda b, x, y, z: b.select(      # y where x > 0, else z
    b.fcmp_ordered(">", x, ir.Constant(x.type, None)), y, z))
_abs = make_ir(lambda t: t, lambda b, x: call_intrinsic(b, f"llvm.fabs.{suffix(x)}", x.type, [x]))


@exact
def _codes(x, least, most):
    """nearest_int, clipped, as float32 lanes."""
    return vmax(vmin(i2f(nearest_ints(x)), most), least)


@exact
def best_trial(sums_x, sums_q, first, end, scale, best):
    """(scale, number) of the last of the trials first ... end - 1 that beats all before it; else (scale, -1)."""
    which = -1
    for t in range(first, end):
        sumqx, sumq2 = at(sums_x, t), at(sums_q, t)
        if sumq2 > ZERO and sumqx * sumqx > best * sumq2:
            scale, which = sumqx / sumq2, t
            best = scale * sumqx
    return scale, which


# ---------------------------------------------------------------- a scale
N_TRIALS = 19                           # nmax / largest first, then those up to 0.9 codes below and above
TRIALS = 32                             # every number of lanes divides it
SUMS_X, SUMS_Q = 4 * TRIALS, 8 * TRIALS
_trials = make_stack(12 * TRIALS)       # inverse scales | sum w x q | sum w q q


@exact
def _fit(n, nmax, x, w, s):
    """Sums for the codes q that the inverse scales give."""
    least, most = splat(f32(-nmax)), splat(f32(nmax - 1))
    for v in range(0, 4 * N_TRIALS, B):
        inverse, sumlx, suml2 = ldf(s + v), zerof(), zerof()
        for i in range(n):
            q = _codes(fmul(inverse, splat(at(x, i))), least, most)
            u = weight(x, w, i)
            sumlx = fadd(sumlx, fmul(splat(u * at(x, i)), q))
            suml2 = fadd(suml2, fmul(fmul(splat(u), q), q))
        stf(s + SUMS_X + v, sumlx)
        stf(s + SUMS_Q + v, suml2)


@exact
def search_scale(n, nmax, x, L, w):
    """Codes 0 ... 2 nmax - 1 and scale; w = 0: weights x^2."""
    largest = first_largest(x, n)
    if abs(largest) < TINY:
        for i in range(n):
            put(L, i, 0)
        return ZERO
    s = _trials()
    st_f32(s, f32(-nmax) / largest)
    for t in range(1, TRIALS):
        step = t - 10 if t < 10 else t - 9
        st_f32(s + 4 * t, -(f32(nmax) + f32(0.1) * f32(step)) / largest)
    _fit(n, nmax, x, w, s)
    sumlx, suml2 = at(s + SUMS_X, 0), at(s + SUMS_Q, 0)
    scale = sumlx / suml2 if suml2 != ZERO else ZERO
    scale, which = best_trial(s + SUMS_X, s + SUMS_Q, 1, N_TRIALS, scale, scale * sumlx)
    inverse = at(s, max(which, 0))
    for i in range(n):
        put(L, i, nmax + clip(nearest_int(inverse * at(x, i)), -nmax, nmax - 1))
    return scale


@exact
def refine_scale(n, nmax, x, L):
    """Codes 0 ... 2 nmax - 1 and scale, weights x^2: each code is moved where that helps, at most five rounds."""
    largest = first_largest(x, n)
    if abs(largest) < TINY:
        for i in range(n):
            put(L, i, 0)
        return ZERO
    inverse = f32(-nmax) / largest
    sumlx, suml2 = ZERO, ZERO
    for i in range(n):
        q = clip(nearest_int(inverse * at(x, i)), -nmax, nmax - 1)
        put(L, i, q)
        v = at(x, i) * at(x, i)
        sumlx += v * at(x, i) * f32(q)
        suml2 += v * f32(q) * f32(q)
    for _ in range(5):
        changed = False
        for i in range(n):
            v, old = at(x, i) * at(x, i), types.int64(ld_i8(L + i))
            slx = sumlx - v * at(x, i) * f32(old)
            if slx > ZERO:
                sl2 = suml2 - v * f32(old) * f32(old)
                new = clip(nearest_int(at(x, i) * sl2 / slx), -nmax, nmax - 1)
                if new != old:
                    slx += v * at(x, i) * f32(new)
                    sl2 += v * f32(new) * f32(new)
                    if sl2 > ZERO and slx * slx * suml2 > sumlx * sumlx * sl2:
                        put(L, i, new)
                        sumlx, suml2, changed = slx, sl2, True
        if not changed:
            break
    for i in range(n):
        put(L, i, types.int64(ld_i8(L + i)) + nmax)
    return sumlx / suml2 if suml2 > ZERO else ZERO


@exact
def _loss(n, x, w, L, scale, low, use_mad):
    """sum w |e| or sum w e^2 of e = scale L + low - x."""
    total = ZERO
    for i in range(n):
        e = scale * f32(ld_u8(L + i)) + low - at(x, i)
        total += at(w, i) * (abs(e) if use_mad else e * e)
    return total


# ---------------------------------------------------------------- a scale and a minimum
SCALES, LOWS, LOSSES, CODES = B, 2 * B, 3 * B, 4 * B
_lanes = make_stack((4 + 32) * B)       # inverse scales | scales | minima | losses | the codes of up to 32 values


@exact
def _fit_min(n, nmax, x, w, low, sum_w, sum_x, use_mad, s):
    """Scale, minimum and loss of W trials, from their inverse scales; no trial without a solution beats another."""
    zero, most, inverse = zerof(), splat(f32(nmax)), ldf(s)
    sum_l, sum_l2, sum_xl = zero, zero, zero
    for i in range(n):
        q = _codes(fmul(inverse, splat(at(x, i) - low)), zero, most)
        stf(s + CODES + B * i, q)
        wq = fmul(splat(at(w, i)), q)
        sum_l = fadd(sum_l, wq)
        sum_l2 = fadd(sum_l2, fmul(wq, q))
        sum_xl = fadd(sum_xl, fmul(wq, splat(at(x, i))))
    all_w, all_x = splat(sum_w), splat(sum_x)
    D = fsub(fmul(all_w, sum_l2), fmul(sum_l, sum_l))
    scale = fdiv(fsub(fmul(all_w, sum_xl), fmul(all_x, sum_l)), D)
    new_low = fdiv(fsub(fmul(sum_l2, all_x), fmul(sum_l, sum_xl)), D)
    scale = _where_above(new_low, fdiv(sum_xl, sum_l2), scale)
    new_low = _where_above(new_low, zero, new_low)
    loss = zero
    for i in range(n):
        e = fsub(fadd(fmul(scale, ldf(s + CODES + B * i)), new_low), splat(at(x, i)))
        loss = fadd(loss, fmul(splat(at(w, i)), _abs(e) if use_mad else fmul(e, e)))
    stf(s + SCALES, scale)
    stf(s + LOWS, new_low)
    stf(s + LOSSES, _where_above(D, loss, splat(f32(math.inf))))


@exact
def search_scale_min(n, nmax, x, w, L, rmin, rdelta, n_steps, use_mad):
    """(scale, min >= 0) and codes 0 ... nmax, of up to 32 values.

    A trial that is better changes the minimum that the next ones begin with: the lanes behind it are tried again.
    """
    low, high = at(x, 0), at(x, 0)
    sum_w = at(w, 0)
    sum_x = sum_w * at(x, 0)
    for i in range(1, n):
        v = at(x, i)
        low = v if v < low else low
        high = v if v > high else high
        sum_w += at(w, i)
        sum_x += at(w, i) * v
    low = ZERO if low > ZERO else low
    if high <= low:
        for i in range(n):
            put(L, i, 0)
        return ZERO, -low
    s, inverse = _lanes(), f32(nmax) / (high - low)
    scale = ONE / inverse
    for i in range(n):
        put(L, i, clip(nearest_int(inverse * (at(x, i) - low)), 0, nmax))
    best, step = _loss(n, x, w, L, scale, low, use_mad), 0
    while step <= n_steps:
        for t in range(W):
            st_f32(s + 4 * t, (rmin + rdelta * f32(step + t) + f32(nmax)) / (high - low))
        _fit_min(n, nmax, x, w, low, sum_w, sum_x, use_mad, s)
        t, end = 0, min(W, n_steps + 1 - step)
        while t < end and not at(s + LOSSES, t) < best:
            t += 1
        step += min(t + 1, W)
        if t < end:
            best, scale, low = at(s + LOSSES, t), at(s + SCALES, t), at(s + LOWS, t)
            for i in range(n):
                put(L, i, types.int64(at(s + CODES + B * i, t)))
    return scale, -low


@exact
def search_positive(n, nmax, x, L, w):
    """Codes 0 ... nmax and scale of values >= 0; a value below 0 has some byte as its code."""
    high = ZERO
    for i in range(n):
        high = at(x, i) if at(x, i) > high else high
    if high < TINY:
        for i in range(n):
            put(L, i, 0)
        return ZERO
    inverse = f32(nmax) / high
    scale = ONE / inverse
    best = ZERO
    for i in range(n):
        e = at(x, i) - scale * f32(nearest_int(inverse * at(x, i)) & 255)       # cut to a byte, as ggml stores a code
        best += at(w, i) * e * e
    for step in range(-4, 5):
        if step == 0:
            continue
        trial = (f32(0.1) * f32(step) + f32(nmax)) / high
        scale = ONE / trial
        loss = ZERO
        for i in range(n):
            e = at(x, i) - scale * f32(min(nmax, nearest_int(trial * at(x, i))))
            loss += at(w, i) * e * e
        if loss < best:
            best, inverse = loss, trial
    sumlx, suml2 = ZERO, ZERO
    for i in range(n):
        q = min(nmax, nearest_int(inverse * at(x, i)))
        put(L, i, q)
        sumlx += at(w, i) * at(x, i) * f32(q)
        suml2 += at(w, i) * f32(q) * f32(q)
    for _ in range(5):
        changed = False
        for i in range(n):
            v, old = at(w, i), types.int64(ld_u8(L + i))
            slx = sumlx - v * at(x, i) * f32(old)
            sl2 = suml2 - v * f32(old) * f32(old)
            if slx > ZERO and sl2 > ZERO:
                new = min(nmax, nearest_int(at(x, i) * sl2 / slx))
                if new != old:
                    slx += v * at(x, i) * f32(new)
                    sl2 += v * f32(new) * f32(new)
                    if slx * slx * suml2 > sumlx * sumlx * sl2:
                        put(L, i, new)
                        sumlx, suml2, changed = slx, sl2, True
        if not changed:
            break
    return sumlx / suml2 if suml2 > ZERO else ZERO


# ---------------------------------------------------------------- weights
@exact
def sum_squares(x, n):
    total = ZERO
    for i in range(n):
        total += at(x, i) * at(x, i)
    return total


@exact
def mean_square(x, n):
    return sum_squares(x, n) / f32(n)


@exact
def importance(x, importances, n, sigma2, w):
    """w[i] = importance[i] sqrt(sigma2 + x[i]^2); returns their sum."""
    total = ZERO
    for i in range(n):
        v = at(importances, i) * f32(math.sqrt(sigma2 + at(x, i) * at(x, i)))
        st_f32(w + 4 * i, v)
        total += v
    return total

