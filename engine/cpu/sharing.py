"""The least work for which a node is shared among threads; smaller nodes run on thread 0 alone.

    kernels/threads-KEY.json    {"2": 3000.0, "4": 6000.0}      nanoseconds of one thread's work, by number of threads

A barrier costs 0.3 us, and fetching what another core has written more: how much depends on the processor, and on
whether two threads are two cores.  `ggjit warm-up` measures it (ggjit.cpu.tuning); KEY is that of the thread pool's
kernels: processor and sources.  Results do not depend on it.  GGJIT_TUNE=off: the rule, whatever was measured.
"""
import contextvars
import functools
import math

from ggjit.ops.matmul import choices
from ggjit.ops.native import measured
from ggjit.ops.native.jit import sources_key

RULE_NANOSECONDS = 4000.0
CANDIDATES = (1000.0, 2000.0, 4000.0, 8000.0, 16000.0, 32000.0)
_forced = contextvars.ContextVar("least shared", default=None)


def least_nanoseconds(n_threads):
    """Nodes of less work are not shared among so many threads."""
    forced = _forced.get()
    if forced is not None:
        return forced
    return RULE_NANOSECONDS if choices.SETTING == "off" else kept().get(n_threads, RULE_NANOSECONDS)


def forced(nanoseconds):
    """Context in which this thread makes plans with that limit."""
    return measured.forced(_forced, nanoseconds)


# ---------------------------------------------------------------- files
def _file():
    return measured.MeasuredFile("kernels", "threads", sources_key(("ggjit.cpu.walk",)), _limits)


def _limits(found):
    """{number of threads: nanoseconds} of the file's JSON.  Errors: ValueError and others where it says none."""
    found = {int(n): float(x) for n, x in found.items()}
    if not all(n > 1 and 0 < x < math.inf for n, x in found.items()):
        raise ValueError("nanoseconds must be positive and finite, for two threads or more")
    return found


@functools.cache
def kept():
    """{number of threads: nanoseconds} measured on this machine."""
    return _file().read() or {}


def keep(n_threads, nanoseconds):
    """Write the file; False where that cannot be done, and nothing has changed."""
    done = _file().add({n_threads: nanoseconds})
    if done:
        kept.cache_clear()
    return done


def note_busy(why):
    """Tell the user that a busy machine spoilt the measurement, and that the rule or the earlier result is used."""
    _file().note_busy(why)
