"""The small Whisper of whisper_reference.py as a folder of Hugging Face and one of CTranslate2."""
import json
import struct

import numpy as np

from ggjit.models import save_safetensors
from ggjit.models.convert import whisper as convert_whisper
from ggjit.models.core.byte_chars import CHAR_OF_BYTE
from helpers.whisper_reference import EOT, SIZES, token_bytes


def write_hf(folder, tensors):
    folder.mkdir()
    names = dict(convert_whisper.HF_NAMES)
    out = {}
    for name, a in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(ours, theirs) if ours != "attn." else name.replace(".attn.", ".self_attn.")
        out["model." + name] = a.reshape(-1) if name.endswith(("conv1.bias", "conv2.bias")) else a
    save_safetensors(folder / "model.safetensors", out)
    vocab = {"".join(CHAR_OF_BYTE[b] for b in t): i for i, t in enumerate(token_bytes())}
    s = SIZES
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": EOT}))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "whisper", "d_model": s["n_text_state"], "encoder_layers": s["n_audio_layer"],
        "decoder_layers": s["n_text_layer"], "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "vocab_size": s["n_vocab"], "num_mel_bins": 80, "max_source_positions": s["n_audio_ctx"],
        "max_target_positions": s["n_text_ctx"], "activation_function": "gelu"}))
    return folder


def write_ct2(folder, tensors, int8):
    """model.bin of CTranslate2: fused projections, keys with a bias of zeros; matrices in int8 with a scale a row."""
    folder.mkdir()
    out, ln = {}, {"weight": "gamma", "bias": "beta"}

    def put(name, *parts):
        a = np.concatenate(parts)
        if int8 and a.ndim == 2 and "encodings" not in name:
            scale = 127 / np.abs(a).max(1)
            out[name], out[name + "_scale"] = np.round(a * scale[:, None]).astype(np.int8), scale.astype(np.float32)
        else:
            out[name] = a
    for side, n in (("encoder", 2), ("decoder", 2)):
        for i in range(n):
            p, q = f"{side}.blocks.{i}", f"{side}/layer_{i}"
            for kind in ("weight", "bias"):
                put(f"{q}/ffn/layer_norm/{ln[kind]}", tensors[f"{p}.mlp_ln.{kind}"])
                for j in (0, 1):
                    put(f"{q}/ffn/linear_{j}/{kind}", tensors[f"{p}.mlp.{2 * j}.{kind}"])
                for ours, theirs, groups in (("attn", "self_attention", ("query key value", "out")),
                                             ("cross_attn", "attention", ("query", "key value", "out"))):
                    if f"{p}.{ours}_ln.weight" not in tensors:
                        continue
                    put(f"{q}/{theirs}/layer_norm/{ln[kind]}", tensors[f"{p}.{ours}_ln.{kind}"])
                    for j, group in enumerate(groups):
                        put(f"{q}/{theirs}/linear_{j}/{kind}", *(
                            tensors.get(f"{p}.{ours}.{c}.{kind}", np.zeros(128, np.float32)) for c in group.split()))
        for kind in ("weight", "bias"):
            norm = {"encoder": "encoder.ln_post", "decoder": "decoder.ln"}[side]
            put(f"{side}/layer_norm/{ln[kind]}", tensors[f"{norm}.{kind}"])
        put(f"{side}/position_encodings/encodings", tensors[f"{side}.positional_embedding"])
    for i in (1, 2):
        put(f"encoder/conv{i}/weight", tensors[f"encoder.conv{i}.weight"])
        put(f"encoder/conv{i}/bias", tensors[f"encoder.conv{i}.bias"].reshape(-1))
    put("decoder/embeddings/weight", tensors["decoder.token_embedding.weight"])
    out["encoder/num_heads"] = np.array(2, np.int16)

    def text(s):
        return struct.pack("<H", len(s) + 1) + s.encode() + b"\0"
    raw = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(out))]
    for name, a in out.items():
        code = {"float32": 0, "int8": 1, "int16": 2}[a.dtype.name]
        raw += [text(name), struct.pack(f"<B{a.ndim}I", a.ndim, *a.shape), struct.pack("<BI", code, a.nbytes),
                a.tobytes()]
    raw += [struct.pack("<I", 1), text("decoder/projection/weight"), text("decoder/embeddings/weight")]
    (folder / "model.bin").write_bytes(b"".join(raw))
    words = ["".join(CHAR_OF_BYTE[b] for b in t) for t in token_bytes()]
    (folder / "vocabulary.json").write_text(json.dumps([*words, "<|endoftext|>"]))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    return folder
