"""Hands out rows such that a thread gets the same rows in every run: for kernels that wait for memory.

Chunks from one counter (ops/native/node.py: next_rows) go to the thread that asks first; what one core has in its
cache another needs next time.  Here a thread takes the chunks of its own stretch in order, and then helps others from
the end:

    chunk      0   1   2   3   4   5   6   7 | 8   9  10  11  12  13  14  15
    thread 0   ---------------------------->                          <-----      when its own are done
    thread 1                                  -------------------->

Taken chunks are bits of the node's counter word, so a descheduled thread delays no other, here too.
"""
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.native.jit import exact, inline
from ggjit.ops.native.mem import IR_I64, call_intrinsic, load_acquire, pointer
from ggjit.ops.native.node import CHUNK, aborted, chunk_rows, next_rows, wait_while

CHUNKS = 8                              # chunks of a thread; fewer where all of them do not fit a word
BITS = 64
LIGHT_NANOSECONDS = 4000                # of a chunk of light rows at least: asking for it takes a part of that


@intrinsic
def _or(typingctx, addr, bits):
    """Sets bits atomically, returns the word before."""
    def codegen(context, b, sig, args):
        return b.atomic_rmw("or", pointer(b, args[0], IR_I64), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


def _counter(name):
    @intrinsic
    def count(typingctx, x):
        def codegen(context, b, sig, args):
            return call_intrinsic(b, name, IR_I64, [args[0], ir.Constant(ir.IntType(1), 0)])
        return types.int64(types.int64), codegen
    return count


_trailing_zeros, _leading_zeros = _counter("llvm.cttz.i64"), _counter("llvm.ctlz.i64")


@inline
def affinity_chunk(n, nth):
    """Chunk length for n equal rows: about eight chunks a thread, at least one row."""
    if nth == 1:
        return max(1, n // CHUNKS)                          # one row, done at once: no division by a variable
    if nth > BITS:
        return chunk_rows(n, nth)
    parts = nth * (CHUNKS if nth <= BITS // CHUNKS else BITS // nth)
    return max(1, (n + parts - 1) // parts)


@inline
def light_chunk(n, nth, nanoseconds):
    """The same for rows that take so many nanoseconds together: fewer chunks a thread, where asking for one would take
    longer than its rows."""
    if nth == 1 or nth > BITS // CHUNKS:
        return affinity_chunk(n, nth)
    parts = nth * max(1, min(CHUNKS, nanoseconds // (nth * LIGHT_NANOSECONDS)))
    return max(1, (n + parts - 1) // parts)


@inline
def countable(chunk, n):
    """`chunk`, or so many times it that n rows have no more chunks than a word has bits."""
    return chunk * max(1, (n + BITS * chunk - 1) // (BITS * chunk))


@inline
def _each(nth, chunk, n):
    """Chunks of a thread's own stretch."""
    return ((n + chunk - 1) // chunk + nth - 1) // nth


@inline
def own_first(ith, nth, chunk, n):
    """First row of thread ith's own stretch; n or more where it has none."""
    return 0 if nth == 1 or nth > BITS else ith * _each(nth, chunk, n) * chunk


@exact
def _next(node, ith, nth, sync, chunk, n, all_free):
    word, total = node + CHUNK, (n + chunk - 1) // chunk    # at most BITS chunks
    k = _each(nth, chunk, n)
    if ith * k >= total:                                    # it has none: those that have some help each other
        return n
    own = ((1 << k) - 1) << ith * k
    while True:
        taken = load_acquire(word)
        free = ~taken & ((1 << total) - 1 if total < BITS else -1)
        if free & own != 0:
            c = _trailing_zeros(free & own)
        else:
            if not all_free:                                # the first of each run of free chunks is left
                free &= free << 1
            if free == 0:
                return n
            c = BITS - 1 - _leading_zeros(free)
        bit = 1 << c
        if _or(word, bit) & bit == 0:
            return n if taken != 0 and aborted(ith, sync) else c * chunk


@inline
def affinity_next(node, ith, nth, sync, chunk, n):
    """First row of this thread's next chunk of `affinity_chunk` rows; n or more when nothing is left."""
    if nth == 1 or nth > BITS:
        return next_rows(node, ith, nth, sync, chunk, n)
    return _next(node, ith, nth, sync, chunk, n, True)


@inline
def affinity_next_but_last(node, ith, nth, sync, chunk, n):
    """The same, but of free chunks side by side the first is left to its own thread, which would begin with it soon and
    then has all its rows in its own cache."""
    if nth == 1 or nth > BITS:
        return next_rows(node, ith, nth, sync, chunk, n)
    return _next(node, ith, nth, sync, chunk, n, False)


@exact
def set_bit(word, i):
    """Tell the other threads that thread i < BITS has done its part; stores before it are seen by who waits for it."""
    _or(word, 1 << i)


@exact
def wait_for_bit(word, i, sync):
    """Wait until thread i has set its bit."""
    bit = 1 << i
    if load_acquire(word) & bit == 0:
        wait_while(word, bit, 0, sync, True)
