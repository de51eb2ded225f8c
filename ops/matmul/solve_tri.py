"""solve_tri: X with A X = B for triangular A, by substitution, W columns of B at a time.

    lower  X[i] = (B[i] - sum_{t < i} A[i][t] X[t]) / A[i][i]         rows from the first
    upper  the same over t > i                                         rows from the last
    unit   A[i][i] is taken to be 1 and not read

ggml serves left, lower, not unit; here left in all four forms.  A zero on the diagonal gives infinities or NaN, as in
ggml.
"""
import numpy as np
from numba import types

from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import is_contiguous, n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, nb, ne, row_addr
from ggjit.ops.native.row_loops import over_rows, param
from ggjit.ops.native.simd import W, fadd, fma, fmul, fsub, ldf, ldf_part, splat, stf, stf_part, zerof

f32 = types.float32
UPPER, UNIT = 1, 2                      # bits of parameter 0; ggml's only form is 0


def solve_tri(a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool):
    """X with a X = b; a [n, n, ...] triangular, b [k, n, ...] -> shape of b; F32, contiguous, equal dims 2 and 3.

    NumPy: np.linalg.solve(np.tril(a), b) for lower, np.triu for upper; the other triangle is not read.
    left must be true: for X a = b solve the transposed problem, transpose(solve_tri(cont(transpose(a)),
    cont(transpose(b)), True, not lower, uni)).
    Errors: ShapeError, TypeMismatch, NotSupported (left false).  Params: P0 = bits 1 upper, 2 unit (ggml aborts
    on those forms and has no parameter).  Source: ggml_solve_tri.
    """
    for t in (a, b):
        require_type("solve_tri", t, (F32,))
        require(is_contiguous(t), "solve_tri: a and b must be contiguous", t, remedy="gg.cont it")
    require(a.ne[0] == a.ne[1], "solve_tri: a must be square", a)
    require(a.ne[1] == b.ne[1] and a.ne[2:] == b.ne[2:], "solve_tri: b must be [k, n, ne2, ne3] for a [n, n, ne2, ne3]",
            a, b)
    if not left:
        raise NotSupported("solve_tri: only left (a X = b) is served; for X a = b transpose a and b, solve with "
                           "lower reversed, and transpose the result")
    return a.ctx.node(OP.SOLVE_TRI, F32, b.ne, (a, b), (UPPER * (not lower) + UNIT * bool(uni),))


def reference(t, a, b):
    """Substitution in float64: a general solver's pivoting loses everything on matrices as badly conditioned as random
    triangular ones, substitution does not."""
    a, b, mode, n = a.astype(np.float64), b.astype(np.float64), int(t.op_params[0]), a.shape[-1]
    x = np.zeros_like(b)
    for i in range(n)[::-1 if mode & UPPER else 1]:
        known = slice(i + 1, n) if mode & UPPER else slice(0, i)
        rest = b[..., i, :] - np.einsum("yzt,yztk->yzk", a[..., i, known], x[..., known, :])
        x[..., i, :] = rest if mode & UNIT else rest / a[..., i, i, None]
    return x


@inline
def _load(p, n):
    return ldf(p) if n >= W else ldf_part(p, n)


@inline
def _solve_columns(a, b, x, size, a1, b1, x1, n, mode):
    """n <= W columns of one matrix."""
    upper = (mode & UPPER) != 0
    for step in range(size):
        i = size - 1 - step if upper else step
        first = i + 1 if upper else 0
        s0, s1, s2, s3 = zerof(), zerof(), zerof(), zerof()
        t = first
        end = first + step
        row = a + i * a1
        while t + 4 <= end:
            s0 = fma(splat(ld_f32(row + 4 * t)), _load(x + t * x1, n), s0)
            s1 = fma(splat(ld_f32(row + 4 * t + 4)), _load(x + (t + 1) * x1, n), s1)
            s2 = fma(splat(ld_f32(row + 4 * t + 8)), _load(x + (t + 2) * x1, n), s2)
            s3 = fma(splat(ld_f32(row + 4 * t + 12)), _load(x + (t + 3) * x1, n), s3)
            t += 4
        while t < end:
            s0 = fma(splat(ld_f32(row + 4 * t)), _load(x + t * x1, n), s0)
            t += 1
        y = fsub(_load(b + i * b1, n), fadd(fadd(s0, s1), fadd(s2, s3)))
        if (mode & UNIT) == 0:
            y = fmul(y, splat(f32(1.0) / ld_f32(row + 4 * i)))
        if n >= W:
            stf(x + i * x1, y)
        else:
            stf_part(x + i * x1, y, n)


@inline
def _blocks(node):
    b = node + SRC1
    return (ne(b, 0) + W - 1) // W * ne(b, 2) * ne(b, 3)


@inline
def _block(node, r):
    a, b, d = node + SRC0, node + SRC1, node + DST
    blocks = (ne(b, 0) + W - 1) // W
    q = r // blocks
    i = (r - q * blocks) * W
    i3 = q // ne(b, 2)
    i2 = q - i3 * ne(b, 2)
    _solve_columns(row_addr(a, 0, i2, i3), row_addr(b, 0, i2, i3) + 4 * i, row_addr(d, 0, i2, i3) + 4 * i, ne(a, 0),
                   nb(a, 1), nb(b, 1), nb(d, 1), ne(b, 0) - i, param(node, 0))
    return OK


def kernel(t, n_threads):
    a, b = t.src
    if a.type is not F32 or b.type is not F32:
        return None
    cost = 0.05 * n_elements(b) * a.ne[0] + 2.0 * n_elements(a)
    return Kernel("solve_tri", lambda: over_rows(_block, _blocks), cost=cost)


def cases():
    def make(n, k, batch, lower, unit):
        def build(inp):
            shape = (*reversed(batch), n, n)
            a = inp.rng.uniform(0.1, 1.0, shape) if not unit else inp.rng.uniform(-0.1, 0.1, shape)
            # the other triangle holds numbers that must not be read
            return solve_tri(inp.new(F32, (n, n, *batch), a.astype(np.float32)), inp.new(F32, (k, n, *batch)), True,
                             lower, unit)
        return build
    for n, k, batch in ((10, 7, (4, 3)), (11, 13, (2, 1)), (17, 40, (1, 2)), (40, 1, (1, 1)), (8, 128, (1, 1))):
        for lower in (True, False):
            for unit in (False, True):
                yield Case(f"{n} {k} {batch} {'lower' if lower else 'upper'}{' unit' * unit}",
                           make(n, k, batch, lower, unit))


SPECS = (Spec(op=OP.SOLVE_TRI, builders=(solve_tri,), reference=reference, kernel=kernel, cases=cases,
              rebuild=lambda n: n.call("solve_tri", *n.src, True, not n.i[0] & 1, bool(n.i[0] & 2)),
              flops=lambda t: t.src[0].ne[0] * (t.src[0].ne[0] + 1) * t.ne[0] * t.ne[2] * t.ne[3]),)
