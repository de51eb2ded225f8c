"""Ops that move elements about: concat, repeat, diag_mask (ops of the same names)."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import rows_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import block, device, ld_f32, n_blocks, n_threads, st_f32, thread
from ggjit.ops.cuda.copy import mover
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, nb, ne, param_i32, row_addr, row_addr_mod, row_index
from ggjit.ops.cuda.rows import MOVE


# ---------------------------------------------------------------- concat
def _make_concat(move, per_piece, size, strided):
    @device
    def row(to, x, n, step):
        i = thread()
        while i < n // per_piece:
            if strided:
                move(to + i * size, x + i * step, 0)
            else:
                move(to, x, i)
            i += n_threads()

    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        dim, n = param_i32(node, 0), n_rows(d)
        edge1 = ne(a, 1) if dim == 1 else ne(d, 1)
        edge2 = ne(a, 2) if dim == 2 else ne(d, 2)
        edge3 = ne(a, 3) if dim == 3 else ne(d, 3)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            to = row_addr(d, i1, i2, i3)
            in_a = i1 < edge1 and i2 < edge2 and i3 < edge3
            if in_a:
                row(to, row_addr(a, i1, i2, i3), ne(a, 0), nb(a, 0))
                to += ne(a, 0) // per_piece * size
            if not in_a or dim == 0:
                j1, j2 = i1 - (edge1 if dim == 1 else 0), i2 - (edge2 if dim == 2 else 0)
                row(to, row_addr(b, j1, j2, i3 - (edge3 if dim == 3 else 0)), ne(b, 0), nb(b, 0))
            r += n_blocks()
    return kernel


def _concat(t):
    strided = not all(rows_contiguous(s) for s in t.src)
    if any(s.type is not t.type for s in t.src) or (t.type.quantized and strided):
        return None
    m = mover(t.type, t.type)
    return over_rows(f"concat_{t.type.name}{'_strided' * strided}",
                     lambda: _make_concat(m.move, m.per_piece, t.type.nbytes, strided),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0] // m.per_piece)


# ---------------------------------------------------------------- repeat
def _make_repeat(move, size):
    def kernel(node):
        a, d = node + SRC0, node + DST
        n0, m0, n = ne(d, 0), ne(a, 0), n_rows(d)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            pd, pa = row_addr(d, i1, i2, i3), row_addr_mod(a, i1, i2, i3)
            i = thread()
            while i < n0:
                move(pd + i * size, pa + i % m0 * nb(a, 0))
                i += n_threads()
            r += n_blocks()
    return kernel


def _repeat(t):
    if t.src[0].type is not t.type or t.type.quantized:
        return None
    size = t.type.nbytes
    return over_rows(f"repeat_{size}", lambda: _make_repeat(MOVE[size], size), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


# ---------------------------------------------------------------- diag_mask
def _make_mask(value):
    value = f32(value)

    def kernel(node):
        a, d = node + SRC0, node + DST
        n0, n, n_past = ne(d, 0), n_rows(d), param_i32(node, 0)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            pd, pa = row_addr(d, i1, i2, i3), row_addr(a, i1, i2, i3)
            i = thread()
            while i < n0:
                x = value
                if i <= n_past + i1:
                    x = ld_f32(pa + 4 * i)
                st_f32(pd + 4 * i, x)
                i += n_threads()
            r += n_blocks()
    return kernel


def _mask(t):
    if t.type is not F32 or not dense(t, t.src[0]):
        return None
    value = "-inf" if t.op == OP.DIAG_MASK_INF else "0"
    return over_rows(t.op.name.lower(), lambda: _make_mask(value), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = {OP.CONCAT: _concat, OP.REPEAT: _repeat, OP.DIAG_MASK_INF: _mask, OP.DIAG_MASK_ZERO: _mask}
