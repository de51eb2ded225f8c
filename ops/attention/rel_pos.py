"""get_rel_pos, add_rel_pos: decomposed relative positions of Segment Anything's attention.

get_rel_pos spreads a table of one row per distance over all pairs (query i2, key i1):

    d[:, i1, i2] = a[:, (w - 1 - i1) + i2]          distances -(w-1) ... w-1 are rows 0 ... 2w-2

add_rel_pos adds one bias per key row and one per key column to the scores of every query:

    a[x + n y, q, h] += ph[y, q.., h] + pw[x, q.., h]       x, y < n = pw.ne0;   q counts pw.ne1 * pw.ne2
"""
import numpy as np

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import is_contiguous, require, require_type, rows_contiguous, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, addr, n_rows, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_chunks, over_rows, whole
from ggjit.ops.native.simd import W, fadd, ldf, ldf_part, splat, stf, stf_part
from ggjit.ops.types.shared.moves import move_bytes


def get_rel_pos(a: Tensor, qh: int, kh: int):
    """Rows of a [C, 2 n - 1] by distance -> [C, kh, qh], F16 in and out; qh == kh == n.

    NumPy: a[(n - 1 - i1) + i2].  Errors: ShapeError, ParamError, TypeMismatch (ggml also lets BF16 in and labels the
    bits F16; that is refused here).  Source: ggml_get_rel_pos.
    """
    require_type("get_rel_pos", a, (F16,))
    n = whole("get_rel_pos", "qh", qh, 1)
    require(n == whole("get_rel_pos", "kh", kh, 1), f"get_rel_pos: qh = {qh} and kh = {kh} must be equal")
    require(a.ne[1] == 2 * n - 1 and a.ne[2] == a.ne[3] == 1,
            f"get_rel_pos: the table must be [C, 2 * {n} - 1]", a)
    require(rows_contiguous(a), "get_rel_pos: elements of a row must lie side by side", a, remedy="use gg.cont first")
    return a.ctx.node(OP.GET_REL_POS, F16, (a.ne[0], n, n), (a,))


def _add_rel_pos(a, pw, ph, in_place):
    for t in (a, pw, ph):
        require_type("add_rel_pos", t, (F32,))
        require(is_contiguous(t), "add_rel_pos: sources must be contiguous", t, remedy="use gg.cont first")
    require(same_shape(pw, ph), "add_rel_pos: pw and ph must have one shape", pw, ph)
    require(a.ne[0] == pw.ne[0] ** 2 and a.ne[1] == pw.ne[1] * pw.ne[2] and a.ne[2] == pw.ne[3] and a.ne[3] == 1,
            "add_rel_pos: a must be [pw.ne0 ^ 2, pw.ne1 * pw.ne2, pw.ne3]", a, pw)
    return a.ctx.node(OP.ADD_REL_POS, F32, a.ne, (a, pw, ph), (int(in_place),), view_of=a if in_place else None,
                      ndim=a.ndim)


def add_rel_pos(a: Tensor, pw: Tensor, ph: Tensor):
    """a [n^2, q, h] + ph along rows + pw along columns of the n x n keys; pw, ph [n, q0, q1, h], q = q0 * q1; F32.

    op params: 0 (1: in place).  Errors: ShapeError, TypeMismatch.  Source: ggml_add_rel_pos.
    """
    return _add_rel_pos(a, pw, ph, False)


def add_rel_pos_inplace(a: Tensor, pw: Tensor, ph: Tensor):
    """As `add_rel_pos`, written over a; returns a view of a.  Source: ggml_add_rel_pos_inplace."""
    return _add_rel_pos(a, pw, ph, True)


def reference_get(t, a):
    n = t.ne[1]
    return a[0, 0][(n - 1 - np.arange(n))[None, :] + np.arange(n)[:, None]][None]


def reference_add(t, a, pw, ph):
    n = pw.shape[-1]
    bias = ph[..., :, None] + pw[..., None, :]
    return a + bias.reshape(1, pw.shape[0], -1, n * n)


@inline
def _get(node, ith, r, stop):
    a, d = node + SRC0, node + DST
    nbytes, n, to_step, x_step = 2 * ne(d, 0), ne(d, 1), nb(d, 1), nb(a, 1)
    i1, i2, _ = row_index(d, r)
    while r < stop:                                 # the keys of a query, or what is wanted of them
        to, x, run = row_addr(d, i1, i2, 0), row_addr(a, n - 1 - i1 + i2, 0, 0), min(stop - r, n - i1)
        for _ in range(run):
            move_bytes(to, x, nbytes)
            to += to_step
            x -= x_step
        r += run
        i1, i2 = 0, i2 + 1
    return OK


@inline
def _queries(node):
    return n_rows(node + SRC1)


@inline
def _add(node, q):
    n = ne(node + SRC1, 0)
    d, a = addr(node + DST) + 4 * n * n * q, addr(node + SRC0) + 4 * n * n * q
    pw, ph = addr(node + SRC1) + 4 * n * q, addr(node + SRC2) + 4 * n * q
    for y in range(n):
        bias = splat(ld_f32(ph + 4 * y))
        i = 0
        while i + W <= n:
            stf(d + 4 * i, fadd(ldf(a + 4 * i), fadd(ldf(pw + 4 * i), bias)))
            i += W
        if i < n:
            m = n - i
            stf_part(d + 4 * i, fadd(ldf_part(a + 4 * i, m), fadd(ldf_part(pw + 4 * i, m), bias)), m)
        d, a = d + 4 * n, a + 4 * n
    return OK


def kernel_get(t, n_threads):
    return Kernel("get_rel_pos", lambda: over_chunks(_get), cost=0.03 * touched_nbytes(t))


def kernel_add(t, n_threads):
    return Kernel("add_rel_pos", lambda: over_rows(_add, _queries), cost=0.03 * touched_nbytes(t))


def get_cases():
    for c, n in ((64, 14), (5, 1), (33, 6)):
        yield Case(f"{c} {n}", lambda inp, c=c, n=n: get_rel_pos(inp.new(F16, (c, 2 * n - 1)), n, n), 2.0 ** -22)


def add_cases():
    for build in (add_rel_pos, add_rel_pos_inplace):
        for n, q0, q1, h in ((14, 4, 3, 2), (3, 3, 3, 1), (37, 2, 1, 3)):
            yield Case(f"{build.__name__} {n} {q0} {q1} {h}", lambda inp, s=(n, q0, q1, h), build=build: build(
                inp.new(F32, (s[0] ** 2, s[1] * s[2], s[3])), inp.new(F32, s), inp.new(F32, s)))


# ---------------------------------------------------------------- gradient
def gradient_get(g, t, dy):
    a, n = t.src[0], t.ne[1]

    def of_a():
        ids = (n - 1 - np.arange(n))[None, :] + np.arange(n)[:, None]
        return g.get_rows_back(g.reshape_2d(dy, t.ne[0], n * n), g.constant(ids.reshape(-1).astype(np.int32)), a)
    return (of_a,)


def gradient_add(g, t, dy):
    """The gradient of pw is dy summed over key rows, that of ph is dy summed over key columns."""
    a, pw, ph = t.src
    n = pw.ne[0]

    def square():
        return g.reshape_3d(dy, n, n, t.ne[1] * t.ne[2])

    def summed(d):
        return g.reshape(g.sum_rows(d), pw)
    return lambda: dy, lambda: summed(g.cont(g.transpose(square()))), lambda: summed(square())


SPECS = (Spec(op=OP.GET_REL_POS, builders=(get_rel_pos,), reference=reference_get, kernel=kernel_get,
              gradient=gradient_get, cases=get_cases,
              rebuild=lambda n: n.call("get_rel_pos", *n.src, n.ne[2], n.ne[1])),
         Spec(op=OP.ADD_REL_POS, builders=(add_rel_pos, add_rel_pos_inplace), reference=reference_add,
              kernel=kernel_add, gradient=gradient_add, cases=add_cases))
