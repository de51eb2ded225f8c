"""Ops of positions: arange, timestep_embedding, add_id (ops/elementwise), interpolate and upscale
(ops/conv/upscale.py)."""
from numpy import float32 as f32

from ggjit.ops.conv.upscale import ALIGN_CORNERS, ANTIALIAS, BILINEAR, NEAREST
from ggjit.ops.core.record import OP
from ggjit.ops.cuda.compiler.core import (
    cos,
    device,
    exp,
    fabs,
    floor,
    fmax,
    fmin,
    ld_f32,
    ld_i32,
    log,
    sin,
    st_f32,
    to_i32,
)
from ggjit.ops.cuda.each import at, each_element
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, bad_index, ne, param_f32, param_i32

ZERO, HALF, ONE, TWO = f32(0), f32(0.5), f32(1), f32(2)


@device
def arange(node, i0, i1, i2, i3):
    st_f32(at(node + DST, i0, i1, i2, i3), param_f32(node, 0) + param_f32(node, 2) * f32(i0))


@device
def timestep_embedding(node, i0, i1, i2, i3):
    dim = param_i32(node, 0)
    half = dim // 2
    x = ZERO
    if i0 < 2 * half:
        j = i0 if i0 < half else i0 - half
        angle = ld_f32(at(node + SRC0, i1, 0, 0, 0)) * exp(-log(f32(param_i32(node, 1))) * f32(j) / f32(half))
        x = cos(angle) if i0 < half else sin(angle)
    st_f32(at(node + DST, i0, i1, i2, i3), x)


@device
def add_id(node, i0, i1, i2, i3):
    b, id = node + SRC1, ld_i32(at(node + SRC2, i1, i2, 0, 0))
    if id < 0 or id >= ne(b, 1):
        bad_index(node, id)
    else:
        st_f32(at(node + DST, i0, i1, i2, i3), ld_f32(at(node + SRC0, i0, i1, i2, i3)) + ld_f32(at(b, i0, id, 0, 0)))


ELEMENTS = {OP.ARANGE: arange, OP.TIMESTEP_EMBEDDING: timestep_embedding, OP.ADD_ID: add_id}


def _element(t):
    return each_element(t, t.op.name.lower(), lambda: ELEMENTS[t.op])


# ---------------------------------------------------------------- interpolation
@device
def factor(node, k):
    """Outputs to inputs along dimension k."""
    n_in, n_out = ne(node + SRC0, k), ne(node + DST, k)
    if param_i32(node, 0) & ALIGN_CORNERS and k < 2 and n_in > 1 and n_out > 1:
        return f32(n_out - 1) / f32(n_in - 1)
    return f32(n_out) / f32(n_in)


@device
def nearest(node, k, i):
    return min(to_i32(f32(i) / factor(node, k)), ne(node + SRC0, k) - 1)


@device
def cubic(x):
    """Keys' kernel, a = -0.75, for 0 <= x <= 2."""
    a = f32(-0.75)
    if x <= ONE:
        return ((a + TWO) * x - (a + f32(3))) * x * x + ONE
    return ((a * x - f32(5) * a) * x + f32(8) * a) * x - f32(4) * a


def _taps(kind, antialias):
    """(span(node, k, i) -> (first tap, end, position), weight(node, k, position, tap)) of output i along k."""
    @device
    def position(node, k, i):
        half = ZERO if param_i32(node, 0) & ALIGN_CORNERS else HALF
        x = (f32(i) + half) / factor(node, k)
        return x if antialias else x - half

    @device
    def support(node, k):
        return fmax(ONE, ONE / factor(node, k))
    if kind == NEAREST:
        @device
        def span(node, k, i):
            j = nearest(node, k, i)
            return j, j + 1, ZERO

        @device
        def weight(node, k, x, j):
            return ONE
    elif antialias:
        @device
        def span(node, k, i):
            x, half = position(node, k, i), ZERO if param_i32(node, 0) & ALIGN_CORNERS else HALF
            s = support(node, k)
            return max(to_i32(x - s + half), 0), min(to_i32(x + s + half), ne(node + SRC0, k)), x - half

        @device
        def weight(node, k, x, j):
            return fmax(ONE - fabs((f32(j) - x) / support(node, k)), ZERO)
    elif kind == BILINEAR:
        @device
        def span(node, k, i):
            x = position(node, k, i)
            j = to_i32(floor(x))
            return j, j + 2, fmin(fmax(x - f32(max(0, min(j, ne(node + SRC0, k) - 1))), ZERO), ONE) + f32(j)

        @device
        def weight(node, k, x, j):
            return fmax(ONE - fabs(x - f32(j)), ZERO)
    else:
        @device
        def span(node, k, i):
            x = position(node, k, i)
            j = to_i32(floor(x))
            return j - 1, j + 3, x

        @device
        def weight(node, k, x, j):
            return cubic(fabs(x - f32(j)))
    return span, weight


def _interpolated(kind, antialias):
    span, weight = _taps(kind, antialias)

    @device
    def body(node, i0, i1, i2, i3):
        a = node + SRC0
        x0, x1, x = span(node, 0, i0)
        y0, y1, y = span(node, 1, i1)
        j2, j3 = nearest(node, 2, i2), nearest(node, 3, i3)
        s, total = ZERO, ZERO
        for v in range(y0, y1):
            row, wy = max(0, min(v, ne(a, 1) - 1)), weight(node, 1, y, v)
            for u in range(x0, x1):
                w = wy * weight(node, 0, x, u)
                total += w
                s += w * ld_f32(at(a, max(0, min(u, ne(a, 0) - 1)), row, j2, j3))
        if antialias:
            s = s / total if total > ZERO else ZERO
        st_f32(at(node + DST, i0, i1, i2, i3), s)
    return body


def _upscale(t):
    mode = int(t.op_params[0])
    kind, antialias = mode & 0xFF, bool(mode & ANTIALIAS)
    return each_element(t, f"upscale{kind}{'_antialias' * antialias}", lambda: _interpolated(kind, antialias))


CUDA = {**dict.fromkeys(ELEMENTS, _element), OP.UPSCALE: _upscale}
