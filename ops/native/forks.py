"""Delays a fork until no other thread compiles.

A child has the memory of the moment of the fork, but only the thread that forked.  What another thread was compiling
stays half done there: locks of Numba, LLVM and llvmlite are taken for ever, functions count as being compiled, Python
collects no garbage.  So the thread that forks first takes the locks that are held while a kernel is compiled or loaded.

After WAIT_SECONDS it forks without them; the child then opens what it can.
"""
import gc
import os
import threading

from llvmlite import binding as llvm
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ggjit.ops.core.interrupts import KeepInterrupts
from ggjit.ops.core.locks import ForkLock

WAIT_SECONDS = 60.0

kernel_lock = ForkLock()        # held while a kernel is looked up, compiled or loaded
# in the order in which they are taken
_locks = kernel_lock, global_compiler_lock._lock, llvm.ffi.lib._lock._lock
_now = threading.local()        # .taken, .kept: of the fork under way on this thread


def _before():
    _now.kept = kept = KeepInterrupts()         # what is raised here would be printed and dropped
    kept.start()
    _now.taken = [lock for lock in _locks if lock.acquire(timeout=WAIT_SECONDS)]


def _in_parent():
    for lock in reversed(_now.taken):
        lock.release()
    _now.kept.stop_and_send()


def _in_child():
    left = [lock for lock in _locks if lock not in _now.taken]
    if left:
        _open(left)
    for lock in reversed(_now.taken):
        lock.release()
    _now.kept.stop()                            # an interrupt of before is the parent's


def _open(locks):
    """Another thread was compiling, and is not here."""
    for lock in locks:
        lock._at_fork_reinit()
    compiling = cpu_target.typing_context.callstack
    compiling._lock._at_fork_reinit()
    compiling._stack.clear()
    gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
