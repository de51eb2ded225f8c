"""Gated linear units (ops/elementwise/glu.py): d = act(x) g."""
from numpy import float32 as f32

from ggjit.ops.core.record import GLU, OP
from ggjit.ops.core.types import F16, F32
from ggjit.ops.cuda.compiler.core import device, exp
from ggjit.ops.cuda.native.launch import dense, over_pieces
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, ne, param_f32, param_i32, piece, row_addr, row_index
from ggjit.ops.cuda.rows import ONE
from ggjit.ops.cuda.unary import gelu, gelu_erf, gelu_quick, silu


def _gate(act):
    @device
    def gate(x, g, alpha, limit):
        return act(x) * g
    return gate


@device
def _reglu(x, g, alpha, limit):
    return x * g if x > f32(0) else f32(0)


@device
def _oai(x, g, alpha, limit):
    x = limit if limit < x else x
    g = limit if limit < g else g
    g = -limit if g < -limit else g
    return x / (f32(1) + exp(-alpha * x)) * (g + f32(1))


@device
def _clamp(x, g, alpha, limit):
    x = limit if limit < x else x
    g = limit if limit < g else g
    return silu(x) * (-limit if g < -limit else g)


GATES = {GLU.REGLU: _reglu, GLU.GEGLU: _gate(gelu), GLU.SWIGLU: _gate(silu), GLU.SWIGLU_OAI: _oai,
         GLU.GEGLU_ERF: _gate(gelu_erf), GLU.GEGLU_QUICK: _gate(gelu_quick), GLU.SWIGLU_CLAMP: _clamp}


def _make(gate, get, put, size, split):
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        alpha, limit = param_f32(node, 2), param_f32(node, 3)
        n0, n, swapped = ne(d, 0), n_rows(d), param_i32(node, 1) != 0
        r, next_row, first, step = piece(n)
        while r < n:
            i1, i2, i3 = row_index(d, r)
            x, to = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            g = x + n0 * size
            if split:
                g = row_addr(b, i1, i2, i3)
            elif swapped:
                g, x = x, g
            i = first * size
            while i < n0 * size:
                put(to + i, gate(get(x + i), get(g + i), alpha, limit))
                i += step * size
            r += next_row
    return kernel


def _glu(t):
    which, ty, split = GLU(int(t.op_params[0])), t.type, len(t.src) > 1
    if any(s.type is not ty for s in t.src) or ty not in (F32, F16) or not dense(t, *t.src):
        return None
    return over_pieces(f"{which.name.lower()}{'_split' * split}_{ty.name}",
                       lambda: _make(GATES[which], ONE[ty].get, ONE[ty].put, ty.nbytes, split),
                       t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = {OP.GLU: _glu}
