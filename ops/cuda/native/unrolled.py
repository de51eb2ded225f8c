"""Unrolls a loop into consecutive bodies."""
from ggjit.ops.cuda.compiler import core


def unrolled(n, body, first=0):
    """run(x, y, at): body(0, x, y, at), ... body(n - 1, x, y, at).

    For local arrays x and y, which stay in registers only where every index is a constant.  How long a loop LLVM
    unrolls by itself depends on the GPU's generation.
    """
    if n == 1:
        @core.device
        def run(x, y, at):
            body(first, x, y, at)
        return run
    low, high = unrolled(n // 2, body, first), unrolled(n - n // 2, body, first + n // 2)

    @core.device
    def run_both(x, y, at):
        low(x, y, at)
        high(x, y, at)
    return run_both
