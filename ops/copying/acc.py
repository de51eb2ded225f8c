"""acc, set: a with b added to, or copied into, a strided window of it.

    row (i1, i2, i3) of b meets the ne0 elements of a at byte  offset + i1 nb1 + i2 nb2 + i3 nb3

ggml keeps strides and offset in 32-bit op params and offsets below 2^30, and so they are here.  Windows whose
rows overlap are undefined, as in ggml.
"""
import numpy as np

from ggjit.ops.copying.view import permute
from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import IndexRangeError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import describe, is_contiguous, n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, ld_i32, st_f32, st_i32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    addr,
    barrier,
    n_rows,
    nb,
    ne,
    row_addr,
    row_index,
)
from ggjit.ops.native.row_loops import MOVED, PIECE, over_chunks, param, pieces_of_result, rows_with_elements, whole
from ggjit.ops.native.simd import fadd
from ggjit.ops.types.shared.moves import move_bytes
from ggjit.ops.types.shared.rows import pair_row

SIZE = 4                            # bytes of an element
MAX_OFFSET = (1 << 30) - 1          # ggml asserts this


def _build(op, a, b, nb1, nb2, nb3, offset, in_place):
    name = op.name.lower()
    require_type(name, a, (F32,) if op == OP.ACC else (F32, I32), "a")
    require(a.type is b.type, f"{name}: a and b must have one type", a, b, remedy="cast one with gg.cast")
    require(is_contiguous(a), f"{name}: a must be contiguous", a, remedy="use gg.cont first")
    require(n_elements(b) <= n_elements(a), f"{name}: b has more elements than a", a, b)
    strides = [whole(name, f"nb{i + 1}", n) for i, n in enumerate((nb1, nb2, nb3))]
    offset = whole(name, "offset", offset, 0, MAX_OFFSET)
    end = offset + (SIZE + sum((n - 1) * s for n, s in zip(b.ne, (SIZE, *strides), strict=True)) if min(b.ne) else 0)
    if end > a.nbytes:
        raise IndexRangeError(f"{name}: the window ends at byte {end}, {describe(a)} has {a.nbytes}")
    return a.ctx.node(op, a.type, a.ne, (a, b), (*strides, offset, int(in_place)), view_of=a if in_place else None,
                      ndim=a.ndim)


def _acc(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, in_place: bool):
    """a + b in the window of a at byte `offset` with row strides nb1, nb2, nb3 in bytes; shape of a, contiguous F32.

    b F32 of the window's shape.  op params: nb1, nb2, nb3, offset, in place.  Errors: ShapeError, TypeMismatch,
    ParamError, IndexRangeError for a window outside a.  Source: ggml_acc.
    """
    return _build(OP.ACC, a, b, nb1, nb2, nb3, offset, in_place)


acc, acc_inplace = in_place_pair(_acc)


def _set(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, in_place: bool):
    """a with b copied into the window at byte `offset` < 2^30; strides nb1, nb2, nb3 in bytes; contiguous F32 or I32.

    Shape of a; op params and errors as `acc`.  Source: ggml_set.
    """
    return _build(OP.SET, a, b, nb1, nb2, nb3, offset, in_place)


set, set_inplace = in_place_pair(_set)


def _set_1d(a: Tensor, b: Tensor, offset: int, in_place: bool):
    """`set` with a's own strides: a stretch of b.ne0 elements of a at byte `offset`.  Errors as `set`.

    Source: ggml_set_1d.
    """
    return _set(a, b, *a.nb[1:], offset, in_place)


set_1d, set_1d_inplace = in_place_pair(_set_1d)


def _set_2d(a: Tensor, b: Tensor, nb1: int, offset: int, in_place: bool):
    """`set` of a matrix b into a, rows nb1 bytes apart, from byte `offset`.  Errors as `set`.  Source: ggml_set_2d."""
    return _set(a, b, nb1, *a.nb[2:], offset, in_place)


set_2d, set_2d_inplace = in_place_pair(_set_2d)


def reference(t, a, b):
    out = np.ascontiguousarray(a).reshape(-1).copy()
    nb1, nb2, nb3, offset = (int(p) for p in t.op_params[:4])
    i3, i2, i1, i0 = np.indices(b.shape)
    where = (offset + i1 * nb1 + i2 * nb2 + i3 * nb3) // SIZE + i0
    out[where] = b + (out[where] if t.op == OP.ACC else 0)
    return out.reshape(a.shape)


@inline
def _copy(node, ith, start, stop):
    a, d, n = addr(node + SRC0), addr(node + DST), n_rows(node + DST) * ne(node + DST, 0)
    moved = SIZE * (min(stop * PIECE, n) - start * PIECE)
    move_bytes(d + SIZE * start * PIECE, a + SIZE * start * PIECE, moved, SIZE * n)
    return OK


@inline
def _rows_of_b(node):
    return rows_with_elements(node + SRC1)


_add_row = pair_row(fadd)


def _make(adds):
    @inline
    def row(d, x, b, b0, n):
        """d = x + b or d = b over n elements; x and d are dense."""
        if b0 != SIZE:
            for i in range(n):
                if adds:
                    st_f32(d + SIZE * i, ld_f32(x + SIZE * i) + ld_f32(b + i * b0))
                else:
                    st_i32(d + SIZE * i, ld_i32(b + i * b0))
        elif adds:
            _add_row(d, x, b, n)
        else:
            move_bytes(d, b, SIZE * n)

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        for r in range(start, stop):
            i1, i2, i3 = row_index(b, r)
            to = param(node, 3) + i1 * param(node, 0) + i2 * param(node, 1) + i3 * param(node, 2)
            row(addr(d) + to, addr(a) + to, row_addr(b, i1, i2, i3), nb(b, 0), ne(b, 0))
        return OK

    copy, change = inline(over_chunks(_copy, pieces_of_result, MOVED)), inline(over_chunks(rows, _rows_of_b, phase=1))

    def kernel(node, ith, nth, sync):
        if addr(node + DST) != addr(node + SRC0):
            copy(node, ith, nth, sync)
            barrier(sync, nth)
        return change(node, ith, nth, sync)
    return kernel


def kernel(t, n_threads):
    op = OP(t.op)
    return Kernel(op.name.lower(), lambda: _make(op == OP.ACC), cost=0.03 * touched_nbytes(t))


def acc_cases():
    for build in (acc, acc_inplace):
        for shape, part, step in (((256, 19, 1, 1), (256, 16, 1, 1), 1), ((33, 5, 4, 3), (20, 5, 2, 1), 1),
                                  ((50, 8, 3, 2), (7, 4, 3, 2), 2), ((5, 1, 1, 1), (5, 1, 1, 1), 1)):
            def make(inp, build=build, shape=shape, part=part, step=step):
                a, b = inp.new(F32, shape), inp.new(F32, part)
                return build(a, b, a.nb[1] * step, a.nb[2], a.nb[3], 4 * (shape[0] - part[0]))
            yield Case(f"{build.__name__} {shape} {part}", make)

    def transposed(inp):
        a, b = inp.new(F32, (20, 9)), permute(inp.new(F32, (5, 7)), 1, 0, 2, 3)
        return acc(a, b, *a.nb[1:], 8)
    yield Case("transposed b", transposed)


def set_cases():
    for ty in (F32, I32):
        for build in (set, set_inplace):
            for shape, part in (((6, 5, 4, 3), (6, 5, 2, 1)), ((64, 7, 2, 2), (37, 4, 2, 1)),
                                ((9, 1, 1, 1), (3, 1, 1, 1))):
                def make(inp, build=build, shape=shape, part=part, ty=ty):
                    a, b = (inp.new(F32, s) if ty is F32 else inp.ids(ty, s, 1000) for s in (shape, part))
                    return build(a, b, *a.nb[1:], 4 * (shape[0] - part[0]))
                yield Case(f"{build.__name__} {ty!r} {shape} {part}", make, 0.0)
        yield Case(f"1d {ty!r}", lambda inp, ty=ty: set_1d(inp.ids(ty, (40, 3), 99), inp.ids(ty, (30,), 99), 20), 0.0)
        yield Case(f"2d {ty!r}", lambda inp, ty=ty: set_2d_inplace(
            inp.ids(ty, (40, 6), 99), inp.ids(ty, (30, 3), 99), 320, 20), 0.0)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """The gradient of b is its window of dy; that of a is dy, for `set` with zeros in the window."""
    a, b = t.src
    nb1, nb2, nb3, offset = (int(p) for p in t.op_params[:4])
    whole = (lambda: dy) if t.op == OP.ACC else lambda: g.set(dy, g.zeros(b), nb1, nb2, nb3, offset)
    return whole, lambda: g.cont(g.view_4d(dy, *b.ne, nb1, nb2, nb3, offset))


SPECS = (Spec(op=OP.ACC, builders=(acc, acc_inplace), reference=reference, kernel=kernel, gradient=gradient,
              cases=acc_cases),
         Spec(op=OP.SET, builders=(set, set_inplace, set_1d, set_1d_inplace, set_2d, set_2d_inplace),
              reference=reference, kernel=kernel, gradient=gradient, cases=set_cases))
