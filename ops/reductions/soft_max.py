"""Softmax of rows, with scale, mask, ALiBi slopes and attention sinks.

    v = scale x + slope(head) mask            d = e^(v - max v) / sum e^(v - max v)

The mask (F16 or F32) has a row per row of x and is repeated over heads (dim 2) and sequences (dim 3).  A sink is one
more logit per head that takes its share of the sum but has no output.  Masked entries hold -inf; a row masked
throughout gives NaN, as in ggml, unless it has a sink (then 0).

Two reading passes over x (maximum; exponentials and their sum) and one over d: nothing but d is written.
"""
import math

import numpy as np
from numba import types

from ggjit.ops.core.builders import in_place_pair, writes_in_c
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import is_contiguous, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import whole_along
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import exp_neg1, vexp_neg
from ggjit.ops.native.mem import ld_f32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    addr,
    ne,
    param_f32,
    row_addr,
    row_addr_mod,
    row_index,
)
from ggjit.ops.native.row_loops import SHORT_ROWS, over_chunks
from ggjit.ops.native.simd import (
    W,
    fadd,
    fma,
    fmul,
    fsub,
    hmax,
    hsum,
    keep_part,
    ldf,
    ldf_part,
    splat,
    stf,
    stf_part,
    vmax,
    zerof,
)
from ggjit.ops.reductions.sums import LOWEST
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


# ---------------------------------------------------------------- builders
def _node(a, mask, scale, max_bias, sinks, in_place):
    require_type("soft_max", a, (F32,))
    require(rows_contiguous(a), "soft_max: elements of a row must lie side by side", a, remedy="use gg.cont first")
    if mask is not None:
        require_type("soft_max", mask, (F16, F32), "mask")
        require(is_contiguous(mask), "soft_max: the mask must be contiguous", mask, remedy="use gg.cont first")
        fits = (mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and mask.ne[2] > 0 and mask.ne[3] > 0
                and a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0)
        require(fits, "soft_max: mask must be [ne0, >= ne1, divides ne2, divides ne3] of a", a, mask)
    if max_bias > 0 and mask is None:
        raise ParamError("soft_max: max_bias > 0 (ALiBi) needs a mask")
    if sinks is not None:
        require_type("soft_max", sinks, (F32,), "sinks")
        require(rows_contiguous(sinks), "soft_max: sinks must lie side by side", sinks, remedy="use gg.cont first")
        require(sinks.ne == (a.ne[2], 1, 1, 1), "soft_max: sinks must hold one value per head, a.ne[2]", a, sinks)
    src = (a,) if mask is None and sinks is None else (a, mask) if sinks is None else (a, mask, sinks)
    return a.ctx.node(OP.SOFT_MAX, a.type, a.ne, src, (float(scale), float(max_bias)), view_of=a if in_place else None)


def _soft_max(a: Tensor, in_place: bool):
    """e^(x - max) / sum e^(x - max) along ne0 of a; shape of a, F32; NumPy: axis -1.

    `soft_max_ext` without a mask.  Errors: TypeMismatch, ShapeError.  Source: ggml_soft_max.
    """
    return _node(a, None, 1.0, 0.0, None, in_place)


soft_max, soft_max_inplace = in_place_pair(_soft_max)


def _soft_max_ext(a: Tensor, mask: Tensor | None, scale: float, max_bias: float, in_place: bool):
    """softmax(scale a + slope mask) along ne0; shape of a; NumPy: axis -1.

    a [n, rows, heads, seqs] F32; mask [n, >= rows, divides heads, divides seqs] F16 or F32, contiguous, or None.  slope
    of head h, when max_bias > 0: with n = 2^floor(log2 heads), m0 = 2^(-max_bias / n), m1 = 2^(-max_bias / 2n): m0^(h +
    1) for h < n, m1^(2 (h - n) + 1) above (ALiBi, arXiv 2108.12409); else 1.  op params: scale, max_bias.  Errors:
    TypeMismatch, ShapeError, ParamError (max_bias > 0 without a mask).  Source: ggml_soft_max_ext.
    """
    return _node(a, mask, scale, max_bias, None, in_place)


soft_max_ext, soft_max_ext_inplace = in_place_pair(_soft_max_ext)


@writes_in_c
def soft_max_add_sinks(a: Tensor, sinks: Tensor):
    """The soft_max node `a` with a sink logit per head, sinks F32 [heads]; `sinks` None returns a itself.

    A sink joins the maximum and the sum, and has no place in the result.  ggml writes src[2] of the existing node;
    nodes are immutable here, so this makes a new one.  Errors: ParamError, TypeMismatch, ShapeError.  Source:
    ggml_soft_max_add_sinks.
    """
    if sinks is None:
        return a
    if a.op != OP.SOFT_MAX:
        raise ParamError(f"soft_max_add_sinks: the argument must be the result of a soft_max, got {a!r}")
    scale, max_bias = a.param_floats[:2]
    return _node(a.src[0], a.src[1] if len(a.src) > 1 else None, scale, max_bias, sinks, a.view_src is not None)


# ---------------------------------------------------------------- reference
def slopes(n_head, max_bias):
    """ALiBi slope of every head."""
    h = np.arange(n_head)
    if max_bias <= 0:
        return np.ones(n_head)
    n = 1 << (n_head.bit_length() - 1)
    return np.where(h < n, 2.0 ** (-max_bias / n * (h + 1)), 2.0 ** (-max_bias / 2 / n * (2 * (h - n) + 1)))


def reference(t, a, mask=None, sinks=None):
    scale, max_bias = (float(p) for p in t.param_floats[:2])
    v = a.astype(np.float64) * scale
    if mask is not None:
        reps = (a.shape[0] // mask.shape[0], a.shape[1] // mask.shape[1], 1, 1)
        full = np.tile(mask.astype(np.float64)[:, :, :a.shape[2]], reps)
        v = v + slopes(a.shape[1], max_bias)[None, :, None, None] * full
    top = v.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        s = sinks.reshape(1, -1, 1, 1)
        top = np.maximum(top, s)
    e = np.exp(v - top)
    total = e.sum(-1, keepdims=True)
    return e / (total + np.exp(s - top) if sinks is not None else total)


# ---------------------------------------------------------------- kernel
@inline
def slope_of(h, n_head, max_bias):
    """ALiBi slope of head h."""
    n = 1
    while 2 * n <= n_head:
        n *= 2
    m0 = f32(math.pow(f32(2.0), -max_bias / f32(n)))
    m1 = f32(math.pow(f32(2.0), -(max_bias / f32(2.0)) / f32(n)))
    return f32(math.pow(m0, f32(h + 1))) if h < n else f32(math.pow(m1, f32(2 * (h - n) + 1)))


def _make_row(mask_type, has_sinks):
    """row(d, x, m, n, scale, slope, sink): one row of n scores at x, their mask at m."""
    has_mask = mask_type is not None
    size = mask_type.nbytes if has_mask else 0
    access = ROW[mask_type or F32]
    ldm, ldm_part = access.load, access.load_part

    @inline
    def value(x, m, i, scale, slope):
        v = fmul(ldf(x + 4 * i), scale)
        return fma(ldm(m + size * i), slope, v) if has_mask else v

    @inline
    def value_part(x, m, i, n, scale, slope):
        """Lanes beyond the row hold -inf: they change no maximum and no sum."""
        v = fmul(ldf_part(x + 4 * i, n - i), scale)
        if has_mask:
            v = fma(ldm_part(m + size * i, n - i), slope, v)
        return keep_part(v, n - i, LOWEST)

    @inline
    def row(d, x, m, n, scale, slope, sink):
        top = splat(LOWEST)
        i = 0
        while i + W <= n:
            top = vmax(value(x, m, i, scale, slope), top)
            i += W
        if i < n:
            top = vmax(value_part(x, m, i, n, scale, slope), top)
        highest = hmax(top)
        if has_sinks:
            highest = max(highest, sink)
        top = splat(highest)
        s0, s1 = zerof(), zerof()
        i = 0
        while i + 2 * W <= n:
            e0 = vexp_neg(fsub(value(x, m, i, scale, slope), top))
            e1 = vexp_neg(fsub(value(x, m, i + W, scale, slope), top))
            stf(d + 4 * i, e0)
            stf(d + 4 * (i + W), e1)
            s0, s1 = fadd(s0, e0), fadd(s1, e1)
            i += 2 * W
        if i + W <= n:
            e0 = vexp_neg(fsub(value(x, m, i, scale, slope), top))
            stf(d + 4 * i, e0)
            s0 = fadd(s0, e0)
            i += W
        tail = zerof()                          # stays in a register: a masked store cannot be forwarded to its load
        if i < n:
            tail = vexp_neg(fsub(value_part(x, m, i, n, scale, slope), top))
            s1 = fadd(s1, tail)
        total = hsum(fadd(s0, s1))
        if has_sinks:
            total += exp_neg1(sink - highest)
        k = splat(f32(1.0) / total)
        i = 0
        while i + W <= n:
            stf(d + 4 * i, fmul(ldf(d + 4 * i), k))
            i += W
        if i < n:
            stf_part(d + 4 * i, fmul(tail, k), n - i)
    return row


def _make(mask_type, has_sinks):
    has_mask, row = mask_type is not None, _make_row(mask_type, has_sinks)

    @inline
    def rows(node, ith, start, stop):
        x, mask, sinks, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        scale, max_bias = splat(param_f32(node, 0)), param_f32(node, 1)
        n0, n_head, slope, sink = ne(d, 0), ne(d, 2), f32(1.0), f32(0.0)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            m = row_addr_mod(mask, i1, i2, i3) if has_mask else 0
            if has_mask and max_bias > f32(0.0):
                slope = slope_of(i2, n_head, max_bias)
            if has_sinks:
                sink = ld_f32(addr(sinks) + 4 * i2)
            row(row_addr(d, i1, i2, i3), row_addr(x, i1, i2, i3), m, n0, scale, splat(slope), sink)
        return OK
    return over_chunks(rows, chunking=SHORT_ROWS)


def kernel(t, n_threads):
    a, mask, sinks = (*t.src, None, None)[:3]
    if a.type is not F32 or t.type is not F32:
        return None
    mask_type = mask.type if mask is not None else None
    label = f"soft_max{'' if mask is None else '-' + mask_type.name}{'-sinks' * (sinks is not None)}"
    return Kernel(label, lambda: _make(mask_type, sinks is not None), cost=0.04 * touched_nbytes(t))


# ---------------------------------------------------------------- cases
def cases():
    def make(shape, mask_ne=None, mask_type=F32, scale=1.0, max_bias=0.0, sinks=False, in_place=False, hidden=0):
        def build(inp):
            a = inp.new(F32, shape, lo=-3, hi=3)
            m = None
            if mask_ne:
                values = inp.rng.uniform(-1, 1, tuple(reversed(mask_ne))).astype(np.float32)
                if hidden:
                    values[..., -hidden:] = -np.inf
                m = inp.new(mask_type, mask_ne, values)
            s = inp.new(F32, (shape[2],), lo=-10, hi=10) if sinks else None
            if sinks:
                return soft_max_add_sinks(soft_max_ext(a, m, scale, max_bias), s)
            return (soft_max_ext_inplace if in_place else soft_max_ext)(a, m, scale, max_bias)
        return build
    for shape in ((16, 5, 4, 3), (33, 3, 6, 1), (7, 4, 1, 1), (1, 3, 2, 1), (515, 2, 3, 2)):
        n0, n1, n2, n3 = shape
        yield Case(f"{shape}", make(shape, scale=0.1), 1e-6)
        yield Case(f"{shape} inplace", make(shape, in_place=True), 1e-6)
        for mask_type in (F32, F16):
            yield Case(f"{shape} {mask_type!r}", make(shape, (n0, n1, 1, 1), mask_type, 0.5), 1e-6)
            yield Case(f"{shape} {mask_type!r} alibi", make(shape, (n0, n1 + 2, n2, n3), mask_type, 0.1, 8.0), 1e-6)
        yield Case(f"{shape} sinks", make(shape, (n0, n1, 1, n3), F32, 1.0, 8.0, sinks=True), 1e-6)
        yield Case(f"{shape} sinks no mask", make(shape, sinks=True), 1e-6)
        yield Case(f"{shape} hidden", make(shape, (n0, n1, 1, 1), F16, hidden=n0 - n0 // 3 - 1), 1e-6)
    yield Case("hidden throughout", make((40, 3, 2, 1), (40, 3, 1, 1), F16, hidden=40), 1e-6)
    yield Case("hidden throughout, sinks", make((40, 3, 2, 1), (40, 3, 1, 1), F16, hidden=40, sinks=True), 1e-6)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """dx = scale y (dy - y . dy); of the mask: its share of that; of a sink: -(1 - sum y) (y . dy) over its rows."""
    (a, mask, sinks), (scale, max_bias) = (*t.src, None, None)[:3], (float(p) for p in t.param_floats[:2])

    def of_mask():
        d = g.soft_max_ext_back(dy, t, 1.0, 0.0)
        if max_bias > 0:
            d = g.mul(d, g.constant(slopes(a.ne[2], max_bias).astype(np.float32).reshape(1, -1, 1, 1)))
        d = g.fit(d, (a.ne[0], a.ne[1], *mask.ne[2:]))
        return g.pad(d, 0, mask.ne[1] - a.ne[1], 0, 0) if mask.ne[1] > a.ne[1] else d

    def of_sinks():
        rest = g.scale_bias(g.sum_rows(t), 1.0, -1.0)
        d = g.mul(rest, g.sum_rows(g.mul(dy, t)))                                   # [1, rows, heads, seqs]
        d = g.sum_rows(g.reshape_3d(d, *a.ne[1:]))                                  # [1, heads, seqs]
        return g.reshape_1d(g.fit(d, (1, a.ne[2], 1, 1)), a.ne[2])
    return (lambda: g.soft_max_ext_back(dy, t, scale, 0.0), of_mask if mask is not None else None,
            of_sinks if sinks is not None else None)


# ---------------------------------------------------------------- rows
def _rows(t):
    """Along the last axis.  A mask belongs to all heads and texts, or there is one for each."""
    a, mask = last_axis(t), t.src[1] if len(t.src) > 1 else None
    slopes = t.op_params[1] != 0                        # which differ from head to head, axis 2
    if a >= 1 and not (slopes and a == 2) and all(s is None for s in t.src[2:]):
        if mask is None:
            yield a, [a]
        elif a >= 2 and mask.ne[a] in (1, t.ne[a]):
            yield a, [a, None if mask.ne[a] == 1 else a]


def _rebuild(n):
    a, mask, sinks = n.up_to(3)
    out = n.call("soft_max_ext", a, mask, *n.f[:2])
    return out if sinks is None else n.call("soft_max_add_sinks", out, sinks)


def _split(t, a, mask=None, sinks=None, *before):
    """Rows, where each has the same mask, slope and sinks."""
    no_slopes = float(t.param_floats[1]) == 0
    return a if a.is_cut and a.axis and sinks is None and no_slopes and whole_along(t, 1, mask, a.axis) else None


SPECS = (Spec(op=OP.SOFT_MAX, builders=(soft_max, soft_max_inplace, soft_max_ext, soft_max_ext_inplace,
                                        soft_max_add_sinks),
              reference=reference, kernel=kernel, in_place=True, in_place_2023=True, gradient=gradient,
              rows=_rows, split=_split, cases=cases,
              rebuild=_rebuild),)
