"""Decoders with recurrent states, instead of a KV cache or in addition to it: Mamba, RWKV 6 and 7, LFM2, Granite
hybrid, Qwen 3 Next."""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.delta import DeltaRule
from ggjit.models.blocks.description import Block, Description, HalvedOutput
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import mixture
from ggjit.models.blocks.rwkv import ChannelMix, TimeMix, TimeMix6
from ggjit.models.blocks.short_conv import ShortConv
from ggjit.models.blocks.state_space import Mamba, Mamba2
from ggjit.models.families.llama import dense_or_experts, granite_shared

NO_ATTENTION = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def ssm(hparams):
    """(d_inner, d_state, d_conv, dt_rank)"""
    return [hparams.positive("ssm." + key) for key in ("inner_size", "state_size", "conv_kernel", "time_step_rank")]


def mamba(hparams):
    hparams.ignore(*NO_ATTENTION)
    mixer = Mamba(*ssm(hparams), norms="rms bare" if hparams.get("ssm.dt_b_c_rms", False, bool) else "")
    return Description([Block(mixer)] * hparams.n_layer, hparams.eps())


def mamba2_of(hparams):
    sizes, groups = ssm(hparams), hparams.positive("ssm.group_count")
    if sizes[0] % sizes[3] or sizes[3] % groups or sizes[0] % groups:
        raise hparams.wrong("ssm.time_step_rank", sizes[3],
                            f"a divisor of the inner size {sizes[0]}, and a multiple of the {groups} groups")
    return Mamba2(*sizes, groups)


def mamba2(hparams):
    hparams.ignore(*NO_ATTENTION)
    return Description([Block(mamba2_of(hparams))] * hparams.n_layer, hparams.eps())


def rwkv7(hparams):
    hparams.ignore("attention.head_count", "attention.head_count_kv")
    hparams.same("token_shift_count", 2)
    ranks = tuple(hparams.positive(f"attention.{key}_lora_rank") for key in
                  ("decay", "iclr", "value_residual_mix", "gate"))
    mixer = TimeMix(hparams.n_embd, _wkv_head(hparams), ranks)
    block = Block(mixer, ChannelMix(hparams.n_ff), norm="layer", ffn_norm="attn_norm_2")
    return Description([block] * hparams.n_layer, hparams.eps("layer"), norm="layer", embd_norm="token_embd_norm",
                       tied=False)


def _wkv_head(hparams):
    d_head = hparams.positive("wkv.head_size")
    if hparams.n_embd % d_head:
        raise hparams.wrong("wkv.head_size", d_head, f"a divisor of the embedding length {hparams.n_embd}")
    return d_head


def arwkv7(hparams):
    """RWKV 7's time mixing in Qwen 2."""
    hparams.ignore("attention.head_count", "attention.head_count_kv")
    hparams.same("token_shift_count", 1)
    ranks = tuple(hparams.positive(f"attention.{key}_lora_rank") for key in ("decay", "iclr", "value_residual_mix"))
    gate_rank = hparams.get("attention.gate_lora_rank", 0, int)
    ranks += gate_rank if hparams.has("blk.0.time_mix_g1.weight") else 0,
    mixer = TimeMix(hparams.n_embd, _wkv_head(hparams), ranks, hparams.has("blk.0.time_mix_ln.weight"))
    return Description([Block(mixer, Dense(hparams.n_ff, bias=False))] * hparams.n_layer, hparams.eps(), tied=False)


def rwkv6(hparams):
    """Every few layers what a layer gives on is rescaled, where the file says so."""
    hparams.ignore("attention.head_count", "attention.head_count_kv")
    hparams.same("token_shift_count", 2)
    d_head, every = _wkv_head(hparams), hparams.get("rescale_every_n_layers", 0, int)
    if every < 0:
        raise hparams.wrong("rescale_every_n_layers", every, "a number at least 0")
    mixer = TimeMix6(hparams.n_embd, d_head, hparams.n_embd // d_head, hparams.positive("time_mix_extra_dim"),
                     hparams.positive("time_decay_extra_dim"))
    block = Block(mixer, ChannelMix(hparams.n_ff, gated=True), norm="layer", ffn_norm="attn_norm_2")
    rescaled = dataclasses.replace(block, output_transform=HalvedOutput())
    blocks = [rescaled if every and (i + 1) % every == 0 else block for i in range(hparams.n_layer)]
    return Description(blocks, hparams.eps("layer"), norm="layer", embd_norm="token_embd_norm", tied=False)


def rwkv6qwen2(hparams):
    """RWKV 6's time mixing in Qwen 2, as gated linear attention."""
    hparams.same("token_shift_count", 1)
    hparams.same("rescale_every_n_layers", 0)
    hparams.ignore("attention.head_count")
    d_head = _wkv_head(hparams)
    heads = hparams.n_embd // d_head
    n_head_kv = hparams.get("attention.head_count_kv", 0, int) or heads
    if heads % n_head_kv:
        raise hparams.wrong("attention.head_count_kv", n_head_kv, f"a divisor of the {heads} heads")
    mixer = TimeMix6(hparams.n_embd, d_head, n_head_kv, hparams.positive("time_mix_extra_dim"),
                     hparams.positive("time_decay_extra_dim"), linear=True, bias=None)
    norm = "rms biased" if hparams.has("output_norm.bias") else "rms"
    return Description([Block(mixer, Dense(hparams.n_ff, bias=False))] * hparams.n_layer, hparams.eps(), norm=norm,
                       tied=False)


def with_heads(hparams, n_head_kv):
    """The sizes of Attention in a layer with so many heads of keys; other layers have none."""
    n_head, stated = max(hparams.per_layer("attention.head_count")), hparams.get("attention.key_length", 0, int)
    if not n_head or not n_head_kv or n_head % n_head_kv or (hparams.n_embd % n_head and not stated):
        raise hparams.wrong("attention.head_count", n_head, f"a multiple of {n_head_kv}, and a divisor of "
                                                          f"{hparams.n_embd}")
    d_head = hparams.positive("attention.key_length", hparams.n_embd // n_head)
    return {"n_head": n_head, "n_head_kv": n_head_kv, "d_head": d_head,
            "d_head_v": hparams.positive("attention.value_length", d_head)}


def lfm2(hparams):
    """Short convolutions, and attention where the metadata says so."""
    conv, window = ShortConv(hparams.positive("shortconv.l_cache")), hparams.get("attention.sliding_window", 0, int)
    blocks = []
    for n_head_kv in hparams.per_layer("attention.head_count_kv"):
        mixer = conv
        if n_head_kv:
            sizes = with_heads(hparams, n_head_kv)
            mixer = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms",
                              window=window, out_bias=False)
        blocks.append(Block(mixer, Dense(hparams.n_ff, bias=False)))
    return Description(blocks, hparams.eps(), out_norm="token_embd_norm")


def granite_hybrid(hparams):
    """Granite with Mamba 2 in most layers."""
    shared, rotates = (hparams.get("expert_shared_feed_forward_length", 0, int),
                       hparams.get("rope.scaling.finetuned", True, bool))
    blocks = []
    for n_head_kv in hparams.per_layer("attention.head_count_kv"):
        if n_head_kv:
            sizes = with_heads(hparams, n_head_kv)
            rope = hparams.rope(ROPE_NORMAL, sizes["d_head"])
            mixer = Attention(**sizes, rope=rope if rotates else None, scale=hparams.scale("attention.scale"))
        else:
            mixer = mamba2_of(hparams)
        blocks.append(Block(mixer, dense_or_experts(hparams, **granite_shared(shared)),
                            residual_scale=hparams.scale("residual_scale")))
    logit_scale = hparams.scale("logit_scale")
    return Description(blocks, hparams.eps(), embd_scale=hparams.scale("embedding_scale"),
                       logit_scale=1.0 / logit_scale if logit_scale else 0.0)


def qwen3next(hparams):
    """The gated delta rule in three layers of four, gated attention in the fourth; experts everywhere."""
    hparams.ignore("feed_forward_length")
    return _delta(hparams, _gated_experts(hparams))


def _gated_experts(hparams):
    shared = Dense(hparams.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    return mixture(hparams, hparams.positive("expert_feed_forward_length"), shared=shared, shared_gate=True)


def qwen35(hparams):
    """Qwen3-Next with other heads of keys and a dense feed-forward; for text its RoPE is the usual one."""
    hparams.leave_predicting()
    hparams.ignore("rope.dimension_sections")
    return _delta(hparams, Dense(hparams.n_ff, bias=False), apart=True)


def qwen35moe(hparams):
    hparams.leave_predicting()
    hparams.ignore("rope.dimension_sections", "feed_forward_length")
    return _delta(hparams, _gated_experts(hparams), apart=True)


def _delta(hparams, feed_forward, apart=False):
    d_inner, d_state, d_conv, n_head = ssm(hparams)
    groups = hparams.positive("ssm.group_count")
    if n_head % groups or d_inner != n_head * d_state:
        raise hparams.wrong("ssm.inner_size", d_inner, f"{n_head} heads of {d_state} in {groups} groups")
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms", gated=True,
                          out_bias=False)
    every, blocks = hparams.positive("full_attention_interval", 4), []
    for i in range(hparams.n_layer):
        delta = DeltaRule(groups, n_head, d_state, d_conv, hparams.has(f"blk.{i}.ssm_in.weight"), apart)
        blocks.append(Block(delta if (i + 1) % every else attention, feed_forward, ffn_norm="post_attention_norm"))
    return Description(blocks, hparams.eps())


DECODERS = {"mamba": mamba, "mamba2": mamba2, "rwkv7": rwkv7, "lfm2": lfm2, "granitehybrid": granite_hybrid,
            "qwen3next": qwen3next, "qwen35": qwen35, "qwen35moe": qwen35moe, "rwkv6": rwkv6, "rwkv6qwen2": rwkv6qwen2,
            "arwkv7": arwkv7}
