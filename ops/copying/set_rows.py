"""set_rows: rows written into a tensor at given row numbers, converted or quantised to its type.

    a[:, ids[i1, i2 % .., i3 % ..], i2, i3] = b[:, i1, i2, i3]

The KV cache is filled this way: row numbers are an input, so the graph stays the same from token to token.  An id is
checked before its row is touched; one out of range stops the graph with IndexRangeError.  Two values with one id:
either may win.
"""
import numpy as np

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.record import BAD_INDEX, OK, OP
from ggjit.ops.core.shape import n_elements, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, elements_nbytes
from ggjit.ops.core.split import MIRRORED
from ggjit.ops.core.types import BF16, F16, F32, I32, I64, Q4_0, Q8_0, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32, ld_i64
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, fail, nb, ne, next_plane, row_addr, row_index, work
from ggjit.ops.native.row_loops import MOVED, over_chunks, rows_of_source
from ggjit.ops.types.shared.moves import SCRATCH_NBYTES, can_move, mover

VALUES = (F32, F16)
IDS = (I64, I32)


def set_rows(a: Tensor, b: Tensor, c: Tensor):
    """Write the rows of b into a at row numbers c; returns a view of a.  (src order of the node: b, c, a.)

    a [n, m, ne2, ne3] any type with a quantiser; b [n, r, ne2, ne3] F32 or F16; c [r, divides ne2, divides ne3] I64
    or I32.  Errors: ShapeError, TypeMismatch; IndexRangeError at run time for ids outside [0, m), before the row is
    written.  Source: ggml_set_rows.
    """
    require_type("set_rows", b, VALUES, "values")
    require_type("set_rows", c, IDS, "ids")
    require(a.ne[0] == b.ne[0] and a.ne[2:] == b.ne[2:], "set_rows: a and b may differ in ne1 only", a, b)
    fits = (b.ne[1] == c.ne[0] and c.ne[3] == 1 and min(c.ne[1:]) > 0
            and b.ne[2] % c.ne[1] == 0 and b.ne[3] % c.ne[2] == 0)
    require(fits, "set_rows: ids must be [b.ne1, divides b.ne2, divides b.ne3]", b, c)
    for t in (a, b):
        require(rows_contiguous(t), "set_rows: elements of a row must lie side by side", t, remedy="use gg.cont first")
    return a.ctx.node(OP.SET_ROWS, a.type, a.ne, (b, c, a), view_of=a)


def reference(t, b, ids, a):
    out = a.copy()
    rows = np.broadcast_to(np.tile(ids[0], (b.shape[0] // ids.shape[1], b.shape[1] // ids.shape[2], 1)), b.shape[:3])
    i3, i2, _ = np.ogrid[:b.shape[0], :b.shape[1], :b.shape[2]]
    out[i3, i2, rows] = b
    return out


def _make(tb, td, ids_type):
    move, load_id = mover(tb, td).move, ld_i64 if ids_type is I64 else ld_i32

    @inline
    def rows(node, ith, r, stop):
        b, ids, d = node + SRC0, node + SRC1, node + DST
        n0, n1, n2, n_table, m2, m3 = ne(b, 0), ne(b, 1), ne(b, 2), ne(d, 1), ne(ids, 1), ne(ids, 2)
        b_step, ids_step, d_step = nb(b, 1), nb(ids, 0), nb(d, 1)
        scratch = work(node) + ith * SCRATCH_NBYTES
        i1, i2, i3 = row_index(b, r)
        while r < stop:                                 # a plane, or what is wanted of it
            at = addr(ids) + i1 * ids_step
            if i2 + i3 > 0:                             # most tensors have one plane: two divisions are saved
                at += i2 % m2 * nb(ids, 1) + i3 % m3 * nb(ids, 2)
            to, x, run = row_addr(d, 0, i2, i3), row_addr(b, i1, i2, i3), min(stop - r, n1 - i1)
            for _ in range(run):
                id = load_id(at)
                if id < 0 or id >= n_table:
                    return fail(node, BAD_INDEX, id)
                move(to + id * d_step, x, n0, scratch, n1)
                at += ids_step
                x += b_step
            r += run
            i1, i2, i3 = next_plane(i2, i3, n2)
        return OK
    return over_chunks(rows, rows_of_source, MOVED)


def kernel(t, n_threads):
    b, ids = t.src[:2]
    if b.type not in VALUES or ids.type not in IDS or not can_move(b.type, t.type):
        return None
    each = 0.3 if t.type.quantized else 0.1
    return Kernel(f"set_rows-{b.type.name}-{t.type.name}-{ids.type.name}", lambda: _make(b.type, t.type, ids.type),
                  cost=each * n_elements(b) + 5.0 * b.ne[1], work_nbytes=n_threads * SCRATCH_NBYTES,
                  modules=mover(b.type, t.type).modules, alone=b.ne[1:] == (1, 1, 1))


def cases():

    def make(tb, ta, ids_type, n, m, r, batch, divide, view):
        def build(inp):
            a = inp.new(ta, (n, m, *batch))
            b = inp.new(tb, (n, r * (1 + view), *batch))
            if view:
                b = view_4d(b, n, r, *batch, *b.nb[1:], b.nb[1] * (r // 2))
            heads = [k // q for k, q in zip(batch, divide, strict=True)]
            ids = np.stack([inp.rng.permutation(m)[:r] for _ in range(heads[0] * heads[1])])
            return set_rows(a, b, inp.new(ids_type, (r, *heads), ids.astype(ids_type.dtype)))
        return build
    # quantised destinations: one step off, ggml's estimate: (k / 8)^2 / 4n, here with n = 256 per row
    limit = {F32: 1e-7, F16: 2.0 ** -22, BF16: 2.0 ** -16, Q8_0: 1e-4, Q4_0: 2e-2}
    for ta in (F32, F16, BF16, Q8_0, Q4_0):
        for tb, ids_type in ((F32, I64), (F32, I32), (F16, I64)):
            name = f"{tb!r} {ta!r} {ids_type!r}"
            yield Case(name, make(tb, ta, ids_type, 256, 5, 4, (2, 3), (1, 1), False), limit[ta])
            yield Case(f"{name} view", make(tb, ta, ids_type, 96, 11, 7, (6, 4), (2, 4), True), limit[ta])
    yield Case("tail", make(F32, F16, I64, 33, 5, 1, (1, 7), (1, 1), False), limit[F16])


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """The gradient of the values is their rows of dy; that of the tensor written into has zeros in those rows."""
    b, ids, a = t.src

    def of_b():
        i32 = g.cast(ids, I32) if ids.type is I64 else g.dense(ids)
        i32 = i32 if i32.ne[1:3] == b.ne[2:] else g.repeat_4d(i32, i32.ne[0], *b.ne[2:], 1)
        return g.get_rows(dy, i32)
    return of_b, None, lambda: g.set_rows(g.dup(dy), g.zeros(b), ids)


def _moved(t):
    """The rows that are written, not the whole table."""
    n = elements_nbytes(t.src[0])
    return n + n // t.src[0].type.nbytes * t.type.nbytes // t.type.block


def _split(t, values, ids, into):
    """Each device writes its part of every row, or its own batch."""
    return into if into.is_cut and values == into and into.axis != 1 and ids == MIRRORED else None


SPECS = (Spec(op=OP.SET_ROWS, builders=(set_rows,), reference=reference, kernel=kernel,
              gradient=gradient, split=_split, cases=cases, indexed=2,
              rebuild=lambda n: n.call("set_rows", n.src[2], n.src[0], n.src[1]),
              moved=_moved),)
