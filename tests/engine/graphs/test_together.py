"""Graph(order="together"): products of one column that read the same one are neighbours; nothing else moves."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.ops.core.record import OP


class Heads:
    """x -> h -> rope(Wq h), rope(Wk h + bias), Wv h, and what reads all three."""

    def __init__(self, n_tokens=1):
        self.ctx, rng = gg.Context(), np.random.default_rng()

        def leaf(*shape):
            return gg.from_numpy(self.ctx, rng.standard_normal(shape).astype(np.float32))
        self.pos = gg.from_numpy(self.ctx, np.arange(n_tokens, dtype=np.int32))
        self.h = gg.rms_norm(leaf(n_tokens, 32), 1e-5)
        self.wq, self.wk, self.wv = leaf(32, 32), leaf(32, 32), leaf(32, 32)
        self.q = self.rotated(gg.mul_mat(self.wq, self.h))
        self.k = self.rotated(gg.add(gg.mul_mat(self.wk, self.h), leaf(32)))
        self.v = gg.mul_mat(self.wv, self.h)
        self.y = gg.add(gg.add(self.q, self.k), gg.reshape(self.v, self.q))

    def rotated(self, x):
        return gg.rope(gg.reshape_3d(x, 8, 4, self.pos.ne[0]), self.pos, 8, 0)


def ops(graph):
    return [t.op for t in graph.nodes if t.op != OP.RESHAPE]


def test_products_of_one_column_are_neighbours_and_results_stay():
    net = Heads()
    given, ordered = gg.Graph(net.y), gg.Graph(net.y, order="together")
    assert ops(given) == [OP.RMS_NORM, OP.MUL_MAT, OP.ROPE, OP.MUL_MAT, OP.ADD, OP.ROPE, OP.ADD, OP.MUL_MAT, OP.ADD]
    assert ops(ordered) == [OP.RMS_NORM, OP.MUL_MAT, OP.MUL_MAT, OP.ADD, OP.MUL_MAT, OP.ROPE, OP.ROPE, OP.ADD, OP.ADD]
    assert sorted(given.node_ids) == sorted(ordered.node_ids)
    cpu, results = gg.init_backend("CPU", n_threads=2), []
    for graph in (given, ordered):
        gg.GraphAllocator(cpu).alloc_graph(graph)
        cpu.graph_compute(graph)
        results.append(net.y.numpy().tobytes())
    assert results[0] == results[1]


def test_products_of_several_columns_stay_where_they_are():
    net = Heads(3)
    assert [t.id for t in gg.Graph(net.y, order="together").nodes] == [t.id for t in gg.Graph(net.y).nodes]


@pytest.mark.parametrize("what", ("column", "weights"))
def test_a_product_does_not_pass_a_node_that_writes_what_it_reads(what):
    net = Heads()
    changed = gg.scale_inplace({"column": net.h, "weights": net.wv}[what], 2.0)
    graph = gg.Graph(net.q, changed, net.v, order="together")
    at = {t.id: i for i, t in enumerate(graph.nodes)}
    assert at[net.q.id] < at[changed.id] < at[net.v.id]


def test_a_sum_that_was_placed_by_hand_stays_where_it_is():
    """It lies over a leaf that is read before it."""
    net, raw = Heads(), gg.HostBuffer(gg.init_backend("CPU").device.buffer_type(), 128)
    gg.tensor_alloc(raw, leaf := net.ctx.new_tensor(gg.F32, (32,)), 0)
    bias = gg.from_numpy(net.ctx, np.zeros(32, np.float32))
    first, last = gg.mul(net.v, leaf), gg.add(gg.mul_mat(net.wq, net.h), bias)
    gg.tensor_alloc(raw, last, 0)
    graph = gg.Graph(first, last, order="together")
    at = {t.id: i for i, t in enumerate(graph.nodes)}
    assert at[first.id] < at[last.id]
