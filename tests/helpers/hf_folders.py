"""Small Hugging Face folders of every architecture that can be converted, and what transformers makes of them.

    python hf_folders.py [NAME...]  writes hf_shapes.json and ../models/hf_goldens.json, whole or those entries of them
                                    (needs torch and transformers)

hf_shapes.json has config.json and the shapes of the tensors as transformers saves them, for the folders of MORE.
"""
import functools
import json
import pathlib
import sys
import tempfile

import numpy as np

SHAPES = pathlib.Path(__file__).parent / "hf_shapes.json"
GOLDENS = SHAPES.parents[1] / "models" / "hf_goldens.json"
D, FF, VOCAB, LAYERS, HEADS, KV, HD, EXPERTS = 32, 48, 40, 2, 4, 2, 16, 4
IDS = [3, 17, 5, 29, 8, 1, 30, 11, 2, 9]
SIZES = {"hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
         "num_key_value_heads": KV, "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "tie_word_embeddings": False, "head_dim": HD, "rope_theta": 10000.0}
ENDS = {"model.embed_tokens": (VOCAB, D), "model.norm": (D,), "lm_head": (VOCAB, D)}
QKV = {"self_attn.q_proj": (HEADS * HD, D), "self_attn.k_proj": (KV * HD, D), "self_attn.v_proj": (KV * HD, D),
       "self_attn.o_proj": (D, HEADS * HD)}
NORMS = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
MLP = {"mlp.gate_proj": (FF, D), "mlp.up_proj": (FF, D), "mlp.down_proj": (D, FF)}
HEAD_NORMS = {"self_attn.q_norm": (HD,), "self_attn.k_norm": (HD,)}
MOE = {"mlp.gate": (EXPERTS, D)} | {f"mlp.experts.{i}.{k.removeprefix('mlp.')}": s for i in range(EXPERTS)
                                    for k, s in MLP.items()}
MIXTRAL = {"block_sparse_moe.gate": (EXPERTS, D)} | {f"block_sparse_moe.experts.{i}.{k}": s for i in range(EXPERTS)
                                                     for k, s in (("w1", (FF, D)), ("w2", (D, FF)), ("w3", (FF, D)))}
POST = {"pre_feedforward_layernorm": (D,), "post_feedforward_layernorm": (D,)}
SQUARE = {"num_key_value_heads": HEADS, "head_dim": D // HEADS}
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
         "query_pre_attn_scalar": HD, "sliding_window": 4}
TIED = {k: s for k, s in ENDS.items() if k != "lm_head"}
BERT_LAYER = {f"attention.{k}": s for k, s in (("self.query", (D, D)), ("self.key", (D, D)), ("self.value", (D, D)),
                                               ("output.dense", (D, D)), ("output.LayerNorm", (D,)))} | {
    "intermediate.dense": (FF, D), "output.dense": (D, FF), "output.LayerNorm": (D,)}


def _square(layer):
    return {k: tuple(D if "_proj" in k and "attn" in k else n for n in s) for k, s in layer.items()}


# name: (architecture, config beside SIZES, prefix of layers, tensors of a layer, others, parts of names with a bias)
FOLDERS = {
    "llama": ("LlamaForCausalLM", {}, "model.layers", NORMS | QKV | MLP, ENDS, ()),
    "llama3": ("LlamaForCausalLM", {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}, "tie_word_embeddings": True}, "model.layers", NORMS | QKV | MLP, TIED,
        ()),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}, "model.layers",
                NORMS | QKV | MIXTRAL, ENDS, ()),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": D // HEADS, "num_key_value_heads": HEADS}, "model.layers",
              NORMS | _square(QKV) | MLP, ENDS, ("q_proj", "k_proj", "v_proj")),
    "qwen3": ("Qwen3ForCausalLM", {}, "model.layers", NORMS | QKV | HEAD_NORMS | MLP, ENDS, ()),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True,
                                          "moe_intermediate_size": FF, "decoder_sparse_step": 1, "mlp_only_layers": []},
                  "model.layers", NORMS | QKV | HEAD_NORMS | MOE, ENDS, ()),
    "gemma": ("GemmaForCausalLM", GEMMA, "model.layers", NORMS | QKV | MLP, TIED, ()),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
               "model.layers", NORMS | QKV | MLP | POST, TIED, ()),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA | {"rope_local_base_freq": 1000.0, "sliding_window_pattern": 6},
                    "model.layers", NORMS | QKV | HEAD_NORMS | MLP | POST, TIED, ()),
    "phi3": ("Phi3ForCausalLM", SQUARE | {"original_max_position_embeddings": 64, "pad_token_id": 0}, "model.layers",
             NORMS | {"self_attn.qkv_proj": (3 * D, D), "self_attn.o_proj": (D, D), "mlp.gate_up_proj": (2 * FF, D),
                      "mlp.down_proj": (D, FF)}, ENDS, ()),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_ctx": 64, "n_positions": 64,
                                 "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}, "transformer.h", {
        "ln_1": (D,), "ln_2": (D,), "attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, 4 * D),
        "mlp.c_proj": (4 * D, D)}, {"transformer.wte": (VOCAB, D), "transformer.wpe": (64, D),
                                    "transformer.ln_f": (D,)}, ("ln_", "c_")),
    "olmo2": ("Olmo2ForCausalLM", SQUARE, "model.layers", _square(QKV) | MLP | {
        "self_attn.q_norm": (D,), "self_attn.k_norm": (D,), "post_attention_layernorm": (D,),
        "post_feedforward_layernorm": (D,)}, ENDS, ()),
    "olmoe": ("OlmoeForCausalLM", SQUARE | {"num_experts": EXPERTS, "num_experts_per_tok": 2}, "model.layers",
              NORMS | _square(QKV) | {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)} | MOE, ENDS, ()),
    "bert": ("BertModel", {"type_vocab_size": 2, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}, "encoder.layer",
             BERT_LAYER, {"embeddings.word_embeddings": (VOCAB, D), "embeddings.position_embeddings": (64, D),
                          "embeddings.token_type_embeddings": (2, D), "embeddings.LayerNorm": (D,),
                          "pooler.dense": (D, D)}, ("LayerNorm", "attention", "dense"))}
LEFT_OUT = {"gpt2": SIZES, "bert": ("num_key_value_heads", "rms_norm_eps", "head_dim", "rope_theta",
                                    "tie_word_embeddings")}


# name: (class of transformers, its configuration beside _MORE_SIZES)
_MORE_SIZES = {k: v for k, v in SIZES.items() if k in (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings")} | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
_SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_LATENT = {"num_key_value_heads": HEADS, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
           "v_head_dim": 16, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "first_k_dense_replace": 1, "topk_group": 1}
_SCALES = {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_GRANITE4 = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
             "mamba_n_groups": 1, "mamba_expand": 2, "shared_intermediate_size": 24, "position_embedding_type": "nope"}
_NEAR_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "head_dim": HD,
                  "sliding_window": 4}
_TEXT_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
               "vocab_size", "max_position_embeddings", "head_dim", "tie_word_embeddings")
MORE = {
    "llama_square": ("LlamaForCausalLM", {}), "granite": ("GraniteForCausalLM", _SCALES),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", _SCALES | _EXPERTS | {"shared_intermediate_size": 24}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", _SCALES | _EXPERTS | _GRANITE4),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}), "glm4": ("Glm4ForCausalLM", {"head_dim": HD}),
    "gpt_oss": ("GptOssForCausalLM", _EXPERTS | {"head_dim": HD, "sliding_window": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 150000.0}}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": HD}), "seed_oss": ("SeedOssForCausalLM", {"head_dim": HD}),
    "arcee": ("ArceeForCausalLM", {"head_dim": D // HEADS}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": HD}),
    "starcoder2": ("Starcoder2ForCausalLM", {}), "gpt_neox": ("GPTNeoXForCausalLM", {"hidden_act": "gelu_new"}),
    "falcon": ("FalconForCausalLM", {"activation": "gelu_new"}),
    "falcon_new": ("FalconForCausalLM", {"activation": "gelu_new", "new_decoder_architecture": True,
                                         "num_kv_heads": 2}),
    "phi": ("PhiForCausalLM", {"num_key_value_heads": HEADS, "intermediate_size": 4 * D}),
    "stablelm": ("StableLmForCausalLM", {"hidden_size": 64}), "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 4}),
    "bloom": ("BloomForCausalLM", {"n_layer": LAYERS, "n_head": HEADS}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 1.2}),
    "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 4}),
    "nemotron": ("NemotronForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _LATENT | {
        "q_lora_rank": None, "n_routed_experts": EXPERTS, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT | {"q_lora_rank": 24, "n_routed_experts": 8, "n_group": 2}),
    "mamba": ("MambaForCausalLM", {"state_size": 8}), "falcon_mamba": ("FalconMambaForCausalLM", {"state_size": 8}),
    "mamba2": ("Mamba2ForCausalLM", {"state_size": 16, "head_dim": 8, "num_heads": 8, "n_groups": 1, "expand": 2}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _EXPERTS | _SHARED),
    "qwen3_next": ("Qwen3NextForCausalLM", _EXPERTS | _SHARED | _LINEAR | {
        "head_dim": HD, "layer_types": ["linear_attention", "full_attention"], "norm_topk_prob": True,
        "full_attention_interval": 2}),
    "modernbert": ("ModernBertModel", {"num_hidden_layers": 4, "local_attention": 4, "cls_token_id": 1,
                                       "sep_token_id": 2}),
    "t5": ("T5EncoderModel", {"d_model": D, "d_kv": 8, "d_ff": FF, "num_layers": LAYERS, "num_heads": HEADS,
                              "feed_forward_proj": "gated-gelu"}),
    "roberta": ("RobertaModel", {}), "xlm_roberta_rank": ("XLMRobertaForSequenceClassification", {"num_labels": 1}),
    "bert_rank": ("BertForSequenceClassification", {"num_labels": 3}),
    "modernbert_rank": ("ModernBertForSequenceClassification", {
        "num_hidden_layers": 4, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "num_labels": 1,
        "classifier_pooling": "mean"}),
    "qwen3_rank": ("Qwen3ForSequenceClassification", {"head_dim": HD, "num_labels": 1}),
    "nomic_bert": ("NomicBertModel", {}), "eurobert": ("EuroBertModel", {}),
    "gemma3n_text": ("Gemma3nForCausalLM", _NEAR_AND_FULL | {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB - 3,
        "activation_sparsity_pattern": [0.95, 0.9, 0.0, 0.0, 0.0, 0.0], "laurel_rank": 64}),
    "gemma4_text": ("Gemma4ForCausalLM", _NEAR_AND_FULL | {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True, "global_head_dim": 32, "final_logit_softcapping": 6.0}),
    "gemma4_moe": ("Gemma4ForCausalLM", _NEAR_AND_FULL | {
        "hidden_size_per_layer_input": 0, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2,
        "moe_intermediate_size": 24}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {
        "text_config": {k: v for k, v in SIZES.items() if k in _TEXT_SIZES} | {"rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": D,
                          "deepstack_visual_indexes": [0], "num_position_embeddings": 4}})}
# sizes these do not have
_UNKNOWN = {"gpt_neox": ("num_key_value_heads",), "nomic_bert": ("num_key_value_heads",),
            **dict.fromkeys(("roberta", "xlm_roberta_rank", "bert_rank", "modernbert", "modernbert_rank"),
                            ("num_key_value_heads",)), "mamba": ("intermediate_size",),
            "falcon_mamba": ("intermediate_size",), "mamba2": ("intermediate_size", "num_key_value_heads"),
            "qwen3_vl": tuple(SIZES)}
ENCODERS = {"bert", "roberta", "modernbert", "t5", "nomic_bert", "eurobert"}
NAMES = [*FOLDERS, *MORE]
RANKS = {name for name in MORE if name.endswith("_rank")}        # their results: what the classifier says
FROM_ONE = ("nemotron", "qwen3_next")       # norms are stored as what they differ from 1


# ---------------------------------------------------------------- families that transformers does not have
_EXAONE = {"self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "mlp.gate_proj": "mlp.c_fc_0",
           "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1",
           "post_attention_layernorm": "ln_2", "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte",
           "model.norm": "transformer.ln_f"}
_INTERN = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
           "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "lm_head": "output",
           "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings"}
_LLAMAS = {"exaone": ("ExaoneForCausalLM", _EXAONE), "internlm2": ("InternLM2ForCausalLM", _INTERN)}


def renamed_llama(folder, name, save):
    """"llama_square" as one of _LLAMAS: the same network under other names."""
    arch, names = _LLAMAS[name]
    about, x = config("llama_square"), tensors("llama_square")
    if name == "exaone":
        about |= {"layer_norm_epsilon": about.pop("rms_norm_eps"), "num_layers": about.pop("num_hidden_layers"),
                  "activation_function": about.pop("hidden_act")}
    else:
        for i in range(LAYERS):
            q, k, v = (x.pop(f"model.layers.{i}.self_attn.{p}_proj.weight").reshape(KV, -1, D // HEADS, D)
                       for p in "qkv")
            x[f"model.layers.{i}.attention.wqkv.weight"] = np.concatenate([q, k, v], 1).reshape(-1, D)
    for old, new in names.items():
        x = {k.replace(old, new): v for k, v in x.items()}
    return write_folder(folder, about | {"architectures": [arch]}, x, save)


RWKV_RANKS = {"w": 8, "a": 4, "v": 6, "g": 10}


def rwkv7(folder, save, seed=0, d=D, d_head=D // HEADS):
    """A folder of RWKV-7 as flash-linear-attention saves it, (its tensors)."""
    layer = {"attn_norm.weight": (d,), "attn_norm.bias": (d,), "ffn_norm.weight": (d,), "ffn_norm.bias": (d,),
             "ffn.x_k": (d,), "ffn.key.weight": (FF, d), "ffn.value.weight": (d, FF), "attn.r_k": (d // d_head, d_head),
             **{f"attn.{k}": (d,) for k in ("k_k", "k_a", "g_norm.weight", "g_norm.bias")},
             **{f"attn.x_{k}": (1, 1, d) for k in "rwkvag"}, **{f"attn.{k}_proj.weight": (d, d) for k in "rkvo"},
             **{f"attn.{k}_lora.lora.0.weight": (n, d) for k, n in RWKV_RANKS.items()},
             **{f"attn.{k}_lora.lora.2.weight": (d, n) for k, n in RWKV_RANKS.items()},
             **{f"attn.{k}_lora.lora.2.bias": (d,) for k in "wav"}}
    shapes = {"model.embeddings.weight": (VOCAB, d), "lm_head.weight": (VOCAB, d), "model.norm.weight": (d,),
              "model.layers.0.pre_norm.weight": (d,), "model.layers.0.pre_norm.bias": (d,), "model.norm.bias": (d,)} | {
        f"model.layers.{i}.{k}": s for i in range(LAYERS) for k, s in layer.items() if i or ".v_lora" not in k}
    rng = np.random.default_rng(seed)
    x = {k: (rng.standard_normal(s) * 0.3 + k.endswith("norm.weight")).astype(np.float32) for k, s in shapes.items()}
    about = {"architectures": ["RWKV7ForCausalLM"], "hidden_size": d, "num_hidden_layers": LAYERS, "norm_eps": 1e-5,
             "head_dim": d_head, "intermediate_size": FF, "vocab_size": VOCAB, "tie_word_embeddings": False,
             "hidden_act": "sqrelu", **{f"{p}_low_rank_dim": RWKV_RANKS[k] for p, k in (
                 ("decay", "w"), ("a", "a"), ("v", "v"), ("gate", "g"))}}
    return write_folder(folder, about, x, save), x


def jina_bert(folder, save, seed=0):
    """A folder of Jina BERT 2, (its tensors)."""
    layer = {k: s for k, s in BERT_LAYER.items() if not k.startswith(("intermediate", "output"))}
    layer |= {"mlp.wo": (D, FF), "mlp.layernorm": (D,)}
    shapes = {"embeddings.word_embeddings": (VOCAB, D), "embeddings.token_type_embeddings": (2, D),
              "embeddings.LayerNorm": (D,)} | {f"encoder.layer.{i}.{k}": s for i in range(LAYERS)
                                               for k, s in layer.items()}
    rng, x = np.random.default_rng(seed), {}
    for k, s in shapes.items():
        x[k + ".weight"] = (rng.standard_normal(s) * 0.3 + (len(s) == 1)).astype(np.float32)
        if "embeddings.w" not in k and "type" not in k:
            x[k + ".bias"] = (rng.standard_normal(s[0]) * 0.1).astype(np.float32)
    for i in range(LAYERS):
        x[f"encoder.layer.{i}.mlp.gated_layers.weight"] = (rng.standard_normal((2 * FF, D)) * 0.3).astype(np.float32)
    about = {"architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "hidden_size": D, "intermediate_size": FF,
             "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB, "layer_norm_eps": 1e-12,
             "max_position_embeddings": 64, "type_vocab_size": 2, "feed_forward_type": "geglu",
             "position_embedding_type": "alibi"}
    return write_folder(folder, about, x, save), x


def moonshine(folder, save, seed=0, d=72, ff=96, n_head=2, part=0.9):
    """A folder of Moonshine, with a tokenizer of bytes.  part: of a head's numbers that RoPE turns."""
    n, vocab = 2, 300
    linear = {f"{p}_proj.weight": (d, d) for p in "qkvo"}
    layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,), "mlp.fc2.weight": (d, ff),
             "mlp.fc2.bias": (d,), **{f"self_attn.{k}": s for k, s in linear.items()}}
    heard = layer | {"mlp.fc1.weight": (ff, d), "mlp.fc1.bias": (ff,)}
    written = layer | {"mlp.fc1.weight": (2 * ff, d), "mlp.fc1.bias": (2 * ff,), "final_layernorm.weight": (d,),
                       **{f"encoder_attn.{k}": s for k, s in linear.items()}}
    shapes = {"encoder.conv1.weight": (d, 1, 127), "encoder.groupnorm.weight": (d,), "encoder.groupnorm.bias": (d,),
              "encoder.conv2.weight": (2 * d, d, 7), "encoder.conv2.bias": (2 * d,),
              "encoder.conv3.weight": (d, 2 * d, 3), "encoder.conv3.bias": (d,), "encoder.layer_norm.weight": (d,),
              "decoder.embed_tokens.weight": (vocab, d), "decoder.norm.weight": (d,),
              **{f"encoder.layers.{i}.{k}": s for i in range(n) for k, s in heard.items()},
              **{f"decoder.layers.{i}.{k}": s for i in range(n) for k, s in written.items()}}
    rng = np.random.default_rng(seed)
    x = {f"model.{k}": (rng.standard_normal(s) * (0.1 if len(s) == 1 else 1.2 / np.prod(s[1:]) ** 0.5)
                        + ("norm" in k and k.endswith("weight"))).astype(np.float32) for k, s in shapes.items()}
    about = {"architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine", "hidden_size": d,
             "intermediate_size": ff, "vocab_size": vocab, "max_position_embeddings": 64, "bos_token_id": 1,
             "eos_token_id": 2, "decoder_start_token_id": 1, "encoder_hidden_act": "gelu", "decoder_hidden_act": "silu",
             **{f"{side}_num_{what}": k for side in ("encoder", "decoder") for what, k in (
                 ("hidden_layers", n), ("attention_heads", n_head), ("key_value_heads", n_head))},
             "rope_parameters": {"partial_rotary_factor": part, "rope_theta": 10000.0, "rope_type": "default"}}
    folder = write_folder(folder, about, x, save)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [
        {"id": i, "content": t, "special": True} for i, t in enumerate(special[:3])], "model": {
            "type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": [],
            "vocab": {t: i for i, t in enumerate([*special, *(f"▁{i}" for i in range(vocab - len(special)))])}}}))
    return folder


def moonshine_sound():
    """One second of noise, float32."""
    return (np.random.default_rng(1).standard_normal(16000) * 0.3).astype(np.float32)


def write_folder(folder, about, x, save):
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    save(folder / "model.safetensors", x, {"format": "pt"})
    return folder


# ---------------------------------------------------------------- folders
@functools.cache
def _shapes():
    return json.loads(SHAPES.read_text())


def config(name):
    if name in MORE:
        return dict(_shapes()[name]["config"])
    arch, more, *_ = FOLDERS[name]
    sizes = {k: v for k, v in SIZES.items() if k not in LEFT_OUT.get(name, ()) or k == "vocab_size"}
    return {"architectures": [arch], "model_type": name.removesuffix("3") if name == "llama3" else name,
            "dtype": "float32", **sizes, **more}


def tensors(name, seed=0):
    """{name: float32 array}"""
    if name in MORE:
        return _drawn(name, np.random.default_rng(seed))
    _, _, prefix, layer, ends, biased = FOLDERS[name]
    shapes = ends | {f"{prefix}.{i}.{k}": s for i in range(LAYERS) for k, s in layer.items()}
    rng, out = np.random.default_rng(seed), {}
    for k, shape in shapes.items():
        x = rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5)
        norm = len(shape) == 1 and not name.startswith("gemma")             # gemma's norms are 1 + w
        out[k + ".weight"] = (x + norm).astype(np.float32)
        if any(part in k for part in biased):
            n = shape[-1] if name == "gpt2" else shape[0]
            out[k + ".bias"] = (0.1 * rng.standard_normal(n)).astype(np.float32)
    return out


def _drawn(name, rng):
    out = {}
    for k, shape in _shapes()[name]["shapes"].items():
        one = len(shape) == 1
        x = rng.standard_normal(shape) * (0.1 if one else 1.5 / shape[-1] ** 0.5)
        norm = one and k.endswith(".weight") and (name not in FROM_ONE or "linear_attn" in k)
        out[k] = (x + norm).astype(np.float32)
    return out


def write(folder, name, save):
    """config.json and model.safetensors; save: of ggjit.models."""
    return write_folder(folder, config(name), tensors(name), save)


def main(names):
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file
    kept, out = (_shapes() | {}, json.loads(GOLDENS.read_text())) if names else ({}, {})
    for name, (arch, more) in MORE.items():
        if names and name not in names:
            continue
        cls = getattr(transformers, arch)
        with tempfile.TemporaryDirectory() as tmp:
            sizes = {k: v for k, v in _MORE_SIZES.items() if k not in _UNKNOWN.get(name, ())}
            cls(cls.config_class(**sizes | more)).save_pretrained(tmp)
            about = json.loads((pathlib.Path(tmp) / "config.json").read_text())
            shapes = {k: list(v.shape) for k, v in load_file(pathlib.Path(tmp) / "model.safetensors").items()}
        unused = ("dropout", "initializer", "_version", "use_cache", "time_step")
        kept[name] = {"config": {k: v for k, v in about.items() if not any(u in k for u in unused)},
                      "shapes": shapes}
    SHAPES.write_text(json.dumps(kept))
    _shapes.cache_clear()
    for name in NAMES if not names else set(names) & set(NAMES):
        with tempfile.TemporaryDirectory() as tmp:
            write(tmp, name, lambda path, x, about: save_file(x, str(path), about))
            cls = getattr(transformers, config(name)["architectures"][0])
            model = cls.from_pretrained(tmp, attn_implementation="eager").float().eval()
            with torch.no_grad():
                result = model(torch.tensor([IDS]))
            values = result.logits if hasattr(result, "logits") else result.last_hidden_state
            values = values if name in RANKS else values[0, ::3, :6]
            out[name] = [[round(float(v), 5) for v in row] for row in values]
        print(name, file=sys.stderr)
    with tempfile.TemporaryDirectory() as tmp, torch.no_grad():
        moonshine(tmp, lambda path, x, about: save_file(x, str(path), about))
        m = transformers.MoonshineForConditionalGeneration.from_pretrained(tmp, attn_implementation="eager").eval()
        x = torch.tensor(moonshine_sound()[None])
        found = {"heard": m.model.encoder(x).last_hidden_state[0, ::3, :6],
                 "logits": m(input_values=x, decoder_input_ids=torch.tensor([IDS])).logits[0, ::3, :6]}
        out["moonshine"] = {k: [[round(float(v), 5) for v in row] for row in values] for k, values in found.items()}
    GOLDENS.write_text(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
