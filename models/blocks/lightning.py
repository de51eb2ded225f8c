"""Lightning attention (MiniMax 01): linear attention with a fixed decay for each head, and its layers.

    q, k, v = silu(W n), of every head side by side
    S       = decay S + k v^T,   o = q S;     decay = exp(-slope of the head (1 - i / (n_layer - 1) + 1e-5)) in layer i
    result  = Wout (sigmoid(Wg n) * norm(o))

    layer   : n = norm(x),  y = mixer(n) + scale n,  m = norm(y),  feed_forward(m) + scale m
"""
import dataclasses
import math
from typing import Any

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.short_conv import state


@dataclasses.dataclass(frozen=True)
class Lightning:
    n_head: int
    d_head: int
    part: float                         # factor of ALiBi's slopes in this layer: 1 - i / (n_layer - 1) + 1e-5

    def cache(self, sizes):
        return [state(sizes, 0, self.d_head * self.d_head * self.n_head)]

    def load(self, loader, p):
        d, n = loader.n_embd, self.n_head * self.d_head
        w = {"qkv": loader.linear(p + "attn_qkv", d, 3 * n, False), "norm": loader.norm(p + "attn_norm_2", "rms", n)}
        return w | {"gate": loader.linear(p + "attn_gate", d, n, False),
                    "out": loader.linear(p + "attn_output", n, d, False)}

    def build(self, g, n, w, i):
        t, s, h = g.n_tokens, self.d_head, self.n_head
        qkv = gg.silu(linear(w["qkv"], n))
        q, k, v = (gg.cont(gg.view_3d(qkv, s, h, t, 3 * s * qkv.nb[0], qkv.nb[1], j * s * qkv.nb[0])) for j in range(3))
        decay = gg.repeat_4d(gg.reshape_3d(self._decays(n), 1, h, 1), s, h, t, 1)
        before = gg.reshape_2d(g.state(i, 0), s * s * h, g.n_seqs)
        out = gg.gated_linear_attn(k, v, q, gg.reshape_3d(decay, s, h, t), before, 1.0)
        g.keep(i, 0, gg.view_1d(out, s * s * h * g.n_seqs, s * h * t * out.nb[0]))
        o = gg.set_name(gg.view_2d(out, s * h, t, s * h * out.nb[0], 0), f"scan-{i}")
        o = gg.mul(gg.sigmoid(linear(w["gate"], n)), g.norm(o, "rms", w["norm"]))
        return linear(w["out"], o)

    def _decays(self, n):
        """[n_head]: exp(-part a^(h + 1)) of head h, a = 2^(-8 / n_head), ALiBi's slopes.  n: only gives the graph a
        tensor to start from; its values are not used."""
        first = -(2.0 ** -(math.log2(self.n_head) - 3)) * math.log(2.0)
        slopes = gg.exp(gg.cumsum(gg.fill(gg.view_1d(n, self.n_head, 0), first)))
        return gg.exp(gg.scale(slopes, -self.part))


@dataclasses.dataclass(frozen=True)
class NormResidualBlock:
    """One layer whose residual connections begin behind its norms and have a scale factor."""
    mixer: Any
    feed_forward: Any
    scale: float
    norm = "rms"

    def load(self, loader, p):
        w = self.mixer.load(loader, p) | self.feed_forward.load(loader, p)
        return w | {n: loader.norm(p + n, self.norm) for n in ("attn_norm", "ffn_norm")}

    def cache(self, sizes):
        return self.mixer.cache(sizes) + self.feed_forward.cache(sizes)

    def build(self, g, x, w, i, rows=None):
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")

        def picked(t):
            return t if rows is None or g.whole else gg.get_rows(t, rows)
        n = named(g.norm(x, self.norm, w["attn_norm"]), "attn_norm")
        a = named(self.mixer.build(g, n, w, i), "attn_out")
        y = named(gg.add(picked(a), gg.scale(picked(n), self.scale)), "ffn_inp")
        m = named(g.norm(y, self.norm, w["ffn_norm"]), "ffn_norm")
        y = gg.add(named(self.feed_forward.build(g, m, w, i), "ffn_out"), gg.scale(m, self.scale))
        y = named(y, "l_out")
        return gg.get_rows(y, rows) if rows is not None and g.whole else y
