"""Writing model files: GGUF with every tensor type and kind of metadata, and safetensors.

    save_gguf("m.gguf", {"w": w, "b": array}, {"general.architecture": "llama", "llama.block_count": 2})
    save_safetensors("m.safetensors", {"w": w})

Everything is checked before a byte is written.  A file appears under its name only when it is whole: it is written
beside it and renamed.  Reading: models/files/gguf.py and models/files/load_tensors.py.

    GGUF          magic, version, counts | metadata | name, ne, type, offset of each tensor | padding | data
    safetensors   length of the header | JSON {name: {dtype, shape, data_offsets}} | data
"""
import contextlib
import json
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ggjit.models.files.gguf import (
    ARRAY,
    BOOL,
    CODES,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_KEY_NBYTES,
    MAX_NAME_NBYTES,
    STRING,
)
from ggjit.ops.core.errors import ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.types import BF16, F16, F32, F64, I8, I16, I32, I64
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.tensor import Tensor

VERSION = 3
_KIND = {np.dtype("<" + code): kind for kind, code in CODES.items()}
_U32, _I32, _F32, _U64, _I64 = 4, 5, 6, 10, 11
_TYPE_OF_DTYPE = {t.dtype: t for t in (F32, F16, F64, I8, I16, I32, I64)}
SAFETENSORS_DTYPES = {F32: "F32", F16: "F16", BF16: "BF16", F64: "F64", I8: "I8", I16: "I16", I32: "I32", I64: "I64"}


def save_gguf(path, tensors, metadata=None):
    """Write a GGUF file (version 3, little endian).

    tensors: {name: Tensor or ndarray}; a Tensor keeps its type, also a quantised one, an array the type of its dtype.
    Both keep their axes, leading ones of length 1 too; one without axes is written with one (GGUF has no fewer).
    metadata: {key: value}; str, bool, int (u32, i32, u64 or i64, the first that holds it), float (f32), NumPy scalars
    (their own kind), arrays, and lists of these, nested ones too.  "general.alignment" (default 32) is obeyed.
    Errors: ParamError (names, keys, alignment), TypeMismatch (values GGUF has no kind for), NotAllocated, OSError.
    """
    metadata = _dict("metadata", {} if metadata is None else metadata)
    align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not is_whole(align, 1) or align & (align - 1):
        raise ParamError(f"general.alignment must be a power of two, got {align!r}")
    sources = {name: _Source(name, x) for name, x in _dict("tensors", tensors).items()}
    header = [MAGIC, struct.pack("<IQQ", VERSION, len(sources), len(metadata))]
    for key, value in metadata.items():
        header += [_text(key, "key", MAX_KEY_NBYTES), _value(value, key)]
    offs = 0
    for name, s in sources.items():
        header += [_text(name, "tensor name", MAX_NAME_NBYTES), struct.pack("<I", len(s.ne)),
                   struct.pack(f"<{len(s.ne)}Q", *s.ne), struct.pack("<IQ", s.type.id, offs)]
        offs += -(-s.nbytes // align) * align
    header = b"".join(header)
    with whole_file(path) as f:
        f.write(header)
        f.write(bytes(-len(header) % align))
        for s in sources.values():
            f.write(s.bytes())
            f.write(bytes(-s.nbytes % align))


def save_safetensors(path, tensors, metadata=None):
    """Write a safetensors file.  tensors: {name: Tensor or ndarray} of F32, F16, BF16, F64 or integers (quantised
    types have no dtype there: save_gguf keeps them); metadata: {str: str}.  Errors: TypeMismatch, ParamError, OSError.
    """
    metadata = _dict("metadata", {} if metadata is None else metadata)
    if not all(isinstance(x, str) for pair in metadata.items() for x in pair):
        raise TypeMismatch("safetensors metadata maps strings to strings; save_gguf takes other values")
    sources = {name: _Source(name, x) for name, x in _dict("tensors", tensors).items()}
    header, offs = {"__metadata__": metadata} if metadata else {}, 0
    for name, s in sources.items():
        _text(name, "tensor name", MAX_KEY_NBYTES)
        if s.type not in SAFETENSORS_DTYPES or name == "__metadata__":
            raise TypeMismatch(f"safetensors has no dtype for {s.type!r} of {name!r}; use save_gguf" if name !=
                               "__metadata__" else "safetensors keeps the name '__metadata__' for itself; rename it")
        header[name] = {"dtype": SAFETENSORS_DTYPES[s.type], "shape": list(s.shape),
                        "data_offsets": [offs, offs + s.nbytes]}
        offs += s.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for s in sources.values():
            f.write(s.bytes())


# ---------------------------------------------------------------- tensors
def _dict(what, x):
    if not isinstance(x, Mapping):
        raise TypeMismatch(f"{what} must be a dict with names as keys, got {type(x).__name__}")
    return dict(x)


class _Source:
    """One tensor to write: type, ne (ggml order), shape (NumPy order), nbytes, and its bytes when their turn comes."""

    def __init__(self, name, x):
        self.x = x = np.asarray(x) if isinstance(x, np.generic) else x
        if isinstance(x, Tensor):
            if not is_contiguous(x) and x.type.dtype is None:
                raise ShapeError(f"saving {name!r}: {describe(x)} is a strided view; use gg.cont and compute it first")
            self.type, self.shape = x.type, x.shape
            x._checked_range()                  # NotAllocated, StaleHandle, Overwritten: now, not in the middle
        elif isinstance(x, np.ndarray) and x.dtype.newbyteorder("=") in _TYPE_OF_DTYPE:
            self.type, self.shape = _TYPE_OF_DTYPE[x.dtype.newbyteorder("=")], x.shape
        else:
            what = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
            raise TypeMismatch(f"saving {name!r}: a tensor or an array of floats or signed integers is expected, got "
                               f"{what}")
        if len(self.shape) > 4:
            raise ShapeError(f"saving {name!r}: {len(self.shape)} dimensions, at most 4 are possible")
        self.ne = tuple(reversed(self.shape)) or (1,)       # GGUF has at least one dimension
        self.nbytes = self.type.row_nbytes(self.ne[0]) * math.prod(self.ne[1:])

    def bytes(self):
        if isinstance(self.x, np.ndarray):
            return np.ascontiguousarray(self.x, self.x.dtype.newbyteorder("<")).tobytes()
        return self.x.bytes() if is_contiguous(self.x) else self.x.numpy().tobytes()


# ---------------------------------------------------------------- metadata
def _text(s, what, max_nbytes=None):
    """A GGUF string: u64 length, bytes."""
    if not isinstance(s, str):
        raise TypeMismatch(f"a {what} is a string, got {type(s).__name__}")
    try:
        raw = s.encode()
    except UnicodeEncodeError as e:
        raise ParamError(f"{what} {s[:40]!r} is no Unicode text: {e.reason}") from None
    if max_nbytes is not None and not 0 < len(raw) <= max_nbytes:
        raise ParamError(f"{what} {s[:40]!r} has {len(raw)} bytes, 1 to {max_nbytes} are allowed")
    return struct.pack("<Q", len(raw)) + raw


def _value(x, key):
    """u32 kind, then the value."""
    kind, raw = _encoded(x, key)
    return struct.pack("<I", kind) + raw


def _encoded(x, key):
    """(kind, bytes) of one value."""
    if isinstance(x, str):
        return STRING, _text(x, f"value of {key!r}")
    if isinstance(x, bool | np.bool_):
        return BOOL, bytes([x])
    if isinstance(x, np.generic | np.ndarray) and x.dtype.newbyteorder("<") not in _KIND:
        raise TypeMismatch(f"key {key!r}: GGUF has no kind for {x.dtype}")
    if isinstance(x, np.generic):
        return _KIND[x.dtype.newbyteorder("<")], x.astype(x.dtype.newbyteorder("<")).tobytes()
    if isinstance(x, int):
        return _integer(x, key)
    if isinstance(x, float):
        return _F32, np.float32(x).astype("<f4").tobytes()
    if isinstance(x, np.ndarray):
        if x.ndim != 1:
            raise TypeMismatch(f"key {key!r}: an array of {x.ndim} dimensions; GGUF's have one, or lists of lists")
        return ARRAY, struct.pack("<IQ", _KIND[x.dtype.newbyteorder("<")], x.size) + \
            x.astype(x.dtype.newbyteorder("<")).tobytes()
    if isinstance(x, Sequence) and not isinstance(x, bytes | bytearray | memoryview):
        return ARRAY, _list(list(x), key)
    raise TypeMismatch(f"key {key!r}: GGUF has no kind for {type(x).__name__}")


def _integer(x, key):
    for kind, code in ((_U32, "<I"), (_I32, "<i"), (_U64, "<Q"), (_I64, "<q")):
        with contextlib.suppress(struct.error):
            return kind, struct.pack(code, x)
    raise ParamError(f"key {key!r}: {x} does not fit 64 bits")


def _list(items, key):
    """u32 kind of the items, u64 count, items.  Integers of one list share the first kind that holds them all."""
    if not items:
        return struct.pack("<IQ", _I32, 0)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        for kind, code in ((_I32, "i"), (_U32, "I"), (_I64, "q"), (_U64, "Q")):
            with contextlib.suppress(struct.error):
                return struct.pack("<IQ", kind, len(items)) + struct.pack(f"<{len(items)}{code}", *items)
        raise ParamError(f"key {key!r}: some integers do not fit 64 bits")
    if all(isinstance(i, int | float) and not isinstance(i, bool) for i in items):
        items = [float(i) for i in items]
    encoded = [_encoded(i, key) for i in items]
    kinds = {kind for kind, _ in encoded}
    if len(kinds) > 1:
        raise TypeMismatch(f"key {key!r}: the items of a list must be of one kind, these are "
                           f"{', '.join(sorted({type(i).__name__ for i in items}))}")
    return struct.pack("<IQ", kinds.pop(), len(items)) + b"".join(raw for _, raw in encoded)
