"""cumsum (ops/reductions/cumsum.py), solve_tri and out_prod (ops/matmul), lightning_indexer
(ops/attention/lightning_indexer.py): sums that one thread or block forms in order."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F16, F32
from ggjit.ops.cuda.compiler.core import (
    block,
    device,
    fmax,
    ld_f16,
    ld_f32,
    lds_f32,
    n_blocks,
    n_threads,
    shared,
    shfl,
    st_f32,
    sts_f32,
    sync,
    thread,
)
from ggjit.ops.cuda.each import at, each_element, each_unit, floats
from ggjit.ops.cuda.native.launch import over_rows
from ggjit.ops.cuda.native.sums import MAX_WARPS
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, SRC3, n_rows, ne, param_i32, row_index

ZERO = f32(0)


# ---------------------------------------------------------------- cumsum
def _running_sum():
    parts = shared(4 * MAX_WARPS)

    @device
    def over_warp(x):
        """Sums over the lanes up to this one."""
        lane = thread() & 31
        for k in range(5):
            y = shfl(x, max(lane - (1 << k), 0))
            if lane >= 1 << k:
                x += y
        return x

    @device
    def running(x):
        """(sum over the threads up to this one, sum over all)"""
        p, warp, n_warps = parts(), thread() >> 5, n_threads() >> 5
        x = over_warp(x)
        if thread() & 31 == 31:
            sts_f32(p + 4 * warp, x)
        sync()
        before, total = ZERO, ZERO
        for w in range(n_warps):
            y = lds_f32(p + 4 * w)
            total += y
            if w < warp:
                before += y
        sync()                                  # barrier: other warps may now overwrite the partial sums
        return x + before, total
    return running


def _make_cumsum():
    running = _running_sum()

    def kernel(node):
        a, d = node + SRC0, node + DST
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            first, before = 0, ZERO
            while first < ne(d, 0):
                i, x = first + thread(), ZERO
                if i < ne(d, 0):
                    x = ld_f32(at(a, i, i1, i2, i3))
                x, total = running(x)
                if i < ne(d, 0):
                    st_f32(at(d, i, i1, i2, i3), before + x)
                before += total
                first += n_threads()
            r += n_blocks()
    return kernel


def _cumsum(t):
    return over_rows("cumsum", _make_cumsum, t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


# ---------------------------------------------------------------- solve_tri
UPPER, UNIT = 1, 2


@device
def columns(node):
    b = node + SRC1
    return ne(b, 0) * ne(b, 2) * ne(b, 3)


@device
def solve_column(node, u):
    """Substitution in one column of the result; it reads what it wrote itself."""
    a, b, d, mode = node + SRC0, node + SRC1, node + DST, param_i32(node, 0)
    n, k, m = ne(a, 0), u % ne(b, 0), u // ne(b, 0)
    i2, i3 = m % ne(b, 2), m // ne(b, 2)
    for step in range(n):
        i, first = step, 0
        if mode & UPPER:
            i = n - 1 - step
            first = i + 1
        s = ld_f32(at(b, k, i, i2, i3))
        for j in range(first, first + step):
            s -= ld_f32(at(a, j, i, i2, i3)) * ld_f32(at(d, k, j, i2, i3))
        if mode & UNIT == 0:
            s /= ld_f32(at(a, i, i, i2, i3))
        st_f32(at(d, k, i, i2, i3), s)


def _solve_tri(t):
    b = t.src[1]
    return each_unit(t, "solve_tri", b.ne[0] * b.ne[2] * b.ne[3], lambda: (solve_column, columns))


# ---------------------------------------------------------------- sums of products, a of any type
def _outer(get_a):
    @device
    def body(node, i0, i1, i2, i3):
        a, b, s = node + SRC0, node + SRC1, ZERO
        j2, j3 = i2 // (ne(b, 2) // ne(a, 2)), i3 // (ne(b, 3) // ne(a, 3))
        for k in range(ne(a, 1)):
            s += get_a(node, i0, k, j2, j3) * ld_f32(at(b, i1, k, i2, i3))
        st_f32(at(node + DST, i0, i1, i2, i3), s)
    return body


def _out_prod(t):
    a = floats(SRC0, t.src[0])
    if a is None or t.src[1].type is not F32 or len(t.src) > 2:
        return None
    before, get = a
    return *before, each_element(t, "out_prod", lambda: _outer(get), work_nbytes=max([x.work_nbytes for x in before],
                                                                                      default=0))


def _indexer(get_k):
    @device
    def body(node, j, i, i2, s):
        q, w, m, total = node + SRC0, node + SRC2, node + SRC3, ZERO
        for h in range(ne(q, 1)):
            x = ZERO
            for e in range(ne(q, 0)):
                x += ld_f32(at(q, e, h, i, s)) * get_k(node, e, 0, j, s)
            total += fmax(x, ZERO) * ld_f32(at(w, h, i, 0, s))
        st_f32(at(node + DST, j, i, 0, s), total + ld_f16(at(m, j, i, 0, s % ne(m, 3))))
    return body


def _lightning_indexer(t):
    q, k, w, mask = t.src
    keys = floats(SRC1, k)
    if keys is None or (q.type, w.type, mask.type) != (F32, F32, F16):
        return None
    before, get = keys
    return *before, each_element(t, "lightning_indexer", lambda: _indexer(get),
                                 work_nbytes=max([x.work_nbytes for x in before], default=0))


CUDA = {OP.CUMSUM: _cumsum, OP.SOLVE_TRI: _solve_tri, OP.OUT_PROD: _out_prod, OP.LIGHTNING_INDEXER: _lightning_indexer}
