"""Writing model files: GGUF with every tensor type and kind of metadata, and safetensors.

    save_gguf("m.gguf", {"w": w, "b": array}, {"general.architecture": "llama", "llama.block_count": 2})
    save_safetensors("m.safetensors", {"w": w})

Everything is checked before a byte is written.  A file appears under its name only when it is whole: it is written
beside it and renamed.  Reading: models/files/gguf.py and models/files/load_tensors.py.

Files made from others are written tensor by tensor (`write_gguf`), in one file or in parts.

    GGUF          magic, version, counts | metadata | name, ne, type, offset of each tensor | padding | data
    safetensors   length of the header | JSON {name: {dtype, shape, data_offsets}} | data
"""
import contextlib
import dataclasses
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ggjit.display.progress import bar
from ggjit.models.files.gguf import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    CODES,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_KEY_NBYTES,
    MAX_NAME_NBYTES,
    PART,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    STRING,
    part_path,
)
from ggjit.ops.core.errors import CannotWrite, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.types import BF16, F16, F32, F64, I8, I16, I32, I64, Type
from ggjit.ops.core.whole_file import whole_file, whole_files
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.tensor import Tensor

VERSION = 3
MAX_ALIGNMENT = 1 << 21       # bytes: a huge page
_KIND = {np.dtype("<" + code): kind for kind, code in CODES.items()}
_U32, _I32, _F32, _U64, _I64 = 4, 5, 6, 10, 11
_TYPE_OF_DTYPE = {t.dtype: t for t in (F32, F16, F64, I8, I16, I32, I64)}
SAFETENSORS_DTYPES = {F32: "F32", F16: "F16", BF16: "BF16", F64: "F64", I8: "I8", I16: "I16", I32: "I32", I64: "I64"}


def save_gguf(path, tensors, metadata=None):
    """Write a GGUF file (version 3, little endian).

        save_gguf("two.gguf", {"w": t, "b": np.zeros(3, np.float32)}, {"general.name": "two tensors"})

    tensors: {name: Tensor or ndarray}; a Tensor keeps its type, also a quantised one, an array the type of its dtype.
    Both keep their axes, leading ones of length 1 too; one without axes is written with one (GGUF has no fewer).
    metadata: {key: value}; str, bool, int (u32, i32, u64 or i64, the first that holds it), float (f32), NumPy scalars
    (their own kind), arrays, and lists of these, nested ones too.  "general.alignment" (default 32) is obeyed; keys
    split.* of a model in several files are left out, since this is one file.
    Errors: ParamError (names, keys, alignment), TypeMismatch (values GGUF has no kind for), NotAllocated, OSError.
    """
    metadata = mapping("metadata", {} if metadata is None else metadata)
    align = alignment(metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT))
    sources = {name: _Source(name, x) for name, x in mapping("tensors", tensors).items()}
    write_gguf(path, {key: encoded(value, key) for key, value in metadata.items()},
               [[Entry(name, s.type, s.ne, s.chunks) for name, s in sources.items()]], align, force=True)


# ---------------------------------------------------------------- tensor by tensor
@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file to be written.  chunks() yields its bytes in order."""
    name: str
    type: Type
    ne: tuple
    chunks: Callable

    @property
    def nbytes(self):
        return self.type.row_nbytes(self.ne[0]) * math.prod(self.ne[1:])


def refuse_existing(path, force):
    """CannotWrite for a file that is there already and is not to be replaced."""
    if os.path.isfile(path) and not force:
        raise CannotWrite(f"{path} exists already; choose another name, or replace it with force=True (--force)")


def refuse_source(path, *sources):
    """CannotWrite where `path` is a file that is read, or in a folder that is; whatever force says."""
    if os.path.isfile(path):
        for source in sources:
            if source is not None and os.path.exists(source) and (
                    os.path.samefile(path, source) or os.path.isdir(source)
                    and os.path.samefile(os.path.dirname(os.path.abspath(path)), source)
                    and not os.fspath(path).endswith(".gguf")):
                raise CannotWrite(f"{path} is what is read; choose another name for what is made of it")


def alignment(n):
    """`n`, if tensors can be aligned to it."""
    if not is_whole(n, 1, MAX_ALIGNMENT) or n & (n - 1):
        raise ParamError(f"general.alignment must be a power of two, got {n!r} (at most {MAX_ALIGNMENT})")
    return n


def parts_of(entries, max_nbytes):
    """`entries` in groups of at most that many bytes; a larger tensor has a group of its own.  None: one group."""
    if max_nbytes is None:
        return [entries]
    groups, held = [[]], 0
    for e in entries:
        if groups[-1] and held + e.nbytes > max_nbytes:
            groups.append([])
            held = 0
        groups[-1].append(e)
        held += e.nbytes
    return groups


def write_gguf(path, metadata, groups, align=DEFAULT_ALIGNMENT, force=False, title=None, check=None):
    """Write Entries as a GGUF file, or as one of each group: NAME-00001-of-00003.gguf and so on; their paths.

    metadata: {key: (kind, bytes)} as `encoded` makes them.  force: a file of that name is replaced.  title: of the
    progress bar; None: no bar.  check: called with the path of a file of the same header and no data, before anything
    is written; its errors come out.  All files get their names when all are whole.  Errors: CannotWrite, an OSError.
    """
    path, n, n_tensors = os.fspath(path), len(groups), sum(map(len, groups))
    paths, metadata = [path], {k: v for k, v in metadata.items() if k not in (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)}
    if n > 1:
        named = PART.fullmatch(path)
        paths = [part_path(named[1] if named else path, i, n) for i in range(n)]
    for p in paths:
        refuse_existing(p, force)
    headers = []
    for i, group in enumerate(groups):
        own = dict(metadata) if i == 0 else {}
        if n > 1:
            counts = {SPLIT_NO: np.uint16(i), SPLIT_COUNT: np.uint16(n), SPLIT_TENSORS: np.int32(n_tensors)}
            own |= {key: encoded(value, key) for key, value in counts.items()}
        headers.append(_header(own, group, align))
    total = sum(e.nbytes for group in groups for e in group)
    _check_space(paths[0], sum(map(len, headers)) + sum(_padded(e.nbytes, align) for group in groups for e in group))
    if check is not None:
        _checked(check, headers[0], sum(_padded(e.nbytes, align) for e in groups[0]))
    with _explained(path, "the end"), _opened(paths) as files, \
            bar(f"{title}, MiB", total / 2**20, drawn=title is not None) as step:
        for f, target, header, group in zip(files, paths, headers, groups, strict=True):
            with _explained(target, "the header"):
                f.write(header)
            for e in group:
                _write_entry(f, target, e, align, step)
            f.flush()
    return paths


def _checked(check, header, nbytes):
    """check(path) of a file with that header and holes for the data, which take no space."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "header.gguf")
        with _explained(path, "the header"), open(path, "wb") as f:
            f.write(header)
            f.truncate(len(header) + nbytes)
        check(path)


@contextlib.contextmanager
def _opened(paths):
    """The files, which get their names together."""
    if len(paths) > 1:
        with whole_files(paths) as files:
            yield files
        return
    with whole_file(paths[0]) as f:
        yield [f]


def _write_entry(f, path, e, align, step):
    written = 0
    for chunk in e.chunks():
        with _explained(path, f"tensor {e.name!r}"):
            f.write(chunk)
        n = memoryview(chunk).nbytes
        written += n
        step(n / 2**20)
    if written != e.nbytes:
        raise ShapeError(f"{path}: tensor {e.name!r} {list(e.ne)} of {e.type!r} has {e.nbytes} bytes, {written} came")
    with _explained(path, f"tensor {e.name!r}"):
        f.write(bytes(-written % align))


@contextlib.contextmanager
def _explained(path, what):
    """An OSError inside comes out as CannotWrite; one that whole_file made of a CannotWrite as that again."""
    try:
        yield
    except (CannotWrite, FileNotFoundError, IsADirectoryError):     # these name the folder themselves
        raise
    except OSError as e:
        if isinstance(e.__cause__, CannotWrite):
            raise e.__cause__ from None
        error = CannotWrite(f"{path}: {e.strerror or e}, at {what}; nothing is left of it: make space or choose "
                            f"another place")
        error.errno, error.filename = e.errno, path
        raise error from e


def _check_space(path, nbytes):
    """CannotWrite, if the disk has less than `nbytes` left: better now than hours later."""
    free, folder = nbytes, os.path.dirname(os.path.abspath(path))
    if os.path.isfile(path) or not os.path.exists(path):            # space does not matter for devices and pipes
        with contextlib.suppress(OSError):          # no folder, or free space is unknown: writing will report the error
            free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CannotWrite(f"{path}: {nbytes:,} bytes are needed, {free:,} are free there; make space or choose another "
                          f"place")


def _padded(nbytes, align):
    return -(-nbytes // align) * align


def _header(metadata, entries, align):
    """The bytes of the file before the tensors' data, padding included."""
    out = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(metadata))]
    for key, (kind, raw) in metadata.items():
        out += [_text(key, "key", MAX_KEY_NBYTES), struct.pack("<I", kind), raw]
    offs = 0
    for e in entries:
        out += [_text(e.name, "tensor name", MAX_NAME_NBYTES), struct.pack("<I", len(e.ne)),
                struct.pack(f"<{len(e.ne)}Q", *e.ne), struct.pack("<IQ", e.type.id, offs)]
        offs += _padded(e.nbytes, align)
    out = b"".join(out)
    return out + bytes(-len(out) % align)


def save_safetensors(path, tensors, metadata=None):
    """Write a safetensors file.

        save_safetensors("two.safetensors", {"w": t, "b": np.zeros(3, np.float32)})

    tensors: {name: Tensor or ndarray} of F32, F16, BF16, F64 or integers (quantised types have no dtype there:
    save_gguf keeps them); metadata: {str: str}.  Errors: TypeMismatch, ParamError, OSError.
    """
    metadata = mapping("metadata", {} if metadata is None else metadata)
    if not all(isinstance(x, str) for pair in metadata.items() for x in pair):
        raise TypeMismatch("safetensors metadata maps strings to strings; save_gguf takes other values")
    sources = {name: _Source(name, x) for name, x in mapping("tensors", tensors).items()}
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
def mapping(what, x):
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

    def chunks(self):
        yield self.bytes()

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
        raise ParamError(f"{what} {s[:40]!r} is not Unicode text: {e.reason}") from None
    if max_nbytes is not None and not 0 < len(raw) <= max_nbytes:
        raise ParamError(f"{what} {s[:40]!r} has {len(raw)} bytes, 1 to {max_nbytes} are allowed")
    return struct.pack("<Q", len(raw)) + raw


def encoded(x, key):
    """(kind, bytes) of one value of the metadata.  Errors: TypeMismatch, ParamError."""
    if isinstance(x, str):
        return STRING, _text(x, f"value of {key!r}")
    if isinstance(x, bool | np.bool_):
        return BOOL, bytes([bool(x)])
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
    pairs = [encoded(i, key) for i in items]
    kinds = {kind for kind, _ in pairs}
    if len(kinds) > 1:
        raise TypeMismatch(f"key {key!r}: the items of a list must be of one kind, these are "
                           f"{', '.join(sorted({type(i).__name__ for i in items}))}")
    return struct.pack("<IQ", kinds.pop(), len(items)) + b"".join(raw for _, raw in pairs)
