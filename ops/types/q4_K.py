"""Q4_K and Q5_K: super-blocks of 8 sub-blocks of 32; w = d s[j] q - dmin m[j], s and m of 6 bits.

    Q4_K   d | dmin | 12 bytes s, m | 128 bytes of nibbles: byte l of quarter i holds codes 64 i + l, 64 i + l + 32
    Q5_K   d | dmin | 12 bytes s, m | 32 bytes: bit j of byte l is the fifth of code 32 j + l | 128 bytes as above
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import nibbles_ir
from ggjit.ops.native.mem import ld_f16, ld_f32, ld_u8, st_f16
from ggjit.ops.types.shared import k_quants as kq
from ggjit.ops.types.shared.blocks import bit_ir
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.quant_search import ZERO, f32, mean_square, nearest_int, put


def _codes_ir(b, p, offs):
    return [half for i in range(4) for half in nibbles_ir(b, kq.load32_ir(b, p, offs + 32 * i))]


def _five_bits_ir(b, p):
    high = kq.load32_ir(b, p, 16)
    return [b.or_(q, bit_ir(b, high, j, 4)) for j, q in enumerate(_codes_ir(b, p, 48))]


def _super(type, codes_ir, nmax):
    def scales(b, p):
        return kq.both_halves_ir(b, kq.k4_scales_ir(b, p)[0])

    def mins(b, p):
        return kq.both_halves_ir(b, kq.k4_scales_ir(b, p)[1]), kq.half_at(2)(b, p)
    return Super(type, codes_ir, scales, kq.half_at(0), mins, max_code=nmax)


# ---------------------------------------------------------------- quantisation
@exact
def _pack(L, to, five):
    """Codes -> nibbles and fifth bits."""
    if five:
        for m in range(32):
            high = types.int64(0)
            for j in range(8):
                high |= (types.int64(ld_u8(L + 32 * j + m)) >> 4) << j
            put(to + 16, m, high)
    nibbles = to + (48 if five else 16)
    for i in range(4):
        for m in range(32):
            x = L + 64 * i + m
            put(nibbles + 32 * i, m, (ld_u8(x) & 15) | (ld_u8(x + 32) & 15) << 4)


@exact
def _finish(x, s, to, nmax):
    """Scales and mins from LS and LM; codes once more, for what d and the scales became."""
    kq.pack_k4_scales(s + kq.LS, s + kq.LM, to + 4)
    d, dmin = ld_f16(to), ld_f16(to + 2)
    for j in range(8):
        scale, low = d * f32(ld_u8(s + kq.LS + j)), dmin * f32(ld_u8(s + kq.LM + j))
        kq.recode_with_min(x + 128 * j, s + 32 * j, 32, scale, low, nmax)
    _pack(s, to, nmax == 31)


def _quantisers(nbytes, nmax, rmin, n_steps):
    """quantize_row_q4_K_ref, quantize_row_q4_K_impl, and the same for five bits."""
    @exact
    def from_float(src, dst, k):
        s = kq.scratch()
        for i in range(k // kq.QK):
            x, to = src + 4 * kq.QK * i, dst + nbytes * i
            high_scale, high_min = kq.find_scales_mins(x, s, 32, nmax, f32(rmin), f32(0.1), n_steps, False)
            by_scale = f32(63) / high_scale if high_scale > ZERO else ZERO
            by_min = f32(63) / high_min if high_min > ZERO else ZERO
            for j in range(8):
                put(s + kq.LS, j, min(63, nearest_int(by_scale * ld_f32(s + kq.SCALES + 4 * j)) & 255))
                put(s + kq.LM, j, min(63, nearest_int(by_min * ld_f32(s + kq.MINS + 4 * j)) & 255))
            st_f16(to, high_scale / f32(63))
            st_f16(to + 2, high_min / f32(63))
            _finish(x, s, to, nmax)

    @exact
    def weighted(src, dst, k, weights):
        s = kq.scratch()
        for i in range(k // kq.QK):
            x, to = src + 4 * kq.QK * i, dst + nbytes * i
            d, dmin = kq.find_weighted(x, weights + 4 * kq.QK * i, s, 32, nmax, f32(2) * mean_square(x, kq.QK), 63)
            st_f16(to, d)
            st_f16(to + 2, dmin)
            _finish(x, s, to, nmax)
    return from_float, weighted


def _traits():
    for name, codes_ir, nmax, rmin, n_steps in (("q4_K", lambda b, p: _codes_ir(b, p, 16), 15, -1.0, 20),
                                                ("q5_K", _five_bits_ir, 31, -0.5, 15)):
        type = BY_NAME[name]
        from_float, weighted = _quantisers(type.nbytes, nmax, rmin, n_steps)
        yield _super(type, codes_ir, nmax).traits(from_float, quantize_weighted=weighted)


TRAITS = tuple(_traits())
