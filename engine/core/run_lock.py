"""No computation inside a computation.

Custom ops, abort callbacks and signal handlers run inside a computation: on the thread that called it, or on a worker
of the pool.  Whatever waits for that computation from there (a second compute, the values of its plan, its scheduler)
would wait for itself.  The pool knows which threads are inside; what computes or waits asks here first and raises.

A function that waits for another thread which computes waits for itself in a roundabout way.  Nobody can tell that for
sure; but if a thread had to wait for PATIENCE seconds, and all the time a user's function ran inside the computation
and used no processor, the waiting thread gives up with an error.
"""
import os
import threading
import time
import weakref
from threading import get_ident

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.elementwise.custom import IN_PYTHON

INSIDE = set()                  # idents of the threads that run kernels now; kept by the pool
PATIENCE = 30.0                 # seconds
_LOCKS = weakref.WeakSet()      # every RunLock


def refuse_nesting():
    """GgjitError on a thread that runs kernels."""
    if get_ident() in INSIDE:
        raise GgjitError("this call comes from inside a computation, and what computes or waits for one would wait for "
                         "itself; custom ops, abort callbacks and signal handlers set a flag or keep a copy, and the "
                         "rest is done after the computation has returned")


class RunLock(type(threading.RLock())):
    """A reentrant lock that is held while kernels run: kernels that ask for it get an error.

    A forked child finds it open, unless the thread that forked holds it.  Signal handlers may raise wherever Python
    code is called or has called, so `acquire` and `release` are C's, the latter in `with` too.
    """

    __slots__ = ()

    def __init__(self):
        _LOCKS.add(self)

    def __enter__(self):
        if get_ident() in INSIDE:
            refuse_nesting()
        try:
            if not self.acquire(False):
                take(self)
        except BaseException:
            release(self)
            raise
        return self


def release(lock):
    """Release a reentrant lock that this thread may have acquired, or not."""
    try:
        lock.release()
    except RuntimeError:            # it had not
        return


def _after_fork():
    """In the child: locks that threads held which do not exist there."""
    for lock in list(_LOCKS):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def take(lock):
    """Acquire a lock that is held while kernels run.  GgjitError if its holder seems to wait for this thread."""
    if lock.acquire(False):
        return
    before = {}
    while not lock.acquire(timeout=PATIENCE if before else PATIENCE / 10):
        now = {call: _cpu_seconds(call[0]) for call in list(IN_PYTHON.items())}
        if any(seconds - before[call] < 1e-3 * PATIENCE for call, seconds in now.items() if call in before):
            raise GgjitError(f"waited {PATIENCE:g} s for a computation in which a custom op or callback is itself "
                             f"waiting, perhaps for this thread; nothing may compute or wait for a computation from "
                             f"inside one, on no thread")
        before = now


def _cpu_seconds(ident):
    """Processor time of a thread that is alive; 0 where the system does not say."""
    return time.clock_gettime(time.pthread_getcpuclockid(ident)) if hasattr(time, "pthread_getcpuclockid") else 0.0
