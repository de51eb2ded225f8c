"""Pickles and copies: what of a graph or a tensor is in them."""
import copy
import pickle

import numpy as np
import pytest

import ggjit as gg

CPU = gg.init_backend("CPU:n_threads=1")
RNG = np.random.default_rng()


def leaf(shape, type=None, name="", ctx=None):
    return gg.from_numpy(ctx or gg.Context(), RNG.standard_normal(shape).astype(np.float32), name, type)


def test_a_graph_pickles_without_data():
    ctx = gg.Context()
    w, x = leaf((3, 64), gg.Q8_0, "w", ctx), leaf((2, 64), None, "x", ctx)
    y = gg.set_name(gg.soft_max_ext(gg.mul_mat(w, x)[:, 1:] * 2.0, None, 0.5, 0.0), "y")
    gg.set_input(x)
    graph = gg.Graph(y)
    back = pickle.loads(pickle.dumps(graph))
    assert len(pickle.dumps(graph)) < 4000
    assert [(t.name, t.op, t.type, t.ne, t.nb, t.flags, tuple(t.op_params)) for t in (*back.nodes, *back.leafs)] == \
        [(t.name, t.op, t.type, t.ne, t.nb, t.flags, tuple(t.op_params)) for t in (*graph.nodes, *graph.leafs)]
    mine = {t.name: t for t in back.leafs}
    assert mine["w"].ctx is not ctx and mine["w"].buffer is None
    gg.alloc_ctx_tensors(mine["w"].ctx, CPU)
    for t in (w, x):
        mine[t.name].set_bytes(t.bytes())
    np.testing.assert_array_equal(gg.compute(back.outputs[0]), gg.compute(y))


def test_pickled_order_and_views_of_leaves():
    a = leaf((8, 8), name="a")
    b = gg.set_rows(a, leaf((1, 8)), gg.from_numpy(a.ctx, np.array([3])))
    graph = gg.Graph(gg.exp(a) + gg.sqr(a), b, order="memory")
    back = pickle.loads(pickle.dumps(graph))
    assert [t.op for t in back.nodes] == [t.op for t in graph.nodes]
    assert back.outputs[1].view_src in back.leafs and back.outputs[1].view_src.name == "a"


def test_what_cannot_be_pickled_says_so():
    a = leaf((4,))
    own = gg.Graph(gg.map_custom1(a, lambda dst, a, ith, nth: None))
    for x, error, text in ((a, gg.TypeMismatch, "pickle its Graph"), (a.ctx, gg.TypeMismatch, "pickle a Graph"),
                           (own, gg.NotSupported, "calls a function of yours")):
        with pytest.raises(error, match=text):
            pickle.dumps(x)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "I32", "Q8_0", "Q4_K"])
def test_a_copy_is_a_leaf_of_its_own(type):
    a = gg.tensor(np.arange(2048).reshape(8, 256) % 100, name="a", type=type)
    for t in (a, a[1:7:2], a[3]):
        for again in (copy.copy(t), copy.deepcopy(t)):
            assert (again.type, again.shape) == (t.type, t.shape) and not again.op
            np.testing.assert_array_equal(again.numpy(), t.numpy())
    a.set(0 * a.numpy())
    assert again.numpy().any()
    with pytest.raises(gg.NotAllocated, match="compute it first"):
        copy.copy(gg.cast(a, "F32"))
