"""arange: start, start + step, start + 2 step ...; the one op without a source, so the context comes first."""
import math

import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require_param
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Context
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, addr, ne, param_f32
from ggjit.ops.native.row_loops import I32_MAX, PIECE, over_rows, pieces_of_result
from ggjit.ops.native.simd import IR, V, W, const_ir, make_ir, splat_ir, stf, stf_part, vec_ir


def arange(ctx: Context, start: float, stop: float, step: float):
    """start + i step for i < ceil((stop - start) / step), F32; NumPy: np.arange(start, stop, step).

    Made in the context ctx.  The count is formed in float32 as in ggml.  op params: start, stop, step.
    Errors: ParamError unless stop > start and step > 0.  Source: ggml_arange.
    """
    with np.errstate(all="ignore"):
        start, stop, step = (np.float32(x) for x in (start, stop, step))
        n = np.ceil((stop - start) / step)
    require_param(stop > start and step > 0 and 0 < n <= I32_MAX and math.isfinite(start),
                  f"arange: from {start} to {stop} by {step} is not an ascending range of at most 2^31 numbers")
    return ctx.node(OP.ARANGE, F32, (int(n),), (), (float(start), float(stop), float(step)))


def reference(t):
    start, _, step = (float(x) for x in t.param_floats[:3])
    return (start + step * np.arange(t.ne[0])).reshape(1, 1, 1, -1)


def _ramp_ir(b, start, step, i):
    """start + step (i + lane), formed in float64."""
    at = b.fadd(splat_ir(b, b.sitofp(i, IR["f64"]), W), const_ir("f64", range(W)))
    sums = b.fadd(splat_ir(b, start, W), b.fmul(splat_ir(b, step, W), at))
    return b.fptrunc(sums, vec_ir("f32", W))


_ramp = make_ir(lambda *_: V("f32", W), _ramp_ir)


@inline
def _one(node, p):
    to, start, step = addr(node + DST), types.float64(param_f32(node, 0)), types.float64(param_f32(node, 2))
    end = min(ne(node + DST, 0), (p + 1) * PIECE)
    for i in range(p * PIECE, end - W + 1, W):
        stf(to + 4 * i, _ramp(start, step, i))
    left = end % W
    if left:
        stf_part(to + 4 * (end - left), _ramp(start, step, end - left), left)
    return OK


def kernel(t, n_threads):
    return Kernel("arange", lambda: over_rows(_one, pieces_of_result), cost=0.5 * t.ne[0])


def cases():
    for p in ((0, 11, 1), (0, 1048577, 1), (-3.5, 7, 0.3), (2, 2.5, 4)):
        yield Case("{} {} {}".format(*p), lambda inp, p=p: arange(inp.ctx, *p))


SPECS = (Spec(op=OP.ARANGE, builders=(arange,), reference=reference, kernel=kernel, cases=cases,
              rebuild=lambda n: n.call("arange", n.ctx, *n.src, *n.f[:3])),)
