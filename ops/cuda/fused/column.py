"""A column that every block prepares for itself in shared memory, and products of two rows of weights with it.

    column          x, or its norm: x[i] factor w[i], factor = 1 / sqrt(mean of x[i]^2 + eps)
    quantised       8-bit codes and scales of it, the values of quantize_columns.py
    float           float32 of the norm; x itself is read where it lies

No block waits for another one's norm or codes, and the first weights are on their way meanwhile.
"""
from numpy import float32 as f32

from ggjit.ops.core.record import V_WORDS, WORD
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.choice import SMALL_BLOCKS, WALKS
from ggjit.ops.cuda.matmul.mul_mat_vec import is_wide, make_unit, piece_of
from ggjit.ops.cuda.native.sums import block_sum
from ggjit.ops.cuda.native.views import SRC0, SRC1, addr, nb, ne, param_f32
from ggjit.ops.cuda.rows import FLOATS

VIEW_NBYTES, LINE = WORD * V_WORDS, 128
WARPS = 2 if SMALL_BLOCKS else 8
STEP, MOST_CODES, MOST_FLOATS = 1024, 16384, 8192      # shared memory is set aside for a column in such steps
REGISTERS = 128                 # most of a thread: two blocks fit a multiprocessor
ZERO, ONE = f32(0), f32(1)


# ---------------------------------------------------------------- the column
@core.device
def lds_f32x4(at):
    x0, x1, x2, x3 = core.lds_i32x4(at)
    return core.bits_f32(x0), core.bits_f32(x1), core.bits_f32(x2), core.bits_f32(x3)


@core.device
def _factor(x, k, eps):
    """Of the norm of a column."""
    s, i = ZERO, 4 * core.thread()
    while i < k:
        v0, v1, v2, v3 = core.ld_f32x4(x + 4 * i)
        s += (v0 * v0 + v1 * v1) + (v2 * v2 + v3 * v3)
        i += 4 * core.n_threads()
    return ONE / core.sqrt(block_sum(s) / f32(k) + eps)


def _make_values(normed):
    """values(x, w, factor, i): four of the column."""
    @core.device
    def values(x, w, factor, i):
        v0, v1, v2, v3 = core.ld_f32x4(x + 4 * i)
        if normed:
            w0, w1, w2, w3 = core.ld_f32x4(w + 4 * i)
            v0, v1, v2, v3 = v0 * factor * w0, v1 * factor * w1, v2 * factor * w2, v3 * factor * w3
        return v0, v1, v2, v3
    return values


@core.device
def _code(x, d):
    return core.to_i32(core.round_away(x / d)) & 255 if d > ZERO else 0


def _make_put_codes(values):
    @core.device
    def put(x, w, factor, k, to, scales):
        """A lane has four values, eight lanes a scale."""
        lane, first = core.thread() & 31, 128 * (core.thread() >> 5)
        while first < k:
            i = first + 4 * lane
            v0, v1, v2, v3 = values(x, w, factor, min(i, k - 4))
            most = max(max(core.fabs(v0), core.fabs(v1)), max(core.fabs(v2), core.fabs(v3)))
            most = max(most, core.shfl_xor(most, 1))
            most = max(most, core.shfl_xor(most, 2))
            d = max(most, core.shfl_xor(most, 4)) / quantize_columns.STEPS
            if i < k:
                core.sts_i32(to + i, _code(v0, d) | _code(v1, d) << 8 | _code(v2, d) << 16 | _code(v3, d) << 24)
                if i & 31 == 0:
                    core.sts_f32(scales + (i >> 3), d)
            first += 4 * core.n_threads()
    return put


def _make_put_floats(values):
    @core.device
    def put(x, w, factor, k, to, scales):
        i = 4 * core.thread()
        while i < k:
            v0, v1, v2, v3 = values(x, w, factor, i)
            core.sts_i32x4(to + 4 * i, (core.f32_bits(v0), core.f32_bits(v1), core.f32_bits(v2), core.f32_bits(v3)))
            i += 4 * core.n_threads()
    return put


def make_prepare(type, normed, most):
    """prepare(node) -> (the column, its scales), for all threads of the block; the column is source 0, the norm's
    weights are source 1.  most: values that there is room for."""
    quantised = type in BLOCKS
    values, in_place = _make_values(normed), not quantised and not normed
    put = (_make_put_codes if quantised else _make_put_floats)(values)
    place = core.shared(quantize_columns.nbytes(most, 1) if quantised else 4 * most)

    @core.device
    def prepare(node):
        x, k, w, factor = addr(node + SRC0), ne(node + SRC0, 0), 0, ONE
        if in_place:
            return x, 0
        if normed:
            w, factor = addr(node + SRC1), _factor(x, k, param_f32(node, 0))
        to = place()
        put(x, w, factor, k, to, to + most)
        core.sync()
        return to, to + most
    return prepare


# ---------------------------------------------------------------- rows of weights
def make_fetch(rows):
    @core.device
    def fetch(a, row):
        """Ask for the weights of some rows, from `row` on."""
        if WALKS and row < ne(a, 1):
            at, end = addr(a) + row * nb(a, 1), addr(a) + min(row + rows, ne(a, 1)) * nb(a, 1)
            at += LINE * core.thread()
            while at < end:
                core.prefetch(at)
                at += LINE * core.n_threads()
    return fetch


@core.device
def row_of(a, row):
    return addr(a) + min(row, ne(a, 1) - 1) * nb(a, 1)


def _quantised_dots(type):
    words, units, nbytes = BLOCKS[type].words, type.block // 32, type.nbytes
    unit = make_unit(BLOCKS[type], core.lds_i32x4, core.lds_i32, core.lds_f32)

    @core.device
    def dots(p, q, x, scales, k):
        i, s, t = core.thread() & 31, ZERO, ZERO
        while i < k >> 5:
            block = i // units
            u, at, first = i - block * units, block * nbytes, block * units * 32
            w, v = words(p + at, u), words(q + at, u)
            s += unit(p + at, u, w, x, scales, first)
            t += unit(q + at, u, v, x, scales, first)
            i += 32
        return core.warp_sum(s), core.warp_sum(t)
    return dots


def _float_dots(type, ld_f32x4):
    piece, per_piece = piece_of(type, ld_f32x4), 16 // type.nbytes

    @core.device
    def dots(p, q, x, scales, k):
        i, s, t = core.thread() & 31, ZERO, ZERO
        while i < k // per_piece:
            y = x + 4 * per_piece * i
            s += piece(p + 16 * i, y)
            t += piece(q + 16 * i, y)
            i += 32
        return core.warp_sum(s), core.warp_sum(t)
    return dots


def make_dots(type, normed):
    """dots(p, q, x, scales, k): a warp's products of two rows with the column that `prepare` made."""
    return _quantised_dots(type) if type in BLOCKS else _float_dots(type, lds_f32x4 if normed else core.ld_f32x4)


# ---------------------------------------------------------------- what fits
def room_for(type, k, normed):
    """Values that shared memory is set aside for; 0: none is."""
    return -(-k // STEP) * STEP if type in BLOCKS or normed else 0


def fits(x, weights, matrices):
    """Can blocks prepare the column x, with these weights of its norm or None, for matrices of one type?"""
    type = matrices[0].type
    if any(a.type is not type for a in matrices) or not all(
            t.type is F32 and is_contiguous(t) and t.ne == (x.ne[0], 1, 1, 1) and t.view_offs % 16 == 0
            for t in (x, *([] if weights is None else [weights]))):
        return False
    if type in BLOCKS:
        return x.ne[0] <= MOST_CODES and all(is_contiguous(a) for a in matrices)
    return type in FLOATS and (weights is None or x.ne[0] <= MOST_FLOATS) and all(is_wide(a, x) for a in matrices)
