"""Prints a line while kernels are compiled, so that the first call of an op is not silent.

    compiling kernel 7 of 12 (mul_mat-q4_0), 9 s so far, 0:06 left; kept for the next time
    compiled 12 kernels in 18.2 s, kept for the next time

On a terminal the line is on stderr, rewritten in place, after LEAST seconds of compiling; in a notebook it is an output
of the cell; elsewhere there is none.  How many are still to come is known of the plan that is being made, and of a
prompt's plan with the tokens that follow it (engine/core/kernels_ahead.py).  That they are kept is said once.  Other
long work has its line in the same place (ops/core/progress.py); the commands of `ggjit` show bars of their own
(engine/display/progress.py).
"""
import math
import shutil
import sys
import threading
import time

from ggjit.core.kernels_ahead import n_ahead
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

    def at_end(self, function):
        """Do nothing: a terminal's line can be changed at any time."""

    def show(self, text, last=False):
        text = text[:shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r\x1b[K{text}" + "\n" * last)
        sys.stderr.flush()


class Cell:
    """The line as an output of the cell that runs; made by its thread, changed by any.

    at_end(function): called when the cell has run, while its output can still be changed.
    """
    least = 0.0

    def __init__(self, shell=None):
        self.handle, self.shell = None, shell

    def at_end(self, function):
        def over(*_):
            self.shell.events.unregister("post_run_cell", over)
            function()
        if self.shell is not None:
            self.shell.events.register("post_run_cell", over)

    def show(self, text, last=False):
        if self.handle is None:
            from IPython.display import display  # IPython is imported: its kernel runs this code
            self.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)


def place():
    """The object that shows the line: a Cell, a Terminal or None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return Cell(shell)
    return Terminal() if sys.stderr is not None and sys.stderr.isatty() else None


class Notice:
    """CACHE.on_compile of a process: called with the name of a kernel before it is compiled."""

    def __init__(self, place=place):
        self._place, self._lock = place, ForkLock()
        self._where = None              # place of the line while kernels are compiled
        self._start = self._before = 0  # seconds, and number of compiled kernels, when that began
        self._changed = self._seen = 0  # the same values when the last kernel was finished
        self._name, self._expected = "", 0
        self._kept = "; kept for the next time"

    def __call__(self, name):
        with self._lock:
            self._name, self._expected = name, CACHE.compiled + 1
            if self._where is None:
                self._where = self._place()
                if self._where is None:
                    return
                self._start = self._changed = time.monotonic()
                self._before = self._seen = CACHE.compiled
                self._where.at_end(self._finish)
                start_thread(threading.Thread(target=self._watch, daemon=True), "the line about compiling")
            self._show()

    def _show(self):
        seconds = time.monotonic() - self._start
        if seconds >= self._where.least:
            n = self._expected - self._before
            ahead, of, left = n_ahead(self._name), "", ""       # 0: the kernel was asked for outside of a plan
            if ahead and n - 1 + ahead > 1:
                of = f" of {n - 1 + ahead}"
                left = math.ceil(seconds / (n - 1) * ahead) if n > 1 else None
                left = "" if left is None else f", {left // 60}:{left % 60:02d} left"
            self._where.show(f"compiling kernel {n}{of} ({printable(self._name)}), {seconds:.0f} s so far{left}"
                             f"{self._kept}")

    def _watch(self):
        """Updates the line, and removes it once nothing has been compiled for a while."""
        while time.monotonic() - self._changed < (PAUSE if self._seen >= self._expected else GIVE_UP):
            time.sleep(TICK)
            with self._lock:
                if self._where is None:
                    return
                self._look()
                if self._seen < self._expected:
                    self._show()
        self._finish()

    def _look(self):
        if CACHE.compiled != self._seen:
            self._seen, self._changed = CACHE.compiled, time.monotonic()

    def _finish(self):
        """The last text of the line."""
        with self._lock:
            if self._where is None:
                return
            self._look()
            where, n, seconds = self._where, self._seen - self._before, self._changed - self._start
            self._where = None
            if n and seconds >= where.least:
                kept, self._kept = self._kept.replace(";", ","), ""
                where.show(f"compiled {n} kernel{'s' if n > 1 else ''} in {seconds:.1f} s{kept}", last=True)
