"""Progress of long work: after two seconds, a line on a terminal or in a notebook's cell.

    with work("embedding", len(texts)) as step:
        for text in texts:
            ...
            step()

`show_in` says where the line goes (engine/display/compile_notice.py); until it is called there is none.  Of works
inside each other only the outermost has a line.
"""
import contextlib
import math
import threading
import time

from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.core.host_memory import start as start_thread
from ggjit.ops.core.printable import printable

AFTER = 2.0                     # seconds of work before a line appears
EVERY = 0.25                    # seconds between two changes of it

_inside = threading.local()     # .work: True where a line may be shown already
_place = None                   # function: where the line goes, something with show(text, last), or None


def show_in(place):
    """Show lines in what `place()` returns from now on, if it is not None."""
    global _place
    _place = place


class _Line:
    """The line about one work; `step` is what its `with` gives."""

    def __init__(self, description, total):
        self.description, self.total, self.done, self.where = description, total, 0, None
        self.start = time.monotonic()
        self.next = self.start + AFTER

    def step(self, n=1, total=None, description=None):
        """n more are done; the total and the description may come late."""
        self.done, self.total, self.description = self.done + n, total or self.total, description or self.description
        self.tick()

    def tick(self):
        now = time.monotonic()
        if now >= self.next:
            self.next = now + EVERY
            if self.where is None:
                self.where = _place() if _place is not None else None
            if self.where is not None:
                self.where.show(self.text(now - self.start))

    def text(self, seconds):
        out = printable(self.description)
        if self.total:
            out += f": {self.done:,}/{self.total:,}"
            if 0 < self.done < self.total:
                left = math.ceil(seconds / self.done * (self.total - self.done))
                out += f", {left // 60}:{left % 60:02d} left"
            return out
        return f"{out}: {self.done:,}, {seconds:.0f} s so far" if self.done else f"{out}, {seconds:.0f} s so far"

    def end(self):
        if self.where is not None:
            count = f"{self.done:,} in " if self.done else ""
            self.where.show(f"{printable(self.description)}: {count}{time.monotonic() - self.start:.1f} s", last=True)


@contextlib.contextmanager
def quiet():
    """Context in which work shows no line, because something else shows its progress."""
    before = getattr(_inside, "work", False)
    _inside.work = True
    try:
        yield
    finally:
        _inside.work = before


@contextlib.contextmanager
def work(description, total=None):
    """`with work("loading", n) as step: ... step()`: the line moves with the steps."""
    if getattr(_inside, "work", False):
        yield lambda n=1, **changes: None
        return
    line = _Line(description, total)
    try:
        with quiet():
            yield line.step
    finally:
        line.end()


def counted(description, things):
    """`for x in counted("reading", parts):` shows a line as `work` does, if there is more than one part."""
    return _counted(description, things) if len(things) > 1 else things


def _counted(description, things):
    with work(description, len(things)) as step:
        for x in things:
            yield x
            step()


@contextlib.contextmanager
def busy(description, seconds=math.inf):
    """The line moves by itself: for work without steps that may take `seconds`."""
    if seconds < AFTER or _place is None or getattr(_inside, "work", False):
        yield
        return
    line, over = _Line(description, None), threading.Event()

    def move():
        wait = AFTER
        while not over.wait(wait):
            line.tick()
            wait = EVERY
    thread = threading.Thread(target=move, daemon=True)
    try:
        start_thread(thread, "the progress line")
    except OutOfMemory:                 # progress is optional: the work goes on without it
        thread = None
    try:
        with quiet():
            yield
    finally:
        over.set()
        if thread is not None:
            thread.join()
        line.end()
