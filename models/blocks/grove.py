"""GroveMoE: experts, with one small expert ("adjugate") for each group of n_each experts.

    y       = experts(m), as in moe.py
    ids     = the n_used largest of the router's s(m), each over n_each, rounded down; an id may stand there twice
    w       = p[ids] / sum p[ids],  p = softmax(s)
    result  = y + scale sum_u w[u] small[ids[u]](y)
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.moe import SMALLEST_SUM, Experts, Mixture, through_experts
from ggjit.ops.core.types import BY_NAME

I32, F32 = BY_NAME["i32"], BY_NAME["f32"]


@dataclasses.dataclass(frozen=True)
class Grove:
    experts: Mixture
    n_ff: int                           # feed-forward length of the small experts
    n_each: int                         # experts that share a small one
    scale: float

    @property
    def n_small(self):
        return self.experts.n_expert // self.n_each

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        d, f, n, want, p_ = loader.n_embd, self.n_ff, self.n_small, loader.want, p + "ffn_"
        gate, up, down = (want(f"{p_}{k}_chexps.weight", *ne) for k, ne in
                          (("gate", (d, f, n)), ("up", (d, f, n)), ("down", (f, d, n))))
        loader.matrices += gate, up, down
        adapters = (), *(tuple(loader.beside(f"{p_}{k}_chexps.weight")) for k in ("gate", "up", "down"))
        w = self.experts.load(loader, p)
        n_used = min(self.experts.n_used, n)
        return w | {"small": Experts(w["experts"].router, gate, up, down, n_used, self.experts.scale,
                                     adapters=adapters)}

    def build(self, g, m, w, i):
        y = self.experts.build(g, m, w, i)
        small, t = w["small"], m.ne[1]
        s = linear((small.router, None, *w["experts"].adapters[0]), m)
        ids = gg.cast(gg.argsort_top_k(s, small.n_used), F32)
        ids = gg.cast(gg.scale(ids, 1.0 / self.n_each), I32)
        weights = gg.get_rows(gg.reshape_3d(gg.soft_max(s), 1, self.experts.n_expert, t), ids)
        weights = gg.reshape_2d(weights, small.n_used, t)
        weights = gg.div(weights, gg.clamp(gg.sum_rows(weights), SMALLEST_SUM, math.inf))
        if small.scale not in (0.0, 1.0):
            weights = gg.scale(weights, small.scale)
        more = through_experts(y, small, ids, gg.reshape_3d(weights, 1, small.n_used, t),
                               lambda x, name: gg.set_name(x, f"ffn_small_{name}-{i}"))
        return gg.add(y, gg.scale(more, self.scale))
