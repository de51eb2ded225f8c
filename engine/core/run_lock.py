"""Forbids a computation inside a computation: an error instead of a deadlock.

Custom ops, abort callbacks and signal handlers run inside a computation: on the thread that called it, or on a worker
of the pool.  A call from there that waits for the same computation (a second compute, the values of its plan, its
scheduler) would never return.  The pool keeps the set of threads that run kernels; `refuse_nesting` raises on them.

A callback that waits for another thread, which waits for this computation, is a deadlock that cannot be proved.  It is
assumed, and raised, when a thread has waited NESTING_TIMEOUT seconds for a computation while one user function ran
inside it all the time and used no processor.
"""
import os
import threading
import time
from threading import get_ident

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.weak import WeakKeys
from ggjit.ops.elementwise.custom import IN_PYTHON

KERNEL_THREADS = set()          # idents of the threads that run kernels now; kept by the pool
NESTING_TIMEOUT = 30.0          # seconds
_LOCKS = WeakKeys()             # every RunLock


def refuse_nesting():
    """GgjitError on a thread that runs kernels."""
    if get_ident() in KERNEL_THREADS:
        raise GgjitError("this call comes from inside a computation, and what computes or waits for one would wait for "
                         "itself; custom ops, abort callbacks and signal handlers set a flag or keep a copy, and the "
                         "rest is done after the computation has returned")


class RunLock(type(threading.RLock())):
    """A reentrant lock that is held while kernels run; on a thread that runs kernels `with` raises.

    In a forked child it is open, unless the thread that forked holds it.  Signal handlers may raise between any two
    lines of Python, so `acquire` and `release` are the C functions, in `with` too.
    """

    __slots__ = ()

    def __init__(self):
        _LOCKS.put(self)

    def __enter__(self):
        if get_ident() in KERNEL_THREADS:
            refuse_nesting()
        try:
            if not self.acquire(False):
                acquire_or_raise(self)
        except BaseException:
            release_if_held(self)
            raise
        return self


def release_if_held(lock):
    """Release a reentrant lock, if this thread has it."""
    try:
        lock.release()
    except RuntimeError:            # not acquired
        return


def _after_fork():
    """In the child: open the locks of threads that do not exist there."""
    for lock in _LOCKS.objects():
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def acquire_or_raise(lock):
    """Acquire a lock that is held while kernels run.  GgjitError if its holder seems to wait for this thread."""
    if lock.acquire(False):
        return
    before = {}
    while not lock.acquire(timeout=NESTING_TIMEOUT if before else NESTING_TIMEOUT / 10):
        now = {call: _cpu_seconds(call[0]) for call in list(IN_PYTHON.items())}
        if any(seconds - before[call] < 1e-3 * NESTING_TIMEOUT for call, seconds in now.items() if call in before):
            raise GgjitError(f"waited {NESTING_TIMEOUT:g} s for a computation in which a custom op or callback is "
                             f"itself waiting, perhaps for this thread; nothing may compute or wait for a computation "
                             f"from inside one, on no thread")
        before = now


def _cpu_seconds(ident):
    """Processor time of a thread that is alive; 0 where the system does not say."""
    return time.clock_gettime(time.pthread_getcpuclockid(ident)) if hasattr(time, "pthread_getcpuclockid") else 0.0
