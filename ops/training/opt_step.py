"""opt_step_adamw, opt_step_sgd: one step of an optimiser, over the parameter itself.

    AdamW    m = beta1 m + (1 - beta1) g        w = w (1 - alpha wd) - alpha (m beta1h) / (sqrt(v beta2h) + eps)
             v = beta2 v + (1 - beta2) g^2      beta1h = 1 / (1 - beta1^t), beta2h = 1 / (1 - beta2^t)
    SGD      w = w (1 - alpha wd) - alpha g

w, m and v are written in place; the settings are tensors, so that a graph is built once for all steps.
"""
import numpy as np
from numba import types

from ggjit.ops.core.builders import looks_further
from ggjit.ops.core.record import FLAG_PARAM, OK, OP
from ggjit.ops.core.shape import is_contiguous, n_elements, require, require_type, rows_contiguous, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32
from ggjit.ops.native.node import DST, SRC1, SRC2, SRC3, SRC4, addr, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.native.simd import W, fadd, fdiv, fma, fmul, fsub, ldf, ldf_part, splat, stf, stf_part, vsqrt

f32 = types.float32


def _check(name, a, same, settings, n_settings):
    require(a.flags & FLAG_PARAM, f"{name}: the weights must be marked as a parameter", a, remedy="gg.set_param(a)")
    for t in (a, *same):
        require_type(name, t, (F32,))
        require(same_shape(a, t), f"{name}: all state must have the shape of the weights", a, t)
        require(rows_contiguous(t), f"{name}: elements of a row must lie side by side", t)
    require_type(name, settings, (F32,), "settings")
    require(n_elements(settings) == n_settings and is_contiguous(settings),
            f"{name}: the settings must be {n_settings} numbers side by side", settings)


@looks_further
def opt_step_adamw(a: Tensor, grad: Tensor, m: Tensor, v: Tensor, adamw_params: Tensor):
    """One AdamW step on the weights a (marked by set_param) -> view of a; m and v are updated too.

    a, grad, m, v F32 of one shape.  adamw_params F32 [7]: alpha, beta1, beta2, eps, wd, beta1h, beta2h (1 / (1 -
    beta^t) of step t).  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  a = a (1 - alpha wd) - alpha m
    beta1h / (sqrt(v beta2h) + eps).  Errors: ShapeError, TypeMismatch.  Source: ggml_opt_step_adamw; arXiv 1711.05101.
    """
    _check("opt_step_adamw", a, (grad, m, v), adamw_params, 7)
    return a.ctx.node(OP.OPT_STEP_ADAMW, F32, a.ne, (a, grad, m, v, adamw_params), view_of=a)


@looks_further
def opt_step_sgd(a: Tensor, grad: Tensor, sgd_params: Tensor):
    """One step of gradient descent with weight decay: a = a (1 - alpha wd) - alpha g -> view of a.

    a weights (marked by set_param), grad, F32 of one shape; sgd_params F32 [2]: alpha, wd.  Errors: ShapeError,
    TypeMismatch.  Source: ggml_opt_step_sgd.
    """
    _check("opt_step_sgd", a, (grad,), sgd_params, 2)
    return a.ctx.node(OP.OPT_STEP_SGD, F32, a.ne, (a, grad, sgd_params), view_of=a)


def reference_adamw(t, w, g, m, v, settings):
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = settings.reshape(-1)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    return w * (1 - alpha * wd) - alpha * (m * beta1h) / (np.sqrt(v * beta2h) + eps)


def reference_sgd(t, w, g, settings):
    alpha, wd = settings.reshape(-1)
    return w * (1 - alpha * wd) - alpha * g


@inline
def _setting(view, i):
    return ld_f32(addr(view) + 4 * i)


@inline
def _adamw(node, r):
    d, s = node + DST, node + SRC4
    i1, i2, i3 = row_index(d, r)
    w, g = row_addr(d, i1, i2, i3), row_addr(node + SRC1, i1, i2, i3)
    m, v = row_addr(node + SRC2, i1, i2, i3), row_addr(node + SRC3, i1, i2, i3)
    alpha, one = _setting(s, 0), f32(1.0)
    beta1, new1 = splat(_setting(s, 1)), splat(one - _setting(s, 1))
    beta2, new2 = splat(_setting(s, 2)), splat(one - _setting(s, 2))
    eps, keep = splat(_setting(s, 3)), splat(one - alpha * _setting(s, 4))
    step, root = splat(alpha * _setting(s, 5)), splat(_setting(s, 6))
    for i in range(0, ne(d, 0), W):
        n, at = min(W, ne(d, 0) - i), 4 * i
        gi = ldf_part(g + at, n)
        mi = fma(ldf_part(m + at, n), beta1, fmul(gi, new1))
        vi = fma(ldf_part(v + at, n), beta2, fmul(fmul(gi, gi), new2))
        stf_part(m + at, mi, n)
        stf_part(v + at, vi, n)
        move = fdiv(fmul(mi, step), fadd(vsqrt(fmul(vi, root)), eps))
        stf_part(w + at, fsub(fmul(ldf_part(w + at, n), keep), move), n)
    return OK


@inline
def _sgd(node, r):
    d, s = node + DST, node + SRC2
    i1, i2, i3 = row_index(d, r)
    w, g = row_addr(d, i1, i2, i3), row_addr(node + SRC1, i1, i2, i3)
    alpha = _setting(s, 0)
    keep, step = splat(f32(1.0) - alpha * _setting(s, 1)), splat(alpha)
    i, n = 0, ne(d, 0)
    while i + W <= n:
        stf(w + 4 * i, fsub(fmul(ldf(w + 4 * i), keep), fmul(ldf(g + 4 * i), step)))
        i += W
    if i < n:
        last = fsub(fmul(ldf_part(w + 4 * i, n - i), keep), fmul(ldf_part(g + 4 * i, n - i), step))
        stf_part(w + 4 * i, last, n - i)
    return OK


def kernel(t, n_threads):
    op = OP(t.op)
    one = _adamw if op == OP.OPT_STEP_ADAMW else _sgd
    return Kernel(op.name.lower(), lambda: over_rows(one), cost=0.04 * touched_nbytes(t))


def cases(op):
    shapes = (12, 5, 4, 3), (33, 3, 1, 1), (1024, 1, 1, 1)

    def leaf(inp, shape, lo=0.0, hi=1.0):
        return inp.new(F32, shape, lo=lo, hi=hi)

    def make(inp, shape):
        w = inp.param(shape)
        if op == OP.OPT_STEP_SGD:
            return opt_step_sgd(w, leaf(inp, shape), leaf(inp, (2,)))
        return opt_step_adamw(w, leaf(inp, shape), leaf(inp, shape), leaf(inp, shape), leaf(inp, (7,)))
    for shape in shapes:
        yield Case(f"{shape}", lambda inp, s=shape: make(inp, s))


SPECS = (
    Spec(op=OP.OPT_STEP_ADAMW, builders=(opt_step_adamw,), reference=reference_adamw, kernel=kernel, updates=(2, 3),
         cases=lambda: cases(OP.OPT_STEP_ADAMW)),
    Spec(op=OP.OPT_STEP_SGD, builders=(opt_step_sgd,), reference=reference_sgd, kernel=kernel,
         cases=lambda: cases(OP.OPT_STEP_SGD)))
