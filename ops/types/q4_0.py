"""Q4_0: blocks of 32 weights, w[i] = d * (q[i] - 8), q of 4 bits.

    byte   0  1 | 2 ... 17
           d f16| q[0] + 16 q[16], q[1] + 16 q[17], ... q[15] + 16 q[31]
"""
import numpy as np
from llvmlite import ir
from numba import types

from ggjit.ops.core.types import Q4_0
from ggjit.ops.native import lanes
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.mem import IR_F32, IR_I32, call_intrinsic, ld_u8, st_f16, st_i8
from ggjit.ops.native.simd import fma_ir, load_ir, opaque_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared import quant32
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.dot import Dot
from ggjit.ops.types.shared.quant_search import importance, make_stack, mean_square, search_scale

NBYTES = 18


def load_q_ir(b, addr):
    return load_ir(b, b.add(addr, lanes.i64(2)), vec_ir("i8", 16))


def codes_ir(b, addr):
    return lanes.concat_ir(b, *lanes.nibbles_ir(b, load_q_ir(b, addr)))


# ---------------------------------------------------------------- quantisation
@ir_function
def _quantize_block(b, src, dst):
    """quantize_row_q4_0_ref: d = m / -8 for the first m of largest size, q = min(15, trunc(x * (1 / d) + 8.5))."""
    x = load_ir(b, src, vec_ir("f32", 32))
    amax = lanes.amax_ir(b, x)
    size = call_intrinsic(b, "llvm.fabs.v32f32", x.type, [x])
    at = b.bitcast(b.fcmp_ordered("==", size, splat_ir(b, amax, 32)), IR_I32)
    m = load_ir(b, b.add(src, b.mul(quant32.clamp_index_ir(b, at), lanes.i64(4))), IR_F32)
    m = b.fadd(m, lanes.f32(0.0))                 # a block of zeros: m = +0, whatever their signs
    d = b.fdiv(m, lanes.f32(-8.0))
    inverse = b.select(b.fcmp_ordered("!=", d, lanes.f32(0.0)), b.fdiv(lanes.f32(1.0), d), lanes.f32(0.0))
    y = b.fadd(b.fmul(x, splat_ir(b, inverse, 32)), lanes.splat_const("f32", 8.5, 32))
    q = b.fptosi(y, vec_ir("i32", 32))
    q = call_intrinsic(b, "llvm.smin.v32i32", q.type, [q, lanes.splat_const("i32", 15, 32)])
    q = b.trunc(q, vec_ir("i8", 32))
    low, high = (shuffle_ir(b, q, q, range(i, i + 16)) for i in (0, 16))
    store_ir(b, quant32.scale_word_ir(b, d), dst)
    store_ir(b, b.or_(low, b.shl(high, lanes.splat_const("i8", 4, 16))), b.add(dst, lanes.i64(2)))


@exact
def from_float(src, dst, k):
    for i in range(k // 32):
        _quantize_block(src + i * 128, dst + i * NBYTES)


_scratch = make_stack(160)              # codes 32 | weights 128


@exact
def quantize_weighted(src, dst, k, weights):
    """quantize_row_q4_0_impl"""
    s = _scratch()
    sigma2 = mean_square(src, k)
    for i in range(k // 32):
        x, to = src + 128 * i, dst + NBYTES * i
        importance(x, weights + 128 * i, 32, sigma2, s + 32)
        st_f16(to, search_scale(32, 8, x, s, s + 32))
        for j in range(16):
            st_i8(to + 2 + j, types.int8(ld_u8(s + j) | ld_u8(s + j + 16) << 4))


def np_from_float(x):
    """Rows of floats -> rows of blocks, uint8, with the bytes of ggml's reference quantiser."""
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    m = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    d = (m + np.float32(0)) / np.float32(-8)        # -0 to +0
    with np.errstate(divide="ignore"):
        y = blocks * np.where(d != 0, np.float32(1) / d, np.float32(0)) + np.float32(8.5)
    q = np.minimum(15, y.astype(np.int8)).astype(np.uint8)
    return np.concatenate([quant32.half_scale(d), q[..., :16] | q[..., 16:] << 4], -1).reshape(*x.shape[:-1], -1)


def np_to_float(raw):
    d, codes = quant32.np_blocks(raw, NBYTES)
    q = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int8) - np.int8(8)
    return (d * q).reshape(*raw.shape[:-1], -1)


# ---------------------------------------------------------------- products: two (AVX2) or four (AVX-512) blocks a step
def _layout(n_blocks):
    """Step of n blocks: low halves of q | high halves | -8 sum(q) over the block's four lanes | d in four lanes."""
    part = 16 * n_blocks

    def store(b, src, dst, j):
        q, d = quant32.activation_ir(b, src)
        codes = b.trunc(q, vec_ir("i8", 32))
        at = b.add(dst, b.mul(j, lanes.i64(16)))
        store_ir(b, shuffle_ir(b, codes, codes, range(16)), at)
        store_ir(b, shuffle_ir(b, codes, codes, range(16, 32)), b.add(at, lanes.i64(part)))
        bias = b.mul(quant32.sum_ir(b, q), ir.Constant(IR_I32, -8 // 4))
        store_ir(b, splat_ir(b, bias, 4), b.add(at, lanes.i64(2 * part)))
        store_ir(b, splat_ir(b, d, 4), b.add(at, lanes.i64(3 * part)))

    def load_y(b, p):
        return (load_ir(b, p, vec_ir("i8", part)), load_ir(b, b.add(p, lanes.i64(part)), vec_ir("i8", part)),
                load_ir(b, b.add(p, lanes.i64(2 * part)), vec_ir("i32", part // 4)),
                load_ir(b, b.add(p, lanes.i64(3 * part)), vec_ir("f32", part // 4)))

    def join(b, parts):
        while len(parts) > 1:
            parts = [lanes.concat_ir(b, x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def tail_w(b, p, n):
        """The last blocks; those beyond the row repeat the last one; their activations are zeros."""
        last = b.sub(b.udiv(n, lanes.i64(32)), lanes.i64(1))
        at = [b.add(p, b.mul(lanes.min_ir(b, lanes.i64(i), last), lanes.i64(NBYTES))) for i in range(n_blocks)]
        d = join(b, [lanes.splat_half_ir(b, a, 4) for a in at])
        return *lanes.nibbles_ir(b, join(b, [load_q_ir(b, a) for a in at])), d
    return store, load_y, join, tail_w


def _dot_512():
    store, load_y, join, tail_w = _layout(4)

    def load_w(b, p):
        # the scale's load overlaps the codes' and is hidden from LLVM, which would build one from the other
        words = load_ir(b, opaque_ir(b, p), vec_ir("i16", 32))
        words = shuffle_ir(b, words, words, [9 * (i // 4) for i in range(16)])
        d = b.fpext(b.bitcast(words, vec_ir("f16", 16)), vec_ir("f32", 16))
        return *lanes.nibbles_ir(b, join(b, [load_q_ir(b, b.add(p, lanes.i64(NBYTES * i))) for i in range(4)])), d

    def mac(b, acc, w, y):
        s = lanes.dpbusd_ir(b, lanes.dpbusd_ir(b, y[2], w[0], y[0]), w[1], y[1])
        return fma_ir(b, b.fmul(w[2], y[3]), lanes.int_to_float_ir(b, s), acc)
    return Dot(step=128, w_nbytes=4 * NBYTES, y_nbytes=256, load_w_ir=load_w, tail_w_ir=tail_w, load_y_ir=load_y,
               mac_ir=mac, prepare=quant32.make_prepare(4, 256, store), lanes=16, max_columns=8)


def _dot_256():
    store, load_y, join, tail_w = _layout(2)

    def load_w(b, p):
        at = p, b.add(p, lanes.i64(NBYTES))
        d = join(b, [lanes.splat_half_ir(b, a, 4) for a in at])
        return *lanes.nibbles_ir(b, join(b, [load_q_ir(b, a) for a in at])), d

    def mac(b, acc, w, y):
        pairs = b.add(lanes.maddubs_ir(b, w[0], y[0]), lanes.maddubs_ir(b, w[1], y[1]))        # 4 * 15 * 127 < 32768
        s = b.add(lanes.madd_ir(b, pairs, lanes.splat_const("i16", 1, 16)), y[2])
        return fma_ir(b, b.fmul(w[2], y[3]), lanes.int_to_float_ir(b, s), acc)
    return Dot(step=64, w_nbytes=2 * NBYTES, y_nbytes=128, load_w_ir=load_w, tail_w_ir=tail_w, load_y_ir=load_y,
               mac_ir=mac, prepare=quant32.make_prepare(2, 128, store), lanes=8)


_BLOCKS = Plain(Q4_0, lambda b, p: [codes_ir(b, p)], zero_point=8, max_code=15)
TRAITS = (_BLOCKS.traits(from_float, dot=quant32.fast_dot(NBYTES, codes_ir, 8, _dot_512, _dot_256),
                         np_to_float=np_to_float, np_from_float=np_from_float, quantize_weighted=quantize_weighted),)
