"""Scalar access by address, atomics, and calls by address, for jitted code.  Addresses are int64.

Loads and stores carry align=1: tensors may start anywhere, and an aligned vector move on an odd address is a fault.
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

IR_I32, IR_I64, IR_F32, IR_F16 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.HalfType()


def pointer(b, addr, irty):
    """LLVM pointer to `irty` at the int64 `addr`."""
    return b.inttoptr(addr, irty.as_pointer())


def call_intrinsic(b, name, ret, args):
    """Call the LLVM intrinsic (or C function of the process) `name`."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return b.call(fn, args)


def _loader(irty, nbty, widen=None):
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, b, sig, args):
            v = b.load(pointer(b, args[0], irty), align=1)
            return b.fpext(v, IR_F32) if widen else v
        return nbty(types.int64), codegen
    return load


def _storer(irty, nbty, narrow=None):
    @intrinsic
    def store(typingctx, addr, value):
        def codegen(context, b, sig, args):
            v = b.fptrunc(args[1], irty) if narrow else args[1]
            b.store(v, pointer(b, args[0], irty), align=1)
            return context.get_dummy_value()
        return types.void(types.int64, nbty), codegen
    return store


ld_i64, ld_i32 = _loader(IR_I64, types.int64), _loader(IR_I32, types.int32)
ld_i16, ld_u16 = _loader(ir.IntType(16), types.int16), _loader(ir.IntType(16), types.uint16)
ld_i8, ld_u8 = _loader(ir.IntType(8), types.int8), _loader(ir.IntType(8), types.uint8)
ld_f32, ld_f64 = _loader(IR_F32, types.float32), _loader(ir.DoubleType(), types.float64)
ld_f16 = _loader(IR_F16, types.float32, widen=True)                 # half in memory, float32 in registers
st_i64, st_i32, st_i16, st_i8 = (_storer(ir.IntType(n), t) for n, t in (
    (64, types.int64), (32, types.int32), (16, types.int16), (8, types.int8)))
st_f32, st_f64 = _storer(IR_F32, types.float32), _storer(ir.DoubleType(), types.float64)
st_f16 = _storer(IR_F16, types.float32, narrow=True)                # rounds to nearest even, as ggml


def _bitcaster(src_ir, src_nb, dst_ir, dst_nb):
    @intrinsic
    def cast(typingctx, x):
        def codegen(context, b, sig, args):
            return b.bitcast(args[0], dst_ir)
        return dst_nb(src_nb), codegen
    return cast


f32_bits = _bitcaster(IR_F32, types.float32, IR_I32, types.int32)
bits_f32 = _bitcaster(IR_I32, types.int32, IR_F32, types.float32)


@intrinsic
def half_of(typingctx, bits):
    """The float16 of the lower 16 bits, as float32."""
    def codegen(context, b, sig, args):
        return b.fpext(b.bitcast(b.trunc(args[0], ir.IntType(16)), IR_F16), IR_F32)
    return types.float32(types.int64), codegen


@intrinsic
def half_bits(typingctx, x):
    """The 16 bits of float32 rounded to float16 (nearest even)."""
    def codegen(context, b, sig, args):
        return b.zext(b.bitcast(b.fptrunc(args[0], IR_F16), ir.IntType(16)), IR_I64)
    return types.int64(types.float32), codegen


@intrinsic
def round_f16(typingctx, x):
    """float32 rounded to half precision (nearest even) and back."""
    def codegen(context, b, sig, args):
        return b.fpext(b.fptrunc(args[0], IR_F16), IR_F32)
    return types.float32(types.float32), codegen


@intrinsic
def copy_bytes(typingctx, dst, src, n):
    """memcpy(dst, src, n)"""
    def codegen(context, b, sig, args):
        i8 = ir.IntType(8)
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(
            ir.VoidType(), [i8.as_pointer(), i8.as_pointer(), IR_I64, ir.IntType(1)]), "llvm.memcpy.p0.p0.i64")
        b.call(fn, [pointer(b, args[0], i8), pointer(b, args[1], i8), args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_bytes(typingctx, dst, n):
    """memset(dst, 0, n)"""
    def codegen(context, b, sig, args):
        i8 = ir.IntType(8)
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(
            ir.VoidType(), [i8.as_pointer(), i8, IR_I64, ir.IntType(1)]), "llvm.memset.p0.i64")
        b.call(fn, [pointer(b, args[0], i8), ir.Constant(i8, 0), args[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


# ---------------------------------------------------------------- atomics on 8-byte words
@intrinsic
def atomic_add(typingctx, addr, value):
    """Adds, returns the value before."""
    def codegen(context, b, sig, args):
        return b.atomic_rmw("add", pointer(b, args[0], IR_I64), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, addr):
    def codegen(context, b, sig, args):
        return b.load_atomic(pointer(b, args[0], IR_I64), "acquire", 8)
    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, addr, value):
    def codegen(context, b, sig, args):
        b.store_atomic(args[1], pointer(b, args[0], IR_I64), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


# ---------------------------------------------------------------- calls
def _caller(n_args):
    @intrinsic
    def call(typingctx, address, args):
        def codegen(context, b, sig, a):
            fnty = ir.FunctionType(IR_I64, [IR_I64] * n_args)
            words = [b.extract_value(a[1], i) for i in range(n_args)]
            return b.call(b.inttoptr(a[0], fnty.as_pointer()), words)
        return types.int64(types.int64, types.UniTuple(types.int64, n_args)), codegen
    return call


call1 = _caller(1)              # call1(address, (a,)) -> int64
call4 = _caller(4)              # call4(address, (node, ith, nth, sync)) -> status


@intrinsic
def cycles(typingctx):
    """The processor's time stamp counter."""
    def codegen(context, b, sig, args):
        return call_intrinsic(b, "llvm.readcyclecounter", IR_I64, [])
    return types.int64(), codegen
