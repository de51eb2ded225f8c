"""A worker's connection to another one, from which it fetches what a driver had pushed there.

It greets like a driver, with the same certificates, and lives on the event loop that reads its own driver's messages:
bytes are here before the message that takes them begins, and no thread waits for them.
"""
import asyncio

from ggjit.cluster import protocol as p
from ggjit.cluster import wire
from ggjit.ops.core.errors import GgjitError

CONNECT_SECONDS = 5.0


class Peer:
    """timeout: seconds of silence after which the other worker counts as lost."""

    def __init__(self, address, tls, timeout):
        self._address, self._tls, self._timeout = address, tls, timeout
        self._comm, self._seq, self._lock = None, 0, asyncio.Lock()

    async def fetch(self, secret, number, nbytes):
        """The bytes of a push.  Errors: GgjitError, where the other worker is lost, or does not have them."""
        async with self._lock:
            try:
                if self._comm is None:
                    await asyncio.wait_for(self._open(), CONNECT_SECONDS)
                self._seq += 1
                wire.write(self._comm, wire.pack([self._seq, [[p.FETCH, secret, number, nbytes]]]))
                status, results, payload = await self._answer()
            except (OSError, TimeoutError, ValueError, TypeError, GgjitError) as e:
                self.close()
                why = f"nothing was heard of it for {self._timeout:g} s" if isinstance(e, TimeoutError) else e
                raise GgjitError(f"no copy comes from the worker at {self._address}: {why}") from e
        if status != p.OK or len(payload) != nbytes:
            raise GgjitError(f"no copy comes from the worker at {self._address}: {results!s:.400}")
        return payload

    async def _open(self):
        comm = await wire.connect(self._address, self._tls)
        try:
            theirs, _ = await wire.read(comm, limit_nbytes=0)
            p.check_hello(p.hello(), theirs, self._address)
            wire.write(comm, wire.pack({**p.hello(), "heartbeat": self._timeout / 5}))
        except BaseException:
            comm.abort()
            raise
        self._comm = comm

    async def _answer(self):
        while True:
            (seq, status, results), payload = await asyncio.wait_for(wire.read(self._comm), self._timeout)
            if seq == self._seq:
                return status, results, payload

    def close(self):
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
