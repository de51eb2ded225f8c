"""Kimi Linear, Kimi K3 and Ling 3 (bailingmoe3): Kimi's delta rule in most layers, latent attention in the others."""
import dataclasses
import math

from ggjit.models.blocks.delta import KimiDelta
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import gating, groups, mixture
from ggjit.models.blocks.residual_attention import MixedBlock, MixedEnd
from ggjit.models.families.windowed_experts import limited


def _latent(facts, q_rank, **switches):
    """Latent attention in its absorbed form; without a `rope` the part of a head that others rotate stays as it is."""
    n_head = max(facts.per_layer("attention.head_count"))
    d_key, d_value = (facts.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    rank = facts.positive("attention.kv_lora_rank")
    n_rot = facts.positive("rope.dimension_count")
    facts.same("attention.key_length", rank + n_rot)
    facts.ignore("attention.value_length")              # some files state another one, there are no values of their own
    return Latent(n_head, d_key, d_value, rank, q_rank, scale=1.0 / math.sqrt(d_key), absorbed=True,
                  **{"rope": None, "d_shared": n_rot, **switches})


def _delta(facts, **switches):
    return KimiDelta(max(facts.per_layer("attention.head_count")), facts.positive("kda.head_dim"),
                     facts.positive("ssm.conv_kernel"), **switches)


def _lower(facts, default):
    """The least logarithm of a decay; 0: none."""
    lower = facts.get("kda.gate_lower_bound", default, float)
    if not -1e6 < lower <= 0:
        raise facts.wrong("kda.gate_lower_bound", lower, "a number below 0, or 0 for none")
    return lower


def _experts(facts, **switches):
    """Picked with a bias, beside shared ones."""
    n_ff = facts.positive("expert_feed_forward_length")
    n_shared = facts.get("expert_shared_feed_forward_length", 0, int) or \
        n_ff * max(facts.get("expert_shared_count", 1, int), 1)
    facts.ignore("expert_shared_count")
    shared = Dense(n_shared, suffix="_shexp", bias=False)
    return mixture(facts, n_ff, gating=gating(facts, 0), pick_bias=True, **{"shared": shared, **switches},
                   **groups(facts))


def _mixers(facts, delta, latent):
    return [latent if n else delta for n in facts.per_layer("attention.head_count_kv")]


def kimi_linear(facts):
    """Attention without RoPE."""
    facts.ignore("rope.freq_base")
    delta = _delta(facts, decay_rank=facts.positive("kda.head_dim"), gate_rank=facts.positive("kda.head_dim"))
    n_dense, experts = facts.get("leading_dense_block_count", 0, int), _experts(facts)
    blocks = [Block(mixer, experts if i >= n_dense else Dense(facts.n_ff, bias=False))
              for i, mixer in enumerate(_mixers(facts, delta, _latent(facts, 0)))]
    facts.ignore("feed_forward_length", "attention.q_lora_rank")
    return Description(blocks, facts.eps(), tied=False)


def kimi_k3(facts):
    """Attention over residuals, gates behind attention, experts of a shorter vector, no RoPE."""
    facts.ignore("rope.freq_base", "feed_forward_length")
    lower, every = _lower(facts, 0.0), facts.positive("attn_res.block_size")
    delta = _delta(facts, decay_rank=facts.positive("kda.head_dim"), gate="ssm_g", flat=True, lower=lower, sign=-1.0)
    shape = (facts.between("activation.situ_beta", 0.0, 1e6),
             max(facts.between("activation.situ_linear_beta", -1e6, 1e6), 0.0))
    q_rank = facts.get("attention.q_lora_rank", 0, int)
    n_dense = facts.get("leading_dense_block_count", 0, int)
    shared_width = facts.positive("expert_feed_forward_length") * max(facts.get("expert_shared_count", 1, int), 1)
    experts = _experts(facts, act="situ", shape=shape, normed=facts.get("expert_weights_norm", False, bool),
                       n_latent=facts.get("expert_latent_length", 0, int), latent="routed",
                       shared=Dense(shared_width, "situ", suffix="_shexp", bias=False, shape=shape))
    blocks = []
    for i, n_head_kv in enumerate(facts.per_layer("attention.head_count_kv")):
        mixer = delta
        if n_head_kv:
            low = q_rank if facts.has(f"blk.{i}.attn_q_a_norm.weight") else 0
            mixer = _latent(facts, low, gate="sigmoid" if facts.has(f"blk.{i}.attn_gate.weight") else "")
        f = experts if i >= n_dense else Dense(facts.n_ff, "situ", bias=False, shape=shape)
        blocks.append(MixedBlock(mixer, f, i % every == 0))
    return Description(blocks, facts.eps(), tied=False, frame=MixedEnd())


def bailingmoe3(facts):
    """Decays within limits, a gate for each head of attention, SwiGLU within limits; for text its RoPE is the usual
    one."""
    facts.leave_predicting()
    facts.ignore("rope.dimension_sections", "feed_forward_length")
    if not facts.get("kda.safe_gate", True, bool):
        raise facts.wrong("kda.safe_gate", False, "true")
    lower = _lower(facts, ...)
    if not lower:
        raise facts.wrong("kda.gate_lower_bound", lower, "a number below 0")
    rope = facts.rope(ROPE_NORMAL, facts.positive("attention.key_length_mla"), factors="")
    latent = _latent(facts, facts.get("attention.q_lora_rank", 0, int), rope=rope, gate="sigmoid", gate_by_head=True)
    limits, shared_limits = (facts.numbers_per_layer(f"swiglu_clamp_{name}") for name in ("exp", "shexp"))
    n_dense, blocks = facts.get("leading_dense_block_count", 0, int), []
    experts = _experts(facts, normed=facts.get("expert_weights_norm", False, bool))
    for i, mixer in enumerate(_mixers(facts, _delta(facts, lower=lower), latent)):
        shared = dataclasses.replace(experts.shared, **limited(shared_limits[i]))
        f = dataclasses.replace(experts, shared=shared, **limited(limits[i])) if i >= n_dense else \
            Dense(facts.n_ff, bias=False, **limited(shared_limits[i]))
        blocks.append(Block(mixer, f))
    return Description(blocks, facts.eps())


FAMILY = {"kimi-linear": kimi_linear, "kimi-k3": kimi_k3, "bailingmoe3": bailingmoe3}
