"""Several residual streams instead of one (hyper-connections): each block reads a mix of them, and its result is
added to all.

    x [n_embd, n_streams, n_tokens]
    mixes   = F rms_norm(x of all streams)
    pre     = sigmoid(mixes s + b) + eps;   post = magnitude sigmoid(mixes s + b) + post_eps       for each stream
    y       = piece(norm(sum_h pre[h] x[h]))
    x[h]    = post[h] y + x[h], or + sum_s comb[h, s] x[s], comb doubly stochastic (n_iter Sinkhorn steps)

Sources: arXiv 2409.19606, 2512.24880; llama.cpp's deepseek4 and hy-v4.
"""
import dataclasses
from typing import Any

import ggjit as gg
from ggjit.models.blocks.description import linear


def _sigmoid(mixes, scale, base, first, n, part):
    """sigmoid of n of the mixes from `first` on, times a number of scale, plus their base."""
    x = gg.view_2d(mixes, n, mixes.ne[1], mixes.nb[1], first * mixes.nb[0])
    x = gg.mul(x, gg.view_1d(scale, 1, part * scale.nb[0]))
    return gg.sigmoid(gg.add(x, gg.view_1d(base, n, first * base.nb[0])))


def _flat(x):
    """All streams of a token side by side."""
    return gg.reshape_2d(x, x.ne[0] * x.ne[1], x.ne[2])


def _shifted(x, factor, shift):
    return gg.scale_bias(x, factor, shift) if shift else x if factor == 1.0 else gg.scale(x, factor)


@dataclasses.dataclass(frozen=True)
class StreamBlock:
    """One layer.  All tokens pass the last one: StreamsEnd picks those that are wanted."""
    mixer: Any
    feed_forward: Any
    n_streams: int
    eps: float
    magnitude: float = 2.0
    post_eps: float = 0.0
    n_iter: int = 0                     # 0: streams are not mixed with each other
    norm = "rms"

    def cache(self, sizes):
        return self.mixer.cache(sizes) + self.feed_forward.cache(sizes)

    def load(self, loader, p):
        n, d = self.n_streams, loader.n_embd
        n_mix = 2 * n + n * n * bool(self.n_iter)
        w = self.mixer.load(loader, p) | self.feed_forward.load(loader, p)
        for piece in ("attn", "ffn"):
            w[piece + "_norm"] = loader.norm(f"{p}{piece}_norm", self.norm)
            w[piece] = (loader.linear(f"{p}hc_{piece}_fn", n * d, n_mix, False),
                        loader.want(f"{p}hc_{piece}_scale.weight", 2 + bool(self.n_iter)),
                        loader.want(f"{p}hc_{piece}_base.weight", n_mix))
        return w

    def build(self, g, x, w, i, rows=None):
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")
        for piece, run in (("attn", self.mixer), ("ffn", self.feed_forward)):
            mixed, post, comb = self._read(g, x, *w[piece])
            n = named(g.norm(mixed, self.norm, w[piece + "_norm"]), piece + "_norm")
            x = gg.dsv4_hc_post(named(run.build(g, n, w, i), piece + "_out"), x, post, comb)
        return named(x, "l_out")

    def _read(self, g, x, fn, scale, base):
        """(what the piece reads, the weights of its result in each stream, how streams mix)."""
        n = self.n_streams
        mixes = linear(fn, gg.rms_norm(_flat(x), g.eps))
        pre = _shifted(_sigmoid(mixes, scale, base, 0, n, 0), 1.0, self.eps)
        post = _shifted(_sigmoid(mixes, scale, base, n, n, 1), self.magnitude, self.post_eps)
        comb = gg.dsv4_hc_comb(mixes, scale, base, self.eps, self.n_iter) if self.n_iter else None
        return gg.dsv4_hc_pre(x, pre), post, comb


@dataclasses.dataclass(frozen=True)
class StreamsEnd:
    """A Description.frame: every stream begins as the embeddings; a last mix of them is what follows the layers."""
    n_streams: int
    eps: float

    def load(self, loader):
        n = self.n_streams
        return {"fn": loader.linear("output_hc_fn", n * loader.n_embd, n, False),
                "scale": loader.want("output_hc_scale.weight", 1), "base": loader.want("output_hc_base.weight", n)}

    def before(self, g, x, w):
        d, t = x.ne[:2]
        return gg.repeat_4d(gg.reshape_3d(x, d, 1, t), d, self.n_streams, t, 1)

    def _wanted(self, x, rows):
        return x if rows is None else gg.reshape_3d(gg.get_rows(_flat(x), rows), *x.ne[:2], rows.ne[0])

    def after(self, g, x, w, rows):
        x = self._wanted(x, rows)
        mixes = linear(w["fn"], gg.rms_norm(_flat(x), g.eps))
        pre = _sigmoid(mixes, w["scale"], w["base"], 0, self.n_streams, 0)
        return gg.dsv4_hc_pre(x, _shifted(pre, 1.0, self.eps))


@dataclasses.dataclass(frozen=True)
class StreamsMean(StreamsEnd):
    """What follows the layers is the mean of the streams."""

    def load(self, loader):
        return {}

    def after(self, g, x, w, rows):
        x = self._wanted(x, rows)
        streams = [gg.view_2d(x, x.ne[0], x.ne[2], x.nb[2], h * x.nb[1]) for h in range(self.n_streams)]
        total = streams[0]
        for stream in streams[1:]:
            total = gg.add(total, stream)
        return gg.scale(total, 1.0 / self.n_streams)
