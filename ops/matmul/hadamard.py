"""The product with a Hadamard matrix as a fast Walsh-Hadamard transform: n log2 n additions a row, no weights read.

    H[i][j] = (-1)^(number of ones in i & j) / sqrt(n)                    n a power of two, Sylvester's order

    stage h:   x[i]     + x[i + h]     for i without bit h
               x[i - h] - x[i]         for i with it

Stages below the vector width are shuffles inside a register, the others add and subtract whole vectors.
"""
import math

from numba import types

from ggjit.ops.core.record import OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC1, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.native.simd import W, const_ir, fadd, fma_ir, fmul, fsub, ldf, make_ir, shuffle_ir, splat, stf

f32 = types.float32


def _lanes_ir(b, v):
    """All stages inside one vector."""
    n, h = v.type.count, 1
    while h < n:
        sign = const_ir("f32", [-1.0 if i & h else 1.0 for i in range(n)])
        v = fma_ir(b, v, sign, shuffle_ir(b, v, v, [i ^ h for i in range(n)]))
        h *= 2
    return v


_lanes = make_ir(lambda t: t, lambda b, v: _lanes_ir(b, v))


@inline
def _vectors(d, n):
    for i in range(0, n, W):
        stf(d + 4 * i, _lanes(ldf(d + 4 * i)))
    h = W
    while h < n:
        for start in range(0, n, 2 * h):
            for i in range(start, start + h, W):
                x, y = ldf(d + 4 * i), ldf(d + 4 * (i + h))
                stf(d + 4 * i, fadd(x, y))
                stf(d + 4 * (i + h), fsub(x, y))
        h *= 2


@inline
def _scalars(d, n):
    h = 1
    while h < n:
        for i in range(n):
            if i & h == 0:
                x, y = ld_f32(d + 4 * i), ld_f32(d + 4 * (i + h))
                st_f32(d + 4 * i, x + y)
                st_f32(d + 4 * (i + h), x - y)
        h *= 2


@inline
def _row(node, r):
    b, d = node + SRC1, node + DST
    n, b0 = ne(b, 0), nb(b, 0)
    scale = f32(1.0) / f32(math.sqrt(f32(n)))
    i1, i2, i3 = row_index(b, r)
    pb, pd = row_addr(b, i1, i2, i3), row_addr(d, i1, i2, i3)
    if b0 == 4 and n >= W:
        for i in range(0, n, W):
            stf(pd + 4 * i, fmul(ldf(pb + 4 * i), splat(scale)))
    else:
        for i in range(n):
            st_f32(pd + 4 * i, ld_f32(pb + i * b0) * scale)
    if n >= W:
        _vectors(pd, n)
    else:
        _scalars(pd, n)
    return OK


def make_kernel():
    """Kernel of mul_mat(H, b): rows of b (float32, any strides) transformed into rows of d."""
    return over_rows(_row)
