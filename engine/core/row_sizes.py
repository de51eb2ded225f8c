"""Sizes of tensors in bytes, computed from their rows of the table."""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core import record as r
from ggjit.ops.core.types import BLOCK_SIZES
from ggjit.ops.native.jit import i64s, inlined, native


@inlined
def row_nbytes(t, at, sizes):
    """ggml_nbytes of the table row that starts at word `at`: from the first element to the last, gaps counted.
    sizes: (bytes, elements) of a block by type number."""
    block_nbytes, block_size = sizes[2 * t[at + r.T_TYPE]], sizes[2 * t[at + r.T_TYPE] + 1]
    if block_size == 1:
        total = block_nbytes + (t[at + r.T_NE] - 1) * t[at + r.T_NB]
    else:
        total = t[at + r.T_NE] // block_size * t[at + r.T_NB]
    for k in range(1, 4):
        total += (t[at + r.T_NE + k] - 1) * t[at + r.T_NB + k]
    for k in range(4):
        if t[at + r.T_NE + k] <= 0:
            return np.int64(0)
    return total


@native("i64(i64, i64, i64, i64, i64)")
def _rows_nbytes(table, ids, n, sizes, out):
    t, a, s, o = i64s(table, 1 << 40), i64s(ids, n), i64s(sizes, 1 << 11), i64s(out, n)
    for i in range(n):
        o[i] = row_nbytes(t, a[i] * r.T_WORDS, s)
    return 0


def nbytes_of(ids):
    """int64 array: Tensor.nbytes of rows of the table.  ids: a contiguous int64 array."""
    out = np.empty(len(ids), np.int64)
    _rows_nbytes(TABLE.words, ids, len(ids), BLOCK_SIZES, out)
    return out
