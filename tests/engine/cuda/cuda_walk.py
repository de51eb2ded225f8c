"""Plans as one persistent kernel, in the simulator: the bits of the captured plan, what is refused, and whether the
check of tables and the simulator see what is wrong.  Run by test_cuda.py."""
import types

import numpy as np
import pytest
from helpers import tiny_model
from helpers.device_contract import floats, on
from helpers.requirements import shared
from helpers.sample import SEED, sampled

import ggjit as gg
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.cuda import walk as walks
from ggjit.cuda import walk_check, walk_table
from ggjit.cuda.walk import PlanWalk
from ggjit.cuda.walk_check import WalkFault, check_table
from ggjit.models import load_model
from ggjit.ops.cuda.compiler.simulator import SimulationFault
from ggjit.ops.cuda.native import walk
from ggjit.ops.cuda.native.launch import Launch


@pytest.fixture
def persistent():
    return gg.init_backend("CUDA0:persistent=1")


def n_walks():
    return sum(name.startswith("walker") for name in cuda_sim.launched)


def planned(backend, *outputs):
    graph = gg.Graph(*outputs)
    gg.GraphAllocator(backend).alloc_graph(graph)
    return backend.graph_plan_create(graph)


def walked(backend, *outputs):
    """A plan that was walked, and its PlanWalk."""
    plan = planned(backend, *outputs)
    for _ in range(2):
        plan.compute()
    backend.synchronize()
    assert isinstance(plan._walk, PlanWalk), plan.not_walked_because
    return plan, plan._walk


# ---------------------------------------------------------------- real plans
@pytest.mark.parametrize("type", sampled([(t,) for t in ("F32", "F16", "Q4_0", "Q8_0")], lambda case: ["one"]))
def test_decoding_has_the_bits_of_the_captured_plan(tmp_path, gpu, persistent, type):
    path = tiny_model.write(tmp_path / "tiny.gguf", type=type)
    got = {}
    for backend in (gpu, persistent):
        before = n_walks()
        with load_model(path, backend=backend, n_gpu_layers=-1, reserve=False) as m:
            m.decode([3, 17])
            got[backend] = [m.decode([i]) for i in (31, 8)], n_walks() - before
    np.testing.assert_array_equal(got[persistent][0], got[gpu][0])
    assert got[gpu][1] == 0 and got[persistent][1] == 1             # the plan's second run


@pytest.mark.parametrize("type", sampled([(t,) for t in ("F16", "Q4_0", "Q8_0")], lambda case: ["one"]))
def test_kernels_that_copy_while_they_compute_are_walked(gpu, persistent, monkeypatch, type):
    """Products of one column and of several, an attention over shared keys: teams of a block copy for themselves."""
    monkeypatch.setenv("GGJIT_PIPED", "1")
    type, got = getattr(gg, type), []
    w, k = on(persistent, type, (64, 32), floats(32, 64)), on(persistent, gg.F16, (32, 70, 1), floats(1, 70, 32))
    x = on(persistent, gg.F32, (64, 3), floats(3, 64))
    for backend in (gpu, persistent):
        h = gg.mul_mat(w, gg.rms_norm(x, 1e-5))
        o = gg.flash_attn_ext(gg.reshape_3d(h, 32, 1, 3), k, k, None, 0.2, 0.0, 0.0)
        y = gg.mul_mat(w, gg.reshape_2d(gg.concat(gg.cont(gg.view_1d(h, 32, 0)), gg.view_1d(h, 32, 128), 0), 64, 1))
        plan = planned(backend, y, o)
        for _ in range(2):
            plan.compute()
        got.append([plan.numpy(t) for t in (y, o)])
        names = " ".join(kernel.name for kernel in plan.kernels)
        assert all(n in names for n in ("mul_mat_few", "flash_attn_piped", "flash_attn_piped_merge"))
    assert isinstance(plan._walk, PlanWalk), plan.not_walked_because
    for a, b in zip(*got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("type", ["F32", "F16", "Q4_0", "Q8_0"])
def test_a_real_model_has_the_bits_of_the_captured_plan(gpu, persistent, type):
    path, tokens = shared("data", "stories260k", f"stories260K-{type}.gguf"), {}
    for backend in (gpu, persistent):
        with load_model(path, backend=backend, n_gpu_layers=-1, reserve=False) as m:
            m.decode([1, 403])
            tokens[backend] = [m.decode([i]) for i in (407, 261)]
    np.testing.assert_array_equal(tokens[persistent], tokens[gpu])
    assert n_walks() > 0


def test_a_bad_index_is_reported_and_the_next_run_is_clean(persistent):
    table, ids = on(persistent, gg.F32, (32, 5), floats(5, 32)), on(persistent, gg.I32, (3,), np.zeros(3, np.int32))
    y = gg.neg(gg.get_rows(table, ids))
    plan, _ = walked(persistent, y)
    ids.set(np.array([0, 7, 1], np.int32))
    plan.compute()
    with pytest.raises(gg.IndexRangeError, match="index 7 "):
        persistent.synchronize()
    ids.set(np.array([0, 4, 1], np.int32))
    plan.compute()
    np.testing.assert_array_equal(plan.numpy(y), -table.numpy()[[0, 4, 1]])


def test_a_walk_follows_memory_that_moved(persistent):
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (33,))
    old = gg.alloc_ctx_tensors(ctx, persistent)
    a.set(floats(33))
    y = gg.sqr(gg.neg(a))
    plan, first = walked(persistent, y)
    old.free()
    gg.alloc_ctx_tensors(ctx, persistent)
    a.set(x := floats(33))
    before = n_walks()
    plan.compute()
    np.testing.assert_allclose(plan.numpy(y), x * x, rtol=1e-6)
    assert plan._walk is not first and n_walks() == before + 1


# ---------------------------------------------------------------- what is captured instead
def test_the_backend_has_to_be_asked(gpu):
    plan = planned(gpu, gg.sqr(gg.neg(on(gpu, gg.F32, (8,), floats(8)))))
    for _ in range(2):
        plan.compute()
    gpu.synchronize()
    assert "persistent=1" in plan.not_walked_because and plan._graph.exec is not None


BECAUSE = {"cooperative": "no cooperative launches", "full": "does not fit", "spills": "bytes of a thread's memory",
           "out of memory": "not enough GPU memory"}


@pytest.mark.parametrize("why", BECAUSE)
def test_where_it_cannot_be_a_plan_is_captured(monkeypatch, persistent, failing, why):
    if why == "cooperative":
        monkeypatch.setattr(persistent.device, "cooperative", False)
    if why == "full":
        monkeypatch.setitem(persistent.cuda.__dict__, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *args: 0)
    if why == "spills":
        made = walks.walker_of
        monkeypatch.setattr(walks, "walker_of", lambda *args: (*made(*args)[:2], walks.MOST_SPILLED + 1))
    x = floats(8)
    y = gg.sqr(gg.neg(on(persistent, gg.F32, (8,), x)))
    plan = planned(persistent, y)
    plan.compute()
    if why == "out of memory":
        failing["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY", 0
    plan.compute()
    failing.clear()
    np.testing.assert_allclose(plan.numpy(y), x * x, rtol=1e-6)
    assert plan._graph.exec is not None and BECAUSE[why] in plan.not_walked_because


# ---------------------------------------------------------------- the table and its check
@pytest.fixture
def decoded(persistent):
    """(rows, planned, NODE rows, their address, walker, blocks) of a plan with rows that wait and rows that do not."""
    w = [on(persistent, gg.Q8_0, (64, 32), floats(32, 64)) for _ in range(3)]
    x = on(persistent, gg.F32, (64, 1), floats(1, 64))
    q, k, v = (gg.mul_mat(a, gg.rms_norm(x, 1e-5)) for a in w)
    plan, found = walked(persistent, gg.add(gg.mul(q, k), gg.silu(v)))
    left_out = {i for i, done_by in enumerate(plan._done_by) if done_by >= 0}
    steps = walk_table.steps(plan, left_out)
    walker, _ = walk.walker_of([step.launch for step in steps])
    return (found.rows.copy(), [(x.node, x.launch, x.n_stored) for x in steps], plan.rows, plan._row_base, walker,
            found.n_blocks)


def test_a_right_table_passes(decoded):
    check_table(*decoded)
    assert 0 < decoded[0][:, walk.W_ALONE].sum() < len(decoded[0])
    assert 2 <= walk_check.n_waits(decoded[0]) < len(decoded[0]) - 1


def test_every_wait_is_needed(decoded):
    waits = np.flatnonzero(decoded[0][:, walk.W_WAITS])
    for i in waits:
        rows = decoded[0].copy()
        rows[i, walk.W_WAITS] = 0
        with pytest.raises(WalkFault, match="with no wait in between"):
            check_table(rows, *decoded[1:])


def swapped(rows):
    first, last = rows[0].copy(), rows[-1].copy()
    rows[0], rows[-1] = last, first
    rows[:, walk.W_WAITS] = 1
    rows[[0, -1], walk.W_ENDS] = 0, 1


@pytest.mark.parametrize("change, match", [
    (swapped, "plan's order"), (lambda rows: rows.__setitem__(1, rows[0]), "left out|is .*, not"),
    (lambda rows: rows.__setitem__((0, walk.W_BODY), 99), "names no body"),
    (lambda rows: rows.__setitem__((0, walk.W_TEAMS), 0), "0 teams"),
    (lambda rows: rows.__setitem__((2, walk.W_BLOCKS), 1000), "other blocks"),
    (lambda rows: rows.__setitem__((1, walk.W_WAITS), 2), "more than once"),
    (lambda rows: rows.__setitem__((1, walk.W_ENDS), 1), "end with its last"),
    (lambda rows: rows.__setitem__((1, walk.W_COUNTER), 8), "different counters"),
    (lambda rows: rows.__setitem__((0, walk.W_WRITES), 0), "does not say what")], ids=range(9))
def test_a_wrong_table_is_refused(decoded, change, match):
    rows = decoded[0].copy()
    change(rows)
    with pytest.raises(WalkFault, match=match):
        check_table(rows, *decoded[1:])


def test_a_counter_that_could_overflow_is_refused(decoded):
    with pytest.raises(WalkFault, match="counted"):
        check_table(*decoded[:-1], 1 << 30)


def test_the_simulator_sees_a_wait_that_is_missing(persistent, monkeypatch):
    """What is read too early, and what is overwritten before others have read it."""
    monkeypatch.setattr(walk_table, "ALONE_ROUNDS", 0)
    x = on(persistent, gg.F32, (64, 40), floats(40, 64))
    y = gg.rms_norm(gg.add(x, x), 1e-5)
    _, found = walked(persistent, gg.mul_mat(y, y))
    for wait in np.flatnonzero(found.rows[:, walk.W_WAITS]):
        rows = found.rows.copy()
        rows[wait, walk.W_WAITS] = 0
        with pytest.raises(SimulationFault, match="race: thread .* (reads|writes) what .* (wrote|read), with no"):
            run_rows(persistent, found, rows)
    run_rows(persistent, found, found.rows)


def run_rows(backend, found, rows):
    backend.send(found.table.base + walk_table.COUNTER_NBYTES, rows.ravel().view(np.uint8))
    found.launch(backend.stream)
    try:
        backend.synchronize()
    except SimulationFault:
        backend.stream.jobs.clear()
        raise


def random_steps(rng, n):
    def pieces(most):
        return tuple((int(a), int(a + rng.integers(1, 9))) for a in rng.integers(0, 60, rng.integers(1, most)))
    launch = Launch("none", None, (1, 1, 1), 32)
    return [walk_table.WalkStep(launch, 0, pieces(4), pieces(2)) for _ in range(n)]


def test_levels_are_the_longest_chains():
    """Beside every pair of launches, looked at one by one."""
    rng = np.random.default_rng(SEED)

    def touch(some, others):
        return any(max(a, c) < min(b, d) for a, b in some for c, d in others)
    for _ in range(20):
        steps, alone, want = random_steps(rng, 25), rng.integers(0, 2, 25) > 0, []
        for i, s in enumerate(steps):
            want.append(max((want[j] + 1 - (alone[i] and alone[j]) for j, o in enumerate(steps[:i]) if touch(
                s.reads, o.writes) or touch(s.writes, o.writes) or touch(s.writes, o.reads)), default=0))
        assert walk_table.levels(steps, alone).tolist() == want


@pytest.mark.parametrize("threads, block, piece, want", [
    (512, 32, 0, 16), (512, 64, 0, 8), (1024, 64, 0, 15), (1024, 32, 0, 32), (512, 512, 128, 1), (128, 96, 0, 1),
    (512, 128, 20000, 2), (512, 128, 50000, 0)])
def test_teams_of_a_block(threads, block, piece, want):
    assert walk_table.n_teams(threads, types.SimpleNamespace(block=block), piece) == want
