"""Loops written out: for local arrays whose every index has to be a constant, so that they stay in registers.

LLVM unrolls short loops by itself; how long they may be depends on the compiler of the GPU's generation.
"""
from ggjit.ops.cuda.native.core import device


def unrolled(n, body, first=0):
    """run(*args): body(0, *args), body(1, *args), ... body(n - 1, *args), without a loop."""
    if n == 1:
        @device
        def run(*args):
            body(first, *args)
        return run
    low, high = unrolled(n // 2, body, first), unrolled(n - n // 2, body, first + n // 2)

    @device
    def run_both(*args):
        low(*args)
        high(*args)
    return run_both
