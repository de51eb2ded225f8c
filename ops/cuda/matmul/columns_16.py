"""Columns as 16-bit floats, for tensor cores: rows of b one after the other, filled up with zeros to whole STEPs.

    scratch memory of the node      values  n_columns x padded(k) of 16 bits
                                    scales  n_columns float32, right behind them

A column is multiplied by a power of two, so that its largest value has exponent 13 and small ones keep their digits;
its scale undoes that.  Columns with an infinity stay as they are.  They are numbered in b's flat row order.
"""
from numpy import float32 as f32

from ggjit.ops.core.types import BF16
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native.launch import MAX_BLOCKS, Launch, threads_for
from ggjit.ops.cuda.native.sums import block_max
from ggjit.ops.cuda.native.views import SRC1, n_rows, nb, ne, row_addr, row_index, work
from ggjit.ops.cuda.rows import ONE

STEP = 32
BIAS, TOP, INFINITE = 127, 13, 255              # exponents of float32; the one that the largest value gets
ZERO = f32(0)


def padded(k):
    return (k + STEP - 1) // STEP * STEP


padded_k = core.device(padded)


def nbytes(k, n_columns):
    return n_columns * (2 * padded(k) + 4)


@core.device
def power_of_two(exponent):
    return core.bits_f32(exponent << 23)


@core.device
def as_it_is(i):
    return i


@core.device
def turned_place(i):
    """Where words of 32 values stand whose eights (4 x 4 words) are turned: word j of eight t at 4 j + t."""
    return i & -16 | (i & 3) << 2 | i >> 2 & 3


def _make(get, pack, place):
    @core.device
    def value(p, step, i, k, factor):
        return get(p + i * step) * factor if i < k else ZERO

    def kernel(node):
        b = node + SRC1
        k, n, r = ne(b, 0), n_rows(b), core.block()
        length = padded_k(k)
        while r < n:
            i1, i2, i3 = row_index(b, r)
            p, to, step, top = row_addr(b, i1, i2, i3), work(node) + 2 * r * length, nb(b, 0), ZERO
            i = core.thread()
            while i < k:
                top = max(top, core.fabs(get(p + i * step)))
                i += core.n_threads()
            exponent = max(core.f32_bits(block_max(top)) >> 23 & INFINITE, TOP + 1)
            if exponent == INFINITE:
                exponent = BIAS + TOP
            factor = power_of_two(2 * BIAS + TOP - exponent)
            i = 2 * core.thread()
            while i < length:
                x, y = value(p, step, i, k, factor), value(p, step, i + 1, k, factor)
                core.st_i32(to + 4 * place(i >> 1), pack(x, y))
                i += 2 * core.n_threads()
            if core.thread() == 0:
                core.st_f32(work(node) + 2 * n * length + 4 * r, power_of_two(exponent - TOP))
            r += core.n_blocks()
    return kernel


def launch(a, b, turned=False):
    """The Launch that fills the scratch memory from source 1, for weights of a's type.  turned: as warpgroups read
    columns (mul_mat_warpgroups.py)."""
    n, is_bf16 = b.ne[1] * b.ne[2] * b.ne[3], a.type is BF16
    pack = core.pack_bf16 if is_bf16 else core.pack_f16
    name, place = f"columns_16_{b.type.name}{'_bf16' * is_bf16}{'_turned' * turned}", turned_place if turned else \
        as_it_is
    return Launch(name, lambda: _make(ONE[b.type].get, pack, place),
                  (max(1, min(n, MAX_BLOCKS)), 1, 1), threads_for(b.ne[0]), nbytes(b.ne[0], n),
                  leaves=f"{'bf16' if is_bf16 else 'f16'}{' turned' * turned}")
