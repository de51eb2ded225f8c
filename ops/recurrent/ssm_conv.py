"""ssm_conv: the short causal convolution in front of a state-space layer, one filter per channel.

    d[channel, t] = sum_j x[t + j, channel] c[j, channel]              j = 0 .. d_conv - 1

    row of x (one channel)     [ d_conv - 1 earlier tokens | t = 0, 1, 2 ... n_t - 1 ]
    d                          channels side by side, one row per token: the transpose of x's layout

Many tokens: W channels x W tokens at a time with tokens in the lanes, transposed on the way out.
Few tokens (decoding): one sum after the other.
"""
import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.matmul.tile import LDC, NL, put_transposed
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne, work
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import W, fma, ldf, ldf_part, opaque, splat, stf, zerof

TILED_TOKENS = 4                        # tokens from which the transposing tile is faster
STRIP_NBYTES = W * LDC


def ssm_conv(sx: Tensor, c: Tensor):
    """Causal depthwise convolution: d[channel, t, s] = sum_j sx[t + j, channel, s] c[j, channel].

    sx F32 [d_conv - 1 + n_t, d_inner, n_s], rows contiguous; c F32 [d_conv, d_inner], rows contiguous
    -> F32 [d_inner, n_t, n_s].  NumPy: sx (n_s, d_inner, d_conv - 1 + n_t) -> (n_s, n_t, d_inner).
    Errors: ShapeError, TypeMismatch.  Source: ggml_ssm_conv; Mamba, arXiv 2312.00752.
    """
    for t, role in ((sx, "sx"), (c, "c")):
        require_type("ssm_conv", t, (F32,), role)
        require(t.nb[0] == 4, f"ssm_conv: elements of a row of {role} must lie side by side", t, remedy="gg.cont it")
    require(sx.ne[3] == 1 and c.ne[2] == c.ne[3] == 1, "ssm_conv: sx has 3 dimensions, c has 2", sx, c)
    require(c.ne[0] > 0, "ssm_conv: a filter needs at least one tap", c)
    require(sx.ne[1] == c.ne[1], "ssm_conv: sx and c differ in d_inner (dimension 1)", sx, c)
    n_t = sx.ne[0] - c.ne[0] + 1
    require(n_t >= 0, "ssm_conv: rows of sx must hold d_conv - 1 earlier tokens", sx, c,
            remedy="concat the convolution state in front")
    return sx.ctx.node(OP.SSM_CONV, F32, (c.ne[1], n_t, sx.ne[2]), (sx, c))


def reference(t, sx, c):
    sx, c, n_t = sx.astype(np.float64), c[0, 0], t.ne[1]
    return sum(sx[..., j:j + n_t] * c[:, j, None] for j in range(c.shape[1])).swapaxes(2, 3)


@inline
def _one_by_one(x, c, d, n_t, d_conv, channels, x1, c1, d1):
    for i in range(channels):
        for t in range(n_t):
            y = types.float32(0.0)
            for j in range(d_conv):
                y += ld_f32(x + i * x1 + 4 * (t + j)) * ld_f32(c + i * c1 + 4 * j)
            st_f32(d + t * d1 + 4 * i, y)


@inline
def _tiled(x, c, d, n_t, d_conv, channels, x1, c1, d1, strip):
    for t in range(0, n_t, W):
        cols = min(W, n_t - t)
        for i in range(channels):
            y = zerof()
            for j in range(d_conv):
                at, f = opaque(x + i * x1 + 4 * (t + j)), splat(ld_f32(c + i * c1 + 4 * j))
                if cols == W:
                    y = fma(ldf(at), f, y)
                else:
                    y = fma(ldf_part(at, cols), f, y)
            stf(strip + i * LDC, y)
        put_transposed(strip, d + t * d1, d1, channels, cols, NL * d1)


def _make():
    @inline
    def count(node):
        return (ne(node + DST, 0) + W - 1) // W * ne(node + DST, 2)

    @inline
    def rows(node, ith, start, stop):
        x, c, d = node + SRC0, node + SRC1, node + DST
        n, n_t, d_conv = ne(d, 0), ne(d, 1), ne(c, 0)
        strip = work(node) + ith * STRIP_NBYTES
        blocks = (n + W - 1) // W
        for r in range(start, stop):
            s = r // blocks
            i = (r - s * blocks) * W
            channels = min(W, n - i)
            px, pc = addr(x) + i * nb(x, 1) + s * nb(x, 2), addr(c) + i * nb(c, 1)
            pd = addr(d) + 4 * i + s * nb(d, 2)
            if n_t < TILED_TOKENS:
                _one_by_one(px, pc, pd, n_t, d_conv, channels, nb(x, 1), nb(c, 1), nb(d, 1))
            else:
                _tiled(px, pc, pd, n_t, d_conv, channels, nb(x, 1), nb(c, 1), nb(d, 1), strip)
        return OK
    return over_chunks(rows, count)


def kernel(t, n_threads):
    if any(s.type is not F32 for s in t.src):
        return None
    return Kernel("ssm_conv", _make, cost=0.1 * touched_nbytes(t), work_nbytes=n_threads * STRIP_NBYTES)


def cases():
    for d_conv in (3, 4, 9):
        for d_inner, n_t, n_s in ((70, 1, 1), (33, 3, 2), (70, 37, 2), (16, 64, 1)):
            yield Case(f"{d_conv} {d_inner} {n_t} {n_s}", lambda inp, k=d_conv, n=d_inner, t=n_t, s=n_s: ssm_conv(
                inp.new(F32, (k - 1 + t, n, s)), inp.new(F32, (k, n))))


SPECS = (Spec(op=OP.SSM_CONV, builders=(ssm_conv,), reference=reference, kernel=kernel, cases=cases),)
