"""Ctrl-C, fork and exit at random moments of every kind of work, compiling among them."""
import ctypes
import functools
import itertools
import os
import signal
import threading
import time

import numpy as np

import ggjit as gg
from campaign import memory
from campaign.runner import Find
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import CACHE, exact, inline, sources_key

WITHIN_SECONDS = 0.2            # of a Ctrl-C, processor time of this process
PASS_SECONDS = 1.0              # the same while compiling: it comes in between two passes


def long_compute(rng):
    x = gg.from_numpy(gg.Context(), np.ones((200, 1000), np.float32))
    y = x
    for _ in range(int(rng.integers(1, 30))):
        y = gg.silu(y)
    return gg.compute(y)


def quantising(rng):
    """Rows and one long row, of float32 and of what has to be converted, with importances and without."""
    type = (gg.Q4_K, gg.Q4_0, gg.Q8_0, gg.IQ3_S, gg.Q6_K)[int(rng.integers(5))]
    a = np.linspace(-1, 1, 1 << 19, dtype=(np.float32, np.float64)[int(rng.integers(2))])
    a = a.reshape((256, 2048) if rng.integers(2) else (1, -1))
    raw = gg.quantize(type, a, np.ones(a.shape[-1]) if rng.integers(2) else None)
    return np.append(raw, gg.dequantize(type, raw, a.shape).view(np.uint8))


WORKS = (*memory.WORKS, long_compute, quantising)
_numbers = itertools.count()


def compiling(rng):
    """A kernel of two helpers that are its own: Numba has compiled neither before."""
    a, b, n = (int(x) for x in rng.integers(1, 100, 3))

    @inline
    def line(x):
        return a * x + b

    @exact
    def summed(x, n):
        total = 0
        for i in range(n):
            total += line(x + i) ^ b
        return total

    def kernel(x, n):
        return summed(line(x), n) - summed(x, 3)
    name, modules = f"campaign.{os.getpid()}.{next(_numbers)}", (__name__,)
    try:
        address = CACHE.address(name, "i64(i64, i64)", lambda: kernel, modules)
    finally:
        (cache_dir() / "kernels" / f"{name}-{sources_key(modules)}.o").unlink(missing_ok=True)
    return np.array([ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)(n, n)])


def signals(rng, works=WORKS, within=WITHIN_SECONDS):
    """SIGINT somewhere inside the work: it ends in time, or the work had ended, and the next run is right."""
    work, seed = works[int(rng.integers(len(works)))], int(rng.integers(1 << 30))
    t0 = time.perf_counter()
    want = work(np.random.default_rng(seed))
    seconds, sent = time.perf_counter() - t0, []

    def interrupt():
        sent.append(time.process_time())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    timer, arrived = threading.Timer(rng.uniform(0, 1.2 * seconds), interrupt), None
    try:
        timer.start()
        try:
            for _ in range(3):
                work(np.random.default_rng(seed))
            timer.join()
            time.sleep(0.05)                            # one that was held back comes now
        except KeyboardInterrupt:
            arrived = time.process_time()
            timer.join()
    except KeyboardInterrupt:
        arrived = time.process_time()
    if sent and arrived is None:
        raise Find(f"{work.__name__}: the interrupt was lost")
    if sent and arrived - sent[0] > within:
        raise Find(f"{work.__name__}: {arrived - sent[0]:.2f} s from signal to error")
    if not np.array_equal(work(np.random.default_rng(seed)), want):
        raise Find(f"{work.__name__}: another result after an interrupt")
    return "interrupted" if sent else "right"


def fork(rng, works=WORKS):
    """A child made while another thread works computes, compiles nothing it need not, and exits."""
    work, seed = works[int(rng.integers(len(works)))], int(rng.integers(1 << 30))
    want, stop = work(np.random.default_rng(seed)), threading.Event()

    def other():
        while not stop.is_set():
            work(np.random.default_rng(seed))
    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(rng.uniform(0, 0.02))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if np.array_equal(work(np.random.default_rng(seed)), want) else 3
        finally:
            os._exit(status)
    stop.set()
    thread.join()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if status:
                raise Find(f"{work.__name__}: the forked child ended with status {status}")
            return "right"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Find(f"{work.__name__}: the forked child hung")


CASES = {"signals": signals, "fork": fork,
         "signals while compiling": functools.partial(signals, works=(compiling,), within=PASS_SECONDS),
         "forks while compiling": functools.partial(fork, works=(compiling,))}
