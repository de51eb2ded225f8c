"""Ops in which one thread computes an element, or a run of elements, from indices and sources.

    each_element(t, label, make)      make() -> body(node, i0, i1, i2, i3), called for every element of the result
    each_unit(t, label, n, make)      make() -> body(node, u), called for u = 0 ... n - 1

What a body reads of its sources is its own affair, so views with any strides are right.
"""
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler.core import block, device, n_blocks, n_threads, thread
from ggjit.ops.cuda.copy import mover
from ggjit.ops.cuda.native.launch import dense, over_elements, over_pieces
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, nb, ne, piece, row_addr, row_index, work
from ggjit.ops.cuda.rows import FLOATS, ONE

SOURCES = (SRC0, SRC1)


def _name(t, label):
    return "_".join([label, *(s.type.name for s in t.src if s is not None), t.type.name])


def _make_elements(body, view):
    def kernel(node):
        d = node + view
        n, n0 = n_rows(d), ne(d, 0)
        r, next_row, first, step = piece(n)
        while r < n:
            i1, i2, i3 = row_index(d, r)
            i = first
            while i < n0:
                body(node, i, i1, i2, i3)
                i += step
            r += next_row
    return kernel


def each_element(t, label, make, view=DST, work_nbytes=0):
    """The Launch; `view` names whose elements they are: DST or a source."""
    x = t if view == DST else t.src[SOURCES.index(view)]
    return over_pieces(_name(t, label), lambda: _make_elements(make(), view), x.ne[1] * x.ne[2] * x.ne[3], x.ne[0],
                       work_nbytes)


def _make_units(body, count):
    def kernel(node):
        n, step = count(node), n_threads() * n_blocks()
        u = block() * n_threads() + thread()
        while u < n:
            body(node, u)
            u += step
    return kernel


def each_unit(t, label, n, make):
    """The Launch; make() -> (body, count(node) = n)."""
    return over_elements(_name(t, label), lambda: _make_units(*make()), n)


@device
def at(view, i0, i1, i2, i3):
    """The address of an element."""
    return row_addr(view, i1, i2, i3) + i0 * nb(view, 0)


# ---------------------------------------------------------------- sources of any type
def _make_floats(move, per_piece, view):
    def kernel(node):
        a = node + view
        n, n0 = n_rows(a), ne(a, 0)
        r, next_row, first, step = piece(n)
        while r < n:
            i1, i2, i3 = row_index(a, r)
            i = first
            while i < n0 // per_piece:
                move(work(node) + 4 * n0 * r, row_addr(a, i1, i2, i3), i)
                i += step
            r += next_row
    return kernel


def floats(view, a):
    """(launches before, get(node, i0, i1, i2, i3) of source `a`, whose view is `view`): floats are read as they lie,
    quantised types unpacked to scratch memory first.  None for other types."""
    if a.type in FLOATS:
        get = ONE[a.type].get

        @device
        def direct(node, i0, i1, i2, i3):
            return get(at(node + view, i0, i1, i2, i3))
        return (), direct
    if a.type not in BLOCKS or not dense(a):
        return None
    m, get, n = mover(a.type, F32), ONE[F32].get, a.ne[1] * a.ne[2] * a.ne[3]

    @device
    def unpacked(node, i0, i1, i2, i3):
        a = node + view
        return get(work(node) + 4 * (((i3 * ne(a, 2) + i2) * ne(a, 1) + i1) * ne(a, 0) + i0))
    before = over_pieces(f"floats_{view}_{a.type.name}", lambda: _make_floats(m.move, m.per_piece, view), n,
                         a.ne[0] // m.per_piece, 4 * n * a.ne[0])
    return (before,), unpacked
