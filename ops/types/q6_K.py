"""Q3_K and Q6_K: super-blocks of 16 sub-blocks of 16 without mins.

    Q3_K    w = d (s[j] - 32) (q - 4)       q of 3 bits, s of 6
            32 bytes: bit g of byte l is the third bit of code 32 g + l | 64 bytes: lower two (two_bits_ir)
            | 12 bytes s: byte j < 8 holds the lower nibbles of s[j], s[j + 8]; byte 8 + j the upper two bits of
            s[j], s[j + 4], s[j + 8], s[j + 12] | d f16
    Q6_K    w = d s[j] (q - 32)             q of 6 bits, s int8
            128 bytes of nibbles | 64 bytes of upper two bits | 16 bytes s | d f16
            byte l of each half: nibbles l + 0, l + 64 in byte l; l + 32, l + 96 in byte l + 32
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, nibbles_ir, splat_const
from ggjit.ops.native.mem import ld_f16, ld_f32, ld_i8, ld_u8, st_f16, st_f32, zero_bytes
from ggjit.ops.native.simd import load_ir, vec_ir
from ggjit.ops.types.shared import k_quants as kq
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.blocks import bit_ir, first_and_second_ir
from ggjit.ops.types.shared.blocks_super import Super


# ---------------------------------------------------------------- unpacking
def _q3_codes_ir(b, p):
    high = kq.load32_ir(b, p, 0)
    return [b.or_(q, bit_ir(b, high, g, 2)) for g, q in enumerate(kq.two_bits_ir(b, p, 32))]


def _q3_scales_ir(b, p):
    low = concat_ir(b, *nibbles_ir(b, load_ir(b, b.add(p, i64(96)), vec_ir("i8", 8))))
    top = load_ir(b, b.add(p, i64(104)), vec_ir("i8", 4))
    tops = [b.and_(b.lshr(top, splat_const("i8", s, 4)), splat_const("i8", 3, 4)) for s in (0, 2, 4, 6)]
    top = concat_ir(b, concat_ir(b, *tops[:2]), concat_ir(b, *tops[2:]))
    s = b.or_(low, b.shl(top, splat_const("i8", 4, 16)))
    return first_and_second_ir(b, b.sext(b.sub(s, splat_const("i8", 32, 16)), vec_ir("i16", 16)))


def _q6_codes_ir(b, p):
    out = []
    for half in (0, 1):
        x, y = (nibbles_ir(b, kq.load32_ir(b, p, 64 * half + offs)) for offs in (0, 32))
        high = kq.load32_ir(b, p, 128 + 32 * half)
        for shift, q in zip((4, 2, 0, -2), (x[0], y[0], x[1], y[1]), strict=True):
            h = high
            if shift:
                h = (b.shl if shift > 0 else b.lshr)(h, splat_const("i8", abs(shift), 32))
            out.append(b.or_(q, b.and_(h, splat_const("i8", 0x30, 32))))
    return out


def _q6_scales_ir(b, p):
    s = load_ir(b, b.add(p, i64(192)), vec_ir("i8", 16))
    return first_and_second_ir(b, b.sext(s, vec_ir("i16", 16)))


# ---------------------------------------------------------------- Q3_K
@exact
def _q3_finish(x, s, to, d):
    """Scales (0 ... 63, in LS) and d are chosen: their bytes, then the codes."""
    st_f16(to + 108, d)
    d = ld_f16(to + 108)
    zero_bytes(to + 96, 12)
    for j in range(16):
        m = types.int64(ld_u8(s + kq.LS + j))
        low, top = to + 96 + j % 8, to + 104 + j % 4
        qs.put(low, 0, ld_u8(low) | (m & 15) << (4 * (j // 8)))
        qs.put(top, 0, ld_u8(top) | m >> 4 << (2 * (j // 4)))
        kq.recode(x + 64 * j, s + 16 * j, 16, d * qs.f32(m - 32), 4)
    for m in range(32):
        high = types.int64(0)
        for g in range(8):
            code = types.int64(ld_u8(s + 32 * g + m))
            high |= (code >> 2) << g
            qs.put(s, 32 * g + m, code & 3)
        qs.put(to, m, high)
    kq.pack_two_bits(s, to + 32)


@exact
def q3_from_float(src, dst, k):
    """quantize_row_q3_K_ref"""
    s = kq.scratch()
    for i in range(k // kq.QK):
        x, to = src + 4 * kq.QK * i, dst + 110 * i
        for j in range(16):
            st_f32(s + kq.SCALES + 4 * j, qs.refine_scale(16, 4, x + 64 * j, s + 16 * j))
        largest, d = qs.first_largest(s + kq.SCALES, 16), qs.ZERO
        inverse = qs.ZERO
        if largest != qs.ZERO:
            inverse = qs.f32(-32) / largest
            d = qs.ONE / inverse
        for j in range(16):
            m = qs.clip(qs.nearest_int(inverse * ld_f32(s + kq.SCALES + 4 * j)), -32, 31) + 32
            qs.put(s + kq.LS, j, m if largest != qs.ZERO else 0)
        _q3_finish(x, s, to, d)


@exact
def q3_weighted(src, dst, k, weights):
    """quantize_row_q3_K_impl"""
    s = kq.scratch()
    for i in range(k // kq.QK):
        x, to = src + 4 * kq.QK * i, dst + 110 * i
        sigma2 = qs.f32(2) * qs.mean_square(x, kq.QK)
        for j in range(16):
            total = qs.importance(x + 64 * j, weights + 4 * kq.QK * i + 64 * j, 16, sigma2, s + kq.WEIGHTS)
            st_f32(s + kq.SUMS + 4 * j, total)
            st_f32(s + kq.SCALES + 4 * j, qs.search_scale(16, 4, x + 64 * j, s + 16 * j, s + kq.WEIGHTS))
        _q3_finish(x, s, to, qs.search_scale(16, 32, s + kq.SCALES, s + kq.LS, s + kq.SUMS))


# ---------------------------------------------------------------- Q6_K
@exact
def _q6_pack(L, to):
    for half in range(2):
        for m in range(32):
            x, q, h = L + 128 * half + m, to + 64 * half + m, to + 128 + 32 * half + m
            a, c = types.int64(ld_u8(x)), types.int64(ld_u8(x + 32))
            e, f = types.int64(ld_u8(x + 64)), types.int64(ld_u8(x + 96))
            qs.put(q, 0, (a & 15) | (e & 15) << 4)
            qs.put(q, 32, (c & 15) | (f & 15) << 4)
            qs.put(h, 0, a >> 4 | c >> 4 << 2 | e >> 4 << 4 | f >> 4 << 6)


@exact
def q6_weighted(src, dst, k, weights):
    """quantize_row_q6_K_ref (weights 0: squares) and quantize_row_q6_K_impl"""
    s = kq.scratch()
    for i in range(k // kq.QK):
        x, to = src + 4 * kq.QK * i, dst + 210 * i
        for j in range(16):
            w = weights + 4 * kq.QK * i + 64 * j if weights != 0 else 0
            st_f32(s + kq.SCALES + 4 * j, qs.search_scale(16, 32, x + 64 * j, s + 16 * j, w))
        largest = qs.first_largest(s + kq.SCALES, 16)
        if abs(largest) < qs.TINY:
            zero_bytes(to, 210)
            continue
        inverse = qs.f32(-128) / largest
        st_f16(to + 208, qs.ONE / inverse)
        d = ld_f16(to + 208)
        for j in range(16):
            qs.put(to + 192, j, min(127, qs.nearest_int(inverse * ld_f32(s + kq.SCALES + 4 * j))))
            kq.recode(x + 64 * j, s + 16 * j, 16, d * qs.f32(ld_i8(to + 192 + j)), 32)
        _q6_pack(s, to)


@exact
def q6_from_float(src, dst, k):
    q6_weighted(src, dst, k, 0)


_Q3 = Super(BY_NAME["q3_K"], _q3_codes_ir, _q3_scales_ir, kq.half_at(108), zero_point=4, max_code=7, halves=True)
_Q6 = Super(BY_NAME["q6_K"], _q6_codes_ir, _q6_scales_ir, kq.half_at(208), zero_point=32, max_code=63, halves=True)
TRAITS = (_Q3.traits(q3_from_float, quantize_weighted=q3_weighted),
          _Q6.traits(q6_from_float, quantize_weighted=q6_weighted))
