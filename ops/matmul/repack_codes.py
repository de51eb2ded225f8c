"""Products with quantised weights whose rows are interleaved (repack_formats.py has the layout).

A product needs no sums over lanes and no packing: the scales of all rows are one load and one conversion, activations
are broadcast from memory, and one register tile of L rows x a few columns serves one column and hundreds.  Measured in
benchmarks/repack.py.  AVX-512 with VNNI, and AVX2; k a multiple of the type's block, rows a multiple of L.

    activations, a block:   codes | -zero_point sum(codes) of each part, i32 | d sum(codes) of each part, f32 | d f32
    a tile's columns:       block 0 of column 0, of column 1 ... | block 1 of column 0 ...

The second and third field are there for types with a zero point, with offsets.  Activations are rounded as ggml rounds
them next to the type: codes of 8 bits with a scale for 32 (Q8_0) or 256 elements (Q8_K).  Every element of a result is
summed in the order of k: results depend neither on threads nor on the number of columns.
"""
import functools

import numpy as np
from llvmlite import ir

from ggjit.ops.core.record import OK
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.traits import module_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul import choices, mul_mat_tile
from ggjit.ops.matmul.repack_formats import FORMATS, LANES, Rows
from ggjit.ops.matmul.tile_codes import code_tile
from ggjit.ops.matmul.tile_float import float_tile
from ggjit.ops.native import isa
from ggjit.ops.native.jit import exact, inline, ir_function, native
from ggjit.ops.native.lanes import (
    dpbusd_ir,
    fold_ir,
    for_ir,
    i64,
    int_to_float_ir,
    madd_ir,
    maddubs_ir,
    prefetch_ir,
    splat_const,
    transpose_ir,
    zero,
)
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64, call_intrinsic, ld_i8, ld_i16, ld_i32, st_i8, st_i16, st_i32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, barrier, chunk_rows, nb, ne, next_rows, next_rows2, work
from ggjit.ops.native.simd import after_ir, fma_ir, load_ir, opaque_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared import blocks_super, quant32
from ggjit.ops.types.shared.dot import OWN

ROWS = LANES
FALSE = ir.Constant(ir.IntType(1), 0)
AHEAD_NBYTES = 6144                 # between a prefetch and its use, of all groups, up to whole blocks
LOCALITY = {OWN: 2, "near": 3}      # the cache it goes into
CHUNK_NBYTES = 64 << 10             # of weights, where there are enough: [576 x 1536] Q4_0, two threads, 1.1 x (Zen 5)
MAX_COLUMNS = 4                     # of AVX2


# ---------------------------------------------------------------- the layout
@exact
def _copy(to, here, width, flip):
    if width == 4:
        st_i32(to, ld_i32(here) ^ flip)
    elif width == 2:
        st_i16(to, ld_i16(here))
    else:
        st_i8(to, ld_i8(here))


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def move_rows(file, repacked, n_blocks, m, block_nbytes, runs, n_runs, flip, into):
    """Blocks of m rows in the file's order -> interleaved, or back (into 0).  runs: (width, offset, count) as int64."""
    for row in range(m):
        group, lane = repacked + row // ROWS * (n_blocks * block_nbytes * ROWS), row % ROWS
        for i in range(n_blocks):
            here, run = file + (row * n_blocks + i) * block_nbytes, group + i * block_nbytes * ROWS
            for r in range(n_runs):
                width, offs, count = ld_i32(runs + 12 * r), ld_i32(runs + 12 * r + 4), ld_i32(runs + 12 * r + 8)
                x = flip if width == 4 else 0
                for c in range(count):
                    field, slot = here + offs + width * c, run + width * (ROWS * c + lane)
                    if into:
                        _copy(slot, field, width, x)
                    else:
                        _copy(field, slot, width, x)
                run += width * ROWS * count
    return 0


@functools.cache
def _runs(type):
    return np.array(FORMATS[type].runs, np.int32)


def _flip(format):
    """The xor of a word, as int32."""
    return int.from_bytes(bytes([format.flip] * 4), "little", signed=True)


def _move(type, file, repacked, k, m, into):
    runs = _runs(type)
    move_rows(file, repacked, k // type.block, m, type.nbytes, runs, len(runs), _flip(FORMATS[type]), into)


def pack_rows(type, file, repacked, k, m):
    """m rows of the file's blocks (m a multiple of ROWS) -> the layout."""
    _move(type, file, repacked, k, m, 1)


def unpack_rows(type, file, repacked, k, m):
    """The layout -> m rows of the file's blocks."""
    _move(type, file, repacked, k, m, 0)


# ---------------------------------------------------------------- activations
class _Columns:
    """Where the fields of a prepared block lie."""

    def __init__(self, format):
        self.zero_sums = format.type.block
        self.sums = self.zero_sums + 4 * format.n_parts * bool(format.zero_point)
        self.scale = self.sums + 4 * format.n_parts * (format.offset_ir is not None)
        self.nbytes = self.scale + 4


def column_nbytes(format):
    """Of a prepared block of one column."""
    return _Columns(format).nbytes


def make_prepare(format):
    """jitted prepare(src, dst, k, step): a float32 row as blocks that lie `step` bytes apart."""
    at, elements = _Columns(format), format.type.block
    per_part, super_block = elements // format.n_parts, elements == blocks_super.QK

    @ir_function
    def block(b, src, dst):
        groups, d = blocks_super.activations_ir(b, src) if super_block else quant32.activation_ir(b, src)
        groups = groups if super_block else [groups]
        for g, q in enumerate(groups):
            store_ir(b, b.trunc(q, vec_ir("i8", 32)), b.add(dst, i64(32 * g)))
            for h in range(32 // per_part):
                part = 32 // per_part * g + h
                some = shuffle_ir(b, q, q, range(per_part * h, per_part * (h + 1)))
                total = fold_ir(b, some, b.add)
                if format.zero_point:
                    store_ir(b, b.mul(total, IR_I32(-format.zero_point)), b.add(dst, i64(at.zero_sums + 4 * part)))
                if format.offset_ir is not None:
                    store_ir(b, b.fmul(b.sitofp(total, IR_F32), d), b.add(dst, i64(at.sums + 4 * part)))
        store_ir(b, d, b.add(dst, i64(at.scale)))

    @exact
    def prepare(src, dst, k, step):
        for i in range(k // elements):
            block(src + 4 * elements * i, dst + step * i)
    return prepare


# ---------------------------------------------------------------- the register tile
def _sum_fours_ir(b, sums, weights, four, signed):
    """sums + products of four codes a lane and four activations, the same four for all lanes."""
    four = b.bitcast(splat_ir(b, four, LANES), vec_ir("i8", 4 * LANES))
    if isa.ISA == "avx512":
        return dpbusd_ir(b, sums, weights, four)
    if signed:
        four = call_intrinsic(b, "llvm.x86.avx2.psign.b", four.type, [four, weights])
        weights = call_intrinsic(b, "llvm.abs.v32i8", weights.type, [weights, FALSE])
    return b.add(sums, madd_ir(b, maddubs_ir(b, weights, four), splat_const("i16", 1, 16)))


def make_tile(format, n_columns, n_groups=1, prefetch=OWN, in_turn=False):
    """intrinsic tile(w, y, n_blocks, dst, dst_stride): n_groups L rows x n_columns dot products.

    Each group is a stream of memory of its own.  prefetch: one of LOCALITY.  in_turn: one column of a part after the
    other, its activations from one or two cache lines, all codes in registers; else each vector of codes times all
    columns.
    """
    at, n_fours, n_parts = _Columns(format), format.n_fours, format.n_parts
    floats, one_scale, hide = vec_ir("f32", LANES), format.n_parts == 1, format.n_parts > 1 and n_columns > 2
    columns = range(n_columns)
    together = [[j] for j in columns] if in_turn else [columns]
    nbytes = format.type.nbytes * LANES
    first_ahead = -(-AHEAD_NBYTES // (n_groups * nbytes)) * nbytes
    ahead = range(first_ahead, first_ahead + nbytes, 64)

    @ir_function
    def tile(b, w, y, n_blocks, dst, dst_stride):
        def load(q, j, offs, irty):
            return load_ir(b, b.add(q, i64(at.nbytes * j + offs)), irty)

        def add_part(p, q, acc, part):
            # parts share words: seen as one address they would be kept in registers that the sums need
            rows = Rows(b, format, p, opaque_ir(b, p) if hide else p)
            fours, d, offset = format.fours_ir(b, rows, part), None, None
            for some in together:
                if one_scale and some[0]:               # LLVM would mix the columns, and spill
                    q = after_ir(b, q, acc[some[0] - 1])
                sums = {j: splat_ir(b, load(q, j, at.zero_sums + 4 * part, IR_I32), LANES) if format.zero_point
                        else zero("i32", LANES) for j in some}
                for f, codes in enumerate(fours):
                    for j in some:
                        four = load(q, j, 4 * (n_fours * part + f), IR_I32)
                        sums[j] = _sum_fours_ir(b, sums[j], codes, four, format.signed)
                if d is None:
                    d = format.scale_ir(b, rows, part)
                    offset = b.fneg(format.offset_ir(b, rows, part)) if format.offset_ir else None
                for j in some:
                    x, dy = int_to_float_ir(b, sums[j]), splat_ir(b, load(q, j, at.scale, IR_F32), LANES)
                    acc[j] = fma_ir(b, b.fmul(d, dy), x, acc[j]) if one_scale else fma_ir(b, b.fmul(d, x), dy, acc[j])
                    if offset is not None:
                        sum_y = splat_ir(b, load(q, j, at.sums + 4 * part, IR_F32), LANES)
                        acc[j] = fma_ir(b, offset, sum_y, acc[j])

        def body(b, state):
            p, q, *acc = state
            for g in range(n_groups):
                here = b.add(p, far[g]) if g else p
                own = acc[g * n_columns:(g + 1) * n_columns]
                for part in range(n_parts):
                    # a few at a time and in order: bursts fill the load queue
                    for offs in ahead[len(ahead) * part // n_parts:len(ahead) * (part + 1) // n_parts]:
                        prefetch_ir(b, b.add(here, i64(offs)), LOCALITY[prefetch])
                    add_part(here, q, own, part)
                acc[g * n_columns:(g + 1) * n_columns] = own
            return [b.add(p, i64(nbytes)), b.add(q, i64(at.nbytes * n_columns)), *acc]
        far = [b.mul(n_blocks, i64(g * nbytes)) for g in range(n_groups)]
        zeros = [(floats, splat_const("f32", 0.0, LANES))] * (n_columns * n_groups)
        sums = for_ir(b, n_blocks, [(IR_I64, x) for x in (w, y)] + zeros, body)[2:]
        for i, v in enumerate(sums):
            g, j = divmod(i, n_columns)
            store_ir(b, v, b.add(dst, b.add(b.mul(dst_stride, i64(j)), i64(4 * LANES * g))))
    return tile


# ---------------------------------------------------------------- rows as they are in a file
def make_rows_of(format):
    """jitted (a, k, first, rows, dst): the file's rows `first` ... of the interleaved matrix at a."""
    nbytes, elements = format.type.nbytes, format.type.block

    @ir_function
    def rows_of_block(b, block, dst, row_nbytes):                   # words are transposed L x L at a time
        to = [b.add(dst, b.mul(row_nbytes, i64(r))) for r in range(LANES)]
        for (width, offs, count), start in zip(format.runs, format.starts, strict=True):
            for first in range(0, count, LANES):
                n = min(LANES, count - first)
                fields = [load_ir(b, b.add(block, i64(start + width * LANES * (first + f))),
                                  vec_ir(f"i{8 * width}", LANES)) for f in range(n)]
                if format.flip and width == 4:
                    fields = [b.xor(x, splat_const("i32", _flip(format), LANES)) for x in fields]
                lines = transpose_ir(b, fields + [zero(f"i{8 * width}", LANES)] * (LANES - n))
                for r, line in enumerate(lines):
                    store_ir(b, shuffle_ir(b, line, line, range(n)), b.add(to[r], i64(offs + width * first)))

    @inline
    def rows_of(a, k, first, rows, dst):
        n_blocks = k // elements
        row_nbytes = n_blocks * nbytes
        for r in range(0, rows, ROWS):
            for i in range(n_blocks):
                rows_of_block(a + (first + r) * row_nbytes + i * ROWS * nbytes, dst + r * row_nbytes + i * nbytes,
                              row_nbytes)
    return rows_of


# ---------------------------------------------------------------- kernel
def _panel_nbytes(format, k, n_columns):
    """The prepared columns of a tile, whole cache lines."""
    return (k // format.type.block * column_nbytes(format) * n_columns + 63) // 64 * 64


def _make(type, n_columns, n_groups, prefetch, in_turn):
    format, nbytes, block = FORMATS[type], type.nbytes, type.block
    tile, prepare = make_tile(format, n_columns, n_groups, prefetch, in_turn), make_prepare(format)
    y_nbytes = column_nbytes(format)

    @inline
    def first_column(i, n):
        """Of tile i; the last tile overlaps the one before: the same numbers, stored twice."""
        return min(i * n_columns, n - n_columns)

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n, panels = ne(a, 0), ne(a, 1), ne(b, 1), work(node)
        panel, tiles = (k // block * y_nbytes * n_columns + 63) // 64 * 64, (n + n_columns - 1) // n_columns
        while True:
            i = next_rows(node, ith, nth, sync, 1, tiles * n_columns)
            if i >= tiles * n_columns:
                break
            t, j = i // n_columns, i % n_columns
            prepare(addr(b) + (first_column(t, n) + j) * nb(b, 1), panels + t * panel + j * y_nbytes, k,
                    n_columns * y_nbytes)
        barrier(sync, nth)
        groups, group_nbytes = m // ROWS, ROWS * (k // block) * nbytes
        chunk = max(chunk_rows(groups, nth), min(CHUNK_NBYTES // group_nbytes, groups // (2 * nth)))
        chunk = (chunk + n_groups - 1) // n_groups * n_groups
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, groups)
            if start >= groups:
                return OK
            for t in range(tiles):              # columns stay in the first-level cache, groups in the second
                c = addr(d) + first_column(t, n) * nb(d, 1)
                for first in range(start, min(groups, start + chunk), n_groups):
                    g = min(first, groups - n_groups)           # the last tile overlaps the one before, as above
                    tile(addr(a) + g * group_nbytes, panels + t * panel, k // block, c + 4 * ROWS * g, nb(d, 1))
    return kernel


def _tile_product(a, b, format, n_threads):
    """Many columns of super-blocks: their integer tile wins; strips of rows are brought into the file's order."""
    tile, k, n = code_tile(a.type, b.ne[1]) or float_tile(a.type, b.ne[1]), a.ne[0], b.ne[1]
    own_nbytes = mul_mat_tile.private_nbytes(tile) + mul_mat_tile.MB * a.type.row_nbytes(k)
    return Kernel(f"mul_mat-repacked-tile-{a.type.name}-{tile.columns}x{tile.kc}" + _tail_name(tile),
                  lambda: mul_mat_tile.make_kernel(a.type, F32, tile, tile.rounds, False, make_rows_of(format)),
                  2 * k * a.ne[1] * n / 400 + a.nbytes / 20,
                  mul_mat_tile.panels_nbytes(tile, k, n) + n_threads * own_nbytes, (__name__, module_of(a.type)))


def _tail_name(tile):
    return f"-spread{tile.tail.spread}" + "-only" * tile.tail.only if tile.tail else ""


def groups_of(type, n_columns, m):
    """(groups of rows that a tile takes at once, how it prefetches).

    One column may read several streams of memory faster than one (choices.py).  Intel Xeon, [2048 x 2048] from memory,
    one thread, us with 1 / 4 groups: Q4_0 221 / 176, Q8_0 374 / 316, Q4_K 253 / 234, Q5_K 344 / 300.  With two columns
    only Q8_0 gains.
    """
    groups, prefetch = choices.layout_tile(type)
    return (groups if n_columns == 1 and m // ROWS >= groups else 1), prefetch


def direct(format, n_columns):
    """Do products of so many columns use the layout's tile?"""
    return format.n_parts == 1 or n_columns <= (choices.RULE or choices.INTEL).direct


def widest(format):
    """(columns of the widest tile, whether they are multiplied in turn)."""
    rule = choices.RULE or choices.INTEL
    return (rule.columns[format.n_parts > 1], rule.in_turn) if isa.ISA == "avx512" else (MAX_COLUMNS, False)


def product(a, b, n_threads):
    """The Kernel of repacked weights a times float32 columns b."""
    k, m, n, format = a.ne[0], a.ne[1], b.ne[1], FORMATS[a.type]
    if not direct(format, n):
        return _tile_product(a, b, format, n_threads)
    most, in_turn = widest(format)
    columns = -(-n // -(-n // most))                         # 13 columns are 7 + 7, not 12 + 12
    cost = 2 * k * m * n / 300 + a.type.row_nbytes(k) * m / 20
    n_groups, prefetch = groups_of(a.type, columns, m)
    name = f"mul_mat-repacked-{a.type.name}-{columns}" + f"x{n_groups}" * (n_groups > 1)
    name += f"-{prefetch}" * (prefetch != OWN) + "-in_turn" * in_turn
    return Kernel(name, lambda: _make(a.type, columns, n_groups, prefetch, in_turn), cost,
                  -(-n // columns) * _panel_nbytes(format, k, columns), (__name__, module_of(a.type)))
