"""count_equal: how many elements of two integer tensors agree."""
import numpy as np
from llvmlite import ir
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, I32, I64, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import IR_I64, call_intrinsic, ld_i32, ld_i64, st_i64
from ggjit.ops.native.node import (
    DST,
    LINE,
    SRC0,
    SRC1,
    addr,
    barrier,
    nb,
    ne,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import over_chunks, rows_of_source
from ggjit.ops.native.simd import W, load_ir, make_ir, vec_ir
from ggjit.ops.reductions.reduce import argmax


def count_equal(a: Tensor, b: Tensor):
    """Number of equal elements of a and b (I32, one shape) -> I64 [1]; NumPy: (a == b).sum().  Any strides.

    Errors: ShapeError, TypeMismatch.  Source: ggml_count_equal.
    """
    for t in (a, b):
        require_type("count_equal", t, (I32,))
    require(same_shape(a, b), "count_equal: a and b must have one shape", a, b)
    return a.ctx.node(OP.COUNT_EQUAL, I64, (1,), (a, b))


def reference(t, a, b):
    return (a == b).sum().reshape(1, 1, 1, 1)


def _equal_lanes_ir(b, x, y):
    """How many of the W numbers at x and at y are equal."""
    lanes = b.icmp_signed("==", *(load_ir(b, p, vec_ir("i32", W)) for p in (x, y)))
    bits = b.zext(b.bitcast(lanes, ir.IntType(W)), IR_I64)
    return call_intrinsic(b, "llvm.ctpop.i64", IR_I64, [bits])


_equal_lanes = make_ir(lambda *_: types.int64, _equal_lanes_ir)


@inline
def _rows(node, ith, start, stop):
    a, b, count = node + SRC0, node + SRC1, work(node) + LINE * ith
    n0, a0, b0, n_equal = ne(a, 0), nb(a, 0), nb(b, 0), ld_i64(count)
    for r in range(start, stop):
        i1, i2, i3 = row_index(a, r)
        x, y = row_addr(a, i1, i2, i3), row_addr(b, i1, i2, i3)
        done = n0 // W * W if a0 == 4 and b0 == 4 else 0
        for i in range(0, done, W):
            n_equal += _equal_lanes(x + 4 * i, y + 4 * i)
        for i in range(done, n0):
            n_equal += ld_i32(x + i * a0) == ld_i32(y + i * b0)
    st_i64(count, n_equal)
    return OK


def _make():
    each_row = inline(over_chunks(_rows, rows_of_source))

    def kernel(node, ith, nth, sync):
        st_i64(work(node) + LINE * ith, 0)
        each_row(node, ith, nth, sync)
        barrier(sync, nth)
        if ith == 0:
            total = 0
            for k in range(nth):
                total += ld_i64(work(node) + LINE * k)
            st_i64(addr(node + DST), total)
        return OK
    return kernel


def kernel(t, n_threads):
    return Kernel("count_equal", _make, cost=0.05 * touched_nbytes(t), work_nbytes=LINE * n_threads)


def cases():
    for shape in ((4, 500, 1, 1), (4, 5000, 1, 1), (33, 5, 4, 3), (0, 3, 1, 1)):
        yield Case(f"{shape}", lambda inp, s=shape: count_equal(inp.ids(I32, s, 3), inp.ids(I32, s, 3)), 0.0)
    yield Case("permuted", lambda inp: count_equal(permute(inp.ids(I32, (5, 40), 2), 1, 0, 2, 3),
                                                   inp.ids(I32, (40, 5), 2)), 0.0)

    def of_argmax(inp):
        rows = np.stack([inp.rng.permutation(4) for _ in range(200)]).astype(np.float32)
        return count_equal(argmax(inp.new(F32, (4, 200), rows)), inp.ids(I32, (200,), 4))
    yield Case("of argmax", of_argmax, 0.0)


SPECS = (Spec(op=OP.COUNT_EQUAL, builders=(count_equal,), reference=reference, kernel=kernel, cases=cases),)
