"""Architectures of Hugging Face folders: metadata from config.json, and which change their tensors need.

Names of tensors and keys come from the gguf package, the changes from tensors.py; what is here is the rest, as
llama.cpp's conversion has it.
"""
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.models.convert.tensors import (
    chain,
    ernie_fused,
    falcon_heads_kv,
    falcon_qkv,
    fused_experts,
    fused_qkv,
    gated_layers,
    gpt_oss_change,
    granite_experts,
    internlm_qkv,
    latent_change,
    mamba2_change,
    mamba_change,
    norms_change,
    pairs_change,
    qwen3next_change,
    rwkv7_change,
    short_conv_change,
    transposed,
    unchanged,
)
from ggjit.ops.core.errors import ModelError, NotSupported

NOT_WEIGHTS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
RECURRENT = ("mamba", "linear_attention")       # layer_types without attention
NO_LIMIT = 1 << 20      # context length of models without one


class Config:
    """config.json: `config["hidden_size"]` or the first of several names.  Errors: ModelError with the path."""

    def __init__(self, path, values):
        self.path, self.values = path, values | (values.get("text_config") or {})
        self.file_type = 0              # general.file_type, known when the type is

    def get(self, *names, default=None):
        return next((self.values[n] for n in names if self.values.get(n) is not None), default)

    def __getitem__(self, names):
        value = self.get(*(names if isinstance(names, tuple) else (names,)))
        if value is None:
            raise ModelError(f"{self.path}: {names!r} is missing; fetch the folder again")
        return value

    @property
    def n_layer(self):
        return self["num_hidden_layers", "n_layer", "n_layers", "num_layers"]

    @property
    def n_expert(self):
        return self.get("num_local_experts", "num_experts", "n_routed_experts", default=0)

    @property
    def head_dim(self):
        return self.get("head_dim") or self["hidden_size", "n_embd"] // self["num_attention_heads", "n_head"]

    @property
    def ssm_groups(self):
        return self.get("mamba_n_groups", "n_groups", default=1)

    def rope(self):
        """rope_parameters, or what older files say of it."""
        rope = dict(self.get("rope_parameters", "rope_scaling", default={}))
        if not {"full_attention", "sliding_attention"} & set(rope):
            mirrored = {"rope_theta": self.get("rope_theta", "global_rope_theta", "rotary_emb_base"),
                        "rope_type": rope.get("type"),
                        "partial_rotary_factor": self.get("partial_rotary_factor", "rotary_pct", "rope_pct"),
                        "original_max_position_embeddings": self.get("original_max_position_embeddings")}
            rope = {k: v for k, v in mirrored.items() if v is not None} | rope
            if (local := self.get("rope_local_base_freq", "local_rope_theta")) is not None:
                rope["sliding_attention"] = {"rope_theta": local}
        return rope

    def n_rotated(self, default=1.0):
        """Numbers of a head that RoPE turns.  default: their part, where the file does not say."""
        rope = self.rope()
        return int(rope.get("full_attention", rope).get("partial_rotary_factor", default) * self.head_dim)

    def near(self, every):
        """[does layer i look at a window?], as layer_types says; else all but one of so many."""
        kinds = self.get("layer_types", default=["sliding_attention" if (i + 1) % every else "full_attention"
                                                 for i in range(self.n_layer)])
        return [kind == "sliding_attention" for kind in kinds]

    def refuse(self, what):
        raise NotSupported(f"{self.path}: {what}, which GGUF has no form for in this architecture; take another model")


# ---------------------------------------------------------------- metadata
def stated(w, c, *what):
    """Add what config.json says: (name of the writer's method, names of the key...)."""
    for add, *names in what:
        if (value := c.get(*names)) is not None:
            getattr(w, "add_" + add)(value)


def common(w, c, gguf):
    """What most architectures state."""
    w.add_block_count(c.n_layer)
    stated(w, c, ("context_length", "max_position_embeddings", "n_ctx", "n_positions", "max_length",
                  "max_sequence_length", "model_max_length"),
           ("embedding_length", "hidden_size", "n_embd"),
           ("feed_forward_length", "intermediate_size", "n_inner", "hidden_dim"),
           ("head_count", "num_attention_heads", "n_head", "n_heads"),
           ("head_count_kv", "num_key_value_heads", "n_kv_heads"))
    rope = c.rope()
    full = rope.get("full_attention", rope)
    _rope_scaling(w, full, gguf)
    if (theta := full.get("rope_theta")) is not None:
        w.add_rope_freq_base(theta)
    if (local := rope.get("sliding_attention", {}).get("rope_theta")) is not None:
        w.add_float32(f"{w.arch}.rope.freq_base_swa", local)
    stated(w, c, ("layer_norm_rms_eps", "rms_norm_eps", "norm_eps"),
           ("layer_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
           ("expert_count", "num_local_experts", "num_experts"), ("expert_used_count", "num_experts_per_tok"),
           ("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group"),
           ("key_length", "head_dim"), ("value_length", "head_dim"))
    if (score := c.get("score_function", "scoring_func", "moe_router_activation_func")) is not None:
        w.add_expert_gating_func(gguf.ExpertGatingFuncType[score.upper()])
    w.add_file_type(c.file_type)


def _rope_scaling(w, rope, gguf):
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in (None, "default", "dynamic", "llama3"):
        return
    if kind in ("su", "longrope"):
        w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    elif kind in ("linear", "yarn") and factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        w.add_rope_scaling_factor(factor)
        if kind == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for add, *names in ((w.add_rope_scaling_yarn_ext_factor, "extrapolation_factor"),
                                (w.add_rope_scaling_yarn_attn_factor, "attention_factor", "attn_factor"),
                                (w.add_rope_scaling_yarn_beta_fast, "beta_fast"),
                                (w.add_rope_scaling_yarn_beta_slow, "beta_slow")):
                value = next((rope[n] for n in names if rope.get(n) is not None), None)
                if value is not None:
                    add(value)
    else:
        raise NotSupported(f"RoPE scaling {kind!r} has no form in GGUF")


def llama(w, c, gguf):
    common(w, c, gguf)
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c.head_dim)


def granite(w, c, gguf):
    llama(w, c, gguf)
    stated(w, c, ("attention_scale", "attention_multiplier"), ("embedding_scale", "embedding_multiplier"),
           ("residual_scale", "residual_multiplier"), ("logit_scale", "logits_scaling"))
    if c.get("shared_intermediate_size") and c.n_expert:
        w.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])


def smollm3(w, c, gguf):
    turned = c.get("no_rope_layers", default=[(i + 1) % 4 > 0 for i in range(c.n_layer)])
    if [bool(t) for t in turned] != [(i + 1) % 4 > 0 for i in range(c.n_layer)]:
        c.refuse("RoPE is left out of other layers than every fourth (no_rope_layers)")
    llama(w, c, gguf)


def rotated(default=1.0):
    """Common, and how much of a head rotates."""
    def metadata(w, c, gguf):
        common(w, c, gguf)
        w.add_rope_dimension_count(c.n_rotated(default))
    return metadata


def moe(w, c, gguf):
    common(w, c, gguf)
    stated(w, c, ("expert_feed_forward_length", "moe_intermediate_size"),
           ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"))


def qwen3_moe(w, c, gguf):
    if c.get("norm_topk_prob") is False:
        raise NotSupported(f"{c.path}: norm_topk_prob is false, but GGUF's qwen3moe always norms the experts' weights")
    moe(w, c, gguf)


def olmoe(w, c, gguf):
    common(w, c, gguf)
    w.add_layer_norm_rms_eps(1e-5)


def gemma(w, c, gguf):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c.n_layer)
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads", "num_attention_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_file_type(c.file_type)


def gemma2(w, c, gguf):
    gemma(w, c, gguf)
    w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    w.add_final_logit_softcapping(c["final_logit_softcapping"])
    w.add_sliding_window(c["sliding_window"])


def gemma3(w, c, gguf):
    common(w, c, gguf)
    w.add_context_length(c.get("max_position_embeddings", default=131072))
    w.add_head_count(c.get("num_attention_heads", default=8))
    w.add_layer_norm_rms_eps(c.get("rms_norm_eps", default=1e-6))
    w.add_key_length(c.get("head_dim", default=256))
    w.add_value_length(c.get("head_dim", default=256))
    rope = c.rope()
    w.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 1_000_000.0))
    if cap := c.get("final_logit_softcapping"):
        w.add_final_logit_softcapping(cap)
    if c.get("sliding_window_pattern") != 1:
        w.add_sliding_window(c["sliding_window"])
    w.add_head_count_kv(c.get("num_key_value_heads", default=4))


def phi3(w, c, gguf):
    rope = c.rope()
    w.add_context_length(c["max_position_embeddings"])
    w.add_rope_scaling_orig_ctx_len(_original_ctx(c))
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_block_count(c.n_layer)
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"])
                               // c["num_attention_heads"])
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_file_type(c.file_type)
    w.add_sliding_window(c.get("sliding_window", default=0))
    if rope.get("long_factor"):
        scale = c["max_position_embeddings"] / _original_ctx(c)
        grown = math.sqrt(1 + math.log(scale) / math.log(_original_ctx(c))) if scale > 1 else 1.0
        w.add_rope_scaling_attn_factors(grown)


def _original_ctx(c):
    return c.rope().get("original_max_position_embeddings") or c["max_position_embeddings"]


def olmo2(w, c, gguf):
    common(w, c, gguf)
    if (window := c.get("sliding_window")) is not None:
        w.add_sliding_window(window)
        kinds = c.get("layer_types", default=["sliding_attention" if (i + 1) % 4 else "full_attention"
                                              for i in range(c.n_layer)])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def gpt_oss(w, c, gguf):
    if c.near(2) != [i % 2 == 0 for i in range(c.n_layer)]:
        c.refuse("windows on other layers than every other (layer_types)")
    common(w, c, gguf)
    w.add_sliding_window(c["sliding_window"])
    w.add_expert_feed_forward_length(c["intermediate_size"])


def exaone(w, c, gguf):
    rotated()(w, c, gguf)
    w.add_layer_norm_rms_eps(c["layer_norm_epsilon", "rms_norm_eps"])


def hunyuan(w, c, gguf):
    rope = c.rope()
    common(w, c, gguf)
    if c.n_expert < 2:
        for key in ("expert_count", "expert_used_count"):
            w.kv_data[0].pop(f"{w.arch}.{key}", None)
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        d = c.head_dim                  # NTK-aware: the base grows with alpha
        w.add_rope_freq_base(rope.get("rope_theta", 10000.0) * rope["alpha"] ** (d / (d - 2)))
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        w.add_rope_scaling_factor(1)
        w.add_rope_scaling_orig_ctx_len(256 * 1024)
        w.add_context_length(256 * 1024)


# ---------------------------------------------------------------- with layer norms
def gpt2(w, c, gguf):
    w.add_block_count(c.n_layer)
    w.add_context_length(c["n_ctx", "n_positions"])
    w.add_embedding_length(c["n_embd"])
    w.add_feed_forward_length(4 * c["n_embd"])
    w.add_head_count(c["n_head"])
    w.add_layer_norm_eps(c["layer_norm_epsilon"])
    w.add_file_type(c.file_type)


def gptneox(w, c, gguf):
    rotated(0.25)(w, c, gguf)
    w.add_parallel_residual(c.get("use_parallel_residual", default=True))


def falcon(w, c, gguf):
    for key, off in (("alibi", False), ("bias", False), ("parallel_attn", True)):
        if c.get(key, default=off) is not off:
            c.refuse(f"{key} is {not off}")
    common(w, c, gguf)
    w.add_context_length(2048)          # config.json does not say
    w.add_tensor_data_layout("jploski")
    w.add_feed_forward_length(c.get("ffn_hidden_size", default=4 * c["hidden_size"]))
    w.add_head_count_kv(falcon_heads_kv(c))


def phi2(w, c, gguf):
    rotated(0.5)(w, c, gguf)
    w.add_feed_forward_length(c.get("intermediate_size", default=4 * c["hidden_size", "n_embd"]))
    w.add_add_bos_token(False)


def stablelm(w, c, gguf):
    rotated(0.25)(w, c, gguf)
    w.add_parallel_residual(c.get("use_parallel_residual", default=True))
    if c.get("layer_norm_eps", "norm_eps") is not None:
        w.add_layer_norm_eps(c["layer_norm_eps", "norm_eps"])


def command_r(w, c, gguf):
    common(w, c, gguf)
    w.add_context_length(c["model_max_length", "max_position_embeddings"])
    w.add_logit_scale(c["logit_scale"])
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2(w, c, gguf):
    if c.near(4) != [(i + 1) % 4 > 0 for i in range(c.n_layer)]:
        c.refuse("windows on other layers than three of four (layer_types)")
    rotated()(w, c, gguf)
    w.add_logit_scale(c["logit_scale"])
    w.add_sliding_window(c["sliding_window"])
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def bloom(w, c, gguf):
    n_embd, n_head = c["hidden_size", "n_embed"], c["n_head", "num_attention_heads"]
    common(w, c, gguf)
    w.add_context_length(c.get("seq_length", default=n_embd))
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(4 * n_embd)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head)


def olmo(w, c, gguf):
    common(w, c, gguf)
    w.add_layer_norm_eps(1e-5)
    stated(w, c, ("clamp_kqv", "clip_qkv"))


def nemotron(w, c, gguf):
    rotated(0.5)(w, c, gguf)
    w.add_vocab_size(c["vocab_size"])
    w.add_layer_norm_eps(c["norm_eps", "layer_norm_eps"])
    if not c.rope().get("factor"):
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


# ---------------------------------------------------------------- latent attention, recurrent layers
def deepseek2(w, c, gguf):
    if c.get("moe_layer_freq", default=1) != 1:
        c.refuse(f"moe_layer_freq is {c['moe_layer_freq']}")
    common(w, c, gguf)
    stated(w, c, ("q_lora_rank", "q_lora_rank"), ("expert_count", "n_routed_experts"),
           ("expert_weights_scale", "routed_scaling_factor"))
    rank, n_nope, n_rope = c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(c.get("rms_norm_eps", default=1e-6))
    w.add_leading_dense_block_count(c.get("first_k_dense_replace", default=0 if c.n_expert else c.n_layer))
    w.add_vocab_size(c["vocab_size"])
    w.add_kv_lora_rank(rank)
    w.add_key_length(rank + n_rope)
    w.add_value_length(rank)
    w.add_key_length_mla(n_nope + n_rope)
    w.add_value_length_mla(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size", "intermediate_size"])
    w.add_expert_shared_count(c.get("n_shared_experts", default=0))
    if c.get("norm_topk_prob"):
        w.add_expert_weights_norm(True)
    if "V3" in c["architectures"][0]:
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_rope_dimension_count(n_rope)
    if (scale := c.rope().get("mscale_all_dim")) is not None:
        w.add_rope_scaling_yarn_log_mul(0.1 * scale)


def mamba(w, c, gguf):
    n_embd = c["hidden_size", "d_model"]
    _recurrent(w, c, n_embd)
    w.add_ssm_conv_kernel(c.get("conv_kernel", "d_conv", default=4))
    w.add_ssm_inner_size(c.get("intermediate_size", "d_inner", default=2 * n_embd))
    w.add_ssm_state_size(c.get("state_size", "d_state", default=16))
    w.add_ssm_time_step_rank(c.get("time_step_rank", "dt_rank", default=-(n_embd // -16)))
    w.add_ssm_dt_b_c_rms(c.get("model_type") == "falcon_mamba")


def mamba2(w, c, gguf):
    n_embd = c["hidden_size", "d_model", "dim"]
    n_inner = c.get("mamba_d_ssm", "intermediate_size", "d_inner", default=c.get("expand", default=2) * n_embd)
    _recurrent(w, c, n_embd)
    w.add_ssm_conv_kernel(c.get("conv_kernel", "d_conv", default=4))
    w.add_ssm_inner_size(n_inner)
    w.add_ssm_state_size(c.get("state_size", "d_state", default=128))
    w.add_ssm_time_step_rank(n_inner // c.get("mamba_d_head", "head_dim", default=64))
    w.add_ssm_group_count(c.ssm_groups)


def _recurrent(w, c, n_embd):
    w.add_context_length(NO_LIMIT)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_block_count(c.n_layer)
    w.add_layer_norm_rms_eps(c.get("layer_norm_epsilon", "rms_norm_eps", default=1e-5))
    w.add_file_type(c.file_type)


def granite_hybrid(w, c, gguf):
    granite(w, c, gguf)
    w.add_ssm_conv_kernel(c["mamba_d_conv"])
    w.add_ssm_state_size(c["mamba_d_state"])
    w.add_ssm_group_count(c.ssm_groups)
    w.add_ssm_inner_size(c["mamba_expand"] * c["hidden_size"])
    w.add_ssm_time_step_rank(c["mamba_n_heads"])
    w.add_head_count_kv([0 if kind in RECURRENT else c["num_key_value_heads"] for kind in c["layer_types"]])
    turned = c.get("position_embedding_type") == "rope"
    w.add_rope_scaling_finetuned(turned)
    if not turned:
        w.add_context_length(NO_LIMIT)


def lfm2(w, c, gguf):
    n_ff = c["block_ff_dim", "intermediate_size"]
    if c.get("block_auto_adjust_ff_dim"):
        n_ff = int(c.get("block_ffn_dim_multiplier", default=1.0) * int(2 * n_ff / 3))
        n_ff = -(n_ff // -c["block_multiple_of"]) * c["block_multiple_of"]
    common(w, c, gguf)
    w.add_head_count_kv([0 if kind == "conv" else c["num_key_value_heads"] for kind in c["layer_types"]])
    w.add_vocab_size(c["vocab_size"])
    w.add_shortconv_l_cache(c["conv_L_cache"])
    w.add_layer_norm_rms_eps(c["norm_eps"])
    w.add_feed_forward_length(n_ff)


def qwen3next(w, c, gguf):
    every = c.get("full_attention_interval", default=4)
    kinds = c.get("layer_types")
    if kinds and [k == "full_attention" for k in kinds] != [(i + 1) % every == 0 for i in range(c.n_layer)]:
        c.refuse(f"full attention on other layers than every {every}th (layer_types)")
    moe(w, c, gguf)
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_ssm_state_size(c["linear_key_head_dim"])
    w.add_ssm_group_count(c["linear_num_key_heads"])
    w.add_ssm_time_step_rank(c["linear_num_value_heads"])
    w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
    w.add_full_attention_interval(every)
    w.add_rope_dimension_count(c.n_rotated(0.25))


def rwkv7(w, c, gguf):
    n_embd = c["hidden_size"]

    def rank(names, exponent, multiplier):
        return c.get(*names, default=max(1, round(n_embd ** exponent * multiplier / 32)) * 32)
    w.add_context_length(NO_LIMIT)
    w.add_embedding_length(n_embd)
    w.add_block_count(c.n_layer)
    w.add_layer_norm_eps(c["layer_norm_epsilon", "norm_eps"])
    w.add_wkv_head_size(c["head_size", "head_dim"])
    w.add_decay_lora_rank(rank(("lora_rank_decay", "decay_low_rank_dim"), 0.5, 1.8))
    w.add_iclr_lora_rank(rank(("lora_rank_iclr", "a_low_rank_dim"), 0.5, 1.8))
    w.add_value_residual_mix_lora_rank(rank(("lora_rank_value_residual_mix", "v_low_rank_dim"), 0.5, 1.3))
    w.add_gate_lora_rank(rank(("lora_rank_gate", "gate_low_rank_dim"), 0.8, 0.6))
    w.add_feed_forward_length(c.get("intermediate_size", default=4 * n_embd))
    w.add_head_count(0)
    w.add_file_type(c.file_type)


# ---------------------------------------------------------------- encoders
def bert(w, c, gguf):
    common(w, c, gguf)
    w.add_causal_attention(False)


def nomic_bert(w, c, gguf):
    for key, only in (("activation_function", "swiglu"), ("causal", False), ("qkv_proj_bias", False),
                      ("mlp_fc1_bias", False), ("mlp_fc2_bias", False), ("prenorm", False),
                      ("rotary_emb_fraction", 1.0), ("rotary_emb_interleaved", False)):
        if c.get(key, default=only) != only:
            c.refuse(f"{key} is {c.get(key)!r}")
    bert(w, c, gguf)
    if c.get("n_positions") == 8192 and c.get("max_trained_positions", default=2048) == 2048:
        w.add_context_length(2048)      # what it was trained for


def modern_bert(w, c, gguf):
    every = c.get("global_attn_every_n_layers", default=3)
    bert(w, c, gguf)
    w.add_layer_norm_eps(c["layer_norm_eps", "norm_eps"])
    w.add_sliding_window(c["local_attention"])
    w.add_uint32(f"{w.arch}.attention.sliding_window_pattern", every)
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    w.add_vocab_size(c["vocab_size"])
    act = c.get("hidden_activation", default="gelu")
    if act != "gelu":                   # what a reader takes
        w.add_string(f"{w.arch}.hidden_activation", act)


def t5_encoder(w, c, gguf):
    w.add_context_length(c.get("n_positions", default=512))
    for add, *names in ((w.add_embedding_length, "d_model"), (w.add_feed_forward_length, "d_ff"),
                        (w.add_block_count, "num_layers"), (w.add_head_count, "num_heads"),
                        (w.add_key_length, "d_kv"), (w.add_value_length, "d_kv"),
                        (w.add_layer_norm_eps, "layer_norm_epsilon"), (w.add_layer_norm_rms_eps, "layer_norm_epsilon"),
                        (w.add_relative_attn_buckets_count, "relative_attention_num_buckets")):
        add(c[tuple(names)])
    w.add_file_type(c.file_type)


# ---------------------------------------------------------------- tensors that config.json holds
def llama_extra(c):
    """Factors of Llama 3.1's RoPE: 1 for short waves, `factor` for long ones, a ramp in between."""
    rope = c.rope()
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") != "llama3":
        return {}
    freqs = np.float32(1) / np.float32(rope.get("rope_theta", 10000.0)) ** (
        np.arange(0, c.head_dim, 2, dtype=np.float32) / np.float32(c.head_dim))
    factor, low, high, n_ctx = (np.float32(rope.get(k, d)) for k, d in (
        ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 8192)))
    wave, one = np.float32(2 * np.pi) / freqs, np.float32(1)
    smooth = (n_ctx / wave - low) / (high - low)
    ramp = one / ((one - smooth) / factor + smooth)
    return {"rope_freqs.weight": np.where(wave < n_ctx / high, one, np.where(wave > n_ctx / low, factor, ramp))}


def phi3_extra(c):
    rope = c.rope()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short") if rope.get(f"{kind}_factor")}


# ---------------------------------------------------------------- the table
SILU = (None, "silu", "swish")


@dataclasses.dataclass(frozen=True)
class Family:
    """arch: a name of gguf.MODEL_ARCH.  metadata(writer, Config, gguf);  change: as tensors.py has them;
    extra(Config) -> {GGUF name: array};  rename(name) -> name, or None where the tensor is left out."""
    arch: str
    metadata: Callable = common
    change: Callable = unchanged
    extra: Callable = lambda c: {}
    rename: Callable = lambda name: name
    tied_head: bool = False             # lm_head.weight is the embedding again
    acts: tuple = SILU                  # values of hidden_act that are what GGUF's network computes; (): any


def bert_rename(name):
    name = name.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
    left_out = ("embeddings.position_ids", "pooler.", "cls.")
    return None if name.startswith(left_out) else name


def modern_bert_rename(name):
    name = name.removeprefix("model.")
    return None if name.startswith(("head.", "decoder.")) else name


def t5_rename(name):
    """The embedding is stored under one name or two."""
    return None if name == "encoder.embed_tokens.weight" else name


def without(*prefixes):
    return lambda name: None if name.startswith(prefixes) else name


def replaced(old, new):
    return lambda name: name.replace(old, new)


def whole(prefix):
    """Names of a model without a head, saved by itself, begin with what the others begin with."""
    return lambda name: name if name.startswith((prefix, "lm_head.")) else prefix + name


def granite_hybrid_family(c):
    """Granite 4: the ones without recurrent layers are plain Granites."""
    change = chain(granite_experts, lambda c, name, x: mamba2_change(c, name, x) if ".mamba." in name else None,
                   pairs_change)
    if set(RECURRENT) & set(c["layer_types"]):
        return Family("GRANITE_HYBRID", granite_hybrid, change)
    return Family("GRANITE_MOE" if c.n_expert else "GRANITE", granite, change)


_WHOLE = {"rename": whole("model.")}
_PAIRS, _NORMS = chain(pairs_change), chain(norms_change)
_LLAMA = Family("LLAMA", llama, _PAIRS, llama_extra, **_WHOLE)
_GEMMA = {"change": _NORMS, "tied_head": True, "acts": (), **_WHOLE}
_BERT = {"rename": bert_rename, "acts": ()}
_GRANITE_MOE = Family("GRANITE_MOE", granite, chain(granite_experts, pairs_change))
_DEEPSEEK = Family("DEEPSEEK2", deepseek2, chain(latent_change))
_EXPERTS = {"change": chain(fused_experts)}
FAMILIES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "LlamaModel"), _LLAMA),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen2Model"), Family("QWEN2", **_WHOLE)),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3Model"), Family("QWEN3", **_WHOLE)),
    "Qwen2MoeForCausalLM": Family("QWEN2MOE", moe, **_EXPERTS),
    "Qwen3MoeForCausalLM": Family("QWEN3MOE", qwen3_moe, **_EXPERTS),
    "GraniteForCausalLM": Family("GRANITE", granite, _PAIRS),
    **dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE_MOE),
    "SmolLM3ForCausalLM": Family("SMOLLM3", smollm3, _PAIRS),
    "GemmaForCausalLM": Family("GEMMA", gemma, **_GEMMA), "Gemma2ForCausalLM": Family("GEMMA2", gemma2, **_GEMMA),
    "Gemma3ForCausalLM": Family("GEMMA3", gemma3, **_GEMMA),
    "Phi3ForCausalLM": Family("PHI3", phi3, extra=phi3_extra),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), Family("OLMO2", olmo2)),
    "OlmoeForCausalLM": Family("OLMOE", olmoe, **_EXPERTS),
    "Glm4ForCausalLM": Family("GLM4", rotated(0.5)), "SeedOssForCausalLM": Family("SEED_OSS"),
    "GptOssForCausalLM": Family("GPT_OSS", gpt_oss, chain(gpt_oss_change)),
    "InternLM2ForCausalLM": Family("INTERNLM2", change=chain(internlm_qkv)),
    "ExaoneForCausalLM": Family("EXAONE", exaone, extra=llama_extra),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
                    Family("ERNIE4_5", change=chain(ernie_fused), rename=replaced("ernie.", "model."))),
    "ArceeForCausalLM": Family("ARCEE", llama, _PAIRS, llama_extra, acts=("relu2",)),
    "HunYuanDenseV1ForCausalLM": Family("HUNYUAN_DENSE", hunyuan),
    "GPT2LMHeadModel": Family("GPT2", gpt2, chain(transposed(".c_attn.weight", ".c_proj.weight", ".c_fc.weight")),
                              acts=()),
    "Starcoder2ForCausalLM": Family("STARCODER2", acts=()),
    "GPTNeoXForCausalLM": Family("GPTNEOX", gptneox, chain(fused_qkv), acts=()),
    **dict.fromkeys(("FalconForCausalLM", "RWForCausalLM"), Family("FALCON", falcon, chain(falcon_qkv), acts=())),
    "PhiForCausalLM": Family("PHI2", phi2, acts=()),
    **dict.fromkeys(("StableLmForCausalLM", "StableLMEpochForCausalLM"), Family("STABLELM", stablelm)),
    "CohereForCausalLM": Family("COMMAND_R", command_r), "Cohere2ForCausalLM": Family("COHERE2", cohere2),
    **dict.fromkeys(("BloomForCausalLM", "BloomModel"),
                    Family("BLOOM", bloom, chain(fused_qkv), rename=replaced("transformer.", ""), acts=())),
    **dict.fromkeys(("OlmoForCausalLM", "OLMoForCausalLM"), Family("OLMO", olmo, _PAIRS)),
    "NemotronForCausalLM": Family("NEMOTRON", nemotron, _NORMS, acts=("relu2",)),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _DEEPSEEK),
    **dict.fromkeys(("MambaForCausalLM", "MambaLMHeadModel", "FalconMambaForCausalLM"),
                    Family("MAMBA", mamba, chain(mamba_change))),
    "Mamba2ForCausalLM": Family("MAMBA2", mamba2, mamba2_change),
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), Family("RWKV7", rwkv7, rwkv7_change, acts=())),
    **dict.fromkeys(("Lfm2ForCausalLM", "LFM2ForCausalLM"), Family("LFM2", lfm2, chain(short_conv_change))),
    "GraniteMoeHybridForCausalLM": granite_hybrid_family,
    "Qwen3NextForCausalLM": Family("QWEN3NEXT", qwen3next, chain(qwen3next_change, fused_experts),
                                   rename=without("mtp.")),
    **dict.fromkeys(("BertModel", "BertForMaskedLM"), Family("BERT", bert, **_BERT)),
    "NomicBertModel": Family("NOMIC_BERT", nomic_bert, **_BERT),
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM"),
                    Family("JINA_BERT_V2", bert, chain(gated_layers), **_BERT)),
    **dict.fromkeys(("ModernBertModel", "ModernBertForMaskedLM"),
                    Family("MODERN_BERT", modern_bert, rename=modern_bert_rename, acts=())),
    "T5EncoderModel": Family("T5ENCODER", t5_encoder, rename=t5_rename, acts=())}


def family_of(config):
    """The Family of a Config.  Errors: NotSupported."""
    name = (config.get("architectures", default=[None]) or [None])[0]
    if name not in FAMILIES:
        raise NotSupported(f"{config.path}: architecture {name!r} cannot be converted{nearest(str(name), FAMILIES)}; "
                           f"those that can: {', '.join(FAMILIES)}")
    family, act = FAMILIES[name], config.get("hidden_act")
    family = family if isinstance(family, Family) else family(config)
    if config.get("quantization_config"):
        raise NotSupported(f"{config.path}: the weights are quantised already (quantization_config); take the original")
    if family.acts and act not in (None, *family.acts):
        raise NotSupported(f"{config.path}: hidden_act is {act!r}; GGUF's {family.arch.lower()} always computes "
                           f"{family.acts[-1] if family.acts is not SILU else 'silu'}")
    return family
