"""GGUF files: a bounded reader.  It checks the whole file before it returns anything.

        0        4         8            16          24
        "GGUF" | version | n_tensors  | n_kv      | n_kv entries: key, value type, value
                                                  | n_tensors entries: name, n_dims, ne.., type, offset
                                                  | padding to `alignment`
        data_offs ------------------------------> | tensor data, each tensor at a multiple of `alignment`
        (little endian; string = u64 length, bytes; array = u32 item type, u64 count, items)

Every count, length and offset is compared with what is left of the file before it is used, so neither time nor memory
can exceed what the file's own size pays for; `MAX_ITEMS` bounds the only part that costs Python time per item.
Nothing is copied: numeric arrays are views of the mapped file, strings are located once (80 ns each) and decoded when
asked for.  Source: ggml's gguf.cpp, whose checks are all here; on top of them ranges may not overlap, but tensors need
not follow one another without gaps.

A large model may come in parts, NAME-00001-of-00003.gguf and so on: the first one is opened and brings the others.

    split.no (from 0), split.count, split.tensors.count     in every part; all other keys are in the first
"""
import itertools
import math
import os
import re
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from ggjit.models.files.mapped_file import map_file
from ggjit.ops.core.errors import BadFile, IndexRangeError, TypeMismatch
from ggjit.ops.core.progress import work
from ggjit.ops.core.types import TYPE_INFO, Type
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.types.validate import first_bad_block

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_ITEMS = 1 << 22             # strings and inner arrays of one file: at most a second of scanning
MAX_ENTRIES = 1 << 16           # keys, and tensors, of one file
MAX_STRING_NBYTES = 1 << 26     # one string value; a chat template has 10 kB, an embedded tokenizer.json 20 MB
MAX_DEPTH = 4                   # arrays within arrays
MAX_KEY_NBYTES = 65535          # GGUF specification
MAX_NAME_NBYTES = 63            # GGML_MAX_NAME less its terminator
MAX_DIMS = 4
INT64_MAX = 2**63 - 1
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = 99999               # five digits of a name

# GGUF value types: number -> struct's and NumPy's letter
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, BOOL, STRING, ARRAY, U64 = 4, 7, 8, 9, 10
KIND_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64")
SCALARS = {kind: np.dtype("<" + code) for kind, code in CODES.items()}
UNPACK = {kind: struct.Struct("<" + code).unpack_from for kind, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `ne` in ggml order (ne0 fastest), `offs` in bytes from the start of the file.

    part: number of the file, of a model in several.
    """
    name: str
    type: Type
    ne: tuple
    offs: int
    nbytes: int
    part: int = 0

    @property
    def shape(self):
        """NumPy order: `ne` reversed."""
        return self.ne[::-1]


class StringArray(Sequence):
    """The strings of a GGUF array, decoded when they are asked for.  `raw(i)` gives the bytes, which need not be UTF-8;
    the strings have U+FFFD in place of what is not."""

    def __init__(self, data, starts):
        self._data = data           # memoryview of the file
        self._starts = starts       # byte offset of each string's length word, then of the first byte after the last

    def __len__(self):
        return len(self._starts) - 1

    def raw(self, i):
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"string {i} of {n}")
        i %= n
        return bytes(self._data[self._starts[i] + 8:self._starts[i + 1]])

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.raw(i).decode("utf-8", "replace")

    def __iter__(self):
        data, starts = self._data, self._starts
        blob = bytes(data[starts[0]:starts[-1]])          # one copy: slicing bytes is cheaper than slicing the map
        base = starts[0]
        for a, b in itertools.pairwise(starts):
            yield blob[a + 8 - base:b - base].decode("utf-8", "replace")

    def __repr__(self):
        return f"StringArray({len(self)} strings)"


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data, source):
        self.data, self.source = data, source
        self.pos, self.end = 0, len(data)
        self.items_left = MAX_ITEMS

    def fail(self, what):
        what = what if len(what) < 400 else what[:400] + "..."
        raise BadFile(f"{self.source}: {what}; the file is damaged or not a GGUF file, fetch or convert it again")

    def need(self, nbytes, what):
        if nbytes > self.end - self.pos:
            self.fail(f"{what} needs {nbytes} bytes at {self.pos}, the file ends at {self.end}")

    def spend(self, n, what):
        """Count n items against the limit of items, since each costs time in Python."""
        if n > self.items_left:
            self.fail(f"{what}: {n} more entries, above the {MAX_ITEMS} a file may hold")
        self.items_left -= n

    def number(self, kind, what):
        nbytes = SCALARS[kind].itemsize
        self.need(nbytes, what)
        if kind == BOOL and self.data[self.pos] > 1:
            self.fail(f"key {what!r} holds a bool that is neither 0 nor 1")
        value = UNPACK[kind](self.data, self.pos)[0]
        self.pos += nbytes
        return value

    def raw_string(self, what):
        nbytes = self.number(U64, what)
        self.need(nbytes, what)
        self.pos += nbytes
        if nbytes > MAX_STRING_NBYTES:
            self.fail(f"{what} is a string of {nbytes} bytes, at most {MAX_STRING_NBYTES} are allowed")
        return bytes(self.data[self.pos - nbytes:self.pos])

    def name(self, what, max_nbytes):
        raw = self.raw_string(what)
        if not 0 < len(raw) <= max_nbytes:
            self.fail(f"{what} has {len(raw)} bytes, 1 to {max_nbytes} are allowed")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {raw!r} is not UTF-8")

    def count(self, n_bytes_each, what):
        """A u64 count of things that take at least `n_bytes_each` bytes of the rest of the file each."""
        n = self.number(U64, what)
        if n > (self.end - self.pos) // n_bytes_each:
            self.fail(f"{what} says {n}, more than the {self.end - self.pos} bytes that are left can hold")
        return n

    def value(self, kind, key, depth=0):
        """The value of `key`, which begins here and is of GGUF's type `kind`."""
        if kind in SCALARS:
            return self.number(kind, key)
        if kind == STRING:
            return self.raw_string(key).decode("utf-8", "replace")
        if kind != ARRAY:
            self.fail(f"key {key!r} has value type {kind}, which GGUF does not define")
        item = self.number(U32, key)
        if item in SCALARS:
            return self.numbers(item, key)
        if item == STRING:
            return self.strings(key)
        if item != ARRAY:
            self.fail(f"key {key!r} is an array of type {item}, which GGUF does not define")
        if depth == MAX_DEPTH:
            self.fail(f"key {key!r} has arrays nested deeper than {MAX_DEPTH}")
        n = self.count(12, key)
        self.spend(n, key)
        return [self.value(ARRAY, key, depth + 1) for _ in range(n)]

    def numbers(self, kind, key):
        """An array of numbers, read-only, in the file's memory."""
        dtype = SCALARS[kind]
        n = self.count(dtype.itemsize, key)
        a = np.frombuffer(self.data, np.uint8, n * dtype.itemsize, self.pos).view(dtype)
        a.flags.writeable = False
        self.pos += a.nbytes
        if kind == BOOL and n and a.view(np.uint8).max() > 1:
            self.fail(f"key {key!r} holds a bool that is neither 0 nor 1")
        return a

    def strings(self, key):
        """An array of strings, which stay in the file's memory: only where each begins is kept."""
        n = self.count(8, key)
        self.spend(n, key)
        pos, last, data, unpack = self.pos, self.end - 8, self.data, UNPACK[U64]
        starts = array("q")
        append = starts.append
        for _ in range(n):
            append(pos)
            if pos > last:
                self.fail(f"key {key!r}: string {len(starts) - 1} of {n} starts beyond the end of the file")
            pos += 8 + unpack(data, pos)[0]
            if pos > self.end:
                self.fail(f"key {key!r}: string {len(starts) - 1} of {n} is longer than the file")
        append(pos)
        self.pos = pos
        return StringArray(data, starts)


def part_path(name, i, n):
    """Path of part i, from 0, of n.  name: without the part's number, with or without ".gguf"."""
    return f"{name.removesuffix('.gguf')}-{i + 1:05d}-of-{n:05d}.gguf"


def type_name(kind):
    """The name of a kind of value, 0 to 12 (gguf_type_name): type_name(4) is "u32".  Errors: IndexRangeError."""
    if not is_whole(kind, 0, len(KIND_NAMES) - 1):
        raise IndexRangeError(f"type_name: GGUF has kinds 0 to {len(KIND_NAMES) - 1}, got {kind!r}")
    return KIND_NAMES[kind]


class GGUFFile:
    """A GGUF file, mapped and checked: `.metadata`, `.tensors`, `.alignment`, `.arch`, `.version`, `.data_offs`.

    Of a model in several files, the path is that of the first; `.parts` has all of them, this one first.

    `.state`: the os.stat_result of the file when it was mapped, None of bytes in memory.  `.stored`: the file without
    parts that lie in memory alone (`with_part`).

    Raises BadFile (what, where, remedy) for anything a loader could not use safely; a file that came through here has
    every tensor inside it, aligned, whole in blocks and apart from the others.  The pages are shared with every process
    that maps the file; shortening the file while it is mapped kills readers (SIGBUS), as with any mapped file.
    """

    state, _others, _stored = None, (), None

    def __init__(self, path):
        self._open(path)
        if self.metadata.get(SPLIT_COUNT, 1) != 1:
            self._join()

    def _open(self, path):
        path = os.fspath(path)
        data, self.state = map_file(path)
        self._absolute = os.path.abspath(path)          # a later os.chdir changes what `path` means
        self._load(data, path)

    @classmethod
    def from_bytes(cls, data, source="<bytes>"):
        """Read a file that is already in memory; `source` names it in errors."""
        file = cls.__new__(cls)
        file._load(np.frombuffer(data, np.uint8), source)
        return file

    def _load(self, data, source):
        self.path, self._data = source, data
        self.read_keys = set()          # keys that `get` was asked for, whether they are there or not
        c = _Cursor(memoryview(data), source)
        self.version, n_tensors, n_kv = _read_start(c)
        metadata, self._spans = _read_metadata(c, n_kv)
        self.metadata = MappingProxyType(metadata)
        self.alignment = _alignment(c, self.metadata)
        infos = _read_infos(c, n_tensors)
        self.data_offs = -(-c.pos // self.alignment) * self.alignment
        self.tensors = MappingProxyType(_place(c, infos, self.data_offs, self.alignment))

    def _join(self):
        """Open the other parts: `.parts`, and their tensors among `.tensors`."""
        no, n = (self.get(key, kind=int) for key in (SPLIT_NO, SPLIT_COUNT))
        named = PART.fullmatch(self.path)
        if named is None or int(named[3]) != n or not 1 < n <= MAX_PARTS:
            raise BadFile(f"{self.path}: it holds part {no + 1} of a model in {n} files, which its name does not say; "
                          f"call the parts NAME-00001-of-{n:05d}.gguf and so on")
        paths = [part_path(named[1], i, n) for i in range(n)]
        if no != 0 or int(named[2]) != 1:
            raise BadFile(f"{self.path}: part {no + 1} of {n}; open the first one, {paths[0]}")
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise BadFile(f"{self.path}: of the model's {n} files {len(missing)} are missing: {', '.join(missing[:3])}"
                          f"{', ...' if len(missing) > 3 else ''}; put all of them into one folder")
        tensors = dict(self.tensors)
        for i, path in enumerate(paths[1:], 1):
            part = GGUFFile.__new__(GGUFFile)
            data, part.state = map_file(path)
            part._load(data, path)
            found = tuple(part.metadata.get(key) for key in (SPLIT_NO, SPLIT_COUNT))
            if found != (i, n):
                raise BadFile(f"{path}: its {SPLIT_NO} and {SPLIT_COUNT} are {found[0]} and {found[1]}, expected {i} "
                              f"and {n}; the parts are not of one model, fetch them again")
            for info in part.tensors.values():
                if info.name in tensors:
                    raise BadFile(f"{path}: tensor {info.name!r} is in another part as well; fetch the parts again")
                tensors[info.name] = replace(info, part=i)
            self._others += (part,)
        if len(tensors) != self.get(SPLIT_TENSORS, len(tensors)):
            raise BadFile(f"{self.path}: the parts hold {len(tensors)} tensors, {SPLIT_TENSORS} is "
                          f"{self.get(SPLIT_TENSORS)}; fetch the parts again")
        self.tensors = MappingProxyType(tensors)

    def __repr__(self):
        return f"GGUFFile({self.path!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def __reduce__(self):
        """A pickle, or a copy, opens the path again.  Errors: TypeMismatch for bytes in memory."""
        if self._stored is not None:
            raise TypeMismatch(f"{self.path} was quantised: the new matrices lie in memory alone, and are not pickled "
                               f"or copied with it; pass the path on, and quantise there, or write them with `ggjit "
                               f"quantize`")
        if self.state is None:
            raise TypeMismatch(f"{self.path} was read from bytes in memory, which are not pickled or copied with it; "
                               f"pass the bytes on, and read them there with GGUFFile.from_bytes")
        return type(self), (self._absolute,)

    def with_part(self, part, tensors):
        """This file, of the same mapping, with one more part, whose `tensors` {name: TensorInfo} take the place of its
        own."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), _others=(*self._others, part), _stored=self.stored, read_keys=set(),
                           tensors=MappingProxyType({**self.tensors, **tensors}))
        return other

    @property
    def stored(self):
        return self._stored or self

    @property
    def parts(self):
        return self, *self._others              # kept without itself: the mapping ends with the last reference to it

    @property
    def arch(self):
        """`general.architecture`, e.g. "llama" or "bert"."""
        return self.get("general.architecture", kind=str)

    def map(self):
        """The whole file, uint8; private copy-on-write pages, so writing here never reaches the file."""
        return self._data

    def raw_value(self, key):
        """The bytes of a key's value as they are in the file, after u32 kind."""
        start, end = self._spans[key]
        return self._data[start:end].tobytes()

    def validate(self):
        """Read every tensor: BadFile for the first with a NaN or an infinity, among its values or the scales of its
        blocks.  Source: ggml_validate_row_data."""
        with work("checking tensors", len(self.tensors)) as step:
            for name, info in self.tensors.items():
                bad = first_bad_block(info.type, self.tensor_bytes(name))
                if bad is not None:
                    raise BadFile(f"{self.path}: tensor {name!r} ({info.type!r}): {bad[1]} in block {bad[0]}; the file "
                                  f"is damaged, fetch or convert it again")
                step()

    def tensor_bytes(self, name):
        """The bytes of one tensor: a view of its part's `map()`."""
        info = self.tensors.get(name)
        if info is None:
            raise BadFile(f"{self.path}: tensor {name!r} is missing; convert the model again")
        return self.parts[info.part].map()[info.offs:info.offs + info.nbytes]

    def get(self, key, default=..., kind=None):
        """The value of `key`; without a default, a missing key is an error.

        `kind` is one of bool, int, float (an int will do), str, np.ndarray (numeric array) or StringArray.  Raises
        BadFile naming the key, what is there and what was expected.
        """
        self.read_keys.add(key)
        if key not in self.metadata:
            if default is ...:
                raise BadFile(f"{self.path}: key {key!r} is missing; the model was converted without it, convert again")
            return default
        value = self.metadata[key]
        if kind is not None and not _is_kind(value, kind):
            raise BadFile(f"{self.path}: key {key!r} holds {_describe(value)}, expected {kind.__name__}; convert again")
        return float(value) if kind is float else value

    def arch_get(self, name, default=..., kind=None):
        """`get` of "<architecture>.<name>"."""
        return self.get(f"{self.arch}.{name}", default, kind)


def _is_kind(value, kind):
    if kind is StringArray:             # the tokens of whisper.cpp's files have StringArray's methods
        return isinstance(value, Sequence) and hasattr(value, "raw")
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _describe(value):
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float, StringArray)) else type(value).__name__


def _read_start(c):
    c.need(24, "the header")
    magic = bytes(c.data[:4])
    if magic != MAGIC:
        c.fail(f"the file starts with {magic!r}, not {MAGIC!r}")
    c.pos = 4
    version = c.number(U32, "the version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big")
        if big_endian in (1, *VERSIONS):
            c.fail(f"a big-endian file (version {big_endian}), only little-endian ones are read")
        c.fail(f"GGUF version {version}, only {VERSIONS[0]} and {VERSIONS[1]} are read")
    n_tensors = c.count(8 + 1 + 4 + 4 + 8, "the number of tensors")
    n_kv = c.count(8 + 1 + 4 + 1, "the number of keys")
    if max(n_tensors, n_kv) > MAX_ENTRIES:
        c.fail(f"{n_tensors} tensors and {n_kv} keys, at most {MAX_ENTRIES} of each are allowed")
    return version, n_tensors, n_kv


def _read_metadata(c, n_kv):
    """({key: value}, {key: (byte offset of its kind, end of its value)})"""
    out, spans = {}, {}
    for i in range(n_kv):
        key = c.name(f"key {i}", MAX_KEY_NBYTES)
        if key in out:
            c.fail(f"key {key!r} appears twice")
        start = c.pos
        out[key] = c.value(c.number(U32, key), key)
        spans[key] = start, c.pos
    return out, spans


def _alignment(c, metadata):
    n = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(n) is not int or n <= 0 or n & (n - 1):
        c.fail(f"general.alignment is {_describe(n)}, expected a power of two")
    return n


def _read_infos(c, n_tensors):
    """[(name, type, ne, nbytes, offset in the data section)], each whole in itself."""
    out = []
    for i in range(n_tensors):
        name = c.name(f"name of tensor {i}", MAX_NAME_NBYTES)
        n_dims = c.number(U32, name)
        if n_dims > MAX_DIMS:
            c.fail(f"tensor {name!r} has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
        c.need(8 * n_dims + 12, f"tensor {name!r}")
        ne = struct.unpack_from(f"<{n_dims}Q", c.data, c.pos) or (1,)
        c.pos += 8 * n_dims
        kind = _type(c, name, c.number(U32, name))
        out.append((name, kind, ne, _nbytes(c, name, kind, ne), c.number(U64, name)))
    return out


def _type(c, name, number):
    if number not in TYPE_INFO:
        c.fail(f"tensor {name!r} has type number {number}, which no known ggml type has")
    return TYPE_INFO[number]


def _nbytes(c, name, kind, ne):
    if math.prod(max(n, 1) for n in ne) > INT64_MAX:
        c.fail(f"tensor {name!r} of shape {ne} has more elements than 64 bits can count")
    if ne[0] % kind.block:
        c.fail(f"tensor {name!r}: rows of {ne[0]} are not a multiple of {kind!r}'s block of {kind.block}")
    return math.prod(ne) // kind.block * kind.nbytes


def _place(c, infos, data_offs, alignment):
    """Make the offsets of tensors absolute, and check that their ranges lie inside the file, aligned and apart."""
    tensors = {}
    for name, kind, ne, nbytes, offs in infos:
        if name in tensors:
            c.fail(f"tensor {name!r} appears twice")
        if offs % alignment:
            c.fail(f"tensor {name!r} starts at {offs}, not a multiple of the alignment {alignment}")
        if data_offs + offs + nbytes > c.end:
            c.fail(f"tensor {name!r} needs bytes {data_offs + offs} to {data_offs + offs + nbytes}, "
                   f"the file ends at {c.end} (truncated?)")
        tensors[name] = TensorInfo(name, kind, ne, data_offs + offs, nbytes)
    in_order = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offs)
    for a, b in itertools.pairwise(in_order):
        if a.offs + a.nbytes > b.offs:
            c.fail(f"tensors {a.name!r} and {b.name!r} overlap")
    return tensors
