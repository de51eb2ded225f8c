"""What the K-quants share: packing of scales and codes, and the drivers of their quantisers.

Q2_K, Q4_K, Q5_K are codes with scales and mins, Q3_K and Q6_K codes with scales alone; all of 256 values.  A driver
finds codes L (256 bytes), scales and mins of the sub-blocks in float32; a type file turns them into its bytes.
"""
import math

from numba import types

from ggjit.ops.native.jit import exact
from ggjit.ops.native.lanes import i64, load_half_ir, splat_const
from ggjit.ops.native.mem import IR_I32, ld_u8, st_f32
from ggjit.ops.native.simd import load_ir, vec_ir
from ggjit.ops.types.shared import quant_search as qs

QK = 256
scratch = qs.make_stack(1024)           # L 256 | pad | Ls 16 | Lm 16 | pad | w 128 | scales 64 | mins 64 | sums 64
LS, LM, WEIGHTS, SCALES, MINS, SUMS = 288, 304, 384, 512, 576, 640


# ---------------------------------------------------------------- unpacking
def load32_ir(b, p, offs):
    return load_ir(b, b.add(p, i64(offs)) if offs else p, vec_ir("i8", 32))


def half_at(offs):
    """(b, block address) -> the float16 at `offs` as float32"""
    return lambda b, p: load_half_ir(b, b.add(p, i64(offs)))


def k4_scales_ir(b, p):
    """Twelve bytes at p + 4 -> (scales, mins), each <8 x i8> of 6 bits: two words in one vector.

        byte    0 ... 3         4 ... 7         8 ... 11
        bits    ss SSSSSS 0-3 | mm MMMMMM 0-3 | MMMM SSSS 4-7       ss, mm: the upper two bits of numbers 4-7
    """
    word = [load_ir(b, b.add(p, i64(4 + 4 * i)), IR_I32) for i in range(3)]

    def c(x):
        return word[0].type(x)

    def six(low, first):
        high = b.or_(low, b.and_(b.lshr(first, c(2)), c(0x30303030)))
        pair = b.insert_element(vec_ir("i32", 2)(None), b.and_(first, c(0x3F3F3F3F)), c(0))
        return b.bitcast(b.insert_element(pair, high, c(1)), vec_ir("i8", 8))
    nibbles = c(0x0F0F0F0F)
    return six(b.and_(word[2], nibbles), word[0]), six(b.and_(b.lshr(word[2], c(4)), nibbles), word[1])


def both_halves_ir(b, v):
    """<8 x i8>, one a group -> <16 x i16> for first | second halves."""
    v = b.zext(v, vec_ir("i16", 8))
    return b.shuffle_vector(v, v, vec_ir("i32", 16)([*range(8)] * 2))


def two_bits_ir(b, p, offs):
    """64 bytes at p + offs -> eight groups of 2-bit codes: byte l of a half holds codes l, l + 32, l + 64, l + 96."""
    out = []
    for half in (0, 32):
        q = load32_ir(b, p, offs + half)
        for shift in (0, 2, 4, 6):
            v = b.lshr(q, splat_const("i8", shift, 32)) if shift else q
            out.append(b.and_(v, splat_const("i8", 3, 32)))
    return out


# ---------------------------------------------------------------- packing
@exact
def pack_two_bits(L, dst):
    for j in range(0, QK, 128):
        for i in range(32):
            x = L + j + i
            qs.put(dst + j // 4, i, ld_u8(x) | ld_u8(x + 32) << 2 | ld_u8(x + 64) << 4 | ld_u8(x + 96) << 6)


@exact
def pack_k4_scales(Ls, Lm, dst):
    """Eight scales and eight mins of 6 bits -> twelve bytes (see k4_scales_ir)."""
    for j in range(4):
        s, m = types.int64(ld_u8(Ls + j + 4)), types.int64(ld_u8(Lm + j + 4))
        qs.put(dst, j, types.int64(ld_u8(Ls + j)) | s >> 4 << 6)
        qs.put(dst, j + 4, types.int64(ld_u8(Lm + j)) | m >> 4 << 6)
        qs.put(dst, j + 8, (s & 15) | (m & 15) << 4)


# ---------------------------------------------------------------- scales and mins
@exact
def recode_with_min(x, L, n, d, low, nmax):
    """Codes of x ~ d L - low, once the scales are rounded; a scale of 0 leaves them as they are."""
    if d != qs.ZERO:
        for i in range(n):
            qs.put(L, i, qs.clip(qs.nearest_int((qs.at(x, i) + low) / d), 0, nmax))


@exact
def recode(x, L, n, d, nmax):
    """Codes of x ~ d (L - nmax)."""
    if d != qs.ZERO:
        for i in range(n):
            qs.put(L, i, nmax + qs.clip(qs.nearest_int(qs.at(x, i) / d), -nmax, nmax - 1))


@exact
def plain_weights(x, w, n, by_size):
    """|x|, or the root mean square plus |x|."""
    base = qs.ZERO if by_size else qs.f32(math.sqrt(qs.mean_square(x, n)))
    for i in range(n):
        st_f32(w + 4 * i, abs(qs.at(x, i)) if by_size else base + abs(qs.at(x, i)))


@exact
def find_scales_mins(x, s, n, nmax, rmin, rdelta, n_steps, use_mad):
    """Scales and mins of 256 / n sub-blocks by make_qkx2_quants; returns the largest of each.  s: scratch."""
    high_scale, high_min = qs.ZERO, qs.ZERO
    for j in range(QK // n):
        plain_weights(x + 4 * n * j, s + WEIGHTS, n, use_mad)
        scale, low = qs.search_scale_min(n, nmax, x + 4 * n * j, s + WEIGHTS, s + n * j, rmin, rdelta, n_steps,
                                         use_mad)
        st_f32(s + SCALES + 4 * j, scale)
        st_f32(s + MINS + 4 * j, low)
        high_scale = scale if scale > high_scale else high_scale
        high_min = low if low > high_min else high_min
    return high_scale, high_min


@exact
def find_weighted(x, weights, s, n, nmax, sigma2, top):
    """The same with importances, by make_qkx3_quants and make_qp_quants: returns (d, dmin), codes of scales and mins
    (0 ... top) are left in LS and LM."""
    for j in range(QK // n):
        total = qs.importance(x + 4 * n * j, weights + 4 * n * j, n, sigma2, s + WEIGHTS)
        scale, low = qs.search_scale_min(n, nmax, x + 4 * n * j, s + WEIGHTS, s + n * j, qs.f32(-0.9), qs.f32(0.05),
                                         36, False)
        st_f32(s + SCALES + 4 * j, scale)
        st_f32(s + MINS + 4 * j, low)
        st_f32(s + SUMS + 4 * j, total)
    d = qs.search_positive(QK // n, top, s + SCALES, s + LS, s + SUMS)
    dmin = qs.search_positive(QK // n, top, s + MINS, s + LM, s + SUMS)
    return d, dmin
