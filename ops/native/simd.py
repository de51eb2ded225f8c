"""Vector types as Numba values, so that a kernel is readable Python and the author picks the instructions.

`Vec("f32", 16)` is the LLVM vector <16 x float>; values live in registers.  The float vocabulary below is written once
in the lane count W of the instruction set (`isa.W`: 16, 8 or 4); bytes of a float vector: B = 4 W.

    for i in range(0, n, B):                       # n in bytes
        stf(d + i, fma(ldf(x + i), s, ldf(y + i)))

Rules, each of which was found by a fault or a measurement:
  - loads and stores have align=1 (an aligned move on an odd address is a fault);
  - two wide loads that OVERLAP are merged by LLVM byte by byte, four times slower: pass one address through `opaque`;
  - `vmax`, `vmin` are compare and select, exactly vmaxps / vminps (llvm.maxnum adds NaN fix-ups);
  - a horizontal sum needs `reassoc`, else it is a serial chain;
  - keep every Python constant typed: an untyped float literal is float64.
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from ggjit.ops.native import isa
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64, call_intrinsic, pointer

W = isa.W
B = 4 * W
f32 = types.float32

IR = {"f32": IR_F32, "f16": ir.HalfType(), "f64": ir.DoubleType(), "i8": ir.IntType(8), "i16": ir.IntType(16),
      "i32": IR_I32, "i64": IR_I64}


class Vec(types.Type):
    """`n` lanes of `elem` ("f32", "i8"...)."""

    def __init__(self, elem, n):
        self.elem, self.n = elem, n
        super().__init__(name=f"Vec({elem}x{n})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, t):
        super().__init__(dmm, t, vec_ir(t.elem, t.n))


_made = {}


def V(elem, n):
    """The one Vec type of that name."""
    return _made.setdefault((elem, n), Vec(elem, n))


# ---------------------------------------------------------------- building blocks for intrinsics (LLVM IR level)
def vec_ir(elem, n):
    return ir.VectorType(IR[elem], n)


def const_ir(elem, values):
    t, values = IR[elem], list(values)
    return ir.Constant(ir.VectorType(t, len(values)), [ir.Constant(t, v) for v in values])


def shuffle_ir(b, x, y, lanes):
    return b.shuffle_vector(x, y, const_ir("i32", lanes))


def splat_ir(b, scalar, n):
    u = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    return shuffle_ir(b, b.insert_element(u, scalar, ir.Constant(IR_I32, 0)), u, [0] * n)


def load_ir(b, addr, irty, align=1):
    return b.load(pointer(b, addr, irty), align=align)


def store_ir(b, value, addr, align=1):
    b.store(value, pointer(b, addr, value.type), align=align)


def offset_ir(b, addr, nbytes):
    return b.add(addr, ir.Constant(IR_I64, nbytes)) if nbytes else addr


def suffix(v):
    """LLVM's type suffix of an overloaded intrinsic: v16f32."""
    e = {"float": "f32", "half": "f16", "double": "f64"}.get(str(v.type.element), str(v.type.element))
    return f"v{v.type.count}{e}"


def fma_ir(b, x, y, z):
    return call_intrinsic(b, f"llvm.fma.{suffix(x)}", x.type, [x, y, z])


def hsum_ir(b, v):
    """Sum of the lanes as a tree of halves (fixed order: the same bytes on every path)."""
    n = v.type.count
    add = b.fadd if isinstance(v.type.element, ir.FloatType) else b.add
    while n > 1:
        n //= 2
        v = add(shuffle_ir(b, v, v, range(n)), shuffle_ir(b, v, v, range(n, 2 * n)))
    return b.extract_element(v, ir.Constant(IR_I32, 0))


def max_ir(b, x, y):
    """The larger lanes; y where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def opaque_ir(b, value):
    """An identity LLVM cannot see through (an empty asm): keeps it from merging overlapping loads or unrolling."""
    return b.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)


def after_ir(b, value, vectors):
    """`value`, which LLVM may only use once it has the vectors; no instruction, a processor waits for nothing."""
    signature = ir.FunctionType(value.type, [value.type, *(v.type for v in vectors)])
    return b.asm(signature, "", "=r,0" + (",w" if isa.ARM64 else ",v") * len(vectors), [value, *vectors], False)


def counted_loop_ir(b, count, carried, body):
    """`for _ in range(count)` (count >= 1) with the loop-carried values as phi nodes, that is, in registers.

    carried: [(ir type, initial value)]; body(b, values) -> new values.  Returns the final values.
    """
    entry = b.basic_block
    loop, done = b.append_basic_block("tile"), b.append_basic_block("tile.end")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(IR_I64)
    i.add_incoming(ir.Constant(IR_I64, 0), entry)
    phis = []
    for t, init in carried:
        phis.append(b.phi(t))
        phis[-1].add_incoming(init, entry)
    new = body(b, phis)
    after = b.add(i, ir.Constant(IR_I64, 1))
    last = b.basic_block
    i.add_incoming(after, last)
    for p, v in zip(phis, new, strict=True):
        p.add_incoming(v, last)
    b.cbranch(b.icmp_signed("<", after, count), loop, done)
    b.position_at_end(done)
    return new


# ---------------------------------------------------------------- makers: one intrinsic per element type and width
def make_load(elem, n):
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            return load_ir(b, args[0], vec_ir(elem, n))
        return V(elem, n)(types.int64), codegen
    return load


def make_store(elem, n):
    @intrinsic
    def store(typingctx, addr, v):
        def codegen(context, b, sig, args):
            store_ir(b, args[1], args[0])
            return context.get_dummy_value()
        return types.void(types.int64, V(elem, n)), codegen
    return store


def make_zero(elem, n):
    @intrinsic
    def zero(typingctx):
        def codegen(context, b, sig, args):
            return ir.Constant(vec_ir(elem, n), None)
        return V(elem, n)(), codegen
    return zero


def make_splat(elem, n, scalar):
    @intrinsic
    def splat(typingctx, s):
        def codegen(context, b, sig, args):
            return splat_ir(b, args[0], n)
        return V(elem, n)(scalar), codegen
    return splat


def make_half_load(n):
    """n float16 in memory -> n float32 lanes."""
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            return b.fpext(load_ir(b, args[0], vec_ir("f16", n)), vec_ir("f32", n))
        return V("f32", n)(types.int64), codegen
    return load


def half_ir(b, v):
    """float32 lanes -> float16 bit patterns as i16 lanes, nearest even.

    On x86 they are complete in a register before they are stored: the conversion that stores is slow on AMD's
    processors (docs/measured.md, "Choices in the kernels").
    """
    n = v.type.count
    h = b.bitcast(b.fptrunc(v, vec_ir("f16", n)), vec_ir("i16", n))
    return b.asm(ir.FunctionType(h.type, [h.type]), "", "=v,0", [h], False) if isa.X86_LEVEL else h


def make_half_store(n):
    """n float32 lanes -> float16 in memory, nearest even."""
    @intrinsic
    def store(typingctx, addr, v):
        def codegen(context, b, sig, args):
            store_ir(b, half_ir(b, args[1]), args[0])
            return context.get_dummy_value()
        return types.void(types.int64, V("f32", n)), codegen
    return store


def make_bf16_load(n):
    """n bfloat16 in memory -> n float32 lanes: the upper halves of the words."""
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            h = b.zext(load_ir(b, args[0], vec_ir("i16", n)), vec_ir("i32", n))
            return b.bitcast(b.shl(h, const_ir("i32", [16] * n)), vec_ir("f32", n))
        return V("f32", n)(types.int64), codegen
    return load


def bf16_ir(b, v):
    """float32 lanes -> bfloat16 bit patterns as i16 lanes: nearest even, NaN made quiet (ggml's rule)."""
    n = v.type.count

    def c(k):
        return const_ir("i32", [k] * n)
    u = b.bitcast(v, vec_ir("i32", n))
    rounded = b.lshr(b.add(u, b.add(c(0x7FFF), b.and_(b.lshr(u, c(16)), c(1)))), c(16))
    quiet = b.or_(b.lshr(u, c(16)), c(64))
    is_nan = b.icmp_unsigned(">", b.and_(u, c(0x7FFFFFFF)), c(0x7F800000))
    return b.trunc(b.select(is_nan, quiet, rounded), vec_ir("i16", n))


def make_bf16_store(n):
    @intrinsic
    def store(typingctx, addr, v):
        def codegen(context, b, sig, args):
            store_ir(b, bf16_ir(b, args[1]), args[0])
            return context.get_dummy_value()
        return types.void(types.int64, V("f32", n)), codegen
    return store


def make_ir(result, build):
    """An intrinsic from a one-line IR builder: make_ir(lambda *types: result type, lambda b, *values: value)."""
    n_args = build.__code__.co_argcount - 1

    def typed(*ts):
        def codegen(context, b, sig, args):
            return build(b, *args)
        return result(*ts)(*ts), codegen
    if n_args == 1:
        @intrinsic
        def f(typingctx, x):
            return typed(x)
    elif n_args == 2:
        @intrinsic
        def f(typingctx, x, y):
            return typed(x, y)
    else:
        @intrinsic
        def f(typingctx, x, y, z):
            return typed(x, y, z)
    return f


def _same(*ts):
    return ts[0]


# ---------------------------------------------------------------- the vocabulary: any vector width
fadd = make_ir(_same, lambda b, x, y: b.fadd(x, y))
fsub = make_ir(_same, lambda b, x, y: b.fsub(x, y))
fmul = make_ir(_same, lambda b, x, y: b.fmul(x, y))
fdiv = make_ir(_same, lambda b, x, y: b.fdiv(x, y))
fneg = make_ir(_same, lambda b, x: b.fneg(x))
fma = make_ir(_same, fma_ir)                                        # x * y + z, one rounding
vmax = make_ir(_same, max_ir)
vmin = make_ir(_same, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
vsqrt = make_ir(_same, lambda b, x: call_intrinsic(b, f"llvm.sqrt.{suffix(x)}", x.type, [x]))
iadd = make_ir(_same, lambda b, x, y: b.add(x, y))
isub = make_ir(_same, lambda b, x, y: b.sub(x, y))
imul = make_ir(_same, lambda b, x, y: b.mul(x, y))
iand = make_ir(_same, lambda b, x, y: b.and_(x, y))
ior = make_ir(_same, lambda b, x, y: b.or_(x, y))
hsum = make_ir(lambda t: f32, hsum_ir)
i2f = make_ir(lambda t: V("f32", t.n), lambda b, x: b.sitofp(x, vec_ir("f32", x.type.count)))
round_f16v = make_ir(_same, lambda b, x: b.fpext(b.fptrunc(x, vec_ir("f16", x.type.count)), x.type))
opaque = make_ir(_same, opaque_ir)                                  # int64 -> int64


def _hmax_ir(b, v):
    n = v.type.count
    while n > 1:
        n //= 2
        v = max_ir(b, shuffle_ir(b, v, v, range(n)), shuffle_ir(b, v, v, range(n, 2 * n)))
    return b.extract_element(v, ir.Constant(IR_I32, 0))


hmax = make_ir(lambda t: f32, _hmax_ir)

# ---------------------------------------------------------------- the native width
ldf, stf, zerof, splat = make_load("f32", W), make_store("f32", W), make_zero("f32", W), make_splat("f32", W, f32)
ldh, sth = make_half_load(W), make_half_store(W)
ldb, stb = make_bf16_load(W), make_bf16_store(W)
ldi, sti, zeroi, splati = (make_load("i32", W), make_store("i32", W), make_zero("i32", W),
                           make_splat("i32", W, types.int32))


# ---------------------------------------------------------------- row tails: the first n lanes, n < W
def _mask_ir(b, n):
    lanes = const_ir("i32", range(W))
    return b.icmp_signed("<", lanes, splat_ir(b, b.trunc(n, IR_I32), W))


@intrinsic
def ldf_part(typingctx, addr, n):
    """The first n float32 at addr, zeros above; touches no byte beyond them."""
    def codegen(context, b, sig, args):
        v = vec_ir("f32", W)
        p = pointer(b, args[0], v)
        ty = ir.FunctionType(v, [p.type, IR_I32, ir.VectorType(ir.IntType(1), W), v])
        fn = _declare(b, ty, f"llvm.masked.load.v{W}f32.p0")
        return b.call(fn, [p, ir.Constant(IR_I32, 1), _mask_ir(b, args[1]), ir.Constant(v, None)])
    return V("f32", W)(types.int64, types.int64), codegen


@intrinsic
def stf_part(typingctx, addr, v, n):
    """Stores the first n lanes only."""
    def codegen(context, b, sig, args):
        p = pointer(b, args[0], args[1].type)
        ty = ir.FunctionType(ir.VoidType(), [args[1].type, p.type, IR_I32, ir.VectorType(ir.IntType(1), W)])
        fn = _declare(b, ty, f"llvm.masked.store.v{W}f32.p0")
        b.call(fn, [args[1], p, ir.Constant(IR_I32, 1), _mask_ir(b, args[2])])
        return context.get_dummy_value()
    return types.void(types.int64, V("f32", W), types.int64), codegen


@intrinsic
def keep_part(typingctx, v, n, fill):
    """Lanes 0..n-1 of v, `fill` in the others (reductions over a tail)."""
    def codegen(context, b, sig, args):
        return b.select(_mask_ir(b, args[1]), args[0], splat_ir(b, args[2], W))
    return v(v, types.int64, types.float32), codegen


def _declare(b, fnty, name):
    return cgutils.get_or_insert_function(b.module, fnty, name)
