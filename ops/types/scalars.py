"""Types whose element is one scalar: F32, F16, BF16, F64, I8, I16, I32, I64.

    F16     IEEE half; rounds to nearest even
    BF16    the upper 16 bits of a float32; rounds to nearest even, NaN made quiet (ggml_compute_fp32_to_bf16)
    I*      float32 -> integer truncates toward zero, as C's cast

Products: activations are rounded through F16 for F16 weights, through BF16 for BF16 weights (ggml
converts the second operand to the first one's type); sums are float32.
"""
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.core.traits import Traits
from ggjit.ops.core.types import BF16, F16, F32, F64, I8, I16, I32, I64
from ggjit.ops.native import isa, mem, neon, simd
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.lanes import load_part_ir, packed_dot_ir, splat_const
from ggjit.ops.native.simd import W
from ggjit.ops.types.shared.dot import Dot
from ggjit.ops.types.shared.rows import ld_bf16, st_bf16

f32 = types.float32


# ---------------------------------------------------------------- rows to and from float32
@exact
def copy_row(src, dst, k):
    mem.copy_bytes(dst, src, 4 * k)


def _row(load, store, load_one, store_one, src_nbytes, dst_nbytes):
    """W elements at a time, then one by one."""
    @exact
    def convert(src, dst, k):
        n = k // W * W
        for i in range(0, n, W):
            store(dst + i * dst_nbytes, load(src + i * src_nbytes))
        for i in range(n, k):
            store_one(dst + i * dst_nbytes, load_one(src + i * src_nbytes))
    return convert


def _scalar_row(load_one, store_one, src_nbytes, dst_nbytes, target):
    @exact
    def convert(src, dst, k):
        for i in range(k):
            store_one(dst + i * dst_nbytes, target(load_one(src + i * src_nbytes)))
    return convert


def bf16_to_float(raw):
    """uint16 bit patterns -> float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(x):
    """float32 -> uint16 bit patterns: nearest even, NaN made quiet."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + (0x7FFF + ((u >> 16) & 1))) >> 16
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, (u >> 16) | 64, rounded).astype(np.uint16)


def _np_to_float(dtype):
    return lambda raw: np.ascontiguousarray(raw).view(dtype).astype(np.float32)


def _np_from_float(dtype):
    return lambda x: np.ascontiguousarray(np.asarray(x, np.float32).astype(dtype)).view(np.uint8)


# ---------------------------------------------------------------- products
def _widen(elem):
    """LLVM value of W stored elements -> <W x float>"""
    if elem == "f32":
        return lambda b, v: v
    if elem == "f16":
        return lambda b, v: b.fpext(b.bitcast(v, simd.vec_ir("f16", W)), simd.vec_ir("f32", W))
    return lambda b, v: b.bitcast(b.shl(b.zext(v, simd.vec_ir("i32", W)), splat_const("i32", 16, W)),
                                  simd.vec_ir("f32", W))


# Float weights are prefetched into the first-level cache.  The processor prefetches rows of F32 by itself, only their
# next lines come late; rows of 16-bit elements are too short for that, so the next tile is prefetched
# (docs/measured.md, "Choices in the kernels").
NEAR = 3                        # locality argument of prefetch_ir: first-level cache
F32_AHEAD_NBYTES = 512


def _float_dot(elem, nbytes, prepare, ahead_nbytes=None, columns=None):
    """FMAs on float32 lanes; activations are kept in the weights' type: fewer bytes in the first-level cache are
    worth more than the second conversion.  columns: another type of theirs."""
    (load_w, tail_w), (load_y, tail_y) = _reads(elem), _reads(columns or elem)
    return Dot(step=W, w_nbytes=W * nbytes, y_nbytes=W * (4 if columns else nbytes), prepare=prepare, load_w_ir=load_w,
               tail_w_ir=tail_w, load_y_ir=load_y, tail_y_ir=tail_y, locality=NEAR, ahead_nbytes=ahead_nbytes,
               mac_ir=lambda b, acc, w, y: simd.fma_ir(b, w, y, acc), unroll=8 if isa.ISA == "neon" else 2)


def _reads(elem):
    """(load_w_ir, tail_w_ir) of a Dot: W elements as float32."""
    widen, word = _widen(elem), "f32" if elem == "f32" else "i16"

    def load(b, p):
        return widen(b, simd.load_ir(b, p, simd.vec_ir(word, W)))

    def tail(b, p, n):
        return widen(b, load_part_ir(b, p, word, W, n))
    return load, tail


@exact
def _round_row_f16(src, dst, k):
    n = k // W * W
    for i in range(0, n, W):
        simd.stf(dst + 4 * i, simd.round_f16v(simd.ldf(src + 4 * i)))
    for i in range(n, k):
        mem.st_f32(dst + 4 * i, mem.round_f16(mem.ld_f32(src + 4 * i)))


@intrinsic
def _round_bf16v(typingctx, v):
    def codegen(context, b, sig, args):
        return _widen("bf16")(b, simd.bf16_ir(b, args[0]))
    return v(v), codegen


@exact
def _round_row_bf16(src, dst, k):
    n = k // W * W
    for i in range(0, n, W):
        simd.stf(dst + 4 * i, _round_bf16v(simd.ldf(src + 4 * i)))
    for i in range(n, k):
        st_bf16(dst + 4 * i, mem.ld_f32(src + 4 * i))
        mem.st_f32(dst + 4 * i, ld_bf16(dst + 4 * i))


class _BFloat(ir.Type):
    """llvmlite has no bfloat, but IR travels as text: a type that prints `bfloat` is enough."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash("bfloat")


@ir_function
def _zero_part(b, addr):
    """64 zero bytes at addr"""
    simd.store_ir(b, ir.Constant(simd.vec_ir("i32", 16), None), addr)


_bf16_from_float = _row(simd.ldf, simd.stb, mem.ld_f32, st_bf16, 4, 2)


def _padded(from_float):
    """Rows of 16-bit elements with zeros up to a whole line behind them."""
    @exact
    def prepare(src, dst, k):
        if k % 32 != 0:
            _zero_part(dst + k // 32 * 64)
        from_float(src, dst, k)
    return prepare


def _pair_dot(elem, n, mac_ir, prepare, unroll, **more):
    """The Dot of 16-bit elements (ir type elem) on processors whose instruction adds several products in each lane; n
    elements a step."""
    v = ir.VectorType(elem, n)

    def load(b, p):
        return b.bitcast(simd.load_ir(b, p, simd.vec_ir("i16", n)), v)
    return Dot(step=n, w_nbytes=2 * n, y_nbytes=2 * n, prepare=prepare, load_w_ir=load, load_y_ir=load, locality=NEAR,
               tail_w_ir=lambda b, p, left: b.bitcast(load_part_ir(b, p, "i16", n, left), v), mac_ir=mac_ir,
               unroll=unroll, **more)


def _bf16_dot():
    """vdpbf16ps, bfdot: 32 or 8 products an instruction, pairs summed in float32."""
    if isa.ISA == "neon":
        return _pair_dot(_BFloat(), 8, neon.bf16_pairs_ir, _prepare_bf16, 8)
    return _pair_dot(_BFloat(), 32, lambda b, acc, w, y: packed_dot_ir(b, "avx512bf16.dpbf16ps", acc, w, y),
                     _prepare_bf16, 2)


def _f16_dot():
    if neon.HAS_FMLAL:
        return _pair_dot(ir.HalfType(), 8, neon.f16_products_ir, _prepare_f16, 2, lanes=8)      # for tiles of four rows
    if isa.ISA == "neon":               # a conversion takes as long as two FMAs: columns are converted once
        return _float_dot("f16", 2, _round_row_f16, columns="f32")
    return _float_dot("f16", 2, _f16_from_float)


F32_DOT = _float_dot("f32", 4, None, F32_AHEAD_NBYTES)
_f16_from_float = _row(simd.ldf, simd.sth, mem.ld_f32, mem.st_f16, 4, 2)
_prepare_bf16, _prepare_f16 = _padded(_bf16_from_float), _padded(_f16_from_float)
F16_DOT = _f16_dot()
if isa.BF16_DOT:
    BF16_DOT = _bf16_dot()
elif isa.ISA == "neon":
    BF16_DOT = _float_dot("bf16", 2, _round_row_bf16, columns="f32")
else:
    BF16_DOT = _float_dot("bf16", 2, _bf16_from_float)
F16_DOT_F32, BF16_DOT_F32 = (_float_dot(elem, 2, None, columns="f32") for elem in ("f16", "bf16"))


def _integer(type, load, store, numba_type):
    return Traits(type, to_float=_scalar_row(load, mem.st_f32, type.nbytes, 4, types.float32),
                  from_float=_scalar_row(mem.ld_f32, store, 4, type.nbytes, numba_type),
                  np_to_float=_np_to_float(type.dtype), np_from_float=_np_from_float(type.dtype))


TRAITS = (
    Traits(F32, copy_row, copy_row, _np_to_float(np.float32), _np_from_float(np.float32), dot=F32_DOT),
    Traits(F16, _row(simd.ldh, simd.stf, mem.ld_f16, mem.st_f32, 2, 4), _f16_from_float,
           _np_to_float(np.float16), _np_from_float(np.float16), round_activations=_round_row_f16,
           np_round_activations=lambda x: x.astype(np.float16).astype(np.float32), dot=F16_DOT,
           dot_f32=F16_DOT_F32),
    Traits(BF16, _row(simd.ldb, simd.stf, ld_bf16, mem.st_f32, 2, 4), _bf16_from_float,
           lambda raw: bf16_to_float(np.ascontiguousarray(raw).view(np.uint16)),
           lambda x: float_to_bf16(x).view(np.uint8), round_activations=_round_row_bf16,
           np_round_activations=lambda x: bf16_to_float(float_to_bf16(x)), dot=BF16_DOT, dot_f32=BF16_DOT_F32),
    _integer(F64, mem.ld_f64, mem.st_f64, types.float64),
    _integer(I8, mem.ld_i8, mem.st_i8, types.int8), _integer(I16, mem.ld_i16, mem.st_i16, types.int16),
    _integer(I32, mem.ld_i32, mem.st_i32, types.int32), _integer(I64, mem.ld_i64, mem.st_i64, types.int64))
