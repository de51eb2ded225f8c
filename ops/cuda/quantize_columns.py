"""Activations as 8-bit codes, for products with quantised weights: blocks of 32 values, code = round(x / d).

    scratch memory of the node      codes   n_columns x k bytes
                                    scales  n_columns x k / 32 float32, right behind them

A column is a row of b; columns are numbered in b's flat row order.
"""
from numpy import float32 as f32

from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native.launch import MAX_BLOCKS, MAX_THREADS, Launch
from ggjit.ops.cuda.native.views import SRC1, n_rows, nb, ne, row_addr, row_index, work
from ggjit.ops.cuda.rows import ONE

STEPS, CODES = f32(127), "codes"


def nbytes(k, n_columns):
    return n_columns * (k + k // 32 * 4)


@core.device
def put_code(to, scale, x):
    """The code of a lane's value, and the scale of the warp's 32."""
    d, q = core.warp_max(core.fabs(x)) / STEPS, 0
    if d > f32(0):
        q = core.to_i32(core.round_away(x / d))
    core.st_i8(to, q)
    if core.thread() & 31 == 0:
        core.st_f32(scale, d)


def _make(get):
    def kernel(node):
        b = node + SRC1
        k, n = ne(b, 0), n_rows(b)
        per_row, codes, lane = k >> 5, work(node), core.thread() & 31
        scales = codes + n * k
        i = core.block() * (core.n_threads() >> 5) + (core.thread() >> 5)              # a warp per 32 values
        while i < n * per_row:
            r = i // per_row
            at = (i - r * per_row) * 32 + lane
            i1, i2, i3 = row_index(b, r)
            x = get(row_addr(b, i1, i2, i3) + at * nb(b, 0))
            put_code(codes + r * k + at, scales + 4 * i, x)
            i += core.n_blocks() * (core.n_threads() >> 5)
    return kernel


def _over_values(x, name, make, **leaves):
    n = x.ne[1] * x.ne[2] * x.ne[3]
    blocks = max(1, min(-(-n * (x.ne[0] // 32) * 32 // MAX_THREADS), MAX_BLOCKS))
    return Launch(name, make, (blocks, 1, 1), MAX_THREADS, nbytes(x.ne[0], n), **leaves)


def launch(b):
    """The Launch that fills the scratch memory from source 1."""
    return _over_values(b, f"quantize_columns_{b.type.name}", lambda: _make(ONE[b.type].get), leaves=CODES)


def beside(t, name, make, module):
    """The Launch of node `t`'s result and its codes."""
    return _over_values(t, name, make, leaves_result=CODES, module=module)
