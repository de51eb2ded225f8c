"""Products with quantised weights whose rows are interleaved (ops/matmul/interleaved.py has the layout).

A product needs no sums over lanes and no packing of weights: the scales of all rows are one load and one conversion,
activations are broadcast from memory (lane_tile.py has the tile).  Few columns are one tile of L rows.  More columns
are tiles of a few columns times two groups of L rows where that is a processor's rule (choices.py), else tiles like the
first: then super-blocks are unpacked to bytes, a chunk of rows at a time, once for all columns.

    panels of activations    column by column of a tile, block by block: tile 0 | tile 1 ...; a tile starts at a cache
                             line and is one thread's, so no line is written by two
    loops                    a chunk of rows (second-level cache), tiles of columns (first-level cache), groups of rows
    threads                  take chunks of rows; where that moves fewer bytes, chunks of rows times their own columns

Measured in benchmarks/repack.py.  AVX-512 with VNNI, and AVX2; k a multiple of the type's block, rows a multiple of L.
Activations are rounded as ggml rounds them next to the type: codes of 8 bits with a scale for 32 (Q8_0) or 256 elements
(Q8_K).  Every element of a result is summed in the order of k: results depend neither on threads nor on the number of
columns, but where the integer tile takes over (`_shape`), whose order is its own.
"""
import functools
import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from ggjit.ops.core.record import OK, WORD
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.traits import module_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul import choices, mul_mat_tile
from ggjit.ops.matmul.interleaved import FORMATS, LANES, unpacked
from ggjit.ops.matmul.one_column import ColumnParts, OneColumn
from ggjit.ops.matmul.repack.lane_tile import column_nbytes, make_prepare, make_tile, make_unpack
from ggjit.ops.matmul.tile_kinds import tile_of
from ggjit.ops.native import isa
from ggjit.ops.native.jit import exact, inline, ir_function, native
from ggjit.ops.native.lanes import i64, splat_const, transpose_ir, zero
from ggjit.ops.native.mem import ld_i8, ld_i16, ld_i32, st_i8, st_i16, st_i32
from ggjit.ops.native.node import (
    CHUNK,
    DST,
    SRC0,
    SRC1,
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
from ggjit.ops.native.row_affinity import BITS, CHUNKS, affinity_next_but_last, set_bit, wait_for_bit
from ggjit.ops.native.simd import load_ir, shuffle_ir, store_ir, vec_ir
from ggjit.ops.types.shared.dot import OWN

ROWS = LANES
CHUNK_NBYTES = 64 << 10             # of weights, where there are enough: less is read as several short streams
UNPACKED_NBYTES = 384 << 10         # of unpacked weights a thread keeps in the second-level cache
HIDING_COLUMNS = 32                 # columns that take longer to multiply than their weights to read
MAX_COLUMNS = 4                     # columns of a tile with AVX2
# Tiles of columns from which on blocks of 32 are unpacked once for all; AVX-512 unpacks them in each
UNPACKED_TILES = 4 if isa.ISA == "neon" else math.inf


# ---------------------------------------------------------------- the layout
@exact
def _copy(to, here, width, flip):
    if width == 4:
        st_i32(to, ld_i32(here) ^ flip)
    elif width == 2:
        st_i16(to, ld_i16(here))
    else:
        st_i8(to, ld_i8(here))


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def move_rows(file, repacked, n_blocks, m, block_nbytes, runs, n_runs, into):
    """Blocks of m rows in the file's order -> interleaved, or back (into 0).  runs: (width, offset, count, xor of a
    word) as int32."""
    for row in range(m):
        group, lane = repacked + row // ROWS * (n_blocks * block_nbytes * ROWS), row % ROWS
        for i in range(n_blocks):
            here, run = file + (row * n_blocks + i) * block_nbytes, group + i * block_nbytes * ROWS
            for r in range(n_runs):
                width, offs, count, flip = (ld_i32(runs + 16 * r), ld_i32(runs + 16 * r + 4), ld_i32(runs + 16 * r + 8),
                                            ld_i32(runs + 16 * r + 12))
                for c in range(count):
                    field, slot = here + offs + width * c, run + width * (ROWS * c + lane)
                    if into:
                        _copy(slot, field, width, flip)
                    else:
                        _copy(field, slot, width, flip)
                run += width * ROWS * count
    return 0


@functools.cache
def _runs(type):
    return np.array([(*run[:3], _flip(run)) for run in FORMATS[type].runs], np.int32)


def _flip(run):
    """The xor of its words, as int32."""
    return int.from_bytes(bytes([*run, 0][3:4] * 4), "little", signed=True)


def _move(type, file, repacked, k, m, into):
    runs = _runs(type)
    move_rows(file, repacked, k // type.block, m, type.nbytes, runs, len(runs), into)


def pack_rows(type, file, repacked, k, m):
    """m rows of the file's blocks (m a multiple of ROWS) -> the layout."""
    _move(type, file, repacked, k, m, 1)


def unpack_rows(type, file, repacked, k, m):
    """The layout -> m rows of the file's blocks."""
    _move(type, file, repacked, k, m, 0)


# ---------------------------------------------------------------- rows as they are in a file
def make_rows_of(format):
    """jitted (a, k, first, rows, dst): the file's rows `first` ... of the interleaved matrix at a."""
    nbytes, elements = format.type.nbytes, format.type.block

    @ir_function
    def rows_of_block(b, block, dst, row_nbytes):                   # words are transposed L x L at a time
        to = [b.add(dst, b.mul(row_nbytes, i64(r))) for r in range(LANES)]
        for run, start in zip(format.runs, format.starts, strict=True):
            width, offs, count = run[:3]
            for first in range(0, count, LANES):
                n = min(LANES, count - first)
                fields = [load_ir(b, b.add(block, i64(start + width * LANES * (first + f))),
                                  vec_ir(f"i{8 * width}", LANES)) for f in range(n)]
                if _flip(run):
                    fields = [b.xor(x, splat_const("i32", _flip(run), LANES)) for x in fields]
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


def make_row_of(type):
    """jitted (a, k, m, row, dst): one row of the file, of the interleaved [k, m] matrix at a."""
    format, elements, nbytes = FORMATS[type], type.block, type.nbytes

    @ir_function
    def lane_of_block(b, block, lane, dst):
        for run, start in zip(format.runs, format.starts, strict=True):
            width, offs, count = run[:3]
            field = ir.IntType(8 * width)
            own = b.add(b.add(block, i64(start)), b.mul(lane, i64(width)))
            for c in range(count):
                x = load_ir(b, b.add(own, i64(width * LANES * c)), field, 1)
                store_ir(b, b.xor(x, ir.Constant(field, _flip(run))), b.add(dst, i64(offs + width * c)), 1)

    @inline
    def row_of(a, k, m, row, dst):
        n_blocks = k // elements
        group, lane = a + row // ROWS * (n_blocks * nbytes * ROWS), row % ROWS
        for i in range(n_blocks):
            lane_of_block(group + i * ROWS * nbytes, lane, dst + i * nbytes)
    return row_of


# ---------------------------------------------------------------- kernel
class _Shape(NamedTuple):
    """Sizes of a product's tiles.  narrower: some tiles have one column less; unpacks: codes are unpacked once for all
    columns."""
    n_columns: int
    narrower: bool
    n_groups: int
    prefetch: str
    in_turn: bool = False
    unpacks: bool = False
    n_lines: int = 0

    def __str__(self):
        return (f"{self.n_columns}" + "-narrower" * self.narrower + f"x{self.n_groups}" * (self.n_groups > 1)
                + f"-{self.prefetch}" * (self.prefetch != OWN) + "-in_turn" * self.in_turn + "-unpacks" * self.unpacks
                + f"-prefetch{self.n_lines}" * (self.n_lines > 0))


@inline
def cut_by_columns(m, n, column_nbytes, weights_nbytes, nth):
    """Does less time go into moving bytes where each thread has n / nth columns than where it has m / nth rows?

    By rows, every thread reads the columns that others prepared, and what reads the results row by row finds
    (nth - 1) / nth of them with other threads; by columns, every thread reads all weights.  Weights count half where a
    thread multiplies them by so many columns that the next ones arrive meanwhile.
    """
    moved, read = n * (nth * column_nbytes + 4 * m), nth * weights_nbytes
    return nth <= BITS and (moved > read or n >= HIDING_COLUMNS * nth and 2 * moved > read)


@inline
def _chunk_of_groups(groups, group_nbytes, n_groups, nth):
    """Groups that a thread takes at once: whole tiles of n_groups, whole cache lines of results."""
    chunk = max(chunk_rows(groups, nth), min(CHUNK_NBYTES // group_nbytes, groups // (2 * nth)))
    chunk = (chunk + n_groups - 1) // n_groups * n_groups
    return chunk_of_lines(chunk, 4 * ROWS, groups, nth)


@inline
def even_chunks(units, most, nth):
    """Chunks of at most so many of the units, as many for each thread where there are enough."""
    chunks = (units + most - 1) // most
    return min((chunks + nth - 1) // nth * nth, units)


@inline
def even_start(units, i, chunks):
    """The first unit of chunk i: chunks of one length, of which the first ones have a unit more."""
    return units // chunks * i + min(i, units % chunks)


def _make(type, shape):
    n_columns, narrower, n_groups, prefetch, in_turn, unpacks, n_lines = shape
    format, block = FORMATS[type], type.block
    seen, unpack = unpacked(format) if unpacks else format, make_unpack(format)
    prepare, y_nbytes = make_prepare(seen), column_nbytes(seen)
    nbytes, seen_nbytes, n_parts = format.nbytes, seen.nbytes, format.n_parts
    wide = make_tile(seen, n_columns, n_groups, prefetch, in_turn, n_lines)
    narrow = make_tile(seen, n_columns - 1, n_groups, prefetch, in_turn, n_lines) if narrower else wide
    may_cut = n_columns > 1 and n_lines < 2 and not unpacks     # unpacked rows are a thread's own

    @inline
    def multiply(n, w, y, n_blocks, dst, dst_stride, next_w):
        if n == n_columns or not narrower:
            wide(w, y, n_blocks, dst, dst_stride, next_w)
        else:
            narrow(w, y, n_blocks, dst, dst_stride, next_w)

    @inline
    def chunk_of(groups, n_blocks, nth):
        """Groups that a thread takes at once."""
        if n_lines > 1:                         # few tiles: chunks are short, and the next one is prefetched meanwhile
            return n_groups
        if n_lines or unpacks:                  # a chunk may not have more unpacked rows than fit the scratch memory
            chunk = min((groups + 2 * nth - 1) // (2 * nth), UNPACKED_NBYTES // (n_blocks * seen_nbytes))
            return max(1, chunk // n_groups) * n_groups
        return _chunk_of_groups(groups, n_blocks * nbytes, n_groups, nth)

    @inline
    def multiply_chunk(node, weights, start, end, t0, t1, tiles, panels, column, far):
        """Groups start ... end - 1 of rows against tiles t0 ... t1 - 1 of columns; the thread's next groups are `far`
        groups on."""
        a, n, d = node + SRC0, ne(node + SRC1, 1), node + DST
        n_blocks, groups = ne(a, 0) // block, ne(a, 1) // ROWS
        for t in range(t0, t1):                 # columns stay in the first-level cache, groups in the second
            j = n * t // tiles
            c = addr(d) + j * nb(d, 1)
            for first in range(start, end, n_groups):
                g = min(first, groups - n_groups)               # the last tile may overlap: the same numbers, twice
                w = weights + g * n_blocks * seen_nbytes
                ahead = n_blocks * ((t - t0) * n_lines * n_parts * 64)      # within the same rows of the next chunk
                next_w = addr(a) + (g + far) * n_blocks * nbytes + ahead
                multiply(n * (t + 1) // tiles - j, w, panels + j * column, n_blocks, c + 4 * ROWS * g, nb(d, 1),
                         next_w if ahead < n_groups * n_blocks * nbytes else w)

    @inline
    def part_length(groups, nth):
        """Groups of a part of the rows, where threads take parts of the rows times their own columns."""
        parts = min(CHUNKS, BITS // nth)
        return ((groups + parts - 1) // parts + n_groups - 1) // n_groups * n_groups

    def kernel(node, ith, nth, sync):
        a, b = node + SRC0, node + SRC1
        k, m, n, panels = ne(a, 0), ne(a, 1), ne(b, 1), work(node)
        tiles, n_blocks, groups = (n + n_columns - 1) // n_columns, k // block, m // ROWS
        column = whole_lines(n_blocks * y_nbytes)
        by_columns = may_cut and nth > 1 and cut_by_columns(m, n, column, groups * n_blocks * nbytes, nth)
        if n_columns == 1 and n == 1:           # each thread prepares its own column: no thread waits for another
            panels += ith * column
            prepare(addr(b), k, panels, 0, 1)
        else:
            own_first, own_end = own_share(tiles, ith, nth)
            for t in range(own_first, own_end):
                first, after = n * t // tiles, n * (t + 1) // tiles
                for j in range(first, after):
                    prepare(addr(b) + j * nb(b, 1), k, panels + first * column, j - first, after - first)
            if by_columns:                      # who helps another thread waits for that thread's columns
                set_bit(node + CHUNK, ith)
            else:
                barrier(sync, nth)
        chunk, whole = chunk_of(groups, n_blocks, nth), groups // n_groups * n_groups
        unit = n_groups if n_lines or unpacks else chunk_of_lines(n_groups, 4 * ROWS, groups, nth)
        own = panels + n * column + ith * whole_lines((chunk + n_groups - 1) * n_blocks * seen_nbytes)
        length = max(part_length(groups, nth), chunk) if by_columns else chunk
        parts = (whole + length - 1) // length
        units = (whole + unit - 1) // unit
        chunks = even_chunks(units, chunk // unit, nth)
        while True:
            if by_columns:                      # a thread begins with its own columns: their tokens stay with it
                item = affinity_next_but_last(node + WORD, ith, nth, sync, 1, nth * parts)
                if item >= nth * parts:
                    return OK
                whose = item // parts
                if whose != ith:
                    wait_for_bit(node + CHUNK, whose, sync)
                first_tile, end_tile = own_share(tiles, whose, nth)
                start = item % parts * length
                end, after, step = start + length, start + length, min(chunk, length)
            else:
                item, first_tile, end_tile = next_rows2(node, ith, nth, sync, 1, chunks), 0, tiles
                if item >= chunks:
                    return OK
                start, end = unit * even_start(units, item, chunks), unit * even_start(units, item + 1, chunks)
                after, step = unit * even_start(units, item + nth, chunks), end - start
            weights = addr(a)
            if end >= whole:
                end = groups
            if unpacks:
                for g in range(start, end):
                    unpack(weights + g * n_blocks * nbytes, n_blocks, own + (g - start) * n_blocks * seen_nbytes)
                weights = own - start * n_blocks * seen_nbytes
            for g in range(start, end, step):
                far = step if g + step < end else after - g
                multiply_chunk(node, weights, g, min(end, g + step), first_tile, end_tile, tiles, panels, column, far)
    return kernel


def _one_column(a, shape, label):
    """The OneColumn of repacked weights; None where the last tile would overlap the one before it."""
    format, run = FORMATS[a.type], 4 * ROWS
    if shape.unpacks or shape.n_lines or run % (shape.n_groups * ROWS) or a.ne[1] % (shape.n_groups * ROWS):
        return None
    panel = whole_lines.py_func(a.ne[0] // a.type.block * column_nbytes(format))
    return OneColumn(label, run, panel, lambda: _parts(a.type, shape))


def _parts(type, shape):
    format, block, n_groups = FORMATS[type], type.block, shape.n_groups
    prepare_in, nbytes = make_prepare(format), format.nbytes
    tile = make_tile(format, 1, n_groups, shape.prefetch, shape.in_turn)

    @inline
    def prepare(src, panel, k):
        prepare_in(src, k, panel, 0, 1)

    @inline
    def rows(a, k, y, start, stop, out):
        n_blocks = k // block
        group_nbytes = n_blocks * nbytes
        for r in range(start, stop, n_groups * ROWS):
            w = addr(a) + r // ROWS * group_nbytes
            tile(w, y, n_blocks, out + 4 * (r - start), 0, w)

    @inline
    def chunk(a, nth, n):
        return _chunk_of_groups(ne(a, 1) // ROWS, n * (ne(a, 0) // block) * nbytes, n_groups, nth) * ROWS
    return ColumnParts(prepare, rows, chunk)


def _tile_product(a, b, format, n_threads):
    """Many columns, of super-blocks or with AMX: the integer tile wins; strips of rows are brought into the file's
    order."""
    tile, k, n = tile_of(a.type, b.ne[1]), a.ne[0], b.ne[1]
    own_nbytes = mul_mat_tile.private_nbytes(tile) + mul_mat_tile.MB * a.type.row_nbytes(k)
    return Kernel(f"mul_mat-repacked-tile-{a.type.name}-{tile.columns}x{tile.kc}{tile.name}" + _tail_name(tile),
                  lambda: mul_mat_tile.make_kernel(a.type, F32, tile, tile.rounds, False, make_rows_of(format)),
                  2 * k * a.ne[1] * n / 400 + a.nbytes / 20,
                  mul_mat_tile.panels_nbytes(tile, k, n) + n_threads * own_nbytes, (__name__, module_of(a.type)))


def _tail_name(tile):
    return f"-spread{tile.tail.spread}" + "-only" * tile.tail.only if tile.tail else ""


def groups_of(type, n_columns, m):
    """(groups of rows that a tile takes at once, how it prefetches).

    One column may read several streams of memory faster than one (choices.py, docs/measured.md).  With two columns only
    Q8_0 gains.
    """
    groups, prefetch = choices.layout_tile(type)
    return (groups if n_columns == 1 and m // ROWS >= groups else 1), prefetch


def direct(format, n_columns):
    """Do products of so many columns use the layout's tile?"""
    most = (choices.RULE or choices.UNKNOWN).direct
    return format.n_parts == 1 or n_columns <= most or choices.are_apart()


def widest(format):
    """(columns of the widest tile, whether they are multiplied in turn)."""
    rule = choices.RULE or choices.UNKNOWN
    return (rule.columns[format.n_parts > 1], rule.in_turn) if isa.ISA == "avx512" else (MAX_COLUMNS, False)


def columns_of_pairs(m):
    """Columns of a tile over two groups of rows; None where the processor has no such tile or there are too few
    rows."""
    return (choices.RULE or choices.UNKNOWN).pairs if isa.ISA in ("avx512", "neon") and m >= 2 * ROWS else None


def _shape(type, m, n):
    """The _Shape of n columns; None where these tiles are not the fastest."""
    format, (width, in_turn) = FORMATS[type], widest(FORMATS[type])
    narrow = (choices.RULE or choices.UNKNOWN).narrow if isa.ISA == "avx512" else {}
    width, most = narrow.get(type, (width, width))
    pairs = columns_of_pairs(m) if n > most else None
    if choices.by_amx(type, n) or not (pairs or direct(format, n)):
        return None
    tiles = max(1, -(-n // (pairs or width)))
    n_columns, narrower = max(1, -(-n // tiles)), n % tiles > 0         # 13 columns are 5 + 4 + 4, not 6 + 6 + 1
    n_groups, prefetch = groups_of(type, n_columns, m)
    if pairs:
        lines = 2 * format.nbytes // (64 * format.n_parts)
        n_lines = -(-lines // 3) if tiles < 5 else -(-lines // 5) if tiles < 9 else 1
        unpacks = format.n_parts > 1 or tiles >= UNPACKED_TILES and format.packed
        return _Shape(n_columns, narrower, 2, prefetch, unpacks=unpacks, n_lines=n_lines)
    return _Shape(n_columns, narrower, n_groups, prefetch, in_turn)


def product(a, b, n_threads):
    """The Kernel of repacked weights a times float32 columns b."""
    k, m, n, format = a.ne[0], a.ne[1], b.ne[1], FORMATS[a.type]
    shape = _shape(a.type, m, n)
    if shape is None:
        return _tile_product(a, b, format, n_threads)
    cost = 2 * k * m * n / 300 + a.type.row_nbytes(k) * m / 20
    n_blocks, own_nbytes = k // a.type.block, 0
    if shape.unpacks:
        row_group = n_blocks * unpacked(format).nbytes
        own_nbytes = max(UNPACKED_NBYTES, shape.n_groups * row_group) + (shape.n_groups - 1) * row_group + 64
    name = f"mul_mat-repacked-{a.type.name}-{shape}"
    return Kernel(name, lambda: _make(a.type, shape), cost,
                  (n_threads if n == 1 else n) * whole_lines.py_func(n_blocks * column_nbytes(format))
                  + n_threads * own_nbytes,
                  (__name__, module_of(a.type)), column=_one_column(a, shape, name) if n == 1 else None)
