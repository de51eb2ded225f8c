"""Decoders with states instead of a cache, or beside one: Mamba, RWKV 6 and 7, LFM2, Granite hybrid, Qwen 3 Next."""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.delta import DeltaRule
from ggjit.models.blocks.description import Block, Description, Halved
from ggjit.models.blocks.facts import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.moe import mixture
from ggjit.models.blocks.rwkv import ChannelMix, TimeMix, TimeMix6
from ggjit.models.blocks.short_conv import ShortConv
from ggjit.models.blocks.state_space import Mamba, Mamba2
from ggjit.models.families.llama import dense_or_experts, granite_shared

NO_ATTENTION = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def ssm(facts):
    """(d_inner, d_state, d_conv, dt_rank)"""
    return [facts.positive("ssm." + key) for key in ("inner_size", "state_size", "conv_kernel", "time_step_rank")]


def mamba(facts):
    facts.ignore(*NO_ATTENTION)
    mixer = Mamba(*ssm(facts), norms="rms bare" if facts.get("ssm.dt_b_c_rms", False, bool) else "")
    return Description([Block(mixer)] * facts.n_layer, facts.eps())


def mamba2_of(facts):
    sizes, groups = ssm(facts), facts.positive("ssm.group_count")
    if sizes[0] % sizes[3] or sizes[3] % groups or sizes[0] % groups:
        raise facts.wrong("ssm.time_step_rank", sizes[3],
                          f"a divisor of the inner size {sizes[0]}, and a multiple of the {groups} groups")
    return Mamba2(*sizes, groups)


def mamba2(facts):
    facts.ignore(*NO_ATTENTION)
    return Description([Block(mamba2_of(facts))] * facts.n_layer, facts.eps())


def rwkv7(facts):
    facts.ignore("attention.head_count", "attention.head_count_kv")
    facts.same("token_shift_count", 2)
    ranks = tuple(facts.positive(f"attention.{key}_lora_rank") for key in
                  ("decay", "iclr", "value_residual_mix", "gate"))
    mixer = TimeMix(facts.n_embd, _wkv_head(facts), ranks)
    block = Block(mixer, ChannelMix(facts.n_ff), norm="layer", ffn_norm="attn_norm_2")
    return Description([block] * facts.n_layer, facts.eps("layer"), norm="layer", embd_norm="token_embd_norm",
                       tied=False)


def _wkv_head(facts):
    d_head = facts.positive("wkv.head_size")
    if facts.n_embd % d_head:
        raise facts.wrong("wkv.head_size", d_head, f"a divisor of the embedding length {facts.n_embd}")
    return d_head


def arwkv7(facts):
    """RWKV 7's time mixing in Qwen 2."""
    facts.ignore("attention.head_count", "attention.head_count_kv")
    facts.same("token_shift_count", 1)
    ranks = tuple(facts.positive(f"attention.{key}_lora_rank") for key in ("decay", "iclr", "value_residual_mix"))
    gate_rank = facts.get("attention.gate_lora_rank", 0, int)
    ranks += gate_rank if facts.has("blk.0.time_mix_g1.weight") else 0,
    mixer = TimeMix(facts.n_embd, _wkv_head(facts), ranks, facts.has("blk.0.time_mix_ln.weight"))
    return Description([Block(mixer, Dense(facts.n_ff, bias=False))] * facts.n_layer, facts.eps(), tied=False)


def rwkv6(facts):
    """Every few layers what a layer gives on is halved, where the file says so."""
    facts.ignore("attention.head_count", "attention.head_count_kv")
    facts.same("token_shift_count", 2)
    d_head, every = _wkv_head(facts), facts.get("rescale_every_n_layers", 0, int)
    if every < 0:
        raise facts.wrong("rescale_every_n_layers", every, "a number at least 0")
    mixer = TimeMix6(facts.n_embd, d_head, facts.n_embd // d_head, facts.positive("time_mix_extra_dim"),
                     facts.positive("time_decay_extra_dim"))
    block = Block(mixer, ChannelMix(facts.n_ff, gated=True), norm="layer", ffn_norm="attn_norm_2")
    halved = dataclasses.replace(block, finish=Halved())
    blocks = [halved if every and (i + 1) % every == 0 else block for i in range(facts.n_layer)]
    return Description(blocks, facts.eps("layer"), norm="layer", embd_norm="token_embd_norm", tied=False)


def rwkv6qwen2(facts):
    """RWKV 6's time mixing in Qwen 2, as gated linear attention."""
    facts.same("token_shift_count", 1)
    facts.same("rescale_every_n_layers", 0)
    facts.ignore("attention.head_count")
    d_head = _wkv_head(facts)
    heads = facts.n_embd // d_head
    n_head_kv = facts.get("attention.head_count_kv", 0, int) or heads
    if heads % n_head_kv:
        raise facts.wrong("attention.head_count_kv", n_head_kv, f"a divisor of the {heads} heads")
    mixer = TimeMix6(facts.n_embd, d_head, n_head_kv, facts.positive("time_mix_extra_dim"),
                     facts.positive("time_decay_extra_dim"), linear=True, bias=None)
    norm = "rms biased" if facts.has("output_norm.bias") else "rms"
    return Description([Block(mixer, Dense(facts.n_ff, bias=False))] * facts.n_layer, facts.eps(), norm=norm,
                       tied=False)


def with_heads(facts, n_head_kv):
    """The sizes of Attention in a layer with so many heads of keys; other layers have none."""
    n_head, stated = max(facts.per_layer("attention.head_count")), facts.get("attention.key_length", 0, int)
    if not n_head or not n_head_kv or n_head % n_head_kv or (facts.n_embd % n_head and not stated):
        raise facts.wrong("attention.head_count", n_head, f"a multiple of {n_head_kv}, and a divisor of "
                                                          f"{facts.n_embd}")
    d_head = facts.positive("attention.key_length", facts.n_embd // n_head)
    return {"n_head": n_head, "n_head_kv": n_head_kv, "d_head": d_head,
            "d_head_v": facts.positive("attention.value_length", d_head)}


def lfm2(facts):
    """Short convolutions, and attention where the metadata says so."""
    conv, window = ShortConv(facts.positive("shortconv.l_cache")), facts.get("attention.sliding_window", 0, int)
    blocks = []
    for n_head_kv in facts.per_layer("attention.head_count_kv"):
        mixer = conv
        if n_head_kv:
            sizes = with_heads(facts, n_head_kv)
            mixer = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms",
                              window=window, out_bias=False)
        blocks.append(Block(mixer, Dense(facts.n_ff, bias=False)))
    return Description(blocks, facts.eps(), out_norm="token_embd_norm")


def granite_hybrid(facts):
    """Granite with Mamba 2 in most layers."""
    shared, rotates = (facts.get("expert_shared_feed_forward_length", 0, int),
                       facts.get("rope.scaling.finetuned", True, bool))
    blocks = []
    for n_head_kv in facts.per_layer("attention.head_count_kv"):
        if n_head_kv:
            sizes = with_heads(facts, n_head_kv)
            rope = facts.rope(ROPE_NORMAL, sizes["d_head"])
            mixer = Attention(**sizes, rope=rope if rotates else None, scale=facts.scale("attention.scale"))
        else:
            mixer = mamba2_of(facts)
        blocks.append(Block(mixer, dense_or_experts(facts, **granite_shared(shared)),
                            residual_scale=facts.scale("residual_scale")))
    logit_scale = facts.scale("logit_scale")
    return Description(blocks, facts.eps(), embd_scale=facts.scale("embedding_scale"),
                       logit_scale=1.0 / logit_scale if logit_scale else 0.0)


def qwen3next(facts):
    """The gated delta rule in three layers of four, gated attention in the fourth; experts everywhere."""
    facts.ignore("feed_forward_length")
    return _delta(facts, _gated_experts(facts))


def _gated_experts(facts):
    shared = Dense(facts.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    return mixture(facts, facts.positive("expert_feed_forward_length"), shared=shared, shared_gate=True)


def qwen35(facts):
    """Qwen3-Next with other heads of keys and a dense feed-forward; for text its RoPE is the usual one."""
    facts.leave_predicting()
    facts.ignore("rope.dimension_sections")
    return _delta(facts, Dense(facts.n_ff, bias=False), apart=True)


def qwen35moe(facts):
    facts.leave_predicting()
    facts.ignore("rope.dimension_sections", "feed_forward_length")
    return _delta(facts, _gated_experts(facts), apart=True)


def _delta(facts, feed_forward, apart=False):
    d_inner, d_state, d_conv, n_head = ssm(facts)
    groups = facts.positive("ssm.group_count")
    if n_head % groups or d_inner != n_head * d_state:
        raise facts.wrong("ssm.inner_size", d_inner, f"{n_head} heads of {d_state} in {groups} groups")
    sizes = facts.heads()
    attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms", gated=True,
                          out_bias=False)
    every, blocks = facts.positive("full_attention_interval", 4), []
    for i in range(facts.n_layer):
        delta = DeltaRule(groups, n_head, d_state, d_conv, facts.has(f"blk.{i}.ssm_in.weight"), apart)
        blocks.append(Block(delta if (i + 1) % every else attention, feed_forward, ffn_norm="post_attention_norm"))
    return Description(blocks, facts.eps())


FAMILY = {"mamba": mamba, "mamba2": mamba2, "rwkv7": rwkv7, "lfm2": lfm2, "granitehybrid": granite_hybrid,
          "qwen3next": qwen3next, "qwen35": qwen35, "qwen35moe": qwen35moe, "rwkv6": rwkv6, "rwkv6qwen2": rwkv6qwen2,
          "arwkv7": arwkv7}
