"""im2col, im2col_3d and the way back; convolutions as an unfolding and a matrix product.

One row of the result holds the patch under one output pixel, channel by channel:

    kernel [KW, KH, IC, OC], data [W, H, IC, N]

        . . . . . .          output (ox, oy) sees the inputs  (ox s0 - p0 + kx d0,  oy s1 - p1 + ky d1)
        . a b c . .
        . d e f . .    ->    d[:, ox, oy, n] = | a b c d e f g h i | next channel ... |
        . g h i . .
        . . . . . .          inputs outside the picture are 0

1-D and 2-D unfold as 3-D with the missing dimensions of size one, so there is one body.  The convolutions multiply
these rows with the kernel's: they make the same nodes as ggml, with its choices of type (see conv_1d, conv_2d).
"""
import math
from collections.abc import Sequence

import numpy as np

from ggjit.ops.conv.im2col_kernels import make_fold, make_unfold
from ggjit.ops.copying.copy import cont
from ggjit.ops.copying.view import permute, reshape_2d, reshape_3d, reshape_4d
from ggjit.ops.core.builders import all_or_nothing
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import last_axis, pictures
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import BF16, F16, F32, Tensor, Type
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.ops.native.row_loops import whole

OUT = (F32, F16, BF16)


# ---------------------------------------------------------------- shape rules
def conv_size(name, n, k, s, p, d):
    """Outputs along a dimension: (n + 2 p - d (k - 1) - 1) / s + 1.  ParamError if there are none.

    The division is C's, rounded toward 0: a kernel that hangs over the padded input by less than a stride gives one.
    """
    span = n + 2 * p - d * (k - 1) - 1
    if span <= -s or k < 1:
        raise ParamError(f"{name}: a kernel of {k} with dilation {d} does not fit into {n} + 2 * {p} elements")
    return max(span, 0) // s + 1


def steps(name, **values):
    """Strides, paddings and dilations as ints: s and d from 1, p from 0."""
    return [whole(name, k, v, 0 if k.startswith("p") else 1) for k, v in values.items()]


def _unfolded(name, a, data_ne, s0, s1, p0, p1, d0, d1, is_2D):
    """(shape of the patches, op params) for kernel a over data of shape data_ne, 1-D or 2-D."""
    if is_2D:
        params = steps(name, s0=s0, s1=s1, p0=p0, p1=p1, d0=d0, d1=d1)
        require(a.ne[2] == data_ne[2], f"{name}: kernel and data {list(data_ne)} differ in channels (ne2)", a)
        ow = conv_size(name, data_ne[0], a.ne[0], params[0], params[2], params[4])
        oh = conv_size(name, data_ne[1], a.ne[1], params[1], params[3], params[5])
        return (a.ne[0] * a.ne[1] * a.ne[2], ow, oh, data_ne[3]), (*params, 1)
    s0, p0, d0 = steps(name, s0=s0, p0=p0, d0=d0)
    unused = [whole(name, n, v) for n, v in (("s1", s1), ("p1", p1), ("d1", d1))]
    require(a.ne[1] == data_ne[1], f"{name}: kernel and data {list(data_ne)} differ in channels (ne1)", a)
    require(data_ne[3] == 1, f"{name}: 1-D data have three dimensions, not {list(data_ne)}", a)
    ow = conv_size(name, data_ne[0], a.ne[0], s0, p0, d0)
    return (a.ne[0] * a.ne[1], ow, data_ne[2], 1), (s0, unused[0], p0, unused[1], d0, unused[2], 0)


# ---------------------------------------------------------------- builders
def _types(name, b, dst_type):
    require_type(name, b, (F32, F16), "data")
    if dst_type not in OUT:
        raise ParamError(f"{name}: dst_type must be one of {OUT}, got {dst_type!r}")


def im2col(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool,
           dst_type: Type | str | None):
    """Patches of b under the kernel a (only its shape counts) -> [IC KH KW, OW, OH, N]; in 1-D [IC KW, OW, N].

    2-D: a [KW, KH, IC, OC], b [W, H, IC, N];  1-D: a [KW, IC, OC], b [L, IC, N], s1, p1, d1 unused.
    b F32 or F16, any strides; dst_type F32, F16 or BF16.  op params: s0, s1, p0, p1, d0, d1, is_2D.
    Errors: ShapeError, ParamError, TypeMismatch.  Source: ggml_im2col.
    """
    _types("im2col", b, dst_type)
    shape, params = _unfolded("im2col", a, b.ne, s0, s1, p0, p1, d0, d1, is_2D)
    return a.ctx.node(OP.IM2COL, dst_type, shape, (a, b), params)


def im2col_back(a: Tensor, b: Tensor, ne: Sequence[int], s0: int, s1: int, p0: int, p1: int, d0: int, d1: int,
                is_2D: bool):
    """Gradient of im2col: patches a F32 added back into zeros of shape ne -> F32; b is the kernel (its shape counts).

    a as im2col's result; ne the shape of im2col's data; s0, s1, p0, p1, d0, d1, is_2D, op params and errors as
    `im2col`.  (The comment in ggml.h has a and b swapped.)  Source: ggml_im2col_back.
    """
    require_type("im2col_back", a, (F32,), "gradient")
    shape = [whole("im2col_back", f"ne{i}", n, 0, 2 ** 40) for i, n in enumerate(ne)]
    require(1 <= len(shape) <= 4, f"im2col_back: a shape of {len(shape)} dimensions")
    ndim, shape = len(shape), (*shape, 1, 1, 1)[:4]
    want, params = _unfolded("im2col_back", b, shape, s0, s1, p0, p1, d0, d1, is_2D)
    require(a.ne == want, f"im2col_back: the gradient must be {list(want)}", a, b)
    return a.ctx.node(OP.IM2COL_BACK, F32, shape, (a, b), params, ndim=ndim)


def im2col_3d(a: Tensor, b: Tensor, IC: int, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int,
              d2: int, dst_type: Type | str | None):
    """Patches of volumes: a [KW, KH, KD, IC OC], b [W, H, D, IC N] -> [KW KH KD IC, OW, OH, OD N].

    N is b.ne3 / IC rounded down: planes beyond the last whole volume are not read, and with fewer than IC the result
    is empty, as in ggml.  Types, dst_type too, as `im2col`.  op params: s0, s1, s2, p0, p1, p2, d0, d1, d2, IC.
    Errors: ParamError, TypeMismatch.  Source: ggml_im2col_3d.
    """
    _types("im2col_3d", b, dst_type)
    ic = whole("im2col_3d", "IC", IC, 1)
    params = steps("im2col_3d", s0=s0, s1=s1, s2=s2, p0=p0, p1=p1, p2=p2, d0=d0, d1=d1, d2=d2)
    out = [conv_size("im2col_3d", b.ne[i], a.ne[i], params[i], params[3 + i], params[6 + i]) for i in range(3)]
    shape = (a.ne[0] * a.ne[1] * a.ne[2] * ic, out[0], out[1], out[2] * (b.ne[3] // ic))
    return a.ctx.node(OP.IM2COL_3D, dst_type, shape, (a, b), (*params, ic))


# ---------------------------------------------------------------- convolutions of these
def _patch_type(a):
    """ggml's choice: F16 also for F32 kernels."""
    return F32 if a.type is BF16 else F16


@all_or_nothing
def conv_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int, dst_type: Type | str | None = F16):
    """Convolution of b [L, IC, N] with a [K, IC, OC] -> F32 [OL, OC, N]; stride s0, padding p0, dilation d0.

    d[o, oc, n] = sum over ic, k of a[k, ic, oc] b[o s0 - p0 + k d0, ic, n]; OL = (L + 2 p0 - d0 (K - 1) - 1) / s0 + 1.
    NumPy: a (OC, IC, K), b (N, IC, L) -> (N, OC, OL).  im2col and mul_mat; the patches are rounded to dst_type (ggml:
    always F16).  For N > 1 the result is ggml's: the product [OL N, OC] read as [OL, OC, N], which is a convolution
    only where N or OC is 1.  Errors: ShapeError, ParamError, TypeMismatch.  Source: ggml_conv_1d.
    """
    cols = im2col(a, b, s0, 0, p0, 0, d0, 0, False, dst_type)
    rows = reshape_2d(cols, cols.ne[0], cols.ne[2] * cols.ne[1])
    result = mul_mat(rows, reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2]))
    return reshape_3d(result, cols.ne[1], a.ne[2], cols.ne[2])


def conv_1d_ph(a: Tensor, b: Tensor, s: int, d: int, dst_type: Type | str | None = F16):
    """As `conv_1d` with stride s, dilation d and padding a.ne0 / 2: for s = 1 and odd kernels the length stays.

    a, b and dst_type as there.  Source: ggml_conv_1d_ph.
    """
    return conv_1d(a, b, s, a.ne[0] // 2, d, dst_type)


@all_or_nothing
def conv_1d_dw(a: Tensor, b: Tensor, s0: int, p0: int, d0: int, dst_type: Type | str | None = F16):
    """Depthwise: channel c of b [L, C] with a[:, :, c], a [K, 1, C] -> F32 [OL, C, 1].

    Stride s0, padding p0, dilation d0, dst_type and errors as `conv_1d`.  Source: ggml_conv_1d_dw.
    """
    cols = im2col(a, reshape_4d(b, b.ne[0], 1, b.ne[1], b.ne[2]), s0, 0, p0, 0, d0, 0, False, dst_type)
    result = mul_mat(cols, a)
    return reshape_3d(result, result.ne[0], result.ne[2], 1)


def conv_1d_dw_ph(a: Tensor, b: Tensor, s0: int, d0: int, dst_type: Type | str | None = F16):
    """As `conv_1d_dw` (a, b, stride s0, dilation d0, dst_type) with padding a.ne0 / 2.  Source: ggml_conv_1d_dw_ph."""
    return conv_1d_dw(a, b, s0, a.ne[0] // 2, d0, dst_type)


@all_or_nothing
def conv_2d(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int,
            dst_type: Type | str | None = None):
    """Convolution of b [W, H, IC, N] with a [KW, KH, IC, OC] -> F32 [OW, OH, OC, N].

    Strides s0, s1, paddings p0, p1, dilations d0, d1 along W and H; O = (I + 2 p - d (K - 1) - 1) / s + 1.  NumPy: a
    (OC, IC, KH, KW), b (N, IC, H, W) -> (N, OC, OH, OW).  im2col, mul_mat, permute, cont.  The patches are rounded to
    dst_type; by default, as in ggml, to F16, whatever a is, but F32 where a is BF16.  Errors: ShapeError, ParamError,
    TypeMismatch.  Source: ggml_conv_2d.
    """
    cols = im2col(a, b, s0, s1, p0, p1, d0, d1, True, dst_type or _patch_type(a))
    rows = reshape_2d(cols, cols.ne[0], cols.ne[3] * cols.ne[2] * cols.ne[1])
    result = mul_mat(rows, reshape_2d(a, a.ne[0] * a.ne[1] * a.ne[2], a.ne[3]))
    result = reshape_4d(result, cols.ne[1], cols.ne[2], cols.ne[3], a.ne[3])
    return cont(permute(result, 0, 1, 3, 2))


def conv_2d_sk_p0(a: Tensor, b: Tensor):
    """As `conv_2d` of a and b with the kernel's size as stride and no padding: the patches of a vision model.

    Source: ggml_conv_2d_sk_p0.
    """
    return conv_2d(a, b, a.ne[0], a.ne[1], 0, 0, 1, 1)


def conv_2d_s1_ph(a: Tensor, b: Tensor):
    """As `conv_2d` of a and b with stride 1 and half padding: for odd kernels the size stays.

    Source: ggml_conv_2d_s1_ph.
    """
    return conv_2d(a, b, 1, 1, a.ne[0] // 2, a.ne[1] // 2, 1, 1)


@all_or_nothing
def conv_2d_dw(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int):
    """Depthwise: a [KW, KH, 1, C], b [W, H, C, N] -> F32 [OW, OH, C, N]; patches F16, whatever a is.

    s0, s1, p0, p1, d0, d1 and errors as `conv_2d`.  Source: ggml_conv_2d_dw.
    """
    kernel = reshape_4d(a, a.ne[0], a.ne[1], 1, a.ne[2] * a.ne[3])
    planes = reshape_4d(b, b.ne[0], b.ne[1], 1, b.ne[2] * b.ne[3])
    cols = im2col(kernel, planes, s0, s1, p0, p1, d0, d1, True, F16)
    patches = reshape_4d(cols, cols.ne[0], cols.ne[2] * cols.ne[1], b.ne[2], b.ne[3])
    result = mul_mat(reshape_4d(kernel, a.ne[0] * a.ne[1], 1, kernel.ne[3], 1), patches)
    return reshape_4d(result, cols.ne[1], cols.ne[2], b.ne[2], b.ne[3])


@all_or_nothing
def conv_3d(a: Tensor, b: Tensor, IC: int, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int,
            d2: int, dst_type: Type | str | None = None):
    """Convolution of volumes: a [KW, KH, KD, IC OC], b [W, H, D, IC N] -> F32 [OW, OH, OD, OC N].

    IC: channels.  Strides s0, s1, s2, paddings p0, p1, p2, dilations d0, d1, d2 along W, H, D; sizes and dst_type as
    `conv_2d`.  Errors: ShapeError, ParamError, TypeMismatch.  Source: ggml_conv_3d.
    """
    cols = im2col_3d(a, b, IC, s0, s1, s2, p0, p1, p2, d0, d1, d2, dst_type or _patch_type(a))
    oc, n = a.ne[3] // IC, b.ne[3] // IC
    rows = reshape_2d(cols, cols.ne[0], cols.ne[3] * cols.ne[2] * cols.ne[1])
    result = mul_mat(rows, reshape_2d(a, a.ne[0] * a.ne[1] * a.ne[2] * IC, oc))
    depth = cols.ne[3] // max(n, 1)
    result = cont(permute(reshape_4d(result, cols.ne[1] * cols.ne[2], depth, n, oc), 0, 1, 3, 2))
    return reshape_4d(result, cols.ne[1], cols.ne[2], depth, oc * n)


# ---------------------------------------------------------------- reference
def _as_3d(t, data_shape):
    """(data shape [N, IC, D, H, W], kernel (KD, KH, KW), strides, paddings, dilations in that order)."""
    p, k = [int(x) for x in t.op_params], (t.src[0] if t.op != OP.IM2COL_BACK else t.src[1]).ne
    if t.op == OP.IM2COL_3D:
        planes, d, h, w = data_shape
        return (planes // p[9], p[9], d, h, w), (k[2], k[1], k[0]), p[2::-1], p[5:2:-1], p[8:5:-1]
    if p[6]:
        n, c, h, w = data_shape
        return (n, c, 1, h, w), (1, k[1], k[0]), (1, p[1], p[0]), (0, p[3], p[2]), (1, p[5], p[4])
    _, n, c, w = data_shape
    return (n, c, 1, 1, w), (1, 1, k[0]), (1, 1, p[0]), (0, 0, p[2]), (1, 1, p[4])


def under_taps(b, k, s, p, d):
    """(tap, the inputs under it for every output) for each tap of a kernel of shape k over b [N, C, D, H, W].

    Triples in the order of the axes; inputs outside the picture are 0.
    """
    axes = list(zip(b.shape[2:], k, s, p, d, strict=True))
    reach = [(conv_size("reference", *axis) - 1) * axis[2] + 1 for axis in axes]    # first to last output
    pads = [(p, max(p, n + d * (k - 1) - size - p)) for n, (size, k, s, p, d) in zip(reach, axes, strict=True)]
    b = np.pad(b, ((0, 0), (0, 0), *pads))
    for tap in np.ndindex(*k):
        z, y, x = (slice(i * d, i * d + n, s) for i, n, (_, _, s, _, d) in zip(tap, reach, axes, strict=True))
        yield tap, b[:, :, z, y, x]


def reference(t, kernel, b):
    shape, k, s, p, d = _as_3d(t, b.shape)
    taps = under_taps(b[:shape[0] * shape[1]].reshape(shape) if t.op == OP.IM2COL_3D else b.reshape(shape), k, s, p, d)
    patches = np.stack([inputs for _, inputs in taps], -1)      # [N, IC, OD, OH, OW, taps]
    return np.moveaxis(patches, 1, 4).reshape(tuple(reversed(t.ne)))


def reference_back(t, grad, kernel):
    """The transpose of the unfolding, found by unfolding the numbers of the elements."""
    shape = tuple(reversed(t.ne))
    numbers = np.arange(1, np.prod(shape) + 1).reshape(shape)
    out = np.zeros(numbers.size + 1)
    np.add.at(out, _numbers(t, kernel, numbers).reshape(-1), grad.reshape(-1))
    return out[1:].reshape(shape)


def _numbers(t, kernel, numbers):
    class Forward:
        op, op_params, src, ne = t.op, t.op_params, t.src, t.src[0].ne
    return reference(Forward, kernel, numbers)


# ---------------------------------------------------------------- kernels
def kernel(t, n_threads):
    tb, td = t.src[1].type, t.type
    dims = 3 if t.op == OP.IM2COL_3D else 2 if t.op_params[6] else 1
    return Kernel(f"im2col-{dims}d-{tb.name}-{td.name}", lambda: make_unfold(dims, tb, td), cost=0.4 * n_elements(t))


def kernel_back(t, n_threads):
    return Kernel("im2col_back", make_fold, cost=1.5 * n_elements(t.src[0]))


# ---------------------------------------------------------------- cases
def forward_cases():
    limit = {F32: 1e-7, F16: 2.0 ** -22, BF16: 2.0 ** -16}
    pairs = ((F32, F32), (F32, F16), (F16, F16), (F16, F32), (F32, BF16))
    grid = [(F32, F32, *q) for q in ((1, 1, 0, 0, 1, 1), (3, 1, 3, 0, 1, 3), (1, 3, 0, 3, 3, 1), (3, 3, 3, 3, 3, 3))]
    for tb, td, *q in (*grid, *((tb, td, 2, 1, 1, 2, 1, 2) for tb, td in pairs)):
        for kernel, data in (((3, 3, 3, 2), (20, 20, 3, 2)), ((5, 1, 2, 3), (33, 7, 2, 1)), ((3, 4, 2), (50, 4, 2)),
                             ((20, 1, 3), (70, 1, 1))):
            yield Case(f"{tb!r} {td!r} {q} {kernel}", lambda inp, q=q, k=kernel, b=data, tb=tb, td=td: im2col(
                inp.new(F16, k), inp.new(tb, b), *q, len(k) == 4, td), limit[td])
    yield Case("padding beyond the data", lambda inp: im2col(
        inp.new(F32, (2, 2, 1, 1)), inp.new(F32, (3, 2, 1, 1)), 1, 1, 6, 5, 1, 1, True, F32))
    yield Case("a kernel larger than the padded data", lambda inp: im2col(
        inp.new(F32, (2, 3, 2, 1)), inp.new(F32, (5, 4, 2, 2)), 1, 5, 1, 0, 1, 3, True, F32))
    yield Case("permuted", lambda inp: im2col(
        inp.new(F32, (3, 3, 2, 2)), permute(inp.new(F32, (2, 9, 8, 2)), 2, 0, 1, 3), 1, 1, 1, 1, 1, 1, True, F32))


def back_cases():
    for kernel, data, q, is_2d in (
            ((3, 3, 3, 2), (20, 17, 3, 2), (1, 1, 1, 1, 1, 1), True),
            ((3, 2, 3, 2), (20, 17, 3, 2), (3, 2, 3, 1, 3, 2), True),
            ((3, 4, 2), (50, 4, 2), (2, 0, 3, 0, 2, 0), False), ((1, 1, 1), (7, 1, 1), (1, 0, 0, 0, 1, 0), False)):
        def make(inp, kernel=kernel, data=data, q=q, is_2d=is_2d):
            k = inp.new(F16, kernel)
            shape, _ = _unfolded("im2col_back", k, (*data, 1)[:4], *q, is_2d)
            return im2col_back(inp.new(F32, shape), k, data, *q, is_2d)
        yield Case(f"{kernel} {data} {q}", make)


def cases_3d():
    for ic in (1, 3):
        for q in ((1, 1, 1, 0, 0, 0, 1, 1, 1), (3, 1, 2, 3, 0, 1, 1, 3, 2), (1, 2, 3, 0, 3, 2, 2, 1, 1)):
            for tb, td in ((F32, F32), (F16, F16)):
                yield Case(f"{ic} {q} {tb!r}", lambda inp, ic=ic, q=q, tb=tb, td=td: im2col_3d(
                    inp.new(F16, (3, 2, 3, ic * 2)), inp.new(tb, (20, 11, 10, ic * 2)), ic, *q, td), 2.0 ** -22)
    for planes in (2, 5):
        yield Case(f"{planes} planes of 3", lambda inp, planes=planes: im2col_3d(
            inp.new(F16, (3, 2, 1, 4)), inp.new(F32, (6, 5, 2, planes)), 3, *(1,) * 9, F32))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    kernel, data = t.src
    p = [int(x) for x in t.op_params]
    return None, lambda: g.im2col_back(dy, kernel, data.ne, *p[:6], bool(p[6]))


def gradient_back(g, t, dy):
    p = [int(x) for x in t.op_params]
    return lambda: g.im2col(t.src[1], dy, *p[:6], bool(p[6]), F32), None


def gradient_3d(g, t, dy):
    """Every patch element is added to the element it was read from; element 0 of the numbers is outside."""
    kernel, data = t.src

    def of_data():
        shape = tuple(reversed(data.ne))
        source = reference(t, np.zeros(tuple(reversed(kernel.ne))), np.arange(1, math.prod(shape) + 1).reshape(shape))
        return g.scatter(dy, source - 1, data.ne)
    return None, of_data


# ---------------------------------------------------------------- rows
def _pictures_back(t):
    if last_axis(t) == 3 and t.src[0].ne[3] == t.ne[3]:
        yield 3, [3, None]


SPECS = (
    Spec(op=OP.IM2COL, builders=(im2col, conv_1d, conv_1d_ph, conv_1d_dw, conv_1d_dw_ph, conv_2d, conv_2d_sk_p0,
                                 conv_2d_s1_ph, conv_2d_dw), reference=reference, kernel=kernel,
         gradient=gradient, rows=pictures, cases=forward_cases,
         rebuild=lambda n: n.call("im2col", *n.src, *n.i[:6], bool(n.i[6]), n.type)),
    Spec(op=OP.IM2COL_BACK, builders=(im2col_back,), reference=reference_back, kernel=kernel_back,
         gradient=gradient_back, rows=_pictures_back, cases=back_cases,
         rebuild=lambda n: n.call("im2col_back", *n.src, n.ne, *n.i[:6], bool(n.i[6]))),
    Spec(op=OP.IM2COL_3D, builders=(im2col_3d, conv_3d), reference=reference, kernel=kernel,
         gradient=gradient_3d, cases=cases_3d,
         rebuild=lambda n: n.call("im2col_3d", *n.src, n.i[9], *n.i[:9], n.type)))
