"""Lifetimes: handles that cannot be copied, clean-up that continues after an error, finalizers.

Who holds whom is a tree, so that reference counts free everything at once:

    plan -> graph -> tensors -> their sources and their context, which knows them weakly
                           `-> the buffer they lie in

Where Python code has to run when an object dies: `AtEnd`.  Elsewhere weak references do (ops/core/weak.py).
"""
import itertools
import operator
import signal
import sys

from ggjit.ops.core.errors import TypeMismatch
from ggjit.ops.core.interrupts import KeepInterrupts


class Handle:
    """Mixin: stands for a resource of this process, so it is neither copied nor pickled."""
    __slots__ = ()

    def __reduce__(self):
        raise TypeMismatch(f"{self!r} stands for something of this process and cannot be copied or pickled; make "
                           f"another one, there or here (gg.init_backend, alloc_buffer, gg.Scheduler)")


def call_all(*calls, after=None):
    """Make all calls, then raise the first error among them.  after: an error being handled; gets it as a note."""
    first = None
    for call in calls:
        try:
            call()
        except Exception as e:
            first = first or e
    if first is not None and after is not None:
        after.add_note(f"and while cleaning up: {first!r}")
    elif first is not None:
        raise first


# ---------------------------------------------------------------- finalizers
class AtEnd:
    """Calls `work` when it dies or at `now()`, whichever comes first, once.  `work` must not refer to it.

    A Ctrl-C that comes in meanwhile is held back, and sent again when the work is done.  A generator does that, because
    C code can enter it inside its `try`; a function can be interrupted before its first line.  Not a weakref.finalize,
    whose registry would hold all that `work` refers to for ever; a cycle through an AtEnd can be collected.
    """

    def __init__(self, work):
        self._steps = _steps(work)
        next(self._steps)

    __del__ = property(operator.attrgetter("_steps.__next__"))

    def now(self):
        """Errors: those of `work`."""
        steps, self._steps = self._steps, itertools.repeat(None)
        next(steps)


def _steps(work):
    kept = KeepInterrupts()
    try:
        yield
        kept.start()
    except KeyboardInterrupt:           # a Ctrl-C came before the block began
        kept.interrupts.append(signal.SIGINT)
        kept.start()
    try:
        if not sys.is_finalizing():     # at interpreter exit devices are gone already
            work()
    finally:
        kept.stop_and_send()
    yield
