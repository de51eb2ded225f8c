"""Linear attention by the gated delta rule: Qwen3-Next's and Kimi's.  Source: arXiv 2412.06464, 2510.26692.

    q, k, v = silu(conv(Wqkv n));   q, k divided by their norms, each of n_group heads serves a run of value heads
    beta, a = sigmoid(Wb n), exp(A softplus(Wa n + dt))
    S       = a S + beta (v - a S k) k^T,   o = S q
    result  = Wout (rms_norm(o) * g * silu(z)),   z = Wgate n
"""
import dataclasses

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.short_conv import convolved, state


def _unit(x, eps):
    """x / sqrt(sum x^2 + eps) of every row"""
    n = x.ne[0]
    return gg.scale(gg.rms_norm(x, eps / n), n ** -0.5)


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    n_group: int                        # heads of keys
    n_head: int                         # heads of values
    d_state: int                        # size of a head
    d_conv: int
    interleaved: bool = False           # q, k, v and z of a group lie side by side in one matrix, ssm_in
    apart: bool = False                 # ssm_beta and ssm_alpha instead of ssm_ba; head h of values has key h % n_group

    @property
    def n_key(self):
        return self.n_group * self.d_state

    @property
    def n_value(self):
        return self.n_head * self.d_state

    @property
    def n_conv(self):
        return 2 * self.n_key + self.n_value

    def cache(self, sizes):
        return [state(sizes, 0, (self.d_conv - 1) * self.n_conv), state(sizes, 1, self.d_state * self.n_value)]

    def load(self, loader, p):
        d, h, want = loader.n_embd, self.n_head, loader.want
        if self.interleaved:
            w = {"in": loader.linear(p + "ssm_in", d, self.n_conv + self.n_value, False)}
        else:
            w = {"qkv": loader.linear(p + "attn_qkv", d, self.n_conv, False),
                 "z": loader.linear(p + "attn_gate", d, self.n_value, False)}
        p += "ssm_"
        gates = {"b": "beta", "a": "alpha"} if self.apart else {"ba": "ba"}
        w |= {"gate_" + n: loader.linear(p + name, d, h if self.apart else 2 * h, False) for n, name in gates.items()}
        return w | {"out": loader.linear(p + "out", self.n_value, d, False),
                    "conv": want(p + "conv1d.weight", self.d_conv, self.n_conv), "dt": want(p + "dt.bias", h),
                    "a": want(p + "a", h), "ssm_norm": want(p + "norm.weight", self.d_state)}

    def _parts(self, y, sizes, t):
        """The parts of every group's run of y, each with all its groups side by side."""
        run = sum(sizes)
        at = [sum(sizes[:j]) for j in range(len(sizes))]
        views = (gg.view_3d(y, n, self.n_group, t, run * y.nb[0], y.nb[1], first * y.nb[0])
                 for n, first in zip(sizes, at, strict=True))
        return [gg.reshape_2d(gg.cont(v), v.ne[0] * self.n_group, t) for v in views]

    def _inputs(self, w, n, t):
        if not self.interleaved:
            return linear(w["qkv"], n), linear(w["z"], n)
        s, per_group = self.d_state, self.n_value // self.n_group
        q, k, v, z = self._parts(linear(w["in"], n), (s, s, per_group, per_group), t)
        return gg.concat(gg.concat(q, k, 0), v, 0), z

    def build(self, g, n, w, i):
        t, s, h, n_each = g.n_tokens, self.d_state, self.n_head, (g.n_each, g.n_seqs)
        qkv, z = self._inputs(w, n, t)
        b, a = (linear(w["gate_" + c], n) for c in "ba") if self.apart else \
            self._parts(linear(w["gate_ba"], n), (h // self.n_group,) * 2, t)
        beta = gg.reshape_4d(gg.sigmoid(b), 1, h, *n_each)
        decay = gg.reshape_4d(gg.mul(gg.softplus(gg.add(a, w["dt"])), w["a"]), 1, h, *n_each)
        qkv = gg.silu(convolved(g, i, 0, qkv, w["conv"]))
        size, row = qkv.nb[:2]
        q, k = (self._key_heads(g, gg.view_3d(qkv, s, self.n_group, t, s * size, row, j * self.n_key * size))
                for j in range(2))
        v = gg.view_4d(qkv, s, h, *n_each, s * size, row, g.n_each * row, 2 * self.n_key * size)
        before = gg.reshape_4d(g.state(i, 1), s, s, h, g.n_seqs)
        out = gg.gated_delta_net(q, k, v, decay, beta, before)
        g.keep(i, 1, gg.view_1d(out, s * s * h * g.n_seqs, s * h * t * out.nb[0]))
        o = gg.set_name(gg.view_3d(out, s, h, t, s * out.nb[0], s * h * out.nb[0], 0), f"scan-{i}")
        o = gg.mul(gg.mul(gg.rms_norm(o, g.eps), w["ssm_norm"]), gg.silu(gg.reshape_3d(z, s, h, t)))
        return linear(w["out"], gg.reshape_2d(o, s * h, t))

    def _key_heads(self, g, x):
        """x [d_state, n_group, n_tokens] over its norms, each head as often as it serves value heads."""
        s, times, t = self.d_state, self.n_head // self.n_group, g.n_tokens
        if self.apart:
            return gg.reshape_4d(_unit(x, g.eps), s, self.n_group, g.n_each, g.n_seqs)
        x = gg.reshape_4d(_unit(x, g.eps), s, 1, self.n_group, t)
        return gg.reshape_4d(gg.repeat_4d(x, s, times, self.n_group, t), s, self.n_head, g.n_each, g.n_seqs)


@dataclasses.dataclass(frozen=True)
class KimiDelta:
    """Kimi's linear attention: the delta rule with a decay of its own for every number of a key.

    q, k, v = silu(conv(W n));   decay = exp(A softplus(Wf n + dt)), or exp(lower sigmoid(sign A (Wf n + dt)))
    result  = Wout (rms_norm(o) * g * sigmoid(Wg n));   Wf and Wg may each be two matrices, [a] with [b] behind it
    """
    n_head: int
    d_head: int
    d_conv: int
    decay_rank: int = 0                 # 0: Wf is one matrix
    gate_rank: int = 0
    gate: str = "ssm_g_a"               # the tensor of Wg, or of its first matrix
    flat: bool = False                  # A lies in the file as one row
    lower: float = 0.0                  # 0: the decay is that of softplus
    sign: float = 1.0
    unit_eps: float = 0.0               # epsilon of the norms of q and k; 0: that of other norms

    def cache(self, sizes):
        n = self.n_head * self.d_head
        convs = [state(sizes, k, (self.d_conv - 1) * n) for k in range(3)]
        return [*convs, state(sizes, 3, self.d_head * n)]

    def load(self, loader, p):
        d, h, n, want = loader.n_embd, self.n_head, self.n_head * self.d_head, loader.want

        def in_two(name, rank):
            """[weights of one product after the other]"""
            if not rank:
                return [loader.linear(p + name, d, n, False)]
            return [loader.linear(p + name, d, rank, False), loader.linear(p + name[:-1] + "b", rank, n, False)]
        w = {c: loader.linear(f"{p}attn_{c}", d, n, False) for c in "qkv"}
        w |= {"conv_" + c: want(f"{p}ssm_conv1d_{c}.weight", self.d_conv, 1, n) for c in "qkv"}
        return w | {"f": in_two("ssm_f_a", self.decay_rank), "g": in_two(self.gate, self.gate_rank),
                    "beta": loader.linear(p + "ssm_beta", d, h, False), "a": want(p + "ssm_a", *(() if self.flat else
                                                                                               (1,)), h),
                    "dt": want(p + "ssm_dt.bias", n), "ssm_norm": want(p + "ssm_norm.weight", self.d_head),
                    "out": loader.linear(p + "attn_output", n, d, False)}

    def build(self, g, n, w, i):
        t, s, h, each = g.n_tokens, self.d_head, self.n_head, (g.n_each, g.n_seqs)

        def product(name):
            x = n
            for weights in w[name]:
                x = linear(weights, x)
            return x
        q, k, v = (gg.reshape_4d(gg.silu(convolved(g, i, j, linear(w[c], n), gg.reshape_2d(w["conv_" + c], self.d_conv,
                                                                                          s * h))), s, h, *each)
                   for j, c in enumerate("qkv"))
        q, k = (_unit(x, self.unit_eps or g.eps) for x in (q, k))
        decay = self._decay(gg.add(product("f"), w["dt"]), gg.reshape_3d(w["a"], 1, h, 1))
        beta = gg.reshape_4d(gg.sigmoid(linear(w["beta"], n)), 1, h, *each)
        before = gg.reshape_4d(g.state(i, 3), s, s, h, g.n_seqs)
        out = gg.gated_delta_net(q, k, v, gg.reshape_4d(decay, s, h, *each), beta, before)
        g.keep(i, 3, gg.view_1d(out, s * s * h * g.n_seqs, s * h * t * out.nb[0]))
        o = gg.set_name(gg.view_3d(out, s, h, t, s * out.nb[0], s * h * out.nb[0], 0), f"scan-{i}")
        o = gg.mul(gg.mul(gg.rms_norm(o, g.eps), w["ssm_norm"]), gg.sigmoid(gg.reshape_3d(product("g"), s, h, t)))
        return linear(w["out"], gg.reshape_2d(o, s * h, t))

    def _decay(self, x, a):
        """The logarithm of what is left of the state, [d_head, n_head, n_tokens]."""
        if not self.lower:
            return gg.mul(gg.reshape_3d(gg.softplus(x), self.d_head, self.n_head, x.ne[1]), a)
        x = gg.mul(gg.reshape_3d(x, self.d_head, self.n_head, x.ne[1]), a)
        return gg.scale(gg.sigmoid(gg.scale(x, self.sign) if self.sign != 1.0 else x), self.lower)
