"""What the figures were measured on: processor, versions, and how busy other processes kept it meanwhile.

    python -m benchmarks.machine        its name, and the most it reads from memory and computes
"""
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import time

from ggjit.profiling.machine_limits import peak_f32, read_bandwidth

IDLE_CORES = 0.10           # others may use this much of one core before we call the machine busy
TICKS = os.sysconf("SC_CLK_TCK")
PACKAGES = ("ggjit", "numba", "llvmlite", "numpy", "xllamacpp", "onnxruntime", "gguf")


def cpu_model():
    """The processor's name as the system gives it, with family and model, since clouds hide the name."""
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor() or platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}), {os.cpu_count()} cores"


def versions():
    """{package: version}, None where it is not installed."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


def busy_seconds():
    """Processor seconds all cores have been busy since the machine started; idle and waiting for disks are not."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / TICKS       # user nice system irq softirq steal


def own_seconds():
    """Processor seconds of this process and of its children that ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def cores():
    """Numbers of the cores this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def same_cores(n_threads):
    """The calling thread, and those it starts, stay on the first n_threads cores: cores are not equally fast."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores()[:n_threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Others:
    """How many cores other processes kept busy during a `with` block: `.cores`.  workers: our engines still alive."""

    def __init__(self, workers=()):
        self.workers = workers

    def _ours(self):
        return own_seconds() + sum(w.cpu_seconds() for w in self.workers)

    def __enter__(self):
        self._start = time.perf_counter(), busy_seconds() - self._ours()
        return self

    def __exit__(self, *exc):
        t0, busy = self._start
        seconds = time.perf_counter() - t0
        self.cores = max(0.0, busy_seconds() - self._ours() - busy) / seconds if seconds else 0.0


def idle_check(when, seconds=0.7):
    """A line about the machine's load now; starts with a warning if it is not idle."""
    with Others() as others:
        time.sleep(seconds)
    load = " ".join(pathlib.Path("/proc/loadavg").read_text().split()[:3])
    ok = others.cores < IDLE_CORES
    return (f"{'' if ok else 'WARNING, NOT IDLE: '}{when}: others keep {others.cores:.2f} of {os.cpu_count()} cores "
            f"busy, load average {load}")


if __name__ == "__main__":
    print(cpu_model())
    for t in (1, 2):
        print(f"reading memory, {t} thread(s): {read_bandwidth(t) / 1e9:.1f} GB/s")
    print(f"float32 multiply-adds, one core: {peak_f32() / 1e9:.0f} GFLOP/s")
