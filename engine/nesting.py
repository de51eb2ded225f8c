"""No computation inside a computation.

Custom ops, abort callbacks and signal handlers run inside a computation: on the thread that called it, or on a worker
of the pool.  Whatever waits for that computation from there (a second compute, the values of its plan, its scheduler)
would wait for itself.  The pool knows which threads are inside; what computes or waits asks here first and raises.
"""
import os
import threading

from ggjit.ops.errors import GgjitError
from ggjit.ops.locks import ForkLock

INSIDE = set()                  # idents of the threads that run kernels now; kept by the pool
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INSIDE.clear)


def refuse_nesting():
    """GgjitError on a thread that runs kernels."""
    if threading.get_ident() in INSIDE:
        raise GgjitError("this call comes from inside a computation, and what computes or waits for one would wait for "
                         "itself; custom ops, abort callbacks and signal handlers set a flag or keep a copy, and the "
                         "rest is done after the computation has returned")


class RunLock(ForkLock):
    """A lock that is held while kernels run: kernels that ask for it get an error."""

    __slots__ = ()

    def __enter__(self):
        refuse_nesting()
        return ForkLock.__enter__(self)         # super() costs twice as much, in every replay
