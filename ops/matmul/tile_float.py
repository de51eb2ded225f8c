"""The float32 tile: serves every type through its to_float.

12 rows x 32 columns are 24 of the 32 AVX-512 registers, 6 x 16 are 12 of the 16 AVX registers; for each k that is two
loads and 12 (6) broadcast operands for 24 (12) FMAs.  Many columns take 8 rows x 48: 11 loads for the same 24 FMAs.
Both reach the peak of a core; beside a busy sibling thread the second is 9 % faster (Sapphire Rapids).  NEON has 16
sums of 8 rows x 8 columns or 18 of 6 x 12, beside them the rows: 16 or 18 loads for 64 or 72 FMAs.
"""
import functools

from numba import types

from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul.tile import LDC, NL, SPREAD_BELOW, Tail, Tile, finish_ir, repeat_ir, spread_of
from ggjit.ops.native import isa
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import i64, load_part_ir, min_ir, prefetch_ir, transpose_ir, zero
from ggjit.ops.native.mem import IR_I64, st_f32
from ggjit.ops.native.simd import B, W, counted_loop_ir, fma_ir, load_ir, opaque_ir, shuffle_ir, store_ir, vec_ir

ROWS, WIDE_ROWS = (8, 6) if isa.ISA == "neon" else (12 if W == 16 else 6, 8)
FLOAT_UNIT, FLOAT_KC = W, 384 if W == 16 else 256       # a unit of AVX-512 is a cache line of each row
NARROW_KC = 256                         # n = 16, two threads: 3 % faster than 384; n = 24, F16: 8 %
WIDE_KC = 256                          # n = 512, one thread: 192: 4 % slower, 3 % faster beside a busy sibling
LANE_OPERANDS = isa.ISA == "neon"       # an FMA takes a lane of a register: W elements of a row are one load
WIDE = SPREAD_BELOW                     # columns from which panels of 3 W, evened, are faster; these have no tail


def _shape(n):
    """(rows of a tile, columns of a panel, elements of a strip's row) of a product of n columns."""
    if LANE_OPERANDS:
        return (WIDE_ROWS, 3 * W, WIDE_KC) if n >= WIDE else (ROWS, NL if n > W else W, FLOAT_KC)
    if W == 16 and n >= WIDE:
        return WIDE_ROWS, 3 * W, WIDE_KC
    columns = NL if n > W else W                        # W columns in half the cache
    return ROWS, columns, NARROW_KC if n < NL else FLOAT_KC


@functools.cache                        # made once, since Numba keeps every intrinsic
def _make_float_multiply(n_rows, n_vectors, columns, unit_nbytes, spread=1, prefetching=True):
    """c[n_rows][n_vectors * W] (+)= w[n_rows][units * FLOAT_UNIT] x panel of `columns`, its columns spread over lanes.

    Rows of w lie ldw bytes apart.  The n_rows rows at `next_w` (stride bytes apart, unit_nbytes a unit), which the next
    tile reads, are prefetched unit by unit, three rows at a time.
    """
    v = vec_ir("f32", W)
    threes = (n_rows + 2) // 3
    points = [FLOAT_UNIT * i // threes for i in range(threes)]    # where a unit prefetches three rows

    @ir_function
    def multiply(b, w, ldw, y, units, c, first, next_w, stride):
        # three rows share a base register; LLVM must not see how the addresses hang together, or it chains them
        # and spills accumulators; nor how they go on, or it keeps twelve bases in memory and loads each again
        apart = [i64(0), opaque_ir(b, ldw), opaque_ir(b, b.mul(ldw, i64(2)))]
        next_apart = [i64(0), stride, b.mul(stride, i64(2))]
        step = b.mul(stride, i64(3))

        def body(b, state):
            y, next_w = state[:2]
            bases, acc = list(state[2:2 + threes]), list(state[2 + threes:])
            at_next = next_w
            rows = [b.add(bases[r // 3], apart[r % 3]) for r in range(n_rows)]
            lines = [load_ir(b, p, v) for p in rows] if LANE_OPERANDS else None
            for u in range(0, FLOAT_UNIT, spread):
                if prefetching and u in points:
                    for o in next_apart[:n_rows - 3 * points.index(u)]:
                        prefetch_ir(b, b.add(at_next, o))
                    at_next = opaque_ir(b, b.add(at_next, step))
                at = 4 * columns * u // spread
                ys = [load_ir(b, b.add(y, i64(at + B * h)), v, B) for h in range(n_vectors)]
                for r in range(n_rows):
                    if LANE_OPERANDS:
                        s = shuffle_ir(b, lines[r], lines[r], [u + i % spread for i in range(W)])
                    else:
                        s = repeat_ir(b, b.add(rows[r], i64(4 * u)), "f32", spread)
                    for h in range(n_vectors):
                        i = r * n_vectors + h
                        acc[i] = fma_ir(b, s, ys[h], acc[i])
            return [opaque_ir(b, b.add(y, i64(4 * columns * FLOAT_UNIT))), b.add(next_w, i64(unit_nbytes)),
                    *(opaque_ir(b, b.add(p, i64(4 * FLOAT_UNIT))) for p in bases), *acc]
        starts = [opaque_ir(b, b.add(w, b.mul(ldw, i64(3 * i)))) for i in range(threes)]
        state = [(IR_I64, x) for x in (y, next_w, *starts)] + [(v, zero("f32", W))] * (n_rows * n_vectors)
        acc = counted_loop_ir(b, units, state, body)[2 + threes:]
        finish_ir(b, acc, [b.add(c, i64(r * LDC + B * h)) for r in range(n_rows) for h in range(n_vectors)], first)
    return multiply


@functools.cache
def _make_pack(columns, spread=1):
    """pack_y of a Tile or Tail with panels of `columns`."""
    @ir_function
    def transpose(b, src, stride, cols, left, dst):
        """W values of each of `cols` float32 rows (from the first row, `stride` apart; the last one repeats) to the
        lanes of W / spread panel rows at dst; only `left` values are read where fewer than W are left, zeros follow."""
        last = b.sub(cols, i64(1))
        at = [b.add(src, b.mul(min_ir(b, i64(i), last), stride)) for i in range(W // spread)]

        def put(rows):
            for i, x in enumerate(transpose_ir(b, rows, spread)):
                store_ir(b, x, b.add(dst, i64(4 * columns * i)), B)
        with b.if_else(b.icmp_signed(">=", left, i64(W))) as (full, part):
            with full:
                put([load_ir(b, p, vec_ir("f32", W)) for p in at])
            with part:
                put([load_part_ir(b, p, "f32", W, left) for p in at])

    @inline
    def pack(src, stride, k, cols, dst):
        for i in range(0, k, W):
            transpose(src + 4 * i, stride, cols, k - i, dst + 4 * columns * i)
    return pack


def float_tile(type, n=NL):
    """The Tile of weights of `type` for products of n columns."""
    return _float_tile(type, *_shape(n), spread_of(n), n < W)


@functools.cache
def _float_tile(type, rows, columns, kc, spread, only):
    """rows, columns, kc: of _shape; spread, only: of the last vector and whether it is the only one (Tail)."""
    to_float = traits_of(type).to_float
    unit_nbytes, tail = FLOAT_UNIT * type.nbytes // type.block, None
    if spread > 1:
        tail = Tail(spread, only, rows, _make_pack(columns, spread),
                    _make_float_multiply(rows, 1, columns, unit_nbytes, spread, only))

    @inline
    def pack_w(src, k, dst):
        to_float(src, dst, k)
        for i in range(k, (k + FLOAT_UNIT - 1) // FLOAT_UNIT * FLOAT_UNIT):
            st_f32(dst + 4 * i, types.float32(0.0))
    return Tile(unit=FLOAT_UNIT, y_nbytes=4 * columns * FLOAT_UNIT, w_nbytes=4 * FLOAT_UNIT,
                kc=kc // type.block * type.block,
                pack_y=_make_pack(columns), pack_w=pack_w, in_place=type is F32,
                multiply={h: (rows, _make_float_multiply(rows, h, columns, unit_nbytes))
                          for h in range(1, columns // W + 1)},
                rounds=traits_of(type).round_activations is None, pad=W, columns=columns,
                tail=tail)
