"""clamp: x limited to [min, max], in place."""
import numpy as np

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import require_type
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.types import F16, F32
from ggjit.ops.elementwise.elementwise import lift, map_kernel


def _clamp(b, x, p):
    """max(min(x, p1), p0); NaN becomes p0, as in ggml's MAX(MIN(x, max), min)."""
    x = b.select(b.fcmp_ordered("<", x, p[1]), x, p[1])
    return b.select(b.fcmp_ordered(">", x, p[0]), x, p[0])


CLAMP = lift(_clamp)


def clamp(a, min, max):
    """min(max(a, min), max), elementwise; a [n0, n1, n2, n3] F32 or F16 -> a view of a.  NumPy: np.clip(a, min, max).

    Always in place, as in ggml up to 0.13 (0.26 makes a new tensor here): gg.clamp(gg.dup(a), ...) keeps a.  op params:
    min, max.  Errors: TypeMismatch, ParamError (min > max).  Source: ggml_clamp.
    """
    require_type("clamp", a, (F32, F16))
    if not min <= max:
        raise ParamError(f"clamp: min {min} is above max {max}")
    return a.ctx.node(OP.CLAMP, a.type, a.ne, (a,), (float(min), float(max)), view_of=a)


def reference(t, a):
    return np.clip(a.astype(np.float64), *t.param_floats[:2])


def kernel(t, n_threads):
    return map_kernel(t, "clamp", CLAMP)


def cases():
    for type in (F32, F16):
        for ne in ((10, 5, 4, 3), (7, 1, 5, 3)):
            yield Case(f"{type!r} {ne}", lambda inp, type=type, ne=ne: clamp(inp.new(type, ne), -0.5, 0.5))


SPECS = (Spec(op=OP.CLAMP, builders=(clamp,), reference=reference, kernel=kernel, cases=cases),)
