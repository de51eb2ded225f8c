"""Ops of which an element is a function of one element, or of two.

    map_launch(t, label, f)     d[i] = f(x[i], p0..p4): the unary family, scale, clamp, fill (unary.py)
    add, sub, mul, div, add1    with b repeated along every dimension (ops/elementwise/binary.py)

f takes and gives float32.  Contiguous tensors are one long row whose elements the threads take in turn; others go row
by row.
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, n_elements
from ggjit.ops.cuda.compiler.core import block, device, n_blocks, n_threads, thread
from ggjit.ops.cuda.native.launch import over_elements, over_rows
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    addr,
    n_rows,
    nb,
    ne,
    param_f32,
    row_addr,
    row_addr_mod,
    row_index,
)
from ggjit.ops.cuda.rows import FLOATS, ONE


def _make_flat(f, get, put, sa, sd):
    def kernel(node):
        a, d = addr(node + SRC0), addr(node + DST)
        p0, p1, p2 = param_f32(node, 0), param_f32(node, 1), param_f32(node, 2)
        p3, p4 = param_f32(node, 3), param_f32(node, 4)
        n, step = ne(node + DST, 0) * n_rows(node + DST), n_threads() * n_blocks()
        i = block() * n_threads() + thread()
        while i < n:
            put(d + i * sd, f(get(a + i * sa), p0, p1, p2, p3, p4))
            i += step
    return kernel


def _make_rows(f, get, put):
    def kernel(node):
        a, d = node + SRC0, node + DST
        p0, p1, p2 = param_f32(node, 0), param_f32(node, 1), param_f32(node, 2)
        p3, p4 = param_f32(node, 3), param_f32(node, 4)
        n, n0, a0, d0 = n_rows(d), ne(d, 0), nb(a, 0), nb(d, 0)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            pa, pd = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < n0:
                put(pd + i * d0, f(get(pa + i * a0), p0, p1, p2, p3, p4))
                i += n_threads()
            r += n_blocks()
    return kernel


def map_launch(t, label, f):
    """The Launch that applies f to t.src[0]; None for types it cannot take."""
    ta, td = t.src[0].type, t.type
    if ta not in ONE or td not in ONE:
        return None
    get, put, name = ONE[ta].get, ONE[td].put, f"{label}_{ta.name}_{td.name}"
    if is_contiguous(t) and is_contiguous(t.src[0]):
        return over_elements(f"{name}_flat", lambda: _make_flat(f, get, put, ta.nbytes, td.nbytes), n_elements(t))
    return over_rows(name, lambda: _make_rows(f, get, put), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


def plain(f):
    """A function of x alone as map_launch takes it."""
    @device
    def of_x(x, p0, p1, p2, p3, p4):
        return f(x)
    return of_x


# ---------------------------------------------------------------- two elements
@device
def _add(x, y):
    return x + y


@device
def _sub(x, y):
    return x - y


@device
def _mul(x, y):
    return x * y


@device
def _div(x, y):
    return x / y


FUNCTIONS = {OP.ADD: _add, OP.ADD1: _add, OP.SUB: _sub, OP.MUL: _mul, OP.DIV: _div}


def _make_flat_pairs(f, a_get, b_get, put, sa, sb, sd):
    def kernel(node):
        a, b, d = addr(node + SRC0), addr(node + SRC1), addr(node + DST)
        n, step = ne(node + DST, 0) * n_rows(node + DST), n_threads() * n_blocks()
        i = block() * n_threads() + thread()
        while i < n:
            put(d + i * sd, f(a_get(a + i * sa), b_get(b + i * sb)))
            i += step
    return kernel


def _make_rows_of_pairs(f, a_get, b_get, put):
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        n, n0, m0 = n_rows(d), ne(d, 0), ne(b, 0)
        a0, b0, d0 = nb(a, 0), nb(b, 0), nb(d, 0)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            pa, pb, pd = row_addr(a, i1, i2, i3), row_addr_mod(b, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < n0:
                k = i if m0 == n0 else i % m0
                put(pd + i * d0, f(a_get(pa + i * a0), b_get(pb + k * b0)))
                i += n_threads()
            r += n_blocks()
    return kernel


def _binary(t):
    a, b = t.src[:2]
    if not {a.type, b.type, t.type} <= set(FLOATS):
        return None
    f, parts = FUNCTIONS[t.op], (ONE[a.type].get, ONE[b.type].get, ONE[t.type].put)
    name = f"{t.op.name.lower()}_{a.type.name}_{b.type.name}_{t.type.name}"
    if a.ne == b.ne and all(is_contiguous(x) for x in (a, b, t)):
        return over_elements(f"{name}_flat", lambda: _make_flat_pairs(f, *parts, a.type.nbytes, b.type.nbytes,
                                                                t.type.nbytes), n_elements(t))
    return over_rows(name, lambda: _make_rows_of_pairs(f, *parts), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = dict.fromkeys(FUNCTIONS, _binary)
