"""concat: two tensors of one type side by side along a dimension.  Any type; quantised rows move as whole blocks."""
import numpy as np

from ggjit.ops.copying.view import permute, view_4d
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import require, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import BF16, F16, F32, I32, I64, Q4_0, Q8_0, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    nb,
    ne,
    param_i32,
    row_addr,
    row_index,
)
from ggjit.ops.native.row_loops import MOVED, over_chunks
from ggjit.ops.types.shared.moves import element_mover, mover


def concat(a: Tensor, b: Tensor, dim: int):
    """a and b joined along dimension dim (0 to 3, ggml order); the other sizes and the types are equal.

    Shapes: sizes add up along dim.  NumPy: np.concatenate((a, b), 3 - dim), of four dimensions.  Any type and strides;
    along ne0, quantised rows join at whole blocks.  op params: dim.  Errors: ShapeError (also for different types),
    ParamError.  Source: ggml_concat.
    """
    if dim not in (0, 1, 2, 3):
        raise ParamError(f"concat: dim must be 0 to 3, got {dim!r}")
    require(a.type is b.type, "concat: the types must be equal", a, b, remedy="cast one with gg.cast")
    fits = all(a.ne[i] == b.ne[i] for i in range(4) if i != dim)
    require(fits, f"concat: sizes may differ in dimension {dim} only", a, b)
    joined = tuple(n + (b.ne[i] if i == dim else 0) for i, n in enumerate(a.ne))
    return a.ctx.node(OP.CONCAT, a.type, joined, (a, b), (int(dim),))


def reference(t, a, b):
    return np.concatenate((a, b), 3 - int(t.op_params[0]))


def _make(ty, by_rows):
    """Each row of the result is a row of a, a row of b, or (dim 0) one of each."""
    block, size = ty.block, ty.nbytes
    move, element = mover(ty, ty).move, element_mover(ty, ty).move if not ty.quantized else None

    @inline
    def copy_row(to, x, n, step, n1):
        if by_rows:
            move(to, x, n, 0, n1)
        else:
            for i in range(n):
                element(to + i * size, x + i * step, 0)

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        dim = param_i32(node, 0)
        a_n, b_n = ne(a, 0), ne(b, 0)
        edge1 = ne(a, 1) if dim == 1 else ne(d, 1)
        edge2 = ne(a, 2) if dim == 2 else ne(d, 2)
        edge3 = ne(a, 3) if dim == 3 else ne(d, 3)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            to = row_addr(d, i1, i2, i3)
            in_a = i1 < edge1 and i2 < edge2 and i3 < edge3
            if in_a:
                copy_row(to, row_addr(a, i1, i2, i3), a_n, nb(a, 0), ne(d, 1))
                to += a_n // block * size
            if not in_a or dim == 0:
                j1, j2 = i1 - (edge1 if dim == 1 else 0), i2 - (edge2 if dim == 2 else 0)
                copy_row(to, row_addr(b, j1, j2, i3 - (edge3 if dim == 3 else 0)), b_n, nb(b, 0), ne(d, 1))
        return OK
    return over_chunks(rows, chunking=MOVED)


def kernel(t, n_threads):
    a, b = t.src
    by_rows = rows_contiguous(a) and rows_contiguous(b)
    if a.type is not t.type or b.type is not t.type or (t.type.quantized and not by_rows):
        return None
    return Kernel(f"concat-{t.type.name}{'' if by_rows else '-strided'}", lambda: _make(t.type, by_rows),
                  cost=0.03 * touched_nbytes(t), modules=mover(t.type, t.type).modules)


def cases():
    def leaf(inp, ty, shape, view):
        wide = tuple(n * (1 + view * (i == 1)) for i, n in enumerate(shape))
        a = inp.new(ty, wide) if ty.dtype is None or ty.dtype.kind == "f" else inp.ids(ty, wide, 1000)
        return view_4d(a, *shape, a.nb[1] * 2, a.nb[2], a.nb[3], a.nb[1]) if view else a

    def make(ty, dim, view_a, view_b, block=1):
        def build(inp):
            shape = [11 * block, 4, 3, 2]
            other = [n + (dim == i) * 2 * (block if i == 0 else 1) for i, n in enumerate(shape)]
            return concat(leaf(inp, ty, shape, view_a), leaf(inp, ty, other, view_b), dim)
        return build
    for dim in range(4):
        for ty in (F32, F16, BF16, I32, I64):
            yield Case(f"{ty!r} dim {dim}", make(ty, dim, False, False), 0.0)
        for ty in (Q8_0, Q4_0):
            yield Case(f"{ty!r} dim {dim}", make(ty, dim, True, False, 32), 0.0)
        yield Case(f"F32 views dim {dim}", make(F32, dim, True, True), 0.0)

    def transposed(inp):
        return concat(permute(inp.new(F32, (4, 9, 2, 1)), 1, 0, 2, 3), inp.new(F32, (9, 5, 2, 1)), 1)
    yield Case("transposed", transposed, 0.0)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    a, b, dim = *t.src, int(t.op_params[0])

    def part(x, first):
        return lambda: g.cont(g.view_4d(dy, *x.ne, *dy.nb[1:], first * dy.nb[dim]))
    return part(a, 0), part(b, a.ne[dim])


# ---------------------------------------------------------------- rows
def _rows(t):
    a = last_axis(t)
    if int(t.op_params[0]) != a:
        yield a, [a, a]


SPECS = (Spec(op=OP.CONCAT, builders=(concat,), reference=reference, kernel=kernel, gradient=gradient, rows=_rows,
              cases=cases),)
