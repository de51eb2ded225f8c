"""Positions, factors and strides of rope: what it refuses."""
import numpy as np
import pytest
from helpers.cases import nmse

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs

R = np.random.default_rng(6)


def floats(*shape):
    return R.uniform(-1.0, 1.0, shape).astype(np.float32)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("mode,in_place", [(0, False), (2, True), (8, False), (40, True)])
def test_rope_refuses_positions_beyond_float32(mode, in_place, n_threads, monkeypatch):
    """Named with node and value, nothing written, and the plan goes on with good ids; 2^24 and negatives are."""
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    ctx, backend = gg.Context(), gg.init_backend(f"CPU:n_threads={n_threads}")
    x, ids = floats(9, 3, 16), np.arange(9 * (4 if mode & 8 else 1), dtype=np.int32)
    a, pos = gg.from_numpy(ctx, x.copy(), "a"), gg.from_numpy(ctx, ids, "positions")
    rest = (0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    name = ("rope_multi" if mode & 8 else "rope_ext") + "_inplace" * in_place
    turned = getattr(gg, name)(a, pos, None, 16, *[(3, 3, 2, 0)] * (mode & 8 > 0), mode, *rest)
    y = gg.set_name(turned, "turned")
    graph = gg.Graph(y)
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    buffer, offs = plan.where(y)
    memory = buffer.arena[offs:offs + y.nbytes]
    before = memory.copy()
    for bad in (2 ** 24 + 1, -2 ** 24 - 1, 2 ** 31 - 1, -2 ** 31):
        ids[-2] = bad
        with pytest.raises(gg.IndexRangeError, match=f"turned.*index {bad} is out of range for.*positions"):
            plan.compute()
        assert memory.tobytes() == before.tobytes()
    ids[-2], ids[1] = 2 ** 24, -5
    plan.compute()
    want, near = all_specs()[OP.ROPE].reference(y, x[None], ids), np.arange(9) != 7     # float32 angles are off at 2^24
    assert nmse(plan.numpy(y)[near].astype(np.float64), want[0, near]) < 1e-7


@pytest.mark.parametrize("mode, n", [(24, 32), (8, 16), (40, 16)])
def test_rope_wants_a_factor_for_each_pair(mode, n):
    ctx = gg.Context()
    x, ids = gg.from_numpy(ctx, floats(3, 1, 64)), gg.from_numpy(ctx, np.arange(12, dtype=np.int32))

    def turned(n_factors, behind):
        values = np.r_[np.ones(n_factors), np.full(32, behind)].astype(np.float32)
        factors = gg.view_1d(gg.from_numpy(ctx, values), n_factors, 0)
        return gg.rope_multi(x, ids, factors, 32, [8, 8, 8, 8], mode, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    with pytest.raises(gg.ShapeError, match=f"{n} pairs"):
        turned(n - 1, 1.0)
    np.testing.assert_array_equal(*(gg.compute(turned(n, behind)) for behind in (1.0, 1e-3)))


def test_strided_small_operands_are_refused():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, floats(4, 2, 16))
    ids = gg.transpose(gg.view_2d(gg.from_numpy(ctx, np.arange(8, dtype=np.int32)), 1, 4, 8, 0))
    factors = gg.transpose(gg.view_2d(gg.from_numpy(ctx, floats(16)), 1, 8, 8, 0))
    none = gg.transpose(gg.view_2d(gg.from_numpy(ctx, np.zeros(1, np.int32)), 1, 4, 0, 0))
    for make in (lambda: gg.rope(x, ids, 16, 0), lambda: gg.rope(x, none, 16, 0),
                 lambda: gg.rope_ext(x, gg.cont(ids), factors, 16, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
                 lambda: gg.soft_max_add_sinks(gg.soft_max(gg.from_numpy(ctx, floats(8, 3, 5))), factors)):
        with pytest.raises(gg.ShapeError, match="cont"):
            make()
    np.testing.assert_allclose(gg.compute(gg.rope(x, gg.cont(ids), 16, 0)).shape, (4, 2, 16))


@pytest.mark.parametrize("freq_scale,ext_factor", [(2.0 ** 31, 0.0), (-1e20, 0.0), (1.0, 2.0 ** 31), (np.nan, 0.0)])
def test_a_scale_leaves_digits_of_the_angle(freq_scale, ext_factor):
    with gg.Context() as ctx:
        a, ids = ctx.new_tensor(gg.F32, (64, 2, 3)), ctx.new_tensor(gg.I32, (3,))
        with pytest.raises(gg.ParamError, match="no digits left in float32"):
            gg.rope_ext(a, ids, None, 64, 0, 0, 1e4, freq_scale, ext_factor, 1.0, 32.0, 1.0)
        gg.rope_ext(a, ids, None, 64, 0, 4096, 1e4, 0.25, 1.0, 1.0, 32.0, 1.0)


@pytest.mark.parametrize("n_ctx_orig", [-1, -np.inf, 1.5])
def test_a_context_is_a_number_of_tokens(n_ctx_orig):
    with gg.Context() as ctx:
        a, ids = ctx.new_tensor(gg.F32, (64, 2, 3)), ctx.new_tensor(gg.I32, (3,))
        with pytest.raises(gg.ParamError, match="rope: n_ctx_orig is a number of tokens, 0 or more"):
            gg.rope_ext(a, ids, None, 64, 0, n_ctx_orig, 1e4, 1.0, 1.0, 1.0, 32.0, 1.0)
