"""How much work a node must be to be shared among threads: less runs on thread 0 alone.

    kernels/threads-KEY.json    {"2": 3000.0, "4": 6000.0}      nanoseconds of one thread's work, by number of threads

A barrier costs 0.3 us, and fetching what another core has written more: how much depends on the processor, and on
whether two threads are two cores.  `ggjit warm-up` measures it (ggjit.cpu.tuning); KEY is that of the thread pool's
kernels: processor and sources.  Results do not depend on it.  GGJIT_TUNE=off: the rule, whatever was measured.
"""
import contextlib
import contextvars
import functools
import json
import math

from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.matmul import choices
from ggjit.ops.native.cache_files import cache_dir
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


@contextlib.contextmanager
def forced(nanoseconds):
    """Inside the block this thread makes plans with that limit."""
    token = _forced.set(nanoseconds)
    try:
        yield
    finally:
        _forced.reset(token)


# ---------------------------------------------------------------- files
def _path():
    return cache_dir() / "kernels" / f"threads-{sources_key(('ggjit.cpu.walk',))}.json"


@functools.cache
def kept():
    """{number of threads: nanoseconds} measured on this machine."""
    try:
        found = {int(n): float(x) for n, x in json.loads(_path().read_text("utf-8")).items()}
    except Exception:           # none, or a damaged file, which counts as none
        return {}
    return found if all(n > 1 and 0 < x < math.inf for n, x in found.items()) else {}


def keep(n_threads, nanoseconds):
    """Write the file; False where that cannot be done, and nothing has changed."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**kept(), n_threads: nanoseconds})
        write_whole(_path(), text, mode=0o600, devices=False)
    except OSError:
        return False
    kept.cache_clear()
    return True
