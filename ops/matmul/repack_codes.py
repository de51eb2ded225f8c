"""Quantised weights with sixteen rows interleaved, so that a lane of a vector is a row of the matrix.

    file      row 0: | d | 32 codes | d | 32 codes ...        one row after the other, blocks of 18 or 34 bytes
    repacked  rows 0-15: | d of 16 rows | codes 0-3 of 16 rows | codes 4-7 of 16 rows ...    as many bytes

A product needs no sums over lanes and no packing: sixteen scales are one load and one conversion, activations are
broadcast from memory, and one register tile of 16 rows x up to 12 columns serves one column and hundreds.  Measured in
benchmarks/repack.py.  Types Q4_0 and Q8_0, AVX-512 with VNNI; k a multiple of 32, rows a multiple of 16.

    activations, a block of 32:   codes 32 bytes | -zero_point sum(codes) i32 | scale f32
    a tile's columns:             block 0 of column 0, of column 1 ... | block 1 of column 0 ...

Every element of a result is summed in the order of k: results depend neither on threads nor on the number of columns.
"""
from llvmlite import ir
from numba import types

from ggjit.ops.core.record import OK
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.types import Q4_0, Q8_0
from ggjit.ops.native.jit import exact, inline, ir_function, native
from ggjit.ops.native.lanes import dpbusd_ir, for_ir, i64, int_to_float_ir, nibbles_ir, prefetch_ir, splat_const
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64, copy_bytes, ld_i32, st_i32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, barrier, chunk_rows, nb, ne, next_rows, next_rows2, work
from ggjit.ops.native.simd import fma_ir, load_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared.quant32 import activation_ir, sum_ir

TYPES, ISAS = (Q4_0, Q8_0), ("avx512",)
ROWS, BLOCK = 16, 32
MAX_COLUMNS = 12                    # 12 integer sums and 12 float sums in 32 registers
Y_NBYTES = 40                       # an activation block
AHEAD = 8                           # blocks of weights between a prefetch and its use
ZERO_POINT = {Q4_0: 8, Q8_0: 128}


# ---------------------------------------------------------------- the layout
def _make_move(type, into):
    """jitted move(file, repacked, k, m): `into` the layout, or back."""
    nbytes, fours, flip = type.nbytes, (type.nbytes - 2) // 4, -2139062144 if type is Q8_0 else 0      # 0x80808080

    @exact
    def move(file, repacked, k, m):
        blocks = k // BLOCK
        for row in range(m):
            group = repacked + row // ROWS * (blocks * nbytes * ROWS)
            lane = row % ROWS
            for i in range(blocks):
                here, there = file + (row * blocks + i) * nbytes, group + i * nbytes * ROWS
                codes = there + 2 * ROWS + 4 * lane
                if into:
                    copy_bytes(there + 2 * lane, here, 2)
                    for c in range(fours):
                        st_i32(codes + 64 * c, ld_i32(here + 2 + 4 * c) ^ types.int32(flip))
                else:
                    copy_bytes(here, there + 2 * lane, 2)
                    for c in range(fours):
                        st_i32(here + 2 + 4 * c, ld_i32(codes + 64 * c) ^ types.int32(flip))
    return move


_pack_q4_0, _pack_q8_0 = _make_move(Q4_0, True), _make_move(Q8_0, True)
_unpack_q4_0, _unpack_q8_0 = _make_move(Q4_0, False), _make_move(Q8_0, False)


@native("i64(i64, i64, i64, i64, i64)")
def pack_rows(type_id, file, repacked, k, m):
    """m rows of the file's blocks (m a multiple of 16) -> the layout."""
    if type_id == 2:
        _pack_q4_0(file, repacked, k, m)
    else:
        _pack_q8_0(file, repacked, k, m)
    return 0


@native("i64(i64, i64, i64, i64, i64)")
def unpack_rows(type_id, file, repacked, k, m):
    """The layout -> m rows of the file's blocks."""
    if type_id == 2:
        _unpack_q4_0(file, repacked, k, m)
    else:
        _unpack_q8_0(file, repacked, k, m)
    return 0


# ---------------------------------------------------------------- activations
def _make_prepare(zero_point):
    @ir_function
    def block(b, src, dst):
        q, d = activation_ir(b, src)
        store_ir(b, b.trunc(q, vec_ir("i8", BLOCK)), dst)
        store_ir(b, b.mul(sum_ir(b, q), ir.Constant(IR_I32, -zero_point)), b.add(dst, i64(32)))
        store_ir(b, d, b.add(dst, i64(36)))

    @exact
    def prepare(src, dst, k, step):
        for i in range(k // BLOCK):
            block(src + 4 * BLOCK * i, dst + step * i)
    return prepare


# ---------------------------------------------------------------- the register tile
def _make_tile(type, n_columns):
    """intrinsic tile(w, y, n_blocks, dst, dst_stride): 16 rows x n_columns dot products."""
    n_fours, block_nbytes = (type.nbytes - 2) // 4, ROWS * type.nbytes
    codes_ir = nibbles_ir if type is Q4_0 else lambda b, v: (v,)

    def at(b, y, j, offs):
        """Address in the activation block of column j."""
        return b.add(y, i64(Y_NBYTES * j + offs))

    @ir_function
    def tile(b, w, y, n_blocks, dst, dst_stride):

        def body(b, state):
            p, q, *acc = state
            for line in range(0, block_nbytes, 64):
                prefetch_ir(b, b.add(p, i64(AHEAD * block_nbytes + line)))
            sums = [splat_ir(b, load_ir(b, at(b, q, j, 32), IR_I32), ROWS) for j in range(n_columns)]
            for c in range(n_fours):
                codes = codes_ir(b, load_ir(b, b.add(p, i64(2 * ROWS + 64 * c)), vec_ir("i8", 64)))
                for part, u in enumerate(codes):
                    for j in range(n_columns):
                        four = splat_ir(b, load_ir(b, at(b, q, j, 4 * (part * n_fours + c)), IR_I32), ROWS)
                        sums[j] = dpbusd_ir(b, sums[j], u, b.bitcast(four, vec_ir("i8", 64)))
            d = b.fpext(load_ir(b, p, vec_ir("f16", ROWS)), vec_ir("f32", ROWS))
            for j in range(n_columns):
                scale = b.fmul(d, splat_ir(b, load_ir(b, at(b, q, j, 36), IR_F32), ROWS))
                acc[j] = fma_ir(b, scale, int_to_float_ir(b, sums[j]), acc[j])
            return [b.add(p, i64(block_nbytes)), b.add(q, i64(Y_NBYTES * n_columns)), *acc]
        state = [(IR_I64, w), (IR_I64, y)] + [(vec_ir("f32", ROWS), splat_const("f32", 0.0, ROWS))] * n_columns
        for j, v in enumerate(for_ir(b, n_blocks, state, body)[2:]):
            store_ir(b, v, b.add(dst, b.mul(dst_stride, i64(j))))
    return tile


# ---------------------------------------------------------------- kernel
@inline
def _panel_nbytes(k, n_columns):
    """The prepared columns of a tile, whole cache lines."""
    return (k // BLOCK * Y_NBYTES * n_columns + 63) // 64 * 64


def _make(type, n_columns):
    tile, prepare, nbytes = _make_tile(type, n_columns), _make_prepare(ZERO_POINT[type]), type.nbytes

    @inline
    def first_column(i, n):
        """Of tile i; the last tile overlaps the one before: the same numbers, stored twice."""
        return min(i * n_columns, n - n_columns)

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n, panels = ne(a, 0), ne(a, 1), ne(b, 1), work(node)
        panel, tiles = _panel_nbytes(k, n_columns), (n + n_columns - 1) // n_columns
        while True:
            i = next_rows(node, ith, nth, sync, 1, tiles * n_columns)
            if i >= tiles * n_columns:
                break
            t, j = i // n_columns, i % n_columns
            prepare(addr(b) + (first_column(t, n) + j) * nb(b, 1), panels + t * panel + j * Y_NBYTES, k,
                    n_columns * Y_NBYTES)
        barrier(sync, nth)
        groups, group_nbytes = m // ROWS, ROWS * (k // BLOCK) * nbytes
        chunk = chunk_rows(groups, nth)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, groups)
            if start >= groups:
                return OK
            for t in range(tiles):              # columns stay in the first-level cache, groups in the second
                c = addr(d) + first_column(t, n) * nb(d, 1)
                for g in range(start, min(groups, start + chunk)):
                    tile(addr(a) + g * group_nbytes, panels + t * panel, k // BLOCK, c + 4 * ROWS * g, nb(d, 1))
    return kernel


def product(a, b):
    """The Kernel of repacked weights a times float32 columns b."""
    k, m, n = a.ne[0], a.ne[1], b.ne[1]
    columns = -(-n // -(-n // MAX_COLUMNS))                  # 13 columns are 7 + 7, not 12 + 12
    cost = 2 * k * m * n / 300 + a.type.row_nbytes(k) * m / 20
    return Kernel(f"mul_mat-repacked-{a.type.name}-{columns}", lambda: _make(a.type, columns), cost,
                  -(-n // columns) * _panel_nbytes.py_func(k, columns))
