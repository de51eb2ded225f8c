"""The code for a query row that both flash attention kernels share: masks, online softmax, ALiBi, soft cap and sinks.

For row r after the key blocks seen so far:  m = max of its scores,  l = sum of exp(score - m),  acc = sum of
exp(score - m) v.  A new block with maximum m' scales l and acc by c = exp(m - m').  (Milakov and Gimelshein 2018.)

A key is visible to a row where the mask is above -inf.  Blocks without a visible key
are skipped, a block ends at its last visible key, and values of keys that no row sees are never read (the unwritten
cells of a KV cache may hold anything, NaN included).
"""
import functools
import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.attention.flash_attn_tiles import BK, ROW_NBYTES
from ggjit.ops.core.types import F16
from ggjit.ops.native import simd
from ggjit.ops.native.jit import inline
from ggjit.ops.native.lanes import folds_ir
from ggjit.ops.native.mathfun import exp1, exp_neg1, vexp_neg, vtanh
from ggjit.ops.native.mem import IR_I64, call_intrinsic, ld_f32, ld_i64, st_f32, st_i64
from ggjit.ops.native.simd import B, W
from ggjit.ops.types.shared.rows import ROW

NEG_INF, NAN = simd.f32(-math.inf), simd.f32(math.nan)
ldh_part = ROW[F16].load_part


# ---------------------------------------------------------------- bits and masks
@intrinsic
def ctz(typingctx, bits):
    """Zero bits below the lowest one; 64 for 0."""
    def codegen(context, b, sig, args):
        return call_intrinsic(b, "llvm.cttz.i64", IR_I64, [args[0], ir.Constant(ir.IntType(1), 0)])
    return types.int64(types.int64), codegen


@intrinsic
def clz(typingctx, bits):
    """Zero bits above the highest one; 64 for 0."""
    def codegen(context, b, sig, args):
        return call_intrinsic(b, "llvm.ctlz.i64", IR_I64, [args[0], ir.Constant(ir.IntType(1), 0)])
    return types.int64(types.int64), codegen


@intrinsic
def shift_right(typingctx, bits, n):
    """Logical shift; 0 for n = 64."""
    def codegen(context, b, sig, args):
        gone = b.icmp_signed(">=", args[1], ir.Constant(IR_I64, 64))
        return b.select(gone, ir.Constant(IR_I64, 0), b.lshr(args[0], b.and_(args[1], ir.Constant(IR_I64, 63))))
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def visible(typingctx, v):
    """One bit per lane: mask value above -inf, or NaN (so that a broken mask shows in the result)."""
    def codegen(context, b, sig, args):
        seen = b.fcmp_unordered(">", args[0], simd.const_ir("f32", [-math.inf] * W))
        return b.zext(b.bitcast(seen, ir.IntType(W)), IR_I64)
    return types.int64(v), codegen


@intrinsic
def nans(typingctx, v):
    """One bit per lane: NaN."""
    def codegen(context, b, sig, args):
        return b.zext(b.bitcast(b.fcmp_unordered("uno", args[0], args[0]), ir.IntType(W)), IR_I64)
    return types.int64(v), codegen


# score + slope * mask, exactly -inf where the mask is: the score there may be NaN
masked = simd.make_ir(lambda s, *_: s, lambda b, s, slope, m: b.select(
    b.fcmp_unordered(">", m, simd.const_ir("f32", [-math.inf] * W)), simd.fma_ir(b, slope, m, s),
    simd.const_ir("f32", [-math.inf] * W)))
finite_or_0 = simd.make_ir(lambda x: x, lambda b, x: b.select(
    b.fcmp_ordered(">", x, simd.const_ir("f32", [-math.inf] * W)), x, ir.Constant(x.type, None)))


@inline
def read_mask(src, dst, n):
    """n <= BK mask values at src (0: no mask) -> BK float32 at dst, -inf beyond n; returns the visible ones' bits."""
    bits = 0
    for i in range(0, BK, W):
        left = n - i
        if src == 0:
            v = simd.keep_part(simd.zerof(), left, NEG_INF)
        elif left >= W:
            v = simd.ldh(src + 2 * i)
        elif left > 0:
            v = simd.keep_part(ldh_part(src + 2 * i, left), left, NEG_INF)
        else:
            v = simd.splat(NEG_INF)
        simd.stf(dst + 4 * i, v)
        bits |= visible(v) << i
    return bits


@inline
def slope_of(head, n_head, max_bias):
    """ALiBi's factor of a head (ggml: powers of 2^(-max_bias / 2^floor(log2 n_head)))."""
    if max_bias <= simd.f32(0.0):
        return simd.f32(1.0)
    n = 1
    while 2 * n <= n_head:
        n *= 2
    if head < n:
        return simd.f32(2.0 ** (-max_bias / n * (head + 1)))
    return simd.f32(2.0 ** (-max_bias / 2.0 / n * (2 * (head - n) + 1)))


@inline
def output_factor(m, l_sum, sink):
    """The factor of the accumulated row: 1 / (l + exp(sink - m)); 0 where no key was visible."""
    if sink != 0:
        s = ld_f32(sink)
        if s > m:
            c = exp1(m - s)
            return c / (l_sum * c + simd.f32(1.0))
        l_sum += exp1(s - m)
    return simd.f32(1.0) / l_sum if l_sum != simd.f32(0.0) else simd.f32(0.0)      # NaN stays NaN


# ---------------------------------------------------------------- a thread's scratch
class Scratch:
    """Allocates byte offsets, each at the start of a cache line."""

    def __init__(self):
        self.nbytes = 0

    def area(self, nbytes):
        at = self.nbytes
        self.nbytes += -(-nbytes // 64) * 64
        return at


class SoftmaxRows:
    """Where the state of `n` query rows lies in a thread's scratch (byte offsets; rows rounded up to 16)."""

    def __init__(self, scratch, n):
        self.n = -(-n // 16) * 16
        self.n_folded = min(n, W)                           # rows whose lanes are folded at once
        self.m, self.l, self.c, self.slope = (scratch.area(4 * self.n) for _ in range(4))
        self.mask, self.block, self.bits = (scratch.area(8 * self.n) for _ in range(3))
        self.lanes = scratch.area(self.n * B)               # a vector a row: its maxima, then its sums
        self.values = scratch.area(n * ROW_NBYTES)          # masks of the current block as float32
        self.scores = scratch.area(n * ROW_NBYTES)

    def key(self):
        return tuple(self.__dict__.values())


@inline
def _largest(s, block, slope, cap, nv):
    """Capped and masked scores in place; per lane the largest of them (a NaN is passed over)."""
    top = simd.splat(NEG_INF)
    if block == 0 and cap == simd.f32(0.0):
        for i in range(0, nv * B, B):
            top = simd.vmax(simd.ldf(s + i), top)
        return top
    k = simd.splat(slope)
    for i in range(0, nv * B, B):
        x = simd.ldf(s + i)
        if cap != simd.f32(0.0):
            x = simd.fmul(simd.splat(cap), vtanh(x))
        if block != 0:
            x = masked(x, k, simd.ldf(block + i))
        simd.stf(s + i, x)
        top = simd.vmax(x, top)
    return top


@inline
def _exps(s, m, nv):
    """exp(score - m) in place; their sums per lane."""
    t = simd.splat(m)
    a = simd.zerof()
    for i in range(0, nv * B, B):
        e = vexp_neg(simd.fsub(simd.ldf(s + i), t))
        simd.stf(s + i, e)
        a = simd.fadd(a, e)
    return a


@inline
def _nothing(s, bits, nv):
    """Weights of a row that sees no key, or only keys whose scores are NaN, which a maximum does not show."""
    found = 0
    for i in range(0, nv * B, B):
        found |= nans(simd.ldf(s + i))
        simd.stf(s + i, simd.zerof())
    return simd.splat(NAN if bits != 0 and found != 0 else simd.f32(0.0))


def _make_fold(n, op):
    """fold(addr): lane i is op over the lanes of vector i, for the n <= W vectors at addr."""
    @intrinsic
    def fold(typingctx, addr):
        def codegen(context, b, sig, args):
            v = simd.vec_ir("f32", W)
            folded, = folds_ir(b, [simd.load_ir(b, simd.offset_ir(b, args[0], B * i), v) for i in range(n)],
                               functools.partial(op, b))
            return simd.shuffle_ir(b, folded, folded, [min(i, n - 1) for i in range(W)])
        return simd.V("f32", W)(addr), codegen
    return fold


def make_row_stages(rows):
    """(start, see, softmax) for a SoftmaxRows layout; `wk` is the thread's scratch, n the rows in use."""
    return _row_stages(*rows.key())


@functools.cache
def _row_stages(capacity, n_folded, m_, l_, c_, slope_, mask_, block_, bits_, lanes_, values_, scores_):
    fold_max, fold_sum = _make_fold(n_folded, simd.max_ir), _make_fold(n_folded, lambda b, x, y: b.fadd(x, y))

    @inline
    def start(wk):
        for r in range(0, 4 * capacity, B):
            simd.stf(wk + m_ + r, simd.splat(NEG_INF))
            simd.stf(wk + l_ + r, simd.zerof())
        for r in range(0, capacity * B, B):
            simd.stf(wk + lanes_ + r, simd.splat(NEG_INF))

    @inline
    def see(wk, n, j0, nj):
        """Read the rows' masks for keys j0 .. j0 + nj; returns the bits of the keys that some row sees."""
        everyone = 0
        before = -1
        block = bits = 0
        for r in range(n):
            mask = ld_i64(wk + mask_ + 8 * r)
            if mask != before:              # rows of one query mostly share a mask row
                before = mask
                block, bits = 0, -1
                if mask != 0 or nj < BK:
                    block = wk + values_ + r * ROW_NBYTES
                    bits = read_mask(mask + 2 * j0 if mask != 0 else 0, block, nj)
                everyone |= bits
            st_i64(wk + block_ + 8 * r, block)
            st_i64(wk + bits_ + 8 * r, bits)
        return everyone

    @inline
    def softmax(wk, n, nj, cap):
        """Scores of the block -> weights exp(score - m), in place; updates m, l and the factor c of what is older."""
        nv = (nj + W - 1) // W
        for r in range(n):
            top = simd.splat(NEG_INF)
            if ld_i64(wk + bits_ + 8 * r) != 0:
                top = _largest(wk + scores_ + r * ROW_NBYTES, ld_i64(wk + block_ + 8 * r),
                               ld_f32(wk + slope_ + 4 * r), cap, nv)
            simd.stf(wk + lanes_ + r * B, top)
        for r in range(0, n, n_folded):
            old = simd.ldf(wk + m_ + 4 * r)
            new = simd.vmax(fold_max(wk + lanes_ + r * B), old)
            simd.stf(wk + c_ + 4 * r, vexp_neg(simd.fsub(old, finite_or_0(new))))
            simd.stf(wk + m_ + 4 * r, new)
        for r in range(n):
            s, m, bits = wk + scores_ + r * ROW_NBYTES, ld_f32(wk + m_ + 4 * r), ld_i64(wk + bits_ + 8 * r)
            sums = _nothing(s, bits, nv) if bits == 0 or m == NEG_INF else _exps(s, m, nv)
            simd.stf(wk + lanes_ + r * B, sums)
        for r in range(0, n, n_folded):
            older = simd.fmul(simd.ldf(wk + l_ + 4 * r), simd.ldf(wk + c_ + 4 * r))
            simd.stf(wk + l_ + 4 * r, simd.fadd(older, fold_sum(wk + lanes_ + r * B)))

    @inline
    def softmax_of_one(wk, n, nj, cap):
        """The same for a single row, whose state needs no vectors."""
        nv, s, bits, m = (nj + W - 1) // W, wk + scores_, ld_i64(wk + bits_), ld_f32(wk + m_)
        old = m
        if bits != 0:
            m = max(m, simd.hmax(_largest(s, ld_i64(wk + block_), ld_f32(wk + slope_), cap, nv)))
        c = exp_neg1(old - m) if m != NEG_INF else simd.f32(0.0)
        sums = _nothing(s, bits, nv) if bits == 0 or m == NEG_INF else _exps(s, m, nv)
        st_f32(wk + m_, m)
        st_f32(wk + c_, c)
        st_f32(wk + l_, ld_f32(wk + l_) * c + simd.hsum(sums))
    return start, see, softmax if n_folded > 1 else softmax_of_one


@inline
def next_run(bits, start):
    """(first, length) of the next run of ones at or above bit `start`; length 0 when there is none."""
    rest = shift_right(bits, start)
    skip = ctz(rest)
    if skip == 64:
        return start, 0
    return start + skip, ctz(~shift_right(rest, skip))
