"""flash_attn_ext: attention without storing the scores.

    d[:, h, i] = sum_j softmax_j(s_ij) v[:, j]          s_ij = scale q_i . k_j (+ slope_h mask_ij)
                                                        with a soft cap: cap tanh(s_ij / cap) before the mask is added

Sums are float32 and q stays float32 for every type of K and V.  ggml rounds q to K's companion type and sums an F16 V
in F16; the results differ by that rounding.  Two kernels, chosen by the number of query rows that share a K/V head:
flash_attn_decode and flash_attn_prefill; their parts are in flash_attn_rows, _softmax, _tiles and _matrix.
"""
import math

import numpy as np

from ggjit.ops.attention import flash_attn_decode, flash_attn_prefill
from ggjit.ops.attention.flash_attn_rows import Variant
from ggjit.ops.core.builders import writes_in_c
from ggjit.ops.core.errors import NotSupported, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import describe, is_contiguous, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.split import MIRRORED, SplitState
from ggjit.ops.core.traits import module_of, traits_of
from ggjit.ops.core.types import BF16, F16, F32, Q4_0, Q8_0, Tensor
from ggjit.ops.matmul import choices

PREC_DEFAULT, PREC_F32 = 0, 10          # GGML_PREC_*
PREFILL_ROWS = 16                       # query rows per K/V head from which the prefill kernel is faster


# ---------------------------------------------------------------- builders
def flash_attn_ext(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0,
                   max_bias: float = 0.0, logit_softcap: float = 0.0):
    """Attention of n_batch queries over n_kv keys: softmax(scale q k^T + slope mask) v; F32 [Dv, n_head, n_batch, ne3].

    Shapes (ggml order; NumPy's is reversed):
        q     [D,  n_batch, n_head,    ne3]    F32 or F16
        k     [D,  n_kv,    n_head_kv, ne3]    F32, F16, BF16 or any quantised type with kernels
        v     [Dv, n_kv,    n_head_kv, ne3]    the same; n_head is a multiple of n_head_kv: query head h reads h // rep
        mask  [n_kv, >= n_batch, ne2, ne3]     F16, contiguous, added to the scores; -inf hides a key; dims 2 and 3
                                               divide n_head and ne3 and are repeated by modulo
    max_bias > 0 turns on ALiBi: the mask of head h is multiplied by its slope.  logit_softcap != 0: cap tanh(s / cap).
    A query that sees no key gives zeros.  q, k, v may be strided views (KV cache); their rows must be contiguous.
    Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_flash_attn_ext; Dao et al. 2022, arXiv 2205.14135.
    """
    _check_types(q, k, v)
    require(q.ne[0] == k.ne[0] > 0, "flash_attn_ext: q and k must have rows of one length", q, k)
    require(k.ne[1] == v.ne[1], "flash_attn_ext: k and v must have one row per key", k, v)
    require(q.ne[3] == k.ne[3] == v.ne[3], "flash_attn_ext: dim 3 of q, k and v must be equal", q, k, v)
    for name, x in (("k", k), ("v", v)):
        require(x.ne[2] > 0 and q.ne[2] % x.ne[2] == 0,
                f"flash_attn_ext: heads of q must be a multiple of {name}'s", q, x)
    _check_mask(q, k, mask)
    for name, value in (("scale", scale), ("max_bias", max_bias), ("logit_softcap", logit_softcap)):
        if not math.isfinite(value):
            raise ParamError(f"flash_attn_ext: {name} must be a finite number, got {value!r}")
    if max_bias > 0 and mask is None:
        raise ParamError("flash_attn_ext: max_bias (ALiBi) scales the mask, but no mask was given; pass mask=")
    params = (float(scale), float(max_bias), float(logit_softcap), PREC_DEFAULT)
    ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    return q.ctx.node(OP.FLASH_ATTN_EXT, F32, ne, (q, k, v, mask, None), params, ndim=max(3, q.ndim))


@writes_in_c
def flash_attn_ext_set_prec(a: Tensor, prec: int):
    """The attention `a` with precision `prec` (PREC_DEFAULT or PREC_F32) noted in parameter 3; both compute in F32.

    Returns a new tensor: built tensors never change (ggml writes into a).  Errors: TypeMismatch, ParamError.  Source:
    ggml_flash_attn_ext_set_prec.
    """
    _check_attention("flash_attn_ext_set_prec", a)
    if prec not in (PREC_DEFAULT, PREC_F32):
        raise ParamError(f"flash_attn_ext_set_prec: prec must be {PREC_DEFAULT} (default) or {PREC_F32} (F32), "
                         f"got {prec!r}")
    return _again(a, a.src, int(prec))


@writes_in_c
def flash_attn_ext_add_sinks(a: Tensor, sinks: Tensor):
    """The attention `a` with one more score per head, sinks[h], that has no value: it only takes weight.

    sinks: F32 [n_head] or None (returns a).  Returns a new tensor: built tensors never change (ggml writes into a).
    Errors: TypeMismatch, ShapeError, ParamError.  Source: ggml_flash_attn_ext_add_sinks (source 4); Xiao et al. 2023,
    arXiv 2309.17453.
    """
    _check_attention("flash_attn_ext_add_sinks", a)
    if sinks is None:
        return a
    require(a.src[4] is None, "flash_attn_ext_add_sinks: it has sinks already", a, a.src[4], error=ParamError)
    require_type("flash_attn_ext_add_sinks", sinks, (F32,), "sinks")
    require(tuple(sinks.ne) == (a.src[0].ne[2], 1, 1, 1) and is_contiguous(sinks),
            "flash_attn_ext_add_sinks: sinks must hold one value per query head", a.src[0], sinks)
    return _again(a, (*a.src[:4], sinks), int(a.op_params[3]))


def _again(a, src, prec):
    floats = a.op_params.view(np.float32)
    return a.ctx.node(OP.FLASH_ATTN_EXT, F32, a.ne, src, (*(float(x) for x in floats[:3]), prec), ndim=a.ndim)


def _check_attention(name, a):
    if a.op != OP.FLASH_ATTN_EXT:
        raise TypeMismatch(f"{name}: expected the result of flash_attn_ext, got {describe(a)}")


def _check_types(q, k, v):
    require_type("flash_attn_ext", q, (F32, F16), "q")
    for name, x in (("k", k), ("v", v)):
        if x.type not in (F32, F16, BF16) and not _convertible(x.type):
            raise TypeMismatch(f"flash_attn_ext: {name} {describe(x)} cannot be read as floats; cast it with gg.cast")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(rows_contiguous(x), f"flash_attn_ext: rows of {name} must be contiguous", x,
                remedy="use gg.cont on it")


def _convertible(type):
    try:
        return type.quantized and traits_of(type).to_float is not None
    except NotSupported:
        return False


def _check_mask(q, k, mask):
    if mask is None:
        return
    require_type("flash_attn_ext", mask, (F16,), "mask")
    require(is_contiguous(mask), "flash_attn_ext: the mask must be contiguous", mask, remedy="use gg.cont on it")
    if mask.ne[0] != k.ne[1] or mask.ne[1] < q.ne[1]:
        raise ShapeError(f"flash_attn_ext: the mask must be [n_kv = {k.ne[1]}, at least n_batch = {q.ne[1]}], got "
                         f"{describe(mask)}")
    require(min(mask.ne) > 0 and q.ne[2] % mask.ne[2] == 0 and q.ne[3] % mask.ne[3] == 0,
            "flash_attn_ext: dims 2 and 3 of the mask must divide those of q", mask, q)


# ---------------------------------------------------------------- reference
def slopes(n_head, max_bias):
    """ALiBi slopes of all heads, float64."""
    if max_bias <= 0:
        return np.ones(n_head)
    n = 1 << int(math.floor(math.log2(n_head)))
    h = np.arange(n_head)
    return np.where(h < n, 2.0 ** (-max_bias / n * (h + 1)), 2.0 ** (-max_bias / 2 / n * (2 * (h - n) + 1)))


def reference(t, q, k, v, mask=None, sinks=None):
    scale, max_bias, cap = (float(x) for x in np.asarray(t.op_params).view(np.float32)[:3])
    n_head, n_batch = q.shape[1:3]
    k, v = (np.repeat(x, n_head // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhid,bhjd->bhij", q, k) * (scale / cap if cap else scale)
    if cap:
        s = cap * np.tanh(s)
    if mask is not None:
        m = np.tile(mask[:, :, :n_batch], (q.shape[0] // mask.shape[0], n_head // mask.shape[1], 1, 1))
        s = np.where(m == -np.inf, -np.inf, s + slopes(n_head, max_bias)[None, :, None, None] * m)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks.reshape(1, n_head, 1, 1))
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(1, n_head, 1, 1) - top)
    p = e / np.where(total > 0, total, 1.0)
    v = np.where((e > 0).any(axis=2)[..., None], v, 0.0)        # a value of weight 0 may be inf or NaN
    return np.einsum("bhij,bhjd->bihd", p, v)


# ---------------------------------------------------------------- kernels
def kernel(t, n_threads, paged=False):
    """paged: of flash_attn_paged, whose sources are the same and a page table."""
    q, k, v, mask = t.src[:4]
    variant = Variant(q.type, k.type, v.type, q.ne[0], v.ne[0])
    rep = math.gcd(q.ne[2] // k.ne[2], q.ne[2] // v.ne[2])
    per_group, n_rows, n_kv = rep * q.ne[1], q.ne[1] * q.ne[2] * q.ne[3], mask.ne[0] if paged else k.ne[1]
    cost = n_rows * n_kv * (0.04 * (q.ne[0] + v.ne[0]) + 0.5)
    modules = tuple({module_of(x.type) for x in (k, v) if x.type.quantized})
    apart = q.ne[1] > 1 and (choices.are_apart() or paged and t.src[5].ne[1] > 1)
    if per_group >= PREFILL_ROWS and not apart:
        return Kernel(f"flash_attn-prefill-{variant.name}" + "-paged" * paged,
                      lambda: flash_attn_prefill.make(variant, paged), cost,
                      flash_attn_prefill.work_nbytes(variant, n_threads), modules)
    group = flash_attn_decode.rows_at_once(rep, 1) if apart else flash_attn_decode.rows_at_once(per_group, q.ne[1])
    return Kernel(f"flash_attn-decode{group}-{variant.name}" + "-apart" * apart + "-paged" * paged,
                  lambda: flash_attn_decode.make(variant, group, apart, paged), cost,
                  flash_attn_decode.work_nbytes(variant, group, n_threads, n_rows, n_kv), modules)


# ---------------------------------------------------------------- cases
def causal_mask(rng, n_kv, n_batch, n_past, ne2=1, ne3=1):
    """Random finite values, -inf above the diagonal shifted by n_past; NumPy order."""
    m = rng.uniform(-1, 1, (ne3, ne2, n_batch, n_kv))
    hidden = np.arange(n_kv)[None, :] > np.arange(n_batch)[:, None] + n_past
    return np.where(hidden, -np.inf, m).astype(np.float16)


def _permuted(inp, type, ne, lo=-1.0, hi=1.0):
    """A tensor of shape ne that is a view: heads lie side by side in each token, as in a KV cache."""
    x = inp.new(type, (ne[0], ne[2], ne[1], ne[3]), lo=lo, hi=hi)
    return x.ctx.node(OP.PERMUTE, type, ne, (x,), (0, 2, 1, 3), view_of=x, nb=(x.nb[0], x.nb[2], x.nb[1], x.nb[3]))


def make_case(kt=F16, vt=None, qt=F32, d=64, dv=None, n_kv=113, n=1, heads=4, rep=1, ne3=1, mask=True, mask_heads=1,
              max_bias=0.0, cap=0.0, sinks=False, permuted=False):
    """build(inputs) for one attention; heads counts K/V heads."""
    def build(inp):
        new = (lambda *a, **kw: _permuted(inp, *a, **kw)) if permuted else inp.new
        q = new(qt, (d, n, heads * rep, ne3), lo=-4.0, hi=4.0)
        k, v = new(kt, (d, n_kv, heads, ne3)), new(vt or kt, (dv or d, n_kv, heads, ne3))
        m = None
        if mask:
            values = causal_mask(inp.rng, n_kv, n + 3, max(0, n_kv - n - 2), mask_heads, ne3)
            m = inp.new(F16, (n_kv, n + 3, mask_heads, ne3), values)
        y = flash_attn_ext(q, k, v, m, 1 / math.sqrt(d), max_bias, cap)
        return flash_attn_ext_add_sinks(y, inp.new(F32, (heads * rep,), lo=-3.0, hi=3.0)) if sinks else y
    return build


def cases():
    """One case per path: types, row sets of either kernel, chunks, tails in D, Dv and n_kv, every option."""
    grid = [dict(kt=F32, d=8, n_kv=40, rep=2, permuted=True), dict(kt=F32, d=8, n=20, n_kv=75, rep=2),
            dict(kt=F32, d=32, n=64, n_kv=64, mask=False), dict(n_kv=1), dict(n_kv=1100, rep=4, permuted=True),
            dict(n_kv=64, rep=4, mask=False), dict(rep=4, max_bias=8.0, cap=10.0, sinks=True),
            dict(n=75, n_kv=512, rep=4, permuted=True),
            dict(n=17, ne3=2, mask_heads=2, max_bias=8.0, cap=5.0, sinks=True),
            dict(d=40, dv=24, kt=F16, n=3), dict(d=40, dv=24, kt=F16, n=35), dict(kt=BF16, d=80, n=18, rep=2),
            dict(kt=F16, vt=F32, qt=F16, d=72, n_kv=65, n=2, rep=3), dict(kt=Q8_0, d=64, n=1, rep=4, n_kv=130),
            dict(kt=Q8_0, vt=Q4_0, d=64, n=33, n_kv=130), dict(d=5, dv=3, kt=F16, n=2, rep=5, n_kv=9)]
    for options in grid:
        if all(t in (F32, F16, BF16) or _convertible(t) for t in (options.get("kt", F16), options.get("vt") or F32)):
            yield Case(" ".join(f"{k}={v!r}" for k, v in options.items()), make_case(**options), max_nmse=1e-11)


# ---------------------------------------------------------------- gradient
NOTHING = -1e30                         # added to the score of a hidden key instead of -inf: no NaN where all are


def gradient(g, t, dy):
    """Scores and weights are computed again, by nodes of their own:

        s = k q,  p = softmax(scale s, or cap tanh(scale s / cap), + mask),  o = v p
        dv = p do,  dp = v do,  ds = p (dp - p . dp) (1 - tanh^2) scale,  dq = k ds,  dk = q ds
    """
    q, k, v, mask, sinks = (*t.src, None, None)[:5]
    scale, max_bias, cap = (float(x) for x in t.param_floats[:3])
    q32, k32, v32 = g.once(t, "qkv", lambda: [g.f32(g.rows(x)) for x in (q, k, v)])

    def weights():
        """(p as a soft_max node, p with zeros for queries that see no key, tanh)"""
        s = g.mul_mat(k32, q32)
        bent = g.tanh(g.scale(s, scale / cap)) if cap else None
        s, factor = (g.scale(bent, cap), 1.0) if cap else (s, scale)
        if mask is None:
            return g.soft_max_add_sinks(g.soft_max_ext(s, None, factor, 0.0), sinks), None, bent
        m = g.clamp(g.cast(mask, F32), NOTHING, math.inf)
        p = g.soft_max_add_sinks(g.soft_max_ext(s, m, factor, max_bias), sinks)
        rows = g.view_4d(m, m.ne[0], q.ne[1], *m.ne[2:], *m.nb[1:], 0)
        return p, g.step(g.scale_bias(g.cont(rows), 1.0, -NOTHING / 10)), bent

    def parts():
        """Values that the gradients of all sources share, made once: (p, gradient of the output, dp, gradient of the
        softmax's input, tanh of the capped scores).  p: the weights, dp: their gradient."""
        p, seen, bent = weights()
        do = g.cont(g.permute(dy, 0, 2, 1, 3))
        dp = g.mul_mat(v32, do)
        p = p if seen is None else g.mul(p, seen)
        return p, do, dp, g.soft_max_ext_back(dp, p, 1.0, 0.0), bent

    def shared():
        return g.once(t, "parts", parts)

    def of_scores():
        bent, d = shared()[4], shared()[3]
        d = g.mul(d, g.scale_bias(g.sqr(bent), -1.0, 1.0)) if cap else d
        return g.scale(d, scale)

    def ds():
        return g.once(t, "ds", of_scores)

    def of_v():
        p, do, *_ = shared()
        return g.sum_groups(g.out_prod(do, p), v)

    def of_mask():
        d = shared()[3]
        if max_bias > 0:
            d = g.mul(d, g.constant(slopes(q.ne[2], max_bias).astype(np.float32).reshape(1, -1, 1, 1)))
        d = g.fit(d, (k.ne[1], q.ne[1], *mask.ne[2:]))
        return g.pad(d, 0, mask.ne[1] - q.ne[1], 0, 0) if mask.ne[1] > q.ne[1] else d

    def of_sinks():
        p, _, dp, *_ = shared()
        d = g.mul(g.scale_bias(g.sum_rows(p), 1.0, -1.0), g.sum_rows(g.mul(dp, p)))    # [1, n_batch, n_head, ne3]
        d = g.sum_rows(g.reshape_3d(d, *d.ne[1:]))
        return g.reshape_1d(g.fit(d, (1, q.ne[2], 1, 1)), q.ne[2])
    return (lambda: g.out_prod(k32, g.transpose(ds())), lambda: g.sum_groups(g.out_prod(q32, ds()), k), of_v,
            of_mask if mask is not None else None, of_sinks if sinks is not None else None)


# ---------------------------------------------------------------- rows
def _rows(t):
    """Along the axis of texts.  A mask belongs to all texts, or there is one for each."""
    q, k, v, mask, sinks = t.src
    if last_axis(t) == 3 and (mask is None or mask.ne[3] in (1, t.ne[3])):
        yield 3, [3, 3, 3, None if mask is None or mask.ne[3] == 1 else 3, None]


def _rebuild(n):
    q, k, v, mask, sinks = n.up_to(5)
    out = n.call("flash_attn_ext", q, k, v, mask, *n.f[:3])
    out = n.call("flash_attn_ext_set_prec", out, n.i[3]) if n.i[3] else out
    return out if sinks is None else n.call("flash_attn_ext_add_sinks", out, sinks)


def _split(t, q, k, v, mask=None, sinks=None):
    """Heads, where each has the same mask, slope and sinks; they are axis 1 of the result."""
    r = t.src[0].ne[2] // t.src[1].ne[2]
    ok = q.axis == 2 and k == v and k.axis == 2 and tuple(r * s for s in k.sizes) == q.sizes and sinks is None \
        and mask in (None, MIRRORED) and (mask is None or t.src[3].ne[2] == 1) and float(t.param_floats[1]) == 0
    return SplitState(1, q.sizes) if ok else None


SPECS = (Spec(op=OP.FLASH_ATTN_EXT,
              builders=(flash_attn_ext, flash_attn_ext_set_prec, flash_attn_ext_add_sinks),
              reference=reference, kernel=kernel, gradient=gradient, rows=_rows, split=_split, cases=cases,
              rebuild=_rebuild,
              flops=lambda t: 2 * math.prod(t.src[0].ne[1:]) * (t.src[0].ne[0] + t.src[2].ne[0]) * t.src[1].ne[1]),)
