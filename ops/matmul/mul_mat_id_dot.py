"""mul_mat_id for few columns an expert: rows of weights are multiplied as they lie (see mul_mat_dot).

one token      pairs follow each other: no sorting, no copying; float32 next to float32 needs no barrier either
more tokens    columns are sorted by expert and prepared in that order, so an expert's columns lie side by side:

               prepared columns   | expert 0's | expert 3's ........ | expert 7's |
               threads take runs of rows of the experts in use, R x C sums at a time, and scatter them
"""
from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul import mul_mat_id_group as lists
from ggjit.ops.matmul.mul_mat_dot import chunk_of_rows, make_columns, make_fetch, row_nbytes
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, ld_i64, st_f32
from ggjit.ops.native.node import (
    DST,
    LINE,
    SRC0,
    SRC1,
    SRC2,
    addr,
    barrier,
    chunk_of_lines,
    chunk_rows,
    nb,
    ne,
    next_rows,
    next_rows2,
    work,
)
from ggjit.ops.types.shared.dot import make_dot_tile


def many_nbytes(dot, k, n_experts, n_pairs, n_threads, tile_shape):
    """The lists, a prepared column a pair, a float32 row and a tile of sums a thread."""
    scratch = row_nbytes(k) + tile_nbytes(*tile_shape[:2])
    return lists.group_nbytes(n_experts, n_pairs) + n_pairs * dot.column_nbytes(k) + n_threads * scratch


def tile_nbytes(n_rows, n_cols):
    return (4 * n_rows * n_cols + LINE - 1) // LINE * LINE


def make_one(ta, tb, direct, shape):
    """Kernel for a single token; direct: columns of b are used where they lie."""
    tile, n_rows_tile = make_dot_tile(traits_of(ta).dot, *shape), shape.rows
    stride, prepare_columns = make_columns(ta, tb)

    def kernel(node, ith, nth, sync):
        a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, n_b, n_used = ne(a, 0), ne(a, 1), ne(b, 1), ne(d, 1)
        status = lists.check_experts(node, ids, ne(a, 2))
        if status != OK:
            return status
        y, ldy = addr(b), nb(b, 1)
        if not direct:
            y, ldy = work(node), stride(k)
            prepare_columns(node, ith, nth, sync, b, k, ldy)
            barrier(sync, nth)
        ldw, total = nb(a, 1), m * n_used
        chunk = chunk_of_rows(total, nth, ldw, n_rows_tile)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            end = min(total, start + chunk)
            while start < end:
                s = start // m
                r = start - s * m
                stop = min(m, r + end - start)
                start += stop - r
                w, c = addr(a) + lists.expert_id(ids, s, 0) * nb(a, 2), addr(d) + s * nb(d, 1)
                for q in range(r, stop, n_rows_tile):
                    tile(w + q * ldw, ldw, n_rows_tile * ldw, y + s % n_b * ldy, ldy, k, c + 4 * q, 0, stop - q, 1)
    return kernel


def make_many(ta, tb, shape, single_shape):
    """Kernel for several tokens; shape: the tile's DotShape; single_shape: a lone column's."""
    dot = traits_of(ta).dot
    n_rows_tile, n_cols_tile, n_rows_single = shape.rows, shape.columns, single_shape.rows
    tile, single = make_dot_tile(dot, *shape), make_dot_tile(dot, *single_shape)
    fetch, prepare, (stride, _) = make_fetch(tb), dot.prepare or traits_of(F32).to_float, make_columns(ta, tb)
    sums_nbytes = tile_nbytes(n_rows_tile, n_cols_tile)

    @inline
    def target(d, n_used, pair):
        """Address of the pair's column of d."""
        return addr(d) + pair % n_used * nb(d, 1) + pair // n_used * nb(d, 2)

    @inline
    def expert_rows(w, ldw, y, ldy, k, n, pairs, d, n_used, r, stop, sums):
        """Rows r .. stop of one expert times its n columns."""
        j = 0
        while n - j > 1:
            for q in range(r, stop, n_rows_tile):
                rows, cols = min(n_rows_tile, stop - q), min(n_cols_tile, n - j)
                tile(w + q * ldw, ldw, n_rows_tile * ldw, y + j * ldy, ldy, k, sums, 4 * n_rows_tile, rows, cols)
                for c in range(cols):
                    p = target(d, n_used, ld_i64(pairs + 8 * (j + c))) + 4 * q
                    for i in range(rows):
                        st_f32(p + 4 * i, ld_f32(sums + 4 * (c * n_rows_tile + i)))
            j += n_cols_tile
        if j < n:
            p = target(d, n_used, ld_i64(pairs + 8 * j))
            for q in range(r, stop, n_rows_single):
                single(w + q * ldw, ldw, n_rows_single * ldw, y + j * ldy, ldy, k, p + 4 * q, 0, stop - q, 1)

    def kernel(node, ith, nth, sync):
        a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, n_experts, n_b, n_used = ne(a, 0), ne(a, 1), ne(a, 2), ne(b, 1), ne(d, 1)
        n_pairs = n_used * ne(d, 2)
        status = lists.group(node, ids, n_experts, 1, ith, nth, sync)
        if status != OK:
            return status
        ldy = stride(k)
        columns = lists.lists_end(node, n_experts, n_pairs)
        scratch = columns + n_pairs * ldy + ith * ((4 * k + 63) // 64 * 64 + sums_nbytes)
        starts, experts = lists.starts_of(node), lists.experts_of(node, n_experts)
        pairs = lists.pairs_of(node, n_experts)
        while True:
            r = next_rows(node, ith, nth, sync, 1, n_pairs)
            if r >= n_pairs:
                break
            pair = ld_i64(pairs + 8 * r)
            src = addr(b) + pair % n_used % n_b * nb(b, 1) + pair // n_used * nb(b, 2)
            prepare(fetch(src, nb(b, 0), k, scratch + sums_nbytes), columns + r * ldy, k)
        barrier(sync, nth)
        ldw, total = nb(a, 1), m * lists.n_active(node)
        chunk = chunk_of_lines(chunk_rows(total, nth), 4, total, nth)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            end = min(total, start + chunk)
            while start < end:
                i = start // m
                r = start - i * m
                stop = min(m, r + end - start)
                start += stop - r
                e = ld_i64(experts + 8 * i)
                first = ld_i64(starts + 8 * e)
                expert_rows(addr(a) + e * nb(a, 2), ldw, columns + first * ldy, ldy, k,
                            ld_i64(starts + 8 * e + 8) - first, pairs + 8 * first, d, n_used, r, stop, scratch)
    return kernel
