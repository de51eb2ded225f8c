"""What a remote device costs beside a bare socket, in the same run: two workers on this machine.

    python benchmarks/cluster.py [--quick] [--json] [--tls]

    socket    a process that answers 8 KB with 8 KB; and takes and gives 4 MB frames
    step      8 KB in, a graph of one node, 8 KB out, on one worker
    stages    a graph whose halves lie on two workers; the 8 KB between them go from one to the other
    flight    a token of eight such sequences that are under way at once
    set, get  64 MB to and from a worker's memory; copy: from worker to worker
    extra     memory beyond those 64 MB that driver and worker had at most for set and get
    kill      SIGKILL until the error

Targets: step 0.5 ms beyond the socket (p99 1.2; TLS 0.7), stages 1.0, flight 0.6, set and get 0.6 of the socket, extra
16 MB, kill 100 ms.  Only ratios within a run mean something, and only on an idle machine.
"""
import argparse
import collections
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np

import ggjit as gg

NBYTES, FRAME, LARGE = 8 << 10, 4 << 20, 64 << 20
ECHO = """
import socket, struct, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held = memoryview(bytearray(1 << 26))
    while head := peer.recv(8, socket.MSG_WAITALL):
        n_in, n_out = struct.unpack("II", head)
        at = 0
        while at < n_in:
            at += peer.recv_into(held[at:n_in])
        peer.sendall(held[:n_out])
"""


class Socket:
    """The bare socket to compare with."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        self.peer = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.held = memoryview(bytearray(LARGE))

    def trip(self, n_in, n_out):
        self.peer.sendall(struct.pack("II", n_in, n_out))
        self.peer.sendall(self.held[:n_in])
        at = 0
        while at < n_out:
            at += self.peer.recv_into(self.held[at:n_out])

    def close(self):
        self.peer.close()
        self.process.wait()


def worker(*options):
    """A `ggjit worker` process and its address."""
    command = [sys.executable, "-m", "ggjit.tools.command.main", "worker", "--memory", "1", "-t", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def step(sched_or_backend, backends):
    """(function that runs a step, its input) of a graph with a node on each backend."""
    ctx, n = gg.Context(), NBYTES // 4
    x, *shifts = ctx.new_tensor(gg.F32, (n,)), *(ctx.new_tensor(gg.F32, (n,)) for _ in backends)
    for backend, t in zip([backends[0], *backends], [x, *shifts], strict=True):
        gg.tensor_alloc(backend.alloc_buffer(t.nbytes), t, 0)
        t.buffer.set_usage(gg.USAGE_WEIGHTS)
        t.set(np.ones(n))
    y = x
    for t in shifts:
        y = gg.add(y, t)
    graph, values = gg.Graph(y), np.ones(n, np.float32)
    if sched_or_backend is backends[0]:
        allocator = gg.GraphAllocator(backends[0])
        allocator.alloc_graph(graph)

    def run():
        x.set(values)
        sched_or_backend.graph_compute(graph)
        (y if sched_or_backend is backends[0] else Read(sched_or_backend, y)).numpy()

    def submit():
        x.set(values)
        return sched_or_backend.submit_and_read(graph, y)
    run.submit = submit
    run.keep = ctx, allocator if sched_or_backend is backends[0] else None
    return run


class Read:
    """A result of a scheduler."""

    def __init__(self, sched, t):
        self.sched, self.t = sched, t

    def numpy(self):
        return self.sched.numpy(self.t)


def in_flight(run, n, depth=8):
    """Seconds of each of n runs, `depth` of which are under way at once."""
    reads, t0 = collections.deque(), time.perf_counter()
    for _ in range(n):
        reads.append(run.submit())
        if len(reads) == depth:
            reads.popleft()()
    while reads:
        reads.popleft()()
    return (time.perf_counter() - t0) / n


def peak_nbytes(pid, reset=False):
    """The most memory that a process had since it was reset (Linux)."""
    if reset:
        with open(f"/proc/{pid}/clear_refs", "w") as f:
            f.write("5")
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM"))


def times(runs, n):
    """{name: sorted seconds}; the runs take turns, so that what else the machine does meets all of them."""
    found = {name: [] for name in runs}
    for k in range(n + 3):
        for name, run in runs.items():
            t0 = time.perf_counter()
            run()
            if k >= 3:
                found[name].append(time.perf_counter() - t0)
    return {name: sorted(v) for name, v in found.items()}


def measure(quick=False, tls=False):
    """All figures as a dict."""
    options = ["--listen", "tcp://127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as folder:
        certs = None
        if tls:
            certs = str(pathlib.Path(folder) / "certs")
            gg.cluster.make_certificates(certs)
            options = ["--listen", "tls://127.0.0.1:0", "--tls", certs]
        bare, workers = Socket(), [worker(*options) for _ in range(2)]
        try:
            with gg.cluster.connect([address for _, address in workers], tls=certs) as cl:
                return {"tls": tls, "cores": os.cpu_count(), **_measured(bare, workers, cl, quick)}
        finally:
            bare.close()
            for process, _ in workers:
                process.kill()
                process.wait()


def _measured(bare, workers, cl, quick):
    a, b = (d.init_backend() for d in cl.devices)
    sched = gg.Scheduler([a, b, gg.init_backend("CPU:n_threads=1")])
    stages = step(sched, [a, b])
    trips = times({"socket": lambda: bare.trip(NBYTES, NBYTES), "step": step(a, [a]), "stages": stages},
                  50 if quick else 1000)
    out = {"flight_ms": 1e3 * min(in_flight(stages, 50 if quick else 400) for _ in range(3))}
    for name, v in trips.items():
        for what, at in (("best", 0), ("median", len(v) // 2), ("p99", int(0.99 * len(v)))):
            out[f"{name}_{what}_ms"] = 1e3 * v[at]
    for name in ("step", "stages"):
        for what in ("best", "median"):
            out[f"{name}_beyond_socket_{what}_ms"] = out[f"{name}_{what}_ms"] - out[f"socket_{what}_ms"]
    t, data = gg.Context().new_tensor(gg.I8, (LARGE,)), np.zeros(LARGE, np.int8)
    gg.alloc_ctx_tensors(t.ctx, a)
    t.set_bytes(data)
    there = gg.Context().new_tensor(gg.I8, (LARGE,))
    gg.alloc_ctx_tensors(there.ctx, b)
    pids = {"driver": os.getpid(), "worker": workers[0][0].pid}
    before = {name: peak_nbytes(pid, reset=True) for name, pid in pids.items()}
    copies = times({"socket_set": lambda: [bare.trip(FRAME, 0) for _ in range(LARGE // FRAME)] and bare.trip(0, 8),
                    "set": lambda: t.set_bytes(data), "socket_get": lambda: [bare.trip(0, FRAME)
                                                                             for _ in range(LARGE // FRAME)],
                    "get": lambda: t.buffer.get_tensor(t)}, 3 if quick else 15)
    for name, pid in pids.items():              # what get returns is the driver's 64 MB
        out[f"extra_{name}_mb"] = (peak_nbytes(pid) - before[name] - (LARGE if name == "driver" else 0)) / 1e6

    def copy():
        gg.tensor_copy(t, there)
        gg.tensor_get(there, 0, 4)
    out["copy_gb_per_second"] = LARGE / times({"copy": copy}, 3 if quick else 15)["copy"][0] / 1e9
    for name in ("set", "get"):
        out[f"{name}_gb_per_second"] = LARGE / copies[name][0] / 1e9
        out[f"{name}_part_of_socket"] = copies[f"socket_{name}"][0] / copies[name][0]
    t0 = time.perf_counter()
    workers[0][0].send_signal(signal.SIGKILL)
    try:
        while True:
            gg.tensor_get(t, 0, 4)
    except gg.DeviceLost:
        out["kill_to_error_ms"] = 1e3 * (time.perf_counter() - t0)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("quick", "json", "tls"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    figures = measure(args.quick, args.tls)
    lines = (f"{name:30} {value:10.3f}" if isinstance(value, float) else f"{name:30} {value}"
             for name, value in figures.items())
    print(json.dumps(figures) if args.json else "\n".join(lines))


if __name__ == "__main__":
    main()
