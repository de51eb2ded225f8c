"""Parts that only Gemma 3n and 4 have: embeddings for every layer, several streams (AltUp), experts beside a dense
network.

    per layer   e = (sqrt(n) E[ids] + norm(Wm x / sqrt(n_embd))) / sqrt(2)              [n] of every layer
                x + norm(Wp (gelu(Wg x) * e[layer]))
    AltUp       arXiv 2301.13310: n streams of which one passes the layer, the others are predicted and corrected
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.feed_forward import PLAIN, Dense
from ggjit.models.blocks.moe import Mixture


@dataclasses.dataclass(frozen=True)
class LayerEmbeddings:
    """Embeddings of the tokens that every layer gets.  As a frame it is built around the blocks (Description)."""
    n: int
    n_layer: int

    def load(self, loader):
        d, n, p = loader.n_embd, self.n * self.n_layer, "per_layer_"
        return {"layer_embd": loader.want(p + "token_embd.weight", n, loader.n_vocab),
                "layer_model": loader.linear(p + "model_proj", d, n, False),
                "layer_norm": loader.norm(p + "proj_norm", "rms", self.n)}

    def before(self, g, x, w):
        ne = self.n, self.n_layer, g.n_tokens
        own = gg.scale(gg.reshape_3d(gg.get_rows(w["layer_embd"], g.leaf["tokens"]), *ne), math.sqrt(self.n))
        seen = gg.scale(linear(w["layer_model"], x), 1.0 / math.sqrt(x.ne[0]))
        seen = g.norm(gg.reshape_3d(seen, *ne), "rms", w["layer_norm"])
        both = gg.scale(gg.add(seen, own), 1.0 / math.sqrt(2.0))
        g.shared["layer embeddings"] = gg.cont(gg.permute(both, 0, 2, 1, 3))        # [n, n_tokens, n_layer]
        return x

    def after(self, g, x, w, rows):
        return x


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """Adds this layer's embedding of the token at the layer's end; the result may then be scaled by a learned
    number."""
    n: int                              # 0: there are no such embeddings
    scaled: bool = False

    def load(self, loader, p):
        d, n = loader.n_embd, self.n
        w = {"out_scale": loader.want(p + "layer_output_scale.weight", 1)} if self.scaled else {}
        return w | ({"inp_gate": loader.linear(p + "inp_gate", d, n, False),
                     "proj": loader.linear(p + "proj", n, d, False),
                     "post_norm": loader.norm(p + "post_norm", "rms")} if n else {})

    def build(self, g, x, w, i, picked):
        if self.n:
            x = gg.add(x, self.added(g, x, w, i, picked))
        return gg.mul(x, w["out_scale"]) if self.scaled else x

    def added(self, g, x, w, i, picked=lambda t: t):
        of_all = g.shared["layer embeddings"]
        own = picked(gg.view_2d(of_all, *of_all.ne[:2], of_all.nb[1], i * of_all.nb[2]))
        y = linear(w["proj"], gg.mul(PLAIN["gelu"](linear(w["inp_gate"], x)), own))
        return gg.set_name(g.norm(y, "rms", w["post_norm"]), f"layer_input-{i}")


@dataclasses.dataclass(frozen=True)
class DenseAndExperts:
    """A dense network and experts side by side, each between norms of its own; it is given x itself.

    The router reads x / rms(x) / sqrt(n_embd) times weights of its own.
    """
    dense: Dense
    experts: Mixture
    NORMS = "ffn_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        w = self.dense.load(loader, p) | self.experts.load(loader, p)
        w["router_scale"] = loader.want(p + "ffn_gate_inp.scale", loader.n_embd)
        return w | {n: loader.norm(p + n, "rms") for n in self.NORMS}

    def build(self, g, x, w, i):
        before, after, before_2, after_2 = (w[n] for n in self.NORMS)
        y = g.norm(self.dense.build(g, g.norm(x, "rms", before), w, i), "rms", after)
        routed = gg.mul(gg.scale(gg.rms_norm(x, g.eps), 1.0 / math.sqrt(x.ne[0])), w["router_scale"])
        picked = self.experts.build(g, g.norm(x, "rms", before_2), w, i, routed)
        return gg.add(y, g.norm(picked, "rms", after_2))


@dataclasses.dataclass(frozen=True)
class Streams(LayerEmbeddings):
    """A frame that makes n_streams streams of x, and one again of what the last layer makes of them.

    The others are Wj x, and at the end Uj of each, scaled to the length of the first.
    """
    n_streams: int = 4

    def load(self, loader):
        d, n = loader.n_embd, self.n_streams - 1
        return super().load(loader) | {name: loader.want(f"altup_{name}.weight", d, d, n)
                                       for name in ("proj", "unembd_proj")}

    def before(self, g, x, w):
        super().before(g, x, w)
        d, t = x.ne[:2]
        others = gg.mul_mat(w["proj"], gg.repeat_4d(x, d, t, self.n_streams - 1, 1))
        return gg.concat(x, self._as_long(others, x), 2)                # [n_embd, n_tokens, n_streams]

    def after(self, g, x, w, rows):
        first = stream(x, 0)
        others = gg.view_3d(x, *x.ne[:2], self.n_streams - 1, *x.nb[1:3], x.nb[2])
        others = self._as_long(gg.mul_mat(w["unembd_proj"], others), first)
        y = first
        for j in range(self.n_streams - 1):
            y = gg.add(y, stream(others, j))
        y = gg.scale(y, 1.0 / self.n_streams)
        return y if rows is None else gg.get_rows(y, rows)

    @staticmethod
    def _as_long(x, like):
        x_length, length = (gg.sqrt(gg.sum_rows(gg.sqr(t))) for t in (x, like))
        return gg.div(gg.mul(x, length), x_length)


def stream(x, j):
    return gg.view_2d(x, *x.ne[:2], x.nb[1], j * x.nb[2])


@dataclasses.dataclass(frozen=True)
class StreamsBlock:
    """One layer of Gemma 3n.  x and p have n_streams streams; the first passes the layer.

    p = x + Cp(x0) x                                    predicted: every stream a mix of all
    n = norm p0,  l = n + norm(Wr Wl n)                 beside attention a low-rank layer (LAuReL)
    y = (p0 + norm(attention n) + l) / sqrt(2),  y += norm(feed_forward(norm y))
    x = p + (1 + Cc(y)) (y - p0)                        corrected;  all but the first: + what LayerInput adds
    """
    mixer: object
    feed_forward: object
    layer_input: LayerInput
    n_streams: int
    rank: int                           # rank of the low-rank layer
    NORMS = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "laurel_post_norm", "altup_router_norm"

    def load(self, loader, p):
        d, n, want = loader.n_embd, self.n_streams, loader.want
        w = self.mixer.load(loader, p) | self.feed_forward.load(loader, p) | self.layer_input.load(loader, p)
        w |= {name: loader.linear(p + name, *ne, False) for name, ne in (
            ("laurel_l", (d, self.rank)), ("laurel_r", (self.rank, d)), ("altup_router", (d, n)),
            ("altup_predict_coef", (n, n * n)), ("altup_correct_coef", (n, n)))}
        return w | {"correct_scale": want(p + "altup_correct_scale.weight", d)} | {
            name: loader.norm(p + name, "rms") for name in self.NORMS}

    def cache(self, sizes):
        return self.mixer.cache(sizes)

    def build(self, g, x, w, i, rows=None):
        """rows are left to the frame."""
        def normed(y, name):
            return gg.set_name(g.norm(y, "rms", w[name]), f"{name}-{i}")
        predicted = gg.set_name(self._predicted(g, x, w), f"predictions-{i}")
        active = stream(predicted, 0)
        n = normed(active, "attn_norm")
        low_rank = gg.add(normed(linear(w["laurel_r"], linear(w["laurel_l"], n)), "laurel_post_norm"), n)
        a = normed(gg.set_name(self.mixer.build(g, n, w, i), f"attn_out-{i}"), "post_attention_norm")
        y = gg.scale(gg.add(gg.add(a, active), low_rank), 1.0 / math.sqrt(2.0))
        f = self.feed_forward.build(g, normed(gg.set_name(y, f"ffn_inp-{i}"), "ffn_norm"), w, i)
        y = gg.add(normed(gg.set_name(f, f"ffn_out-{i}"), "post_ffw_norm"), y)
        return gg.set_name(self._with_layer_input(g, self._corrected(g, predicted, y, w), w, i), f"streams-{i}")

    def _mixing(self, g, x, w, name):
        """The coefficients that mix the streams, computed from one of them: [n or n n, n_tokens]."""
        routed = gg.scale(g.norm(x, "rms", w["altup_router_norm"]), 1.0 / x.ne[0])
        return linear(w[f"altup_{name}_coef"], gg.tanh(linear(w["altup_router"], routed)))

    def _predicted(self, g, x, w):
        n, t = self.n_streams, g.n_tokens
        mixing = gg.reshape_3d(self._mixing(g, stream(x, 0), w, "predict"), n, n, t)
        by_token = gg.cont(gg.permute(x, 1, 2, 0, 3))                   # [n_streams, n_embd, n_tokens]
        mixed = gg.mul_mat(by_token, mixing)                            # [n_embd, n_streams, n_tokens]
        return gg.add(gg.cont(gg.permute(mixed, 0, 2, 1, 3)), x)

    def _corrected(self, g, predicted, y, w):
        n, t = self.n_streams, g.n_tokens
        shares = gg.scale_bias(self._mixing(g, y, w, "correct"), 1.0, 1.0)
        shares = gg.reshape_3d(gg.cont(gg.transpose(shares)), 1, t, n)
        new = gg.repeat_4d(gg.sub(y, stream(predicted, 0)), y.ne[0], t, n, 1)
        return gg.add(gg.mul(new, shares), predicted)

    def _with_layer_input(self, g, x, w, i):
        first = gg.set_name(stream(x, 0), f"l_out-{i}")
        more = self.layer_input.added(g, gg.mul(first, w["correct_scale"]), w, i)
        others = gg.view_3d(x, *x.ne[:2], self.n_streams - 1, *x.nb[1:3], x.nb[2])
        return gg.concat(first, gg.add(others, more), 2)
