"""The graph allocator of 2023: rows A10.* of the behaviour list; bad graphs.

Golden traces are worked out by hand from the 2023 sources; alignment 32 unless said otherwise.
"""

import numpy as np
import pytest
from helpers.alloc_2023 import Graph
from helpers.requirements import benchmark

from ggjit.alloc import IN_PLACE_2023, IN_PLACE_OPS
from ggjit.alloc.ggml.legacy.graph_alloc_2023 import GraphAllocator2023, maxima
from ggjit.alloc.ggml.legacy.tensor_alloc import BestFit
from ggjit.alloc.ggml.problem import GraphError
from ggjit.alloc.plan_request import PlanRequest
from ggjit.alloc.validate import check_graph_plan
from ggjit.ops.core.errors import IndexRangeError, OutOfMemory, ParamError, ShapeError
from ggjit.ops.core.record import OP, T_BUFFER

graphs = benchmark("alloc_graphs")
plan_table = graphs.plan_table


# ---------------------------------------------------------------- A10
def plan23(g, **kw):
    return plan_table(g.table, g.nodes, g.leafs, g.sizes, planner="ggml-2023", **kw)


def leaf(g, n=32, ext=False):
    return g.new(OP.NONE, (n,), ext=ext)


def chain(n, length=32):
    """mul_mat after mul_mat: nothing in place, every node feeds the next twice."""
    g = graphs.Net()
    x = leaf(g, length, ext=True)
    for _ in range(n):
        x = g.like(OP.MUL_MAT, x, x)
    return g.expand(x)


def test_a10_02_a10_07_a10_08_a10_12_in_place_and_freeing():
    g = graphs.Net()
    a = leaf(g)
    b = g.like(OP.MUL_MAT, a, a)
    c = g.like(OP.ADD, b, a)        # b dies here: in place
    d = g.like(OP.ADD, c, c)        # two uses of c: not in place; a's bytes are free by now
    p = plan23(g.expand(d))
    assert p.leaf_offs.tolist() == [0] and p.node_offs.tolist() == [128, 128, 0]
    assert p.node_root.tolist() == [b, b, d] and p.peak == 256
    assert [p.why_not_in_place(i)[0] for i in range(3)] == [
        "this op cannot work in place", "computed in place", "the source is still needed by another node"]


def test_a10_04_in_place_sets():
    assert IN_PLACE_2023.sum() == 15 and IN_PLACE_OPS.sum() == 21
    assert not (IN_PLACE_2023 & ~IN_PLACE_OPS).any()
    for op in (OP.NORM, OP.CONT, OP.CPY, OP.RESHAPE):
        assert not IN_PLACE_OPS[op]


def test_a10_06_a10_09_in_place_through_a_whole_view_only_in_2023():
    g = graphs.Net()
    x = leaf(g, ext=True)
    y = g.like(OP.MUL_MAT, x, x)
    z = g.like(OP.SQR, g.reshape(y, 32))
    g.expand(z)
    assert plan23(g).node_offs.tolist() == [0, 0, 0] and plan23(g).peak == 128
    modern = plan_table(g.table, g.nodes, g.leafs, g.sizes)
    assert modern.node_offs.tolist() == [0, 0, 128] and modern.peak == 256
    best = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner="best")
    assert (best.peak, best.rule, best.ggml_peak) == (128, "views", 256)
    assert "view" in modern.why_not_in_place(2)[0] and modern.why_not_in_place(2)[1] == g.nodes[1]


def test_a10_09_not_through_a_view_with_an_offset_or_a_second_view():
    for offs, twice in ((64, False), (0, True)):
        g = graphs.Net()
        x = leaf(g, 64, ext=True)
        y = g.like(OP.MUL_MAT, x, x)
        v = g.view(y, (16,), offs=offs)
        z = g.like(OP.SQR, v)
        if twice:
            z = g.like(OP.ADD, z, g.view(y, (16,)))
        p = plan23(g.expand(z))
        assert p.node_offs[g.nodes.index(v)] == offs
        assert p.node_offs[g.nodes.index(z)] == 256 and p.peak == 320


def test_a10_08_the_scan_stops_at_the_first_absent_source():
    g = graphs.Net()
    x = leaf(g, ext=True)
    y = g.like(OP.MUL_MAT, x, x)
    z = g.like(OP.ADD, x, y)
    g.rows[z][20:23] = x, -1, y                                     # ADD(x, NULL, y)
    g.rows[z][23:] = np.where(np.arange(23, 40) < 30, -1, g.rows[z][23:])
    g.nodes, g.leafs = [y, z], [x]
    assert plan23(g).node_offs.tolist() == [0, 128]                 # y is never seen: neither reused nor freed
    assert plan_table(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0]


def test_a10_10_external_parents_are_never_reused():
    g = graphs.Net()
    w = leaf(g, ext=True)
    p = plan23(g.expand(g.like(OP.SQR, w)))
    assert p.leaf_buffer.tolist() == [-1] and p.node_offs.tolist() == [0]
    assert "memory of its own" in p.why_not_in_place(0)[0]


def test_a10_11_a10_18_views_of_leafs_count_only_as_nodes():
    g = graphs.Net()
    a = leaf(g, 64)
    v = g.view(a, (32,))
    y = g.like(OP.MUL_MAT, v, v)
    z = g.like(OP.MUL_MAT, y, y)
    p = plan23(g.expand(z))
    assert p.node_offs.tolist() == [0, 256, 0]                      # a is free once its view is dead


def test_a10_03_a10_13_barriers_hold_memory_back():
    g = chain(4)
    assert plan23(g).node_offs.tolist() == [0, 128, 0, 128]
    p = plan23(g, parse_seq=[0, 1, -1, 2, 3, -1])
    assert p.node_offs.tolist() == [0, 128, 0, 256] and p.peak == 384
    assert plan23(g, parse_seq=[0, 1, 2, 3]).peak == 512            # after the last barrier nothing is freed
    assert plan23(g, parse_seq=[]).peak == 256                      # off
    with pytest.raises(ParamError, match="ggml-2023"):
        plan_table(g.table, g.nodes, g.leafs, g.sizes, parse_seq=[0, 1, 2, 3])
    for bad in ([0, 1, 2, 9], [0, 0, 1]):
        with pytest.raises(GraphError, match="parse_seq"):
            plan23(g, parse_seq=bad)


def test_a10_13_order_of_the_sequence_is_the_order_of_allocation():
    g = graphs.Net()
    x = leaf(g, ext=True)
    a, b = (g.like(OP.MUL_MAT, x, x) for _ in range(2))
    g.expand(g.like(OP.MUL_MAT, a, b))
    assert plan23(g).node_offs.tolist() == [0, 128, 256]
    assert plan23(g, parse_seq=[1, 0, -1, 2, -1]).node_offs.tolist() == [128, 0, 256]


def test_a10_05_a10_15_an_allocator_per_node():
    g = chain(4)
    a, b = BestFit(None, 32), BestFit(1000, 64, base=32)
    p = GraphAllocator2023().alloc_graph_n([a, b], g.table, g.nodes, g.leafs, g.sizes, node_tallocs=[0, 1, 0, 1],
                                           leaf_tallocs=[0])
    assert p.node_buffer.tolist() == [0, 1, 0, 1] and p.node_offs.tolist() == [0, 32, 0, 32]
    assert (a.max_size, b.max_size) == (128, 160)                   # two allocators, one live tensor each
    assert b.is_own(g.nodes[3]) and not b.is_own(g.nodes[0])


def test_a10_08_no_reuse_across_allocators():
    g = graphs.Net()
    x = leaf(g, ext=True)
    y = g.like(OP.MUL_MAT, x, x)
    g.expand(g.like(OP.SQR, y))
    two = [BestFit(None, ), BestFit(None, )]
    p = GraphAllocator2023().alloc_graph_n(two, g.table, g.nodes, g.leafs, g.sizes, [0, 1])
    assert p.node_buffer.tolist() == [0, 1] and [t.max_size for t in two] == [128, 128]


def test_a10_01_a10_14_inputs_placed_beforehand_are_owned():
    g = graphs.Net()
    x = leaf(g)
    y = g.like(OP.SQR, x)
    z = g.like(OP.MUL_MAT, y, y)
    g.expand(z)
    t = BestFit(1000)
    t.alloc(x, 128, g.table)
    size, p = GraphAllocator2023().alloc_graph(t, g.table, g.nodes, g.leafs, g.sizes)
    assert p.leaf_offs.tolist() == [0] and p.node_offs.tolist() == [0, 128] and size == 256
    assert t.blocks == [(0, 128), (256, 744)] and list(t.live) == [z]
    GraphAllocator2023()                                            # nothing to free: plain objects


def test_a10_14_out_of_memory_leaves_the_allocator_alone():
    g = chain(4)
    t = BestFit(200)
    with pytest.raises(OutOfMemory, match=f"tensor {g.nodes[1]} needs 128 bytes"):
        GraphAllocator2023().alloc_graph(t, g.table, g.nodes, g.leafs, g.sizes)
    assert t.blocks == [(0, 200)] and not t.live and t.max_size == 0


def test_a10_16_outputs_survive_only_as_last_node_in_2023():
    g = chain(3)
    for i in g.nodes:
        g.rows[i][2] = 2                                            # OUTPUT
    assert plan23(g).peak == 256
    assert plan_table(g.table, g.nodes, g.leafs, g.sizes).peak == 384


def test_a10_17_trace():
    g = chain(3)
    p = plan23(g)
    assert p.events[:, 0].tolist() == [0, 0, 1, 0, 1]               # take, take, give back, take, give back
    assert p.events[:, 3].tolist() == [0, 1, 1, 2, 2]
    assert [top for top, _ in maxima(p)] == [128, 256]


def test_a10_14_measuring_makes_the_same_plan():
    g = chain(4)
    measure, graphs = BestFit(None, 32), GraphAllocator2023()
    need, planned = graphs.alloc_graph(measure, g.table, g.nodes, g.leafs, g.sizes)
    assert measure.is_measure and need == measure.max_size == 256
    real = BestFit(need, 32)
    size, plan = graphs.alloc_graph(real, g.table, g.nodes, g.leafs, g.sizes)
    assert size == need and not real.is_measure and plan.node_offs.tolist() == planned.node_offs.tolist()
    real.reset()
    assert real.alloc(123, 10) == 0
    real.reset()
    graphs.set_parse_seq([0, 1, -1, 2, 3, -1])
    with pytest.raises(OutOfMemory, match="not enough space in the buffer: tensor 4 needs 128 bytes"):
        graphs.alloc_graph(real, g.table, g.nodes, g.leafs, g.sizes)


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_are_placed_by_the_rules(seed):
    """Backends may ask for more bytes than a tensor has, and empty tensors take none: what works in place of a larger
    tensor gives back its own bytes when it dies, and the tail is lost."""
    rng = np.random.default_rng(seed)
    g = graphs.random_graph(seed)
    sizes = [n * rng.choice([0, 1, 1, 1, 2, 3], len(n)) if seed % 2 else n for n in g.sizes]
    padded = {i: -(-n // 32) * 32 for ids, some in zip((g.nodes, g.leafs), sizes, strict=True)
              for i, n in zip(ids, some.tolist(), strict=True)}
    want, peak = Graph(g.table, padded).place(g.nodes)
    p = plan_table(g.table, g.nodes, g.leafs, sizes, planner="ggml-2023")
    assert p.peak == peak
    for ids, offs in ((g.nodes, p.node_offs), (g.leafs, p.leaf_offs)):
        got = {i: at for i, at in zip(ids, offs.tolist(), strict=True) if isinstance(want[i], int)}
        assert got == {i: want[i] for i in got}


# ---------------------------------------------------------------- bad graphs
def test_bad_graphs_are_refused_with_ids():
    g = chain(3)
    t, n = g.table, g.nodes
    for nodes, leafs, error, text in (
            ([n[0], n[0]], g.leafs, GraphError, "twice"),
            ([n[1], n[0], n[2]], g.leafs, GraphError, "computed after it"),
            (n[1:], g.leafs, GraphError, "neither in the graph nor placed"),
            ([99], [], IndexRangeError, "99"), ([-1], [], IndexRangeError, "-1")):
        with pytest.raises(error, match=text):
            plan_table(t, nodes, leafs, (np.full(len(nodes), 8), np.full(len(leafs), 8)))
    for sizes, text in (((np.full(3, -1), [8]), "cannot be negative"),
                        ((np.full(3, 1 << 61), [8]), "overflow the 62-bit address space"),
                        ((np.full(2, 8), [8]), "expected 3 sizes")):
        with pytest.raises(ShapeError, match=text):
            plan_table(t, n, g.leafs, sizes)
    with pytest.raises(ParamError, match="planner"):
        plan_table(t, n, g.leafs, g.sizes, planner="worst")
    with pytest.raises(ParamError, match="max_size 0: expected positive bytes"):
        plan_table(t, n, g.leafs, g.sizes, max_size=0)
    with pytest.raises(IndexRangeError, match="buffer"):
        plan_table(t, n, g.leafs, g.sizes, node_buffers=[0, 1, 0])
    loop = g.table
    loop[n[0], 30], loop[n[1], 30] = n[1], n[0]                     # views of each other
    with pytest.raises(GraphError, match="view of itself"):
        plan_table(loop, n, g.leafs, g.sizes)
    loop[n[0], 30] = 10 ** 9
    with pytest.raises(IndexRangeError, match="the table has rows 0..3"):
        plan_table(loop, n, g.leafs, g.sizes)


def test_empty_graph_and_cast():
    g = graphs.Net()
    assert plan_table(np.zeros((1, 40), np.int64), [], [], ([], [])).peak == 0
    x = leaf(g, ext=True)
    c = g.like(OP.CPY, x)
    g.rows[c][21] = c                                               # ggml_cast: its own destination
    g.expand(g.like(OP.SQR, c))
    assert plan_table(g.table, g.nodes, g.leafs, g.sizes).peak == 128
    assert g.rows[x][T_BUFFER] == 0


def test_none_op_views_in_nodes_do_not_count():
    """The scheduler's dependency markers: op NONE, a view, sources, among the nodes."""
    g = graphs.Net()
    x = leaf(g, ext=True)
    y = g.like(OP.MUL_MAT, x, x)
    mark = g.new(OP.NONE, (32,), (y,), view=y)
    z = g.like(OP.MUL_MAT, y, y)
    u = g.like(OP.MUL_MAT, z, z)
    g.nodes, g.leafs = [y, mark, z, u], [x]
    assert plan_table(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0, 128, 0]     # y is free for u
    g.rows[mark][1] = int(OP.VIEW)
    assert plan_table(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0, 128, 256]   # its view holds it


def test_an_input_flagged_op_does_not_take_a_tensor_with_later_users():
    """ggml allocates it while counts are still partial and overwrites x; the validator finds that."""
    g = graphs.Net()
    x = leaf(g)
    y = g.like(OP.SQR, x, inp=True)
    g.expand(g.like(OP.MUL_MAT, x, y))
    p = plan_table(g.table, g.nodes, g.leafs, g.sizes)
    assert p.leaf_offs.tolist() == [0] and p.node_offs[0] == 128
    check_graph_plan(PlanRequest(g.table, g.nodes, g.leafs, g.sizes), p)
