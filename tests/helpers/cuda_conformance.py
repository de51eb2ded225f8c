"""Twelve kernels that use every kind of function of compilers (ops/cuda/compiler/contract.py), and what each leaves.

A kernel works on one block of THREADS threads over memory of N words: x words 0 ... N - 1 as float32 values 0.5, 1.5,
... and y = x + 4 N bytes, where it leaves its results.  An implementation passes when it compiles all of them; one that
can run kernels, when y is as said.
"""
import math

import numpy as np

from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.core import block, device, n_blocks, n_threads, sync, thread

THREADS = N = 64
X = np.arange(N, dtype=np.float32) + np.float32(0.5)
HALF, THREE, I = np.float32(0.5), np.float32(3), np.arange(N)           # noqa: E741
KERNELS = {}                    # name: (kernel(x), what y holds then)


def leaves(want):
    def kept(kernel):
        KERNELS[kernel.__name__] = kernel, np.asarray(want)
        return kernel
    return kept


@device
def own(x):
    return x + 4 * (block() * n_threads() + thread())


@leaves(X + HALF)
def loads_and_stores(x):
    core.st_f32(own(x) + 4 * N, core.ld_f32(own(x)) + HALF)


@leaves(X.astype(np.float16).astype(np.float32) + X)
def narrow_types(x):
    y = own(x) + 4 * N
    core.st_f16(y, core.ld_f32(own(x)))
    v = core.ld_f16(y)
    core.st_bf16(y, core.ld_f32(own(x)))
    core.st_f32(y, v + core.ld_bf16(y))


@leaves((X.view(np.int32) & 0xFFFF) + (X.view(np.int32) >> 16) + (X.view(np.int32) >> 16 & 0xFF))
def parts_of_words(x):
    p = own(x)
    core.st_i32(p + 4 * N, core.ld_u16(p) + core.ld_i16(p + 2) + core.ld_u8(p + 2))


@leaves(X[I ^ 5] + X[(I & ~31) + 3])
def shuffles(x):
    v = core.ld_f32(own(x))
    core.st_f32(own(x) + 4 * N, core.shfl_xor(v, 5) + core.shfl(v, 3))


@leaves(np.repeat(X.reshape(2, 32).sum(1) + X.reshape(2, 32).max(1), 32))
def sums_of_warps(x):
    v = core.ld_f32(own(x))
    core.st_f32(own(x) + 4 * N, core.warp_sum(v) + core.warp_max(v))


reversed_in = core.shared(4 * N)


@leaves(X[::-1])
def through_shared_memory(x):
    p = reversed_in()
    core.sts_f32(p + 4 * thread(), core.ld_f32(own(x)))
    sync()
    core.st_f32(own(x) + 4 * N, core.lds_f32(p + 4 * (n_threads() - 1 - thread())))


@leaves(X * 4)
def memory_of_a_thread(x):
    held = core.local.array(4, "float32")
    for i in range(4):
        held[i] = core.ld_f32(own(x))
    s = HALF - HALF
    for i in range(4):
        s += held[i]
    core.st_f32(own(x) + 4 * N, s)


@leaves([float(np.float32(math.exp(-v)) + np.float32(math.sqrt(v))) for v in X])
def functions_of_floats(x):
    v = core.ld_f32(own(x))
    core.st_f32(own(x) + 4 * N, core.exp(-v) + core.sqrt(core.fabs(v)))


@leaves(np.full(N, 1 * 1 + 2 * -1 + 7 + 32, np.int32))
def bytes_and_votes(x):
    votes = core.popcount(core.ballot(thread() >= 0))
    core.st_i32(own(x) + 4 * N, core.dp4a(0x0201, 0xFF01, 7) + votes + (n_blocks() - 1))


@leaves(np.full(N, 16.0))
def a_product_of_tiles(x):
    """Ones times ones: every result is k = 16."""
    one = core.pack_f16(HALF + HALF, HALF + HALF)
    zero = HALF - HALF
    d = core.mma_f16(one, one, one, one, one, one, zero, zero, zero, zero)
    core.st_f32(own(x) + 4 * N, (d[0] + d[1] + d[2] + d[3]) * HALF * HALF)


copied, await_copies = core.shared(4 * N), core.copies_but(0)


@leaves(np.where(I < 34, X, 0)[I & -4] + np.where(I < 34, X.view(np.int32) >> 16, 0)[I ^ 1])
def copies_beside_the_thread(x):
    """16 bytes a thread; of the ninth the first 8, zeros behind them."""
    p = copied()
    if thread() < N // 4:
        core.copy_16(p + 16 * thread(), x + 16 * thread(), min(max(4 * 34 - 16 * thread(), 0), 16))
    core.copies_end()
    await_copies()
    sync()
    words = core.lds_i32x4(p + 4 * (thread() & -4))
    q = p + 4 * (thread() ^ 1) + 2
    core.st_f32(own(x) + 4 * N, core.bits_f32(words[0]) + core.lds_u16(q))


matrices = core.shared(16 * 32)
LOW_ROW = 2.0 * (I % 4)                         # rows 2 p and 2 p + 1 are the halves of lane 4 c + p


@leaves(LOW_ROW + 1 + (LOW_ROW + 1) * 3 + np.where(I % 2 == 0, 8 + 3 * 8, 0))
def matrices_transposed(x):
    """A row of a matrix holds its number, of the second one 8 more; both by permuted bytes, then fma of both halves."""
    p = matrices() + 16 * (thread() & 31)
    row = np.float32(thread() & 15)
    word = core.pack_f16(row, row)
    if thread() < 32:
        core.sts_i32x4(p, (word, word, word, word))
    sync()
    words = core.ldmatrix_t(p)
    w = words[0]
    if thread() & 1 == 0:
        w = words[1]
    one, three = core.pack_f16(HALF + HALF, HALF + HALF), core.pack_f16(HALF + HALF, THREE)
    d = core.fma_f16(core.permute(w, 0, 0x3210), three, core.permute(one, 0, 0x4410))
    core.st_f32(own(x) + 4 * N, core.low_f16(d) + core.high_f16(d))
