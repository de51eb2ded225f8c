"""Leaving a walk in a forked child, where only the thread that forked is left.

A function of the user's may fork inside a computation (a custom op that starts a process).  The child comes back into
the middle of the walk, whose barriers wait for threads that do not exist there: the walk is cancelled, and another
thread opens every barrier until the child is out of it.
"""
import threading
import time

from ggjit.cpu.walk import S_DONE, S_QUIT
from ggjit.ops.core.record import WORD
from ggjit.ops.native.node import S_ABORT, S_COUNT, S_GENERATION


def leave_walk(pool):
    """In the child, on the thread that was walking for `pool`: the walk ends without the other threads."""
    if pool.n_walking > 1:
        pool.words[S_ABORT // WORD] = pool.words[S_QUIT // WORD] = 1
        pool.words[S_COUNT // WORD], pool.words[S_DONE // WORD] = 0, pool.n_walking - 1
        threading.Thread(target=_open_barriers, args=(pool,), daemon=True).start()


def _open_barriers(pool, seconds=1e-4):
    while pool.n_walking:
        if pool.words[S_COUNT // WORD]:
            pool.words[S_COUNT // WORD] = 0
            pool.words[S_GENERATION // WORD] += 1
        time.sleep(seconds)
