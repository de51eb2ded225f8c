"""Whisper models as GGUF files: folders of Hugging Face and of CTranslate2, and whisper.cpp's .bin.

    model.encoder.layers.3.self_attn.q_proj.weight     Hugging Face; proj_out is the embedding
    encoder/layer_3/self_attention/linear_0/weight     CTranslate2; queries, keys and values in one, int8 with a scale
        -> encoder.blocks.3.attn.query.weight          OpenAI, whisper.cpp and our GGUF (models/files/whisper_file.py)

Matrices get the type that is asked for; positions, vectors and the biases of convolutions are F32, and convolutions
F16 where that type has blocks.
"""
import pathlib
import re

import numpy as np

from ggjit.models.convert.tensors import float32, pieces
from ggjit.models.convert.vocabulary import read_json
from ggjit.models.files.ct2_file import read_ct2
from ggjit.models.files.load_tensors import mapped_numbers
from ggjit.models.files.mel import mel_filters
from ggjit.models.files.save import Entry, encoded
from ggjit.models.files.whisper_file import CONV_BIASES, known_alignment_heads
from ggjit.ops.core.errors import BadFile, ModelError
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.types.quantize import quantize
from ggjit.ops.types.validate import first_bad_block

PIECE = 1 << 22
# parts of Hugging Face's names -> OpenAI's; the first that fits counts
HF_NAMES = (("encoder_attn_layer_norm", "cross_attn_ln"), ("self_attn_layer_norm", "attn_ln"),
            ("encoder_attn.", "cross_attn."), ("self_attn.", "attn."), (".layers.", ".blocks."),
            (".q_proj.", ".query."), (".k_proj.", ".key."), (".v_proj.", ".value."), (".out_proj.", ".out."),
            ("final_layer_norm", "mlp_ln"), (".fc1.", ".mlp.0."), (".fc2.", ".mlp.2."),
            ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln"),
            ("embed_positions.weight", "positional_embedding"), ("embed_tokens", "token_embedding"))
CT2_NORMS = {"gamma": "weight", "beta": "bias"}
MODEL_BIN, VOCABULARIES = "model.bin", ("vocabulary.json", "vocabulary.txt")
END = "<|endoftext|>"
PART = re.compile(r"(ffn|self_attention|attention)/(?:(layer_norm)/(\w+)|linear_(\d)/(weight|bias))")


def is_ct2(folder):
    """Does the folder hold a model of CTranslate2?"""
    return (folder / MODEL_BIN).is_file() and any((folder / name).is_file() for name in VOCABULARIES)


# ---------------------------------------------------------------- Hugging Face
def from_hf(folder, config, sources, kind):
    """(metadata, [Entry]) of a folder whose config.json says "whisper".  sources: {name: leaf}."""
    if config.get("activation_function", default="gelu") != "gelu":
        raise ModelError(f"{config.path}: activation {config['activation_function']!r}, Whisper has gelu")
    tensors = {}
    for name, leaf in sources.items():
        new = name.removeprefix("model.")
        if new == "proj_out.weight":            # the embedding again
            continue
        for old, ours in HF_NAMES:
            new = new.replace(old, ours)
        tensors[new] = mapped_numbers(leaf)
    n_vocab = config["vocab_size"]
    words = read_json(folder / "vocab.json", needed=False)
    if not words:
        words = read_json(folder / "tokenizer.json")["model"]["vocab"]
    heads = read_json(folder / "generation_config.json", needed=False).get("alignment_heads")
    sizes = {"block_count": config["encoder_layers"], "decoder_block_count": config["decoder_layers"],
             "embedding_length": config["d_model"], "attention.head_count": config["decoder_attention_heads"],
             "context_length": config["max_target_positions"], "vocab_size": n_vocab,
             "encoder.context_length": config["max_source_positions"], "encoder.mel_count": config["num_mel_bins"]}
    if config["encoder_attention_heads"] != sizes["attention.head_count"]:
        raise ModelError(f"{config.path}: encoder and decoder have different numbers of heads")
    texts = [""] * min(n_vocab, max(words.values()) + 1)
    for text, id in words.items():
        if 0 <= id < len(texts):
            texts[id] = text
    return _metadata(folder, sizes, texts, heads, kind), _entries(folder, tensors, kind)


# ---------------------------------------------------------------- CTranslate2
def from_ct2(folder, kind):
    """(metadata, [Entry]) of a folder of CTranslate2."""
    path = folder / MODEL_BIN
    spec, variables = read_ct2(str(path))
    if spec != "WhisperSpec":
        raise ModelError(f"{path}: a {spec}, not a Whisper")
    try:
        tensors = _ct2_tensors(variables)
        n_head = _ct2_heads(variables)
        width = tensors["decoder.token_embedding.weight"].shape[1]
        sizes = {side: len({n for n in tensors if re.fullmatch(side + r"\.blocks\.\d+\.attn_ln\.weight", n)})
                 for side in ("encoder", "decoder")}
        sizes = {"block_count": sizes["encoder"], "decoder_block_count": sizes["decoder"], "embedding_length": width,
                 "attention.head_count": n_head or width // 64,
                 "context_length": len(tensors["decoder.positional_embedding"]),
                 "vocab_size": len(tensors["decoder.token_embedding.weight"]),
                 "encoder.context_length": len(tensors["encoder.positional_embedding"]),
                 "encoder.mel_count": tensors["encoder.conv1.weight"].shape[1]}
    except (KeyError, IndexError, ValueError) as e:
        raise BadFile(f"{path}: not a complete Whisper ({type(e).__name__}: {e}); fetch the folder again") from None
    about = read_json(folder / "config.json", needed=False)
    if (folder / VOCABULARIES[0]).is_file():
        texts = read_json(folder / VOCABULARIES[0], kind=list)
    else:
        texts = (folder / VOCABULARIES[1]).read_text(encoding="utf-8").splitlines()
    return _metadata(folder, sizes, texts, about.get("alignment_heads"), kind), _entries(folder, tensors, kind)


def _ct2_heads(variables):
    """Heads, where the file says; else None."""
    found = next((v for name, v in variables.items() if name.endswith("num_heads")), None)
    return None if found is None else int(found.reshape(-1)[0])


def _ct2_tensors(variables):
    """{OpenAI's name: array}"""
    def values(name):
        """The values of a variable; those stored as whole numbers are multiplied by their scale."""
        x = variables[name]
        if x.dtype == np.int8:
            scale = variables[name + "_scale"].astype(np.float32)
            return x.astype(np.float32) / scale.reshape(-1, *[1] * (x.ndim - 1))
        return x
    out = {}
    for name in variables:
        side, _, rest = name.partition("/")
        layer = re.fullmatch(r"layer_(\d+)/(.*)", rest)
        if side not in ("encoder", "decoder"):
            continue
        if layer:
            p, rest = f"{side}.blocks.{layer[1]}", layer[2]
            part = PART.fullmatch(rest)
            if part is None:
                continue
            where, norm, kind, i, what = part.groups()
            ours = {"ffn": "mlp", "self_attention": "attn", "attention": "cross_attn"}[where]
            if norm:
                out[f"{p}.{ours}_ln.{CT2_NORMS[kind]}"] = values(name)
            elif where == "ffn":
                out[f"{p}.mlp.{2 * int(i)}.{what}"] = values(name)
            else:
                out |= _projections(f"{p}.{ours}", where, int(i), what, values(name))
        elif rest in ("layer_norm/gamma", "layer_norm/beta"):
            norm = "encoder.ln_post" if side == "encoder" else "decoder.ln"
            out[f"{norm}.{CT2_NORMS[rest.partition('/')[2]]}"] = values(name)
        elif rest == "embeddings/weight":
            out["decoder.token_embedding.weight"] = values(name)
        elif rest == "position_encodings/encodings":
            out[f"{side}.positional_embedding"] = values(name)
        elif conv := re.fullmatch(r"(conv[12])/(weight|bias)", rest):
            out[f"{side}.{conv[1]}.{conv[2]}"] = values(name)
    return out


def _projections(p, where, i, what, x):
    """The parts of a fused matrix or bias; the bias of keys is zero."""
    names = ([("query", "key", "value"), ("out",)] if where == "self_attention" else
             [("query",), ("key", "value"), ("out",)])[i]
    parts = dict(zip(names, np.split(x, len(names)), strict=True))
    if what == "bias" and "key" in parts and np.any(parts.pop("key")):
        raise ValueError(f"{p}: keys have a bias, Whisper's have none")
    return {f"{p}.{name}.{what}": part for name, part in parts.items()}


# ---------------------------------------------------------------- the new file
def _metadata(folder, sizes, texts, heads, kind):
    """{key: (kind, bytes)}"""
    texts = texts[:texts.index(END)] if END in texts else texts
    if heads is None:
        heads = known_alignment_heads(sizes["block_count"], sizes["decoder_block_count"], sizes["embedding_length"],
                                      sizes["vocab_size"])
    keys = {"general.architecture": "whisper", "general.type": "model",
            "general.name": pathlib.Path(folder).resolve().name,
            "general.file_type": {F32: 0, F16: 1, BF16: 32}.get(kind, 7), "general.quantization_version": 2,
            **{f"whisper.{key}": int(value) for key, value in sizes.items()},
            "whisper.encoder.mel_filters": mel_filters(int(sizes["encoder.mel_count"])).reshape(-1),
            "whisper.alignment_heads": np.array(heads, np.int32).reshape(-1), "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": texts}
    return {key: encoded(value, key) for key, value in keys.items()}


def _entries(folder, tensors, kind):
    return [entry(folder, name, x[None].T if name in CONV_BIASES and x.ndim == 1 else x, kind)
            for name, x in tensors.items()]


def entry(folder, name, x, kind):
    """The Entry of a tensor; kind: of matrices."""
    if x.ndim < 2 or name.endswith("positional_embedding") or name in CONV_BIASES:
        kind = F32
    elif x.shape[-1] % kind.block:
        kind = F16

    def chunks():
        for piece in pieces(x, PIECE):
            raw = quantize(kind, np.ascontiguousarray(float32(piece)))
            bad = first_bad_block(kind, raw)
            if bad is not None:
                raise BadFile(f"{folder}: tensor {name!r} as {kind!r}: {bad[1]}; the file is damaged, or its numbers "
                              f"are too large for the type: take F32")
            yield raw
    return Entry(name, kind, tuple(reversed(x.shape)), chunks)
