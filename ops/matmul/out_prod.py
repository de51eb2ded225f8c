"""out_prod: the sum of outer products, d[j][i] = sum_k a[k][i] b[k][j]: a product of matrices stored row by row.

    a [m, n]   row k: m values          b [p, n]   row k: p values          d [m, p]
    NumPy: d = b.T @ a, per matrix of dimensions 2 and 3, a repeated over b's

A unit of work is IC columns of a times up to JC rows of d.  KC rows of a at a time are converted to float32 in the
thread's scratch (float32 itself is used in place); a tile of 4 rows x 2 vectors of d takes KC steps in registers and
is added up in d.
"""
import math

import numpy as np
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import SUM_IN_ORDER, last_axis
from ggjit.ops.core.shape import require, require_sum_so_far, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.traits import all_traits, module_of, traits_of
from ggjit.ops.core.types import BF16, F16, F32, Q4_0, Q8_0, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, zero_bytes
from ggjit.ops.native.node import DST, SRC0, SRC1, nb, ne, row_addr, work
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import B, W, fma, ldf, ldf_part, splat, stf, stf_part

IC, JC, KC = 256, 64, 32                # IC is a multiple of every block and of every 2 W
SCRATCH_NBYTES = 4 * IC * KC


def left_types():
    """Types out_prod takes as a: everything with a to_float."""
    return tuple(t for t, (traits, _) in all_traits().items() if traits.to_float is not None)


def out_prod(a: Tensor, b: Tensor, onto: Tensor | None = None):
    """d[j][i] = sum_k a[k][i] b[k][j]: a [m, n, a2, a3], b [p, n, b2, b3] -> F32 [m, p, b2, b3]; a2 | b2, a3 | b3.

    a: any type that converts to floats, rows contiguous (ggml: F32, or quantised without repeating); b: F32, any
    strides.  NumPy: b.swapaxes(-1, -2) @ a.  onto: F32 [m, p, b2, b3], contiguous, to which the products are added in
    the order of k; the result is a view of it.  So a sum of some k goes on with the bits of the whole sum.
    Errors: ShapeError, TypeMismatch.  Source: ggml_out_prod, which has no onto.
    """
    require_type("out_prod", a, left_types(), "a")
    require_type("out_prod", b, (F32,), "b")
    require(a.ne[1] == b.ne[1], "out_prod: a and b differ in the summed dimension 1", a, b)
    require(a.ne[2] > 0 and a.ne[3] > 0 and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0,
            "out_prod: dimensions 2 and 3 of a must divide b's", a, b)
    require(a.nb[0] == a.type.nbytes, "out_prod: rows of a must be contiguous", a, remedy="gg.cont it")
    ne = a.ne[0], b.ne[0], *b.ne[2:]
    if onto is None:
        return a.ctx.node(OP.OUT_PROD, F32, ne, (a, b), ndim=max(2, a.ndim, b.ndim))
    require_sum_so_far("out_prod", onto, ne)
    return a.ctx.node(OP.OUT_PROD, F32, ne, (a, b, onto), view_of=onto)


def reference(t, a, b, onto=0):
    a = np.repeat(np.repeat(a.astype(np.float64), b.shape[0] // a.shape[0], 0), b.shape[1] // a.shape[1], 1)
    return b.astype(np.float64).swapaxes(-1, -2) @ a + onto


@inline
def _tile(d, ldd, a, lda, b, b0, b1, rows, n_k):
    """4 rows x 2 W floats of d += n_k steps; rows that do not exist repeat the last one."""
    r1, r2, r3 = min(1, rows - 1), min(2, rows - 1), min(3, rows - 1)
    d1, d2, d3 = d + r1 * ldd, d + r2 * ldd, d + r3 * ldd
    x00, x01, x10, x11 = ldf(d), ldf(d + B), ldf(d1), ldf(d1 + B)
    x20, x21, x30, x31 = ldf(d2), ldf(d2 + B), ldf(d3), ldf(d3 + B)
    for k in range(n_k):
        y0, y1, p = ldf(a + k * lda), ldf(a + k * lda + B), b + k * b1
        s0, s1, s2, s3 = (splat(ld_f32(p)), splat(ld_f32(p + r1 * b0)), splat(ld_f32(p + r2 * b0)),
                          splat(ld_f32(p + r3 * b0)))
        x00, x01, x10, x11 = fma(s0, y0, x00), fma(s0, y1, x01), fma(s1, y0, x10), fma(s1, y1, x11)
        x20, x21, x30, x31 = fma(s2, y0, x20), fma(s2, y1, x21), fma(s3, y0, x30), fma(s3, y1, x31)
    stf(d, x00)
    stf(d + B, x01)
    stf(d1, x10)
    stf(d1 + B, x11)
    stf(d2, x20)
    stf(d2 + B, x21)
    stf(d3, x30)
    stf(d3 + B, x31)


@inline
def _edge(d, ldd, a, lda, b, b0, b1, rows, n_k, n):
    """The same for n < 2 W columns, a vector at a time."""
    for r in range(min(rows, 4)):
        for i in range(0, n, W):
            x = ldf_part(d + r * ldd + 4 * i, n - i)
            for k in range(n_k):
                x = fma(splat(ld_f32(b + r * b0 + k * b1)), ldf_part(a + k * lda + 4 * i, n - i), x)
            stf_part(d + r * ldd + 4 * i, x, n - i)


def _make(ta, onto):
    to_float, plain, block, nbytes = traits_of(ta).to_float, ta is F32, ta.block, ta.nbytes

    @inline
    def unit(pa, a1, pb, b0, b1, pd, ldd, cols, rows, n, scratch):
        if not onto:
            for j in range(rows):
                zero_bytes(pd + j * ldd, 4 * cols)
        for k in range(0, n, KC):
            n_k = min(KC, n - k)
            if plain:
                x, ldx = pa + k * a1, a1
            else:
                x, ldx = scratch, types.int64(4 * IC)
                for i in range(n_k):
                    to_float(pa + (k + i) * a1, scratch + i * ldx, cols)
            for j in range(0, rows, 4):
                y = pb + j * b0 + k * b1
                i = 0
                while i + 2 * W <= cols:
                    _tile(pd + j * ldd + 4 * i, ldd, x + 4 * i, ldx, y, b0, b1, rows - j, n_k)
                    i += 2 * W
                if i < cols:
                    _edge(pd + j * ldd + 4 * i, ldd, x + 4 * i, ldx, y, b0, b1, rows - j, n_k, cols - i)

    @inline
    def count(node):
        d = node + DST
        return (ne(d, 0) + IC - 1) // IC * ((ne(d, 1) + JC - 1) // JC) * ne(d, 2) * ne(d, 3)

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        m, p, n2 = ne(d, 0), ne(d, 1), ne(d, 2)
        ratio2, ratio3 = n2 // ne(a, 2), ne(d, 3) // ne(a, 3)
        scratch = work(node) + ith * SCRATCH_NBYTES
        strips, bands = (m + IC - 1) // IC, (p + JC - 1) // JC
        for r in range(start, stop):
            q = r // strips
            i = (r - q * strips) * IC
            matrix = q // bands
            j = (q - matrix * bands) * JC
            i3 = matrix // n2
            i2 = matrix - i3 * n2
            pa = row_addr(a, 0, i2 // ratio2, i3 // ratio3) + i // block * nbytes
            pb, pd = row_addr(b, 0, i2, i3) + j * nb(b, 0), row_addr(d, j, i2, i3) + 4 * i
            unit(pa, nb(a, 1), pb, nb(b, 0), nb(b, 1), pd, nb(d, 1), min(IC, m - i), min(JC, p - j), ne(a, 1),
                 scratch)
        return OK
    return over_chunks(rows, count)


def kernel(t, n_threads):
    a, b, onto = *t.src[:2], len(t.src) > 2
    if a.type not in left_types() or b.type is not F32:
        return None
    flops = 2 * a.ne[0] * a.ne[1] * b.ne[0] * b.ne[2] * b.ne[3]
    return Kernel(f"out_prod-{a.type.name}{'-onto' * onto}", lambda: _make(a.type, onto), cost=flops / 40 + 100,
                  work_nbytes=0 if a.type is F32 else n_threads * SCRATCH_NBYTES, modules=(module_of(a.type),))


def cases():

    def make(ta, m, n, p, a23, b23, transposed):
        def build(inp):
            a = inp.new(ta, (m, n, *a23))
            b = inp.new(F32, (n, p, *b23) if transposed else (p, n, *b23))
            return out_prod(a, permute(b, 1, 0, 2, 3) if transposed else b)
        return build
    for ta in (F32, F16, BF16, Q8_0, Q4_0):
        for m, n, p, a23, b23, transposed in ((320, 1, 1, (1, 1), (1, 1), False), (288, 16, 16, (2, 1), (4, 3), False),
                                              (64, 37, 70, (1, 1), (1, 1), True), (32, 16, 3, (3, 2), (3, 2), False)):
            name = f"{ta!r} {m} {n} {p} {a23} {b23}{' transposed' * transposed}"
            yield Case(name, make(ta, m, n, p, a23, b23, transposed), 5e-4)
    for m, n, p in ((1, 5, 1), (37, 33, 5), (47, 2, 130)):
        yield Case(f"F32 {m} {n} {p}", make(F32, m, n, p, (1, 1), (1, 1), False), 5e-4)
    for ta in (F32, Q8_0):
        yield Case(f"{ta!r} onto", lambda inp, ta=ta: out_prod(inp.new(ta, (64, 37, 2)), inp.new(F32, (5, 37, 4)),
                                                                inp.new(F32, (64, 5, 4))), 5e-4)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """d = b^T a: da = dy b^T, db = a dy^T, in ggml's order of dimensions."""
    a, b = t.src[:2]
    return (lambda: g.sum_groups(g.out_prod(dy, g.transpose(b)), a),
            lambda: g.transpose(g.mul_mat(g.f32(a), dy)), lambda: dy)


# ---------------------------------------------------------------- rows
def _rows(t):
    (a, b), last = t.src[:2], last_axis(t)
    if last == 1:
        yield 1, [None, 0]
    elif last > 1 and b.ne[last] == t.ne[last] and a.ne[last] in (1, t.ne[last]):
        yield last, [None if a.ne[last] == 1 else last, last]
    if last_axis(a) == last_axis(b) == 1:
        yield SUM_IN_ORDER, [1, 1]


def _chunk(t, ne, src, before, is_last):
    return out_prod(*src[:2], before)


SPECS = (Spec(op=OP.OUT_PROD, builders=(out_prod,), reference=reference, kernel=kernel,
              gradient=gradient, rows=_rows, chunk=_chunk, cases=cases,
              flops=lambda t: 2 * math.prod(t.ne) * t.src[0].ne[1]),)
