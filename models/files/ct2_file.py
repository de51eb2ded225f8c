"""CTranslate2's model.bin: a bounded reader of the numbers in it.

    u32 version 6 | spec | u32 revision | u32 n, n variables: name, u8 n_dims, u32 dims, u8 type, u32 nbytes, values
    | u32 n, n aliases: name, name of the variable                   (little endian; strings: u16 length with their NUL)

Every count is compared with what is left of the file before it is used.  Values stay in the mapped file.
"""
import math
import struct

import numpy as np

from ggjit.models.files.mapped_file import map_file
from ggjit.ops.core.errors import BadFile

VERSION = 6
MAX_DIMS, MAX_VARIABLES = 4, 1 << 16
# type codes; bfloat16 comes as uint16
DTYPES = {0: np.dtype("<f4"), 1: np.dtype("<i1"), 2: np.dtype("<i2"), 3: np.dtype("<i4"), 4: np.dtype("<f2"),
          5: np.dtype("<u2")}


def read_ct2(path):
    """(spec, {name: array}) of a model.bin, aliases included.  Errors: BadFile."""
    return Ct2Cursor(map_file(path)[0], path).read()


class Ct2Cursor:
    def __init__(self, data, path):
        self.data, self.path, self.pos = data, path, 0

    def fail(self, what):
        raise BadFile(f"{self.path}: {what}; the file is damaged or no model of CTranslate2, fetch it again")

    def take(self, nbytes, what):
        if nbytes > len(self.data) - self.pos:
            self.fail(f"{what} needs {nbytes} bytes at {self.pos}, {len(self.data) - self.pos} are left")
        self.pos += nbytes
        return self.pos - nbytes

    def number(self, code, what):
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize(code), what))[0]

    def string(self, what):
        n = self.number("H", what)
        at = self.take(n, what)
        try:
            return self.data[at:at + n].tobytes().rstrip(b"\0").decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def variable(self, i):
        name = self.string(f"the name of variable {i}")
        n_dims = self.number("B", name)
        if n_dims > MAX_DIMS:
            self.fail(f"variable {name!r} has {n_dims} dimensions")
        shape = [self.number("I", name) for _ in range(n_dims)]
        code, nbytes = self.number("B", name), self.number("I", name)
        dtype = DTYPES.get(code)
        if dtype is None or math.prod(shape) * dtype.itemsize != nbytes:
            self.fail(f"variable {name!r} of shape {shape}, type {code}, has {nbytes} bytes")
        at = self.take(nbytes, f"variable {name!r}")
        return name, np.frombuffer(self.data, dtype, math.prod(shape), at).reshape(shape)

    def read(self):
        version = self.number("I", "the version")
        if version != VERSION:
            self.fail(f"version {version}, expected {VERSION}")
        spec = self.string("the name of the spec")
        self.number("I", "the revision")
        n = self.number("I", "the number of variables")
        if n > MAX_VARIABLES:
            self.fail(f"{n} variables")
        out = dict(self.variable(i) for i in range(n))
        for _ in range(min(self.number("I", "the number of aliases"), MAX_VARIABLES)):
            alias, target = self.string("an alias"), self.string("the target of an alias")
            if target not in out:
                self.fail(f"alias {alias!r} of {target!r}, which is not there")
            out[alias] = out[target]
        return spec, out
