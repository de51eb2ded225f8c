"""Which matrix and which columns a block of tiles multiplies, in mul_mat and in mul_mat_id.

    mul_mat       block z: the matrix;  block y: columns y width ... of b's matrix
    mul_mat_id    block y: a tile of mul_mat_group;  its columns are pairs of one expert, anywhere in b and the result

A block looks its columns up once and keeps what it needs of them in shared memory:

    from    address of column c in b, or its number among all columns of b where 8-bit columns are read
    to      address of column c of the result; 0: beyond the end, nothing is stored
"""
import dataclasses
from collections.abc import Callable

from ggjit.ops.cuda.compiler.core import (
    block_y,
    block_z,
    device,
    ld_i32,
    lds_i64,
    shared,
    st_f32,
    sts_i64,
    sync,
    thread,
)
from ggjit.ops.cuda.matmul import mul_mat_group
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, addr, nb, ne, row_addr


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a tile kernel: where they are and how they are loaded.

    matrix(node)                    address of the matrix, 0: this block has nothing to do
    shared()                        where the columns lie; called by the kernel, which passes it on (core.shared)
    fill(node, sc)                  looks the columns up; every thread of the block calls it
    source(sc, c), target(sc, c)    from and to of column c
    """
    matrix: Callable
    shared: Callable
    fill: Callable
    source: Callable
    target: Callable


def columns(grouped, quantized, width):
    """The Columns of tiles of `width` columns.  grouped: of a mul_mat_id; quantized: source gives numbers."""
    matrix, span, index = _grouped(quantized) if grouped else _plain(width)

    @device
    def fill(node, sc):
        b, c = node + SRC1, thread()
        first, end = span(node)
        if c < width:
            i1, i2, i3, j1, j2 = index(node, min(first + c, end - 1))
            if quantized:
                sts_i64(sc + 8 * c, (i3 * ne(b, 2) + i2) * ne(b, 1) + i1)
            else:
                sts_i64(sc + 8 * c, row_addr(b, i1, i2, i3))
            to = 0
            if first + c < end:
                to = row_addr(node + DST, j1, j2, i3)
            sts_i64(sc + 8 * (width + c), to)
        sync()

    @device
    def source(sc, c):
        return lds_i64(sc + 8 * c)

    @device
    def target(sc, c):
        return lds_i64(sc + 8 * (width + c))
    return Columns(matrix, shared(16 * width), fill, source, target)


def _plain(width):
    """(matrix(node), span(node) -> (first column, end), index(node, j) -> (i1, i2, i3 of b, j1, j2 of the result))"""
    @device
    def matrix(node):
        a, b = node + SRC0, node + SRC1
        i3 = block_z() // ne(b, 2)
        i2 = block_z() - i3 * ne(b, 2)
        return row_addr(a, 0, i2 // (ne(b, 2) // ne(a, 2)), i3 // (ne(b, 3) // ne(a, 3)))

    @device
    def span(node):
        return block_y() * width, ne(node + SRC1, 1)

    @device
    def index(node, j):
        i3 = block_z() // ne(node + SRC1, 2)
        i2 = block_z() - i3 * ne(node + SRC1, 2)
        return j, i2, i3, j, i2
    return matrix, span, index


def _grouped(quantized):
    """As _plain, for a tile of columns that mul_mat_group has made."""
    order_of = mul_mat_group.scratch(quantized)

    @device
    def tile(node, i):
        n_pairs = ne(node + SRC2, 0) * ne(node + SRC2, 1)
        return ld_i32(order_of(node) + 8 * n_pairs + 12 * block_y() + 4 * i)

    @device
    def matrix(node):
        expert = tile(node, 0)
        return addr(node + SRC0) + expert * nb(node + SRC0, 2) if expert >= 0 else 0

    @device
    def span(node):
        return tile(node, 1), tile(node, 2)

    @device
    def index(node, j):
        pair, n_used = ld_i32(order_of(node) + 4 * j), ne(node + SRC2, 0)
        token = pair // n_used
        u = pair - token * n_used
        return u % ne(node + SRC1, 1), token, 0, u, token
    return matrix, span, index


@device
def store_pair(to, to_next, row, m, x, y):
    """Results of one row in two columns, where they exist."""
    if row < m:
        if to != 0:
            st_f32(to + 4 * row, x)
        if to_next != 0:
            st_f32(to_next + 4 * row, y)
