"""Files of measured choices: which way was fastest on this machine, as JSON that later processes read.

    CACHE/FOLDER/NAME-KEY.json

KEY is of what the figures depend on: the processor or device, and the sources of what was measured.  A file that is
damaged or says what its reader does not accept counts as absent; a warning says why, and the next measurement writes it
anew.  Processes and threads that measure at the same time lose nothing of each other's: they write in turn.

On a busy machine nothing is chosen (`in_turns`): the rule holds, and NAME-KEY.json.busy says that the measurement was
refused ("taken busy"), so that it is made again later, and not at every load meanwhile.
"""
import contextlib
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable

try:
    import fcntl
except ImportError:             # Windows: of two writers at the same moment the later one stays
    fcntl = None

from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.user_warnings import warn
from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.native.cache_files import cache_dir

# least share of the elapsed time that must be own processor time: else other processes used the core
LEAST_SHARE = 0.9
# largest ratio of median to least time: more means that other processes used cores now and then
SPREAD = 1.5
AGAIN_SECONDS = 600.0           # seconds after which a measurement that a busy machine spoilt is repeated


class MachineBusy(Exception):
    """Other processes had the cores during a measurement: its times say nothing."""


def in_turns(works, rounds, now=time.perf_counter, used=time.thread_time):
    """{name: least seconds} of functions, works = {name: function}, that run in turn, so often each.

    now, used: clocks of the time that passed and of this thread's processor time.  Errors: MachineBusy where the
    processor time is less than LEAST_SHARE of the time that passed, or most functions' medians are SPREAD times
    their least.
    """
    seconds, passed, own = {name: [] for name in works}, 0.0, 0.0
    for _ in range(rounds):
        for name, work in works.items():
            u0, t0 = used(), now()
            work()
            seconds[name].append(now() - t0)
            own += used() - u0
            passed += seconds[name][-1]
    if own < LEAST_SHARE * passed:
        raise MachineBusy(f"this thread had a processor for {own / passed:.0%} of {passed:.3g} seconds")
    spread = [statistics.median(times) / min(times) for times in seconds.values()]
    if sum(x > SPREAD for x in spread) > len(spread) / 2:
        raise MachineBusy(f"the same work took {max(spread):.3g} times as long at other times")
    return {name: min(times) for name, times in seconds.items()}


@dataclasses.dataclass(frozen=True)
class MeasuredFile:
    """accepted: function of the parsed JSON; gives what `read` returns, or raises an error that says what is wrong."""
    folder: str
    name: str
    key: str
    accepted: Callable

    @property
    def path(self):
        return cache_dir() / self.folder / f"{self.name}-{self.key}.json"

    def read(self):
        """The accepted content of the file, or None where it is absent or not accepted."""
        try:
            return self.accepted(parse_json(self.path.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as e:      # of any type: `accepted` is given whatever the file holds
            reason = e.strerror if isinstance(e, OSError) else f"{type(e).__name__}: {e}"
            warn(f"{self.path} is not used ({reason}); what it should hold will be measured again")
            return None

    @property
    def _busy(self):
        return self.path.with_name(f"{self.path.name}.busy")

    def note_busy(self, why):
        """A busy machine spoilt the measurement."""
        with contextlib.suppress(OSError):              # measured again at once, then
            self._busy.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._busy, f"taken busy: {why}\n", mode=0o600, devices=False)

    def busy_seconds(self, now=time.time):
        """Seconds since a busy machine spoilt the measurement; infinite where none did, or a later one was kept."""
        try:
            return max(0.0, now() - self._busy.stat().st_mtime)
        except OSError:
            return math.inf

    def write(self, content):
        """Write the file; False where that cannot be done, and nothing has changed."""
        return self._write(lambda: content)

    def add(self, entries):
        """Add entries to the file, replacing those of the same names; otherwise as `write`."""
        return self._write(lambda: {**(self.read() or {}), **entries})

    def _write(self, content):
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _in_turn(folder):
                write_whole(self.path, json.dumps(content()), mode=0o600, devices=False)
                self._busy.unlink(missing_ok=True)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def forced(variable, way):
    """Context in which the context variable of a choice is `way`, in this thread alone."""
    token = variable.set(way)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def _in_turn(folder):
    """Context in which no other process or thread writes in the folder."""
    if fcntl is None:
        yield
        return
    lock = os.open(folder, os.O_RDONLY)  # flock belongs to the opened file, so each writer opens the folder anew
    try:
        with contextlib.suppress(OSError):          # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):          # closing is not enough: a forked child may have it open, too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
