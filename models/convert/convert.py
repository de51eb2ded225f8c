"""convert_folder: a Hugging Face folder as a GGUF file.

    DIR/config.json  tokenizer.json  *.safetensors     ->  OUT.gguf, as llama.cpp's convert_hf_to_gguf.py writes it

Tensors are mapped and go through in pieces of PIECE numbers: piece -> float32 -> new type -> the new file.  However
large a tensor is, no more than that is held.  Names of keys and tensors come from the gguf package; torch and
transformers are not needed.
"""
import collections
import contextlib
import functools
import logging
import math
import pathlib

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.convert import mmproj as mmproj_file
from ggjit.models.convert import moonshine
from ggjit.models.convert.common_metadata import collected
from ggjit.models.convert.config import Config
from ggjit.models.convert.families import NOT_WEIGHTS, family_of
from ggjit.models.convert.rerank import OUT, add_rank, classifies
from ggjit.models.convert.tensors import float32, pieces
from ggjit.models.convert.vocabulary import add_vocabulary, inside, read_json
from ggjit.models.convert.whisper import from_ct2, from_hf, is_ct2
from ggjit.models.core.checks import one_of
from ggjit.models.files.load_tensors import mapped_numbers, safetensors_leaves
from ggjit.models.files.mapped_file import give_back
from ggjit.models.files.rewrite import quantize_gguf
from ggjit.models.files.save import Entry, refuse_source, write_gguf
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, extra
from ggjit.ops.core.types import BF16, F16, F32, F64, Q8_0
from ggjit.ops.types.quantize import quantize
from ggjit.ops.types.validate import first_bad_block

TYPES = {"F32": (F32, 0), "F16": (F16, 1), "BF16": (BF16, 32), "Q8_0": (Q8_0, 7)}      # type, general.file_type
FLOATS = (F32, F16, BF16, F64)
INDEX = "model.safetensors.index.json"
PIECE = 1 << 22                 # numbers converted at a time
loader_rules = None             # (path of a file without data): the loader's errors; set by models/networks/load.py
STAY_F32 = ("FFN_GATE_INP", "FFN_GATE_INP_SHEXP", "POS_EMBD", "TOKEN_TYPES", "SSM_CONV1D", "SHORTCONV_CONV",
            "TIME_MIX_LERP_FUSED")


@typed_call
def convert_folder(folder, out, type="AUTO", pre=None, vocabulary=True, force=False, progress=True, mmproj=None):
    """Write the model in a Hugging Face folder to `out`: config.json, tokenizer.json or tokenizer.model, *.safetensors.
    Of Whisper models also CTranslate2's folders and whisper.cpp's .bin files.

        convert_folder("Qwen3-0.6B", "qwen3.gguf", "BF16")

    type: of the matrices: F32, F16, BF16, Q8_0, or AUTO, the source's type of 16 bits (F16 for F32).  pre: name of the
    pre-tokenizer where tokenizer.json cuts text in a way that is not known.  vocabulary=False: token ids only.
    mmproj: another file, for the part of the model that sees (docs/vision.md); `out` is its decoder.
    Returns {"paths", "nbytes", "arch", "tensors"}.  Errors: NotSupported (the architecture, the tokenizer), ModelError
    and BadFile with the file at fault, MissingExtra, CannotWrite.
    """
    folder = pathlib.Path(folder)
    for path in [out] if mmproj is None else [out, mmproj]:
        refuse_source(path, folder)
    known = one_of("type", str(getattr(type, "name", type)).upper(), ("AUTO", *TYPES))
    if folder.is_file():
        return _of_file(folder, out, known, force, progress)
    if is_ct2(folder):
        return _written(folder, out, *from_ct2(folder, TYPES["F16" if known == "AUTO" else known][0]), force, progress)
    config = read_json(folder / "config.json")
    if config.get("model_type") == "whisper":
        return _of_whisper(folder, Config(folder / "config.json", config), out, known, force, progress)
    gguf = extra("gguf", "models")
    if config.get("model_type") == "moonshine":
        return _of_moonshine(gguf, folder, Config(folder / "config.json", config), out, known, force, progress)
    config = Config(folder / "config.json", read_json(folder / "config.json"))
    with _readable(config):
        family = family_of(config)
    sources = _sources(folder, lambda name: not name.endswith(NOT_WEIGHTS) and family.rename(name) is not None)
    kind = _type(known, sources)
    if mmproj is not None:
        _write_mmproj(gguf, folder, config, mmproj, TYPES[kind][0], force, progress)
    config.file_type = TYPES[kind][1]
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.arch]]
    # the gguf package warns of keys that are set twice, and of tokens outside the vocabulary
    with _silent("gguf"), _readable(config):
        entries = _entries(gguf, folder, config, family, sources, TYPES[kind][0])
        keys = _metadata(gguf, gguf.GGUFWriter(None, arch), folder, config, family, entries, pre, vocabulary)
    paths = write_gguf(out, keys, [entries], force=force, title=f"converting to {kind}" if progress else None,
                       check=functools.partial(_check_loads, folder))
    return {"paths": paths, "nbytes": sum(e.nbytes for e in entries), "arch": arch, "tensors": len(entries)}


def _check_loads(folder, path):
    """ModelError, if the loader would refuse the file that is about to be written."""
    try:
        loader_rules(path)
    except (GgjitError, ArithmeticError, LookupError, TypeError, ValueError) as e:
        why = str(e).replace(str(path), "the file")
        raise ModelError(f"{folder}: what would be made of it cannot be loaded: {why}; nothing was written") from e


def _of_whisper(folder, config, out, kind, force, progress):
    sources = _sources(folder, lambda name: True)
    with _readable(config):
        made = from_hf(folder, config, sources, TYPES[_type(kind, sources)][0])
    return _written(folder, out, *made, force, progress)


def _write_mmproj(gguf, folder, config, out, kind, force, progress):
    with _silent("gguf"), _readable(config):
        made = mmproj_file.from_hf(gguf, folder, config, _sources(folder, lambda name: True, True), kind)
    _written(folder, out, *made, force, progress, "clip")


def _of_moonshine(gguf, folder, config, out, kind, force, progress):
    sources = _sources(folder, lambda name: True)
    with _silent("gguf"), _readable(config):
        made = moonshine.from_hf(gguf, folder, config, sources, TYPES[_type(kind, sources)][0])
    return _written(folder, out, *made, force, progress, "moonshine")


def _written(folder, out, keys, entries, force, progress, arch="whisper"):
    paths = write_gguf(out, keys, [entries], force=force, title="converting" if progress else None,
                       check=functools.partial(_check_loads, folder))
    return {"paths": paths, "nbytes": sum(e.nbytes for e in entries), "arch": arch, "tensors": len(entries)}


def _of_file(path, out, kind, force, progress):
    """whisper.cpp's .bin."""
    done = quantize_gguf(path, out, "COPY" if kind == "AUTO" else kind, requantize=True, force=force, progress=progress)
    return {"paths": done["paths"], "nbytes": done["nbytes"], "arch": "whisper", "tensors": len(done["types"])}


@contextlib.contextmanager
def _silent(name):
    """Context in which the loggers of that package report only errors."""
    logger = logging.getLogger(name)
    before, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _readable(config):
    """Context in which a value of config.json of an unexpected kind gives a ModelError."""
    try:
        yield
    except GgjitError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as e:
        raise ModelError(f"{config.path}: a value is not what it has to be ({type(e).__name__}: {e}); fetch the folder "
                         f"again") from e


def _metadata(gguf, w, folder, config, family, entries, pre, vocabulary):
    """{key: (kind, bytes)}, collected in the GGUFWriter `w`."""
    w.add_type("model")
    w.add_name(gguf.Metadata.id_to_title(folder.resolve().name))
    w.add_size_label(gguf.size_label(*_counts(entries)))
    family.metadata(w, config, gguf)
    if classifies(config) and family.arch != "QWEN3":
        add_rank(w, gguf, config)
    else:
        _pooling(w, gguf, folder)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if vocabulary:
        add_vocabulary(w, gguf, folder, config, pre)
    else:
        w.add_tokenizer_model("no_vocab")
        if config.get("vocab_size") is not None:
            w.add_vocab_size(config["vocab_size"])
        if config.get("type_vocab_size") is not None:
            w.add_token_type_count(config["type_vocab_size"])
    return collected(w)


def _counts(entries):
    """(parameters, those outside experts, those of one expert, number of experts)"""
    experts = [e for e in entries if "_exps." in e.name]
    total = sum(math.prod(e.ne) for e in entries)
    return (total, total - sum(math.prod(e.ne) for e in experts), sum(math.prod(e.ne[:2]) for e in experts),
            experts[0].ne[2] if experts else 0)


def _sources(folder, wanted, folds=False):
    """{name: Tensor} of all .safetensors files of the folder, those that are wanted; folds: as safetensors_leaves."""
    index = read_json(folder / INDEX, needed=False).get("weight_map", {})
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise BadFile(f"{folder / INDEX}: weight_map has to map names of tensors to names of files; fetch it again")
    paths = sorted(set(index.values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not paths:
        raise BadFile(f"{folder}: no .safetensors files; PyTorch's .bin files have to be saved as safetensors first")
    out = {}
    for name in paths:
        if not inside(folder, name, folder / INDEX).is_file():
            raise BadFile(f"{folder / name}: no such file, but {INDEX} names it; fetch it")
        found = safetensors_leaves(folder / name, wanted=wanted, folds=folds)
        double = sorted(found.keys() & out.keys())
        if double:
            raise ModelError(f"{folder / name}: tensor {double[0]!r} is in another file of the folder too; leave only "
                             f"the files of one model there")
        out |= found
    missing = [name for name in index if name not in out and wanted(name)]
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
        about = read_json(inside(folder, path or ".", modules) / "config.json")
        for key, kind in (("mean_tokens", "MEAN"), ("cls_token", "CLS"), ("lasttoken", "LAST")):
            if about.get(f"pooling_mode_{key}"):
                return w.add_pooling_type(gguf.PoolingType[kind])
        raise ModelError(f"{folder / path / 'config.json'}: a pooling that GGUF cannot express; mean, cls and last "
                         f"token are possible")


def _entries(gguf, folder, config, family, sources, kind):
    """An Entry for each tensor of the new file, in the order of the source."""
    if config.n_layer > len(sources):           # names are made for every layer
        raise ModelError(f"{config.path}: {config.n_layer} layers, but the folder has {len(sources)} tensors; fetch it "
                         f"again")
    arch = gguf.MODEL_ARCH[family.arch]
    names, groups, out = gguf.get_tensor_name_map(arch, config.n_layer), {}, []
    stay = {gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[n]].format(bid=i) + ".weight" for n in STAY_F32
            for i in range(config.n_layer)}
    own = {gguf.TENSOR_NAMES[t].format(bid=i) + ".weight" for t in gguf.MODEL_TENSORS[arch]
           for i in range(config.n_layer)}
    for name, array in family.extra(config).items():
        out.append(Entry(name, F32, array.shape[::-1], lambda array=array: iter([array.tobytes()])))
    for name, tensor in sources.items():
        new = family.rename(name)
        if new == "lm_head.weight" and (family.tied_head or config.get("tie_word_embeddings")):
            continue
        try:
            for made in family.change(config, new, _numbers(folder, name, tensor)):
                groups.setdefault(made.name, []).append((made, name))
        except GgjitError:
            raise
        except (ValueError, IndexError, ZeroDivisionError) as e:
            raise ModelError(f"{folder}: tensor {name!r} of shape {tensor.shape} does not fit config.json ({e}); the "
                             f"files are not of one model") from None
    for old, members in groups.items():
        target = old if old in own or old == OUT else names.get_name(old, try_suffixes=(".weight", ".bias", ".scale"))
        if target is None:
            raise ModelError(f"{folder}: tensor {members[0][1]!r} has no place in a GGUF of architecture "
                             f"{family.arch.lower()}; the folder holds another model than config.json says")
        if len({made.index is None for made, _ in members}) > 1 or (len(members) > 1 and members[0][0].index is None):
            raise ModelError(f"{folder}: two tensors become {target!r}; the folder holds one of them twice")
        out.append(_entry(folder, sources, target, *_stacked(folder, config, target, members),
                          F32 if target in stay else kind))
    double = next((name for name, n in collections.Counter(e.name for e in out).items() if n > 1), None)
    if double is not None:
        raise ModelError(f"{folder}: two tensors become {double!r}; the folder holds one of them twice")
    return out


def _numbers(folder, name, tensor):
    if tensor.type not in FLOATS:
        raise ModelError(f"{folder}: tensor {name!r} holds {tensor.type!r}, not real numbers; the weights are "
                         f"quantised in a way that cannot be converted, take the original")
    return mapped_numbers(tensor)


def _stacked(folder, config, target, members):
    """(shape, [(name of the source, ConvertedTensor)]): one tensor, or those of an order, of which none is missing."""
    if members[0][0].index is None:
        return members[0][0].shape, [(name, made) for made, name in members]
    members = sorted(((made, name) for made, name in members), key=lambda m: m[0].index)
    n = config.n_expert if "_exps" in target else len(members)
    if len(members) != n or any(made.index != i for i, (made, _) in enumerate(members)):
        raise ModelError(f"{folder}: {len(members)} experts like {members[0][1]!r}, config.json says {n}; fetch the "
                         f"folder again")
    shape = members[0][0].shape
    if any(made.shape != shape for made, _ in members):
        raise ModelError(f"{folder}: parts of {target!r} have different shapes; fetch the folder again")
    return (n, *shape), [(name, made) for made, name in members]


def _entry(folder, sources, target, shape, members, kind):
    if len(shape) < 2 or target.endswith("_norm.weight") or not target.endswith(".weight"):
        kind = F32
    kind = F16 if shape and shape[-1] % kind.block else kind

    def chunks():
        for name, made in members:
            for view in made.views:
                for piece in pieces(view, PIECE):
                    x = float32(piece)
                    x = np.ascontiguousarray(x if made.values is None else made.values(x))
                    raw = x.tobytes() if kind is F32 else quantize(kind, x)
                    bad = first_bad_block(kind, raw)
                    if bad is not None:
                        raise BadFile(f"{folder}: tensor {name!r} as {kind!r}: {bad[1]}; the file is damaged, or its "
                                      f"numbers are too large for the type: take BF16 or F32")
                    yield raw
            give_back(mapped_numbers(sources[name]))
    return Entry(target, kind, tuple(reversed(shape)) or (1,), chunks)
