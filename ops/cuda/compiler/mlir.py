"""The functions that CUDA kernels call, by numba-cuda-mlir: those of `intrinsics`, as MLIR.

Read `intrinsics` first.  A function is written as what it emits: values of MLIR in, a value or a tuple of values out.
"""
import functools
import inspect

from numba_cuda_mlir import types
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm
from numba_cuda_mlir.extending import intrinsic, refresh_registries

from ggjit.ops.cuda.compiler.alike import *  # noqa: F403

GLOBAL, SHARED = 1, 3           # LLVM address spaces of NVPTX
b1, i32, i64, f32 = types.boolean, types.int32, types.int64, types.float32



def emits(result, *parameters):
    """Make a function of kernels out of one that emits MLIR: `result` and `parameters` are Numba's types of both."""
    def made(emit):
        def lower(builder, target, args, kwargs):
            given = [_values(builder, v, t) for v, t in zip(args, parameters, strict=True)]
            builder.store_var(target, emit(*given))

        def call(typingctx, *args):
            return result(*parameters), lower
        call.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD)
             for n in ("typingctx", *(f"x{i}" for i in range(len(parameters))))])
        return intrinsic(call)
    return made


def _values(builder, variable, type):
    value = builder.load_var(variable)
    if isinstance(type, types.UniTuple):
        return [builder.mlir_convert(value[i], builder.get_mlir_type(type.dtype)) for i in range(type.count)]
    return builder.mlir_convert(value, builder.get_mlir_type(type))


# ---------------------------------------------------------------- MLIR's types, operations
def _int(n_bits):
    return ir.IntegerType.get_signless(n_bits)


I8, I16, I32, I64 = (functools.partial(_int, n) for n in (8, 16, 32, 64))       # called where there is an MLIR context
F16, F32 = ir.F16Type.get, ir.F32Type.get


def constant(value, type):
    return arith.constant(type, value)


def _shifted(v, n_bits, shift):
    return shift(v, constant(n_bits, v.type))


def _bits(v, type):
    return llvm.bitcast(type, v)


def _asm(results, operands, text, constraints, effects=False):
    """Values of one PTX instruction."""
    if len(results) == 1:
        return llvm.inline_asm(results[0], operands, text, constraints, has_side_effects=effects)
    struct = llvm.StructType.get_literal(results)
    packed = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=effects)
    return tuple(llvm.extractvalue(type, packed, [i]) for i, type in enumerate(results))


# ---------------------------------------------------------------- memory
def _pointer(address, space):
    return llvm.inttoptr(llvm.PointerType.get(space), address)


def _loader(mlir_type, nbty, nbytes, space=GLOBAL, constant=False, convert=None):
    @emits(nbty, i64)
    def load(address):
        v = llvm.load(mlir_type(), _pointer(address, space), alignment=nbytes, invariant=constant)
        return convert(v) if convert else v
    return load


def _storer(nbty, nbytes, space=GLOBAL, convert=None):
    @emits(types.void, i64, nbty)
    def store(address, v):
        llvm.store(convert(v) if convert else v, _pointer(address, space), alignment=nbytes)
    return store


def _widen_bf16(v):
    return _bits(_shifted(arith.extui(I32(), v), 16, arith.shli), F32())


def _round_bf16(v):
    """Nearest even; NaN made quiet (ggml_compute_fp32_to_bf16)."""
    bits = _bits(v, I32())
    upper = _shifted(bits, 16, arith.shrui)
    half = arith.addi(constant(0x7FFF, I32()), arith.andi(upper, constant(1, I32())))
    rounded = _shifted(arith.addi(bits, half), 16, arith.shrui)
    quiet = arith.ori(upper, constant(64, I32()))
    return arith.trunci(I16(), arith.select(arith.cmpf(arith.CmpFPredicate.UNO, v, v), quiet, rounded))


def _widen(v):
    return arith.extf(F32(), v)


def _narrow(v):
    return arith.truncf(F16(), v)


def _zext(v):
    return arith.extui(I32(), v)


def _sext(v):
    return arith.extsi(I32(), v)


def _low(type):
    return lambda v: arith.trunci(type(), v)


ld_f32, st_f32 = _loader(F32, f32, 4), _storer(f32, 4)
ld_f16, st_f16 = _loader(F16, f32, 2, convert=_widen), _storer(f32, 2, convert=_narrow)
ld_bf16, st_bf16 = _loader(I16, f32, 2, convert=_widen_bf16), _storer(f32, 2, convert=_round_bf16)
ld_i64, st_i64 = _loader(I64, i64, 8), _storer(i64, 8)
st_i64_any = st_i64             # threads may write one place: the value of any of them stays
ld_i32, st_i32 = _loader(I32, i32, 4), _storer(i32, 4)
ld_u16, st_i16 = _loader(I16, i32, 2, convert=_zext), _storer(i32, 2, convert=_low(I16))
ld_i16 = _loader(I16, i32, 2, convert=_sext)
ld_u8, st_i8 = _loader(I8, i32, 1, convert=_zext), _storer(i32, 1, convert=_low(I8))
ld_i8 = _loader(I8, i32, 1, convert=_sext)
ldc_i64, ldc_i32, ldc_f32 = (_loader(t, n, size, constant=True) for t, n, size in (
    (I64, i64, 8), (I32, i32, 4), (F32, f32, 4)))
lds_f32, sts_f32 = _loader(F32, f32, 4, SHARED), _storer(f32, 4, SHARED)
lds_i32, sts_i32 = _loader(I32, i32, 4, SHARED), _storer(i32, 4, SHARED)
lds_i64, sts_i64 = _loader(I64, i64, 8, SHARED), _storer(i64, 8, SHARED)
lds_f16, lds_u16 = _loader(F16, f32, 2, SHARED, convert=_widen), _loader(I16, i32, 2, SHARED, convert=_zext)
lds_u8, lds_i8 = (_loader(I8, i32, 1, SHARED, convert=c) for c in (_zext, _sext))


def _two_halves(space):
    """Four bytes at a multiple of two."""
    @emits(i32, i64)
    def load(address):
        low = llvm.load(I16(), _pointer(address, space), alignment=2)
        high = llvm.load(I16(), _pointer(arith.addi(address, constant(2, I64())), space), alignment=2)
        return arith.ori(_zext(low), _shifted(_zext(high), 16, arith.shli))
    return load


ld_i32_2, lds_i32_2 = _two_halves(GLOBAL), _two_halves(SHARED)


def _vector_loader(mlir_type, nbty, space=GLOBAL):
    """Four elements in one instruction; the address is a multiple of all their bytes.  A tuple."""
    @emits(types.UniTuple(nbty, 4), i64)
    def load(address):
        v = llvm.load(ir.VectorType.get([4], mlir_type()), _pointer(address, space), alignment=16)
        return tuple(llvm.extractelement(v, constant(i, I32())) for i in range(4))
    return load


ld_i32x4, ld_f32x4 = _vector_loader(I32, i32), _vector_loader(F32, f32)
lds_i32x4 = _vector_loader(I32, i32, SHARED)


@emits(types.void, i64, types.UniTuple(i32, 4))
def sts_i32x4(address, words):
    """Four words to shared memory in one instruction; the address is a multiple of 16."""
    vector = llvm.mlir_undef(ir.VectorType.get([4], I32()))
    for i in range(4):
        vector = llvm.insertelement(vector, words[i], constant(i, I32()))
    llvm.store(vector, _pointer(address, SHARED), alignment=16)


def shared(nbytes):
    """Shared memory of one kernel, 16-byte aligned: `piece = shared(512)` outside the kernel, `piece()` its address.

    Call it in one function and pass the address on: a second caller would get a second piece.
    """
    def lower(builder, target, args, kwargs):
        name, module = f"shared_{nbytes}_{id(lower):x}", builder.mlir_gpu_module
        if name not in ir.SymbolTable(module.operation):
            with ir.InsertionPoint(module.bodyRegion.blocks[0]):
                llvm.mlir_global(llvm.ArrayType.get(I8(), nbytes), name, ir.Attribute.parse("#llvm.linkage<internal>"),
                                 alignment=16, addr_space=SHARED)
        start = llvm.mlir_addressof(llvm.PointerType.get(SHARED), name)
        builder.store_var(target, llvm.ptrtoint(I64(), start))

    def call(typingctx):
        return i64(), lower
    made = intrinsic(call)
    refresh_registries()                # kernels may have been compiled already
    return made


# ---------------------------------------------------------------- copies that go on beside the thread
def _in_shared(address):
    """The 32 bits that PTX takes of an address in shared memory."""
    return arith.trunci(I32(), address)


@emits(types.void, i64, i64, i64)
def copy_16(to, source, n):
    """16 bytes from global to shared memory; those behind the first n are zeros.  Both at multiples of 16."""
    llvm.inline_asm(None, [_in_shared(to), source, arith.trunci(I32(), n)],
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}", has_side_effects=True)


@emits(types.void)
def copies_end():
    """The copies since the last end are a group."""
    llvm.inline_asm(None, [], "cp.async.commit_group;", "~{memory}", has_side_effects=True)


def copies_but(n):
    """A function that waits until all groups of this thread's copies but the last n are there."""
    @emits(types.void)
    def wait():
        llvm.inline_asm(None, [], f"cp.async.wait_group {n};", "~{memory}", has_side_effects=True)
    return wait


@emits(types.UniTuple(i32, 4), i64)
def ldmatrix_t(address):
    """Four matrices of 8 x 8 halves, transposed; see intrinsics.py."""
    return _asm([I32()] * 4, [_in_shared(address)], "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, "
                "[$4];", "=r,=r,=r,=r,r,~{memory}", effects=True)


# ---------------------------------------------------------------- bits
f32_bits = emits(i32, f32)(lambda x: _bits(x, I32()))
bits_f32 = emits(f32, i32)(lambda x: _bits(x, F32()))


def _half_of(shift, half):
    """One half of a word as float32."""
    @emits(f32, i32)
    def value(x):
        bits = arith.trunci(I16(), _shifted(x, shift, arith.shrui))
        return _widen_bf16(bits) if half is None else _widen(_bits(bits, half()))
    return value


low_f16, high_f16, low_bf16, high_bf16 = (_half_of(s, h) for h in (F16, None) for s in (0, 16))


@emits(f32, f32)
def round_f16(x):
    """float32 rounded to half precision and back."""
    return _widen(_narrow(x))


def _pack(bits):
    @emits(i32, f32, f32)
    def word(low, high):
        return arith.ori(_zext(bits(low)), _shifted(_zext(bits(high)), 16, arith.shli))
    return word


pack_f16, pack_bf16 = _pack(lambda x: _bits(_narrow(x), I16())), _pack(_round_bf16)


@emits(i32, f32)
def to_i32(x):
    """float32 -> int32 toward zero; values beyond the range saturate, NaN gives 0 (cvt.rzi)."""
    return _asm([I32()], [x], "cvt.rzi.s32.f32 $0, $1;", "=r,f")


@emits(i32, i32, i32, i32)
def permute(a, b, selector):
    """Byte i: byte `selector >> 4 i & 7` of the eight of a and b."""
    return _asm([I32()], [a, b, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


# ---------------------------------------------------------------- arithmetic
@emits(i32, i32, i32, i32)
def fma_f16(a, b, c):
    """a b + c of two float16 each, rounded once."""
    return _asm([I32()], [a, b, c], "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r")


@emits(i32, i32, i32, i32)
def dp4a(a, b, c):
    """c + the sum of the four products of the signed bytes of a and b."""
    return _asm([I32()], [a, b, c], "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")


def _mma(instruction):
    """mma.sync: 16 x 8 results += 16 x k times k x 8; a0..a3, b0, b1 packed words, c0..c3 the lane's four results.

    All lanes of the warp execute it together; said to have effects, so that nothing moves it into a branch.
    """
    @emits(types.UniTuple(f32, 4), *[i32] * 6, *[f32] * 4)
    def mma(*given):
        text = f"{instruction} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
        return _asm([F32()] * 4, given, text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4), effects=True)
    return mma


mma_f16 = _mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
mma_bf16 = _mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")


@emits(types.UniTuple(i32, 4), i32, i32, i32)
def mma_i8(a0, a1, b0):
    """16 x 8 int32 sums of products of signed bytes, k = 16: a0, a1, b0 packed words; the lane's four results."""
    text = "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
    zero = constant(0, I32())
    return _asm([I32()] * 4, [a0, a1, b0, *[zero] * 4], text, ",".join(["=r"] * 4 + ["r"] * 7), effects=True)
