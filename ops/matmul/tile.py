"""Packed panels and register tiles: the geometry of a product with many columns.

The columns of b lie in the vector lanes, the rows of a are broadcast element by element:

                    NL columns of b in the lanes
                 +-----------------+
      k rows of  |  y y y ...      |    packed once: k-major panels of NL columns, in work memory
      the panel  |  y y y ...      |
                 +-----------------+
     R rows   w -> c c c ...              R x NL accumulators in registers, k is the inner loop;
     of a     w -> c c c ...              w comes from a thread's own strip: MB rows x KC columns of a

The last vector of few columns may be part empty.  Where at most half, a quarter or an eighth of it would be filled,
each column is spread over 2, 4 or 8 lanes, which take elements of k in turn; one broadcast brings as many of w, and the
lanes of a column are added at the end:

    spread 1  | y0[0]  y1[0]  y2[0]  y3[0]  ... |      w[0]  in every lane               16 columns, a vector each k
    spread 2  | y0[0]  y0[1]  y1[0]  y1[1]  ... |      w[0]  w[1]  w[0]  w[1] ...         8 columns, a vector each 2 k
    spread 4  | y0[0]  y0[1]  y0[2]  y0[3]  ... |      w[0]  w[1]  w[2]  w[3] ...         4 columns, a vector each 4 k

so a needs no transpose: float32 rows are read where they lie, others are converted (or their codes unpacked) to the
strip, and the tile reads scalars as broadcast operands.  Sums over KC elements are added up in a float32 strip of C,
which is transposed into the result at the end, W x W at a time.

Rows are broadcast, since packing a then costs 2 instructions a vector; panels of transposed weights cost 7.  The next
rows are prefetched inside the tile's loop, a few lines a step: in bursts between tiles the load queue fills up and the
tile waits (docs/measured.md, "Choices in the kernels").
"""
import dataclasses
import functools
from collections.abc import Callable

from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import bitcast_ir, i64, prefetch_ir, store_part_ir, transpose_ir
from ggjit.ops.native.mem import st_i32
from ggjit.ops.native.simd import IR, B, W, load_ir, shuffle_ir, splat_ir, store_ir, vec_ir

NL = 2 * W                              # columns of a panel (a float tile's: tile_float.py, `_shape`)
MB = 96                                 # rows of a strip: one unit of work
NB = 544 // NL * NL                     # columns of a strip of C: 512 in whole panels of 48 too
LDC = 4 * NB + 64                       # stride of a row of C; the 64 bytes move rows to different cache sets
SPREADS = 8, 4, 2                       # how many lanes share one column
SPREAD_BELOW = 8 * W                    # from so many columns on, an empty part of the last vector does not matter


def spread_of(n):
    """Lanes that a column takes in the last vector of a product of n columns."""
    left = n % W
    if left == 0 or n >= SPREAD_BELOW:
        return 1
    return next((s for s in SPREADS if s * left <= W), 1)


@inline
def nothing():
    """Do nothing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tail:
    """How the last vector is multiplied where its columns are spread; members as in Tile.

    only            whether there is no other vector; then `multiply` prefetches the next rows
    """
    spread: int
    only: bool
    rows: int
    pack_y: Callable
    multiply: Callable


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """One way to multiply packed panels.  A unit is what the tile consumes a step along k.

    unit            elements of a unit
    y_nbytes        bytes of a unit of a panel
    w_nbytes        bytes of a unit of one row of a strip
    kc              elements of a strip's row
    pack_y          jitted (rows, stride, k, cols, dst): `cols` <= W float32 rows into one vector of a panel
    pack_w          jitted (row address of the weights, k, dst)
    multiply        {vectors: (rows, jitted (w, ldw, y, units, c, first, next_w, stride))}, from one vector on; first:
                    store, else add; next_w, stride: rows to prefetch
    in_place        weights may be read where they lie, without a strip (float32 rows)
    rounds          whether pack_y does the rounding of activations itself
    pad             elements a panel's k is padded to
    columns         columns of a panel: W, NL or 3 W
    tail            of the last vector, where the tile was made for a number of columns that spread_of spreads
    enter, leave    jitted, without arguments: a thread calls them before and after it calls `multiply`
    name            what kernels' names say of it
    """
    unit: int
    y_nbytes: int
    w_nbytes: int
    kc: int
    pack_y: Callable
    pack_w: Callable
    multiply: dict
    rounds: bool
    pad: int
    in_place: bool = False
    columns: int = NL
    tail: Tail | None = None
    enter: Callable = nothing
    leave: Callable = nothing
    name: str = ""

    @property
    def ldw(self):
        """Stride of a strip's rows."""
        return self.kc // self.unit * self.w_nbytes + 64

    def panel_nbytes(self, k):
        return -(-k // self.pad) * self.pad // self.unit * self.y_nbytes


@inline
def blank_columns(first, blocks, block_nbytes, dst):
    """Lanes first ... W - 1 of half a panel of quantised blocks: zeros after the eight rows of codes.

    They are multiplied with the others, and old bytes there may be denormals: n = 17 took five times as long as 32.
    """
    for j in range(first, W):
        for i in range(blocks):
            for word in range(8, block_nbytes // (4 * NL)):
                st_i32(dst + i * block_nbytes + 4 * (word * NL + j), 0)


def put_quads_ir(b, q, dst, spread):
    """One column's 32 codes <32 x i32> into its lanes: each vector takes the next `spread` quads."""
    quads = bitcast_ir(b, b.trunc(q, vec_ir("i8", 32)), "i32", 8)
    for t in range(0, 8, spread):
        store_ir(b, shuffle_ir(b, quads, quads, range(t, t + spread)), b.add(dst, i64(4 * NL * t // spread)), 4)


def lane_sums_ir(b, q, first, n, spread):
    """Sums of codes first ... first + n - 1 of one column's <32 x i32>, of each lane its own quads: <spread x i32>.

    The correction of a lane's sum has to be in the same lane, as integers; in other lanes it would cancel only in
    float32.
    """
    def pick(v, lanes):
        return shuffle_ir(b, v, v, lanes)
    sums = functools.reduce(b.add, [pick(q, range(first + c, first + n, 4)) for c in range(4)])
    while sums.type.count > spread:
        half = sums.type.count // 2
        sums = b.add(pick(sums, range(half)), pick(sums, range(half, 2 * half)))
    return sums


def finish_ir(b, acc, places, first, align=B):
    """Store the sums of a stretch of k, or add them to what earlier stretches left."""
    with b.if_else(b.icmp_signed("!=", first, i64(0))) as (then, other):
        with then:
            for p, x in zip(places, acc, strict=True):
                store_ir(b, x, p, align)
        with other:
            for p, x in zip(places, acc, strict=True):
                store_ir(b, b.fadd(load_ir(b, p, vec_ir("f32", W), align), x), p, align)


def prefetch_rows_ir(b, next_w, stride, n_rows):
    """prefetch(b, offset): prefetch that byte of the rows read next; three rows share a base register."""
    apart = [i64(0), stride, b.mul(stride, i64(2))]
    bases = [b.add(next_w, b.mul(stride, i64(r))) for r in range(0, n_rows, 3)]

    def prefetch(b, offset):
        for p in bases:
            q = b.add(p, offset)
            for o in apart:
                prefetch_ir(b, b.add(q, o))
    return prefetch


def repeat_ir(b, addr, type, n):
    """The n values at addr, again and again in a vector of W."""
    if n == 1:
        return splat_ir(b, load_ir(b, addr, IR[type], 4), W)
    v = load_ir(b, addr, vec_ir(type, n), 4)
    return shuffle_ir(b, v, v, [i % n for i in range(W)])


@functools.cache                        # made once, since Numba keeps every intrinsic
def make_put(spread):
    """intrinsic (c, dst, ldd, rows, cols, ahead): W rows x W lanes of a strip of C -> dst[column][row], the first
    `rows` rows and `cols` columns; the `spread` lanes of a column are added.

    The lines `ahead` bytes further are prefetched: they lie far apart, and a store that misses the cache waits.
    """
    @ir_function
    def put(b, c, dst, ldd, rows, cols, ahead):
        out = transpose_ir(b, [load_ir(b, b.add(c, i64(LDC * i)), vec_ir("f32", W), B) for i in range(W)])
        for _ in range(spread.bit_length() - 1):
            out = [b.fadd(x, y) for x, y in zip(out[::2], out[1::2], strict=True)]
        whole = b.icmp_signed(">=", rows, i64(W))
        for j, x in enumerate(out):
            place = b.add(dst, b.mul(ldd, i64(j)))
            prefetch_ir(b, b.add(place, ahead))
            with b.if_then(b.icmp_signed("<", i64(j), cols)):
                with b.if_else(whole) as (full, part):
                    with full:
                        store_ir(b, x, place)
                    with part:
                        store_part_ir(b, x, place, rows)
    return put


put_transposed = make_put(1)
