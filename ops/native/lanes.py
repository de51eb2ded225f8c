"""LLVM IR building blocks of dot products and packed tiles: loops, row tails, byte dots, transposes, sums.

Everything here takes an llvmlite builder `b` and LLVM values and is called inside an intrinsic's codegen.  A block of
32 weights is handled as one value, <32 x i8> or <32 x float>: LLVM splits it into what the machine has.
"""
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import cgutils

from ggjit.ops.native.jit import ir_function
from ggjit.ops.native.mem import IR_F16, IR_F32, IR_I32, IR_I64, call_intrinsic, pointer
from ggjit.ops.native.simd import const_ir, load_ir, shuffle_ir, splat_ir, vec_ir


def i64(n):
    return ir.Constant(IR_I64, n)


def i32(n):
    return ir.Constant(IR_I32, n)


def f32(x):
    return ir.Constant(IR_F32, x)


def splat_const(elem, x, n):
    return const_ir(elem, [x] * n)


def zero(elem, n):
    return ir.Constant(vec_ir(elem, n), None)


# ---------------------------------------------------------------- control
def for_ir(b, count, carried, body):
    """`for _ in range(count)`, count may be 0; carried: [(ir type, initial value)]; body(b, values) -> new values.

    The carried values are phi nodes, that is, registers.  Returns the final values.
    """
    entry = b.basic_block
    head, loop, done = (b.append_basic_block(f"for.{s}") for s in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(IR_I64)
    i.add_incoming(i64(0), entry)
    phis = []
    for t, init in carried:
        phis.append(b.phi(t))
        phis[-1].add_incoming(init, entry)
    b.cbranch(b.icmp_signed("<", i, count), loop, done)
    b.position_at_end(loop)
    new = body(b, phis)
    i.add_incoming(b.add(i, i64(1)), b.basic_block)
    for p, v in zip(phis, new, strict=True):
        p.add_incoming(v, b.basic_block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def if_ir(b, condition, values, then):
    """`values = then(b) if condition else values`, as phi nodes."""
    entry = b.basic_block
    yes, done = b.append_basic_block("if.then"), b.append_basic_block("if.end")
    b.cbranch(condition, yes, done)
    b.position_at_end(yes)
    new = then(b)
    last = b.basic_block
    b.branch(done)
    b.position_at_end(done)
    out = []
    for old, v in zip(values, new, strict=True):
        out.append(b.phi(v.type))
        out[-1].add_incoming(old, entry)
        out[-1].add_incoming(v, last)
    return out


def min_ir(b, x, y):
    return b.select(b.icmp_signed("<", x, y), x, y)


# ---------------------------------------------------------------- memory
def load_part_ir(b, addr, elem, lanes, n):
    """The first n (int64) of `lanes` elements at addr, zeros above; touches no byte beyond them."""
    v = vec_ir(elem, lanes)
    mask = b.icmp_signed("<", const_ir("i32", range(lanes)), splat_ir(b, b.trunc(n, IR_I32), lanes))
    name = f"llvm.masked.load.v{lanes}{elem}.p0"
    return call_intrinsic(b, name, v, [pointer(b, addr, v), ir.Constant(IR_I32, 1), mask, ir.Constant(v, None)])


def store_part_ir(b, v, addr, n):
    """Stores the first n (int64) lanes of a float vector; touches no byte beyond them."""
    lanes = v.type.count
    mask = b.icmp_signed("<", const_ir("i32", range(lanes)), splat_ir(b, b.trunc(n, IR_I32), lanes))
    call_intrinsic(b, f"llvm.masked.store.v{lanes}f32.p0", ir.VoidType(),
                   [v, pointer(b, addr, v.type), ir.Constant(IR_I32, 1), mask])


def prefetch_ir(b, addr, locality=2):
    """Ask for the cache line at addr, in the second-level cache (locality 2) or the first (3); any address will do."""
    call_intrinsic(b, "llvm.prefetch.p0", ir.VoidType(),
                   [pointer(b, addr, ir.IntType(8)), i32(0), i32(locality), i32(1)])


@ir_function
def prefetch(b, addr):
    """Ask for the cache line at addr, in the second-level cache; any address will do."""
    prefetch_ir(b, addr)


def load_half_ir(b, addr):
    """One float16 -> float32 scalar."""
    return b.fpext(load_ir(b, addr, IR_F16), IR_F32)


def splat_half_ir(b, addr, n):
    """One float16 -> n equal float32 lanes (a 16-bit broadcast and one conversion)."""
    h = splat_ir(b, load_ir(b, addr, ir.IntType(16)), n)
    return b.fpext(b.bitcast(h, vec_ir("f16", n)), vec_ir("f32", n))


def table_ir(b, name, data):
    """Address (int64) of constant bytes that live in the module's own data: no process address is baked in."""
    name = f"ggjit.{name}"
    known = b.module.globals.get(name)
    if known is None:
        known = cgutils.global_constant(b.module, name, cgutils.make_bytearray(data))
        known.align = 64
    return b.ptrtoint(known, IR_I64)


# ---------------------------------------------------------------- across lanes
def fold_ir(b, v, combine):
    """Reduce the lanes of v by a tree of halves."""
    n = v.type.count
    while n > 1:
        n //= 2
        v = combine(shuffle_ir(b, v, v, range(n)), shuffle_ir(b, v, v, range(n, 2 * n)))
    return b.extract_element(v, ir.Constant(IR_I32, 0))


def amax_ir(b, v):
    """max |v[i]|"""
    a = call_intrinsic(b, f"llvm.fabs.v{v.type.count}f32", v.type, [v])
    return fold_ir(b, a, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


def amax_or_nan_ir(b, vs):
    """max |v[i]| over float vectors, NaN where one of them is: the bits of sizes are in their order, NaN above all."""
    ints = ir.VectorType(IR_I32, vs[0].type.count)
    mask = splat_const("i32", 0x7FFFFFFF, vs[0].type.count)
    bits = [b.and_(b.bitcast(v, ints), mask) for v in vs]

    def larger(x, y):
        return b.select(b.icmp_signed(">", x, y), x, y)
    while len(bits) > 1:
        bits = [larger(x, y) for x, y in zip(bits[::2], bits[1::2], strict=True)]
    return b.bitcast(fold_ir(b, bits[0], larger), ir.FloatType())


def concat_ir(b, x, y):
    return shuffle_ir(b, x, y, range(2 * x.type.count))


def hsums_ir(b, vs):
    """Lane sums of many float vectors, all at once -> vectors of sums, in the order of `vs`.

    The additions of one sum are those of hsum_ir, in the same order, whatever its neighbours are.
    """
    return folds_ir(b, vs, b.fadd)


def folds_ir(b, vs, op):
    """fold_ir of many vectors, all at once -> vectors of results, in the order of `vs`.

    Each stage halves what is left of a vector and joins two.  16 sums of 16 lanes: 45 instructions instead of 100.

        x x x x x x x x     +     y y y y y y y y     ->     x x x x y y y y     ->     x x y y z z w w   ...
    """
    lanes = vs[0].type.count
    out = []
    for i in range(0, len(vs), lanes):
        group = list(vs[i:i + lanes])
        want = 1 << (len(group) - 1).bit_length()
        group += group[-1:] * (want - len(group))
        for _ in range((lanes // want).bit_length() - 1):           # fewer sums than lanes: fold first
            n = group[0].type.count // 2
            group = [op(shuffle_ir(b, v, v, range(n)), shuffle_ir(b, v, v, range(n, 2 * n))) for v in group]
        order = _butterfly_order(want)
        group = [group[order.index(k)] for k in range(want)]
        left = want
        while len(group) > 1:
            low, high = _halves(want, left)
            group = [op(shuffle_ir(b, x, y, low), shuffle_ir(b, x, y, high))
                     for x, y in zip(group[::2], group[1::2], strict=True)]
            left //= 2
        out.append(group[0])
    return out


def _halves(lanes, left):
    """Shuffles of (x, y) that bring the lower and the upper halves of every run of `left` lanes together.

    Runs wider than 128 bits keep their vector's order (whole-lane moves), narrower ones alternate between x and y
    inside each 128 bits (the cheap unpacks).
    """
    half, low = left // 2, []
    if left > 4:
        for v in (0, lanes):
            for run in range(0, lanes, left):
                low += [v + run + i for i in range(half)]
    else:
        for block in range(0, lanes, min(4, lanes)):
            for v in (0, lanes):
                for run in range(block, block + min(4, lanes), left):
                    low += [v + run + i for i in range(half)]
    return low, [i + half for i in low]


def _butterfly_order(n):
    """order[lane] = which input's sum ends in that lane."""
    labels = [[i] * n for i in range(n)]
    left = n
    while len(labels) > 1:
        low, _ = _halves(n, left)
        labels = [[(x + y)[i] for i in low] for x, y in zip(labels[::2], labels[1::2], strict=True)]
        left //= 2
    return labels[0]


def transpose_ir(b, rows, run=1):
    """n vectors of n elements -> their transpose, by log2(n) stages of full-width interleaves; an element is a run of
    `run` lanes."""
    n = len(rows)
    if n == 8 and run == 1:
        return _transpose8_ir(b, rows)
    low, high = ([run * (i // 2 + first + n * (i % 2)) + lane for i in range(n) for lane in range(run)]
                 for first in (0, n // 2))
    stages = n
    while stages > 1:
        half = n // 2
        rows = [shuffle_ir(b, rows[i // 2], rows[i // 2 + half], high if i % 2 else low) for i in range(n)]
        stages //= 2
    return rows


def _transpose8_ir(b, r):
    """8 x 8 with in-lane unpacks and one cross-lane stage: 24 single-uop shuffles on AVX2."""
    def pairs(x, y, o):
        return shuffle_ir(b, x, y, [o, 8 + o, o + 1, 9 + o, o + 4, 12 + o, o + 5, 13 + o])

    def quads(x, y, o):
        return shuffle_ir(b, x, y, [o, o + 1, 8 + o, 9 + o, o + 4, o + 5, 12 + o, 13 + o])
    t = [pairs(r[i], r[i + 1], o) for i in (0, 2, 4, 6) for o in (0, 2)]
    u = [quads(t[h + i], t[h + i + 2], o) for h in (0, 4) for i in (0, 1) for o in (0, 2)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [shuffle_ir(b, u[i], u[i + 4], x) for x in (low, high) for i in range(4)]


# ---------------------------------------------------------------- byte dots
_PACKED_SINCE = {"avx512.vpdpbusd": 22, "avx512.vpdpwssd": 22, "avx512bf16.dpbf16ps": 16}      # releases of LLVM


def packed_dot_ir(b, name, acc, x, y):
    """acc + products of the small numbers that x and y hold, summed within lanes of 32 bits.

    From some release of LLVM on, x and y are vectors of those numbers, before it vectors of words.
    """
    if llvm.llvm_version_info[0] < _PACKED_SINCE[name]:
        x, y = (b.bitcast(v, vec_ir("i32", acc.type.count)) for v in (x, y))
    return call_intrinsic(b, f"llvm.x86.{name}.{32 * acc.type.count}", acc.type, [acc, x, y])


def dpbusd_ir(b, acc, u, s):
    """acc.i32 += u8 x s8 in groups of four (AVX-512 VNNI)."""
    return packed_dot_ir(b, "avx512.vpdpbusd", acc, u, s)


def maddubs_ir(b, u, s):
    """u8 x s8, adjacent pairs -> i16.  The caller guarantees |sum| < 32768 (nibbles, or abs and sign)."""
    return call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", vec_ir("i16", 16), [u, s])


def madd_ir(b, x, y):
    """i16 x i16, adjacent pairs -> i32."""
    return call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", vec_ir("i32", 8), [x, y])


def madd_to_ir(b, acc, x, y):
    """acc.i32 += i16 x i16, adjacent pairs; x, y: vectors of 32-bit words."""
    x, y = (b.bitcast(v, vec_ir("i16", 2 * v.type.count)) for v in (x, y))
    if acc.type.count == 16:
        return packed_dot_ir(b, "avx512.vpdpwssd", acc, x, y)
    return b.add(acc, madd_ir(b, x, y))


def int_to_float_ir(b, v):
    return b.sitofp(v, vec_ir("f32", v.type.count))


def nibbles_ir(b, v):
    """(low, high) four bits of every byte."""
    n = v.type.count
    return b.and_(v, splat_const("i8", 15, n)), b.lshr(v, splat_const("i8", 4, n))


def bitcast_ir(b, v, elem, n):
    return b.bitcast(v, vec_ir(elem, n))

