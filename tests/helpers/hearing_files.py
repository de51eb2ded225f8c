"""Small random-weight mmproj files of networks that hear, and libmtmd's vectors of a sound.

    python -m helpers.hearing_files TOOLS NAME FOLDER   writes text.gguf and hearing.gguf, and vectors.npz: `I.K` is the
                                                        K-th window of sound I, `logits` those after PROMPT

A process of its own, so that no two ggml libraries meet.
"""
import os
import sys
import wave

import gguf
import numpy as np

from helpers.gguf_files import written
from helpers.vision_files import MTMD, TEXT, logits, opened, vectors, write_text

D, FF, HEADS, LAYERS, MELS, FRAMES = 48, 64, 4, 2, 20, 1500
NAMES = "ultravox", "qwen2a", "voxtral", "gemma4a"
LOUD = {"gemma4a": 100}                 # so much louder; libmtmd's least energy is not added, as the model's is
STACK = {"ultravox": 4, "voxtral": 4}
PROMPT = f"Hear {MTMD} now:"
SECONDS = 1.3, 30.5


def sound(n, name=""):
    """float32 samples at 16 kHz, so loud that libmtmd's least energy is below what counts."""
    t, rng = np.arange(int(16000 * SECONDS[n])) / 16000, np.random.default_rng(n)
    waves = sum(np.sin(2 * np.pi * f * t * (1 + 0.1 * np.sin(3 * t))) for f in (220, 700 + 100 * n, 2500))
    return (LOUD.get(name, 1) * (0.32 * waves + 0.01 * rng.standard_normal(len(t)))).astype(np.float32)


def drawn(name, seed=0):
    """{name: array}"""
    rng, out, n = np.random.default_rng(seed), {}, STACK.get(name, 1) * D

    def put(tensor, *shape):
        one = len(shape) == 1 or shape[-1] == 1
        x = rng.standard_normal(shape) * (0.1 if one else 1 / np.prod(shape[1:]) ** 0.5)
        out[tensor] = (x + (one and ("ln" in tensor or "norm" in tensor) and tensor.endswith("weight"))).astype("f4")

    def both(tensor, *shape):
        put(f"{tensor}.weight", *shape)
        put(f"{tensor}.bias", shape[0])
    if name == "gemma4a":
        _conformer(put, out)
        return out
    for i, n_in in ((1, MELS), (2, D)):
        put(f"a.conv1d.{i}.weight", D, n_in, 3)
        put(f"a.conv1d.{i}.bias", D, 1)
    put("a.position_embd.weight", FRAMES, D)
    for i in range(LAYERS):
        for part, *shape in (("attn_q", D, D), ("attn_v", D, D), ("attn_out", D, D), ("ffn_up", FF, D),
                             ("ffn_down", D, FF), ("ln1", D), ("ln2", D)):
            both(f"a.blk.{i}.{part}", *shape)
        put(f"a.blk.{i}.attn_k.weight", D, D)
    both("a.post_ln", D)
    if name == "qwen2a":
        both("mm.a.fc", TEXT, D)
        return out
    put("mm.a.mlp.1.weight", 96, n)
    put("mm.a.mlp.2.weight", TEXT, 48 if name == "ultravox" else 96)
    if name == "ultravox":
        put("mm.a.norm_pre.weight", n)
        put("mm.a.norm_mid.weight", 48)
    return out


def _conformer(put, out):
    put("a.conv1d.0.weight", 6, 1, 3, 3)
    put("a.conv1d.1.weight", 8, 6, 3, 3)
    for tensor, *shape in (
            ("a.conv1d.0.norm", 6), ("a.conv1d.1.norm", 8), ("a.input_projection", D, 8 * MELS // 4),
            ("a.pre_encode.out", 56, D), ("mm.a.soft_emb_norm", 56), ("mm.a.input_projection", TEXT, 56)):
        put(tensor + ".weight", *shape)
    put("a.pre_encode.out.bias", 56)
    for i in range(LAYERS):
        for part, *shape in (
                ("ffn_norm", D), ("ffn_up", FF, D), ("ffn_down", D, FF), ("ffn_post_norm", D), ("ffn_norm_1", D),
                ("ffn_up_1", FF, D), ("ffn_down_1", D, FF), ("ffn_post_norm_1", D), ("attn_pre_norm", D),
                ("attn_q", D, D), ("attn_k", D, D), ("attn_v", D, D), ("attn_out", D, D), ("attn_post_norm", D),
                ("attn_k_rel", D, D), ("conv_norm", D), ("conv_pw1", 2 * D, D), ("conv_dw", D, 5), ("norm_conv", D),
                ("conv_pw2", D, D), ("ln2", D), ("per_dim_scale", D // HEADS)):
            put(f"a.blk.{i}.{part}.weight", *shape)
        out[f"a.blk.{i}.per_dim_scale.weight"] += 1
        for what, limit in (("input_min", -1.5), ("input_max", 1.25), ("output_max", 0.75)):
            out[f"a.blk.{i}.attn_v.{what}"] = np.full(1, limit, np.float32)


def write_wav(path, samples):
    with wave.open(str(path), "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(16000)
        w.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())


def write(name, path, without=(), projector=None, **keys):
    """The mmproj file."""
    w = gguf.GGUFWriter(str(path), "clip")
    w.add_bool("clip.has_audio_encoder", True)
    w.add_string("clip.projector_type", projector or name)
    values = {"embedding_length": D, "feed_forward_length": FF, "block_count": LAYERS, "attention.head_count": HEADS,
              "projection_dim": TEXT, "num_mel_bins": MELS}
    values |= {"projector.stack_factor": STACK[name]} if name in STACK else {}
    for key, value in (values | keys).items():
        w.add_uint32(f"clip.audio.{key}", value)
    w.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    for tensor, x in drawn(name).items():
        if tensor not in without:
            w.add_tensor(tensor, x)
    return written(w, path)


def main(tools, name, folder):
    text, path = (os.path.join(folder, f) for f in ("text.gguf", "hearing.gguf"))
    write_text(tools, text)
    write(name, path)
    _, model, L, context = opened(text, path)
    found = {f"{n}.{k}": v for n in range(len(SECONDS))
             for k, v in enumerate(vectors(L, context, sound(n, name), TEXT))}
    found["logits"] = logits(L, context, model, PROMPT, [sound(0, name)])
    np.savez(os.path.join(folder, "vectors.npz"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
