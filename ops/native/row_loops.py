"""The loop that hands the rows of an op to threads, and checks of whole-number parameters.

    over_rows(row)          kernel that calls row(node, r) for every flat row r of the destination, on all threads
    over_chunks(rows)       kernel that calls rows(node, ith, start, stop) for chunks of them: what does not change
                            from row to row is computed once a chunk

`row` and `rows` are jitted and return a status; anything but OK ends the kernel with it.  `count` tells how many rows
there are, where they are not those of the destination; `chunking` how many a thread takes at a time, and which.

A kernel with a barrier is written by hand around its phases, each of which has a counter of its own:

    sums, finish = inline(over_chunks(_sums)), inline(over_chunks(_finish, phase=1))

    def kernel(node, ith, nth, sync):
        sums(node, ith, nth, sync)
        barrier(sync, nth)
        return finish(node, ith, nth, sync)
"""
import operator
from collections.abc import Callable
from typing import NamedTuple

from numba import types

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, WORD
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import cycles
from ggjit.ops.native.node import DST, SRC0, aborted, chunk_of_lines, n_rows, nb, ne, next_rows, param_i32
from ggjit.ops.native.row_affinity import (
    BITS,
    affinity_chunk,
    affinity_next,
    affinity_next_but_last,
    light_chunk,
)

I32_MAX = 2 ** 31 - 1
SHORT_CHUNK = 512               # elements: takes about ten times as long as asking for a chunk
FEW_ROWS = 16  # up to so many short rows a thread does not poll signals, since it is done before polling is due
FEW_ELEMENTS = 1 << 14          # the same for elements, where they are only moved
PIECE = 1024                    # elements; a multiple of every vector length
PART = 1 << 16                  # elements of the result between two looks at the abort word, at first
PART_CYCLES = 1 << 21           # the time to which parts grow or shrink: about a millisecond


@inline
def param(node, i):
    """Int32 op param i, widened: products with sizes do not overflow."""
    return types.int64(param_i32(node, i))


# ---------------------------------------------------------------- the loop
class Chunking(NamedTuple):
    """How rows are handed to threads."""
    length: Callable            # jitted (node, n, nth) -> rows of a chunk
    take: Callable              # jitted (node, ith, nth, sync, chunk, n) -> first row of a thread's next chunk, or >= n


@inline
def _few(node, n, nth):
    return nth == 1 and n <= FEW_ROWS and n_rows(node + DST) * ne(node + DST, 0) <= 64 * PIECE


@inline
def _one(node, n, nth):
    return 1


@inline
def _short(node, n, nth):
    return max(affinity_chunk(n, nth), SHORT_CHUNK // max(ne(node + DST, 0), 1))


@inline
def _affinity(node, n, nth):
    return n if _few(node, n, nth) else affinity_chunk(n, nth)


@inline
def _moved(node, n, nth):
    few = nth == 1 and n * max(ne(node + DST, 0), ne(node + SRC0, 0)) <= FEW_ELEMENTS
    return n if few else _affinity(node, n, nth)


@inline
def _light(node, n, nth):
    x, d = node + SRC0, node + DST
    return n if _few(node, n, nth) else light_chunk(n, nth, (n_rows(d) * ne(d, 0) + n_rows(x) * ne(x, 0)) // 16)


@inline
def _next_item(node, ith, nth, sync, chunk, n):
    return affinity_next(node, ith, nth, sync, chunk, n) if n <= BITS else next_rows(node, ith, nth, sync, chunk, n)


SINGLE = Chunking(_one, next_rows)                          # row by row to the thread that asks first: much work
ITEMS = Chunking(_one, _next_item)                          # up to BITS of them to the same thread in every run
AFFINITY = Chunking(_affinity, affinity_next)               # to the same thread in every run (row_affinity.py)
LIGHT = Chunking(_light, affinity_next_but_last)            # the same, little work an element: chunks are longer
MOVED = Chunking(_moved, affinity_next)                     # the same; rows are moved, and short ones take no time
SHORT_ROWS = Chunking(_short, affinity_next)                # the same, chunks of at least SHORT_CHUNK elements


@inline
def rows_of_result(node):
    return n_rows(node + DST)


@inline
def has_elements(view):
    """False where an axis is empty, however long the others are: empty loops over them would take minutes."""
    return min(min(ne(view, 0), ne(view, 1)), min(ne(view, 2), ne(view, 3))) > 0


@inline
def rows_with_elements(view):
    """Rows of a view; none where a row has no elements."""
    return n_rows(view) if ne(view, 0) > 0 else 0


@inline
def rows_of_source(node):
    return rows_with_elements(node + SRC0)


@inline
def pieces_of_result(node):
    """The destination, contiguous, in pieces of PIECE elements regardless of its rows."""
    return (n_rows(node + DST) * ne(node + DST, 0) + PIECE - 1) // PIECE


@inline
def row_of_result(node):
    """Bytes from one row of the destination to the next."""
    return nb(node + DST, 1)


def over_chunks(rows, count=rows_of_result, chunking=AFFINITY, phase=0, written=row_of_result):
    """kernel(node, ith, nth, sync) that calls rows(node, ith, start, stop) for chunks of range(count(node)).

    written: jitted (node) -> bytes that a row writes; chunks are whole cache lines of them.
    """
    length, take = chunking
    counter, by_row = WORD * phase, count is not pieces_of_result and length is not _one

    @inline
    def in_parts(node, ith, sync, start, stop, part):
        """A chunk of more than `part` rows, with a look at the abort word after each part of about a millisecond."""
        while start < stop:
            began, end = cycles(), min(stop, start + part)
            status = rows(node, ith, start, end)
            if status != OK or end < stop and aborted(ith, sync):
                return status
            took, start = cycles() - began, end
            part = 2 * part if took < PART_CYCLES // 2 else max(part // 2, 1) if took > 2 * PART_CYCLES else part
        return OK

    def kernel(node, ith, nth, sync):
        n = count(node)
        chunk = length(node, n, nth)
        if nth == 1 and 0 < n <= chunk and n * ne(node + DST, 0) <= PART:
            return rows(node, ith, 0, n)        # without the counter, which takes longer than a short row
        part = PART // max(ne(node + DST, 0), 1) + 1
        if by_row:                              # chunks end where cache lines of the result end
            chunk = chunk_of_lines(chunk, written(node), n, nth, (ne(node + DST, 0) + ne(node + SRC0, 0)) // 16)
        while True:
            start = take(node + counter, ith, nth, sync, chunk, n)
            if start >= n:
                return OK
            stop = min(n, start + chunk)
            status = rows(node, ith, start, stop) if stop - start <= part else \
                in_parts(node, ith, sync, start, stop, part)
            if status != OK:
                return status
    return kernel


def over_rows(row, count=rows_of_result, chunking=AFFINITY, written=row_of_result):
    """kernel(node, ith, nth, sync) that calls row(node, r) for every r in range(count(node))."""
    @inline
    def rows(node, ith, start, stop):
        for r in range(start, stop):
            status = row(node, r)
            if status != OK:
                return status
        return OK
    return over_chunks(rows, count, chunking, written=written)


# ---------------------------------------------------------------- parameters
def whole(op, name, value, low=0, high=I32_MAX):
    """`value` as a Python int in [low, high], or a ParamError naming op and parameter."""
    if not is_whole(value, low, high):
        raise ParamError(f"{op}: {name} must be a whole number from {low} to {high}, got {value!r}")
    return operator.index(value)
