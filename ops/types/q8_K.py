"""Q8_1 and Q8_K: what ggml quantises activations to, next to weights with mins and next to super-blocks.

    Q8_1    blocks of 32: d f16 | s = d sum(q) f16 | q int8
    Q8_K    blocks of 256: d f32 | q int8 | 16 sums of 16 q, int16

No file holds them and no product takes them as weights (products here keep activations in other layouts, see
ops/types/shared/blocks_plain.py and ops/types/shared/blocks_super.py); they convert, so that a tensor of these types
can be filled and read.
"""
import math

from numba import types

from ggjit.ops.core.traits import Traits
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import ld_f16, ld_f32, ld_i8, st_f16, st_f32, st_i16
from ggjit.ops.types.shared.quant_search import ONE, ZERO, at, f32, first_largest, nearest_int, put


@exact
def q8_1_from_float(src, dst, k):
    """quantize_row_q8_1_ref: d = max|x| / 127, q = round(x (1 / d)), halves away from zero."""
    for i in range(k // 32):
        x, to = src + 128 * i, dst + 36 * i
        d = abs(first_largest(x, 32)) / f32(127)
        inverse = ONE / d if d != ZERO else ZERO
        total = 0
        for j in range(32):
            v = at(x, j) * inverse
            size = abs(v)
            whole = f32(math.floor(size))
            q = types.int64(whole) + (1 if size - whole >= f32(0.5) else 0)
            q = -q if v < ZERO else q
            put(to, 4 + j, q)
            total += q
        st_f16(to, d)
        st_f16(to + 2, f32(total) * d)


@exact
def q8_1_to_float(src, dst, k):
    for i in range(k):
        block = src + i // 32 * 36
        st_f32(dst + 4 * i, f32(ld_i8(block + 4 + i % 32)) * ld_f16(block))


@exact
def q8_K_from_float(src, dst, k):
    """quantize_row_q8_K_ref: d = x / -127 for the first x of largest size, q = min(127, rint(x / d))."""
    for i in range(k // 256):
        x, to = src + 1024 * i, dst + 292 * i
        largest = first_largest(x, 256)
        inverse = f32(-127) / largest if largest != ZERO else ZERO
        for j in range(16):
            total = 0
            for m in range(16 * j, 16 * j + 16):
                q = min(127, nearest_int(inverse * at(x, m)))
                put(to, 4 + m, q)
                total += q
            st_i16(to + 260 + 2 * j, types.int16(total))
        st_f32(to, ONE / inverse if largest != ZERO else ZERO)


@exact
def q8_K_to_float(src, dst, k):
    for i in range(k):
        block = src + i // 256 * 292
        st_f32(dst + 4 * i, f32(ld_i8(block + 4 + i % 256)) * ld_f32(block))


TRAITS = (Traits(BY_NAME["q8_1"], q8_1_to_float, q8_1_from_float),
          Traits(BY_NAME["q8_K"], q8_K_to_float, q8_K_from_float))
