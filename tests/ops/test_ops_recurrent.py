"""Recurrences, experts, outer products and solves: ids out of range, nothing to compute, and random calls."""
import numpy as np
import pytest
from helpers.cases import expected, nmse
from hypothesis import given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.ops.core.errors import GgjitError, IndexRangeError

R = np.random.default_rng(11)


def floats(*shape):
    return R.uniform(-1.0, 1.0, shape).astype(np.float32)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n,bad", [(1, 4), (1, -1), (5, 2 ** 31 - 1), (40, -2 ** 31), (90, 4)])
def test_mul_mat_id_checks_ids_first(n, bad, n_threads, monkeypatch):
    """One token, few and many columns an expert: an error that names the id, and nothing written."""
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
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


# ---------------------------------------------------------------- random shapes, types and strides
# sources as shapes in ggml order over a few sizes; a trailing "i" marks ids
RECIPES = {
    "ssm_conv": lambda a, b, c, d: [(a + b, c, d), (a + 1, c)],
    "ssm_scan": lambda a, b, c, d: [(a, b, c, d), (b, c, a, d), (c, a, d), (1, c), *[(a, 1, a, d)] * 2, (d, "i")],
    "rwkv_wkv6": lambda a, b, c, d: [(a, b, c), (a, b, c), (a, b, c), (a, b), (a, b, c), (a * a * b, 1)],
    "rwkv_wkv7": lambda a, b, c, d: [(a, b, c)] * 6 + [(a * a * b, 1)],
    "gated_linear_attn": lambda a, b, c, d: [(a, b, c)] * 4 + [(a * a * b, 1)],
    "gated_delta_net": lambda a, b, c, d: [(a, b, c, d)] * 3 + [(1, b, c, d)] * 2 + [(a, a, b, d)],
    "solve_tri": lambda a, b, c, d: [(a, a, c, d), (b, a, c, d)],
    "lightning_indexer": lambda a, b, c, d: [(a, b, c, d), (a, 1, b, d), (b, c, 1, d), (b, c, 1, d)],
    "dsv4_hc_comb": lambda a, b, c, d: [(24, a), (3,), (24,)],
    "dsv4_hc_pre": lambda a, b, c, d: [(a, b, c), (b, c)],
    "dsv4_hc_post": lambda a, b, c, d: [(a, c), (a, b, c), (b, c), (b, b, c)],
    "out_prod": lambda a, b, c, d: [(a, b, c, 1), (d, b, c, 2)],
    "mul_mat_id": lambda a, b, c, d: [(a, b, c), (a, 1, d), (2, d, "i")],
}
PARAMS = {"gated_linear_attn": (0.5,), "solve_tri": (True, True, False), "dsv4_hc_comb": (1e-6, 3)}
TYPES = (gg.F32, gg.F16, gg.BF16, gg.I32)
SIZE = st.integers(0, 6) | st.sampled_from([17, 33])
CHANGE = st.tuples(st.integers(0, 6), st.sampled_from(["size", "type", "permute"]), st.integers(0, 3), SIZE)


def source(ctx, rng, shape, type, axes):
    if shape[-1] == "i":
        a = rng.integers(-1 if rng.random() < 0.1 else 0, 3, shape[:-1][::-1]).astype(np.int32)
        return gg.from_numpy(ctx, a)
    a = rng.uniform(0.1, 1.0, shape[::-1]).astype(np.float32)
    if type is gg.I32:
        return gg.from_numpy(ctx, a.astype(np.int32))
    t = gg.from_numpy(ctx, a, type=None if type is gg.F32 else type)
    return gg.permute(t, *axes) if axes else t


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(RECIPES)), SIZE, SIZE, SIZE, SIZE, st.lists(CHANGE, max_size=2), st.integers(0, 99))
def test_typed_error_or_right(name, a, b, c, d, changes, seed):
    """A typed error or the numbers of the reference; never a crash."""
    rng, ctx = np.random.default_rng(seed), gg.Context()
    shapes = [list(s) for s in RECIPES[name](a, b, c, d)]
    types, axes = [gg.F32] * len(shapes), [None] * len(shapes)
    if name == "lightning_indexer":
        types[3] = gg.F16
    for which, what, where, size in changes:
        i = which % len(shapes)
        if what == "size" and shapes[i][min(where, len(shapes[i]) - 1)] != "i":
            shapes[i][min(where, len(shapes[i]) - 1)] = size
        elif what == "type":
            types[i] = TYPES[where]
        elif what == "permute":
            axes[i] = [(1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)][where]
    sources = [source(ctx, rng, s, ty, ax) for s, ty, ax in zip(shapes, types, axes, strict=True)]
    try:
        out = getattr(gg, name)(*sources, *PARAMS.get(name, ()))
    except GgjitError as e:
        assert len(str(e)) > 20
        return
    try:
        got = gg.compute(out)
    except IndexRangeError:
        return
    assert got.size == int(np.prod(out.ne))
    if got.size == 0:
        return
    with np.errstate(all="ignore"):
        want = expected(out)
    if np.isfinite(want).all() and np.abs(want).max() < 1e6:
        assert nmse(got.reshape(-1).astype(np.float64), want.reshape(-1)) < 5e-4
