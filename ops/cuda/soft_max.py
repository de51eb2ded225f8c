"""soft_max with scale, mask, ALiBi slopes and sinks (ops/reductions/soft_max.py): a block per row, two passes over
x."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import block, device, exp, ld_f32, n_blocks, n_threads, power, st_f32, thread
from ggjit.ops.cuda.native import views
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.sums import LOWEST, block_max, block_sum
from ggjit.ops.cuda.rows import ONE

UNIT, TWO = f32(1), f32(2)


@device
def slope_of(h, n_head, max_bias):
    """ALiBi slope of head h (arXiv 2108.12409)."""
    n = 1
    while 2 * n <= n_head:
        n *= 2
    if h < n:
        return power(power(TWO, -max_bias / f32(n)), f32(h + 1))
    return power(power(TWO, -(max_bias / TWO) / f32(n)), f32(2 * (h - n) + 1))


def _make(mask_type, has_sinks):
    has_mask = mask_type is not None
    size = mask_type.nbytes if has_mask else 0
    get = ONE[mask_type or F32].get

    @device
    def value(x, m, i, scale, slope):
        v = ld_f32(x + 4 * i) * scale
        if has_mask:
            v += slope * get(m + size * i)
        return v

    def kernel(node):
        x, mask, d = node + views.SRC0, node + views.SRC1, node + views.DST
        scale, max_bias = views.param_f32(node, 0), views.param_f32(node, 1)
        n0, n, n_head = views.ne(d, 0), views.n_rows(d), views.ne(d, 2)
        r = block()
        while r < n:
            i1, i2, i3 = views.row_index(d, r)
            px, pd, pm = views.row_addr(x, i1, i2, i3), views.row_addr(d, i1, i2, i3), 0
            slope = UNIT
            if has_mask:
                pm = views.row_addr_mod(mask, i1, i2, i3)
                if max_bias > f32(0):
                    slope = slope_of(i2, n_head, max_bias)
            top = LOWEST
            i = thread()
            while i < n0:
                top = max(top, value(px, pm, i, scale, slope))
                i += n_threads()
            top = block_max(top)
            sink = f32(0)
            if has_sinks:
                sink = ld_f32(views.addr(node + views.SRC2) + 4 * i2)
                top = max(top, sink)
            total = f32(0)
            i = thread()
            while i < n0:
                e = exp(value(px, pm, i, scale, slope) - top)
                st_f32(pd + 4 * i, e)
                total += e
                i += n_threads()
            total = block_sum(total)
            if has_sinks:
                total += exp(sink - top)
            k = UNIT / total
            i = thread()
            while i < n0:                       # each thread scales what it wrote itself
                st_f32(pd + 4 * i, ld_f32(pd + 4 * i) * k)
                i += n_threads()
            r += n_blocks()
    return kernel


def _soft_max(t):
    a, mask, sinks = (*t.src, None, None)[:3]
    used = [x for x in (t, a, mask, sinks) if x is not None]
    if a.type is not F32 or t.type is not F32 or (mask is not None and mask.type not in ONE) or not dense(*used):
        return None
    mask_type = None if mask is None else mask.type
    name = f"soft_max{'' if mask is None else '_' + mask_type.name}{'_sinks' * (sinks is not None)}"
    return over_rows(name, lambda: _make(mask_type, sinks is not None), t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


CUDA = {OP.SOFT_MAX: _soft_max}
