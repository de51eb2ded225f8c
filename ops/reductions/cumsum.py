"""cumsum: running sums along ne0."""
import numpy as np
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import by_row
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows


def cumsum(a: Tensor):
    """d[i] = a[0] + ... + a[i] along ne0; shape of a, F32, any strides; NumPy: np.cumsum(a, -1).

    The running sum is float64 (ggml: float32), so long rows do not drift.  Errors: TypeMismatch.  Source: ggml_cumsum.
    """
    require_type("cumsum", a, (F32,))
    return a.ctx.node(OP.CUMSUM, F32, a.ne, (a,))


def reference(t, a):
    return np.cumsum(a, -1)


@inline
def _row(node, r):
    a, d = node + SRC0, node + DST
    i1, i2, i3 = row_index(d, r)
    x, to, step, total = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3), nb(a, 0), 0.0
    for i in range(ne(d, 0)):
        total += types.float64(ld_f32(x + i * step))
        st_f32(to + 4 * i, types.float32(total))
    return OK


def kernel(t, n_threads):
    return Kernel("cumsum", lambda: over_rows(_row), cost=0.17 * touched_nbytes(t))


def cases():
    for shape in ((12, 5, 4, 3), (127, 7, 4, 3), (2048, 16, 5, 4), (20481, 3, 1, 1), (1, 1, 1, 1)):
        yield Case(f"{shape}", lambda inp, s=shape: cumsum(inp.new(F32, s)))
    yield Case("transposed", lambda inp: cumsum(permute(inp.new(F32, (6, 50, 2, 1)), 1, 0, 2, 3)))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """dx[i] = dy[i] + dy[i + 1] + ... = dy - (cumsum(dy) - sum(dy))."""
    return (lambda: g.sub(dy, g.sub(g.cumsum(dy), g.sum_rows(dy))),)


SPECS = (Spec(op=OP.CUMSUM, builders=(cumsum,), reference=reference, kernel=kernel, gradient=gradient, split=by_row,
              cases=cases),)
