"""Dense feed-forward networks.

    gated:  Wdown (act(Wgate m) * Wup m)        swiglu, geglu, reglu: act is SiLU, GELU, ReLU; gate and up may be one
                                                matrix; swiglu_limited, swiglu_clamp, situ: both factors are
                                                kept below limits
    plain:  Wdown act(Wup m)                    gelu, relu, relu_sqr, xielu
    cutoff: gates lose their mean and so many standard deviations, and at least 0 is left
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.description import linear

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0       # parameters of gpt-oss's clamped SwiGLU


def _relu_sqr(x):
    return gg.sqr(gg.relu(x))


def _limited(gate, up, limit):
    """min(silu(gate), limit) * up, up within -limit .. limit."""
    gate = gg.clamp(gg.silu(gate), -math.inf, limit)
    return gg.mul(gate, gg.clamp(up, -limit, limit))


def _situ(gate, up, beta, linear_beta):
    """beta tanh(gate / beta) sigmoid(gate) * b tanh(up / b), b = linear_beta; 0: up as it is."""
    factor = gg.mul(gg.scale(gg.tanh(gg.scale(gate, 1.0 / beta)), beta), gg.sigmoid(gate))
    return gg.mul(factor, gg.scale(gg.tanh(gg.scale(up, 1.0 / linear_beta)), linear_beta) if linear_beta else up)


def _oai(gate, up):
    return gg.swiglu_oai(gate, up, OAI_ALPHA, OAI_LIMIT)


PLAIN = {"gelu": gg.gelu, "gelu_erf": gg.gelu_erf, "relu": gg.relu, "relu_sqr": _relu_sqr, "silu": gg.silu,
         "xielu": gg.xielu}
# name -> (function of gate and up, function of one tensor with the gate's half first, or None)
GATED = {"swiglu": (gg.swiglu_split, gg.swiglu), "geglu": (gg.geglu_split, gg.geglu),
         "geglu_erf": (gg.geglu_erf_split, gg.geglu_erf), "reglu": (gg.reglu_split, gg.reglu),
         "swiglu_oai": (_oai, None), "swiglu_limited": (_limited, None),
         "swiglu_clamp": (gg.swiglu_clamp, None), "situ": (_situ, None)}


@dataclasses.dataclass(frozen=True)
class Dense:
    """`act`: a name of PLAIN or GATED."""
    n_ff: int
    act: str = "swiglu"
    fused: bool = False                 # gate and up are one tensor, ffn_up
    bias: bool | None = None            # biases of all matrices: True: required, False: refused, None: optional
    suffix: str = ""                    # suffix of the tensors' names
    out_bias: bool | None = None        # the same for ffn_down, where it differs
    shape: tuple = ()                   # numbers of act: alpha_n, alpha_p, beta, eps of xielu; the limit; situ's betas
    cutoff: float | None = None         # cutoff of gates, in standard deviations
    sub_norm: bool = False              # a norm before Wdown
    scaled: bool = False                # matrices may have a factor

    @property
    def gated(self):
        return self.act in GATED

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        d, f, s = loader.n_embd, self.n_ff, self.suffix
        sizes = {"ffn_gate": (d, f)} if self.gated and not self.fused else {}
        sizes |= {"ffn_up": (d, 2 * f if self.fused else f), "ffn_down": (f, d)}
        biases = {"ffn_down": self.bias if self.out_bias is None else self.out_bias}
        w = {name + s: loader.scaled(p + name + s, *ne) if self.scaled else
             loader.linear(p + name + s, *ne, biases.get(name, self.bias)) for name, ne in sizes.items()}
        return w | ({"ffn_sub_norm": loader.norm(p + "ffn_sub_norm", "rms", f)} if self.sub_norm else {})

    def build(self, g, m, w, i):
        def product(name, x, called=None):
            name += self.suffix
            return gg.set_name(linear(w[name], x), f"{called or name}-{i}")
        if self.gated and not self.fused:
            gate, up = product("ffn_gate", m), product("ffn_up", m)
            gate = _largest(gate, self.cutoff) if self.cutoff is not None else gate
            h = GATED[self.act][0](gate, up, *self.shape)
        else:
            h = (GATED[self.act][1] if self.gated else PLAIN[self.act])(product("ffn_up", m), *self.shape)
        h = gg.set_name(h, f"ffn_{self.act}{self.suffix}-{i}")
        if self.sub_norm:
            h = gg.set_name(g.norm(h, "rms", w["ffn_sub_norm"]), f"ffn_sub_norm-{i}")
        return product("ffn_down", h, "ffn_out" + self.suffix)


@dataclasses.dataclass(frozen=True)
class Projection:
    """One matrix, in the place of attention."""
    out: str = "attn_output"

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        return {self.out: loader.linear(p + self.out, loader.n_embd, loader.n_embd)}

    def build(self, g, n, w, i):
        return linear(w[self.out], n)


def _largest(x, cutoff):
    """max(x - mean - cutoff std, 0) of every row."""
    apart = gg.sub(x, gg.mean(x))
    std = gg.sqrt(gg.scale(gg.sum_rows(gg.sqr(apart)), 1.0 / x.ne[0]))
    return gg.relu(gg.sub(apart, gg.scale(std, cutoff)))
