"""GGUF files made from other GGUF files: quantised, edited, split, joined.

    quantize_gguf("f16.gguf", "q4.gguf", "Q4_K_M", imatrix="imatrix.gguf")
    edit_gguf("m.gguf", "n.gguf", remove_keys=["tokenizer.chat_template"], rename={"a.weight": "b.weight"})

Tensors come from the mapped file in pieces of PIECE numbers: piece -> float32 -> new type -> the new file.  However
large a tensor is, no more than that is held; what is not converted is copied as it is.  Nothing has the new name before
all of it is there.
"""
import contextlib
import math
import os
import re

import numpy as np

from ggjit.core.arguments import nearest, typed_call
from ggjit.cpu.device import CPU
from ggjit.models.files.adapter import adapters_of
from ggjit.models.files.gguf import ALIGNMENT, BOOL, DEFAULT_ALIGNMENT, SCALARS, GGUFFile
from ggjit.models.files.imatrix import Imatrix, load_imatrix
from ggjit.models.files.mapped_file import give_back
from ggjit.models.files.mixtures import (
    LAYER,
    NEED_IMPORTANCES,
    QuantizeParams,
    choose_types,
    file_type,
    is_quantised,
    n_dims,
    needs_importances,
    role_of,
    tensor_type,
)
from ggjit.models.files.save import Entry, alignment, encoded, mapping, parts_of, write_gguf
from ggjit.models.files.whisper_file import open_model
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError
from ggjit.ops.core.user_warnings import warn
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.ops.types.validate import first_bad_block

PIECE = 1 << 22                 # numbers converted at a time
COPIED = 1 << 24                # bytes copied at a time
QUANTIZATION_VERSION = 2        # GGML_QNT_VERSION
MAX_PATH_NBYTES = 127           # of the imatrix's path in the metadata: llama.cpp's limit
NUMBERS = {kind: dtype for kind, dtype in SCALARS.items() if kind != BOOL}


# ---------------------------------------------------------------- one tensor
def copied(file, info):
    """The bytes of a tensor, in pieces."""
    data = file.tensor_bytes(info.name)
    for start in range(0, data.size, COPIED):
        piece = data[start:start + COPIED]
        yield piece
        give_back(piece)


def converted(file, info, type, importances=None, added=()):
    """The bytes of a tensor in another type, in pieces.

    importances: float32 of each column of each matrix, or None.  added: (A, B, factor) of LoRA adapters, whose product
    factor B A is added to the matrix (of experts: to each its own).  Errors: BadFile for NaN and infinities,
    NotSupported.
    """
    data, k = file.tensor_bytes(info.name), info.ne[0]
    n_rows = math.prod(info.ne[1:])
    experts = any(low.ndim == 3 for low, _, _ in added)
    per_matrix = info.ne[1] if importances is not None or experts else n_rows
    row, at_once = info.type.row_nbytes(k), max(1, PIECE // k)
    for start in range(0, n_rows, per_matrix):
        own = None if importances is None else importances[start // per_matrix % (importances.size // k)]
        for first in range(start, start + per_matrix, at_once):
            n = min(at_once, start + per_matrix - first)
            piece = data[first * row:(first + n) * row]
            _check(file, info, info.type, piece)
            try:
                values = dequantize(info.type, piece, (n, k))
                for low, up, factor in added:
                    low, up = (low[start // per_matrix], up[start // per_matrix]) if experts else (low, up)
                    values += np.float32(factor) * (up[first - start:first - start + n] @ low)
                out = quantize(type, values, own)
            except GgjitError as e:
                raise e.__class__(f"{file.path}: tensor {info.name!r} from {info.type!r} to {type!r}: {e}") from e
            _check(file, info, type, out)
            yield out
            give_back(piece)


def _check(file, info, type, data):
    bad = first_bad_block(type, data)
    if bad is not None:
        raise BadFile(f"{file.path}: tensor {info.name!r} as {type!r}: {bad[1]}; the file is damaged or its numbers "
                      f"are too large for the type, convert the model again")


def _entry(file, info, type, name=None, importances=None, n_dims=None, added=()):
    """n_dims: as many dimensions are written, None: all."""
    def chunks():
        same = type is info.type and not added
        return copied(file, info) if same else converted(file, info, type, importances, added)
    return Entry(info.name if name is None else name, type, info.ne[:n_dims], chunks)


# ---------------------------------------------------------------- quantising
@typed_call
def quantize_gguf(path, out, type, imatrix=None, tensor_types=None, output_type=None, embedding_type=None,
                  leave_output=False, pure=False, requantize=False, keep_split=False, max_nbytes=None, force=False,
                  progress=True):
    """Write the model of the file `path` to `out` with its matrices in smaller types, as llama-quantize does.

        quantize_gguf("f16.gguf", "q4.gguf", "Q4_K_M", imatrix="imatrix.gguf", tensor_types={"ffn_down": "q6_K"})

    type: a mixture ("Q4_K_M", "IQ4_XS", ...), one type for all ("Q8_0", "F16"), or "COPY".  The types of the tensors
    and their bytes are llama.cpp's.
    imatrix: an Imatrix or the path of one; IQ1, IQ2, IQ3_XXS and Q2_K_S need it.
    tensor_types: {regular expression: type}: tensors in whose names it is found get that type; the first one counts.
    output_type, embedding_type: of output.weight and of token_embd.weight; leave_output: output.weight stays as it is.
    pure: no mixture, all matrices get the base type.  requantize: matrices that are quantised already are, again.
    keep_split: parts as those of the input.  max_nbytes: of one part, else there is one.  force: `out` is replaced.
    Returns {"paths", "nbytes_before", "nbytes", "types": {name of a tensor: type}, "imatrix": number of matrices whose
    importances were used, or None}.  Errors: ParamError, BadFile, ModelError, CannotWrite.
    Source: llama.cpp's llama_model_quantize.
    """
    _refuse_contradictions(tensor_types, imatrix, output_type, embedding_type, leave_output, pure, type, keep_split,
                           max_nbytes)
    file = open_model(path)
    by_part = sorted(file.tensors.values(), key=(lambda i: (i.part, i.offs)) if keep_split else _llama_order)
    copy = isinstance(type, str) and type.upper() == "COPY"
    mixture, number, base = ("COPY", None, None) if copy else file_type(type)
    matrix = load_imatrix(imatrix) if isinstance(imatrix, str) or hasattr(imatrix, "__fspath__") else imatrix
    if matrix is not None and not isinstance(matrix, Imatrix):
        raise ParamError(f"imatrix takes the path of a file or an Imatrix, got {matrix.__class__.__name__}")
    choice = QuantizeParams(_patterns(tensor_types, file), None if output_type is None else tensor_type(output_type),
                            None if embedding_type is None else tensor_type(embedding_type), leave_output, pure)
    types = {i.name: i.type for i in by_part} if copy else choose_types(file, by_part, mixture, choice,
                                                                        matrix is not None)
    importances = {} if copy else _importances(file, by_part, types, matrix, mixture)
    if not (copy or requantize):
        _refuse_quantised(file, types)
    entries = [_entry(file, i, types[i.name], importances=importances.get(i.name), n_dims=n_dims(i.ne))
               for i in by_part]
    if keep_split:
        groups = [[e for e, i in zip(entries, by_part, strict=True) if i.part == n] for n in range(len(file.parts))]
    else:
        groups = parts_of(entries, _part_size(max_nbytes))
    about = {} if copy else {"general.quantization_version": np.uint32(QUANTIZATION_VERSION),
                             "general.file_type": np.uint32(number)} | _about(matrix)
    before, after = sum(i.nbytes for i in by_part), sum(e.nbytes for e in entries)
    paths = write_gguf(out, _metadata(file, about, about), groups, file.alignment, force,
                       f"quantizing to {mixture}" if progress else None)
    if after > before and not copy and base.quantized:
        warn(f"quantize_gguf: the file grew, from {before:,} to {after:,} bytes: {mixture} gives some matrices larger "
             f"types than they had; pure=True (--pure) gives all of them the one type")
    return {"paths": paths, "nbytes_before": before, "nbytes": after,
            "types": {name: t.name for name, t in types.items()},
            "imatrix": None if matrix is None else len(importances)}


def _refuse_contradictions(tensor_types, imatrix, output_type, embedding_type, leave_output, pure, type, keep_split,
                           max_nbytes):
    """Errors: ParamError for options of which one would be ignored."""
    if keep_split and max_nbytes is not None:
        raise ParamError("keep_split (--keep-split) keeps the parts of the input, max_nbytes (--split-max-size) makes "
                         "others; leave one of them out")
    if leave_output and output_type is not None:
        raise ParamError("leave_output (--leave-output-tensor) keeps the type that output_type (--output-tensor-type) "
                         "changes; leave one of them out")
    copy = isinstance(type, str) and type.upper() == "COPY"
    ignored = {"tensor_types (--tensor-type)": tensor_types}
    if copy:
        ignored |= {"imatrix (--imatrix)": imatrix, "output_type (--output-tensor-type)": output_type,
                    "embedding_type (--token-embedding-type)": embedding_type, "pure (--pure)": pure}
    given = next((name for name, x in ignored.items() if x), None)
    if given is not None and (copy or not file_type(type)[2].quantized):
        raise ParamError(f"{type} gives every tensor its type, {given} would be ignored; leave it out, or change "
                         f"single tensors with `ggjit edit --set-tensor-type`")


def _llama_order(info):
    """By layer, then by name: the order of llama.cpp's files."""
    layer = LAYER.match(info.name)
    return int(layer[1]) if layer else -1, info.name.encode()


def _part_size(n):
    if n is not None and not is_whole(n, 1):
        raise ParamError(f"max_nbytes is a positive number of bytes, got {n!r}")
    return n


def _patterns(tensor_types, file):
    """((compiled pattern, Type), ...).  Errors: ParamError, also for a pattern that no tensor's name has."""
    out = []
    for pattern, t in mapping("tensor_types", tensor_types or {}).items():
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as e:
            raise ParamError(f"tensor type {pattern!r} is not a regular expression ({e})") from None
        if not any(compiled.search(name) for name in file.tensors):
            raise ParamError(f"{file.path}: no tensor's name has {pattern!r}{nearest(pattern, file.tensors)}; `ggjit "
                             f"info FILE` lists them")
        out.append((compiled, tensor_type(t)))
    return tuple(out)


def _importances(file, infos, types, matrix, mixture):
    """{name: (n_matrices, n_columns)} of the tensors that change their type.  Errors: ModelError."""
    out, changing = {}, [i for i in infos if types[i.name] is not i.type]
    for i in changing:
        found = matrix.sums.get(i.name) if matrix is not None else None
        if found is None:
            if needs_importances(i.name, types[i.name], mixture) and is_quantised(i, False):
                why = "without an importance matrix" if matrix is None else \
                    f"without importances ({matrix.path} has none for it)"
                raise ModelError(f"{file.path}: tensor {i.name!r} would be {types[i.name]!r} {why}, which is garbage; "
                                 f"make one with `ggjit imatrix MODEL --data FILE` and pass it with imatrix= "
                                 f"(--imatrix), or choose a larger type")
            continue
        values, want = found.importances, i.ne[0] * math.prod(i.ne[2:3])
        if values.size == want:
            out[i.name] = values.reshape(-1, i.ne[0])
        elif role_of(i.name) != "embd":
            raise ModelError(f"{matrix.path}: {values.size} importances of {i.name!r}, the tensor in {file.path} needs "
                             f"{want}; the importance matrix is of another model")
    if matrix is not None and changing and not out:
        raise ModelError(f"{matrix.path}: has importances for none of the {len(changing)} matrices of {file.path}; it "
                         f"is of another model")
    return out


def _refuse_quantised(file, types):
    for info in file.tensors.values():
        if info.type.quantized and types[info.name] is not info.type:
            raise ParamError(f"{file.path}: tensor {info.name!r} is {info.type!r} already, quantising it to "
                             f"{types[info.name]!r} makes it worse than either; start from the F16 or F32 file, or "
                             f"allow it with requantize=True (--allow-requantize)")


def _about(matrix):
    """The metadata that describe an importance matrix."""
    if matrix is None:
        return {}
    path = os.fsencode(matrix.path)[:MAX_PATH_NBYTES].decode("utf-8", "ignore")
    out = {"quantize.imatrix.file": path}
    if matrix.datasets:
        out["quantize.imatrix.dataset"] = matrix.datasets[0].encode()[:MAX_PATH_NBYTES].decode("utf-8", "ignore")
    out["quantize.imatrix.entries_count"] = np.uint32(len(matrix.sums))
    if matrix.n_chunks:
        out["quantize.imatrix.chunks_count"] = np.uint32(matrix.n_chunks)
    return out


def _metadata(file, new, without=()):
    """{key: (kind, bytes)}: the file's as they are, less `without`; then the new."""
    kept = {}
    for key in file.metadata:
        if key not in without:
            raw = file.raw_value(key)
            kept[key] = int.from_bytes(raw[:4], "little"), raw[4:]
    return kept | {key: encoded(value, key) for key, value in new.items()}


# ---------------------------------------------------------------- editing
@typed_call
def edit_gguf(path, out, set_keys=None, remove_keys=(), rename=None, set_types=None, max_nbytes=None, force=False,
              progress=True, lora=()):
    """Write the file `path` to `out` with keys and tensors changed; what is not named stays as it is, in its order.

        edit_gguf("m.gguf", "n.gguf", set_keys={"general.name": "mine"}, set_types={"token_embd.weight": "q8_0"})

    set_keys: {key: value}, as save_gguf takes them; a number where the file has one keeps its kind.  remove_keys: keys.
    rename: {name of a tensor: new name}.  set_types: {name: type}, converted by way of float32.
    max_nbytes: of one part, NAME-00001-of-00003.gguf and so on; None: all in one file.  force: `out` is replaced, which
    may be the input.  lora: [(path, scale)] of adapters, as load_model takes them: they are merged, W becomes
    W + scale alpha / rank B A in its own type or that of set_types (a quantised one is quantised again).
    Returns {"paths", "nbytes"}.  Errors: ParamError for a key or tensor that is not there, CannotWrite, BadFile, and
    those of load_model's lora.
    """
    file = GGUFFile(path)
    with contextlib.ExitStack() as held:
        adapters = adapters_of(lora, file, CPU)
        for adapter in adapters:
            held.callback(adapter.free)
        return _edited(file, out, set_keys, remove_keys, rename, set_types, max_nbytes, force, progress, adapters)


def _edited(file, out, set_keys, remove_keys, rename, set_types, max_nbytes, force, progress, adapters):
    set_keys, rename, set_types = (mapping(what, x or {}) for what, x in (
        ("set_keys", set_keys), ("rename", rename), ("set_types", set_types)))
    if isinstance(remove_keys, str):
        raise ParamError(f"remove_keys is a list of keys, got {remove_keys!r}")
    for what, names, known in (("key", remove_keys, file.metadata), ("tensor", rename, file.tensors),
                               ("tensor", set_types, file.tensors)):
        for name in names:
            if name not in known:
                raise ParamError(f"{file.path}: no {what} {name!r}{nearest(str(name), known)}; `ggjit info FILE` lists "
                                 f"them")
    both = next((key for key in remove_keys if key in set_keys), None)
    if both is not None:
        raise ParamError(f"key {both!r} is to be removed and to be set; leave one of them out")
    names = [rename.get(name, name) for name in file.tensors]
    double = next((n for n in names if names.count(n) > 1), None) if rename else None
    if double is not None:
        raise ParamError(f"{file.path}: two tensors would be called {double!r}; rename the other one too")
    added = {name: _added(file, name, adapters) for name in file.tensors}
    types = {name: info.type for name, info in file.tensors.items()} | {
        name: tensor_type(t) for name, t in set_types.items()}
    poor = next((name for name in types if types[name].name in NEED_IMPORTANCES and (name in set_types or added[name])),
                None)
    if poor is not None:
        raise ParamError(f"{file.path}: tensor {poor!r} would be {types[poor]!r} without importances, which is "
                         f"garbage; choose a larger type, or take `ggjit quantize --imatrix`")
    entries = [_entry(file, info, types[info.name], rename.get(info.name), added=added[info.name])
               for info in file.tensors.values()]
    for e, info in zip(entries, file.tensors.values(), strict=True):
        if info.ne[0] % e.type.block:
            raise ParamError(f"{file.path}: tensor {info.name!r} has rows of {info.ne[0]}, not a multiple of "
                             f"{e.type!r}'s block of {e.type.block}; choose another type")
    new = {key: _same_kind(file, key, value) for key, value in set_keys.items()}
    # readers take the default where the key is missing
    align = alignment(set_keys.get(ALIGNMENT, DEFAULT_ALIGNMENT if ALIGNMENT in remove_keys else file.alignment))
    paths = write_gguf(out, _metadata(file, new, remove_keys), parts_of(entries, _part_size(max_nbytes)), align, force,
                       "writing" if progress else None)
    return {"paths": paths, "nbytes": sum(e.nbytes for e in entries)}


def _added(file, name, adapters):
    """[(A, B, factor)] of the adapters of a tensor.

    Where the file has a scale of the matrix's products (BitNet), an adapter's are not multiplied by it: what is added
    to the matrix is divided by it.
    """
    pairs = [pair for a in adapters for pair in a.added(name)]
    scale = file.tensors.get(name.removesuffix("weight") + "scale") if pairs else None
    if scale is None or math.prod(scale.ne) != 1:
        return pairs
    by = float(dequantize(scale.type, file.tensor_bytes(scale.name), (1, 1))[0, 0])
    if not by:
        raise ModelError(f"{file.path}: {scale.name!r} is 0, so nothing that is added to {name!r} would count; leave "
                         f"the adapter beside the model")
    return [(low, up, factor / by) for low, up, factor in pairs]


def _same_kind(file, key, value):
    """A number as the file's kind of number, if it has that key.

    Errors: ParamError for a text in a number's place, or a number in a text's.
    """
    before, plain = file.metadata.get(key), str | bool | int | float
    if isinstance(before, plain) and isinstance(value, plain) and isinstance(before, str) != isinstance(value, str):
        raise ParamError(f"{file.path}: key {key!r} holds {before!r}, and {value!r} is of another kind; a text of "
                         f"digits is KEY='\"7\"', another kind goes in after an edit that removes the key "
                         f"(--remove-key)")
    if before is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    dtype = NUMBERS.get(int.from_bytes(file.raw_value(key)[:4], "little"))
    if dtype is None:
        return value
    with np.errstate(all="ignore"):
        try:
            same = dtype.type(value)
        except (OverflowError, ValueError):
            return value
    return same if dtype.kind == "f" or same == value else value
