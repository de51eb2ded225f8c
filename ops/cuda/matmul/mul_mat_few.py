"""Products of 2 to 32 columns by tensor cores: a block makes 16 rows of results, its warps take steps of k in turn.

    k               | step 0 | step 1 | step 2 | step 3 | step 4 | ...
    warp                0        1        2        3        0                   sums are added over the warps at the end

A lane's values are as in mul_mat_piped.py.  Weights are read once from memory and stay in no shared memory: blocks are
many and small, so that loads of all of them are under way.
"""
from numpy import float32 as f32

from ggjit.ops.core.types import BF16
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.eights import EIGHTS
from ggjit.ops.cuda.matmul import columns_16
from ggjit.ops.cuda.matmul.columns_16 import STEP, padded_k
from ggjit.ops.cuda.matmul.mul_mat_piped import MAX_NMSE, MAX_NMSE_BF16, columns_of, matrix, put_results, serves
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch
from ggjit.ops.cuda.native.views import SRC0, SRC1, nb, ne

WARPS = 2 if SMALL_BLOCKS else 4
ROWS = 16
MAX_COLUMNS = 32
ZERO = f32(0)
ZEROS = (0, 0, 0, 0)


def _make_rows(type):
    """(load(row, i, k), words): eight i of a row as loaded, zeros behind k; the eight of it."""
    raw, whole = EIGHTS[type].raw, type in BLOCKS

    @core.device
    def load(row, i, k):
        if whole or 8 * i < k:
            return raw(row, i)
        return ZEROS
    return load, EIGHTS[type].words


def _make_sum(n_acc):
    """sum(parts, j, c): value c of mma tile j, added over the warps."""
    @core.device
    def total(parts, j, c):
        x = ZERO
        for w in range(WARPS):
            x += core.lds_f32(parts + 4 * ((w * n_acc + 4 * j + c) * 32 + (core.thread() & 31)))
        return x
    return total


def _make(type, columns):
    """columns: mma tiles of 8 columns of a block."""
    mma = core.mma_bf16 if type is BF16 else core.mma_f16
    (load, words_of), n_acc = _make_rows(type), 4 * columns
    shared, total, put = core.shared(4 * WARPS * n_acc * 32), _make_sum(n_acc), put_results(1)

    def kernel(node):
        a = node + SRC0
        m, n, k, pa, (pb, scales) = ne(a, 1), ne(node + SRC1, 1), ne(a, 0), matrix(node), columns_of(node)
        length, n_steps, warp, lane = 2 * padded_k(k), padded_k(k) // STEP, core.thread() >> 5, core.thread() & 31
        g, t, m0, n0 = lane >> 2, lane & 3, ROWS * core.block(), 8 * columns * core.block_y()
        row0, row1 = pa + min(m0 + g, m - 1) * nb(a, 1), pa + min(m0 + g + 8, m - 1) * nb(a, 1)
        acc, sums = core.local.array(n_acc, "float32"), core.local.array(4, "float32")
        for i in range(n_acc):
            acc[i] = ZERO
        step = warp
        i = 4 * min(step, n_steps - 1) + t
        raw0, raw1 = load(row0, i, k), load(row1, i, k)
        while step < n_steps:
            x, y = words_of(raw0), words_of(raw1)
            i = 4 * min(step + WARPS, n_steps - 1) + t
            raw0, raw1 = load(row0, i, k), load(row1, i, k)
            for j in range(columns):
                b = core.ld_i32x4(pb + min(n0 + 8 * j + g, n - 1) * length + 2 * STEP * step + 16 * t)
                s = 4 * j
                c = mma(x[0], y[0], x[1], y[1], b[0], b[1], acc[s], acc[s + 1], acc[s + 2], acc[s + 3])
                c = mma(x[2], y[2], x[3], y[3], b[2], b[3], c[0], c[1], c[2], c[3])
                acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = c[0], c[1], c[2], c[3]
            step += WARPS
        parts = shared()
        for i in range(n_acc):
            core.sts_f32(parts + 4 * ((warp * n_acc + i) * 32 + lane), acc[i])
        core.sync()
        j = warp
        while j < columns:
            for c in range(4):
                sums[c] = total(parts, j, c)
            put(node, sums, 0, m0 + g, n0 + 8 * j + 2 * t, m, n, scales)
            j += WARPS
    return kernel


def product(t):
    """The Launches of a mul_mat with at most MAX_COLUMNS columns, or None."""
    a, b = t.src[:2]
    n_matrices = b.ne[2] * b.ne[3]
    if not serves(a, b) or n_matrices > 65535:
        return None
    columns = 1 if b.ne[1] <= 8 else 2 if b.ne[1] <= 16 else 4
    grid = -(-a.ne[1] // ROWS), -(-b.ne[1] // (8 * columns)), n_matrices
    return columns_16.launch(a, b), Launch(
        f"mul_mat_few{8 * columns}_{a.type.name}", lambda: _make(a.type, columns), grid, 32 * WARPS,
        max_nmse=MAX_NMSE_BF16 if a.type is BF16 else MAX_NMSE)
