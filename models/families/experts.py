"""Mixtures of experts: the first layers are dense; in the others a router selects experts for each token, and in most
models one more expert computes every token.

DeepSeek 1 and its OCR model, dots1, GLM 4.5, Ling (bailingmoe), ERNIE 4.5, MiniMax M2, Hunyuan, Phi 3.5 MoE, DBRX,
Grok, LLaMA 4, HY V3, MiniMax M3, Arctic, Grove, and the experts of EXAONE, Arcee (afmoe) and Cohere.
"""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.block_indexer import BlockIndexer, BlockInputs, SparseAttention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.grove import Grove
from ggjit.models.blocks.hparams import LONG, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import SIGMOID, SOFTMAX, DenseBesideExperts, gating, groups, mixture
from ggjit.models.blocks.next_token import NextToken
from ggjit.models.families.common import rotated

OCR_BASE = 10000.0              # base of DeepSeek-OCR's RoPE
CHUNK = 8192                    # positions that LLaMA 4's layers with RoPE look at; its files do not say
MAVERICK = 128                  # experts of the LLaMA 4 without norms of queries and keys


def after_dense(hparams, attention, feed_forward, every=1, **block):
    """Blocks: `leading_dense_block_count` with dense feed-forwards, then one of `every` with experts.

    attention: of all layers, or a list.  A layer whose file holds a bias for picking experts uses it.
    """
    n_dense, blocks = hparams.get("leading_dense_block_count", 0, int), []
    for i in range(hparams.n_layer):
        if i < n_dense or (i + 1) % every:
            f = Dense(hparams.n_ff, bias=False)
        else:
            f = dataclasses.replace(feed_forward, pick_bias=hparams.has(f"blk.{i}.exp_probs_b.bias"))
        blocks.append(Block(attention[i] if isinstance(attention, list) else attention, f, **block))
    return blocks


def routed(hparams, kind=SOFTMAX, normed=False, n_shared=None, **switches):
    """Experts as the metadata states them.  kind: of gating, where it states none; n_shared: of shared experts."""
    n_ff = hparams.positive("expert_feed_forward_length")
    n_shared = hparams.positive("expert_shared_count") if n_shared is None else n_shared
    shared = Dense(n_ff * n_shared, suffix="_shexp", bias=False) if n_shared else None
    return mixture(hparams, n_ff, gating=gating(hparams, kind), normed=hparams.get("expert_weights_norm", normed, bool),
                   **{"shared": shared, **switches})


def next_token(hparams, attention, feed_forward, **block):
    """The NextToken of the first layer of experts behind the network; None: the file has none."""
    i = hparams.n_layer
    if not hparams.n_predicting or not hparams.has(f"blk.{i}.nextn.eh_proj.weight"):
        return None
    biased = hparams.has(f"blk.{i}.exp_probs_b.bias") or hparams.has(f"blk.{i}.exp_probs_b")
    return NextToken(Block(attention, dataclasses.replace(feed_forward, pick_bias=biased), **block), i)


def deepseek(hparams):
    attention = rotated(hparams, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    return Description(after_dense(hparams, attention, routed(hparams)), hparams.eps(), tied=False)


def deepseek2_ocr(hparams):
    """The text part of DeepSeek-OCR: DeepSeek 1 with another RoPE."""
    hparams.ignore("rope.dimension_count", "attention.q_lora_rank")
    sizes = hparams.heads()
    if hparams.freq_base != OCR_BASE:
        raise hparams.wrong("rope.freq_base", hparams.freq_base, OCR_BASE)
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="", kinds=("none", "linear"), n_dims=sizes["d_head"])
    attention = Attention(**sizes, rope=rope, out_bias=False)
    return Description(after_dense(hparams, attention, routed(hparams)), hparams.eps())


def exaone_moe(hparams):
    """Norms of every head's query and key; RoPE only where there is a window."""
    hparams.leave_predicting()
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"])
    hparams.ignore("rope.freq_base_swa", "expert_shared_count")
    n_ff = hparams.get("expert_shared_feed_forward_length", 0, int) or hparams.positive("expert_feed_forward_length")
    experts = routed(hparams, n_shared=0, shared=Dense(n_ff, suffix="_shexp", bias=False))
    attentions = [Attention(**sizes, rope=rope if w else None, window=w, qk_norm="rms", out_bias=False)
                  for w in hparams.windows(4, default=...)]
    return Description(after_dense(hparams, attentions, experts), hparams.eps(), tied=False)


def afmoe(hparams):
    """Norms before and after, windows, gated attention; every fourth layer has no RoPE."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope)
    attentions = [Attention(**sizes, rope=None if i % 4 == 3 else near if w else rope, window=w, qk_norm="rms",
                            gate="sigmoid", out_bias=False) for i, w in enumerate(hparams.windows(4))]
    n_shared = hparams.get("expert_shared_count", kind=int)
    blocks = after_dense(hparams, attentions, routed(hparams, SIGMOID, n_shared=n_shared),
                         attn_post="post_attention_norm", ffn_post="post_ffw_norm")
    return Description(blocks, hparams.eps(), embd_scale=math.sqrt(hparams.n_embd))


def grok(hparams):
    """Soft caps, norms before and after, experts with a GELU gate; Grok 2 has a dense network beside them."""
    # llama.cpp reads this key and does not use it
    hparams.ignore("router_logit_softcapping", "attention.temperature_length", "rope.scaling.yarn_attn_factor")
    sizes, softcap = hparams.heads(), hparams.scale("attn_logit_softcapping", 30.0)
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="", beta_fast=8.0)
    attention = Attention(**sizes, rope=rope, softcap=softcap, out_bias=False,
                          scale=hparams.scale("attention.output_scale", 0.08838834764831845))
    n_ff = hparams.get("expert_feed_forward_length", 0, int) or hparams.n_ff
    blocks = []
    for i in range(hparams.n_layer):
        beside = Dense(hparams.n_ff, "geglu", bias=False) if hparams.has(f"blk.{i}.ffn_up.weight") else None
        experts = mixture(hparams, n_ff, act="geglu", shared=beside, sum_scale=math.sqrt(0.5))
        post = "layer_output_norm" if hparams.has(f"blk.{i}.layer_output_norm.weight") else "post_ffw_norm"
        blocks.append(Block(attention, experts, attn_post="attn_output_norm", ffn_post=post))
    return Description(blocks, hparams.eps(), embd_scale=hparams.scale("embedding_scale", 78.38367176906169),
                       logit_scale=hparams.scale("logit_scale", 0.5773502691896257),
                       softcap=hparams.scale("final_logit_softcapping"))


def cohere2moe(hparams):
    """Parallel with one norm; RoPE in dense layers and where there is a window; the mean with a shared expert."""
    hparams.leave_predicting()
    hparams.ignore("rope.freq_base_swa")
    kind = "rms" if hparams.get("attention.layer_norm_rms_epsilon", 0.0, float) else "centred"
    sizes, n_dense = hparams.heads(), hparams.get("leading_dense_block_count", kind=int)
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"])
    attentions = [Attention(**sizes, rope=rope if w or i < n_dense else None, window=w, out_bias=False)
                  for i, w in enumerate(hparams.windows(4, dense_first=True, default=...))]
    n_shared, n_ff = hparams.get("expert_shared_count", 0, int), hparams.get("expert_feed_forward_length", kind=int)
    n_ff = n_ff or hparams.n_ff
    each = hparams.get("expert_shared_feed_forward_length", 0, int) or n_ff * n_shared
    shared = Dense(each, suffix="_shexp", bias=False) if n_shared else None
    experts = mixture(hparams, n_ff, gating=gating(hparams, SIGMOID), shared=shared, sum_scale=0.5,
                      normed=hparams.get("expert_weights_norm", False, bool))
    blocks = after_dense(hparams, attentions, experts, norm=kind, ffn_norm="", parallel=True)
    return Description(blocks, hparams.eps("rms" if kind == "rms" else "layer"), norm=kind,
                       logit_scale=hparams.scale("logit_scale", ...))


def llama4(hparams):
    """Chunks and RoPE in three layers of four; the fourth sees all, with a temperature by position instead of RoPE."""
    hparams.same("attention.sliding_window", CHUNK)
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"])
    near = hparams.window_rope(rope)
    qk_norm = "" if hparams.get("expert_count", kind=int) == MAVERICK else "rms bare"
    attentions = []
    for i, w in enumerate(hparams.windows(4, default=CHUNK)):
        rotated = dict(rope=near if w else rope, qk_norm=qk_norm, norm_after_rope=bool(qk_norm))
        attentions.append(Attention(**sizes, window=w, **({"temperature": True} if i % 4 == 3 else rotated)))
    n_ff = hparams.positive("expert_feed_forward_length")
    experts = mixture(hparams, n_ff, gating=SIGMOID, normed=False, before=True,
                      shared=Dense(n_ff, suffix="_shexp", bias=False))
    blocks = after_dense(hparams, attentions, experts, hparams.positive("interleave_moe_layer_step"))
    return Description(blocks, hparams.eps(), temperature=(0.1, CHUNK, 1), chunked=True)


def dots1(hparams):
    """Norms of every head's query and key."""
    attention = rotated(hparams, ROPE_NEOX, bias=False, out_bias=False, qk_norm="rms")
    return Description(after_dense(hparams, attention, routed(hparams)), hparams.eps(), tied=False)


def glm4moe(hparams):
    """Sigmoid gating; the second norm stands where others have one after attention."""
    hparams.leave_predicting()
    normed = "rms" if hparams.has("blk.0.attn_q_norm.weight") else ""
    attention = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm=normed)
    parts = attention, routed(hparams, SIGMOID)
    blocks = after_dense(hparams, *parts, ffn_norm="post_attention_norm")
    return Description(blocks, hparams.eps(), next_token=next_token(hparams, *parts, ffn_norm="post_attention_norm"))


def bailingmoe(hparams):
    attention = rotated(hparams, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    hparams.ignore("feed_forward_length")
    feed_forward = routed(hparams)
    return Description([Block(attention, feed_forward)] * hparams.n_layer, hparams.eps(), tied=False)


def bailingmoe2(hparams):
    """Fused queries, keys and values with norms; experts lie in groups."""
    hparams.leave_predicting()
    attention = rotated(hparams, ROPE_NEOX, fused=True, bias=False, out_bias=False, qk_norm="rms")
    each = hparams.get("expert_shared_feed_forward_length", 0, int) or hparams.positive("expert_feed_forward_length")
    shared = Dense(each * hparams.positive("expert_shared_count"), suffix="_shexp", bias=False)
    feed_forward = routed(hparams, n_shared=0, shared=shared, **groups(hparams))
    return Description(after_dense(hparams, attention, feed_forward), hparams.eps(), tied=False)


def ernie4_5_moe(hparams):
    """One layer of `interleave_moe_layer_step` has experts, picked with a bias."""
    hparams.ignore("expert_shared_count")
    n_ff = hparams.get("expert_shared_feed_forward_length", 0, int)
    shared = Dense(n_ff, suffix="_shexp", bias=False) if n_ff else None
    attention = rotated(hparams, ROPE_NORMAL, out_bias=False)
    feed_forward = routed(hparams, normed=True, n_shared=0, shared=shared)
    blocks = after_dense(hparams, attention, feed_forward, hparams.positive("interleave_moe_layer_step"))
    return Description(blocks, hparams.eps())


def minimax_m2(hparams):
    """Norms of queries and keys over all heads, half of a head rotated."""
    hparams.ignore("feed_forward_length")
    attention = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="all")
    blocks = after_dense(hparams, attention, routed(hparams, SIGMOID, normed=True, n_shared=0))
    return Description(blocks, hparams.eps(), tied=False)


def minimax_m3(hparams):
    """Norms of every head's query and key, a clamped gate; layers of experts look at blocks of positions."""
    plain = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm="rms")
    n_index, d_index, n_top, size, n_local = (hparams.positive(f"attention.indexer.{name}") for name in (
        "head_count", "key_length", "top_k", "block_size", "local_blocks"))
    if n_index != plain.n_head_kv or plain.rope.n_dims > d_index:
        raise hparams.wrong("attention.indexer.head_count", n_index, f"{plain.n_head_kv}, of {plain.rope.n_dims} "
                            f"numbers or more each")
    index = BlockIndexer(n_index, d_index, n_top, size, plain.rope)
    sparse = SparseAttention(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}, indexer=index)
    n_dense = hparams.get("leading_dense_block_count", 0, int)
    n_ff = hparams.positive("expert_feed_forward_length") * hparams.positive("expert_shared_count")
    experts = routed(hparams, n_shared=0, act="swiglu_oai", pick_bias=True,
                     shared=Dense(n_ff, "swiglu_oai", suffix="_shexp", bias=False))
    blocks = [Block(plain, Dense(hparams.n_ff, "swiglu_oai", bias=False)) if i < n_dense else Block(sparse, experts)
              for i in range(hparams.n_layer)]
    return Description(blocks, hparams.eps(), tied=False, inputs=(BlockInputs(size, n_local),))


def hunyuan_moe(hparams):
    """Norms of heads after RoPE."""
    hparams.ignore("expert_feed_forward_length", "expert_shared_count")
    attention = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm="rms", norm_after_rope=True)
    shared = Dense(hparams.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    feed_forward = mixture(hparams, hparams.n_ff, shared=shared)
    return Description([Block(attention, feed_forward)] * hparams.n_layer, hparams.eps())


def phimoe(hparams):
    """RMS norms with biases, RoPE with factors by context size."""
    attention = rotated(hparams, ROPE_NEOX, LONG, bias=True, out_bias=True)
    block = Block(attention, mixture(hparams, hparams.n_ff), norm="rms biased")
    hparams.ignore("attention.sliding_window")
    return Description([block] * hparams.n_layer, hparams.eps(), norm="rms biased", tied=False, output_bias=True)


def dbrx(hparams):
    """Layer norms without biases; queries, keys and values are kept within limits."""
    attention = rotated(hparams, ROPE_NEOX, fused=True, bias=False, out_bias=False,
                         clamp=hparams.scale("attention.clamp_kqv"))
    block = Block(attention, mixture(hparams, hparams.n_ff), norm="centred", ffn_norm="attn_output_norm")
    return Description([block] * hparams.n_layer, hparams.eps("layer"), norm="centred", tied=False)


def hy_v3(hparams):
    """Queries and keys have norms for each head; one expert is shared; layers without a router are dense."""
    hparams.leave_predicting()
    hparams.ignore("leading_dense_block_count", "expert_shared_count", "feed_forward_length")
    attention = rotated(hparams, ROPE_NEOX, qk_norm="rms")
    n_shared = hparams.get("expert_shared_feed_forward_length", 0,
                           int) or hparams.positive("expert_feed_forward_length")
    experts = routed(hparams, SIGMOID, n_shared=0, shared=Dense(n_shared, suffix="_shexp", bias=False),
                     **groups(hparams))
    blocks = []
    for i in range(hparams.n_layer):
        f = dataclasses.replace(experts, pick_bias=hparams.has(f"blk.{i}.exp_probs_b"))
        blocks.append(Block(attention, f if hparams.has(f"blk.{i}.ffn_gate_inp.weight") else
                            Dense(hparams.n_ff, bias=False)))
    return Description(blocks, hparams.eps(), next_token=next_token(hparams, attention, experts))


def arctic(hparams):
    """A dense feed-forward, and experts beside the whole layer."""
    attention = rotated(hparams, ROPE_NORMAL, out_bias=False)
    feed_forward = DenseBesideExperts(Dense(hparams.n_embd, bias=False),
                                      mixture(hparams, hparams.n_ff, **groups(hparams)))
    return Description([Block(attention, feed_forward)] * hparams.n_layer, hparams.eps())


def grovemoe(hparams):
    """Qwen 3's experts, and small ones that groups of them share, which read what the first gave."""
    hparams.ignore("feed_forward_length")
    attention = rotated(hparams, ROPE_NEOX, qk_norm="rms")
    small = hparams.get("expert_chunk_feed_forward_length", 0, int) or attention.d_head
    experts, n_each = mixture(hparams,
                              hparams.positive("expert_feed_forward_length")), hparams.positive("experts_per_group")
    if experts.n_expert % n_each:
        raise hparams.wrong("experts_per_group", n_each, f"a divisor of the {experts.n_expert} experts")
    feed_forward = Grove(experts, small, n_each, hparams.between("expert_group_scale", 0.0, 1e6))
    return Description([Block(attention, feed_forward)] * hparams.n_layer, hparams.eps())


DECODERS = {"deepseek": deepseek, "dots1": dots1, "glm4moe": glm4moe, "bailingmoe": bailingmoe,
            "bailingmoe2": bailingmoe2, "ernie4_5-moe": ernie4_5_moe, "minimax-m2": minimax_m2,
            "minimax-m3": minimax_m3,
            "hunyuan-moe": hunyuan_moe, "phimoe": phimoe, "dbrx": dbrx, "deepseek2-ocr": deepseek2_ocr,
            "exaone-moe": exaone_moe, "afmoe": afmoe, "grok": grok, "cohere2moe": cohere2moe,
            "llama4": llama4, "hy_v3": hy_v3, "arctic": arctic, "grovemoe": grovemoe}
