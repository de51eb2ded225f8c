"""Importance matrices: the importance of each column of each matrix, measured on a text (`ggjit imatrix`).

    sums[i, j] = sum over rows x that matrix i was multiplied with of x[j]^2        importance = sums / counts

A matrix of experts has one row of sums for every expert.  Files are llama.cpp's, read and written:

    GGUF    NAME.in_sum2 [n_columns, n_matrices], NAME.counts [1, n_matrices]; in newer ones also NAME.in_sum, the sums
            of x itself, which are kept; keys imatrix.datasets, .chunk_count, .chunk_size
    .dat    n_entries | length, name, n_calls, n_values, mean squares * n_calls | n_chunks | length, data set
            (old files: read, not written)
"""
import dataclasses
import os
import struct

import numpy as np

from ggjit.models.files.gguf import MAGIC, GGUFFile, StringArray
from ggjit.models.files.save import Entry, encoded, write_gguf
from ggjit.ops.core.errors import BadFile
from ggjit.ops.core.types import F32
from ggjit.ops.core.whole_numbers import is_whole

SUMS, COUNTS, PLAIN = ".in_sum2", ".counts", ".in_sum"
MAX_ENTRIES = 1 << 16


@dataclasses.dataclass
class ImportanceSums:
    """values (n_matrices, n_columns) and counts (n_matrices,), float32; counts: rows that were summed.

    plain: sums of x instead of x^2, of the shape of values, where a file has them.
    """
    values: np.ndarray
    counts: np.ndarray
    plain: np.ndarray | None = None

    @property
    def importances(self):
        """(n_matrices * n_columns,) float32; 1 for an expert that no token went to."""
        seen = self.counts > 0
        mean = self.values / np.where(seen, self.counts, np.float32(1))[:, None]
        return np.where(seen[:, None], mean, np.float32(1)).reshape(-1)


@dataclasses.dataclass
class Imatrix:
    """`.sums[name]` of every matrix; `.path` of the file it came from; `.datasets`, `.n_chunks`, `.chunk_size`.

    chunk_size: tokens; 0 and n_chunks 0 where the file does not tell.
    """
    sums: dict
    datasets: tuple = ()
    n_chunks: int = 0
    chunk_size: int = 0
    path: str = ""

    def save(self, path, force=False):
        """Write a GGUF file.  Errors: CannotWrite, an OSError."""
        about = {"general.type": "imatrix", "imatrix.datasets": list(self.datasets),
                 "imatrix.chunk_count": np.uint32(self.n_chunks), "imatrix.chunk_size": np.uint32(self.chunk_size)}
        if not self.datasets:
            del about["imatrix.datasets"]
        entries = []
        for name, s in sorted(self.sums.items()):
            parts = {PLAIN: s.plain} if s.plain is not None else {}
            for suffix, a in (parts | {SUMS: s.values, COUNTS: s.counts[:, None]}).items():
                entries.append(Entry(name + suffix, F32, a.shape[::-1],
                                     lambda a=a: iter([np.ascontiguousarray(a, "<f4").tobytes()])))
        write_gguf(path, {k: encoded(v, k) for k, v in about.items()}, [entries], force=force)

    def __repr__(self):
        return f"<Imatrix {self.path!r}: {len(self.sums)} matrices, {self.n_chunks} chunks>"


def load_imatrix(path):
    """The Imatrix in a file of llama.cpp's, GGUF or .dat.

        gg_models.load_imatrix("imatrix.gguf").sums["blk.0.ffn_up.weight"].importances

    Errors: BadFile.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as f:
            start = f.read(len(MAGIC))
        found = _from_gguf(path) if start == MAGIC else _from_dat(path)
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    if not found.sums:
        raise BadFile(f"{path}: holds no sums of a matrix; make it with `ggjit imatrix`")
    for name, s in found.sums.items():
        if not s.values.size:
            raise BadFile(f"{path}: {name!r} has no sums; make the file again")
        if not (np.isfinite(s.values).all() and np.isfinite(s.counts).all() and (s.values >= 0).all()):
            raise BadFile(f"{path}: the sums of {name!r} are not all finite and at least 0; make the file again")
    return found


def _from_gguf(path):
    file = GGUFFile(path)
    sums = {}
    for name in file.tensors:
        if not name.endswith(SUMS):
            continue
        name = name.removesuffix(SUMS)
        for suffix in (SUMS, COUNTS):
            if file.tensors.get(name + suffix) is None or file.tensors[name + suffix].type is not F32:
                raise BadFile(f"{path}: {name + suffix!r} of type F32 is missing; make the imatrix again")
        values, counts = (file.tensor_bytes(name + suffix).view("<f4") for suffix in (SUMS, COUNTS))
        if not counts.size or values.size % counts.size:
            raise BadFile(f"{path}: {name!r} has {values.size} sums and {counts.size} counts; make the imatrix again")
        values = values.reshape(counts.size, -1).copy()
        sums[name] = ImportanceSums(values, counts.copy(), _plain_sums(file, name, values.shape))
    return Imatrix(sums, tuple(file.get("imatrix.datasets", (), StringArray)), _chunks(file, "count"),
                   _chunks(file, "size"), path)


def _chunks(file, what):
    n = file.get(f"imatrix.chunk_{what}", 0, int)
    if not is_whole(n, 0, (1 << 32) - 1):
        raise BadFile(f"{file.path}: imatrix.chunk_{what} is {n}; make the imatrix again")
    return int(n)


def _plain_sums(file, name, shape):
    info = file.tensors.get(name + PLAIN)
    if info is None:
        return None
    if info.type is not F32 or info.nbytes != 4 * shape[0] * shape[1]:
        raise BadFile(f"{file.path}: {info.name!r} is {info.type!r} {list(info.ne)}, expected F32 {list(shape[::-1])}; "
                      f"make the imatrix again")
    plain = file.tensor_bytes(info.name).view("<f4").reshape(shape).copy()
    if not np.isfinite(plain).all():
        raise BadFile(f"{file.path}: the sums of {info.name!r} are not all finite; make the file again")
    return plain


def _from_dat(path):
    with open(path, "rb") as f:
        data = f.read()
    pos = 0

    def take(nbytes, what):
        nonlocal pos
        if nbytes < 0 or pos + nbytes > len(data):
            raise BadFile(f"{path}: {what} needs {nbytes} bytes at {pos}, the file ends at {len(data)}; it is damaged "
                          f"or no importance matrix")
        pos += nbytes
        return data[pos - nbytes:pos]

    def number(what):
        return struct.unpack("<i", take(4, what))[0]
    n_entries, sums = number("the number of entries"), {}
    if not 0 < n_entries <= MAX_ENTRIES:
        raise BadFile(f"{path}: {n_entries} entries; the file is damaged or no importance matrix")
    for i in range(n_entries):
        name = take(number(f"entry {i}"), f"the name of entry {i}").decode("utf-8", "replace")
        n_calls, n_values = number(name), number(name)
        values = np.frombuffer(take(4 * n_values, name), "<f4").reshape(1, -1)
        if not n_values:
            raise BadFile(f"{path}: {name!r} has no values; make the imatrix again")
        sums[name] = ImportanceSums(values, np.array([max(n_calls, 1)], np.float32))
    if pos + 8 > len(data):             # older versions of the format end here
        return Imatrix(sums, path=path)
    n_chunks = number("the number of chunks")
    dataset = take(number("the data set"), "the data set").decode("utf-8", "replace")
    return Imatrix(sums, (dataset,) if dataset else (), max(n_chunks, 0), path=path)
