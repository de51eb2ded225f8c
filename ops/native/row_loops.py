"""What ops over independent rows share: the loop that hands rows to threads, and checks of whole-number parameters.

    each(count, one)        kernel that calls one(node, r) for every r in range(count(node)), in chunks, on all threads
    each_row(one)           the same for the flat rows of the destination

`one` returns a status; anything but OK ends the kernel with it.
"""
import operator

from numba import types

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, chunk_rows, n_rows, next_rows, param_i32

I32_MAX = 2 ** 31 - 1
SHORT_CHUNK = 512                   # elements: about as long as asking for a chunk ten times


@inline
def param(node, i):
    """Int32 op param i, widened: products with sizes do not overflow."""
    return types.int64(param_i32(node, i))


@inline
def chunk_of(n, nth, length):
    """chunk_rows for n rows of `length` elements: never so few that asking for them takes longer than their work."""
    return max(chunk_rows(n, nth), SHORT_CHUNK // max(length, 1))


@inline
def rows_of_result(node):
    return n_rows(node + DST)


def each(count, one):
    def kernel(node, ith, nth, sync):
        n = count(node)
        chunk = chunk_rows(n, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, n)
            if start >= n:
                return OK
            for r in range(start, min(n, start + chunk)):
                status = one(node, r)
                if status != OK:
                    return status
    return kernel


def each_row(one):
    return each(rows_of_result, one)


def whole(op, name, value, low=0, high=I32_MAX):
    """`value` as a Python int in [low, high], or a ParamError naming op and parameter."""
    try:
        n = operator.index(value)
    except TypeError:
        n = None
    if n is None or not low <= n <= high:
        raise ParamError(f"{op}: {name} must be a whole number from {low} to {high}, got {value!r}")
    return n
