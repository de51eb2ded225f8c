"""The functions that CUDA kernels call, on the device.  `simulated.py` has the same names; `core.py` picks one of both.

Addresses are int64.  `ld_*` and `st_*` reach global memory (tensors), `ldc_*` global memory that no kernel writes
while this one runs (NODE rows, through the read-only cache), `lds_*` and `sts_*` shared memory.  Elements lie at
multiples of their own size; block types only promise 2 bytes, so their words are read as halves (`ld_i32_2`).
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda import cudadecl
from numba.cuda.extending import intrinsic

from ggjit.ops.cuda.compiler.alike import *  # noqa: F403
from ggjit.ops.cuda.compiler.alike import local

I8, I16, I32, I64, F16, F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(),
                               ir.FloatType())
GLOBAL, SHARED = 1, 3           # LLVM address spaces of NVPTX

cudadecl.registry.register_global(local, types.Module(local))           # so that kernels may name it without `cuda`


# ---------------------------------------------------------------- memory
def _pointer(b, addr, irty, space):
    return b.inttoptr(addr, irty.as_pointer(space))


def _loader(irty, nbty, nbytes, space=GLOBAL, constant=False, convert=None):
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            v = b.load(_pointer(b, args[0], irty, space), align=nbytes)
            if constant:
                v.set_metadata("invariant.load", b.module.add_metadata([]))
            return convert(b, v) if convert else v
        return nbty(types.int64), codegen
    return load


def _storer(irty, nbty, nbytes, space=GLOBAL, convert=None):
    @intrinsic
    def store(typingctx, addr, value):
        def codegen(context, b, sig, args):
            v = convert(b, args[1]) if convert else args[1]
            b.store(v, _pointer(b, args[0], irty, space), align=nbytes)
            return context.get_dummy_value()
        return types.void(types.int64, nbty), codegen
    return store


def _widen_bf16(b, v):
    return b.bitcast(b.shl(b.zext(v, I32), ir.Constant(I32, 16)), F32)


def _round_bf16(b, v):
    """Nearest even; NaN made quiet (ggml_compute_fp32_to_bf16)."""
    bits = b.bitcast(v, I32)
    upper = b.lshr(bits, ir.Constant(I32, 16))
    half = b.add(ir.Constant(I32, 0x7FFF), b.and_(upper, ir.Constant(I32, 1)))
    rounded = b.lshr(b.add(bits, half), ir.Constant(I32, 16))
    quiet = b.or_(upper, ir.Constant(I32, 64))
    return b.trunc(b.select(b.fcmp_unordered("uno", v, v), quiet, rounded), I16)


def _widen(b, v):
    return b.fpext(v, F32)


def _narrow(b, v):
    return b.fptrunc(v, F16)


def _zext(b, v):
    return b.zext(v, I32)


def _sext(b, v):
    return b.sext(v, I32)


def _low(irty):
    return lambda b, v: b.trunc(v, irty)


ld_f32, st_f32 = _loader(F32, types.float32, 4), _storer(F32, types.float32, 4)
ld_f16, st_f16 = _loader(F16, types.float32, 2, convert=_widen), _storer(F16, types.float32, 2, convert=_narrow)
ld_bf16 = _loader(I16, types.float32, 2, convert=_widen_bf16)
st_bf16 = _storer(I16, types.float32, 2, convert=_round_bf16)
ld_i64, st_i64 = _loader(I64, types.int64, 8), _storer(I64, types.int64, 8)
st_i64_any = st_i64             # threads may write one place: the value of any of them stays
ld_i32, st_i32 = _loader(I32, types.int32, 4), _storer(I32, types.int32, 4)
ld_u16, st_i16 = _loader(I16, types.int32, 2, convert=_zext), _storer(I16, types.int32, 2, convert=_low(I16))
ld_i16 = _loader(I16, types.int32, 2, convert=_sext)
ld_u8, st_i8 = _loader(I8, types.int32, 1, convert=_zext), _storer(I8, types.int32, 1, convert=_low(I8))
ld_i8 = _loader(I8, types.int32, 1, convert=_sext)
ldc_i64, ldc_i32 = _loader(I64, types.int64, 8, constant=True), _loader(I32, types.int32, 4, constant=True)
ldc_f32 = _loader(F32, types.float32, 4, constant=True)
lds_f32, sts_f32 = _loader(F32, types.float32, 4, SHARED), _storer(F32, types.float32, 4, SHARED)
lds_i32, sts_i32 = _loader(I32, types.int32, 4, SHARED), _storer(I32, types.int32, 4, SHARED)
lds_i64, sts_i64 = _loader(I64, types.int64, 8, SHARED), _storer(I64, types.int64, 8, SHARED)
lds_f16, lds_u16 = (_loader(t, n, 2, SHARED, convert=c) for t, n, c in (
    (F16, types.float32, _widen), (I16, types.int32, _zext)))
lds_u8, lds_i8 = (_loader(I8, types.int32, 1, SHARED, convert=c) for c in (_zext, _sext))


def _two_halves(space):
    """Four bytes at a multiple of two."""
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            low = b.load(_pointer(b, args[0], I16, space), align=2)
            high = b.load(_pointer(b, b.add(args[0], ir.Constant(I64, 2)), I16, space), align=2)
            return b.or_(b.zext(low, I32), b.shl(b.zext(high, I32), ir.Constant(I32, 16)))
        return types.int32(types.int64), codegen
    return load


ld_i32_2, lds_i32_2 = _two_halves(GLOBAL), _two_halves(SHARED)


def _vector_loader(irty, nbty, n, space=GLOBAL):
    """n elements in one instruction; the address is a multiple of all their bytes.  A tuple."""
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            vector = ir.VectorType(irty, n)
            v = b.load(_pointer(b, args[0], vector, space), align=n * 4)
            return cgutils.pack_array(b, [b.extract_element(v, ir.Constant(I32, i)) for i in range(n)])
        return types.UniTuple(nbty, n)(types.int64), codegen
    return load


ld_i32x4, ld_f32x4 = _vector_loader(I32, types.int32, 4), _vector_loader(F32, types.float32, 4)
lds_i32x4 = _vector_loader(I32, types.int32, 4, SHARED)


@intrinsic
def sts_i32x4(typingctx, addr, v):
    """Four words to shared memory in one instruction; the address is a multiple of 16."""
    def codegen(context, b, sig, args):
        vector = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for i in range(4):
            vector = b.insert_element(vector, b.extract_value(args[1], i), ir.Constant(I32, i))
        b.store(vector, _pointer(b, args[0], vector.type, SHARED), align=16)
        return context.get_dummy_value()
    return types.void(types.int64, types.UniTuple(types.int32, 4)), codegen


# ---------------------------------------------------------------- copies that go on beside the thread
def _acting(text, constraints, *parameters, lanes=0):
    """A PTX instruction that touches memory, of integers; addresses of shared memory ("r") have 32 bits.

    lanes: how many words it gives, in a tuple; all lanes of the warp execute it together then.
    """
    result = types.UniTuple(types.int32, lanes) if lanes else types.void

    def codegen(context, b, sig, args):
        given = [b.trunc(x, I32) if kind == "r" else x for x, kind in zip(args, parameters, strict=True)]
        returns = ir.LiteralStructType([I32] * lanes) if lanes else ir.VoidType()
        asm = ir.InlineAsm(ir.FunctionType(returns, [x.type for x in given]), text, constraints, side_effect=True)
        made = b.call(asm, given, attrs=("convergent",) if lanes else ())
        return cgutils.pack_array(b, [b.extract_value(made, i) for i in range(lanes)]) if lanes else \
            context.get_dummy_value()
    return result(*[types.int64] * len(parameters)), codegen


@intrinsic
def copy_16(typingctx, to, source, n):
    """16 bytes from global to shared memory; those behind the first n are zeros.  Both at multiples of 16."""
    return _acting("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}", "r", "l", "r")


@intrinsic
def copies_end(typingctx):
    """The copies since the last end are a group."""
    return _acting("cp.async.commit_group;", "~{memory}")


def copies_but(n):
    """A function that waits until all groups of this thread's copies but the last n are there."""
    @intrinsic
    def wait(typingctx):
        return _acting(f"cp.async.wait_group {n};", "~{memory}")
    return wait


@intrinsic
def ldmatrix_t(typingctx, addr):
    """Four matrices of 8 x 8 halves, lane 8 i + r gives the address of row r of matrix i: the words of each that lane
    4 c + p has of a transposed one, rows 2 p and 2 p + 1 of column c."""
    return _acting("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r,~{memory}",
                   "r", lanes=4)


# ---------------------------------------------------------------- bits
def _bitcaster(src_nb, dst_ir, dst_nb):
    @intrinsic
    def cast(typingctx, x):
        return dst_nb(src_nb), lambda context, b, sig, args: b.bitcast(args[0], dst_ir)
    return cast


f32_bits, bits_f32 = _bitcaster(types.float32, I32, types.int32), _bitcaster(types.int32, F32, types.float32)


def _half_of(shift, half):
    """One half of a word as float32."""
    @intrinsic
    def value(typingctx, x):
        def codegen(context, b, sig, args):
            bits = b.trunc(b.lshr(args[0], ir.Constant(I32, shift)), I16)
            return _widen_bf16(b, bits) if half is None else b.fpext(b.bitcast(bits, half), F32)
        return types.float32(types.int32), codegen
    return value


low_f16, high_f16, low_bf16, high_bf16 = (_half_of(s, h) for h in (F16, None) for s in (0, 16))


@intrinsic
def round_f16(typingctx, x):
    """float32 rounded to half precision and back."""
    def codegen(context, b, sig, args):
        return b.fpext(b.fptrunc(args[0], F16), F32)
    return types.float32(types.float32), codegen


@intrinsic
def pack_f16(typingctx, low, high):
    """Two float32 as float16 in one word."""
    def codegen(context, b, sig, args):
        halves = [b.zext(b.bitcast(b.fptrunc(x, F16), I16), I32) for x in args]
        return b.or_(halves[0], b.shl(halves[1], ir.Constant(I32, 16)))
    return types.int32(types.float32, types.float32), codegen


@intrinsic
def pack_bf16(typingctx, low, high):
    """Two float32 as bfloat16 in one word."""
    def codegen(context, b, sig, args):
        halves = [b.zext(_round_bf16(b, x), I32) for x in args]
        return b.or_(halves[0], b.shl(halves[1], ir.Constant(I32, 16)))
    return types.int32(types.float32, types.float32), codegen


@intrinsic
def to_i32(typingctx, x):
    """float32 -> int32 toward zero; values beyond the range saturate, NaN gives 0 (cvt.rzi)."""
    def codegen(context, b, sig, args):
        asm = ir.InlineAsm(ir.FunctionType(I32, [F32]), "cvt.rzi.s32.f32 $0, $1;", "=r,f", side_effect=False)
        return b.call(asm, args)
    return types.int32(types.float32), codegen


def _of_three(text):
    """A PTX instruction of three words."""
    def codegen(context, b, sig, args):
        return b.call(ir.InlineAsm(ir.FunctionType(I32, [I32] * 3), text, "=r,r,r,r", side_effect=False), args)
    return types.int32(types.int32, types.int32, types.int32), codegen


@intrinsic
def permute(typingctx, a, b, selector):
    """Byte i: byte `selector >> 4 i & 7` of the eight of a and b."""
    return _of_three("prmt.b32 $0, $1, $2, $3;")


# ---------------------------------------------------------------- arithmetic
@intrinsic
def dp4a(typingctx, a, b, c):
    """c + the sum of the four products of the signed bytes of a and b."""
    return _of_three("dp4a.s32.s32 $0, $1, $2, $3;")


@intrinsic
def fma_f16(typingctx, a, b, c):
    """a b + c of two float16 each, rounded once."""
    return _of_three("fma.rn.f16x2 $0, $1, $2, $3;")


def _mma(instruction, acc_ir, acc_nb, letter):
    """mma.sync: 16 x 8 results += 16 x k times k x 8; a0..a3, b0, b1 packed words, c0..c3 the lane's four results.

    All lanes of the warp execute it together: convergent, so that LLVM does not move it into a branch.
    """
    @intrinsic
    def mma(typingctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        sig = types.UniTuple(acc_nb, 4)(*([types.int32] * 6 + [acc_nb] * 4))

        def codegen(context, b, signature, args):
            ft = ir.FunctionType(ir.LiteralStructType([acc_ir] * 4), [I32] * 6 + [acc_ir] * 4)
            text = f"{instruction} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
            constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)
            r = b.call(ir.InlineAsm(ft, text, constraints, side_effect=False), args, attrs=("convergent",))
            return cgutils.pack_array(b, [b.extract_value(r, i) for i in range(4)])
        return sig, codegen
    return mma


mma_f16 = _mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", F32, types.float32, "f")
mma_bf16 = _mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", F32, types.float32, "f")


@intrinsic
def mma_i8(typingctx, a0, a1, b0):
    """16 x 8 int32 sums of products of signed bytes, k = 16: a0, a1, b0 packed words; the lane's four results."""
    sig = types.UniTuple(types.int32, 4)(types.int32, types.int32, types.int32)

    def codegen(context, b, signature, args):
        ft = ir.FunctionType(ir.LiteralStructType([I32] * 4), [I32] * 7)
        text = "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
        zero = ir.Constant(I32, 0)
        asm = ir.InlineAsm(ft, text, "=r,=r,=r,=r,r,r,r,r,r,r,r", side_effect=False)
        r = b.call(asm, [*args, *[zero] * 4], attrs=("convergent",))
        return cgutils.pack_array(b, [b.extract_value(r, i) for i in range(4)])
    return sig, codegen
