"""Attention over residuals (Kimi K3): each layer reads a weighted sum of the outputs of earlier layers.

    kept    = [x before layers 0, n, 2n, ...]           after each of these x begins again with the mixer's result
    s       = r . rms_norm(y) for every y of kept and x;   p = softmax(s)
    mixed   = sum p y
    layer   : x += mixer(norm mixed(x)),  x += feed_forward(norm mixed(x))
"""
import dataclasses
from typing import Any

import ggjit as gg

KEPT = "residuals"                      # in Scope.shared: [n_embd, n, n_tokens]


def mixed(g, x, score):
    """The weighted sum of x and of the residuals that were kept."""
    kept, t = g.shared.get(KEPT), x.ne[1]
    if kept is None:
        return x
    n = kept.ne[1]
    of_kept = gg.reshape_2d(gg.sum_rows(gg.mul(gg.rms_norm(kept, g.eps), score)), n, t)
    of_x = gg.sum_rows(gg.mul(gg.rms_norm(x, g.eps), score))
    p = gg.soft_max(gg.concat(of_kept, of_x, 0))
    p_kept, p_x = (gg.cont(gg.view_2d(p, size, t, p.nb[1], first * p.nb[0])) for size, first in ((n, 0), (1, n)))
    return gg.add(gg.dsv4_hc_pre(kept, p_kept), gg.mul(x, p_x))


@dataclasses.dataclass(frozen=True)
class MixedBlock:
    """One layer.  All tokens pass the last one: MixedEnd picks those that are wanted."""
    mixer: Any
    feed_forward: Any
    keeps: bool                         # does the block keep its input as a residual?
    norm = "rms"

    def load(self, loader, p):
        w = self.mixer.load(loader, p) | self.feed_forward.load(loader, p)
        w |= {n: loader.norm(p + n, self.norm) for n in ("attn_norm", "ffn_norm")}
        return w | {n: loader.want(f"{p}{n}.weight", loader.n_embd) for n in ("attn_res_score", "ffn_res_score")}

    def cache(self, sizes):
        return self.mixer.cache(sizes) + self.feed_forward.cache(sizes)

    def build(self, g, x, w, i, rows=None):
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")
        n = named(g.norm(mixed(g, x, w["attn_res_score"]), self.norm, w["attn_norm"]), "attn_norm")
        if self.keeps:
            new, kept = gg.reshape_3d(x, x.ne[0], 1, x.ne[1]), g.shared.get(KEPT)
            g.shared[KEPT] = new if kept is None else gg.concat(kept, new, 1)
        a = named(self.mixer.build(g, n, w, i), "attn_out")
        x = a if self.keeps else named(gg.add(x, a), "ffn_inp")
        m = named(g.norm(mixed(g, x, w["ffn_res_score"]), self.norm, w["ffn_norm"]), "ffn_norm")
        return named(gg.add(x, named(self.feed_forward.build(g, m, w, i), "ffn_out")), "l_out")


class MixedEnd:
    """A Description.frame: the last sum, over the tokens that are wanted."""

    def load(self, loader):
        return {"score": loader.want("output_res_score.weight", loader.n_embd)}

    def before(self, g, x, w):
        return x

    def after(self, g, x, w, rows):
        x = mixed(g, x, w["score"])
        return x if rows is None else gg.get_rows(x, rows)

    def __repr__(self):
        return "MixedEnd()"
