"""Attention over the last tokens and over summaries of all earlier tokens, one key for each group (DeepSeek V4).

    q = rope(Wqb norm(Wqa n)) of every head, divided by its RMS;  k = v = rope(norm(Wkv n)), one head
    c, s    = Wc n, Ws n + e[place in the run]              of every token, kept in a cache of their own
    pooled  = rope(norm(sum over the tokens of a run of softmax(s) c)), a number at a time; it stands at the first token
    o       = softmax over the keys of the window and the pooled ones of runs that have ended; a sink takes part
    result  = Wob (Woa[group] rope_back(o)), heads in groups

RoPE turns the last numbers of a head.  Where runs overlap, c and s have two halves: a run pools the first halves of the
run before and the second halves of its own.  Then an index of the same kind picks the pooled keys that a token sees.

A batch holds one text.  Sources: llama.cpp's deepseek4.
"""
import dataclasses
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend, rows_by_head
from ggjit.models.blocks.description import WHOLE, linear
from ggjit.models.blocks.hparams import Rope
from ggjit.ops.core.types import F32


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """The inputs of all layers with runs of one length, one of Description.inputs."""
    size: int                           # tokens of a run
    window: int                         # of the cache that c and s lie in
    n_runs: int                         # of a whole context; the row behind them takes what is no run
    one_text = True

    def name(self, what):
        return f"runs of {self.size}: {what}"

    def arrays(self, n_tokens, n_kv):
        """{name: array} for so many tokens and positions.  new runs end in this batch, at most so many of them."""
        n_new, n_seen = n_tokens // self.size + 1, max(n_kv // self.size, 1)
        arrays = {"place": np.zeros(n_tokens, np.int32), "own": np.zeros(n_new * self.size, np.int32),
                  "before": np.zeros(n_new * self.size, np.int32), "no run before": np.zeros((n_new, 1, 1), np.float32),
                  "first": np.zeros(n_new, np.int32), "run": np.zeros(n_new, np.int64),
                  "seen": np.zeros((n_tokens, n_seen), np.float16)}
        return {self.name(what): a for what, a in arrays.items()}

    def fill(self, inputs, at, text, ids):
        """ids follow the text, from `at` on in the batch."""
        past, end, size = len(text.ids), len(text.ids) + len(ids), self.size
        runs, rows = np.arange(past // size, end // size), text.mappings[self.window]
        own, before, none, first, run = (inputs[self.name(w)] for w in ("own", "before", "no run before", "first",
                                                                        "run"))
        n, positions = len(runs), np.arange(past, end)
        own[:], before[:], none[:], first[:], run[:] = 0, 0, 0, 0, self.n_runs
        first[:n], run[:n], none[:n, 0, 0] = runs * size, runs, np.where(runs, 0, -np.inf)
        if n:
            own[:n * size] = rows.at(runs[0] * size, (runs[-1] + 1) * size)
            skipped = size * int(runs[0] == 0)
            before[skipped:n * size] = rows.at((runs[0] - 1) * size + skipped, runs[-1] * size)
        inputs[self.name("place")][:] = positions % size
        seen = inputs[self.name("seen")]
        seen[:] = np.where(np.arange(seen.shape[1]) < ((positions + 1) // size)[:, None], 0, -np.inf)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """One key of each run of tokens, in a cache with a row for each run."""
    runs: RunInputs
    d: int
    rope: Rope
    overlap: bool
    prefix: str                         # of its tensors' names

    @property
    def n_kept(self):
        """Numbers that are kept of a token: c and s."""
        return 2 * self.d * (1 + self.overlap)

    def cache(self, sizes):
        return [(f"{self.prefix} parts", F32, (self.n_kept, sizes.rows[self.runs.window])),
                (f"{WHOLE} {self.prefix} keys", sizes.kv_type, (self.d, self.runs.n_runs + 1))]

    def load(self, loader, p):
        n, p = self.n_kept // 2, p + self.prefix
        parts = (loader.linear(p + part, loader.n_embd, n, False) for part in ("_kv", "_gate"))
        return {self.prefix: (*parts, loader.want(p + "_ape.weight", n, self.runs.size),
                              loader.norm(p + "_norm", "rms", self.d))}

    def keys(self, g, n, caches, w):
        """The cache of pooled keys [d, runs], with those of the runs that end in this batch."""
        kv, gate, places, norm = w[self.prefix]
        leaf, (parts, pooled) = {what: g.leaf[self.runs.name(what)] for what in (
            "place", "own", "before", "no run before", "first", "run")}, caches
        score = gg.add(linear(gate, n), gg.get_rows(places, leaf["place"]))
        kept = gg.set_rows(parts, gg.concat(linear(kv, n), score, 0), g.rows(self.runs.window))
        c, s = self._of(kept, leaf["own"], self.overlap)
        if self.overlap:
            c0, s0 = self._of(kept, leaf["before"], False)
            c, s = gg.concat(c0, c, 1), gg.concat(gg.add(s0, leaf["no run before"]), s, 1)
        p = gg.soft_max(gg.cont(gg.permute(s, 1, 0, 2, 3)))
        new = gg.sum_rows(gg.mul(gg.cont(gg.permute(c, 1, 0, 2, 3)), p))
        new = g.norm(gg.reshape_3d(new, self.d, 1, new.ne[2]), "rms", norm)
        new = turned(new, leaf["first"], self.rope)
        return gg.set_rows(pooled, gg.reshape_2d(new, self.d, new.ne[2]), leaf["run"])

    def _of(self, kept, rows, second):
        """(c, s), [d, size, runs], of the tokens in these rows: their first or their second half."""
        rows = gg.get_rows(kept, rows)
        return (gg.cont(gg.view_3d(rows, self.d, self.runs.size, rows.ne[1] // self.runs.size, rows.nb[1],
                                   rows.nb[1] * self.runs.size, (first + self.d * second) * rows.nb[0]))
                for first in (0, self.n_kept // 2))


@dataclasses.dataclass(frozen=True)
class RunIndex:
    """Picks the pooled keys that a token sees: those of the n_top largest scores."""
    compressor: Compressor
    n_head: int
    n_top: int

    def load(self, loader, p, q_rank):
        d = self.compressor.d
        return self.compressor.load(loader, p) | {
            "index_q": loader.linear(p + "indexer.attn_q_b", q_rank, self.n_head * d, False),
            "index_proj": loader.linear(p + "indexer.proj", loader.n_embd, self.n_head, False)}

    def mask(self, g, n, low, caches, seen, w):
        """As `seen` [runs, n_tokens], -inf where a run is not picked."""
        d, h, (n_seen, t) = self.compressor.d, self.n_head, seen.ne[:2]
        kept = self.compressor.keys(g, n, caches, w)
        q = turned(gg.reshape_3d(linear(w["index_q"], low), d, h, t), g.leaf["positions"], self.compressor.rope)
        weights = gg.scale(linear(w["index_proj"], n), 1.0 / math.sqrt(d * h))
        keys = gg.view_3d(kept, d, 1, n_seen, kept.nb[1], kept.nb[1], 0)
        scores = gg.lightning_indexer(q, keys, weights, seen)
        n_top = min(self.n_top, n_seen)
        ids = gg.reshape_2d(gg.top_k(scores, n_top), n_top, t)
        hidden = gg.reshape_3d(gg.fill(seen, -math.inf), 1, n_seen, t)
        zeros = gg.fill(gg.view_3d(scores, 1, n_top, t, scores.nb[0], scores.nb[1], 0), 0.0)
        return gg.add(gg.reshape_2d(gg.set_rows(hidden, zeros, ids), n_seen, t), seen)


@dataclasses.dataclass(frozen=True)
class CompressedAttention:
    n_head: int
    d_head: int
    q_rank: int
    n_groups: int                       # of heads, each with a matrix Woa
    o_rank: int
    window: int
    rope: Rope
    compressor: Compressor | None = None
    index: RunIndex | None = None
    norm_after_rope = True              # pooled keys cannot be turned to other positions

    @property
    def windows(self):
        """0: the length of a text decides how many runs are looked at."""
        return 0, self.window

    @property
    def d_head_v(self):
        return self.d_head

    @property
    def d_index(self):
        return self.index.compressor.d if self.index else 0

    def cache(self, sizes):
        more = [c.cache(sizes) for c in (self.compressor, self.index and self.index.compressor) if c]
        return [("k cache", sizes.kv_type, (self.d_head, sizes.rows[self.window])), *sum(more, [])]

    def load(self, loader, p):
        h, d, p_ = self.n_head, self.d_head, p + "attn_"
        w = {"q_a": loader.linear(p_ + "q_a", loader.n_embd, self.q_rank, False),
             "q_norm": loader.norm(p_ + "q_a_norm", "rms", self.q_rank),
             "q": loader.linear(p_ + "q_b", self.q_rank, h * d, False),
             "kv": loader.linear(p_ + "kv", loader.n_embd, d, False),
             "kv_norm": loader.norm(p_ + "kv_a_norm", "rms", d), "sinks": loader.want(p_ + "sinks.weight", h),
             "o_a": loader.want(p_ + "output_a.weight", h * d // self.n_groups, self.n_groups * self.o_rank),
             "o_b": loader.linear(p_ + "output_b", self.n_groups * self.o_rank, loader.n_embd, False)}
        if self.compressor:
            w |= self.compressor.load(loader, p)
        return w | (self.index.load(loader, p, self.q_rank) if self.index else {})

    def build(self, g, n, w, i):
        t, h, d, at = g.n_tokens, self.n_head, self.d_head, g.leaf["positions"]
        low = g.norm(linear(w["q_a"], n), "rms", w["q_norm"])
        q = gg.rms_norm(gg.reshape_3d(gg.set_name(linear(w["q"], low), f"q-{i}"), d, h, t), g.eps)
        k = gg.reshape_3d(g.norm(linear(w["kv"], n), "rms", w["kv_norm"]), d, 1, t)
        q, k = turned(q, at, self.rope), turned(k, at, self.rope)
        kept = gg.set_rows(g.cache[i][0], gg.reshape_2d(k, d, t), g.rows(self.window))
        keys, mask = rows_by_head(g, kept, d, 1), g.mask(self.window)
        if self.compressor:
            keys, mask = self._with_runs(g, n, low, keys, mask, w, i)
        o = attend(g, gg.permute(q, 0, 2, 1, 3), keys, keys, mask, 1.0 / math.sqrt(d), i, sinks=w["sinks"])
        o = turned(gg.reshape_3d(o, d, h, t), at, self.rope, gg.rope_ext_back)
        return self._output(o, w)

    def _with_runs(self, g, n, low, keys, mask, w, i):
        """Keys and mask with those of the runs behind them."""
        pooled = self.compressor.keys(g, n, g.cache[i][1:3], w)
        seen = g.leaf[self.compressor.runs.name("seen")]
        if self.index:
            seen = self.index.mask(g, n, low, g.cache[i][3:], seen, w)
        pooled = gg.view_3d(pooled, self.d_head, seen.ne[0], 1, pooled.nb[1], pooled.nb[2], 0)
        return gg.concat(keys, pooled, 1), gg.concat(mask, seen, 0)

    def _output(self, o, w):
        d, h, t = o.ne[:3]
        o = gg.permute(gg.reshape_3d(o, d * h // self.n_groups, self.n_groups, t), 0, 2, 1, 3)
        o = gg.mul_mat(gg.reshape_3d(w["o_a"], d * h // self.n_groups, self.o_rank, self.n_groups), o)
        o = gg.cont(gg.permute(o, 0, 2, 1, 3))
        return linear(w["o_b"], gg.reshape_2d(o, self.o_rank * self.n_groups, t))


def turned(x, positions, rope, op=gg.rope_ext):
    """x [d, heads, tokens] with RoPE of the last numbers of a head."""
    return gg.rope_set_offset(op(x, positions, None, *rope.parameters), x.ne[0] - rope.n_dims)
