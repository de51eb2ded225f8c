"""add for a quantised a: each row is decoded, added to in float32, and written in the result's type."""
from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    ne,
    row_addr,
    row_addr_mod,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import W, fadd, ldf, stf


def row_nbytes(k):
    """Scratch memory of a thread: one float32 row, in whole cache lines."""
    return (4 * k + 63) // 64 * 64


def make_kernel(ta, td):
    to_float, from_float = traits_of(ta).to_float, traits_of(td).from_float

    @inline
    def add_row(d, b, n):
        i = 0
        while i + W <= n:
            stf(d + 4 * i, fadd(ldf(d + 4 * i), ldf(b + 4 * i)))
            i += W
        while i < n:
            st_f32(d + 4 * i, ld_f32(d + 4 * i) + ld_f32(b + 4 * i))
            i += 1

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        n0 = ne(d, 0)
        row = work(node) + ith * ((4 * n0 + 63) // 64 * 64)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            to_float(row_addr(a, i1, i2, i3), row, n0)
            add_row(row, row_addr_mod(b, i1, i2, i3), n0)
            from_float(row, row_addr(d, i1, i2, i3), n0)
        return OK
    return over_chunks(rows)
