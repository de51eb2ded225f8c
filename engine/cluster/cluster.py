"""Several remote devices: worker processes on this machine, or workers that listen at an address."""
import functools
import os

from ggjit.cluster.certificates import certificates
from ggjit.cluster.device import RemoteDevice
from ggjit.cluster.server import Server
from ggjit.cluster.wire import BadMessage, checked_address
from ggjit.core.arguments import typed_call
from ggjit.core.backend import DeviceLost
from ggjit.core.html_repr import HtmlRepr
from ggjit.core.lifetime import Handle, call_all
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.machine import available_nbytes
from ggjit.ops.core.whole_numbers import is_whole

MAX_WORKERS = 256
START_SECONDS = 120


class Cluster(Handle, HtmlRepr):
    """`.devices`: one a worker; `.client`: Dask's, where there is one.

    `close()`, or the end of a `with` block, ends the connections, and the workers it started.
    """

    def __init__(self, devices, client=None, stop=()):
        self.devices, self.client, self._stop = list(devices), client, list(stop)
        self._pid = os.getpid()

    def close(self):
        """End the connections.  A second call does nothing, nor does one in a process that was forked since."""
        if self._pid != os.getpid():
            return
        stop, self._stop = self._stop, []
        call_all(*(device.close for device in self.devices), *stop)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"<Cluster of {len(self.devices)} devices: {', '.join(d.address for d in self.devices)}>"


@typed_call
def local(n_workers=2, processes=True, n_threads=1, timeout=None, memory_nbytes=None):
    """Workers on this machine, for notebooks and tests; they listen on loopback alone.

        with gg.cluster.local(n_workers=2) as cl:
            sched = gg.Scheduler([*(d.init_backend() for d in cl.devices), gg.init_backend("CPU")])

    processes=False: in this process, as threads.  n_threads: of each worker.  timeout: seconds of silence after which a
    worker counts as lost (10).  memory_nbytes: what each lends (its share of what is available).
    Errors: ParamError, DeviceLost (a worker does not start).
    """
    if not is_whole(n_workers, 1, MAX_WORKERS):
        raise ParamError(f"n_workers must be an integer from 1 to {MAX_WORKERS}, got {n_workers!r}")
    timeout, memory_nbytes = checked_timeout(timeout), memory_nbytes or available_nbytes() // n_workers
    if not processes:
        return threads(["inproc://"] * n_workers, None, n_threads, timeout, memory_nbytes)
    from ggjit.cluster.dask_worker import distributed
    workers = distributed.LocalCluster(
        n_workers=n_workers, processes=True, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0", silence_logs=50)
    try:
        return _of_scheduler(workers, None, timeout, [workers.close], memory_nbytes=memory_nbytes, n_threads=n_threads)
    except BaseException:
        workers.close()
        raise


def threads(addresses, tls=None, n_threads=1, timeout=None, memory_nbytes=None, keep_nbytes=0, own=None):
    """A Cluster of workers in this process that listen at these addresses; `.servers` are their Servers."""
    servers = []
    stop = lambda: [server.stop() for server in servers]       # noqa: E731
    try:
        devices = []
        for i, address in enumerate(addresses):
            servers.append(Server(certificates(tls), memory_nbytes, n_threads, keep_nbytes, own))
            at = servers[-1].start(address)
            devices.append(RemoteDevice(at, f"worker{i}", certificates(tls), timeout))
    except BaseException:
        stop()
        raise
    cluster = Cluster(devices, stop=[stop])
    cluster.servers = servers
    return cluster


@typed_call
def connect(address, tls=None, timeout=None):
    """The devices of workers that run already.

        cl = gg.cluster.connect("tls://10.0.0.2:8790", tls="certs")

    address: of `ggjit worker --listen`, or a list of such; or that of a Dask scheduler whose workers were started with
    `ggjit worker --scheduler`.  tls: a directory of certificates (`ggjit worker --make-certs DIR`), which anything but
    loopback needs.  timeout: seconds of silence after which a worker counts as lost (10).
    Errors: ParamError, DeviceLost (no answer, or the certificates do not fit), NotSupported (another version).
    """
    tls, timeout = certificates(tls), checked_timeout(timeout)
    addresses = [address] if isinstance(address, str) else address
    if not isinstance(addresses, list | tuple) or not addresses:
        raise ParamError(f"connect takes an address or a list of them, got {address!r}")
    for a in addresses:
        checked_address(a, tls)
    devices = []
    try:
        for i, a in enumerate(addresses):
            devices.append(RemoteDevice(a, f"worker{i}", tls, timeout))
    except BadMessage:
        if len(addresses) > 1:
            raise
        return _of_scheduler(addresses[0], tls, timeout)
    finally:
        if len(devices) < len(addresses):
            for device in devices:
                device.close()
    return Cluster(devices)


def _of_scheduler(address, tls, timeout, stop=(), **options):
    """The devices of the workers of a Dask scheduler, or of a LocalCluster."""
    from ggjit.cluster.dask_worker import DevicePlugin, device_addresses, distributed, find_device
    security = None if tls is None else tls.security
    try:
        client = distributed.Client(address, timeout=START_SECONDS if options else 10, security=security,
                                    set_as_default=False)
    except (OSError, TimeoutError) as e:
        raise DeviceLost(f"{address}: neither a `ggjit worker` nor a Dask scheduler answers there ({e})") from e
    try:
        client.register_plugin(DevicePlugin(None if tls is None else os.fspath(tls.directory), **options))
        found = device_addresses(client)
        if not found:
            raise DeviceLost(f"{address} has no workers; start some with `ggjit worker --scheduler {address}`")
        devices = [RemoteDevice(a, f"worker{name}", tls, timeout, functools.partial(find_device, client, name))
                   for name, a in found.items()]
    except BaseException:
        client.close()
        raise
    return Cluster(devices, client, [client.close, *stop])


def checked_timeout(timeout):
    """Seconds, or None for the default."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)
                                or not 0.1 <= timeout <= 86400):
        raise ParamError(f"timeout={timeout!r}: expected seconds of silence, from 0.1 to 86400")
    return timeout
