"""Progress bars on stderr with rate and remaining time, only if stderr is a terminal.

rich honours NO_COLOR and TERM; on a pipe nothing is drawn and rich is not imported.  Without rich, and in a notebook,
a bar is a line of text (ops/core/progress.py).
"""
import contextlib
import math
import sys
import threading
import time

from ggjit.core.kernels_ahead import n_ahead
from ggjit.display import compile_notice
from ggjit.ops.core.errors import MissingExtra, extra
from ggjit.ops.core.host_memory import start as start_thread
from ggjit.ops.core.printable import printable
from ggjit.ops.core.progress import quiet, work
from ggjit.ops.native.jit import CACHE

TICK = 0.1                              # seconds between two moves of a clock's bar
BAR_WIDTH = 24                          # columns of a bar; the description gets the rest of the terminal


def _drawn():
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        extra("rich.progress", "models")
    except MissingExtra:
        return False
    return True


def shortened(text, width):
    """`text` in at most `width` columns: its end is kept, which tells kernels and files apart."""
    return text if len(text) <= width else "\u2026" + text[len(text) - max(width, 1) + 1:]


def _numbers(task):
    """The text behind a bar: "3/8  1.5/s  0:04 left"."""
    done = f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total else "")
    rate = f"  {task.speed:,.3g}/s" if task.speed else ""
    left = "" if task.time_remaining is None else "  {}:{:02d} left".format(*divmod(math.ceil(task.time_remaining), 60))
    return done + rate + left


class _Display:
    """All bars of the process in one place of the terminal; it is drawn while there is one."""

    def __init__(self):
        self._progress = None

    @property
    def active(self):
        return self._progress is not None

    def add(self, description, total):
        if self._progress is None:
            p, text = extra("rich.progress", "models"), extra("rich.text", "models")

            console = p.Console(file=sys.stderr)

            class DescriptionColumn(p.ProgressColumn):
                def render(column, task):
                    numbers = max(len(_numbers(t)) for t in self._progress.tasks)
                    return text.Text(shortened(task.description, console.width - BAR_WIDTH - numbers - 3))

            class Numbers(p.ProgressColumn):
                def render(self, task):
                    return text.Text(_numbers(task), no_wrap=True, overflow="crop")
            self._progress = p.Progress(DescriptionColumn(), p.BarColumn(BAR_WIDTH), Numbers(), console=console,
                                        transient=True, redirect_stdout=sys.stdout is not None and sys.stdout.isatty())
            self._progress.start()
        return self._progress.add_task(printable(description), total=total)

    def update(self, task, **changes):
        self._progress.update(task, **changes)

    def remove(self, task):
        self._progress.refresh()            # drawn at once, so that work shorter than a tick is shown as done
        self._progress.remove_task(task)
        if not self._progress.tasks:
            self._progress.stop()
            self._progress = None


_display = _Display()


class _Task:
    """The line about a work (ops/core/progress.py) among the bars of a command."""

    def __init__(self):
        self.task = _display.add("", None)

    def show(self, text, last=False):
        if last:
            _display.remove(self.task)
        else:
            _display.update(self.task, description=text)


def place():
    """The object that shows the line about a work: a task among the bars, if there are some."""
    return _Task() if _display.active else compile_notice.place()


@contextlib.contextmanager
def bar(description, total=None, drawn=True):
    """`with bar("repetitions", n) as step: ... step()`.  step(n, total=...) moves by n and may tell the total late."""
    if not drawn:
        yield lambda n=1, **changes: None
        return
    if not _drawn():
        with work(description, total) as step:
            yield step
        return
    task = _display.add(description, total)
    try:
        with quiet():
            yield lambda n=1, **changes: _display.update(task, advance=n, **changes)
    finally:
        _display.remove(task)


@contextlib.contextmanager
def clock(description, seconds):
    """A bar that moves by itself and is full after `seconds`: for work that stops by the clock."""
    if not _drawn() or not 1 <= seconds < math.inf:
        yield
        return
    stop, start = threading.Event(), time.monotonic()
    task = _display.add(description, seconds)

    def move():
        while not stop.wait(TICK):
            _display.update(task, completed=min(time.monotonic() - start, seconds))
    thread = threading.Thread(target=move, daemon=True)
    start_thread(thread, "the progress display")
    try:
        with quiet():
            yield
    finally:
        stop.set()
        thread.join()
        _display.remove(task)


@contextlib.contextmanager
def compiling():
    """While kernels are compiled inside the block, a line on stderr names them and counts."""
    if not _drawn():
        yield
        return
    task, before = None, CACHE.on_compile

    def show(name):
        nonlocal task
        if task is None:
            task = _display.add("", None)
        ahead = n_ahead(name)
        more = f", {ahead - 1} more" if ahead > 1 else ""
        _display.update(task, advance=1, description=f"compiling (kept for next time{more}): {name}")
    CACHE.on_compile = show
    try:
        yield
    finally:
        CACHE.on_compile = before
        if task is not None:
            _display.remove(task)
