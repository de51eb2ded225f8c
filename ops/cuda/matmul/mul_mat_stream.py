"""Products of one column, quantised weights: a row's bytes are streamed through shared memory, 16 at a time.

    row             |  1024 values  |  1024 values  | ...           pieces; a block is one warp, a lane has 32 values
    memory        ..[16][16][16] ... [16]..                         copied from one multiple of 16 bytes to another one
    shared memory   | place 0 | place 1 | place 2 | place 3 |       STAGES pieces of ROWS rows, three of them under way

Blocks of 18 or 34 bytes are not aligned to 4, so a lane's own loads of them are narrow; copies are not.  Copies take
no registers and the warp does not wait for them, so more bytes are under way.  A warp goes on with the next rows when
it is done with these.  The column is quantised once for all products of it (quantize_columns.py); values are those of
mul_mat_vec, in another order.
"""
from dataclasses import replace

from numpy import float32 as f32

from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.in_shared import in_shared
from ggjit.ops.cuda.matmul.mul_mat_vec import ONES, column_of, matrix_of, put_of
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch
from ggjit.ops.cuda.native.views import SRC0, SRC1, n_rows, nb, ne, work
from ggjit.ops.cuda.rows import FLOATS

LANES, ROWS, STAGES = 32, 2, 4
PIECE = 32 * LANES              # values
MAX_BLOCKS = 2 if SMALL_BLOCKS else 3168        # so many that all of a GPU's multiprocessors are full of them
EIGHT_ONES = (ONES,) * 8
ZERO = f32(0)


def place_nbytes(type):
    """Shared memory of a row's piece, wherever between two multiples of 16 it begins."""
    return (15 + PIECE // type.block * type.nbytes + 15) // 16 * 16


def _make_copy(type):
    """copy(to, first, left): the piece of a row at `first`, from the multiple of 16 before it; left: bytes of the row
    from there on, 0: there is no row."""
    nbytes, rounds = PIECE // type.block * type.nbytes, -(-place_nbytes(type) // (16 * LANES))

    @core.device
    def copy(to, first, left):
        at = first - (first & 15) + 16 * core.thread()
        n = first + min(nbytes, left) - at
        for r in range(rounds):
            if left > 0 and n > 16 * LANES * r:
                core.copy_16(to + 16 * (core.thread() + LANES * r), at + 16 * LANES * r, min(n - 16 * LANES * r, 16))
    return copy


def _make_units(blocks):
    """two_units(p, next, u, codes, scales, first): the sums of products of unit u of two rows' blocks, which are in
    shared memory, with the column's codes; its first one of the block is number `first`."""
    words, scale, at, segments, mins = in_shared(blocks.words), in_shared(blocks.scale), blocks.at, blocks.segments, \
        blocks.mins
    n_words = 8 // segments

    @core.device
    def dot(w, first, x):
        total = core.dp4a(w[first + 1], x[1], core.dp4a(w[first], x[0], 0))
        if n_words == 4:
            total = core.dp4a(w[first + 3], x[3], core.dp4a(w[first + 2], x[2], total))
        return f32(total)

    @core.device
    def of_column(codes, first):
        if n_words == 4:
            return core.ld_i32x4(codes + first)
        return core.ld_i32(codes + first), core.ld_i32(codes + first + 4), 0, 0

    @core.device
    def two_units(p, next, u, codes, scales, first):
        w, v, s, y = words(p, u), words(next, u), ZERO, ZERO
        for j in range(segments):
            begin, i = first + at(u, j), n_words * j
            x, size = of_column(codes, begin), core.ld_f32(scales + (begin >> 5) * 4)
            d, m = scale(p, u, j)
            e, n = scale(next, u, j)
            a, b = d * dot(w, i, x), e * dot(v, i, x)
            if mins:
                ones = dot(EIGHT_ONES, i, x)
                a += m * ones
                b += n * ones
            s += size * a
            y += size * b
        return s, y
    return two_units


def _make(type, adds):
    blocks = BLOCKS[type]
    two_units = _make_units(blocks)
    units, block_nbytes, piece_nbytes = type.block // 32, type.nbytes, PIECE // type.block * type.nbytes
    type_block, row_place, place = type.block, place_nbytes(type), ROWS * place_nbytes(type)
    matrix, column, put, copy = matrix_of(False), column_of(False, 1), put_of(False, 1, adds), _make_copy(type)
    shared, await_copies = core.shared(STAGES * place), core.copies_but(STAGES - 2)

    @core.device
    def row_of(node, base, pair, r):
        a = node + SRC0
        return base + min(ROWS * pair + r, ne(a, 1) - 1) * nb(a, 1)

    @core.device
    def copy_rows(to, from0, from1, left):
        copy(to, from0, left)
        copy(to + row_place, from1, left)
        core.copies_end()

    @core.device
    def after(node, base, from0, from1, left, pair):
        """The piece after this one, of the same pair of rows or of the next: where it lies, bytes left, the pair."""
        if left > piece_nbytes:
            return from0 + piece_nbytes, from1 + piece_nbytes, left - piece_nbytes, pair
        pair += core.n_blocks()
        left = ne(node + SRC0, 0) // type_block * block_nbytes if ROWS * pair < ne(node + SRC0, 1) else 0
        return row_of(node, base, pair, 0), row_of(node, base, pair, 1), left, pair

    @core.device
    def finish(node, pair, sum0, sum1):
        sum0, sum1 = core.warp_sum(sum0), core.warp_sum(sum1)
        if core.thread() == 0:
            put(node, ROWS * pair, 0, sum0)
            if ROWS * pair + 1 < ne(node + SRC0, 1):
                put(node, ROWS * pair + 1, 0, sum1)

    def kernel(node):
        base, m, k = matrix(node), ne(node + SRC0, 1), ne(node + SRC0, 0)
        i1, i2, i3 = column(node, 0)
        number = (i3 * ne(node + SRC1, 2) + i2) * ne(node + SRC1, 1) + i1
        codes = work(node)
        scales, codes = codes + k * n_rows(node + SRC1) + (k >> 5) * 4 * number, codes + k * number
        lane, pair, at = core.thread(), core.block(), shared()
        u, own, end, to = lane % units, lane // units * block_nbytes, at + STAGES * place, at + (STAGES - 1) * place
        from0, from1, left, next = after(node, base, 0, 0, 0, pair - core.n_blocks())
        for i in range(STAGES - 1):
            copy_rows(at + i * place, from0, from1, left)
            from0, from1, left, next = after(node, base, from0, from1, left, next)
        while ROWS * pair < m:
            row0, row1, sum0, sum1 = row_of(node, base, pair, 0), row_of(node, base, pair, 1), ZERO, ZERO
            first, n = lane // units * type_block, k
            while n > 0:
                await_copies()
                core.sync()
                copy_rows(to, from0, from1, left)
                from0, from1, left, next = after(node, base, from0, from1, left, next)
                if 32 * lane < n:
                    p, next_p = at + own + (row0 & 15), at + row_place + own + (row1 & 15)
                    x, y = two_units(p, next_p, u, codes, scales, first)
                    sum0, sum1 = sum0 + x, sum1 + y
                row0, row1, first, n = row0 + piece_nbytes, row1 + piece_nbytes, first + PIECE, n - PIECE
                to, at = at, at + place
                if at == end:
                    at = end - STAGES * place
            finish(node, pair, sum0, sum1)
            pair += core.n_blocks()
    return kernel


def product(t):
    """The Launches of a mul_mat of one column with quantised weights, or None."""
    a, b = t.src[:2]
    n_matrices = b.ne[2] * b.ne[3]
    if a.type not in BLOCKS or b.type not in FLOATS or n_matrices > 65535:
        return None
    grid = min(-(-a.ne[1] // ROWS), MAX_BLOCKS), 1, n_matrices

    def launch(adds):
        return Launch(f"mul_mat_stream{'_add' * adds}_{a.type.name}", lambda: _make(a.type, adds), grid, LANES)
    made = launch(False)
    if n_matrices == 1:
        made = replace(made, added=lambda: launch(True))
    return quantize_columns.launch(b), made
