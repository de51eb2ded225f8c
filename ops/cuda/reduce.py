"""sum, sum_rows, mean, argmax (ops/reductions/reduce.py), count_equal (ops/reductions/count_equal.py).

sum is two launches, so that its result does not depend on the order in which blocks run: N_PARTS partial sums in
scratch memory, then one block adds them.
"""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import n_elements
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import (
    block,
    device,
    ld_f32,
    ld_i32,
    n_blocks,
    n_threads,
    st_f32,
    st_i32,
    st_i64,
    thread,
    to_i32,
)
from ggjit.ops.cuda.native.launch import MAX_THREADS, Launch, dense, over_rows
from ggjit.ops.cuda.native.sums import LOWEST, ZERO, block_max, block_sum
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, addr, element_addr, n_rows, nb, ne, row_addr, row_index, work
from ggjit.ops.cuda.norm import sum_of
from ggjit.ops.cuda.rows import FLOATS, ONE

N_PARTS = 64


def _make_parts(get):
    def kernel(node):
        a = node + SRC0
        n, s = ne(a, 0) * n_rows(a), f32(0)
        e = block() * n_threads() + thread()
        while e < n:
            s += get(element_addr(a, e, 1))
            e += n_threads() * n_blocks()
        s = block_sum(s)
        if thread() == 0:
            st_f32(work(node) + 4 * block(), s)
    return kernel


def _make_total(put, n_parts):
    def kernel(node):
        s = f32(0)
        i = thread()
        while i < n_parts:
            s += ld_f32(work(node) + 4 * i)
            i += n_threads()
        s = block_sum(s)
        if thread() == 0:
            put(addr(node + DST), s)
    return kernel


def _sum(t):
    a = t.src[0]
    if a.type not in FLOATS or t.type is not a.type or len(t.src) > 1:
        return None
    parts = 2 if MAX_THREADS < 256 else N_PARTS
    return (Launch(f"sum_parts_{a.type.name}", lambda: _make_parts(ONE[a.type].get), (parts, 1, 1), MAX_THREADS,
                   4 * parts),
            Launch(f"sum_total_{a.type.name}", lambda: _make_total(ONE[t.type].put, parts), (1, 1, 1), 32, 4 * parts))


# ---------------------------------------------------------------- count_equal
def _make_counts():
    def kernel(node):
        a, b = node + SRC0, node + SRC1
        n, s = ne(a, 0) * n_rows(a), f32(0)
        e = block() * n_threads() + thread()
        while e < n:
            if ld_i32(element_addr(a, e, 1)) == ld_i32(element_addr(b, e, 1)):
                s += f32(1)                     # exact up to 2^24 equal elements of a part
            e += n_threads() * n_blocks()
        s = block_sum(s)
        if thread() == 0:
            st_i32(work(node) + 4 * block(), to_i32(s))
    return kernel


def _make_count(n_parts):
    def kernel(node):
        total = 0
        if thread() == 0:
            for i in range(n_parts):
                total += ld_i32(work(node) + 4 * i)
            st_i64(addr(node + DST), total)
    return kernel


def _count_equal(t):
    parts = 2 if MAX_THREADS < 256 else N_PARTS
    if n_elements(t.src[0]) > parts << 24:
        return None
    return (Launch("count_equal_parts", _make_counts, (parts, 1, 1), MAX_THREADS, 4 * parts),
            Launch("count_equal", lambda: _make_count(parts), (1, 1, 1), 32, 4 * parts))


# ---------------------------------------------------------------- argmax, sums of rows
def _past_last(is_it):
    """past(x, start, end, y) -> 1 + the last i in start ... end - 1 with is_it(x[i], y), 0 if there is none."""
    @device
    def past(x, start, end, y):
        at = ZERO                               # exact up to 2^24, the longest row `_rows` takes
        i = start + thread()
        while i < end:
            if is_it(ld_f32(x + 4 * i), y):
                at = f32(i + 1)
            i += n_threads()
        return to_i32(block_max(at))
    return past


past_number, past_nan, past_equal = (_past_last(device(f)) for f in (
    lambda v, y: v == v, lambda v, y: v != v, lambda v, y: v == y))     # noqa: PLR0124


@device
def last_of_largest(x, n):
    """As the CPU's argmax_of: the last index of the largest of n floats, of those behind the last NaN that another
    number follows; 0 for NaNs only.  In every thread."""
    end = past_number(x, 0, n, ZERO)
    start = past_nan(x, 0, end, ZERO)
    top = LOWEST
    i = start + thread()
    while i < end:
        top = max(top, ld_f32(x + 4 * i))
        i += n_threads()
    return max(past_equal(x, start, end, block_max(top)) - 1, 0)


def _make_argmax():
    def kernel(node):
        a, d = node + SRC0, node + DST
        r = block()
        while r < n_rows(a):
            at = last_of_largest(row_addr(a, r, 0, 0), ne(a, 0))
            if thread() == 0:
                st_i32(addr(d) + r * nb(d, 0), at)
            r += n_blocks()
    return kernel


def _make_rows(mean):
    def kernel(node):
        a, d = node + SRC0, node + DST
        n = n_rows(a)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(a, r)
            s = sum_of(row_addr(a, i1, i2, i3), ne(a, 0), nb(a, 0))
            if mean:
                s /= f32(ne(a, 0))
            if thread() == 0:
                st_f32(row_addr(d, i1, i2, i3), s)
            r += n_blocks()
    return kernel


def _rows(t):
    a = t.src[0]
    if a.type is not F32 or not dense(a) or (t.op == OP.ARGMAX and a.ne[0] >= 1 << 24):
        return None
    make = _make_argmax if t.op == OP.ARGMAX else lambda: _make_rows(t.op == OP.MEAN)
    return over_rows(t.op.name.lower(), make, a.ne[1] * a.ne[2] * a.ne[3], a.ne[0])


CUDA = {OP.SUM: _sum, OP.SUM_ROWS: _rows, OP.MEAN: _rows, OP.ARGMAX: _rows,
        OP.COUNT_EQUAL: _count_equal}
