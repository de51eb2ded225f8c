"""mul_mat_id with repacked experts: the register tiles of codes.py, columns sorted by expert.

The matrices of all experts lie in the layout one after the other, as one matrix of m E rows.

    one token      every pair takes its expert's groups of L rows times one column
    more tokens    columns are sorted by expert and prepared as its tiles take them; threads take groups of the experts
                   in use, and a tile's columns are scattered to their tokens

    an expert's prepared columns | C columns, block by block | C columns ... |

A tile takes C columns, where an expert has fewer two, or one; the last tile of an expert overlaps the one before it:
the same numbers, stored twice.  So an expert's n columns take room for at most 2 n.
"""
from ggjit.ops.core.record import OK
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.traits import module_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul import choices, mul_mat_id_tile
from ggjit.ops.matmul import mul_mat_id_group as lists
from ggjit.ops.matmul.interleaved import FORMATS
from ggjit.ops.matmul.repack.codes import LANES, ROWS, columns_of_pairs, direct, make_rows_of, widest
from ggjit.ops.matmul.repack.lane_tile import column_nbytes, make_prepare, make_tile
from ggjit.ops.matmul.tile_kinds import tile_of
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i64
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    addr,
    barrier,
    chunk_of_lines,
    chunk_rows,
    nb,
    ne,
    next_rows2,
    own_share,
    whole_lines,
    work,
)
from ggjit.ops.types.shared.dot import OWN
from ggjit.ops.types.shared.moves import move_bytes

GROUP_NBYTES = 4 * LANES                # bytes that a group of rows has in a column of the result


def _make_one(type, prefetch):
    format = FORMATS[type]
    tile, prepare = make_tile(format, 1, prefetch=prefetch), make_prepare(format)
    nbytes, block, y_nbytes = type.nbytes, type.block, column_nbytes(format)

    def kernel(node, ith, nth, sync):
        a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, n_b, n_used = ne(a, 0), ne(a, 1), ne(b, 1), ne(d, 1)
        status = lists.check_experts(node, ids, ne(a, 2))
        if status != OK:
            return status
        n_blocks, columns = k // block, work(node)
        column, group_nbytes = whole_lines(n_blocks * y_nbytes), ROWS * (k // block) * nbytes
        own_first, own_end = own_share(n_b, ith, nth)
        for j in range(own_first, own_end):
            prepare(addr(b) + j * nb(b, 1), k, columns + j * column, 0, 1)
        barrier(sync, nth)
        groups = m // ROWS
        total = groups * n_used
        chunk = chunk_of_lines(chunk_rows(total, nth), GROUP_NBYTES, total, nth)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for item in range(start, min(total, start + chunk)):
                s = item // groups
                g = item - s * groups
                w = addr(a) + (lists.expert_id(ids, s, 0) * groups + g) * group_nbytes
                tile(w, columns + s % n_b * column, n_blocks, addr(d) + s * nb(d, 1) + GROUP_NBYTES * g, 0, w)
    return kernel


def _make_many(type, n_columns, n_groups, prefetch, in_turn):
    format, sums_nbytes = FORMATS[type], n_groups * GROUP_NBYTES
    tiles = {c: make_tile(format, c, n_groups, prefetch, in_turn) for c in (1, 2, n_columns)}
    prepare = make_prepare(format)
    single, double, wide = tiles[1], tiles[2], tiles[n_columns]
    nbytes, block, y_nbytes = type.nbytes, type.block, column_nbytes(format)

    @inline
    def width(n):
        """Columns of the tiles of an expert with n columns."""
        return n_columns if n >= n_columns else min(n, 2)

    @inline
    def multiply(w, y, n_blocks, sums, c):
        if c == n_columns:
            wide(w, y, n_blocks, sums, sums_nbytes, w)
        elif c == 2:
            double(w, y, n_blocks, sums, sums_nbytes, w)
        else:
            single(w, y, n_blocks, sums, sums_nbytes, w)

    @inline
    def prepare_pair(b, src, k, position, n, columns, column):
        """Column `position` of an expert's n, for its tile and for the last one where that overlaps."""
        c = width(n)
        last = (n + c - 1) // c - 1
        t = position // c
        if t < last:
            prepare(src, k, columns + t * c * column, position - t * c, c)
        if position >= n - c:
            prepare(src, k, columns + last * c * column, position - n + c, c)

    @inline
    def tile_start(starts, ids, pairs, n_used, n_pairs, r):
        """The first pair from r on whose tile is not that of a pair before it: where one thread may follow another."""
        if r == 0 or r == n_pairs:
            return r
        pair = ld_i64(pairs + 8 * r)
        e = lists.expert_id(ids, pair % n_used, pair // n_used)
        first = ld_i64(starts + 8 * e)
        n = ld_i64(starts + 8 * e + 8) - first
        c = width(n)
        position = (r - first + c - 1) // c * c
        return first + (position if position <= n - c else n)   # the last tile may share columns with the one before

    @inline
    def expert_group(w, columns, column, n_blocks, n, pairs, d, n_used, g, sums):
        """Groups g ... of an expert times its n columns."""
        c = width(n)
        for t in range((n + c - 1) // c):
            first = min(t * c, n - c)
            multiply(w, columns + t * c * column, n_blocks, sums, c)
            for j in range(c):
                pair = ld_i64(pairs + 8 * (first + j))
                to = addr(d) + pair % n_used * nb(d, 1) + pair // n_used * nb(d, 2)
                move_bytes(to + GROUP_NBYTES * g, sums + sums_nbytes * j, sums_nbytes)

    def kernel(node, ith, nth, sync):
        a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, n_experts, n_b, n_used = ne(a, 0), ne(a, 1), ne(a, 2), ne(b, 1), ne(d, 1)
        n_pairs = n_used * ne(d, 2)
        status = lists.group(node, ids, n_experts, 1, ith, nth, sync)
        if status != OK:
            return status
        n_blocks, groups = k // block, m // ROWS
        column, group_nbytes = whole_lines(n_blocks * y_nbytes), ROWS * (k // block) * nbytes
        starts, experts = lists.starts_of(node), lists.experts_of(node, n_experts)
        pairs, sums = lists.pairs_of(node, n_experts), lists.lists_end(node, n_experts, n_pairs)
        columns = sums + nth * n_columns * sums_nbytes
        sums += ith * n_columns * sums_nbytes
        own_first, own_end = own_share(n_pairs, ith, nth)
        own_first = tile_start(starts, ids, pairs, n_used, n_pairs, own_first)
        for r in range(own_first, tile_start(starts, ids, pairs, n_used, n_pairs, own_end)):
            pair = ld_i64(pairs + 8 * r)
            e = lists.expert_id(ids, pair % n_used, pair // n_used)
            first = ld_i64(starts + 8 * e)
            src = addr(b) + pair % n_used % n_b * nb(b, 1) + pair // n_used * nb(b, 2)
            prepare_pair(b, src, k, r - first, ld_i64(starts + 8 * e + 8) - first, columns + 2 * first * column, column)
        barrier(sync, nth)
        bunches = groups // n_groups
        total = bunches * lists.n_active(node)
        chunk = chunk_of_lines(chunk_rows(total, nth), sums_nbytes, total, nth)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for item in range(start, min(total, start + chunk)):
                i = item // bunches
                g0 = (item - i * bunches) * n_groups
                end = g0 + n_groups if item - i * bunches < bunches - 1 else groups
                e = ld_i64(experts + 8 * i)
                first = ld_i64(starts + 8 * e)
                for at in range(g0, end, n_groups):
                    g = min(at, groups - n_groups)          # the last groups may overlap those before, of this thread
                    expert_group(addr(a) + (e * groups + g) * group_nbytes, columns + 2 * first * column, column,
                                 n_blocks, ld_i64(starts + 8 * e + 8) - first, pairs + 8 * first, d, n_used, g, sums)
    return kernel


# ---------------------------------------------------------------- choice of kernel
def product(t, n_threads):
    """The Kernel of repacked experts a times float32 columns b."""
    a, b, _ = t.src
    (k, m, n_experts), n_pairs, type, format = a.ne[:3], t.ne[1] * t.ne[2], a.type, FORMATS[a.type]
    per_expert = -(-n_pairs // n_experts)
    cost = 2 * k * m * n_pairs / 300 + type.row_nbytes(k) * m * min(n_experts, n_pairs) / 20 + 2 * n_pairs
    modules = (__name__, module_of(type))
    column = whole_lines.py_func(k // type.block * column_nbytes(format))
    prefetch = choices.layout_tile(type).prefetch
    how = "" if prefetch == OWN else f"-{prefetch}"
    if t.ne[2] == 1:
        return Kernel(f"mul_mat_id-repacked-one-{type.name}{how}", lambda: _make_one(type, prefetch), cost,
                      b.ne[1] * column, modules)
    if choices.by_amx(type, per_expert) or not direct(format, per_expert):
        tile = tile_of(type)
        return Kernel(f"mul_mat_id-repacked-tile-{type.name}{tile.name}",
                      lambda: mul_mat_id_tile.make_kernel(type, F32, tile, make_rows_of(format)), cost,
                      mul_mat_id_tile.work_nbytes(tile, k, n_experts, n_pairs, n_threads, type.row_nbytes(k)), modules)
    most, in_turn = widest(format)
    columns = 4 if per_expert <= 4 else min(most, 12)           # only two widths, so that a type needs two kernels
    n_groups, pairs = 1, columns_of_pairs(m)
    if pairs and per_expert > most:
        columns, n_groups, in_turn = pairs, 2, False
    how += f"x{n_groups}" * (n_groups > 1) + "-in_turn" * in_turn
    own = columns * n_groups * GROUP_NBYTES
    return Kernel(f"mul_mat_id-repacked-many-{type.name}-{columns}{how}",
                  lambda: _make_many(type, columns, n_groups, prefetch, in_turn), cost,
                  lists.group_nbytes(n_experts, n_pairs) + n_threads * own + 2 * n_pairs * column, modules)
