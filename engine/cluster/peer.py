"""A worker's connection to another worker, from which it fetches tensors that a driver has put there.

It greets like a driver, with the same certificates, and belongs to the session of that driver: the thread that runs its
ops waits for the bytes, which go straight into its memory.
"""
from ggjit.cluster import protocol as p
from ggjit.cluster import wire
from ggjit.ops.core.errors import GgjitError

CONNECT_SECONDS = 5.0


class Peer:
    """timeout: seconds of silence after which the other worker counts as lost."""

    def __init__(self, address, tls, timeout):
        self._address, self._tls, self._timeout = address, tls, timeout
        self._conn, self._seq = None, 0

    def fetch(self, secret, number, into):
        """Read the bytes of a push into a writable memoryview.  Errors: GgjitError, where the other worker is lost, or
        does not have them."""
        try:
            if self._conn is None:
                self._open()
            self._seq += 1
            self._conn.write(wire.pack([self._seq, [[p.FETCH, secret, number, len(into)]]]))
            status, results, payload = self._answer(into)
        except (OSError, ValueError, TypeError, GgjitError) as e:
            self.close()
            why = f"it sent nothing for {self._timeout:g} s" if isinstance(e, TimeoutError) else e
            raise GgjitError(f"no copy comes from the worker at {self._address}: {why}") from e
        if status != p.OK or len(payload) != len(into):
            raise GgjitError(f"no copy comes from the worker at {self._address}: {results!s:.400}")

    def _open(self):
        conn = wire.connect(self._address, self._tls, CONNECT_SECONDS)
        try:
            theirs, _ = conn.read(limit_nbytes=0, seconds=CONNECT_SECONDS)
            p.check_hello(p.hello(), theirs, self._address)
            conn.write(wire.pack({**p.hello(), "heartbeat": self._timeout / 5}))
            conn.sock.settimeout(self._timeout)
        except BaseException:
            conn.close()
            raise
        self._conn = conn

    def _answer(self, into):
        while True:
            (seq, status, results), payload = self._conn.read(lambda _, n: into if n and n == len(into) else None,
                                                              wire.MAX_PAYLOAD_NBYTES)
            if seq == self._seq:
                return status, results, payload

    def end(self):
        """End the connection; a `fetch` in another thread then fails at once."""
        conn = self._conn
        if conn is not None:
            conn.end()

    def close(self):
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
