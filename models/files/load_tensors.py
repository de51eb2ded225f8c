"""Tensors of a file as leaves over the mapped file.  Nothing is copied or read ahead.

    tensors = load_safetensors("model.safetensors")         {name: Tensor}
    tensors, metadata = load_gguf("model.gguf")

The memory is read-only; the leaves' context (a new one unless given) keeps the file mapped.
"""
import math
import struct

import numpy as np

from ggjit.api.compute import default_backend
from ggjit.core.arguments import typed_call
from ggjit.core.buffer import USAGE_WEIGHTS, place
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.mapped_file import map_private
from ggjit.models.files.save import SAFETENSORS_DTYPES
from ggjit.ops.core.errors import BadFile, NotSupported
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.types import BF16
from ggjit.tensors.context import Context

MAX_HEADER_NBYTES = 100 << 20       # safetensors' own limit
_TYPES = {name: t for t, name in SAFETENSORS_DTYPES.items()}


@typed_call
def load_gguf(path, ctx=None):
    """({name: Tensor}, {key: value}) of a GGUF file, or of the first of several; tensors are mapped, not read.

        tensors, metadata = load_gguf("model.gguf")
        tensors["token_embd.weight"].ne

    ctx: where the leaves go, by default a new Context.  Errors: BadFile.
    """
    file = GGUFFile(path)
    infos = [(i.name, i.type, i.ne, i.part, i.offs) for i in file.tensors.values()]
    return _leaves(infos, [part.map() for part in file.parts], ctx), file.metadata


@typed_call
def load_safetensors(path, ctx=None):
    """{name: Tensor} of a safetensors file; `shape` as stored, so ne is reversed.

        load_safetensors("model.safetensors")["w"].shape

    Errors: BadFile (damaged, truncated, hostile), NotSupported (dtypes ggjit has no type for, more than 4 dimensions).
    """
    return safetensors_leaves(path, ctx)


def safetensors_leaves(path, ctx=None, wanted=lambda name: True, folds=False):
    """As load_safetensors, of the tensors whose names are wanted.  folds: of five axes, the second and third become
    one."""
    try:
        data = map_private(path)
    except (OSError, ValueError) as e:          # ValueError: an empty file cannot be mapped
        raise BadFile(f"{path}: {getattr(e, 'strerror', None) or e}; check the path and the permissions") from e
    header, start = _header(path, data)
    infos, used = [], []
    for name, about in header.items():
        if name == "__metadata__" or not wanted(name):
            continue
        type, shape, lo, hi = _tensor(path, name, about, data.size - start, folds)
        infos.append((name, type, shape[::-1], 0, start + lo))
        used.append((lo, hi, name))
    used.sort()
    for (_, hi, a), (lo, _, b) in zip(used, used[1:], strict=False):
        if hi > lo:
            raise _bad(path, f"tensors {a!r} and {b!r} overlap")
    return _leaves(infos, [data], ctx)


def mapped_numbers(leaf):
    """The numbers of a leaf as an array over the mapped file, in NumPy order; bfloat16 comes as uint16."""
    return leaf._bytes_view().view(np.uint16 if leaf.type is BF16 else leaf.type.dtype).reshape(leaf.shape)


def _bad(path, what):
    return BadFile(f"{path}: {what}; the file is damaged or not a safetensors file, fetch it again")


def _header(path, data):
    """(the JSON object, byte at which the data begin)"""
    n = struct.unpack_from("<Q", data)[0] if data.size >= 8 else 1 << 63
    if n > min(data.size - 8, MAX_HEADER_NBYTES):
        raise _bad(path, f"{data.size} bytes do not hold a header of {n}")
    try:
        header = parse_json(bytes(data[8:8 + n]))
    except ValueError as e:
        raise _bad(path, f"the header is not JSON: {e}") from None
    if not isinstance(header, dict):
        raise _bad(path, f"the header is a {type(header).__name__}, not an object")
    return header, 8 + n


def _tensor(path, name, about, n_data, folds):
    """(type, shape, first byte, end) of one entry, checked."""
    try:
        dtype, shape, (lo, hi) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        numbers = (*shape, lo, hi)
    except (TypeError, KeyError, ValueError):
        raise _bad(path, f"the entry of tensor {name!r} is incomplete") from None
    if not all(type(i) is int and 0 <= i < 1 << 62 for i in numbers):
        raise _bad(path, f"tensor {name!r} has shape {shape} and offsets {lo}, {hi}")
    if folds and len(shape) == 5:
        shape = (shape[0], shape[1] * shape[2], *shape[3:])
    if dtype not in _TYPES or len(shape) > 4:
        raise NotSupported(f"{path}: tensor {name!r} is {dtype} with {len(shape)} dimensions; ggjit reads "
                           f"{', '.join(_TYPES)} of up to 4; convert it first")
    type_ = _TYPES[dtype]
    if lo > hi or hi > n_data or hi - lo != math.prod(shape) * type_.nbytes:
        raise _bad(path, f"tensor {name!r} of shape {shape} {dtype} lies at {lo}..{hi} of {n_data} bytes")
    return type_, shape, lo, hi


def _leaves(infos, files, ctx):
    """A leaf per (name, type, ne, number of its file, byte offset) over the bytes of the files."""
    ctx = Context() if ctx is None else ctx
    buffers = []
    for data in files:
        data = data if data.size else np.zeros(1, np.uint8)
        buffers.append(default_backend().device.buffer_from_host_ptr(data, read_only=True))
        buffers[-1].usage = USAGE_WEIGHTS
    out = {}
    for name, type_, ne, part, offs in infos:
        out[name] = leaf = ctx._leaf(type_, ne or (1,), name, len(ne))
        place(leaf, buffers[part], offs)
    return out
