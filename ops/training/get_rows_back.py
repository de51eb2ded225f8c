"""get_rows_back: rows added into a table by row number, the gradient of get_rows.

    d = 0;   d[:, ids[i]] += a[:, i]   for i = 0, 1, ...

Threads share out columns, not rows: ids may repeat, and every sum is formed in the order of the ids.
"""
import numpy as np

from ggjit.ops.copying.view import view_2d
from ggjit.ops.core.record import BAD_INDEX, OK, OP
from ggjit.ops.core.row_axes import SUM_IN_ORDER
from ggjit.ops.core.shape import require, require_sum_so_far, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F16, F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, fail, nb, ne, row_addr
from ggjit.ops.native.row_loops import SINGLE, over_rows
from ggjit.ops.native.simd import W, fadd, ldf, ldf_part, stf, stf_part
from ggjit.ops.types.shared.rows import ROW

COLUMNS = 4 * W                         # columns that one thread adds up


def get_rows_back(a: Tensor, b: Tensor, c: Tensor, onto: Tensor | None = None):
    """Rows of a [n, r] (F32, F16) added into zeros of the shape of c [n, m] at rows b (I32 [k]) -> F32 [n, m].

    The first k <= r rows of a are added; only the shape of c counts.  NumPy: np.add.at(zeros, b, a[:k]).  onto: F32 of
    that shape, contiguous, in place of zeros; the result is a view of it.
    Errors: ShapeError, TypeMismatch; IndexRangeError at run time for ids outside [0, m), before anything of that row
    is added.  Source: ggml_get_rows_back, which has no onto.
    """
    require_type("get_rows_back", a, (F32, F16), "rows")
    require_type("get_rows_back", b, (I32,), "ids")
    require(a.ne[0] == c.ne[0] and a.ne[2] == a.ne[3] == c.ne[2] == c.ne[3] == 1,
            "get_rows_back: a and c must be matrices with rows of one length", a, c)
    require(b.ne[1:] == (1, 1, 1) and b.ne[0] <= a.ne[1], "get_rows_back: ids must be a row of at most a.ne1", a, b)
    require(rows_contiguous(a), "get_rows_back: elements of a row must lie side by side", a, remedy="use gg.cont first")
    if onto is None:
        return a.ctx.node(OP.GET_ROWS_BACK, F32, c.ne[:2], (a, b))
    require_sum_so_far("get_rows_back", onto, c.ne[:2])
    return a.ctx.node(OP.GET_ROWS_BACK, F32, c.ne[:2], (a, b, onto), view_of=onto)


def reference(t, a, ids, onto=0):
    out = np.zeros(tuple(reversed(t.ne))) + onto
    np.add.at(out[0, 0], ids[0, 0, 0], a[0, 0, :ids.size])
    return out


@inline
def _stretches(node):
    return (ne(node + DST, 0) + COLUMNS - 1) // COLUMNS


def _make(ta, onto):
    load, load_part, size = ROW[ta].load, ROW[ta].load_part, ta.nbytes

    @inline
    def stretch(node, s):
        a, ids, d = node + SRC0, node + SRC1, node + DST
        m, first, end = ne(d, 1), s * COLUMNS, min(ne(d, 0), (s + 1) * COLUMNS)
        if not onto:
            for i in range(m):
                zero_bytes(row_addr(d, i, 0, 0) + 4 * first, 4 * (end - first))
        for k in range(ne(ids, 0)):
            id = ld_i32(addr(ids) + k * nb(ids, 0))
            if id < 0 or id >= m:
                return fail(node, BAD_INDEX, id)
            to, x = row_addr(d, id, 0, 0), row_addr(a, k, 0, 0)
            i = first
            while i + W <= end:
                stf(to + 4 * i, fadd(ldf(to + 4 * i), load(x + size * i)))
                i += W
            if i < end:
                part = end - i
                stf_part(to + 4 * i, fadd(ldf_part(to + 4 * i, part), load_part(x + size * i, part)), part)
        return OK
    return over_rows(stretch, _stretches, SINGLE)


def kernel(t, n_threads):
    ta, onto = t.src[0].type, len(t.src) > 2
    return Kernel(f"get_rows_back-{ta.name}{'-onto' * onto}", lambda: _make(ta, onto), cost=0.06 * touched_nbytes(t))


def cases():
    for ty in (F32, F16):
        for n, m, r, view in ((256, 6, 4, False), (33, 3, 40, True), (1, 9, 2, False), (500, 70, 9, True)):
            def make(inp, ty=ty, n=n, m=m, r=r, view=view):
                a = inp.new(ty, (n, r * (1 + view)))
                if view:
                    a = view_2d(a, n, r, 2 * a.nb[1], 0)
                return get_rows_back(a, inp.ids(I32, (r - view,), m), inp.new(F32, (n, m)))
            yield Case(f"{ty!r} {n} {m} {r}{' view' * view}", make)
        yield Case(f"{ty!r} onto", lambda inp, ty=ty: get_rows_back(
            inp.new(ty, (33, 9)), inp.ids(I32, (9,), 4), inp.new(F32, (33, 4)), inp.new(F32, (33, 4))))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    a, ids = t.src[:2]

    def of_a():
        d = g.get_rows(dy, ids)
        return g.pad(d, 0, a.ne[1] - d.ne[1], 0, 0) if a.ne[1] > d.ne[1] else d
    return of_a, None, lambda: dy


# ---------------------------------------------------------------- rows
def _rows(t):
    if t.src[0].ne[1] == t.src[1].ne[0]:
        yield SUM_IN_ORDER, [1, 0]


def _chunk(t, ne, src, before, is_last):
    return get_rows_back(*src[:2], t, before)


SPECS = (Spec(op=OP.GET_ROWS_BACK, builders=(get_rows_back,), reference=reference, kernel=kernel,
              gradient=gradient, rows=_rows, chunk=_chunk, cases=cases, indexed=None,
              rebuild=lambda n: n.call("get_rows_back", *n.src[:2], n.like(), *n.src[2:])),)
