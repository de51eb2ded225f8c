"""The searches behind ggml's quantisers: scales (and minima) that lose least, for a run of up to 256 values.

Arrays travel as addresses: float32 x and w (weights), bytes L (the codes found).  Everything is float32, one operation
after the other in ggml's order and without fastmath: the codes must be equal to the byte.

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
from ggjit.ops.native.mem import IR_I64, f32_bits, ld_f32, ld_i8, ld_u8, st_f32, st_i8
from ggjit.ops.native.simd import IR

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


@exact
def _fit(n, nmax, x, w, inverse):
    """(sum w x q, sum w q q) for the codes q that `inverse` gives."""
    sumlx, suml2 = ZERO, ZERO
    for i in range(n):
        q = f32(clip(nearest_int(inverse * at(x, i)), -nmax, nmax - 1))
        v = weight(x, w, i)
        sumlx += v * at(x, i) * q
        suml2 += v * q * q
    return sumlx, suml2


@exact
def _take(n, nmax, x, L, inverse):
    for i in range(n):
        put(L, i, nmax + clip(nearest_int(inverse * at(x, i)), -nmax, nmax - 1))


@exact
def search_scale(n, nmax, x, L, w):
    """Codes 0 ... 2 nmax - 1 and scale; w = 0: weights x^2."""
    largest = first_largest(x, n)
    if abs(largest) < TINY:
        for i in range(n):
            put(L, i, 0)
        return ZERO
    inverse = f32(-nmax) / largest
    _take(n, nmax, x, L, inverse)
    sumlx, suml2 = _fit(n, nmax, x, w, inverse)
    scale = sumlx / suml2 if suml2 != ZERO else ZERO
    best = scale * sumlx
    for step in range(-9, 10):
        if step == 0:
            continue
        inverse = -(f32(nmax) + f32(0.1) * f32(step)) / largest
        sumlx, suml2 = _fit(n, nmax, x, w, inverse)
        if suml2 > ZERO and sumlx * sumlx > best * suml2:
            _take(n, nmax, x, L, inverse)
            scale = sumlx / suml2
            best = scale * sumlx
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


@exact
def _codes_from(n, nmax, x, L, inverse, low):
    for i in range(n):
        put(L, i, clip(nearest_int(inverse * (at(x, i) - low)), 0, nmax))


@exact
def search_scale_min(n, nmax, x, w, L, other, rmin, rdelta, n_steps, use_mad):
    """(scale, min >= 0) and codes 0 ... nmax; `other`: n bytes of scratch."""
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
    inverse = f32(nmax) / (high - low)
    scale = ONE / inverse
    _codes_from(n, nmax, x, L, inverse, low)
    best = _loss(n, x, w, L, scale, low, use_mad)
    for step in range(n_steps + 1):
        inverse = (rmin + rdelta * f32(step) + f32(nmax)) / (high - low)
        _codes_from(n, nmax, x, other, inverse, low)
        sum_l, sum_l2, sum_xl = ZERO, ZERO, ZERO
        for i in range(n):
            q = f32(ld_u8(other + i))
            sum_l += at(w, i) * q
            sum_l2 += at(w, i) * q * q
            sum_xl += at(w, i) * q * at(x, i)
        D = sum_w * sum_l2 - sum_l * sum_l
        if D > ZERO:
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / D
            new_low = (sum_l2 * sum_x - sum_l * sum_xl) / D
            if new_low > ZERO:
                new_low = ZERO
                new_scale = sum_xl / sum_l2
            loss = _loss(n, x, w, other, new_scale, new_low, use_mad)
            if loss < best:
                for i in range(n):
                    put(L, i, ld_u8(other + i))
                best, scale, low = loss, new_scale, new_low
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

