"""The feed-forward network of a mixture of experts: a router selects n_used experts for every token.

    s       = Wr m                                              [n_expert, n_tokens]
    p       = softmax(s), sigmoid(s), or sqrt(softplus(s))
    ids     = the n_used largest of p (+ b), in descending order; or those that a table has for the token
                                                                                [n_used, n_tokens]
    w       = p[ids] / sum p[ids], or p[ids];  or softmax(s[ids])
    result  = sum_u w[u] Wdown[ids[u]] (act(Wgate[ids[u]] m) * Wup[ids[u]] m)   (+ a shared expert that all pass)

The weights of all experts of a layer are one tensor each: ffn_gate_exps and ffn_up_exps [n_embd, n_ff, n_expert], or
both in ffn_gate_up_exps; ffn_down_exps [n_ff, n_embd, n_expert]; mul_mat_id reads only the experts in use.  Latent
experts read Wlow m, which is shorter, and Wup makes their result as long as m again.
"""
import dataclasses
import math
from typing import Any

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.feed_forward import GATED, PLAIN, Dense
from ggjit.ops.core.errors import ModelError
from ggjit.tensors.tensor import Tensor

SMALLEST_SUM = 6.103515625e-5           # of the picked probabilities: the smallest normal float16, as in llama.cpp
MAX_SCALE = 1e6
SOFTMAX, SIGMOID, SOFTMAX_OF_PICKED, ROOT_OF_SOFTPLUS = 1, 2, 3, 4         # expert_gating_func


@dataclasses.dataclass(frozen=True)
class Experts:
    """One layer's router and experts."""
    router: Tensor
    gate: Tensor | None                 # None: gate and up are one tensor, or there is no gate
    up: Tensor
    down: Tensor
    n_used: int
    scale: float                        # factor of the weights; 0: none
    gating: int = SOFTMAX
    normed: bool = True                 # are the weights of the picked experts divided by their sum?
    pick_bias: Any = None               # added to p where experts are picked, not to their weights
    n_groups: int = 1                   # experts lie in groups: only those of the best groups are picked
    n_groups_used: int = 1
    biases: Any = None                  # (of router, gate, up, down)
    act: str = "swiglu"
    adapters: tuple = ((), (), (), ())  # (A, B, factor) of each LoRA adapter of router, gate, up, down
    factors: Any = None                 # factors of the results of each expert, [n_expert]
    shape: tuple = ()                   # parameters of act, as in Dense.shape
    before: bool = False                # are tokens weighted before the experts, instead of what these give?


def is_mixture(hparams):
    """Do the file's layers hold experts?"""
    return hparams.has("blk.0.ffn_gate_exps.weight")


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The description of a layer of experts."""
    n_ff: int
    n_expert: int
    n_used: int
    scale: float = 0.0
    gating: int = SOFTMAX
    normed: bool = True
    pick_bias: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    biased: bool = False
    act: str = "swiglu"
    shape: tuple = ()                   # parameters of act, as in Dense.shape
    n_latent: int = 0                   # numbers that experts read and give; 0: n_embd
    latent: str = "latent"              # tensors ffn_latent_down, ffn_latent_up; a norm between, where the file has one
    shared: Dense | None = None         # an expert that all tokens pass
    shared_gate: bool = False           # the shared expert's result is weighted with a sigmoid
    before: bool = False                # tokens are weighted before the experts, instead of what these give
    sum_scale: float = 0.0              # factor of the sum with the shared expert; 0: none
    by_token: bool = False              # a table has the experts of each token of the vocabulary

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        d, f, n, want, p_ = loader.n_embd, self.n_ff, self.n_expert, loader.want, p + "ffn_"
        names, e = ("gate_inp", "gate_exps", "up_exps", "down_exps"), self.n_latent or d
        router, gate, down = want(p_ + "gate_inp.weight", d, n), None, want(p_ + "down_exps.weight", f, e, n)
        up = want(p_ + "gate_up_exps.weight", e, 2 * f, n, optional=True) \
            if self.act in GATED and GATED[self.act][1] else None
        if up is not None:
            names = "gate_inp", "", "gate_up_exps", "down_exps"
        else:
            gate = want(p_ + "gate_exps.weight", e, f, n) if self.act not in PLAIN else None
            up = want(p_ + "up_exps.weight", e, f, n)
        loader.matrices += [t for t in (gate, up, down) if t is not None]
        biases = None
        if self.biased:
            biases = tuple(want(f"{p_}{k}.bias", *ne) for k, ne in
                           zip(names, ((n,), (f, n), (f, n), (d, n)), strict=True))
        bias = p + "exp_probs_b.bias"
        pick_bias = want(bias if loader.has(bias) else p + "exp_probs_b", n) if self.pick_bias else None
        factors = None if self.biased else want(p_ + "down_exps.scale", n, optional=True)
        adapters = tuple(loader.beside(f"{p_}{k}.weight") if k else () for k in names)
        w = {"experts": Experts(router, gate, up, down, self.n_used, self.scale, self.gating, self.normed, pick_bias,
                                self.n_groups, self.n_groups_used, biases, self.act, adapters, factors, self.shape,
                                self.before)}
        if self.n_latent:
            name = p_ + self.latent
            w |= {"latent_down": loader.linear(name + "_down", d, e, False),
                  "latent_up": loader.linear(name + "_up", e, d, False)}
            if loader.has(name + "_norm.weight"):
                w["latent_norm"] = loader.norm(name + "_norm", "rms", e)
        if self.shared:
            w |= self.shared.load(loader, p)
        if self.by_token:
            w["experts_of_token"] = want(p_ + "gate_tid2eid.weight", self.n_used, loader.n_vocab)
        if self.shared_gate:
            w["ffn_gate_inp_shexp"] = want(p_ + "gate_inp_shexp.weight", d)
        return w

    def build(self, g, m, w, i, routed=None):
        """routed: what the router reads instead of m."""
        ids = gg.get_rows(w["experts_of_token"], g.leaf["tokens"]) if self.by_token else None
        if self.n_latent:
            low = gg.set_name(linear(w["latent_down"], m), f"ffn_latent-{i}")
            low = feed_forward(low, w["experts"], i, m if routed is None else routed, ids)
            y = linear(w["latent_up"], g.norm(low, "rms", w["latent_norm"]) if "latent_norm" in w else low)
        else:
            y = feed_forward(m, w["experts"], i, routed, ids)
        if self.shared is None:
            return y
        s = self.shared.build(g, m, w, i)
        if self.shared_gate:
            gate = w["ffn_gate_inp_shexp"]
            s = gg.mul(s, gg.sigmoid(gg.mul_mat(gg.reshape_2d(gate, gate.ne[0], 1), m)))
        y = gg.add(y, s)
        return gg.set_name(gg.scale(y, self.sum_scale) if self.sum_scale else y, f"ffn_out-{i}")


@dataclasses.dataclass(frozen=True)
class RoutedByInput:
    """Experts that are picked by the block's input, before attention and norms (SmallThinker)."""
    experts: Mixture
    reads_input = True

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        return self.experts.load(loader, p)

    def build(self, g, m, w, i):
        return self.experts.build(g, m, w, i, g.block_input)


@dataclasses.dataclass(frozen=True)
class DenseBesideExperts:
    """A dense network, and experts that read the block's input through a norm of their own (Arctic)."""
    dense: Dense
    experts: Mixture
    reads_input = True

    def cache(self, sizes):
        return []

    def load(self, loader, p):
        return self.dense.load(loader, p) | self.experts.load(loader, p) | {
            "ffn_norm_exps": loader.norm(p + "ffn_norm_exps", "rms")}

    def build(self, g, m, w, i):
        routed = self.experts.build(g, g.norm(g.block_input, "rms", w["ffn_norm_exps"]), w, i)
        return gg.add(self.dense.build(g, m, w, i), routed)


def mixture(hparams, n_ff, n_used=None, **switches):
    """The Mixture whose counts and scale stand in the metadata.  Errors: ModelError."""
    n_expert = hparams.get("expert_count", kind=int)
    n_used = hparams.get("expert_used_count", kind=int) if n_used is None else n_used
    path, arch = hparams.file.path, hparams.file.arch
    if not 1 <= n_used <= n_expert:
        raise ModelError(f"{path}: {arch}.expert_used_count = {n_used} does not fit {n_expert} experts")
    scale = hparams.get("expert_weights_scale", 0.0, float)
    if not 0 <= scale <= MAX_SCALE:
        raise ModelError(f"{path}: {arch}.expert_weights_scale = {scale}, expected 0 (none) to {MAX_SCALE}")
    return Mixture(n_ff, n_expert, n_used, scale, **switches)


def groups(hparams):
    """{n_groups, n_groups_used} of a Mixture.  Errors: ModelError."""
    n, used = (max(hparams.get(key, 1, int), 1) for key in ("expert_group_count", "expert_group_used_count"))
    n_expert = hparams.get("expert_count", kind=int)
    if not 1 <= used <= n or n_expert % n or (n > 1 and n_expert < 2 * n):
        raise hparams.wrong("expert_group_count", n,
                            f"a divisor of the {n_expert} experts that leaves two or more to a "
                                                   f"group, and at least the {used} groups used")
    return {"n_groups": n, "n_groups_used": used}


def gating(hparams, default):
    """The kind of gating that the metadata states.  Errors: ModelError."""
    kind = hparams.get("expert_gating_func", default, int) or default
    if kind not in (SOFTMAX, SIGMOID):
        raise hparams.wrong("expert_gating_func", kind, f"{SOFTMAX} (softmax) or {SIGMOID} (sigmoid)")
    return kind


def feed_forward(m, experts, layer, routed=None, ids=None):
    """m [n_embd, n_tokens] through the experts of a layer -> [n_embd, n_tokens]; results carry llama.cpp's names.

    routed [n_embd, n_tokens]: what the router reads instead of m.  ids [n_used, n_tokens]: the experts, where they are
    known.
    """
    def named(t, name):
        return gg.set_name(t, f"ffn_moe_{name}-{layer}")
    return through_experts(m, experts, *_route(m if routed is None else routed, experts, named, ids), named)


def through_experts(m, experts, ids, weights, named):
    """The weighted sum of the picked experts' results for m.  ids, weights: as of `_route`."""
    def product(weights, x, k):
        y = gg.mul_mat_id(weights, x, ids)
        for low, up, factor in experts.adapters[k]:
            y = gg.add(y, gg.scale(gg.mul_mat_id(up, gg.mul_mat_id(low, x, ids), ids), factor))
        return y if experts.biases is None else gg.add_id(y, experts.biases[k], ids)
    n_embd, n_tokens = m.ne[:2]
    m = gg.reshape_3d(m, n_embd, 1, n_tokens)
    if experts.before:
        m = named(gg.mul(gg.repeat_4d(m, n_embd, experts.n_used, n_tokens, 1), weights), "weighted")
    up = named(product(experts.up, m, 2), "up" if experts.gate is not None or experts.act in PLAIN else "gate_up")
    if experts.gate is None:
        h = (PLAIN[experts.act] if experts.act in PLAIN else GATED[experts.act][1])(up)
    else:
        gate = named(product(experts.gate, m, 1), "gate")
        h = GATED[experts.act][0](gate, up, *experts.shape)
    h = named(h, experts.act)
    y = named(product(experts.down, h, 3), "down")
    y = y if experts.before else named(gg.mul(y, weights), "weighted")
    outputs = [gg.view_2d(y, n_embd, n_tokens, y.nb[2], u * y.nb[1]) for u in range(experts.n_used)]
    out = outputs[0] if len(outputs) > 1 else gg.cont(outputs[0])
    for output in outputs[1:]:
        out = gg.add(out, output)
    return named(out, "out")


_PROBABILITIES = {SOFTMAX: gg.soft_max, SIGMOID: gg.sigmoid, ROOT_OF_SOFTPLUS: lambda s: gg.sqrt(gg.softplus(s))}


def _route(m, experts, named, ids=None):
    """(ids [n_used, n_tokens], weights [1, n_used, n_tokens]) of the picked experts."""
    n_expert, n_tokens, n_used = experts.router.ne[1], m.ne[1], experts.n_used
    s = named(linear((experts.router, None, *experts.adapters[0]), m), "logits")
    if experts.biases is not None:
        s = gg.add(s, experts.biases[0])
    p = s if experts.gating == SOFTMAX_OF_PICKED else named(_PROBABILITIES[experts.gating](s), "probs")
    picked = p if experts.pick_bias is None else gg.add(p, experts.pick_bias)
    if experts.n_groups > 1:
        picked = _best_groups(picked, experts)
    ids = named(gg.argsort_top_k(picked, n_used), "topk") if ids is None else ids
    w = named(gg.get_rows(gg.reshape_3d(p, 1, n_expert, n_tokens), ids), "weights")
    w = gg.reshape_2d(w, n_used, n_tokens)
    if experts.gating == SOFTMAX_OF_PICKED:
        w = named(gg.soft_max(w), "weights_softmax")
    elif experts.normed:
        total = named(gg.clamp(gg.sum_rows(w), SMALLEST_SUM, math.inf), "weights_sum")
        w = named(gg.div(w, total), "weights_norm")
    if experts.scale not in (0.0, 1.0):
        w = named(gg.scale(w, experts.scale), "weights_scaled")
    if experts.factors is not None:
        of_all = gg.repeat_4d(gg.reshape_3d(experts.factors, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
        w = gg.mul(w, gg.reshape_2d(gg.get_rows(of_all, ids), n_used, n_tokens))
    return ids, gg.reshape_3d(w, 1, n_used, n_tokens)


def _best_groups(p, experts):
    """p with -inf for experts outside the best groups; a group is worth the sum of its two best experts."""
    n_expert, n_tokens, n_groups = p.ne[0], p.ne[1], experts.n_groups
    by_group = gg.reshape_3d(p, n_expert // n_groups, n_groups, n_tokens)
    best = gg.argsort_top_k(by_group, 2)                                            # [2, n_groups, n_tokens]
    values = gg.get_rows(gg.reshape_4d(by_group, 1, n_expert // n_groups, n_groups, n_tokens), best)
    worth = gg.sum_rows(gg.reshape_3d(values, 2, n_groups, n_tokens))
    worth = gg.reshape_2d(worth, n_groups, n_tokens)
    kept = gg.argsort_top_k(worth, experts.n_groups_used)                           # [n_groups_used, n_tokens]
    rows = gg.get_rows(by_group, kept)
    hidden = gg.fill(by_group, -math.inf)
    return gg.reshape_2d(gg.set_rows(hidden, rows, kept), n_expert, n_tokens)
