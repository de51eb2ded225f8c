"""Silero VAD's weights in whisper.cpp's file form: a bounded reader.

    "ggml" as u32 0x67676d6c | n, n bytes: kind | version: 3 | n_window, n_context | n_encoder, 3 per encoder layer
                             | LSTM: input, hidden | last convolution: input, output                  (all int32)
    then, up to the end:     n_dims, n_name, type (0 F32, 1 F16) | ne, n_dims of them | name | values (little endian)

Every count is compared with what is left of the file before it is used.
"""
import math
import os
import stat
import struct
from dataclasses import dataclass

import numpy as np

from ggjit.models.files.bin_cursor import BinCursor
from ggjit.ops.core.errors import BadFile

MAGIC = 0x67676D6C
MAX_NBYTES = 64 << 20           # the model has 0.9 MB; whatever is larger is something else
MAX_KIND_NBYTES = MAX_NAME_NBYTES = 256
MAX_LAYERS = 64
MAX_DIMS = 4
DTYPES = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


@dataclass(frozen=True)
class SileroFile:
    """The contents of a Silero file.  encoder: ((input channels, output channels, taps), ...); tensors: {name: array}
    in NumPy order, views of the file's bytes."""
    path: str
    kind: str
    version: tuple
    n_window: int
    n_context: int
    encoder: tuple
    lstm: tuple
    final: tuple
    tensors: dict


class _SileroCursor(BinCursor):
    def count(self, what, low, high):
        n, = self.ints(1, what)
        if not low <= n <= high:
            self.fail(f"{what} is {n}, expected {low} to {high}")
        return n

    def string(self, nbytes, what):
        at = self.take(nbytes, what)
        try:
            return self.data[at:at + nbytes].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {self.data[at:at + nbytes]!r} is not UTF-8")

    def tensor(self):
        """(name, values)"""
        where = f"the tensor at {self.pos}"
        n_dims = self.count(f"n_dims of {where}", 0, MAX_DIMS)
        n_name = self.count(f"the length of the name of {where}", 1, MAX_NAME_NBYTES)
        type_id = self.count(f"the type of {where}", min(DTYPES), max(DTYPES))
        ne = self.ints(n_dims, f"the shape of {where}")
        name = self.string(n_name, f"the name of {where}")
        if min(ne, default=1) < 1:
            self.fail(f"tensor {name!r} has shape {list(ne)}")
        dtype, n = DTYPES[type_id], math.prod(ne)
        at = self.take(n * dtype.itemsize, f"tensor {name!r} {list(ne)}")
        return name, np.frombuffer(self.data, dtype, n, at).reshape(ne[::-1])


def _read_bytes(path):
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise BadFile(f"{path}: not a regular file; give the path of a Silero VAD model")
        if info.st_size > MAX_NBYTES:
            raise BadFile(f"{path}: {info.st_size:,} bytes, a Silero VAD model has at most {MAX_NBYTES:,}; is it "
                          f"another model?")
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    except ValueError as e:             # a null byte in the path
        raise e if isinstance(e, BadFile) else BadFile(f"{path!r} is not a path of a file: {e}") from None


def read_silero(path):
    """The SileroFile at `path`.  Errors: BadFile for whatever is not such a file, whole and consistent."""
    path = os.fspath(path)
    c = _SileroCursor(_read_bytes(path), path, "Silero VAD model")
    if c.ints(1, "the magic number")[0] != MAGIC:
        c.fail(f"it starts with {c.data[:4]!r}, not with the magic number of ggml's files {struct.pack('<i', MAGIC)!r}")
    kind = c.string(c.count("the length of the model's kind", 1, MAX_KIND_NBYTES), "the model's kind")
    version = c.ints(3, "the version")
    n_window, n_context = c.ints(2, "n_window and n_context")
    layers = [c.ints(3, "an encoder layer") for _ in range(c.count("n_encoder", 1, MAX_LAYERS))]
    lstm, final = c.ints(2, "the LSTM's sizes"), c.ints(2, "the last convolution's sizes")
    tensors = {}
    while c.pos < len(c.data):
        name, values = c.tensor()
        if name in tensors:
            c.fail(f"tensor {name!r} is there twice")
        tensors[name] = values
    return SileroFile(path, kind, version, n_window, n_context, tuple(layers), lstm, final, tensors)
