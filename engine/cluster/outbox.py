"""Bytes that a worker has laid out for others to fetch: the way of copies between workers.

    PUSH  ->  put(number, bytes)         FETCH  ->  await known(number); take(number)

Numbers rise.  A worker that never fetches what is meant for it fills no memory: after a while the oldest bytes go, and
who asks for them then gets an error.
"""
import asyncio
import collections
import threading

from ggjit.ops.core.errors import GgjitError

LIMIT_NBYTES = 64 << 20
PATIENCE_SECONDS = 10.0         # for room


class Outbox:
    """Of one driver; used by its session, in whatever thread that runs, and by those of the workers that fetch."""

    def __init__(self):
        self._held = collections.OrderedDict()          # {number: bytes, None: they could not be computed}
        self._nbytes, self._last, self._open = 0, -1, True
        self._changed = threading.Condition()
        self._waiters = []                              # [(number, event loop, future)]

    def has_room(self, nbytes):
        return self._nbytes + nbytes <= LIMIT_NBYTES

    def put(self, number, raw):
        """Lay bytes out; waits while too many are there."""
        with self._changed:
            n = 0 if raw is None else len(raw)
            if not self._changed.wait_for(lambda: not self._open or self.has_room(n), PATIENCE_SECONDS):
                while self._held and not self.has_room(n):
                    self._forget(next(iter(self._held)))
            self._held[number], self._nbytes, self._last = raw, self._nbytes + n, max(self._last, number)
            self._wake()

    async def known(self, number):
        """Until the bytes are there, or it is certain that they will not be."""
        with self._changed:
            if not self._open or number <= self._last:
                return
            loop = asyncio.get_running_loop()
            self._waiters.append((number, loop, found := loop.create_future()))
        await found

    def take(self, number):
        """The bytes, once.  Errors: GgjitError if they are not there."""
        with self._changed:
            raw = self._held.get(number)
            self._forget(number)
        if raw is None:
            raise GgjitError("what was to be copied to another worker was not computed, or is gone; see the first "
                             "error of the worker it was copied from")
        return raw

    def drop(self, number):
        """Nobody will fetch it."""
        with self._changed:
            self._forget(number)

    def close(self):
        """The driver has left: nothing will come."""
        with self._changed:
            self._open = False
            self._held.clear()
            self._nbytes = 0
            self._changed.notify_all()
            self._wake()

    def _forget(self, number):
        self._nbytes -= len(self._held.pop(number, None) or b"")
        self._changed.notify_all()

    def _wake(self):
        for waiter in [w for w in self._waiters if not self._open or w[0] <= self._last]:
            self._waiters.remove(waiter)
            _, loop, found = waiter
            if not loop.is_closed():
                loop.call_soon_threadsafe(_done, found)


def _done(future):
    if not future.done():               # who waited may have been cancelled
        future.set_result(None)
