"""Small random-weight GGUFs that pool their tokens or rank texts, and llama.cpp's results on them.

    python -m helpers.pooled_files TOOLS NAME FOLDER        writes model.gguf, and pooled.npy: llama.cpp's
                                                            numbers of IDS

Files of arch_files.py with other metadata and a classifier.  A process of its own, so that no two ggml libraries meet.
"""
import os
import sys

import gguf
import numpy as np

from helpers import arch_files
from helpers.gguf_files import written

IDS = np.random.default_rng(11).integers(0, 96, 30).tolist()
D = arch_files.SMALL["embd"]
DENSE = {"cls.weight": (D, D), "cls.bias": (D,)}
OUT = {"cls.output.weight": (1, D), "cls.output.bias": (1,)}
# {name: (architecture, pooling_type, {key: value}, {tensor: shape})}
CASES = {"llama-mean": ("llama", 1, {}, {}), "gemma-cls": ("gemma", 2, {}, {}), "qwen3-last": ("qwen3", 3, {}, {}),
         "qwen3-rank": ("qwen3", 4, {"classifier.output_labels": ["yes", "no"]}, {"cls.output.weight": (2, D)}),
         "bert-rank": ("bert", 4, {}, DENSE | OUT),
         "bert-direct": ("bert", 4, {"classifier.output_labels": ["a", "b", "c"]},
                         {"cls.output.weight": (3, D), "cls.output.bias": (3,)}),
         "neo-bert-rank": ("neo-bert", 4, {}, DENSE | OUT),
         "jina-bert-v2-rank": ("jina-bert-v2", 4, {}, {"cls.weight": (1, D), "cls.bias": (1,)}),
         "modern-bert-rank": ("modern-bert", 4, {}, {"cls.weight": (D, D), "cls.norm.weight": (D,), **OUT}),
         "modern-bert-first": ("modern-bert", 4, {"classifier.pooling_type": 2},
                               {"cls.weight": (D, D), "cls.norm.weight": (D,), **OUT})}


def write(tools, name, path):
    """The file; its number of pooled values."""
    arch, pooling, keys, tensors = CASES[name]
    base = f"{path}.base"
    arch_files.write(tools, arch, base)
    old, rng = gguf.GGUFReader(base), np.random.default_rng(5)
    w = gguf.GGUFWriter(str(path), arch)
    ours = {f"{arch}.{key}" for key in ("pooling_type", *keys)}
    for field in old.fields.values():
        if field.name not in ours and not field.name.startswith("GGUF.") and field.name != "general.architecture":
            w.add_key_value(field.name, field.contents(), field.types[0],
                            field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None)
    w.add_pooling_type(gguf.PoolingType(pooling))
    for key, value in keys.items():
        (w.add_array if isinstance(value, list) else w.add_uint32)(f"{arch}.{key}", value)
    for t in old.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    for tensor, shape in tensors.items():
        x = rng.standard_normal(shape) / np.sqrt(shape[-1])
        w.add_tensor(tensor, (1 + 0.2 * x if "norm" in tensor else x).astype(np.float32))
    written(w, path)
    os.remove(base)
    heads = [shape[0] for tensor, shape in tensors.items() if tensor.endswith(".weight")]
    return heads[-1] if heads else D


def main(tools, name, folder):
    path = os.path.join(folder, "model.gguf")
    n = write(tools, name, path)
    from peer_llamacpp import LlamaLib
    lib = LlamaLib()                        # owns the log callback, so it has to live as long as the library is used
    c = lib.load(path).context(n_ctx=256, flash=0, kv=0, embeddings=True)
    if "bert" in name:
        c.decode_embed(IDS)
    else:
        c.decode(IDS, all_logits=True, want=False)
        c.L.llama_synchronize(c.h)
    values = np.ctypeslib.as_array(c.L.llama_get_embeddings_seq(c.h, 0), (n,)).copy()
    np.save(os.path.join(folder, "pooled.npy"), values)


if __name__ == "__main__":
    main(*sys.argv[1:])
