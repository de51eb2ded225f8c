"""Multi-head latent attention (DeepSeek 2 and 3): one short vector per token yields the keys and values of all heads.

    q = Wq n, or Wqb norm(Wqa n);    every head [nope | rope], the last part is rotated
    c, r = Wkva n                    c: latent, normed;  r: rotated, shared by all heads

    absorbed:   scores of head h = (Wkb[h] q_nope) . c + q_rope . r;   o[h] = Wvb[h] (softmax(scores) c)
                cache: [c | r] of every token
    expanded:   k[h], v[h] = Wkvb[h] c, attention as usual
"""
import dataclasses
from typing import Any

import ggjit as gg
from ggjit.models.blocks.attention import attend, gated, rows_by_head
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import Rope


@dataclasses.dataclass(frozen=True)
class Latent:
    n_head: int
    d_key: int                          # length of a head of keys: the part without RoPE and the part with it
    d_value: int
    kv_rank: int
    q_rank: int                         # 0: Wq in one piece
    rope: Rope | None
    scale: float
    absorbed: bool
    temperature: bool = False           # queries are scaled by position: input "temperature"
    d_shared: int = 0                   # without RoPE: of a head, the part that would be rotated
    gate: str = ""                      # a name in attention.GATES: the result is o * act(attn_gate n)
    gate_by_head: bool = False          # that gate is one number for each head
    indexer: Any = None                 # an Indexer or PoolIndexer:     # which keys a token looks at; None: all
    window: int = 0                     # tokens looked back on, itself included; 0: all
    sinks: bool = False                 # a learned score per head that takes part in the softmax, with value 0
    k_norm: bool = False                # r is normed before it is rotated
    cached = True                       # writes keys into the cache and reads them there

    @property
    def n_rot(self):
        return self.rope.n_dims if self.rope else self.d_shared

    @property
    def d_nope(self):
        return self.d_key - self.n_rot

    @property
    def d_head(self):
        return self.kv_rank + self.n_rot if self.absorbed else self.d_key

    @property
    def d_index(self):
        return self.indexer.d_head if self.indexer else 0

    @property
    def d_head_v(self):
        return self.kv_rank if self.absorbed else self.d_value

    def cache(self, sizes):
        if self.absorbed:
            index = self.indexer.cache(sizes) if self.indexer else []
            return [("k cache", sizes.kv_type, (self.d_head, sizes.rows[self.window])), *index]
        return [("k cache", sizes.kv_type, (self.d_key * self.n_head, sizes.rows[self.window])),
                ("v cache", sizes.v_type, (self.d_value * self.n_head, sizes.rows[self.window]))]

    def load(self, loader, p):
        d, h, c, want, p = loader.n_embd, self.n_head, self.kv_rank, loader.want, p + "attn_"
        w = {"kv_a": loader.linear(p + "kv_a_mqa", d, c + self.n_rot, False),
             "kv_norm": loader.norm(p + "kv_a_norm", "rms", c),
             "out": loader.linear(p + "output", h * self.d_value, d, False),
             "rope_factors": loader.rope_factors(self.rope) if self.rope else None}
        if self.q_rank:
            w |= {"q_a": loader.linear(p + "q_a", d, self.q_rank, False),
                  "q_norm": loader.norm(p + "q_a_norm", "rms", self.q_rank),
                  "q": loader.linear(p + "q_b", self.q_rank, h * self.d_key, False)}
        else:
            w["q"] = loader.linear(p + "q", d, h * self.d_key, False)
        if self.sinks:
            w["sinks"] = want(p + "sinks.weight", h)
        if self.k_norm:
            w["k_norm"] = loader.norm(p + "k_norm", "rms", self.n_rot)
        if self.indexer:
            w |= self.indexer.load(loader, p.removesuffix("attn_"))
        if self.gate:
            w["gate"] = loader.linear(p + "gate", d, h if self.gate_by_head else h * self.d_value, False)
        if self.absorbed:
            return w | {"k_b": want(p + "k_b.weight", self.d_nope, c, h),
                        "v_b": want(p + "v_b.weight", c, self.d_value, h)}
        return w | {"kv_b": loader.linear(p + "kv_b", c, h * (self.d_nope + self.d_value), False)}

    def build(self, g, n, w, i):
        t, h, rot, c = g.n_tokens, self.n_head, self.n_rot, self.kv_rank
        x = g.norm(linear(w["q_a"], n), "rms", w["q_norm"]) if self.q_rank else n
        q = gg.reshape_3d(gg.set_name(linear(w["q"], x), f"q-{i}"), self.d_key, h, t)
        q_nope, q_rope = self._split(q, self.d_nope, rot) if rot else (q, None)
        kv = gg.reshape_3d(gg.set_name(linear(w["kv_a"], n), f"kv_cmpr_pe-{i}"), c + rot, 1, t)
        latent, k_rope = self._split(kv, c, rot) if rot else (kv, None)
        k_rope = g.norm(k_rope, "rms", w["k_norm"]) if self.k_norm else k_rope
        if self.rope:
            q_rope, k_rope = (gg.rope_ext(v, g.leaf["positions"], w["rope_factors"], *self.rope.parameters)
                              for v in (q_rope, k_rope))
        latent = gg.set_name(g.norm(latent, "rms", w["kv_norm"]), f"kv_cmpr-{i}")
        build = self._absorbed if self.absorbed else self._expanded
        mask = self.indexer.mask(g, n, x, g.cache[i][-1], w) if self.indexer else g.mask(self.window)
        o = gg.reshape_2d(build(g, q_nope, q_rope, latent, k_rope, mask, w, i), self.d_value * h, t)
        if self.gate:
            o = gated(o, self.gate, w["gate"], n, i, h if self.gate_by_head else 0)
        return linear(w["out"], o)

    def rotated(self, k, positions, parameters, w):
        """Rows of the K cache, rotated by further positions (context shift); only the last part of every head is
        rotated."""
        rot, t = self.n_rot, k.ne[1]
        heads = gg.reshape_3d(k, self.d_head, k.ne[0] // self.d_head, t)
        still, rope = self._split(heads, self.d_head - rot, rot)
        rope = gg.rope_ext(rope, positions, w["rope_factors"], *parameters)
        return gg.reshape_2d(gg.concat(still, rope, 0), *k.ne[:2])

    @staticmethod
    def _split(x, a, b):
        """The first a and the next b numbers of every head."""
        return (gg.view_3d(x, n, x.ne[1], x.ne[2], x.nb[1], x.nb[2], first * x.nb[0]) for n, first in ((a, 0), (b, a)))

    def _query(self, g, nope, rope):
        q = nope if rope is None else gg.concat(nope, rope, 0)
        return gg.permute(gg.mul(q, g.leaf["temperature"]) if self.temperature else q, 0, 2, 1, 3)

    def _absorbed(self, g, q_nope, q_rope, latent, k_rope, mask, w, i):
        q_nope = gg.mul_mat(w["k_b"], gg.permute(q_nope, 0, 2, 1, 3))           # [kv_rank, n_tokens, n_head]
        q = self._query(g, gg.permute(q_nope, 0, 2, 1, 3), q_rope)
        new = latent if k_rope is None else gg.concat(latent, k_rope, 0)
        new = gg.reshape_2d(new, self.d_head, g.n_tokens)
        kept = gg.set_rows(g.cache[i][0], new, g.rows(self.window))
        k = rows_by_head(g, kept, self.d_head, 1)
        v = rows_by_head(g, kept, self.kv_rank, 1)
        o = attend(g, q, k, v, mask, self.scale, i, sinks=w.get("sinks"))      # [kv_rank, n_head, n_tokens]
        o = gg.mul_mat(w["v_b"], gg.permute(o, 0, 2, 1, 3))
        return gg.cont(gg.permute(o, 0, 2, 1, 3))

    def _expanded(self, g, q_nope, q_rope, latent, k_rope, mask, w, i):
        t, h = g.n_tokens, self.n_head
        kv = linear(w["kv_b"], gg.reshape_2d(latent, self.kv_rank, t))
        k_nope, v = self._split(gg.reshape_3d(kv, self.d_nope + self.d_value, h, t), self.d_nope, self.d_value)
        k = gg.concat(k_nope, gg.repeat_4d(k_rope, self.n_rot, h, t, 1), 0)
        k = gg.set_rows(g.cache[i][0], gg.reshape_2d(k, self.d_key * h, t), g.rows(self.window))
        v = gg.set_rows(g.cache[i][1], gg.reshape_2d(gg.cont(v), self.d_value * h, t), g.rows(self.window))
        return attend(g, self._query(g, q_nope, q_rope), rows_by_head(g, k, self.d_key, h),
                      rows_by_head(g, v, self.d_value, h), mask, self.scale, i)
