"""Hyper-connections of DeepSeek V4: n_hc residual streams, mixed before, after and around each layer.

    comb   4 x 4 matrices per token made doubly stochastic (Sinkhorn)
    pre    d[i, t]     = sum_h x[i, h, t] w[h, t]                               streams -> the layer's input
           d[i, t]     = scale sum_h x[i, h, t] sigmoid(gate[i, h, t])          the same with a gate per element
    post   d[i, h, t]  = x[i, t] post[h, t] + sum_s res[i, s, t] comb[h, s, t]  the layer's output -> streams
"""
import numpy as np
from numba import types

from ggjit.ops.copying.view import permute
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import n_elements, require, require_param, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native import simd
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import sigmoid1, vexp, vsigmoid
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, addr, nb, ne, param_f32
from ggjit.ops.native.row_loops import over_rows, param, whole
from ggjit.ops.native.simd import W

f32 = types.float32
HC = 4                                  # streams of comb
N_MIX = (2 + HC) * HC
MAX_ITER = 1000                         # 0.1 ms a token; float32 stands still after some tens of steps
ld4, st4, splat4 = simd.make_load("f32", HC), simd.make_store("f32", HC), simd.make_splat("f32", HC, f32)


# ---------------------------------------------------------------- builders
def _floats(name, *tensors):
    for t in tensors:
        require_type(name, t, (F32,))


def dsv4_hc_comb(mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int):
    """[4, 4, t] doubly stochastic mixing matrices from the last 16 of 24 mixes per token.

    v[dst, src] = mixes[8 + dst + 4 src] scale[2] + base[8 + dst + 4 src]; softmax over dst, + eps; then each column of
    src divided by (its sum + eps); then n_iter - 1 times the same over dst and over src.
    mixes [24, t], scale [>= 3], base [24]; F32, any strides -> F32 [4, 4, t] (dst fastest).  Params: P0 = eps, P1 =
    n_iter.  Errors: ShapeError, TypeMismatch, ParamError (n_iter outside 1 to 1,000, a negative eps).  Source:
    ggml_dsv4_hc_comb; arXiv 2409.19606.
    """
    _floats("dsv4_hc_comb", mixes, scale, base)
    require(mixes.ne[0] == N_MIX and mixes.ne[2:] == (1, 1), "dsv4_hc_comb: mixes must be [24, t] (4 streams)", mixes)
    require(scale.ne[0] >= 3 and scale.ne[1:] == (1, 1, 1), "dsv4_hc_comb: scale must hold 3 values", scale)
    require(base.ne == (N_MIX, 1, 1, 1), "dsv4_hc_comb: base must be [24]", base)
    require_param(eps >= 0, f"dsv4_hc_comb: eps must not be negative, got {eps}")
    params = (float(eps), whole("dsv4_hc_comb", "n_iter", n_iter, 1, MAX_ITER))
    return mixes.ctx.node(OP.DSV4_HC_COMB, F32, (HC, HC, mixes.ne[1]), (mixes, scale, base), params)


def dsv4_hc_pre(x: Tensor, weights: Tensor):
    """d[i, t] = sum_h x[i, h, t] weights[h, t]; x [n_embd, n_hc, t], weights [n_hc, t]; F32, any strides.

    Errors: ShapeError, TypeMismatch.  Params: P0 = 1.0 (scale), P1 = 0 (not gated).  Source: ggml_dsv4_hc_pre.
    """
    _floats("dsv4_hc_pre", x, weights)
    require(x.ne[3] == 1 and weights.ne == (*x.ne[1:3], 1, 1), "dsv4_hc_pre: weights must be [n_hc, t] for x "
            "[n_embd, n_hc, t]", x, weights)
    return x.ctx.node(OP.DSV4_HC_PRE, F32, (x.ne[0], x.ne[2]), (x, weights), (1.0, 0))


def dsv4_hc_pre_gated(x: Tensor, gate: Tensor, scale: float):
    """d[i, t] = scale sum_h x[i, h, t] sigmoid(gate[i, h, t]); x, gate [n_embd, n_hc, t]; F32, any strides.

    Errors: ShapeError, TypeMismatch.  Params: P0 = scale, P1 = 1 (gated).  Source: ggml_dsv4_hc_pre_gated (0.25).
    """
    _floats("dsv4_hc_pre_gated", x, gate)
    require(x.ne[3] == 1 and gate.ne == x.ne, "dsv4_hc_pre_gated: x and gate must both be [n_embd, n_hc, t]", x, gate)
    return x.ctx.node(OP.DSV4_HC_PRE, F32, (x.ne[0], x.ne[2]), (x, gate), (float(scale), 1))


def dsv4_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None = None):
    """d[i, h, t] = x[i, t] post[h, t] + sum_s residual[i, s, t] comb[h, s, t] -> F32 [n_embd, n_hc, t].

    x [n_embd, t], residual [n_embd, n_hc, t], post [n_hc, t], comb [n_hc, n_hc, t]; F32, any strides.  comb None is the
    identity: the sum is residual[i, h, t].  Errors: ShapeError, TypeMismatch.  Source: ggml_dsv4_hc_post.
    """
    _floats("dsv4_hc_post", x, residual, post, *(() if comb is None else (comb,)))
    (n, t), hc = x.ne[:2], residual.ne[1]
    require(x.ne[2:] == (1, 1) and residual.ne == (n, hc, t, 1) and post.ne == (hc, t, 1, 1)
            and (comb is None or comb.ne == (hc, hc, t, 1)), "dsv4_hc_post: shapes must be [n_embd, t], "
            "[n_embd, n_hc, t], [n_hc, t], [n_hc, n_hc, t]", x, residual, post, comb)
    return x.ctx.node(OP.DSV4_HC_POST, F32, (n, hc, t), (x, residual, post, comb))


# ---------------------------------------------------------------- reference
def _comb_reference(t, mixes, scale, base):
    eps, n_iter = float(t.param_floats[0]), int(t.op_params[1])
    v = mixes[0, 0, :, 2 * HC:].astype(np.float64) * scale.ravel()[2] + base.ravel()[2 * HC:]
    v = v.reshape(-1, HC, HC)                                           # [t, src, dst]
    v = np.exp(v - v.max(-1, keepdims=True))
    v = v / v.sum(-1, keepdims=True) + eps
    for i in range(2 * n_iter - 1):
        v = v / (v.sum(2 if i % 2 else 1, keepdims=True) + eps)
    return v[None]


def _pre_reference(t, x, w):
    x = x.astype(np.float64)
    if t.op_params[1]:
        return (x / (1 + np.exp(-w.astype(np.float64)))).sum(2)[:, None] * float(t.param_floats[0])
    return np.einsum("ythi,th->yti", x, w[0, 0])[:, None]


def _post_reference(t, x, residual, post, comb=None):
    direct, residual = x[0, 0].astype(np.float64)[:, None, :] * post[0, 0][:, :, None], residual[0].astype(np.float64)
    return (direct + (residual if comb is None else np.einsum("tsi,tsh->thi", residual, comb[0])))[None]


# ---------------------------------------------------------------- kernels
@inline
def _load4(p, stride):
    """Four floats `stride` bytes apart."""
    return ld_f32(p), ld_f32(p + stride), ld_f32(p + 2 * stride), ld_f32(p + 3 * stride)


@inline
def _divided_row(v, eps):
    return simd.fmul(v, splat4(f32(1.0) / (simd.hsum(v) + eps)))


@inline
def _soft_max_row(d, mixes, m0, base, b0, scale, eps):
    m, b = _load4(mixes, m0), _load4(base, b0)
    for i in range(HC):
        st_f32(d + 4 * i, m[i] * scale + b[i])
    v = ld4(d)
    e = vexp(simd.fsub(v, splat4(simd.hmax(v))))
    return simd.fadd(simd.fmul(e, splat4(f32(1.0) / simd.hsum(e))), splat4(eps))


@inline
def _n_tokens(node):
    return ne(node + SRC0, 1)


@inline
def _comb(node, t):
    mixes, scale, base, d = node + SRC0, node + SRC1, node + SRC2, node + DST
    eps, factor, m0, b0 = param_f32(node, 0), ld_f32(addr(scale) + 2 * nb(scale, 0)), nb(mixes, 0), nb(base, 0)
    pm, pb, pd = addr(mixes) + t * nb(mixes, 1) + 8 * m0, addr(base) + 8 * b0, addr(d) + t * nb(d, 2)
    v0 = _soft_max_row(pd, pm, m0, pb, b0, factor, eps)
    v1 = _soft_max_row(pd, pm + 4 * m0, m0, pb + 4 * b0, b0, factor, eps)
    v2 = _soft_max_row(pd, pm + 8 * m0, m0, pb + 8 * b0, b0, factor, eps)
    v3 = _soft_max_row(pd, pm + 12 * m0, m0, pb + 12 * b0, b0, factor, eps)
    for i in range(param(node, 1)):
        if i > 0:
            v0, v1 = _divided_row(v0, eps), _divided_row(v1, eps)
            v2, v3 = _divided_row(v2, eps), _divided_row(v3, eps)
        f = simd.fdiv(splat4(f32(1.0)), simd.fadd(simd.fadd(simd.fadd(v0, v1), simd.fadd(v2, v3)), splat4(eps)))
        v0, v1, v2, v3 = simd.fmul(v0, f), simd.fmul(v1, f), simd.fmul(v2, f), simd.fmul(v3, f)
    st4(pd, v0)
    st4(pd + 16, v1)
    st4(pd + 32, v2)
    st4(pd + 48, v3)
    return OK


@inline
def _mix(d, x, x0, x1, w, w1, n, count, extra, e0, factor):
    """d[i] = extra[i] factor + sum_h x[i, h] w[h] over n elements; strides in bytes, extra 0: absent."""
    i = 0
    if x0 == 4 and (extra == 0 or e0 == 4):
        while i < n:
            m = n - i
            y = simd.zerof()
            if extra != 0:
                y = simd.ldf_part(extra + 4 * i, m) if m < W else simd.ldf(extra + 4 * i)
                y = simd.fmul(y, simd.splat(factor))
            for h in range(count):
                p = x + h * x1 + 4 * i
                y = simd.fma(simd.ldf_part(p, m) if m < W else simd.ldf(p), simd.splat(ld_f32(w + h * w1)), y)
            if m < W:
                simd.stf_part(d + 4 * i, y, m)
            else:
                simd.stf(d + 4 * i, y)
            i += W
    while i < n:
        y = ld_f32(extra + i * e0) * factor if extra != 0 else f32(0.0)
        for h in range(count):
            y += ld_f32(x + i * x0 + h * x1) * ld_f32(w + h * w1)
        st_f32(d + 4 * i, y)
        i += 1


@inline
def _gated(d, x, x0, x1, g, g0, g1, n, count, scale):
    """d[i] = scale sum_h x[i, h] sigmoid(g[i, h]) over n elements; strides in bytes."""
    i = 0
    while x0 == 4 and g0 == 4 and i < n:
        m, y = n - i, simd.zerof()
        for h in range(count):
            y = simd.fma(simd.ldf_part(x + h * x1 + 4 * i, m), vsigmoid(simd.ldf_part(g + h * g1 + 4 * i, m)), y)
        simd.stf_part(d + 4 * i, simd.fmul(y, simd.splat(scale)), m)
        i += W
    while i < n:
        z = f32(0.0)
        for h in range(count):
            z += ld_f32(x + i * x0 + h * x1) * sigmoid1(ld_f32(g + i * g0 + h * g1))
        st_f32(d + 4 * i, z * scale)
        i += 1


@inline
def _pre(node, t):
    x, w, d = node + SRC0, node + SRC1, node + DST
    pd, px, n, hc = addr(d) + t * nb(d, 1), addr(x) + t * nb(x, 2), ne(x, 0), ne(x, 1)
    if param(node, 1) != 0:
        _gated(pd, px, nb(x, 0), nb(x, 1), addr(w) + t * nb(w, 2), nb(w, 0), nb(w, 1), n, hc, param_f32(node, 0))
    else:
        _mix(pd, px, nb(x, 0), nb(x, 1), addr(w) + t * nb(w, 1), nb(w, 0), n, hc, 0, 0, f32(0.0))
    return OK


@inline
def _post(node, r):
    x, res, post, comb, d = node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + DST
    n, hc = ne(d, 0), ne(d, 1)
    t = r // hc
    h = r - t * hc
    pd, px, pr = addr(d) + h * nb(d, 1) + t * nb(d, 2), addr(x) + t * nb(x, 1), addr(res) + t * nb(res, 2)
    share = addr(post) + h * nb(post, 0) + t * nb(post, 1)
    if addr(comb) == 0:
        _mix(pd, px, nb(x, 0), 0, share, 0, n, 1, pr + h * nb(res, 1), nb(res, 0), f32(1.0))
    else:
        _mix(pd, pr, nb(res, 0), nb(res, 1), addr(comb) + h * nb(comb, 0) + t * nb(comb, 2), nb(comb, 1), n, hc, px,
             nb(x, 0), ld_f32(share))
    return OK


MAKE = {OP.DSV4_HC_COMB: lambda: over_rows(_comb, _n_tokens), OP.DSV4_HC_PRE: lambda: over_rows(_pre),
        OP.DSV4_HC_POST: lambda: over_rows(_post)}


def kernel(t, n_threads):
    if any(s is not None and s.type is not F32 for s in t.src):
        return None
    op = OP(t.op)
    cost = 10.0 * n_elements(t) * int(t.op_params[1]) / HC if op == OP.DSV4_HC_COMB else 0.05 * touched_nbytes(t)
    return Kernel(op.name.lower(), MAKE[op], cost=cost)


# ---------------------------------------------------------------- cases
def _comb_cases():
    for n in (2, 3, 32):
        for n_iter in (1, 20):
            yield Case(f"{n} {n_iter}", lambda inp, n=n, i=n_iter: dsv4_hc_comb(
                inp.new(F32, (N_MIX, n)), inp.new(F32, (3,)), inp.new(F32, (N_MIX,)), 1e-6, i))


def _pre_cases():
    for n, hc, t in ((64, 4, 1), (100, 4, 7), (33, 2, 5)):
        yield Case(f"{n} {hc} {t}", lambda inp, n=n, hc=hc, t=t: dsv4_hc_pre(
            inp.new(F32, (n, hc, t)), inp.new(F32, (hc, t))))
        yield Case(f"gated {n} {hc} {t}", lambda inp, n=n, hc=hc, t=t: dsv4_hc_pre_gated(
            inp.new(F32, (n, hc, t)), inp.new(F32, (n, hc, t), lo=-5, hi=5), 0.25))
    yield Case("gated strided", lambda inp: dsv4_hc_pre_gated(
        permute(inp.new(F32, (4, 40, 6)), 1, 0, 2, 3), inp.new(F32, (40, 4, 6)), 2.0))
    yield Case("strided", lambda inp: dsv4_hc_pre(permute(inp.new(F32, (4, 40, 6)), 1, 0, 2, 3), inp.new(F32, (4, 6))))


def _post_cases():
    for n, hc, t in ((64, 4, 1), (100, 4, 7), (33, 2, 5)):
        yield Case(f"{n} {hc} {t}", lambda inp, n=n, hc=hc, t=t: dsv4_hc_post(
            inp.new(F32, (n, t)), inp.new(F32, (n, hc, t)), inp.new(F32, (hc, t)), inp.new(F32, (hc, hc, t))))
        yield Case(f"no comb {n} {hc} {t}", lambda inp, n=n, hc=hc, t=t: dsv4_hc_post(
            inp.new(F32, (n, t)), inp.new(F32, (n, hc, t)), inp.new(F32, (hc, t))))
    yield Case("strided", lambda inp: dsv4_hc_post(
        permute(inp.new(F32, (6, 40)), 1, 0, 2, 3), permute(inp.new(F32, (4, 40, 6)), 1, 0, 2, 3),
        inp.new(F32, (4, 6)), permute(inp.new(F32, (4, 4, 6)), 1, 0, 2, 3)))


def _rebuild_pre(n):
    return n.call("dsv4_hc_pre_gated", *n.src, n.f[0]) if n.i[1] else n.call("dsv4_hc_pre", *n.src)


SPECS = (Spec(op=OP.DSV4_HC_COMB, builders=(dsv4_hc_comb,), reference=_comb_reference, kernel=kernel,
              cases=_comb_cases),
         Spec(op=OP.DSV4_HC_PRE, builders=(dsv4_hc_pre, dsv4_hc_pre_gated), reference=_pre_reference, kernel=kernel,
              cases=_pre_cases, rebuild=_rebuild_pre),
         Spec(op=OP.DSV4_HC_POST, builders=(dsv4_hc_post,), reference=_post_reference, kernel=kernel,
              cases=_post_cases))
