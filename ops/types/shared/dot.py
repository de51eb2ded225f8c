"""Dot products of rows: what a type supplies, and register tiles of R rows x C columns over it.

A row of weights is read `step` elements at a time and multiplied with activations prepared once per column, laid out
in the order the weights unpack to.  Products are summed in float32 lanes; the lanes are added at the end of the row.

        k ->  |  step  |  step  |  step  |tail|
    row r     |   w    |   w    |   w    | w  |         C columns share each w, R rows share each y
    column j  |   y    |   y    |   y    | y  |

Tiles at the edge repeat their last row or column: the same number is computed and stored twice, no code is added.
"""
import dataclasses
from collections.abc import Callable

from llvmlite import ir

from ggjit.ops.native.jit import ir_function
from ggjit.ops.native.lanes import for_ir, hsums_ir, i64, if_ir, min_ir, prefetch_ir, zero
from ggjit.ops.native.mem import IR_I32, IR_I64
from ggjit.ops.native.simd import W, shuffle_ir, store_ir, vec_ir

LINE = 64                       # bytes of a cache line


@dataclasses.dataclass(frozen=True, eq=False)
class Dot:
    """How rows of one type are multiplied with prepared activations.  The `_ir` members build LLVM IR.

    step        elements a step
    w_nbytes    bytes of a step of weights
    y_nbytes    bytes of a step of prepared activations
    load_w_ir   (b, address) -> values
    tail_w_ir   (b, address, n) -> values: n < step elements (int64); reads no byte beyond them
    load_y_ir   (b, address) -> values
    tail_y_ir   the same for the last n; None: preparation pads with zeros, so load_y_ir serves
    mac_ir      (b, acc, w values, y values) -> acc
    prepare     jitted (float32 row, destination, k); None: the float32 row itself serves
    lanes       float32 lanes of the accumulator
    rows        rows a tile of several columns has at most (a wide step needs its registers for one row)
    max_columns up to how many columns dots are faster than the integer tile of the type, where it has one
    unroll      independent sums along k of a tile of one column
    locality    of prefetch_ir: the cache that weights are prefetched into, 2 the second, 3 the first
    ahead_nbytes  how far ahead of a load they are prefetched; None: as far as the kernel says, a tile
    tile        jitted, with the arguments of make_dot_tile's: serves tiles of any size instead; then there is no IR
    """
    step: int
    w_nbytes: int
    y_nbytes: int
    load_w_ir: Callable
    tail_w_ir: Callable
    load_y_ir: Callable
    mac_ir: Callable
    tail_y_ir: Callable | None = None
    prepare: Callable | None = None
    lanes: int = W
    rows: int = 4
    max_columns: int = 4
    unroll: int = 4
    locality: int = 2
    ahead_nbytes: int | None = None
    tile: Callable | None = None

    def column_nbytes(self, k):
        """Bytes of a prepared column: an odd number of cache lines, so that columns fall into different sets."""
        return ((-(-k // self.step) * self.y_nbytes + 63) // 64 | 1) * 64


def store_sums_ir(b, sums, n_rows, n_cols, columns, index, rows):
    """Sums in the order [column][row] -> the tile's columns; whole runs of rows where all of them exist."""
    per = sums[0].type.count

    def run(i, n):
        v = sums[i // per]
        return shuffle_ir(b, v, v, range(i % per, i % per + n))

    def one_by_one():
        for j, column in enumerate(columns):
            for r in range(n_rows):
                i = j * n_rows + r
                x = b.extract_element(sums[i // per], ir.Constant(IR_I32, i % per))
                store_ir(b, x, b.add(column, b.mul(index[r], i64(4))))
    if n_rows == 1 or per % n_rows:
        one_by_one()
        return
    with b.if_else(b.icmp_signed(">=", rows, i64(n_rows))) as (whole, edge):
        with whole:
            for j, column in enumerate(columns):
                store_ir(b, run(j * n_rows, n_rows), column)
        with edge:
            one_by_one()


# Ways to ask for weights ahead of their use: (locality, bytes ahead or None: a tile).  A processor may like another one
# than "own", the type's.
OWN, NO_PREFETCH = "own", "no prefetch"
PREFETCHES = {NO_PREFETCH: None, "near": (3, 512), "ahead": (3, 6144), "far": (2, None)}


def prefetching(dot, how):
    """(locality, bytes ahead or None) of that way for the type, None for no prefetching."""
    return (dot.locality, dot.ahead_nbytes) if how == OWN else PREFETCHES[how]


def make_dot_tile(dot, n_rows, n_cols, unroll=1, prefetch=OWN):
    """intrinsic tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols): dst[j][r] = sum_k w[r][k] y[j][k].

    Addresses and strides in bytes; rows <= n_rows and cols <= n_cols are how many exist (at least 1).
    unroll: independent accumulators along k, for tiles too small to hide the latency of an FMA.
    prefetch: OWN or a way of PREFETCHES.  While a tile is multiplied, the bytes `ahead` of it, or as far ahead as that
    way says, are prefetched, once for each cache line.
    """
    if dot.tile is not None:
        return dot.tile
    acc_t = vec_ir("f32", dot.lanes)
    nothing = zero("f32", dot.lanes)
    n_acc, asks = n_rows * n_cols, prefetching(dot, prefetch)
    tail_y_ir = dot.tail_y_ir or (lambda b, addr, n: dot.load_y_ir(b, addr))

    def pointers(b, base, stride, n, limit):
        last = b.sub(limit, i64(1))
        index = [i64(0)] + [min_ir(b, i64(i), last) for i in range(1, n)]
        return [b.add(base, b.mul(i, stride)) for i in index], index

    @ir_function
    def tile(b, w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols):
        if asks and asks[1] is not None:
            ahead = i64(asks[1])
        ws, ri = pointers(b, w, ldw, n_rows, rows)
        ys, ci = pointers(b, y, ldy, n_cols, cols)

        def multiply(b, acc, wo, yo, load_w, load_y, asks=asks):
            for p in ws if asks else ():
                prefetch_ir(b, b.add(p, b.add(wo, ahead)), asks[0])
            wv = [load_w(b, b.add(p, wo)) for p in ws]
            new = list(acc)
            for j, q in enumerate(ys):
                yv = load_y(b, b.add(q, yo))
                for r in range(n_rows):
                    new[j * n_rows + r] = dot.mac_ir(b, new[j * n_rows + r], wv[r], yv)
            return new

        def body_of(times):
            def body(b, state):
                wo, yo, acc = state[0], state[1], list(state[2:])
                for u in range(times):
                    o = u * n_acc
                    acc[o:o + n_acc] = multiply(b, acc[o:o + n_acc], b.add(wo, i64(u * dot.w_nbytes)),
                                                b.add(yo, i64(u * dot.y_nbytes)), dot.load_w_ir, dot.load_y_ir,
                                                asks if u * dot.w_nbytes % LINE < dot.w_nbytes else None)
                return [b.add(wo, i64(times * dot.w_nbytes)), b.add(yo, i64(times * dot.y_nbytes))] + acc
            return body

        steps = b.udiv(k, i64(dot.step))
        state = [(IR_I64, i64(0))] * 2 + [(acc_t, nothing)] * (n_acc * unroll)
        wo, yo, *acc = for_ir(b, b.udiv(steps, i64(unroll)), state, body_of(unroll))
        if unroll > 1:
            rest = [(IR_I64, wo), (IR_I64, yo)] + [(acc_t, v) for v in acc[:n_acc]]
            wo, yo, *acc[:n_acc] = for_ir(b, b.urem(steps, i64(unroll)), rest, body_of(1))
            while len(acc) > n_acc:
                half = len(acc) // 2
                acc = [b.fadd(p, q) for p, q in zip(acc[:half], acc[half:], strict=True)]
        left = b.urem(k, i64(dot.step))
        acc = if_ir(b, b.icmp_signed(">", left, i64(0)), acc, lambda b: multiply(
            b, acc, wo, yo, lambda b, p: dot.tail_w_ir(b, p, left), lambda b, p: tail_y_ir(b, p, left)))
        store_sums_ir(b, hsums_ir(b, acc), n_rows, n_cols, [b.add(dst, b.mul(i, ldd)) for i in ci], ri, rows)
    return tile
