"""Attention over the tokens so far, as decoders and encoders have it.

    q, k, v  = Wq n, Wk n, Wv n  (+ biases)                     one matrix each, or all rows in one
    q, k     = rope(norm(q)), rope(norm(k))                     either may be left out
    o[h]     = softmax(cap(scale q[h] K[h / group]) + mask, sink[h]) V[h / group]
    result   = Wo o  (+ bias)

    cache of one layer                         which row holds which token: networks/parts/kv_cells.py
    K, V  [n_embd_kv, n_rows]                  set_rows writes the new rows, attention views rows 0 .. n_kv-1

A layer with `kv_of` has no keys and values of its own: it reads those of an earlier layer.
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import Rope

GATES = {"sigmoid": gg.sigmoid, "softplus": gg.softplus}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention; the defaults switch everything off."""
    n_head: int
    n_head_kv: int
    d_head: int
    d_head_v: int
    rope: Rope | None = None
    scale: float = 0.0                  # factor of the scores; 0: 1 / sqrt(d_head)
    window: int = 0                     # tokens looked back on, itself included; 0: all
    softcap: float = 0.0                # scores become softcap tanh(scores / softcap); 0: none
    max_alibi_bias: float = 0.0         # largest slope of ALiBi; 0: no ALiBi
    clamp: float = 0.0                  # q, k and v are kept within -clamp .. clamp; 0: not
    sinks: bool = False                 # a learned score per head that takes part in the softmax, with value 0
    gated: bool = False                 # half of each head of Wq is a gate: o * sigmoid(gate)
    gate: str = ""                      # a name in GATES: the result is o * act(attn_gate n); "": no gate
    gate_by_head: bool = False          # that gate is one number for each head
    out_scale: float = 0.0              # factor of the result; 0: none
    sub_norm: bool = False              # a norm between attention's result o and its last matrix Wo
    scaled: bool = False                # the file may hold a factor for each matrix
    fused: bool = False                 # attn_qkv instead of attn_q, attn_k, attn_v
    bias: bool | None = None            # biases of q, k, v: True: required, False: refused, None: optional
    out_bias: bool | None = None
    qk_norm: str = ""                   # kind, as Scope.norm has them; "": none
    qk_norm_over: str = "head"          # "head": one head with weights for all; "heads": weights per head; "all";
                                        # "query": a head, with one weight for each head of queries, none for keys
    norm_after_rope: bool = False
    v_norm: bool = False                # every head's value is divided by its RMS
    v_is_k: bool = False                # there is no Wv: values are the keys as projected
    kv_of: int | None = None            # the layer whose keys and values are read, instead of own ones
    out: str = "attn_output"
    temperature: bool = False           # queries are scaled by position: input "temperature"
    rel_buckets: int = 0                # buckets of relative positions, each with a score per head; 0: none
    n_in: int = 0                       # numbers of a token that q, k and v are made of; 0: n_embd

    @property
    def n_q(self):
        return self.d_head * self.n_head

    @property
    def n_k(self):
        return self.d_head * self.n_head_kv

    @property
    def n_o(self):
        return self.d_head_v * self.n_head

    @property
    def n_v(self):
        return self.d_head_v * self.n_head_kv

    def cache(self, sizes):
        """[(name, type, ne)] of what is kept between tokens."""
        if self.kv_of is not None:
            return []
        n = sizes.rows[self.window]
        return [("k cache", sizes.kv_type, (self.n_k, n)), ("v cache", sizes.v_type, (self.n_v, n))]

    def load(self, loader, p):
        d, n_q = self.n_in or loader.n_embd, self.n_q * (2 if self.gated else 1)
        if self.fused:
            w = {"attn_qkv": loader.linear(p + "attn_qkv", d, n_q + self.n_k + self.n_v, self.bias)}
        else:
            sizes = {"attn_q": n_q}
            if self.kv_of is None:
                sizes |= {"attn_k": self.n_k} | ({} if self.v_is_k else {"attn_v": self.n_v})
            else:                       # some files hold keys and values of such layers, which are not used
                loader.ignore(*(f"{p}attn_{n}.weight" for n in ("k", "v", "k_norm")))
            bias = self.bias or (loader.all_or_none(*(f"{p}{n}.bias" for n in sizes)) if self.bias is None else False)
            w = {n: loader.scaled(p + n, d, ne) if self.scaled else loader.linear(p + n, d, ne, bias)
                 for n, ne in sizes.items()}
        w[self.out] = loader.scaled(p + self.out, self.n_o, loader.n_embd) if self.scaled else \
            loader.linear(p + self.out, self.n_o, loader.n_embd, self.out_bias)
        if self.gate:
            w["attn_gate"] = loader.linear(p + "attn_gate", d, self.n_head if self.gate_by_head else self.n_o, False)
        if self.sub_norm:
            w["attn_sub_norm"] = loader.norm(p + "attn_sub_norm", "rms", self.n_o)
        for n, n_heads in (("attn_q_norm", self.n_head), ("attn_k_norm", self.n_head_kv)):
            if self.qk_norm and (n == "attn_q_norm" or self.kv_of is None):
                ne = {"head": (self.d_head,), "heads": (self.d_head, n_heads), "all": (self.d_head * n_heads,),
                      "query": (1, n_heads)}
                bare = self.qk_norm_over == "query" and n == "attn_k_norm"
                w[n] = (None, None) if bare else loader.norm(p + n, self.qk_norm, *ne[self.qk_norm_over])
        if self.rel_buckets:
            table = loader.want(p + "attn_rel_b.weight", self.n_head, self.rel_buckets, optional=bool(loader.tables))
            loader.tables.extend([] if table is None else [table])
            w["attn_rel_b"] = loader.tables[0] if table is None else table
        if self.sinks:
            w["attn_sinks"] = loader.want(p + "attn_sinks.weight", self.n_head)
        if self.rope:
            w["rope_factors"] = loader.rope_factors(self.rope)
        return w

    # ------------------------------------------------------------ the graph
    def build(self, g, n, w, i):
        if self.kv_of is not None:
            return self._reading(g, n, w, i)
        q, k, v, gate = self._project(g, n, w, i)
        q, k = self._rotated(g, q, "Q", w, i), self._rotated(g, k, "K", w, i)
        if self.norm_after_rope:
            q, k = (self._normed(g, t, name, w, i) for t, name in ((q, "Q"), (k, "K")))
        if self.temperature:
            q = gg.mul(q, g.leaf["temperature"])
        v = self._divided(g, v) if self.v_norm else v
        k, v = g.shared["keys and values", i] = self._keys_and_values(g, k, v, i)
        o = self._attend(g, gg.permute(q, 0, 2, 1, 3), k, v, w, i)      # q [d_head, n_tokens, n_head]
        o = gg.reshape_2d(o, self.d_head_v * self.n_head, g.n_tokens)
        if gate is not None:
            o = gg.mul(o, gg.sigmoid(gate))
        if self.gate:
            o = gated(o, self.gate, w["attn_gate"], n, i, self.n_head if self.gate_by_head else 0)
        if self.sub_norm:
            o = gg.set_name(g.norm(o, "rms", w["attn_sub_norm"]), f"attn_sub_norm-{i}")
        y = self._output(g, o, w)
        return gg.scale(y, self.out_scale) if self.out_scale else y

    def written(self, g, n, w, i):
        """(keys, values) of the cache with those of these tokens in it; nothing is asked for."""
        k = linear(w["attn_k"], n)
        v = k if self.v_is_k else linear(w["attn_v"], n)
        k = gg.reshape_3d(k, self.d_head, self.n_head_kv, g.n_tokens)
        k = self._rotated(g, self._normed(g, k, "K", w, i) if self.qk_norm else k, "K", w, i)
        return self._keys_and_values(g, k, self._divided(g, v) if self.v_norm else v, i)

    def _divided(self, g, v):
        """Every head's values over their RMS."""
        v = gg.view_3d(v, self.d_head_v, self.n_head_kv, g.n_tokens, self.d_head_v * v.nb[0], v.nb[1], 0)
        return gg.reshape_2d(gg.rms_norm(v, g.eps), self.n_v, g.n_tokens)

    def _output(self, g, o, w):
        return linear(w[self.out], o)

    def _reading(self, g, n, w, i):
        """The mixer's graph where it reads the keys and values of another layer."""
        q = gg.reshape_3d(gg.set_name(linear(w["attn_q"], n), f"Qcur-{i}"), self.d_head, self.n_head, g.n_tokens)
        q = self._rotated(g, self._normed(g, q, "Q", w, i) if self.qk_norm else q, "Q", w, i)
        o = self._attend(g, gg.permute(q, 0, 2, 1, 3), *g.shared["keys and values", self.kv_of], w, i)
        return linear(w[self.out], gg.reshape_2d(o, self.d_head_v * self.n_head, g.n_tokens))

    def _rotated(self, g, x, name, w, i):
        if not self.rope:
            return x
        factors = g.leaf[self.rope.non_rotary_name] if self.rope.n_non_rotary else w["rope_factors"]
        if self.rope.sections and "parts" in g.leaf:
            x = gg.rope_multi(x, g.leaf["parts"], factors, *self.rope.parts)
        else:
            x = gg.rope_ext(x, g.leaf["positions"], factors, *self.rope.parameters)
        return gg.set_name(x, f"{name}_roped-{i}")

    def rotated(self, k, positions, parameters, w):
        """Rows of the K cache, rotated by further positions (context shift)."""
        by_head = gg.reshape_3d(k, self.d_head, self.n_head_kv, k.ne[1])
        return gg.reshape_2d(gg.rope_ext(by_head, positions, w["rope_factors"], *parameters), *k.ne[:2])

    def _project(self, g, n, w, i):
        """q and k by head, v in rows, and the gate."""
        def clamped(x):
            return gg.clamp(x, -self.clamp, self.clamp) if self.clamp else x
        if self.fused:
            qkv = gg.set_name(clamped(linear(w["attn_qkv"], n)), f"wqkv-{i}")
            at, size = (0, self.n_q, self.n_q + self.n_k), qkv.type.nbytes
            if self.qk_norm_over == "all" and self.qk_norm:
                q, k = (gg.cont(gg.view_2d(qkv, ne, g.n_tokens, qkv.nb[1], first * size))
                        for ne, first in ((self.n_q, at[0]), (self.n_k, at[1])))
            else:
                q, k = (gg.view_3d(qkv, self.d_head, h, g.n_tokens, self.d_head * size, qkv.nb[1], first * size)
                        for h, first in ((self.n_head, at[0]), (self.n_head_kv, at[1])))
            v = gg.view_2d(qkv, self.n_v, g.n_tokens, qkv.nb[1], at[2] * size)
            q, k, v = (gg.set_name(t, f"{name}cur-{i}") for name, t in zip("QKV", (q, k, v), strict=True))
            return *self._by_head(g, q, k, w, i), v, None
        gate = None
        q = gg.set_name(clamped(linear(w["attn_q"], n)), f"Qcur{'_full' * self.gated}-{i}")
        if self.gated:                  # [query | gate] of every head
            size = q.type.nbytes
            q, gate = (gg.cont(gg.view_3d(q, self.d_head, self.n_head, g.n_tokens, 2 * self.d_head * size, q.nb[1],
                                          first * size)) for first in (0, self.d_head))
            q, gate = gg.set_name(q, f"Qcur-{i}"), gg.set_name(gg.reshape_2d(gate, self.n_q, g.n_tokens), f"gate-{i}")
        q = q if self.qk_norm_over == "all" else gg.reshape_3d(q, self.d_head, self.n_head, g.n_tokens)
        k = gg.set_name(clamped(linear(w["attn_k"], n)), f"Kcur-{i}")
        v = k if self.v_is_k else gg.set_name(clamped(linear(w["attn_v"], n)), f"Vcur-{i}")
        k = k if self.qk_norm_over == "all" else gg.reshape_3d(k, self.d_head, self.n_head_kv, g.n_tokens)
        return *self._by_head(g, q, k, w, i), v, gate

    def _by_head(self, g, q, k, w, i):
        """q and k, normed where that comes before RoPE, as [d_head, heads, n_tokens]."""
        if self.qk_norm and not self.norm_after_rope:
            q, k = (self._normed(g, t, name, w, i) for t, name in ((q, "Q"), (k, "K")))
        if self.qk_norm_over == "all":
            q, k = (gg.reshape_3d(t, self.d_head, h, g.n_tokens) for t, h in ((q, self.n_head), (k, self.n_head_kv)))
        return q, k

    def _normed(self, g, x, name, w, i):
        return gg.set_name(g.norm(x, self.qk_norm, w[f"attn_{name.lower()}_norm"]), f"{name}cur_normed-{i}")

    def _keys_and_values(self, g, k, v, i):
        """As [d, n_kv, n_head_kv]: out of the cache, or of these tokens alone."""
        if g.cache is None:
            v = gg.view_3d(v, self.d_head_v, self.n_head_kv, g.n_tokens, self.d_head_v * v.nb[0], v.nb[1], 0)
            return gg.permute(k, 0, 2, 1, 3), gg.permute(v, 0, 2, 1, 3)
        if k.nb[2] == self.n_k * k.nb[0]:
            k = gg.reshape_2d(k, self.n_k, g.n_tokens)
        else:
            k = gg.view_2d(k, self.n_k, g.n_tokens, k.nb[2], 0)
        # attention reads views of what set_rows returns, so it comes after the writes
        k_all, v_all = (gg.set_rows(kept, new, g.rows(self.window))
                        for kept, new in zip(g.cache[i][:2], (k, v), strict=True))
        paged = g.pages(self.window) is not None
        return (rows_by_head(g, k_all, self.d_head, self.n_head_kv, paged),
                rows_by_head(g, v_all, self.d_head_v, self.n_head_kv, paged))

    def _attend(self, g, q, k, v, w, i):
        """[d_head_v, n_head, n_tokens]"""
        scale = self.scale or 1.0 / math.sqrt(self.d_head)
        bias = self._relative(g, w["attn_rel_b"]) if self.rel_buckets else None
        return attend(g, q, k, v, g.mask(self.window), scale, i, self.softcap, self.max_alibi_bias,
                      w.get("attn_sinks"), bias, g.pages(self.window))

    @property
    def pages(self):
        """May this layer read keys and values by a page table?"""
        return not (self.max_alibi_bias or self.rel_buckets)

    def _relative(self, g, table):
        """[n_kv, n_tokens, n_head]: the bias of each score, by the distance of the two tokens."""
        t, buckets = g.n_tokens, g.leaf["buckets"]
        scores = gg.reshape_3d(gg.get_rows(table, buckets), self.n_head, buckets.ne[0] // t, t)
        return gg.cont(gg.permute(scores, 2, 0, 1, 3))


def gated(o, act, weights, n, i, n_head=0):
    """o times act(W n).  n_head: of o, where there is one number for each; 0: one for each number of o."""
    gate = GATES[act](gg.set_name(linear(weights, n), f"attn_gate-{i}"))
    if not n_head:
        return gg.mul(o, gate)
    heads = gg.reshape_3d(o, o.ne[0] // n_head, n_head, o.ne[1])
    return gg.reshape_2d(gg.mul(heads, gg.reshape_3d(gate, 1, n_head, o.ne[1])), *o.ne[:2])


def rows_by_head(g, cache, d, n_head_kv, paged=False):
    """The cache rows that are looked at, as [d, n_kv, n_head_kv]; paged: all rows."""
    n = cache.ne[1] if paged else min(g.n_kv, cache.ne[1])
    return gg.view_3d(cache, d, n, n_head_kv, cache.nb[1], cache.type.row_nbytes(d), 0)


def attend(g, q, k, v, mask, scale, i, softcap=0.0, max_bias=0.0, sinks=None, bias=None, pages=None):
    """q [d, n_tokens, n_head], k [d, n_kv, n_head_kv], v [d_v, n_kv, n_head_kv] -> [d_v, n_head, n_tokens].

    i: of the layer, in the names of what is computed; None: they get none.  pages: tables by which keys are found.
    """
    def named(x, name):
        return x if i is None else gg.set_name(x, f"{name}-{i}")
    if pages is not None:
        return named(gg.flash_attn_paged(q, k, v, mask, sinks, pages, scale, softcap), "attn")
    if g.flash and not max_bias and bias is None:
        o = gg.flash_attn_ext(q, k, v, mask, scale, 0.0, softcap)
        return named(o if sinks is None else gg.flash_attn_ext_add_sinks(o, sinks), "attn")
    kq = named(gg.mul_mat(k, q), "kq")
    if softcap:
        kq = gg.scale(gg.tanh(gg.scale(kq, scale / softcap)), softcap)
        scale = 1.0
    if bias is not None:
        kq = gg.add(kq if scale == 1.0 else gg.scale(kq, scale), bias)
        scale = 1.0
    p = gg.soft_max_ext(kq, mask, scale, max_bias)
    p = named(p if sinks is None else gg.soft_max_add_sinks(p, sinks), "kq_soft_max")
    v = gg.cast(v, gg.F32) if v.type.quantized else v       # blocks cannot be transposed
    o = named(gg.mul_mat(gg.cont(gg.transpose(v)), p), "kqv")     # [d_head_v, n_tokens, n_head]
    return named(gg.cont(gg.permute(o, 0, 2, 1, 3)), "attn")
