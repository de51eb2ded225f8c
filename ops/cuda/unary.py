"""Elementwise functions of one tensor (ops/elementwise/unary.py), scale, clamp, fill, leaky_relu: formulas in
float32."""
import math

from numpy import float32 as f32

from ggjit.ops.core.record import OP, UNARY
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.core import device, erfc, exp, expm1, fabs, fmax, fmin, log1p
from ggjit.ops.cuda.elementwise import map_launch, plain

ZERO, ONE, HALF = f32(0), f32(1), f32(0.5)
SQRT_2_OVER_PI, SQRT_HALF = f32(math.sqrt(2 / math.pi)), f32(math.sqrt(0.5))
GELU_CUBE, GELU_QUICK = f32(0.044715), f32(1.702)
tanh, log = core.tanh, core.log


@device
def sgn(x):
    return ONE if x > ZERO else (-ONE if x < ZERO else ZERO)


@device
def neg(x):
    return -x


@device
def step(x):
    return ONE if x > ZERO else ZERO


@device
def elu(x):
    return x if x > ZERO else expm1(x)


@device
def relu(x):
    return x if x > ZERO else ZERO


@device
def sigmoid(x):
    return ONE / (ONE + exp(-x))


@device
def silu(x):
    return x / (ONE + exp(-x))


@device
def not_below_100(x):
    """max(x, -100), NaN stays NaN: at -infinity the forms of gelu would be -infinity * 0."""
    return f32(-100) if x < f32(-100) else x


@device
def gelu(x):
    x = not_below_100(x)
    return HALF * x * (ONE + tanh(SQRT_2_OVER_PI * x * (ONE + GELU_CUBE * x * x)))


@device
def gelu_erf(x):
    x = not_below_100(x)
    return HALF * x * erfc(-x * SQRT_HALF)


@device
def gelu_quick(x):
    return x / (ONE + exp(-GELU_QUICK * x))


@device
def hardsigmoid(x):
    return fmin(ONE, fmax(ZERO, (x + f32(3)) / f32(6)))


@device
def hardswish(x):
    return x * hardsigmoid(x)


@device
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|)"""
    return (x if x > ZERO else ZERO) + log1p(exp(-fabs(x)))


@device
def sqr(x):
    return x * x


@device
def xielu(x, p0, alpha_n, alpha_p, beta, eps):
    if x > ZERO:
        return alpha_p * x * x + beta * x
    return (expm1(eps if eps < x else x) - x) * alpha_n + beta * x


@device
def leaky_relu(x, slope, p1, p2, p3, p4):
    return x if x > ZERO else slope * x


@device
def scale(x, s, b, p2, p3, p4):
    return x * s + b


@device
def clamp(x, low, high, p2, p3, p4):
    y = x if x < high else high
    return y if y > low else low


@device
def fill(x, c, p1, p2, p3, p4):
    return c


FUNCTIONS = {
    UNARY.ABS: fabs, UNARY.SGN: sgn, UNARY.NEG: neg, UNARY.STEP: step, UNARY.TANH: tanh, UNARY.ELU: elu,
    UNARY.RELU: relu, UNARY.SIGMOID: sigmoid, UNARY.GELU: gelu, UNARY.GELU_QUICK: gelu_quick, UNARY.SILU: silu,
    UNARY.HARDSWISH: hardswish, UNARY.HARDSIGMOID: hardsigmoid, UNARY.EXP: exp, UNARY.EXPM1: expm1,
    UNARY.SOFTPLUS: softplus, UNARY.GELU_ERF: gelu_erf, UNARY.FLOOR: core.floor, UNARY.CEIL: core.ceil,
    UNARY.ROUND: core.round_away, UNARY.TRUNC: core.trunc}
OPS = {OP.SQR: plain(sqr), OP.SQRT: plain(core.sqrt), OP.LOG: plain(log), OP.SIN: plain(core.sin),
       OP.COS: plain(core.cos), OP.LEAKY_RELU: leaky_relu, OP.SCALE: scale, OP.CLAMP: clamp, OP.FILL: fill}


def _unary(t):
    which = UNARY(int(t.op_params[0]))
    return map_launch(t, which.name.lower(), xielu if which is UNARY.XIELU else plain(FUNCTIONS[which]))


def _op(t):
    return map_launch(t, t.op.name.lower(), OPS[t.op])


CUDA = {OP.UNARY: _unary, **dict.fromkeys(OPS, _op)}
