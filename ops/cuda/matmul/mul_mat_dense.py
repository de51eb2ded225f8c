"""Products with many columns by cuBLAS: both operands as dense 16-bit floats, or as float32.

    weights     F16, BF16, F32      read where they are
                quantised           unpacked to BF16 in scratch memory, whose range is float32's
    columns     F32, F16, BF16      rounded to the weights' type in scratch memory, unless they have it

    scratch     columns   n x k values | weights   m x k values

Serves plain matrices only; the others take mul_mat_tile.
"""
import functools

from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.cuda.blocks import BLOCKS, byte_of
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.choice import library_decided, library_may
from ggjit.ops.cuda.native.launch import Gemm, over_pieces
from ggjit.ops.cuda.native.views import SRC0, SRC1, nb, ne, piece, row_addr, work
from ggjit.ops.cuda.rows import FLOATS, ONE

MAX_UNPACKED_NBYTES = 512 << 20
ALIGNED = 16                    # bytes: what cuBLAS' fast kernels ask of rows


@functools.cache
def available():
    """May cuBLAS be used?  GGJIT_CUBLAS=0 says no; in the simulator only GGJIT_CUBLAS=1 says yes."""
    return library_may("GGJIT_CUBLAS", "nvmath", "cuda")


def decided():
    return library_decided("GGJIT_CUBLAS")


def _make_columns(get, put, size):
    """The rows of source 1, dense, at the start of scratch memory."""
    def kernel(node):
        b = node + SRC1
        k, n = ne(b, 0), ne(b, 1)
        r, next_row, first, step = piece(n)
        while r < n:
            p, to, i = row_addr(b, r, 0, 0), work(node) + r * k * size, first
            while i < k:
                put(to + i * size, get(p + i * nb(b, 0)))
                i += step
            r += next_row
    return kernel


def _make_weights(type):
    """The rows of source 0 as BF16, dense, behind the columns; a thread unpacks four values."""
    b = BLOCKS[type]
    words, scale, at, four, nbytes, length = b.words, b.scale, b.at, b.segments == 4, type.nbytes, type.block
    per_block = length // 4

    @core.device
    def word_of(w, j):
        low = (w[1] if j & 1 else w[0]) if j < 2 else (w[3] if j & 1 else w[2])
        high = (w[5] if j & 1 else w[4]) if j < 6 else (w[7] if j & 1 else w[6])
        return low if j < 4 else high

    def kernel(node):
        a = node + SRC0
        k, m = ne(a, 0), ne(a, 1)
        r, next_row, first, step = piece(m)
        while r < m:
            row, to = row_addr(a, r, 0, 0), work(node) + 2 * k * (ne(node + SRC1, 1) + r)
            i = first
            while i < k // 4:
                q = i // per_block
                j = i - q * per_block
                u, j = j >> 3, j & 7
                p = row + q * nbytes
                s = j >> 1 if four else j >> 2
                at_word = at(u, s) + 4 * (j & 1 if four else j & 3)
                w, (d, low) = word_of(words(p, u), j), scale(p, u, s)
                put = to + 2 * (q * length + at_word)
                core.st_i32(put, core.pack_bf16(d * byte_of(w, 0) + low, d * byte_of(w, 1) + low))
                core.st_i32(put + 4, core.pack_bf16(d * byte_of(w, 2) + low, d * byte_of(w, 3) + low))
                i += step
            r += next_row
    return kernel


def product(t):
    """The Launches and the Gemm of a product, or None where cuBLAS does not serve it."""
    a, b = t.src[:2]
    quantized = a.type in BLOCKS
    type = BF16 if quantized else a.type
    (k, m), n = a.ne[:2], b.ne[1]
    if not available() or type not in (F16, BF16, F32) or b.type not in FLOATS or not _plain(a, b, t):
        return None
    unpacked_nbytes = m * k * type.nbytes if quantized else 0
    if unpacked_nbytes > MAX_UNPACKED_NBYTES:
        return None
    before, a_offs, b_offs, ldb = (), None, None, b.nb[1] // b.type.nbytes
    if b.type is not type or b.nb[1] % ALIGNED:
        before, b_offs, ldb = (_columns(b, type),), 0, k
    if quantized:
        a_offs = n * k * type.nbytes
        before += over_pieces(f"unpack_{a.type.name}_bf16", lambda: _make_weights(a.type), m, k // 4,
                              a_offs + unpacked_nbytes),
    lda = k if quantized else a.nb[1] // type.nbytes
    return *before, Gemm(type, m, n, k, lda, ldb, t.nb[1] // 4, a_offs, b_offs,
                         max_nmse=0.0 if type is F32 else 5e-5 if quantized else 5e-4)


def _columns(b, type):
    k, n = b.ne[:2]
    return over_pieces(f"columns_{b.type.name}_{type.name}",
                       lambda: _make_columns(ONE[b.type].get, ONE[type].put, type.nbytes), n, k, n * k * type.nbytes,
                       (b.base.id, b.id, type.name))


def _plain(a, b, t):
    """Matrices without further dimensions, rows dense and aligned."""
    return (t.ne[2] * t.ne[3] == 1 and a.ne[2] * a.ne[3] == 1 and a.ne[0] % 8 == 0 and t.nb[1] % ALIGNED == 0
            and (a.type in BLOCKS or (a.nb[1] % ALIGNED == 0 and a.view_offs % ALIGNED == 0))
            and b.nb[0] == b.type.nbytes and t.view_offs % ALIGNED == 0)
