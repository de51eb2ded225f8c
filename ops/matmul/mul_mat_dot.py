"""mul_mat for few columns: rows of a are read once and multiplied as they lie in memory.

    phase 1   every column of b is prepared once (converted, rounded or quantised) into work memory
    phase 2   threads take runs of rows of a; a register tile of R rows x C columns does the sums

A plain float32 b next to float32 weights needs no preparation: no work memory, no barrier.  That is also the
low-latency path of tiny nodes.

Reading a from memory limits the speed.  With n = 1 one row at a time is fastest on AMD Zen 4, four or eight on an Intel
Xeon (choices.py).  With more columns four rows share each load of a column, and a tile prefetches the next four rows
while it multiplies (F32 less far: ops/types/scalars.py): n = 4 is as fast as n = 1, without prefetches 1.5 to 2.5 times
slower.  Short rows are prefetched at least AHEAD_NBYTES ahead: Q8_0 with k = 2048 reads with 84 instead of 73 % of the
bandwidth of an Intel core.
"""
from typing import NamedTuple

from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul.one_column import ColumnParts, OneColumn
from ggjit.ops.native.jit import exact, inline
from ggjit.ops.native.mem import st_f32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    addr,
    barrier,
    chunk_of_lines,
    chunk_rows,
    n_rows,
    nb,
    ne,
    next_rows,
    next_rows2,
    row_addr,
    row_index,
    work,
)
from ggjit.ops.types.shared.dot import OWN, make_dot_tile
from ggjit.ops.types.shared.rows import ROW

AHEAD_NBYTES = 16 << 10         # bytes of weights that are prefetched ahead; measured, see above
# least bytes of a chunk: with smaller ones, taking chunks is half of the 0.8 us of [64 x 64] F32
CHUNK_NBYTES = 16 << 10
RUN = 32                        # rows of one_column's unit of work, whole tiles
COLUMNS_NBYTES, ROWS_NBYTES = 24 << 10, 20 << 10        # shares of a first-level cache of 48 KB


def make_fetch(type):
    """jitted fetch(src, nb0, k, tmp) -> address of the k values at src as contiguous float32: src itself, or tmp."""
    to_float, nbytes, plain = traits_of(type).to_float, type.nbytes, type is F32
    if type.quantized:
        @inline
        def fetch_blocks(src, nb0, k, tmp):
            to_float(src, tmp, k)
            return tmp
        return fetch_blocks
    get = ROW[type].get

    @inline
    def fetch(src, nb0, k, tmp):
        if nb0 == nbytes:
            if plain:
                return src
            to_float(src, tmp, k)
        else:
            for i in range(k):
                st_f32(tmp + 4 * i, get(src + i * nb0))
        return tmp
    return fetch


def work_nbytes(dot, k, n_columns, n_threads):
    """Prepared columns, a single one for each thread, then one float32 row for each thread."""
    return (n_threads if n_columns == 1 else n_columns) * dot.column_nbytes(k) + n_threads * row_nbytes(k)


def row_nbytes(k):
    return (4 * k + 63) // 64 * 64


@inline
def chunk_of_rows(n, nth, ldw, tile_rows):
    """Rows of ldw bytes, of n, that a thread takes at once: whole tiles, at least CHUNK_NBYTES, whole lines of sums."""
    chunk = max(chunk_rows(n, nth), CHUNK_NBYTES // (ldw + 1))
    return chunk_of_lines((chunk + tile_rows - 1) // tile_rows * tile_rows, 4, n, nth, ldw // 32)


class DotShape(NamedTuple):
    """Register tile of dot products: rows x columns, independent sums along k, how weights are prefetched."""
    rows: int
    columns: int
    unroll: int
    prefetch: str = OWN

    def __str__(self):
        how = "" if self.prefetch == OWN else "-" + self.prefetch.replace(" ", "_")
        return f"{self.rows}x{self.columns}x{self.unroll}{how}"


def dot_of(ta, exact=False):
    """The Dot of weights of type ta; exact: with activations that are not rounded, where there is one."""
    traits = traits_of(ta)
    return traits.dot_f32 if exact and traits.dot_f32 is not None else traits.dot


def make_tile(ta, shape, exact_columns=False):
    """jitted dot tile (ops/types/shared/dot.py) for weights of type ta.

    Exact: a kernel around it may not reorder its sums, so those of one unroll are the same bytes in every tile height.
    """
    tile = make_dot_tile(dot_of(ta, exact_columns), *shape)

    @exact
    def exact_tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols):
        tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols)
    return exact_tile


def make_columns(ta, tb, exact=False):
    """jitted (stride(k), prepare(node, ith, nth, sync, b, k, ldy)): the columns of b for products with weights of ta.

    `prepare` shares the columns among the threads and writes them `stride` bytes apart to the start of work memory;
    a barrier has to follow.
    """
    dot = dot_of(ta, exact)
    fetch, prepare = make_fetch(tb), dot.prepare or traits_of(F32).to_float
    step, y_nbytes = dot.step, dot.y_nbytes

    @inline
    def stride(k):
        return (((k + step - 1) // step * y_nbytes + 63) // 64 | 1) * 64

    @inline
    def prepare_columns(node, ith, nth, sync, b, k, ldy):
        n = n_rows(b)
        tmp = work(node) + n * ldy + ith * ((4 * k + 63) // 64 * 64)
        while True:
            r = next_rows(node, ith, nth, sync, 1, n)
            if r >= n:
                return
            i1, i2, i3 = row_index(b, r)
            row = fetch(row_addr(b, i1, i2, i3), nb(b, 0), k, tmp)
            prepare(row, work(node) + r * ldy, k)
    return stride, prepare_columns


def make_kernel(ta, tb, direct, shape, exact=False, narrower=False):
    """Kernel body for weights of type ta; direct: columns of b are used where they lie; exact: not rounded; narrower:
    some tiles have one column less."""
    wide, n_rows_tile, n_cols_tile = make_tile(ta, shape, exact), shape.rows, shape.columns
    narrow = make_tile(ta, shape._replace(columns=n_cols_tile - 1), exact) if narrower else wide
    stride, prepare_columns = make_columns(ta, tb, exact)
    fetch, prepare = make_fetch(tb), dot_of(ta, exact).prepare or traits_of(F32).to_float

    @inline
    def prepare_one(node, ith, nth, b, k, column, ldy):
        """The only column, prepared by a thread for itself."""
        tmp = work(node) + nth * ldy + ith * ((4 * k + 63) // 64 * 64)
        prepare(fetch(addr(b), nb(b, 0), k, tmp), column, k)

    @inline
    def tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols):
        if cols == n_cols_tile or not narrower:
            wide(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols)
        else:
            narrow(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols)

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n = ne(a, 0), ne(a, 1), ne(b, 1)
        tiles = (n + n_cols_tile - 1) // n_cols_tile
        ldw, ldd, columns = nb(a, 1), nb(d, 1), work(node)
        if direct:
            ldy = nb(b, 1)
        else:
            ldy = stride(k)
            if n_rows(b) == 1:                  # each thread prepares its own: no thread waits for another
                columns += ith * ldy
                prepare_one(node, ith, nth, b, k, columns, ldy)
            else:
                prepare_columns(node, ith, nth, sync, b, k, ldy)
                barrier(sync, nth)
        n2 = ne(b, 2)
        ratio2, ratio3 = n2 // ne(a, 2), ne(b, 3) // ne(a, 3)
        run = n_rows_tile
        if n * ldy > COLUMNS_NBYTES:                 # columns come from the second-level cache: use each more often
            run = max(1, min(8, ROWS_NBYTES // (n_rows_tile * ldw + 1))) * n_rows_tile
        ahead = max(run * ldw, AHEAD_NBYTES)
        total = m * n2 * ne(b, 3)
        chunk = chunk_of_rows(total, nth, ldw, n_rows_tile)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            end = min(total, start + chunk)
            while start < end:
                matrix = start // m
                r = start - matrix * m
                stop = min(m, r + end - start)
                i3 = matrix // n2
                i2 = matrix - i3 * n2
                w = addr(a) + i2 // ratio2 * nb(a, 2) + i3 // ratio3 * nb(a, 3)
                y = addr(b) + i2 * nb(b, 2) + i3 * nb(b, 3) if direct else columns + matrix * n * ldy
                c = addr(d) + i2 * nb(d, 2) + i3 * nb(d, 3)
                start += stop - r
                for r0 in range(r, stop, run):
                    end_run = min(stop, r0 + run)
                    for t in range(tiles):
                        j, after = n * t // tiles, n * (t + 1) // tiles
                        for q in range(r0, end_run, n_rows_tile):
                            tile(w + q * ldw, ldw, ahead, y + j * ldy, ldy, k,
                                 c + j * ldd + 4 * q, ldd, end_run - q, after - j)
    return kernel


# ---------------------------------------------------------------- one column, in parts
def one_column(ta, k, shape, exact, label):
    """The OneColumn of weights of type ta and a plain float32 column of k elements."""
    dot = dot_of(ta, exact)
    return OneColumn(label, RUN, dot.column_nbytes(k) if dot.prepare else 0, lambda: _parts(ta, shape, exact))


def _parts(ta, shape, exact_columns):
    tile, n_rows_tile = make_tile(ta, shape, exact_columns), shape.rows

    @inline
    def rows(a, k, y, start, stop, out):
        ldw = nb(a, 1)
        ahead = max(n_rows_tile * ldw, AHEAD_NBYTES)
        for q in range(start, stop, n_rows_tile):
            tile(addr(a) + q * ldw, ldw, ahead, y, 0, k, out + 4 * (q - start), 0, stop - q, 1)

    @inline
    def chunk(a, nth, n):
        return chunk_of_rows(ne(a, 1), nth, n * nb(a, 1), n_rows_tile)
    return ColumnParts(dot_of(ta, exact_columns).prepare, rows, chunk)
