"""`ggjit worker`: a process that only serves as a worker."""
import asyncio
import contextlib
import json
import os
import signal
import socket

from ggjit.cluster.certificates import certificates
from ggjit.cluster.server import Server
from ggjit.cluster.wire import checked_address
from ggjit.core.arguments import typed_call
from ggjit.ops.core.errors import GgjitError, ParamError

LISTEN = "tcp://127.0.0.1:8790"


@typed_call
def serve(listen=LISTEN, scheduler=None, tls=None, memory_nbytes=None, n_threads=None, keep_nbytes=0,
          said=print, own=None):
    """Lend this process's processor and memory until SIGTERM or Ctrl-C; returns what was done, as a dict.

        gg.cluster.serve("tcp://127.0.0.1:8790")            # elsewhere: gg.cluster.connect of that address

    listen: tcp://127.0.0.1:PORT, or tls://HOST:PORT with `tls`, a directory of certificates; port 0: any.  scheduler:
    the address of a Dask scheduler to work for instead, in a process that is started again after failures.
    memory_nbytes: at most so much for drivers.  keep_nbytes: of weights that are kept on disk, so that a model which is
    loaded again is not sent again; 0: none.  said: called with a line of text once drivers can connect.
    own: weights in files of this machine, which are not sent either: an object with get(key, nbytes) -> array or None,
    such as ggjit.models.OwnWeights(DIR); with `listen`.
    Errors: ParamError, GgjitError (an address that is taken; no scheduler answers).
    """
    tls = certificates(tls)
    checked_address(listen if scheduler is None else scheduler, tls)
    if memory_nbytes is not None and memory_nbytes < 1:
        raise ParamError(f"memory of {memory_nbytes} bytes: expected a number above 0")
    if keep_nbytes < 0:
        raise ParamError(f"keep_nbytes = {keep_nbytes}: expected 0 or more")
    if own is not None and scheduler is not None:
        raise ParamError("own (--models) works with listen (--listen), not with scheduler, which restarts the process")
    options = memory_nbytes, n_threads, keep_nbytes
    return asyncio.run(_listen(listen, tls, (*options, own), said) if scheduler is None else
                       _work_for(scheduler, tls, options, said))


@contextlib.contextmanager
def _ended():
    """An event that SIGTERM and Ctrl-C set, within the block."""
    ended, loop, before = asyncio.Event(), asyncio.get_running_loop(), {}
    for s in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(s, ended.set)
        except NotImplementedError:             # Windows: Python's handler, which wakes the loop
            before[s] = signal.signal(s, lambda *_: loop.call_soon_threadsafe(ended.set))
    try:
        yield ended
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


async def _listen(address, tls, options, said):
    server = Server(tls, *options)
    with _ended() as ended:
        try:
            at = server.start(address)
        except OSError as e:
            raise GgjitError(f"{address}: {e.strerror or e}; choose another port (0: any)") from e
        said(f"listening at {at}")
        await ended.wait()
        server.stop()
    return {"address": at, **server.machine.counters}


def _facing(address):
    """This machine's address on the way to another: a worker listens there and nowhere else."""
    host, _, port = address.partition("://")[2].rpartition(":")
    family, kind, _, _, there = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(there)                        # connecting a datagram socket sends nothing
        return s.getsockname()[0]


async def _work_for(address, tls, options, said):
    from ggjit.cluster.dask_worker import OPTIONS, distributed
    os.environ[OPTIONS] = json.dumps([None if tls is None else str(tls.directory), *options])
    try:
        security = None if tls is None else tls.security
        with _ended() as ended:
            async with distributed.Nanny(address, nthreads=1, host=_facing(address), security=security, dashboard=False,
                                         dashboard_address="127.0.0.1:0", death_timeout=30) as nanny:
                said(f"working for {address}")
                done = [asyncio.ensure_future(x) for x in (ended.wait(), nanny.finished())]
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
    except (OSError, TimeoutError, RuntimeError) as e:
        raise GgjitError(f"{address}: no Dask scheduler answers there ({e})") from e
    return {"address": address}
