"""Sums and maxima over stretches of float32 in memory: what norms, softmax and reductions share."""
import numpy as np
from numba import types

from ggjit.ops.core.record import OK
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.types import F64
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, ld_f64, st_f32
from ggjit.ops.native.node import addr, barrier, work
from ggjit.ops.native.row_loops import over_rows, rows_of_source
from ggjit.ops.native.simd import B, W, fadd, fma, fsub, hmax, hsum, keep_part, ldf, ldf_part, splat, vmax, zerof

f32 = types.float32
LOWEST = np.float32(-np.inf)


@inline
def nothing(node):
    return 0.0


@inline
def _word(node):
    return 8


def sum_over_rows(row, finish, start=nothing):
    """Kernel: row(node, r) leaves a float64 in word r of the scratch memory; one thread calls finish(node, their sum).

    The sum starts from start(node) and is formed in the order of the rows, whatever the number of threads.
    """
    each_row = inline(over_rows(row, rows_of_source, written=_word))

    def kernel(node, ith, nth, sync):
        each_row(node, ith, nth, sync)
        barrier(sync, nth)
        if ith == 0:
            total = start(node)
            for r in range(rows_of_source(node)):
                total += ld_f64(work(node) + 8 * r)
            finish(node, total)
        return OK
    return kernel


def sum_in(view):
    """start of sum_over_rows: the float64 that a source holds.  view: SRC0, SRC1, ..."""
    @inline
    def start(node):
        return ld_f64(addr(node + view))
    return start


def require_before(op, before):
    """Errors unless `before` is None or a sum that another node of the op has left."""
    if before is not None:
        require_type(op, before, (F64,), "before")
        require(n_elements(before) == 1, f"{op}: before must be one element", before)


@inline
def largest(x, n):
    """Maximum of n floats at x; -inf if there are none."""
    top, i = splat(LOWEST), 0
    while i + W <= n:
        top = vmax(ldf(x + 4 * i), top)
        i += W
    if i < n:
        top = vmax(keep_part(ldf_part(x + 4 * i, n - i), n - i, LOWEST), top)
    return hmax(top)


@inline
def sum_of(x, n):
    """Sum of n floats at x."""
    s0, s1, s2, s3 = zerof(), zerof(), zerof(), zerof()
    i, end = x, x + 4 * n
    while i + 4 * B <= end:
        s0, s1 = fadd(s0, ldf(i)), fadd(s1, ldf(i + B))
        s2, s3 = fadd(s2, ldf(i + 2 * B)), fadd(s3, ldf(i + 3 * B))
        i += 4 * B
    while i + B <= end:
        s0 = fadd(s0, ldf(i))
        i += B
    if i < end:
        s1 = fadd(s1, ldf_part(i, (end - i) >> 2))
    return hsum(fadd(fadd(s0, s1), fadd(s2, s3)))


@inline
def gathered(x, step, n, scratch):
    """Address of n floats side by side: x, or a copy in scratch of the floats that lie `step` bytes apart at x."""
    if step == 4 or n <= 1:             # rows of one element count as dense (rows_contiguous), whatever their stride
        return x
    for i in range(n):
        st_f32(scratch + 4 * i, ld_f32(x + i * step))
    return scratch


@inline
def squares_of(x, n, shift):
    """Sum of (x - shift)^2 over n floats at x; shift is a vector."""
    s0, s1, s2, s3 = zerof(), zerof(), zerof(), zerof()
    i, end = x, x + 4 * n
    while i + 4 * B <= end:
        v0, v1 = fsub(ldf(i), shift), fsub(ldf(i + B), shift)
        v2, v3 = fsub(ldf(i + 2 * B), shift), fsub(ldf(i + 3 * B), shift)
        s0, s1, s2, s3 = fma(v0, v0, s0), fma(v1, v1, s1), fma(v2, v2, s2), fma(v3, v3, s3)
        i += 4 * B
    while i + B <= end:
        v0 = fsub(ldf(i), shift)
        s0 = fma(v0, v0, s0)
        i += B
    if i < end:
        m = (end - i) >> 2
        v1 = keep_part(fsub(ldf_part(i, m), shift), m, f32(0.0))
        s1 = fma(v1, v1, s1)
    return hsum(fadd(fadd(s0, s1), fadd(s2, s3)))
