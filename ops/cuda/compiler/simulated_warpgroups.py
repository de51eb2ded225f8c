"""The functions of `warpgroups.py` in NumPy, for the simulator: by the PTX ISA's rules for a descriptor's addresses.

A warp computes its 16 rows by itself.  It reads the columns when it is asked to multiply, as each of its lanes, so that
a copy to them without a barrier is a race.
"""
import ctypes

import numpy as np

from ggjit.ops.cuda.compiler.simulated import G, T, _once_per_warp, _words, f32
from ggjit.ops.cuda.compiler.simulator import WARP, SimulationFault, check, current, reads_shared

LINE, EIGHT_LINES = 128, 1024                   # bytes
HALVES = LINE // 2


def fence_shared():
    """Here what is written is seen; what is not, is a race."""


def _places(n):
    """[column][value of k] -> bytes behind the first: bits 4 to 6 of an address are exchanged with bits 7 to 9."""
    column, k = np.arange(n)[:, None], np.arange(HALVES)
    straight = EIGHT_LINES * (column // 8) + LINE * (column % 8) + 2 * k
    return straight ^ (straight >> 7 & 7) << 4


def wgmma(n, bf16=False):
    places = _places(n)

    def values(words):
        if bf16:
            return (words.view(np.uint16).astype(np.uint32) << 16).view(f32)
        return words.view(np.float16).astype(f32)

    def compute(given):
        at = given[0][2]
        columns = values(np.frombuffer(ctypes.string_at(at, n * LINE), np.uint16)[places // 2])
        rows = np.empty((16, HALVES // 2, 2), f32)
        words = _words([a for _, a, _ in given], 16)
        of = values(words).reshape(WARP, 4, 4, 2)               # lane, 16 values of k, word, half
        for i in range(4):
            rows[G, 8 * i + T], rows[G + 8, 8 * i + T] = of[:, i, 0], of[:, i, 1]
            rows[G, 8 * i + T + 4], rows[G + 8, 8 * i + T + 4] = of[:, i, 2], of[:, i, 3]
        d = rows.reshape(16, HALVES) @ columns.T
        results = np.empty((WARP, n // 8, 4), f32)
        for j in range(n // 8):
            results[:, j] = np.stack([d[G, 8 * j + 2 * T], d[G, 8 * j + 2 * T + 1], d[G + 8, 8 * j + 2 * T],
                                      d[G + 8, 8 * j + 2 * T + 1]], 1)
        results = results.reshape(WARP, n // 2) + np.array([acc for acc, *_ in given], f32)
        return [list(x) for x in results]

    def multiply(acc, a, at):
        check(at, n * LINE, EIGHT_LINES)
        lane = current()
        if lane.block.n_threads % 128:
            raise SimulationFault(f"a block of {lane.block.n_threads} threads is not whole warpgroups")
        for i in range(lane.lane, n * LINE // 4, WARP):
            reads_shared(at + 4 * i)
        acc[:] = _once_per_warp(f"wgmma {n}", (list(acc), list(a), at), compute)
    return multiply
