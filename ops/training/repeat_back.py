"""repeat_back: the tiles of a summed, the gradient of repeat."""
import numpy as np

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import SUM_IN_ORDER, last_axis
from ggjit.ops.core.shape import can_repeat, require, require_sum_so_far, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import has_elements, over_rows
from ggjit.ops.native.simd import W, fadd, ldf, stf


def repeat_back(a: Tensor, b: Tensor, onto: Tensor | None = None):
    """Sum of the tiles of a [k0 n0, k1 n1, k2 n2, k3 n3] over each other -> shape of b [n0, n1, n2, n3], F32.

    Only the shape of b counts.  NumPy: a.reshape(k3, n3, k2, n2, k1, n1, k0, n0).sum((0, 2, 4, 6)).
    onto: F32 of that shape, contiguous, to which the tiles are added one after the other; the result is a view of it.
    Errors: ShapeError, TypeMismatch.  Source: ggml_repeat_back, which has no onto.
    """
    require_type("repeat_back", a, (F32,))
    require(can_repeat(b, a), "repeat_back: b must tile a", a, b)
    if onto is None:
        return a.ctx.node(OP.REPEAT_BACK, F32, b.ne, (a,), ndim=b.ndim)
    require_sum_so_far("repeat_back", onto, b.ne)
    return a.ctx.node(OP.REPEAT_BACK, F32, b.ne, (a, onto), view_of=onto)


def reference(t, a, onto=0):
    shape = tuple(reversed(t.ne))
    if 0 in shape:
        return np.zeros(shape)
    split = [n for big, small in zip(a.shape, shape, strict=True) for n in (big // small, small)]
    return a.reshape(split).sum((0, 2, 4, 6)) + onto


@inline
def _add(to, x, step, n):
    i = 0
    if step == 4:
        while i + W <= n:
            stf(to + 4 * i, fadd(ldf(to + 4 * i), ldf(x + 4 * i)))
            i += W
    while i < n:
        st_f32(to + 4 * i, ld_f32(to + 4 * i) + ld_f32(x + i * step))
        i += 1


def _make(onto):
    @inline
    def row(node, r):
        a, d = node + SRC0, node + DST
        i1, i2, i3 = row_index(d, r)
        n0, to, step = ne(d, 0), row_addr(d, i1, i2, i3), nb(a, 0)
        if not onto:
            zero_bytes(to, 4 * n0)
        if not has_elements(a):
            return OK
        for j3 in range(i3, ne(a, 3), ne(d, 3)):
            for j2 in range(i2, ne(a, 2), ne(d, 2)):
                for j1 in range(i1, ne(a, 1), ne(d, 1)):
                    x = row_addr(a, j1, j2, j3)
                    for j0 in range(0, ne(a, 0), n0):
                        _add(to, x + j0 * step, step, n0)
        return OK
    return over_rows(row)


def kernel(t, n_threads):
    onto = len(t.src) > 1
    return Kernel(f"repeat_back{'-onto' * onto}", lambda: _make(onto), cost=0.05 * touched_nbytes(t))


def cases():
    shape = (8, 6, 5, 2)
    for by in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (5, 3, 2, 2)):
        def make(inp, by=by, view=False):
            wide = [n * k for n, k in zip(shape, by, strict=True)]
            a = inp.new(F32, (wide[0] * (1 + view), *wide[1:]))
            if view:
                a = view_4d(a, *wide, *a.nb[1:], 4)
            return repeat_back(a, inp.new(F32, shape))
        yield Case(f"{by}", make)
        yield Case(f"{by} view", lambda inp, make=make: make(inp, view=True))
    yield Case("onto", lambda inp: repeat_back(inp.new(F32, (33, 7, 2)), inp.new(F32, (33, 1, 2)),
                                               inp.new(F32, (33, 1, 2))))
    yield Case("to columns", lambda inp: repeat_back(inp.new(F32, (100, 7, 1, 1)), inp.new(F32, (1, 7, 1, 1))))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    return lambda: g.repeat(dy, t.src[0]), lambda: dy


# ---------------------------------------------------------------- rows
def _rows(t):
    a = last_axis(t.src[0])
    yield (SUM_IN_ORDER if t.ne[a] == 1 else a), [a]


def _chunk(t, ne, src, before, is_last):
    src = src if before is None else (*src, before)
    return t.ctx.node(OP.REPEAT_BACK, F32, ne, src, view_of=before, ndim=t.ndim)


SPECS = (Spec(op=OP.REPEAT_BACK, builders=(repeat_back,), reference=reference, kernel=kernel,
              gradient=gradient, rows=_rows, chunk=_chunk, cases=cases,
              rebuild=lambda n: n.call("repeat_back", n.src[0], n.like(), *n.src[1:])),)
