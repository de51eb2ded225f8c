"""A product of one float32 column in parts, for kernels that do more than the product (ops/fused/column.py).

    y = prepare(x)                          each thread for itself
    d[r] = sum over k of a[r][k] y[k]       for rows r = start ... stop - 1, as many at a time as threads take
"""
from collections.abc import Callable
from typing import NamedTuple


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
