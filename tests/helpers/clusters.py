"""Workers for tests: in this process, over real connections; and processes."""
import contextlib
import subprocess
import sys

import numpy as np

import ggjit as gg
from ggjit.cluster.cluster import threads

ADDRESSES = {"inproc": "inproc://", "tcp": "tcp://127.0.0.1:0", "tls": "tls://127.0.0.1:0"}


def workers(kind="inproc", n=2, tls=None, **options):
    """A Cluster of n workers of one thread each."""
    return threads([ADDRESSES[kind]] * n, tls if kind == "tls" else None, **{"memory_nbytes": 1 << 28, **options})


def scheduler(cluster, **options):
    """Of one backend a device, and the CPU."""
    return gg.Scheduler([*(d.init_backend() for d in cluster.devices), gg.init_backend("CPU:n_threads=1")], **options)


def worker_processes(n, *options):
    """n `ggjit worker` processes; returns [(Popen, address)]."""
    command = [sys.executable, "-m", "ggjit.tools.command.main", "worker", "--listen", "tcp://127.0.0.1:0",
               "--memory", "0.25", "-t", "1", *options]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(n)]
    return [(p, p.stdout.readline().split()[-1]) for p in started]


@contextlib.contextmanager
def of_processes(n=2):
    """A Cluster of n `ggjit worker` processes."""
    started = worker_processes(n)
    try:
        with gg.cluster.connect([address for _, address in started]) as cluster:
            yield cluster
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
            process.stdout.close()


def step_of(backend, n=16, seed=3):
    """A small network's step on the backend: values -> results."""
    rng = np.random.default_rng(seed)
    ctx = gg.Context()
    w, x = ctx.new_tensor(gg.F32, (n, n)), ctx.new_tensor(gg.F32, (n, 2))
    gg.alloc_ctx_tensors(ctx, backend)
    w.set(rng.standard_normal((n, n), np.float32))
    y = gg.soft_max(gg.mul_mat(w, gg.rms_norm(x, 1e-5)))
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(backend)
    allocator.alloc_graph(graph)

    def step(values):
        assert allocator.buffer_size()
        x.set(values)
        backend.graph_compute(graph)
        return y.numpy()
    return step
