"""cross_entropy_loss and its gradient, on rows of logits and of label probabilities.

    loss  = -1/rows  sum over rows, i   labels[i] log_softmax(logits)[i]
    back  = (softmax(logits) - labels) grad / rows
"""
import math

import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import SUM_IN_ORDER, last_axis
from ggjit.ops.core.shape import n_elements, require, require_param, require_type, rows_contiguous, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, F64, Tensor
from ggjit.ops.core.whole_numbers import whole
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import log1, vexp
from ggjit.ops.native.mem import ld_f32, st_f32, st_f64
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    addr,
    n_rows,
    ne,
    param_i32,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.native.simd import (
    W,
    fadd,
    fma,
    fmul,
    fsub,
    hsum,
    keep_part,
    ldf,
    ldf_part,
    splat,
    stf,
    stf_part,
    zerof,
)
from ggjit.ops.reductions.reduce import mean
from ggjit.ops.reductions.soft_max import soft_max
from ggjit.ops.reductions.sums import largest, nothing, require_before, sum_in, sum_over_rows

f32 = types.float32


def _check(name, logits, labels):
    for t in (logits, labels):
        require_type(name, t, (F32,))
        require(rows_contiguous(t), f"{name}: elements of a row must lie side by side", t, remedy="use gg.cont first")
    require(same_shape(logits, labels), f"{name}: logits and labels must have one shape", logits, labels)
    require(min(logits.ne) > 0, f"{name}: the mean needs at least one row with elements", logits)


def cross_entropy_loss(a: Tensor, b: Tensor, before: Tensor | None = None, n_rows: int | None = None):
    """Mean over rows of -sum(b log_softmax(a)) along ne0 -> F32 [1]; a logits, b label probabilities, one shape, F32.

    Some rows at a time, with the bits of one mean: n_rows=0 gives the sum of all rows so far, F64 [1]; before: such a
    sum of earlier rows; n_rows: the number of all rows, for the last of them.  op params: n_rows or 0, whether it is
    given.  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_cross_entropy_loss, which has neither.
    """
    _check("cross_entropy_loss", a, b)
    require_before("cross_entropy_loss", before)
    _check_n_rows("cross_entropy_loss", a, n_rows, 0)
    return a.ctx.node(OP.CROSS_ENTROPY_LOSS, F64 if n_rows == 0 else F32, (1,), (a, b) if before is None else
                      (a, b, before), () if n_rows is None else (int(n_rows), 1))


def _check_n_rows(name, a, n_rows, *instead):
    if n_rows is not None and whole(n_rows, f"{name}: n_rows") not in instead:
        own = math.prod(a.ne[1:])
        require_param(own <= n_rows < 1 << 31, f"{name}: n_rows counts all rows, {own} here and others; got {n_rows}")


def cross_entropy_loss_back(a: Tensor, b: Tensor, c: Tensor, n_rows: int | None = None):
    """Gradient of the loss with respect to its logits: a F32 [1] gradient of the loss, b logits, c labels.

    Shape of b.  (The comment in ggml.h lists logits, labels, gradient; its code reads gradient, logits, labels.)
    n_rows: rows of the mean, where b has some of them.  op params: n_rows or 0.  Errors: ShapeError, TypeMismatch,
    ParamError.  Source: ggml_cross_entropy_loss_back, which has no n_rows.
    """
    require_type("cross_entropy_loss_back", a, (F32,), "gradient")
    require(n_elements(a) == 1, "cross_entropy_loss_back: the gradient must be one element", a)
    _check("cross_entropy_loss_back", b, c)
    _check_n_rows("cross_entropy_loss_back", b, n_rows)
    other = n_rows is not None and n_rows != math.prod(b.ne[1:])
    return a.ctx.node(OP.CROSS_ENTROPY_LOSS_BACK, F32, b.ne, (a, b, c), (int(n_rows),) if other else ())


def _shifted(logits):
    return logits.astype(np.float64) - logits.max(-1, keepdims=True)


def reference(t, logits, labels, before=0):
    x = _shifted(logits)
    log_softmax = x - np.log(np.exp(x).sum(-1, keepdims=True))
    total, n_rows = (labels * log_softmax).sum() + before, t.op_params[0] or x.size // x.shape[-1]
    return np.reshape(total if t.type is F64 else -total / n_rows, (1, 1, 1, 1))


def reference_back(t, grad, logits, labels):
    e = np.exp(_shifted(logits))
    return (e / e.sum(-1, keepdims=True) - labels) * grad / (t.op_params[0] or e.size // e.shape[-1])


@inline
def _exp_sum(x, n, top):
    """Sum of e^(x - top)."""
    shift, s, i = splat(top), zerof(), 0
    while i + W <= n:
        s = fadd(s, vexp(fsub(ldf(x + 4 * i), shift)))
        i += W
    if i < n:
        s = fadd(s, keep_part(vexp(fsub(ldf_part(x + 4 * i, n - i), shift)), n - i, f32(0.0)))
    return hsum(s)


@inline
def _row_loss(x, y, n):
    """sum y (x - log sum e^x)"""
    top = largest(x, n)
    shift, s, i = splat(f32(top + log1(_exp_sum(x, n, top)))), zerof(), 0
    while i < n:
        m = min(W, n - i)
        s = fma(keep_part(fsub(ldf_part(x + 4 * i, m), shift), m, f32(0.0)), ldf_part(y + 4 * i, m), s)
        i += W
    return hsum(s)


@inline
def _row(node, r):
    a, b = node + SRC0, node + SRC1
    i1, i2, i3 = row_index(a, r)
    loss = _row_loss(row_addr(a, i1, i2, i3), row_addr(b, i1, i2, i3), ne(a, 0))
    st_f64(work(node) + 8 * r, types.float64(loss))
    return OK


def _make(goes_on, part):
    @inline
    def finish(node, total):
        if part:
            st_f64(addr(node + DST), total)
        else:
            st_f32(addr(node + DST), f32(-total / _rows_of_mean(node, SRC0)))
    return sum_over_rows(_row, finish, sum_in(SRC2) if goes_on else nothing)


@inline
def _rows_of_mean(node, view):
    given = param_i32(node, 0)
    return types.int64(given) if given > 0 else n_rows(node + view)


@inline
def _row_back(node, r):
    x, y, d = node + SRC1, node + SRC2, node + DST
    i1, i2, i3 = row_index(d, r)
    n, x, y, to = ne(d, 0), row_addr(x, i1, i2, i3), row_addr(y, i1, i2, i3), row_addr(d, i1, i2, i3)
    top = largest(x, n)
    shift, share = splat(top), splat(f32(1.0) / _exp_sum(x, n, top))
    grad, i = splat(ld_f32(addr(node + SRC0)) / f32(_rows_of_mean(node, DST))), 0
    while i + W <= n:
        p = fmul(vexp(fsub(ldf(x + 4 * i), shift)), share)
        stf(to + 4 * i, fmul(fsub(p, ldf(y + 4 * i)), grad))
        i += W
    if i < n:
        m = n - i
        p = fmul(vexp(fsub(ldf_part(x + 4 * i, m), shift)), share)
        stf_part(to + 4 * i, fmul(fsub(p, ldf_part(y + 4 * i, m)), grad), m)
    return OK


def kernel(t, n_threads):
    a, goes_on, part = t.src[0], len(t.src) > 2, t.type is F64
    return Kernel(f"cross_entropy_loss{'-on' * goes_on}{'-part' * part}", lambda: _make(goes_on, part),
                  cost=0.06 * touched_nbytes(t), work_nbytes=8 * a.ne[1] * a.ne[2] * a.ne[3])


def kernel_back(t, n_threads):
    return Kernel("cross_entropy_loss_back", lambda: over_rows(_row_back), cost=0.08 * touched_nbytes(t))


def cases(build):
    for shape in ((12, 5, 4, 3), (1025, 3, 1, 1), (7, 1, 1, 1)):
        for big in (1, 100):
            def make(inp, shape=shape, big=big):
                logits, labels = inp.new(F32, shape, lo=-big, hi=big), soft_max(inp.new(F32, shape))
                sources = (logits, labels) if build is cross_entropy_loss else (inp.new(F32, (1,)), logits, labels)
                return build(*sources)
            yield Case(f"{shape} {big}", make)
    if build is cross_entropy_loss_back:
        yield Case("some rows", lambda inp: build(inp.new(F32, (1,)), inp.new(F32, (7, 3)), inp.new(F32, (7, 3)), 11))
    if build is cross_entropy_loss:
        shape = 10, 5, 4

        def pair(inp):
            return inp.new(F32, shape), soft_max(inp.new(F32, shape))
        yield Case("part", lambda inp: cross_entropy_loss(*pair(inp), n_rows=0))
        yield Case("goes on", lambda inp: cross_entropy_loss(*pair(inp), cross_entropy_loss(*pair(inp), n_rows=0), 0))
        yield Case("last", lambda inp: cross_entropy_loss(*pair(inp), cross_entropy_loss(*pair(inp), n_rows=0), 40))
        yield Case("of a mean", lambda inp: build(mean(inp.new(F32, (6, 9, 2, 1))), inp.new(F32, (1, 9, 2, 1))), 1e-6)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    logits, labels = t.src[:2]
    own, n_rows = math.prod(logits.ne[1:]), _n_rows(t, logits)
    if t.type is F64:
        return (lambda: g.cross_entropy_loss_back(g.scale(dy, -own), logits, labels), g.missing("of the labels"),
                lambda: dy)
    return (lambda: g.cross_entropy_loss_back(dy, logits, labels, n_rows), g.missing("of the labels"),
            lambda: g.scale(dy, -1 / n_rows))


# ---------------------------------------------------------------- rows
def _rows(t):
    a = last_axis(t.src[0])
    if a >= 1:
        yield SUM_IN_ORDER, [a, a, None][:len(t.src)]


def _rows_back(t):
    a = last_axis(t)
    if a >= 1:
        yield a, [None, a, a]


def _n_rows(t, logits):
    return int(t.op_params[0]) or math.prod(logits.ne[1:])


def _chunk(t, ne, src, before, is_last):
    before = src[2] if before is None and len(src) > 2 else before
    return cross_entropy_loss(*src[:2], before, _n_rows(t, t.src[0]) if is_last and t.type is F32 else 0)


def _chunk_back(t, ne, src, before, is_last):
    return cross_entropy_loss_back(*src, n_rows=_n_rows(t, t))


SPECS = (
    Spec(op=OP.CROSS_ENTROPY_LOSS, builders=(cross_entropy_loss,), reference=reference, kernel=kernel,
         gradient=gradient, rows=_rows, chunk=_chunk, cases=lambda: cases(cross_entropy_loss),
         rebuild=lambda n: n.call("cross_entropy_loss", *n.up_to(3), n.i[0] if n.i[1] else None)),
    Spec(op=OP.CROSS_ENTROPY_LOSS_BACK, builders=(cross_entropy_loss_back,), reference=reference_back,
         kernel=kernel_back, rows=_rows_back, chunk=_chunk_back, cases=lambda: cases(cross_entropy_loss_back),
         rebuild=lambda n: n.call("cross_entropy_loss_back", *n.src, n.i[0] or None)))
