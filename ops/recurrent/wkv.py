"""Recurrent attention with a matrix state per head: rwkv_wkv6, gated_linear_attn, rwkv_wkv7.

    wkv6   out[j] += r[i] (tf[i] k[i] v[j] + S[i][j])        S[i][j] = S[i][j] td[i] + k[i] v[j]
    gla    S[i][j] = S[i][j] g[i] + k[i] v[j]                out[j] += scale q[i] S[i][j]
    wkv7   S[i][j] = S[i][j] w[j] + v[i] k[j] + (sum_m a[m] S[i][m]) b[j]       out[i] = sum_j r[j] S[i][j]

wkv6 and gla: columns of the state do not depend on each other; a unit of work is W columns (lanes) of one head, taken
through all tokens with the output in registers.  wkv7: rows do not; a unit is a block of rows.  ggml splits by heads,
zeroes the output first and waits; here nothing waits.

    result [S H, n_tokens + S n_seqs]    | one row of S H outputs per token | states, S x S per head and sequence |
"""
import math

import numpy as np
from numba import types

from ggjit.ops.core.record import OK, OP, V_WORDS, WORD
from ggjit.ops.core.shape import is_contiguous, n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import copy_bytes, ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, SRC4, addr, ne, param_f32
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.native.simd import W, fadd, fma, fmul, hsum, ldf, ldf_part, splat, stf, stf_part, zerof
from ggjit.ops.recurrent.state_rows import ROWS, row_blocks

f32 = types.float32
SRC5, SRC6 = (SRC4 + WORD * V_WORDS * i for i in (1, 2))


# ---------------------------------------------------------------- builders
def _node(op, state, per_token, others=(), src=(), params=()):
    name = op.name.lower()
    for t in (*per_token, *others, state):
        require_type(name, t, (F32,))
        require(is_contiguous(t), f"{name}: every source must be contiguous", t, remedy="gg.cont it")
    size, heads, n_tokens = per_token[0].ne[:3]
    for t in per_token:
        require(t.ne == (size, heads, n_tokens, 1), f"{name}: sources per token must all be [S, H, n_tokens]", t,
                per_token[0])
    for t in others:
        require(n_elements(t) == size * heads, f"{name}: the bonus must hold S H values", t, per_token[0])
    n_seqs = state.ne[1]
    require(n_elements(state) == size * size * heads * n_seqs, f"{name}: state must be [S S H, n_seqs]", state,
            per_token[0])
    require(n_seqs > 0 and n_tokens % n_seqs == 0, f"{name}: n_tokens must be a multiple of n_seqs", state,
            per_token[0])
    return src[0].ctx.node(op, F32, (size * heads, n_tokens + size * n_seqs), src, params)


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor):
    """RWKV-6 time mixing: out[j] = sum_i r[i] (tf[i] k[i] v[j] + S[i][j]); S[i][j] = S[i][j] td[i] + k[i] v[j].

    k, v, r, td [S, H, n_tokens]; tf [S, H]; state [S S H, n_seqs]; F32, contiguous; the tokens of a sequence follow
    each other, n_tokens / n_seqs each (ggml divides without checking).  -> F32 [S H, n_tokens + S n_seqs]: outputs,
    then states.  Errors: ShapeError, TypeMismatch.  Source: ggml_rwkv_wkv6; arXiv 2404.05892.
    """
    return _node(OP.RWKV_WKV6, state, (k, v, r, td), (tf,), (k, v, r, tf, td, state))


def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float):
    """Gated linear attention: S[i][j] = S[i][j] g[i] + k[i] v[j]; out[j] = scale sum_i q[i] S[i][j].

    k, v, q, g [S, H, n_tokens]; state [S S H, n_seqs]; F32, contiguous; result as rwkv_wkv6.  Params: P0 = scale.
    Errors: ShapeError, TypeMismatch.  Source: ggml_gated_linear_attn; arXiv 2312.06635.
    """
    return _node(OP.GATED_LINEAR_ATTN, state, (k, v, q, g), (), (k, v, q, g, state), (float(scale),))


def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor):
    """RWKV-7 time mixing: S[i][j] = S[i][j] w[j] + v[i] k[j] + (sum_m a[m] S[i][m]) b[j]; out[i] = sum_j r[j] S[i][j].

    r, w, k, v, a, b [S, H, n_tokens]; state [S S H, n_seqs]; F32, contiguous; result as rwkv_wkv6.  Any S is right
    here; ggml's CPU code walks a head in windows of 32 floats (AVX2) without a tail: where 32 does not divide S it
    takes in values of the next head, and at the end of a tensor those behind it.
    Errors: ShapeError, TypeMismatch.  Source: ggml_rwkv_wkv7; arXiv 2503.14456.
    """
    return _node(OP.RWKV_WKV7, state, (r, w, k, v, a, b), (), (r, w, k, v, a, b, state))


# ---------------------------------------------------------------- reference
def reference(t, *src):
    src = [np.asarray(s, np.float64) for s in src]
    state, n_seqs = src[-1], t.src[-1].ne[1]
    size, heads, n_tokens = t.src[0].ne[:3]
    S = state.reshape(n_seqs, heads, size, size).copy()
    per = n_tokens // n_seqs
    bonus = 3 if t.op == OP.RWKV_WKV6 else -1
    x = [s.reshape(heads, size) if i == bonus else s.reshape(n_seqs, per, heads, size) for i, s in enumerate(src[:-1])]
    out = np.zeros((n_seqs, per, heads, size))
    for i in range(per):
        at = [a if a.ndim == 2 else a[:, i] for a in x]
        if t.op == OP.RWKV_WKV6:
            k, v, r, tf, td = at
            kv = k[..., :, None] * v[..., None, :]
            out[:, i] = np.einsum("shi,shij->shj", r, tf[..., None] * kv + S)
            S = S * td[..., :, None] + kv
        elif t.op == OP.GATED_LINEAR_ATTN:
            k, v, q, g = at
            S = S * g[..., :, None] + k[..., :, None] * v[..., None, :]
            out[:, i] = np.einsum("shi,shij->shj", q, S) * float(t.param_floats[0])
        else:
            r, w, k, v, a, b = at
            sa = np.einsum("shj,shij->shi", a, S)
            S = S * w[..., None, :] + v[..., :, None] * k[..., None, :] + sa[..., :, None] * b[..., None, :]
            out[:, i] = np.einsum("shj,shij->shi", r, S)
    return np.concatenate([out.ravel(), S.ravel()]).reshape(t.ne[::-1])


# ---------------------------------------------------------------- kernels
def _column_steps(load, store):
    """The two column recurrences over W lanes (n exist): out at `d`, state rows `stride` bytes apart."""
    @inline
    def wkv6(d, new, old, k, v, r, tf, td, size, stride, n):
        vv, y = load(v, n), zerof()
        for i in range(size):
            kv, s = fmul(splat(ld_f32(k + 4 * i)), vv), load(old + i * stride, n)
            y = fma(fma(kv, splat(ld_f32(tf + 4 * i)), s), splat(ld_f32(r + 4 * i)), y)
            store(new + i * stride, fma(s, splat(ld_f32(td + 4 * i)), kv), n)
        store(d, y, n)

    @inline
    def gla(d, new, old, k, v, q, g, scale, size, stride, n):
        vv, y = load(v, n), zerof()
        for i in range(size):
            s = fma(load(old + i * stride, n), splat(ld_f32(g + 4 * i)), fmul(splat(ld_f32(k + 4 * i)), vv))
            y = fma(s, splat(ld_f32(q + 4 * i) * scale), y)
            store(new + i * stride, s, n)
        store(d, y, n)
    return wkv6, gla


@inline
def _whole_load(p, n):
    return ldf(p)


@inline
def _whole_store(p, v, n):
    stf(p, v)


WHOLE, PART = _column_steps(_whole_load, _whole_store), _column_steps(ldf_part, stf_part)


def _make_columns(is_wkv6):
    (wkv6_whole, gla_whole), (wkv6_part, gla_part) = WHOLE, PART
    last = SRC5 if is_wkv6 else SRC4

    @inline
    def count(node):
        return (ne(node + SRC0, 0) + W - 1) // W * ne(node + SRC0, 1) * ne(node + last, 1)

    @inline
    def columns(node, u):
        size, heads, n_tokens = ne(node + SRC0, 0), ne(node + SRC0, 1), ne(node + SRC0, 2)
        k, v, r, x3, x4 = (addr(node + SRC0), addr(node + SRC1), addr(node + SRC2), addr(node + SRC3),
                           addr(node + SRC4))
        d, scale, per, row = addr(node + DST), param_f32(node, 0), n_tokens // ne(node + last, 1), 4 * size * heads
        blocks = (size + W - 1) // W
        hs = u // blocks
        j = (u - hs * blocks) * W
        n, seq = size - j, hs // heads
        at, state = 4 * size * (hs - seq * heads), 4 * size * size * hs + 4 * j
        old, new = addr(node + last) + state, d + n_tokens * row + state
        if per == 0:
            for i in range(size):
                copy_bytes(new + 4 * size * i, old + 4 * size * i, 4 * min(n, W))
        for t in range(seq * per, (seq + 1) * per):
            o = t * row + at
            pd, pv = d + o + 4 * j, v + o + 4 * j
            if is_wkv6:
                if n >= W:
                    wkv6_whole(pd, new, old, k + o, pv, r + o, x3 + at, x4 + o, size, 4 * size, n)
                else:
                    wkv6_part(pd, new, old, k + o, pv, r + o, x3 + at, x4 + o, size, 4 * size, n)
            elif n >= W:
                gla_whole(pd, new, old, k + o, pv, r + o, x3 + o, scale, size, 4 * size, n)
            else:
                gla_part(pd, new, old, k + o, pv, r + o, x3 + o, scale, size, 4 * size, n)
            old = new
        return OK
    return over_rows(columns, count)


@inline
def _two_dots(x, stride, y, n):
    """sum x y over n floats, of the rows at x and x + stride; each as `dot` adds it."""
    a0, b0, a1, b1 = zerof(), zerof(), zerof(), zerof()
    i = 0
    while i + 2 * W <= n:
        u, v = ldf(y + 4 * i), ldf(y + 4 * i + 4 * W)
        a0, b0 = fma(ldf(x + 4 * i), u, a0), fma(ldf(x + 4 * i + 4 * W), v, b0)
        a1, b1 = fma(ldf(x + stride + 4 * i), u, a1), fma(ldf(x + stride + 4 * i + 4 * W), v, b1)
        i += 2 * W
    while i < n:
        u = ldf_part(y + 4 * i, n - i)
        a0 = fma(ldf_part(x + 4 * i, n - i), u, a0)
        a1 = fma(ldf_part(x + stride + 4 * i, n - i), u, a1)
        i += W
    return hsum(fadd(a0, b0)), hsum(fadd(a1, b1))


@inline
def _wkv7_rows(new, old, stride, w, k, b, r, v, sa, n):
    """new = old w + v k + sa b over n floats of two rows, with two numbers each; returns the sums new r."""
    v0, v1, s0, s1, y0, y1 = splat(v[0]), splat(v[1]), splat(sa[0]), splat(sa[1]), zerof(), zerof()
    i = 0
    while i + W <= n:
        at, to = old + 4 * i, new + 4 * i
        vw, vk, vb, vr = ldf(w + 4 * i), ldf(k + 4 * i), ldf(b + 4 * i), ldf(r + 4 * i)
        x0 = fma(ldf(at), vw, fma(v0, vk, fmul(s0, vb)))
        x1 = fma(ldf(at + stride), vw, fma(v1, vk, fmul(s1, vb)))
        stf(to, x0)
        stf(to + stride, x1)
        y0, y1 = fma(x0, vr, y0), fma(x1, vr, y1)
        i += W
    if i < n:
        m, at, to = n - i, old + 4 * i, new + 4 * i
        vw, vk, vb = ldf_part(w + 4 * i, m), ldf_part(k + 4 * i, m), ldf_part(b + 4 * i, m)
        x0 = fma(ldf_part(at, m), vw, fma(v0, vk, fmul(s0, vb)))
        x1 = fma(ldf_part(at + stride, m), vw, fma(v1, vk, fmul(s1, vb)))
        stf_part(to, x0, m)
        stf_part(to + stride, x1, m)
        vr = ldf_part(r + 4 * i, m)
        y0, y1 = fadd(y0, fmul(x0, vr)), fadd(y1, fmul(x1, vr))
    return hsum(y0), hsum(y1)


@inline
def _wkv7_blocks(node):
    return row_blocks(ne(node + SRC0, 0)) * ne(node + SRC0, 1) * ne(node + SRC6, 1)


@inline
def _wkv7_block(node, u):
    """A block of rows of one head through the tokens of its sequence."""
    size, heads, n_tokens, n_seqs = ne(node + SRC0, 0), ne(node + SRC0, 1), ne(node + SRC0, 2), ne(node + SRC6, 1)
    r, w, k, v = addr(node + SRC0), addr(node + SRC1), addr(node + SRC2), addr(node + SRC3)
    a, b, d = addr(node + SRC4), addr(node + SRC5), addr(node + DST)
    per, row, blocks = n_tokens // n_seqs, 4 * size * heads, row_blocks(size)
    hs = u // blocks
    i0 = (u - hs * blocks) * ROWS
    rows, seq = min(ROWS, size - i0), hs // heads
    at, state = 4 * size * (hs - seq * heads), 4 * size * (hs * size + i0)
    old, new = addr(node + SRC6) + state, d + n_tokens * row + state
    if per == 0:
        copy_bytes(new, old, 4 * size * rows)
    for t in range(seq * per, (seq + 1) * per):
        o = t * row + at
        for i in range(0, rows, 2):
            row0, i_nbytes = old + 4 * size * i, 4 * (i0 + i)
            next = 4 if i + 1 < rows else 0         # the last of an odd number is computed twice
            pv, pd, stride = v + o + i_nbytes, d + o + i_nbytes, next * size
            y0, y1 = _wkv7_rows(new + 4 * size * i, row0, stride, w + o, k + o, b + o, r + o,
                                (ld_f32(pv), ld_f32(pv + next)), _two_dots(row0, stride, a + o, size), size)
            st_f32(pd, y0)
            st_f32(pd + next, y1)
        old = new
    return OK


MAKE = {OP.RWKV_WKV6: lambda: _make_columns(True), OP.GATED_LINEAR_ATTN: lambda: _make_columns(False),
        OP.RWKV_WKV7: lambda: over_rows(_wkv7_block, _wkv7_blocks)}


def kernel(t, n_threads):
    if any(s.type is not F32 for s in t.src):
        return None
    op, (size, heads, n_tokens, _) = OP(t.op), t.src[0].ne
    return Kernel(op.name.lower(), MAKE[op], cost=0.15 * size * size * heads * n_tokens + 0.3 * n_elements(t.src[-1]))


# ---------------------------------------------------------------- cases
def cases(op):
    def make(size, heads, n_tokens, n_seqs):
        def build(inp):
            def new(**kw):
                return inp.new(F32, (size, heads, n_tokens), **kw)
            state = inp.new(F32, (size * size * heads, n_seqs))
            if op == OP.RWKV_WKV6:
                return rwkv_wkv6(new(), new(), new(), inp.new(F32, (size, heads)), new(), state)
            if op == OP.GATED_LINEAR_ATTN:
                return gated_linear_attn(new(), new(), new(), new(), state, size ** -0.5)
            # a and b as RWKV-7 makes them, small: the recurrence must not grow
            small = {"lo": -1 / size, "hi": 1 / size}
            return rwkv_wkv7(new(), new(), new(), new(), new(**small), new(**small), state)
        return build
    for args in ((64, 4, 1, 1), (64, 3, 8, 2), (32, 2, 5, 1), (20, 3, 6, 3), (5, 1, 4, 2)):
        yield Case(" ".join(map(str, args)), make(*args))


SPECS = tuple(Spec(op=op, builders=(f,), reference=reference, kernel=kernel, cases=lambda op=op: cases(op),
                   flops=lambda t, n=n: n * math.prod(t.src[0].ne) * t.src[0].ne[0])
              for op, f, n in ((OP.RWKV_WKV6, rwkv_wkv6, 6), (OP.GATED_LINEAR_ATTN, gated_linear_attn, 6),
                               (OP.RWKV_WKV7, rwkv_wkv7, 8)))
