"""win_part, win_unpart: a picture cut into square windows, and put together again (Segment Anything's local attention).

    [C, 7, 5] in windows of w = 4                   window 0  1
        the last ones are padded with zeros         window 2  3

           x: 0..3   4..6 .
      y    +--------+-------+-+
    0..3   |   0    |   1   |0|
           +--------+-------+-+
    4      |   2    |   3   |0|
    .      |  0000  |  0000 |0|
           +--------+-------+-+
"""
import numpy as np

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import zero_bytes
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_chunks, over_rows, param, whole
from ggjit.ops.types.shared.moves import move_bytes


def _check(name, a, w):
    require_type(name, a, (F32,))
    require(rows_contiguous(a), f"{name}: elements of a row must lie side by side", a, remedy="use gg.cont first")
    return whole(name, "window", w, 1)


def win_part(a: Tensor, w: int):
    """Windows of w x w of a [C, W, H] -> [C, w, w, windows], row by row, zero-padded at the far edges; F32.

    op params: windows along x, along y, w.  Errors: ShapeError (a.ne3 != 1), ParamError.  Source: ggml_win_part.
    """
    w = _check("win_part", a, w)
    require(a.ne[3] == 1, "win_part: the source must have three dimensions", a)
    nx, ny = -(-a.ne[1] // w), -(-a.ne[2] // w)
    return a.ctx.node(OP.WIN_PART, F32, (a.ne[0], w, w, nx * ny), (a,), (nx, ny, w), ndim=4)


def win_unpart(a: Tensor, w0: int, h0: int, w: int):
    """The inverse of win_part: a [C, w, w, windows] -> [C, w0, h0], without the padding; F32.

    op params: w.  Errors: ShapeError unless a holds the windows of such a picture, ParamError.  Source:
    ggml_win_unpart.
    """
    w = _check("win_unpart", a, w)
    w0, h0 = whole("win_unpart", "w0", w0), whole("win_unpart", "h0", h0)
    require(a.ne[1] == a.ne[2] == w and a.ne[3] == -(-w0 // w) * -(-h0 // w),
            f"win_unpart: a picture of {w0} x {h0} has {-(-w0 // w) * -(-h0 // w)} windows [C, {w}, {w}]", a)
    return a.ctx.node(OP.WIN_UNPART, F32, (a.ne[0], w0, h0), (a,), (w,))


def reference(t, a):
    if t.op == OP.WIN_PART:
        nx, ny, w = (int(p) for p in t.op_params[:3])
        full = np.zeros((ny * w, nx * w, a.shape[3]))
        full[:a.shape[1], :a.shape[2]] = a[0]
        return full.reshape(ny, w, nx, w, t.ne[0]).swapaxes(1, 2).reshape(tuple(reversed(t.ne)))
    w, (_, w0, h0, _) = int(t.op_params[0]), t.ne
    nx, ny = -(-w0 // w), -(-h0 // w)
    full = a.reshape(ny, nx, w, w, t.ne[0]).swapaxes(1, 2).reshape(ny * w, nx * w, t.ne[0])
    return full[None, :h0, :w0]


@inline
def _part(node, r):
    a, d = node + SRC0, node + DST
    i1, i2, i3 = row_index(d, r)
    nx, w = param(node, 0), param(node, 2)
    x, y, to = i3 % nx * w + i1, i3 // nx * w + i2, row_addr(d, i1, i2, i3)
    if x < ne(a, 1) and y < ne(a, 2):
        move_bytes(to, row_addr(a, x, y, 0), 4 * ne(d, 0))
    else:
        zero_bytes(to, 4 * ne(d, 0))
    return OK


@inline
def _unpart(node, ith, r, stop):
    a, d = node + SRC0, node + DST
    w, n, nbytes = param(node, 0), ne(d, 1), 4 * ne(d, 0)
    n_windows = (n + w - 1) // w
    while r < stop:                                 # a line of a window, or what is wanted of it
        x, y, _ = row_index(d, r)
        left, run = x % w, min(min(stop - r, n - x), w - x % w)
        to, source = row_addr(d, x, y, 0), row_addr(a, left, y % w, y // w * n_windows + x // w)
        for _ in range(run):
            move_bytes(to, source, nbytes)
            to += nb(d, 1)
            source += nb(a, 1)
        r += run
    return OK


def kernel(t, n_threads):
    op = OP(t.op)
    make = (lambda: over_rows(_part)) if op == OP.WIN_PART else (lambda: over_chunks(_unpart))
    return Kernel(op.name.lower(), make, cost=0.03 * touched_nbytes(t))


def part_cases():
    for shape, w in (((24, 7, 5), 4), ((3, 8, 8), 4), ((1, 3, 1), 14), ((70, 1, 6), 1)):
        yield Case(f"{shape} {w}", lambda inp, shape=shape, w=w: win_part(inp.new(F32, shape), w), 0.0)


def unpart_cases():
    for (c, x, y), w in (((24, 7, 5), 4), ((3, 8, 8), 4), ((1, 3, 1), 14)):
        n = -(-x // w) * -(-y // w)
        yield Case(f"{c, x, y} {w}", lambda inp, c=c, x=x, y=y, w=w, n=n: win_unpart(
            inp.new(F32, (c, w, w, n)), x, y, w), 0.0)


# ---------------------------------------------------------------- gradient
def gradient_part(g, t, dy):
    a = t.src[0]
    return (lambda: g.win_unpart(dy, a.ne[1], a.ne[2], int(t.op_params[2])),)


def gradient_unpart(g, t, dy):
    return (lambda: g.win_part(dy, int(t.op_params[0])),)


SPECS = (Spec(op=OP.WIN_PART, builders=(win_part,), reference=reference, kernel=kernel, gradient=gradient_part,
              cases=part_cases,
              rebuild=lambda n: n.call("win_part", *n.src, n.i[2])),
         Spec(op=OP.WIN_UNPART, builders=(win_unpart,), reference=reference, kernel=kernel, gradient=gradient_unpart,
              cases=unpart_cases,
              rebuild=lambda n: n.call("win_unpart", *n.src, n.ne[1], n.ne[2], n.i[0])))
