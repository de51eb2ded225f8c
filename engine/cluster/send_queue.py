"""Bytes that a worker offers for other workers to fetch; copies between workers use it.

    PUSH  ->  put(number, bytes)         FETCH  ->  take(number), which waits for it

Numbers rise.  A worker that never fetches what is meant for it fills no memory: after a while the oldest bytes go, and
who asks for them then gets an error.
"""
import collections
import threading

from ggjit.ops.core.errors import GgjitError

LIMIT_NBYTES = 64 << 20
ROOM_SECONDS = 10.0             # how long `put` waits for room


class SendQueue:
    """Bytes that wait to be fetched, of one driver; its session and other workers' threads use it at once."""

    def __init__(self):
        self._held = collections.OrderedDict()          # {number: bytes, or None if they could not be computed}
        self._nbytes, self._last, self._open = 0, -1, True
        self._changed = threading.Condition()

    def put(self, number, raw):
        """Add bytes to be fetched; waits while too many are there."""
        with self._changed:
            n = 0 if raw is None else len(raw)
            has_room = lambda: not self._open or self._nbytes + n <= LIMIT_NBYTES       # noqa: E731
            if not self._changed.wait_for(has_room, ROOM_SECONDS):
                while self._held and not has_room():
                    self._forget(next(iter(self._held)))
            self._held[number], self._nbytes, self._last = raw, self._nbytes + n, max(self._last, number)
            self._changed.notify_all()

    def take(self, number, left=lambda: False):
        """The bytes, once; waits until they are there, or it is certain that they will not be.  left(): has the one who
        asks disconnected?  It is called again after `wake`.  Errors: GgjitError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or number <= self._last or left())
            raw = self._held.get(number)
            self._forget(number)
        if raw is None:
            raise GgjitError("what was to be copied to another worker was not computed, or was dropped; see the first "
                             "error of the worker it was copied from")
        return raw

    def drop(self, number):
        """Free the bytes; they will not be fetched."""
        with self._changed:
            self._forget(number)

    def close(self):
        """The driver has disconnected: no bytes will come, and who waits for them gets an error."""
        with self._changed:
            self._open = False
            self._held.clear()
            self._nbytes = 0
            self._changed.notify_all()

    def wake(self):
        """Every waiting `take` asks again whether its `left` is true."""
        with self._changed:
            self._changed.notify_all()

    def _forget(self, number):
        self._nbytes -= len(self._held.pop(number, None) or b"")
        self._changed.notify_all()
