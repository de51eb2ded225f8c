"""Processor time, without the garbage collector's, and interrupts at a moment."""
import contextlib
import gc
import os
import signal
import threading
import time
import types

import pytest

HANGS = 300                     # seconds by the clock after which something hangs, however busy the machine is


@contextlib.contextmanager
def no_collector():
    """The garbage collector, which may take a second where much was compiled, is off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def processor_time():
    """Processor time of a block, without the collector's, in `.seconds` after it."""
    spent = types.SimpleNamespace()
    with no_collector():
        start = time.process_time()
        try:
            yield spent
        finally:
            spent.seconds = time.process_time() - start


@contextlib.contextmanager
def interrupted(delay):
    """Ctrl-C `delay` seconds into a block that must end with it; `.seconds` of processor time from the signal to the
    end."""
    at = []

    def strike():
        at.extend((time.process_time(), time.monotonic()))
        os.kill(os.getpid(), signal.SIGINT)
    spent, timer = types.SimpleNamespace(), threading.Timer(delay, strike)
    with no_collector(), pytest.raises(KeyboardInterrupt):
        timer.start()
        try:
            yield spent
        finally:
            timer.cancel()
    assert at, "interrupted by another thread"
    spent.seconds = time.process_time() - at[0]
    assert time.monotonic() - at[1] < HANGS
