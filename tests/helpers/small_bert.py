"""A tiny BERT in the form of MiniLM's package, and as a GGUF file."""
import json

import numpy as np

from ggjit.models.files import minilm

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s", "ran", "▁"]
CONFIG = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
              max_position_embeddings=16, type_vocab_size=2, layer_norm_eps=1e-12)


def package(source, **sizes):
    """Write the package's files into the folder `source`; the weights by their GGUF names.  sizes: other ones than
    CONFIG's."""
    from safetensors.numpy import save_file
    source.mkdir(parents=True)
    rng, config = np.random.default_rng(0), CONFIG | sizes
    weights = {n: rng.standard_normal(s, np.float32) for n, s in minilm._shapes(config)}
    olds = dict(minilm._names(config))
    save_file({olds[n]: w for n, w in weights.items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    (source / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    return weights
