"""Copies between any strides and types: cpy, cast, cont, dup.

Elements are paired in flat order (ne0 fastest), so shapes may differ.  The kernels: ops/copying/copy_kernels.py.
"""
import math

import numpy as np

from ggjit.ops.copying.copy_kernels import choose
from ggjit.ops.copying.view import permute, reshape_4d, view_4d
from ggjit.ops.core.errors import ShapeError
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import along, as_many_elements
from ggjit.ops.core.shape import describe, require, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import copied
from ggjit.ops.core.types import BF16, F16, F32, I32, Q4_0, Q8_0, Tensor, Type
from ggjit.ops.types.shared.moves import SCRATCH_NBYTES, can_move, mover


# ---------------------------------------------------------------- builders
def _same_count(name, a, b):
    require(math.prod(a.ne) == math.prod(b.ne), f"{name}: both must have the same number of elements", a, b)


def cpy(a: Tensor, b: Tensor):
    """Copy a into b in flat order, converting types; returns a view of b.  Equal numbers of elements, any strides.

    Errors: ShapeError; NotSupported when the plan is made, for a pair of types without a conversion.
    Source: ggml_cpy.
    """
    _same_count("cpy", a, b)
    return a.ctx.node(OP.CPY, b.type, b.ne, (a, b), view_of=b)


def cast(a: Tensor, type: Type | str):
    """a [n0, n1, n2, n3] as a new contiguous tensor of `type`, same shape; NumPy: a.astype.

    Errors: TypeMismatch, ShapeError (blocks of `type` that do not divide n0); NotSupported as `cpy`.  Source:
    ggml_cast.
    """
    return a.ctx.node(OP.CPY, type, a.ne, (a,))


def dup(a: Tensor):
    """A contiguous copy of a: same type and shape, any type and strides; NumPy: a.copy().

    Errors: NotSupported as `cpy`.  Source: ggml_dup.
    """
    return a.ctx.node(OP.DUP, a.type, a.ne, (a,))


def dup_inplace(a: Tensor):
    """A view of a that stands for a copy onto itself; otherwise as `dup`.  Source: ggml_dup_inplace."""
    return a.ctx.node(OP.DUP, a.type, a.ne, (a,), view_of=a)


def _cont(a, ne, ndim):
    ne = tuple(int(n) for n in ne)
    if math.prod(ne) != math.prod(a.ne):
        raise ShapeError(f"cont: {describe(a)} has {math.prod(a.ne)} elements, {list(ne)} has {math.prod(ne)}")
    return a.ctx.node(OP.CONT, a.type, ne, (a,), ndim=ndim)


def cont(a: Tensor):
    """a made contiguous, same type and shape; NumPy: np.ascontiguousarray(a).

    Any type and strides; a is copied even if it is contiguous already, as in ggml.  Errors: NotSupported as `cpy`.
    Source: ggml_cont.
    """
    return _cont(a, a.ne, a.ndim)


def cont_1d(a: Tensor, ne0: int):
    """a made contiguous, as [ne0]; NumPy: a.reshape(ne0).  Errors: ShapeError; as `cont`.  Source: ggml_cont_1d."""
    return _cont(a, (ne0,), 1)


def cont_2d(a: Tensor, ne0: int, ne1: int):
    """a made contiguous, as [ne0, ne1]; NumPy: a.reshape(ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_2d.
    """
    return _cont(a, (ne0, ne1), 2)


def cont_3d(a: Tensor, ne0: int, ne1: int, ne2: int):
    """a made contiguous, as [ne0, ne1, ne2]; NumPy: a.reshape(ne2, ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_3d.
    """
    return _cont(a, (ne0, ne1, ne2), 3)


def cont_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int):
    """a made contiguous, as [ne0, ne1, ne2, ne3]; NumPy: a.reshape(ne3, ne2, ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_4d.
    """
    return _cont(a, (ne0, ne1, ne2, ne3), 4)


def reference(t, a, destination=None):
    shape = tuple(reversed(t.ne))
    return (np.trunc(a) if t.type.dtype is not None and t.type.dtype.kind == "i" else a).reshape(shape)


# ---------------------------------------------------------------- the kernel
def kernel(t, n_threads):
    s = t.src[0]
    chosen = choose(s, t) if can_move(s.type, t.type) else None
    if chosen is None:
        return None
    name, make, each = chosen
    if s.type is not t.type and (s.type.quantized or t.type.quantized):
        each *= 2
    pair = f"{s.type.name}-{t.type.name}" if s.type is not t.type else f"{t.type.nbytes}x{t.type.block}"
    return Kernel(f"copy-{name}-{pair}", make, cost=each * touched_nbytes(t),
                  work_nbytes=n_threads * SCRATCH_NBYTES, modules=mover(s.type, t.type).modules)


# ---------------------------------------------------------------- cases
def _limit(ts, td):
    """ggml's: 0 for one type, 1e-6 otherwise, one step off for quantised results."""
    return 0.0 if ts is td else {Q8_0: 1e-4, Q4_0: 2e-2, BF16: 2.0 ** -16}.get(td, 1e-6)


def cases_of(op):

    def leaf(inp, ty, shape):
        if ty is I32:
            return inp.ids(I32, shape, 150)
        return inp.new(ty, shape, lo=-150, hi=150)

    def make(ts, td, shape, axes=None, back=None, reshaped=None, padded=False):
        def build(inp):
            a = leaf(inp, ts, shape)
            if axes:
                a = permute(a, *axes)
            if op is OP.CONT:
                return cont_4d(a, *reshaped) if reshaped else cont(a)
            if op is OP.DUP:
                return dup(a)
            ne_b = reshaped or (tuple(a.ne[i] for i in back) if back else a.ne)
            b = leaf(inp, td, (ne_b[0] * (1 + padded), *ne_b[1:]))
            if padded:
                b = view_4d(b, *ne_b, *b.nb[1:], 0)
            return cpy(a, permute(b, *back) if back else b)
        return build
    swaps = ((0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3), (3, 2, 1, 0), (2, 0, 3, 1))
    if op is not OP.CPY:
        for ty in (F32, F16, BF16, I32):
            for axes in (None, *swaps):
                yield Case(f"{ty!r} {axes}", make(ty, ty, (35, 18, 5, 2), axes), 0.0)
        yield Case("Q8_0 (0, 2, 1, 3)", make(Q8_0, Q8_0, (64, 3, 5, 2), (0, 2, 1, 3)), 0.0)
        if op is OP.CONT:
            yield Case("reshaped rows", make(F32, F32, (64, 12, 5, 1), (0, 2, 1, 3), reshaped=(320, 12, 1, 1)), 0.0)
            yield Case("reshaped tile", make(F32, F32, (64, 40, 3, 1), (1, 0, 2, 3), reshaped=(40 * 64, 3, 1, 1)), 0.0)
        return
    pairs = [(s, d) for s in (F32, F16, BF16, Q8_0, Q4_0) for d in (F32, F16, BF16, Q8_0, Q4_0)]
    for ts, td in (*pairs, (I32, I32), (I32, F32), (F32, I32)):
        limit = _limit(ts, td)
        yield Case(f"{ts!r} {td!r}", make(ts, td, (96, 3, 3, 2)), limit)
        yield Case(f"{ts!r} {td!r} rows", make(ts, td, (64, 3, 2, 4), (0, 2, 1, 3)), limit)
        yield Case(f"{ts!r} {td!r} padded", make(ts, td, (64, 2, 3, 1), padded=True), limit)
        if not (ts.quantized or td.quantized):
            yield Case(f"{ts!r} {td!r} tile", make(ts, td, (37, 33, 3, 2), (1, 0, 2, 3)), limit)
            yield Case(f"{ts!r} {td!r} strided", make(ts, td, (3, 5, 7, 2), (2, 1, 0, 3)), limit)
            yield Case(f"{ts!r} {td!r} to transposed", make(ts, td, (3, 5, 7, 2), None, (1, 0, 2, 3)), limit)
            yield Case(f"{ts!r} {td!r} any", make(ts, td, (6, 5, 4, 2), (1, 0, 2, 3), reshaped=(10, 4, 3, 2),
                                                 padded=True), limit)
    for axes in swaps:
        yield Case(f"permuted {axes}", make(F32, F16, (17, 19, 20, 2), axes), 1e-6)
    for ty in (Q8_0, Q4_0):
        yield Case(f"{ty!r} any", make(ty, ty, (64, 4, 3, 2), (0, 3, 1, 2), (0, 2, 1, 3)), 0.0)
    yield Case("cast", lambda inp: cast(permute(inp.new(F32, (24, 40, 3, 1)), 1, 0, 2, 3), F16), 1e-6)
    yield Case("reshaped", lambda inp: cpy(inp.new(F32, (24, 6)), reshape_4d(inp.new(F16, (36, 4)), 9, 4, 4, 1)), 1e-6)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """dy in a's shape; the former content of a destination gets no gradient."""
    return lambda: g.reshape(dy, t.src[0]), None


# ---------------------------------------------------------------- rows
def _elements(t):
    yield from (along(0) if same_shape(t, t.src[0]) else as_many_elements)(t)


SPECS = (
    Spec(op=OP.CPY, builders=(cpy, cast), reference=reference, kernel=kernel, gradient=gradient,
         split=copied, cases=lambda: cases_of(OP.CPY),
         rebuild=lambda n: n.call("cpy", *n.src) if n.in_place else n.call("cast", *n.src, n.type)),
    Spec(op=OP.CONT, builders=(cont, cont_1d, cont_2d, cont_3d, cont_4d), reference=reference, kernel=kernel,
         gradient=gradient, rows=_elements, split=copied, cases=lambda: cases_of(OP.CONT),
         rebuild=lambda n: n.call("cont_4d", *n.src, *n.ne)),
    Spec(op=OP.DUP, builders=(dup, dup_inplace), reference=reference, kernel=kernel, gradient=gradient,
         rows=_elements, split=copied, cases=lambda: cases_of(OP.DUP)))
