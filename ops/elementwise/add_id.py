"""add_id: a row of a table added to every slot, the row picked by an id (biases of a mixture of experts)."""
from ggjit.ops.copying.view import view_2d
from ggjit.ops.core.record import BAD_INDEX, OK, OP
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, addr, fail, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import fadd
from ggjit.ops.types.shared.rows import pair_row


def add_id(a: Tensor, b: Tensor, ids: Tensor):
    """d[:, i1, i2] = a[:, i1, i2] + b[:, ids[i1, i2]]; a [n, used, tokens], b [n, experts] F32, ids I32 [used, tokens].

    Shape of a.  Errors: ShapeError, TypeMismatch; IndexRangeError at run time for ids outside [0, experts), before
    the row is written.  Source: ggml_add_id.
    """
    for t in (a, b):
        require_type("add_id", t, (F32,))
        require(rows_contiguous(t), "add_id: elements of a row must lie side by side", t, remedy="use gg.cont first")
    require_type("add_id", ids, (I32,), "ids")
    require(a.ne[0] == b.ne[0] and a.ne[3] == b.ne[2] == b.ne[3] == 1, "add_id: a must be [n, used, tokens], "
            "b [n, experts]", a, b)
    require(a.ne[1:3] == ids.ne[:2] and ids.ne[2] == ids.ne[3] == 1, "add_id: ids must be [a.ne1, a.ne2]", a, ids)
    return a.ctx.node(OP.ADD_ID, F32, a.ne, (a, b, ids))


def reference(t, a, b, ids):
    return a + b[0, 0][ids[0, 0]]


_add_row = pair_row(fadd)


@inline
def _rows(node, ith, start, stop):
    a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
    n, n1 = ne(d, 0), ne(d, 1)
    i1, i2, _ = row_index(d, start)
    for _ in range(start, stop):
        id = ld_i32(addr(ids) + i1 * nb(ids, 0) + i2 * nb(ids, 1))
        if id < 0 or id >= ne(b, 1):
            return fail(node, BAD_INDEX, id)
        _add_row(row_addr(d, i1, i2, 0), row_addr(a, i1, i2, 0), row_addr(b, id, 0, 0), n)
        i1, i2 = (i1 + 1, i2) if i1 + 1 < n1 else (0, i2 + 1)
    return OK


def kernel(t, n_threads):
    return Kernel("add_id", lambda: over_chunks(_rows), cost=0.03 * touched_nbytes(t))


def cases():

    def make(experts, used, n, tokens):
        def build(inp):
            ids = view_2d(inp.ids(I32, (experts, tokens), experts), used, tokens, 4 * experts, 0)
            return add_id(inp.new(F32, (n, used, tokens)), inp.new(F32, (n, experts)), ids)
        return build
    for shape in ((4, 2, 36, 1), (8, 4, 131, 32), (4, 1, 131, 129), (3, 3, 5, 2)):
        yield Case("experts={} used={} n={} tokens={}".format(*shape), make(*shape))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    a, b, ids = t.src

    def of_b():
        n = ids.ne[0] * ids.ne[1]
        return g.get_rows_back(g.reshape_2d(dy, a.ne[0], n), g.reshape_1d(g.dense(ids), n), b)
    return lambda: dy, of_b, None


SPECS = (Spec(op=OP.ADD_ID, builders=(add_id,), reference=reference, kernel=kernel, in_place=True,
              gradient=gradient, cases=cases,
              indexed=1),)
