"""Reductions over a block of whole warps."""
from numpy import float32 as f32

from ggjit.ops.cuda.compiler.core import device, lds_f32, n_threads, shared, sts_f32, sync, thread, warp_max, warp_sum

MAX_WARPS = 32
LOWEST, ZERO = f32("-inf"), f32(0)


def _over_block(over_warp, neutral):
    parts = shared(4 * MAX_WARPS)

    @device
    def reduce(x):
        x = over_warp(x)
        n_warps = n_threads() >> 5
        if n_warps > 1:
            p, lane = parts(), thread() & 31
            if lane == 0:
                sts_f32(p + 4 * (thread() >> 5), x)
            sync()
            y = neutral
            if lane < n_warps:
                y = lds_f32(p + 4 * lane)
            x = over_warp(y)
            sync()                              # barrier: other warps may now overwrite the partial sums
        return x
    return reduce


block_sum, block_max = _over_block(warp_sum, ZERO), _over_block(warp_max, LOWEST)
