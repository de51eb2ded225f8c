"""Products with few columns: each weight is read once, by a block for ROWS rows (ops/matmul/mul_mat.py).

    quantised weights   dp4a of unpacked codes with 8-bit columns; a lane takes units of 32 values
    float weights       products in float32; `wide`: 16 bytes a load

    threads         0   1   2  ... 127   0   1  ...                            a row of a
                   |---|---|---|...|---|---|---|...                            units, or 16-byte pieces
                   partial sums of up to 4 columns, added over the block at the end

Small blocks end one by one, so that the GPU is busy to the end: one warp where there are many rows, as many as a row
feeds where there are few.

mul_mat_id is the same with the matrix named by an id: `experts`.
"""
from dataclasses import replace

from numpy import float32 as f32

from ggjit.ops.core.types import F32
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch, threads_for
from ggjit.ops.cuda.native.sums import block_sum
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, addr, bad_index, nb, ne, row_addr, work
from ggjit.ops.cuda.rows import ONE, WIDE

MAX_THREADS = 64 if SMALL_BLOCKS else 128
MANY_ROWS = 8192                # blocks of one warp keep a GPU busy
MAX_COLUMNS = 4                 # columns a block takes at once
ROWS = 2                        # rows a block takes at once
UNROLL = 2                      # units or pieces a thread loads at once
ONES = 0x01010101
ZERO = f32(0)


# ---------------------------------------------------------------- which matrix, which column
def matrix_of(experts):
    """matrix(node) -> address of the matrix this block multiplies, or 0 where the id is out of range."""
    if experts:
        @core.device
        def matrix(node):
            a, ids = node + SRC0, node + SRC2
            id = core.ld_i32(addr(ids) + core.block_y() * nb(ids, 0) + core.block_z() * nb(ids, 1))
            if id < 0 or id >= ne(a, 2):
                bad_index(node, id)
                return 0
            return addr(a) + id * nb(a, 2)
    else:
        @core.device
        def matrix(node):
            a, b = node + SRC0, node + SRC1
            if ne(b, 2) * ne(b, 3) == 1:        # divisions take longer than short rows
                return addr(a)
            i3 = core.block_z() // ne(b, 2)
            i2 = core.block_z() - i3 * ne(b, 2)
            return row_addr(a, 0, i2 // (ne(b, 2) // ne(a, 2)), i3 // (ne(b, 3) // ne(a, 3)))
    return matrix


def column_of(experts, at_once):
    """column(node, c) -> (i1, i2, i3) of b for the block's column c; the last one again beyond the end."""
    if experts:
        @core.device
        def column(node, c):
            return core.block_y() % ne(node + SRC1, 1), core.block_z(), 0
    else:
        @core.device
        def column(node, c):
            b = node + SRC1
            if ne(b, 2) * ne(b, 3) == 1:
                return min(core.block_y() * at_once + c, ne(b, 1) - 1), 0, 0
            i3 = core.block_z() // ne(b, 2)
            return min(core.block_y() * at_once + c, ne(b, 1) - 1), core.block_z() - i3 * ne(b, 2), i3
    return column


def put_of(experts, at_once, adds=False):
    """put(node, row, c, x): the result of a row and the block's column c.  adds: source 2, one column as the result"""
    if adds:
        @core.device
        def put(node, row, c, x):
            core.st_f32(addr(node + DST) + 4 * row, x + core.ld_f32(addr(node + SRC2) + 4 * row))
    elif experts:
        @core.device
        def put(node, row, c, x):
            core.st_f32(row_addr(node + DST, core.block_y(), core.block_z(), 0) + 4 * row, x)
    else:
        @core.device
        def put(node, row, c, x):
            d, j = node + DST, core.block_y() * at_once + c
            if j < ne(d, 1) and ne(d, 2) * ne(d, 3) == 1:
                core.st_f32(addr(d) + j * nb(d, 1) + 4 * row, x)
            elif j < ne(d, 1):
                i3 = core.block_z() // ne(d, 2)
                core.st_f32(row_addr(d, j, core.block_z() - i3 * ne(d, 2), i3) + 4 * row, x)
    return put


def _finish(experts, at_once, rows, adds):
    """finish(node, row, acc): the threads' sums of `rows` rows and the block's columns, added and put."""
    put = put_of(experts, at_once, adds)

    @core.device
    def finish(node, row, acc):
        for r in range(rows):
            for c in range(at_once):
                x = block_sum(acc[r * at_once + c])
                if core.thread() == 0 and row + r < ne(node + SRC0, 1):
                    put(node, row + r, c, x)
    return finish


@core.device
def chosen(counts, x):
    return x if counts else ZERO


# ---------------------------------------------------------------- quantised weights
def make_unit(b, ld_i32x4=core.ld_i32x4, ld_i32=core.ld_i32, ld_f32=core.ld_f32):
    """unit(p, u, w, codes, scales, first): the sum of products of unit u of the block at p, its codes unpacked as w,
    with the column's codes and scales, which these functions load; its first value is number `first` of the column."""
    scale, at, segments, mins = b.scale, b.at, b.segments, b.mins
    n_words = 8 // segments

    @core.device
    def segment(w0, w1, w2, w3, d, m, codes, scales, first):
        """One run of 8 or 16 codes with the column's codes at the same place."""
        if n_words == 4:
            x0, x1, x2, x3 = ld_i32x4(codes + first)
        else:
            x0, x1, x2, x3 = ld_i32(codes + first), ld_i32(codes + first + 4), 0, 0
        total = core.dp4a(w1, x1, core.dp4a(w0, x0, 0))
        if n_words == 4:
            total = core.dp4a(w3, x3, core.dp4a(w2, x2, total))
        y = d * f32(total)
        if mins:
            ones = core.dp4a(ONES, x1, core.dp4a(ONES, x0, 0))
            if n_words == 4:
                ones = core.dp4a(ONES, x3, core.dp4a(ONES, x2, ones))
            y += m * f32(ones)
        return y * ld_f32(scales + (first >> 5) * 4)

    @core.device
    def unit(p, u, w, codes, scales, first):
        s = ZERO
        if segments == 2:
            for j in range(2):
                d, m = scale(p, u, j)
                s += segment(w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3], d, m, codes, scales,
                             first + at(u, j))
        else:
            for j in range(4):
                d, m = scale(p, u, j)
                s += segment(w[2 * j], w[2 * j + 1], 0, 0, d, m, codes, scales, first + at(u, j))
        return s
    return unit


def _make_quantized(type, at_once, experts, adds, rows=ROWS, unroll=UNROLL):
    words, unit, units, block_nbytes = BLOCKS[type].words, make_unit(BLOCKS[type]), type.block // 32, type.nbytes
    matrix, column, finish = matrix_of(experts), column_of(experts, at_once), _finish(experts, at_once, rows, adds)
    n_acc = rows * at_once

    def kernel(node):
        a, b = node + SRC0, node + SRC1
        row = rows * core.block()
        base = matrix(node)
        if row >= ne(a, 1) or base == 0:
            return
        k, n_units = ne(a, 0), ne(a, 0) >> 5
        codes = work(node)
        scales = codes + k * ne(b, 1) * ne(b, 2) * ne(b, 3)
        at_c = core.local.array(at_once, "int64")
        acc = core.local.array(n_acc, "float32")
        for c in range(at_once):
            i1, i2, i3 = column(node, c)
            at_c[c] = (i3 * ne(b, 2) + i2) * ne(b, 1) + i1
        for c in range(n_acc):
            acc[c] = ZERO
        i, step = core.thread(), core.n_threads()
        while i < n_units:
            for t in range(unroll):
                j, counts = i + t * step, True
                if t > 0 and j >= n_units:
                    j, counts = i, False
                q = j // units
                u, at, first = j - q * units, q * block_nbytes, q * units * 32
                for r in range(rows):
                    p = base + min(row + r, ne(a, 1) - 1) * nb(a, 1) + at
                    w = words(p, u)
                    for c in range(at_once):
                        acc[r * at_once + c] += chosen(counts, unit(p, u, w, codes + at_c[c] * k,
                                                                   scales + at_c[c] * (k >> 5) * 4, first))
            i += unroll * step
        finish(node, row, acc)
    return kernel


# ---------------------------------------------------------------- float weights
def piece_of(type, ld_f32x4=core.ld_f32x4):
    """piece(p, x): the sum of products of 16 bytes of weights with as many float32, which this function loads."""
    if type is F32:
        @core.device
        def piece(p, x):
            a0, a1, a2, a3 = core.ld_f32x4(p)
            x0, x1, x2, x3 = ld_f32x4(x)
            return (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
        return piece
    load = WIDE[type]

    @core.device
    def piece(p, x):
        a0, a1, a2, a3, a4, a5, a6, a7 = load(p)
        x0, x1, x2, x3 = ld_f32x4(x)
        x4, x5, x6, x7 = ld_f32x4(x + 16)
        return ((a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)) + ((a4 * x4 + a5 * x5) + (a6 * x6 + a7 * x7))
    return piece


def _make_float(ta, tb, at_once, experts, wide, adds, rows=ROWS, unroll=UNROLL):
    get_a, get_b, size = ONE[ta].get, ONE[tb].get, ta.nbytes
    piece, per_piece = piece_of(ta), 16 // ta.nbytes
    matrix, column, finish = matrix_of(experts), column_of(experts, at_once), _finish(experts, at_once, rows, adds)
    n_acc = rows * at_once

    def kernel(node):
        a, b = node + SRC0, node + SRC1
        row = rows * core.block()
        base = matrix(node)
        if row >= ne(a, 1) or base == 0:
            return
        k, step = ne(a, 0), nb(b, 0)
        at_c = core.local.array(at_once, "int64")
        acc = core.local.array(n_acc, "float32")
        for c in range(at_once):
            i1, i2, i3 = column(node, c)
            at_c[c] = row_addr(b, i1, i2, i3)
        for c in range(n_acc):
            acc[c] = ZERO
        i, threads = core.thread(), core.n_threads()
        if wide:
            while i < k // per_piece:
                for t in range(unroll):
                    j, counts = i + t * threads, True
                    if t > 0 and j >= k // per_piece:
                        j, counts = i, False
                    for r in range(rows):
                        p = base + min(row + r, ne(a, 1) - 1) * nb(a, 1)
                        for c in range(at_once):
                            y = piece(p + 16 * j, at_c[c] + 4 * per_piece * j)
                            acc[r * at_once + c] += chosen(counts, y)
                i += unroll * threads
        else:
            while i < k:
                for r in range(rows):
                    x = get_a(base + min(row + r, ne(a, 1) - 1) * nb(a, 1) + i * size)
                    for c in range(at_once):
                        acc[r * at_once + c] += x * get_b(at_c[c] + i * step)
                i += threads
        finish(node, row, acc)
    return kernel


# ---------------------------------------------------------------- launches
def is_wide(a, b):
    """16-byte loads reach every row of both."""
    return (a.ne[0] * a.type.nbytes % 16 == 0 and b.type is F32 and b.nb[0] == 4 and b.ne[0] % 4 == 0
            and all(x.view_offs % 16 == 0 and all(s % 16 == 0 for s in x.nb[1:]) for x in (a, b)))


def _threads(a, n_pieces):
    """Threads of a block for rows of n_pieces units or loads."""
    return 32 if a.ne[1] >= MANY_ROWS else threads_for(n_pieces // UNROLL, MAX_THREADS)


def product(t, n_columns, grid_yz, experts):
    """The Launches of a product whose blocks are numbered by rows of a and (y, z) = grid_yz."""
    made = _launch(t, n_columns, grid_yz, experts, False)
    if made and grid_yz == (1, 1) and not experts:
        made = replace(made, added=lambda: _launch(t, n_columns, grid_yz, False, True))
    return made and (made,)


def _launch(t, n_columns, grid_yz, experts, adds):
    a, b = t.src[:2]
    at_once = 1 if experts else min(MAX_COLUMNS, n_columns if n_columns != 3 else 4)
    grid = (-(-a.ne[1] // ROWS), -(-grid_yz[0] // at_once), grid_yz[1])
    if max(grid[1:]) > 65535:
        return None
    name = f"mul_mat{'_id' * experts}_vec{at_once}{'_add' * adds}_{a.type.name}"
    if a.type in BLOCKS:
        return Launch(name, lambda: _make_quantized(a.type, at_once, experts, adds), grid, _threads(a, a.ne[0] // 32))
    wide = is_wide(a, b)
    return Launch(f"{name}_{b.type.name}{'_wide' * wide}",
                  lambda: _make_float(a.type, b.type, at_once, experts, wide, adds), grid,
                  _threads(a, a.ne[0] * a.type.nbytes // 16))
