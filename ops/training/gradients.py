"""silu_back, rms_norm_back, soft_max_ext_back: gradients of functions of a row.

    silu_back           dx = dy s (1 + x (1 - s)),  s = 1 / (1 + e^-x)
    rms_norm_back       dx = (dy - x (x . dy) / (x . x + n eps)) / sqrt(mean(x^2) + eps)
    soft_max_ext_back   dx = scale y (dy - y . dy),  y the softmax

dy is the gradient of the result and comes first (the comment in ggml.h has rms_norm_back's two sources swapped; its
code has not).  One body: each op is a function of one row of dy and of x (or y).
"""
import math

import numpy as np
from numba import types

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import require, require_param, require_type, rows_contiguous, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.elementwise.elementwise import TOLERANCE
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import vsigmoid
from ggjit.ops.native.node import DST, SRC0, SRC1, ne, param_f32, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.native.simd import W, fadd, fma, fmul, fsub, hsum, ldf, ldf_part, splat, stf, stf_part, zerof
from ggjit.ops.reductions.sums import squares_of
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


# ---------------------------------------------------------------- builders
def _pair(name, dy, x, allowed):
    require_type(name, dy, allowed, "gradient")
    require(x.type is dy.type, f"{name}: both sources must have one type", dy, x, remedy="cast one with gg.cast")
    require(same_shape(dy, x), f"{name}: both sources must have one shape", dy, x)
    for t in (dy, x):
        require(rows_contiguous(t), f"{name}: elements of a row must lie side by side", t, remedy="use gg.cont first")


def silu_back(a: Tensor, b: Tensor):
    """Gradient of silu: a = dy, b = x -> dy s (1 + x (1 - s)), s = 1 / (1 + e^-x); one shape and type, F32 or F16.

    Errors: ShapeError, TypeMismatch.  Source: ggml_silu_back.
    """
    _pair("silu_back", a, b, (F32, F16))
    return a.ctx.node(OP.SILU_BACK, a.type, a.ne, (a, b))


def rms_norm_back(a: Tensor, b: Tensor, eps: float):
    """Gradient of rms_norm(x, eps): a = dy, b = x, one shape, F32 -> the same shape.

    d = r (dy - x mean(x dy) r^2) along ne0, with r = 1 / sqrt(mean(x^2) + eps).  (The comment in ggml.h has a and b
    swapped.)  op params: eps.  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_rms_norm_back.
    """
    _pair("rms_norm_back", a, b, (F32,))
    require_param(eps >= 0, f"rms_norm_back: eps must not be negative, got {eps}")
    return a.ctx.node(OP.RMS_NORM_BACK, F32, a.ne, (a, b), (float(eps),))


def _soft_max_ext_back(a: Tensor, b: Tensor, scale: float, max_bias: float, in_place: bool):
    """Gradient of soft_max_ext: a = dy, b = y, one shape, F32 -> (dy - sum(y dy)) y scale along ne0.

    op params: scale, max_bias (which must be 0, as ggml's CPU backend demands).  Errors: ShapeError, TypeMismatch,
    ParamError.  Source: ggml_soft_max_ext_back.
    """
    _pair("soft_max_ext_back", a, b, (F32,))
    if max_bias != 0:
        raise ParamError(f"soft_max_ext_back: max_bias must be 0 (as on ggml's CPU), got {max_bias!r}")
    return a.ctx.node(OP.SOFT_MAX_BACK, F32, a.ne, (a, b), (float(scale), 0.0), view_of=a if in_place else None)


soft_max_ext_back, soft_max_ext_back_inplace = in_place_pair(_soft_max_ext_back)


def reference(t, dy, x):
    dy, x, p = dy.astype(np.float64), x.astype(np.float64), float(t.param_floats[0])
    if t.op == OP.SILU_BACK:
        s = 1 / (1 + np.exp(-x))
        return dy * s * (1 + x * (1 - s))
    dot = (dy * x).sum(-1, keepdims=True)
    if t.op == OP.SOFT_MAX_BACK:
        return (dy - dot) * x * p
    square = (x * x).sum(-1, keepdims=True) + p * t.ne[0]
    return (dy - x * dot / square) / np.sqrt(square / t.ne[0])


# ---------------------------------------------------------------- rows
@inline
def dot_of(x, y, n):
    """Sum of x y over n floats."""
    s0, s1, i = zerof(), zerof(), 0
    while i + 2 * W <= n:
        s0 = fma(ldf(x + 4 * i), ldf(y + 4 * i), s0)
        s1 = fma(ldf(x + 4 * i + 4 * W), ldf(y + 4 * i + 4 * W), s1)
        i += 2 * W
    while i < n:
        m = min(W, n - i)
        s0 = fma(ldf_part(x + 4 * i, m), ldf_part(y + 4 * i, m), s0)
        i += W
    return hsum(fadd(s0, s1))


@inline
def _rms_norm(d, dy, x, n, eps):
    square = squares_of(x, n, zerof()) + eps * f32(n)
    pull = splat(-dot_of(dy, x, n) / square)
    factor, i = splat(f32(1.0) / f32(math.sqrt(square / f32(n)))), 0
    while i + W <= n:
        stf(d + 4 * i, fmul(fma(ldf(x + 4 * i), pull, ldf(dy + 4 * i)), factor))
        i += W
    if i < n:
        m = n - i
        stf_part(d + 4 * i, fmul(fma(ldf_part(x + 4 * i, m), pull, ldf_part(dy + 4 * i, m)), factor), m)


@inline
def _soft_max(d, dy, y, n, scale):
    dot, factor, i = splat(dot_of(dy, y, n)), splat(scale), 0
    while i + W <= n:
        stf(d + 4 * i, fmul(fmul(fsub(ldf(dy + 4 * i), dot), ldf(y + 4 * i)), factor))
        i += W
    if i < n:
        m = n - i
        stf_part(d + 4 * i, fmul(fmul(fsub(ldf_part(dy + 4 * i, m), dot), ldf_part(y + 4 * i, m)), factor), m)


def _silu(ty):
    access, size = ROW[ty], ty.nbytes
    load, load_part, store, store_part = access.load, access.load_part, access.store, access.store_part

    @inline
    def one(dy, x):
        s = vsigmoid(x)
        return fmul(fmul(dy, s), fma(x, fsub(splat(f32(1.0)), s), splat(f32(1.0))))

    @inline
    def row(d, dy, x, n, unused):
        i = 0
        while i + W <= n:
            store(d + size * i, one(load(dy + size * i), load(x + size * i)))
            i += W
        if i < n:
            m = n - i
            store_part(d + size * i, one(load_part(dy + size * i, m), load_part(x + size * i, m)), m)
    return row


def _make(op, ty):
    row = {OP.RMS_NORM_BACK: _rms_norm, OP.SOFT_MAX_BACK: _soft_max}.get(op) or _silu(ty)

    @inline
    def one(node, r):
        dy, x, d = node + SRC0, node + SRC1, node + DST
        i1, i2, i3 = row_index(d, r)
        row(row_addr(d, i1, i2, i3), row_addr(dy, i1, i2, i3), row_addr(x, i1, i2, i3), ne(d, 0), param_f32(node, 0))
        return OK
    return over_rows(one)


def kernel(t, n_threads):
    op = OP(t.op)
    return Kernel(f"{op.name.lower()}-{t.type.name}", lambda: _make(op, t.type), cost=0.04 * touched_nbytes(t))


# ---------------------------------------------------------------- cases
def cases(build, types_=(F32,), lo=-10, hi=10):

    def half(a):
        return view_4d(a, a.ne[0] // 2, *a.ne[1:], *a.nb[1:], a.type.nbytes * (a.ne[0] // 4))
    for ty in types_:
        for s in ((64, 7, 4, 3), (1025, 5, 1, 2), (7, 3, 1, 1), (16, 1, 1, 1), (33, 2, 3, 1)):
            yield Case(f"{build.__name__} {ty!r} {s}", lambda inp, s=s, ty=ty: build(
                inp.new(ty, s, lo=lo, hi=hi), inp.new(ty, s, lo=lo, hi=hi)), TOLERANCE[ty])
    yield Case(f"{build.__name__} views", lambda inp: build(
        *(half(inp.new(F32, (64, 5, 4, 3), lo=lo, hi=hi)) for _ in range(2))))


def rms_cases():
    def named(eps):
        def f(a, b):
            return rms_norm_back(a, b, eps)
        f.__name__ = f"eps {eps}"
        return f
    for eps in (0.0, 1e-6, 0.1, 10.0):
        yield from cases(named(eps))


def soft_max_cases():
    def scaled(a, b):
        return soft_max_ext_back(a, b, 0.1, 0.0)

    def in_place(a, b):
        return soft_max_ext_back_inplace(a, b, 1.0, 0.0)
    for f in (scaled, in_place):
        yield from cases(f, lo=0, hi=1)


SPECS = (
    Spec(op=OP.SILU_BACK, builders=(silu_back,), reference=reference, kernel=kernel, in_place=True,
         rows=along(1), cases=lambda: cases(silu_back, (F32, F16))),
    Spec(op=OP.RMS_NORM_BACK, builders=(rms_norm_back,), reference=reference, kernel=kernel, in_place=True,
         rows=along(1), cases=rms_cases),
    Spec(op=OP.SOFT_MAX_BACK, builders=(soft_max_ext_back, soft_max_ext_back_inplace), reference=reference,
         kernel=kernel, in_place=True, rows=along(1), cases=soft_max_cases,
         rebuild="soft_max_ext_back"))
