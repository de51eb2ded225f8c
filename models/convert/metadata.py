"""Metadata of GGUF files from config.json: a function for each architecture, as llama.cpp's conversion has it.

    def llama(w, c, gguf)       w: the gguf package's GGUFWriter; c: a Config; gguf: the package
"""
import math
import statistics

from ggjit.models.convert.common_metadata import common, stated
from ggjit.models.convert.rerank import add_qwen3_rank, classifies
from ggjit.models.convert.tensors import falcon_heads_kv
from ggjit.ops.core.errors import NotSupported

RECURRENT = ("mamba", "linear_attention")       # layer_types without attention
NO_LIMIT = 1 << 20      # context length of models without one


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
    """The common keys, and the number of dimensions of a head that rotate."""
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


def gemma3n(w, c, gguf):
    for key, only in (("altup_num_inputs", 4), ("altup_active_idx", 0), ("laurel_rank", 64)):
        if c[key] != only:
            c.refuse(f"{key} is {c[key]}")
    gemma3(w, c, gguf)
    w.add_altup_active_idx(c["altup_active_idx"])
    w.add_altup_num_inputs(c["altup_num_inputs"])
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    w.add_shared_kv_layers(c["num_kv_shared_layers"])
    w.add_sliding_window_pattern(c.near(5))
    w.add_activation_sparsity_scale([statistics.NormalDist().inv_cdf(part) if part else -math.inf
                                     for part in c["activation_sparsity_pattern"]])


def gemma4(w, c, gguf):
    gemma3(w, c, gguf)
    near, n_shared, d_near = c.near(6), c.get("num_kv_shared_layers", default=0), c["head_dim"]
    d_full, n_kv_full = c.full("head_dim"), c.full("num_key_value_heads")
    w.add_shared_kv_layers(n_shared)
    w.add_embedding_length_per_layer_input(c.get("hidden_size_per_layer_input", default=0))
    w.add_sliding_window_pattern(near)
    for add, d in ((w.add_key_length, d_full), (w.add_value_length, d_full), (w.add_key_length_swa, d_near),
                   (w.add_value_length_swa, d_near), (w.add_rope_dimension_count, d_full)):
        add(d)
    w.add_rope_dimension_count_swa(int(d_near * c.rope()["sliding_attention"].get("partial_rotary_factor", 1.0)))
    w.add_head_count_kv([c["num_key_value_heads"] if n else n_kv_full for n in near])
    n_ff = c["intermediate_size"]
    if c.get("use_double_wide_mlp"):
        w.add_feed_forward_length([n_ff * (1 + (i >= c.n_layer - n_shared)) for i in range(c.n_layer)])
    if c.get("enable_moe_block"):
        stated(w, c, ("expert_used_count", "top_k_experts"), ("expert_feed_forward_length", "moe_intermediate_size"))


def qwen2vl(w, c, gguf):
    common(w, c, gguf)
    w.add_rope_dimension_sections([*c.rope()["mrope_section"], 0, 0][:4])


def qwen3vl(w, c, gguf):
    """The keys of the text part.  n_deepstack_layers: first layers to whose input a picture's features are added."""
    common(w, c, gguf)
    w.add_rope_dimension_sections([*c.rope()["mrope_section"], 0][:4])
    w.add_num_deepstack_layers(len(c.get("vision_config", default={}).get("deepstack_visual_indexes", ())))


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


def roberta(w, c, gguf):
    """Positions are counted from behind the number of the padding token."""
    bert(w, c, gguf)
    w.add_context_length(c["max_position_embeddings"] - c["pad_token_id"] - 1)
    for add in (w.add_add_bos_token, w.add_add_eos_token, w.add_add_sep_token):
        add(True)


def qwen3_reranker(w, c, gguf):
    common(w, c, gguf)
    add_qwen3_rank(w, gguf)


def nomic_bert(w, c, gguf):
    for key, only in (("activation_function", "swiglu"), ("causal", False), ("qkv_proj_bias", False),
                      ("mlp_fc1_bias", False), ("mlp_fc2_bias", False), ("prenorm", False),
                      ("rotary_emb_fraction", 1.0), ("rotary_emb_interleaved", False)):
        if c.get(key, default=only) != only:
            c.refuse(f"{key} is {c.get(key)!r}")
    bert(w, c, gguf)
    if c.get("n_positions") == 8192 and c.get("max_trained_positions", default=2048) == 2048:
        w.add_context_length(2048)      # the context length the model was trained for


def modern_bert(w, c, gguf):
    every = c.get("global_attn_every_n_layers", default=3)
    bert(w, c, gguf)
    w.add_layer_norm_eps(c["layer_norm_eps", "norm_eps"])
    w.add_sliding_window(c["local_attention"])
    w.add_uint32(f"{w.arch}.attention.sliding_window_pattern", every)
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    w.add_vocab_size(c["vocab_size"])
    if classifies(c):
        if c.get("classifier_activation", default="gelu") != "gelu":
            c.refuse(f"classifier_activation is {c['classifier_activation']!r}")
        kind = {"cls": gguf.PoolingType.CLS, "mean": gguf.PoolingType.MEAN}[c.get("classifier_pooling", default="cls")]
        w.add_uint32(f"{w.arch}.classifier.pooling_type", kind)
    act = c.get("hidden_activation", default="gelu")
    if act != "gelu":                   # readers assume GELU where the key is missing
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
