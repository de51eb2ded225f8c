"""norm, rms_norm, l2_norm of rows and group_norm (ops/reductions/norm.py): a block sums a stretch of memory, then
shifts and scales it."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import block, device, ld_f32, n_blocks, n_threads, sqrt, st_f32, thread
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.sums import block_sum
from ggjit.ops.cuda.native.views import DST, SRC0, n_rows, nb, ne, param_f32, param_i32, row_addr, row_index

ZERO, ONE = f32(0), f32(1)


@device
def sum_of(x, n, step):
    """Sum of n floats, `step` bytes apart; in every thread of the block."""
    s = ZERO
    i = thread()
    while i < n:
        s += ld_f32(x + step * i)
        i += n_threads()
    return block_sum(s)


@device
def squares_of(x, n, step, shift):
    """Sum of (x - shift)^2."""
    s = ZERO
    i = thread()
    while i < n:
        v = ld_f32(x + step * i) - shift
        s += v * v
        i += n_threads()
    return block_sum(s)


@device
def shift_and_scale(d, x, n, step, shift, factor):
    i = thread()
    while i < n:
        st_f32(d + 4 * i, (ld_f32(x + step * i) - shift) * factor)
        i += n_threads()


@device
def norm(d, x, n, step, eps):
    mean = sum_of(x, n, step) / f32(n)
    shift_and_scale(d, x, n, step, mean, ONE / sqrt(squares_of(x, n, step, mean) / f32(n) + eps))


@device
def rms_norm(d, x, n, step, eps):
    shift_and_scale(d, x, n, step, ZERO, ONE / sqrt(squares_of(x, n, step, ZERO) / f32(n) + eps))


@device
def l2_norm(d, x, n, step, eps):
    shift_and_scale(d, x, n, step, ZERO, ONE / max(sqrt(squares_of(x, n, step, ZERO)), eps))


STRETCH = {OP.NORM: norm, OP.RMS_NORM: rms_norm, OP.L2_NORM: l2_norm}


def _make_rows(stretch):
    def kernel(node):
        x, d = node + SRC0, node + DST
        n0, n, eps = ne(d, 0), n_rows(d), param_f32(node, 0)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            stretch(row_addr(d, i1, i2, i3), row_addr(x, i1, i2, i3), n0, nb(x, 0), eps)
            r += n_blocks()
    return kernel


def _make_groups():
    def kernel(node):
        x, d = node + SRC0, node + DST
        n_groups, eps = param_i32(node, 0), param_f32(node, 1)
        channels, plane = ne(d, 2), ne(d, 0) * ne(d, 1)
        step = (channels + n_groups - 1) // n_groups
        r = block()
        while r < n_groups * ne(d, 3):
            i3 = r // n_groups
            first = (r - i3 * n_groups) * step
            n = min(step, channels - first) * plane
            if n > 0:
                at = first * nb(x, 2) + i3 * nb(x, 3)
                norm(row_addr(d, 0, 0, 0) + at, row_addr(x, 0, 0, 0) + at, n, 4, eps)
            r += n_blocks()
    return kernel


def _norm(t):
    if t.type is not F32 or t.src[0].type is not F32 or not dense(t):
        return None
    if t.op == OP.GROUP_NORM:
        n_groups = int(t.op_params[0])
        return over_rows("group_norm", _make_groups, n_groups * t.ne[3], t.ne[0] * t.ne[1])
    return over_rows(t.op.name.lower(), lambda: _make_rows(STRETCH[t.op]), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = dict.fromkeys((*STRETCH, OP.GROUP_NORM), _norm)
