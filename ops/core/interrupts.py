"""Ctrl-C while something runs in which it would be lost.

Python prints and drops what a signal handler raises inside a finalizer or the callback of a weak reference.
"""
import _signal  # signal.signal makes enumerations of what it returns, which takes ten times as long
import signal
import threading

# functions that Python, Numba and llvmlite call when an object dies
_FINALIZERS = "__del__", "_on_type_disposal"
_FILES = "weakref.py", "_weakrefset.py"


class KeepInterrupts:
    """From `start()` to `stop()` a Ctrl-C is put into `interrupts` instead of raising KeyboardInterrupt.

    when: of the frame that was interrupted, is it to be kept?  By default always.
    """

    def __init__(self, when=lambda frame: True):
        self.interrupts, self._handler, self._when = [], None, when

    def start(self):
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._handle)

    def _handle(self, number, frame):
        if not self._when(frame):
            return self._handler(number, frame)
        self.interrupts.append(number)

    def stop(self):
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)


def in_finalizer(frame):
    """Is this frame, or one it was called from, a finalizer?"""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _FINALIZERS or code.co_filename.endswith(_FILES):
            return True
        frame = frame.f_back
    return False


class defer_interrupts:
    """`with defer_interrupts():` a Ctrl-C that comes in inside a finalizer of other packages is raised at the end.

    when: as of KeepInterrupts.
    """

    def __init__(self, when=in_finalizer):
        self._keep = KeepInterrupts(when)

    def __enter__(self):
        self._keep.start()

    def __exit__(self, *exc):
        self._keep.stop()
        if self._keep.interrupts:
            signal.raise_signal(signal.SIGINT)
