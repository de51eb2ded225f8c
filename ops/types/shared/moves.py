"""Moving rows of elements between types: what get_rows, set_rows, copies and concat share.

    move(dst, src, k, scratch, n)   k elements (whole blocks) at src -> the same at dst, a row of n that are moved
                                    together; addresses in bytes

Equal types are copied as bytes; the others go through float32, in pieces of PIECE elements where neither side is F32.
`scratch` is SCRATCH_NBYTES of memory of the calling thread.

A long row that is written is mostly in no near cache, and a store waits there for its line.  So lines are prefetched
AHEAD bytes early, never beyond the row: rows of 8 KiB become faster by it, but not those that are in the second-level
cache already.

    dst   |#########################|-------- AHEAD --------|- prefetched-|                  |
                                    written next                                             end of the row

The newest x86 processors (isa.FAST_STRINGS) do better without prefetches, and have a fast string instruction, of which
libc knows where it pays.  So libc's memcpy moves rows of STRING bytes and more there, if they are FAR bytes together:
fewer may be in the first-level cache, where the loop is faster (docs/measured.md, "Copies of rows").
"""
import dataclasses
import functools
from collections.abc import Callable

from llvmlite import ir

from ggjit.ops.core.traits import all_traits, module_of, traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.native import isa, mem
from ggjit.ops.native.jit import exact, inline, inlined, ir_function
from ggjit.ops.native.simd import B, ldf, ldf_part, opaque, stf, stf_part

PIECE = 1024                            # a multiple of every block
SCRATCH_NBYTES = 4 * PIECE
SHORT, LONG, FAR = 256, 64 * B, 1 << 15 # bytes: a loop of vectors, of four, of four with prefetch, libc's memcpy
STRING = 4096                           # bytes of a row, of many, from which the string instruction is faster
PREFETCHES = not isa.FAST_STRINGS
AHEAD, LINE = 1024, 64                  # bytes between a prefetch and its use; bytes of a cache line
STEP = AHEAD // 4                       # float32 elements; a multiple of every block


@dataclasses.dataclass(frozen=True)
class Mover:
    move: Callable
    modules: tuple = ()                 # type files the code depends on


def _asker(nbytes):
    @ir_function
    def prefetch(b, addr):
        """Prefetch the lines of the nbytes at addr for writing; any address will do."""
        for offs in range(0, nbytes, LINE):
            line = mem.pointer(b, b.add(addr, ir.Constant(mem.IR_I64, offs)), ir.IntType(8))
            how = [ir.Constant(mem.IR_I32, k) for k in (1, 3, 1)]       # to be written, keep near, data
            mem.call_intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), [line, *how])
    return prefetch


_ask_vectors, _ask_step = _asker(4 * B), _asker(4 * STEP)


@inline
def _move_long(dst, src, n):
    """SHORT bytes or more, four vectors at a time."""
    i, is_long = 0, PREFETCHES and n > LONG
    while i + 4 * B <= n:
        if is_long:
            _ask_vectors(dst + min(i + AHEAD, n - 4 * B))
        v0, v1, v2, v3 = ldf(src + i), ldf(src + i + B), ldf(src + i + 2 * B), ldf(src + i + 3 * B)
        stf(dst + i, v0)
        stf(dst + i + B, v1)
        stf(dst + i + 2 * B, v2)
        stf(dst + i + 3 * B, v3)
        i += 4 * B
    while i < n:
        at = opaque(min(i, n - B))          # the last vector may move some bytes a second time
        stf(dst + at, ldf(src + at))
        i += B


@exact
def _move_more(dst, src, n, together):
    """More than SHORT bytes, or a number that is not a multiple of four."""
    by_string = isa.FAST_STRINGS and n >= STRING and together >= FAR and dst - src & LINE - 1 == 0
    if SHORT < n <= FAR and not by_string:
        _move_long(dst, src, n)
    else:
        mem.copy_bytes(dst, src, n)


@inlined
def move_bytes(dst, src, n, together=0):
    """memcpy, inlined for short stretches; dst and src are the same or do not overlap.

    together: the bytes of all rows, of which this is one."""
    if n > SHORT or n & 3:
        _move_more(dst, src, n, together)
        return
    i = 0
    while i + B <= n:
        stf(dst + i, ldf(src + i))
        i += B
    if i < n:
        m = (n - i) >> 2
        stf_part(dst + i, ldf_part(src + i, m), m)


ONE = {1: (mem.ld_i8, mem.st_i8), 2: (mem.ld_i16, mem.st_i16), 4: (mem.ld_i32, mem.st_i32), 8: (mem.ld_i64, mem.st_i64)}


def can_move(ts, td):
    """Is there a conversion?"""
    if ts is td:
        return True
    known = all_traits()
    return (ts in known and td in known and known[ts][0].to_float is not None
            and (td is F32 or known[td][0].from_float is not None))


@functools.cache
def mover(ts, td):
    """The Mover from type ts to type td; NotSupported where a type has no such conversion."""
    if ts is td:
        block, nbytes = ts.block, ts.nbytes

        @inline
        def move(dst, src, k, scratch, n):
            row = k // block * nbytes
            move_bytes(dst, src, row, n * row)
        return Mover(move, (module_of(ts),) if ts.is_own else ())
    modules = tuple(module_of(t) for t in (ts, td))
    to_float, from_float = traits_of(ts).to_float, traits_of(td).from_float
    if td is F32:
        step_nbytes = ts.row_nbytes(STEP)

        @inline
        def move(dst, src, k, scratch, n):
            if PREFETCHES and 4 * k > LONG:
                last = dst + 4 * (k - STEP)
                while k >= 2 * STEP:
                    _ask_step(min(dst + AHEAD, last))
                    to_float(src, dst, STEP)
                    dst, src, k = dst + AHEAD, src + step_nbytes, k - STEP
            to_float(src, dst, k)
    elif ts is F32:
        @inline
        def move(dst, src, k, scratch, n):
            from_float(src, dst, k)
    else:
        s_step, d_step = ts.row_nbytes(PIECE), td.row_nbytes(PIECE)

        @inline
        def move(dst, src, k, scratch, n):
            while k > 0:
                piece = min(k, PIECE)
                to_float(src, scratch, piece)
                from_float(scratch, dst, piece)
                dst, src, k = dst + d_step, src + s_step, k - piece
    return Mover(move, modules)


@functools.cache
def element_mover(ts, td):
    """move(dst, src, scratch) of one element, or of one block where both types are the same."""
    if ts is td and ts.nbytes in ONE:
        load, store = ONE[ts.nbytes]

        @inline
        def move(dst, src, scratch):
            store(dst, load(src))
        return Mover(move, (module_of(ts),) if ts.is_own else ())
    row = mover(ts, td)
    inner, k = row.move, max(ts.block, td.block)

    @inline
    def move_one(dst, src, scratch):
        inner(dst, src, k, scratch, 1)
    return Mover(move_one, row.modules)
