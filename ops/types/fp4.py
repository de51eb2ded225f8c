"""MXFP4 and NVFP4: codes of 4 bits are small floats (E2M1), here doubled to whole numbers; the scales are 8-bit floats.

    code      0 1 2 3 4 5 6  7   8  9 ... 15
    level     0 1 2 3 4 6 8 12   0 -1 ... -12              w = scale / 2 * level
    MXFP4     blocks of 32: one E8M0 byte (2^(e - 127)) | 16 bytes: q[i] + 16 q[i + 16]
    NVFP4     blocks of 64: four UE4M3 bytes, one for each 16 | for each 16: 8 bytes, q[i] + 16 q[i + 8]

E8M0 and UE4M3 are scales without sign; UE4M3 is 4 bits of exponent (bias 7), 3 of fraction, 0 and 0x7F mean 0.
"""
import math

from numba import types
from numba.extending import intrinsic

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, nibbles_ir, splat_const, table_ir
from ggjit.ops.native.mem import IR_F32, IR_I32, bits_f32, f32_bits, ld_i8
from ggjit.ops.native.simd import IR, load_ir, shuffle_ir, splat_ir, vec_ir
from ggjit.ops.types.shared.blocks import lookup16_ir
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.quant_search import ZERO, at, f32, first_largest, put

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4, NVFP4 = BY_NAME["mxfp4"], BY_NAME["nvfp4"]


# ---------------------------------------------------------------- unpacking
def _nibbles_ir(b, addr):
    return concat_ir(b, *nibbles_ir(b, load_ir(b, addr, vec_ir("i8", 16))))


def _levels_ir(b, p):
    return lookup16_ir(b, LEVELS, _nibbles_ir(b, b.add(p, i64(1))))


def _half_e8m0_ir(b, p):
    """The byte at p as float32, halved: exponent e - 1, the two smallest as subnormals."""
    e = b.zext(load_ir(b, p, IR["i8"]), IR_I32)
    normal = b.shl(b.sub(e, IR_I32(1)), IR_I32(23))
    tiny = b.shl(IR_I32(0x00200000), b.and_(e, IR_I32(1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", e, IR_I32(2)), tiny, normal), IR_F32)


def _half_ue4m3_ir(b, bytes8):
    """<n x i8> -> <n x float>, halved."""
    n = bytes8.type.count

    def c(x):
        return splat_const("i32", x, n)
    u = b.zext(bytes8, vec_ir("i32", n))
    fraction = b.and_(u, c(7))
    exponent = b.and_(b.lshr(u, c(3)), c(15))
    normal = b.or_(b.shl(b.add(exponent, c(127 - 8)), c(23)), b.shl(fraction, c(20)))
    tiny = b.fmul(b.sitofp(fraction, vec_ir("f32", n)), splat_const("f32", 2.0 ** -10, n))
    v = b.select(b.icmp_unsigned("==", exponent, c(0)), tiny, b.bitcast(normal, vec_ir("f32", n)))
    return b.select(b.icmp_unsigned("==", u, c(0x7F)), splat_const("f32", 0.0, n), v)


def _nv_codes_ir(b, p):
    out = []
    for g in (0, 1):
        v = load_ir(b, b.add(p, i64(4 + 16 * g)), vec_ir("i8", 16))
        order = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
        out.append(lookup16_ir(b, LEVELS, shuffle_ir(b, *nibbles_ir(b, v), order)))
    return out


def _nv_factors_ir(b, p, n):
    d = _half_ue4m3_ir(b, load_ir(b, p, vec_ir("i8", 4)))
    return [shuffle_ir(b, d, d, [2 * g] * (n // 2) + [2 * g + 1] * (n // 2)) for g in (0, 1)]


# ---------------------------------------------------------------- quantisation
@intrinsic
def _table(typingctx):
    def codegen(context, b, sig, args):
        return table_ir(b, "fp4_levels", bytes(x & 255 for x in LEVELS))
    return types.int64(), codegen


@exact
def _nearest(table, x, d):
    """best_index_mxfp4: the first level that is nearest."""
    best, error = 0, abs(f32(ld_i8(table)) * d - x)
    for i in range(1, 16):
        e = abs(f32(ld_i8(table + i)) * d - x)
        if e < error:
            best, error = i, e
    return best


@exact
def _pack(table, x, n, d, dst):
    for j in range(n // 2):
        put(dst, j, _nearest(table, at(x, j), d) | _nearest(table, at(x, j + n // 2), d) << 4)


@exact
def mx_from_float(src, dst, k):
    """quantize_row_mxfp4_ref: e = floor(log2 max|x|) - 2 + 127."""
    table = _table()
    for i in range(k // 32):
        x, to = src + 128 * i, dst + 17 * i
        amax = abs(first_largest(x, 32))
        e = 0
        if amax > ZERO:
            e = (types.int64(math.floor(f32(math.log2(amax)))) - 2 + 127) & 255
        d = bits_f32(types.int32((e - 1) << 23 if e >= 2 else 0x00200000 << e))
        put(to, 0, e)
        _pack(table, x, 32, d, to + 1)


@exact
def to_ue4m3(x):
    """ggml_fp32_to_ue4m3: x >= 0, halves away from 0 in the fraction, at most 448."""
    if not x > ZERO:
        return 0
    x = min(x, f32(448))
    bits = types.int64(f32_bits(x))
    exponent, fraction = (bits >> 23 & 255) - 120, bits >> 20 & 7
    if exponent <= 0:
        tiny = min(7, types.int64(x * f32(512) + f32(0.5)))
        return tiny if tiny >= 1 else 0
    if exponent >= 15:
        return 0x7E
    code = (exponent << 3 | fraction) + (bits >> 19 & 1)
    return 0x7E if code >> 3 >= 15 else code


@exact
def half_ue4m3(code):
    if code == 0 or code == 0x7F:
        return ZERO
    if code >> 3 == 0:
        return f32(code) * f32(2.0 ** -10)
    return bits_f32(types.int32((code >> 3) + 119 << 23 | (code & 7) << 20))


@exact
def nv_from_float(src, dst, k):
    """quantize_row_nvfp4_ref"""
    table = _table()
    for i in range(k // 64):
        x, to = src + 256 * i, dst + 36 * i
        for j in range(4):
            code = to_ue4m3(abs(first_largest(x + 64 * j, 16)) / f32(6))
            put(to, j, code)
            _pack(table, x + 64 * j, 16, half_ue4m3(code), to + 4 + 8 * j)


TRAITS = (
    Plain(MXFP4, lambda b, p: [_levels_ir(b, p)], lambda b, p, n: [splat_ir(b, _half_e8m0_ir(b, p), n)],
          signed=True).traits(mx_from_float),
    Plain(NVFP4, _nv_codes_ir, _nv_factors_ir, signed=True, halves=True).traits(nv_from_float))
