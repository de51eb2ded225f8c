"""Locks of cached properties in a forked child.

In Python 3.11 each `functools.cached_property` has a lock for all instances, held while its function runs.  Kernels are
compiled inside of some, here and in Numba: a child that was forked meanwhile would wait for a thread it does not have.
Python 3.12 has no such lock.
"""
import functools
import os
import sys

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
