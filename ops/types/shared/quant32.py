"""What all formats of 32 weights with one float16 scale share: w[i] = d * (code[i] - zero_point), codes of 8 bits.

From a type's `codes_ir` (a block's codes as <32 x i8>, unsigned) follows the generic dot; each type file has its fast
dots for AVX-512 and AVX2.

Activations are quantised to the codes of ggml's CPU kernels: q = rint(x * (127 / amax)), d = amax / 127.  ggml keeps
d in float16, because its work buffer holds Q8_0 blocks; here it stays float32, one rounding less.  The two differ
by NMSE 5e-8, where the codes cost 3e-5, so on MiniLM the rms error hardly moves (Q8_0 1.50e-3 to 1.49e-3, Q4_0 the
same); single largest errors do, either way (Q8_0 0.0122 to 0.0082, Q4_0 0.0709 to 0.0728), by chance of the rounding.
(ggml's *reference* quantiser, used to write files, differs: it rounds x * (1 / d) half away from 0.)

The integer dot of unsigned codes u and signed activations s needs no signs in the loop:
    sum (u - z) s = sum u s - z sum s,   and -z sum s is prepared once as the accumulator's initial value.
"""
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.native import isa
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.lanes import amax_or_nan_ir, f32, fold_ir, i64, load_half_ir, splat_const, zero
from ggjit.ops.native.mem import IR_F16, IR_I32, call_intrinsic
from ggjit.ops.native.simd import W, fma_ir, load_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared.dot import Dot

BLOCK = 32
V32 = vec_ir("f32", 32)


# ---------------------------------------------------------------- activations
def activation_ir(b, src):
    """32 float32 at src -> (codes <32 x i32>, scale f32): ggml's Q8_0 codes of activations.

    A NaN makes the scale NaN, and so all that the block takes part in; ggml loses it.
    """
    x = load_ir(b, src, V32)
    amax = amax_or_nan_ir(b, [x])
    ok = b.fcmp_ordered("!=", amax, f32(0.0))
    inverse = b.select(ok, b.fdiv(f32(127.0), amax), f32(0.0))
    q = call_intrinsic(b, "llvm.rint.v32f32", V32, [b.fmul(x, splat_ir(b, inverse, 32))])
    d = b.fdiv(amax, f32(127.0))
    return b.fptosi(q, vec_ir("i32", 32)), d


def sum_ir(b, q):
    return fold_ir(b, q, b.add)


@ir_function
def _round_block(b, src, dst):
    q, d = activation_ir(b, src)
    store_ir(b, b.fmul(b.sitofp(q, V32), splat_ir(b, d, 32)), dst)


@exact
def round_activations(src, dst, k):
    """float32 row -> the float32 row that its Q8_0 codes mean."""
    for i in range(0, k * 4, 128):
        _round_block(src + i, dst + i)


def np_round_activations(x):
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0))
    d = amax / np.float32(127)
    return (np.rint(blocks * inverse) * d).reshape(x.shape)


def make_prepare(per_step, step_nbytes, store_ir_):
    """prepare(src, dst, k): store_ir_(b, src, dst, j) writes block j of a step; missing blocks of the last are zeros.

    j is an int64 value; `dst` the address of the step.
    """
    words = step_nbytes // 64

    @intrinsic
    def block(typingctx, src, dst, j):
        def codegen(context, b, sig, args):
            store_ir_(b, *args)
            return context.get_dummy_value()
        return types.void(*(types.int64,) * 3), codegen

    @ir_function
    def clear(b, dst):
        for i in range(words):
            store_ir(b, zero("i32", 16), b.add(dst, i64(64 * i)))

    @exact
    def prepare(src, dst, k):
        n = k // BLOCK
        if n % per_step != 0:
            clear(dst + n // per_step * step_nbytes)
        for i in range(n):
            block(src + i * 128, dst + i // per_step * step_nbytes, i % per_step)
    return prepare


# ---------------------------------------------------------------- weights
def floats_ir(b, codes, zero_point, d, lanes=32):
    """d * (codes - zero_point) as <lanes x float>"""
    q = b.sub(b.zext(codes, vec_ir("i32", lanes)), splat_const("i32", zero_point, lanes))
    return b.fmul(b.sitofp(q, vec_ir("f32", lanes)), splat_ir(b, d, lanes))


def fast_dot(nbytes, codes_ir, zero_point, avx512, avx2):
    """The Dot of the instruction set; avx512(), avx2() make those with byte dots.  None: blocks_plain.py has it."""
    if isa.ISA == "neon":
        return None
    if isa.ISA == "generic":
        return generic_dot(nbytes, codes_ir, zero_point)
    return avx512() if isa.ISA == "avx512" else avx2()


def generic_dot(nbytes, codes_ir, zero_point):
    """Dequantised in registers, float32 FMAs: for instruction sets without byte dots."""
    parts = BLOCK // W

    def load_w(b, p):
        codes = codes_ir(b, p)
        return [floats_ir(b, shuffle_ir(b, codes, codes, range(W * i, W * i + W)), zero_point, f32(1.0), W)
                for i in range(parts)] + [splat_ir(b, load_half_ir(b, p), W)]

    def load_y(b, p):
        return [load_ir(b, b.add(p, i64(4 * W * i)), vec_ir("f32", W)) for i in range(parts)]

    def mac(b, acc, w, y):
        s = b.fmul(w[0], y[0])
        for i in range(1, parts):
            s = fma_ir(b, w[i], y[i], s)
        return fma_ir(b, s, w[parts], acc)
    return Dot(step=BLOCK, w_nbytes=nbytes, y_nbytes=128, load_w_ir=load_w, tail_w_ir=lambda b, p, n: load_w(b, p),
               load_y_ir=load_y, mac_ir=mac, prepare=round_activations)


# ---------------------------------------------------------------- scales
def np_blocks(raw, nbytes):
    """Raw rows -> (float32 scales [..., blocks, 1], the bytes of the codes [..., blocks, nbytes - 2]) (NumPy)."""
    blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, nbytes)
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32), blocks[..., 2:]


def half_scale(d):
    """float32 scale -> the two bytes of its float16 (NumPy)."""
    return np.ascontiguousarray(d, np.float32).astype(np.float16).view(np.uint8)


def scale_word_ir(b, d):
    """float32 -> float16 bits as i16, nearest even."""
    return b.bitcast(b.fptrunc(d, IR_F16), ir.IntType(16))


def clamp_index_ir(b, mask32):
    """Index of the lowest set bit of a 32-bit mask, 31 where none is set (a block of NaNs)."""
    i = call_intrinsic(b, "llvm.cttz.i32", IR_I32, [mask32, ir.Constant(ir.IntType(1), 0)])
    return b.zext(b.and_(i, ir.Constant(IR_I32, 31)), ir.IntType(64))
