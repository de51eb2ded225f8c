"""The independent validator accepts every planner's plans and refuses broken ones (properties over random problems)."""
import itertools

import numpy as np
import pytest
from helpers.requirements import benchmark
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggjit.alloc import IN_PLACE_2023, IN_PLACE_OPS
from ggjit.alloc.offsets.chunked import plan_chunks
from ggjit.alloc.offsets.planners import DOES_NOT_FIT, FITS, plan_offsets
from ggjit.alloc.plan_request import PlanRequest
from ggjit.alloc.validate import InvalidPlan, check_graph_plan, check_layout, validate_plan
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import T_FLAGS, T_SRC

quick = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)


graphs = benchmark("alloc_graphs")
plan_table = graphs.plan_table
buffers = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(0, 200)), min_size=1, max_size=24)


def columns(rows):
    a = np.array(rows, np.int64).reshape(-1, 3)
    return a[:, 0], a[:, 0] + a[:, 1], a[:, 2]


def most_live(lo, hi, size):
    return max(int(size[(lo <= t) & (t < hi)].sum()) for t in range(25))


@quick
@given(buffers, st.sampled_from([1, 16, 64]))
def test_layouts_are_valid_and_never_above_ggml(rows, alignment):
    lo, hi, size = columns(rows)
    padded = -(-size // alignment) * alignment
    lay = plan_offsets(lo, hi, size, alignment=alignment, time_limit=0.05)
    assert check_layout(lo, hi, size, lay.offsets, alignment, lay.peak) <= lay.peak
    assert lay.lower_bound == most_live(lo, hi, padded) <= lay.proved_bound <= lay.peak
    assert lay.peak <= plan_offsets(lo, hi, size, alignment=alignment, time_limit=0).peak
    assert lay.fits == FITS


def exhaustive(lo, hi, size):
    """Least peak over all orders of bottom-up placement."""
    n, best = len(size), 1 << 60
    meets = [[lo[i] < hi[j] and lo[j] < hi[i] for j in range(n)] for i in range(n)]
    for order in itertools.permutations(range(n)):
        top = {}
        for i in order:
            top[i] = max((top[j] for j in top if meets[i][j]), default=0) + int(size[i])
        best = min(best, max(top.values()))
    return best


@quick
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=6))
def test_decisions_agree_with_exhaustive_search(rows):
    lo, hi, size = columns(rows)
    least = exhaustive(lo, hi, size)
    assert plan_offsets(lo, hi, size, time_limit=2).peak == least
    for capacity in {max(int(size.max()), least - 1), least, least + 3}:
        lay = plan_offsets(lo, hi, size, capacity=capacity, time_limit=2)
        assert lay.fits == (FITS if capacity >= least else DOES_NOT_FIT)
        assert check_layout(lo, hi, size, lay.offsets) == lay.peak


@quick
@given(st.integers(0, 10 ** 6), st.sampled_from(["ggml", "best", "ggml-2023"]), st.integers(1, 3),
       st.sampled_from([None, 700, 4000]), st.sampled_from([16, 32, 128]))
def test_graph_plans_keep_every_value_until_its_last_use(seed, planner, k, max_size, alignment):
    g, rng = graphs.random_graph(seed), np.random.default_rng(seed)
    if planner == "ggml-2023":              # it knows neither chunks nor flags
        k, max_size = 1, None
        for r in g.rows:
            r[T_FLAGS] = 0
    ids = rng.integers(0, k, len(g.rows))
    plan = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner=planner, n_buffers=k, max_size=max_size,
                      alignment=alignment, node_buffers=ids[g.nodes], leaf_buffers=ids[g.leafs], time_limit=0.05)
    modern = planner != "ggml-2023"
    check_graph_plan(PlanRequest(g.table, g.nodes, g.leafs, g.sizes, alignment=alignment, n_buffers=k), plan,
                     IN_PLACE_OPS if modern else IN_PLACE_2023, leafs_first=modern)
    validate_plan(plan, alignment)
    assert plan.lower_bound <= plan.peak
    if planner == "best":
        assert plan.peak <= plan.ggml_peak


@pytest.mark.parametrize("name", list(graphs.SUITE))
def test_best_reaches_the_lower_bound_on_model_graphs(name):
    g = graphs.SUITE[name]()
    plan = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner="best", time_limit=5)
    assert plan.peak == plan.lower_bound <= plan.ggml_peak
    if len(g.nodes) < 1100:
        check_graph_plan(PlanRequest(g.table, g.nodes, g.leafs, g.sizes), plan)
    check_layout(plan.a_lo, plan.a_hi, plan.a_size, plan.a_offs, 32, plan.peak)


@pytest.mark.parametrize("name, parts, at_most", [("tinyllama pp128", 4, 0.75), ("inception x8", 4, 0.65),
                                                  ("train gpt2 6L", 2, 0.9)])
def test_best_cuts_chunks_of_its_own(name, parts, at_most):
    """Chunks of at most a part of ggml's peak: fewer bytes in all than ggml's chunks."""
    g = graphs.SUITE[name]()
    limit = plan_table(g.table, g.nodes, g.leafs, g.sizes).peak // parts
    plan = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner="best", max_size=limit, time_limit=5)
    assert plan.how == "chunks" and plan.peak <= at_most * plan.ggml_peak
    assert max(plan.chunk_sizes[0]) <= max(limit, int(plan.a_size.max())) and min(plan.chunk_sizes[0]) > 0
    check_graph_plan(PlanRequest(g.table, g.nodes, g.leafs, g.sizes), plan)
    validate_plan(plan, 32)


def test_chunks_of_buffers_above_the_limit():
    """Two that never meet share a chunk of the larger size, and a small one lies above the smaller of them."""
    lo, hi, size = columns([(0, 1, 50), (1, 1, 60), (0, 1, 8), (0, 2, 10), (0, 2, 0)])
    chunk, offs, sizes = plan_chunks(lo, hi, size, np.zeros(5, np.int64), limit=20)
    assert (chunk[0], offs[0], chunk[4]) == (chunk[1], offs[1], 0) and sorted(sizes) == [10, 60]
    wide = columns([(0, 1, 30)] * 17)
    assert plan_chunks(*wide, np.zeros(17, np.int64), limit=20) is None         # more than ggml has


def test_broken_layouts_are_refused():
    lo, hi, size = columns([(0, 2, 10), (1, 2, 10), (2, 2, 10)])
    assert check_layout(lo, hi, size, [0, 10, 0]) == 20
    for offsets, text in (([0, 9, 0], "overlap"), ([0, 10, 10], "overlap"), ([-1, 10, 0], "outside")):
        with pytest.raises(InvalidPlan, match=text):
            check_layout(lo, hi, size, offsets)
    with pytest.raises(InvalidPlan, match="multiple"):
        check_layout(lo, hi, size, [0, 10, 0], alignment=4)
    with pytest.raises(InvalidPlan, match="outside"):
        check_layout(lo, hi, size, [0, 10, 0], capacity=19)


def test_broken_graph_plans_are_refused():
    """Every way of moving one tensor onto another that is alive is noticed."""
    found = 0
    for seed in range(40):
        g = graphs.random_graph(seed)
        plan = plan_table(g.table, g.nodes, g.leafs, g.sizes)
        for i in range(len(g.nodes) - 1):
            s = int(plan.a_lo[plan.node_alloc[i]]) if plan.node_alloc[i] >= 0 else -1
            feeds = g.nodes[i] in g.table[g.nodes[i + 1], T_SRC:T_SRC + 10]
            if s == i and feeds and plan.node_alloc[i + 1] >= 0 and plan.a_lo[plan.node_alloc[i + 1]] == i + 1:
                bad = plan_table(g.table, g.nodes, g.leafs, g.sizes)
                bad.node_offs[i + 1] = bad.node_offs[i]
                op_may = IN_PLACE_OPS[g.rows[g.nodes[i + 1]][1]]
                if op_may or min(g.sizes[0][i], g.sizes[0][i + 1]) == 0:
                    continue
                with pytest.raises(InvalidPlan, match=r"may not work in place there|view \d+ is at|ends beyond chunk"):
                    check_graph_plan(PlanRequest(g.table, g.nodes, g.leafs, g.sizes), bad)
                found += 1
    assert found > 20


@pytest.mark.parametrize(("name", "bad"), [("capacity", -1), ("capacity", 1.5), ("capacity", "1"), ("capacity", True),
                                           ("node_limit", -1), ("node_limit", 2.0), ("max_size", 1.5),
                                           ("max_size", "1"), ("max_size", [0])])
def test_limits_of_a_plan_are_whole_numbers(name, bad):
    """Also where the planner would not look at them."""
    g = graphs.random_graph(3)
    for planner in ("ggml", "best"):
        with pytest.raises(ParamError, match=f"{name} .*expected"):
            plan_table(g.table, g.nodes, g.leafs, g.sizes, planner=planner, **{name: bad})
