"""Profiles: every node once a run, times that add up, nothing when off."""
import csv
import json
import sys
import threading
import time

import numpy as np
import pytest

import ggjit as gg
from ggjit.cpu.thread_pool import the_pool
from ggjit.cpu.ticks import add_runs
from ggjit.ops.core.spec import flops, moved_nbytes
from ggjit.profiling.profile import Profile, last_of, share_text

RNG = np.random.default_rng()


def planned(n_threads=1, size=256, depth=3):
    """A plan of matrix products large enough for several threads, and tiny nodes between them."""
    backend = gg.init_backend("CPU", n_threads=n_threads)
    ctx = gg.Context()
    x = gg.from_numpy(ctx, RNG.standard_normal((size, size)).astype(np.float32), "x")
    w = gg.from_numpy(ctx, RNG.standard_normal((size, size)).astype(np.float32), "w")
    small = gg.exp(gg.from_numpy(ctx, np.ones(4, np.float32)))
    for i in range(depth):
        x = gg.set_name(gg.rms_norm(gg.mul_mat(w, x), 1e-5), f"out-{i}")
    graph = gg.Graph(x, small)
    gg.GraphAllocator(backend).alloc_graph(graph)
    return backend.graph_plan_create(graph)


def quickest(p, op):
    """Least seconds a thread was in a node of an op: a pause of the machine is in some runs only."""
    return min(b - a for r, i, ith, a, b in p.events() if r.nodes[i].op == op)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_every_node_is_a_row_and_times_add_up(n_threads):
    plan = planned(n_threads)
    plan.compute()
    with gg.profile() as p:
        t0 = time.perf_counter()
        for _ in range(5):
            plan.compute()
        elapsed = time.perf_counter() - t0
    rows = p.rows
    assert [r.name for r in rows] == [t.name or f"%{t.id}" for t in plan.nodes]
    assert all(r.runs == 5 and r.seconds > 0 and 0 < r.balance <= 1 for r in rows)
    assert 0 < p.seconds <= elapsed
    product = next(r for r in rows if r.op == "mul_mat")
    assert product.flops == 2 * 256**3 and product.nbytes == 3 * 4 * 256**2
    assert product.seconds / 5 > quickest(p, "exp")
    assert all(r.busy <= r.seconds * r.n_threads * 1.001 for r in rows)
    if n_threads > 1:
        assert product.n_threads == 2
        assert {ith for r, i, ith, a, b in p.events() if r.nodes[i].op == "mul_mat"} == {0, 1}


def test_rows_as_columns_and_as_text(tmp_path):
    plan = planned()
    with gg.profile() as p:
        plan.compute()
    columns = p.to_dict()
    assert columns["name"] == [r.name for r in p.rows] and columns["seconds"] == [r.seconds for r in p.rows]
    head, *lines = list(csv.reader(p.to_csv().splitlines()))
    assert head == list(columns) and [line[0] for line in lines] == columns["name"]
    p.to_csv(tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text("utf-8") == p.to_csv()


def test_events_of_a_thread_follow_one_another():
    plan = planned(2)
    with gg.profile() as p:
        plan.compute()
        plan.compute()
    for ith in (0, 1):
        mine = sorted((a, b) for _, _, t, a, b in p.events() if t == ith)
        assert mine and all(a <= b for a, b in mine)
        assert all(b <= a2 for (_, b), (a2, _) in zip(mine, mine[1:], strict=False))


def test_the_clock_is_seconds():
    """A node that sleeps: its time is known."""
    a = gg.from_numpy(gg.Context(), np.ones(4, np.float32))
    with gg.profile() as p:
        t0 = time.perf_counter()
        gg.compute(gg.map_custom1(a, lambda dst, x, ith, nth: time.sleep(0.05 if ith == 0 else 0)))
        elapsed = time.perf_counter() - t0
    assert 0.049 < p.rows[0].seconds <= elapsed


def test_off_means_off():
    plan = planned()
    with gg.profile() as p:
        pass
    plan.compute()
    assert p.rows == [] and the_pool().tracing.watchers == []
    assert "nothing was computed" in str(p) and p._repr_html_()


def test_the_untraced_walk_holds_no_clock():
    """What is compiled for a run without a profile reads the clock nowhere but where it polls."""
    from ggjit.cpu.walk import walk, walk_with_clock

    def clocks(f):
        from numba import types
        f.compile((types.int64,) * 5)
        return "".join(f.inspect_llvm().values()).count("@llvm.readcyclecounter()")
    assert clocks(walk) < clocks(walk_with_clock)


def test_errors_and_nested_profiles():
    plan = planned()
    bad = gg.get_rows(gg.from_numpy(gg.Context(), np.ones((2, 4), np.float32)),
                      gg.from_numpy(gg.Context(), np.array([5], np.int32)))
    with gg.profile() as outer:
        with gg.profile() as inner:
            plan.compute()
        with pytest.raises(gg.IndexRangeError, match="index 5 is out of range"):
            gg.compute(bad)
        plan.compute()
        with pytest.raises(gg.GgjitError, match="open"):
            outer.__enter__()
    assert {r.runs for r in inner.rows} == {1} and {r.runs for r in outer.rows} == {2}
    assert the_pool().tracing.watchers == []
    with pytest.raises(KeyError, match="not ours"), gg.profile():
        raise KeyError("not ours")
    assert the_pool().tracing.watchers == []


def test_computes_of_other_threads_are_seen():
    plans = [planned() for _ in range(2)]
    with gg.profile() as p:
        threads = [threading.Thread(target=plan.compute) for plan in plans]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(p.records) == 2


def test_a_profile_that_another_thread_closes_as_a_run_begins():
    tracing, plan = the_pool().tracing, planned()
    with gg.profile():
        pass
    assert tracing.trace_buffer(plan, 0, len(plan.parts)) is None and not tracing.trace_buffers


def test_a_schedulers_splits_are_seen():
    a, b = (gg.init_backend("CPU", n_threads=1) for _ in range(2))
    x = gg.from_numpy(gg.Context(), np.ones((4, 4), np.float32), "x")
    y = gg.exp(x)
    z = gg.set_name(gg.sqr(y), "z")
    sched = gg.Scheduler([a, b])
    sched.set_tensor_backend(y, a)
    sched.set_tensor_backend(z, b)
    graph = gg.Graph(z)
    with gg.profile() as p:
        sched.graph_compute(graph)
    assert [r.op for r in p.rows] == ["exp", "sqr"]


def test_old_runs_are_kept_as_sums(monkeypatch):
    monkeypatch.setattr(sys.modules["ggjit.cpu.ticks"], "SHEET_NBYTES", 1024)
    plan = planned(size=16)
    with gg.profile() as p:
        for _ in range(40):
            plan.compute()
    assert {r.runs for r in p.rows} == {40} and len(p.events()) <= 60
    assert {r.runs for r in p.rows} == {40}                             # asking twice changes nothing


@pytest.mark.parametrize("n_threads", [1, 3])
def test_sums_of_any_stretch_of_runs(n_threads):
    """What jitted code adds up, beside NumPy; thread 0 alone runs every other node; pages are written over."""
    n_pages, n_nodes, (first, end) = 5, 6, sorted(RNG.integers(0, 30, 2).tolist())
    end = min(end, first + n_pages)
    start = RNG.integers(1, 1 << 60, (n_pages, n_threads, n_nodes))
    ticks = np.stack([start, start + RNG.integers(0, 1000, start.shape)], -1)
    ticks[:, 1:, ::2] = 0
    wall, busy = RNG.integers(0, 9, n_nodes), RNG.integers(0, 9, (n_nodes, n_threads))
    want = wall.copy(), busy.copy()
    for run in range(first, end):
        for i in range(n_nodes):
            ran = ticks[run % n_pages, :1 if i % 2 == 0 else n_threads, i]
            want[0][i] += ran[:, 1].max() - ran[:, 0].min()
            want[1][i, :len(ran)] += ran[:, 1] - ran[:, 0]
    add_runs(first, end, ticks, n_pages, n_threads, n_nodes, wall, busy)
    assert (wall == want[0]).all() and (busy == want[1]).all()


@pytest.mark.parametrize("n_runs", [1, 2, 3, 7, 8, 9, 40])
def test_every_run_is_counted_once(n_runs, monkeypatch):
    """Sheets double up to 8 pages and are written over then; a profile inside another sees its own runs only."""
    monkeypatch.setattr(sys.modules["ggjit.cpu.ticks"], "SHEET_NBYTES", 1024)
    plan = planned(size=16)
    with gg.profile() as outer:
        plan.compute()
        with gg.profile() as inner:
            for k in range(n_runs):
                plan.compute()
                assert {r.runs for r in inner.rows} == {k + 1}          # asked while it is open
        plan.compute()
    assert {r.runs for r in inner.rows} == {n_runs} and {r.runs for r in outer.rows} == {n_runs + 2}
    assert len(inner.records[0].ticks) == min(n_runs, len(outer.records[0].ticks))
    for p in (inner, outer):
        starts = p.records[0].ticks[:, 0, 0, 0]
        assert (np.diff(starts) > 0).all()                              # oldest first, none twice
        assert p.seconds >= sum(b - a for *_, a, b in p.events()) * 0.999


def test_failed_runs_leave_no_trace():
    ctx = gg.Context()
    ids = gg.from_numpy(ctx, np.zeros(1, np.int32))
    graph = gg.Graph(gg.exp(gg.get_rows(gg.from_numpy(ctx, np.ones((2, 4), np.float32)), ids)))
    backend = gg.init_backend("CPU", n_threads=1)
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    with gg.profile() as p:
        for k in range(9):
            ids.set(np.array([5 if k % 3 else 1], np.int32))
            if k % 3:
                with pytest.raises(gg.IndexRangeError, match="index 5 is out of range"):
                    plan.compute()
            else:
                plan.compute()
    assert {r.runs for r in p.rows} == {3} and p.records[0].ticks.shape == (3, 1, 2, 2)
    assert (np.diff(p.records[0].ticks.reshape(-1)) >= 0).all()         # start, end, start, end ... of three runs


def test_names_given_between_two_profiles():
    plan = planned()
    with gg.profile() as p:
        plan.compute()
    gg.set_name(plan.nodes[0], "renamed")
    with gg.profile() as q:
        plan.compute()
    assert p.rows[0].name != "renamed" and q.rows[0].name == "renamed"


def test_tables_sums_and_files(tmp_path):
    plan = planned(2)
    with gg.profile() as p:
        plan.compute()
    by_op = {r.name: r for r in p.by("op", limits=False)}
    assert set(by_op) == {"mul_mat", "rms_norm", "exp"} and by_op["mul_mat"].n_nodes == 3
    assert by_op["mul_mat"].flops == 3 * 2 * 256**3
    assert {r.name for r in p.by("layer", limits=False)} >= {"blk.0", "blk.1", "blk.2"}
    assert sum(r.seconds for r in p.by("node", limits=False)) == pytest.approx(p.seconds)
    with pytest.raises(gg.ParamError, match="colour"):
        p.by("colour")
    assert "mul_mat" in str(p) and "roofline" in str(p) and "mul_mat" in p._repr_html_()
    p.trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in bars} == {0, 1} and {e["cat"] for e in bars} == {"mul_mat", "rms_norm", "exp"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in bars)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(FileNotFoundError, match="no such folder: '.*none'$"):
        p.trace(tmp_path / "none" / "t.json")


def test_plot(tmp_path, need):
    need("matplotlib", "plots")
    plan = planned(2)
    with gg.profile() as p:
        plan.compute()
    ax = p.plot(path=tmp_path / "p.png")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["layers", "thread 0", "thread 1"]
    assert (tmp_path / "p.png").stat().st_size > 1000
    with pytest.raises(gg.ParamError, match="run 7 of 1"):
        p.plot(path=tmp_path / "q.png", run=7)
    with pytest.raises(gg.ParamError, match="no run"):
        Profile().plot(path=tmp_path / "q.png")


def test_the_picture_of_the_graph_tells_times():
    plan = planned()
    with gg.profile() as p:
        plan.compute()
    assert last_of(plan.graph) is p
    d = plan.graph.draw(engine="own")
    assert d.profile is p and " moved" in d.svg and ">CPU</text>" in d.svg
    assert last_of(planned().graph) is None


def test_traffic_counts_rows_that_are_read():
    ctx = gg.Context()
    table, ids = ctx.new_tensor(gg.Q8_0, (64, 1000)), ctx.new_tensor(gg.I32, (3,))
    y = gg.get_rows(table, ids)
    assert moved_nbytes(y) == 3 * 64 * 4 + 3 * 68 + 12 and flops(y) == 0


def test_a_fused_node_is_one_row():
    backend, ctx = gg.init_backend("CPU", n_threads=1), gg.Context()
    x, w = (gg.from_numpy(ctx, RNG.standard_normal(s).astype(np.float32)) for s in ((8, 64), (64,)))
    graph = gg.Graph(gg.mul(gg.rms_norm(x, 1e-5), w))
    gg.GraphAllocator(backend).alloc_graph(graph)
    rows = {}
    for fuse in (False, True):
        from ggjit.cpu.cpu_plan import CPUPlan
        plan = CPUPlan(backend, graph, graph.placement, fuse=fuse)
        with gg.profile() as p:
            plan.compute()
        rows[fuse] = p.rows
        assert len(p.rows) == len(plan.parts)
    assert [r.op for r in rows[False]] == ["rms_norm", "mul"]
    assert [r.op for r in rows[True]] == ["rms_norm+mul"]
    assert "fused into mul<" in graph.draw(profile=p, engine="own").svg
    assert rows[True][0].nbytes == 4 * (8 * 64 + 64 + 8 * 64) < sum(r.nbytes for r in rows[False])


def test_no_share_of_the_roofline_is_above_all_of_it():
    assert [share_text(x) for x in (0.0, 0.873, 1.0, 1.004)] == ["0%", "87%", "100%", "100%"]
    assert share_text(1.72) == share_text(4.82) == "cached"
    assert Profile.remarks([("cached", "mul_mat")])[0].startswith("cached: faster than memory") and \
        Profile.remarks([("87%", "cached_op")]) == []
