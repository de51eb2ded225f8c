"""Progress on stderr, never on stdout: a line that says which kernel is being compiled, bars for countable work."""
import contextlib
import sys

from ggjit.ops.errors import extra
from ggjit.ops.jit import CACHE


def console():
    """rich's console on stderr; it honours NO_COLOR and pipes."""
    return extra("rich.console", "models").Console(file=sys.stderr)


@contextlib.contextmanager
def compiling():
    """While kernels are compiled inside the block, one line on stderr names them and counts."""
    if not sys.stderr.isatty():
        yield
        return
    status, before = None, CACHE.on_compile

    def show(name):
        nonlocal status
        text = f"compiling kernels (kept for next time): {CACHE.compiled + 1}  {name}"
        if status is None:
            status = console().status(text)
            status.start()
        status.update(text)
    CACHE.on_compile = show
    try:
        yield
    finally:
        CACHE.on_compile = before
        if status is not None:
            status.stop()


def bar(description, total):
    """A rich progress bar on stderr: `with bar("repetitions", n) as step: ... step()`."""
    return _Bar(description, total)


class _Bar:
    def __init__(self, description, total):
        p = extra("rich.progress", "models")
        self._progress = p.Progress(p.TextColumn("{task.description}"), p.BarColumn(), p.MofNCompleteColumn(),
                                    p.TimeRemainingColumn(), console=console(), transient=True,
                                    disable=not sys.stderr.isatty())
        self._task = self._progress.add_task(description, total=total)

    def __enter__(self):
        self._progress.start()
        return lambda n=1: self._progress.advance(self._task, n)

    def __exit__(self, *exc):
        self._progress.stop()
