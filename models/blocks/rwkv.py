"""RWKV-7: a state per head that is rewritten along learned directions.  Source: arXiv 2503.14456.

    every input is a mix of this token's x and the last one's, x + (x' - x) mu
    time:     r, k, v = Wr xr, Wk xk, Wv xv;   w, a, g from low-rank networks;  v moves towards layer 0's v
              S = S diag(w) + v k^T + (S (-kk)) (kk a)^T,   o = S r
              Wo (g * (norm(o) + (r k u) v))
    channel:  Wv relu(Wk xk)^2
"""
import dataclasses

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.short_conv import state

DECAY = -0.606531                       # -exp(-1/2): the smallest w is exp of it
HEAD_EPS, UNIT_EPS = 64e-5, 1e-12
MIXED = "r", "w", "k", "v", "a", "g"


def shifted(g, i, k, x):
    """x of the token before each; the last one is kept as state k of layer i."""
    d, t, s = x.ne[0], g.n_each, g.n_seqs
    before, run = g.state(i, k), t * x.nb[1]
    g.keep(i, k, gg.cont(gg.view_2d(x, d, s, run, (t - 1) * x.nb[1])))
    if t == 1:
        return before
    others = gg.view_3d(x, d, t - 1, s, x.nb[1], run, 0)
    return gg.reshape_2d(gg.concat(gg.reshape_3d(before, d, 1, s), others, 1), d, t * s)


@dataclasses.dataclass(frozen=True)
class TimeMix:
    n_embd: int
    d_head: int
    ranks: tuple                        # of the low-rank networks of w, a, v, g

    def cache(self, sizes):
        return [state(sizes, 0, sizes.n_embd), state(sizes, 1, sizes.n_embd * self.d_head)]

    def load(self, loader, p):
        d, want, first = loader.n_embd, loader.want, p == "blk.0."
        p += "time_mix_"
        w = {n: loader.linear(p + n, d, d, False) for n in ("receptance", "key", "value", "output")}
        w |= {n: want(f"{p}{n}.weight", d) for n in ("k_k", "k_a", "r_k", "w0", "a0")}
        for n, rank in zip("wavg", self.ranks, strict=True):
            if n == "v" and first:                      # its v is what later layers move towards
                loader.ignore(*(f"{p}v{j}.weight" for j in range(3)))
                continue
            w[n + "1"], w[n + "2"] = want(f"{p}{n}1.weight", d, rank), want(f"{p}{n}2.weight", rank, d)
            if n == "v":
                w["v0"] = want(p + "v0.weight", d)
        return w | {"lerp": want(p + "lerp_fused.weight", d, 1, 1, len(MIXED)), "ln": loader.norm(p + "ln", "layer")}

    def build(self, g, n, w, i):
        d, t, s = self.n_embd, g.n_tokens, self.d_head
        heads = d // s

        def by_head(x):
            return gg.reshape_3d(x, s, heads, t)

        def low_rank(name, x, act=None):
            y = gg.mul_mat(w[name + "1"], x)
            return gg.mul_mat(w[name + "2"], act(y) if act else y)
        step = gg.sub(shifted(g, i, 0, n), n)
        x = {m: gg.add(n, gg.mul(step, gg.view_1d(w["lerp"], d, j * d * w["lerp"].nb[0])))
             for j, m in enumerate(MIXED)}
        r, k, v = (linear(w[name], x[m]) for name, m in (("receptance", "r"), ("key", "k"), ("value", "v")))
        decay = gg.exp(gg.scale(gg.sigmoid(gg.add(low_rank("w", x["w"], gg.tanh), w["w0"])), DECAY))
        a = gg.sigmoid(gg.add(low_rank("a", x["a"]), w["a0"]))
        gate = low_rank("g", x["g"], gg.sigmoid)
        if "v0" in w:
            near = gg.sigmoid(gg.add(low_rank("v", x["v"]), w["v0"]))
            v = gg.add(v, gg.mul(gg.sub(g.shared["first value"], v), near))
        else:
            g.shared["first value"] = v
        unit = gg.l2_norm(by_head(gg.mul(k, w["k_k"])), UNIT_EPS)
        ka = gg.mul(k, w["k_a"])
        k = gg.add(k, gg.sub(gg.mul(a, ka), ka))
        r, k, v, a, decay = map(by_head, (r, k, v, a, decay))
        before = gg.reshape_2d(g.state(i, 1), d * s, g.n_seqs)
        out = gg.rwkv_wkv7(r, decay, k, v, gg.neg(unit), gg.mul(unit, a), before)
        g.keep(i, 1, gg.view_1d(out, d * s * g.n_seqs, d * t * out.nb[0]))
        o = gg.set_name(by_head(gg.view_1d(out, d * t, 0)), f"scan-{i}")
        o = gg.reshape_2d(gg.norm(o, HEAD_EPS), d, t)
        o = gg.add(gg.mul(o, w["ln"][0]), w["ln"][1])
        bonus = gg.sum_rows(gg.mul(gg.mul(k, r), gg.reshape_2d(w["r_k"], s, heads)))
        o = gg.add(o, gg.reshape_2d(gg.mul(v, bonus), d, t))
        return linear(w["output"], gg.mul(o, gate))


@dataclasses.dataclass(frozen=True)
class ChannelMix:
    """Its input is the token before, too, so that every token passes it."""
    n_ff: int
    looks_back = True

    def cache(self, sizes):
        return [state(sizes, 2, sizes.n_embd)]

    def load(self, loader, p):
        d, p = loader.n_embd, p + "channel_mix_"
        return {"channel_key": loader.linear(p + "key", d, self.n_ff, False),
                "channel_value": loader.linear(p + "value", self.n_ff, d, False),
                "channel_lerp": loader.want(p + "lerp_k.weight", d, 1, 1)}

    def build(self, g, m, w, i):
        x = gg.add(m, gg.mul(gg.sub(shifted(g, i, 2, m), m), w["channel_lerp"]))
        return linear(w["channel_value"], gg.sqr(gg.relu(linear(w["channel_key"], x))))
