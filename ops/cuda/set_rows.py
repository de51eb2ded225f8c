"""set_rows (ops/set_rows.py): rows written at given row numbers, converted or quantised."""
from ggjit.ops.cuda.core import block, ld_i32, ld_i64, n_blocks, n_threads, thread
from ggjit.ops.cuda.launch import dense, over_rows
from ggjit.ops.cuda.moves import mover
from ggjit.ops.cuda.views import DST, SRC0, SRC1, addr, bad_index, n_rows, nb, ne, row_addr, row_index
from ggjit.ops.record import OP
from ggjit.ops.types import I64


def _make(move, per_piece, load_id):
    def kernel(node):
        b, ids, d = node + SRC0, node + SRC1, node + DST
        n, pieces, n_table, m2, m3 = n_rows(b), ne(b, 0) // per_piece, ne(d, 1), ne(ids, 1), ne(ids, 2)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(b, r)
            id = load_id(addr(ids) + i1 * nb(ids, 0) + i2 % m2 * nb(ids, 1) + i3 % m3 * nb(ids, 2))
            if id < 0 or id >= n_table:
                bad_index(node, id)
            else:
                pb, pd = row_addr(b, i1, i2, i3), row_addr(d, id, i2, i3)
                i = thread()
                while i < pieces:
                    move(pd, pb, i)
                    i += n_threads()
            r += n_blocks()
    return kernel


def _set_rows(t):
    b, ids = t.src[:2]
    m = mover(b.type, t.type)
    if m is None or not dense(b, t):
        return None
    load_id = ld_i64 if ids.type is I64 else ld_i32
    return over_rows(f"set_rows_{b.type.name}_{t.type.name}_{ids.type.name}",
                     lambda: _make(m.move, m.per_piece, load_id), b.ne[1] * b.ne[2] * b.ne[3],
                     b.ne[0] // m.per_piece)


CUDA = {OP.SET_ROWS: _set_rows}
