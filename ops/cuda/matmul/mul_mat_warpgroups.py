"""Products of many columns by warpgroups (compute capability 9.0): weights in registers, columns in shared memory.

    weights, row    | 0 ... 7 | 8 ... 15 | ...          a lane's eights, as in mul_mat_piped.py, loaded a step ahead
    columns         | 64 values of k of a column |      128 bytes, copied STAGES - 1 steps ahead (core.copy_16)

A block is two warpgroups; each multiplies 64 rows by all its columns, one instruction 16 values of k at a time.  The
instruction reads columns in the order of memory.  So columns_16.py leaves each 32 values in the order in which eights
of rows come: pair j of eight t stands at place 4 j + t.  Weights are float16, bfloat16 or blocks, whose values become
float16 where they are multiplied (eights.py).
"""
from numpy import float32 as f32

from ggjit.ops.core.types import BF16, BY_NAME
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.choice import WARPGROUPS
from ggjit.ops.cuda.eights import EIGHTS
from ggjit.ops.cuda.matmul import columns_16
from ggjit.ops.cuda.matmul.columns_16 import padded_k
from ggjit.ops.cuda.matmul.mul_mat_piped import (
    ENOUGH_TILES,
    MAX_NMSE,
    MAX_NMSE_BF16,
    PipedTile,
    columns_of,
    make_place,
    matrix,
    n_tiles,
    put_results,
    serves,
)
from ggjit.ops.cuda.native.launch import Launch
from ggjit.ops.cuda.native.views import SRC0, SRC1, nb, ne

K, LINE, STAGES = 64, 128, 3                    # values and bytes of a column in a step
MIN_COLUMNS = 33                                # few columns fill no tile: mul_mat_few
TILES = PipedTile(128, 128, 8, 1), PipedTile(128, 64, 8, 1)
WIDE = {BY_NAME[name] for name in ("f16", "q4_0", "q4_K", "q6_K")}      # types whose wide tile fits REGISTERS
ALIGNED = 1024                                  # bytes: of eight lines
REGISTERS = 128                                 # two blocks of 256 threads a multiprocessor
ZERO = f32(0)


def _make_copy(n_columns, threads):
    """copy(to, base, stride, first, n, step): lines of a step; the pieces of a line change places."""
    rounds = n_columns * 8 // threads

    @core.device
    def copy(to, base, stride, first, n, step):
        for r in range(rounds):
            i = r * threads + core.thread()
            line, piece = i >> 3, i & 7
            core.copy_16(to + LINE * line + 16 * (piece ^ (line & 7)),
                         base + min(first + line, n - 1) * stride + LINE * step + 16 * piece, 16)
    return copy


def _make_weights(type):
    """load(raw, row0, row1, step, t): this lane's four eights of a step, as loaded; ready(a, raw): as they are
    multiplied, four words for each 16 values of k."""
    load_eight, words = EIGHTS[type].raw, EIGHTS[type].words

    @core.device
    def load(raw, row0, row1, step, t):
        for i in range(2):
            z, x, y = 8 * i, load_eight(row0, 8 * step + 4 * i + t), load_eight(row1, 8 * step + 4 * i + t)
            raw[z], raw[z + 1], raw[z + 2], raw[z + 3] = x[0], x[1], x[2], x[3]
            raw[z + 4], raw[z + 5], raw[z + 6], raw[z + 7] = y[0], y[1], y[2], y[3]

    @core.device
    def ready(a, raw):
        for i in range(2):
            z = 8 * i
            x = words((raw[z], raw[z + 1], raw[z + 2], raw[z + 3]))
            y = words((raw[z + 4], raw[z + 5], raw[z + 6], raw[z + 7]))
            a[z], a[z + 1], a[z + 2], a[z + 3] = x[0], y[0], x[1], y[1]
            a[z + 4], a[z + 5], a[z + 6], a[z + 7] = x[2], y[2], x[3], y[3]
    return load, ready


def _make(type, tile):
    n_acc, n_columns, place_nbytes = tile.n // 2, tile.n // 8, LINE * tile.n
    shared, await_copies = core.shared(STAGES * place_nbytes, ALIGNED), core.copies_but(STAGES - 2)
    copy_columns, (load, ready), place = _make_copy(tile.n, tile.threads), _make_weights(type), make_place(tile)
    multiply, put = core.wgmma(tile.n, type is BF16), put_results(1)

    @core.device
    def copy(node, to, pb, n0, step):
        k = ne(node + SRC0, 0)
        if K * step < k:
            copy_columns(to, pb, 2 * padded_k(k), n0, ne(node + SRC1, 1), step)
        core.copies_end()

    def kernel(node):
        a, n_steps, (m0, n0), (pb, scales) = node + SRC0, ne(node + SRC0, 0) // K, place(node), columns_of(node)
        m, n, pa, t = ne(a, 1), ne(node + SRC1, 1), matrix(node), core.thread() & 3
        row = m0 + (core.thread() >> 5) * 16 + (core.thread() >> 2 & 7)
        row0, row1 = pa + min(row, m - 1) * nb(a, 1), pa + min(row + 8, m - 1) * nb(a, 1)
        acc = core.local.array(n_acc, "float32")
        words, raw = core.local.array(16, "int32"), core.local.array(16, "int32")
        for i in range(n_acc):
            acc[i] = ZERO
        base, step = shared(), 0
        for i in range(STAGES - 1):
            copy(node, base + i * place_nbytes, pb, n0, i)
        load(raw, row0, row1, 0, t)
        while step < n_steps:
            await_copies()
            core.fence_shared()
            core.sync()
            copy(node, base + (step + STAGES - 1) % STAGES * place_nbytes, pb, n0, step + STAGES - 1)
            ready(words, raw)
            load(raw, row0, row1, min(step + 1, n_steps - 1), t)
            multiply(acc, words, base + step % STAGES * place_nbytes)
            step += 1
        for j in range(n_columns):
            put(node, acc, 4 * j, row, n0 + 8 * j + 2 * t, m, n, scales)
    return kernel


def product(t, tile=None):
    """The Launches of a mul_mat with many columns, or None."""
    a, b = t.src[:2]
    n_matrices = b.ne[2] * b.ne[3]
    if not WARPGROUPS or not serves(a, b) or n_matrices > 65535 or a.ne[0] % K or b.ne[1] < MIN_COLUMNS:
        return None
    tiles = TILES if a.type in WIDE else TILES[1:]
    tile = tile or next((x for x in tiles if n_tiles(x, a, b) * n_matrices >= ENOUGH_TILES), TILES[-1])
    return columns_16.launch(a, b, turned=True), Launch(
        f"mul_mat_warpgroups_{tile.m}x{tile.n}_{a.type.name}", lambda: _make(a.type, tile),
        (n_tiles(tile, a, b), 1, n_matrices), tile.threads, max_nmse=MAX_NMSE_BF16 if a.type is BF16 else MAX_NMSE,
        by_warpgroups=True, registers=REGISTERS)
