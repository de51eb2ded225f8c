"""Plain blocks: float factors for each group of 32 (or its halves); their partner is Q8_0.

Activations are those of ops/types/shared/quant32.py: codes q of 32 values and their float32 scale.  A prepared group is

    byte   0 ... 31 | 32 ... 35 | 36 ... 39 | 40 ... 63
           q        | d         | word      | -            word: -zero_point sum(q) as int32, or d sum(q) as float32

    sum_i (f (u_i - z) + o) (d q_i) = f d (sum u_i q_i - z sum q_i) + o (d sum q_i)
"""
import dataclasses
from collections.abc import Callable

from ggjit.ops.core.traits import Traits
from ggjit.ops.core.types import Type
from ggjit.ops.native import isa, neon
from ggjit.ops.native.jit import exact, ir_function
from ggjit.ops.native.lanes import i32, i64, int_to_float_ir, load_half_ir, min_ir, splat_half_ir, zero
from ggjit.ops.native.mem import IR_F16, IR_F32, IR_I32, IR_I64
from ggjit.ops.native.simd import W, fma_ir, load_ir, shuffle_ir, splat_ir, store_ir, vec_ir
from ggjit.ops.types.shared import blocks as bl
from ggjit.ops.types.shared.dot import Dot
from ggjit.ops.types.shared.quant32 import (
    activation_ir,
    make_prepare,
    np_round_activations,
    round_activations,
    sum_ir,
)

Y_GROUP = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """How a block unpacks.  The `_ir` members build LLVM IR: (b, block address) -> values.

    codes_ir    a <32 x i8> for each group
    factors_ir  (b, address, n) -> an <n x float> for each group: n / 2 times the first half's, then the second's;
                None: the block begins with a float16, the factor of all groups
    has_offsets the block begins with two float16: its factor and an offset; one group
    signed      codes are signed bytes, -127 ... 127; else unsigned, at most max_code, and zero_point is subtracted
    halves      the halves of a group have factors of their own
    """
    type: Type
    codes_ir: Callable
    factors_ir: Callable | None = None
    has_offsets: bool = False
    zero_point: int = 0
    max_code: int = 127
    signed: bool = False
    halves: bool = False

    @property
    def n_groups(self):
        return self.type.block // 32

    def group_factors_ir(self, b, p, n):
        return self.factors_ir(b, p, n) if self.factors_ir else [splat_half_ir(b, p, n)] * self.n_groups

    def offset_ir(self, b, p):
        return load_half_ir(b, b.add(p, i64(2)))

    def part_factors_ir(self, b, p, parts):
        """(factors, offsets) of every group: lists of `parts` float32."""
        def both(v):
            return [b.extract_element(v, i32(i)) for i in range(parts)]
        factors = [both(v) for v in self.group_factors_ir(b, p, 2)]
        return factors, [[self.offset_ir(b, p)] * parts] if self.has_offsets else None

    def values_ir(self, b, p):
        """A <32 x float> for each group; the operations of ggml's to_float in its order."""
        out = []
        for codes, factor in zip(self.codes_ir(b, p), self.group_factors_ir(b, p, 32), strict=True):
            v = b.fmul(bl.floats_ir(b, codes, self.zero_point, self.signed), factor)
            out.append(b.fadd(v, splat_ir(b, self.offset_ir(b, p), 32)) if self.has_offsets else v)
        return out

    def traits(self, from_float, dot=None, **more):
        return Traits(self.type, make_to_float(self), from_float, round_activations=round_activations,
                      np_round_activations=np_round_activations, dot=dot or _dot(self), **{"tile": self, **more})


def make_to_float(blocks):
    """Jitted to_float of Traits, for Plain and Super."""
    size, nbytes = 4 * blocks.type.block, blocks.type.nbytes

    @ir_function
    def block(b, src, dst):
        bl.store_groups_ir(b, blocks.values_ir(b, src), dst)

    @exact
    def to_float(src, dst, k):
        for i in range(k * 4 // size):
            block(src + i * nbytes, dst + i * size)
    return to_float


def _make_prepare(plain):
    zero_point, with_offset = plain.zero_point, plain.has_offsets

    @ir_function
    def group(b, src, dst):
        q, d = activation_ir(b, src)
        store_ir(b, b.trunc(q, vec_ir("i8", 32)), dst)
        store_ir(b, d, b.add(dst, i64(32)))
        total = sum_ir(b, q)
        word = b.fmul(d, b.sitofp(total, IR_F32)) if with_offset else b.mul(total, i32(-zero_point))
        store_ir(b, word, b.add(dst, i64(36)))

    @exact
    def prepare(src, dst, k):
        for i in range(k // 32):
            group(src + 128 * i, dst + Y_GROUP * i)
    return prepare


def _dot(plain):
    if isa.ISA == "neon":
        return _neon_dot(plain)
    if isa.ISA == "generic":
        return bl.scratch_dot(plain.type, lambda b, p, to: bl.store_groups_ir(b, plain.values_ir(b, p), to),
                              round_activations)
    if plain.has_offsets:
        return _offset_dot(plain)
    n = plain.n_groups

    def load_w(b, p):
        return [bl.operand_ir(b, c, plain.signed) for c in plain.codes_ir(b, p)], plain.group_factors_ir(b, p, 8)

    def load_y(b, p):
        out = []
        for g in range(n):
            at = b.add(p, i64(Y_GROUP * g))
            start = bl.lane0_ir(b, load_ir(b, b.add(at, i64(36)), IR_I32)) if plain.zero_point else None
            d = splat_ir(b, load_ir(b, b.add(at, i64(32)), IR_F32), 8)
            out.append((load_ir(b, at, vec_ir("i8", 32)), d, start))
        return out

    def mac(b, acc, w, y):
        for (q, d, start), u, f in zip(y, *w, strict=True):
            acc = fma_ir(b, b.fmul(f, d), int_to_float_ir(b, bl.quad_sums_ir(b, u, q, start)), acc)
        return acc
    return _make_dot(plain, load_w, load_y, mac)


def _offset_dot(plain):
    """Factors and offsets lie in pairs (f, o), as d and d sum(q) of the activations: one product serves both."""
    def load_w(b, p):
        pair = splat_ir(b, load_ir(b, p, IR_I32), 4)
        return (bl.operand_ir(b, plain.codes_ir(b, p)[0], plain.signed),
                b.fpext(b.bitcast(pair, vec_ir("f16", 8)), vec_ir("f32", 8)))

    def load_y(b, p):
        pair = splat_ir(b, load_ir(b, b.add(p, i64(32)), IR_I64), 4)
        return load_ir(b, p, vec_ir("i8", 32)), b.bitcast(pair, vec_ir("f32", 8))

    def mac(b, acc, w, y):
        both = b.fmul(w[1], y[1])
        factor = shuffle_ir(b, both, both, [0, 0, 2, 2, 4, 4, 6, 6])
        offset = shuffle_ir(b, both, zero("f32", 8), [8, 1, 10, 11, 12, 13, 14, 15])
        return b.fadd(fma_ir(b, factor, int_to_float_ir(b, bl.quad_sums_ir(b, w[0], y[0])), acc), offset)
    return _make_dot(plain, load_w, load_y, mac)


def _make_dot(plain, load_w, load_y, mac):
    return Dot(step=plain.type.block, w_nbytes=plain.type.nbytes, y_nbytes=Y_GROUP * plain.n_groups, load_w_ir=load_w,
               tail_w_ir=lambda b, p, n: load_w(b, p), load_y_ir=load_y, mac_ir=mac, prepare=_make_prepare(plain),
               lanes=8, max_columns=3 if W == 16 else 4)


# ---------------------------------------------------------------- products, NEON
def _neon_dot(plain):
    """Four parts a step, those of four blocks, two or one: lane i of sums, factors and offsets is part i's.

    A prepared step is the codes | d of each part | word of each part, in multiples of 64 bytes.
    """
    parts = 2 if plain.halves else 1
    n_blocks = 4 // (parts * plain.n_groups)
    n_codes, per_part = n_blocks * plain.type.block, 32 // parts
    y_nbytes = (n_codes + 32 + 63) // 64 * 64

    def store(b, src, dst, j):
        q, d = activation_ir(b, src)
        store_ir(b, b.trunc(q, vec_ir("i8", 32)), b.add(dst, b.mul(j, i64(32))))
        for i in range(parts):
            at = b.add(b.add(dst, b.mul(j, i64(4 * parts))), i64(n_codes + 4 * i))
            store_ir(b, d, at)
            total = sum_ir(b, shuffle_ir(b, q, q, range(per_part * i, per_part * (i + 1))))
            word = (b.fmul(d, b.sitofp(total, IR_F32)) if plain.has_offsets
                    else b.mul(total, i32(-plain.zero_point)))
            store_ir(b, word, b.add(at, i64(16)))

    def halves(b, addresses):
        v = vec_ir("f16", 4)(None)
        for i in range(4):
            x = load_ir(b, addresses[i * n_blocks // 4], IR_F16)
            v = b.insert_element(v, x, i32(i))
        return b.fpext(v, vec_ir("f32", 4))

    def factors(b, addresses):
        if plain.factors_ir is None:
            return halves(b, addresses)
        each = [v for p in addresses for v in plain.factors_ir(b, p, parts)]
        out = vec_ir("f32", 4)(None)
        for i in range(4):
            out = b.insert_element(out, b.extract_element(each[i // parts], i32(i % parts)), i32(i))
        return out

    def load_blocks(b, addresses):
        codes = [half for p in addresses for c in plain.codes_ir(b, p) for half in neon.parts_ir(b, c)]
        offsets = halves(b, [b.add(p, i64(2)) for p in addresses]) if plain.has_offsets else None
        return codes, factors(b, addresses), offsets

    def load_w(b, p):
        return load_blocks(b, [b.add(p, i64(plain.type.nbytes * i)) for i in range(n_blocks)])

    def tail_w(b, p, n):
        """Blocks beyond the row repeat the last one; their activations are zeros."""
        last = b.sub(b.udiv(n, i64(plain.type.block)), i64(1))
        return load_blocks(b, [b.add(p, b.mul(min_ir(b, i64(i), last), i64(plain.type.nbytes)))
                               for i in range(n_blocks)])

    def load_y(b, p):
        word = load_ir(b, b.add(p, i64(n_codes + 16)), vec_ir("f32" if plain.has_offsets else "i32", 4))
        return ([load_ir(b, b.add(p, i64(i)), vec_ir("i8", 16)) for i in range(0, n_codes, 16)],
                load_ir(b, b.add(p, i64(n_codes)), vec_ir("f32", 4)), word)

    def mac(b, acc, w, y):
        (codes, f, offsets), (q, d, word) = w, y
        sums = []
        for i in range(0, len(codes), per_part // 16):
            s = zero("i32", 4)
            for x, z in zip(codes[i:i + per_part // 16], q[i:i + per_part // 16], strict=True):
                s = neon.quads_ir(b, s, x, z)
            sums.append(s)
        s, = neon.lane_sums_ir(b, sums)
        if plain.zero_point:
            s = b.add(s, word)
        acc = fma_ir(b, b.fmul(f, d), int_to_float_ir(b, s), acc)
        return acc if offsets is None else fma_ir(b, offsets, word, acc)
    return Dot(step=n_codes, w_nbytes=n_blocks * plain.type.nbytes, y_nbytes=y_nbytes, load_w_ir=load_w,
               tail_w_ir=tail_w, load_y_ir=load_y, mac_ir=mac, prepare=make_prepare(n_codes // 32, y_nbytes, store),
               lanes=4, rows=1, unroll=1)
