"""fill: a constant everywhere."""
import numpy as np

from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import require_type
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.types import F16, F32
from ggjit.ops.elementwise.elementwise import lift, map_kernel

FILL = lift(lambda b, x, p: p[0])


def fill(a, c):
    """c everywhere; shape and type of a (F32, F16), whose values do not matter; NumPy: np.full_like(a, c).

    op params: c.  Errors: TypeMismatch.  Source: ggml_fill.
    """
    require_type("fill", a, (F32, F16))
    return a.ctx.node(OP.FILL, a.type, a.ne, (a,), (float(c),))


def fill_inplace(a, c):
    """As `fill`, written over a; returns a view of a.  Source: ggml_fill_inplace."""
    require_type("fill", a, (F32, F16))
    return a.ctx.node(OP.FILL, a.type, a.ne, (a,), (float(c),), view_of=a)


def reference(t, a):
    return np.full(a.shape, float(t.param_floats[0]))


def kernel(t, n_threads):
    return map_kernel(t, "fill", FILL)


def cases():
    for type in (F32, F16):
        for ne in ((303, 207, 11, 3), (5, 1, 1, 1)):
            yield Case(f"{type!r} {ne}", lambda inp, type=type, ne=ne: fill(inp.new(type, ne), -152.0))
        yield Case(f"{type!r} inplace", lambda inp, type=type: fill_inplace(inp.new(type, (17, 3)), 3.5))


SPECS = (Spec(op=OP.FILL, builders=(fill, fill_inplace), reference=reference, kernel=kernel, in_place=True,
              cases=cases),)
