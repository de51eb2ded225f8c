"""scale: s x + b."""
import numpy as np

from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import require_type
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.types import F32
from ggjit.ops.elementwise.elementwise import lift, map_kernel
from ggjit.ops.native.simd import fma_ir

SCALE = lift(lambda b, x, p: fma_ir(b, x, p[0], p[1]))


def _scale(a, s, b, in_place):
    require_type("scale", a, (F32,))
    return a.ctx.node(OP.SCALE, a.type, a.ne, (a,), (float(s), float(b)), view_of=a if in_place else None)


def scale(a, s):
    """s a; shape of a, F32; NumPy: s * a.  op params: s, 0.  Errors: TypeMismatch.  Source: ggml_scale."""
    return _scale(a, s, 0.0, False)


def scale_inplace(a, s):
    """As `scale`, written over a; returns a view of a.  Source: ggml_scale_inplace."""
    return _scale(a, s, 0.0, True)


def scale_bias(a, s, b):
    """s a + b, one rounding; shape of a, F32; s and b are numbers.

    op params: s, b.  Errors: TypeMismatch.  Source: ggml_scale_bias.
    """
    return _scale(a, s, b, False)


def scale_bias_inplace(a, s, b):
    """As `scale_bias`, written over a; returns a view of a.  Source: ggml_scale_bias_inplace."""
    return _scale(a, s, b, True)


def kernel(t, n_threads):
    return map_kernel(t, "scale", SCALE)


def reference(t, a):
    return a.astype(np.float64) * float(t.param_floats[0]) + float(t.param_floats[1])


def _transposed(a):
    return a.ctx.node(OP.PERMUTE, a.type, (a.ne[1], a.ne[0], *a.ne[2:]), (a,), (1, 0, 2, 3), view_of=a,
                      nb=(a.nb[1], a.nb[0], a.nb[2], a.nb[3]))


def cases():
    for ne in ((10, 10, 10, 10), (33, 3, 1, 1)):
        yield Case(f"{ne}", lambda inp, ne=ne: scale(inp.new(F32, ne), 2.5))
        yield Case(f"{ne} bias", lambda inp, ne=ne: scale_bias(inp.new(F32, ne), 2.5, -1.25))
        yield Case(f"{ne} inplace", lambda inp, ne=ne: scale_bias_inplace(inp.new(F32, ne), 0.5, 1.0))
    yield Case("transposed", lambda inp: scale(_transposed(inp.new(F32, (9, 7, 2, 1))), -3.0))


SPECS = (Spec(op=OP.SCALE, builders=(scale, scale_inplace, scale_bias, scale_bias_inplace), reference=reference,
              kernel=kernel, in_place=True, in_place_2023=True, cases=cases),)
