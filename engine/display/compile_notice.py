"""A line while kernels are compiled in a program or notebook: the first call of an op is not silent.

    compiling kernel 7 (mul_mat-q4_0), 9 s so far; kept for the next time
    compiled 12 kernels in 18.2 s, kept for the next time

On a terminal the line is on stderr, rewritten in place, after LEAST seconds of compiling; in a notebook it is an output
of the cell; elsewhere there is none.  How many kernels are still to come is not known here: plans ask for them one by
one.  The commands of `ggjit` show bars of their own (engine/display/progress.py).
"""
import shutil
import sys
import threading
import time

from ggjit.ops.core.host_memory import start as start_thread
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.printable import printable
from ggjit.ops.native.jit import CACHE

LEAST = 1.0                     # seconds of compiling before a terminal shows the line
PAUSE = 0.5                     # seconds without a compilation after which it is over
GIVE_UP = 120.0                 # seconds after which a compilation that never ended is taken for one that failed
TICK = 0.25


class Terminal:
    """The line on stderr."""
    least = LEAST

    def show(self, text, last=False):
        text = text[:shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r\x1b[K{text}" + "\n" * last)
        sys.stderr.flush()


class Cell:
    """The line as an output of the cell that runs; made by its thread, changed by any."""
    least = 0.0

    def __init__(self):
        self.handle = None

    def show(self, text, last=False):
        if self.handle is None:
            from IPython.display import display  # it is there: one of its kernels runs this code
            self.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)


def place():
    """Where the line goes: a Cell, a Terminal or None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return Cell()
    return Terminal() if sys.stderr is not None and sys.stderr.isatty() else None


class Notice:
    """CACHE.on_compile of a process: called with the name of a kernel before it is compiled."""

    def __init__(self, place=place):
        self._place, self._lock = place, ForkLock()
        self._where = None              # place of the line while kernels are compiled
        self._start = self._before = 0  # seconds, and number of compiled kernels, when that began
        self._name, self._expected = "", 0

    def __call__(self, name):
        with self._lock:
            self._name, self._expected = printable(name), CACHE.compiled + 1
            if self._where is None:
                self._where = self._place()
                if self._where is None:
                    return
                self._start, self._before = time.monotonic(), CACHE.compiled
                start_thread(threading.Thread(target=self._watch, daemon=True), "the line about compiling")
            self._show()

    def _show(self):
        seconds = time.monotonic() - self._start
        if seconds >= self._where.least:
            n = self._expected - self._before
            self._where.show(f"compiling kernel {n} ({self._name}), {seconds:.0f} s so far; kept for the next time")

    def _watch(self):
        """Moves the line on, and ends it once nothing has been compiled for a while."""
        n, changed = CACHE.compiled, time.monotonic()
        while time.monotonic() - changed < (PAUSE if n >= self._expected else GIVE_UP):
            time.sleep(TICK)
            if CACHE.compiled != n:
                n, changed = CACHE.compiled, time.monotonic()
            elif n < self._expected:
                self._show()
        with self._lock:
            where, n, seconds = self._where, n - self._before, changed - self._start
            self._where = None
            if n and seconds >= where.least:
                where.show(f"compiled {n} kernel{'s' if n > 1 else ''} in {seconds:.1f} s, kept for the next time",
                           last=True)
