"""An indexer of pools (GLM 5 Next): it selects whole groups of neighbouring tokens by one key for each group.

    k, c    = layer_norm(Wk n), Wc n                        kept in a cache of their own
    pooled  = sum over a pool's tokens of softmax(c + e) k, e by the place in the pool
    score   = sum_h (Wp n)[h] relu(q[h] . pooled) / sqrt(d_head n_head)         of pools that end before the token
    mask    = the usual one in the pools of the n_top largest scores, and where no pool has ended yet; -inf elsewhere

A batch holds one text.  Source: llama.cpp's glm5-next.
"""
import dataclasses
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.indexer import MASK

ROWS, POOLS, ENDED, ENDED_F16, TAIL = "pool_rows", "row_pools", "ended_pools", "pool_mask", "pool_tail"    # inputs
HIDDEN = 1e30


@dataclasses.dataclass(frozen=True)
class PoolInputs:
    """The inputs of all PoolIndexers of a network, one of Description.inputs."""
    size: int                           # tokens of a pool
    one_text = True

    def arrays(self, n_tokens, n_kv):
        """{name: array} for so many tokens and cache rows."""
        n = -(-n_kv // self.size)
        return {ROWS: np.zeros(n * self.size, np.int32), POOLS: np.zeros(n_kv, np.int32),
                ENDED: np.zeros((n_tokens, n), np.float32), ENDED_F16: np.zeros((n_tokens, n), np.float16),
                TAIL: np.zeros((n_tokens, n_kv), np.float32)}

    def fill(self, inputs, at, text, ids):
        """ids follow the text, from `at` on in the batch."""
        past, end = len(text.ids), len(text.ids) + len(ids)
        rows, positions = text.mappings[0].at(0, end), np.arange(past, end)[:, None]
        inputs[ROWS][:], inputs[POOLS][:], inputs[TAIL][:] = 0, 0, 0
        inputs[ROWS][:end], inputs[POOLS][rows] = rows, np.arange(end) // self.size
        ended = (np.arange(inputs[ENDED].shape[1]) + 1) * self.size <= positions + 1
        inputs[ENDED][:], inputs[ENDED_F16][:] = ended, np.where(ended, 0, -np.inf)
        first = (positions + 1) // self.size * self.size
        inputs[TAIL][:, rows] = (np.arange(end) >= first) & (np.arange(end) <= positions)


@dataclasses.dataclass(frozen=True)
class PoolIndexer:
    n_head: int
    d_head: int
    n_top: int                          # pools
    size: int
    q_rank: int
    eps: float                          # epsilon of the norm of k
    shared: bool = False                # this layer looks at what the layer before looked at

    def cache(self, sizes):
        return [] if self.shared else [("index cache", sizes.kv_type, (2 * self.d_head, sizes.rows[0]))]

    def load(self, loader, p):
        if self.shared:
            return {}
        d, s = loader.n_embd, self.d_head
        return {"index_q": loader.linear(p + "indexer.attn_q_b", self.q_rank, self.n_head * s, False),
                "index_k": loader.linear(p + "indexer.attn_k", d, s, False),
                "index_norm": loader.norm(p + "indexer.k_norm", "layer", s),
                "index_proj": loader.linear(p + "indexer.proj", d, self.n_head, False),
                "index_gate": loader.linear(p + "indexer_compressor_gate", d, s, False),
                "index_place": loader.want(p + "indexer_compressor_ape.weight", s, self.size)}

    def mask(self, g, n, low, cache, w):
        """F16 [n_kv, n_tokens].  n: what attention reads, low: the low-rank vector of queries."""
        if not self.shared:
            g.shared[MASK] = self._picked(g, self._scores(g, n, low, self._pooled(g, n, cache, w), w))
        return g.shared[MASK]

    def _pooled(self, g, n, cache, w):
        """[d_head, 1, n_pools]"""
        s, size, t = self.d_head, self.size, g.n_tokens
        k = gg.norm(linear(w["index_k"], n), self.eps)
        k = gg.add(gg.mul(k, w["index_norm"][0]), w["index_norm"][1])
        kept = gg.set_rows(cache, gg.reshape_2d(gg.concat(k, linear(w["index_gate"], n), 0), 2 * s, t), g.rows(0))
        rows = gg.get_rows(kept, g.leaf[ROWS])
        rows = gg.reshape_3d(rows, 2 * s, size, rows.ne[1] // size)
        keys, gates = (gg.view_3d(rows, s, *rows.ne[1:3], *rows.nb[1:3], first * rows.nb[0]) for first in (0, s))
        p = gg.soft_max(gg.cont(gg.permute(gg.add(gates, w["index_place"]), 1, 0, 2, 3)))
        return gg.reshape_3d(gg.sum_rows(gg.mul(p, gg.permute(keys, 1, 0, 2, 3))), s, 1, rows.ne[2])

    def _scores(self, g, n, low, pooled, w):
        q = gg.reshape_3d(linear(w["index_q"], low), self.d_head, self.n_head, g.n_tokens)
        weights = gg.scale(linear(w["index_proj"], n), 1.0 / math.sqrt(self.d_head * self.n_head))
        return gg.lightning_indexer(q, pooled, weights, g.leaf[ENDED_F16])

    def _picked(self, g, scores):
        n_pools, t = scores.ne[0], g.n_tokens
        n = min(self.n_top, n_pools)
        ids = gg.reshape_2d(gg.top_k(scores, n), n, t)
        none = gg.reshape_3d(gg.fill(g.leaf[ENDED], 0.0), 1, n_pools, t)
        ones = gg.fill(gg.view_3d(scores, 1, n, t, scores.nb[0], scores.nb[1], 0), 1.0)
        picked = gg.mul(gg.reshape_2d(gg.set_rows(none, ones, ids), n_pools, t), g.leaf[ENDED])
        by_row = gg.cont(gg.transpose(gg.get_rows(gg.cont(gg.transpose(picked)), g.leaf[POOLS])))
        seen = gg.add(by_row, g.leaf[TAIL])                                     # 1 where a token looks
        return gg.cast(gg.add(gg.scale_bias(seen, HIDDEN, -HIDDEN), gg.cast(g.mask(0), gg.F32)), gg.F16)
