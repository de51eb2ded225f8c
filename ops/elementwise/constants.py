"""scale, clamp, fill: every element of a tensor with one or two numbers.

    scale    s x + b
    clamp    min(max(x, low), high), in place
    fill     c
"""
import numpy as np

from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import require_param, require_type
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.split import elementwise
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.elementwise.elementwise import lift, map_kernel
from ggjit.ops.native.simd import fma_ir


# ---------------------------------------------------------------- builders
def _scale_node(a, s, b, in_place):
    require_type("scale", a, (F32,))
    return a.ctx.node(OP.SCALE, a.type, a.ne, (a,), (float(s), float(b)), view_of=a if in_place else None)


def _scale(a: Tensor, s: float, in_place: bool):
    """s a; shape of a, F32; NumPy: s * a.  op params: s, 0.  Errors: TypeMismatch.  Source: ggml_scale."""
    return _scale_node(a, s, 0.0, in_place)


scale, scale_inplace = in_place_pair(_scale)


def _scale_bias(a: Tensor, s: float, b: float, in_place: bool):
    """s a + b, one rounding; shape of a, F32; s and b are numbers.

    op params: s, b.  Errors: TypeMismatch.  Source: ggml_scale_bias.
    """
    return _scale_node(a, s, b, in_place)


scale_bias, scale_bias_inplace = in_place_pair(_scale_bias)


def clamp(a: Tensor, min: float, max: float):
    """min(max(a, min), max), elementwise; a [n0, n1, n2, n3] F32 or F16 -> a view of a.  NumPy: np.clip(a, min, max).

    Always in place, as in ggml up to 0.13 (0.26 makes a new tensor here): gg.clamp(gg.dup(a), ...) keeps a.  op params:
    min, max.  Errors: TypeMismatch, ParamError (min > max).  Source: ggml_clamp.
    """
    require_type("clamp", a, (F32, F16))
    require_param(min <= max, f"clamp: min {min} is above max {max}")
    return a.ctx.node(OP.CLAMP, a.type, a.ne, (a,), (float(min), float(max)), view_of=a)


def _fill(a: Tensor, c: float, in_place: bool):
    """c everywhere; shape and type of a (F32, F16), whose values do not matter; NumPy: np.full_like(a, c).

    op params: c.  Errors: TypeMismatch.  Source: ggml_fill.
    """
    require_type("fill", a, (F32, F16))
    return a.ctx.node(OP.FILL, a.type, a.ne, (a,), (float(c),), view_of=a if in_place else None)


fill, fill_inplace = in_place_pair(_fill)


# ---------------------------------------------------------------- references and kernels
def reference_scale(t, a):
    return a.astype(np.float64) * float(t.param_floats[0]) + float(t.param_floats[1])


def reference_clamp(t, a):
    return np.clip(a.astype(np.float64), *t.param_floats[:2])


def reference_fill(t, a):
    return np.full(a.shape, float(t.param_floats[0]))


def _clamp(b, x, p):
    """max(min(x, p1), p0); NaN becomes p0, as in ggml's MAX(MIN(x, max), min)."""
    x = b.select(b.fcmp_ordered("<", x, p[1]), x, p[1])
    return b.select(b.fcmp_ordered(">", x, p[0]), x, p[0])


FUNCTIONS = {OP.SCALE: lift(lambda b, x, p: fma_ir(b, x, p[0], p[1])), OP.CLAMP: lift(_clamp),
             OP.FILL: lift(lambda b, x, p: p[0])}


def kernel(t, n_threads):
    return map_kernel(t, OP(t.op).name.lower(), FUNCTIONS[t.op])


# ---------------------------------------------------------------- cases
def _transposed(a):
    return a.ctx.node(OP.PERMUTE, a.type, (a.ne[1], a.ne[0], *a.ne[2:]), (a,), (1, 0, 2, 3), view_of=a,
                      nb=(a.nb[1], a.nb[0], a.nb[2], a.nb[3]))


def scale_cases():
    for ne in ((10, 10, 9, 10), (33, 3, 1, 1)):
        yield Case(f"{ne}", lambda inp, ne=ne: scale(inp.new(F32, ne), 2.5))
        yield Case(f"{ne} bias", lambda inp, ne=ne: scale_bias(inp.new(F32, ne), 2.5, -1.25))
        yield Case(f"{ne} inplace", lambda inp, ne=ne: scale_bias_inplace(inp.new(F32, ne), 0.5, 1.0))
    yield Case("transposed", lambda inp: scale(_transposed(inp.new(F32, (9, 7, 2, 1))), -3.0))


def clamp_cases():
    for type in (F32, F16):
        for ne in ((12, 5, 4, 3), (9, 1, 5, 3)):
            yield Case(f"{type!r} {ne}", lambda inp, type=type, ne=ne: clamp(inp.new(type, ne), -0.5, 0.5))


def fill_cases():
    for type in (F32, F16):
        for ne in ((303, 205, 11, 3), (5, 1, 1, 1)):
            yield Case(f"{type!r} {ne}", lambda inp, type=type, ne=ne: fill(inp.new(type, ne), -152.0))
        yield Case(f"{type!r} inplace", lambda inp, type=type: fill_inplace(inp.new(type, (17, 3)), 3.5))


# ---------------------------------------------------------------- gradient
def gradient_scale(g, t, dy):
    return (lambda: g.scale(dy, float(t.param_floats[0])),)


def gradient_clamp(g, t, dy):
    """dy where the result is inside its limits, 0 at them."""
    low, high = (float(p) for p in t.param_floats[:2])

    def inside():
        y = g.f32(t)
        return g.mul(g.mul(dy, g.step(g.scale_bias(y, 1.0, -low))), g.step(g.scale_bias(y, -1.0, high)))
    return (inside,)


def gradient_fill(g, t, dy):
    return (None,)


SPECS = (
    Spec(op=OP.SCALE, builders=(scale, scale_inplace, scale_bias, scale_bias_inplace), reference=reference_scale,
         kernel=kernel, in_place=True, in_place_2023=True, gradient=gradient_scale, rows=along(0),
         split=elementwise, cases=scale_cases, rebuild="scale_bias"),
    Spec(op=OP.CLAMP, builders=(clamp,), reference=reference_clamp, kernel=kernel,
         gradient=gradient_clamp, rows=along(0), split=elementwise, cases=clamp_cases),
    Spec(op=OP.FILL, builders=(fill, fill_inplace), reference=reference_fill, kernel=kernel, in_place=True,
         gradient=gradient_fill, cases=fill_cases))
