"""conv_transpose_1d, conv_transpose_2d_p0: every input pixel stamps the kernel onto the output, `stride` apart.

    d[x s + kx, y s + ky, oc, n] += a[kx, ky, oc, ic] b[x, y, ic, n]

        stride 2, kernel of 3         input     A     B     C
                                      output    A A A . .
                                                    B B B . .
                                                        C C C

Computed as s convolutions for each dimension (see conv_tile): every output has one thread, and no tap over a zero
between two stamps is computed.
"""
import math

import numpy as np

from ggjit.ops.conv.conv_tile import cost, make_kernel, work_nbytes, write_record
from ggjit.ops.copying.view import permute
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne
from ggjit.ops.native.row_loops import param, whole


# ---------------------------------------------------------------- builders
def _check(name, a, b):
    require_type(name, a, (F32, F16), "kernel")
    require_type(name, b, (F32,), "data")
    require(min(a.ne[:2]) > 0 and min(b.ne[:2]) > 0, f"{name}: kernel and data must not be empty", a, b)


def conv_transpose_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int):
    """b [L, IC] spread by a [K, OC, IC] -> F32 [(L - 1) s0 + K, OC]; p0 must be 0 and d0 must be 1, as in ggml.

    a F32 or F16, b F32.  op params: s0, p0, d0.  Errors: ShapeError, TypeMismatch, ParamError.
    Source: ggml_conv_transpose_1d.
    """
    _check("conv_transpose_1d", a, b)
    s0 = whole("conv_transpose_1d", "s0", s0, 1)
    if p0 != 0 or d0 != 1:
        raise ParamError(f"conv_transpose_1d: p0 must be 0 and d0 must be 1, got {p0!r} and {d0!r}")
    require(b.ne[2] == b.ne[3] == a.ne[3] == 1, "conv_transpose_1d: a must be [K, OC, IC], b [L, IC]", a, b)
    require(a.ne[2] == b.ne[1], "conv_transpose_1d: kernel (ne2) and data (ne1) differ in channels", a, b)
    return a.ctx.node(OP.CONV_TRANSPOSE_1D, F32, ((b.ne[0] - 1) * s0 + a.ne[0], a.ne[1]), (a, b), (s0, 0, 1))


def conv_transpose_2d_p0(a: Tensor, b: Tensor, stride: int):
    """b [W, H, IC, N] spread by a [KW, KH, OC, IC] -> F32 [(W - 1) s + KW, (H - 1) s + KH, OC, N].

    s = stride; no padding.  a F32 or F16, b F32.  op params: stride.  Errors: ShapeError, TypeMismatch, ParamError.
    Source: ggml_conv_transpose_2d_p0.
    """
    _check("conv_transpose_2d_p0", a, b)
    s = whole("conv_transpose_2d_p0", "stride", stride, 1)
    require(a.ne[3] == b.ne[2], "conv_transpose_2d_p0: kernel (ne3) and data (ne2) differ in channels", a, b)
    size = [(b.ne[i] - 1) * s + a.ne[i] for i in (0, 1)]
    return a.ctx.node(OP.CONV_TRANSPOSE_2D, F32, (*size, a.ne[2], b.ne[3]), (a, b), (s,))


# ---------------------------------------------------------------- reference
def reference(t, a, b):
    s, flat = int(t.op_params[0]), t.op == OP.CONV_TRANSPOSE_1D
    if flat:
        a, b = a.reshape(*a.shape[1:3], 1, a.shape[3]), b.reshape(1, b.shape[2], 1, b.shape[3])
    a, b = a.astype(np.float64), b.astype(np.float64)
    sy = 1 if flat else s
    out = np.zeros((b.shape[0], a.shape[1], (b.shape[2] - 1) * sy + a.shape[2], t.ne[0]))
    for ky, kx in np.ndindex(*a.shape[2:]):
        stamp = np.einsum("nchw,co->nohw", b, a[:, :, ky, kx])
        out[:, :, ky:ky + (b.shape[2] - 1) * sy + 1:sy, kx:kx + (b.shape[3] - 1) * s + 1:s] += stamp
    return out.reshape(tuple(reversed(t.ne)))


# ---------------------------------------------------------------- kernel
def _make(ta, flat):
    @inline
    def across(node):
        """Residues along x; more than outputs there are none."""
        return min(param(node, 0), ne(node + DST, 0))

    @inline
    def shape(node):
        a, d, s = node + SRC0, node + DST, param(node, 0)
        taps, pixels = (ne(a, 0) + s - 1) // s, (ne(d, 0) + s - 1) // s
        if flat:
            return across(node), taps * ne(a, 2), pixels, ne(d, 1), 1
        down = min(s, ne(d, 1))
        return (across(node) * down, taps * ((ne(a, 1) + s - 1) // s) * ne(a, 3),
                pixels * ((ne(d, 1) + s - 1) // s), ne(d, 2), ne(d, 3))

    @inline
    def describe(node, c, g):
        a, b, d = node + SRC0, node + SRC1, node + DST
        s = param(node, 0)
        sy, rx, ry = 1 if flat else s, c % across(node), c // across(node)
        k1, h, n1, to_y = (1, 1, 1, 0) if flat else (ne(a, 1), ne(b, 1), ne(d, 1), nb(d, 1))
        kernel_y, data_y = (0, 0) if flat else (nb(a, 1), nb(b, 1))
        data_c, data_n = (nb(b, 1), 0) if flat else (nb(b, 2), nb(b, 3))
        kernel_oc, kernel_c = (nb(a, 1), nb(a, 2)) if flat else (nb(a, 2), nb(a, 3))
        to_oc, to_n = (nb(d, 1), 0) if flat else (nb(d, 2), nb(d, 3))
        n_in, n_out, n_batch = (ne(b, 1), ne(d, 1), 1) if flat else (ne(b, 2), ne(d, 2), ne(d, 3))
        write_record(
            g, ((ne(d, 0) - rx + s - 1) // s, (n1 - ry + sy - 1) // sy, 1),
            (max(0, (ne(a, 0) - rx + s - 1) // s), max(0, (k1 - ry + sy - 1) // sy), 1),
            (1, 1, 1), (0, 0, 0), (-1, -1, -1), (ne(b, 0), h, 1), (addr(b), nb(b, 0), data_y, 0, data_c, data_n),
            (addr(a) + rx * nb(a, 0) + ry * kernel_y, s * nb(a, 0), sy * kernel_y, 0, kernel_c, kernel_oc),
            (addr(d) + rx * nb(d, 0) + ry * to_y, s * nb(d, 0), sy * to_y, 0, to_oc, to_n), (n_in, n_out, n_batch))
    return make_kernel(describe, shape, ta, F32, F32)


def kernel(t, n_threads):
    a, b = t.src
    s, flat = int(t.op_params[0]), t.op == OP.CONV_TRANSPOSE_1D
    sides = 1 if flat else 2
    classes, taps = 1, b.ne[1] if flat else b.ne[2]
    for i in range(sides):
        classes, taps = classes * min(s, t.ne[i]), taps * -(-a.ne[i] // s)
    out, pixels = (t.ne[1], t.ne[0]) if flat else (t.ne[2], t.ne[0] * t.ne[1] * t.ne[3])
    return Kernel(f"conv_transpose_{sides}d-{a.type.name}", lambda: _make(a.type, flat), cost(taps, pixels, out),
                  work_nbytes(n_threads, classes, taps, out))


# ---------------------------------------------------------------- cases
def cases_1d():
    for ta in (F32, F16):
        for oc, ic, k, n, s in ((1, 1, 1, 4, 1), (9, 7, 3, 14, 1), (9, 7, 3, 14, 2), (1, 7, 1337, 14, 3),
                                (9, 1, 2, 2, 5), (17, 3, 4, 150, 3), (3, 2, 5, 2, 1000)):
            yield Case(f"{ta!r} {oc} {ic} {k} {n} {s}", lambda inp, ta=ta, oc=oc, ic=ic, k=k, n=n, s=s:
                       conv_transpose_1d(inp.new(ta, (k, oc, ic)), inp.new(F32, (n, ic)), s, 0, 1))


def cases_2d():
    for ta in (F32, F16):
        for kernel, data, s in (((2, 2, 1, 3), (5, 2, 3, 1), 1), ((3, 3, 9, 6), (50, 10, 6, 2), 2),
                                ((2, 3, 3, 2), (7, 6, 2, 1), 4)):
            yield Case(f"{ta!r} {kernel} {data} {s}", lambda inp, ta=ta, k=kernel, b=data, s=s: conv_transpose_2d_p0(
                inp.new(ta, k), inp.new(F32, b), s))
    yield Case("permuted", lambda inp: conv_transpose_2d_p0(
        inp.new(F32, (3, 2, 5, 4)), permute(inp.new(F32, (4, 9, 8, 2)), 2, 0, 1, 3), 2))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """The patches of dy under the kernel, one for each element of the data, times the kernel or the data."""
    a, b = t.src
    s, flat = int(t.op_params[0]), t.op == OP.CONV_TRANSPOSE_1D
    ic, n_pics = (b.ne[1], 1) if flat else b.ne[2:]
    n_taps, n_in = math.prod(a.ne) // ic, math.prod(b.ne) // (ic * n_pics)

    def patches():
        strides = (s, 0, 0, 0, 1, 0, False) if flat else (s, s, 0, 0, 1, 1, True)
        return g.reshape_3d(g.im2col(a, dy, *strides, F32), n_taps, n_in, n_pics)

    def of_kernel():
        data = g.cont(g.permute(g.reshape_3d(g.dense(b), n_in, ic, n_pics), 1, 0, 2, 3))
        return g.reshape(g.out_prod(g.reshape_2d(patches(), n_taps, n_in * n_pics),
                                    g.reshape_2d(data, ic, n_in * n_pics)), a)

    def of_data():
        d = g.mul_mat(g.reshape_2d(g.dense(g.f32(a)), n_taps, ic), patches())           # [ic, n_in, n_pics]
        return g.reshape(g.cont(g.permute(d, 1, 0, 2, 3)), b)
    return of_kernel, of_data


SPECS = (Spec(op=OP.CONV_TRANSPOSE_1D, builders=(conv_transpose_1d,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases_1d,
              flops=lambda t: 2 * math.prod(t.src[0].ne) * t.src[1].ne[0]),
         Spec(op=OP.CONV_TRANSPOSE_2D, builders=(conv_transpose_2d_p0,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases_2d,
              rebuild="conv_transpose_2d_p0",
              flops=lambda t: 2 * math.prod(t.src[0].ne) * t.src[1].ne[0] * t.src[1].ne[1] * t.src[1].ne[3]))
