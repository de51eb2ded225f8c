"""Graphs that share one allocator: whose results its memory holds, and threads that use it at once."""
import numpy as np
import pytest

import ggjit as gg


def planned(y, allocator):
    backend = gg.init_backend("CPU", n_threads=1)
    graph = gg.Graph(y)
    allocator.alloc_graph(graph)
    return backend.graph_plan_create(graph)


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_results_of_another_graph_in_the_same_arena_are_not_mistaken():
    ctx = gg.Context()
    a, b = gg.from_numpy(ctx, array(100)), gg.from_numpy(ctx, array(100, seed=1))
    shared = gg.GraphAllocator(gg.init_backend("CPU"))
    first, second = gg.add(a, a), gg.mul(b, b)
    p1 = planned(first, shared)
    p1.compute()
    p2 = planned(second, shared)
    np.testing.assert_array_equal(p1.numpy(first), 2 * a.numpy())
    p2.compute()
    np.testing.assert_array_equal(second.numpy(), b.numpy() ** 2)
    for read in (lambda: p1.numpy(first), first.numpy):
        with pytest.raises(gg.Overwritten, match="GraphAllocator"):
            read()
    p1.compute()
    np.testing.assert_array_equal(p1.numpy(first), 2 * a.numpy())


def test_threads_that_share_an_allocator_keep_the_heap_whole(python):
    r = python("""
import faulthandler, threading, numpy as np, ggjit as gg
faulthandler.dump_traceback_later(50, exit=True)
cpu = gg.init_backend("CPU:n_threads=2")
shared = gg.GraphAllocator(cpu)
def work(k):
    try:
        for _ in range(100):
            x = gg.from_numpy(gg.Context(), np.ones((8 + k, 64), np.float32))
            graph = gg.Graph(gg.scale(gg.add(x, x), 3.0))
            shared.alloc_graph(graph)
            cpu.graph_plan_create(graph).compute()
    except gg.GgjitError:
        pass                            # another thread's graph took the memory
threads = [threading.Thread(target=work, args=(50 * k,)) for k in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
""", timeout=120)
    assert r.returncode == 0, r.stderr[-1500:]
