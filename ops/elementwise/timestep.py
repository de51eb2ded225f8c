"""timestep_embedding: cosines and sines of a position at a geometric series of frequencies.

    row i of the result (half = dim / 2, f_j = max_period^(-j / half)):

        | cos(t_i f_0) ... cos(t_i f_half-1) | sin(t_i f_0) ... sin(t_i f_half-1) | 0 if dim is odd |
"""
import math

import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import vcos_any, vsin_any
from ggjit.ops.native.mem import ld_f32, ld_f64, st_f32, st_f64
from ggjit.ops.native.node import DST, SRC0, addr, nb, row_addr, whole_lines, work
from ggjit.ops.native.row_loops import over_chunks, param, whole
from ggjit.ops.native.simd import W, ldf_part, stf_part


def timestep_embedding(timesteps: Tensor, dim: int, max_period: int):
    """[dim, n] F32 from n timesteps (F32 [n]): cosines, then sines, then 0 if dim is odd.

    d[j, i] = cos(t_i f_j), d[j + dim / 2, i] = sin(t_i f_j), f_j = max_period^(-j / (dim / 2)).  op params: dim,
    max_period (both whole).  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_timestep_embedding; arXiv
    2006.11239.
    """
    require_type("timestep_embedding", timesteps, (F32,))
    require(timesteps.ne[1:] == (1, 1, 1), "timestep_embedding: the time steps must be one row", timesteps)
    params = whole("timestep_embedding", "dim", dim, 1), whole("timestep_embedding", "max_period", max_period, 1)
    return timesteps.ctx.node(OP.TIMESTEP_EMBEDDING, F32, (params[0], timesteps.ne[0]), (timesteps,), params)


def reference(t, a):
    dim, period = int(t.op_params[0]), float(t.op_params[1])
    half = dim // 2
    angle = a.reshape(-1, 1) * period ** (-np.arange(half) / max(half, 1))
    return np.concatenate([np.cos(angle), np.sin(angle), np.zeros((len(angle), dim % 2))], 1)[None, None]


@inline
def _rows(node, ith, start, stop):
    a, d, dim = node + SRC0, node + DST, param(node, 0)
    half, log_period = dim // 2, math.log(types.float64(param(node, 1)))
    series = work(node) + ith * whole_lines(8 * half)
    for j in range(half):
        st_f64(series + 8 * j, math.exp(-log_period * j / half))
    for r in range(start, stop):
        to, t = row_addr(d, r, 0, 0), types.float64(ld_f32(addr(a) + r * nb(a, 0)))
        for i in range(0, half, W):
            n = min(W, half - i)
            for j in range(i, i + n):                           # the angles wait where the sines will be
                st_f32(to + 4 * (half + j), types.float32(t * ld_f64(series + 8 * j)))
            angle = ldf_part(to + 4 * (half + i), n)
            stf_part(to + 4 * i, vcos_any(angle), n)
            stf_part(to + 4 * (half + i), vsin_any(angle), n)
        if dim % 2:
            st_f32(to + 4 * (dim - 1), types.float32(0.0))
    return OK


def kernel(t, n_threads):
    series_nbytes = whole_lines.py_func(8 * (t.ne[0] // 2))
    return Kernel("timestep_embedding", lambda: over_chunks(_rows), cost=5.0 * n_elements(t),
                  work_nbytes=n_threads * series_nbytes)


def cases():
    for n, dim, period in ((2, 318, 10000), (7, 33, 10000), (1, 1, 100), (3, 2, 1)):
        yield Case(f"{n} {dim} {period}", lambda inp, n=n, dim=dim, period=period: timestep_embedding(
            inp.new(F32, (n,), lo=0, hi=1000), dim, period))


SPECS = (Spec(op=OP.TIMESTEP_EMBEDDING, builders=(timestep_embedding,), reference=reference, kernel=kernel,
              cases=cases),)
