"""Rotary position embedding (ops/attention/rope.py): a block per row, a thread per pair.

The angle of pair i is pos * scale^i; the CPU multiplies step by step, here each thread raises to a power in one step.
"""
import math

from numpy import float32 as f32

from ggjit.ops.attention.rope_angles import FARTHEST, IMROPE, MROPE, NORMAL, VISION
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F16, F32
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native import views
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.rows import ONE

ZERO, UNIT, TWO_PI = f32(0), f32(1), f32(2 * math.pi)


@core.device
def corr_dim(n_dims, n_ctx_orig, n_rot, base):
    """The pair that turns n_rot times over the original context."""
    return f32(n_dims) * core.log(f32(n_ctx_orig) / (n_rot * TWO_PI)) / (f32(2) * core.log(base))


@core.device
def yarn(node, i, theta):
    """(angle, magnitude) of pair i: interpolated, or blended with the original by YaRN's ramp (arXiv 2309.00071)."""
    freq_scale, ext, magnitude = views.param_f32(node, 6), views.param_f32(node, 7), views.param_f32(node, 8)
    angle = theta * freq_scale
    if ext != ZERO:
        n_dims, n_ctx_orig, base = views.param_i32(node, 1), views.param_i32(node, 4), views.param_f32(node, 5)
        low = max(ZERO, core.floor(corr_dim(n_dims, n_ctx_orig, views.param_f32(node, 9), base)))
        high = min(f32(n_dims - 1), core.ceil(corr_dim(n_dims, n_ctx_orig, views.param_f32(node, 10), base)))
        ramp = (f32(i) - low) / max(f32(0.001), high - low)
        mix = (UNIT - min(UNIT, max(ZERO, ramp))) * ext
        angle = angle * (UNIT - mix) + theta * mix
        magnitude *= UNIT + f32(0.1) * core.log(UNIT / freq_scale)
    return angle, magnitude


@core.device
def section_of(node, i, interleaved):
    """(which of the four position ids pair i uses, pairs since its section began)."""
    s0, s1 = views.param_i32(node, 11), views.param_i32(node, 12)
    s2, s3 = views.param_i32(node, 13), views.param_i32(node, 14)
    at = i % (s0 + s1 + s2 + s3)
    if interleaved:
        k = at % 3
        which = 3
        if (k == 0 and at < 3 * s0) or (k == 1 and at < 3 * s1) or (k == 2 and at < 3 * s2):
            which = k
        return which, at
    if at < s0:
        return 0, at
    if at < s0 + s1:
        return 1, at - s0
    if at < s0 + s1 + s2:
        return 2, at - s0 - s1
    return 3, at - s0 - s1 - s2


@core.device
def check_positions(node):
    """Report a position id beyond float32's whole numbers, as the CPU does; all threads look at some."""
    positions, i = node + views.SRC1, core.block() * core.n_threads() + core.thread()
    while i < views.ne(positions, 0):
        id = core.ld_i32(views.addr(positions) + 4 * i)
        if id < -FARTHEST or id > FARTHEST:
            views.bad_index(node, id)
        i += core.n_blocks() * core.n_threads()


def _make(mode, get, put, size, sign, has_factors):
    adjacent, sections, interleaved, anew = mode == NORMAL, bool(mode & MROPE), mode == IMROPE, mode == VISION
    sign = f32(sign)

    @core.device
    def start_and_power(node, i, token, n_tokens):
        positions = views.addr(node + views.SRC1)
        if sections:
            which, since = section_of(node, i, interleaved)
            return f32(core.ld_i32(positions + 4 * (token + which * n_tokens))), f32(since if anew else i)
        return f32(core.ld_i32(positions + 4 * token)), f32(i)

    def kernel(node):
        check_positions(node)
        x, d = node + views.SRC0, node + views.DST
        n0, n, n_tokens = views.ne(d, 0), views.n_rows(d), views.ne(d, 2)
        n_dims, n_offs = views.param_i32(node, 1), views.param_i32(node, 15)
        pairs = n_dims if anew else n_dims // 2
        scale = core.power(views.param_f32(node, 5), f32(-2) / f32(n_dims))
        r = core.block()
        while r < n:
            i1, i2, i3 = views.row_index(d, r)
            px, pd = views.row_addr(x, i1, i2, i3), views.row_addr(d, i1, i2, i3)
            i = core.thread()
            while i < pairs:
                start, p = start_and_power(node, i, i2, n_tokens)
                theta = start * core.power(scale, p)
                if has_factors:
                    theta /= core.ld_f32(views.addr(node + views.SRC2) + 4 * i)
                angle, magnitude = yarn(node, i, theta)
                c, s = core.cos(angle) * magnitude, core.sin(angle) * magnitude * sign
                j = n_offs + (2 * i if adjacent else i)
                k = j + (1 if adjacent else pairs)
                u, v = get(px + j * size), get(px + k * size)
                put(pd + j * size, u * c - v * s)
                put(pd + k * size, u * s + v * c)
                i += core.n_threads()
            i = core.thread()
            while i < n0 - 2 * pairs:           # elements beyond the rotated ones are copied
                j = i if i < n_offs else i + 2 * pairs
                put(pd + j * size, get(px + j * size))
                i += core.n_threads()
            r += core.n_blocks()
    return kernel


def _rope(t):
    mode, ty, back, factors = int(t.op_params[2]), t.type, t.op == OP.ROPE_BACK, len(t.src) > 2
    if t.src[0].type is not ty or ty not in (F32, F16) or not dense(t, *t.src):
        return None
    return over_rows(f"rope_{mode}_{ty.name}{'_back' * back}{'_factors' * factors}",
                     lambda: _make(mode, ONE[ty].get, ONE[ty].put, ty.nbytes, -1 if back else 1, factors),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0] // 2)


CUDA = {OP.ROPE: _rope, OP.ROPE_BACK: _rope}
