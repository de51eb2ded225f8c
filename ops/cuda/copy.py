"""Rows moved between types: cpy, cast, cont, dup (ops/copying/copy.py), get_rows and set_rows (ops of the same names).

A piece is what one thread moves at a time: an element, or the 32 values of a quantised block's unit.

    mover(ts, td) -> CudaMover or None      .move(dst, src, i): piece i of a row;  .per_piece elements a piece

Copies pair elements in flat order:

    pieces      both sides without gaps: threads take pieces
    rows        one shape, rows side by side on both sides: blocks take rows
    any         element by element, or block by block, the sides may differ in shape

Rows of a table are named by ids:

    get_rows    table: source 0     row i of the result    <-    row ids[i] of the table
    set_rows    table: the result   row i of source 0      ->    row ids[i] of the table
"""
import dataclasses
import functools
from collections.abc import Callable

from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, n_elements, rows_contiguous
from ggjit.ops.core.types import I64
from ggjit.ops.cuda.blocks import BLOCKS, unpacker
from ggjit.ops.cuda.compiler.core import block, device, ld_i32, ld_i64, n_blocks, n_threads, thread
from ggjit.ops.cuda.native.launch import dense, over_elements, over_rows
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    addr,
    bad_index,
    element_addr,
    n_rows,
    nb,
    ne,
    row_addr,
    row_index,
)
from ggjit.ops.cuda.quantize import QUANTIZE
from ggjit.ops.cuda.rows import FLOATS, MOVE, ONE


@dataclasses.dataclass(frozen=True)
class CudaMover:
    """move(pd, ps, i): piece i of a row at ps, of per_piece elements, to its place in the row at pd."""
    move: Callable
    per_piece: int = 1


@functools.cache
def mover(ts, td):
    """The function that moves rows of type ts to rows of td with elements side by side; None: there is no such
    conversion."""
    if ts is td:
        return CudaMover(*_same(ts))
    if td in QUANTIZE and ts in FLOATS:
        return CudaMover(_quantizing(ts, td), 32)
    if ts in BLOCKS and td in FLOATS:
        return CudaMover(_unpacking(ts, td), 32)
    if ts in ONE and td in ONE:
        get, put, ss, sd = ONE[ts].get, ONE[td].put, ts.nbytes, td.nbytes

        @device
        def convert(dst, src, i):
            put(dst + i * sd, get(src + i * ss))
        return CudaMover(convert)
    return None


def _same(ty):
    """The piece is an element or a whole block; its bytes are moved as they are."""
    width = ty.nbytes if not ty.quantized else 2 if ty.nbytes % 2 == 0 else 1
    word, size = MOVE[width], ty.nbytes

    @device
    def move(dst, src, i):
        for k in range(0, size, width):
            word(dst + i * size + k, src + i * size + k)
    return move, ty.block


def _quantizing(ts, td):
    quantize, ss, sd = QUANTIZE[td](ONE[ts].get), ts.nbytes, td.nbytes

    @device
    def move(dst, src, i):
        quantize(src + i * 32 * ss, ss, dst + i * sd)
    return move


def _unpacking(ts, td):
    unpack, units, ss, sd, block = unpacker(ts, ONE[td].put, td.nbytes), ts.block // 32, ts.nbytes, td.nbytes, ts.block

    @device
    def move(dst, src, i):
        b = i // units
        unpack(dst + b * block * sd, src + b * ss, i - b * units)
    return move


# ---------------------------------------------------------------- elements paired in flat order
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


# ---------------------------------------------------------------- rows of a table named by ids
def _make_picked(move, per_piece, load_id, writes_table):
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


def _picked(t):
    a, ids = t.src[:2]
    m, writes_table = mover(a.type, t.type), t.op == OP.SET_ROWS
    rows = a if writes_table else t
    if m is None or not dense(a, t):
        return None
    load_id = ld_i64 if ids.type is I64 else ld_i32
    return over_rows(f"{t.op.name.lower()}_{a.type.name}_{t.type.name}_{ids.type.name}",
                     lambda: _make_picked(m.move, m.per_piece, load_id, writes_table),
                     rows.ne[1] * rows.ne[2] * rows.ne[3], rows.ne[0] // m.per_piece)


CUDA = dict.fromkeys((OP.CPY, OP.CONT, OP.DUP), _copy) | dict.fromkeys((OP.GET_ROWS, OP.SET_ROWS), _picked)
