"""gg.compute: leaves without values, outputs that are views, how long results live."""
import numpy as np
import pytest
from helpers import devices

import ggjit as gg


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_compute_names_leaves_without_values():
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (8,), "empty")
    with pytest.raises(gg.NotAllocated, match="empty"):
        gg.compute(gg.scale(a, 2.0))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    a.set(np.ones(8))
    y = gg.scale(a, 2.0)
    np.testing.assert_array_equal(gg.compute(y), 2)
    np.testing.assert_array_equal(y.numpy(), 2)


@pytest.mark.parametrize("planner", ["ggml", "best"])
def test_outputs_that_are_views_survive(planner):
    ctx = gg.Context()
    a = gg.from_numpy(ctx, array(32, 64))
    x = gg.silu(a)
    view = gg.reshape_1d(x, 2048)
    z = gg.silu(gg.scale(gg.silu(gg.scale(x, 2.0)), 3.0))
    first, last = gg.compute(view, z, planner=planner)
    silu = lambda v: v / (1 + np.exp(-v))           # noqa: E731
    np.testing.assert_allclose(first, silu(a.numpy()).reshape(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last, silu(3 * silu(2 * silu(a.numpy()))), rtol=1e-4, atol=1e-6)
    rest = view = gg.reshape_1d(gg.scale(a, 2.0), 2048)
    for _ in range(6):                              # what reads the view must not be computed in its place
        rest = gg.mul(gg.scale(rest, 1.5), gg.scale(rest, 0.5))
    np.testing.assert_array_equal(gg.compute(view, rest, planner=planner)[0], 2 * a.numpy().reshape(-1))


def test_results_live_as_long_as_their_plan_and_the_error_says_so():
    ctx, cpu = gg.Context(), gg.init_backend("CPU:n_threads=2")
    x = array(4)
    y, z = (gg.scale(gg.from_numpy(ctx, x), s) for s in (2.0, 3.0))
    gg.compute(y)
    np.testing.assert_array_equal(y.numpy(), 2 * x)
    graph = gg.Graph(z)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    cpu.graph_plan_create(graph).compute()
    with pytest.raises(gg.NotAllocated, match="keep the plan"):
        z.numpy()
    cpu.graph_compute(graph)                    # kept with the graph
    np.testing.assert_array_equal(z.numpy(), np.float32(3) * x)


def test_a_result_stays_readable_when_a_later_graph_computes_it_again():
    x = gg.from_numpy(gg.Context(), np.arange(4, dtype=np.float32))
    y = gg.sqr(x)
    gg.compute(y)
    gg.compute(y + 1)
    np.testing.assert_array_equal(y.numpy(), [0, 1, 4, 9])


@pytest.mark.parametrize("delay", [None, 1e-3])
@pytest.mark.parametrize("planner", ["ggml", "best"])
def test_a_backend_that_only_has_graph_compute(planner, delay):
    device = devices.Fake("A", host=True, delay=delay)
    backend, ctx = device.init_backend(), gg.Context()
    x = gg.from_numpy(ctx, array(4, 8))
    middle = gg.scale(x, 2.0)
    y, view = gg.silu(gg.scale(middle, 0.5)), gg.reshape_1d(gg.scale(x, 3.0), 32)
    got, flat = gg.compute(y, view, backend=backend)
    np.testing.assert_array_equal(got, gg.compute(gg.silu(x)))
    np.testing.assert_array_equal(flat, 3 * x.numpy().reshape(-1))
    np.testing.assert_array_equal(y.numpy(), got)
    with pytest.raises(gg.Overwritten, match="was reused by"):
        middle.numpy()
    backend.free()


def test_a_backend_whose_plans_only_compute():
    """What graph_plan_create returns is the backend's own affair; graph_plan_free gets it back."""
    freed = []

    class Runs:
        def __init__(self, graph):
            self.graph = graph

    class OwnPlans(devices.FakeBackend):
        def graph_plan_create(self, graph, placement=None):
            return Runs(graph)

        def graph_plan_compute(self, plan):
            self.graph_compute(plan.graph)

        def graph_plan_free(self, plan):
            freed.append(plan)
    x = gg.from_numpy(gg.Context(), array(4))
    got = gg.compute(gg.scale(x, 2.0), backend=OwnPlans(devices.Fake("A", host=True)))
    np.testing.assert_array_equal(got, 2 * x.numpy())
    assert len(freed) == 1
    np.testing.assert_array_equal(gg.compute(gg.scale(x, 2.0), backend="CPU:n_threads=1"), 2 * x.numpy())
    with pytest.raises(gg.TypeMismatch, match="compute takes a Backend, got int"):
        gg.compute(gg.scale(x, 2.0), backend=1)


def test_graphs_plans_and_reports_by_habit():
    x = gg.from_numpy(gg.Context(), array(4), name="x")
    y = gg.set_name(gg.scale(x, 2.0), "y")
    graph = gg.Graph(y)
    assert list(graph) == graph.nodes == graph[:] and graph[0] is graph["y"] and graph["x"] in graph.leafs
    with pytest.raises(KeyError, match="no node or leaf of the name 'z'; it has y, x"):
        graph["z"]
    cpu = gg.init_backend("CPU", n_threads=1)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    with pytest.raises(AttributeError, match=r"a plan has no attribute 'run'; write plan.compute\(\)"):
        cpu.graph_plan_create(graph).run()
    with pytest.raises(AttributeError, match="no attribute 'peak_bytes'; it has .*did you mean"):
        getattr(gg.measure(graph), "peak_bytes")  # noqa: B009
    with pytest.raises(TypeError, match=r"it is called as profile\(\)"):
        gg.profile(y)


def test_outputs_belong_to_a_graph_and_not_to_its_tensors():
    """Graphs made, planned and computed leave the memory plans of others as they are."""
    ctx = gg.Context()
    a = gg.from_numpy(ctx, array(64, 64))
    middle = gg.scale(gg.scale(a, 2.0), 3.0)
    view = gg.reshape_1d(middle, 4096)
    y = gg.silu(gg.scale(middle, 0.5))
    graph, cpu = gg.Graph(y), gg.init_backend("CPU")
    sched = gg.Scheduler([devices.Fake("A", host=True).init_backend(), cpu])

    def peaks(graph):
        allocator = gg.GraphAllocator(cpu)
        allocator.reserve(graph)
        return [gg.measure(graph, planner=p).peak for p in ("ggml", "best")] + [allocator.buffer_size()]
    before, flags = peaks(graph), [t.flags for t in graph.nodes]
    assert before == [16384] * 3
    gg.compute(middle)
    gg.compute(view, y)
    other = gg.Graph(middle, y, order="memory")
    sched.graph_compute(other)
    assert peaks(graph) == peaks(gg.Graph(y)) == before and [t.flags for t in graph.nodes] == flags
    assert peaks(other) == [2 * 16384] * 3 and other.key != graph.key
    np.testing.assert_array_equal(sched.numpy(middle), 6 * a.numpy())
    gg.GraphAllocator(cpu).alloc_graph(other)
    plan = gg.init_backend("CPU", fuse=1).graph_plan_create(other)
    plan.compute()
    np.testing.assert_array_equal(plan.numpy(middle), 6 * a.numpy())
