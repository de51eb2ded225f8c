"""diag_mask_inf, diag_mask_zero: everything right of a diagonal becomes -inf or 0.

    n_past = 2                  column i0 of row i1 is kept where i0 <= n_past + i1
        x x x . . .
        x x x x . .
        x x x x x .
"""
import numpy as np

from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_chunks, param
from ggjit.ops.native.simd import W, splat, stf, stf_part
from ggjit.ops.types.shared.moves import move_bytes

VALUE = {OP.DIAG_MASK_INF: np.float32(-np.inf), OP.DIAG_MASK_ZERO: np.float32(0)}


def _node(op, a, n_past, in_place):
    name = op.name.lower()
    require_type(name, a, (F32,))
    require(rows_contiguous(a), f"{name}: elements of a row must lie side by side", a, remedy="use gg.cont first")
    if n_past < 0:
        raise ParamError(f"{name}: n_past must not be negative, got {n_past}")
    return a.ctx.node(op, a.type, a.ne, (a,), (int(n_past),), view_of=a if in_place else None)


def _diag_mask_inf(a: Tensor, n_past: int, in_place: bool):
    """-inf where i0 > n_past + i1, else a; a [n0, n1, n2, n3] F32, same shape.

    NumPy: np.where(np.tri(n1, n0, n_past), a, -np.inf).  op params: n_past.  Errors: TypeMismatch, ShapeError,
    ParamError.  Source: ggml_diag_mask_inf.
    """
    return _node(OP.DIAG_MASK_INF, a, n_past, in_place)


diag_mask_inf, diag_mask_inf_inplace = in_place_pair(_diag_mask_inf)


def _diag_mask_zero(a: Tensor, n_past: int, in_place: bool):
    """0 where i0 > n_past + i1, else a; otherwise as `diag_mask_inf`.  NumPy: np.tril(a, n_past).

    op params: n_past.  Errors as there.  Source: ggml_diag_mask_zero.
    """
    return _node(OP.DIAG_MASK_ZERO, a, n_past, in_place)


diag_mask_zero, diag_mask_zero_inplace = in_place_pair(_diag_mask_zero)


def reference(t, a):
    hidden = np.arange(a.shape[3])[None, :] > int(t.op_params[0]) + np.arange(a.shape[2])[:, None]
    return np.where(hidden, VALUE[t.op], a)


def _make(value):
    @inline
    def rows(node, ith, start, stop):
        a, d = node + SRC0, node + DST
        n0, n_past, fill = ne(d, 0), param(node, 0), splat(value)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            pd, pa, i = row_addr(d, i1, i2, i3), row_addr(a, i1, i2, i3), min(n0, n_past + i1 + 1)
            if pd != pa:
                move_bytes(pd, pa, 4 * i)
            while i + W <= n0:
                stf(pd + 4 * i, fill)
                i += W
            if i < n0:
                stf_part(pd + 4 * i, fill, n0 - i)
        return OK
    return over_chunks(rows)


def kernel(t, n_threads):
    if t.type is not F32:
        return None
    op = OP(t.op)
    return Kernel(op.name.lower(), lambda: _make(VALUE[op]), cost=0.03 * touched_nbytes(t))


def cases(plain, in_place):
    for shape in ((12, 10, 1, 1), (40, 10, 3, 2), (5, 10, 2, 1)):
        yield Case(f"{shape}", lambda inp, shape=shape: plain(inp.new(F32, shape), 5), 0.0)
        yield Case(f"{shape} inplace", lambda inp, shape=shape: in_place(inp.new(F32, shape), 0), 0.0)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    return (lambda: g.diag_mask_zero(dy, int(t.op_params[0])),)


SPECS = tuple(Spec(op=op, builders=fs, reference=reference, kernel=kernel, in_place=True, in_place_2023=True,
                   gradient=gradient, cases=lambda fs=fs: cases(*fs))
              for op, fs in ((OP.DIAG_MASK_INF, (diag_mask_inf, diag_mask_inf_inplace)),
                             (OP.DIAG_MASK_ZERO, (diag_mask_zero, diag_mask_zero_inplace))))
