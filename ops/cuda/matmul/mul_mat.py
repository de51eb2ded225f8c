"""mul_mat and mul_mat_id (ops/matmul/mul_mat.py, ops/matmul/mul_mat_id.py): which kernels serve a product.

    columns                  weights F32       F16, BF16           Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K ... Q6_K
    at most MAX_VEC          float32 rows      float32 rows        8-bit columns, dp4a            mul_mat_vec
    more                     float32 tiles     16-bit mma tiles    8-bit columns, int8 mma tiles  mul_mat_tile

With the extra `cublas` plain matrices with many columns may be cuBLAS' (mul_mat_dense).  mul_mat_id with more than
MAX_VEC tokens groups its columns by expert first (mul_mat_group).

A second set of kernels, `piped`, copies to shared memory while it computes.  engine/cuda/libraries.py measures on the
device whether they are right and faster:

    columns                  quantised weights                          F16, BF16
    one                      8-bit columns, dp4a: mul_mat_stream        -
    2 to 32                  float16 mma: mul_mat_few                   16-bit mma: mul_mat_few
    more                     float16 mma: mul_mat_piped                 16-bit mma: mul_mat_piped
    more, capability 9.0     float16 wgmma: mul_mat_warpgroups          16-bit wgmma: mul_mat_warpgroups
"""
from ggjit.ops.core.record import OP
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.matmul import (
    mul_mat_dense,
    mul_mat_few,
    mul_mat_piped,
    mul_mat_stream,
    mul_mat_tile,
    mul_mat_warpgroups,
)
from ggjit.ops.cuda.matmul.mul_mat_vec import product
from ggjit.ops.cuda.native.launch import NodeWays, dense, rounded
from ggjit.ops.cuda.rows import FLOATS
from ggjit.ops.matmul.mul_mat import exact_columns, mul_mat

MAX_VEC = 8


def _serves(t):
    a, b = t.src[:2]
    return ((a.type in BLOCKS or a.type in FLOATS) and b.type in FLOATS and dense(a, t)
            and min(a.ne[1], t.ne[1], t.ne[2], t.ne[3]) > 0)


def _mul_mat(t):
    a, b = t.src[:2]
    if not _serves(t) or b.ne[1] > MAX_VEC and exact_columns(t):        # tensor cores take columns of 16 bits
        return None
    return (mul_mat_dense.product(t) if b.ne[1] > MAX_VEC else None) or own(t)


def own(t):
    """A product that is served, without cuBLAS."""
    a, b = t.src[:2]
    n = b.ne[1]
    return _after_columns(a, b, product(t, n, (n, b.ne[2] * b.ne[3]), False) if n <= MAX_VEC else
                          mul_mat_tile.product(t, False))


def _mul_mat_id(t):
    a, b, ids = t.src[:3]
    if not _serves(t):
        return None
    tiles = mul_mat_tile.product(t, True) if ids.ne[1] > MAX_VEC else None
    return _after_columns(a, b, tiles or product(t, 1, (ids.ne[0], ids.ne[1]), True))


def _after_columns(a, b, made):
    """The product's launches, behind the one that makes 8-bit columns where the weights are quantised."""
    if made is None or a.type not in BLOCKS:
        return made
    return quantize_columns.launch(b), *made


def piped(t):
    """A product by the second set of kernels, or None."""
    if not _serves(t) or exact_columns(t):
        return None
    n = t.src[1].ne[1]
    if n == 1:
        return mul_mat_stream.product(t)
    return mul_mat_few.product(t) if n <= mul_mat_few.MAX_COLUMNS else mul_mat_piped.product(t)


def by_warpgroups(t):
    """A product by warpgroups, or None."""
    return None if not _serves(t) or exact_columns(t) else mul_mat_warpgroups.product(t)


def _class_of(t):
    a, b = t.src[:2]
    k, m, n = map(rounded, (a.ne[0], a.ne[1], b.ne[1]))
    return f"{a.type.name} {b.type.name} {k}x{m}x{n}"


CUDA = {OP.MUL_MAT: _mul_mat, OP.MUL_MAT_ID: _mul_mat_id}
WAYS = {OP.MUL_MAT: NodeWays(own, _class_of, lambda t, a, b: mul_mat(a, b), ("cublas", lambda: mul_mat_dense.decided()),
                             piped, by_warpgroups, "cublas")}


def reads_weights(t):
    """Does the node read weights, for which all of a GPU's bandwidth is wanted?"""
    return t.op in CUDA


def reads_all_weights(t):
    """Are they all of its first source?  Which experts are used is known only when it runs."""
    return t.op is OP.MUL_MAT
