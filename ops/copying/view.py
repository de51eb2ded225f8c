"""reshape, view, permute, transpose: other shapes and strides over the same bytes; nothing is computed.

A view shares the memory of its base; chains collapse, so `view_src` is always a tensor with memory of its own and
`view_offs` counts bytes from its start.

    permute scatters: axis i of the input becomes axis axes[i] of the result (NumPy's transpose gathers).
        ne (a, b, c, d) permuted by (0, 2, 1, 3)  ->  ne (a, c, b, d)
        ne (a, b, c, d) permuted by (1, 2, 0, 3)  ->  ne (c, a, b, d)         # not (b, c, a, d)
"""
import math
import operator

import numpy as np

from ggjit.ops.core.errors import IndexRangeError, NotSupported, ParamError, ShapeError
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.row_axes import as_many_elements, last_axis
from ggjit.ops.core.shape import describe, is_contiguous, require
from ggjit.ops.core.spec import Spec
from ggjit.ops.core.split import viewed
from ggjit.ops.core.types import Tensor

_SPLIT = 1 << 32


def reshape_to(a, ne, ndim):
    """a with the sizes `ne` and `ndim` axes, a view."""
    require(is_contiguous(a), "reshape: the source must be contiguous", a, remedy="use gg.cont first")
    ne = tuple(operator.index(n) for n in ne)
    if math.prod(ne) != math.prod(a.ne):
        raise ShapeError(f"reshape: {describe(a)} has {math.prod(a.ne)} elements, {list(ne)} has {math.prod(ne)}")
    return a.ctx.node(OP.RESHAPE, a.type, ne, (a,), view_of=a, ndim=ndim)


def reshape(a: Tensor, b: Tensor):
    """a with the shape of tensor b; same elements in the same order, a view.  NumPy: a.reshape(b.shape).

    Errors: ShapeError unless a is contiguous and as large as b.  Source: ggml_reshape.
    """
    return reshape_to(a, b.ne, b.ndim)


def reshape_1d(a: Tensor, ne0: int):
    """a as one row of ne0 elements, a view; NumPy: a.reshape(ne0).  Errors as `reshape`.  Source: ggml_reshape_1d."""
    return reshape_to(a, (ne0,), 1)


def reshape_2d(a: Tensor, ne0: int, ne1: int):
    """a as [ne0, ne1], a view; NumPy: a.reshape(ne1, ne0).  Errors as `reshape`.  Source: ggml_reshape_2d."""
    return reshape_to(a, (ne0, ne1), 2)


def reshape_3d(a: Tensor, ne0: int, ne1: int, ne2: int):
    """a as [ne0, ne1, ne2], a view; NumPy: a.reshape(ne2, ne1, ne0).  Errors as `reshape`.  Source: ggml_reshape_3d."""
    return reshape_to(a, (ne0, ne1, ne2), 3)


def reshape_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int):
    """a as [ne0, ne1, ne2, ne3], a view; NumPy: a.reshape(ne3, ne2, ne1, ne0).

    Errors as `reshape`.  Source: ggml_reshape_4d.
    """
    return reshape_to(a, (ne0, ne1, ne2, ne3), 4)


def _view(a, ne, nb, offset):
    ndim, ne = len(ne), tuple(operator.index(n) for n in ne) + (1,) * (4 - len(ne))
    if min(ne) < 0 or ne[0] % a.type.block:
        raise ShapeError(f"view: bad shape {list(ne)} for {describe(a)}")
    strides = [a.type.nbytes, *(operator.index(n) for n in nb)]
    if len(strides) == 1:
        strides.append(a.type.row_nbytes(ne[0]))
    while len(strides) < 4:
        strides.append(strides[-1] * ne[len(strides) - 1])
    offset = operator.index(offset)
    if offset < 0 or min(strides) < 0:
        raise ParamError(f"view: offset {offset} and strides {strides} must not be negative")
    last = offset + (a.type.row_nbytes(ne[0]) + sum((n - 1) * b for n, b in zip(ne[1:], strides[1:], strict=True))
                     if min(ne) else 0)
    if last > a.nbytes:
        raise IndexRangeError(f"view: bytes {offset}..{last} are outside {describe(a)} ({a.nbytes} bytes)")
    return a.ctx.node(OP.VIEW, a.type, ne, (a,), offset_params(offset), view_of=a, view_offs=offset, nb=strides,
                      ndim=ndim)


def offset_params(offset):
    """size_t offset over the first two 32-bit slots, as ggml stores it."""
    lo, hi = offset % _SPLIT, offset // _SPLIT
    return (lo - _SPLIT if lo >= _SPLIT // 2 else lo, hi)


def view_1d(a: Tensor, ne0: int, offset: int):
    """ne0 elements of a from byte `offset`; contiguous.

    op params: offset, 64 bits over two slots.  Errors: IndexRangeError outside a, ShapeError, ParamError.  Source:
    ggml_view_1d.
    """
    return _view(a, (ne0,), (), offset)


def view_2d(a: Tensor, ne0: int, ne1: int, nb1: int, offset: int):
    """[ne0, ne1] window of a from byte `offset`, rows nb1 bytes apart.  Errors as `view_1d`.  Source: ggml_view_2d."""
    return _view(a, (ne0, ne1), (nb1,), offset)


def view_3d(a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int):
    """[ne0, ne1, ne2] window of a from byte `offset`, strides nb1, nb2 in bytes.

    Errors as `view_1d`.  Source: ggml_view_3d.
    """
    return _view(a, (ne0, ne1, ne2), (nb1, nb2), offset)


def view_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int):
    """[ne0, ne1, ne2, ne3] window of a from byte `offset`, strides nb1, nb2, nb3 in bytes.

    Errors as `view_1d`.  Source: ggml_view_4d.
    """
    return _view(a, (ne0, ne1, ne2, ne3), (nb1, nb2, nb3), offset)


def view_tensor(a: Tensor):
    """A view of all of a, with a's shape and strides.  Errors: StaleHandle.  Source: ggml_view_tensor."""
    return a.ctx.node(OP.VIEW, a.type, a.ne, (a,), offset_params(0), view_of=a, nb=a.nb)


def permute(a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int):
    """Axes scattered: axis i of a becomes axis axis<i> of the result (axis0, axis1, axis2, axis3), a view.

    ne (p, q, r, s) by axes (1, 2, 0, 3) -> ne (r, p, q, s).  NumPy's transpose gathers: it takes the inverse
    permutation, of the reversed dimensions.  op params: the axes.  Blocks stay whole: axis0 is 0 for quantised types.
    Errors: ParamError unless the axes are a permutation of 0..3, ShapeError.  Source: ggml_permute.
    """
    axes = (axis0, axis1, axis2, axis3)
    if sorted(axes) != [0, 1, 2, 3]:
        raise ParamError(f"permute: axes {axes} are not a permutation of 0, 1, 2, 3")
    if a.type.block > 1 and axis0 != 0:
        raise ShapeError(f"permute: rows of {describe(a)} are blocks; dimension 0 must stay")
    ne, nb = [0] * 4, [0] * 4
    for i, to in enumerate(axes):
        ne[to], nb[to] = a.ne[i], a.nb[i]
    ndim = max(axes[:a.ndim], default=-1) + 1           # axes of the result: up to the place of the last of a's axes
    return a.ctx.node(OP.PERMUTE, a.type, ne, (a,), axes, view_of=a, nb=nb, ndim=ndim)


def transpose(a: Tensor):
    """Dimensions 0 and 1 of a swapped, a view; NumPy: a.swapaxes(-1, -2).

    Errors: ShapeError for quantised types.  Source: ggml_transpose.
    """
    if a.type.block > 1:
        raise ShapeError(f"transpose: rows of {describe(a)} are blocks and cannot be strided")
    ne, nb = list(a.ne), list(a.nb)
    ne[0], ne[1], nb[0], nb[1] = ne[1], ne[0], nb[1], nb[0]
    return a.ctx.node(OP.TRANSPOSE, a.type, ne, (a,), view_of=a, nb=nb, ndim=2 if a.ndim == 1 else a.ndim)


def reference_reshape(t, a):
    return a.reshape(tuple(reversed(t.ne)))


def reference_view(t, a):
    """Strided window over a's elements (a scalar type, given as the contiguous array of its base's values)."""
    item = t.type.nbytes
    offset = int(t.op_params[:2].view(np.int64)[0])
    flat = np.ascontiguousarray(a).reshape(-1)
    index = np.zeros(tuple(reversed(t.ne)), np.int64) + offset // item
    for axis, (n, b) in enumerate(zip(t.ne, t.nb, strict=True)):
        shape = [1] * 4
        shape[3 - axis] = n
        index = index + (np.arange(n) * (b // item)).reshape(shape)
    return flat[index]


def reference_permute(t, a):
    order = [0] * 4
    for i, to in enumerate(t.op_params[:4]):
        order[3 - to] = 3 - i
    return np.transpose(a, order)


def reference_transpose(t, a):
    return np.swapaxes(a, -1, -2)


# ---------------------------------------------------------------- gradient
def _distinct(ne, nb, size):
    """Do no two elements of these sizes and strides overlap?"""
    end = size
    for b, n in sorted((b, n) for b, n in zip(nb, ne, strict=True) if n > 1):
        if b < end:
            return False
        end = b * (n - 1) + end
    return True


def _add_window(g, total, dy, nb, offset):
    """dy added to the elements of `total` at byte `offset`, nb bytes apart."""
    if not min(dy.ne):
        return total
    if nb[0] == dy.type.nbytes or dy.ne[0] == 1:
        return g.acc(total, dy, *nb[1:], offset)
    for i in range(dy.ne[3]):               # elements with gaps become rows of one element
        plane = g.reshape_4d(g.cont(g.view_3d(dy, *dy.ne[:3], *dy.nb[1:3], i * dy.nb[3])) if dy.ne[3] > 1 else dy,
                             1, *dy.ne[:3])
        total = g.acc(total, plane, *nb[:3], offset + i * nb[3])
    return total


def gradient_view(g, t, dy):
    """dy added to the window of a's gradient; where a has gaps, to what it is a view of, and read as a is."""
    a, item = t.src[0], t.type.nbytes

    def bytes_in(x, of):
        """Strides of x and its offset in `of`, both as if their elements were F32."""
        offset = x.view_offs - (of.view_offs if of.view_src is not None else 0)
        return [b * 4 // item for b in x.nb], offset * 4 // item

    def of_a():
        require(t.type.block == 1 and _distinct(t.ne, t.nb, item), "gradient of view: its elements overlap", t,
                error=NotSupported, remedy="use gg.im2col for sliding windows")
        if is_contiguous(a):
            total = g.take(a)
            return _add_window(g, g.zeros(a) if total is None else total, dy, *bytes_in(t, a))
        root = a
        while root.op in VIEW_OPS and root.src and not is_contiguous(root):
            root = root.src[0]
        require(_distinct(a.ne, a.nb, item), "gradient of view: elements of its source overlap", a, error=NotSupported,
                remedy="use gg.cont on the source")
        d = _add_window(g, g.zeros(root), dy, *bytes_in(t, root))
        nb, offset = bytes_in(a, root)
        return g.cont(d.ctx.node(OP.VIEW, d.type, a.ne, (d,), offset_params(offset), view_of=d, view_offs=offset,
                                 nb=nb, ndim=a.ndim))
    return (of_a,)


def gradient_reshape(g, t, dy):
    return (lambda: g.reshape(dy, t.src[0]),)


def gradient_permute(g, t, dy):
    axes = [int(p) for p in t.op_params[:4]]
    return (lambda: g.permute(dy, *(axes.index(i) for i in range(4))),)


def gradient_transpose(g, t, dy):
    return (lambda: g.transpose(dy),)


# ---------------------------------------------------------------- rows
def _rows_of_view(t):
    """The same part of each row."""
    s, a = t.src[0], last_axis(t)
    if a >= 1 and a == last_axis(s) and (s.ne[a], s.nb[a]) == (t.ne[a], t.nb[a]) and is_contiguous(s) \
            and t.view_offs - s.view_offs < s.nb[a]:
        yield a, [a]


def _rows_of_permute(t):
    a = last_axis(t.src[0])
    yield int(t.op_params[a]), [a]


def _rows_of_transpose(t):
    a = last_axis(t.src[0])
    yield {0: 1, 1: 0}.get(a, a), [a]


SPECS = (
    Spec(op=OP.RESHAPE, builders=(reshape, reshape_1d, reshape_2d, reshape_3d, reshape_4d),
         reference=reference_reshape,
         gradient=gradient_reshape, rows=as_many_elements, split=viewed,
         rebuild=lambda n: n.call("reshape_4d", *n.src, *n.ne)),
    Spec(op=OP.VIEW, builders=(view_1d, view_2d, view_3d, view_4d, view_tensor), reference=reference_view,
         gradient=gradient_view, rows=_rows_of_view, split=viewed),
    Spec(op=OP.PERMUTE, builders=(permute,), reference=reference_permute, gradient=gradient_permute,
         rows=_rows_of_permute, split=viewed),
    Spec(op=OP.TRANSPOSE, builders=(transpose,), reference=reference_transpose, gradient=gradient_transpose,
         rows=_rows_of_transpose, split=viewed),
)
