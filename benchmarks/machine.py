"""What the figures were measured on: processor, versions, and how busy other processes kept it meanwhile.

    python -m benchmarks.machine        its name, and the most it reads from memory and computes
"""
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import time

import numpy as np

from ggjit.ops.core.machine import processor_name
from ggjit.ops.native import isa
from ggjit.ops.native.jit import ir_function, native
from ggjit.ops.native.lanes import dpbusd_ir, for_ir, i64, madd_ir, maddubs_ir, splat_const
from ggjit.ops.native.simd import B, W, load_ir, store_ir, vec_ir
from ggjit.profiling.machine_limits import CHAINS, peak_f32, read_bandwidth

IDLE_CORES = 0.10           # others may use this much of one core before we call the machine busy
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PACKAGES = ("ggjit", "numba", "llvmlite", "numpy", "xllamacpp", "onnxruntime", "openvino", "torch", "gguf")


def _cpuinfo():
    """Fields of the first processor, none where the system is not Linux."""
    fields, path = {}, pathlib.Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_model():
    """The processor's name as the system gives it, with family and model, since clouds hide the name."""
    fields = _cpuinfo()
    name = processor_name() or f"{isa.PROCESSOR} ({platform.machine()})"
    x86 = f" (family {fields['cpu family']}, model {fields.get('model', '?')})" if "cpu family" in fields else ""
    return f"{name}{x86}, {os.cpu_count()} cores"


def versions():
    """{package: version}, None where it is not installed."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


@ir_function
def _int8_ir(b, addr, n):
    """n rounds of CHAINS independent sums of products of bytes, on registers; the sums end where they began."""
    x, y = (load_ir(b, b.add(addr, i64(B * i)), vec_ir("i8", 4 * W)) for i in range(2))
    starts = [load_ir(b, b.add(addr, i64(B * i)), vec_ir("i32", W)) for i in range(CHAINS)]

    def body(b, sums):
        if isa.ISA == "avx512":
            return [dpbusd_ir(b, s, x, y) for s in sums]
        return [b.add(s, madd_ir(b, maddubs_ir(b, x, y), splat_const("i16", 1, 2 * W))) for s in sums]
    sums = for_ir(b, n, [(vec_ir("i32", W), s) for s in starts], body)
    for i, x in enumerate(sums):
        store_ir(b, x, b.add(addr, i64(B * i)))


@native("i64(i64, i64)")
def _int8(addr, n):
    _int8_ir(addr, n)
    return 0


def peak_int8(now=time.perf_counter, n=1_000_000):
    """Operations a second of one core on bytes (a multiply-add counts two), as our kernels do them; the float peak
    where they have no instructions for bytes."""
    if isa.ISA == "generic":
        return peak_f32(now=now)
    x, best = np.arange(CHAINS * B, dtype=np.uint8) & 31, 0.0
    for _ in range(10):
        t0 = now()
        _int8(x.ctypes.data, n)
        best = max(best, 2 * 4 * W * CHAINS * n / (now() - t0))
    return best


def slug():
    """The processor in a file's name: "genuineintel-6-207"; of ARM on Linux "aarch64-0x41-0xd0c-0x3", implementer, part
    and variant; elsewhere "arm64-apple-m1"."""
    return _slug(_cpuinfo(), platform.machine(), processor_name() or isa.PROCESSOR)


def _slug(fields, machine, name):
    if "vendor_id" in fields:
        parts = [fields.get(key, "0") for key in ("vendor_id", "cpu family", "model")]
    elif "CPU implementer" in fields:
        parts = [machine, *(fields.get(key, "0") for key in ("CPU implementer", "CPU part", "CPU variant"))]
    else:
        parts = [machine, *re.findall(r"[A-Za-z0-9]+", name)]
    return "-".join(parts).lower()


def busy_seconds():
    """Processor seconds all cores have been busy since the machine started; idle and waiting for disks are not.

    Of this process alone where the system does not tell of others.
    """
    path = pathlib.Path("/proc/stat")
    if not path.exists():
        return own_seconds()
    fields = path.read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / TICKS       # user nice system irq softirq steal


def own_seconds():
    """Processor seconds of this process and of its children that ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def cores():
    """Numbers of the cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


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


def others_busy(seconds=0.7):
    """How many cores other processes keep busy now."""
    with Others() as others:
        time.sleep(seconds)
    return others.cores


def idle_line(when, busy):
    """A line that says how many cores other processes kept busy; it starts with a warning if that is too many."""
    return (f"{'WARNING, NOT IDLE: ' * (busy >= IDLE_CORES)}{when}, other processes used {busy:.2f} of "
            f"{os.cpu_count()} cores")


def idle_check(when, seconds=0.7):
    """The line of the machine's load now."""
    return idle_line(when, others_busy(seconds))


if __name__ == "__main__":
    print(cpu_model())
    for t in (1, 2):
        print(f"reading memory, {t} thread(s): {read_bandwidth(t) / 1e9:.1f} GB/s")
    print(f"float32 multiply-adds, one core: {peak_f32() / 1e9:.0f} GFLOP/s; of bytes: {peak_int8() / 1e9:.0f} GOP/s")
