"""mul_mat of F32 weights for few columns: dot products of rows, summed stretch by stretch of k.

                 k ->  |  stretch 0  |  stretch 1  | ...
    column 0 ... n - 1 |  yyyyyyyyy  |  yyyyyyyyy  |        a stretch of all columns stays in the first-level cache
    rows of a run      |  wwwwwwwww  |  wwwwwwwww  |        each stretch of them is read once, for all columns

    phase 1   the columns are copied to work memory as float32: stretch by stretch, of each stretch column by column,
              so that they fill the cache's sets evenly
    phase 2   threads take runs of rows; a register tile of ROWS x C columns adds a stretch to its sums

The lanes of a tile's sums wait in work memory for the next stretch and are added after the last one.  The columns are
cut into equal tiles of C columns, some of C - 1.  The order of sums depends on k and n alone.
"""
from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul.mul_mat_dot import chunk_of_rows, make_fetch
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import for_ir, hsums_ir, i64, if_ir, min_ir, prefetch_ir, zero
from ggjit.ops.native.mem import IR_I64, copy_bytes
from ggjit.ops.native.node import DST, LINE, SRC0, SRC1, addr, barrier, nb, ne, next_rows, next_rows2, whole_lines, work
from ggjit.ops.native.simd import B, W, load_ir, store_ir, vec_ir
from ggjit.ops.types.shared.dot import store_sums_ir

ROWS, MAX_COLUMNS = 3, 9            # of a tile: 27 sums, three rows and a column are 31 registers
RUN = 32 * ROWS                     # rows whose sums wait at once
COLUMNS_NBYTES = 24 << 10           # of all columns of a stretch
MAX_STRETCH = 1024                  # elements
AHEAD_NBYTES = 6144                 # between a prefetch of weights and their use, up to whole tiles


def tile_columns(n):
    """Columns of a tile for n columns; some tiles may have one less."""
    return -(-n // -(-n // MAX_COLUMNS))


@inline
def stretch_of(k, n):
    """Elements of a stretch of n columns: equal parts of k, whole cache lines."""
    parts = max((4 * k * n + COLUMNS_NBYTES - 1) // COLUMNS_NBYTES, (k + MAX_STRETCH - 1) // MAX_STRETCH)
    return whole_lines(4 * ((k + parts - 1) // parts)) // 4


@inline
def pitch_of(stretch):
    """Bytes between two columns: an odd number of lines, or the cache would mix up their addresses."""
    return (4 * stretch // LINE | 1) * LINE


def work_nbytes(k, n, n_threads):
    """For each thread the sums of a run and a float32 row, then the prepared columns."""
    most_parts = -(-4 * k * n // COLUMNS_NBYTES) + -(-k // MAX_STRETCH)
    columns = n * (4 * k + 2 * LINE * most_parts)               # a part is at most two lines longer
    cols = tile_columns(n)
    return n_threads * (-(-n // cols) * RUN * cols * B + whole_lines.py_func(4 * k)) + columns


def _make_tile(n_cols):
    """intrinsic tile(w, ldw, ahead, y, ldy, steps, sums, first, last, dst, ldd, rows): ROWS x n_cols dot products of
    `steps` vectors, added to the lanes at `sums` unless this is the first stretch.  The last stretch stores the results
    of the first `rows` rows.  What lies `ahead` bytes beyond the weights is prefetched."""
    dot, v, n_acc = traits_of(F32).dot, vec_ir("f32", W), ROWS * n_cols

    @ir_function
    def tile(b, w, ldw, ahead, y, ldy, steps, sums, first, last, dst, ldd, rows):
        index = [i64(0)] + [min_ir(b, i64(i), b.sub(rows, i64(1))) for i in range(1, ROWS)]
        ws = [b.add(w, b.mul(i, ldw)) for i in index]
        ys = [b.add(y, b.mul(i64(j), ldy)) for j in range(n_cols)]
        places = [b.add(sums, i64(B * i)) for i in range(n_acc)]

        def add(b, state):
            wo, yo, *acc = state
            for p in ws:
                prefetch_ir(b, b.add(p, b.add(wo, ahead)), dot.locality)
            wv = [dot.load_w_ir(b, b.add(p, wo)) for p in ws]
            for j, q in enumerate(ys):
                yv = load_ir(b, b.add(q, yo), v, B)
                for r in range(ROWS):
                    acc[j * ROWS + r] = dot.mac_ir(b, acc[j * ROWS + r], wv[r], yv)
            return [b.add(wo, i64(B)), b.add(yo, i64(B)), *acc]
        acc = if_ir(b, b.icmp_signed("==", first, i64(0)), [zero("f32", W)] * n_acc,
                    lambda b: [load_ir(b, p, v, B) for p in places])
        acc = for_ir(b, steps, [(IR_I64, i64(0))] * 2 + [(v, x) for x in acc], add)[2:]
        with b.if_else(b.icmp_signed("!=", last, i64(0))) as (done, other):
            with done:
                columns = [b.add(dst, b.mul(i64(j), ldd)) for j in range(n_cols)]
                store_sums_ir(b, hsums_ir(b, acc), ROWS, n_cols, columns, index, rows)
            with other:
                for p, x in zip(places, acc, strict=True):
                    store_ir(b, x, p, B)
    return tile


def make_kernel(tb, n_cols, narrower):
    """tb: type of the columns; n_cols: tile_columns; narrower: some tiles have one column less."""
    wide = _make_tile(n_cols)
    narrow = _make_tile(n_cols - 1) if narrower else wide
    fetch, tile_nbytes = make_fetch(tb), ROWS * n_cols * B

    @inline
    def prepare(node, ith, nth, sync, columns, tmp, stretch):
        b = node + SRC1
        k, n = ne(b, 0), ne(b, 1)
        while True:
            j = next_rows(node, ith, nth, sync, 1, n)
            if j >= n:
                return
            row, to = fetch(addr(b) + j * nb(b, 1), nb(b, 0), k, tmp), columns + j * pitch_of(stretch)
            for k0 in range(0, k, stretch):
                copy_bytes(to, row + 4 * k0, 4 * min(stretch, k - k0))
                to += n * pitch_of(stretch)

    @inline
    def multiply(cols, w, ldw, ahead, y, ldy, steps, sums, first, last, dst, ldd, rows):
        if cols == n_cols or not narrower:
            wide(w, ldw, ahead, y, ldy, steps, sums, first, last, dst, ldd, rows)
        else:
            narrow(w, ldw, ahead, y, ldy, steps, sums, first, last, dst, ldd, rows)

    @inline
    def multiply_run(node, start, end, stretch, columns, sums):
        """Rows start ... end - 1 times all columns."""
        a, d = node + SRC0, node + DST
        k, n, ldw, ldd = ne(a, 0), ne(node + SRC1, 1), nb(a, 1), nb(d, 1)
        tiles, pitch = (n + n_cols - 1) // n_cols, pitch_of(stretch)
        for k0 in range(0, k, stretch):
            length = min(stretch, k - k0)
            begins, ends = 1 if k0 == 0 else 0, 1 if k0 + stretch >= k else 0
            per_tile = 4 * ROWS * length
            later = (AHEAD_NBYTES + per_tile - 1) // per_tile * ROWS
            at = sums
            for r in range(start, end, ROWS):
                w = addr(a) + r * ldw + 4 * k0
                ahead = later * ldw
                if r + later >= end:            # in the next stretch, or in the next run
                    ahead += -4 * k0 if ends else 4 * length - (end - start) * ldw
                for t in range(tiles):
                    j, after = n * t // tiles, n * (t + 1) // tiles
                    multiply(after - j, w, ldw, ahead, columns + j * pitch, pitch, length // W, at,
                             begins, ends, addr(d) + j * ldd + 4 * r, ldd, end - r)
                    at += tile_nbytes
            columns += n * pitch

    def kernel(node, ith, nth, sync):
        a, b = node + SRC0, node + SRC1
        k, m, n = ne(a, 0), ne(a, 1), ne(b, 1)
        stretch, sums_nbytes = stretch_of(k, n), (n + n_cols - 1) // n_cols * RUN * n_cols * B
        own_nbytes = sums_nbytes + whole_lines(4 * k)
        own, columns = work(node) + ith * own_nbytes, work(node) + nth * own_nbytes
        prepare(node, ith, nth, sync, columns, own + sums_nbytes, stretch)
        barrier(sync, nth)
        chunk = chunk_of_rows(m, nth, nb(a, 1), ROWS)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, m)
            if start >= m:
                return OK
            stop = min(m, start + chunk)
            for r in range(start, stop, RUN):
                multiply_run(node, r, min(stop, r + RUN), stretch, columns, own)
    return kernel
