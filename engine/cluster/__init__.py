"""One graph over several processes and machines (`gg.cluster`): pip install 'ggjit[cluster]'.

    with gg.cluster.local(n_workers=2) as cl:
        sched = gg.Scheduler([*(d.init_backend() for d in cl.devices), gg.init_backend("CPU")])

    certificates    who may connect: a small CA of your own
    wire            messages: lengths checked, never a pickle
    protocol        greetings, ops, answers
    encoding        graphs as integers
    weight_cache    weights on a worker's disk, by their content
    session         what a worker does for a driver; server: it listens
    send_queue, peer  bytes that workers fetch from each other
    stream          the driver's end of a connection: order, deadlines
    device          a worker as a device: what is sent when; buffer: its memory; backend: its streams and graphs
    cluster         several of them: local, connect
    serving         a process that is a worker; dask_worker: a device on each worker of a Dask cluster
"""
from importlib import import_module as _import_module

from ggjit.cluster.certificates import make_certificates
from ggjit.cluster.cluster import Cluster, connect, local
from ggjit.cluster.device import RemoteDevice
from ggjit.cluster.serving import serve

__all__ = ["Cluster", "RemoteDevice", "connect", "embed", "generate", "local", "make_certificates", "serve"]
_BULK = {"embed": "embed_texts", "generate": "generate_texts"}

def __getattr__(name):
    """`embed(model, texts, cluster=cl)` and `generate` are those of ggjit.models, which is imported when they are used.
    """
    if name in _BULK:
        return getattr(_import_module("ggjit.models"), _BULK[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
