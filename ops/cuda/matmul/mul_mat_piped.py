"""Products by tensor cores of 16-bit floats, weights as they lie, columns of columns_16.py.

A sum does not care for the order of k.  So a lane gives mma the eight values of 32 that lie side by side in its row of
weights, and its column's eight of the same place: one load of 16 bytes each, with no exchange between lanes.

    32 values of k      | 0 ... 7 | 8 ... 15 | 16 ... 23 | 24 ... 31 |
    lane (g, t)             t = 0      1           2           3            of rows g and g + 8, and of column g
    first mma             0 1 2 3 of each eight         second mma       4 5 6 7

A block makes a tile of the result (PipedTile) STEP values of k at a time:

    columns             shared memory, copied STAGES - 1 steps ahead (core.copy_16)
    float weights       the same
    quantised weights   registers: loaded one step ahead, made float16 where mma takes them (ops/cuda/eights.py)

    step            0       1       2                       shared memory has STAGES places, taken in turn
    copies          3       4       5       ...
    products        0       1       2       ...
"""
import dataclasses

from numpy import float32 as f32

from ggjit.ops.core.types import BF16
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.eights import EIGHTS
from ggjit.ops.cuda.matmul import columns_16
from ggjit.ops.cuda.matmul.columns_16 import STEP, padded_k
from ggjit.ops.cuda.matmul.mul_mat_columns import store_pair
from ggjit.ops.cuda.native.launch import Launch
from ggjit.ops.cuda.native.unrolled import unrolled
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, nb, ne, row_addr, work
from ggjit.ops.cuda.rows import FLOATS

STAGES = 3
LINE = 2 * STEP                 # bytes of a row or column in one step
BAND = 8                        # tiles of columns that share rows of weights in the second-level cache
MAX_NMSE = 1e-6                 # both sides are rounded to 11 bits
MAX_NMSE_BF16 = 5e-5
ZERO = f32(0)
ENOUGH_TILES = 128              # of one size; else smaller ones keep more of the GPU busy


@dataclasses.dataclass(frozen=True)
class PipedTile:
    """m x n results of a block; warps_m x warps_n warps share them."""
    m: int
    n: int
    warps_m: int
    warps_n: int

    @property
    def threads(self):
        return 32 * self.warps_m * self.warps_n

    @property
    def rows(self):
        """mma tiles of 16 rows of a warp."""
        return self.m // self.warps_m // 16

    @property
    def columns(self):
        """mma tiles of 8 columns of a warp."""
        return self.n // self.warps_n // 8


TILES = (PipedTile(128, 128, 4, 2), PipedTile(64, 64, 2, 2), PipedTile(32, 32, 2, 1))


# ---------------------------------------------------------------- one step
def multiplied(rows, columns, mma):
    """run(acc, a, at): the products of a step.  a: 8 words for each of `rows` mma tiles, at: the lane's eight of its
    first column, columns LINE bytes apart in shared memory; acc: 4 results for each mma tile, by columns."""
    @core.device
    def of_columns(j, acc, a, at):
        b0, b1, b2, b3 = core.lds_i32x4(at + 8 * LINE * j)
        for i in range(rows):
            s, x = 4 * (rows * j + i), 8 * i
            c = mma(a[x], a[x + 4], a[x + 1], a[x + 5], b0, b1, acc[s], acc[s + 1], acc[s + 2], acc[s + 3])
            c = mma(a[x + 2], a[x + 6], a[x + 3], a[x + 7], b2, b3, c[0], c[1], c[2], c[3])
            acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = c[0], c[1], c[2], c[3]
    return unrolled(columns, of_columns)


def _make_copy(n_lines, threads):
    """copy(to, base, stride, first, n, step, k): lines of a step, 16 bytes a thread and round; zeros behind k."""
    rounds = -(-n_lines * 4 // threads)

    @core.device
    def copy(to, base, stride, first, n, step, k):
        for r in range(rounds):
            i = r * threads + core.thread()
            line, at = i >> 2, LINE * step + 16 * (i & 3)
            if n_lines * 4 % threads == 0 or line < n_lines:
                core.copy_16(to + 16 * i, base + min(first + line, n - 1) * stride + at, min(max(2 * k - at, 0), 16))
    return copy


def _make_of_rows(tile, type):
    """load(raw, p, stride, row, m, i): eight i of the warp's rows, as loaded; ready(a, raw): as mma takes them."""
    n = 2 * tile.rows
    load_eight, words = EIGHTS[type].raw, EIGHTS[type].words

    @core.device
    def load(raw, p, stride, row, m, i):
        for r in range(n):
            w = load_eight(p + min(row + 8 * r, m - 1) * stride, i)
            raw[4 * r], raw[4 * r + 1], raw[4 * r + 2], raw[4 * r + 3] = w[0], w[1], w[2], w[3]

    @core.device
    def ready(a, raw):
        for r in range(n):
            w = words((raw[4 * r], raw[4 * r + 1], raw[4 * r + 2], raw[4 * r + 3]))
            a[4 * r], a[4 * r + 1], a[4 * r + 2], a[4 * r + 3] = w[0], w[1], w[2], w[3]
    return load, ready


# ---------------------------------------------------------------- which tile, its results
@core.device
def matrix(node):
    """Address of the matrix of weights of block z."""
    a, b = node + SRC0, node + SRC1
    i3 = core.block_z() // ne(b, 2)
    i2 = core.block_z() - i3 * ne(b, 2)
    return row_addr(a, 0, i2 // (ne(b, 2) // ne(a, 2)), i3 // (ne(b, 3) // ne(a, 3)))


@core.device
def columns_of(node):
    """(address of the first column of block z, of its scale)"""
    b = node + SRC1
    length, first = padded_k(ne(b, 0)), core.block_z() * ne(b, 1)
    return work(node) + 2 * length * first, work(node) + 2 * length * n_rows(b) + 4 * first


def make_place(tile):
    tile_m, tile_n = tile.m, tile.n

    @core.device
    def place(node):
        """(first row, first column) of the block's tile: bands of BAND tiles of columns, in each all rows."""
        n_x, n_y = (ne(node + SRC0, 1) + tile_m - 1) // tile_m, (ne(node + SRC1, 1) + tile_n - 1) // tile_n
        band = core.block() // (BAND * n_x)
        i, width = core.block() - band * BAND * n_x, min(BAND, n_y - band * BAND)
        x = i // width
        return x * tile_m, (band * BAND + i - x * width) * tile_n
    return place


def put_results(rows):
    """put(j, acc, scales, ...): results of mma tiles `j` of columns; see `unrolled`."""
    @core.device
    def put(node, acc, s, row, column, m, n, scales):
        i3 = core.block_z() // ne(node + DST, 2)
        i2 = core.block_z() - i3 * ne(node + DST, 2)
        to = to_next = 0
        x = y = ZERO
        if column < n:
            to, x = row_addr(node + DST, column, i2, i3), core.ld_f32(scales + 4 * column)
        if column + 1 < n:
            to_next, y = row_addr(node + DST, column + 1, i2, i3), core.ld_f32(scales + 4 * column + 4)
        for i in range(rows):
            z = s + 4 * i
            store_pair(to, to_next, row + 16 * i, m, acc[z] * x, acc[z + 1] * y)
            store_pair(to, to_next, row + 16 * i + 8, m, acc[z + 2] * x, acc[z + 3] * y)
    return put


# ---------------------------------------------------------------- the kernel
def _make(type, tile):
    quantized, mma = type in BLOCKS, core.mma_bf16 if type is BF16 else core.mma_f16
    warps_n, n_rows_of_warp, n_columns = tile.warps_n, tile.rows, tile.columns
    n_acc, n_words, tile_m, tile_n = 4 * n_rows_of_warp * n_columns, 8 * n_rows_of_warp, tile.m, tile.n
    place_nbytes = LINE * (tile_n if quantized else tile_m + tile_n)
    shared, await_copies = core.shared(STAGES * place_nbytes), core.copies_but(STAGES - 2)
    copy_a, copy_b = _make_copy(tile_m, tile.threads), _make_copy(tile_n, tile.threads)
    (load, ready), place = _make_of_rows(tile, type), make_place(tile)
    multiply, put = multiplied(n_rows_of_warp, n_columns, mma), put_results(n_rows_of_warp)

    @core.device
    def copy(node, to, pa, pb, m0, n0, step):
        """The copies of a step, if there is such a one."""
        k, n = ne(node + SRC0, 0), ne(node + SRC1, 1)
        length = padded_k(k)
        if STEP * step < length:
            copy_b(to, pb, 2 * length, n0, n, step, length)
            if not quantized:
                copy_a(to + LINE * tile_n, pa, nb(node + SRC0, 1), m0, ne(node + SRC0, 1), step, k)
        core.copies_end()

    def kernel(node):
        a = node + SRC0
        m, n, n_steps = ne(a, 1), ne(node + SRC1, 1), padded_k(ne(a, 0)) // STEP
        (m0, n0), pa, (pb, scales) = place(node), matrix(node), columns_of(node)
        warp, g, t = core.thread() >> 5, core.thread() >> 2 & 7, core.thread() & 3
        row, column = warp // warps_n * (16 * n_rows_of_warp) + g, warp % warps_n * (8 * n_columns) + g
        acc = core.local.array(n_acc, "float32")
        words, raw = core.local.array(n_words, "int32"), core.local.array(n_words, "int32")
        for i in range(n_acc):
            acc[i] = ZERO
        base, step = shared(), 0
        for i in range(STAGES - 1):
            copy(node, base + i * place_nbytes, pa, pb, m0, n0, i)
        if quantized:
            load(raw, pa, nb(a, 1), m0 + row, m, t)
        while step < n_steps:
            at = base + step % STAGES * place_nbytes
            await_copies()
            core.sync()
            copy(node, base + (step + STAGES - 1) % STAGES * place_nbytes, pa, pb, m0, n0, step + STAGES - 1)
            if quantized:
                ready(words, raw)
                load(raw, pa, nb(a, 1), m0 + row, m, 4 * min(step + 1, n_steps - 1) + t)
            else:
                for r in range(2 * n_rows_of_warp):
                    w = core.lds_i32x4(at + LINE * (tile_n + row + 8 * r) + 16 * t)
                    words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3] = w[0], w[1], w[2], w[3]
            multiply(acc, words, at + LINE * column + 16 * t)
            step += 1
        for j in range(n_columns):
            put(node, acc, 4 * n_rows_of_warp * j, m0 + row, n0 + column - g + 8 * j + 2 * t, m, n, scales)
    return kernel


# ---------------------------------------------------------------- launches
def serves(a, b):
    """Has the type eights, at places that loads of 16 bytes reach?"""
    if a.type not in EIGHTS or b.type not in FLOATS:
        return False
    return a.type in BLOCKS or a.ne[0] % 8 == 0 and a.view_offs % 16 == 0 and all(s % 16 == 0 for s in a.nb[1:])


def n_tiles(tile, a, b):
    return -(-a.ne[1] // tile.m) * -(-b.ne[1] // tile.n)


def product(t, tile=None):
    """The Launches of a mul_mat with many columns, or None."""
    a, b = t.src[:2]
    n_matrices = b.ne[2] * b.ne[3]
    if not serves(a, b) or n_matrices > 65535:
        return None
    tile = tile or next((x for x in TILES if n_tiles(x, a, b) * n_matrices >= ENOUGH_TILES), TILES[-1])
    name = f"mul_mat_piped_{tile.m}x{tile.n}_{a.type.name}"
    return columns_16.launch(a, b), Launch(name, lambda: _make(a.type, tile), (n_tiles(tile, a, b), 1, n_matrices),
                                           tile.threads, max_nmse=MAX_NMSE_BF16 if a.type is BF16 else MAX_NMSE)
