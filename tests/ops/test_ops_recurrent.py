"""Recurrences and experts: ids out of range, and nothing to compute."""
import numpy as np
import pytest

import ggjit as gg

R = np.random.default_rng(11)


def floats(*shape):
    return R.uniform(-1.0, 1.0, shape).astype(np.float32)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n,bad", [(1, 4), (1, -1), (5, 2 ** 31 - 1), (40, -2 ** 31), (90, 4)])
def test_mul_mat_id_checks_ids_first(n, bad, n_threads, monkeypatch):
    """One token, few and many columns an expert: an error that names the id, and nothing written."""
    monkeypatch.setattr("ggjit.cpu.plan.least_nanoseconds", lambda n_threads: 0.0)
    ids = np.stack([R.permutation(4)[:2] for _ in range(n)]).astype(np.int32)
    ids[n // 2, 1] = bad
    ctx, backend = gg.Context(), gg.init_backend(f"CPU:n_threads={n_threads}")
    out = gg.mul_mat_id(*(gg.from_numpy(ctx, a) for a in (floats(4, 33, 64), floats(n, 1, 64), ids)))
    graph = gg.Graph(out)
    allocator = gg.GraphAllocator(backend)
    allocator.alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    buffer, offs = allocator.placement(out)
    memory = buffer.arena[offs:offs + out.nbytes]
    memory[:] = 0x55
    for _ in range(3):                                  # a failed run leaves the pool usable
        with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
            plan.compute()
    assert (memory == 0x55).all()


@pytest.mark.parametrize("bad", [-1, 3])
def test_ssm_scan_checks_ids(bad):
    arrays = [floats(3, 8, 1, 16), floats(2, 3, 8, 1), floats(2, 3, 8), floats(8, 16), floats(2, 3, 1, 16),
              floats(2, 3, 1, 16), np.int32([2, bad])]
    ctx = gg.Context()
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.ssm_scan(*(gg.from_numpy(ctx, a) for a in arrays)))


def test_empty():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.zeros((1, 4, 3), np.float32))
    assert gg.compute(gg.ssm_conv(x, gg.from_numpy(ctx, np.ones((4, 4), np.float32)))).size == 0
    state = gg.from_numpy(ctx, floats(1, 4, 8, 8))
    none = [gg.from_numpy(ctx, np.zeros((1, 0, 4, n), np.float32)) for n in (8, 8, 8, 1, 1)]
    out = gg.compute(gg.gated_delta_net(*none, state, 1))
    assert (out.ravel() == state.numpy().ravel()).all(), "no tokens: the state stays"
    ids = gg.from_numpy(ctx, np.zeros((0, 2), np.int32))
    y = gg.mul_mat_id(gg.from_numpy(ctx, floats(4, 3, 8)), gg.from_numpy(ctx, np.zeros((0, 1, 8), np.float32)), ids)
    assert gg.compute(y).size == 0
