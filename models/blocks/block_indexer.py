"""Sparse attention by blocks of positions (MiniMax M3): an indexer selects the blocks for each group of heads.

    q       = rope(norm(Wq n)) of every group, k = rope(norm(Wk n)), one head, kept in a cache of its own
    score   = max over the positions of a block of q[group] . k, where the token sees them
    blocks  = those of the n_top largest scores; the last n_local up to the token's own always
    mask    = the usual one in these blocks, -inf elsewhere

Blocks are of positions, cache rows are others: `BlockInputs` says which row each position has.  A batch holds one text.
Source: llama.cpp's minimax-m3.
"""
import dataclasses
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import Attention, attend
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import Rope
from ggjit.ops.conv.pooling import MAX

ROWS, BLOCKS, SEEN, LOCAL = "position_rows", "row_blocks", "position_mask", "block_bias"       # inputs
ALWAYS = 1e30                           # above every score
MASK = "mask of blocks"                 # in Scope.shared: of the layer that is built


@dataclasses.dataclass(frozen=True)
class BlockInputs:
    """The inputs of all BlockIndexers of a network, one of Description.inputs."""
    size: int                           # positions of a block
    n_local: int
    one_text = True                     # rows of several texts have no common positions

    def arrays(self, n_tokens, n_kv):
        """{name: array} for so many tokens and cache rows."""
        n_blocks = -(-n_kv // self.size)
        return {ROWS: np.zeros(n_blocks * self.size, np.int32), BLOCKS: np.zeros(n_kv, np.int32),
                SEEN: np.zeros((n_tokens, 1, n_blocks * self.size), np.float32),
                LOCAL: np.zeros((n_tokens, 1, n_blocks), np.float32)}

    def fill(self, inputs, at, text, ids):
        """ids follow the text, from `at` on in the batch."""
        past, end = len(text.ids), len(text.ids) + len(ids)
        rows, positions = text.mappings[0].at(0, end), np.arange(past, end)[:, None]
        inputs[ROWS][:], inputs[BLOCKS][:] = 0, 0
        inputs[ROWS][:end], inputs[BLOCKS][rows] = rows, np.arange(end) // self.size
        inputs[SEEN][:, 0] = np.where(np.arange(inputs[SEEN].shape[2]) <= positions, 0, -np.inf)
        behind = positions // self.size - np.arange(inputs[LOCAL].shape[2])
        inputs[LOCAL][:, 0] = np.where((behind >= 0) & (behind < self.n_local), ALWAYS, 0)


@dataclasses.dataclass(frozen=True)
class BlockIndexer:
    n_head: int                         # one for each group of heads
    d_head: int
    n_top: int                          # blocks
    size: int
    rope: Rope
    shared = False                      # has a cache of its own

    def cache(self, sizes):
        return [("index cache", sizes.kv_type, (self.d_head, sizes.rows[0]))]

    def load(self, loader, p):
        d, s, p = loader.n_embd, self.d_head, p + "indexer."
        return {"index_q": loader.linear(p + "q_proj", d, self.n_head * s, False),
                "index_k": loader.linear(p + "k_proj", d, s, False),
                **{f"index_{c}_norm": loader.norm(f"{p}{c}_norm", "rms", s) for c in "qk"}}

    def rotated(self, k, positions, parameters):
        """Rows of the cache, rotated further."""
        k = gg.reshape_3d(k, self.d_head, 1, k.ne[1])
        return gg.reshape_2d(gg.rope_ext(k, positions, None, *parameters), self.d_head, k.ne[2])

    def mask(self, g, n, cache, w):
        """F16 [n_kv, n_tokens, 1, n_head]: what each group of heads looks at."""
        scores = self._scores(g, n, cache, w)
        n_blocks, h, t = scores.ne[:3]
        n_top = min(self.n_top, n_blocks)
        ids = gg.reshape_2d(gg.top_k(scores, n_top), n_top, h * t)
        hidden = gg.reshape_3d(gg.fill(scores, -math.inf), 1, n_blocks, h * t)
        zeros = gg.fill(gg.view_3d(scores, 1, n_top, h * t, scores.nb[0], scores.nb[1], 0), 0.0)
        picked = gg.reshape_3d(gg.set_rows(hidden, zeros, ids), n_blocks, h, t)
        by_block = gg.cont(gg.transpose(gg.reshape_2d(gg.cont(gg.permute(picked, 0, 2, 1, 3)), n_blocks, t * h)))
        by_row = gg.cont(gg.transpose(gg.get_rows(by_block, g.leaf[BLOCKS])))            # [n_kv, n_tokens n_head]
        usual = gg.cast(g.mask(0), gg.F32)
        mask = gg.add(gg.reshape_3d(by_row, by_row.ne[0], t, h), usual)
        return gg.reshape_4d(gg.cast(mask, gg.F16), by_row.ne[0], t, 1, h)

    def _scores(self, g, n, cache, w):
        """[n_blocks, n_head, n_tokens]"""
        t, s, h = g.n_tokens, self.d_head, self.n_head
        q = g.norm(gg.reshape_3d(linear(w["index_q"], n), s, h, t), "rms", w["index_q_norm"])
        k = g.norm(gg.reshape_3d(linear(w["index_k"], n), s, 1, t), "rms", w["index_k_norm"])
        q, k = (gg.rope_ext(x, g.leaf["positions"], None, *self.rope.parameters) for x in (q, k))
        kept = gg.set_rows(cache, gg.reshape_2d(k, s, t), g.rows(0))
        keys = gg.get_rows(kept, g.leaf[ROWS])                                          # [d_head, positions]
        scores = gg.reshape_3d(gg.mul_mat(keys, gg.reshape_2d(q, s, h * t)), keys.ne[1], h, t)
        scores = gg.add(scores, g.leaf[SEEN])
        return gg.add(gg.pool_2d(scores, MAX, self.size, 1, self.size, 1, 0, 0), g.leaf[LOCAL])


@dataclasses.dataclass(frozen=True)
class SparseAttention(Attention):
    """Attention whose groups of heads look at the blocks that an indexer picks."""
    indexer: BlockIndexer | None = None
    pages = False

    @property
    def d_index(self):
        return self.indexer.d_head

    def cache(self, sizes):
        return super().cache(sizes) + self.indexer.cache(sizes)

    def load(self, loader, p):
        return super().load(loader, p) | self.indexer.load(loader, p)

    def build(self, g, n, w, i):
        g.shared[MASK] = self.indexer.mask(g, n, g.cache[i][-1], w)
        return super().build(g, n, w, i)

    def _attend(self, g, q, k, v, w, i):
        groups, each = self.n_head_kv, self.n_head // self.n_head_kv
        q = gg.view_4d(q, self.d_head, g.n_tokens, each, groups, q.nb[1], q.nb[2], each * q.nb[2], 0)
        k, v = (gg.view_4d(x, *x.ne[:2], 1, groups, x.nb[1], x.nb[2], x.nb[2], 0) for x in (k, v))
        o = attend(g, q, k, v, g.shared[MASK], 1.0 / math.sqrt(self.d_head), i)      # [d_head_v, each, tokens, groups]
        return gg.cont(gg.permute(o, 0, 1, 3, 2))
