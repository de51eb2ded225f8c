"""Long chains of additions: plans to compute, stop, fork and measure."""
import numpy as np

import ggjit as gg

RNG = np.random.default_rng(7)


def array(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def chain(n, shape=(64,)):
    """((x + 1) + 1) ... n times, and its input array."""
    ctx = gg.Context()
    x = array(*shape)
    y, one = gg.from_numpy(ctx, x, "x"), gg.from_numpy(ctx, np.ones(shape[-1], np.float32), "one")
    for _ in range(n):
        y = gg.add(y, one)
    return x, y


def planned(*outputs, n_threads=1, planner="ggml"):
    backend = gg.init_backend("CPU", n_threads=n_threads)
    graph = gg.Graph(*outputs)
    gg.GraphAllocator(backend, planner=planner).alloc_graph(graph)
    return backend.graph_plan_create(graph)


# a chain as a program of its own
PREAMBLE = """
import numpy as np, os, sys, threading, ggjit as gg
def plan(n_threads=2):
    ctx = gg.Context()
    x = np.ones((500, 1000), np.float32)
    y = a = gg.from_numpy(ctx, x)
    for _ in range(10): y = gg.add(y, a)
    b, g = gg.init_backend("CPU", n_threads=n_threads), gg.Graph(y)
    gg.GraphAllocator(b).alloc_graph(g)
    return b.graph_plan_create(g), y
"""
