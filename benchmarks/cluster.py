"""The cost of a remote device beyond a plain socket, measured in the same run: two workers on this machine.

    python -m benchmarks.cluster [--quick] [--json] [--tls]             ratios to a socket
    python -m benchmarks.cluster --report [--gguf model.gguf]           all of it, as results/cluster.md: 4 minutes

    socket    a process that answers 8 KB with 8 KB; and takes and gives 4 MB frames
    step      8 KB in, a graph of one node, 8 KB out, on one worker
    stages    a graph whose halves lie on two workers; the 8 KB between them go from one to the other
    flight    a token of eight such sequences that are under way at once
    set, get  64 MB to and from a worker's memory; copy: from worker to worker
    extra     memory beyond those 64 MB that driver and worker had at most for set and get
    kill      SIGKILL until the error
    back      SIGKILL until a worker that Dask has started again computes; until 1 GiB of weights is there again
    frozen    SIGSTOP until the error, with the deadline that is set by default
    bulk      sentences that one and two workers embed in a second
    tokens    of a model whose layers lie on one or two workers; beside llama.cpp over RPC (benchmarks/llama_rpc.py)

Only ratios within a run mean something, and only on an idle machine.
"""
import argparse
import collections
import contextlib
import json
import os
import pathlib
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy as np

import ggjit as gg
from benchmarks import llama_rpc
from benchmarks.worker import EngineError, Missing
from ggjit.models import load_model
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.load import EMBEDDED
from ggjit.models.networks.placement.device_map import ROOM

NBYTES, FRAME, LARGE, GIB = 8 << 10, 4 << 20, 64 << 20, 1 << 30
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


def worker(*options, memory_gb=1):
    """A `ggjit worker` process and its address."""
    command = [sys.executable, "-m", "ggjit.tools.command.main", "worker", "--memory", f"{memory_gb:.9f}", "-t", "1",
               *(options or ["--listen", "tcp://127.0.0.1:0"])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


@contextlib.contextmanager
def workers_of(n, *options, **how):
    """n such workers, ended with the block."""
    started = [worker(*options, **how) for _ in range(n)]
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
            process.stdout.close()


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
    """The figures beside the socket, as a dict."""
    options = ["--listen", "tcp://127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as folder:
        certs = None
        if tls:
            certs = str(pathlib.Path(folder) / "certs")
            gg.cluster.make_certificates(certs)
            options = ["--listen", "tls://127.0.0.1:0", "--tls", certs]
        bare = Socket()
        try:
            with workers_of(2, *options) as workers, \
                    gg.cluster.connect([address for _, address in workers], tls=certs) as cl:
                return {"tls": tls, "cores": os.cpu_count(), **_measured(bare, workers, cl, quick)}
        finally:
            bare.close()


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
        extra = peak_nbytes(pid) - before[name] - (LARGE if name == "driver" else 0)
        out[f"extra_{name}_mb"] = max(extra, 0) / 1e6

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


# ---------------------------------------------------------------- workers that are lost
def weights(backend, n=GIB // LARGE):
    """n tensors of 64 MB on a backend, as weights are; a function that writes them all."""
    ctx, rng = gg.Context(), np.random.default_rng(0)
    tensors, values = [], [rng.integers(0, 256, LARGE, np.uint8) for _ in range(n)]
    for _ in values:
        t = ctx.new_tensor(gg.I8, (LARGE,))
        gg.tensor_alloc(backend.alloc_buffer(LARGE), t, 0)
        t.buffer.set_usage(gg.USAGE_WEIGHTS)
        tensors.append(t)

    def write():
        for t, raw in zip(tensors, values, strict=True):
            t.set_bytes(raw)
        return tensors[-1].bytes(0, 4)
    return write


def reopened(device):
    """Until there is a worker again; errors of before are done."""
    while True:
        try:
            return device.reopen()
        except gg.DeviceLost:
            time.sleep(0.005)


def seconds_to_come_back():
    """Under Dask, which starts a worker anew: until it computes, and until 1 GiB of weights is there."""
    with gg.cluster.local(n_workers=1, memory_nbytes=2 << 30) as cl:
        device = cl.devices[0]
        step(backend := device.init_backend(), [backend])()
        weights(backend)()
        (pid,) = cl.client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        t0 = time.perf_counter()
        with contextlib.suppress(gg.DeviceLost):
            device.memory()
        backend = reopened(device).init_backend()
        step(backend, [backend])()
        computes = time.perf_counter() - t0
        write = weights(backend)
        t0 = time.perf_counter()
        write()
        return {"back_s": computes, "weights_sent_s": computes + time.perf_counter() - t0}


def seconds_with_kept_weights():
    """The same for a worker with --keep, which is started again at its address at once."""
    with tempfile.TemporaryDirectory() as folder:
        before, os.environ["GGJIT_CACHE_DIR"] = os.environ.get("GGJIT_CACHE_DIR"), folder     # weights are kept there
        try:
            first, address = worker("--listen", "tcp://127.0.0.1:0", "--keep", "2", memory_gb=2)
            with first.stdout, gg.cluster.connect(address) as cl:
                device = cl.devices[0]
                weights(device.init_backend())()
                first.kill()
                t0 = time.perf_counter()
                first.wait()
                with workers_of(1, "--listen", address, "--keep", "2", memory_gb=2):
                    write, n = weights(reopened(device).init_backend()), device.stream.n_bytes_out
                    write()
                    return {"weights_kept_s": time.perf_counter() - t0,
                            "weights_kept_sent_mb": (device.stream.n_bytes_out - n) / 1e6}
        finally:
            if before is None:
                del os.environ["GGJIT_CACHE_DIR"]
            else:
                os.environ["GGJIT_CACHE_DIR"] = before


def seconds_of_silence():
    """A worker that is frozen: until the error."""
    with workers_of(1) as [(process, address)], gg.cluster.connect(address) as cl:
        process.send_signal(signal.SIGSTOP)
        t0 = time.perf_counter()
        with contextlib.suppress(gg.DeviceLost):
            cl.devices[0].memory()
        return {"frozen_s": time.perf_counter() - t0}


# ---------------------------------------------------------------- work
def bulk(n_texts=256):
    """Sentences that one and two workers embed in a second, the model loaded."""
    path, out = str(minilm_path("F32")), {}
    texts = [f"sentence {k} of those that are embedded here, of about the same length as the others" for k in
             range(n_texts)]
    for n in (1, 2):
        with gg.cluster.local(n_workers=n) as cl:
            gg.cluster.embed(path, texts[:32 * 2 * n], cluster=cl, n_part=16)
            took = min(_seconds(lambda cl=cl: gg.cluster.embed(path, texts, cluster=cl, n_part=16)) for _ in range(2))
            out[f"bulk_{n}_texts_per_second"] = n_texts / took
    return {**out, "bulk_part_of_linear": out["bulk_2_texts_per_second"] / out["bulk_1_texts_per_second"] / 2}


def _seconds(run):
    t0 = time.perf_counter()
    run()
    return time.perf_counter() - t0


def tokens(path, n_tokens, name):
    """Milliseconds of a token with the layers on one or two workers, here and by llama.cpp's RPC servers."""
    out = {}
    for n in (1, 2):
        out[f"{name}_{n}_ms"], out[f"{name}_{n}_split"] = _token(path, n, n_tokens)
        try:
            out[f"{name}_{n}_llama_rpc_ms"] = llama_rpc.measured(path, n, n_tokens)
        except (Missing, EngineError) as e:
            out[f"{name}_{n}_llama_rpc_ms"] = str(e)
    return out


def _token(path, n, n_tokens):
    """(milliseconds, who has what); of two workers each says that it has memory for a bit more than half."""
    with workers_of(n, memory_gb=2 * os.path.getsize(path) / 1e9 + 0.1) as started, \
            gg.cluster.connect([address for _, address in started]) as cl:
        how = dict(devices=cl.devices, n_threads=1, n_ctx=256)
        if n == 2:
            with load_model(path, **how) as m:
                held_mb = float(re.search(r"([\d,.]+) MB of", m.explain())[1].replace(",", ""))
            for device in cl.devices:
                device.memory = lambda: (int(0.75e6 * held_mb / ROOM),) * 2
        with load_model(path, **how) as m:
            took = [_seconds(lambda: m.decode([1])) for _ in range(n_tokens)]
            return 1e3 * min(took), "; ".join(re.findall(r"worker\d+: [^,;]*layers[^,]*", m.explain()))


# ---------------------------------------------------------------- showing
def report(gguf=None):
    """The whole page, as Markdown."""
    plain, tls = measure(), measure(tls=True)
    print("beside the socket: done", file=sys.stderr)
    more = {**seconds_to_come_back(), **seconds_with_kept_weights(), **seconds_of_silence(), **bulk()}
    print("workers that are lost, bulk work: done", file=sys.stderr)
    found = [tokens(EMBEDDED, 200, "small")] + ([tokens(gguf, 24, "large")] if gguf else [])
    ms = lambda f, *names: ", ".join(f"{f[n]:.2f}" for n in names)       # noqa: E731
    rows = [
        ("a step: best, median, ms", ms(plain, "step_beyond_socket_best_ms", "step_beyond_socket_median_ms"), "0.5"),
        ("a step, p99, ms", f"{plain['step_p99_ms'] - plain['socket_p99_ms']:.2f}", "1.2"),
        ("two stages: best, median, ms",
         ms(plain, "stages_beyond_socket_best_ms", "stages_beyond_socket_median_ms"), "1.0"),
        ("eight sequences in flight, a token, ms", ms(plain, "flight_ms"), "0.6"),
        *((f"{name}, part of the socket's bandwidth",
           f"{plain[f'{name}_part_of_socket']:.2f} ({plain[f'{name}_gb_per_second']:.1f} GB/s)", "0.6")
          for name in ("set", "get")),
        ("memory beside the tensors, driver and worker, MB", ms(plain, "extra_driver_mb", "extra_worker_mb"), "16"),
        ("TLS: a step, median, ms", ms(tls, "step_beyond_socket_median_ms"), "0.7"),
        ("TLS: set, get, GB/s", ms(tls, "set_gb_per_second", "get_gb_per_second"), "0.5"),
        ("SIGKILL to the error, ms", f"{plain['kill_to_error_ms']:.0f}", "100"),
        ("SIGKILL to a worker that computes, started by Dask, s", ms(more, "back_s"), "1.5"),
        ("... and 1 GiB of weights there, sent again, s", ms(more, "weights_sent_s"), "3"),
        (f"... the same, kept by a `ggjit worker --keep` ({more['weights_kept_sent_mb']:.2f} MB sent), s",
         ms(more, "weights_kept_s"), "3"),
        ("SIGSTOP to the error, deadline as by default, s", ms(more, "frozen_s"), "13"),
        ("sentences embedded in a second, one and two workers",
         f"{more['bulk_1_texts_per_second']:.0f}, {more['bulk_2_texts_per_second']:.0f}", ""),
        ("... part of twice as many", ms(more, "bulk_part_of_linear"), "0.9")]
    about = ("The table shows what remote devices cost in addition to a plain socket (`python -m benchmarks.cluster "
             f"--report`). Two workers and the process that drives them run on {plain['cores']} cores "
             f"({platform.machine()}, Python {platform.python_version()}), with nothing else running. The rows of "
             "steps and stages are milliseconds in addition to the socket's own round trip of 8 KB each way, which "
             f"takes {plain['socket_median_ms']:.3f} ms (99th percentile {plain['socket_p99_ms']:.3f}). The row "
             "\"eight sequences in flight\" is the whole time of a token. The docstring of `benchmarks/cluster.py` "
             "describes each row.")
    lines = ["# Remote devices beside a raw socket", "", textwrap.fill(about, 118), "",
             "| | measured | target |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), "",
             "## Beside llama.cpp's RPC servers", "",
             "Shortest time of a token in milliseconds. Each worker and each server computes with one thread.", "",
             "| model | workers | ggjit | llama.cpp RPC | where ggjit's layers are |", "|---|---|---|---|---|"]
    for figures, path, name in zip(found, (EMBEDDED, gguf), ("small", "large"), strict=False):
        for n in (1, 2):
            theirs = figures[f"{name}_{n}_llama_rpc_ms"]
            lines.append(f"| {pathlib.Path(path).name} | {n} | {figures[f'{name}_{n}_ms']:.2f} | "
                         f"{theirs if isinstance(theirs, str) else format(theirs, '.2f')} | "
                         f"{figures[f'{name}_{n}_split']} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("quick", "json", "tls", "report"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--gguf", help="a larger model for the report, beside the one in the package")
    args = parser.parse_args()
    if args.report:
        print(report(args.gguf))
        return
    figures = measure(args.quick, args.tls)
    lines = (f"{name:30} {value:10.3f}" if isinstance(value, float) else f"{name:30} {value}"
             for name, value in figures.items())
    print(json.dumps(figures) if args.json else "\n".join(lines))


if __name__ == "__main__":
    main()
