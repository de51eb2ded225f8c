"""Files of measured choices: which way was fastest on this machine, as JSON that later processes read.

    CACHE/FOLDER/NAME-KEY.json

KEY is of what the figures depend on: the processor or device, and the sources of what was measured.  A file that is
damaged or says what its reader does not accept counts as absent; a warning says why, and the next measurement writes it
anew.  Processes and threads that measure at the same time lose nothing of each other's: they write in turn.
"""
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable

try:
    import fcntl
except ImportError:             # Windows: of two writers at the same moment the later one stays
    fcntl = None

from ggjit.ops.core.user_warnings import warn
from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.native.cache_files import cache_dir


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
        """What the file says, or None where it is absent or not accepted."""
        try:
            return self.accepted(json.loads(self.path.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as e:      # of any type: `accepted` is given whatever the file holds
            reason = e.strerror if isinstance(e, OSError) else f"{type(e).__name__}: {e}"
            warn(f"{self.path} is not used ({reason}); what it should hold will be measured again")
            return None

    def write(self, content):
        """Write the file; False where that cannot be done, and nothing has changed."""
        return self._write(lambda: content)

    def add(self, entries):
        """Write the file with these entries beside, or instead of, those that it has; else as write."""
        return self._write(lambda: {**(self.read() or {}), **entries})

    def _write(self, content):
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _in_turn(folder):
                write_whole(self.path, json.dumps(content()), mode=0o600, devices=False)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def forced(variable, way):
    """Inside the block the context variable of a choice is `way`, in this thread alone."""
    token = variable.set(way)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def _in_turn(folder):
    """In the block no other process or thread writes in the folder."""
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
