"""gated_delta_net: linear attention with a state that forgets (g) and corrects itself (the delta rule).

    S     = S * e^g                       g: one number per head and token, or one per key channel i (KDA)
    delta = beta (v - S^T k)
    S     = S + k delta^T
    out   = S^T q / sqrt(S_v)

The state of a head is stored transposed: row j holds S[0..][j], so row j needs delta[j] alone and rows go through all
tokens independently of each other.

    result [S_v H, ...]    | out: n_t n_s rows | state after the last token: S_v n_s rows | one token earlier | ...
"""
import math

import numpy as np
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP, V_WORDS, WORD
from ggjit.ops.core.shape import is_contiguous, n_elements, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import exp1, vexp
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, SRC4, addr, nb, ne, work
from ggjit.ops.native.row_loops import over_chunks, param, whole
from ggjit.ops.native.simd import W, ldf_part, stf_part
from ggjit.ops.recurrent.state_rows import ROWS, begin_snapshots, dot, dot3, keep_snapshot, row_blocks, step, step_each

f32 = types.float32
SRC5 = SRC4 + WORD * V_WORDS


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1):
    """Gated delta rule over n_t tokens of n_s sequences -> F32 [S_v H, n_t n_s + K S_v n_s].

    v [S_v, H, n_t, n_s]; q, k [S_v, heads, n_t, divides n_s]: head h reads q head h % heads (modulo, as in ggml);
    rows contiguous.  g [1 or S_v, H, n_t, n_s], beta [1, H, n_t, n_s], state [S_v, S_v, H, n_s], all contiguous; F32.
    The result holds out as [S_v, H, n_t, n_s], then K snapshots of the state in `state`'s layout, the newest first;
    snapshots from before the first token are zero (ggml leaves them unwritten).
    Errors: ShapeError, TypeMismatch, ParamError.  Params: P0 = K.  Source: ggml_gated_delta_net; arXiv 2412.06464.
    """
    for t, role in zip((q, k, v, g, beta, state), ("q", "k", "v", "g", "beta", "state"), strict=True):
        require_type("gated_delta_net", t, (F32,), role)
    for t in (q, k, v):
        require(rows_contiguous(t), "gated_delta_net: rows of q, k and v must be contiguous", t, remedy="gg.cont it")
    for t in (g, beta, state):
        require(is_contiguous(t), "gated_delta_net: g, beta and state must be contiguous", t, remedy="gg.cont it")
    size, heads, n_t, n_s = v.ne
    for t in (q, k):
        require(t.ne[0] == size and t.ne[1] > 0 and t.ne[2] == n_t and t.ne[3] > 0 and n_s % t.ne[3] == 0,
                "gated_delta_net: q and k must be [S_v, heads, n_t, divides n_s]", t, v)
    require(g.ne[0] in (1, size) and g.ne[1:] == (heads, n_t, n_s),
            "gated_delta_net: g must be [1 or S_v, H, n_t, n_s]", g, v)
    require(beta.ne == (1, heads, n_t, n_s), "gated_delta_net: beta must be [1, H, n_t, n_s]", beta, v)
    require(state.ne == (size, size, heads, n_s), "gated_delta_net: state must be [S_v, S_v, H, n_s]", state, v)
    K = whole("gated_delta_net", "K, the number of snapshots,", K, 1)
    ne = (size * heads, n_t * n_s + K * size * n_s)
    return q.ctx.node(OP.GATED_DELTA_NET, F32, ne, (q, k, v, g, beta, state), (K,))


def reference(t, q, k, v, g, beta, state):
    q, k, v, g, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, g, beta, state))
    n_s, n_t, heads, size = v.shape
    K = int(t.op_params[0])
    q, k = (np.repeat(a, n_s // a.shape[0], 0)[:, :, np.arange(heads) % a.shape[2]] for a in (q, k))
    out, snapshots = np.zeros_like(v), np.zeros((K, *state.shape))
    S = state.swapaxes(-1, -2).copy()                                   # [n_s, H, i, j]
    snapshots[0] = state
    for i in range(n_t):
        S = S * np.exp(g[:, i])[..., :, None]
        delta = beta[:, i] * (v[:, i] - np.einsum("shij,shi->shj", S, k[:, i]))
        S = S + np.einsum("shi,shj->shij", k[:, i], delta)
        out[:, i] = np.einsum("shij,shi->shj", S, q[:, i]) / math.sqrt(size)
        if n_t - 1 - i < K:
            snapshots[n_t - 1 - i] = S.swapaxes(-1, -2)
    return np.concatenate([out.ravel(), snapshots.ravel()]).reshape(t.ne[::-1])


@inline
def _exp_row(d, x, n):
    for i in range(0, n, W):
        stf_part(d + 4 * i, vexp(ldf_part(x + 4 * i, n - i)), n - i)


def _make(each):
    """each: does each channel of a key have its own decay, or each head one?"""
    @inline
    def count(node):
        v = node + SRC2
        return row_blocks(ne(v, 0)) * ne(v, 1) * ne(v, 3)

    @inline
    def rows(node, ith, start, stop):
        q, k, v, g, beta, s, d = (node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + SRC4, node + SRC5,
                                  node + DST)
        n, heads, n_t, n_s, n_keep = ne(v, 0), ne(v, 1), ne(v, 2), ne(v, 3), param(node, 0)
        decays = work(node) + ith * ((4 * n + 63) // 64 * 64)
        states = addr(d) + 4 * n * heads * n_t * n_s
        keep_nbytes = 4 * n * n * heads * n_s
        scale = f32(1.0) / f32(math.sqrt(f32(n)))
        q3, k3 = n_s // ne(q, 3), n_s // ne(k, 3)
        blocks = row_blocks(n)
        for r in range(start, stop):
            hs = r // blocks
            j0 = (r - hs * blocks) * ROWS
            i3 = hs // heads
            h = hs - i3 * heads
            rows = min(ROWS, n - j0)
            at = 4 * n * (n * hs + j0)
            old, new = addr(s) + at, states + at
            begin_snapshots(new, old, n_t, n_keep, keep_nbytes, 4 * n * rows)
            for t in range(n_t):
                pq = addr(q) + h % ne(q, 1) * nb(q, 1) + t * nb(q, 2) + i3 // q3 * nb(q, 3)
                pk = addr(k) + h % ne(k, 1) * nb(k, 1) + t * nb(k, 2) + i3 // k3 * nb(k, 3)
                pv = addr(v) + 4 * j0 + h * nb(v, 1) + t * nb(v, 2) + i3 * nb(v, 3)
                pg = addr(g) + h * nb(g, 1) + t * nb(g, 2) + i3 * nb(g, 3)
                b = ld_f32(addr(beta) + h * nb(beta, 1) + t * nb(beta, 2) + i3 * nb(beta, 3))
                out = addr(d) + 4 * (j0 + n * (h + heads * (t + n_t * i3)))
                if each:
                    _exp_row(decays, pg, n)
                decay = exp1(ld_f32(pg))
                for j in range(rows):
                    to, of, vj = new + 4 * n * j, (new if t > 0 else old) + 4 * n * j, ld_f32(pv + 4 * j)
                    if each:
                        y = step_each(to, of, decays, (vj - dot3(of, decays, pk, n)) * b, pk, pq, n)
                    else:
                        y = step(to, of, decay, (vj - decay * dot(of, pk, n)) * b, pk, pq, n)
                    st_f32(out + 4 * j, y * scale)
                keep_snapshot(new, n_t - 1 - t, n_keep, keep_nbytes, 4 * n * rows)
        return OK
    return over_chunks(rows, count)


def kernel(t, n_threads):
    v, g = t.src[2], t.src[3]
    if any(s.type is not F32 for s in t.src):
        return None
    each = g.ne[0] != 1
    return Kernel("gated_delta_net" + "-each" * each, lambda: _make(each),
                  cost=0.25 * n_elements(v) * v.ne[0] + 30.0 * v.ne[1] * v.ne[2] * v.ne[3],
                  work_nbytes=n_threads * (-(-4 * v.ne[0] // 64) * 64))


def cases():
    def make(size, heads, n_t, n_s, repeat, kda, keep, permuted=False):
        def build(inp):
            shape = (size, heads, n_t, n_s)

            def rows(n_heads, **kw):
                if not permuted:
                    return inp.new(F32, (size, n_heads, n_t, n_s), **kw)
                return permute(inp.new(F32, (size, n_t, n_heads, n_s), **kw), 0, 2, 1, 3)
            q, k = rows(heads // repeat, lo=-0.3, hi=0.3), rows(heads // repeat, lo=-0.3, hi=0.3)
            v = rows(heads, lo=-0.3, hi=5.0)
            g = inp.new(F32, (size if kda else 1, *shape[1:]), lo=-20.0, hi=-1e-4)
            beta = inp.new(F32, (1, *shape[1:]), lo=0.0, hi=1.0)
            return gated_delta_net(q, k, v, g, beta, inp.new(F32, (size, size, heads, n_s)), keep)
        return build
    for size, heads, n_t, n_s, repeat, keep in ((16, 4, 1, 1, 1, 1), (64, 4, 7, 2, 2, 1), (128, 2, 4, 1, 1, 3),
                                                (20, 3, 5, 2, 1, 1), (32, 2, 2, 1, 1, 4)):
        for kda in (False, True):
            yield Case(f"{size} {heads} {n_t} {n_s} {repeat} {keep}{' kda' * kda}",
                       make(size, heads, n_t, n_s, repeat, kda, keep))
    yield Case("permuted", make(32, 4, 6, 2, 2, False, 1, True))


SPECS = (Spec(op=OP.GATED_DELTA_NET, builders=(gated_delta_net,), reference=reference, kernel=kernel, cases=cases,
              flops=lambda t: 8 * math.prod(t.src[2].ne) * t.src[0].ne[0]),)
