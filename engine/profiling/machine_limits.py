"""Measures the limits of the machine: bytes read from memory and float operations per second.

Measured when first needed; `roofline` keeps the result for the rest of the process.
"""
import concurrent.futures
import functools
import time

import numpy as np

from ggjit.ops.native.jit import native
from ggjit.ops.native.simd import B, W, fadd, fma, hsum, ldf, zerof

BUFFER_NBYTES = 256 << 20           # beyond any last-level cache that one core can keep for itself
STREAM_NBYTES = 8 << 10             # bytes of each of eight streams: two pages
CHAINS = 12                         # independent multiply-adds: latency 4, two a cycle


@native("f64(i64, i64, i64)")
def read(addr, nbytes, stride):
    """Sum of the floats; eight loads in flight, `stride` bytes apart: B is one stream, more are eight."""
    a = b = c = d = e = f = g = h = zerof()
    for start in range(addr, addr + nbytes, 8 * stride):
        for p in range(start, start + stride, B):
            q = p + 4 * stride
            a, b = fadd(a, ldf(p)), fadd(b, ldf(p + stride))
            c, d = fadd(c, ldf(p + 2 * stride)), fadd(d, ldf(p + 3 * stride))
            e, f = fadd(e, ldf(q)), fadd(f, ldf(q + stride))
            g, h = fadd(g, ldf(q + 2 * stride)), fadd(h, ldf(q + 3 * stride))
    return hsum(fadd(fadd(fadd(a, b), fadd(c, d)), fadd(fadd(e, f), fadd(g, h))))


@native("f64(i64, i64)")
def multiply_add(addr, n):
    """n rounds of 12 independent multiply-adds on registers."""
    x, y = ldf(addr), ldf(addr + B)
    a, b, c, d = ldf(addr + 2 * B), ldf(addr + 3 * B), ldf(addr + 4 * B), ldf(addr + 5 * B)
    e, f, g, h = ldf(addr + 6 * B), ldf(addr + 7 * B), ldf(addr + 8 * B), ldf(addr + 9 * B)
    i, j, k, m = ldf(addr + 10 * B), ldf(addr + 11 * B), ldf(addr + 12 * B), ldf(addr + 13 * B)
    for _ in range(n):
        a, b, c, d = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y)
        e, f, g, h = fma(e, x, y), fma(f, x, y), fma(g, x, y), fma(h, x, y)
        i, j, k, m = fma(i, x, y), fma(j, x, y), fma(k, x, y), fma(m, x, y)
    s = fadd(fadd(fadd(a, b), fadd(c, d)), fadd(fadd(e, f), fadd(g, h)))
    return hsum(fadd(s, fadd(fadd(i, j), fadd(k, m))))


class Reader:
    """A buffer that n_threads together read again and again: `once()` gives bytes a second.

    Each thread reads one stream or eight, whichever was faster when the reader was made.
    """

    def __init__(self, n_threads=1, now=time.perf_counter):
        self.now, self.n_threads = now, n_threads
        self.data = np.ones(BUFFER_NBYTES // 4, np.float32)
        self.nbytes = self.data.nbytes // n_threads // (8 * STREAM_NBYTES) * 8 * STREAM_NBYTES
        self.pool = concurrent.futures.ThreadPoolExecutor(n_threads)
        self.once(B)
        self.stride = max((B, STREAM_NBYTES), key=lambda stride: max(self.once(stride) for _ in range(3)))

    def once(self, stride=None):
        first, nbytes, stride = self.data.ctypes.data, self.nbytes, stride or self.stride
        t0 = self.now()
        list(self.pool.map(lambda i: read(first + i * nbytes, nbytes, stride), range(self.n_threads)))
        return self.n_threads * nbytes / (self.now() - t0)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.pool.shutdown()


def read_bandwidth(n_threads=1, seconds=0.5, now=time.perf_counter):
    """Bytes a second that n_threads together read from memory, at best."""
    with Reader(n_threads, now) as reader:
        return _best(reader.once, seconds)


def peak_f32(seconds=0.2, now=time.perf_counter):
    """Float32 operations a second of one core (a multiply-add counts two)."""
    x = np.linspace(0.25, 0.75, (CHAINS + 2) * W, dtype=np.float32)

    def once(n=1_000_000):
        t0 = now()
        multiply_add(x, n)
        return 2 * W * CHAINS * n / (now() - t0)
    once()
    return _best(once, seconds)


def _best(once, seconds):
    """The best of repeated measurements, since a limit is what was reached once."""
    end, out = time.perf_counter() + seconds, []
    while time.perf_counter() < end or len(out) < 3:
        out.append(once())
    return max(out)


@functools.cache
def roofline(n_threads=1):
    """(bytes a second, float32 operations a second) of n_threads threads; takes half a second the first time."""
    return read_bandwidth(n_threads, seconds=0.2), n_threads * peak_f32(seconds=0.1)
