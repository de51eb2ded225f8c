"""Blocks of codes: what every quantised format is, and what follows from one decoder.

A block is a run of groups of 32 codes of 8 bits, each group two halves of 16:

    value = factor[half] * (code - zero_point) + offset[half]

    Plain    the factors are floats, the offset is one float for the block; partner Q8_0 (blocks_plain.py)
    Super    256 values; factor = d * scale, offset = -dmin * min, small integers scale and min; partner Q8_K
             (blocks_super.py)

A type file writes its decoder once, as LLVM IR; conversion to float32, products on every instruction set and integer
tiles are built from it.  Scales and mins come as <16 x i16>, first halves before second ones, which is how the byte
dots want them:

    lane      0   1  ...  7 | 8   9  ...  15
    half of   g0  g1 ...  g7| g0  g1 ...  g7
              `--- first --'  `-- second --'
"""
from llvmlite import ir
from numba.core import cgutils

from ggjit.ops.native import isa, neon
from ggjit.ops.native.lanes import dpbusd_ir, i64, madd_ir, maddubs_ir, splat_const, zero
from ggjit.ops.native.mem import IR_I64, call_intrinsic
from ggjit.ops.native.simd import W, const_ir, counted_loop_ir, fma_ir, load_ir, shuffle_ir, store_ir, vec_ir
from ggjit.ops.types.shared.dot import Dot


# ---------------------------------------------------------------- bits
def bit_ir(b, v, bit, place):
    """Bit number `bit` of every byte, moved to bit number `place`."""
    n = v.type.count
    one = b.and_(v, splat_const("i8", 1 << bit, n))
    if place > bit:
        return b.shl(one, splat_const("i8", place - bit, n))
    return b.lshr(one, splat_const("i8", bit - place, n)) if place < bit else one


def mask_bytes_ir(b, bits32, value):
    """32 bits -> 32 bytes: `value` where the bit is set, 0 elsewhere."""
    chosen = neon.bits_ir(b, bits32) if isa.ISA == "neon" else b.bitcast(bits32, ir.VectorType(ir.IntType(1), 32))
    return b.select(chosen, splat_const("i8", value, 32), zero("i8", 32))


def lookup16_ir(b, table, index):
    """table[index] for 32 indices below 16; table: 16 signed bytes (Python)."""
    if isa.ISA == "neon":
        return neon.lookup_ir(b, table, index)
    if isa.X86_LEVEL:
        return call_intrinsic(b, "llvm.x86.avx2.pshuf.b", index.type, [const_ir("i8", list(table) * 2), index])
    out = splat_const("i8", table[0], 32)
    for i, x in enumerate(table[1:], 1):
        out = b.select(b.icmp_unsigned("==", index, splat_const("i8", i, 32)), splat_const("i8", x, 32), out)
    return out


def first_and_second_ir(b, v):
    """16 values in the order of the halves -> first halves | second halves."""
    return shuffle_ir(b, v, v, [*range(0, 16, 2), *range(1, 16, 2)])


def twice_ir(b, v):
    """8 values, one a group -> both halves."""
    return shuffle_ir(b, v, v, [*range(8)] * 2)


# ---------------------------------------------------------------- floats and sums
def floats_ir(b, codes, zero_point, signed):
    """<32 x i8> codes -> code - zero_point as <32 x float>"""
    q = b.sext(codes, vec_ir("i32", 32)) if signed else b.zext(codes, vec_ir("i32", 32))
    if zero_point:
        q = b.sub(q, splat_const("i32", zero_point, 32))
    return b.sitofp(q, vec_ir("f32", 32))


def operand_ir(b, codes, signed):
    """The operands of byte products for a group: (unsigned codes,) or (|codes|, codes)."""
    if not signed:
        return (codes,)
    return call_intrinsic(b, "llvm.abs.v32i8", codes.type, [codes, ir.Constant(ir.IntType(1), 0)]), codes


def _signs_to_y(b, w, y):
    """Signed codes: their signs go to y, so that the product has an unsigned side and pairs stay below 32768."""
    return y if len(w) == 1 else call_intrinsic(b, "llvm.x86.avx2.psign.b", y.type, [y, w[1]])


def pair_sums_ir(b, w, y):
    """<16 x i16> sums of two products; the caller makes sure that 2 |code| |y| < 32768."""
    return maddubs_ir(b, w[0], _signs_to_y(b, w, y))


def quad_sums_ir(b, w, y, start=None):
    """<8 x i32> sums of four products, on top of `start`"""
    if isa.ISA == "avx512":
        return dpbusd_ir(b, zero("i32", 8) if start is None else start, w[0], _signs_to_y(b, w, y))
    s = madd_ir(b, pair_sums_ir(b, w, y), splat_const("i16", 1, 16))
    return s if start is None else b.add(s, start)


def lane0_ir(b, x, n=8):
    """Scalar -> lane 0 of n lanes, the others 0."""
    elem = "f32" if isinstance(x.type, ir.FloatType) else "i32"
    return b.insert_element(zero(elem, n), x, ir.Constant(ir.IntType(32), 0))


def scratch_dot(type, store_block_ir, round_activations):
    """The dot of the generic instruction set: a block is dequantised to the stack, then float32 FMAs.

    store_block_ir (b, block address, destination) writes the block's float32 values.
    """
    def load_w(b, p):
        place = cgutils.alloca_once(b, ir.ArrayType(ir.FloatType(), type.block))
        to = b.ptrtoint(place, IR_I64)
        store_block_ir(b, p, to)
        return to

    def mac(b, acc, w, y):
        def body(b, state):
            at, acc = state
            v = vec_ir("f32", W)
            return [b.add(at, i64(4 * W)), fma_ir(b, load_ir(b, b.add(w, at), v), load_ir(b, b.add(y, at), v), acc)]
        return counted_loop_ir(b, i64(type.block // W), [(IR_I64, i64(0)), (acc.type, acc)], body)[1]
    return Dot(step=type.block, w_nbytes=type.nbytes, y_nbytes=4 * type.block, load_w_ir=load_w,
               tail_w_ir=lambda b, p, n: load_w(b, p), load_y_ir=lambda b, p: p, mac_ir=mac,
               prepare=round_activations)


def store_groups_ir(b, groups, dst):
    for i, v in enumerate(groups):
        store_ir(b, v, b.add(dst, i64(128 * i)))


def halves_ir(b, v, g):
    """Float factors of group g, from first | second halves of 8 groups -> <32 x float>"""
    return shuffle_ir(b, v, v, [g] * 16 + [8 + g] * 16)

