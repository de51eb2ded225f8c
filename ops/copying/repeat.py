"""repeat: a tiled to a larger shape.  Elements move by their width, so one kernel serves all types of that width."""
import numpy as np

from ggjit.ops.copying.view import permute
from ggjit.ops.core.errors import ShapeError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import describe, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import BF16, F16, F32, I16, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_addr_mod, row_index
from ggjit.ops.native.row_loops import MOVED, over_chunks
from ggjit.ops.types.shared.moves import ONE, move_bytes

TYPES = (F32, F16, BF16, I32, I16)


def repeat(a: Tensor, b: Tensor):
    """a tiled to the shape of b, whose values do not matter: every b.ne[i] is a multiple of a.ne[i].

    NumPy: np.tile(a, b.shape / a.shape).  F32, F16, BF16, I16, I32.  Errors: ShapeError, TypeMismatch.  Source:
    ggml_repeat.
    """
    return repeat_to(a, b.ne, b.ndim)


def repeat_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int):
    """As `repeat`, a tiled to [ne0, ne1, ne2, ne3], multiples of its shape.  Source: ggml_repeat_4d."""
    return repeat_to(a, (int(ne0), int(ne1), int(ne2), int(ne3)), 4)


def repeat_to(a, wanted, ndim):
    """a tiled to the sizes `wanted`, with `ndim` axes."""
    require_type("repeat", a, TYPES)
    if not all(n >= 0 and (n == 0 if m == 0 else n % m == 0) for n, m in zip(wanted, a.ne, strict=True)):
        raise ShapeError(f"repeat: {list(wanted)} is not a multiple of {describe(a)} in every dimension")
    return a.ctx.node(OP.REPEAT, a.type, wanted, (a,), ndim=ndim)


def reference(t, a):
    return np.tile(a, [n // m for n, m in zip(reversed(t.ne), a.shape, strict=True)])


def _make(size):
    load, store = ONE[size]

    @inline
    def rows(node, ith, start, stop):
        a, d = node + SRC0, node + DST
        n0, m0, a0 = ne(d, 0), ne(a, 0), nb(a, 0)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            pd, pa = row_addr(d, i1, i2, i3), row_addr_mod(a, i1, i2, i3)
            if m0 == 1:
                x = load(pa)
                for i in range(n0):
                    store(pd + i * size, x)
            elif a0 == size:
                for i in range(0, n0, m0):
                    move_bytes(pd + i * size, pa, m0 * size, ne(d, 1) * n0 * size)
            else:
                for i in range(n0):
                    store(pd + i * size, load(pa + i % m0 * a0))
        return OK
    return over_chunks(rows, chunking=MOVED)


def kernel(t, n_threads):
    size = t.type.nbytes
    if t.src[0].type is not t.type or t.type not in TYPES:
        return None
    return Kernel(f"repeat-{size}", lambda: _make(size), cost=0.025 * touched_nbytes(t))


def cases():

    def leaf(inp, ty, shape):
        return inp.new(ty, shape) if ty.dtype is None or ty.dtype.kind == "f" else inp.ids(ty, shape, 1000)
    for ty in TYPES:
        for shape, by in (((12, 5, 4, 3), (1, 1, 1, 2)), ((10, 5, 4, 3), (2, 1, 3, 1)), ((1, 5, 2, 1), (33, 2, 1, 1)),
                          ((160, 2, 1, 1), (2, 2, 2, 2))):
            wanted = tuple(n * k for n, k in zip(shape, by, strict=True))
            yield Case(f"{ty!r} {shape} {by}", lambda inp, ty=ty, shape=shape, wanted=wanted: repeat_4d(
                leaf(inp, ty, shape), *wanted), 0.0)
    yield Case("transposed", lambda inp: repeat_4d(permute(inp.new(F32, (4, 6, 2, 1)), 1, 0, 2, 3), 12, 4, 2, 2), 0.0)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    return (lambda: g.fit(dy, t.src[0]),)


SPECS = (Spec(op=OP.REPEAT, builders=(repeat, repeat_4d), reference=reference, kernel=kernel,
              gradient=gradient, rows=along(0), cases=cases,
              rebuild=lambda n: n.call("repeat_4d", *n.src, *n.ne)),)
