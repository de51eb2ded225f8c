"""Graphs that share one allocator: whose results its memory holds, and threads that use it at once."""
import sys
import threading

import numpy as np
import pytest
from helpers import devices

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
""")
    assert r.returncode == 0, r.stderr[-1500:]


@pytest.mark.parametrize("read", ["plan.numpy", "t.numpy", "compute_and_read"])
def test_reading_beside_a_plan_in_the_same_memory_is_exact_or_refused(read):
    """Another thread's plan overwrites what was computed here: `numpy` gives the values or Overwritten, never a
    mixture, and `compute_and_read` always gives the values."""
    x = gg.from_numpy(gg.Context(), np.ones(1 << 16, np.float32))
    mine, other = gg.scale(x, 2.0), gg.scale(x, 3.0)
    shared = gg.GraphAllocator(gg.init_backend("CPU"))
    plans = [planned(mine, shared), planned(other, shared)]
    stop, wrong, refused = threading.Event(), [], 0

    def overwrite():
        while not stop.is_set():
            plans[1].compute()
    thread = threading.Thread(target=overwrite)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(200):
            try:
                if read == "compute_and_read":
                    values = plans[0].compute_and_read(mine)
                else:
                    plans[0].compute()
                    values = plans[0].numpy(mine) if read == "plan.numpy" else mine.numpy()
                if (values != 2).any():
                    wrong.append(values)
            except gg.Overwritten:
                refused += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert read != "compute_and_read" or not refused
    both = plans[0].compute_and_read(mine, x)
    assert [float(v[0]) for v in both] == [2.0, 1.0]


def test_memory_that_grows_is_cut_anew():
    """Chunks of 2 and 3 tensors, then of 4: all chunks of the buffer type are replaced, as in ggml."""
    device = devices.Fake("split", alignment=4, max_size=20)
    allocator = gg.GraphAllocator(device.buffer_type())

    def outputs(*sizes):
        ctx = gg.Context()
        return gg.Graph(*[gg.set_output(gg.scale(ctx.new_tensor(gg.F32, n), 2.0)) for n in sizes])
    for sizes in ((1, 5, 1), (4, 1, 5), (3, 3)):
        held, graph = [b.size for b in allocator._memory.chunks[0]], outputs(*sizes)
        wanted = allocator.plan(graph).chunk_sizes[0]
        fits = len(held) >= len(wanted) and all(h >= w for h, w in zip(held, wanted, strict=False))
        allocator.reserve(graph)
        assert allocator.buffer_size() == (sum(held) if fits else sum(wanted))


def leaf(n, value=None):
    t = gg.Context().new_tensor(gg.F32, (n,))
    if value is not None:
        gg.alloc_ctx_tensors(t.ctx, gg.init_backend("CPU"))
        t.set(np.full(n, value))
    return t


def test_a_leaf_whose_memory_was_taken_back_is_refused():
    cpu, x = gg.init_backend("CPU"), leaf(4)
    y, shared = gg.sqr(x), gg.GraphAllocator(cpu)
    graph = gg.Graph(y)
    shared.alloc_graph(graph)
    x.set(np.full(4, 3))
    plan = cpu.graph_plan_create(graph)
    with pytest.raises(gg.Overwritten, match="was not computed yet"):
        plan.numpy(y)
    assert (plan.compute_and_read(y) == 9).all()
    other = gg.Graph(gg.scale(leaf(4, 1.0), 10.0))
    shared.plan(other)
    x.set(np.full(4, 4))                                # a plan alone takes nothing
    assert (plan.compute_and_read(y) == 16).all()
    shared.alloc_graph(other)
    with pytest.raises(gg.NotAllocated, match="needed by .* has no memory"):
        plan.compute()


def test_graphs_of_freed_contexts_are_refused():
    cpu, x = gg.init_backend("CPU"), leaf(4, 1.0)
    graph = gg.Graph(gg.sqr(x))
    cpu_plan = gg.GraphAllocator(cpu)
    cpu_plan.alloc_graph(graph)
    cpu.graph_compute(graph)
    x.ctx.free()
    for use in (lambda: cpu_plan.alloc_graph(graph), lambda: gg.GraphAllocator(cpu).reserve(graph),
                lambda: cpu.graph_compute(graph), lambda: gg.alloc_ctx_tensors(x.ctx, cpu)):
        with pytest.raises(gg.StaleHandle, match="freed"):
            use()
    with pytest.raises(gg.TypeMismatch, match="GraphAllocator"):
        cpu_plan.alloc_graph(3)


# ---------------------------------------------------------------- buffers that refuse a tensor
def failing(device, k):
    """The buffer refuses the tensor it is told of k-th; returns the names of those it was told of."""
    told = []

    def init_tensor(t):
        told.append(t.name)
        if len(told) == k + 1:
            raise RuntimeError("driver lost")
    device.answers["init_tensor"] = init_tensor
    return told


@pytest.mark.parametrize("k", range(4))
def test_a_graph_is_placed_wholly_or_not_at_all(k):
    """After an error nothing has a place that it had not, and what an earlier call placed lies where it lay."""
    device, ctx = devices.Slots(), gg.Context()
    allocator = gg.GraphAllocator(device.buffer_type())
    a, b, c = (gg.set_input(ctx.new_tensor(gg.F32, (n,), name)) for n, name in ((64, "a"), (16, "b"), (16, "c")))
    first, second = gg.Graph(gg.silu(a)), gg.Graph(gg.silu(gg.add(b, c)))
    allocator.alloc_graph(first)
    before = a.buffer, a.offs, allocator.placement(first.outputs[0])
    told = failing(device, k)
    with pytest.raises(RuntimeError, match="driver lost"):
        allocator.alloc_graph(second)
    assert len(told) == k + 1 and second.placement is None and b.buffer is c.buffer is None
    assert (a.buffer, a.offs, allocator.placement(first.outputs[0])) == before
    with pytest.raises(gg.NotAllocated, match="not placed by this allocator"):
        allocator.placement(second.outputs[0])
    told.clear()
    device.answers.clear()
    allocator.alloc_graph(second)
    assert a.buffer is None and {b.buffer, c.buffer} == {before[0]} and second.placement is not None


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_scheduler_tells_buffers_anew_after_one_refused(k):
    device = devices.Slots(host=True)
    sched = gg.Scheduler([device.init_backend(), gg.init_backend("CPU", n_threads=1)])
    x = gg.from_numpy(gg.Context(), array(16))
    y = x
    for name, factor in (("a", 3.0), ("b", 2.0), ("c", 2.0)):
        y = gg.set_name(gg.scale(y, factor), name)
    graph = gg.Graph(y)
    told = failing(device, k)
    with pytest.raises(RuntimeError, match="driver lost"):
        sched.graph_compute(graph)
    assert len(told) == k + 1
    told.clear()
    device.answers["init_tensor"] = lambda t: told.append(t.name)
    sched.graph_compute(graph)
    assert {"a", "b", "c"} <= set(told), "all of them, also the one that was refused"
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), np.float32(12) * x.numpy())
    told.clear()
    sched.graph_compute(graph)
    assert not told


@pytest.mark.parametrize("planner", ["ggml", "best"])
def test_work_memory_lies_with_the_rest(planner):
    """The same bits in fewer bytes: what the kernels work in shares memory with tensors of other steps."""
    a, b = array(512, 3), array(512, 3, seed=1)
    results, nbytes = [], []
    for work in (False, True):
        ctx, backend = gg.Context(), gg.init_backend("CPU", n_threads=1)
        x, y = gg.from_numpy(ctx, a), gg.from_numpy(ctx, b)
        square = gg.sqr(x)
        out = gg.add(gg.sum_rows(square), gg.cross_entropy_loss(x, y))
        graph, allocator = gg.Graph(out), gg.GraphAllocator(backend, planner, work=work)
        allocator.alloc_graph(graph)
        plan = backend.graph_plan_create(graph)
        plan.compute()
        results.append(plan.numpy(out).tobytes())
        nbytes.append(allocator.buffer_size() + plan.work_nbytes)
        assert allocator.last.peak == allocator.buffer_size() and (plan.work_nbytes == 0) == work
    with pytest.raises(gg.Overwritten, match="CROSS_ENTROPY_LOSS|cross_entropy_loss"):
        plan.numpy(square)                              # the loss works where it lay
    assert results[0] == results[1] and nbytes[1] == nbytes[0] - 4096


def test_work_memory_belongs_to_the_plan_as_its_tensors_do():
    """Also where no tensor of the plan lies beside it: they were moved by hand."""
    ctx, inner, backend = gg.Context(), gg.Context(), gg.init_backend("CPU", n_threads=1)
    x, y = gg.from_numpy(ctx, array(512, 3)), gg.from_numpy(ctx, array(512, 3, seed=1))
    with inner:
        out = gg.add(gg.sum_rows(gg.sqr(x)), gg.cross_entropy_loss(x, y))
    graph, allocator = gg.Graph(out), gg.GraphAllocator(backend, work=True)
    allocator.alloc_graph(graph)
    gg.alloc_ctx_tensors(inner, backend, all=True)
    plan = backend.graph_plan_create(graph)
    assert plan.work_nbytes == 0
    other = gg.Graph(gg.sqr(x))
    allocator.alloc_graph(other)
    beside = backend.graph_plan_create(other)
    beside.compute()
    plan.compute()
    with pytest.raises(gg.Overwritten, match="another graph of the same GraphAllocator"):
        beside.numpy(other.nodes[-1])
    allocator.free()
    with pytest.raises(gg.NotAllocated, match="work memory of the graph was freed"):
        plan.compute()


def test_work_memory_is_placed_for_a_backend_alone():
    backend = gg.init_backend("CPU")
    for target in (backend.default_buffer_type, [backend, backend]):
        with pytest.raises(gg.ParamError, match="work=True takes one Backend"):
            gg.GraphAllocator(target, work=True)
    ctx = gg.Context()
    graph, allocator = gg.Graph(gg.sqr(gg.from_numpy(ctx, array(4)))), gg.GraphAllocator(backend, work=True)
    allocator.alloc_graph(graph)
    assert graph.placement.work == {} and allocator.saving(graph) == 0


def test_a_plan_that_is_found_again_is_a_copy():
    """A caller that changes the arrays of its plan changes no other allocator's plan and no report."""
    ctx = gg.Context()
    y = x = gg.set_input(ctx.new_tensor(gg.F32, (64, 64)))
    for _ in range(4):
        y = gg.add(gg.sqr(y), gg.sqrt(y))
    graph, backend = gg.Graph(y), gg.init_backend("CPU")
    first = gg.GraphAllocator(backend, "best").plan(graph)
    offs, peak = first.node_offs.copy(), first.peak
    first.node_offs[:] = 0
    first.chunk_sizes[0][0] = 1
    allocator = gg.GraphAllocator(backend, "best")
    allocator.alloc_graph(graph)
    np.testing.assert_array_equal(allocator.last.node_offs, offs)
    assert allocator.buffer_size() == peak == gg.measure(graph).peak
    x.set(np.full((64, 64), 2, np.float32))
    backend.graph_compute(graph)
    want = np.float32(2)
    for _ in range(4):
        want = want * want + np.sqrt(want)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)
