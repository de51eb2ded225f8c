"""col2im_1d: columns of a product added up to a signal; with mul_mat, a transposed convolution.

    a [K OC, T], element k + K oc of column t       d[t s0 + k - p0, oc] += a[k + K oc, t]

Computed output by output: o gathers from the columns t with 0 <= o + p0 - t s0 < K.  Sums are float32.
"""
import numpy as np
from numba import types

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.elementwise.elementwise import FLOATS
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, addr, nb, ne, row_addr
from ggjit.ops.native.row_loops import over_rows, param, whole
from ggjit.ops.types.shared.rows import ROW

PIECE = 256                             # outputs of a channel that are one unit of work


def col2im_1d(a: Tensor, s0: int, oc: int, p0: int):
    """a [K oc, T] F32, F16 or BF16 folded, step s0, cropped by p0: [(T - 1) s0 + K - 2 p0, oc] of a's type.

    d[t s0 + k - p0, c] = sum over t, k of a[k + K c, t]: the second half of a transposed convolution; oc divides a.ne0.
    op params: s0, oc, p0.  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_col2im_1d.
    """
    require_type("col2im_1d", a, FLOATS)
    s0, oc, p0 = whole("col2im_1d", "s0", s0, 1), whole("col2im_1d", "oc", oc, 1), whole("col2im_1d", "p0", p0)
    require(a.ne[2] == a.ne[3] == 1 and min(a.ne[:2]) > 0 and a.ne[0] % oc == 0,
            f"col2im_1d: the source must be a matrix [K * {oc}, T]", a)
    n = (a.ne[1] - 1) * s0 + a.ne[0] // oc - 2 * p0
    if n < 1:
        raise ParamError(f"col2im_1d: padding of {p0} leaves nothing of {n + 2 * p0} outputs")
    return a.ctx.node(OP.COL2IM_1D, a.type, (n, oc), (a,), (s0, oc, p0))


def reference(t, a):
    s0, oc, p0 = (int(x) for x in t.op_params[:3])
    columns = a[0, 0].reshape(a.shape[2], oc, -1)
    k = columns.shape[2]
    out = np.zeros((oc, (len(columns) - 1) * s0 + k))
    for i, column in enumerate(columns):
        out[:, i * s0:i * s0 + k] += column
    return out[None, None, :, p0:p0 + t.ne[0]]


def _make(ty):
    get, put = ROW[ty].get, ROW[ty].put

    @inline
    def pieces(node):
        d = node + DST
        return (ne(d, 0) + PIECE - 1) // PIECE * ne(d, 1)

    @inline
    def one(node, u):
        a, d = node + SRC0, node + DST
        s0, p0, k, step = param(node, 0), param(node, 2), ne(a, 0) // ne(d, 1), nb(a, 0)
        c, first = u % ne(d, 1), u // ne(d, 1) * PIECE
        to, x = row_addr(d, c, 0, 0), addr(a) + c * k * step
        for i in range(first, min(ne(d, 0), first + PIECE)):
            o, total = i + p0, types.float32(0.0)
            for t in range(max(0, (o - k) // s0 + 1), min(ne(a, 1), o // s0 + 1)):
                total += get(x + (o - t * s0) * step + t * nb(a, 1))
            put(to + i * nb(d, 0), total)
        return OK
    return over_rows(one, pieces)


def kernel(t, n_threads):
    ty = t.type
    return Kernel(f"col2im_1d-{ty.name}", lambda: _make(ty), cost=0.4 * touched_nbytes(t))


def cases():
    limit = {ty: 1e-7 if ty is F32 else 5e-4 for ty in FLOATS}
    for ty in FLOATS:
        for k, oc, n, s, p in ((1, 1, 1, 1, 0), (4, 3, 10, 2, 1), (7, 5, 9, 3, 0), (2, 4, 13, 5, 2), (16, 9, 300, 8, 4),
                               (1337, 1, 7, 1, 600)):
            yield Case(f"{ty!r} {k} {oc} {n} {s} {p}", lambda inp, ty=ty, k=k, oc=oc, n=n, s=s, p=p: col2im_1d(
                inp.new(ty, (k * oc, n)), s, oc, p), limit[ty])


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """The columns of dy: im2col, step s0, with the cropped ends as zeros."""
    a, (s0, oc, p0) = t.src[0], (int(p) for p in t.op_params[:3])
    k = a.ne[0] // oc

    def of_a():
        taps = g.view_2d(a, k, oc, k * a.type.nbytes, 0)        # im2col reads only the shape of this kernel
        whole = g.pad_ext(dy, p0, p0, 0, 0, 0, 0, 0, 0) if p0 else dy
        return g.im2col(taps, whole, s0, 0, 0, 0, 1, 0, False, F32)
    return (of_a,)


SPECS = (Spec(op=OP.COL2IM_1D, builders=(col2im_1d,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases),)
