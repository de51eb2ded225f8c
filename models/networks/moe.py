"""The feed-forward of a mixture of experts, as Mixtral has it: a router picks n_used experts for every token.

    p       = softmax(Wr m)                                     [n_expert, n_tokens]
    ids     = the n_used largest of p, in descending order      [n_used, n_tokens]
    w       = p[ids] / sum p[ids]
    result  = sum_u w[u] Wdown[ids[u]] (silu(Wgate[ids[u]] m) * Wup[ids[u]] m)

The weights of all experts of a layer are one tensor each: ffn_gate_exps and ffn_up_exps [n_embd, n_ff, n_expert],
ffn_down_exps [n_ff, n_embd, n_expert]; mul_mat_id reads only the experts in use.
"""
import dataclasses
import math

import ggjit as gg
from ggjit.ops.core.errors import ModelError
from ggjit.tensors.tensor import Tensor

SMALLEST_SUM = 6.103515625e-5           # of the picked probabilities: the smallest normal float16, as in llama.cpp
MAX_SCALE = 1e6


@dataclasses.dataclass(frozen=True)
class Experts:
    """One layer's router and experts."""
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    n_used: int
    scale: float                        # of the weights; 0: none


def is_mixture(file):
    """Do the file's layers hold experts?"""
    return "blk.0.ffn_gate_exps.weight" in file.tensors


def load_experts(file, want, layer, n_embd, n_ff):
    """The Experts of a layer; `want` as Weights.want.  Errors: ModelError."""
    n_expert, n_used = (file.arch_get(key, kind=int) for key in ("expert_count", "expert_used_count"))
    if not 1 <= n_used <= n_expert:
        raise ModelError(f"{file.path}: {file.arch}.expert_used_count = {n_used} does not fit {n_expert} experts")
    scale = file.arch_get("expert_weights_scale", 0.0, float)
    if not 0 <= scale <= MAX_SCALE:
        raise ModelError(f"{file.path}: {file.arch}.expert_weights_scale = {scale}, expected 0 (none) to {MAX_SCALE}")
    p = f"blk.{layer}.ffn_"
    return Experts(want(p + "gate_inp.weight", n_embd, n_expert), want(p + "gate_exps.weight", n_embd, n_ff, n_expert),
                   want(p + "up_exps.weight", n_embd, n_ff, n_expert),
                   want(p + "down_exps.weight", n_ff, n_embd, n_expert), n_used, scale)


def feed_forward(m, experts, layer):
    """m [n_embd, n_tokens] through the experts of a layer -> [n_embd, n_tokens]; results carry llama.cpp's names."""
    def named(t, name):
        return gg.set_name(t, f"ffn_moe_{name}-{layer}")
    n_embd, n_tokens = m.ne[:2]
    ids, weights = _route(m, experts, named)
    m = gg.reshape_3d(m, n_embd, 1, n_tokens)
    up = named(gg.mul_mat_id(experts.up, m, ids), "up")
    gate = named(gg.mul_mat_id(experts.gate, m, ids), "gate")
    h = named(gg.swiglu_split(gate, up), "swiglu")
    y = named(gg.mul_mat_id(experts.down, h, ids), "down")
    y = named(gg.mul(y, weights), "weighted")
    slots = [gg.view_2d(y, n_embd, n_tokens, y.nb[2], u * y.nb[1]) for u in range(experts.n_used)]
    out = slots[0] if len(slots) > 1 else gg.cont(slots[0])
    for slot in slots[1:]:
        out = gg.add(out, slot)
    return named(out, "out")


def _route(m, experts, named):
    """(ids [n_used, n_tokens], weights [1, n_used, n_tokens]) of the picked experts."""
    n_expert, n_tokens, n_used = experts.router.ne[1], m.ne[1], experts.n_used
    p = named(gg.soft_max(named(gg.mul_mat(experts.router, m), "logits")), "probs")
    ids = named(gg.argsort_top_k(p, n_used), "topk")
    w = named(gg.get_rows(gg.reshape_3d(p, 1, n_expert, n_tokens), ids), "weights")
    w = gg.reshape_2d(w, n_used, n_tokens)
    total = named(gg.clamp(gg.sum_rows(w), SMALLEST_SUM, math.inf), "weights_sum")
    w = named(gg.div(w, total), "weights_norm")
    if experts.scale not in (0.0, 1.0):
        w = named(gg.scale(w, experts.scale), "weights_scaled")
    return ids, gg.reshape_3d(w, 1, n_used, n_tokens)
