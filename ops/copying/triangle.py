"""tri and diag: square matrices with a part left out.

    tri of x          UPPER_DIAG 0    UPPER 1        LOWER_DIAG 2    LOWER 3
                      x x x x         . x x x        x . . .         . . . .
                      . x x x         . . x x        x x . .         x . . .
                      . . x x         . . . x        x x x .         x x . .
                      . . . x         . . . .        x x x x         x x x .

    diag of [a b c]   a . .
                      . b .
                      . . c
"""
import numpy as np

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import is_contiguous, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32, st_i32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows, param, whole
from ggjit.ops.types.shared.moves import move_bytes

UPPER_DIAG, UPPER, LOWER_DIAG, LOWER = range(4)


def tri(a: Tensor, type: int):
    """One triangle of the square matrices a [n, n, ne2, ne3], zeros elsewhere; F32, contiguous.

    type: 0 upper with diagonal, 1 upper, 2 lower with diagonal, 3 lower (rows are ne1); op params: type.
    NumPy: np.triu, np.tril.  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_tri.
    """
    require_type("tri", a, (F32,))
    require(a.ne[0] == a.ne[1], "tri: the matrices must be square", a)
    require(is_contiguous(a), "tri: the source must be contiguous", a, remedy="use gg.cont first")
    return a.ctx.node(OP.TRI, F32, a.ne, (a,), (whole("tri", "type", type, 0, 3),))


def diag(a: Tensor):
    """a [n, 1, ne2, ne3] on the diagonals of [n, n, ne2, ne3], zeros elsewhere; F32.

    NumPy: a * np.eye(n).  Errors: ShapeError, TypeMismatch.  Source: ggml_diag.
    """
    require_type("diag", a, (F32,))
    require(a.ne[1] == 1, "diag: the source must have ne1 == 1", a)
    return a.ctx.node(OP.DIAG, F32, (a.ne[0], a.ne[0], *a.ne[2:]), (a,), ndim=max(2, a.ndim))


def reference(t, a):
    if t.op == OP.DIAG:
        return a * np.eye(t.ne[0])
    kind = int(t.op_params[0])
    return np.triu(a, kind == UPPER) if kind in (UPPER_DIAG, UPPER) else np.tril(a, -(kind == LOWER))


@inline
def _tri(node, r):
    a, d = node + SRC0, node + DST
    i1, i2, i3 = row_index(d, r)
    n, kind = ne(d, 0), param(node, 0)
    edge = i1 + (kind == UPPER or kind == LOWER_DIAG)
    first, end = (edge, n) if kind <= UPPER else (0, edge)
    to, x = row_addr(d, i1, i2, i3), row_addr(a, i1, i2, i3)
    zero_bytes(to, 4 * first)
    move_bytes(to + 4 * first, x + 4 * first, 4 * (end - first))
    zero_bytes(to + 4 * end, 4 * (n - end))
    return OK


@inline
def _diag(node, r):
    a, d = node + SRC0, node + DST
    i1, i2, i3 = row_index(d, r)
    to = row_addr(d, i1, i2, i3)
    zero_bytes(to, 4 * ne(d, 0))
    st_i32(to + 4 * i1, ld_i32(row_addr(a, 0, i2, i3) + i1 * nb(a, 0)))
    return OK


ROW = {OP.TRI: _tri, OP.DIAG: _diag}


def kernel(t, n_threads):
    op = OP(t.op)
    return Kernel(op.name.lower(), lambda: over_rows(ROW[op]), cost=0.03 * touched_nbytes(t))


def tri_cases():
    for kind in range(4):
        for shape in ((12, 12, 4, 3), (1, 1, 2, 1), (133, 133, 1, 1)):
            yield Case(f"{kind} {shape}", lambda inp, k=kind, s=shape: tri(inp.new(F32, s), k), 0.0)


def diag_cases():
    for shape in ((12, 1, 4, 3), (7, 1, 1, 1), (65, 1, 2, 1)):
        yield Case(f"{shape}", lambda inp, s=shape: diag(inp.new(F32, s)), 0.0)
    yield Case("strided", lambda inp: diag(permute(inp.new(F32, (1, 6, 5, 2)), 1, 0, 2, 3)), 0.0)


# ---------------------------------------------------------------- gradient
def gradient_tri(g, t, dy):
    return (lambda: g.tri(dy, int(t.op_params[0])),)


def gradient_diag(g, t, dy):
    a = t.src[0]
    step = dy.nb[0] + dy.nb[1]              # from one element of the diagonal to the next
    return (lambda: g.reshape(g.cont(g.view_4d(dy, 1, a.ne[0], *a.ne[2:], step, *dy.nb[2:], 0)), a),)


SPECS = (Spec(op=OP.TRI, builders=(tri,), reference=reference, kernel=kernel, gradient=gradient_tri,
              cases=tri_cases),
         Spec(op=OP.DIAG, builders=(diag,), reference=reference, kernel=kernel, gradient=gradient_diag,
              cases=diag_cases))
