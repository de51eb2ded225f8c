"""Ctrl-C where it would be lost comes later, while compiling too; forks while another thread compiles."""
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from campaign.processes import compiling
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from ggjit.ops.core.interrupts import defer_interrupts, let_in
from ggjit.ops.native import compiler, forks
from ggjit.ops.native.compiler import codegen
from ggjit.ops.native.jit import CACHE

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


def test_an_interrupt_elsewhere_comes_where_it_is_let_in():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            with pytest.raises(KeyboardInterrupt), defer_interrupts():
                let_in()                        # kept by the outer block
                signal.raise_signal(signal.SIGINT)
                reached.append(2)
                let_in()
                reached.append(3)
            let_in()
            reached.append(4)
    assert reached == [1, 2, 3] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_a_callback_of_the_compiler(monkeypatch, capfd):
    """LLVM calls Python with the machine code; what that raises is dropped, and there is no machine code."""
    want = compiling(np.random.default_rng(1))
    engine = codegen()._engine._ee
    notify = engine._object_cache_notify

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        notify(*args)
    monkeypatch.setattr(engine, "_object_cache_notify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiling(np.random.default_rng(1))
    monkeypatch.undo()
    assert compiling(np.random.default_rng(1)) == want and "ignored" not in capfd.readouterr().err


def test_an_interrupt_between_two_passes_ends_a_compilation(monkeypatch):
    want, passes = compiling(np.random.default_rng(1)), []
    monkeypatch.setattr(CACHE, "on_compile", lambda name: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(compiler.TranslateByteCode, "run_pass", lambda *args: passes.append(args) or True)
    with pytest.raises(KeyboardInterrupt):
        compiling(np.random.default_rng(1))
    monkeypatch.undo()
    assert not passes and compiling(np.random.default_rng(1)) == want


def slow_kernel(reached):
    """A kernel whose compilation rests in the middle of type inference."""
    @intrinsic
    def same(typing, x):
        reached.set()
        time.sleep(0.3)
        return types.int64(types.int64), lambda context, builder, signature, args: args[0]
    return lambda x: same(x)


def test_a_fork_while_another_thread_compiles():
    """The child compiles, and collects garbage."""
    reached = threading.Event()
    thread = threading.Thread(target=CACHE.address, args=(f"slow.{os.getpid()}.{time.time_ns()}", "i64(i64)",
                                                          lambda: slow_kernel(reached), (__name__,)))
    thread.start()
    reached.wait(60)
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            compiling(np.random.default_rng(1))
            os._exit(0 if gc.isenabled() else 3)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()


def test_a_fork_that_waited_in_vain(monkeypatch):
    """The thread that holds the compiler's lock does not exist in the child, where the lock is open."""
    monkeypatch.setattr(forks, "WAIT_SECONDS", 0.05)
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
