"""get_rows of repacked tables: of a matrix that is both the embedding and the output of a model.

    layout  -- the blocks of row id, wherever its lane has them -->  the row as in the file  -- as the type says -->  d

A token reads one row of thousands, so its strides cost nothing; the product reads them all.
"""
from ggjit.ops.core.record import BAD_INDEX, OK
from ggjit.ops.core.shape import n_elements
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.types import F32
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, fail, nb, ne, row_addr, row_index, whole_lines, work
from ggjit.ops.native.row_loops import AFFINITY, over_chunks
from ggjit.ops.types.shared.moves import mover


def _make(type, row_of):
    move, block, nbytes = mover(type, F32).move, type.block, type.nbytes

    @inline
    def rows(node, ith, start, stop):
        a, ids, d = node + SRC0, node + SRC1, node + DST
        k, m = ne(a, 0), ne(a, 1)
        file = work(node) + ith * whole_lines(k // block * nbytes)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            id = ld_i32(addr(ids) + i1 * nb(ids, 0) + i2 * nb(ids, 1) + i3 * nb(ids, 2))
            if id < 0 or id >= m:
                return fail(node, BAD_INDEX, id)
            row_of(addr(a), k, m, id, file)
            move(row_addr(d, i1, i2, i3), file, k, file, ne(d, 1))
        return OK
    return over_chunks(rows, chunking=AFFINITY)


def rows_kernel(t, layout, n_threads):
    """The Kernel of get_rows from a repacked matrix."""
    a = t.src[0]
    return Kernel(f"get_rows-repacked-{a.type.name}-f32", lambda: _make(a.type, layout.make_row_of(a.type)),
                  cost=0.5 * n_elements(t) + 5.0 * t.ne[1],
                  work_nbytes=n_threads * whole_lines.py_func(a.type.row_nbytes(a.ne[0])),
                  modules=(__name__, layout.__name__, *mover(a.type, F32).modules))
