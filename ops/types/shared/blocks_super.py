"""Super-blocks: 256 values, one or two float16 scales, small integer scales for each half group; partner Q8_K.

    value[i] = d scale[h] (code[i] - zero_point) - dmin min[h],        h the half group of i

Activations are quantised as ggml's Q8_K: 256 codes q = rint(x 127 / amax) with one float32 scale (1 / (127 / amax)).
(ggml divides by the signed value of largest size; rounding is symmetric, so the products are the same.)
A prepared block is

    byte   0 ... 255 | 256 ... 287         | 288 ... 291 | 292 ... 319
           q         | sums of half groups | d           | -              sums int16, first halves | second halves

The integer scale is an operand of the second multiply-add of a byte dot, so a whole block takes one conversion:

    sum += madd(maddubs(codes[g], q[g]), scale of g's halves)            8 times, int32
    and the zero point and the mins take one madd of 16 values each.
"""
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ggjit.ops.core.traits import Traits
from ggjit.ops.core.types import Type
from ggjit.ops.native import isa, neon
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.lanes import amax_or_nan_ir, f32, fold_ir, i32, i64, int_to_float_ir, madd_ir, splat_const, zero
from ggjit.ops.native.mem import IR_F32, call_intrinsic
from ggjit.ops.native.simd import IR, fma_ir, load_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared import blocks as bl
from ggjit.ops.types.shared.blocks_plain import make_to_float
from ggjit.ops.types.shared.dot import Dot

QK = 256
Y_BLOCK, Y_SUMS, Y_SCALE = 320, 256, 288


@dataclasses.dataclass(frozen=True, eq=False)
class Super:
    """How a super-block unpacks.  The `_ir` members build LLVM IR: (b, block address) -> values.

    codes_ir    eight <32 x i8>, one for each group
    scales_ir   <16 x i16>, first halves | second halves; None: all 1
    d_ir        float32
    mins_ir     (<16 x i16> in the order of scales, dmin float32), or None
    signed      codes are signed bytes, -127 ... 127; else unsigned, at most max_code, and zero_point is subtracted
    halves      the halves of a group have scales of their own
    """
    type: Type
    codes_ir: Callable
    scales_ir: Callable | None
    d_ir: Callable
    mins_ir: Callable | None = None
    zero_point: int = 0
    max_code: int = 127
    signed: bool = False
    halves: bool = False

    def scale_words_ir(self, b, p):
        return self.scales_ir(b, p) if self.scales_ir else splat_const("i16", 1, 16)

    @property
    def has_offsets(self):
        return self.mins_ir is not None

    def factors_ir(self, b, p):
        """(factors, mins) as <16 x float>, first halves | second halves; mins None where there are none."""
        v16 = vec_ir("f32", 16)
        factors = b.fmul(splat_ir(b, self.d_ir(b, p), 16), b.sitofp(self.scale_words_ir(b, p), v16))
        if self.mins_ir is None:
            return factors, None
        mins, dmin = self.mins_ir(b, p)
        return factors, b.fmul(splat_ir(b, dmin, 16), b.sitofp(mins, v16))

    def part_factors_ir(self, b, p, parts):
        """(factors, offsets) of every group: lists of `parts` float32."""
        def split(v):
            return [[b.extract_element(v, i32(g + 8 * i)) for i in range(parts)] for g in range(8)]
        factors, mins = self.factors_ir(b, p)
        return split(factors), None if mins is None else split(b.fneg(mins))

    def values_ir(self, b, p):
        """A <32 x float> for each group; the operations of ggml's to_float in its order."""
        factors, mins = self.factors_ir(b, p)
        out = []
        for g, codes in enumerate(self.codes_ir(b, p)):
            v = b.fmul(bl.halves_ir(b, factors, g), bl.floats_ir(b, codes, self.zero_point, self.signed))
            out.append(v if mins is None else b.fsub(v, bl.halves_ir(b, mins, g)))
        return out

    def traits(self, from_float, **more):
        return Traits(self.type, make_to_float(self), from_float, round_activations=round_activations,
                      np_round_activations=np_round_activations, dot=_dot(self), **{"tile": self, **more})


# ---------------------------------------------------------------- activations
def activations_ir(b, src):
    """256 float32 at src -> (eight <32 x i32> of codes, scale f32: NaN where one of them is)."""
    v = vec_ir("f32", 32)
    x = [load_ir(b, b.add(src, i64(128 * g)), v) for g in range(8)]
    amax = amax_or_nan_ir(b, x)
    ok = b.fcmp_ordered("!=", amax, f32(0.0))
    inverse = b.select(ok, b.fdiv(f32(127.0), amax), f32(0.0))
    d = b.select(ok, b.fdiv(f32(1.0), inverse), amax)
    wide = splat_ir(b, inverse, 32)
    q = [call_intrinsic(b, "llvm.rint.v32f32", v, [b.fmul(g, wide)]) for g in x]
    return [b.fptosi(g, vec_ir("i32", 32)) for g in q], d


@ir_function
def _round_block(b, src, dst):
    q, d = activations_ir(b, src)
    wide = splat_ir(b, d, 32)
    bl.store_groups_ir(b, [b.fmul(b.sitofp(g, vec_ir("f32", 32)), wide) for g in q], dst)


@exact
def round_activations(src, dst, k):
    """float32 row -> the float32 row that its Q8_K codes mean."""
    for i in range(0, 4 * k, 4 * QK):
        _round_block(src + i, dst + i)


def np_round_activations(x):
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, QK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0))
        d = np.where(amax > 0, np.float32(1) / inverse, amax)
    return (np.rint(blocks * inverse) * d).reshape(x.shape)


@ir_function
def _prepare_block(b, src, dst):
    codes, d = activations_ir(b, src)
    for g, q in enumerate(codes):
        store_ir(b, b.trunc(q, vec_ir("i8", 32)), b.add(dst, i64(32 * g)))
        for half in (0, 1):
            s = fold_ir(b, shuffle_ir(b, q, q, range(16 * half, 16 * half + 16)), b.add)
            store_ir(b, b.trunc(s, IR["i16"]), b.add(dst, i64(Y_SUMS + 16 * half + 2 * g)))
    store_ir(b, d, b.add(dst, i64(Y_SCALE)))


@exact
def prepare(src, dst, k):
    for i in range(k // QK):
        _prepare_block(src + 4 * QK * i, dst + Y_BLOCK * i)


# ---------------------------------------------------------------- products
def _half_scales_ir(b, scales, g):
    """The pair of scales of group g, as the <16 x i16> factor of its pair sums (in-lane: one byte shuffle)."""
    return shuffle_ir(b, scales, scales, [g] * 8 + [8 + g] * 8)


def _dot(blocks):
    if isa.ISA == "neon":
        return _neon_dot(blocks)
    if isa.ISA == "generic":
        return bl.scratch_dot(blocks.type, lambda b, p, to: bl.store_groups_ir(b, blocks.values_ir(b, p), to),
                              round_activations)

    def load_w(b, p):
        codes = [bl.operand_ir(b, c, blocks.signed) for c in blocks.codes_ir(b, p)]
        mins, dmin = blocks.mins_ir(b, p) if blocks.mins_ir else (None, None)
        return codes, blocks.scale_words_ir(b, p), blocks.d_ir(b, p), mins, dmin

    def load_y(b, p):
        return ([load_ir(b, b.add(p, i64(32 * g)), vec_ir("i8", 32)) for g in range(8)],
                load_ir(b, b.add(p, i64(Y_SUMS)), vec_ir("i16", 16)), load_ir(b, b.add(p, i64(Y_SCALE)), IR_F32))

    def mac(b, acc, w, y):
        codes, scales, d, mins, dmin = w
        q, sums, dy = y
        parts = [madd_ir(b, bl.pair_sums_ir(b, u, v), _half_scales_ir(b, scales, g))
                 for g, (u, v) in enumerate(zip(codes, q, strict=True))]
        if blocks.zero_point:
            z = madd_ir(b, scales, sums)
            parts.append(b.mul(z, splat_const("i32", -blocks.zero_point, 8)))
        while len(parts) > 1:
            parts = [b.add(*parts[i:i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        acc = fma_ir(b, int_to_float_ir(b, parts[0]), splat_ir(b, b.fmul(d, dy), 8), acc)
        if mins is not None:
            m = int_to_float_ir(b, madd_ir(b, mins, sums))
            acc = fma_ir(b, m, splat_ir(b, b.fneg(b.fmul(dmin, dy)), 8), acc)
        return acc
    return Dot(step=QK, w_nbytes=blocks.type.nbytes, y_nbytes=Y_BLOCK, load_w_ir=load_w,
               tail_w_ir=lambda b, p, n: load_w(b, p), load_y_ir=load_y, mac_ir=mac, prepare=prepare, lanes=8, rows=1)


# ---------------------------------------------------------------- products, NEON
def _neon_dot(blocks):
    """Byte dots of the parts of a block, their lanes added up pairwise: lane i is part i's, as its scale is.

    The sums of parts that share no scale need no such order: they are added up as they come.
    """
    def load_w(b, p):
        codes = [neon.parts_ir(b, c) for c in blocks.codes_ir(b, p)]
        mins, dmin = blocks.mins_ir(b, p) if blocks.mins_ir else (None, None)
        return codes, blocks.scales_ir(b, p) if blocks.scales_ir else None, blocks.d_ir(b, p), mins, dmin

    def load_y(b, p):
        q = [[load_ir(b, b.add(p, i64(32 * g + 16 * h)), vec_ir("i8", 16)) for h in range(2)] for g in range(8)]
        return (q, [load_ir(b, b.add(p, i64(Y_SUMS + 16 * h)), vec_ir("i16", 8)) for h in range(2)],
                load_ir(b, b.add(p, i64(Y_SCALE)), IR_F32))

    def products(b, codes, q, halves):
        """Sums of groups, or of first halves, then second halves."""
        for some in ([0], [1]) if halves else ([0, 1],):
            for x, y in zip(codes, q, strict=True):
                s = zero("i32", 4)
                for h in some:
                    s = neon.quads_ir(b, s, x[h], y[h])
                yield s

    def scaled(b, scales, sums):
        words = neon.parts_ir(b, b.sext(scales, vec_ir("i32", 16)), 4)
        total = None
        for s, w in zip(sums, words, strict=False):
            product = b.mul(s, w)
            total = product if total is None else b.add(total, product)
        return total

    def mac(b, acc, w, y):
        (codes, scales, d, mins, dmin), (q, sums, dy) = w, y
        parts = list(products(b, codes, q, blocks.halves))
        both = b.add(*sums) if not blocks.halves or scales is None else None
        if scales is None:
            total = functools.reduce(b.add, parts)
        else:
            total = scaled(b, scales, neon.lane_sums_ir(b, parts))
        if blocks.zero_point:
            ones = splat_const("i16", 1, 8)
            pairs = [(ones, both)] if scales is None else zip(neon.parts_ir(b, scales, 8), sums, strict=True)
            z = None
            for x, s in pairs:
                z = neon.shorts_ir(b, z, x, s)
            total = b.sub(total, b.mul(z, splat_const("i32", blocks.zero_point, 4)))
        acc = fma_ir(b, int_to_float_ir(b, total), splat_ir(b, b.fmul(d, dy), 4), acc)
        if mins is not None:
            m = None
            pairs = zip(neon.parts_ir(b, mins, 8), sums, strict=True) if blocks.halves else [
                (shuffle_ir(b, mins, mins, range(8)), both)]
            for x, s in pairs:
                m = neon.shorts_ir(b, m, x, s)
            acc = fma_ir(b, int_to_float_ir(b, m), splat_ir(b, b.fneg(b.fmul(dmin, dy)), 4), acc)
        return acc
    return Dot(step=QK, w_nbytes=blocks.type.nbytes, y_nbytes=Y_BLOCK, load_w_ir=load_w,
               tail_w_ir=lambda b, p, n: load_w(b, p), load_y_ir=load_y, mac_ir=mac, prepare=prepare, lanes=4, rows=1,
               unroll=1)
