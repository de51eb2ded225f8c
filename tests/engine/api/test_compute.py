"""gg.compute: leaves without values, outputs that are views, how long results live."""
import numpy as np
import pytest

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
