"""add, sub, mul, div over tensors without gaps: the flat kernel at the lengths where its pieces and vectors end."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.ops.native.row_loops import FEW_ROWS, PIECE

RNG = np.random.default_rng()
SMALL = FEW_ROWS * PIECE             # one chunk where one thread computes
LENGTHS = (1, 15, 16, 17, 64, PIECE - 1, PIECE, PIECE + 1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL + 5)


def planned(y, n_threads):
    backend = gg.init_backend("CPU", n_threads=n_threads, fuse=0)
    graph = gg.Graph(y)
    gg.GraphAllocator(backend).alloc_graph(graph)
    return backend.graph_plan_create(graph)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n", LENGTHS)
def test_flat_sums_at_every_edge(monkeypatch, n, n_threads):
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    ctx = gg.Context()
    a, b = (RNG.standard_normal(n, np.float32) for _ in range(2))
    y = gg.add(gg.from_numpy(ctx, a), gg.from_numpy(ctx, b))
    plan = planned(y, n_threads)
    assert plan.n_used == n_threads
    for _ in range(3):
        plan.compute()
        np.testing.assert_array_equal(plan.numpy(y), a + b)


def test_nothing_is_written_beyond_the_end():
    ctx = gg.Context()
    whole = RNG.standard_normal(SMALL + 64, np.float32)
    t = ctx.new_tensor(gg.F32, (whole.size,))
    buf = gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    for n in (1, 17, PIECE + 3, SMALL + 1):
        t.set(whole)
        part = gg.view_1d(t, n, 0)
        plan = planned(gg.add_inplace(part, gg.from_numpy(ctx, np.ones(n, np.float32))), 1)
        plan.compute()
        np.testing.assert_array_equal(t.numpy()[:n], whole[:n] + 1)
        np.testing.assert_array_equal(t.numpy()[n:], whole[n:])
    buf.free()


def test_only_tensors_of_one_shape_without_gaps_take_the_flat_kernel():
    ctx = gg.Context()
    a, row = gg.from_numpy(ctx, RNG.standard_normal((6, 32), np.float32)), gg.from_numpy(ctx, np.ones(32, np.float32))
    gaps = gg.view_2d(a, 16, 6, a.nb[1], 0)
    for y, flat in ((gg.mul(a, a), True), (gg.mul(a, row), False), (gg.mul(gaps, gaps), False),
                    (gg.mul(gg.transpose(a), gg.transpose(a)), False)):
        plan = planned(y, 1)
        assert plan.kernels[0].name.endswith("-flat") == flat, plan.dump()
        plan.compute()
        want = {t.id: t.numpy() for t in y.src}
        np.testing.assert_array_equal(plan.numpy(y), want[y.src[0].id] * want[y.src[1].id])
