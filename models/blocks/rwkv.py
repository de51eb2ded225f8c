"""RWKV 6 and 7: a decaying state for each head, which version 7 also rewrites along directions.  arXiv 2404.05892,
2503.14456.

    every input is a mix of this token's x and the last one's, x + (x' - x) mu
    RWKV 7
    time:     r, k, v = Wr xr, Wk xk, Wv xv;   w, a, g from low-rank networks;  v moves towards layer 0's v
              S = S diag(w) + v k^T + (S (-kk)) (kk a)^T,   o = S r
              Wo (g * (norm(o) + (r k u) v))
    channel:  Wv relu(Wk xk)^2
    RWKV 6
    time:     mu of w, k, v, r, g = what the mix for all has in common + a low-rank network of it
              S = S diag(w) + k v^T,   o = r (S + u k v^T) before the step,   w = exp(-exp(w0 + low rank))
              Wo (g * norm(o))                                of Qwen 2: o = r S, k (1 - w), no norm
    channel:  sigmoid(Wr xr) Wv relu(Wk xk)^2
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
    ranks: tuple                        # of the low-rank networks of w, a, v, g; the last is 0: no gate
    normed: bool = True                 # o has a norm

    def cache(self, sizes):
        return [state(sizes, 0, sizes.n_embd), state(sizes, 1, sizes.n_embd * self.d_head)]

    def load(self, loader, p):
        d, want, first = loader.n_embd, loader.want, p == "blk.0."
        p += "time_mix_"
        w = {n: loader.linear(p + n, d, d, False) for n in ("receptance", "key", "value", "output")}
        w |= {n: want(f"{p}{n}.weight", d) for n in ("k_k", "k_a", "r_k", "w0", "a0")}
        for n, rank in zip("wavg", self.ranks, strict=True):
            if not rank:
                continue
            if n == "v" and first:                      # later layers mix their v with the v of the first
                loader.ignore(*(f"{p}v{j}.weight" for j in range(3)))
                continue
            w[n + "1"], w[n + "2"] = want(f"{p}{n}1.weight", d, rank), want(f"{p}{n}2.weight", rank, d)
            if n == "v":
                w["v0"] = want(p + "v0.weight", d)
        w["lerp"] = want(p + "lerp_fused.weight", d, 1, 1, len(self._mixed))
        return w | ({"ln": loader.norm(p + "ln", "layer")} if self.normed else {})

    @property
    def _mixed(self):
        return MIXED if self.ranks[-1] else MIXED[:-1]

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
             for j, m in enumerate(self._mixed)}
        r, k, v = (linear(w[name], x[m]) for name, m in (("receptance", "r"), ("key", "k"), ("value", "v")))
        decay = gg.exp(gg.scale(gg.sigmoid(gg.add(low_rank("w", x["w"], gg.tanh), w["w0"])), DECAY))
        a = gg.sigmoid(gg.add(low_rank("a", x["a"]), w["a0"]))
        gate = low_rank("g", x["g"], gg.sigmoid) if "g" in x else None
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
        o = normed_heads(o, w["ln"]) if self.normed else gg.reshape_2d(o, d, t)
        bonus = gg.sum_rows(gg.mul(gg.mul(k, r), gg.reshape_2d(w["r_k"], s, heads)))
        o = gg.add(o, gg.reshape_2d(gg.mul(v, bonus), d, t))
        return linear(w["output"], o if gate is None else gg.mul(o, gate))


def normed_heads(o, params):
    """o [d_head, heads, n_tokens] -> [d_head heads, n_tokens]: every head normed, weights and biases of all."""
    o = gg.reshape_2d(gg.norm(o, HEAD_EPS), o.ne[0] * o.ne[1], o.ne[2])
    return gg.add(gg.mul(o, params[0]), params[1])


@dataclasses.dataclass(frozen=True)
class TimeMix6:
    n_embd: int
    d_head: int
    n_head_kv: int                      # heads of k and v, each of which serves a run of heads
    mix_rank: int
    decay_rank: int
    linear: bool = False                # RWKV 6 out of Qwen 2: gated linear attention
    bias: bool | None = False           # biases of receptance, key and value: True: required, False: refused

    def cache(self, sizes):
        return [state(sizes, 0, sizes.n_embd), state(sizes, 1, sizes.n_embd * self.d_head)]

    def load(self, loader, p):
        d, kv, want = loader.n_embd, self.n_head_kv * self.d_head, loader.want
        p += "time_mix_"
        w = {n: loader.linear(p + n, d, ne, self.bias) for n, ne in (("receptance", d), ("key", kv), ("value", kv))}
        w |= {n: loader.linear(p + n, d, d, False) for n in ("gate", "output")}
        w |= {"w1": want(p + "w1.weight", d, 5 * self.mix_rank), "w2": want(p + "w2.weight", self.mix_rank, d, 5),
              "lerp_x": want(p + "lerp_x.weight", d, 1, 1), "decay": want(p + "decay.weight", d),
              "decay_w1": want(p + "decay_w1.weight", d, self.decay_rank),
              "decay_w2": want(p + "decay_w2.weight", self.decay_rank, d)}
        if loader.has(p + "lerp_fused.weight"):
            w["lerp"] = want(p + "lerp_fused.weight", d, 1, 1, 5)
        else:
            w |= {f"lerp_{m}": want(f"{p}lerp_{m}.weight", d, 1, 1) for m in "wkvrg"}
        if self.linear:
            return w
        return w | {"first": want(p + "first.weight", self.d_head, d // self.d_head),
                    "ln": loader.norm(p + "ln", "layer")}

    def _mixed(self, n, step, w):
        """The inputs of w, k, v, r and g."""
        d, t, rank = self.n_embd, n.ne[1], self.mix_rank
        common = gg.add(gg.mul(step, gg.reshape_1d(w["lerp_x"], d)), n)
        low, up = gg.tanh(gg.mul_mat(w["w1"], common)), w["w2"]
        for j, m in enumerate("wkvrg"):
            lerp = gg.view_1d(w["lerp"], d, j * d * w["lerp"].nb[0]) if "lerp" in w else w[f"lerp_{m}"]
            part = gg.view_2d(low, rank, t, low.nb[1], j * rank * low.nb[0])
            more = gg.mul_mat(gg.view_2d(up, rank, d, up.nb[1], j * up.nb[2]), part)
            yield gg.add(gg.mul(gg.add(more, lerp), step), n)

    def build(self, g, n, w, i):
        d, t, s = self.n_embd, g.n_tokens, self.d_head
        heads, times = d // s, d // s // self.n_head_kv
        xw, xk, xv, xr, xg = self._mixed(n, gg.sub(shifted(g, i, 0, n), n), w)
        r, k, v = (linear(w[name], x) for name, x in (("receptance", xr), ("key", xk), ("value", xv)))
        gate = linear(w["gate"], xg)
        gate = gg.sigmoid(gate) if self.linear else gg.silu(gate)
        if times > 1:
            k, v = (gg.repeat_4d(gg.reshape_4d(x, s, 1, self.n_head_kv, t), s, times, self.n_head_kv, t)
                    for x in (k, v))
        r, k, v = (gg.reshape_3d(x, s, heads, t) for x in (r, k, v))
        decay = gg.add(gg.mul_mat(w["decay_w2"], gg.tanh(gg.mul_mat(w["decay_w1"], xw))), w["decay"])
        decay = gg.reshape_3d(gg.exp(gg.neg(gg.exp(decay))), s, heads, t)
        before = gg.reshape_2d(g.state(i, 1), d * s, g.n_seqs)
        if self.linear:
            k = gg.sub(k, gg.mul(k, decay))
            out = gg.gated_linear_attn(k, v, r, decay, before, s ** -0.5)
        else:
            out = gg.rwkv_wkv6(k, v, r, w["first"], decay, before)
        g.keep(i, 1, gg.view_1d(out, d * s * g.n_seqs, d * t * out.nb[0]))
        o = gg.set_name(gg.view_3d(out, s, heads, t, s * out.nb[0], d * out.nb[0], 0), f"scan-{i}")
        o = gg.reshape_2d(o, d, t) if self.linear else normed_heads(o, w["ln"])
        return linear(w["output"], gg.mul(o, gate))


@dataclasses.dataclass(frozen=True)
class ChannelMix:
    """RWKV's feed-forward.  It also reads the token before, so all tokens pass it, in the last layer too."""
    n_ff: int
    gated: bool = False                 # a gate multiplies the result (RWKV 6)
    looks_back = True

    def cache(self, sizes):
        return [state(sizes, 2, sizes.n_embd)]

    def load(self, loader, p):
        d, p = loader.n_embd, p + "channel_mix_"
        w = {"channel_key": loader.linear(p + "key", d, self.n_ff, False),
             "channel_value": loader.linear(p + "value", self.n_ff, d, False),
             "channel_lerp": loader.want(p + "lerp_k.weight", d, 1, 1)}
        if self.gated:
            w |= {"channel_receptance": loader.linear(p + "receptance", d, d, False),
                  "channel_lerp_r": loader.want(p + "lerp_r.weight", d, 1, 1)}
        return w

    def build(self, g, m, w, i):
        step = gg.sub(shifted(g, i, 2, m), m)
        x = gg.add(m, gg.mul(step, w["channel_lerp"]))
        y = linear(w["channel_value"], gg.sqr(gg.relu(linear(w["channel_key"], x))))
        if self.gated:
            x = gg.add(m, gg.mul(step, w["channel_lerp_r"]))
            y = gg.mul(gg.sigmoid(linear(w["channel_receptance"], x)), y)
        return y
