"""Tensor allocators, the 2023 graph allocator and its wrapper: rows A9.*, A10.*, A11.* of the behaviour list.

Golden traces are worked out by hand from the 2023 sources; alignment 32 unless said otherwise.
"""
import importlib.util
import pathlib
import types

import numpy as np
import pytest

from ggjit.alloc.graph_alloc import IN_PLACE_2023, IN_PLACE_OPS, GraphError, plan_graph
from ggjit.alloc.legacy import Allocr, GraphAllocator2023, maxima
from ggjit.alloc.tensor_alloc import MEASURE_BASE, Bump, TensorAllocator, aligned_offset
from ggjit.alloc.validate import check_graph_plan
from ggjit.ops.errors import IndexRangeError, OutOfMemory, ParamError, ShapeError
from ggjit.ops.record import OP, T_BUFFER

BENCH = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


graphs = load("alloc_graphs")


# ---------------------------------------------------------------- A9
def test_a9_01_aligned_offset():
    assert [aligned_offset(0, n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert aligned_offset(0x1010, 0, 32) == 16 and aligned_offset(0x1010, 5, 32) == 16
    for bad in (0, 3, -32):
        with pytest.raises(ParamError, match="power of two"):
            aligned_offset(0, 0, bad)


def test_a9_02_a9_08_reset_gives_one_block_from_the_aligned_base():
    t = TensorAllocator(1000, 64, base=16)
    assert t.blocks == [(48, 952)] and t.max_size == 0
    t.alloc(1, 100)
    assert t.max_size == 48 + 128
    t.reset()
    assert t.blocks == [(48, 952)] and t.max_size == 176            # not reset
    assert not t.is_own(1)


def test_a9_03_a9_05_a9_06_a9_07_a9_21_constructors_and_ownership():
    freed = []

    class Buft:
        alignment = 64

        def alloc_buffer(self, size):
            return types.SimpleNamespace(size=size, base=128, buft=self, free=lambda: freed.append(size))
    buft = Buft()
    backend = types.SimpleNamespace(default_buffer_type=buft)
    data = np.zeros(4096 + 32, np.uint8)
    t = TensorAllocator(data.nbytes, 32, base=data.ctypes.data, buffer=data)            # caller's memory
    assert (data.ctypes.data + t.alloc(0, 10)) % 32 == 0
    t.free()
    borrowed = TensorAllocator.from_buffer(buft.alloc_buffer(512))
    assert (borrowed.base, borrowed.alignment, borrowed.size, borrowed.is_measure) == (128, 64, 512, False)
    borrowed.free()
    assert not freed
    owned = TensorAllocator.from_backend(backend, 256)
    owned.free()
    owned.free()
    assert freed == [256]
    assert TensorAllocator.measure_from_backend(backend).alignment == 64
    assert TensorAllocator.measure_from_backend(backend).is_measure and freed == [256]


def test_a9_04_a9_20_a9_22_measuring_makes_the_same_decisions():
    rng = np.random.default_rng(3)
    m, real, live = TensorAllocator.measure(32), TensorAllocator(1 << 20, 32), []
    assert m.is_measure and m.base == MEASURE_BASE
    for i in range(300):
        if live and rng.random() < 0.45:
            i = live.pop(int(rng.integers(len(live))))
            m.free_id(i)
            real.free_id(i)
        else:
            n = int(rng.integers(0, 500))
            assert m.alloc(i, n) == real.alloc(i, n)
            live.append(i)
        assert m.blocks[:-1] == real.blocks[:-1]
    assert m.max_size == real.max_size


def test_a9_09_views_and_placed_tensors_are_refused():
    g = graphs.Net()
    a = g.new(OP.NONE, (8,))
    v, w = g.view(a, (4,)), g.weight(4)
    t = TensorAllocator(1000)
    for i in (v, w):
        with pytest.raises(ParamError, match="view or has memory"):
            t.alloc(i, 16, g.table)
    assert t.alloc(a, 32, g.table) == 0
    with pytest.raises(ParamError, match="already"):
        t.alloc(a, 32, g.table)
    with pytest.raises(ShapeError):
        t.alloc(99, -1)


def test_a9_10_sizes_are_padded_and_empty_tensors_share_an_address():
    t = TensorAllocator(1000)
    assert [t.alloc(i, n) for i, n in enumerate((1, 0, 0, 33))] == [0, 32, 32, 32]
    assert t.max_size == 96


def test_a9_11_a9_12_a9_14_a9_15_best_fit_ties_to_the_later_block_and_the_tail_last():
    t = TensorAllocator(4096)
    for i, n in enumerate((64, 32, 96, 32, 64, 32, 96, 32)):
        t.alloc(i, n)
    for i in (0, 2, 4, 6):
        t.free_id(i)
    assert t.blocks == [(0, 64), (96, 96), (224, 64), (320, 96), (448, 3648)]
    assert t.alloc(10, 64) == 224                                   # exact fits: the later of two, not the tail
    assert t.alloc(11, 70) == 320 and t.alloc(12, 70) == 96         # 96 bytes each, later one first; emptied
    assert t.blocks == [(0, 64), (448, 3648)]
    assert t.alloc(13, 32) == 0 and t.blocks[0] == (32, 32)         # low end of the block
    assert t.alloc(14, 40) == 448                                   # nothing else holds it
    assert t.max_size == 512


def test_a9_13_out_of_memory_names_need_and_best_block():
    t = TensorAllocator(256)
    t.alloc(0, 100)
    with pytest.raises(OutOfMemory, match="tensor 7 needs 160 bytes, the largest free block has 128"):
        t.alloc(7, 150)
    assert t.blocks == [(128, 128)] and not t.is_own(7)


def test_a9_16_a9_18_a9_24_only_own_tensors_are_freed_and_only_once():
    t = TensorAllocator(1000)
    t.alloc(0, 10)
    t.free_id(5)                                                    # another buffer's: ignored
    assert t.is_own(0) and not t.is_own(5)
    t.free_id(0)
    with pytest.raises(IndexRangeError, match="already"):
        t.free_id(0)


def test_a9_17_a9_18_merging_both_ways_and_inserting_in_order():
    t = TensorAllocator(1000)
    for i in range(7):
        t.alloc(i, 32)
    t.free_id(1)
    t.free_id(5)
    t.free_id(3)                                                    # inserted between
    assert t.blocks == [(32, 32), (96, 32), (160, 32), (224, 776)]
    t.free_id(2)                                                    # end of one, start of the next
    assert t.blocks == [(32, 96), (160, 32), (224, 776)]
    t.free_id(0)                                                    # start of a block
    t.free_id(6)                                                    # joins 5 and the tail
    assert t.blocks == [(0, 128), (160, 840)]
    t.free_id(4)
    assert t.blocks == [(0, 1000)]


def test_a9_02_no_limit_on_free_blocks():
    t = TensorAllocator(None)
    for i in range(2000):
        t.alloc(i, 32)
    for i in range(0, 2000, 2):
        t.free_id(i)
    assert len(t.blocks) == 1001                                    # ggml aborts at 256


def test_a9_15_a9_19_callbacks_but_not_while_measuring():
    for size, expect in ((1000, [("init", 3, 0, 32), ("free", 3, 0, 32)]), (None, [])):
        seen = []
        t = TensorAllocator(size, init_tensor=lambda *a, s=seen: s.append(("init", *a)),
                            free_tensor=lambda *a, s=seen: s.append(("free", *a)))
        t.alloc(3, 20)
        t.free_id(3)
        assert seen == expect


def test_a9_23_live_tensors_at_every_new_maximum():
    seen = []
    t = TensorAllocator(1000, on_max=lambda top, live: seen.append((top, [i for i, _, _ in live])))
    t.alloc(1, 64)
    t.alloc(2, 32)
    t.free_id(1)
    t.alloc(3, 40)                                                  # into the hole: no new maximum
    t.alloc(4, 40)
    assert seen == [(64, [1]), (96, [1, 2]), (160, [3, 2, 4])]


def test_b3_bump_allocator():
    b = Bump(200, 32, base=16)
    assert [b.alloc(10), b.alloc(0), b.alloc(33)] == [16, 48, 48]
    with pytest.raises(OutOfMemory, match="needs 96 bytes, 88 of 200 are left"):
        b.alloc(70)
    assert b.offs == 112


# ---------------------------------------------------------------- A10
def plan23(g, **kw):
    return plan_graph(g.table, g.nodes, g.leafs, g.sizes, planner="ggml-2023", **kw)


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
    modern = plan_graph(g.table, g.nodes, g.leafs, g.sizes)
    assert modern.node_offs.tolist() == [0, 0, 128] and modern.peak == 256
    best = plan_graph(g.table, g.nodes, g.leafs, g.sizes, planner="best")
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
    assert plan_graph(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0]


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
        plan_graph(g.table, g.nodes, g.leafs, g.sizes, parse_seq=[0, 1, 2, 3])
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
    a, b = TensorAllocator.measure(32), TensorAllocator(1000, 64, base=32)
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
    two = [TensorAllocator.measure(), TensorAllocator.measure()]
    p = GraphAllocator2023().alloc_graph_n(two, g.table, g.nodes, g.leafs, g.sizes, [0, 1])
    assert p.node_buffer.tolist() == [0, 1] and [t.max_size for t in two] == [128, 128]


def test_a10_01_a10_14_inputs_placed_beforehand_are_owned():
    g = graphs.Net()
    x = leaf(g)
    y = g.like(OP.SQR, x)
    z = g.like(OP.MUL_MAT, y, y)
    g.expand(z)
    t = TensorAllocator(1000)
    t.alloc(x, 128, g.table)
    size, p = GraphAllocator2023().alloc_graph(t, g.table, g.nodes, g.leafs, g.sizes)
    assert p.leaf_offs.tolist() == [0] and p.node_offs.tolist() == [0, 128] and size == 256
    assert t.blocks == [(0, 128), (256, 744)] and list(t.live) == [z]
    GraphAllocator2023()                                            # nothing to free: plain objects


def test_a10_14_out_of_memory_leaves_the_allocator_alone():
    g = chain(4)
    t = TensorAllocator(200)
    with pytest.raises(OutOfMemory, match=f"tensor {g.nodes[1]} needs 128 bytes"):
        GraphAllocator2023().alloc_graph(t, g.table, g.nodes, g.leafs, g.sizes)
    assert t.blocks == [(0, 200)] and not t.live and t.max_size == 0


def test_a10_16_outputs_survive_only_as_last_node_in_2023():
    g = chain(3)
    for i in g.nodes:
        g.rows[i][2] = 2                                            # OUTPUT
    assert plan23(g).peak == 256
    assert plan_graph(g.table, g.nodes, g.leafs, g.sizes).peak == 384


def test_a10_17_trace():
    g = chain(3)
    p = plan23(g)
    assert p.events[:, 0].tolist() == [0, 0, 1, 0, 1]               # take, take, give back, take, give back
    assert p.events[:, 3].tolist() == [0, 1, 1, 2, 2]
    assert [top for top, _ in maxima(p)] == [128, 256]


# ---------------------------------------------------------------- A11
def test_a11_01_to_a11_05_the_wrapper_forwards():
    g = chain(4)
    m = Allocr.measure(32)
    need = m.alloc_graph(g.table, g.nodes, g.leafs, g.sizes)
    assert m.is_measure and need == m.max_size == 256
    real = Allocr(need, 32)
    assert real.alloc_graph(g.table, g.nodes, g.leafs, g.sizes) == need and not real.is_measure
    assert real.plan.node_offs.tolist() == m.plan.node_offs.tolist()
    real.reset()
    assert real.alloc(123, 10) == 0 and real.buffer is None
    real.reset()
    real.set_parse_seq([0, 1, -1, 2, 3, -1])
    with pytest.raises(OutOfMemory):
        real.alloc_graph(g.table, g.nodes, g.leafs, g.sizes)
    real.free()
    m.free()


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
            plan_graph(t, nodes, leafs, (np.full(len(nodes), 8), np.full(len(leafs), 8)))
    for sizes in ((np.full(3, -1), [8]), (np.full(3, 1 << 61), [8]), (np.full(2, 8), [8])):
        with pytest.raises(ShapeError):
            plan_graph(t, n, g.leafs, sizes)
    with pytest.raises(ParamError, match="planner"):
        plan_graph(t, n, g.leafs, g.sizes, planner="worst")
    with pytest.raises(ParamError):
        plan_graph(t, n, g.leafs, g.sizes, max_size=0)
    with pytest.raises(IndexRangeError, match="buffer"):
        plan_graph(t, n, g.leafs, g.sizes, node_buffers=[0, 1, 0])
    loop = g.table
    loop[n[0], 30], loop[n[1], 30] = n[1], n[0]                     # views of each other
    with pytest.raises(GraphError, match="view of itself"):
        plan_graph(loop, n, g.leafs, g.sizes)
    loop[n[0], 30] = 10 ** 9
    with pytest.raises(IndexRangeError):
        plan_graph(loop, n, g.leafs, g.sizes)


def test_empty_graph_and_cast():
    g = graphs.Net()
    assert plan_graph(np.zeros((1, 40), np.int64), [], [], ([], [])).peak == 0
    x = leaf(g, ext=True)
    c = g.like(OP.CPY, x)
    g.rows[c][21] = c                                               # ggml_cast: its own destination
    g.expand(g.like(OP.SQR, c))
    assert plan_graph(g.table, g.nodes, g.leafs, g.sizes).peak == 128
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
    assert plan_graph(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0, 128, 0]     # y is free for u
    g.rows[mark][1] = int(OP.VIEW)
    assert plan_graph(g.table, g.nodes, g.leafs, g.sizes).node_offs.tolist() == [0, 0, 128, 256]   # its view holds it


def test_an_input_flagged_op_does_not_take_a_tensor_with_later_users():
    """ggml allocates it while counts are still partial and overwrites x; the validator finds that."""
    g = graphs.Net()
    x = leaf(g)
    y = g.like(OP.SQR, x, inp=True)
    g.expand(g.like(OP.MUL_MAT, x, y))
    p = plan_graph(g.table, g.nodes, g.leafs, g.sizes)
    assert p.leaf_offs.tolist() == [0] and p.node_offs[0] == 128
    check_graph_plan(g.table, g.nodes, g.leafs, g.sizes, p)
