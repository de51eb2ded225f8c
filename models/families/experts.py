"""Decoders of experts: some dense layers first, then a router's choice, mostly beside an expert that all tokens pass.

DeepSeek 1, dots1, GLM 4.5, Ling (bailingmoe), ERNIE 4.5, MiniMax M2, Hunyuan, Phi 3.5 MoE, DBRX, HY V3, Arctic, Grove.
"""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import LONG, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.grove import Grove
from ggjit.models.blocks.moe import SIGMOID, SOFTMAX, DenseBesideExperts, gating, groups, mixture


def after_dense(facts, attention, feed_forward, every=1, **block):
    """Blocks: `leading_dense_block_count` with dense feed-forwards, then one of `every` with experts.

    A layer whose file holds a bias for picking experts uses it.
    """
    n_dense, blocks = facts.get("leading_dense_block_count", 0, int), []
    for i in range(facts.n_layer):
        if i < n_dense or (i + 1) % every:
            f = Dense(facts.n_ff, bias=False)
        else:
            f = dataclasses.replace(feed_forward, pick_bias=facts.has(f"blk.{i}.exp_probs_b.bias"))
        blocks.append(Block(attention, f, **block))
    return blocks


def routed(facts, kind=SOFTMAX, normed=False, n_shared=None, **switches):
    """Experts as the metadata states them.  kind: of gating, where it states none; n_shared: of shared experts."""
    n_ff = facts.positive("expert_feed_forward_length")
    n_shared = facts.positive("expert_shared_count") if n_shared is None else n_shared
    shared = Dense(n_ff * n_shared, suffix="_shexp", bias=False) if n_shared else None
    return mixture(facts, n_ff, gating=gating(facts, kind), normed=facts.get("expert_weights_norm", normed, bool),
                   **{"shared": shared, **switches})


def _rotated(facts, mode, factors="", **switches):
    sizes = facts.heads()
    kinds = ROPE_KINDS if factors == LONG else ROPE_KINDS[:-1]
    return Attention(**sizes, rope=facts.rope(mode, sizes["d_head"], factors, kinds), **switches)


def deepseek(facts):
    attention = _rotated(facts, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    return Description(after_dense(facts, attention, routed(facts)), facts.eps(), tied=False)


def dots1(facts):
    """Norms of every head's query and key."""
    attention = _rotated(facts, ROPE_NEOX, bias=False, out_bias=False, qk_norm="rms")
    return Description(after_dense(facts, attention, routed(facts)), facts.eps(), tied=False)


def glm4moe(facts):
    """Sigmoid gating; the second norm stands where others have one after attention."""
    facts.leave_predicting()
    normed = "rms" if facts.has("blk.0.attn_q_norm.weight") else ""
    attention = _rotated(facts, ROPE_NEOX, out_bias=False, qk_norm=normed)
    blocks = after_dense(facts, attention, routed(facts, SIGMOID), ffn_norm="post_attention_norm")
    return Description(blocks, facts.eps())


def bailingmoe(facts):
    attention = _rotated(facts, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    facts.ignore("feed_forward_length")
    feed_forward = routed(facts)
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps(), tied=False)


def bailingmoe2(facts):
    """Fused queries, keys and values with norms; experts lie in groups."""
    facts.leave_predicting()
    attention = _rotated(facts, ROPE_NEOX, fused=True, bias=False, out_bias=False, qk_norm="rms")
    each = facts.get("expert_shared_feed_forward_length", 0, int) or facts.positive("expert_feed_forward_length")
    shared = Dense(each * facts.positive("expert_shared_count"), suffix="_shexp", bias=False)
    feed_forward = routed(facts, n_shared=0, shared=shared, **groups(facts))
    return Description(after_dense(facts, attention, feed_forward), facts.eps(), tied=False)


def ernie4_5_moe(facts):
    """One layer of `interleave_moe_layer_step` has experts, picked with a bias."""
    facts.ignore("expert_shared_count")
    n_ff = facts.get("expert_shared_feed_forward_length", 0, int)
    shared = Dense(n_ff, suffix="_shexp", bias=False) if n_ff else None
    attention = _rotated(facts, ROPE_NORMAL, out_bias=False)
    feed_forward = routed(facts, normed=True, n_shared=0, shared=shared)
    blocks = after_dense(facts, attention, feed_forward, facts.positive("interleave_moe_layer_step"))
    return Description(blocks, facts.eps())


def minimax_m2(facts):
    """Norms of queries and keys over all heads, half of a head rotated."""
    facts.ignore("feed_forward_length")
    attention = _rotated(facts, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="all")
    blocks = after_dense(facts, attention, routed(facts, SIGMOID, normed=True, n_shared=0))
    return Description(blocks, facts.eps(), tied=False)


def hunyuan_moe(facts):
    """Norms of heads after RoPE."""
    facts.ignore("expert_feed_forward_length", "expert_shared_count")
    attention = _rotated(facts, ROPE_NEOX, out_bias=False, qk_norm="rms", norm_after_rope=True)
    shared = Dense(facts.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    feed_forward = mixture(facts, facts.n_ff, shared=shared)
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps())


def phimoe(facts):
    """RMS norms with biases, RoPE with factors by context size."""
    attention = _rotated(facts, ROPE_NEOX, LONG, bias=True, out_bias=True)
    block = Block(attention, mixture(facts, facts.n_ff), norm="rms biased")
    facts.ignore("attention.sliding_window")
    return Description([block] * facts.n_layer, facts.eps(), norm="rms biased", tied=False, output_bias=True)


def dbrx(facts):
    """Layer norms without biases; queries, keys and values are kept within limits."""
    attention = _rotated(facts, ROPE_NEOX, fused=True, bias=False, out_bias=False,
                         clamp=facts.scale("attention.clamp_kqv"))
    block = Block(attention, mixture(facts, facts.n_ff), norm="centred", ffn_norm="attn_output_norm")
    return Description([block] * facts.n_layer, facts.eps("layer"), norm="centred", tied=False)


def hy_v3(facts):
    """Norms of heads, a shared expert; layers without a router are dense."""
    facts.leave_predicting()
    facts.ignore("leading_dense_block_count", "expert_shared_count", "feed_forward_length")
    attention = _rotated(facts, ROPE_NEOX, qk_norm="rms")
    n_shared = facts.get("expert_shared_feed_forward_length", 0, int) or facts.positive("expert_feed_forward_length")
    experts = routed(facts, SIGMOID, n_shared=0, shared=Dense(n_shared, suffix="_shexp", bias=False), **groups(facts))
    blocks = []
    for i in range(facts.n_layer):
        f = dataclasses.replace(experts, pick_bias=facts.has(f"blk.{i}.exp_probs_b"))
        blocks.append(Block(attention, f if facts.has(f"blk.{i}.ffn_gate_inp.weight") else
                            Dense(facts.n_ff, bias=False)))
    return Description(blocks, facts.eps())


def arctic(facts):
    """A dense feed-forward, and experts beside the whole layer."""
    attention = _rotated(facts, ROPE_NORMAL, out_bias=False)
    feed_forward = DenseBesideExperts(Dense(facts.n_embd, bias=False), mixture(facts, facts.n_ff, **groups(facts)))
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps())


def grovemoe(facts):
    """Qwen 3's experts, and small ones that groups of them share, which read what the first gave."""
    facts.ignore("feed_forward_length")
    attention = _rotated(facts, ROPE_NEOX, qk_norm="rms")
    small = facts.get("expert_chunk_feed_forward_length", 0, int) or attention.d_head
    feed_forward = Grove(mixture(facts, facts.positive("expert_feed_forward_length")), small,
                         facts.positive("experts_per_group"), facts.between("expert_group_scale", 0.0, 1e6))
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps())


FAMILY = {"deepseek": deepseek, "dots1": dots1, "glm4moe": glm4moe, "bailingmoe": bailingmoe,
          "bailingmoe2": bailingmoe2, "ernie4_5-moe": ernie4_5_moe, "minimax-m2": minimax_m2,
          "hunyuan-moe": hunyuan_moe, "phimoe": phimoe, "dbrx": dbrx, "hy_v3": hy_v3,
          "arctic": arctic, "grovemoe": grovemoe}
