"""The tile of bfloat16 weights on AMX: 32 rows x 32 columns are four registers of sums.

    strip of a    rows as they lie, 64 bytes a unit of 32 elements
    panel of b    16 rows a unit, of NL columns each: pairs of elements that follow one another along k

Sums stay in registers over a stretch of k.  Columns are rounded as for one column at a time, pairs are summed in
another order than there.
"""
import functools

from ggjit.ops.core.types import BF16
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.tile import LDC, NL, Tile, prefetch_rows_ir
from ggjit.ops.native import amx
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import i64, load_part_ir, min_ir, transpose_ir
from ggjit.ops.native.mem import IR_I64, copy_bytes, zero_bytes
from ggjit.ops.native.simd import W, bf16_ir, counted_loop_ir, load_ir, store_ir, vec_ir

UNIT, KC = 32, 512                      # a panel's stretch of 512 elements is 32 KB
ROWS = 2 * amx.ROWS
SUMS, ROWS_OF_A, COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)         # tile registers; SUMS: [row][column]
_enter, _leave = amx.using(*[(amx.ROWS, amx.ROW_NBYTES)] * 8)


@ir_function
def _put_unit(b, src, stride, cols, left, dst):
    """32 values of each of `cols` float32 rows (the last one repeats) to 16 rows of pairs at dst; only `left` values
    are read where fewer than 32 are left, zeros follow."""
    last = b.sub(cols, i64(1))
    at = [b.add(src, b.mul(min_ir(b, i64(j), last), stride)) for j in range(W)]

    def put(rows):
        pairs = [b.bitcast(bf16_ir(b, x), vec_ir("i32", W)) for x in rows]
        for i, x in enumerate(transpose_ir(b, pairs)):
            store_ir(b, x, b.add(dst, i64(4 * NL * i)), amx.ROW_NBYTES)
    with b.if_else(b.icmp_signed(">=", left, i64(UNIT))) as (full, part):
        with full:
            put([load_ir(b, p, vec_ir("f32", UNIT)) for p in at])
        with part:
            put([load_part_ir(b, p, "f32", UNIT, left) for p in at])


@inline
def _pack_y(src, stride, k, cols, dst):
    for i in range(0, k, UNIT):
        _put_unit(src + 4 * i, stride, cols, k - i, dst + i // UNIT * (2 * UNIT * NL))


@inline
def _pack_w(src, k, dst):
    copy_bytes(dst, src, 2 * k)
    zero_bytes(dst + 2 * k, (k + UNIT - 1) // UNIT * (2 * UNIT) - 2 * k)


def _make_multiply(n_vectors):
    sums = [(SUMS[2 * r + h], amx.ROWS * r * LDC + 4 * W * h) for r in range(2) for h in range(n_vectors)]

    @ir_function
    def multiply(b, w, ldw, y, units, c, first, next_w, stride):
        prefetch, ldc = prefetch_rows_ir(b, next_w, stride, ROWS), i64(LDC)
        with b.if_else(b.icmp_signed("!=", first, i64(0))) as (then, other):
            with then:
                for tile, _ in sums:
                    amx.zero_ir(b, tile)
            with other:
                for tile, offs in sums:
                    amx.load_ir(b, tile, b.add(c, i64(offs)), ldc)

        def body(b, state):
            w, y, o = state
            prefetch(b, o)
            for r, tile in enumerate(ROWS_OF_A):
                amx.load_ir(b, tile, b.add(w, b.mul(ldw, i64(amx.ROWS * r))), ldw)
            for h, tile in enumerate(COLUMNS[:n_vectors]):
                amx.load_ir(b, tile, b.add(y, i64(4 * W * h)), i64(4 * NL))
                for r in range(2):
                    amx.add_pairs_ir(b, SUMS[2 * r + h], ROWS_OF_A[r], tile)
            return [b.add(w, i64(2 * UNIT)), b.add(y, i64(2 * UNIT * NL)), b.add(o, i64(2 * UNIT))]
        counted_loop_ir(b, units, [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))], body)
        for tile, offs in sums:
            amx.store_ir(b, tile, b.add(c, i64(offs)), ldc)
    return multiply


def bf16_tile(type, n=NL):
    """The Tile of bfloat16 weights for products of n columns; None for other types, and where it is not the fastest."""
    return _bf16_tile() if type is BF16 and choices.by_amx(type, n) else None


@functools.cache
def _bf16_tile():
    return Tile(unit=UNIT, y_nbytes=2 * UNIT * NL, w_nbytes=2 * UNIT, kc=KC, pack_y=_pack_y, pack_w=_pack_w,
                multiply={h: (ROWS, _make_multiply(h)) for h in (1, 2)}, rounds=True, pad=UNIT, in_place=True,
                enter=_enter, leave=_leave, name="-amx")
