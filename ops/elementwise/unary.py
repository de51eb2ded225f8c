"""Elementwise functions of one tensor: the 22 of OP.UNARY, and SQR, SQRT, LOG, SIN, COS, LEAKY_RELU, which have
numbers of their own.

Each is one line of FUNCTIONS: its float64 meaning and its vector form.  Types F32, F16, BF16; computed in float32.
Differences from ggml's CPU code, all within its tolerance: gelu and gelu_quick are computed where ggml reads a table
of float16 results; expm1 does not cancel near 0 (ggml: exp(x) - 1); softplus keeps its tail (ggml: log(1 + e^x)).
"""
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP, UNARY
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.split import elementwise
from ggjit.ops.core.types import Tensor
from ggjit.ops.elementwise.elementwise import FLOATS, TOLERANCE, lift, map_kernel, number, positive
from ggjit.ops.native import mathfun
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import call_intrinsic
from ggjit.ops.native.simd import fma_ir, suffix


@dataclasses.dataclass(frozen=True)
class UnaryFunction:
    """An elementwise function: what it is called with, in float64 and in vectors, and what it costs."""
    formula: str
    numpy: Callable                     # float64 array, then params p1.. -> float64 array
    vector: Callable                    # f(x, p0..p4), see elementwise.py
    cost: float = 0.025                 # nanoseconds a byte touched
    low: float = -10.0                  # range of test inputs
    high: float = 10.0


def _llvm(name):
    return lift(lambda b, x, p: call_intrinsic(b, f"llvm.{name}.{suffix(x)}", x.type, [x]))


def _of(build):
    """The function of one element made of an IR function of mathfun, or of any build(b, x)."""
    return lift(lambda b, x, p: build(b, x))


def _hardsigmoid(b, x):
    y = fma_ir(b, x, number(x, 1 / 6), number(x, 0.5))
    return mathfun.at_most_ir(b, b.select(positive(b, y), y, number(x, 0.0)), 1.0)      # 0 for NaN, as ggml


def _softplus(b, x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|)"""
    magnitude = call_intrinsic(b, f"llvm.fabs.{suffix(x)}", x.type, [x])
    e = mathfun.exp_ir(b, b.fneg(magnitude), never_positive=True)
    return b.fadd(mathfun.at_least_ir(b, x, 0.0), mathfun.log1p_ir(b, e))


def _elu(b, x):
    return b.select(positive(b, x), x, mathfun.expm1_ir(b, x))


def _xielu(b, x, p):
    alpha_n, alpha_p, beta, eps = p[1:]
    low = b.select(b.fcmp_ordered("<", eps, x), eps, x)
    right = b.fmul(b.fmul(alpha_p, x), x)
    left = b.fmul(b.fsub(mathfun.expm1_ir(b, low), x), alpha_n)
    return fma_ir(b, beta, x, b.select(positive(b, x), right, left))


def _sign(b, x):
    one = number(x, 1.0)
    negative = b.fcmp_ordered("<", x, number(x, 0.0))
    return b.select(positive(b, x), one, b.select(negative, number(x, -1.0), number(x, 0.0)))


@inline
def _sin(x, p0, p1, p2, p3, p4):
    return mathfun.vsin_any(x)


@inline
def _cos(x, p0, p1, p2, p3, p4):
    return mathfun.vcos_any(x)


def _np_sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _np_gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def _np_gelu_erf(x):
    return x / 2 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def _np_xielu(x, alpha_n, alpha_p, beta, eps):
    return np.where(x > 0, alpha_p * x * x, (np.expm1(np.minimum(x, eps)) - x) * alpha_n) + beta * x


FUNCTIONS = {
    "abs": UnaryFunction("|x|", np.abs, _llvm("fabs")),
    "sgn": UnaryFunction("-1, 0 or 1", np.sign, _of(_sign)),
    "neg": UnaryFunction("-x", np.negative, _of(lambda b, x: b.fneg(x))),
    "step": UnaryFunction("1 if x > 0 else 0", lambda x: (x > 0) * 1.0,
                         _of(lambda b, x: b.select(positive(b, x), number(x, 1.0), number(x, 0.0)))),
    "tanh": UnaryFunction("tanh(x)", np.tanh, _of(mathfun.tanh_ir), 0.035),
    "elu": UnaryFunction("x if x > 0 else e^x - 1", lambda x: np.where(x > 0, x, np.expm1(x)), _of(_elu), 0.035),
    "relu": UnaryFunction("max(x, 0)", lambda x: np.maximum(x, 0),
                         _of(lambda b, x: b.select(positive(b, x), x, number(x, 0.0)))),
    "sigmoid": UnaryFunction("1 / (1 + e^-x)", _np_sigmoid, _of(mathfun.sigmoid_ir), 0.03),
    "gelu": UnaryFunction("x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))", _np_gelu, _of(mathfun.gelu_ir), 0.03),
    "gelu_quick": UnaryFunction("x / (1 + e^(-1.702 x))", lambda x: x * _np_sigmoid(1.702 * x),
                               _of(mathfun.gelu_quick_ir), 0.03),
    "silu": UnaryFunction("x / (1 + e^-x)", lambda x: x * _np_sigmoid(x), _of(mathfun.silu_ir), 0.03),
    "hardswish": UnaryFunction("x min(1, max(0, (x + 3) / 6))", lambda x: x * np.clip((x + 3) / 6, 0, 1),
                              _of(lambda b, x: b.fmul(x, _hardsigmoid(b, x)))),
    "hardsigmoid": UnaryFunction("min(1, max(0, (x + 3) / 6))", lambda x: np.clip((x + 3) / 6, 0, 1),
                                _of(_hardsigmoid)),
    "exp": UnaryFunction("e^x", np.exp, _of(mathfun.exp_ir), 0.03),
    "expm1": UnaryFunction("e^x - 1", np.expm1, _of(mathfun.expm1_ir), 0.03),
    "softplus": UnaryFunction("log(1 + e^x)", lambda x: np.logaddexp(0, x), _of(_softplus), 0.05),
    "gelu_erf": UnaryFunction("x/2 (1 + erf(x / sqrt 2))", _np_gelu_erf, _of(mathfun.gelu_erf_ir), 0.03),
    "xielu": UnaryFunction("x > 0: ap x^2 + b x; else (e^min(x, eps) - 1 - x) an + b x", _np_xielu, lift(_xielu),
                           0.035),
    "floor": UnaryFunction("largest integer <= x", np.floor, _llvm("floor")),
    "ceil": UnaryFunction("smallest integer >= x", np.ceil, _llvm("ceil")),
    "round": UnaryFunction("nearest integer, halves away from 0", lambda x: np.trunc(x + np.copysign(0.5, x)),
                          _llvm("round")),
    "trunc": UnaryFunction("integer part", np.trunc, _llvm("trunc")),
    "sqr": UnaryFunction("x^2", np.square, _of(lambda b, x: b.fmul(x, x))),
    "sqrt": UnaryFunction("sqrt(x)", np.sqrt, _llvm("sqrt"), 0.03, 50.0, 100.0),
    "log": UnaryFunction("natural logarithm", np.log, _of(mathfun.log_ir), 0.035, 0.9, 1.1),
    "sin": UnaryFunction("sin(x)", np.sin, _sin, 0.035, -6.5, 6.5),
    "cos": UnaryFunction("cos(x)", np.cos, _cos, 0.035, -6.5, 6.5),
    "leaky_relu": UnaryFunction("x if x > 0 else slope x", lambda x, slope: np.where(x > 0, x, slope * x),
                            lift(lambda b, x, p: b.select(positive(b, x), x, b.fmul(x, p[0])))),
}


# how a function is written in a node: (op, params)
NUMBER = {name: (OP.UNARY, (int(UNARY[name.upper()]),)) if name.upper() in UNARY.__members__ else (OP[name.upper()], ())
          for name in FUNCTIONS}


# ---------------------------------------------------------------- builders
def _node(name, op, a, params, in_place):
    require_type(name, a, FLOATS)
    require(rows_contiguous(a), f"{name}: elements of a row must lie side by side", a, remedy="use gg.cont first")
    return a.ctx.node(op, a.type, a.ne, (a,), params, view_of=a if in_place else None)


def _unary(a: Tensor, op: int, in_place: bool):
    """The elementwise function `op` (a UNARY number) of a; shape and type of a (F32, F16, BF16).

    Elements of a row lie side by side.  op params: op.  Errors: TypeMismatch, ShapeError, ParamError.  Source:
    ggml_unary.
    """
    try:
        op = UNARY(op)
    except ValueError:
        raise ParamError(f"unary: {op!r} is not a UNARY number (0 to {len(UNARY) - 1})") from None
    if op is UNARY.XIELU:
        raise ParamError("unary: xielu has parameters, call gg.xielu(a, alpha_n, alpha_p, beta, eps)")
    return _node(op.name.lower(), OP.UNARY, a, (int(op),), in_place)


unary, unary_inplace = in_place_pair(_unary)


def xielu(a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float):
    """b x + (sp(ap) x^2 if x > 0 else (e^min(x, eps) - 1 - x) (b + sp(an))), b = beta, an = alpha_n, ap = alpha_p.

    sp = softplus, which is applied to the alphas here, as in ggml.  x = a; shape and type of a (F32, F16, BF16).  op
    params: 17, beta + sp(alpha_n), sp(alpha_p), beta, eps.  Errors: TypeMismatch, ShapeError.  Source: ggml_xielu;
    arXiv 2411.13010.
    """
    with np.errstate(invalid="ignore"):                 # a NaN stays one, without a warning
        negative, positive_ = float(np.logaddexp(0, alpha_n)), float(np.logaddexp(0, alpha_p))
    params = (int(UNARY.XIELU), float(beta) + negative, positive_, float(beta), float(eps))
    return _node("xielu", OP.UNARY, a, params, False)


def leaky_relu(a: Tensor, negative_slope: float, inplace: bool = False):
    """a if a > 0 else negative_slope a, elementwise; shape and type of a (F32, F16, BF16).

    inplace: written over a.  op params: negative_slope.  Errors: TypeMismatch, ShapeError.  Source: ggml_leaky_relu.
    """
    return _node("leaky_relu", OP.LEAKY_RELU, a, (float(negative_slope),), inplace)


# functions that ggml's CPU backend computes differently
QUIRKS = {"gelu": "; ggml reads it from a table of F16 values, which is off by up to 2e-3",
          "gelu_quick": "; ggml reads it from a table of F16 values, which is off by up to 2e-3",
          "gelu_erf": "; 0 for -infinity, where ggml gives NaN",
          "expm1": "; ggml computes e^x and subtracts 1, which loses small x"}
PARAMS = {OP.UNARY: "op params: the UNARY number"}


def _simple(function, in_place):
    op, params = NUMBER[function]
    name = function + "_inplace" * in_place

    def build(a: Tensor):
        return _node(name, op, a, params, in_place)
    build.__name__ = build.__qualname__ = name
    build.__doc__ = (f"As `{function}`, written over a; returns a view of a.  Source: ggml_{name}." if in_place else
                     f"{FUNCTIONS[function].formula} for every x of a; shape and type of a (F32, F16, BF16)"
                     f"{QUIRKS.get(function, '')}.\n\n{PARAMS.get(op, 'op params: none')}.  Errors: TypeMismatch, "
                     f"ShapeError (elements of a row not side by side).  Source: ggml_{name}.")
    return build


PARAMETRIC = ("xielu", "leaky_relu")
SIMPLE = {name: (_simple(name, False), _simple(name, True)) for name in FUNCTIONS if name not in PARAMETRIC}


# ---------------------------------------------------------------- reference, kernel, cases
def _function_name(t):
    return (UNARY(int(t.op_params[0])) if t.op == OP.UNARY else t.op).name.lower()


def _parameters(t):
    """The function's numbers besides x."""
    slots = {"xielu": slice(1, 5), "leaky_relu": slice(1)}.get(_function_name(t), slice(0))
    return [float(p) for p in t.param_floats[slots]]


def reference(t, a):
    with np.errstate(all="ignore"):
        return FUNCTIONS[_function_name(t)].numpy(a.astype(np.float64), *_parameters(t))


def kernel(t, n_threads):
    name = _function_name(t)
    return map_kernel(t, name, FUNCTIONS[name].vector, FUNCTIONS[name].cost)


def cases(name):
    f = FUNCTIONS[name]

    def make(type, ne, view, in_place):
        def build(inp):
            a = inp.new(type, ne, lo=f.low, hi=f.high)
            if view:                                            # the source is a view of every second row
                a = a.ctx.node(OP.VIEW, type, (ne[0] - 3, (ne[1] + 1) // 2, *ne[2:]), (a,), view_of=a,
                               nb=(a.nb[0], 2 * a.nb[1], a.nb[2], a.nb[3]))
            if name == "xielu":
                return xielu(a, 4.0, 20.0, 0.5, 1e-6)
            if name == "leaky_relu":
                return leaky_relu(a, 0.1, in_place)
            return SIMPLE[name][in_place](a)
        return build
    for type in FLOATS:
        for ne, view, in_place in (((128, 3, 2, 2), False, False), ((7, 5, 3, 2), False, True),
                                   ((35, 5, 2, 1), True, False), ((5, 1, 1, 1), False, False)):
            if not (in_place and name == "xielu"):
                label = f"{name} {type!r} {ne}{' view' * view}{' inplace' * in_place}"
                yield Case(label, make(type, ne, view, in_place), TOLERANCE[type])


# ---------------------------------------------------------------- gradient
def _of_gelu(g, x, y):
    """y = x s, s = sigmoid(2 u), u = c (x + k x^3): y' = s + x (s - s^2) 2 u'."""
    c, k, x2 = 2 * math.sqrt(2 / math.pi), 0.044715, g.sqr(x)
    s = g.sigmoid(g.mul(x, g.scale_bias(x2, c * k, c)))
    return g.add(s, g.mul(g.mul(x, g.scale_bias(x2, 3 * c * k, c)), g.sub(s, g.sqr(s))))


def _of_gelu_quick(g, x, y):
    s = g.sigmoid(g.scale(x, 1.702))
    return g.add(s, g.mul(g.scale(x, 1.702), g.sub(s, g.sqr(s))))


def _of_gelu_erf(g, x, y):
    """x' = Phi(x) + x phi(x), with Phi(x) = gelu_erf(x) / x; next to 0, where that is 0 / 0, of a point beside it."""
    at = g.add(x, g.scale(g.step(g.scale_bias(g.abs(x), -1.0, 1e-20)), 4e-20))
    density = g.scale(g.exp(g.scale(g.sqr(x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return g.add(g.div(g.gelu_erf(at), at), g.mul(x, density))


def _between(g, x, limit):
    """1 where |x| < limit, else 0."""
    return g.step(g.scale_bias(g.abs(x), -1.0, limit))


def _of_xielu(g, x, y, alpha_n, alpha_p, beta, eps):
    below = g.scale_bias(x, -1.0, eps)                      # eps - x
    low = g.exp(g.scale_bias(g.relu(below), -1.0, eps))     # e^min(x, eps)
    left = g.scale_bias(g.mul(low, g.step(below)), alpha_n, -alpha_n)
    right = g.scale_bias(g.relu(x), 2 * alpha_p, beta)
    return g.add(right, g.mul(left, g.scale_bias(g.step(x), -1.0, 1.0)))


# y' from x and y as nodes; functions that are not here are constant between their steps
DERIVATIVES = {
    "abs": lambda g, x, y: g.sgn(x),
    "neg": lambda g, x, y: g.fill(x, -1.0),
    "tanh": lambda g, x, y: g.scale_bias(g.sqr(y), -1.0, 1.0),
    "elu": lambda g, x, y: g.exp(g.neg(g.relu(g.neg(x)))),
    "relu": lambda g, x, y: g.step(x),
    "sigmoid": lambda g, x, y: g.sub(y, g.sqr(y)),
    "gelu": _of_gelu, "gelu_quick": _of_gelu_quick, "gelu_erf": _of_gelu_erf, "xielu": _of_xielu,
    "silu": lambda g, x, y: g.silu_back(g.fill(x, 1.0), x),
    "hardswish": lambda g, x, y: g.add(g.hardsigmoid(x), g.scale(g.mul(x, _between(g, x, 3.0)), 1 / 6)),
    "hardsigmoid": lambda g, x, y: g.scale(_between(g, x, 3.0), 1 / 6),
    "exp": lambda g, x, y: y,
    "expm1": lambda g, x, y: g.scale_bias(y, 1.0, 1.0),
    "softplus": lambda g, x, y: g.sigmoid(x),
    "sqr": lambda g, x, y: g.scale(x, 2.0),
    "sin": lambda g, x, y: g.cos(x),
    "cos": lambda g, x, y: g.neg(g.sin(x)),
    "leaky_relu": lambda g, x, y, slope: g.scale_bias(g.step(x), 1.0 - slope, slope),
}
# dx from dy in fewer nodes than dy y'
SHORTER = {
    "neg": lambda g, x, y, dy: g.neg(dy),
    "silu": lambda g, x, y, dy: g.silu_back(dy, x),
    "sqrt": lambda g, x, y, dy: g.scale(g.div(dy, y), 0.5),
    "log": lambda g, x, y, dy: g.div(dy, x),
}


def gradient(g, t, dy):
    """dx = dy y'."""
    name = _function_name(t)
    if name not in DERIVATIVES and name not in SHORTER:
        return (None,)

    def of_x():
        x, y = g.f32(t.src[0]), g.f32(t)
        if name in SHORTER:
            return SHORTER[name](g, x, y, dy)
        return g.mul(dy, DERIVATIVES[name](g, x, y, *_parameters(t)))
    return (of_x,)


OF_UNARY = [u.name.lower() for u in UNARY]


def _rebuild(n):
    if n.i[0] != UNARY.XIELU:
        return n.call("unary", *n.src, n.i[0])
    # the builder takes the alphas before softplus: it only checks here, and the parameters are copied from the node
    return n.call("xielu", *n.src, 0.0, 0.0, n.f[3], n.f[4]), 5


SPECS = (
    Spec(op=OP.UNARY, builders=(unary, unary_inplace, xielu, *(f for n in OF_UNARY if n in SIMPLE for f in SIMPLE[n])),
         reference=reference, kernel=kernel, in_place=True, in_place_2023=True,
         gradient=gradient, rows=along(0), split=elementwise, cases=lambda: (c for n in OF_UNARY for c in cases(n)),
         rebuild=_rebuild),
    *(Spec(op=op, builders=SIMPLE[op.name.lower()], reference=reference, kernel=kernel,
           in_place=op in (OP.SQR, OP.SQRT, OP.LOG), in_place_2023=op in (OP.SQR, OP.SQRT, OP.LOG),
           gradient=gradient, rows=along(0), split=elementwise, cases=lambda op=op: cases(op.name.lower()))
      for op in (OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS)),
    Spec(op=OP.LEAKY_RELU, builders=(leaky_relu,), reference=reference, kernel=kernel, gradient=gradient,
         rows=along(0), split=elementwise, cases=lambda: cases("leaky_relu"),
         rebuild=lambda n: n.call("leaky_relu", *n.src, n.f[0], n.in_place)))
