"""The matrix tile of flash attention for prefill, and the transposition that feeds it, as LLVM IR builders.

One tile serves both products: scores = Q times K transposed, and output = weights times V.

                 NV vectors of columns
               +----------------+
               |  B, n rows     |        per step: NV loads, MR broadcasts, MR x NV FMAs
      n        +----------------+
    +-----+    +----------------+
 MR |  A  |    |  C (registers) |
    +-----+    +----------------+
"""
import functools

from llvmlite import ir

from ggjit.ops.native import isa, simd
from ggjit.ops.native.jit import ir_function
from ggjit.ops.native.mem import IR_F32, IR_I64
from ggjit.ops.native.simd import W

# Measured, D = 128: 12x2 and 4x4 are equal on AVX-512 and waste more on odd row counts; on AVX2 4x2 is 12 % slower.
MR, NV = (8, 2) if isa.ISA == "avx512" else (6, 2)


@functools.cache
def make_tile(n_vectors, w, stride_a, stride_c, keep):
    """tile(a, b, stride_b, n, c, scale): C = A B (keep: C = scale C + A B) for MR rows x n_vectors of w columns.

    A rows are stride_a bytes apart, C rows stride_c (constants of the scratch layout); n >= 1 columns of A.
    """
    @ir_function
    def tile(b, a, m, stride_b, n, c, scale):
        v = simd.vec_ir("f32", w)
        where = [simd.offset_ir(b, c, r * stride_c + 4 * w * i) for r in range(MR) for i in range(n_vectors)]
        start = [ir.Constant(v, None)] * len(where)
        if keep:
            factor = [simd.splat_ir(b, simd.load_ir(b, simd.offset_ir(b, scale, 4 * r), IR_F32), w) for r in range(MR)]
            start = [b.fmul(factor[x // n_vectors], simd.load_ir(b, at, v)) for x, at in enumerate(where)]

        def body(b, state):
            a, m, sums = state[0], state[1], list(state[2:])
            columns = [simd.load_ir(b, simd.offset_ir(b, m, 4 * w * i), v) for i in range(n_vectors)]
            for r in range(MR):
                ar = simd.splat_ir(b, simd.load_ir(b, simd.offset_ir(b, a, r * stride_a), IR_F32), w)
                for i in range(n_vectors):
                    sums[r * n_vectors + i] = simd.fma_ir(b, columns[i], ar, sums[r * n_vectors + i])
            return [simd.offset_ir(b, a, 4), b.add(m, stride_b)] + sums
        carried = [(IR_I64, a), (IR_I64, m)] + [(v, s) for s in start]
        for at, s in zip(where, simd.counted_loop_ir(b, n, carried, body)[2:], strict=True):
            simd.store_ir(b, s, at)
    return tile


@functools.cache
def make_transpose(stride_src, stride_dst, n):
    """transpose(src, dst): W rows of W floats -> the first n <= W columns as rows of W floats.

        src, stride_src apart      dst, stride_dst apart
          a0 a1 a2 ...               a0 b0 c0 ...
          b0 b1 b2 ...      ->       a1 b1 c1 ...
          c0 c1 c2 ...               ...
    """
    @ir_function
    def transpose(b, src, dst):
        v = [simd.load_ir(b, simd.offset_ir(b, src, r * stride_src), simd.vec_ir("f32", W)) for r in range(W)]
        s = 1
        while s < W:                    # swap the off-diagonal blocks of size s
            for i in (i for i in range(W) if not i & s):
                x, y = v[i], v[i + s]
                v[i] = simd.shuffle_ir(b, x, y, [W + j - s if j & s else j for j in range(W)])
                v[i + s] = simd.shuffle_ir(b, x, y, [W + j if j & s else j + s for j in range(W)])
            s *= 2
        for i in range(n):
            simd.store_ir(b, v[i], simd.offset_ir(b, dst, i * stride_dst))
    return transpose
