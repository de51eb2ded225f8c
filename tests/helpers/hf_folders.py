"""Small Hugging Face folders of every architecture that can be converted, and what transformers makes of them.

    python hf_folders.py > ../models/hf_goldens.json            (needs torch and transformers)
"""
import json
import pathlib
import sys
import tempfile

import numpy as np

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


def config(name):
    arch, more, *_ = FOLDERS[name]
    sizes = {k: v for k, v in SIZES.items() if k not in LEFT_OUT.get(name, ()) or k == "vocab_size"}
    return {"architectures": [arch], "model_type": name.removesuffix("3") if name == "llama3" else name,
            "dtype": "float32", **sizes, **more}


def tensors(name, seed=0):
    """{name: float32 array}"""
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


def write(folder, name, save):
    """config.json and model.safetensors; save: of ggjit.models."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name)))
    save(folder / "model.safetensors", tensors(name), {"format": "pt"})
    return folder


def main():
    import torch
    import transformers
    from safetensors.numpy import save_file
    out = {}
    for name, (arch, *_) in FOLDERS.items():
        with tempfile.TemporaryDirectory() as tmp:
            write(tmp, name, lambda path, x, about: save_file(x, str(path), about))
            model = getattr(transformers, arch).from_pretrained(tmp, attn_implementation="eager").float().eval()
            with torch.no_grad():
                result = model(torch.tensor([IDS]))
            values = (result.logits if hasattr(result, "logits") else result.last_hidden_state)[0, ::3, :6]
            out[name] = [[round(float(v), 5) for v in row] for row in values]
        print(name, file=sys.stderr)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
