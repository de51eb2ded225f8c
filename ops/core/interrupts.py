"""Ctrl-C in code that would lose it, or that it would leave half done.

    with defer_interrupts():    # a Ctrl-C is kept
        ...
        let_in()                # one that is kept takes effect here
        ...
                                # and at the end

Python prints and drops what a signal handler raises inside a finalizer, the callback of a weak reference or a function
that C code calls.
"""
import _signal  # signal.signal makes enumerations of what it returns, which takes ten times as long
import _thread
import os
import signal
import threading
import time

_keeping = []                   # of the main thread, the only one that handles signals; the innermost last


class KeepInterrupts:
    """From `start()` to `stop()` a Ctrl-C is put into `interrupts` instead of raising KeyboardInterrupt."""

    def __init__(self):
        self.interrupts, self._handler, self.thread = [], None, threading.get_ident()

    def start(self):
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._handle)        # after it nothing raises until stop()
            _keeping.append(self)

    def _handle(self, number, frame):
        self.interrupts.append(number)

    def let_in(self, frame):
        """What the handler of before does with what was kept."""
        if self.interrupts:
            number = self.interrupts[0]
            self.interrupts.clear()
            self._handler(number, frame)

    def stop(self):
        if self._handler is not None:
            _keeping.remove(self)
            _signal.signal(_signal.SIGINT, self._handler)

    def stop_and_send(self):
        """`stop()`, and what was kept comes soon: for functions whose errors Python drops."""
        try:
            self.stop()
        except KeyboardInterrupt:
            self.interrupts.append(signal.SIGINT)
        if self.interrupts:
            _thread.start_new_thread(_send, ())


class defer_interrupts:
    """`with defer_interrupts():` a Ctrl-C is raised at the end, or by `let_in()` inside."""

    def __init__(self):
        self._keep = KeepInterrupts()

    def __enter__(self):
        self._keep.start()

    def __exit__(self, *exc):
        self._keep.stop()
        if self._keep.interrupts:
            signal.raise_signal(signal.SIGINT)


def let_in():
    """Raise a Ctrl-C that was kept; inside a `defer_interrupts()` further out it goes on being kept there."""
    if _keeping and threading.current_thread() is threading.main_thread():
        _keeping[-1].let_in(None)


def _send():
    time.sleep(1e-3)                    # long enough for a finalizer or a hook of a fork to return
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)       # ends a call that waits, too
    else:
        _thread.interrupt_main(signal.SIGINT)


def _after_fork():
    """In the child of a thread that is not the main one: what the main thread was in is not here."""
    if _keeping and _keeping[0].thread != threading.get_ident():
        _signal.signal(_signal.SIGINT, _keeping[0]._handler)
        _keeping.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
