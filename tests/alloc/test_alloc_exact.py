"""planner="ggml" against the real ggml: same order, same peak, same offset for every tensor (rows B3)."""
import importlib.util
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.requirements import benchmark, shared

graphs = benchmark("alloc_graphs")
plan_table = graphs.plan_table


def oracle(problems):
    """Plans of the real ggml; the wheel with the newest one first."""
    wheel = next((w for w in ("xllamacpp", "pywhispercpp") if importlib.util.find_spec(w)), None)
    if wheel is None:
        pytest.skip("no wheel with ggml: pip install 'ggjit[test]'")
    run = subprocess.run([sys.executable, TESTS / "helpers" / "alloc_oracle.py", wheel], capture_output=True,
                         check=False, input=pickle.dumps(problems))
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    return pickle.loads(run.stdout)


def check(net, want, **kw):
    plan = plan_table(net.table, net.nodes, net.leafs, net.sizes, **kw)
    assert net.nodes == want["nodes"] and net.leafs == want["leafs"]
    assert [sum(c) for c in plan.chunk_sizes] == want["sizes"]
    ids = net.nodes + net.leafs
    buffer, chunk, offs = (np.concatenate([getattr(plan, f"{s}_{k}") for s in ("node", "leaf")]).tolist()
                           for k in ("buffer", "chunk", "offs"))
    real = {}
    for i, b, c, o in zip(ids, buffer, chunk, offs, strict=True):
        assert (b < 0) == (i not in want["place"]), i
        if b >= 0:
            assert real.setdefault((b, c), want["place"][i][0]) == want["place"][i][0]
            assert o == want["place"][i][1], i
    assert len(set(real.values())) == len(real)
    return plan


def test_model_graphs():
    nets = [make() for make in graphs.SUITE.values()]
    wants = oracle([{"table": g.table, "roots": g.roots} for g in nets])
    assert len(nets) >= 25
    for net, want in zip(nets, wants, strict=True):
        check(net, want)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2000), marks=pytest.mark.slow)])
def test_random_graphs(seeds):
    nets = [graphs.random_graph(s) for s in seeds]
    for net, want in zip(nets, oracle([{"table": g.table, "roots": g.roots} for g in nets]), strict=True):
        check(net, want)


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_chunks_and_several_buffer_types(n):
    rng, cases = np.random.default_rng(11), []
    for seed in range(n):
        net, k = graphs.random_graph(100_000 + seed), int(rng.integers(1, 4))
        cases.append((net, {
            "alignment": [int(2 ** rng.integers(3, 8)) for _ in range(k)],
            "max_size": [None if rng.random() < 0.3 else int(rng.integers(200, 8000)) for _ in range(k)],
            "node_buffers": rng.integers(0, k, len(net.table)), "leaf_buffers": rng.integers(0, k, len(net.table))}))
    wants = oracle([{"table": net.table, "roots": net.roots, **kw} for net, kw in cases])
    most = 0
    for (net, kw), want in zip(cases, wants, strict=True):
        kw["node_buffers"], kw["leaf_buffers"] = kw["node_buffers"][net.nodes], kw["leaf_buffers"][net.leafs]
        plan = check(net, want, n_buffers=len(kw["alignment"]), **kw)
        most = max(most, *map(len, plan.chunk_sizes))
    assert most > 4


def test_recorded_graphs():
    folder = shared("data", "graphs")
    seen = benchmark("alloc_recorded").recorded(folder)
    assert len(seen) == 17
    for g in seen:
        plan = plan_table(g.table, g.nodes, g.leafs, g.sizes)
        assert plan.peak == g.peak, g.name
        buffer, offs = [*plan.node_buffer, *plan.leaf_buffer], [*plan.node_offs, *plan.leaf_offs]
        for i, b, o in zip(g.nodes + g.leafs, buffer, offs, strict=True):
            assert b < 0 or o == g.offs.get(i, o), (g.name, i)
