"""cross_entropy_loss and its gradient, on rows of logits and of label probabilities.

    loss  = -1/rows  sum over rows, i   labels[i] log_softmax(logits)[i]
    back  = (softmax(logits) - labels) grad / rows
"""
import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import n_elements, require, require_type, rows_contiguous, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32
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
from ggjit.ops.reductions.sums import largest, sum_over_rows

f32 = types.float32


def _check(name, logits, labels):
    for t in (logits, labels):
        require_type(name, t, (F32,))
        require(rows_contiguous(t), f"{name}: elements of a row must lie side by side", t, remedy="use gg.cont first")
    require(same_shape(logits, labels), f"{name}: logits and labels must have one shape", logits, labels)
    require(min(logits.ne) > 0, f"{name}: there is no mean over no rows", logits)


def cross_entropy_loss(a, b):
    """Mean over rows of -sum(b log_softmax(a)) along ne0 -> F32 [1]; a logits, b label probabilities, one shape, F32.

    Errors: ShapeError, TypeMismatch.  Source: ggml_cross_entropy_loss.
    """
    _check("cross_entropy_loss", a, b)
    return a.ctx.node(OP.CROSS_ENTROPY_LOSS, F32, (1,), (a, b))


def cross_entropy_loss_back(a, b, c):
    """Gradient of the loss with respect to its logits: a F32 [1] gradient of the loss, b logits, c labels.

    Shape of b.  (The comment in ggml.h lists logits, labels, gradient; its code reads gradient, logits, labels.)
    Errors: ShapeError, TypeMismatch.  Source: ggml_cross_entropy_loss_back.
    """
    require_type("cross_entropy_loss_back", a, (F32,), "gradient")
    require(n_elements(a) == 1, "cross_entropy_loss_back: the gradient must be one element", a)
    _check("cross_entropy_loss_back", b, c)
    return a.ctx.node(OP.CROSS_ENTROPY_LOSS_BACK, F32, b.ne, (a, b, c))


def _shifted(logits):
    return logits.astype(np.float64) - logits.max(-1, keepdims=True)


def reference(t, logits, labels):
    x = _shifted(logits)
    log_softmax = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return (-(labels * log_softmax).sum() / (x.size // x.shape[-1])).reshape(1, 1, 1, 1)


def reference_back(t, grad, logits, labels):
    e = np.exp(_shifted(logits))
    return (e / e.sum(-1, keepdims=True) - labels) * grad / (e.size // e.shape[-1])


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


@inline
def _finish(node, total):
    st_f32(addr(node + DST), f32(-total / n_rows(node + SRC0)))


@inline
def _row_back(node, r):
    x, y, d = node + SRC1, node + SRC2, node + DST
    i1, i2, i3 = row_index(d, r)
    n, x, y, to = ne(d, 0), row_addr(x, i1, i2, i3), row_addr(y, i1, i2, i3), row_addr(d, i1, i2, i3)
    top = largest(x, n)
    shift, share = splat(top), splat(f32(1.0) / _exp_sum(x, n, top))
    grad, i = splat(ld_f32(addr(node + SRC0)) / f32(n_rows(d))), 0
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
    a = t.src[0]
    return Kernel("cross_entropy_loss", lambda: sum_over_rows(_row, _finish), cost=0.06 * touched_nbytes(t),
                  work_nbytes=8 * a.ne[1] * a.ne[2] * a.ne[3])


def kernel_back(t, n_threads):
    return Kernel("cross_entropy_loss_back", lambda: over_rows(_row_back), cost=0.08 * touched_nbytes(t))


def cases(build):
    for shape in ((10, 5, 4, 3), (1025, 3, 1, 1), (7, 1, 1, 1)):
        for big in (1, 100):
            def make(inp, shape=shape, big=big):
                logits, labels = inp.new(F32, shape, lo=-big, hi=big), soft_max(inp.new(F32, shape))
                sources = (logits, labels) if build is cross_entropy_loss else (inp.new(F32, (1,)), logits, labels)
                return build(*sources)
            yield Case(f"{shape} {big}", make)
    if build is cross_entropy_loss:
        yield Case("of a mean", lambda inp: build(mean(inp.new(F32, (6, 9, 2, 1))), inp.new(F32, (1, 9, 2, 1))), 1e-6)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    logits, labels = t.src
    return lambda: g.cross_entropy_loss_back(dy, logits, labels), g.missing("of the labels")


SPECS = (
    Spec(op=OP.CROSS_ENTROPY_LOSS, builders=(cross_entropy_loss,), reference=reference, kernel=kernel,
         gradient=gradient,
         cases=lambda: cases(cross_entropy_loss)),
    Spec(op=OP.CROSS_ENTROPY_LOSS_BACK, builders=(cross_entropy_loss_back,), reference=reference_back,
         kernel=kernel_back, cases=lambda: cases(cross_entropy_loss_back)))
