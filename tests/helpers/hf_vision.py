"""Small random models of transformers that see, saved as Hugging Face folders, and their logits behind a picture.

    python -m helpers.hf_vision NAME FOLDER         (needs torch and transformers)

FOLDER gets the model, and results.npz: `ids` with -1 where the picture's vectors are, `logits` of every token.
"""
import inspect
import json
import pathlib
import sys

import numpy as np

D, FF, TEXT, VOCAB, IMAGE, BREAK = 32, 48, 64, 96, 90, 91
TEXT_SIZES = {"hidden_size": TEXT, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": 1,
              "eos_token_id": 2, "pad_token_id": 0}
SEEN = {"hidden_size": D, "intermediate_size": FF, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 4, "in_channels": 3}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
# name: (class, class of text_config and what it says more, of vision_config, of the whole, the picture's size)
MODELS = {
    "llava": ("LlavaForConditionalGeneration", "LlamaConfig", {}, "CLIPVisionConfig",
              {**SEEN, "image_size": 24, "patch_size": 8}, {"image_token_index": IMAGE}, (24, 24)),
    "pixtral": ("LlavaForConditionalGeneration", "MistralConfig", {"head_dim": 16}, "PixtralVisionConfig",
                {**SEEN, "image_size": 64, "patch_size": 4},
                {"image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
                (24, 32)),
    "mistral3": ("Mistral3ForConditionalGeneration", "MistralConfig", {"head_dim": 16}, "PixtralVisionConfig",
                 {**SEEN, "image_size": 64, "patch_size": 4},
                 {"image_token_index": IMAGE, "spatial_merge_size": 2}, (32, 40)),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3TextConfig",
               {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}, "SiglipVisionConfig",
               {**SEEN, "image_size": 32, "patch_size": 4, "hidden_act": "gelu_pytorch_tanh"},
               {"image_token_index": IMAGE, "image_token_id": IMAGE, "mm_tokens_per_image": 4}, (32, 32)),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaConfig", {}, "Idefics3VisionConfig",
                 {**SEEN, "image_size": 16, "patch_size": 4}, {"image_token_id": IMAGE, "scale_factor": 2}, (16, 16)),
    "smolvlm": ("SmolVLMForConditionalGeneration", "LlamaConfig", {}, "SmolVLMVisionConfig",
                {**SEEN, "image_size": 16, "patch_size": 4}, {"image_token_id": IMAGE, "scale_factor": 2}, (16, 16)),
    "qwen2vl": ("Qwen2VLForConditionalGeneration", "", MROPE, "",
                {**QWEN, "depth": 2, "embed_dim": D, "hidden_size": TEXT, "mlp_ratio": 2},
                {"image_token_id": IMAGE}, (24, 40)),
    "qwen25vl": ("Qwen2_5_VLForConditionalGeneration", "", MROPE, "",
                 {**QWEN, "depth": 4, "hidden_size": D, "intermediate_size": FF, "out_hidden_size": TEXT,
                  "window_size": 16, "fullatt_block_indexes": [1, 3]}, {"image_token_id": IMAGE}, (24, 40))}
MEAN, STD = [0.5, 0.45, 0.4], [0.3, 0.25, 0.28]


def picture(name):
    """uint8 (height, width, 3)"""
    from helpers.vision_files import picture as pattern
    return pattern(1, *MODELS[name][-1])


def _config(transformers, name):
    cls, text, more_text, seen, of_seen, more, _ = MODELS[name]
    kind = getattr(transformers, cls).config_class
    text = {**TEXT_SIZES, **more_text}
    if MODELS[name][1]:
        text = getattr(transformers, MODELS[name][1])(**text)
        of_seen = getattr(transformers, seen)(**of_seen)
    return kind(text_config=text, vision_config=of_seen, **more)


def _drawn(torch, model):
    """Weights of a size that keeps values near 1."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        one = p.ndim == 1 or "position_embedding" in name
        x = torch.randn_like(p) * (0.1 if one else p[0].numel() ** -0.5)
        p.data = x + 1 if one and "norm" in name and name.endswith("weight") and "soft_emb" not in name else x


def _pixels(name, x):
    """(what forward takes, tokens of the picture)"""
    numbers = ((x / np.float32(255) - np.float32(MEAN)) / np.float32(STD)).transpose(2, 0, 1).astype(np.float32)
    p, h, w = MODELS[name][4]["patch_size"], *x.shape[:2]
    rows, columns = h // p, w // p
    if name.startswith("qwen"):
        t = np.stack([numbers, numbers]).reshape(2, 3, rows // 2, 2, p, columns // 2, 2, p)
        t = t.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
        return {"pixel_values": t, "image_grid_thw": np.array([[1, rows, columns]])}, [IMAGE] * (rows * columns // 4)
    if name in ("pixtral", "mistral3"):
        m = MODELS[name][5].get("spatial_merge_size", 1)
        row = [IMAGE] * (columns // m)
        ids = [i for _ in range(rows // m) for i in (*row, BREAK)][:-1]
        return {"pixel_values": numbers[None], "image_sizes": np.array([[h, w]])}, ids
    n = {"llava": rows * columns, "gemma3": 4}.get(name, rows * columns // 4)
    return {"pixel_values": numbers[None] if name not in ("idefics3", "smolvlm") else numbers[None, None]}, [IMAGE] * n


def main(name, folder):
    import torch
    import transformers
    folder = pathlib.Path(folder)
    model = getattr(transformers, MODELS[name][0])(_config(transformers, name)).eval()
    _drawn(torch, model)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD,
                                                                 "size": {"longest_edge": 16}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(BREAK): {
        "content": "[IMG_BREAK]"}}}))
    seen, picture_ids = _pixels(name, picture(name))
    ids = [5, 17, *picture_ids, 41, 8, *picture_ids, 3, 60, 22]
    takes, more = inspect.signature(model.forward).parameters, {}
    kinds = torch.tensor([[int(i == IMAGE) for i in ids]])
    more |= {key: kinds for key in ("mm_token_type_ids", "token_type_ids") if key in takes and name != "llava"}
    axis = 1 if name in ("idefics3", "smolvlm") else 0
    twice = {k: torch.tensor(np.concatenate([v, v], axis)) for k, v in seen.items()}
    with torch.no_grad():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        out = model(input_ids=torch.tensor([ids]), attention_mask=mask, **twice, **more)
    # a picture's vectors have their rows' ends among them
    told = [-1 if i in (IMAGE, BREAK) else i for i in ids]
    np.savez(folder / "results.npz", ids=told, logits=out.logits[0].float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
