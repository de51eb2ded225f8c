"""A model file with its matrices in another type: the matrices are in memory, the rest stays in the mapped file.

    file    header | norms | matrices ...           one more part, in memory    | matrices in the new type ...
"""
import mmap
import re

import numpy as np

from ggjit.core.arguments import type_of
from ggjit.models.files.gguf import TensorInfo
from ggjit.models.files.mixtures import NEED_IMPORTANCES, WEIGHT_TYPES, is_quantised
from ggjit.models.files.rewrite import converted
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.progress import work

ALIGNMENT = 64                  # bytes, of each tensor


class MemoryPart:
    """A part of a model file that is in no file: `.path` names what it was made from."""

    state = None

    def __init__(self, path, nbytes):
        self.path = path
        with oom_guard("quantize: weights", nbytes):
            # shared pages: "giving them back", as pages of mapped files are, does not lose them
            self._data = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)

    def map(self):
        return self._data


def quantized_file(file, type, keep=()):
    """`file` with every matrix whose rows fit the type's blocks in that type; `file` itself stays as it is.

    keep: a regular expression, or several, of names of tensors that stay.  Errors: ParamError, TypeMismatch,
    OutOfMemory.
    """
    type = _weight_type(type)
    patterns = _patterns(keep)
    chosen = [i for i in file.tensors.values() if is_quantised(i, False) and i.type is not type
              and i.ne[0] % type.block == 0 and not any(p.search(i.name) for p in patterns)]
    if not chosen:
        raise ParamError(f"{file.path}: no matrix would become {type!r}: all are, or their rows are not multiples "
                         f"of its block of {type.block}, or are kept")
    places, end = {}, 0
    for info in chosen:
        nbytes = info.nbytes // info.type.nbytes * info.type.block // type.block * type.nbytes
        places[info.name] = TensorInfo(info.name, type, info.ne, end, nbytes, len(file.parts))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    part = MemoryPart(file.path, end)
    with work(f"quantising to {type!r}", len(chosen)) as step:
        for info in chosen:
            at = places[info.name].offs
            for piece in converted(file, info, type):
                piece = piece.reshape(-1)
                part.map()[at:at + piece.size] = piece
                at += piece.size
            step()
    return file.with_part(part, places)


def _weight_type(type):
    type = type_of(type, "quantize")
    if type.name in NEED_IMPORTANCES or not (type in WEIGHT_TYPES or type.is_own):
        raise ParamError(f"quantize: weights in memory are of a type that needs no importances, or of your own, got "
                         f"{type!r}; quantize_gguf writes the others")
    return type


def _patterns(keep):
    several = keep if isinstance(keep, list | tuple | set | frozenset) else [keep]
    if not all(isinstance(p.pattern if isinstance(p, re.Pattern) else p, str) for p in several):
        raise TypeMismatch(f"quantize: keep is a regular expression, or a list of them, got {keep!r}")
    return [_compiled(p) for p in several]


def _compiled(pattern):
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ParamError(f"quantize: keep={pattern!r} is not a regular expression ({e})") from None
