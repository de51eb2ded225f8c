"""upscale, interpolate: pictures [W, H, ...] resampled to another size, in either direction.

Position of output i in the input, with factor s = n_out / n_in (pixel centres, or corners onto corners):

    half-pixel       (i + 0.5) / s - 0.5         | x x | x x |   centres of the outer pixels keep their distance
    align corners    i / s, s = (n_out - 1) / (n_in - 1)         the outer centres coincide

    nearest (0)      the pixel i / s, rounded down
    bilinear (1)     2 taps; with ANTIALIAS a triangle of width max(1, 1 / s) on either side
    bicubic (2)      4 taps, Keys' kernel with a = -0.75

All modes are separable: per axis a list of (input index, weight).  A row of outputs is the weighted sum of whole input
rows, then sums of a few elements of that (ggml computes every output from all its taps); the nearest is copied.
Positions are formed in float32, as in ggml: which pixel is nearest depends on it.  Dimensions 2 and 3 always take the
nearest.
"""
import math

import numpy as np
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, ld_i32, st_f32, st_i32
from ggjit.ops.native.node import DST, SRC0, chunk_of_lines, n_rows, nb, ne, row_addr, row_index, work
from ggjit.ops.native.row_affinity import affinity_chunk, affinity_next
from ggjit.ops.native.row_loops import param, whole
from ggjit.ops.native.simd import B, W, fma, fmul, ldf, ldf_part, splat, stf, stf_part
from ggjit.ops.types.shared.moves import move_bytes

NEAREST, BILINEAR, BICUBIC = range(3)
ALIGN_CORNERS, ANTIALIAS = 1 << 8, 1 << 9
f32 = types.float32


# ---------------------------------------------------------------- builders
def interpolate(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int):
    """a resampled to [ne0, ne1, ne2, ne3]; F32, any strides.

    mode: 0 nearest, 1 bilinear, 2 bicubic (a = -0.75), plus 0x100 to align corners (else pixel centres), plus 0x200
    (bilinear only) against aliasing.  op params: mode.  Errors: TypeMismatch, ParamError, ShapeError for empty sources.
    Source: ggml_interpolate.
    """
    require_type("interpolate", a, (F32,))
    mode = whole("interpolate", "mode", mode)
    known = mode & 0xFF in (NEAREST, BILINEAR, BICUBIC) and mode < 1 << 10
    if not known or (mode & ANTIALIAS and mode & 0xFF != BILINEAR):
        raise ParamError(f"interpolate: mode must be 0, 1 or 2 (+ 0x100 to align corners), or 0x201, 0x301; got "
                         f"{mode:#x}")
    size = [whole("interpolate", f"ne{i}", n, 0, 2 ** 40) for i, n in enumerate((ne0, ne1, ne2, ne3))]
    require(min(a.ne) > 0 or min(size) == 0, "interpolate: the source is empty", a)
    return a.ctx.node(OP.UPSCALE, F32, size, (a,), (mode,))


def upscale(a: Tensor, scale_factor: int, mode: int):
    """a enlarged scale_factor times along ne0 and ne1; mode and errors as `interpolate`.  Source: ggml_upscale."""
    k = whole("upscale", "scale_factor", scale_factor, 2)
    return interpolate(a, a.ne[0] * k, a.ne[1] * k, a.ne[2], a.ne[3], mode)


def upscale_ext(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int):
    """As `interpolate` (a, ne0, ne1, ne2, ne3, mode): ggml's older name.  Source: ggml_upscale_ext."""
    return interpolate(a, ne0, ne1, ne2, ne3, mode)


# ---------------------------------------------------------------- reference
def _position(i, n_in, n_out, mode):
    """(factor, offset of pixel centres), float32."""
    if mode & ALIGN_CORNERS:
        s = (n_out - 1) / np.float32(n_in - 1) if n_in > 1 and n_out > 1 else np.float32(n_out) / np.float32(n_in)
        return np.float32(s), np.float32(0)
    return np.float32(n_out) / np.float32(n_in), np.float32(0.5)


def _keys(x, a=-0.75):
    x = abs(x)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _weights(n_in, n_out, mode):
    """Matrix [n_out, n_in]."""
    m = np.zeros((n_out, n_in))
    for i in range(n_out):
        s, half = _position(i, n_in, n_out, mode)
        if mode & 0xFF == NEAREST:
            m[i, min(int(np.float32(i) / s), n_in - 1)] = 1
            continue
        x = (np.float32(i) + half) / s
        if mode & ANTIALIAS:
            support = max(np.float32(1), np.float32(1) / s)
            taps = np.arange(max(int(x - support + half), 0), min(int(x + support + half), n_in))
            w = np.maximum(0, 1 - np.abs((taps - float(x) + float(half)) / float(support)))
            m[i, taps] = w / w.sum() if w.sum() > 0 else 0
            continue
        x = x - half
        x0 = int(np.floor(x))
        if mode & 0xFF == BILINEAR:
            f = min(max(float(x) - min(max(x0, 0), n_in - 1), 0.0), 1.0)
            taps = ((x0, 1 - f), (x0 + 1, f))
        else:
            taps = [(x0 + k, _keys(float(x) - x0 - k)) for k in (-1, 0, 1, 2)]
        for j, w in taps:
            m[i, min(max(j, 0), n_in - 1)] += w
    return m


def reference(t, a):
    mode, source = int(t.op_params[0]), t.src[0].ne
    far = [[min(int(np.float32(i) / _position(i, source[k], t.ne[k], mode & ~ALIGN_CORNERS if k > 1 else mode)[0]),
                source[k] - 1) for i in range(t.ne[k])] for k in (2, 3)]
    a = a[far[1]][:, far[0]]
    return _weights(source[1], t.ne[1], mode) @ a @ _weights(source[0], t.ne[0], mode).T


# ---------------------------------------------------------------- kernel
@inline
def _factor(node, k):
    n_in, n_out = ne(node + SRC0, k), ne(node + DST, k)
    if param(node, 0) & ALIGN_CORNERS and k < 2 and n_in > 1 and n_out > 1:
        return f32(n_out - 1) / f32(n_in - 1)
    return f32(n_out) / f32(n_in)


@inline
def _nearest(node, k, i):
    return min(types.int64(f32(i) / _factor(node, k)), ne(node + SRC0, k) - 1)


@inline
def _tap(at, j, n, w):
    """One entry of a table of taps: index (clamped) and weight."""
    st_i32(at, types.int32(max(0, min(j, n - 1))))
    st_f32(at + 4, w)


@inline
def _cubic(x):
    """Keys' kernel for 0 <= x <= 1 and, by its outer branch, for 1 < x <= 2."""
    a = f32(-0.75)
    if x <= f32(1.0):
        return ((a + f32(2.0)) * x - (a + f32(3.0))) * x * x + f32(1.0)
    return ((a * x - f32(5.0) * a) * x + f32(8.0) * a) * x - f32(4.0) * a


def _span(kind, antialias):
    """span(n_in, n_out): most taps of an output."""
    if antialias:
        return lambda n_in, n_out: 2 * ((n_in + max(n_out - 1, 1) - 1) // max(n_out - 1, 1)) + 5
    most = (1, 2, 4)[kind]
    return lambda n_in, n_out: most


@inline
def _add_row(to, x, step, n, w, first):
    """to = w x, or to += w x."""
    if step != 4:
        for i in range(n):
            st_f32(to + 4 * i, ld_f32(x + i * step) * w + (f32(0.0) if first else ld_f32(to + 4 * i)))
        return
    i, v = 0, splat(w)
    while i + W <= n:
        stf(to + 4 * i, fmul(ldf(x + 4 * i), v) if first else fma(ldf(x + 4 * i), v, ldf(to + 4 * i)))
        i += W
    if i < n:
        y, m = ldf_part(x + 4 * i, n - i), n - i
        stf_part(to + 4 * i, fmul(y, v) if first else fma(y, v, ldf_part(to + 4 * i, m)), m)


def _make_taps(kind, antialias):
    @inline
    def taps_of(node, k, i, at):
        """Writes the taps of output i along dimension k (0 or 1) to `at`; returns their number."""
        n, s = ne(node + SRC0, k), _factor(node, k)
        half = f32(0.0) if param(node, 0) & ALIGN_CORNERS else f32(0.5)
        if kind == NEAREST:
            _tap(at, _nearest(node, k, i), n, f32(1.0))
            return 1
        x = (f32(i) + half) / s
        if antialias:
            support = max(f32(1.0), f32(1.0) / s)
            first, end = max(types.int64(x - support + half), 0), min(types.int64(x + support + half), n)
            total = f32(0.0)
            for j in range(first, end):
                w = max(f32(1.0) - abs((f32(j) - x + half) / support), f32(0.0))
                total += w
                _tap(at + 8 * (j - first), j, n, w)
            for j in range(max(end - first, 0)):
                st_f32(at + 8 * j + 4, ld_f32(at + 8 * j + 4) / total if total > 0 else f32(0.0))
            return max(end - first, 0)
        x -= half
        x0 = types.int64(math.floor(x))
        if kind == BILINEAR:
            f = min(max(x - f32(max(0, min(x0, n - 1))), f32(0.0)), f32(1.0))
            _tap(at, x0, n, f32(1.0) - f)
            _tap(at + 8, x0 + 1, n, f)
            return 2
        f = x - f32(x0)
        _tap(at, x0 - 1, n, _cubic(f + f32(1.0)))
        _tap(at + 8, x0, n, _cubic(f))
        _tap(at + 16, x0 + 1, n, _cubic(f32(1.0) - f))
        _tap(at + 24, x0 + 2, n, _cubic(f32(2.0) - f))
        return 4
    return taps_of


def _make(kind, antialias):
    span, taps_of = inline(_span(kind, antialias)), _make_taps(kind, antialias)

    def kernel(node, ith, nth, sync):
        a, d = node + SRC0, node + DST
        n0, m0, rows = ne(d, 0), ne(a, 0), n_rows(d)
        span0, span1 = span(ne(a, 0), n0), span(ne(a, 1), ne(d, 1))
        scratch_nbytes = 8 * (n0 * (span0 + 1) + span1) + 4 * m0 + B
        table = work(node) + ith * scratch_nbytes
        counts = table + 8 * n0 * span0
        ytaps, mixed = counts + 8 * n0, counts + 8 * (n0 + span1)
        ready = False
        chunk = chunk_of_lines(affinity_chunk(rows, nth), nb(d, 1), rows, nth, n0)
        while True:
            start = affinity_next(node, ith, nth, sync, chunk, rows)
            if start >= rows:
                return OK
            if not ready:                                       # a thread that gets no rows needs no table
                for i in range(n0):
                    st_i32(counts + 8 * i, types.int32(taps_of(node, 0, i, table + 8 * span0 * i)))
                ready = True
            last = 0
            for r in range(start, min(rows, start + chunk)):
                i1, i2, i3 = row_index(d, r)
                j2, j3, to = _nearest(node, 2, i2), _nearest(node, 3, i3), row_addr(d, i1, i2, i3)
                if kind == NEAREST:
                    x, step = row_addr(a, _nearest(node, 1, i1), j2, j3), nb(a, 0)
                    if x == last:
                        move_bytes(to, to - nb(d, 1), 4 * n0)
                        continue
                    for i in range(n0):
                        st_i32(to + 4 * i, ld_i32(x + step * types.int64(ld_i32(table + 8 * i))))
                    last = x
                    continue
                for k in range(taps_of(node, 1, i1, ytaps)):
                    x = row_addr(a, types.int64(ld_i32(ytaps + 8 * k)), j2, j3)
                    _add_row(mixed, x, nb(a, 0), m0, ld_f32(ytaps + 8 * k + 4), k == 0)
                for i in range(n0):
                    at, y = table + 8 * span0 * i, f32(0.0)
                    for k in range(ld_i32(counts + 8 * i)):
                        y += ld_f32(mixed + 4 * types.int64(ld_i32(at + 8 * k))) * ld_f32(at + 8 * k + 4)
                    st_f32(to + 4 * i, y)
    return kernel


def kernel(t, n_threads):
    mode = int(t.op_params[0])
    kind, antialias = mode & 0xFF, bool(mode & ANTIALIAS)
    spans = [_span(kind, antialias)(t.src[0].ne[k], t.ne[k]) for k in (0, 1)]
    scratch_nbytes = 8 * (t.ne[0] * (spans[0] + 1) + spans[1]) + 4 * t.src[0].ne[0] + B
    return Kernel(f"upscale-{kind}" + "-antialias" * antialias, lambda: _make(kind, antialias),
                  cost=n_elements(t) * (1.0 + spans[0]), work_nbytes=n_threads * scratch_nbytes)


# ---------------------------------------------------------------- cases
def cases():
    modes = (0, 1, 2, 0x100, 0x101, 0x102, 0x201)
    for mode in modes:
        if mode < 3:
            yield Case(f"upscale {mode}", lambda inp, m=mode: upscale(inp.new(F32, (33, 12, 3, 2)), 2, m))
        for shape, to in (((2, 5, 7, 1), (5, 8, 11, 2)), ((5, 7, 2, 3), (2, 4, 1, 3)), ((40, 9, 1, 2), (33, 1, 2, 2)),
                          ((1, 4, 1, 1), (17, 33, 1, 1)), ((100, 60, 1, 1), (7, 9, 1, 1))):
            yield Case(f"{mode:#x} {shape} {to}", lambda inp, s=shape, to=to, m=mode: interpolate(
                inp.new(F32, s), *to, m))
        yield Case(f"{mode:#x} permuted", lambda inp, m=mode: interpolate(
            permute(inp.new(F32, (6, 40, 2, 2)), 1, 2, 0, 3), 7, 9, 30, 2, m))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """In each dimension upscaling is a product with a matrix; its gradient is the product with the transpose."""
    a, mode = t.src[0], int(t.op_params[0])

    def of_a():
        d = dy
        for i, (n_in, n_out) in enumerate(zip(a.ne, t.ne, strict=True)):
            w = _weights(n_in, n_out, mode if i < 2 else NEAREST)                       # [n_out, n_in]
            if n_in == n_out and (w == np.eye(n_in)).all():
                continue
            axes = [i if k == 0 else 0 if k == i else k for k in range(4)]              # dimension i first
            d = g.mul_mat(g.constant(np.ascontiguousarray(w.T, np.float32)), g.cont(g.permute(d, *axes)) if i else d)
            d = g.cont(g.permute(d, *axes)) if i else d
        return d
    return (of_a,)


SPECS = (Spec(op=OP.UPSCALE, builders=(interpolate, upscale, upscale_ext), reference=reference, kernel=kernel,
              gradient=gradient, rows=along(2), cases=cases,
              rebuild=lambda n: n.call("interpolate", *n.src, *n.ne, n.i[0])),)
