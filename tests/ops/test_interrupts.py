"""Ctrl-C inside finalizers of other packages comes after them; forks while another thread compiles."""
import os
import signal
import threading
import weakref

import pytest
from numba.core.compiler_lock import global_compiler_lock

from ggjit.ops.core.interrupts import defer_interrupts

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks as POSIX has them")


class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def finalized():
    x = Dies()
    weakref.finalize(x, signal.raise_signal, signal.SIGINT)
    x.__class__ = type("Plain", (), {})


@pytest.mark.parametrize("die", [Dies, finalized])
def test_an_interrupt_in_a_finalizer_comes_at_the_end(die, capfd):
    reached, before = False, signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with defer_interrupts():
            die()
            reached = True
    assert reached and signal.getsignal(signal.SIGINT) is before and "ignored" not in capfd.readouterr().err


def test_an_interrupt_elsewhere_comes_at_once():
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached = True
    assert not reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fork_while_another_thread_compiles():
    """The thread that holds the compiler's lock does not exist in the child, where the lock is open."""
    taken, done = threading.Event(), threading.Event()

    def compile_for_long():
        with global_compiler_lock:
            taken.set()
            done.wait(20)
    thread = threading.Thread(target=compile_for_long)
    thread.start()
    taken.wait(20)
    try:
        pid = os.fork()
        if not pid:
            os._exit(0 if global_compiler_lock._lock.acquire(timeout=5) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        thread.join()
    with global_compiler_lock:
        pid = os.fork()
        if not pid:
            os._exit(0 if global_compiler_lock.is_locked() else 1)      # held by the thread that forked: it goes on
        assert os.waitpid(pid, 0)[1] == 0
