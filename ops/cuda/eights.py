"""Eight values of a row that lie side by side, as 16-bit floats in four words: what a lane gives tensor cores.

    row         | 0 ... 7 | 8 ... 15 | ...
    eight i       i = 0       1                 words (0, 1) (2, 3) (4, 5) (6, 7), the first value in the low half

    raw(row, i) -> 4 words      as loaded: of floats the values, of quantised types two words of codes, d d, m m
    words(raw)  -> 4 words      the values

Both are apart so that a kernel may load the next values before it is done with the last ones.  Quantised values become
float16: d code + m, rounded once; a value beyond 65504 is infinite.
"""
import dataclasses
from collections.abc import Callable

from ggjit.ops.core.types import BF16, BY_NAME, F16
from ggjit.ops.cuda.block_bits import LOW, ONES, THREES
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler.core import device, fma_f16, ld_i32, ld_i32_2, ld_i32x4, pack_f16, permute

SIGNS = -0x7F7F7F80             # 128 in each byte
BIASED = 0x64646464             # the upper byte of float16 values 1024 + x
ONE_ONE, BACK = 0x3C003C00, -0x1B7F1B80         # (1, 1), (-1152, -1152)


@dataclasses.dataclass(frozen=True)
class Eights:
    """How eight values of a type are read; see above."""
    raw: Callable
    words: Callable


# ---------------------------------------------------------------- floats of 16 bits
@device
def _wide(row, i):
    return ld_i32x4(row + 16 * i)


@device
def _as_they_are(raw):
    return raw


# ---------------------------------------------------------------- codes
@device
def _halves(w):
    """Four signed bytes as float16: 1024 + 128 + code is exact, and so is the difference."""
    x = w ^ SIGNS
    return (fma_f16(permute(x, BIASED, 0x4140), ONE_ONE, BACK), fma_f16(permute(x, BIASED, 0x4342), ONE_ONE, BACK))


@device
def _scaled(raw):
    w0, w1, d, m = raw
    a, b = _halves(w0)
    x, y = _halves(w1)
    return fma_f16(a, d, m), fma_f16(b, d, m), fma_f16(x, d, m), fma_f16(y, d, m)


def _of_blocks(type, codes, unit, segment):
    """codes(block, i) -> 2 words of eight i of a block; unit(i), segment(i): whose scale they have."""
    per_block, nbytes, scale = type.block // 8, type.nbytes, BLOCKS[type].scale

    @device
    def raw(row, i):
        q = i // per_block
        p, i = row + q * nbytes, i - q * per_block
        w0, w1 = codes(p, i)
        d, m = scale(p, unit(i), segment(i))
        return w0, w1, pack_f16(d, d), pack_f16(m, m)
    return Eights(raw, _scaled)


@device
def _first(i):
    return 0


@device
def _half(i):
    return i >> 1


#   Q4_K, Q5_K    eight i: of group i / 4, whose 32 values are the nibbles of 32 bytes
@device
def _q4_K(p, i):
    q, shift = p + 16 + 32 * (i >> 3) + 8 * (i & 3), i & 4
    return ld_i32(q) >> shift & LOW, ld_i32(q + 4) >> shift & LOW


@device
def _q5_K(p, i):
    q, h, shift, bit = p + 48 + 32 * (i >> 3) + 8 * (i & 3), p + 16 + 8 * (i & 3), i & 4, i >> 2
    return (ld_i32(q) >> shift & LOW | (ld_i32(h) >> bit & ONES) << 4,
            ld_i32(q + 4) >> shift & LOW | (ld_i32(h + 4) >> bit & ONES) << 4)


@device
def _k4_unit(i):
    return (i >> 3) << 1


@device
def _k4_segment(i):
    return i >> 2 & 1


#   Q2_K, Q3_K, Q6_K    eight i: of half i / 16, segment i / 4 % 4; bytes 8 (i % 4) ... + 7 of the half's
@device
def _q2_K(p, i):
    q, shift = p + 16 + 32 * (i >> 4) + 8 * (i & 3), i >> 1 & 6
    return ld_i32(q) >> shift & THREES, ld_i32(q + 4) >> shift & THREES


@device
def _q3_K(p, i):
    q, h, shift, bit = p + 32 + 32 * (i >> 4) + 8 * (i & 3), p + 8 * (i & 3), i >> 1 & 6, i >> 2
    return (ld_i32_2(q) >> shift & THREES | (ld_i32_2(h) >> bit & ONES) << 2,
            ld_i32_2(q + 4) >> shift & THREES | (ld_i32_2(h + 4) >> bit & ONES) << 2)


@device
def _q6_K(p, i):
    q, h = p + 64 * (i >> 4) + 8 * (i & 7), p + 128 + 32 * (i >> 4) + 8 * (i & 3)
    shift, bits = i >> 1 & 4, i >> 1 & 6
    return (ld_i32_2(q) >> shift & LOW | (ld_i32_2(h) >> bits & THREES) << 4,
            ld_i32_2(q + 4) >> shift & LOW | (ld_i32_2(h + 4) >> bits & THREES) << 4)


@device
def _octet_unit(i):
    return i >> 4 << 2 | i & 3


@device
def _octet_segment(i):
    return i >> 2 & 3


EIGHTS = {F16: Eights(_wide, _as_they_are), BF16: Eights(_wide, _as_they_are)} | {
    t: _of_blocks(t, b.pair, _first, _half) for t, b in BLOCKS.items() if b.pair is not None} | {
    BY_NAME[name]: _of_blocks(BY_NAME[name], codes, _k4_unit, _k4_segment) for name, codes in (
        ("q4_K", _q4_K), ("q5_K", _q5_K))} | {
    BY_NAME[name]: _of_blocks(BY_NAME[name], codes, _octet_unit, _octet_segment) for name, codes in (
        ("q2_K", _q2_K), ("q3_K", _q3_K), ("q6_K", _q6_K))}
