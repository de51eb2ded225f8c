"""A worker: listens at an address and serves each driver that connects (engine/cluster/session.py)."""
import threading

from ggjit.cluster import wire
from ggjit.cluster.session import WorkerDevice, serve


class Server:
    """Lends this process's processor and memory."""

    def __init__(self, tls=None, memory_nbytes=None, n_threads=None, keep_nbytes=0, own=None):
        self.machine, self._tls = WorkerDevice(memory_nbytes, n_threads, keep_nbytes, tls, own), tls
        self._listener, self._conns = None, set()
        self.gate = threading.Event()           # tests close the gate to freeze the worker
        self.gate.set()

    def start(self, address):
        """Listen; returns the address with the port that was chosen.  Errors: ParamError, OSError (it is taken)."""
        self._listener = wire.Listener(address, self._serve, self._tls)
        return self._listener.address

    def _serve(self, conn):
        self._conns.add(conn)
        try:
            serve(conn, self.machine, self.gate)
        finally:
            self._conns.discard(conn)

    @property
    def n_drivers(self):
        return len(self._conns)

    def stop(self):
        """Listen no more, and end all connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self.drop()

    def drop(self):
        """End all connections; drivers may connect again."""
        for conn in list(self._conns):
            conn.end()
