"""The walk of traced runs: every thread notes when it began and ended each node (engine/cpu/ticks.py).

Compiled and loaded at the first profile: `worker` and `run` call it by address, out of the sync page.
"""
from ggjit.cpu.walk import make_walk
from ggjit.ops.native.jit import native

walk_with_clock = make_walk(traced=True)


@native("i64(i64, i64, i64, i64)")
def walk_traced(node, end, who, sync):
    """The walk of thread who >> 10 of who & 1023."""
    walk_with_clock(node, end, who >> 10, who & 1023, sync)
    return 0
