"""Metadata that most architectures have, and how the gguf package holds what was written."""
from ggjit.models.files.gguf import SCALARS
from ggjit.models.files.save import encoded
from ggjit.ops.core.errors import NotSupported


def collected(w):
    """{key: (kind, bytes)} of what a GGUFWriter was given."""
    return {key: _encoded(key, v) for key, v in w.kv_data[0].items()}


def _encoded(key, v):
    """(kind, bytes) of a value as the gguf package holds it."""
    kind = int(v.type)
    if kind in SCALARS:
        try:
            return encoded(SCALARS[kind].type(v.value), key)
        except OverflowError:
            raise ValueError(f"{v.value} for {key}") from None
    if isinstance(v.value, list) and v.value and isinstance(v.value[0], bytes):
        return encoded([text.decode("utf-8", "replace") for text in v.value], key)
    return encoded(v.value, key)


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
    # these need no keys; some have a tensor of factors
    if kind in (None, "default", "dynamic", "llama3", "proportional", "mrope"):
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
        raise NotSupported(f"RoPE scaling {kind!r} cannot be expressed in GGUF")
