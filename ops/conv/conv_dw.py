"""conv_2d_dw_direct: every channel is convolved with another kernel.

    d[ox, oy, c, n] = sum over ky, kx of  a[kx, ky, 0, c]  b[ox s0 - p0 + kx d0,  oy s1 - p1 + ky d1,  c, n]

Two bodies by where b's channels lie:

    planes          lanes are pixels of an output row, tap by tap
    channels last   lanes are channels of one output pixel; the result keeps that layout, as in ggml
"""
import math

import numpy as np
from numba import types

from ggjit.ops.conv.conv import convolve
from ggjit.ops.conv.im2col import conv_size, steps
from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import pictures
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne, row_addr
from ggjit.ops.native.row_loops import over_rows, param
from ggjit.ops.native.simd import W, fma, ldf, splat, stf, zerof
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


def _channels_last(t):
    """ggml_is_contiguous_channels: a channel is the step from one element to the next."""
    return t.nb[0] > t.nb[2] and t.nb[1] > t.nb[0] and t.nb[2] == t.type.nbytes


def conv_2d_dw_direct(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int):
    """b [W, H, C, N] with one kernel of a [KW, KH, 1, C] per channel -> F32 [OW, OH, C, N].

    a F32 or F16, b F32, any strides; where b's channels come last in memory, so do the result's.
    op params: s0, s1, p0, p1, d0, d1.  Errors: ShapeError, TypeMismatch, ParamError.
    Source: ggml_conv_2d_dw_direct.
    """
    require_type("conv_2d_dw_direct", a, (F32, F16), "kernel")
    require_type("conv_2d_dw_direct", b, (F32,), "data")
    params = steps("conv_2d_dw_direct", s0=s0, s1=s1, p0=p0, p1=p1, d0=d0, d1=d1)
    require(a.ne[2] == 1 and a.ne[3] == b.ne[2], "conv_2d_dw_direct: the kernel must be [KW, KH, 1, C]", a, b)
    w, h = (conv_size("conv_2d_dw_direct", b.ne[i], a.ne[i], *params[i::2]) for i in (0, 1))
    c, n, nb = b.ne[2], b.ne[3], None
    if _channels_last(b):
        nb = (4 * c, 4 * c * w, 4, 4 * c * w * h)
    return a.ctx.node(OP.CONV_2D_DW, F32, (w, h, c, n), (a, b), params, nb=nb)


def reference(t, a, b):
    q = [int(x) for x in t.op_params]
    if not n_elements(t):
        return np.zeros(tuple(reversed(t.ne)))
    s, p, d = (1, q[1], q[0]), (0, q[3], q[2]), (1, q[5], q[4])
    return np.concatenate([convolve(a[c:c + 1, :, None], b[:, c:c + 1, None], s, p, d)[:, :, 0]
                           for c in range(b.shape[1])], 1)


@inline
def _taps(first, step, size, n):
    """Range of taps k < n with 0 <= first + k step < size."""
    low = (step - 1 - first) // step if first < 0 else 0
    high = (size - 1 - first) // step + 1 if first < size else 0
    return min(low, n), min(high, n)


def _make_planes(ta):
    weight = ROW[ta].get

    @inline
    def rows(node):
        d = node + DST
        return ne(d, 1) * ne(d, 2) * ne(d, 3)

    @inline
    def add(to, x, step, n, w):
        """to += w x over n pixels."""
        i, v = 0, splat(w)
        if step == 4:
            while i + W <= n:
                stf(to + 4 * i, fma(ldf(x + 4 * i), v, ldf(to + 4 * i)))
                i += W
        while i < n:
            st_f32(to + 4 * i, ld_f32(to + 4 * i) + ld_f32(x + i * step) * w)
            i += 1

    @inline
    def one(node, r):
        a, b, d = node + SRC0, node + SRC1, node + DST
        oy, c, pic = r % ne(d, 1), r // ne(d, 1) % ne(d, 2), r // ne(d, 1) // ne(d, 2)
        to, n, s0, d0 = row_addr(d, oy, c, pic), ne(d, 0), param(node, 0), param(node, 4)
        zero_bytes(to, 4 * n)
        y0 = oy * param(node, 1) - param(node, 3)
        low, high = _taps(y0, param(node, 5), ne(b, 1), ne(a, 1))
        for ky in range(low, high):
            x = row_addr(b, y0 + ky * param(node, 5), c, pic)
            for kx in range(ne(a, 0)):
                x0 = kx * d0 - param(node, 2)
                first, end = _taps(x0, s0, ne(b, 0), n)         # output pixels, s0 inputs apart
                if end > first:
                    w = weight(addr(a) + kx * nb(a, 0) + ky * nb(a, 1) + c * nb(a, 3))
                    add(to + 4 * first, x + (x0 + first * s0) * nb(b, 0), s0 * nb(b, 0), end - first, w)
        return OK
    return over_rows(one, rows)


def _make_channels(ta):
    load, weight, size = ROW[ta].load, ROW[ta].get, ta.nbytes

    @inline
    def pixels(node):
        d = node + DST
        return ne(d, 0) * ne(d, 1) * ne(d, 3)

    @inline
    def one(node, r):
        a, b, d = node + SRC0, node + SRC1, node + DST
        ox, oy, pic = r % ne(d, 0), r // ne(d, 0) % ne(d, 1), r // ne(d, 0) // ne(d, 1)
        x0, y0 = ox * param(node, 0) - param(node, 2), oy * param(node, 1) - param(node, 3)
        d0, d1, channels = param(node, 4), param(node, 5), ne(d, 2)
        xl, xh = _taps(x0, d0, ne(b, 0), ne(a, 0))
        yl, yh = _taps(y0, d1, ne(b, 1), ne(a, 1))
        to = row_addr(d, oy, 0, pic) + ox * nb(d, 0)
        c = 0
        while c + W <= channels and nb(a, 3) == size:
            s = zerof()
            for ky in range(yl, yh):
                for kx in range(xl, xh):
                    w = load(addr(a) + kx * nb(a, 0) + ky * nb(a, 1) + c * size)
                    s = fma(w, ldf(row_addr(b, y0 + ky * d1, c, pic) + (x0 + kx * d0) * nb(b, 0)), s)
            stf(to + 4 * c, s)
            c += W
        while c < channels:
            total = f32(0.0)
            for ky in range(yl, yh):
                for kx in range(xl, xh):
                    w = weight(addr(a) + kx * nb(a, 0) + ky * nb(a, 1) + c * nb(a, 3))
                    total += w * ld_f32(row_addr(b, y0 + ky * d1, c, pic) + (x0 + kx * d0) * nb(b, 0))
            st_f32(to + 4 * c, total)
            c += 1
        return OK
    return over_rows(one, pixels)


def kernel(t, n_threads):
    a, b = t.src
    last = _channels_last(b)
    return Kernel(f"conv_2d_dw-{'channels' if last else 'planes'}-{a.type.name}",
                  lambda: (_make_channels if last else _make_planes)(a.type),
                  cost=n_elements(t) * (0.3 + 0.1 * a.ne[0] * a.ne[1]))


def cases():

    def make(ta, kernel, data, q, last):
        def build(inp):
            c, n = data[2:]
            if last == 2:                                       # 2: the channels of the kernel are last in memory, too
                a = permute(inp.new(ta, (c, *kernel, 1)), 3, 0, 1, 2)
            else:
                a = inp.new(ta, (*kernel, 1, c))
            b = permute(inp.new(F32, (c, *data[:2], n)), 2, 0, 1, 3) if last else inp.new(F32, data)
            return conv_2d_dw_direct(a, b, *q)
        return build
    for ta in (F32, F16):
        for kernel, data, q in (((3, 3), (17, 35, 9, 1), (1, 1, 0, 0, 1, 1)),
                                ((3, 3), (32, 8, 64, 1), (2, 1, 1, 1, 1, 1)),
                                ((5, 2), (70, 9, 35, 2), (1, 3, 4, 2, 2, 3))):
            for last in range(3):
                yield Case(f"{ta!r} {kernel} {data} {q} {last}", make(ta, kernel, data, q, last))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """Every channel is a picture of its own: patches [taps, pixels] times dy [pixels], and taps times dy."""
    a, b = t.src
    p, (w, h, c, n) = [int(x) for x in t.op_params[:6]], t.ne
    n_taps = a.ne[0] * a.ne[1]
    one = g.view_4d(a, *a.ne[:2], 1, 1, *a.nb[1:], 0)           # the shape of a kernel of one channel

    def of_kernel():
        data = g.reshape_4d(g.dense(b), *b.ne[:2], 1, c * n)
        patches = g.reshape_4d(g.im2col(one, data, *p, True, F32), n_taps, w * h, c, n)
        d = g.out_prod(patches, g.reshape_4d(dy, 1, w * h, c, n))
        return g.reshape(g.fit(d, (n_taps, 1, c, 1)), a)

    def of_data():
        d = g.out_prod(g.reshape_4d(g.dense(a), n_taps, 1, c, 1), g.reshape_4d(dy, w * h, 1, c, n))
        d = g.im2col_back(g.reshape_4d(d, n_taps, w, h, c * n), one, (*b.ne[:2], 1, c * n), *p, True)
        return g.reshape(d, b)
    return of_kernel, of_data


SPECS = (Spec(op=OP.CONV_2D_DW, builders=(conv_2d_dw_direct,), reference=reference, kernel=kernel, gradient=gradient,
              rows=pictures, cases=cases,
              rebuild="conv_2d_dw_direct",
              flops=lambda t: 2 * math.prod(t.ne) * math.prod(t.src[0].ne[:2])),)
