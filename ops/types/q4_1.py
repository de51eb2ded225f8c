"""Q4_1, Q5_0, Q5_1: blocks of 32 weights with codes of 4 or 5 bits.

    Q4_1    d f16 | m f16 | q 16 bytes              w[i] = d q[i] + m            q[i] + 16 q[i + 16] in byte i
    Q5_0    d f16 | high 4 bytes | q 16 bytes       w[i] = d (q[i] - 16)         bit i of `high` is q[i]'s fifth
    Q5_1    d f16 | m f16 | high 4 bytes | q 16     w[i] = d q[i] + m
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, nibbles_ir
from ggjit.ops.native.mem import IR_I32, ld_u8, st_f16, st_i8, st_i32
from ggjit.ops.native.simd import load_ir, vec_ir
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.blocks import mask_bytes_ir
from ggjit.ops.types.shared.blocks_plain import Plain

Q4_1, Q5_0, Q5_1 = (BY_NAME[n] for n in ("q4_1", "q5_0", "q5_1"))
_codes_bytes, _more_bytes = qs.make_stack(64), qs.make_stack(256)


# ---------------------------------------------------------------- unpacking
def _nibbles_at(offs):
    return lambda b, p: concat_ir(b, *nibbles_ir(b, load_ir(b, b.add(p, i64(offs)), vec_ir("i8", 16))))


def _five_bits_at(offs):
    low = _nibbles_at(offs + 4)

    def codes(b, p):
        return b.or_(low(b, p), mask_bytes_ir(b, load_ir(b, b.add(p, i64(offs)), IR_I32), 16))
    return codes


def _groups(codes):
    return lambda b, p: [codes(b, p)]


# ---------------------------------------------------------------- quantisation
@exact
def _pack(L, dst, five):
    """32 codes -> [fifth bits and] nibbles."""
    high = types.int64(0)
    for j in range(16):
        x, y = types.int64(ld_u8(L + j)), types.int64(ld_u8(L + j + 16))
        st_i8(dst + (4 if five else 0) + j, types.int8((x & 15) | (y & 15) << 4))
        high |= (x >> 4 & 1) << j | (y >> 4 & 1) << (j + 16)
    if five:
        st_i32(dst, types.int32(high))


@exact
def _range_codes(x, L, dst, nmax):
    """d = (max - min) / nmax and the codes of (x - min) / d; writes d and min."""
    low, high = qs.at(x, 0), qs.at(x, 0)
    for i in range(1, 32):
        low = qs.at(x, i) if qs.at(x, i) < low else low
        high = qs.at(x, i) if qs.at(x, i) > high else high
    d = (high - low) / qs.f32(nmax)
    inverse = qs.ONE / d if d != qs.ZERO else qs.ZERO
    for i in range(32):
        qs.put(L, i, min(nmax, types.int64((qs.at(x, i) - low) * inverse + qs.f32(0.5))))
    st_f16(dst, d)
    st_f16(dst + 2, low)


def _make_with_min(nbytes, nmax):
    """quantize_row_q4_1_ref, quantize_row_q5_1_ref; and their weighted forms by make_qkx3_quants."""
    five = nmax == 31

    @exact
    def from_float(src, dst, k):
        L = _codes_bytes()
        for i in range(k // 32):
            to = dst + i * nbytes
            _range_codes(src + 128 * i, L, to, nmax)
            _pack(L, to + 4, five)

    @exact
    def weighted(src, dst, k, weights):
        L, w = _codes_bytes(), _more_bytes()
        sigma2 = qs.mean_square(src, k)
        for i in range(k // 32):
            x, to = src + 128 * i, dst + i * nbytes
            qs.importance(x, weights + 128 * i, 32, sigma2, w)
            d, low = qs.search_scale_min(32, nmax, x, w, L, qs.f32(-0.9), qs.f32(0.05), 36, False)
            st_f16(to, d)
            st_f16(to + 2, -low)
            _pack(L, to + 4, five)
    return from_float, weighted


@exact
def _q5_0_from_float(src, dst, k):
    """quantize_row_q5_0_ref: d = m / -16 for the first m of largest size, q = min(31, trunc(x / d + 16.5))."""
    L = _codes_bytes()
    for i in range(k // 32):
        x, to = src + 128 * i, dst + 22 * i
        d = qs.first_largest(x, 32) / qs.f32(-16)
        inverse = qs.ONE / d if d != qs.ZERO else qs.ZERO
        for j in range(32):
            qs.put(L, j, min(31, types.int64(qs.at(x, j) * inverse + qs.f32(16.5))))
        st_f16(to, d)
        _pack(L, to + 2, True)


@exact
def _q5_0_weighted(src, dst, k, weights):
    L, w = _codes_bytes(), _more_bytes()
    sigma2 = qs.mean_square(src, k)
    for i in range(k // 32):
        x, to = src + 128 * i, dst + 22 * i
        qs.importance(x, weights + 128 * i, 32, sigma2, w)
        st_f16(to, qs.search_scale(32, 16, x, L, w))
        _pack(L, to + 2, True)


def _traits():
    nibbles, q5_0, q5_1 = _nibbles_at(4), _five_bits_at(2), _five_bits_at(4)
    for type, codes, nmax in ((Q4_1, nibbles, 15), (Q5_1, q5_1, 31)):
        from_float, weighted = _make_with_min(type.nbytes, nmax)
        blocks = Plain(type, _groups(codes), has_offsets=True, max_code=nmax)
        yield blocks.traits(from_float, quantize_weighted=weighted)
    yield Plain(Q5_0, _groups(q5_0), zero_point=16, max_code=31).traits(
        _q5_0_from_float, quantize_weighted=_q5_0_weighted)


TRAITS = tuple(_traits())
