"""Locks that are free in a forked child and that no signal handler leaves locked.

A fork copies a lock in the state it has at that moment; if another thread held it, the child waits for ever.  Here
every lock that the forking thread does not hold is open in the child: the threads that held it do not exist there.
"""
import _thread
import functools
import os
import sys
import weakref

_all = weakref.WeakSet()


class ForkLock(_thread.RLock):
    """A reentrant lock for `with`, open after a fork.

    `with` enters and leaves it in C, where no signal handler can raise between taking the lock and the block that
    releases it.  A method `__enter__` in Python would have such a place.
    """

    __slots__ = ()

    def __init__(self):
        _all.add(self)


def _open_after_fork():
    for lock in list(_all):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_after_fork)


# ---------------------------------------------------------------- cached properties
# In Python 3.11 each functools.cached_property has a lock for all instances, held while its function runs.  Kernels are
# compiled inside of some, here and in Numba.  Python 3.12 has no such lock.
_PACKAGES = "ggjit", "numba", "llvmlite"


def _cached_properties():
    """The functools.cached_property objects of all classes of these packages."""
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
