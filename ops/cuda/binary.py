"""add, sub, mul, div, add1 with b repeated along every dimension (ops/elementwise/binary.py)."""
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, n_elements
from ggjit.ops.cuda.compiler.core import block, device, n_blocks, n_threads, thread
from ggjit.ops.cuda.native.launch import over_elements, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, addr, n_rows, nb, ne, row_addr, row_addr_mod, row_index
from ggjit.ops.cuda.rows import FLOATS, ONE


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


def _make_flat(f, a_get, b_get, put, sa, sb, sd):
    def kernel(node):
        a, b, d = addr(node + SRC0), addr(node + SRC1), addr(node + DST)
        n, step = ne(node + DST, 0) * n_rows(node + DST), n_threads() * n_blocks()
        i = block() * n_threads() + thread()
        while i < n:
            put(d + i * sd, f(a_get(a + i * sa), b_get(b + i * sb)))
            i += step
    return kernel


def _make_rows(f, a_get, b_get, put):
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
        return over_elements(f"{name}_flat", lambda: _make_flat(f, *parts, a.type.nbytes, b.type.nbytes,
                                                                t.type.nbytes), n_elements(t))
    return over_rows(name, lambda: _make_rows(f, *parts), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = dict.fromkeys(FUNCTIONS, _binary)
