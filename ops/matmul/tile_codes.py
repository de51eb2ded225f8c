"""The 8-bit tiles: codes of 32-blocks with one scale against activations quantised to Q8_0.

A unit is a block: 8 quads of four codes, broadcast, times 8 x NL quads of activations; then the sums are scaled.
AVX-512 uses VNNI for any code; AVX2 has a tile for codes of four bits (others use the float tile there).
"""
import functools

from numba import types
from numba.extending import intrinsic

from ggjit.ops.core.traits import traits_of
from ggjit.ops.matmul.tile import (
    LDC,
    NL,
    Tail,
    Tile,
    blank_columns,
    finish_ir,
    lane_sums_ir,
    put_quads_ir,
    repeat_ir,
    soon_ir,
    spread_of,
)
from ggjit.ops.matmul.tile_blocks import block_tile
from ggjit.ops.native import isa
from ggjit.ops.native.jit import inline
from ggjit.ops.native.lanes import bitcast_ir, dpbusd_ir, i64, int_to_float_ir, madd_ir, maddubs_ir, splat_const, zero
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64
from ggjit.ops.native.simd import W, counted_loop_ir, fma_ir, load_ir, opaque_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.quant32 import activation_ir

Y_BLOCK = 10 * 4 * NL                   # 8 x NL quads of activations | NL biases i32 | NL scales f32
W_BLOCK = 36                            # 32 codes | scale f32
CODE_KC = 512


def _make_pack_codes(codes, spread=1):
    """Quantise `cols` float32 rows, block by block, into one half of a panel."""
    zero_point = codes.zero_point

    @intrinsic
    def put(typingctx, src, dst):
        """Column's block at src: eight quads NL dwords apart, then bias and scale."""
        def codegen(context, b, sig, args):
            src, dst = args
            q, d = activation_ir(b, src)
            put_quads_ir(b, q, dst, spread)
            sums = lane_sums_ir(b, q, 0, 32, spread)
            store_ir(b, b.mul(sums, splat_const("i32", -zero_point, spread)), b.add(dst, i64(4 * NL * 8)), 4)
            store_ir(b, splat_ir(b, d, spread), b.add(dst, i64(4 * NL * 9)), 4)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64), codegen

    @inline
    def pack_y(src, stride, k, cols, dst):
        for j in range(cols):
            for i in range(k // 32):
                put(src + j * stride + 128 * i, dst + i * Y_BLOCK + 4 * spread * j)
        blank_columns(spread * cols, k // 32, Y_BLOCK, dst)
    return pack_y


def _make_pack_weights(codes):
    nbytes = codes.nbytes

    @intrinsic
    def put(typingctx, src, dst):
        def codegen(context, b, sig, args):
            store_ir(b, codes.codes_ir(b, args[0]), args[1])
            store_ir(b, codes.scale_ir(b, args[0]), b.add(args[1], i64(32)))
            return context.get_dummy_value()
        return types.void(types.int64, types.int64), codegen

    @inline
    def pack_w(src, k, dst):
        for i in range(k // 32):
            put(src + i * nbytes, dst + i * W_BLOCK)
    return pack_w


def _make_code_multiply(n_rows, n_vectors, ldw, nbytes, spread=1, asking=True):
    """AVX-512 VNNI: 12 integer and 12 float accumulators; a block is 8 broadcasts of 4 codes for each row."""
    fv, iv = vec_ir("f32", 16), vec_ir("i32", 16)
    n_acc = n_rows * n_vectors

    def block(b, w, y, acc):
        bias = [load_ir(b, b.add(y, i64(4 * NL * 8 + 64 * h)), iv, 64) for h in range(n_vectors)]
        q = [bias[i % n_vectors] for i in range(n_acc)]
        for t in range(0, 8, spread):
            ys = [bitcast_ir(b, load_ir(b, b.add(y, i64(4 * NL * t // spread + 64 * h)), iv, 64), "i8", 64)
                  for h in range(n_vectors)]
            for r in range(n_rows):
                u = bitcast_ir(b, repeat_ir(b, b.add(w, i64(r * ldw + 4 * t)), "i32", spread), "i8", 64)
                for h in range(n_vectors):
                    q[r * n_vectors + h] = dpbusd_ir(b, q[r * n_vectors + h], u, ys[h])
        dy = [load_ir(b, b.add(y, i64(4 * NL * 9 + 64 * h)), fv, 64) for h in range(n_vectors)]
        for r in range(n_rows):
            dw = splat_ir(b, load_ir(b, b.add(w, i64(r * ldw + 32)), IR_F32, 4), 16)
            for h in range(n_vectors):
                i = r * n_vectors + h
                acc[i] = fma_ir(b, b.fmul(dw, dy[h]), int_to_float_ir(b, q[i]), acc[i])
        return acc

    @intrinsic
    def multiply(typingctx, w, ldw_, y, units, c, first, soon, stride):
        def codegen(context, b, sig, args):
            w, _, y, units, c, first, soon, stride = args
            ask = soon_ir(b, soon, stride, n_rows if asking else 0)
            places = [b.add(c, i64(r * LDC + 64 * h)) for r in range(n_rows) for h in range(n_vectors)]

            def body(b, state):
                w, y, o, *acc = state
                ask(b, o)
                return [b.add(w, i64(W_BLOCK)), b.add(y, i64(Y_BLOCK)), b.add(o, i64(nbytes)), *block(b, w, y, acc)]
            start = [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))] + [(fv, zero("f32", 16))] * n_acc
            acc = counted_loop_ir(b, units, start, body)[3:]
            finish_ir(b, acc, places, first)
            return context.get_dummy_value()
        return types.void(*(types.int64,) * 8), codegen
    return multiply


def _make_nibble_multiply(n_rows, n_vectors, ldw, nbytes):
    """AVX2, codes of 4 bits: pairs are summed in i16 over a block (16 * 15 * 127 < 32768).

    Sixteen registers hold the i16 sums only: float sums stay in the strip of C (L1), and the loop over a block is a
    real loop, its count hidden, or LLVM hoists loads and spills.
    """
    fv, iv, hv = vec_ir("f32", 8), vec_ir("i32", 8), vec_ir("i16", 16)
    n_acc = n_rows * n_vectors

    @intrinsic
    def multiply(typingctx, w, ldw_, y, units, c, first, soon, stride):
        def codegen(context, b, sig, args):
            w, _, y, units, c, first, soon, stride = args
            ask = soon_ir(b, soon, stride, n_rows)
            places = [b.add(c, i64(r * LDC + 32 * h)) for r in range(n_rows) for h in range(n_vectors)]
            with b.if_then(b.icmp_signed("!=", first, i64(0))):
                for p in places:
                    store_ir(b, zero("f32", 8), p, 32)

            def step(b, state):
                w, y, q = state[0], state[1], list(state[2:])
                ys = [bitcast_ir(b, load_ir(b, b.add(y, i64(32 * h)), iv, 32), "i8", 32) for h in range(n_vectors)]
                for r in range(n_rows):
                    u = bitcast_ir(b, splat_ir(b, load_ir(b, b.add(w, i64(r * ldw)), IR_I32, 4), 8), "i8", 32)
                    for h in range(n_vectors):
                        i = r * n_vectors + h
                        q[i] = b.add(q[i], maddubs_ir(b, u, ys[h]))
                return [b.add(w, i64(4)), b.add(y, i64(4 * NL))] + q

            def body(b, state):
                w, y, o = state
                ask(b, o)
                start = [(IR_I64, w), (IR_I64, y)] + [(hv, zero("i16", 16))] * n_acc
                w, y, *q = counted_loop_ir(b, opaque_ir(b, i64(8)), start, step)
                bias = [load_ir(b, b.add(y, i64(32 * h)), iv, 32) for h in range(n_vectors)]
                dy = [load_ir(b, b.add(y, i64(4 * NL + 32 * h)), fv, 32) for h in range(n_vectors)]
                for r in range(n_rows):
                    dw = splat_ir(b, load_ir(b, b.add(w, i64(r * ldw)), IR_F32, 4), 8)
                    for h in range(n_vectors):
                        i = r * n_vectors + h
                        s = b.add(madd_ir(b, q[i], splat_const("i16", 1, 16)), bias[h])
                        old = load_ir(b, places[i], fv, 32)
                        store_ir(b, fma_ir(b, b.fmul(dw, dy[h]), int_to_float_ir(b, s), old), places[i], 32)
                return [b.add(w, i64(4)), b.add(y, i64(8 * NL)), b.add(o, i64(nbytes))]
            counted_loop_ir(b, units, [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))], body)
            return context.get_dummy_value()
        return types.void(*(types.int64,) * 8), codegen
    return multiply


def code_tile(type, n=NL):
    """The integer tile of a type for products of n columns, or None where the instruction set has none for it."""
    spread = spread_of(n) if isa.ISA == "avx512" else 1
    return _code_tile(type, spread, spread > 1 and n < W)


@functools.cache
def _code_tile(type, spread, only):
    codes = traits_of(type).tile
    if isinstance(codes, Plain | Super):
        return block_tile(codes, min(spread, 4 if codes.halves else 8), only)
    if codes is None or isa.ISA == "generic" or (isa.ISA == "avx2" and codes.zero_point > 8):
        return None
    ldw = CODE_KC // 32 * W_BLOCK + 64
    make, shapes = (_make_code_multiply, {1: 12, 2: 6}) if isa.ISA == "avx512" else (
        _make_nibble_multiply, {1: 6, 2: 6})
    tail = None if spread == 1 else Tail(
        spread, only, 12, _make_pack_codes(codes, spread), make(12, 1, ldw, codes.nbytes, spread, only))
    return Tile(unit=32, y_nbytes=Y_BLOCK, w_nbytes=W_BLOCK, kc=CODE_KC, pack_y=_make_pack_codes(codes),
                pack_w=_make_pack_weights(codes), rounds=True, pad=32,
                multiply={h: (r, make(r, h, ldw, codes.nbytes)) for h, r in shapes.items()},
                tail=tail)
