"""Gradients, the loss and optimiser steps (ops/training): silu_back, rms_norm_back, soft_max_back, get_rows_back,
cross_entropy_loss and its gradient, opt_step_adamw, opt_step_sgd."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import (
    block,
    device,
    exp,
    ld_f32,
    ld_i32,
    log,
    n_blocks,
    n_threads,
    sqrt,
    st_f32,
    thread,
)
from ggjit.ops.cuda.each import at, each_element
from ggjit.ops.cuda.native.launch import Launch, dense, over_rows
from ggjit.ops.cuda.native.sums import LOWEST, block_max, block_sum
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    SRC3,
    SRC4,
    addr,
    bad_index,
    n_rows,
    ne,
    param_f32,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.cuda.norm import squares_of
from ggjit.ops.cuda.rows import ONE as TYPES

ZERO, ONE = f32(0), f32(1)


# ---------------------------------------------------------------- element by element
def _silu_back(t):
    get, put = TYPES[t.type].get, TYPES[t.type].put

    @device
    def body(node, i0, i1, i2, i3):
        dy, x = get(at(node + SRC0, i0, i1, i2, i3)), get(at(node + SRC1, i0, i1, i2, i3))
        s = ONE / (ONE + exp(-x))
        put(at(node + DST, i0, i1, i2, i3), dy * s * (ONE + x * (ONE - s)))
    return body


def _get_rows_back(t):
    get = TYPES[t.src[0].type].get

    @device
    def body(node, i0, i1, i2, i3):
        ids, s = node + SRC1, ZERO
        for k in range(ne(ids, 0)):
            id = ld_i32(at(ids, k, 0, 0, 0))
            if id < 0 or id >= ne(node + DST, 1):
                bad_index(node, id)
            elif id == i1:
                s += get(at(node + SRC0, i0, k, 0, 0))
        st_f32(at(node + DST, i0, i1, i2, i3), s)
    return body


@device
def setting(view, i):
    return ld_f32(addr(view) + 4 * i)


@device
def adamw(node, i0, i1, i2, i3):
    """One weight and its two moments; settings as in ops/training/opt_step.py."""
    w, g, s = at(node + DST, i0, i1, i2, i3), ld_f32(at(node + SRC1, i0, i1, i2, i3)), node + SRC4
    pm, pv = at(node + SRC2, i0, i1, i2, i3), at(node + SRC3, i0, i1, i2, i3)
    alpha, beta1, beta2 = setting(s, 0), setting(s, 1), setting(s, 2)
    m, v = ld_f32(pm) * beta1 + g * (ONE - beta1), ld_f32(pv) * beta2 + g * g * (ONE - beta2)
    st_f32(pm, m)
    st_f32(pv, v)
    step = m * (alpha * setting(s, 5)) / (sqrt(v * setting(s, 6)) + setting(s, 3))
    st_f32(w, ld_f32(w) * (ONE - alpha * setting(s, 4)) - step)


@device
def sgd(node, i0, i1, i2, i3):
    w, g, s = at(node + DST, i0, i1, i2, i3), ld_f32(at(node + SRC1, i0, i1, i2, i3)), node + SRC2
    alpha = setting(s, 0)
    st_f32(w, ld_f32(w) * (ONE - alpha * setting(s, 1)) - alpha * g)


ELEMENTS = {OP.SILU_BACK: _silu_back, OP.GET_ROWS_BACK: _get_rows_back, OP.OPT_STEP_ADAMW: lambda t: adamw,
            OP.OPT_STEP_SGD: lambda t: sgd}


def _element(t):
    if t.op == OP.GET_ROWS_BACK and len(t.src) > 2:
        return None
    return each_element(t, t.op.name.lower(), lambda: ELEMENTS[t.op](t))


# ---------------------------------------------------------------- row by row
@device
def dot_of(x, y, n):
    s = ZERO
    i = thread()
    while i < n:
        s += ld_f32(x + 4 * i) * ld_f32(y + 4 * i)
        i += n_threads()
    return block_sum(s)


@device
def rms_norm_back(d, dy, x, n, eps):
    square = squares_of(x, n, 4, ZERO) + eps * f32(n)
    pull, factor = -dot_of(dy, x, n) / square, ONE / sqrt(square / f32(n))
    i = thread()
    while i < n:
        st_f32(d + 4 * i, (ld_f32(dy + 4 * i) + ld_f32(x + 4 * i) * pull) * factor)
        i += n_threads()


@device
def soft_max_back(d, dy, y, n, scale):
    dot = dot_of(dy, y, n)
    i = thread()
    while i < n:
        st_f32(d + 4 * i, (ld_f32(dy + 4 * i) - dot) * ld_f32(y + 4 * i) * scale)
        i += n_threads()


ROWS = {OP.RMS_NORM_BACK: rms_norm_back, OP.SOFT_MAX_BACK: soft_max_back}


def _make_rows(row):
    def kernel(node):
        d = node + DST
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            row(row_addr(d, i1, i2, i3), row_addr(node + SRC0, i1, i2, i3), row_addr(node + SRC1, i1, i2, i3),
                ne(d, 0), param_f32(node, 0))
            r += n_blocks()
    return kernel


def _rows(t):
    if any(x.type is not F32 for x in (t, *t.src)) or not dense(t, *t.src):
        return None
    return over_rows(t.op.name.lower(), lambda: _make_rows(ROWS[t.op]), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


# ---------------------------------------------------------------- cross entropy
@device
def log_sum(x, n):
    """(largest of n floats, log of the sum of e^(x - largest))"""
    top = LOWEST
    i = thread()
    while i < n:
        top = max(top, ld_f32(x + 4 * i))
        i += n_threads()
    top, s = block_max(top), ZERO
    i = thread()
    while i < n:
        s += exp(ld_f32(x + 4 * i) - top)
        i += n_threads()
    return top, log(block_sum(s))


def _make_losses():
    """The loss of each row, in scratch memory."""
    def kernel(node):
        a = node + SRC0
        r = block()
        while r < n_rows(a):
            i1, i2, i3 = row_index(a, r)
            n, x, y, s = ne(a, 0), row_addr(a, i1, i2, i3), row_addr(node + SRC1, i1, i2, i3), ZERO
            top, log_total = log_sum(x, n)
            i = thread()
            while i < n:
                s += (ld_f32(x + 4 * i) - top - log_total) * ld_f32(y + 4 * i)
                i += n_threads()
            s = block_sum(s)
            if thread() == 0:
                st_f32(work(node) + 4 * r, s)
            r += n_blocks()
    return kernel


def _make_mean():
    def kernel(node):
        n, s = n_rows(node + SRC0), ZERO
        i = thread()
        while i < n:
            s += ld_f32(work(node) + 4 * i)
            i += n_threads()
        s = block_sum(s)
        if thread() == 0:
            st_f32(addr(node + DST), -s / f32(n))
    return kernel


def _make_loss_back():
    def kernel(node):
        d = node + DST
        factor = ld_f32(addr(node + SRC0)) / f32(n_rows(d))
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            n, x, y = ne(d, 0), row_addr(node + SRC1, i1, i2, i3), row_addr(node + SRC2, i1, i2, i3)
            top, log_total = log_sum(x, n)
            i = thread()
            while i < n:
                p = exp(ld_f32(x + 4 * i) - top - log_total)
                st_f32(row_addr(d, i1, i2, i3) + 4 * i, (p - ld_f32(y + 4 * i)) * factor)
                i += n_threads()
            r += n_blocks()
    return kernel


def _loss(t):
    a = t.src[0]
    if any(x.type is not F32 for x in (t, *t.src)) or not dense(*t.src) or t.op_params[1]:
        return None
    n = a.ne[1] * a.ne[2] * a.ne[3]
    return (over_rows("cross_entropy_rows", _make_losses, n, a.ne[0], 4 * n),
            Launch("cross_entropy_mean", _make_mean, (1, 1, 1), 64, 4 * n))


def _loss_back(t):
    if any(x.type is not F32 for x in t.src) or not dense(t, *t.src) or t.op_params[0]:
        return None
    return over_rows("cross_entropy_back", _make_loss_back, t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = {**dict.fromkeys(ELEMENTS, _element), **dict.fromkeys(ROWS, _rows), OP.CROSS_ENTROPY_LOSS: _loss,
        OP.CROSS_ENTROPY_LOSS_BACK: _loss_back}
