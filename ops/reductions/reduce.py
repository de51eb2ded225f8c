"""Reductions: sum, sum_rows, mean, argmax.

Row sums run in float32 vectors; `sum` adds the rows' sums in float64 and in order, so the result does not depend on the
number of threads.
"""
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.copying.view import permute, view_4d
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import SUM, SUM_IN_ORDER, along, last_axis
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import by_row
from ggjit.ops.core.types import F32, F64, I32, Tensor
from ggjit.ops.elementwise.elementwise import FLOATS, TOLERANCE
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f64, st_i32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    addr,
    n_rows,
    nb,
    ne,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import W, fadd, hsum, ldf, splat, zerof
from ggjit.ops.reductions.sums import largest, nothing, require_before, sum_in, sum_of, sum_over_rows
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


# ---------------------------------------------------------------- builders
def _rows(name, a, allowed):
    require_type(name, a, allowed)
    require(rows_contiguous(a), f"{name}: elements of a row must lie side by side", a, remedy="use gg.cont first")


def sum(a: Tensor, before: Tensor | None = None, part: bool = False):
    """Sum of all elements of a (F32, F16, BF16), any strides -> [1] of its type; NumPy: a.sum().

    part: the sum as it is added up, F64 [1].  before: such a sum of what comes before a, from which it goes on with
    the bits of one sum of all rows.
    (ggml's CPU backend takes rows whose elements do not lie side by side and adds the wrong ones.) Errors:
    TypeMismatch, ShapeError.  Source: ggml_sum, which has neither.
    """
    require_type("sum", a, FLOATS)
    require_before("sum", before)
    return a.ctx.node(OP.SUM, F64 if part else a.type, (1,), (a,) if before is None else (a, before))


def sum_rows(a: Tensor):
    """Sum along ne0 of a F32: [1, ne1, ne2, ne3]; NumPy: a.sum(-1, keepdims=True).

    Errors: TypeMismatch, ShapeError (elements of a row not side by side).  Source: ggml_sum_rows.
    """
    _rows("sum_rows", a, (F32,))
    return a.ctx.node(OP.SUM_ROWS, a.type, (1, *a.ne[1:]), (a,))


def mean(a: Tensor):
    """Mean along ne0 of a F32: [1, ne1, ne2, ne3]; NumPy: a.mean(-1, keepdims=True).

    Errors: TypeMismatch, ShapeError (elements of a row not side by side).  Source: ggml_mean.
    """
    _rows("mean", a, (F32,))
    return a.ctx.node(OP.MEAN, F32, (1, *a.ne[1:]), (a,))


def argmax(a: Tensor):
    """Index of the largest element of each row of a matrix a [n, m] F32 -> I32 [m].

    Among equals the last one counts, as in ggml (NumPy: the first): n - 1 - a[:, ::-1].argmax(-1).  A NaN makes the
    search start anew behind it, as in ggml, but for NaNs at the end of a row; 0 where all are NaN.  Errors:
    TypeMismatch, ShapeError.  Source: ggml_argmax.
    """
    _rows("argmax", a, (F32,))
    require(a.ne[2] == a.ne[3] == 1 and a.ne[0] > 0, "argmax: the source must be a matrix with ne0 > 0", a)
    return a.ctx.node(OP.ARGMAX, I32, (a.ne[1],), (a,))


def _argmax(row):
    numbers = np.flatnonzero(~np.isnan(row))
    if not numbers.size:
        return 0
    end = numbers[-1] + 1
    start = np.flatnonzero(np.isnan(row[:end])).max(initial=-1) + 1
    return end - 1 - row[start:end][::-1].argmax()


def reference(t, a, before=0):
    a = a.astype(np.float64)
    if t.op == OP.SUM:
        return (a.sum() + before).reshape(1, 1, 1, 1)
    if t.op == OP.ARGMAX:
        return np.array([_argmax(row) for row in a.reshape(-1, a.shape[-1])]).reshape(1, 1, 1, -1)
    with np.errstate(invalid="ignore"):
        return a.sum(-1, keepdims=True) / (a.shape[-1] if t.op == OP.MEAN else 1)


# ---------------------------------------------------------------- kernels
def _sum_of_type(ty):
    if ty is F32:
        return sum_of
    ld, ld_part, size = ROW[ty].load, ROW[ty].load_part, ty.nbytes

    @inline
    def row_sum(x, n):
        s0, s1 = zerof(), zerof()
        i = 0
        while i + 2 * W <= n:
            s0, s1 = fadd(s0, ld(x + i * size)), fadd(s1, ld(x + (i + W) * size))
            i += 2 * W
        while i < n:
            s0 = fadd(s0, ld_part(x + i * size, min(W, n - i)))
            i += W
        return hsum(fadd(s0, s1))
    return row_sum


def _make_sum(ty, goes_on, part):
    dense_sum, get, put, size = _sum_of_type(ty), ROW[ty].get, ROW[ty].put, ty.nbytes

    @inline
    def row_sum(x, step, n):
        if step == size:
            return types.float64(dense_sum(x, n))
        s = 0.0
        for i in range(n):
            s += types.float64(get(x + i * step))
        return s

    @inline
    def row(node, r):
        a = node + SRC0
        i1, i2, i3 = row_index(a, r)
        st_f64(work(node) + 8 * r, row_sum(row_addr(a, i1, i2, i3), nb(a, 0), ne(a, 0)))
        return OK

    @inline
    def finish(node, total):
        if part:
            st_f64(addr(node + DST), total)
        else:
            put(addr(node + DST), f32(total))
    return sum_over_rows(row, finish, sum_in(SRC1) if goes_on else nothing)


@intrinsic
def any_reaches(typingctx, x, y):
    """True if some lane of x is not below the same lane of y; NaNs are not."""
    def codegen(context, b, sig, args):
        mask = ir.IntType(W)
        return b.icmp_unsigned("!=", b.bitcast(b.fcmp_unordered(">=", *args), mask), ir.Constant(mask, 0))
    return types.boolean(x, y), codegen


@inline
def last_top(x, n):
    """Last index of the largest of n floats or of a NaN, whichever comes last."""
    highest = largest(x, n)
    top = splat(highest)
    end = n
    while end >= W and not any_reaches(ldf(x + 4 * (end - W)), top):
        end -= W
    for k in range(end - 1, -1, -1):
        if not ld_f32(x + 4 * k) < highest:
            return k
    return 0


@inline
def argmax_of(x, n):
    """Last index of the largest of n floats, of those behind the last NaN that another number follows; 0 for NaNs only.

    ggml's loop, max = max > x ? max : x; i = k where max == x, forgets at a NaN what came before.
    """
    while n > 0 and ld_f32(x + 4 * (n - 1)) != ld_f32(x + 4 * (n - 1)):
        n -= 1
    if n == 0:
        return 0
    k = last_top(x, n)
    if ld_f32(x + 4 * k) != ld_f32(x + 4 * k):
        return k + 1 + last_top(x + 4 * (k + 1), n - k - 1)
    return k


def _make_rows(op):
    put = ROW[F32].put

    @inline
    def rows(node, ith, start, stop):
        a, d = node + SRC0, node + DST
        n0 = ne(a, 0)
        for r in range(start, stop):
            i1, i2, i3 = row_index(a, r)
            x = row_addr(a, i1, i2, i3)
            if op == OP.ARGMAX:
                st_i32(addr(d) + r * nb(d, 0), types.int32(argmax_of(x, n0)))
            elif op == OP.MEAN:
                put(row_addr(d, i1, i2, i3), sum_of(x, n0) / f32(n0))
            else:
                put(row_addr(d, i1, i2, i3), sum_of(x, n0))
        return OK

    @inline
    def every_row(node):
        return n_rows(node + SRC0)
    return over_chunks(rows, every_row)             # a row without elements has a sum, too


def kernel(t, n_threads):
    a, op = t.src[0], OP(t.op)
    if a.type not in (FLOATS if op == OP.SUM else (F32,)):
        return None
    cost = 0.025 * touched_nbytes(t)
    if op == OP.SUM:
        rows, goes_on, part = math.prod(a.ne[1:]) if a.ne[0] else 0, len(t.src) > 1, t.type is F64
        return Kernel(f"sum-{a.type.name}{'-on' * goes_on}{'-part' * part}",
                      lambda: _make_sum(a.type, goes_on, part), cost, work_nbytes=8 * rows)
    return Kernel(op.name.lower(), lambda: _make_rows(op), cost)


# ---------------------------------------------------------------- cases
def cases(build, types_):
    for ty in types_:
        for shape in ((12, 5, 4, 3), (35, 1, 1, 1), (1025, 3, 1, 1), (1, 7, 2, 1)):
            yield Case(f"{ty!r} {shape}", lambda inp, ty=ty, shape=shape: build(inp.new(ty, shape, lo=-0.9, hi=1.1)),
                       TOLERANCE[ty])
        yield Case(f"{ty!r} permuted", lambda inp, ty=ty: build(
            permute(inp.new(ty, (13, 5, 6, 3), lo=-0.9, hi=1.1), 0, 2, 3, 1)), TOLERANCE[ty])

        if build is sum:
            yield Case(f"{ty!r} rows apart", lambda inp, ty=ty: build(
                permute(inp.new(ty, (11, 5, 6, 3), lo=-0.9, hi=1.1), 3, 0, 2, 1)), TOLERANCE[ty])

        def sliced(inp, ty=ty):
            a = inp.new(ty, (64, 5, 6, 3), lo=-0.9, hi=1.1)
            return build(view_4d(a, 32, 5, 6, 3, *a.nb[1:], 16 * ty.nbytes))
        yield Case(f"{ty!r} sliced", sliced, TOLERANCE[ty])


def sum_cases():
    yield from cases(sum, FLOATS)
    for ty in FLOATS:
        yield Case(f"{ty!r} goes on", lambda inp, ty=ty: sum(inp.new(ty, (33, 7), lo=-0.9, hi=1.1),
                                                             sum(inp.new(ty, (33, 5)), part=True)), TOLERANCE[ty])
    yield Case("part", lambda inp: sum(inp.new(F32, (33, 7), lo=-0.9, hi=1.1), part=True))


def argmax_cases():
    def make(shape, ties):
        def build(inp):
            rows = np.stack([inp.rng.permutation(shape[0]) for _ in range(shape[1])]).astype(np.float32)
            return argmax(inp.new(F32, shape, rows // 5 if ties else rows))
        return build
    for shape in ((34, 1), (100, 9), (1024, 11), (2000, 11), (5438, 2), (7, 4), (1, 1)):
        for ties in (False, True):
            yield Case(f"{shape}{' ties' * ties}", make(shape, ties), 0.0)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    a = t.src[0]
    return lambda: g.repeat(g.scale(dy, 1 / a.ne[0]) if t.op == OP.MEAN else dy, a), lambda: dy


# ---------------------------------------------------------------- rows
def _rows_of_sum(t):
    a = last_axis(t.src[0])
    yield SUM_IN_ORDER if a >= 1 else SUM, [a, None][:len(t.src)]


def _rows_of_argmax(t):
    yield 0, [1]


def _chunk_of_sum(t, ne, src, before, is_last):
    return sum(src[0], src[1] if before is None and len(src) > 1 else before, not is_last or t.type is F64)


SPECS = (
    Spec(op=OP.SUM, builders=(sum,), reference=reference, kernel=kernel, gradient=gradient, rows=_rows_of_sum,
         chunk=_chunk_of_sum, cases=sum_cases,
         rebuild=lambda n: n.call("sum", *n.up_to(2), n.type is F64)),
    Spec(op=OP.SUM_ROWS, builders=(sum_rows,), reference=reference, kernel=kernel, gradient=gradient, rows=along(1),
         split=by_row, cases=lambda: cases(sum_rows, (F32,))),
    Spec(op=OP.MEAN, builders=(mean,), reference=reference, kernel=kernel, gradient=gradient, rows=along(1),
         split=by_row, cases=lambda: cases(mean, (F32,))),
    Spec(op=OP.ARGMAX, builders=(argmax,), reference=reference, kernel=kernel, rows=_rows_of_argmax,
         split=by_row, cases=argmax_cases))
