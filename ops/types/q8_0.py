"""Q8_0: blocks of 32 weights, w[i] = d * q[i].

    byte   0  1 | 2 ... 33
           d f16| q[0..31] int8
"""
import numpy as np
from llvmlite import ir

from ggjit.ops.core.types import Q8_0
from ggjit.ops.native import isa, lanes
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.mem import IR_I32, call_intrinsic
from ggjit.ops.native.simd import fma_ir, load_ir, opaque_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared import quant32
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.dot import Dot

NBYTES = 34


def load_q_ir(b, addr):
    return load_ir(b, b.add(addr, lanes.i64(2)), vec_ir("i8", 32))


def codes_ir(b, addr):
    """q + 128 as unsigned bytes."""
    return b.xor(load_q_ir(b, addr), lanes.splat_const("i8", -128, 32))


# ---------------------------------------------------------------- quantisation
def _reference_ir(b, src):
    """32 float32 at src -> (codes <32 x i32>, scale): quantize_row_q8_0_ref, halves away from zero."""
    x = load_ir(b, src, vec_ir("f32", 32))
    d = b.fdiv(lanes.amax_ir(b, x), lanes.f32(127.0))
    inverse = b.select(b.fcmp_ordered("!=", d, lanes.f32(0.0)), b.fdiv(lanes.f32(1.0), d), lanes.f32(0.0))
    q = call_intrinsic(b, "llvm.round.v32f32", x.type, [b.fmul(x, splat_ir(b, inverse, 32))])
    return b.fptosi(q, vec_ir("i32", 32)), d


def _rows_of(block_ir):
    """Jitted (src, dst, k): rows of blocks from `block_ir(b, src) -> (codes, scale)`."""
    @ir_function
    def block(b, src, dst):
        q, d = block_ir(b, src)
        store_ir(b, quant32.scale_word_ir(b, d), dst)
        store_ir(b, b.trunc(q, vec_ir("i8", 32)), b.add(dst, lanes.i64(2)))

    @exact
    def rows(src, dst, k):
        for i in range(k // 32):
            block(src + i * 128, dst + i * NBYTES)
    return rows


# ggml rounds halves to even where kernels write Q8_0 (copies, KV cache), away from 0 where files are written
from_float, quantize = _rows_of(quant32.activation_ir), _rows_of(_reference_ir)


def np_from_float(x):
    """Rows of floats -> rows of blocks, uint8, with the bytes of ggml's reference quantiser."""
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        y = blocks * np.where(d > 0, np.float32(1) / d, np.float32(0))
    whole = np.trunc(y)
    q = whole + np.sign(y) * (np.abs(y - whole) >= 0.5)
    out = np.concatenate([quant32.half_scale(d), q.astype(np.int8).view(np.uint8)], -1)
    return out.reshape(*x.shape[:-1], -1)


def np_to_float(raw):
    d, codes = quant32.np_blocks(raw, NBYTES)
    return (d * np.ascontiguousarray(codes).view(np.int8)).reshape(*raw.shape[:-1], -1)


# ---------------------------------------------------------------- products, AVX-512: two blocks a step
def _store_512(b, src, dst, j):
    """Step of 192 bytes: q of both blocks | -128 sum(q), spread over the block's eight lanes | d in eight lanes."""
    q, d = quant32.activation_ir(b, src)
    part = b.add(dst, b.mul(j, lanes.i64(32)))
    store_ir(b, b.trunc(q, vec_ir("i8", 32)), part)
    bias = b.mul(quant32.sum_ir(b, q), ir.Constant(IR_I32, -128 // 8))
    store_ir(b, splat_ir(b, bias, 8), b.add(part, lanes.i64(64)))
    store_ir(b, splat_ir(b, d, 8), b.add(part, lanes.i64(128)))


def _dot_512():
    def load_w(b, p):
        # the scale load overlaps the codes: hidden, or LLVM rebuilds one from the other byte by byte
        words = load_ir(b, opaque_ir(b, p), vec_ir("i16", 32))
        words = shuffle_ir(b, words, words, [0] * 8 + [17] * 8)
        d = b.fpext(b.bitcast(words, vec_ir("f16", 16)), vec_ir("f32", 16))
        return lanes.concat_ir(b, codes_ir(b, p), codes_ir(b, b.add(p, lanes.i64(NBYTES)))), d

    def tail_w(b, p, n):
        one = codes_ir(b, p)
        return lanes.concat_ir(b, one, one), lanes.splat_half_ir(b, p, 16)     # y of the second is zeros

    def load_y(b, p):
        return (load_ir(b, p, vec_ir("i8", 64)), load_ir(b, b.add(p, lanes.i64(64)), vec_ir("i32", 16)),
                load_ir(b, b.add(p, lanes.i64(128)), vec_ir("f32", 16)))

    def mac(b, acc, w, y):
        s = lanes.dpbusd_ir(b, y[1], w[0], y[0])
        return fma_ir(b, b.fmul(w[1], y[2]), lanes.int_to_float_ir(b, s), acc)
    return Dot(step=64, w_nbytes=2 * NBYTES, y_nbytes=192, load_w_ir=load_w, tail_w_ir=tail_w, load_y_ir=load_y,
               mac_ir=mac, prepare=quant32.make_prepare(2, 192, _store_512), lanes=16)


# ---------------------------------------------------------------- products, AVX2: one block a step
def _store_256(b, src, dst, j):
    """Step of 64 bytes: q | d in eight lanes."""
    q, d = quant32.activation_ir(b, src)
    store_ir(b, b.trunc(q, vec_ir("i8", 32)), dst)
    store_ir(b, splat_ir(b, d, 8), b.add(dst, lanes.i64(32)))


def _dot_256():
    def load_w(b, p):
        q = load_q_ir(b, p)
        size = call_intrinsic(b, "llvm.abs.v32i8", q.type, [q, ir.Constant(ir.IntType(1), 0)])
        return q, size, lanes.splat_half_ir(b, p, 8)

    def load_y(b, p):
        return load_ir(b, p, vec_ir("i8", 32)), load_ir(b, b.add(p, lanes.i64(32)), vec_ir("f32", 8))

    def mac(b, acc, w, y):
        # |w| * (y with w's sign): pairs stay below 32768 although |w| may be 128, as |y| <= 127
        signed = call_intrinsic(b, "llvm.x86.avx2.psign.b", y[0].type, [y[0], w[0]])
        s = lanes.madd_ir(b, lanes.maddubs_ir(b, w[1], signed), lanes.splat_const("i16", 1, 16))
        return fma_ir(b, b.fmul(w[2], y[1]), lanes.int_to_float_ir(b, s), acc)
    return Dot(step=32, w_nbytes=NBYTES, y_nbytes=64, load_w_ir=load_w, tail_w_ir=lambda b, p, n: load_w(b, p),
               load_y_ir=load_y, mac_ir=mac, prepare=quant32.make_prepare(1, 64, _store_256), lanes=8)


if isa.ISA == "neon":                   # multiplies signed bytes
    _BLOCKS = Plain(Q8_0, lambda b, p: [load_q_ir(b, p)], signed=True)
else:
    _BLOCKS = Plain(Q8_0, lambda b, p: [codes_ir(b, p)], zero_point=128, max_code=255)
TRAITS = (_BLOCKS.traits(from_float, dot=quant32.fast_dot(NBYTES, codes_ir, 128, _dot_512, _dot_256),
                         np_to_float=np_to_float, np_from_float=np_from_float, quantize=quantize),)
