"""Q2_K: super-blocks of 16 sub-blocks of 16; w = d s[j] q - dmin m[j], codes of 2 bits.

    byte   0 ... 15           | 16 ... 79 | 80 81 | 82 83
           s[j] + 16 m[j]     | q         | d     | dmin             (q: see two_bits_ir)
"""
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import nibbles_ir
from ggjit.ops.native.mem import ld_f16, ld_f32, ld_u8, st_f16
from ggjit.ops.native.simd import load_ir, vec_ir
from ggjit.ops.types.shared import k_quants as kq
from ggjit.ops.types.shared.blocks import first_and_second_ir
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.quant_search import ZERO, f32, mean_square, nearest_int, put

Q2_K = BY_NAME["q2_K"]


def _scale_bytes_ir(b, p, high):
    v = nibbles_ir(b, load_ir(b, p, vec_ir("i8", 16)))[high]
    return first_and_second_ir(b, b.zext(v, vec_ir("i16", 16)))


SUPER = Super(Q2_K, codes_ir=lambda b, p: kq.two_bits_ir(b, p, 16), scales_ir=lambda b, p: _scale_bytes_ir(b, p, 0),
              d_ir=kq.half_at(80), mins_ir=lambda b, p: (_scale_bytes_ir(b, p, 1), kq.half_at(82)(b, p)),
              max_code=3, halves=True)


@exact
def _finish(x, s, to):
    d, dmin = ld_f16(to + 80), ld_f16(to + 82)
    for j in range(16):
        code = ld_u8(to + j)
        kq.recode_with_min(x + 64 * j, s + 16 * j, 16, d * f32(code & 15), dmin * f32(code >> 4), 3)
    kq.pack_two_bits(s, to + 16)


@exact
def from_float(src, dst, k):
    """quantize_row_q2_K_ref"""
    s = kq.scratch()
    for i in range(k // kq.QK):
        x, to = src + 4 * kq.QK * i, dst + 84 * i
        high_scale, high_min = kq.find_scales_mins(x, s, 16, 3, f32(-0.5), f32(0.1), 15, True)
        by_scale = f32(15) / high_scale if high_scale > ZERO else ZERO
        by_min = f32(15) / high_min if high_min > ZERO else ZERO
        for j in range(16):
            scale = nearest_int(by_scale * ld_f32(s + kq.SCALES + 4 * j))
            put(to, j, scale | nearest_int(by_min * ld_f32(s + kq.MINS + 4 * j)) << 4)
        st_f16(to + 80, high_scale / f32(15))
        st_f16(to + 82, high_min / f32(15))
        _finish(x, s, to)


@exact
def weighted(src, dst, k, weights):
    """quantize_row_q2_K_impl"""
    s = kq.scratch()
    for i in range(k // kq.QK):
        x, to = src + 4 * kq.QK * i, dst + 84 * i
        d, dmin = kq.find_weighted(x, weights + 4 * kq.QK * i, s, 16, 3, mean_square(x, kq.QK), 15)
        st_f16(to + 80, d)
        st_f16(to + 82, dmin)
        for j in range(16):
            put(to, j, ld_u8(s + kq.LS + j) | ld_u8(s + kq.LM + j) << 4)
        _finish(x, s, to)


TRAITS = (SUPER.traits(from_float, quantize_weighted=weighted),)
