"""Several streams, several schedulers, one memory: a stream reads only what the other streams have written."""
import gc
import os
import textwrap
import threading
import weakref

import numpy as np
import pytest
from helpers import devices
from helpers.paths import TESTS
from helpers.schedulers import RULES
from helpers.streams import N, leaf, world

import ggjit as gg
from ggjit.core.pending import IN_FLIGHT
from ggjit.cpu.device import CPU
from ggjit.ops.core.record import OP

HOST = CPU.buffer_type()
LATE = 2e-2                     # seconds: longer than a stream that does not wait takes


def doubling(x, cache):
    """cache = 2 x"""
    with gg.Context():
        return gg.Graph(gg.cpy(gg.scale(x, 2.0), cache))


def late(reads=(HOST,), **options):
    """A stream that scales and copies, late."""
    return devices.Fake("A", ops={OP.CPY, OP.SCALE}, delay=LATE, reads=reads, **options)


def value(sched, t):
    got = np.unique(sched.numpy(t))
    assert got.size == 1
    return float(got[0])


# ---------------------------------------------------------------- one graph, a leaf that several devices reach
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("delay", [None, 1e-3])
def test_a_leaf_in_memory_of_a_third_device_is_read_after_it_was_written(delay, parallel):
    """A and B compute in private memory; both reach the host's, where A writes the cache that B reads."""
    adds = devices.Fake("B", ops={OP.ADD}, delay=delay, reads=(HOST,))
    sched, (a, b, cpu) = world(late(), adds, parallel=parallel)
    cache, x, one = leaf(cpu, 0), leaf(cpu, 0), leaf(cpu, 1)
    with gg.Context():
        graph = gg.Graph(gg.add(gg.cpy(gg.scale(x, 2.0), cache), one))
    for k in (3, 5, 9):
        x.set(np.full(N, k, np.float32))
        sched.graph_compute(graph)
        assert value(sched, graph.outputs[0]) == 2 * k + 1
    assert [s.backend for s in sched.splits] == [a, b] and not sched.splits[1].inputs


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("delay", [None, 1e-3])
def test_a_copy_waits_for_the_stream_that_writes_the_leaf(delay, rules):
    """The leaf counts as R's or the CPU's, A writes it, B reads a copy of it."""
    reads = devices.Fake("R", ops={OP.MUL}, reads=(HOST,))
    sched, (r, a, b, cpu) = world(reads, late(), devices.Fake("B", ops={OP.ADD}, delay=delay), rules=rules)
    cache, x, one = leaf(cpu, 0), leaf(cpu, 0), leaf(cpu, 1)
    with gg.Context():
        w = gg.cpy(gg.scale(x, 2.0), cache)
        graph = gg.Graph(w, gg.add(cache, one))
    for t, backend in ((w, a), (w.src[0], a), (graph.outputs[1], b)):
        sched.set_tensor_backend(t, backend)
    for k in (3, 5, 9):
        x.set(np.full(N, k, np.float32))
        sched.graph_compute(graph)
        assert value(sched, graph.outputs[1]) == 2 * k + 1
    assert [s.backend for s in sched.splits] == [a, b] and cache in sched.splits[1].inputs


# ---------------------------------------------------------------- results in memory of another device
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("planner", ["ggml", "best"])
@pytest.mark.parametrize("in_place", [True, False])
def test_who_reads_a_result_reaches_its_memory(in_place, planner, rules):
    """The CPU works on C's result: the user says in place, or the planner might.  A reads the CPU's memory, not C's."""
    c, a = devices.Fake("C", ops={OP.SCALE}, host=True), devices.Fake("A", ops={OP.UNARY}, reads=(HOST,))
    sched, (c, a, cpu) = world(c, a, rules=rules, planner=planner)
    x = leaf(cpu, -0.5)
    with gg.Context():
        first = gg.scale(x, 2.0)
        second = (gg.sqr_inplace if in_place else gg.sqr)(first)
        graph = gg.Graph(gg.neg(second))
    for t, backend in ((first, c), (second, cpu), (graph.outputs[0], a)):
        sched.set_tensor_backend(t, backend)
    for _ in range(2):
        sched.graph_compute(graph)
        assert value(sched, graph.outputs[0]) == -1
    assert [s.backend for s in sched.splits] == [c, cpu, a]
    assert in_place or sched._run.where(second)[0].buft is HOST


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("delay", [None, 1e-3])
def test_work_in_place_in_memory_of_a_third_device_is_waited_for(delay, parallel):
    """A computes, B works on it in place, late, C reads it: all in A's memory, none of them in B's or C's."""
    a = devices.Fake("A", ops={OP.MUL})
    b = devices.Fake("B", ops={OP.SCALE}, delay=LATE, reads=(a.buffer_type(),))
    c = devices.Fake("C", ops={OP.ADD}, delay=delay, reads=(a.buffer_type(),))
    sched, (a, b, c, cpu) = world(a, b, c, parallel=parallel)
    x, one = leaf(a, 0), leaf(a, 1)
    with gg.Context():
        product = gg.mul(x, one)
        twice = gg.scale_inplace(product, 2.0)
        graph = gg.Graph(gg.add(twice, one))
    for t, backend in ((product, a), (twice, b), (graph.outputs[0], c)):
        sched.set_tensor_backend(t, backend)
    for k in (3, 5, 9):
        x.set(np.full(N, k, np.float32))
        sched.graph_compute(graph)
        assert value(sched, graph.outputs[0]) == 2 * k + 1
    assert [s.backend for s in sched.splits] == [a, b, c] and not any(s.inputs for s in sched.splits)


# ---------------------------------------------------------------- two schedulers
@pytest.mark.parametrize("copies", [True, False])
def test_another_scheduler_waits_for_the_leaf_it_reads(copies):
    one, (a, _) = world(late())
    two, (b, cpu) = world(devices.Fake("B", reads=() if copies else (HOST,)))
    cache, x, ones = leaf(cpu, 0), leaf(a, 3), leaf(b, 1)
    writes = doubling(x, cache)
    with gg.Context():
        reads = gg.Graph(gg.add(ones, cache))
    two.set_tensor_backend(reads.outputs[0], b)
    one.graph_compute(writes)
    two.graph_compute(reads)
    x.set(np.full(N, 5, np.float32))
    one.graph_compute_async(writes)
    two.graph_compute(reads)
    assert value(two, reads.outputs[0]) == 11
    two.graph_compute(reads)
    assert value(two, reads.outputs[0]) == 11, "a copy made too early must not count as good later"


def test_another_scheduler_does_not_overwrite_what_is_still_read():
    one, (a, _) = world(late())
    two, (cpu,) = world()
    x, cache, four = leaf(cpu, 3), leaf(a, 0), leaf(cpu, 4)
    reads = doubling(x, cache)
    with gg.Context():
        writes = gg.Graph(gg.cpy(four, x))
    one.graph_compute_async(reads)
    two.graph_compute(writes)
    assert (cache.numpy() == 6).all() and (x.numpy() == 4).all()


def test_schedulers_that_only_read_the_same_leaf_do_not_wait():
    one, (a, cpu) = world(late())
    two, _ = world(devices.Fake("B", reads=(HOST,)))
    x = leaf(cpu, 3)
    one.graph_compute_async(doubling(x, leaf(a, 0)))
    with gg.Context():
        two.graph_compute(gg.Graph(gg.add(x, x)))
    assert one in IN_FLIGHT
    assert (x.numpy() == 3).all() and one in IN_FLIGHT, "reading a tensor that no stream writes does not wait either"
    one.synchronize()


# ---------------------------------------------------------------- reads outside a graph
def test_tensor_copy_and_2d_reads_wait():
    sched, (a, cpu) = world(late())
    cache, x, copy = leaf(cpu, 0), leaf(a, 3), leaf(cpu, 0)
    graph = doubling(x, cache)
    sched.graph_compute_async(graph)
    gg.tensor_copy(cache, copy)
    assert (copy.numpy() == 6).all() and sched not in IN_FLIGHT
    x.set(np.full(N, 5, np.float32))
    sched.graph_compute_async(graph)
    assert (np.frombuffer(gg.tensor_get_2d(cache, 0, 16, 2, 16, 16), np.float32) == 10).all()


def test_a_read_waits_although_somebody_waits_already():
    sched, (a, _) = world(late())
    cache, x = leaf(a, 0), leaf(a, 3)
    graph = doubling(x, cache)
    sched.graph_compute(graph)
    x.set(np.full(N, 5, np.float32))
    real, waits = a.synchronize, threading.Event()
    a.synchronize = lambda: (waits.set(), real())
    sched.graph_compute_async(graph)
    thread = threading.Thread(target=sched.synchronize)
    thread.start()
    assert waits.wait(10)
    assert (cache.numpy() == 10).all()
    thread.join()


def test_a_wait_that_was_interrupted_is_not_over():
    sched, (a, _) = world(late())
    cache, x = leaf(a, 0), leaf(a, 3)
    graph = doubling(x, cache)
    sched.graph_compute(graph)
    x.set(np.full(N, 5, np.float32))
    sched.graph_compute_async(graph)
    a.synchronize = lambda: (_ for _ in ()).throw(KeyboardInterrupt("waiting"))
    with pytest.raises(KeyboardInterrupt, match="waiting"):
        sched.synchronize()
    del a.synchronize
    assert (cache.numpy() == 10).all()


# ---------------------------------------------------------------- dropped while at work
def test_a_scheduler_dropped_in_flight_finishes_its_work():
    adds = devices.Fake("B", ops={OP.ADD, OP.CPY}, delay=LATE)
    sched, (a, b, cpu) = world(late(()), adds)
    cache, x, one = leaf(b, 0), leaf(a, 3), leaf(b, 1)
    with gg.Context():
        y = gg.add(gg.scale(x, 2.0), one)
        graph = gg.Graph(gg.cpy(y, cache))
    sched.set_tensor_backend(graph.outputs[0], b)
    sched.graph_compute(graph)
    x.set(np.full(N, 5, np.float32))
    sched.graph_compute_async(graph)
    gone = weakref.ref(sched)
    del sched, graph
    gc.collect()
    other = gg.Scheduler([a, b, cpu])
    with gg.Context():
        other.graph_compute(gg.Graph(gg.add(one, one)))         # errors of the dropped run would come out here
    assert (cache.numpy() == 11).all()
    gc.collect()
    assert gone() is None and not [d for d in adds.buffers if d.alive and d.usage == gg.USAGE_COMPUTE and d.id not in
                {c.id for chunks in other.memory.chunks for c in chunks}], "its memory was given back after that"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_its_parents_streams(python):
    done = python(textwrap.dedent("""
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import numpy as np, ggjit as gg
        from helpers import devices
        a = devices.Fake("A", delay=0.2).init_backend()
        sched = gg.Scheduler([a, gg.init_backend("CPU:n_threads=1")])
        ctx = gg.Context()
        x, cache = ctx.new_tensor(gg.F32, (8,)), ctx.new_tensor(gg.F32, (8,))
        gg.alloc_ctx_tensors(ctx, a)
        x.set(np.ones(8)), cache.set(np.zeros(8))
        graph = gg.Graph(gg.cpy(gg.scale(x, 2.0), cache))
        sched.graph_compute(graph)
        sched.graph_compute_async(graph)
        child = os.fork()
        if not child:
            os._exit(int(cache.numpy().sum()))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cache.numpy().sum())
    """), TESTS)
    assert done.returncode == 0 and done.stdout.split() == ["16", "16.0"], done.stderr


# ---------------------------------------------------------------- what was placed elsewhere
def test_copies_stay_good_when_something_else_is_placed():
    sched, (b, cpu) = world(devices.Fake("B"))
    x, one = leaf(cpu, 4), leaf(b, 1)
    with gg.Context():
        graph = gg.Graph(gg.add(one, x))
    sched.set_tensor_backend(graph.outputs[0], b)
    copied = []
    for _ in range(4):
        sched.graph_compute(graph)
        copied.append(sched.copied_nbytes)
        leaf(cpu, 0)                                # any new tensor: plans look up their addresses again
    assert copied == [x.nbytes, 0, 0, 0]
    x.buffer.free()
    gg.tensor_alloc(cpu.alloc_buffer(x.nbytes), x, 0)
    x.buffer.clear(0)
    sched.graph_compute(graph)
    assert sched.copied_nbytes == x.nbytes and value(sched, graph.outputs[0]) == 1, "it moved"


def test_a_leaf_that_another_scheduler_places_meanwhile():
    """While one scheduler plans a graph, another places its leaf, in memory the first cannot reach."""
    slow = devices.Slots("A")
    one, (a, cpu) = world(slow)
    two, (b, _) = world(devices.Fake("B"))
    x = gg.Context().new_tensor(gg.F32, (N,), "x")
    with x.ctx:
        graph, other = gg.Graph(gg.silu(x)), gg.Graph(gg.scale(x, 2.0))
    for t in (x, graph.outputs[0]):
        one.set_tensor_backend(t, a)
    two.set_tensor_backend(x, b)

    def alignment():
        if x.buffer is None:
            thread = threading.Thread(target=two.alloc_graph, args=(other,))
            thread.start()
            thread.join()
        return 64
    slow.answers["alignment"] = alignment
    one.alloc_graph(graph)
    assert x.buffer.buft is b.default_buffer_type
    x.set(np.zeros(N))
    one.graph_compute(graph)
    assert value(one, graph.outputs[0]) == 0
