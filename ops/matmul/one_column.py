"""Products of one float32 column: recognises them, and has their parts for kernels that do more (ops/fused/column.py).

    y = prepare(x)                          each thread for itself
    d[r] = sum over k of a[r][k] y[k]       for rows r = start ... stop - 1, as many at a time as threads take
"""
from collections.abc import Callable
from typing import NamedTuple

from ggjit.ops.core.record import OP


def is_product(t):
    """Is it a product of a matrix and one column?"""
    return t.op == OP.MUL_MAT and t.ne[1:] == (1, 1, 1)


def has_bias(t, product):
    """Does node t add a leaf to the product?"""
    return t.op == OP.ADD and t.src[0].id == product.id and is_leaf(t.src[1]) and t.view_src is None


def is_leaf(t):
    """Has it memory of its own that no node writes?"""
    return t.op == OP.NONE and t.view_src is None


class ColumnParts(NamedTuple):
    """Jitted functions of a product.  a: address of the view of the matrix.

    prepare   (x, panel, k): k float32 numbers at x as the products read them; None: they are read as they are
    rows      (a, k, y, start, stop, out): rows start ... stop - 1 into float32 `out`
    chunk     (a, nth, n): rows that a thread takes at once of n matrices like a
    """
    prepare: Callable | None
    rows: Callable
    chunk: Callable


class OneColumn(NamedTuple):
    """How a Kernel of one column is made of parts.

    label         names the code: equal labels must mean equal code
    run           rows of whole tiles; a chunk begins at a multiple of a tile
    panel_nbytes  bytes of the prepared column, whole cache lines
    make          () -> ColumnParts
    """
    label: str
    run: int
    panel_nbytes: int
    make: Callable
