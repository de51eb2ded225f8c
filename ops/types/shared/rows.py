"""Row access by element type: how a kernel reads and writes F32, F16 and BF16 as float32 lanes.

ROW[type].load(addr)               W elements -> W float32 lanes
         .load_part(addr, n)       the first n < W, zeros above
         .store(addr, v), .store_part(addr, v, n), .store_one(addr, v)   (store_one: lane 0)
         .splat(addr)              one element in every lane
         .get(addr), .put(addr, x) one element as a scalar

pair_row(f) is the loop over two rows.
"""
import dataclasses
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import IR_I32, ld_f16, ld_f32, pointer, st_f16, st_f32
from ggjit.ops.native.simd import W, bf16_ir, ldb, ldf, ldf_part, ldh, load_ir, splat, splat_ir, stb, stf, stf_part, sth


@dataclasses.dataclass(frozen=True)
class RowAccess:
    """The functions of one type; see above."""
    load: Callable
    load_part: Callable
    store: Callable
    store_part: Callable
    store_one: Callable
    splat: Callable
    get: Callable
    put: Callable


@intrinsic
def lane0(typingctx, v):
    def codegen(context, b, sig, args):
        return b.extract_element(args[0], ir.Constant(IR_I32, 0))
    return types.float32(v), codegen


@intrinsic
def ld_bf16(typingctx, addr):
    """bfloat16 in memory, float32 in registers."""
    def codegen(context, b, sig, args):
        h = b.zext(load_ir(b, args[0], ir.IntType(16)), IR_I32)
        return b.bitcast(b.shl(h, ir.Constant(IR_I32, 16)), ir.FloatType())
    return types.float32(types.int64), codegen


@intrinsic
def st_bf16(typingctx, addr, x):
    """float32 rounded to bfloat16 (nearest even, NaN made quiet)."""
    def codegen(context, b, sig, args):
        h = bf16_ir(b, splat_ir(b, args[1], 4))
        b.store(b.extract_element(h, ir.Constant(IR_I32, 0)), pointer(b, args[0], ir.IntType(16)), align=1)
        return context.get_dummy_value()
    return types.void(types.int64, types.float32), codegen


def _via_scalars(get, put, nbytes):
    """Tail access for 16-bit elements: a masked vector move of halves exists on few machines, so one by one."""
    @intrinsic
    def insert(typingctx, v, i, x):
        def codegen(context, b, sig, args):
            return b.insert_element(args[0], args[2], b.trunc(args[1], IR_I32))
        return v(v, types.int64, types.float32), codegen

    @intrinsic
    def extract(typingctx, v, i):
        def codegen(context, b, sig, args):
            return b.extract_element(args[0], b.trunc(args[1], IR_I32))
        return types.float32(v, types.int64), codegen

    @inline
    def load_part(addr, n):
        v = splat(types.float32(0.0))
        for i in range(n):
            v = insert(v, i, get(addr + i * nbytes))
        return v

    @inline
    def store_part(addr, v, n):
        for i in range(n):
            put(addr + i * nbytes, extract(v, i))
    return load_part, store_part


def _access(load, store, get, put, nbytes, parts=None):
    load_part, store_part = parts or _via_scalars(get, put, nbytes)

    @inline
    def splat_at(addr):
        return splat(get(addr))

    @inline
    def store_one(addr, v):
        put(addr, lane0(v))
    return RowAccess(load, load_part, store, store_part, store_one, splat_at, get, put)


ROW = {F32: _access(ldf, stf, ld_f32, st_f32, 4, (ldf_part, stf_part)),
       F16: _access(ldh, sth, ld_f16, st_f16, 2),
       BF16: _access(ldb, stb, ld_bf16, st_bf16, 2)}


def pair_row(f, ta=F32, tb=F32, td=F32):
    """jitted row(d, a, b, n): d = f(a, b) over n elements side by side; d may be a or b."""
    xa, xb, xd = ROW[ta], ROW[tb], ROW[td]
    lda, ldb, std = xa.load, xb.load, xd.store
    lda_part, ldb_part, std_part = xa.load_part, xb.load_part, xd.store_part
    sa, sb, sd = ta.nbytes, tb.nbytes, td.nbytes

    @inline
    def row(d, a, b, n):
        i = 0
        while i + W <= n:
            std(d + i * sd, f(lda(a + i * sa), ldb(b + i * sb)))
            i += W
        if i < n:
            std_part(d + i * sd, f(lda_part(a + i * sa, n - i), ldb_part(b + i * sb, n - i)), n - i)
    return row
