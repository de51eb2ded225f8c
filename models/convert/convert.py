"""convert_folder: a Hugging Face folder as a GGUF file.

    DIR/config.json  tokenizer.json  *.safetensors     ->  OUT.gguf, as llama.cpp's convert_hf_to_gguf.py writes it

Tensors are mapped and go through one after the other: source, float32, new type.  Names of keys and tensors come from
the gguf package; torch and transformers are not needed.
"""
import contextlib
import logging
import math
import pathlib

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.convert.families import EXPERT, NOT_WEIGHTS, Config, family_of
from ggjit.models.convert.vocabulary import add_vocabulary, read_json
from ggjit.models.core.checks import one_of
from ggjit.models.files.gguf import SCALARS
from ggjit.models.files.load_tensors import load_safetensors
from ggjit.models.files.save import Entry, encoded, write_gguf
from ggjit.ops.core.errors import BadFile, ModelError, extra
from ggjit.ops.core.types import BF16, F16, F32, F64, Q8_0
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.ops.types.validate import first_bad_block

TYPES = {"F32": (F32, 0), "F16": (F16, 1), "BF16": (BF16, 32), "Q8_0": (Q8_0, 7)}      # type, general.file_type
INDEX = "model.safetensors.index.json"
STAY_F32 = ("FFN_GATE_INP", "FFN_GATE_INP_SHEXP", "POS_EMBD", "TOKEN_TYPES")


@typed_call
def convert_folder(folder, out, type="AUTO", pre=None, vocabulary=True, force=False, progress=True):
    """Write the model in a Hugging Face folder to `out`: config.json, tokenizer.json or tokenizer.model, *.safetensors.

        convert_folder("Qwen3-0.6B", "qwen3.gguf", "BF16")

    type: of the matrices: F32, F16, BF16, Q8_0, or AUTO, the source's type of 16 bits (F16 for F32).  pre: name of the
    pre-tokenizer where tokenizer.json cuts text in a way that is not known.  vocabulary=False: token ids only.
    Returns {"paths", "nbytes", "arch", "tensors"}.  Errors: NotSupported (the architecture, the tokenizer), ModelError
    and BadFile with the file at fault, MissingExtra, CannotWrite.
    """
    folder, gguf = pathlib.Path(folder), extra("gguf", "models")
    config = Config(folder / "config.json", read_json(folder / "config.json"))
    family, sources = family_of(config), _sources(folder)
    kind = _type(one_of("type", str(getattr(type, "name", type)).upper(), ("AUTO", *TYPES)), sources)
    entries = _entries(gguf, folder, config, family, sources, TYPES[kind][0])
    config.file_type = TYPES[kind][1]
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.arch]]
    with _silent("gguf"):               # it warns of keys that are set twice, and of tokens outside the vocabulary
        keys = _metadata(gguf, gguf.GGUFWriter(None, arch), folder, config, family, entries, pre, vocabulary)
    paths = write_gguf(out, keys, [entries], force=force, title=f"converting to {kind}" if progress else None)
    return {"paths": paths, "nbytes": sum(e.nbytes for e in entries), "arch": arch, "tensors": len(entries)}


@contextlib.contextmanager
def _silent(name):
    """Inside, the loggers of that package say nothing below errors."""
    logger = logging.getLogger(name)
    before, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.setLevel(before)


def _metadata(gguf, w, folder, config, family, entries, pre, vocabulary):
    """{key: (kind, bytes)}, collected in the GGUFWriter `w`."""
    w.add_type("model")
    w.add_name(gguf.Metadata.id_to_title(folder.resolve().name))
    w.add_size_label(gguf.size_label(*_counts(entries)))
    family.metadata(w, config, gguf)
    _pooling(w, gguf, folder)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if vocabulary:
        add_vocabulary(w, gguf, folder, config, pre)
    else:
        w.add_tokenizer_model("no_vocab")
    return {key: _encoded(key, v) for key, v in w.kv_data[0].items()}


def _counts(entries):
    """(numbers, of which beside experts, of one expert, experts)"""
    experts = [e for e in entries if "_exps." in e.name]
    total = sum(math.prod(e.ne) for e in entries)
    return (total, total - sum(math.prod(e.ne) for e in experts), sum(math.prod(e.ne[:2]) for e in experts),
            experts[0].ne[2] if experts else 0)


def _encoded(key, v):
    """(kind, bytes) of a value as the gguf package holds it."""
    kind = int(v.type)
    if kind in SCALARS:
        return encoded(SCALARS[kind].type(v.value), key)
    if isinstance(v.value, list) and v.value and isinstance(v.value[0], bytes):
        return encoded([text.decode("utf-8", "replace") for text in v.value], key)
    return encoded(v.value, key)


def _sources(folder):
    """{name: Tensor} of all .safetensors files of the folder."""
    index = read_json(folder / INDEX, needed=False).get("weight_map", {})
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise BadFile(f"{folder / INDEX}: weight_map has to map names of tensors to names of files; fetch it again")
    paths = sorted(set(index.values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not paths:
        raise BadFile(f"{folder}: no .safetensors files; PyTorch's .bin files have to be saved as safetensors first")
    out = {}
    for name in paths:
        if not (folder / name).is_file():
            raise BadFile(f"{folder / name}: no such file, but {INDEX} names it; fetch it")
        found = load_safetensors(folder / name)
        double = sorted(found.keys() & out.keys())
        if double:
            raise ModelError(f"{folder / name}: tensor {double[0]!r} is in another file of the folder too; leave only "
                             f"the files of one model there")
        out |= found
    missing = [name for name in index if name not in out]
    if missing:
        raise BadFile(f"{folder}: tensor {missing[0]!r} is in no file, but {INDEX} names it; "
                      f"fetch the folder again")
    return out


def _type(kind, sources):
    if kind != "AUTO":
        return kind
    first = next((t.type for t in sources.values() if len(t.shape) > 1), F32)
    return "BF16" if first is BF16 else "F16"


def _pooling(w, gguf, folder):
    """How a sentence encoder makes one vector of many: the folder of sentence-transformers says it."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return
    path = next((m["path"] for m in read_json(modules, kind=list) if m["type"].endswith("Pooling")), None)
    if path is not None:
        about = read_json(folder / path / "config.json")
        for key, kind in (("mean_tokens", "MEAN"), ("cls_token", "CLS"), ("lasttoken", "LAST")):
            if about.get(f"pooling_mode_{key}"):
                return w.add_pooling_type(gguf.PoolingType[kind])
        raise ModelError(f"{folder / path / 'config.json'}: a pooling that GGUF has no form for; mean, cls and last "
                         f"token have one")


def _entries(gguf, folder, config, family, sources, kind):
    """An Entry for each tensor of the new file, in the order of the source."""
    arch = gguf.MODEL_ARCH[family.arch]
    names, groups, out = gguf.get_tensor_name_map(arch, config.n_layer), {}, []
    stay = [gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[n]].format(bid=i) + ".weight" for n in STAY_F32
            for i in range(config.n_layer)]
    for name, array in family.extra(config).items():
        out.append(Entry(name, F32, array.shape[::-1], lambda array=array: iter([array.tobytes()])))
    for name in sources:
        new = None if name.endswith(NOT_WEIGHTS) else family.rename(name)
        if new is None or (new == "lm_head.weight" and (family.tied_head or config.get("tie_word_embeddings"))):
            continue
        expert = EXPERT.fullmatch(new)
        new = f"{expert[1]}.{expert[3]}.weight" if expert else new
        groups.setdefault(new, []).append((int(expert[2]) if expert else None, name))
    for old, members in groups.items():
        target = names.get_name(old, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ModelError(f"{folder}: tensor {members[0][1]!r} has no place in a GGUF of architecture "
                             f"{family.arch.lower()}; the folder holds another model than config.json says")
        members = _experts(folder, config, members)
        out.append(_entry(folder, config, family, target, [(n, sources[n]) for n in members], members[0] != old and
                          EXPERT.fullmatch(members[0]) is not None, F32 if target in stay else kind))
    double, seen = None, set()
    for e in out:
        double = e.name if e.name in seen else double
        seen.add(e.name)
    if double is not None:
        raise ModelError(f"{folder}: two tensors become {double!r}; the folder holds one of them twice")
    return out


def _experts(folder, config, members):
    """Names in the order of their experts, of which none is missing."""
    if members[0][0] is None:
        return [name for _, name in members]
    found, n = dict(members), config["num_local_experts", "num_experts"]
    if sorted(found) != list(range(n)):
        raise ModelError(f"{folder}: {len(found)} experts like {members[0][1]!r}, config.json says {n}; fetch the "
                         f"folder again")
    return [found[i] for i in range(n)]


def _entry(folder, config, family, target, tensors, stacked, kind):
    change = family.change(config, tensors[0][0])
    shape = tensors[0][1].shape
    if any(t.shape != shape for _, t in tensors):
        raise ModelError(f"{folder}: experts of {target!r} have different shapes; fetch the folder again")
    if family.arch == "GPT2" and change is not None:
        shape = shape[::-1]
    shape = (len(tensors), *shape) if stacked else shape
    if len(shape) < 2 or target.endswith("_norm.weight") or not target.endswith(".weight"):
        kind = F32
    kind = F16 if shape and shape[-1] % kind.block else kind

    def chunks():
        for name, t in tensors:
            x = float32(t)
            raw = np.ascontiguousarray(x if change is None else change(x))
            raw = raw.tobytes() if kind is F32 else quantize(kind, raw)
            bad = first_bad_block(kind, raw)
            if bad is not None:
                raise BadFile(f"{folder}: tensor {name!r} as {kind!r}: {bad[1]}; the file is damaged, or its numbers "
                              f"are too large for the type: take BF16 or F32")
            yield raw
    return Entry(target, kind, tuple(reversed(shape)) or (1,), chunks)


def float32(t):
    """The values of a tensor as float32."""
    if t.type in (F16, BF16):
        return dequantize(t.type, t.bytes(), t.shape or (1,))
    x = t.numpy()
    return x if t.type is F32 else x.astype(np.float32) if t.type is F64 else _no_floats(t)


def _no_floats(t):
    raise ModelError(f"tensor {t.name!r} holds {t.type!r}, no real numbers; the weights are quantised in a way that "
                     f"cannot be converted, take the original")
