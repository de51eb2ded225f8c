"""get_rows: rows of a table picked by ids; quantised rows come out as float32.

    d[:, i1, i2, i3] = a[:, ids[i1, i2, i3], i2, i3]

Ids are checked at run time: one out of range stops the graph with IndexRangeError naming it.
"""
import numpy as np

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.record import BAD_INDEX, OK, OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import n_elements, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, elements_nbytes
from ggjit.ops.core.split import MIRRORED
from ggjit.ops.core.types import BF16, F16, F32, I32, Q4_0, Q8_0, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, fail, nb, ne, next_plane, row_addr, row_index, work
from ggjit.ops.native.row_loops import MOVED, over_chunks
from ggjit.ops.types.shared.moves import SCRATCH_NBYTES, can_move, mover


def get_rows(a: Tensor, b: Tensor):
    """Rows b of a: a [n, m, ne2, ne3] any type, b I32 [r, ne2, ne3] -> [n, r, ne2, ne3] F32 (I32 if a is I32).

    NumPy: a[i3, i2, b[i3, i2, i1]].  Errors: ShapeError, TypeMismatch; IndexRangeError at run time for ids outside
    [0, m).  Source: ggml_get_rows.
    """
    require_type("get_rows", b, (I32,), "ids")
    require(a.ne[2] == b.ne[1] and a.ne[3] == b.ne[2] and b.ne[3] == 1,
            "get_rows: ids must be [r, a.ne2, a.ne3]", a, b)
    require(rows_contiguous(a), "get_rows: elements of a row must lie side by side", a, remedy="use gg.cont first")
    return a.ctx.node(OP.GET_ROWS, I32 if a.type is I32 else F32, (a.ne[0], *b.ne[:3]), (a, b),
                      ndim=min(b.ndim + 1, 4))


def reference(t, a, ids):
    rows = ids[0]                                           # [ne3, ne2, r]
    i3, i2, _ = np.ogrid[:rows.shape[0], :rows.shape[1], :rows.shape[2]]
    return a[i3, i2, rows]


def _make(ta, td):
    move = mover(ta, td).move

    @inline
    def rows(node, ith, r, stop):
        a, ids, d = node + SRC0, node + SRC1, node + DST
        n0, n1, n2, n_table = ne(d, 0), ne(d, 1), ne(d, 2), ne(a, 1)
        a_step, ids_step, d_step = nb(a, 1), nb(ids, 0), nb(d, 1)
        scratch = work(node) + ith * SCRATCH_NBYTES
        i1, i2, i3 = row_index(d, r)
        while r < stop:                                 # a plane, or what is wanted of it
            table = row_addr(a, 0, i2, i3)
            at = addr(ids) + i1 * ids_step + i2 * nb(ids, 1) + i3 * nb(ids, 2)
            to, run = row_addr(d, i1, i2, i3), min(stop - r, n1 - i1)
            for _ in range(run):
                id = ld_i32(at)
                if id < 0 or id >= n_table:
                    return fail(node, BAD_INDEX, id)
                move(to, table + id * a_step, n0, scratch, n1)
                at += ids_step
                to += d_step
            r += run
            i1, i2, i3 = next_plane(i2, i3, n2)
        return OK
    return over_chunks(rows, chunking=MOVED)


def kernel(t, n_threads):
    a = t.src[0]
    if not can_move(a.type, t.type):
        return None
    return Kernel(f"get_rows-{a.type.name}-{t.type.name}", lambda: _make(a.type, t.type),
                  cost=0.15 * n_elements(t) + 5.0 * t.ne[1], work_nbytes=n_threads * SCRATCH_NBYTES,
                  modules=mover(a.type, t.type).modules)


def cases():

    def make(ty, n, m, r, batch, view):
        def build(inp):
            a = inp.new(ty, (n, m, *batch)) if ty is not I32 else inp.ids(ty, (n, m, *batch), 1000)
            ids = inp.ids(I32, (r * (1 + view), *batch), m)
            if view:
                ids = view_4d(ids, r, *ids.ne[1:], *ids.nb[1:], 4 * (r // 2))
            return get_rows(a, ids)
        return build
    for ty in (F32, F16, BF16, Q8_0, Q4_0, I32):
        for n, m, r, batch, view in ((256, 5, 4, (7, 1), True), (64, 5, 4, (2, 3), False), (96, 80, 40, (1, 1), False)):
            yield Case(f"{ty!r} {n} {m} {r} {batch}{' view' * view}", make(ty, n, m, r, batch, view))
    yield Case("F16 tail", make(F16, 77, 9, 5, (1, 1), False))
    # rows for the string instruction, with and without lines in step; and those whose lines are asked for early
    for ty, n in ((F32, 2336), (F32, 1037), (F16, 2336), (Q8_0, 2336)):
        yield Case(f"{ty!r} long {n}", make(ty, n, 9, 5, (1, 1), False))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """Rows of dy added up by id; tables of several matrices one after the other."""
    a, ids = t.src

    def of_matrix(i2, i3):
        table = g.empty(a.ne[:2])
        rows = g.view_2d(dy, dy.ne[0], dy.ne[1], dy.nb[1], i2 * dy.nb[2] + i3 * dy.nb[3])
        return g.get_rows_back(rows, g.view_1d(g.dense(ids), ids.ne[0], 4 * ids.ne[0] * (i2 + i3 * ids.ne[1])), table)

    def of_a():
        if a.ne[2] == a.ne[3] == 1:
            return g.get_rows_back(dy, g.dense(ids), a)
        stacks = []
        for i3 in range(a.ne[3]):
            stack = of_matrix(0, i3)
            for i2 in range(1, a.ne[2]):
                stack = g.concat(stack, of_matrix(i2, i3), 2)
            stacks.append(stack)
        whole = stacks[0]
        for stack in stacks[1:]:
            whole = g.concat(whole, stack, 3)
        return whole
    return of_a, None


# ---------------------------------------------------------------- rows
def _rows(t):
    if last_axis(t) == 1:
        yield 1, [None, 0]


def _moved(t):
    """The rows that are named, not the whole table."""
    rows = t.ne[1] * t.ne[2] * t.ne[3]
    return elements_nbytes(t) + rows * t.src[0].type.row_nbytes(t.ne[0]) + t.src[1].nbytes


def _split(t, a, ids):
    """Each device has its part of every row."""
    return a if a.axis == 0 and ids == MIRRORED else None


SPECS = (Spec(op=OP.GET_ROWS, builders=(get_rows,), reference=reference, kernel=kernel,
              gradient=gradient, rows=_rows, split=_split, cases=cases,
              moved=_moved),)
