"""Locks that a forked child finds open.

A fork copies a lock in the state it has at that moment; if another thread held it, the child waits for ever.  Here the
first use in a new process starts with a fresh lock: the threads that held the old one do not exist there.
"""
import functools
import os
import sys
import threading


class ForkLock:
    """A reentrant lock for `with`, renewed after fork."""

    __slots__ = ("_lock", "_pid")

    def __init__(self):
        self._lock, self._pid = threading.RLock(), os.getpid()

    def __enter__(self):
        if self._pid != os.getpid():
            self._lock, self._pid = threading.RLock(), os.getpid()
        self._lock.acquire()
        return self

    def __exit__(self, *exc):
        self._lock.release()


# ---------------------------------------------------------------- cached properties
# In Python 3.11 each functools.cached_property has a lock for all instances, held while its function runs.  Kernels are
# compiled inside of some, here and in Numba.  Python 3.12 has no such lock.
_PACKAGES = "ggjit", "numba", "llvmlite"


def _cached_properties():
    """Those of all classes of these packages."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            for cls in list(vars(module).values()):
                if isinstance(cls, type) and cls.__module__ == name:
                    yield from (x for x in vars(cls).values() if isinstance(x, functools.cached_property))


def _after_fork():
    for x in _cached_properties():
        if not x.lock._is_owned():
            x.lock._at_fork_reinit()


if hasattr(os, "register_at_fork") and sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_after_fork)
