"""conv_2d_direct, conv_3d_direct: convolutions without an unfolded copy of the data in memory.

    d[ox, oy, oc, n] = sum over ic, ky, kx of  a[kx, ky, ic, oc]  b[ox s0 - p0 + kx d0,  oy s1 - p1 + ky d1,  ic, n]

Inputs outside the picture count as 0.  Any strides, so channels may come first or last in memory.  Sums are float32;
ggml rounds the data to the kernel's type first (F16), here they keep theirs.
"""
import math

import numpy as np

from ggjit.ops.conv import conv_few
from ggjit.ops.conv.conv_tile import cost, make_kernel, work_nbytes, write_record
from ggjit.ops.conv.im2col import conv_size, steps, under_taps
from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import SUM, last_axis, pictures
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne
from ggjit.ops.native.row_loops import param, whole

MAX_FEW = 64                            # output pixels of the kernel that is made for few


# ---------------------------------------------------------------- builders
def conv_2d_direct(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int):
    """Convolution of b [W, H, IC, N] with a [KW, KH, IC, OC] -> [OW, OH, OC, N], type of b.

    a and b F32 or F16, any strides; O = (I + 2 p - d (K - 1) - 1) / s + 1.  op params: s0, s1, p0, p1, d0, d1.
    Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_conv_2d_direct.
    """
    require_type("conv_2d_direct", a, (F32, F16), "kernel")
    require_type("conv_2d_direct", b, (F32, F16), "data")
    params = steps("conv_2d_direct", s0=s0, s1=s1, p0=p0, p1=p1, d0=d0, d1=d1)
    require(a.ne[2] == b.ne[2], "conv_2d_direct: kernel and data differ in channels (ne2)", a, b)
    size = [conv_size("conv_2d_direct", b.ne[i], a.ne[i], *params[i::2]) for i in (0, 1)]
    return a.ctx.node(OP.CONV_2D, b.type, (*size, a.ne[3], b.ne[3]), (a, b), params)


def conv_3d_direct(a: Tensor, b: Tensor, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int,
                   d2: int, n_channels: int, n_batch: int, n_channels_out: int):
    """Convolution of volumes: a [KW, KH, KD, IC OC], b [W, H, D, IC N] -> F32 [OW, OH, OD, OC N].

    IC = n_channels, N = n_batch, OC = n_channels_out; strides s0, s1, s2, paddings p0, p1, p2, dilations d0, d1, d2;
    sizes and types as `conv_2d_direct`.  op params: s0, s1, s2, p0, p1, p2, d0, d1, d2, IC, N, OC.  Errors: ShapeError,
    TypeMismatch, ParamError.  Source: ggml_conv_3d_direct.
    """
    require_type("conv_3d_direct", a, (F32, F16), "kernel")
    require_type("conv_3d_direct", b, (F32, F16), "data")
    params = steps("conv_3d_direct", s0=s0, s1=s1, s2=s2, p0=p0, p1=p1, p2=p2, d0=d0, d1=d1, d2=d2)
    ic, n, oc = (whole("conv_3d_direct", k, v, 1) for k, v in (
        ("n_channels", n_channels), ("n_batch", n_batch), ("n_channels_out", n_channels_out)))
    require(a.ne[3] == ic * oc and b.ne[3] == ic * n,
            f"conv_3d_direct: ne3 of the kernel must be {ic} * {oc}, of the data {ic} * {n}", a, b)
    size = [conv_size("conv_3d_direct", b.ne[i], a.ne[i], *params[i::3]) for i in range(3)]
    return a.ctx.node(OP.CONV_3D, F32, (*size, oc * n), (a, b), (*params, ic, n, oc))


# ---------------------------------------------------------------- reference
def convolve(a, b, s, p, d):
    """float64: a [OC, IC, KD, KH, KW], b [N, IC, D, H, W], triples in the order of the axes."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return sum(np.einsum("oi,nizyx->nozyx", a[:, :, *tap], inputs)
               for tap, inputs in under_taps(b, a.shape[2:], s, p, d))


def reference(t, a, b):
    q = [int(x) for x in t.op_params]
    if t.op == OP.CONV_2D:
        return convolve(a[:, :, None], b[:, :, None], (1, q[1], q[0]), (0, q[3], q[2]), (1, q[5], q[4]))[:, :, 0]
    ic, n, oc = q[9:12]
    out = convolve(a.reshape(oc, ic, *a.shape[1:]), b.reshape(n, ic, *b.shape[1:]), q[2::-1], q[5:2:-1], q[8:5:-1])
    return out.reshape(tuple(reversed(t.ne)))


# ---------------------------------------------------------------- kernel
@inline
def _shape_2d(node):
    a, d = node + SRC0, node + DST
    return 1, ne(a, 0) * ne(a, 1) * ne(a, 2), ne(d, 0) * ne(d, 1), ne(d, 2), ne(d, 3)


@inline
def _shape_3d(node):
    a, d = node + SRC0, node + DST
    taps = ne(a, 0) * ne(a, 1) * ne(a, 2) * param(node, 9)
    return 1, taps, ne(d, 0) * ne(d, 1) * ne(d, 2), param(node, 11), param(node, 10)


@inline
def _describe_2d(node, c, g):
    a, b, d = node + SRC0, node + SRC1, node + DST
    write_record(
        g, (ne(d, 0), ne(d, 1), 1), (ne(a, 0), ne(a, 1), 1), (param(node, 0), param(node, 1), 1),
        (-param(node, 2), -param(node, 3), 0), (param(node, 4), param(node, 5), 1), (ne(b, 0), ne(b, 1), 1),
        (addr(b), nb(b, 0), nb(b, 1), 0, nb(b, 2), nb(b, 3)), (addr(a), nb(a, 0), nb(a, 1), 0, nb(a, 2), nb(a, 3)),
        (addr(d), nb(d, 0), nb(d, 1), nb(d, 1) * ne(d, 1), nb(d, 2), nb(d, 3)), (ne(a, 2), ne(a, 3), ne(b, 3)))


@inline
def _describe_3d(node, c, g):
    a, b, d = node + SRC0, node + SRC1, node + DST
    n_in, n_batch, n_out = param(node, 9), param(node, 10), param(node, 11)
    write_record(
        g, (ne(d, 0), ne(d, 1), ne(d, 2)), (ne(a, 0), ne(a, 1), ne(a, 2)),
        (param(node, 0), param(node, 1), param(node, 2)), (-param(node, 3), -param(node, 4), -param(node, 5)),
        (param(node, 6), param(node, 7), param(node, 8)), (ne(b, 0), ne(b, 1), ne(b, 2)),
        (addr(b), nb(b, 0), nb(b, 1), nb(b, 2), nb(b, 3), nb(b, 3) * n_in),
        (addr(a), nb(a, 0), nb(a, 1), nb(a, 2), nb(a, 3), nb(a, 3) * n_in),
        (addr(d), nb(d, 0), nb(d, 1), nb(d, 2), nb(d, 3), nb(d, 3) * n_out), (n_in, n_out, n_batch))


def _few(t, n_threads):
    """The kernel for few output pixels; None where there are many, or steps leave out most of the data."""
    (a, b), p = t.src, [int(x) for x in t.op_params]
    n_taps, n_pixels = a.ne[0] * a.ne[1], t.ne[0] * t.ne[1]
    inputs = math.prod((t.ne[i] - 1) * p[i] + (a.ne[i] - 1) * p[4 + i] + 1 for i in (0, 1))
    if a.type is b.type is F32 and a.ne[2] > 0 and n_pixels <= min(n_taps, MAX_FEW) and inputs <= 16 * n_taps:
        return Kernel("conv_2d_few", conv_few.make_kernel, conv_few.cost(n_taps * a.ne[2], n_pixels * t.ne[3], t.ne[2]),
                      conv_few.work_nbytes(n_threads, n_taps, a.ne[2], t.ne[2], n_pixels, inputs))


def kernel(t, n_threads):
    few = _few(t, n_threads) if t.op == OP.CONV_2D else None
    if few is not None:
        return few
    a, b = t.src
    flat = t.op == OP.CONV_2D
    taps = a.ne[0] * a.ne[1] * a.ne[2] * (1 if flat else int(t.op_params[9]))
    out, batch = (t.ne[2], t.ne[3]) if flat else (int(t.op_params[11]), int(t.op_params[10]))
    pixels = t.ne[0] * t.ne[1] * (1 if flat else t.ne[2]) * batch
    describe, shape = (_describe_2d, _shape_2d) if flat else (_describe_3d, _shape_3d)
    return Kernel(f"conv_{2 if flat else 3}d-{a.type.name}-{b.type.name}-{t.type.name}",
                  lambda: make_kernel(describe, shape, a.type, b.type, t.type), cost(taps, pixels, out),
                  work_nbytes(n_threads, 1, taps, out))


# ---------------------------------------------------------------- cases
def cases_2d():

    def make(ta, tb, kernel, data, q, last):
        def build(inp):
            if last:                                            # channels last in memory: nb2 is the smallest
                a = permute(inp.new(ta, (kernel[2], *kernel[:2], kernel[3])), 2, 0, 1, 3)
                b = permute(inp.new(tb, (data[2], *data[:2], data[3])), 2, 0, 1, 3)
            else:
                a, b = inp.new(ta, kernel), inp.new(tb, data)
            return conv_2d_direct(a, b, *q)
        return build
    for ta, tb in ((F32, F32), (F16, F32), (F16, F16)):
        for last in (False, True):
            for kernel, data, q in (
                    ((3, 2, 25, 12), (141, 13, 25, 1), (1, 5, 2, 5, 2, 4)),
                    ((1, 1, 1, 1), (2, 1, 1, 2), (3, 5, 5, 5, 2, 4)),
                    ((11, 3, 2, 9), (40, 33, 2, 3), (3, 1, 2, 1, 1, 1)),
                    ((3, 3, 6, 17), (20, 7, 6, 2), (1, 1, 1, 1, 1, 1)),
                    ((2, 3, 3, 5), (1, 4, 3, 2), (3, 5, 0, 0, 2, 3)),
                    ((2, 1, 40, 100), (5, 1, 40, 1), (1, 1, 0, 0, 1, 1))):
                yield Case(f"{ta!r} {tb!r} {kernel} {data} {q}{' last' * last}", make(ta, tb, kernel, data, q, last),
                           1e-7 if tb is F32 else 2.0 ** -20)


def cases_3d():
    for ta in (F32, F16):
        for kernel, data, ic, n, oc, q in (
                ((3, 3, 3), (9, 10, 8), 3, 2, 4, (1, 1, 1, 1, 1, 1, 1, 1, 1)),
                ((3, 1, 2), (20, 5, 9), 1, 1, 9, (2, 1, 3, 0, 2, 1, 1, 1, 2)),
                ((1, 1, 1), (7, 3, 2), 5, 2, 3, (1, 1, 1, 0, 0, 0, 1, 1, 1))):
            yield Case(f"{ta!r} {kernel} {data} {q}", lambda inp, ta=ta, k=kernel, b=data, m=(ic, n, oc), q=q:
                       conv_3d_direct(inp.new(ta, (*k, m[0] * m[2])), inp.new(F32, (*b, m[0] * m[1])), *q, *m))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """Of the kernel: in 2-D a convolution of the data with dy, in 3-D the patches times dy.

    Of the data: a convolution of dy, or the kernel times dy, added up where the patches came from.
    """
    a, b = t.src
    p, flat = [int(x) for x in t.op_params], t.op == OP.CONV_2D
    oc, n_taps = (a.ne[3], math.prod(a.ne[:3])) if flat else (p[11], math.prod(a.ne) // p[11])
    n_pics, n_out = (t.ne[3], t.ne[0] * t.ne[1]) if flat else (p[10], math.prod(t.ne[:3]))

    def patches():
        return g.im2col(a, b, *p[:6], True, F32) if flat else g.im2col_3d(a, b, p[9], *p[:9], F32)

    def by_pixel():
        """dy [n_out, oc, n_pics]"""
        return g.reshape_3d(dy, n_out, oc, n_pics)

    def of_kernel():
        if flat and all(b.ne[i] + 2 * p[2 + i] > p[i] * (t.ne[i] - 1) + p[4 + i] * (a.ne[i] - 1) for i in (0, 1)):
            return _of_kernel(g, t, dy)
        rows = g.reshape_2d(g.cont(g.permute(by_pixel(), 1, 0, 2, 3)), oc, n_out * n_pics)
        return g.reshape(g.out_prod(g.reshape_2d(patches(), n_taps, n_out * n_pics), rows), a)

    def of_data():
        reach = [p[4 + i] * (a.ne[i] - 1) - p[2 + i] for i in (0, 1)]
        if flat and p[:2] == [1, 1] and min(reach) >= 0:
            return g.conv_2d_direct(_turned(g, a), dy, 1, 1, *reach, *p[4:6])
        d = g.out_prod(g.reshape_2d(g.dense(a), n_taps, oc), by_pixel())
        if flat:
            return g.im2col_back(g.reshape_4d(d, n_taps, *t.ne[:2], n_pics), a, b.ne, *p[:6], True)
        spread = g.reshape_4d(d, n_taps, *t.ne[:2], t.ne[2] * n_pics)
        return g.scatter(spread, _sources(t), b.ne)
    return of_kernel, of_data


def _of_kernel(g, t, dy):
    """The sum over n, oy, ox of dy[ox, oy, oc, n] b[ox s0 - p0 + kx d0, oy s1 - p1 + ky d1, ic, n].

    It is a convolution whose kernel is dy: pictures are its channels, steps and dilations change places.  Taps beyond
    the kernel, where a step does not divide what it runs over, are left out.
    """
    (a, b), (s0, s1, p0, p1, d0, d1) = t.src, map(int, t.op_params[:6])
    d = g.conv_2d_direct(g.permute(dy, 0, 1, 3, 2), g.permute(g.f32(b), 0, 1, 3, 2), d0, d1, p0, p1, s0, s1)
    d = g.view_4d(d, *a.ne[:2], *d.ne[2:], *d.nb[1:], 0)
    return g.cont(g.permute(d, 0, 1, 3, 2))


def _turned(g, a):
    """The kernel [KW, KH, IC, OC] turned by half a circle, its channels exchanged: [KW, KH, OC, IC].  With steps of 1,
    the gradient of the data is a convolution with it."""
    taps, ic, oc = a.ne[0] * a.ne[1], *a.ne[2:]
    rows = g.cont(g.transpose(g.reshape_2d(g.dense(g.f32(a)), taps, ic * oc)))
    rows = g.get_rows(rows, g.constant(np.arange(taps, dtype=np.int32)[::-1].copy()))
    return g.reshape_4d(g.cont(g.permute(g.reshape_3d(rows, ic, oc, taps), 2, 1, 0, 3)), *a.ne[:2], oc, ic)


def _sources(t):
    """Which element of the data each patch element of a CONV_3D is; -1 outside."""
    a, b = t.src
    q = [int(x) for x in t.op_params]
    k, s, p, d = (*a.ne[2::-1],), q[2::-1], q[5:2:-1], q[8:5:-1]
    numbers = np.arange(1, math.prod(b.ne) + 1).reshape(q[10], q[9], *b.ne[2::-1])
    patches = np.stack([inputs for _, inputs in under_taps(numbers, k, s, p, d)], -1)
    return np.moveaxis(patches, 1, 4) - 1


# ---------------------------------------------------------------- rows
def _rows(t):
    """Rows are pictures.  In the gradient of a kernel the pictures are summed, as channels are."""
    yield from pictures(t)
    if last_axis(t.src[0]) == 3 and t.src[0].ne[2] > 1:
        yield SUM, [2, 2]


SPECS = (Spec(op=OP.CONV_2D, builders=(conv_2d_direct,), reference=reference, kernel=kernel,
              gradient=gradient, rows=_rows, cases=cases_2d,
              rebuild="conv_2d_direct",
              flops=lambda t: 2 * math.prod(t.ne) * math.prod(t.src[0].ne[:3])),
         Spec(op=OP.CONV_3D, builders=(conv_3d_direct,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases_3d,
              rebuild="conv_3d_direct",
              flops=lambda t: 2 * math.prod(t.ne) * math.prod(t.src[0].ne[:3]) * int(t.op_params[9])))
