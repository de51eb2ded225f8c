"""argsort and top_k of rows (ops/reductions/argsort.py).

    up to MAX_ROW   an element's place is the number of elements before it: n comparisons an element, no barriers
    longer          a block sorts words of key and number in scratch memory, by a bitonic network:

        span 2   a-b c-d    span 4   a---d b-c, then a-b c-d    ...      each pair put in order, a barrier after each
                                                                         distance; log2(n) (log2(n) + 1) / 2 of them

    with CCCL       the words of a row after the other are sorted by the whole card (the extra `cccl`,
                    engine/cuda/cccl.py), where that was measured to be faster

The number makes every word different, or stands in its place where a sort by keys keeps equal ones in order: the
result is the same, bit by bit.
"""
import functools
import math

from ggjit.ops.core.errors import MissingExtra, NotSupported, OutOfMemory
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.choice import library_decided, library_may
from ggjit.ops.cuda.compiler.core import (
    block,
    device,
    ld_i32,
    ld_i64,
    n_blocks,
    n_threads,
    st_i32,
    st_i64,
    sync,
    thread,
)
from ggjit.ops.cuda.native.launch import (
    MAX_THREADS,
    SMALL_BLOCKS,
    Launch,
    NodeWays,
    Sort,
    dense,
    over_pieces,
    over_rows,
    rounded,
)
from ggjit.ops.cuda.native.views import DST, SRC0, n_rows, nb, ne, param_i32, piece, row_addr, row_index, work
from ggjit.ops.reductions.argsort import argsort, top_k

MAX_ROW = 64 if SMALL_BLOCKS else 1024
SORT_THREADS = MAX_THREADS if SMALL_BLOCKS else 1024
MAX_SORTS = 2 if SMALL_BLOCKS else 256             # blocks, each with scratch memory for a row
MAX_CCCL_ROWS = 16
LAST = (1 << 63) - 1                            # a word that sorts behind all words of a row


@device
def key_of(x, descending):
    """The float at x as an integer that sorts like it: -0 equals 0, NaN above all."""
    bits = ld_i32(x) & 0xFFFFFFFF
    if bits == 0x80000000:
        bits = 0
    key = bits ^ 0x80000000
    if bits >> 31:
        key = bits ^ 0xFFFFFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:
        key = 0xFFFFFFFF
    return key ^ 0xFFFFFFFF if descending else key


def _putter(op_is_top_k):
    @device
    def put(to, place, k, i):
        if place < k:
            if op_is_top_k and place < 2 and k > 1:
                place = 1 - place               # as ggml does; it leaves the order of equal elements undefined
            st_i32(to + 4 * place, i)
    return put


def _make_short(op_is_top_k):
    put = _putter(op_is_top_k)

    def kernel(node):
        a, d = node + SRC0, node + DST
        n, k, step = ne(a, 0), ne(d, 0), nb(a, 0)
        descending = op_is_top_k or param_i32(node, 0) == 1
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            x, to = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < n:
                mine, place = key_of(x + i * step, descending), 0
                for j in range(n):
                    other = key_of(x + j * step, descending)
                    if other < mine or (other == mine and j < i):
                        place += 1
                put(to, place, k, i)
                i += n_threads()
            r += n_blocks()
    return kernel


@device
def in_order(words, i, distance, span):
    """Pair i of a pass: the smaller word first where the run of `span` words rises."""
    low = 2 * i - (i & (distance - 1))
    p, q = words + 8 * low, words + 8 * (low + distance)
    x, y = ld_i64(p), ld_i64(q)
    if (x > y) == (low & span == 0):
        st_i64(p, y)
        st_i64(q, x)


def _make_long(op_is_top_k):
    put = _putter(op_is_top_k)

    def kernel(node):
        a, d = node + SRC0, node + DST
        n, k, step, size = ne(a, 0), ne(d, 0), nb(a, 0), 2
        descending = op_is_top_k or param_i32(node, 0) == 1
        while size < n:
            size *= 2
        words = work(node) + 8 * size * block()
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            x, to = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < size:
                word = LAST
                if i < n:
                    word = ((key_of(x + i * step, descending) - 0x80000000) << 32) | i
                st_i64(words + 8 * i, word)
                i += n_threads()
            sync()
            span = 2
            while span <= size:
                distance = span >> 1
                while distance > 0:
                    i = thread()
                    while i < size >> 1:
                        in_order(words, i, distance, span)
                        i += n_threads()
                    sync()
                    distance >>= 1
                span *= 2
            i = thread()
            while i < k:
                put(to, i, k, ld_i64(words + 8 * i) & 0xFFFFFFFF)
                i += n_threads()
            sync()
            r += n_blocks()
    return kernel


# ---------------------------------------------------------------- by CCCL
def _make_words(op_is_top_k):
    """The words of all rows, key above number; no sign: keys are sorted as they are."""
    def kernel(node):
        a = node + SRC0
        n, descending = n_rows(a), op_is_top_k or param_i32(node, 0) == 1
        r, next_row, first, step = piece(n)
        while r < n:
            i1, i2, i3 = row_index(a, r)
            x, words, i = row_addr(a, i1, i2, i3), work(node) + 8 * ne(a, 0) * r, first
            while i < ne(a, 0):
                st_i64(words + 8 * i, (key_of(x + i * nb(a, 0), descending) << 32) | i)
                i += step
            r += next_row
    return kernel


def _make_numbers(op_is_top_k):
    """The numbers in sorted words, which lie behind the words of all rows."""
    put = _putter(op_is_top_k)

    def kernel(node):
        a, d = node + SRC0, node + DST
        n, k = n_rows(d), ne(d, 0)
        r, next_row, first, step = piece(n)
        while r < n:
            i1, i2, i3 = row_index(d, r)
            to, words, i = row_addr(d, i1, i2, i3), work(node) + 8 * ne(a, 0) * (n + r), first
            while i < k:
                put(to, i, k, ld_i64(words + 8 * i) & 0xFFFFFFFF)
                i += step
            r += next_row
    return kernel


@functools.cache
def available():
    """May CCCL be used?  GGJIT_CCCL=0 says no; in the simulator only GGJIT_CCCL=1 says yes."""
    return library_may("GGJIT_CCCL", "cuda", "cuda.compute")


def decided():
    return library_decided("GGJIT_CCCL")


def _by_cccl(t, name, top):
    (n, _, _, _), rows = t.src[0].ne, t.ne[1] * t.ne[2] * t.ne[3]
    nbytes = 16 * n * rows
    return (over_pieces(f"{name}_words", lambda: _make_words(top), rows, n, nbytes), Sort(n, rows),
            over_pieces(f"{name}_numbers", lambda: _make_numbers(top), rows, t.ne[0], nbytes))


def _argsort(t):
    """Sort by CCCL where it may be used for rows this long and there are few: it sorts one row after the other."""
    a, rows = t.src[0], t.ne[1] * t.ne[2] * t.ne[3]
    if MAX_ROW < a.ne[0] and 0 < rows <= MAX_CCCL_ROWS and a.type is F32 and dense(t) and available():
        return _by_cccl(t, t.op.name.lower(), t.op == OP.TOP_K)
    return own(t)


def own(t):
    """The launch of our own kernels."""
    a, name, top = t.src[0], t.op.name.lower(), t.op == OP.TOP_K
    n, rows = a.ne[0], t.ne[1] * t.ne[2] * t.ne[3]
    if a.type is not F32 or not dense(t):
        return None
    if n <= MAX_ROW:
        return over_rows(name, lambda: _make_short(top), rows, n)
    size, blocks = 1 << (n - 1).bit_length(), max(1, min(rows, MAX_SORTS))
    return Launch(f"{name}_long", lambda: _make_long(top), (blocks, 1, 1), min(SORT_THREADS, size // 2),
                  8 * size * blocks)


def _class_of(t):
    return f"{t.op.name.lower()} {rounded(t.src[0].ne[0])}x{rounded(math.prod(t.ne[1:]))}"


def _again(t, a):
    return top_k(a, t.ne[0]) if t.op is OP.TOP_K else argsort(a, int(t.op_params[0]))


_ways = NodeWays(own, _class_of, _again, ("cccl", lambda: decided()),
                 forgiven=(OutOfMemory, MissingExtra, NotSupported))
CUDA = {OP.ARGSORT: _argsort, OP.TOP_K: _argsort}
WAYS = {OP.ARGSORT: _ways, OP.TOP_K: _ways}
