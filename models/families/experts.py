"""Decoders of experts: some dense layers first, then a router's choice, mostly beside an expert that all tokens pass.

DeepSeek 1 and its OCR model, dots1, GLM 4.5, Ling (bailingmoe), ERNIE 4.5, MiniMax M2, Hunyuan, Phi 3.5 MoE, DBRX,
Grok, LLaMA 4, HY V3, Arctic, Grove, and the experts of EXAONE, Arcee (afmoe) and Cohere.
"""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import LONG, ROPE_BASES, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.grove import Grove
from ggjit.models.blocks.moe import SIGMOID, SOFTMAX, DenseBesideExperts, gating, groups, mixture

OCR_BASE = 10000.0              # of DeepSeek-OCR's RoPE
CHUNK = 8192                    # positions that LLaMA 4's layers with RoPE look at; its files do not say
MAVERICK = 128                  # experts of the LLaMA 4 without norms of queries and keys


def after_dense(facts, attention, feed_forward, every=1, **block):
    """Blocks: `leading_dense_block_count` with dense feed-forwards, then one of `every` with experts.

    attention: of all layers, or a list.  A layer whose file holds a bias for picking experts uses it.
    """
    n_dense, blocks = facts.get("leading_dense_block_count", 0, int), []
    for i in range(facts.n_layer):
        if i < n_dense or (i + 1) % every:
            f = Dense(facts.n_ff, bias=False)
        else:
            f = dataclasses.replace(feed_forward, pick_bias=facts.has(f"blk.{i}.exp_probs_b.bias"))
        blocks.append(Block(attention[i] if isinstance(attention, list) else attention, f, **block))
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


def deepseek2_ocr(facts):
    """The text part of DeepSeek-OCR: DeepSeek 1 with another RoPE."""
    facts.ignore("rope.dimension_count", "attention.q_lora_rank")
    sizes = facts.heads()
    if facts.freq_base != OCR_BASE:
        raise facts.wrong("rope.freq_base", facts.freq_base, OCR_BASE)
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="", kinds=("none", "linear"), n_dims=sizes["d_head"])
    attention = Attention(**sizes, rope=rope, out_bias=False)
    return Description(after_dense(facts, attention, routed(facts)), facts.eps())


def exaone_moe(facts):
    """Norms of every head's query and key; RoPE only where there is a window."""
    facts.leave_predicting()
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"])
    facts.ignore("rope.freq_base_swa", "expert_shared_count")
    n_ff = facts.get("expert_shared_feed_forward_length", 0, int) or facts.positive("expert_feed_forward_length")
    experts = routed(facts, n_shared=0, shared=Dense(n_ff, suffix="_shexp", bias=False))
    attentions = [Attention(**sizes, rope=rope if w else None, window=w, qk_norm="rms", out_bias=False)
                  for w in facts.windows(4, default=...)]
    return Description(after_dense(facts, attentions, experts), facts.eps(), tied=False)


def afmoe(facts):
    """Norms before and after, windows, gated attention; every fourth layer has no RoPE."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = dataclasses.replace(rope, freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, rope.freq_base))
    attentions = [Attention(**sizes, rope=None if i % 4 == 3 else near if w else rope, window=w, qk_norm="rms",
                            gate="sigmoid", out_bias=False) for i, w in enumerate(facts.windows(4))]
    n_shared = facts.get("expert_shared_count", kind=int)
    blocks = after_dense(facts, attentions, routed(facts, SIGMOID, n_shared=n_shared), attn_post="post_attention_norm",
                         ffn_post="post_ffw_norm")
    return Description(blocks, facts.eps(), embd_scale=math.sqrt(facts.n_embd))


def grok(facts):
    """Soft caps, norms before and after, experts with a GELU gate; Grok 2 has a dense network beside them."""
    # read by llama.cpp, but not used
    facts.ignore("router_logit_softcapping", "attention.temperature_length", "rope.scaling.yarn_attn_factor")
    sizes, softcap = facts.heads(), facts.scale("attn_logit_softcapping", 30.0)
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="", beta_fast=8.0)
    attention = Attention(**sizes, rope=rope, softcap=softcap, out_bias=False,
                          scale=facts.scale("attention.output_scale", 0.08838834764831845))
    n_ff = facts.get("expert_feed_forward_length", 0, int) or facts.n_ff
    blocks = []
    for i in range(facts.n_layer):
        beside = Dense(facts.n_ff, "geglu", bias=False) if facts.has(f"blk.{i}.ffn_up.weight") else None
        experts = mixture(facts, n_ff, act="geglu", shared=beside, sum_scale=math.sqrt(0.5))
        post = "layer_output_norm" if facts.has(f"blk.{i}.layer_output_norm.weight") else "post_ffw_norm"
        blocks.append(Block(attention, experts, attn_post="attn_output_norm", ffn_post=post))
    return Description(blocks, facts.eps(), embd_scale=facts.scale("embedding_scale", 78.38367176906169),
                       logit_scale=facts.scale("logit_scale", 0.5773502691896257),
                       softcap=facts.scale("final_logit_softcapping"))


def cohere2moe(facts):
    """Parallel with one norm; RoPE in dense layers and where there is a window; the mean with a shared expert."""
    facts.leave_predicting()
    facts.ignore("rope.freq_base_swa")
    kind = "rms" if facts.get("attention.layer_norm_rms_epsilon", 0.0, float) else "centred"
    sizes, n_dense = facts.heads(), facts.get("leading_dense_block_count", kind=int)
    rope = facts.rope(ROPE_NORMAL, sizes["d_head"])
    attentions = [Attention(**sizes, rope=rope if w or i < n_dense else None, window=w, out_bias=False)
                  for i, w in enumerate(facts.windows(4, dense_first=True, default=...))]
    n_shared, n_ff = facts.get("expert_shared_count", 0, int), facts.get("expert_feed_forward_length", kind=int)
    n_ff = n_ff or facts.n_ff
    each = facts.get("expert_shared_feed_forward_length", 0, int) or n_ff * n_shared
    shared = Dense(each, suffix="_shexp", bias=False) if n_shared else None
    experts = mixture(facts, n_ff, gating=gating(facts, SIGMOID), shared=shared, sum_scale=0.5,
                      normed=facts.get("expert_weights_norm", False, bool))
    blocks = after_dense(facts, attentions, experts, norm=kind, ffn_norm="", parallel=True)
    return Description(blocks, facts.eps("rms" if kind == "rms" else "layer"), norm=kind,
                       logit_scale=facts.scale("logit_scale", ...))


def llama4(facts):
    """Chunks and RoPE in three layers of four; the fourth sees all, with a temperature by position instead of RoPE."""
    facts.same("attention.sliding_window", CHUNK)
    sizes = facts.heads()
    rope = facts.rope(ROPE_NORMAL, sizes["d_head"])
    near = dataclasses.replace(rope, freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, rope.freq_base))
    qk_norm = "" if facts.get("expert_count", kind=int) == MAVERICK else "rms bare"
    attentions = []
    for i, w in enumerate(facts.windows(4, default=CHUNK)):
        rotated = dict(rope=near if w else rope, qk_norm=qk_norm, norm_after_rope=bool(qk_norm))
        attentions.append(Attention(**sizes, window=w, **({"temperature": True} if i % 4 == 3 else rotated)))
    n_ff = facts.positive("expert_feed_forward_length")
    experts = mixture(facts, n_ff, gating=SIGMOID, normed=False, before=True,
                      shared=Dense(n_ff, suffix="_shexp", bias=False))
    blocks = after_dense(facts, attentions, experts, facts.positive("interleave_moe_layer_step"))
    return Description(blocks, facts.eps(), temperature=(0.1, CHUNK, 1), chunked=True)


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
    experts, n_each = mixture(facts, facts.positive("expert_feed_forward_length")), facts.positive("experts_per_group")
    if experts.n_expert % n_each:
        raise facts.wrong("experts_per_group", n_each, f"a divisor of the {experts.n_expert} experts")
    feed_forward = Grove(experts, small, n_each, facts.between("expert_group_scale", 0.0, 1e6))
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps())


FAMILY = {"deepseek": deepseek, "dots1": dots1, "glm4moe": glm4moe, "bailingmoe": bailingmoe,
          "bailingmoe2": bailingmoe2, "ernie4_5-moe": ernie4_5_moe, "minimax-m2": minimax_m2,
          "hunyuan-moe": hunyuan_moe, "phimoe": phimoe, "dbrx": dbrx, "deepseek2-ocr": deepseek2_ocr,
          "exaone-moe": exaone_moe, "afmoe": afmoe, "grok": grok, "cohere2moe": cohere2moe,
          "llama4": llama4, "hy_v3": hy_v3, "arctic": arctic, "grovemoe": grovemoe}
