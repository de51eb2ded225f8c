"""Small llama GGUFs made on the spot, whole or with one thing wrong."""
import gguf
import numpy as np

import ggjit as gg
from ggjit.models import load_model
from helpers.gguf_files import written

DIM, HEADS, KV_HEADS, FF, VOCAB, LAYERS, CTX = 64, 4, 2, 96, 48, 2, 64
SHAPES = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
for _i in range(LAYERS):
    SHAPES |= {f"blk.{_i}.{name}.weight": shape for name, shape in {
        "attn_norm": (DIM,), "attn_q": (DIM, DIM), "attn_k": (DIM // 2, DIM), "attn_v": (DIM // 2, DIM),
        "attn_output": (DIM, DIM), "ffn_norm": (DIM,), "ffn_gate": (FF, DIM), "ffn_up": (FF, DIM),
        "ffn_down": (DIM, FF)}.items()}


def write(path, arch="llama", seed=0, type="F32", without=(), shapes=None, metadata=None):
    """Write the model; `without` drops tensors or keys, `shapes` overrides shapes, `metadata` overrides keys."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), arch)
    keys = {"context_length": CTX, "embedding_length": DIM, "block_count": LAYERS, "feed_forward_length": FF,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, **(metadata or {})}
    for key, value in keys.items():
        if key not in without:
            add = {float: w.add_float32, str: w.add_string}.get(value.__class__, w.add_uint32)
            add(f"{arch}.{key}", value)
    w.add_tokenizer_model("no_vocab")
    for name, shape in {**SHAPES, **(shapes or {})}.items():
        if name in without:
            continue
        x = np.ones(shape, np.float32) if len(shape) == 1 else \
            (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        kind = type if len(shape) > 1 else "F32"
        if kind in ("F32", "F16"):
            w.add_tensor(name, x.astype(np.float32 if kind == "F32" else np.float16))
        else:
            w.add_tensor(name, gg.quantize(getattr(gg, kind), x), raw_dtype=gguf.GGMLQuantizationType[kind])
    return written(w, path)


class Words:
    """A tokenizer for files without a vocabulary: `m._tokenizer = Words()`."""
    stop_ids = ()

    def stream(self):
        return self

    def push(self, token):
        return f"{token} "

    def flush(self):
        return ""


def loaded(path, **options):
    """A model of a small file, whose tokens are words."""
    m = load_model(path, **{"n_threads": 1, "reserve": False, "n_ctx": 128, "kv_type": "F32", **options})
    m._tokenizer = Words()
    return m
