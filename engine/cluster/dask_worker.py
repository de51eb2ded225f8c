"""A device on each worker of a Dask cluster: Dask places and restarts workers, devices have own connections."""
import json
import os
import signal
import threading

from ggjit.cluster.certificates import certificates
from ggjit.cluster.server import Server
from ggjit.core.backend import DeviceLost
from ggjit.ops.core.errors import extra

distributed = extra("distributed", "cluster")

OPTIONS = "GGJIT_WORKER"        # environment: [tls, memory_nbytes, n_threads] as JSON


class DevicePlugin(distributed.WorkerPlugin):
    """Opens a device at the worker's own address, with TLS where Dask has it.  tls: directory of certificates, which
    every machine has at the same path."""
    name = "ggjit-device"
    idempotent = True

    def __init__(self, tls=None, memory_nbytes=None, n_threads=None):
        self.options = tls, memory_nbytes, n_threads

    async def setup(self, worker):
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C in a terminal or notebook is handled by the driver
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        scheme, _, location = worker.address.partition("://")
        tls, *options = self.options
        own = os.environ.get(OPTIONS)           # its own certificates, memory ... (serving.py)
        if own is not None:
            tls, *options = json.loads(own)
        worker.ggjit_server = Server(certificates(tls), *options)
        worker.ggjit_address = worker.ggjit_server.start(f"{scheme}://{location.rpartition(':')[0]}:0")

    async def teardown(self, worker):
        worker.ggjit_server.stop()


def device_address(dask_worker):
    """Where the device of a worker listens; None while it has none."""
    return getattr(dask_worker, "ggjit_address", None)


def device_addresses(client):
    """{name of a worker: address of its device}, in the order of the names."""
    names = {address: facts["name"] for address, facts in client.scheduler_info(n_workers=-1)["workers"].items()}
    found = client.run(device_address, on_error="ignore")
    return {str(names[worker]): address for worker, address in
            sorted(found.items(), key=lambda item: (str(type(names.get(item[0]))), names.get(item[0])))
            if worker in names and isinstance(address, str)}


def find_device(client, name):
    """The address of the device of the worker of that name, which may have been started again since."""
    addresses = device_addresses(client)
    if name not in addresses:
        raise DeviceLost(f"there is no worker {name!r} now; there are {', '.join(addresses) or 'none'}")
    return addresses[name]
