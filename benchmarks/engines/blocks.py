"""Products with quantised weights out of a graph file, for engines that have a form of their own for such weights.

Q4_0 and Q8_0 are what others call 4 and 8 bits, symmetric, with a float scale for every 32 elements of a row.
"""
import pickle
from typing import NamedTuple

import numpy as np

from benchmarks.worker import EngineError

BLOCK = 32
BITS = {2: 4, 8: 8}                 # by number of ggml type: Q4_0, Q8_0


class Product(NamedTuple):
    """w x^T.  codes: uint8 [rows, k], the zero point added; scales: float16 [rows, k / BLOCK]; x: float32 [n, k]."""
    bits: int
    codes: np.ndarray
    scales: np.ndarray
    x: np.ndarray

    @property
    def zero_point(self):
        return 1 << self.bits - 1

    def packed(self):
        """Codes as bytes; two of 4 bits share one, the first in its low half."""
        return self.codes if self.bits == 8 else self.codes[:, ::2] | self.codes[:, 1::2] << 4

    def rolled(self, i):
        """The same product with its rows turned by i: a copy that no engine can take for the first."""
        return self._replace(codes=np.roll(self.codes, i, 0), scales=np.roll(self.scales, i, 0))


def products(path, name):
    """The products of a graph file: the first as it is, the others with their rows turned."""
    with open(path, "rb") as f:
        records, leaves, wanted = pickle.load(f)
    node = records[wanted[0]]
    if node["op"] != "MUL_MAT" or records[node["src"][0]]["type"] not in BITS:
        raise EngineError(f"{name} is asked for products of Q4_0 and Q8_0 weights only")
    w, x = node["src"][:2]
    (k, m), n = records[w]["ne"][:2], records[x]["ne"][1]
    first = _product(BITS[records[w]["type"]], leaves[w], m, np.frombuffer(leaves[x], np.float32).reshape(n, k))
    return [first.rolled(i) for i in range(len(wanted))]


def _product(bits, raw, m, x):
    blocks = np.frombuffer(raw, np.dtype([("scale", "f2"), ("codes", "u1", (BLOCK * bits // 8,))])).reshape(m, -1)
    codes = blocks["codes"]
    codes = np.concatenate([codes & 15, codes >> 4], -1) if bits == 4 else codes ^ 0x80
    return Product(bits, codes.reshape(m, -1), blocks["scale"].copy(), x)
