"""cpy, cast, cont, dup (ops/copying/copy.py): elements paired in flat order.

    pieces    both sides without gaps: threads take pieces
    rows      one shape, rows side by side on both sides: blocks take rows
    any       element by element, or block by block, the sides may differ in shape
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, n_elements, rows_contiguous
from ggjit.ops.cuda.compiler.core import block, n_blocks, n_threads, thread
from ggjit.ops.cuda.moves import mover
from ggjit.ops.cuda.native.launch import over_elements, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, addr, element_addr, n_rows, ne, row_addr, row_index


def _make_pieces(move, per_piece):
    def kernel(node):
        s, d = addr(node + SRC0), addr(node + DST)
        n, step = ne(node + DST, 0) * n_rows(node + DST) // per_piece, n_threads() * n_blocks()
        i = block() * n_threads() + thread()
        while i < n:
            move(d, s, i)
            i += step
    return kernel


def _make_rows(move, per_piece):
    def kernel(node):
        s, d = node + SRC0, node + DST
        n, pieces = n_rows(d), ne(d, 0) // per_piece
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            ps, pd = row_addr(s, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < pieces:
                move(pd, ps, i)
                i += n_threads()
            r += n_blocks()
    return kernel


def _make_any(move, per_piece):
    def kernel(node):
        s, d = node + SRC0, node + DST
        n, step = ne(d, 0) * n_rows(d) // per_piece, n_threads() * n_blocks()
        e = block() * n_threads() + thread()
        while e < n:
            move(element_addr(d, e, per_piece), element_addr(s, e, per_piece), 0)
            e += step
    return kernel


def flat_copy(t):
    """The Launch that copies source 0, of t's type and size and without gaps, to t."""
    m = mover(t.type, t.type)
    return over_elements(f"copy_{t.type.name}_{t.type.name}_pieces", lambda: _make_pieces(m.move, m.per_piece),
                         n_elements(t) // m.per_piece)


def _copy(t):
    s, n = t.src[0], n_elements(t)
    ts, td, m = s.type, t.type, mover(s.type, t.type)
    if m is None:
        return None
    name = f"copy_{ts.name}_{td.name}"
    if is_contiguous(s) and is_contiguous(t):
        return over_elements(f"{name}_pieces", lambda: _make_pieces(m.move, m.per_piece), n // m.per_piece)
    if s.ne == t.ne and rows_contiguous(s) and rows_contiguous(t):
        return over_rows(f"{name}_rows", lambda: _make_rows(m.move, m.per_piece), n // max(t.ne[0], 1),
                         t.ne[0] // m.per_piece)
    if (ts.quantized or td.quantized) and ts is not td:
        return None
    return over_elements(f"{name}_any", lambda: _make_any(m.move, ts.block), n // ts.block)


CUDA = {OP.CPY: _copy, OP.CONT: _copy, OP.DUP: _copy}
