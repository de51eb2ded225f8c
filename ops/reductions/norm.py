"""Normalisations of rows and of channel groups.

    norm         (x - mean) / sqrt(variance + eps)          per row; the variance is biased
    rms_norm     x / sqrt(mean(x^2) + eps)                  per row
    l2_norm      x / max(sqrt(sum x^2), eps)                per row
    group_norm   norm over ne0 * ne1 * channels-of-a-group  per group of ne2, per ne3

One kernel body: the sums of a stretch of memory, a shift and a factor from them, one pass that applies both.  A stretch
is a row, or a group of planes.  Sums run in four vector accumulators of float32 (ggml sums in double or in one chain;
the error is below 1e-7 of the result for rows of any usual length).  Rows whose elements do not lie side by side are
gathered first.
"""
import math

import numpy as np
from numba import types

from ggjit.ops.copying.view import permute, view_4d
from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import is_contiguous, require, require_param, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import by_row
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import (
    DST,
    SRC0,
    addr,
    nb,
    ne,
    param_f32,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import SINGLE, over_chunks, over_rows, param
from ggjit.ops.native.simd import W, fmul, fsub, ldf, ldf_part, splat, stf, stf_part, zerof
from ggjit.ops.reductions.sums import gathered, squares_of, sum_of

f32 = types.float32


# ---------------------------------------------------------------- builders
def _rows_op(name, op, a, eps, in_place):
    require_type(name, a, (F32,))
    require(rows_contiguous(a) or not in_place, f"{name}: elements of a row must lie side by side to be overwritten", a,
            remedy=f"use gg.{name}")
    require_param(eps >= 0, f"{name}: eps must not be negative, got {eps}")
    return a.ctx.node(op, a.type, a.ne, (a,), (float(eps),), view_of=a if in_place else None)


def _norm(a: Tensor, eps: float, in_place: bool):
    """(x - mean) / sqrt(variance + eps) along ne0 of a; shape of a, F32, any strides; NumPy: axis -1.

    The variance is the mean of the squares (no correction).  op params: eps.  Errors: TypeMismatch, ParamError (eps <
    0).  Source: ggml_norm; arXiv 1607.06450.
    """
    return _rows_op("norm", OP.NORM, a, eps, in_place)


norm, norm_inplace = in_place_pair(_norm)


def _rms_norm(a: Tensor, eps: float, in_place: bool):
    """x / sqrt(mean(x^2) + eps) along ne0 of a; shape of a, F32, any strides; NumPy: axis -1.

    op params: eps.  Errors: TypeMismatch, ParamError (eps < 0).  Source: ggml_rms_norm; arXiv 1910.07467.
    """
    return _rows_op("rms_norm", OP.RMS_NORM, a, eps, in_place)


rms_norm, rms_norm_inplace = in_place_pair(_rms_norm)


def _l2_norm(a: Tensor, eps: float, in_place: bool):
    """x / max(sqrt(sum x^2), eps) along ne0 of a; shape of a, F32, any strides; NumPy: axis -1.

    op params: eps.  Errors: TypeMismatch, ParamError (eps < 0).  Source: ggml_l2_norm.
    """
    return _rows_op("l2_norm", OP.L2_NORM, a, eps, in_place)


l2_norm, l2_norm_inplace = in_place_pair(_l2_norm)


def _group_norm(a: Tensor, n_groups: int, eps: float, in_place: bool):
    """`norm` over [ne0, ne1, channels of a group] of a: ne2 is cut into n_groups of ceil(ne2 / n_groups) channels.

    Shape of a, F32, contiguous.  The last group is smaller where n_groups does not divide ne2 (NumPy users expect an
    error there).  op params: n_groups, eps.  Errors: TypeMismatch, ShapeError, ParamError.  Source: ggml_group_norm;
    arXiv 1803.08494.
    """
    require_type("group_norm", a, (F32,))
    require(is_contiguous(a), "group_norm: the source must be contiguous", a, remedy="use gg.cont first")
    require_param(is_whole(n_groups, 1, max(a.ne[2], 1)),
                  f"group_norm: n_groups must be from 1 to ne2 = {a.ne[2]}, got {n_groups!r}")
    require_param(eps >= 0, f"group_norm: eps must not be negative, got {eps}")
    return a.ctx.node(OP.GROUP_NORM, a.type, a.ne, (a,), (n_groups, float(eps)), view_of=a if in_place else None)


group_norm, group_norm_inplace = in_place_pair(_group_norm)


# ---------------------------------------------------------------- reference
def reference(t, a):
    a = a.astype(np.float64)
    eps = float(t.param_floats[1 if t.op == OP.GROUP_NORM else 0])
    if t.op == OP.RMS_NORM:
        return a / np.sqrt(np.square(a).mean(-1, keepdims=True) + eps)
    if t.op == OP.L2_NORM:
        return a / np.maximum(np.sqrt(np.square(a).sum(-1, keepdims=True)), eps)
    if t.op == OP.NORM:
        return _normalised(a, (-1,), eps)
    step = -(-t.ne[2] // int(t.op_params[0]))
    return np.concatenate([_normalised(a[:, i:i + step], (1, 2, 3), eps) for i in range(0, t.ne[2], step)], 1)


def _normalised(a, axes, eps):
    return (a - a.mean(axes, keepdims=True)) / np.sqrt(a.var(axes, keepdims=True) + eps)


# ---------------------------------------------------------------- kernel
@inline
def shift_and_scale(d, x, n, shift, factor):
    """d = (x - shift) * factor over n floats; both vectors."""
    i = 0
    while i + W <= n:
        stf(d + 4 * i, fmul(fsub(ldf(x + 4 * i), shift), factor))
        i += W
    if i < n:
        stf_part(d + 4 * i, fmul(fsub(ldf_part(x + 4 * i, n - i), shift), factor), n - i)


@inline
def _norm_row(d, x, n, eps):
    mean = splat(sum_of(x, n) / f32(n))
    variance = squares_of(x, n, mean) / f32(n)
    shift_and_scale(d, x, n, mean, splat(f32(1.0) / f32(math.sqrt(variance + eps))))


@inline
def _rms_norm_row(d, x, n, eps):
    square = squares_of(x, n, zerof()) / f32(n)
    shift_and_scale(d, x, n, zerof(), splat(f32(1.0) / f32(math.sqrt(square + eps))))


@inline
def _l2_norm_row(d, x, n, eps):
    length = f32(math.sqrt(squares_of(x, n, zerof())))
    shift_and_scale(d, x, n, zerof(), splat(f32(1.0) / max(length, eps)))


STRETCH = {OP.NORM: _norm_row, OP.RMS_NORM: _rms_norm_row, OP.L2_NORM: _l2_norm_row}


@inline
def _groups(node):
    return param(node, 0) * ne(node + DST, 3)


@inline
def _group(node, r):
    x, d = node + SRC0, node + DST
    n_groups, eps = param(node, 0), param_f32(node, 1)
    channels, plane = ne(d, 2), ne(d, 0) * ne(d, 1)
    step = (channels + n_groups - 1) // n_groups
    first = r % n_groups * step
    n = min(step, channels - first) * plane
    if n > 0:
        at = first * nb(x, 2) + r // n_groups * nb(x, 3)
        _norm_row(addr(d) + at, addr(x) + at, n, eps)
    return OK


def _make(op):
    if op == OP.GROUP_NORM:
        return over_rows(_group, _groups, SINGLE)
    one = STRETCH[op]

    @inline
    def rows(node, ith, start, stop):
        x, d = node + SRC0, node + DST
        n0, eps, step = ne(d, 0), param_f32(node, 0), nb(x, 0)
        scratch = work(node) + ith * 4 * n0
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            one(row_addr(d, i1, i2, i3), gathered(row_addr(x, i1, i2, i3), step, n0, scratch), n0, eps)
        return OK
    return over_chunks(rows)


def kernel(t, n_threads):
    if t.type is not F32 or t.src[0].type is not F32:
        return None
    op = OP(t.op)
    gathers = 0 if rows_contiguous(t.src[0]) else n_threads
    return Kernel(op.name.lower(), lambda: _make(op), cost=(0.1 if gathers else 0.03) * touched_nbytes(t),
                  work_nbytes=gathers * 4 * t.ne[0])


# ---------------------------------------------------------------- cases
ROW_BUILDERS = {OP.NORM: (norm, norm_inplace), OP.RMS_NORM: (rms_norm, rms_norm_inplace),
                OP.L2_NORM: (l2_norm, l2_norm_inplace)}


def cases(op):
    build, in_place = ROW_BUILDERS[op]

    def halves(a):
        return view_4d(a, a.ne[0] // 2, *a.ne[1:], *a.nb[1:], 4 * (a.ne[0] // 4))
    for shape in ((64, 7, 4, 3), (1025, 2, 2, 1), (7, 3, 1, 1), (260, 3, 1, 1)):
        for eps in (0.0, 1e-6, 0.1):
            yield Case(f"{shape} {eps}", lambda inp, ne=shape, eps=eps: build(inp.new(F32, ne, lo=-10, hi=10), eps))
        yield Case(f"{shape} view", lambda inp, ne=shape: build(halves(inp.new(F32, (ne[0] * 2, *ne[1:]))), 1e-5))
        yield Case(f"{shape} inplace", lambda inp, ne=shape: in_place(inp.new(F32, ne), 1e-5))
        yield Case(f"{shape} permuted", lambda inp, ne=shape: build(permute(inp.new(F32, ne), 2, 0, 3, 1), 1e-5))


def group_cases():
    for shape, groups in (((64, 6, 32, 2), 32), ((9, 7, 10, 2), 4), ((5, 3, 4, 1), 1)):
        yield Case(f"{shape} {groups}", lambda inp, ne=shape, groups=groups: group_norm(inp.new(F32, ne), groups, 1e-6))
    yield Case("inplace", lambda inp: group_norm_inplace(inp.new(F32, (8, 8, 6, 1)), 3, 1e-6))


# ---------------------------------------------------------------- gradient
def _of_norm(g, x, dy, eps):
    """norm(x) = rms_norm(c), c = x - mean(x)."""
    dc = g.rms_norm_back(dy, g.sub(x, g.mean(x)), eps)
    return g.sub(dc, g.mean(dc))


def _of_l2_norm(g, x, dy, eps):
    """y = x / s, s = max(|x|, eps): dx = (dy - y (y . dy) [|x| > eps]) / s."""
    past = g.scale_bias(g.sqrt(g.sum_rows(g.sqr(x))), 1.0, -eps)
    s = g.scale_bias(g.relu(past), 1.0, eps)
    y = g.div(x, s)
    dot = g.mul(g.sum_rows(g.mul(dy, y)), g.step(past))
    return g.div(g.sub(dy, g.mul(y, dot)), s)


def gradient(g, t, dy):
    of = {OP.NORM: _of_norm, OP.RMS_NORM: lambda g, x, dy, eps: g.rms_norm_back(dy, x, eps), OP.L2_NORM: _of_l2_norm}
    return (lambda: of[t.op](g, g.rows(t.src[0]), dy, float(t.param_floats[0])),)


def gradient_group(g, t, dy):
    """A group's channels as one row; the last group may have fewer."""
    x, eps = t.src[0], float(t.param_floats[1])
    n0, n1, n_channels, n3 = t.ne
    step = -(-n_channels // int(t.op_params[0]))
    whole = n_channels // step * step

    def of_channels(first, end):
        width = min(step, end - first)
        rows = [g.reshape_3d(g.cont(g.view_4d(a, n0, n1, end - first, n3, *a.nb[1:], first * a.nb[2])), n0 * n1 * width,
                             (end - first) // width, n3) for a in (x, dy)]
        return g.reshape_4d(_of_norm(g, *rows, eps), n0, n1, end - first, n3)

    def of_x():
        parts = [of_channels(a, b) for a, b in ((0, whole), (whole, n_channels)) if b > a]
        return g.concat(*parts, 2) if len(parts) == 2 else parts[0]
    return (of_x,)


SPECS = (*(Spec(op=op, builders=fs, reference=reference, kernel=kernel, in_place=op is OP.RMS_NORM,
                in_place_2023=op is OP.RMS_NORM,
                gradient=gradient, rows=along(1), split=by_row, cases=lambda op=op: cases(op))
           for op, fs in ROW_BUILDERS.items()),
         Spec(op=OP.GROUP_NORM, builders=(group_norm, group_norm_inplace), reference=reference, kernel=kernel,
              gradient=gradient_group, rows=along(3), cases=group_cases))
