"""The lightning indexer of sparse attention (DeepSeek 3.2): a small attention that selects the keys for each token.

    q       = rope(Wq c) of every head, c the low-rank vector of the queries
    k       = rope(layer_norm(Wk n)), one head, kept in a cache of its own
    score   = sum_h (Wp n)[h] relu(q[h] . k) / sqrt(d_head n_head)
    mask    = the usual one at the n_top keys with the largest scores, -inf elsewhere

llama.cpp turns q and k by a Hadamard matrix before their product, which the product does not depend on.
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import Rope

MASK = "mask of the indexer"            # in Scope.shared: of the last layer that has an indexer


@dataclasses.dataclass(frozen=True)
class Indexer:
    n_head: int
    d_head: int
    n_top: int
    q_rank: int
    rope: Rope                          # RoPE of the first numbers of a head
    eps: float                          # epsilon of the norm of k
    rope_last: bool = False             # the last numbers of a head are rotated, not the first
    shared: bool = False                # this layer uses the mask of the layer before

    def cache(self, sizes):
        return [] if self.shared else [("index cache", sizes.kv_type, (self.d_head, sizes.rows[0]))]

    def load(self, loader, p):
        if self.shared:
            return {}
        d, s, p = loader.n_embd, self.d_head, p + "indexer."
        return {"index_q": loader.linear(p + "attn_q_b", self.q_rank, self.n_head * s, False),
                "index_k": loader.linear(p + "attn_k", d, s, False),
                "index_norm": loader.norm(p + "k_norm", "layer", s),
                "index_proj": loader.linear(p + "proj", d, self.n_head, False)}

    def mask(self, g, n, low, cache, w):
        """The mask of this layer, [n_kv, n_tokens].  n: what attention reads, low: the low-rank vector of queries."""
        if not self.shared:
            g.shared[MASK] = self._picked(g, self._scores(g, n, low, cache, w))
        return g.shared[MASK]

    def _scores(self, g, n, low, cache, w):
        t, s, h = g.n_tokens, self.d_head, self.n_head
        k = gg.norm(linear(w["index_k"], n), self.eps)
        k = gg.reshape_3d(gg.add(gg.mul(k, w["index_norm"][0]), w["index_norm"][1]), s, 1, t)
        q = gg.reshape_3d(linear(w["index_q"], low), s, h, t)
        q, k = (self._rotated(x, g.leaf["positions"], self.rope.parameters) for x in (q, k))
        kept = gg.set_rows(cache, gg.reshape_2d(k, s, t), g.rows(0))
        keys = gg.view_3d(kept, s, 1, min(g.n_kv, kept.ne[1]), kept.nb[1], kept.nb[1], 0)
        weights = gg.scale(linear(w["index_proj"], n), 1.0 / math.sqrt(s * h))
        return gg.lightning_indexer(q, keys, weights, g.mask(0))

    def _picked(self, g, scores):
        mask, n_kv, t = g.mask(0), scores.ne[0], g.n_tokens
        n = min(self.n_top, n_kv)
        ids = gg.reshape_2d(gg.top_k(scores, n), n, t)
        hidden = gg.reshape_3d(gg.fill(mask, -math.inf), 1, n_kv, t)
        zeros = gg.fill(gg.view_3d(scores, 1, n, t, scores.nb[0], scores.nb[1], 0), 0.0)
        return gg.add(gg.reshape_2d(gg.set_rows(hidden, zeros, ids), n_kv, t), mask)

    def rotated(self, k, positions, parameters):
        """Rows of the cache, rotated by further positions (context shift)."""
        k = gg.reshape_3d(k, self.d_head, 1, k.ne[1])
        parameters = (parameters[0], self.rope.mode, *parameters[2:])
        return gg.reshape_2d(self._rotated(k, positions, parameters), self.d_head, k.ne[2])

    def _rotated(self, x, positions, parameters):
        n = x.ne[0] - self.rope.n_dims
        if not self.rope_last or not n:
            return gg.rope_ext(x, positions, None, *parameters)
        still, turned = (gg.view_3d(x, size, *x.ne[1:3], *x.nb[1:3], first * x.nb[0])
                         for size, first in ((n, 0), (self.rope.n_dims, n)))
        return gg.concat(still, gg.rope_ext(turned, positions, None, *parameters), 0)
