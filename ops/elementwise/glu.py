"""Gated linear units: d = act(x) * g, where x and g are the halves of one tensor's rows or two tensors.

    glu(a)                  row of a:  [ x ............ | g ............ ]   ->  row of d: ne0 / 2, rounded down
    glu(a), swapped         row of a:  [ g ............ | x ............ ]
    glu_split(a, b)         x = a, g = b                                     ->  shape of a

Types F32, F16; computed in float32.  Where ne0 is odd the last element of a row is not read, as in ggml.  geglu is
computed where ggml reads a table of float16 results.
"""
import dataclasses
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import GLU, OK, OP, UNARY
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import is_contiguous, require, require_type, same_shape
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import elementwise
from ggjit.ops.core.types import F16, F32, Tensor
from ggjit.ops.elementwise.elementwise import TOLERANCE, number, positive
from ggjit.ops.elementwise.unary import DERIVATIVES, FUNCTIONS
from ggjit.ops.native import mathfun
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, SRC1, nb, ne, param_f32, param_i32, row_addr, row_index
from ggjit.ops.native.row_loops import LIGHT, over_chunks
from ggjit.ops.native.simd import W, fma_ir, splat
from ggjit.ops.types.shared.rows import ROW


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gated unit: y = f(x, g), element by element."""
    formula: str
    numpy: Callable             # (x, g, alpha, limit) float64
    build: Callable             # (b, x, g, alpha, limit) LLVM values
    cost: float                 # nanoseconds a byte touched


def _times(b, y, g):
    """y g, y complete: LLVM may make x s g of (x g) s, and x g may be infinite where s vanishes."""
    return fma_ir(b, y, g, number(y, -0.0))


def _gate(formula, name, build, cost):
    act = FUNCTIONS[name].numpy
    return Gate(formula, lambda x, g, alpha, limit: act(x) * g,
                lambda b, x, g, alpha, limit: _times(b, build(b, x), g), cost)


def _reglu(b, x, g, alpha, limit):
    return b.select(positive(b, x), b.fmul(x, g), ir.Constant(x.type, None))


def _np_oai(x, g, alpha, limit):
    x, g = np.minimum(x, limit), np.clip(g, -limit, limit)
    return x / (1 + np.exp(-alpha * x)) * (g + 1)


def _np_clamp(x, g, alpha, limit):
    x, g = np.minimum(x, limit), np.clip(g, -limit, limit)
    return x / (1 + np.exp(-x)) * g


def _limited(b, x, g, limit):
    """x not above the limit, g not outside +-limit."""
    def least(u, v):
        return b.select(b.fcmp_ordered("<", v, u), v, u)
    low = b.fneg(limit)
    g = least(g, limit)
    return least(x, limit), b.select(b.fcmp_ordered("<", g, low), low, g)


def _clamp(b, x, g, alpha, limit):
    x, g = _limited(b, x, g, limit)
    return _times(b, mathfun.silu_ir(b, x), g)


def _oai(b, x, g, alpha, limit):
    x, g = _limited(b, x, g, limit)
    return _times(b, mathfun.times_sigmoid_ir(b, x, b.fmul(alpha, x)), b.fadd(g, number(x, 1.0)))


# parameters that these gates need besides two tensors
LIMITED = {GLU.SWIGLU_OAI: "alpha and limit", GLU.SWIGLU_CLAMP: "a limit"}
GATES = {
    GLU.REGLU: Gate("x g if x > 0 else 0", lambda x, g, alpha, limit: np.where(x > 0, x * g, 0), _reglu, 0.025),
    GLU.GEGLU: _gate("gelu(x) g, tanh form", "gelu", mathfun.gelu_ir, 0.03),
    GLU.SWIGLU: _gate("silu(x) g", "silu", mathfun.silu_ir, 0.03),
    GLU.SWIGLU_OAI: Gate("x' / (1 + e^(-alpha x')) (g' + 1), x' = min(x, limit), g' = g limited to +-limit",
                         _np_oai, _oai, 0.03),
    GLU.GEGLU_ERF: _gate("gelu_erf(x) g", "gelu_erf", mathfun.gelu_erf_ir, 0.03),
    GLU.GEGLU_QUICK: _gate("gelu_quick(x) g", "gelu_quick", mathfun.gelu_quick_ir, 0.03),
    GLU.SWIGLU_CLAMP: Gate("silu(x') g', x' = min(x, limit), g' = g limited to +-limit", _np_clamp, _clamp, 0.03),
}


# ---------------------------------------------------------------- builders
def _node(name, op, a, b, swapped, alpha=0.0, limit=0.0):
    try:
        op = GLU(op)
    except ValueError:
        raise ParamError(f"{name}: {op!r} is not a GLU number (0 to {len(GLU) - 1})") from None
    for x in (a,) if b is None else (a, b):
        require_type(name, x, (F32, F16))
        require(is_contiguous(x, 1), f"{name}: rows must be contiguous", x, remedy="use gg.cont first")
    if b is not None:
        require(same_shape(a, b) and a.type is b.type, f"{name}: x and g must have one shape and type", a, b)
    ne0 = a.ne[0] // 2 if b is None else a.ne[0]
    return a.ctx.node(OP.GLU, a.type, (ne0, *a.ne[1:]), (a,) if b is None else (a, b),
                      (int(op), int(swapped), float(alpha), float(limit)))


def _other(b):
    if b is None:
        raise TypeMismatch("glu: the split forms take two tensors; for one that holds both halves use glu, swiglu, ...")
    return b


def glu(a: Tensor, op: int, swapped: bool = False):
    """act(x) g of the halves x, g of a's rows: a [2 n, n1, n2, n3] F32 or F16 -> [n, n1, n2, n3].

    op: GLU number, which names act.  swapped: g is the first half.  NumPy: x, g = np.split(a, 2, -1).  Rows contiguous.
    op params: op, swapped, alpha, limit.  Errors: ShapeError, TypeMismatch, ParamError (SWIGLU_OAI, SWIGLU_CLAMP:
    see `swiglu_oai`, `swiglu_clamp`).
    Source: ggml_glu; arXiv 2002.05202.
    """
    if op in LIMITED:
        raise ParamError(f"glu: {GLU(op).name} needs {LIMITED[op]}; use gg.{GLU(op).name.lower()}")
    return _node("glu", op, a, None, swapped)


def glu_split(a: Tensor, b: Tensor, op: int):
    """act(a) b, elementwise; a and b of one shape and type, F32 or F16, rows contiguous; op: GLU number.

    op params and errors as `glu`.  Source: ggml_glu_split.
    """
    if op == GLU.SWIGLU_CLAMP:
        raise ParamError("glu_split: SWIGLU_CLAMP needs a limit; use gg.swiglu_clamp")
    return _node("glu_split", op, a, _other(b), False)


def _check_limit(name, limit):
    if not float(limit) >= 0:
        raise ParamError(f"{name}: the limit must not be negative, got {limit}")


def swiglu_oai(a: Tensor, b: Tensor, alpha: float, limit: float):
    """a' / (1 + e^(-alpha a')) (b' + 1), a' = min(a, limit), b' = b limited to +-limit.

    a and b of one shape and type, F32 or F16, rows contiguous.  op params: 3, 0, alpha, limit.  Errors: ShapeError,
    TypeMismatch, ParamError (a negative limit).  Source: ggml_swiglu_oai.
    """
    _check_limit("swiglu_oai", limit)
    return _node("swiglu_oai", GLU.SWIGLU_OAI, a, _other(b), False, alpha, limit)


def swiglu_clamp(a: Tensor, b: Tensor, limit: float):
    """silu(a') b', a' = min(a, limit), b' = b limited to +-limit.

        gg.swiglu_clamp(gate, up, 7.0)

    a and b of one shape and type, F32 or F16, rows contiguous.  op params: 6, 0, 0, limit.  Errors: ShapeError,
    TypeMismatch, ParamError (a negative limit).  Source: ggml_swiglu_clamp.
    """
    _check_limit("swiglu_clamp", limit)
    return _node("swiglu_clamp", GLU.SWIGLU_CLAMP, a, _other(b), False, 0.0, limit)


def _named(op, form):
    name = op.name.lower() + form
    if form == "_split":
        def build(a: Tensor, b: Tensor):
            return _node(name, op, a, _other(b), False)
    else:
        def build(a: Tensor):
            return _node(name, op, a, None, form == "_swapped")
    shapes = {"": "x, g = halves of the rows of a, [2 n, ...] -> [n, ...]", "_split": "x = a, g = b, one shape",
              "_swapped": "g, x = halves of the rows of a, [2 n, ...] -> [n, ...]"}[form]
    build.__name__ = build.__qualname__ = name
    build.__doc__ = (f"{GATES[op].formula}; {shapes}.\n\nTypes, op params and errors as `glu"
                     f"{'_split' * (form == '_split')}`.  Source: ggml_{name}.")
    return build


NAMED = {(op, form): _named(op, form) for op in GLU if op not in LIMITED for form in ("", "_swapped", "_split")}


# ---------------------------------------------------------------- reference, kernel
def reference(t, a, b=None):
    a = a.astype(np.float64)
    n = t.ne[0]
    x, g = (a, b.astype(np.float64)) if b is not None else (a[..., :n], a[..., n:2 * n])
    if b is None and t.op_params[1]:
        x, g = g, x
    with np.errstate(all="ignore"):
        return GATES[GLU(int(t.op_params[0]))].numpy(x, g, float(t.param_floats[2]), float(t.param_floats[3]))


def make_row(op, ty):
    """jitted row(d, x, g, n, alpha, limit): n elements; d may be x or g, alpha and limit are vectors."""
    gate, access, size = GATES[op], ROW[ty], ty.nbytes
    ld, ld_part, st, st_part = access.load, access.load_part, access.store, access.store_part

    @intrinsic
    def apply(typingctx, x, g, alpha, limit):
        def codegen(context, b, sig, args):
            return gate.build(b, *args)
        return x(x, g, alpha, limit), codegen

    @inline
    def row(d, x, g, n, alpha, limit):
        i = 0
        while i + 2 * W <= n:
            y0 = apply(ld(x + i * size), ld(g + i * size), alpha, limit)
            y1 = apply(ld(x + (i + W) * size), ld(g + (i + W) * size), alpha, limit)
            st(d + i * size, y0)
            st(d + (i + W) * size, y1)
            i += 2 * W
        while i + W <= n:
            st(d + i * size, apply(ld(x + i * size), ld(g + i * size), alpha, limit))
            i += W
        if i < n:
            y = apply(ld_part(x + i * size, n - i), ld_part(g + i * size, n - i), alpha, limit)
            st_part(d + i * size, y, n - i)
    return row


def _make(op, ty, split):
    row, size = make_row(op, ty), ty.nbytes

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        alpha, limit = splat(param_f32(node, 2)), splat(param_f32(node, 3))
        n0, n1, swapped = ne(d, 0), ne(d, 1), param_i32(node, 1) != 0
        is_dense = split and nb(a, 1) == n0 * size and nb(b, 1) == n0 * size and nb(d, 1) == n0 * size
        r = start
        while r < stop:                         # a row, or rows that lie side by side
            i1, i2, i3 = row_index(d, r)
            run = min(stop - r, n1 - i1) if is_dense else 1
            x = row_addr(a, i1, i2, i3)
            if split:
                g = row_addr(b, i1, i2, i3)
            else:
                g = x + n0 * size
                if swapped:
                    x, g = g, x
            row(row_addr(d, i1, i2, i3), x, g, n0 * run, alpha, limit)
            r += run
        return OK
    return over_chunks(rows, chunking=LIGHT)


def kernel(t, n_threads):
    op, ty, split = GLU(int(t.op_params[0])), t.type, len(t.src) > 1
    if any(s.type is not ty for s in t.src) or ty not in (F32, F16):
        return None
    return Kernel(f"{op.name.lower()}{'-split' * split}-{ty.name}", lambda: _make(op, ty, split),
                  cost=GATES[op].cost * touched_nbytes(t))


def cases():

    def make(type, op, form, ne, view, odd):
        def build(inp):
            n0 = ne[0] if form == "_split" else 2 * ne[0] + odd
            got = []
            for _ in range(2 if form == "_split" else 1):
                a = inp.new(type, (n0, ne[1] * (1 + view), *ne[2:]), lo=-10, hi=10)
                if view:                                    # the source is a view of every second row
                    a = view_4d(a, n0, *ne[1:], a.nb[1] * 2, a.nb[2], a.nb[3], a.nb[1])
                got.append(a)
            if op is GLU.SWIGLU_CLAMP:
                return swiglu_clamp(*got, 7.0)
            return swiglu_oai(*got, 1.702, 7.0) if op is GLU.SWIGLU_OAI else NAMED[op, form](*got)
        return build
    for type in (F32, F16):
        for op in GLU:
            for form in ("_split",) if op in LIMITED else ("", "_swapped", "_split"):
                for shape, view, odd in (((128, 3, 2, 2), False, 0), ((5, 7, 11, 1), True, 0),
                                         ((8, 3, 2, 1), False, 1)):
                    yield Case(f"{type!r} {op.name.lower()}{form} {shape}{' view' * view}{' odd' * odd}",
                               make(type, op, form, shape, view, odd), TOLERANCE[type])


# ---------------------------------------------------------------- gradient
def _halves(g, t):
    """x and g as F32, from two tensors or the halves of one; and how the gradients of both become one of `a`."""
    if len(t.src) == 2:
        return *map(g.f32, t.src), None
    a, n = t.src[0], t.ne[0]
    first, second = (g.f32(g.cont(g.view_4d(a, n, *a.ne[1:], *a.nb[1:], i * n * a.type.nbytes))) for i in (0, 1))
    return (second, first, True) if t.op_params[1] else (first, second, False)


def gradient(g, t, dy):
    """d = act(x) gate: dx = dy act'(x) gate, dgate = dy act(x)."""
    op, (alpha, limit) = GLU(int(t.op_params[0])), (float(p) for p in t.param_floats[2:4])

    def parts():
        x, gate, swapped = _halves(g, t)
        below = within = None
        if op in LIMITED:
            below, within = g.step(g.scale_bias(x, -1.0, limit)), g.step(g.scale_bias(g.abs(gate), -1.0, limit))
            x = g.scale_bias(g.relu(g.scale_bias(x, -1.0, limit)), -1.0, limit)                 # min(x, limit)
            gate = g.clamp(g.dup(gate), -limit, limit)
        if op == GLU.SWIGLU_OAI:
            s = g.sigmoid(g.scale(x, alpha))
            act, gate = g.mul(x, s), g.scale_bias(gate, 1.0, 1.0)
            slope = g.add(s, g.mul(g.scale(x, alpha), g.sub(s, g.sqr(s))))
            dx = g.mul(g.mul(dy, gate), slope)
        else:
            name = ACTIVATIONS[op]
            act = g.unary(x, UNARY[name.upper()])
            dx = g.mul(dy, gate)
            dx = g.silu_back(dx, x) if name == "silu" else g.mul(dx, DERIVATIVES[name](g, x, act))
        d_gate = g.mul(dy, act)
        if op in LIMITED:
            dx, d_gate = g.mul(dx, below), g.mul(d_gate, within)
        return dx, d_gate, swapped

    def shared():
        return g.once(t, "parts", parts)

    def whole():
        dx, d_gate, swapped = shared()
        both, odd = g.concat(*((d_gate, dx) if swapped else (dx, d_gate)), 0), t.src[0].ne[0] % 2
        return g.pad(both, 1, 0, 0, 0) if odd else both
    return (lambda: shared()[0], lambda: shared()[1]) if len(t.src) == 2 else (whole,)


ACTIVATIONS = {GLU.REGLU: "relu", GLU.GEGLU: "gelu", GLU.SWIGLU: "silu", GLU.GEGLU_ERF: "gelu_erf",
               GLU.GEGLU_QUICK: "gelu_quick", GLU.SWIGLU_CLAMP: "silu"}


def _rebuild(n):
    if n.i[0] == GLU.SWIGLU_OAI:
        return n.call("swiglu_oai", *n.src, n.f[2], n.f[3])
    if n.i[0] == GLU.SWIGLU_CLAMP:
        return n.call("swiglu_clamp", *n.src, n.f[3])
    return n.call("glu", *n.src, n.i[0], bool(n.i[1])) if len(n.src) == 1 else n.call("glu_split", *n.src, n.i[0])


def _split(t, a, b=None):
    """Gate and up may be the halves of one row, which then stays whole."""
    return elementwise(t, a, b) if b is not None or a.axis else None


SPECS = (Spec(op=OP.GLU, builders=(glu, glu_split, swiglu_oai, swiglu_clamp, *NAMED.values()), reference=reference,
              kernel=kernel, gradient=gradient, rows=along(1), split=_split, cases=cases,
              rebuild=_rebuild),)
