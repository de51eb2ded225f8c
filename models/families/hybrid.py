"""Decoders with attention layers and recurrent layers: Nemotron H, Falcon H1, Jamba, LFM2 with experts, PLaMo 2,
MiniMax 01."""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description, ParallelMixers
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX
from ggjit.models.blocks.lightning import Lightning, NormResidualBlock
from ggjit.models.blocks.moe import SIGMOID, gating, groups, mixture
from ggjit.models.blocks.short_conv import ShortConv
from ggjit.models.blocks.state_space import Mamba, MambaByHead
from ggjit.models.families.recurrent import mamba2_of, ssm, with_heads

NO_ROPE = "rope.dimension_count", "rope.freq_base"          # stated by converters
POSTS = {"attn_post": "post_attention_norm", "ffn_post": "post_ffw_norm"}


def nemotron_h(hparams):
    """One piece a layer: Mamba 2, attention without RoPE, or a feed-forward with squared ReLU."""
    hparams.leave_predicting()
    hparams.ignore(*NO_ROPE)
    kv, ff = hparams.per_layer("attention.head_count_kv"), hparams.per_layer("feed_forward_length")
    blocks = [Block(_one_piece(hparams, i, *sizes)) for i, sizes in enumerate(zip(kv, ff, strict=True))]
    stated = hparams.get("attention.layer_norm_rms_epsilon", None) is not None
    return Description(blocks, hparams.eps("rms" if stated else "layer"))


def _one_piece(hparams, i, n_head_kv, n_ff):
    if n_ff:
        return _squared_experts(hparams, i, n_ff) if hparams.get("expert_count", 0, int) else Dense(n_ff, "relu_sqr")
    if not n_head_kv:
        return mamba2_of(hparams)
    return Attention(**with_heads(hparams, n_head_kv), bias=None)


def _squared_experts(hparams, i, n_ff):
    """Experts without gates, that may read a shorter vector than the router and the shared expert."""
    hparams.ignore("expert_shared_count")
    hparams.same("expert_gating_func", SIGMOID)
    n_used = hparams.per_layer("expert_used_count")[i]
    n_each = hparams.per_layer("expert_feed_forward_length", 0)[i] or n_ff // max(n_used, 1)
    shared = Dense(hparams.positive("expert_shared_feed_forward_length"), "relu_sqr", suffix="_shexp", bias=False)
    return mixture(hparams, n_each, n_used, gating=SIGMOID, normed=hparams.get("expert_weights_norm", False, bool),
                   pick_bias=True, act="relu_sqr", n_latent=hparams.get("moe_latent_size", 0, int), shared=shared,
                   **groups(hparams))


def falcon_h1(hparams):
    """Attention and Mamba 2 side by side in every layer."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), out_bias=False)
    mamba = dataclasses.replace(mamba2_of(hparams), normed=hparams.has("blk.0.ssm_norm.weight"))
    return Description([Block(ParallelMixers(attention, mamba), Dense(hparams.n_ff))] * hparams.n_layer, hparams.eps())


def lfm2moe(hparams):
    """LFM2 with experts behind some dense layers."""
    conv, n_dense = ShortConv(hparams.positive("shortconv.l_cache")), hparams.get("leading_dense_block_count", 0, int)
    experts = mixture(hparams, hparams.positive("expert_feed_forward_length"), gating=gating(hparams, 0),
                      pick_bias=True)
    blocks = []
    for i, n_head_kv in enumerate(hparams.per_layer("attention.head_count_kv")):
        mixer = conv
        if n_head_kv:
            sizes = with_heads(hparams, n_head_kv)
            mixer = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms",
                              out_bias=False)
        blocks.append(Block(mixer, experts if i >= n_dense else Dense(hparams.n_ff, bias=False)))
    return Description(blocks, hparams.eps(), out_norm="token_embd_norm")


def jamba(hparams):
    """Mamba 1 with norms, attention without RoPE where the metadata says so; experts in some layers."""
    hparams.ignore(*NO_ROPE)
    mamba, blocks = Mamba(*ssm(hparams), norms="rms"), []
    for i, n_head_kv in enumerate(hparams.per_layer("attention.head_count_kv")):
        mixer = Attention(**with_heads(hparams, n_head_kv), out_bias=False) if n_head_kv else mamba
        routed = hparams.has(f"blk.{i}.ffn_gate_inp.weight")
        blocks.append(Block(mixer, mixture(hparams, hparams.n_ff, normed=False) if routed else
                            Dense(hparams.n_ff, bias=False)))
    return Description(blocks, hparams.eps())


def plamo2(hparams):
    """Mamba with heads, or attention with norms by head; norms after the blocks, too."""
    hparams.same("ssm.group_count", 0)
    d_inner, d_state, d_conv, n_head = ssm(hparams)
    if d_inner % n_head:
        raise hparams.wrong("ssm.time_step_rank", n_head, f"a divisor of the inner size {d_inner}")
    mamba, blocks = MambaByHead(d_inner, d_state, d_conv, n_head, max(64, hparams.n_embd // 16)), []
    for n_head_kv in hparams.per_layer("attention.head_count_kv"):
        mixer = mamba
        if n_head_kv:
            sizes = with_heads(hparams, n_head_kv)
            mixer = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True,
                              bias=False, out_bias=False, qk_norm="rms", qk_norm_over="heads",
                              scale=sizes["d_head_v"] ** -0.5)
        blocks.append(Block(mixer, Dense(hparams.n_ff, fused=True, bias=False), **POSTS))
    return Description(blocks, hparams.eps())


def minimax_01(hparams):
    """Linear attention with fixed decays in seven layers of eight; experts."""
    n, sizes = hparams.n_layer, hparams.heads()
    if n < 2:
        raise hparams.wrong("block_count", n, "at least 2")
    if sizes["d_head"] != sizes["d_head_v"]:
        raise hparams.wrong("attention.value_length", sizes["d_head_v"], f"attention.key_length, {sizes['d_head']}")
    every = hparams.positive("full_attention_interval", 8)
    linear = hparams.flags_per_layer("attention.recurrent_layers", None)
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), out_bias=False)
    feed_forward, scale = mixture(hparams, hparams.n_ff), hparams.between("residual_scale", 0.0, 1e6)
    blocks = []
    for i in range(n):
        is_linear = (i + 1) % every != 0 if linear[i] is None else linear[i]
        mixer = Lightning(sizes["n_head"], sizes["d_head"], 1.0 - i / (n - 1) + 1e-5) if is_linear else attention
        blocks.append(NormResidualBlock(mixer, feed_forward, scale))
    return Description(blocks, hparams.eps())


DECODERS = {"nemotron_h": nemotron_h, "nemotron_h_moe": nemotron_h, "falcon-h1": falcon_h1, "lfm2moe": lfm2moe,
            "jamba": jamba, "plamo2": plamo2, "minimax-01": minimax_01}
