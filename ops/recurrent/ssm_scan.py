"""ssm_scan: the selective scan of Mamba-1 and Mamba-2, a linear recurrence over tokens.

    dt' = log(1 + e^dt)          (dt itself above 20)
    s   = s e^(dt' A) + B x dt'  one row of d_state numbers for each of head_dim inputs of a head
    y   = sum s C

Mamba-2: A is one number per head; Mamba-1: a row of d_state numbers per head.  Heads share B and C in groups:
head h reads group h // (n_head / n_group).  States are looked up by ids, so a cache of many sequences can be passed
whole; new states are part of the result, the cache is not written.

    result (1-D)    | y: x's elements | state after the last token | ... after the one before | ...   K snapshots
"""
import math

import numpy as np
from numba import types

from ggjit.ops.core.record import BAD_INDEX, OK, OP, V_WORDS, WORD
from ggjit.ops.core.shape import is_contiguous, n_elements, require, require_param, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import exp1, log1p_1, vexp
from ggjit.ops.native.mem import ld_f32, ld_i32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, SRC4, addr, fail, nb, ne, work
from ggjit.ops.native.row_loops import over_chunks, param, whole
from ggjit.ops.native.simd import W, fmul, ldf_part, splat, stf_part
from ggjit.ops.recurrent.state_rows import ROWS, begin_snapshots, keep_snapshot, row_blocks, step, step_each

f32 = types.float32
SRC5, SRC6 = (SRC4 + WORD * V_WORDS * i for i in (1, 2))


def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int = 1):
    """Selective scan over n_t tokens of n_s sequences -> F32 1-D: y, then K states.

    s [d_state, head_dim, n_head, >= 1], contiguous; x [head_dim, n_head, n_t, n_s]; dt [n_head, n_t, n_s], contiguous;
    A [1 or d_state, n_head], contiguous; B, C [d_state, n_group, n_t, n_s]; ids I32 [n_s], rows of s; all others F32.
    Result: x's elements in x's order (contiguous), then K snapshots [d_state, head_dim, n_head, n_s], the newest
    first; snapshots from before the first token are zero (ggml leaves them unwritten).
    Errors: ShapeError, TypeMismatch, ParamError (K < 1; K > 1 with Mamba-1's A, as in ggml); IndexRangeError at run
    time for ids outside s, before anything is written.  Params: P0 = K.
    Source: ggml_ssm_scan; arXiv 2312.00752, 2405.21060.
    """
    for t, role in zip((s, x, dt, A, B, C), ("s", "x", "dt", "A", "B", "C"), strict=True):
        require_type("ssm_scan", t, (F32,), role)
    require_type("ssm_scan", ids, (I32,), "ids")
    for t in (s, dt, A):
        require(is_contiguous(t), "ssm_scan: s, dt and A must be contiguous", t, remedy="gg.cont it")
    for t in (x, B, C):
        require(t.nb[0] == 4 and t.nb[1] == 4 * t.ne[0],
                "ssm_scan: dimensions 0 and 1 of x, B and C must be contiguous", t, remedy="gg.cont it")
    d_state, (head_dim, n_head, n_t, n_s) = s.ne[0], x.ne
    require(s.ne[1:3] == (head_dim, n_head), "ssm_scan: s must be [d_state, x.ne0, x.ne1, ...]", s, x)
    require(dt.ne == (n_head, n_t, n_s, 1), "ssm_scan: dt must be [n_head, n_t, n_s]", dt, x)
    require(A.ne[0] in (1, d_state) and A.ne[1:] == (n_head, 1, 1), "ssm_scan: A must be [1 or d_state, n_head]", A, x)
    require(B.ne == C.ne and B.ne[0] == d_state and B.ne[2:] == (n_t, n_s),
            "ssm_scan: B and C must be [d_state, n_group, n_t, n_s]", B, C, x)
    require(B.ne[1] > 0 and n_head % B.ne[1] == 0, "ssm_scan: n_group must divide n_head", B, x)
    require(ids.ne == (n_s, 1, 1, 1), "ssm_scan: ids must hold one row number per sequence", ids, x)
    K = whole("ssm_scan", "K, the number of snapshots,", K, 1)
    require_param(K == 1 or A.ne[0] == 1, f"ssm_scan: K = {K} snapshots need Mamba-2's A [1, n_head]")
    n = n_elements(x) + K * d_state * head_dim * n_head * n_s
    return s.ctx.node(OP.SSM_SCAN, F32, (n,), (s, x, dt, A, B, C, ids), (K,))


def reference(t, s, x, dt, A, B, C, ids):
    s, x, dt, A, B, C = (np.asarray(a, np.float64) for a in (s, x, dt[0], A[0, 0], B, C))
    n_s, n_t, n_head, _ = x.shape
    K = int(t.op_params[0])
    B, C = (np.repeat(a, n_head // a.shape[2], 2) for a in (B, C))      # [n_s, n_t, n_head, d_state]
    dt = np.where(dt > 20, dt, np.log1p(np.exp(dt)))
    y = np.zeros_like(x)
    snapshots = np.zeros((K, n_s, *s.shape[1:]))
    for i in range(n_s):
        state = s[ids.ravel()[i]].copy()                                # [n_head, head_dim, d_state]
        for k in range(n_t):
            h = dt[i, k][:, None, None]
            state = state * np.exp(h * A[:, None, :]) + B[i, k][:, None, :] * (x[i, k][:, :, None] * h)
            y[i, k] = (state * C[i, k][:, None, :]).sum(-1)
            if n_t - 1 - k < K:
                snapshots[n_t - 1 - k, i] = state
        if n_t == 0:
            snapshots[0, i] = state
    return np.concatenate([y.ravel(), snapshots.ravel()]).reshape(t.ne[::-1])


@inline
def _softplus(x):
    return x if x > f32(20.0) else log1p_1(exp1(x))


@inline
def _exp_row(d, x, factor, n):
    """d = e^(factor x) over n floats."""
    v = splat(factor)
    for i in range(0, n, W):
        stf_part(d + 4 * i, vexp(fmul(v, ldf_part(x + 4 * i, n - i))), n - i)


def _make(each):
    """each: does each element of a state have its own decay (Mamba-1), or each head one?"""
    @inline
    def count(node):
        x = node + SRC1
        return row_blocks(ne(x, 0)) * ne(x, 1) * ne(x, 3)

    @inline
    def rows(node, ith, start, stop):
        s, x, dt, a, b, c = node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + SRC4, node + SRC5
        ids, d = node + SRC6, node + DST
        n, dim, heads, n_t, n_s = ne(s, 0), ne(x, 0), ne(x, 1), ne(x, 2), ne(x, 3)
        for i in range(n_s):
            id = ld_i32(addr(ids) + i * nb(ids, 0))
            if id < 0 or id >= ne(s, 3):
                return fail(node, BAD_INDEX, id)
        share, n_keep = heads // ne(b, 1), param(node, 0)
        decays = work(node) + ith * ((4 * n + 63) // 64 * 64)
        states = addr(d) + 4 * dim * heads * n_t * n_s
        head_nbytes = 4 * n * dim
        keep_nbytes = head_nbytes * heads * n_s
        blocks = row_blocks(dim)
        for r in range(start, stop):
            q = r // blocks
            i0 = (r - q * blocks) * ROWS
            i3 = q // heads
            h = q - i3 * heads
            rows = min(ROWS, dim - i0)
            id = ld_i32(addr(ids) + i3 * nb(ids, 0))
            old = addr(s) + id * nb(s, 3) + h * head_nbytes + 4 * n * i0
            new = states + q * head_nbytes + 4 * n * i0
            begin_snapshots(new, old, n_t, n_keep, keep_nbytes, 4 * n * rows)
            for t in range(n_t):
                step_dt = _softplus(ld_f32(addr(dt) + 4 * h + t * nb(dt, 1) + i3 * nb(dt, 2)))
                px = addr(x) + 4 * (i0 + h * dim) + t * nb(x, 2) + i3 * nb(x, 3)
                py = addr(d) + 4 * (i0 + dim * (h + heads * (t + n_t * i3)))
                at = 4 * n * (h // share) + t * nb(b, 2) + i3 * nb(b, 3)
                pb = addr(b) + at
                pc = addr(c) + 4 * n * (h // share) + t * nb(c, 2) + i3 * nb(c, 3)
                decay = exp1(step_dt * ld_f32(addr(a) + h * nb(a, 1)))
                if each:
                    _exp_row(decays, addr(a) + h * nb(a, 1), step_dt, n)
                for i in range(rows):
                    u = ld_f32(px + 4 * i) * step_dt
                    to, of = new + 4 * n * i, (new if t > 0 else old) + 4 * n * i
                    if each:
                        y = step_each(to, of, decays, u, pb, pc, n)
                    else:
                        y = step(to, of, decay, u, pb, pc, n)
                    st_f32(py + 4 * i, y)
                keep_snapshot(new, n_t - 1 - t, n_keep, keep_nbytes, 4 * n * rows)
        return OK
    return over_chunks(rows, count)


def kernel(t, n_threads):
    s, x, a = t.src[0], t.src[1], t.src[3]
    if any(src.type is not F32 for src in t.src[:6]) or t.src[6].type is not I32:
        return None
    each = a.ne[0] != 1 or s.ne[0] == 1
    steps = n_elements(x) * s.ne[0]
    return Kernel("ssm_scan" + "-each" * each, lambda: _make(each), cost=0.15 * steps + 50.0 * n_elements(t.src[2]),
                  work_nbytes=n_threads * (-(-4 * s.ne[0] // 64) * 64))


def cases():
    def make(d_state, dim, heads, groups, n_t, n_s, a0, keep, more=0):
        def build(inp):
            s = inp.new(F32, (d_state, dim, heads, n_s + more))
            x, dt = inp.new(F32, (dim, heads, n_t, n_s)), inp.new(F32, (heads, n_t, n_s), lo=-3, hi=3)
            A = inp.new(F32, (a0, heads), lo=-1.0, hi=-0.5)
            B, C = (inp.new(F32, (d_state, groups, n_t, n_s)) for _ in "BC")
            ids = inp.rng.permutation(n_s + more)[:n_s].astype(np.int32)
            return ssm_scan(s, x, dt, A, B, C, inp.new(I32, (n_s,), ids), keep)
        return build
    for name, args in (("mamba-1", (16, 1, 40, 1, 9, 3, 16, 1)), ("mamba-1 of 5", (5, 3, 4, 1, 7, 2, 5, 1)),
                       ("mamba-2", (128, 64, 4, 2, 11, 2, 1, 1, 2)), ("mamba-2 of 24", (24, 19, 6, 1, 5, 1, 1, 1)),
                       ("snapshots", (32, 18, 4, 1, 6, 2, 1, 4, 1)), ("more snapshots than tokens",
                                                                      (32, 18, 2, 1, 2, 2, 1, 4))):
        yield Case(name, make(*args), 2e-7)


SPECS = (Spec(op=OP.SSM_SCAN, builders=(ssm_scan,), reference=reference, kernel=kernel, cases=cases,
              flops=lambda t: 6 * math.prod(t.src[1].ne) * t.src[0].ne[0]),)
