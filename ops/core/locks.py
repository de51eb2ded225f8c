"""Locks that a forked child finds open.

A fork copies a lock in the state it has at that moment; if another thread held it, the child waits for ever.  Here the
first use in a new process starts with a fresh lock: the threads that held the old one do not exist there.
"""
import os
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
