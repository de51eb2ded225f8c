"""Quantising to the points of a grid: which points lie near a group of codes, and which of them loses least.

A group of values (8 of IQ1 and IQ2, 4 of IQ3) is first rounded coordinate by coordinate; the codes found make a word.
Where the grid lacks that point its neighbours are tried: the points at the few smallest distances.

    word    the code of coordinate i in bits (bits i) ... (bits i + bits - 1)
    table   int32 [1 << bits size]  number of the point, or -1 - (first run << 8 | runs) where there is none
            uint16 [runs][16]       words of the neighbours, by distance, then by number; the last one fills its run

A table is made at its first use, once a process.  (ggml: iq2xs_init_impl, iq3xs_init_impl, iq2_find_best_neighbour.)
"""
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.native import simd
from ggjit.ops.native.jit import exact, i32s, i64s, native, u8s
from ggjit.ops.native.lanes import fold_ir, for_ir, i32, i64, min_ir, splat_const
from ggjit.ops.native.mem import IR_F32, IR_I64, ld_i32, ld_u16, st_i16
from ggjit.ops.native.simd import V, W
from ggjit.ops.types.shared.quant_search import make_stack

RUN = 16                                # neighbours a run: every vector width divides it
LANES = 32                              # points a step, where distances are measured; divides their number
MAX_POINTS, MAX_DISTANCE = 2048, 256    # distances are squared, in steps of a code: at most 8 x 2^2, 4 x 7^2
LARGEST = float(np.finfo(np.float32).max)


class Grid:
    """Points int8 [n][size]; the points at the `n_distances` smallest distances are neighbours."""

    def __init__(self, points, n_distances):
        levels, codes = np.unique(points, return_inverse=True)
        self.n, self.size = points.shape
        self.n_levels, self.bits = len(levels), (len(levels) - 1).bit_length()
        self.codes = np.ascontiguousarray(codes.reshape(points.shape).T, np.uint8)          # [size][n]
        self.n_distances = n_distances
        self.lists_offs = 4 << self.bits * self.size                                        # bytes, in the table

    @functools.cached_property
    def words(self):
        """The grid's points, each packed in one uint16."""
        return (self.codes.astype(np.uint16) << self.bits * np.arange(self.size)[:, None]).sum(0, dtype=np.uint16)

    @functools.cached_property
    def table(self):
        """uint8 array; jitted code takes its address."""
        shape = (self.codes, self.words, self.n, self.size, self.bits, self.n_levels, self.n_distances)
        n_runs = _fill(np.empty(self.lists_offs, np.uint8), 0, *shape)
        table = np.empty(self.lists_offs + 2 * RUN * n_runs, np.uint8)
        _fill(table, self.lists_offs, *shape)
        return table


@dataclasses.dataclass(frozen=True)
class GridQuantizer:
    """How a type whose codes name points of `grid` is written.

    quantise(src, dst, k, importances, table)   jitted: k float32 at src -> blocks at dst, byte-equal to ggml's
                                                ggml_quantize_chunk; importances: k float32, or 0 for none; table: the
                                                address of grid.table
    needs_importances                           ggml refuses to write the type without
    """
    grid: Grid
    quantise: Callable
    needs_importances: bool = False


# ---------------------------------------------------------------- the table
_stack = make_stack(MAX_POINTS + 8 * MAX_DISTANCE)


_widen = simd.make_ir(lambda t: V("i16", t.n), lambda b, x: b.zext(x, simd.vec_ir("i16", x.type.count)))
_narrow = simd.make_ir(lambda t: V("i8", t.n), lambda b, x: b.trunc(x, simd.vec_ir("i8", x.type.count)))
_load, _store, _zero, _splat = (simd.make_load("i8", LANES), simd.make_store("i8", LANES), simd.make_zero("i16", LANES),
                                simd.make_splat("i16", LANES, types.int16))


@exact
def _distances(word, codes, n, size, bits, to):
    """to[j]: squared distance of point j from the word, a byte."""
    for j in range(0, n, LANES):
        total = _zero()
        for i in range(size):
            code = _splat(types.int16(word >> bits * i & (1 << bits) - 1))
            step = simd.isub(code, _widen(_load(codes + i * n + j)))
            total = simd.iadd(total, simd.imul(step, step))
        _store(to + j, _narrow(total))


@exact
def _largest_code(word, size, bits):
    largest = 0
    for i in range(size):
        largest = max(largest, word >> bits * i & (1 << bits) - 1)
    return largest


@exact
def _places(distances, first, n_distances):
    """first[d]: how many points are nearer than d.  Returns how many are neighbours, and their largest distance."""
    first[:] = 0
    for d in distances:
        first[d] += 1
    count, limit, below = 0, 0, 0
    for d in range(MAX_DISTANCE):
        here = first[d]
        first[d] = below
        below += here
        if here > 0 and n_distances > 0:
            n_distances -= 1
            count, limit = below, d
    return count, limit


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def _fill(table, lists_offs, codes, words, n, size, bits, n_levels, n_distances):
    """Fill the table; returns how many runs the lists of neighbours take.  lists_offs = 0: only count, without writing
    the lists."""
    index, s = i32s(table, 1 << bits * size), _stack()
    distances, first = u8s(s, n), i64s(s + MAX_POINTS, MAX_DISTANCE)
    index[:] = -1
    for j in range(n):
        index[ld_u16(words + 2 * j)] = j
    n_runs = 0
    for word in range(1 << bits * size):
        if index[word] >= 0:
            continue
        # words with too large a code keep 0: they are never looked up
        index[word] = 0
        if _largest_code(word, size, bits) >= n_levels:
            continue
        _distances(word, codes, n, size, bits, s)
        count, limit = _places(distances, first, n_distances)
        more = (count + RUN - 1) // RUN
        index[word] = -1 - (n_runs << 8 | more)
        if lists_offs != 0:
            to, last = table + lists_offs + 2 * RUN * n_runs, 0
            for j in range(n):
                d = distances[j]
                if d <= limit:
                    st_i16(to + 2 * first[d], types.int16(ld_u16(words + 2 * j)))
                    first[d] += 1
            last = types.int16(ld_u16(to + 2 * (count - 1)))
            for j in range(count, RUN * more):
                st_i16(to + 2 * j, last)
        n_runs += more
    return n_runs


# ---------------------------------------------------------------- the nearest neighbour
def _losses_ir(b, words, size, bits, slope, offset, values, weights, scale):
    """sum_i w_i (scale q_i - x_i)^2 of W words, added in this order; q = slope code + offset."""
    total = ir.Constant(simd.vec_ir("f32", W), None)
    for i in range(size):
        code = b.lshr(words, splat_const("i32", bits * i, W)) if i else words
        code = b.and_(code, splat_const("i32", (1 << bits) - 1, W))
        q = b.sitofp(code, total.type)
        q = b.fadd(b.fmul(q, splat_const("f32", slope, W)), offset)
        e = b.fsub(b.fmul(scale, q), values[i])
        total = b.fadd(total, b.fmul(b.fmul(weights[i], e), e))
    return total


def make_nearest(grid, slope):
    """Intrinsic nearest(table, entry, x, w, scale, offset): word of the neighbour with the smallest loss, the first.

    entry: of the table, for a word without a point; x, w: addresses of `size` float32; scale, offset: float32.  A code
    means slope code + offset.  Where no loss is below the largest float32 (NaN, overflow) it is the first neighbour.
    """
    size, bits, v, vi = grid.size, grid.bits, simd.vec_ir("f32", W), simd.vec_ir("i32", W)

    def smallest_ir(b, loss, places):
        least = fold_ir(b, loss, lambda x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
        smallest = b.fcmp_ordered("==", loss, simd.splat_ir(b, least, W))
        places = b.select(smallest, places, splat_const("i32", 1 << 30, W))
        return fold_ir(b, places, lambda x, y: min_ir(b, x, y))

    @intrinsic
    def nearest(typingctx, table, entry, x, w, scale, offset):
        def codegen(context, b, sig, args):
            table, entry, x, w, scale, offset = args
            values, weights = ([simd.splat_ir(b, simd.load_ir(b, b.add(p, i64(4 * i)), IR_F32), W) for i in range(size)]
                               for p in (x, w))
            scale, offset = simd.splat_ir(b, scale, W), simd.splat_ir(b, offset, W)
            entry = b.sub(i64(-1), b.sext(entry, IR_I64))
            words = b.add(table, b.add(b.mul(b.lshr(entry, i64(8)), i64(2 * RUN)), i64(grid.lists_offs)))

            def step(b, state):
                places, best, best_places = state
                here = b.zext(simd.load_ir(b, b.add(words, b.mul(b.zext(b.extract_element(places, i32(0)), IR_I64),
                                                                 i64(2))), simd.vec_ir("i16", W)), vi)
                loss = _losses_ir(b, here, size, bits, slope, offset, values, weights, scale)
                closer = b.fcmp_ordered("<", loss, best)
                return [b.add(places, splat_const("i32", W, W)), b.select(closer, loss, best),
                        b.select(closer, places, best_places)]
            lanes = simd.const_ir("i32", range(W))
            n_steps = b.mul(b.and_(entry, i64(255)), i64(RUN // W))
            _, loss, places = for_ir(b, n_steps, [(vi, lanes), (v, splat_const("f32", LARGEST, W)), (vi, lanes)], step)
            place = b.zext(smallest_ir(b, loss, places), IR_I64)
            return b.zext(simd.load_ir(b, b.add(words, b.mul(place, i64(2))), simd.IR["i16"]), IR_I64)
        f32 = types.float32
        return types.int64(types.int64, types.int32, types.int64, types.int64, f32, f32), codegen
    return nearest


@exact
def entry_of(table, word):
    """>= 0: number of the point; else what `nearest` takes."""
    return ld_i32(table + 4 * word)
