"""IQ4_NL and IQ4_XS: codes of 4 bits that name one of 16 uneven levels.

    IQ4_NL  blocks of 32: d f16 | 16 bytes of nibbles              w = d level[q]
    IQ4_XS  super-blocks of 8 x 32: d f16 | upper bits of s, 2 bytes | lower nibbles of s, 4 bytes | 8 x 16 bytes
            w = d (s[j] - 32) level[q], s of 6 bits

The levels are ggml's kvalues_iq4nl.
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import concat_ir, i64, nibbles_ir, splat_const, table_ir
from ggjit.ops.native.mem import ld_f32, ld_i8, ld_u8, st_f16, st_f32, st_i16
from ggjit.ops.native.simd import IR, const_ir, load_ir, splat_ir, vec_ir
from ggjit.ops.types.shared import quant_search as qs
from ggjit.ops.types.shared.blocks import lookup16_ir, twice_ir
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.k_quants import half_at

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_NL, IQ4_XS = BY_NAME["iq4_nl"], BY_NAME["iq4_xs"]
QK = 256
stack = qs.make_stack(512)                 # L 256 | w 128 | scales 32 | new L
WEIGHTS, SCALES = 256, 384


# ---------------------------------------------------------------- unpacking
def _levels_ir(b, addr):
    return lookup16_ir(b, LEVELS, concat_ir(b, *nibbles_ir(b, load_ir(b, addr, vec_ir("i8", 16)))))


def _nl_codes_ir(b, p):
    return _levels_ir(b, b.add(p, i64(2)))


def _xs_scales_ir(b, p):
    low = load_ir(b, b.add(p, i64(4)), vec_ir("i8", 4))
    low, high = nibbles_ir(b, low)
    low = b.zext(b.shuffle_vector(low, high, const_ir("i32", [0, 4, 1, 5, 2, 6, 3, 7])), vec_ir("i16", 8))
    top = splat_ir(b, load_ir(b, b.add(p, i64(2)), IR["i16"]), 8)
    top = b.and_(b.lshr(top, const_ir("i16", range(0, 16, 2))), splat_const("i16", 3, 8))
    s = b.or_(low, b.shl(top, splat_const("i16", 4, 8)))
    return twice_ir(b, b.sub(s, splat_const("i16", 32, 8)))


# ---------------------------------------------------------------- quantisation
@exact
def _level(table, i):
    return qs.f32(ld_i8(table + i))


def _make_table():
    from numba.extending import intrinsic

    @intrinsic
    def table(typingctx):
        def codegen(context, b, sig, args):
            return table_ir(b, "iq4_levels", bytes(x & 255 for x in LEVELS))
        return types.int64(), codegen
    return table


_table = _make_table()


@exact
def nearest_level(table, x):
    """best_index_int8: number of the nearest level; a tie goes up."""
    if x <= _level(table, 0):
        return 0
    if x >= _level(table, 15):
        return 15
    low, high = 0, 15
    while high - low > 1:
        middle = (low + high) // 2
        if x < _level(table, middle):
            high = middle
        else:
            low = middle
    return low if x - _level(table, low) < _level(table, high) - x else high


@exact
def _fit(table, x, w, inverse):
    """(sum w q x, sum w q q) of 32 values for the levels q that `inverse` gives."""
    sumqx, sumq2 = qs.ZERO, qs.ZERO
    for j in range(32):
        q = _level(table, nearest_level(table, inverse * qs.at(x, j)))
        v = qs.at(w, j)
        sumqx += v * q * qs.at(x, j)
        sumq2 += v * q * q
    return sumqx, sumq2


@exact
def _search(table, x, w, L, n_tries):
    """Scale of one block of 32; its first codes are left in L."""
    largest = qs.first_largest(x, 32)
    if abs(largest) < qs.TINY:
        for j in range(32):
            qs.put(L, j, 0)
        return qs.ZERO
    d = (-largest if n_tries > 0 else largest) / _level(table, 0)
    inverse = qs.ONE / d
    for j in range(32):
        qs.put(L, j, nearest_level(table, inverse * qs.at(x, j)))
    sumqx, sumq2 = _fit(table, x, w, inverse)
    d = sumqx / sumq2 if sumq2 > qs.ZERO else qs.ZERO
    best = d * sumqx
    for step in range(-n_tries, n_tries + 1):
        sumqx, sumq2 = _fit(table, x, w, (qs.f32(step) + _level(table, 0)) / largest)
        if sumq2 > qs.ZERO and sumqx * sumqx > best * sumq2:
            d = sumqx / sumq2
            best = d * sumqx
    return d


@exact
def _weights(x, weights, sigma2, w):
    """Importance times magnitude, or the squares where there is none."""
    if weights != 0:
        qs.importance(x, weights, 32, sigma2, w)
    else:
        for j in range(32):
            st_f32(w + 4 * j, qs.at(x, j) * qs.at(x, j))


@exact
def _pack(L, dst):
    for j in range(16):
        qs.put(dst, j, ld_u8(L + j) | ld_u8(L + j + 16) << 4)


@exact
def _codes(table, x, d, L):
    inverse = qs.ONE / d if d != qs.ZERO else qs.ZERO
    for j in range(32):
        qs.put(L, j, nearest_level(table, inverse * qs.at(x, j)))


def _make_nl(n_tries):
    """quantize_row_iq4_nl_impl: n_tries 7 for files, -1 for from_float (quantize_row_iq4_nl_ref)."""
    @exact
    def quantise(src, dst, k, weights):
        s, table = stack(), _table()
        for i in range(k // 32):
            x, to = src + 128 * i, dst + 18 * i
            w = weights + 128 * i if weights != 0 else 0
            _weights(x, w, qs.f32(2) * qs.mean_square(x, 32), s + WEIGHTS)
            d = _search(table, x, s + WEIGHTS, s, n_tries)
            st_f16(to, d)
            if n_tries > 0:
                _codes(table, x, d, s)
            _pack(s, to + 2)
    return quantise


@exact
def _xs(src, dst, k, weights):
    """quantize_row_iq4_nl_impl over super-blocks, 7 tries."""
    s, table = stack(), _table()
    for i in range(k // QK):
        x, to = src + 4 * QK * i, dst + 136 * i
        sigma2 = qs.f32(2) * qs.mean_square(x, QK)
        for j in range(8):
            w = weights + 4 * QK * i + 128 * j if weights != 0 else 0
            _weights(x + 128 * j, w, sigma2, s + WEIGHTS)
            st_f32(s + SCALES + 4 * j, _search(table, x + 128 * j, s + WEIGHTS, s + 32 * j, 7))
        d = -qs.first_largest(s + SCALES, 8) / qs.f32(32)
        st_f16(to, d)
        inverse = qs.ONE / d if d != qs.ZERO else qs.ZERO
        upper = types.int64(0)
        for j in range(8):
            code = qs.clip(qs.nearest_int(inverse * ld_f32(s + SCALES + 4 * j)), -32, 31)
            _codes(table, x + 128 * j, d * qs.f32(code), s + 32 * j)
            code += 32
            lower = to + 4 + j // 2
            qs.put(lower, 0, (code & 15) << 4 | (ld_u8(lower) & 15) if j % 2 else code & 15)
            upper |= code >> 4 << (2 * j)
            _pack(s + 32 * j, to + 8 + 16 * j)
        st_i16(to + 2, types.int16(upper))


def _unweighted(quantise):
    @exact
    def quantise_plain(src, dst, k):
        quantise(src, dst, k, 0)
    return quantise_plain


def _traits():
    files, here = _make_nl(7), _make_nl(-1)
    nl = Plain(IQ4_NL, lambda b, p: [_nl_codes_ir(b, p)], signed=True)
    yield nl.traits(_unweighted(here), quantize=_unweighted(files), quantize_weighted=files)
    yield Super(IQ4_XS, lambda b, p: [_levels_ir(b, b.add(p, i64(8 + 16 * g))) for g in range(8)], _xs_scales_ir,
                half_at(0), signed=True).traits(_unweighted(_xs), quantize_weighted=_xs)


TRAITS = tuple(_traits())
