"""get_rows (ops/get_rows.py): rows picked by ids; quantised rows come out as float32."""
from ggjit.ops.cuda.core import block, ld_i32, n_blocks, n_threads, thread
from ggjit.ops.cuda.launch import dense, over_rows
from ggjit.ops.cuda.moves import mover
from ggjit.ops.cuda.views import DST, SRC0, SRC1, addr, bad_index, n_rows, nb, ne, row_addr, row_index
from ggjit.ops.record import OP


def _make(move, per_piece):
    def kernel(node):
        a, ids, d = node + SRC0, node + SRC1, node + DST
        n, pieces, n_table = n_rows(d), ne(d, 0) // per_piece, ne(a, 1)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            id = ld_i32(addr(ids) + i1 * nb(ids, 0) + i2 * nb(ids, 1) + i3 * nb(ids, 2))
            if id < 0 or id >= n_table:
                bad_index(node, id)
            else:
                pa, pd = row_addr(a, id, i2, i3), row_addr(d, i1, i2, i3)
                i = thread()
                while i < pieces:
                    move(pd, pa, i)
                    i += n_threads()
            r += n_blocks()
    return kernel


def _get_rows(t):
    a, m = t.src[0], mover(t.src[0].type, t.type)
    if m is None or not dense(a, t):
        return None
    return over_rows(f"get_rows_{a.type.name}_{t.type.name}", lambda: _make(m.move, m.per_piece),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0] // m.per_piece)


CUDA = {OP.GET_ROWS: _get_rows}
