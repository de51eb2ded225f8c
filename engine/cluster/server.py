"""A worker: listens at an address and serves each driver that connects (engine/cluster/session.py)."""
import asyncio

from ggjit.cluster import wire
from ggjit.cluster.session import Machine, serve


class Server:
    """Lends this process's processor and memory.  To be used on one event loop."""

    def __init__(self, tls=None, memory_nbytes=None, n_threads=None, keep_nbytes=0, own=None):
        self.machine, self._tls = Machine(memory_nbytes, n_threads, keep_nbytes, tls, own), tls
        self._listener, self._comms = None, set()
        self.gate = asyncio.Event()             # tests close it: a worker that is frozen
        self.gate.set()

    async def start(self, address):
        """Listen; returns the address with the port that was chosen.  Errors: ParamError, OSError (it is taken)."""
        self._listener = await wire.listen(address, self._serve, self._tls)
        return self._listener.contact_address if address.startswith("inproc") else self._listener.listen_address

    async def _serve(self, comm):
        self._comms.add(comm)
        try:
            await serve(comm, self.machine, self.gate)
        finally:
            self._comms.discard(comm)

    @property
    def n_drivers(self):
        return len(self._comms)

    async def stop(self):
        """Listen no more, and end all connections."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        self.drop()

    def drop(self):
        """End all connections; drivers may connect again."""
        for comm in list(self._comms):
            comm.abort()
