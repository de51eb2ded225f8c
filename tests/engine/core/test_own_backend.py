"""A third party's backend with memory and kernels of its own, on every way to run a graph (helpers/numpy_device.py)."""
import gc

import numpy as np
import pytest
from helpers.numpy_device import NumpyDevice

import ggjit as gg
from ggjit.ops.core.record import OP

rng = np.random.default_rng()


def network(where, n=6):
    """(result, what NumPy says of it, all that is computed); weights and input lie on the device."""
    ctx = gg.Context()
    w, x, b = (ctx.new_tensor(gg.F32, ne, name) for ne, name in (((8, 5), "w"), ((8, n), "x"), ((5,), "b")))
    gg.alloc_ctx_tensors(ctx, where)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (w, x, b)}
    for t in (w, x, b):
        t.set(values[t.name])
    h = gg.add(gg.mul_mat(w, x), b)                     # (n, 5)
    y = gg.scale(gg.cont(gg.transpose(gg.sqr(h))), 0.5)
    return y, 0.5 * ((values["x"] @ values["w"].T + values["b"]) ** 2).T


@pytest.fixture(params=[False, True], ids=["at-once", "asynchronous"])
def backend(request):
    device = NumpyDevice(is_async=request.param)
    yield device.init_backend()
    gc.collect()
    assert device.made == device.freed, "all its memory was given back"


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("planner", ["ggml", "ggml-2023", "best"])
def test_compute_allocates_runs_and_reads(backend, planner):
    y, want = network(backend)
    close(gg.compute(y, backend=backend, planner=planner), want)
    close(y.numpy(), want)


def test_nodes_know_their_memory_in_graph_compute(backend):
    """The memory of this graph's placement, whatever computed the tensors before."""
    y, want = network(backend)
    gg.compute(y, backend=backend)                          # an earlier run, elsewhere
    graph, other = gg.Graph(y), gg.Graph(gg.scale(y, 2.0))
    allocators = [gg.GraphAllocator(backend) for _ in range(2)]
    for g, allocator in zip((graph, other), allocators, strict=True):
        allocator.alloc_graph(g)
    seen, walk = [], backend._walk
    backend._walk = lambda g: (seen.append([(t.buffer.id, t.offs) for t in g.nodes]), walk(g))[1]
    for g, allocator in [(graph, allocators[0]), (other, allocators[1]), (graph, allocators[0])]:
        backend.graph_compute(g)
        close(g.outputs[0].numpy(), want * (1 + (g is other)))
        places = [allocator.placement(t) for t in g.nodes]
        assert seen.pop() == [(buf.id, offs) for buf, offs in places]


def test_plans_of_its_own_run_any_number_of_times(backend):
    y, want = network(backend)
    graph = gg.Graph(y)
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    for factor in (1, 3):
        graph.leafs[0].set(graph.leafs[0].numpy() * factor)
        graph.leafs[2].set(graph.leafs[2].numpy() * factor)
        backend.graph_plan_compute(plan)
        close(y.numpy(), want * factor ** 2)
    z = gg.scale(y, 4.0)
    larger = gg.Graph(z)
    gg.GraphAllocator(backend).alloc_graph(larger)
    plan = backend.graph_plan_update(plan, larger)
    backend.graph_plan_compute(plan)
    close(z.numpy(), want * 36)
    assert plan.runs == 3
    backend.graph_plan_free(plan)


def test_memory_that_moves_is_looked_up_again(backend):
    y, want = network(backend)
    graph, allocator = gg.Graph(y), gg.GraphAllocator(backend)
    allocator.alloc_graph(graph)
    backend.graph_compute(graph)
    large, larger_want = network(backend, 600)
    allocator.alloc_graph(gg.Graph(large))                  # its buffers grow
    allocator.alloc_graph(graph)
    backend.graph_compute(graph)
    close(y.numpy(), want)
    close(gg.compute(large, backend=backend), larger_want)


def test_results_that_are_gone_say_so(backend):
    y, want = network(backend)
    z, want2 = network(backend)
    middle = y.src[0]
    graph, other, allocator = gg.Graph(y), gg.Graph(z), gg.GraphAllocator(backend)
    for g in (graph, other):
        allocator.alloc_graph(g)
        backend.graph_compute(g)
    close(z.numpy(), want2)
    with pytest.raises(gg.Overwritten, match="another graph of the same GraphAllocator"):
        y.numpy()
    backend.graph_compute(graph)
    close(y.numpy(), want)
    with pytest.raises(gg.Overwritten, match="in place|was reused"):
        middle.src[0].src[0].src[0].numpy()
    backend._walk = lambda g: 1 / 0
    with pytest.raises(ZeroDivisionError):
        backend.graph_compute(graph)
        y.numpy()


def test_leaves_it_writes_are_new_for_everybody(backend):
    """A cache of the user's, updated by a graph of this backend, read by a scheduler that has a copy."""
    ctx = gg.Context()
    cache, x = ctx.new_tensor(gg.F32, (8,), "cache"), ctx.new_tensor(gg.F32, (8,), "x")
    gg.alloc_ctx_tensors(ctx, backend)
    for t in (cache, x):
        t.set(np.ones(8))
    cpu = gg.init_backend("CPU")
    sched, read = gg.Scheduler([backend, cpu]), gg.Graph(gg.exp(cache))         # exp: the CPU's
    sched.graph_compute(read)
    close(sched.numpy(read.outputs[0]), np.full(8, np.e))
    graph = gg.Graph(gg.cpy(gg.scale(x, 2.0), cache))
    gg.GraphAllocator(backend).alloc_graph(graph)
    backend.graph_compute(graph)
    close(cache.numpy(), np.full(8, 2))
    sched.graph_compute(read)
    close(sched.numpy(read.outputs[0]), np.full(8, np.e ** 2))
    assert backend.device.calls["copy_tensor_async"] == 0 and backend.device.calls["get_tensor"]


def test_a_graph_it_cannot_run_is_refused_before_it_is_asked(backend):
    y, _ = network(backend)
    graph = gg.Graph(y)
    with pytest.raises(gg.NotAllocated, match="has no memory; allocate leaves"):
        backend.graph_compute(graph)
    host = gg.from_numpy(gg.Context(), np.ones(8, np.float32))
    foreign = gg.Graph(gg.scale(host, 2.0))
    gg.GraphAllocator(backend).alloc_graph(foreign)
    for ask in (backend.graph_compute, backend.graph_plan_create):
        with pytest.raises(gg.NotSupported, match="NP cannot reach; use a Scheduler"):
            ask(foreign)
    assert not backend.device.calls["graph_compute"] and not backend.device.calls["graph_plan_create"]


def test_all_of_it_beside_the_cpu():
    """Two such devices and the CPU under a scheduler; buffers of 512 bytes at most."""
    devices = [NumpyDevice("NP0", max_size=512), NumpyDevice("NP1", is_async=False)]
    backends = [*(d.init_backend() for d in devices), gg.init_backend("CPU")]
    y, want = network(backends[0])
    z = gg.scale(gg.exp(gg.scale(y, -1.0)), 3.0)
    sched, graph = gg.Scheduler(backends, parallel=True), gg.Graph(z)
    sched.set_tensor_backend(z, backends[1])
    sched.set_tensor_backend(y, backends[0])
    for _ in range(5):
        sched.graph_compute(graph)
        close(sched.numpy(z), 3 * np.exp(-want))
    assert {s.backend.name for s in sched.splits} == {"NP0", "NP1", "CPU"}
    sched.free()


def test_copies_and_slots_of_buffers(backend):
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (8,), "a"), ctx.new_tensor(gg.F32, (8,), "b")
    buf = gg.alloc_ctx_tensors(ctx, backend)
    buf = buf if isinstance(buf, gg.Buffer) else a.buffer
    a.set(np.arange(8))
    gg.tensor_copy(a, b)
    assert (b.numpy() == np.arange(8)).all() and backend.device.calls["copy_tensor"] == 1
    gg.tensor_memset(b, 0, 0, 4)
    b.set_bytes(np.float32(5).tobytes(), 8)
    assert b.numpy().tolist() == [0, 1, 5, 3, 4, 5, 6, 7]
    buf.clear(0)
    assert not a.numpy().any() and a.buffer.told == ["a", "b"]
    compared = []
    y, _ = network(backend)
    gg.compare_graph_backend(backend, NumpyDevice("other").init_backend(), gg.Graph(y),
                             lambda i, s, t: compared.append((i, np.array_equal(s.numpy(), t.numpy()))))
    assert [i for i, _ in compared] == [0, 1, 2, 4, 5] and all(same for _, same in compared)
    assert OP.TRANSPOSE not in [t.op for i, t in enumerate(gg.Graph(y).nodes) if i in dict(compared)]
