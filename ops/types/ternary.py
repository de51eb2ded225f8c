"""Types of one to two bits a weight: TQ1_0, TQ2_0 (ternary), Q1_0 (signs), Q2_0.

    TQ1_0   super-blocks, w = d (q - 1), q = 0, 1, 2; five to a byte as the digits of ceil(256 n / 243)
            48 bytes | 4 bytes | d f16     bytes 0-31: codes l + 32 i; 32-47: 160 + l + 16 i; 48-51: 240 + l + 4 i
    TQ2_0   super-blocks, w = d (q - 1); 64 bytes of 2-bit codes (two_bits_ir) | d f16
    Q1_0    blocks of 128: d f16 | 16 bytes; w = d where the bit is set, else -d
    Q2_0    blocks of 64: d f16 | 16 bytes; w = d (q - 1), byte i holds codes 4 i ... 4 i + 3
"""
import math

from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, splat_const
from ggjit.ops.native.mem import IR_I32, st_f16
from ggjit.ops.native.simd import const_ir, load_ir, shuffle_ir, vec_ir
from ggjit.ops.types.shared.blocks import mask_bytes_ir
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.k_quants import QK, half_at, two_bits_ir
from ggjit.ops.types.shared.quant_search import ONE, ZERO, at, f32, first_largest, put


# ---------------------------------------------------------------- unpacking
def _digit_ir(b, v, n):
    """Digit n of every byte: the upper part of three times what is left after n multiplications by three."""
    lanes = v.type.count
    wide = b.zext(v, vec_ir("i16", lanes))
    left = b.and_(b.mul(wide, splat_const("i16", 3 ** n, lanes)), splat_const("i16", 255, lanes))
    return b.trunc(b.lshr(b.mul(left, splat_const("i16", 3, lanes)), splat_const("i16", 8, lanes)), v.type)


def _tq1_codes_ir(b, p):
    first = load_ir(b, p, vec_ir("i8", 32))
    second = load_ir(b, b.add(p, i64(32)), vec_ir("i8", 16))
    last = load_ir(b, b.add(p, i64(48)), vec_ir("i8", 4))
    d = [_digit_ir(b, second, n) for n in range(5)]
    e = [_digit_ir(b, last, n) for n in range(4)]
    tail = concat_ir(b, concat_ir(b, e[0], e[1]), concat_ir(b, e[2], e[3]))
    return [_digit_ir(b, first, n) for n in range(5)] + [concat_ir(b, d[0], d[1]), concat_ir(b, d[2], d[3]),
                                                         concat_ir(b, d[4], tail)]


def _q1_codes_ir(b, p):
    """0 or 2: w = d (code - 1)"""
    return [mask_bytes_ir(b, load_ir(b, b.add(p, i64(2 + 4 * g)), IR_I32), 2) for g in range(4)]


def _q2_codes_ir(b, p):
    out = []
    for g in (0, 1):
        v = load_ir(b, b.add(p, i64(2 + 8 * g)), vec_ir("i8", 8))
        v = shuffle_ir(b, v, v, [i // 4 for i in range(32)])
        out.append(b.and_(b.lshr(v, const_ir("i8", [0, 2, 4, 6] * 8)), splat_const("i8", 3, 32)))
    return out


# ---------------------------------------------------------------- quantisation
@exact
def _round(x):
    """Halves away from zero."""
    size = abs(x)
    whole = math.floor(size)
    n = types.int64(whole) + (1 if size - f32(whole) >= f32(0.5) else 0)
    return -n if x < ZERO else n


@exact
def _scale(x, n, dst):
    """d = max |x| at dst; returns 1 / d, or 0."""
    d = abs(first_largest(x, n))
    st_f16(dst, d)
    return ONE / d if d != ZERO else ZERO


@exact
def _trits(x, stride, n, inverse):
    """n digits, `stride` values apart, as one byte."""
    q = 0
    for i in range(5):
        q = q * 3 + (_round(at(x, i * stride) * inverse) + 1 if i < n else 0)
    return ((q & 255) * 256 + 242) // 243


@exact
def tq1_from_float(src, dst, k):
    """quantize_row_tq1_0_ref"""
    for i in range(k // QK):
        x, to = src + 4 * QK * i, dst + 54 * i
        inverse = _scale(x, QK, to + 52)
        for m in range(32):
            put(to, m, _trits(x + 4 * m, 32, 5, inverse))
        for m in range(16):
            put(to, 32 + m, _trits(x + 4 * (160 + m), 16, 5, inverse))
        for m in range(4):
            put(to, 48 + m, _trits(x + 4 * (240 + m), 4, 4, inverse))


@exact
def tq2_from_float(src, dst, k):
    """quantize_row_tq2_0_ref"""
    for i in range(k // QK):
        x, to = src + 4 * QK * i, dst + 66 * i
        inverse = _scale(x, QK, to + 64)
        for j in range(64):
            q = 0
            for m in range(4):
                q |= (_round(at(x, j // 32 * 128 + j % 32 + 32 * m) * inverse) + 1 & 3) << 2 * m
            put(to, j, q)


@exact
def q1_from_float(src, dst, k):
    """quantize_row_q1_0_ref: d is the mean of |x|."""
    for i in range(k // 128):
        x, to = src + 512 * i, dst + 18 * i
        total = ZERO
        for j in range(128):
            total += abs(at(x, j))
        st_f16(to, total / f32(128))
        for j in range(16):
            q = 0
            for m in range(8):
                q |= (1 if at(x, 8 * j + m) >= ZERO else 0) << m
            put(to, 2 + j, q)


@exact
def q2_from_float(src, dst, k):
    """quantize_row_q2_0_ref"""
    for i in range(k // 64):
        x, to = src + 256 * i, dst + 18 * i
        inverse = _scale(x, 64, to)
        for j in range(16):
            q = 0
            for m in range(4):
                q |= min(3, max(0, _round(at(x, 4 * j + m) * inverse) + 1)) << 2 * m
            put(to, 2 + j, q)


TRAITS = (
    Super(BY_NAME["tq1_0"], _tq1_codes_ir, None, half_at(52), zero_point=1, max_code=2).traits(tq1_from_float),
    Super(BY_NAME["tq2_0"], lambda b, p: two_bits_ir(b, p, 0), None, half_at(64), zero_point=1,
          max_code=3).traits(tq2_from_float),
    Plain(BY_NAME["q1_0"], _q1_codes_ir, zero_point=1, max_code=2).traits(q1_from_float),
    Plain(BY_NAME["q2_0"], _q2_codes_ir, zero_point=1, max_code=3).traits(q2_from_float))
