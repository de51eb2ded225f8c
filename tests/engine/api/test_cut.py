"""Graphs in parts: the largest nodes for some rows at a time, where whole ones do not fit into a budget."""
import pickle

import numpy as np
import pytest

import ggjit as gg
from ggjit.api.cut import cut


def values(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Net:
    """A graph, its inputs (leaves that the allocator places) and their arrays."""

    def __init__(self, build, **arrays):
        self.ctx, self.arrays = gg.Context(), arrays
        self.leaves = {name: self.ctx.new_tensor(gg.I32 if a.dtype.kind == "i" else gg.F32, a.shape[::-1], name=name)
                       for name, a in arrays.items()}
        with self.ctx:
            self.graph = gg.Graph(*build(self, **self.leaves))
        self.peak = min(gg.measure(self.graph, order=order).peak for order in ("graph", "memory"))

    def param(self, *shape):
        return gg.set_param(gg.from_numpy(self.ctx, 0.3 * values(*shape)))

    def run(self, graph):
        """(values of the outputs, bytes of the arena)"""
        cpu = gg.init_backend("CPU", n_threads=1)
        allocator = gg.GraphAllocator(cpu)
        allocator.alloc_graph(graph)
        for name, leaf in self.leaves.items():
            leaf.set(self.arrays[name].reshape(leaf.shape))
        plan = cpu.graph_plan_create(graph)
        plan.compute()
        return [plan.numpy(t).copy() for t in graph.outputs], sum(map(sum, allocator.last.chunk_sizes))

    def within(self, share, **options):
        """The same graph in a share of its peak; its results were compared with those of the whole one."""
        small = gg.rematerialize(self.graph, int(share * self.peak), **options)
        assert small.peak == gg.measure(small).peak <= share * self.peak
        (got, arena), (want, _) = self.run(small), self.run(self.graph)
        assert arena == small.peak
        for a, b in zip(want, got, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max() and (not small.same_bits or (a == b).all())
        return small


def classes(n, rows):
    return np.eye(n, dtype=np.float32)[np.arange(rows) % n]


def trained(loss, *params):
    return loss, *gg.grad(loss, list(params))


def mlp(net, x, labels):
    w, b, v = net.param(48, 16), net.param(48), net.param(10, 48)
    return trained(gg.cross_entropy_loss(gg.mul_mat(v, gg.relu(gg.add(gg.mul_mat(w, x), b))), labels), w, b, v)


def pictures(net, x, labels):
    k, c, w = net.param(8, 1, 3, 3), net.param(1, 8, 1), net.param(10, 72)
    n = x.ne[3]
    h = gg.reshape_3d(gg.conv_2d_direct(k, x, 1, 1, 1, 1, 1, 1), 36, 8, n)
    h = gg.group_norm(gg.reshape_4d(gg.relu(gg.add(h, c)), 6, 6, 8, n), 3, 1e-5)       # of 3, 3 and 2 channels
    h = gg.pool_2d(h, 0, 2, 2, 2, 2, 0, 0)
    return trained(gg.cross_entropy_loss(gg.mul_mat(w, gg.reshape_2d(h, 72, n)), labels), k, c, w)


def attention(net, ids, labels):
    """Of 12 tokens in each text, behind a table of 30 words."""
    table, w, out = net.param(30, 16), [net.param(16, 16) for _ in range(4)], net.param(30, 16)
    t, n = ids.ne[0], ids.ne[1]
    mask = gg.from_numpy(net.ctx, np.where(np.tri(t), 0, -np.inf).astype(np.float32))
    place = gg.from_numpy(net.ctx, np.tile(np.arange(t, dtype=np.int32), n))
    x = gg.get_rows(table, gg.reshape_1d(ids, t * n))
    h = gg.rms_norm(x, 1e-5)
    q, k, v = (gg.reshape_3d(gg.mul_mat(m, h), 8, 2, t * n) for m in w[:3])
    q, k = (gg.rope_ext(a, place, None, 8, 0, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0) for a in (q, k))
    q, k, v = (gg.permute(gg.reshape_4d(a, 8, 2, t, n), 0, 2, 1, 3) for a in (q, k, v))
    y = gg.mul_mat(gg.cont(gg.transpose(v)), gg.soft_max_ext(gg.mul_mat(k, q), mask, 0.35, 0.0))
    y = gg.reshape_2d(gg.cont(gg.permute(y, 0, 2, 1, 3)), 16, t * n)
    x = gg.add(x, gg.mul_mat(w[3], y))
    return trained(gg.cross_entropy_loss(gg.mul_mat(out, gg.rms_norm(x, 1e-5)), labels), table, *w, out)


NETS = {"mlp": (mlp, dict(x=values(768, 16), labels=classes(10, 768)), 0.35),
        "pictures": (pictures, dict(x=values(64, 1, 6, 6), labels=classes(10, 64)), 0.4),
        "attention": (attention, dict(ids=np.arange(384, dtype=np.int32).reshape(32, 12) * 7 % 30,
                                      labels=classes(30, 384)), 0.25)}


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_training_steps_are_cut_with_the_same_bits(name):
    """Losses, gradients of weights, of biases and of tables: sums that go on from chunk to chunk."""
    build, arrays, share = NETS[name]
    net = Net(build, **arrays)
    with pytest.raises(gg.BudgetError):
        gg.rematerialize(net.graph, int(share * net.peak), cut=False)
    small = net.within(share)
    assert small.n_chunks > 1 and small.same_bits and small.bound <= small.extra < 0.3
    again = pickle.loads(pickle.dumps(small))
    assert [t.op for t in again.nodes] == [t.op for t in small.nodes]


def test_rows_are_cut_where_whole_nodes_fit_but_are_dear():
    net = Net(mlp, **NETS["mlp"][1])
    dear = gg.rematerialize(net.graph, int(0.8 * net.peak), cut=False)
    small = net.within(0.8)
    assert dear.n_chunks == 1 and dear.extra > 0.2 and small.n_chunks > 1 and small.same_bits and small.extra < 0.05


def test_sums_that_are_not_in_order_are_rounded_where_that_is_allowed():
    build, arrays, share = NETS["pictures"]
    net = Net(build, **arrays)
    with pytest.raises(gg.BudgetError, match="cut='rounded' meets it") as e:
        gg.rematerialize(net.graph, int(share * net.peak))
    small = net.within(share, cut="rounded")
    assert e.value.minimum > small.peak
    assert small.n_chunks > 1 and not small.same_bits and "chunks, sums rounded otherwise" in repr(small)
    assert small.bound <= small.extra < 0.3
    with pytest.raises(gg.ParamError, match="is computed for some rows at a time; name it among the outputs"):
        small.of(max(net.graph.nodes, key=lambda t: t.nbytes))


def test_without_sums_over_rows_the_bits_are_the_same():
    """Inference: rows that do not meet, in kernels that are those of all rows; what is read as a whole is joined."""
    def feed_forward(net, x):
        w, v = net.param(512, 16), net.param(16, 512)
        y = gg.mul_mat(v, gg.silu(gg.mul_mat(w, gg.norm(x, 1e-5))))
        return gg.mul_mat(*(gg.cont(gg.transpose(a)) for a in (y, x))), gg.sum_rows(y)      # rows meet in the first
    net = Net(feed_forward, x=values(768, 16))
    small = net.within(0.6)
    assert small.n_chunks > 1 and small.same_bits


def test_the_least_budget_with_cuts_is_told_and_works():
    net = Net(mlp, **NETS["mlp"][1])
    with pytest.raises(gg.BudgetError, match="least peak found") as e:
        gg.rematerialize(net.graph, 500, cut="rounded")
    assert gg.rematerialize(net.graph, e.value.minimum, cut="rounded").peak <= e.value.minimum
    with pytest.raises(gg.ParamError, match="cut is 'maybe', expected True, 'rounded' or False"):
        gg.rematerialize(net.graph, 500, cut="maybe")


def test_what_is_written_in_place_is_neither_cut_nor_moved():
    """Sums of gradients as training keeps them: read before, written behind the region."""
    def summed(net, x, labels):
        loss, *grads = mlp(net, x, labels)
        net.sums = [gg.from_numpy(net.ctx, np.ones(d.shape, np.float32)) for d in grads]
        old = gg.sum(net.sums[0])
        return loss, old, *(gg.add_inplace(s, d) for s, d in zip(net.sums, grads, strict=True))
    net = Net(summed, **NETS["mlp"][1])
    small = gg.rematerialize(net.graph, int(0.35 * net.peak), cut="rounded")
    assert small.n_chunks > 1
    found = []
    for graph in (net.graph, small):
        for s in net.sums:
            s.set(np.ones(s.shape, np.float32))
        found.append([*net.run(graph)[0], *(s.numpy() for s in net.sums)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert found[0][1] == found[1][1] == net.sums[0].numpy().size


def test_marked_outputs_and_outputs_of_the_graph_stay_whole():
    def kept(net, x, labels):
        w, v = net.param(48, 16), net.param(10, 48)
        net.scores = gg.set_output(gg.scale(gg.mul_mat(v, gg.relu(gg.mul_mat(w, x))), 2.0))
        logits = gg.scale(net.scores, 0.5)
        return logits, *trained(gg.cross_entropy_loss(logits, labels), w, v)
    net = Net(kept, **NETS["mlp"][1])
    small = net.within(0.6, cut="rounded")
    assert small.n_chunks > 1 and small.of(net.scores).ne == net.scores.ne


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_sum_that_is_part_of_another_is_cut(goes_on):
    """As a second cut meets it: an F64 sum of the rows before, and one that starts from it."""
    x = values(1000)

    def sums(net, x):
        half = gg.sum(gg.sqr(x), part=True)
        return (gg.sum(gg.abs(x), half),) if goes_on else (half,)
    net = Net(sums, x=x)
    start = max((t for t in net.graph.nodes if t.ne[0] == 1000), key=lambda t: t.id)
    found = cut(net.graph, start, 4, {}, {}, rounded=True)
    assert found.n_chunks > 1 and not found.same_bits
    want = np.square(x, dtype=np.float64).sum() + goes_on * np.abs(x).astype(np.float64).sum()
    np.testing.assert_allclose(net.run(found.graph)[0][0], want, rtol=1e-6)


def test_an_empty_node_is_no_obstacle():
    """Gradients through a product without columns: nothing is computed there, so no kernel is asked for."""
    def empty(net, x):
        w = net.param(8, 16)
        return gg.sum(gg.mul_mat(w, gg.view_2d(x, 16, 0, x.nb[1], 0))), gg.sum(gg.sqr(x))
    net = Net(empty, x=values(64, 16))
    small = gg.rematerialize(net.graph, net.peak)
    assert [a.tolist() for a in net.run(small)[0]] == [a.tolist() for a in net.run(net.graph)[0]]
    with pytest.raises(gg.BudgetError, match="least peak found"):
        gg.rematerialize(net.graph, 4)
