"""NEON's instructions of products, as LLVM IR: what lanes.py's byte dots are for x86.

Bytes are multiplied signed, so codes need no bias and no flipped signs.  What a processor lacks is made of what every
one has: four bytes are summed by `sdot`, without it by widening products.
"""
from llvmlite import ir

from ggjit.ops.native import isa
from ggjit.ops.native.mem import IR_I32, call_intrinsic
from ggjit.ops.native.simd import const_ir, shuffle_ir, vec_ir

HAS_SDOT, HAS_SMMLA, HAS_FMLAL = (isa.ISA == "neon" and f in isa.FEATURES for f in ("dotprod", "i8mm", "fp16fml"))


def parts_ir(b, v, n=16):
    """A long vector as vectors of n lanes."""
    return [shuffle_ir(b, v, v, range(i, i + n)) for i in range(0, v.type.count, n)]


def _call(b, name, type, *args):
    return call_intrinsic(b, f"llvm.aarch64.neon.{name}", type, args)


# ---------------------------------------------------------------- bytes
def quads_ir(b, acc, x, y):
    """acc.i32 += s8 x s8 in groups of four: <4 x i32>, <16 x i8>, <16 x i8>.  Without sdot |x y| is at most 127 128."""
    if HAS_SDOT:
        return _call(b, "sdot.v4i32.v16i8", acc.type, acc, x, y)
    products = [_call(b, "smull.v8i16", vec_ir("i16", 8), *pair)
                for pair in zip(parts_ir(b, x, 8), parts_ir(b, y, 8), strict=True)]
    pairs = _call(b, "addp.v8i16", vec_ir("i16", 8), *products)
    return b.add(acc, _call(b, "saddlp.v4i32.v8i16", acc.type, pairs))


def one_byte_ir(b, i):
    """<16 x i8>: 1 in byte i of every four, else 0.  `quads_ir` with it takes that byte of each lane, and its sign."""
    return b.bitcast(const_ir("i32", [1 << 8 * i] * 4), vec_ir("i8", 16))


def matrix_ir(b, acc, x, y):
    """acc[i][j] += sum of x[i] y[j], of two rows of eight bytes each: <4 x i32>, <16 x i8>, <16 x i8> (i8mm)."""
    return _call(b, "smmla.v4i32.v16i8", acc.type, acc, x, y)


def lane_sums_ir(b, vs):
    """The sums of the lanes of 4, 8 ... vectors <4 x i32>, in their order -> a fourth as many vectors."""
    for _ in range(2):
        vs = [_call(b, "addp.v4i32", vs[0].type, x, y) for x, y in zip(vs[::2], vs[1::2], strict=True)]
    return vs


def shorts_ir(b, acc, x, y):
    """acc + products of <8 x i16>, two in each lane."""
    for p, q in zip(parts_ir(b, x, 4), parts_ir(b, y, 4), strict=True):
        product = _call(b, "smull.v4i32", vec_ir("i32", 4), p, q)
        acc = product if acc is None else b.add(acc, product)
    return acc


def pair_products_ir(b, acc, x, ys):
    """acc <4 x i32> + the first four numbers of 16 bits of x times those of ys[0] + the last four times ys[1]."""
    for part, y in zip(parts_ir(b, b.bitcast(x, vec_ir("i16", 8)), 4), ys, strict=True):
        acc = b.add(acc, _call(b, "smull.v4i32", vec_ir("i32", 4), part, y))
    return acc


def insert_left_ir(b, v, bits, n):
    """bits << n in every byte of <16 x i8>, whose lower n bits are v's."""
    return _call(b, "vsli.v16i8", v.type, v, bits, IR_I32(n))


def insert_right_ir(b, v, bits, n):
    """bits >> n in every byte of <16 x i8>, whose upper n bits are v's."""
    return _call(b, "vsri.v16i8", v.type, v, bits, IR_I32(n))


def lookup_ir(b, table, index):
    """table[index] for indices below 16; table: 16 signed bytes (Python)."""
    table = const_ir("i8", table)
    found = [_call(b, "tbl1.v16i8", table.type, table, part) for part in parts_ir(b, index)]
    while len(found) > 1:
        found = [shuffle_ir(b, x, y, range(2 * x.type.count)) for x, y in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def bits_ir(b, bits32):
    """32 bits -> <32 x i1>"""
    four = b.bitcast(bits32, vec_ir("i8", 4))
    bytes_ = shuffle_ir(b, four, four, [i // 8 for i in range(32)])
    bit = b.and_(bytes_, const_ir("i8", [1 << i % 8 for i in range(32)]))
    return b.icmp_unsigned("!=", bit, ir.Constant(bit.type, None))


# ---------------------------------------------------------------- floats of 16 bits
def f16_products_ir(b, acc, x, y):
    """acc <8 x float> += <8 x half> x <8 x half>: products are exact, each sum is rounded once (fp16fml)."""
    low, high = parts_ir(b, acc, 4)
    low = _call(b, "fmlal.v4f32.v8f16", low.type, low, x, y)
    high = _call(b, "fmlal2.v4f32.v8f16", high.type, high, x, y)
    return shuffle_ir(b, low, high, range(8))


def bf16_pairs_ir(b, acc, x, y):
    """acc <4 x float> += <8 x bfloat> x <8 x bfloat>, two products in each lane (bf16)."""
    return _call(b, "bfdot.v4f32.v8bf16", acc.type, acc, x, y)
