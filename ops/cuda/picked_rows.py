"""get_rows and set_rows (ops of the same names): rows of a table named by ids, converted, quantised or unpacked.

    get_rows    table: source 0     row i of the result    <-    row ids[i] of the table
    set_rows    table: the result   row i of source 0      ->    row ids[i] of the table
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import I64
from ggjit.ops.cuda.compiler.core import block, ld_i32, ld_i64, n_blocks, n_threads, thread
from ggjit.ops.cuda.moves import mover
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, addr, bad_index, n_rows, nb, ne, row_addr, row_index


def _make(move, per_piece, load_id, writes_table):
    table_at, rows_at = (DST, SRC0) if writes_table else (SRC0, DST)

    def kernel(node):
        table, rows, ids = node + table_at, node + rows_at, node + SRC1
        n, pieces, n_table, m2, m3 = n_rows(rows), ne(rows, 0) // per_piece, ne(table, 1), ne(ids, 1), ne(ids, 2)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(rows, r)
            id = load_id(addr(ids) + i1 * nb(ids, 0) + i2 % m2 * nb(ids, 1) + i3 % m3 * nb(ids, 2))
            if id < 0 or id >= n_table:
                bad_index(node, id)
            else:
                dst, src = row_addr(rows, i1, i2, i3), row_addr(table, id, i2, i3)
                if writes_table:
                    dst, src = src, dst
                i = thread()
                while i < pieces:
                    move(dst, src, i)
                    i += n_threads()
            r += n_blocks()
    return kernel


def _launch(t):
    a, ids = t.src[:2]
    m, writes_table = mover(a.type, t.type), t.op == OP.SET_ROWS
    rows = a if writes_table else t
    if m is None or not dense(a, t):
        return None
    load_id = ld_i64 if ids.type is I64 else ld_i32
    return over_rows(f"{t.op.name.lower()}_{a.type.name}_{t.type.name}_{ids.type.name}",
                     lambda: _make(m.move, m.per_piece, load_id, writes_table), rows.ne[1] * rows.ne[2] * rows.ne[3],
                     rows.ne[0] // m.per_piece)


CUDA = {OP.GET_ROWS: _launch, OP.SET_ROWS: _launch}
