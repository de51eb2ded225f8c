"""pool_1d, pool_2d, pool_2d_back: maximum or average over sliding windows.

    window of output x: inputs  x s - p  ...  x s - p + k - 1;  those outside the input do not take part

        p = 1, k = 3, s = 2       . | a b c d e | .
        output 0                  [.  a b]
        output 1                       [b c d]
        output 2                           [d e  .]

What an average divides by differs, as in ggml: pool_1d by the number of taps inside the input, pool_2d and its gradient
by k0 * k1 always.  A maximum over no taps is -FLT_MAX; a NaN counts only as the last tap of a window, since max(m, v)
is m if m > v else v, as in ggml.  Forward: a row of outputs at a time, tap by tap where the inputs of a tap lie side by
side (s = 1), else output by output; 1-D is 2-D with a window one row high.
"""
import numpy as np
from numba import types
from numba.extending import intrinsic

from ggjit.ops.copying.view import permute
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import describe, n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, SRC1, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows, param, whole
from ggjit.ops.native.simd import W, fadd, fmul, ldf, ldf_part, opaque, shuffle_ir, splat, stf, stf_part, vmax
from ggjit.ops.types.shared.rows import ROW

MAX, AVG = 0, 1
LOWEST = np.float32(np.finfo(np.float32).min)
f32 = types.float32


# ---------------------------------------------------------------- builders
def _size(name, t, n, k, s, p):
    """Outputs along a dimension of n inputs; p may be a fraction in 2-D (ggml computes the size with it)."""
    if n + 2 * p < k:
        raise ParamError(f"{name}: a window of {k} does not fit into {n} + 2 * {p} elements of {describe(t)}")
    return int((n + 2 * p - k) / s) + 1


def _padding(name, p):
    if not 0 <= p < 2 ** 24:
        raise ParamError(f"{name}: padding must be from 0 to 2^24, got {p!r}")
    return p


def pool_1d(a: Tensor, op: int, k0: int, s0: int, p0: int):
    """Windows of k0, every s0, with p0 outside at both ends, along ne0: [(ne0 + 2 p0 - k0) / s0 + 1, ne1, ne2, ne3].

    op: 0 maximum, 1 average of the taps inside (`pool_2d` divides by all of them: ggml's two differ).  a F32 or F16,
    result F32.  op params: op, k0, s0, p0.  Errors: ParamError, TypeMismatch.  Source: ggml_pool_1d.
    """
    require_type("pool_1d", a, (F32, F16))
    op, k0, s0 = whole("pool_1d", "op", op, 0, 1), whole("pool_1d", "k0", k0, 1), whole("pool_1d", "s0", s0, 1)
    p0 = whole("pool_1d", "p0", p0)
    return a.ctx.node(OP.POOL_1D, F32, (_size("pool_1d", a, a.ne[0], k0, s0, p0), *a.ne[1:]), (a,), (op, k0, s0, p0))


def _window(name, op, k0, k1, s0, s1, p0, p1):
    ints = [whole(name, label, v, low) for label, v, low in
            (("k0", k0, 1), ("k1", k1, 1), ("s0", s0, 1), ("s1", s1, 1))]
    return (whole(name, "op", op, 0, 1), *ints, int(_padding(name, p0)), int(_padding(name, p1)))


def pool_2d(a: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: int, p1: int):
    """Windows of k0 x k1, steps s0, s1, padding p0, p1 along ne0, ne1; averages divide by k0 k1 even at the edges.

    op: 0 maximum, 1 average.  a F32 or F16, result F32.  The padding is a float, as in ggml: its fraction counts for
    the size of the result, (ne + 2 p - k) / s + 1 rounded down, and nowhere else.  op params: op, k0, k1, s0, s1,
    p0, p1 (whole).  Errors: ParamError, TypeMismatch.  Source: ggml_pool_2d.
    """
    require_type("pool_2d", a, (F32, F16))
    params = _window("pool_2d", op, k0, k1, s0, s1, p0, p1)
    n0, n1 = _size("pool_2d", a, a.ne[0], k0, s0, p0), _size("pool_2d", a, a.ne[1], k1, s1, p1)
    return a.ctx.node(OP.POOL_2D, F32, (n0, n1, *a.ne[2:]), (a,), params)


def pool_2d_back(a: Tensor, af: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: int, p1: int):
    """Gradient of `pool_2d`: a F32 that of its result, af F32 or F16 its input -> F32, shape of af.

    A maximum passes its gradient to its first tap (rows first), an average 1 / (k0 k1) of it to every tap inside.  op,
    k0, k1, s0, s1, p0, p1 and op params as there.  Errors: ShapeError, ParamError, TypeMismatch.  Source:
    ggml_pool_2d_back.
    """
    require_type("pool_2d_back", a, (F32,), "gradient")
    require_type("pool_2d_back", af, (F32, F16), "input")
    params = _window("pool_2d_back", op, k0, k1, s0, s1, p0, p1)
    want = (_size("pool_2d_back", af, af.ne[0], k0, s0, p0), _size("pool_2d_back", af, af.ne[1], k1, s1, p1),
            *af.ne[2:])
    require(a.ne == want, f"pool_2d_back: the gradient must be {list(want)}", a, af)
    return a.ctx.node(OP.POOL_2D_BACK, F32, af.ne, (a, af), params)


# ---------------------------------------------------------------- reference
def _parameters(t):
    p = [int(x) for x in t.op_params[:7]]
    return (p[0], p[1], 1, p[2], 1, p[3], 0) if t.op == OP.POOL_1D else p


def _patches(t, a):
    """{(output y, x): (slices of the input)}"""
    _, k0, k1, s0, s1, p0, p1 = _parameters(t)
    n1, n0 = (a.shape[2], a.shape[3])
    out = (t.src[0] if t.op == OP.POOL_2D_BACK else t).ne
    for y in range(out[1]):
        for x in range(out[0]):
            y0, x0 = y * s1 - p1, x * s0 - p0
            yield (y, x), (slice(max(y0, 0), max(0, min(n1, y0 + k1))), slice(max(x0, 0), max(0, min(n0, x0 + k0))))


def reference(t, a):
    out, (op, k0, k1, *_) = np.zeros(tuple(reversed(t.ne))), _parameters(t)
    for (y, x), (rows, cols) in _patches(t, a):
        part = a[:, :, rows, cols]
        if op == MAX:
            out[:, :, y, x] = part.max((2, 3)) if part.size else LOWEST
        else:
            taps = max(part.shape[3], 1) if t.op == OP.POOL_1D else k0 * k1
            out[:, :, y, x] = part.sum((2, 3)) / taps
    return out


def reference_back(t, grad, a):
    out, (op, k0, k1, *_) = np.zeros(a.shape), _parameters(t)
    for (y, x), (rows, cols) in _patches(t, a):
        part = a[:, :, rows, cols]
        if op == AVG:
            out[:, :, rows, cols] += grad[:, :, y, x][..., None, None] / (k0 * k1)
        elif part.size:
            for i3, i2 in np.ndindex(a.shape[:2]):
                dy, dx = divmod(int(part[i3, i2].argmax()), part.shape[3])
                out[i3, i2, rows.start + dy, cols.start + dx] += grad[i3, i2, y, x]
    return out


# ---------------------------------------------------------------- kernels
_EVEN_THEN_ODD = [*range(0, W, 2), *range(W + 1, 2 * W, 2)]


@intrinsic
def _every_second(typingctx, low, high):
    """Lanes 0, 2 ... of low and 1, 3 ... of high."""
    def codegen(context, b, sig, args):
        return shuffle_ir(b, *args, _EVEN_THEN_ODD)
    return low(low, high), codegen


@inline
def _scale(to, n, factor):
    i, v = 0, splat(factor)
    while i + W <= n:
        stf(to + 4 * i, fmul(ldf(to + 4 * i), v))
        i += W
    if i < n:
        stf_part(to + 4 * i, fmul(ldf_part(to + 4 * i, n - i), v), n - i)


def _make(ta, flat):
    """flat: pool_1d."""
    get, load, size = ROW[ta].get, ROW[ta].load, ta.nbytes

    @inline
    def pooled(x, nb0, nb1, n_x, n_y, op):
        """max or sum of n_x by n_y inputs from address x on."""
        total = LOWEST if op == MAX else f32(0.0)
        for _ in range(n_y):
            at = x
            for _ in range(n_x):
                v = get(at)
                total = (total if total > v else v) if op == MAX else v + total
                at += nb0
            x += nb1
        return total

    @inline
    def pooled_lanes(x, nb1, n_x, n_y, s0, op):
        """The same for W outputs, whose windows begin s0 = 1 or 2 inputs after each other."""
        total = splat(LOWEST if op == MAX else f32(0.0))
        for _ in range(n_y):
            for k in range(n_x):
                at = x + k * size
                # of the second vector only inputs of windows are read
                v = load(at) if s0 == 1 else _every_second(load(at), load(opaque(at + (W - 1) * size)))
                total = vmax(total, v) if op == MAX else fadd(v, total)
            x += nb1
        return total

    @inline
    def one(node, r):
        a, d = node + SRC0, node + DST
        i1, i2, i3 = row_index(d, r)
        op, k0 = param(node, 0), param(node, 1)
        k1, s0, s1 = (1, param(node, 2), 1) if flat else (param(node, 2), param(node, 3), param(node, 4))
        p0, p1 = (param(node, 3), 0) if flat else (param(node, 5), param(node, 6))
        to, n, m, step = row_addr(d, i1, i2, i3), ne(d, 0), ne(a, 0), nb(a, 0)
        y0, y1 = max(0, i1 * s1 - p1), min(ne(a, 1), i1 * s1 - p1 + k1)
        x, nb1 = row_addr(a, y0, i2, i3), nb(a, 1)
        # outputs from `first` to `end` have all taps inside
        first = end = n
        if step == size and s0 <= 2:
            first = (p0 + s0 - 1) // s0
            end = min(n, (m + p0 - k0) // s0 + 1)
        i = 0
        while i < n:
            if first <= i < end and end - first >= W:
                i = min(i, end - W)                     # the last vector may compute some outputs a second time
                stf(to + 4 * i, pooled_lanes(x + (i * s0 - p0) * size, nb1, k0, y1 - y0, s0, op))
                i += W
            else:
                x0 = max(0, i * s0 - p0)
                n_x = min(m, i * s0 - p0 + k0) - x0
                st_f32(to + 4 * i, pooled(x + x0 * step, step, nb1, n_x, y1 - y0, op))
                i += 1
        if op == AVG and flat:
            for i in range(n):
                taps = min(m, i * s0 - p0 + k0) - max(0, i * s0 - p0)
                st_f32(to + 4 * i, ld_f32(to + 4 * i) / f32(taps) if taps > 0 else f32(0.0))
        elif op == AVG:
            _scale(to, n, f32(1.0) / f32(k0 * k1))
        return OK
    return over_rows(one)


@inline
def _planes(node):
    return ne(node + DST, 2) * ne(node + DST, 3)


def _make_back(ta):
    get = ROW[ta].get

    @inline
    def first_of_largest(x, nb0, nb1, n_x, n_y, to, n0):
        """Where in the gradient's plane, from address `to` on, the first of the largest inputs is; 0: nowhere."""
        best, where = LOWEST, types.int64(0)
        for _ in range(n_y):
            at = x
            for i in range(n_x):
                v = get(at)
                larger = not v <= best          # True for a NaN too: the next input replaces it
                best, where = v if larger else best, to + 4 * i if larger else where
                at += nb0
            x += nb1
            to += 4 * n0
        return where

    @inline
    def one(node, r):
        g, a, d = node + SRC0, node + SRC1, node + DST
        i2, i3 = r % ne(d, 2), r // ne(d, 2)
        op, k0, k1, s0, s1 = param(node, 0), param(node, 1), param(node, 2), param(node, 3), param(node, 4)
        p0, p1, to, plane = param(node, 5), param(node, 6), row_addr(d, 0, i2, i3), row_addr(a, 0, i2, i3)
        n0, n1, n_x, nb0, nb1 = ne(d, 0), ne(d, 1), ne(g, 0), nb(a, 0), nb(a, 1)
        zero_bytes(to, 4 * n0 * n1)
        for oy in range(ne(g, 1)):
            y0, y1, grads = max(0, oy * s1 - p1), min(n1, oy * s1 - p1 + k1), row_addr(g, oy, i2, i3)
            for ox in range(n_x):
                x0, x1 = max(0, ox * s0 - p0), min(n0, ox * s0 - p0 + k0)
                value, first = ld_f32(grads + ox * nb(g, 0)), to + 4 * (y0 * n0 + x0)
                if op == MAX:
                    where = first_of_largest(plane + x0 * nb0 + y0 * nb1, nb0, nb1, x1 - x0, y1 - y0, first, n0)
                    if where:
                        st_f32(where, ld_f32(where) + value)
                    continue
                value = value / f32(k0 * k1)
                for _ in range(y1 - y0):
                    for x in range(x1 - x0):
                        st_f32(first + 4 * x, ld_f32(first + 4 * x) + value)
                    first += 4 * n0
        return OK
    return over_rows(one, _planes)


def kernel(t, n_threads):
    ta, flat = t.src[0].type, t.op == OP.POOL_1D
    taps = _parameters(t)[1] * _parameters(t)[2]
    return Kernel(f"pool_{1 if flat else 2}d-{ta.name}", lambda: _make(ta, flat),
                  cost=n_elements(t) * (1.0 + 0.3 * taps))


def kernel_back(t, n_threads):
    ta, taps = t.src[1].type, _parameters(t)[1] * _parameters(t)[2]
    return Kernel(f"pool_2d_back-{ta.name}", lambda: _make_back(ta), cost=n_elements(t.src[0]) * (2.0 + taps))


# ---------------------------------------------------------------- cases
def cases_1d():
    for ty in (F32, F16):
        for op in (MAX, AVG):
            for k, s, p in ((1, 1, 0), (2, 1, 1), (3, 2, 0), (3, 3, 3), (1, 2, 3), (2, 3, 2)):
                for shape in ((12, 3, 2, 1), (13, 1, 3, 2), (70, 3, 1, 1)):
                    yield Case(f"{ty!r} {op} {k} {s} {p} {shape}", lambda inp, ty=ty, op=op, q=(k, s, p), n=shape:
                               pool_1d(inp.new(ty, n), op, *q))


def cases_2d():
    for op in (MAX, AVG):
        for q in ((1, 1, 1, 1, 0, 0), (3, 1, 2, 1, 0, 1), (1, 3, 1, 2, 1, 1), (3, 3, 2, 2, 1, 1),
                  (2, 3, 1, 1, 1.5, 0.5)):
            for ty, shape in ((F32, (39, 10, 2, 1)), (F16, (37, 9, 2, 2))):
                yield Case(f"{ty!r} {op} {q} {shape}", lambda inp, ty=ty, op=op, q=q, n=shape:
                           pool_2d(inp.new(ty, n), op, *q))
        yield Case(f"permuted {op}", lambda inp, op=op: pool_2d(
            permute(inp.new(F32, (9, 20, 3, 2)), 1, 2, 0, 3), op, 3, 2, 1, 2, 1, 0))


def cases_back():
    for op in (MAX, AVG):
        for ty in (F32, F16):
            for q in ((1, 1, 1, 1, 0, 0), (3, 2, 2, 1, 0, 1), (3, 3, 2, 2, 1, 1)):
                def make(inp, ty=ty, op=op, q=q):
                    a = inp.new(ty, (10, 9, 3, 2))
                    return pool_2d_back(inp.new(F32, pool_2d(a, op, *q).ne), a, op, *q)
                several = ty is F16 and op == MAX and q[0] * q[1] > 1
                yield Case(f"{ty!r} {op} {q}", make, wrong="finds other maxima in F16 data than in the same numbers in "
                           "F32" if several else "")


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """pool_2d_back; 1-D averages, which divide by the taps inside, are weighted first."""
    a, (op, k0, k1, s0, s1, p0, p1) = t.src[0], _parameters(t)

    def padding(i, k, s, p):
        """The padding with the fraction that only shows in the size of the result."""
        return max(p, ((t.ne[i] - 1) * s - a.ne[i] + k) / 2)

    def of_a():
        d = dy
        if t.op == OP.POOL_1D and op == AVG:
            first = np.arange(t.ne[0]) * s0 - p0
            taps = np.minimum(first + k0, a.ne[0]) - np.maximum(first, 0)
            d = g.mul(dy, g.constant((k0 / np.maximum(taps, 1)).astype(np.float32)))
        return g.pool_2d_back(d, a, op, k0, k1, s0, s1, padding(0, k0, s0, p0), padding(1, k1, s1, p1))
    return (of_a,)


def _rebuild_2d(n, name, data, result):
    """The call that makes the node again.  Padding may be a fraction, which is read off the size of the result."""
    op, k, s, p = n.i[0], n.i[1:3], n.i[3:5], n.i[5:7]
    p = [max(p[d], ((result[d] - 1) * s[d] - data.ne[d] + k[d]) / 2) if p[d] >= 0 else p[d] for d in (0, 1)]
    return n.call(name, *n.src, op, *k, *s, *p)


SPECS = (Spec(op=OP.POOL_1D, builders=(pool_1d,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases_1d),
         Spec(op=OP.POOL_2D, builders=(pool_2d,), reference=reference, kernel=kernel,
              gradient=gradient, rows=along(2), cases=cases_2d,
              rebuild=lambda n: _rebuild_2d(n, "pool_2d", n.src[0], n.ne)),
         Spec(op=OP.POOL_2D_BACK, builders=(pool_2d_back,), reference=reference_back, kernel=kernel_back, rows=along(2),
              cases=cases_back,
              rebuild=lambda n: _rebuild_2d(n, "pool_2d_back", n.src[1], n.src[0].ne)))
