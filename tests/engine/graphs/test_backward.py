"""gg.grad: random graphs against float64, results of the device, ggml's names, and what is refused."""
import numpy as np
import pytest
from helpers.slopes import agrees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.tools.suite.compare import nmse
from ggjit.tools.suite.float64 import Float64


def leaf(ctx, *shape, seed=0, type=None, name=""):
    values = np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)
    return gg.from_numpy(ctx, values, name=name, type=type)


def ids(ctx, values):
    return gg.from_numpy(ctx, np.array(values, np.int32))


@pytest.fixture
def ctx():
    return gg.Context()


# ---------------------------------------------------------------- random graphs
SMOOTH = [gg.tanh, gg.sigmoid, gg.silu, gg.gelu, gg.gelu_erf, gg.softplus, gg.sin, gg.neg, gg.elu]
CORNERS = [gg.relu, gg.abs, gg.hardswish]
ROWS = [gg.soft_max, lambda x: gg.norm(x, 1e-5), lambda x: gg.rms_norm(x, 1e-5), lambda x: gg.l2_norm(x, 1e-5)]


class Random:
    """A graph that grows by drawn ops over tensors of a few shapes; every leaf of floats is to be learned."""

    def __init__(self, draw):
        self.draw, self.ctx, self.n = draw, gg.Context(), 0
        self.leaves, self.pool = [], []
        for _ in range(2):
            self.pool.append(self.new(*draw(st.sampled_from([(3, 4), (4, 4), (2, 3, 4)]))))

    def new(self, *shape):
        self.n += 1
        self.leaves.append(leaf(self.ctx, *shape, seed=self.n))
        return self.leaves[-1]

    def pick(self, options):
        return self.draw(st.sampled_from(options))

    def step(self):
        x = self.pick(self.pool)
        kind = self.pick(["smooth", "smooth", "corner", "rows", "pair", "tile", "mul_mat", "sum", "view", "permute",
                          "reshape", "concat", "get_rows", "set_rows", "acc", "pad", "repeat", "cumsum", "scale", "div",
                          "clamp", "glu", "in_place"])
        y = getattr(self, kind)(x)
        if 1 <= np.prod(y.ne) <= 400:
            self.pool.append(gg.tanh(y) if kind in ("pair", "mul_mat", "cumsum", "sum") else y)

    def smooth(self, x):
        return self.pick(SMOOTH)(gg.cont(x))

    def corner(self, x):
        return self.pick(CORNERS)(gg.cont(x))

    def rows(self, x):
        return self.pick(ROWS)(gg.cont(x))

    def pair(self, x):
        same = [y for y in self.pool if y.ne == x.ne]
        return self.pick([gg.add, gg.sub, gg.mul])(x, self.pick(same))

    def tile(self, x):
        shape = [self.pick([1, n]) for n in reversed(x.ne)]
        return self.pick([gg.add, gg.mul])(x, self.new(*shape))

    def div(self, x):
        return gg.div(x, gg.scale_bias(gg.sqr(gg.cont(x)), 1.0, 1.0))

    def mul_mat(self, x):
        return gg.mul_mat(self.new(self.pick([2, 5]), x.ne[0]), x)

    def sum(self, x):
        return gg.repeat(self.pick([gg.sum_rows, gg.mean, gg.sum])(gg.cont(x)), x)

    def view(self, x):
        n = x.shape[0]
        first = self.draw(st.integers(0, n - 1))
        return x[first::self.pick([1, 2])] if self.pick([True, False]) else x[..., ::2]

    def permute(self, x):
        return gg.permute(x, *self.draw(st.permutations(range(4))))

    def reshape(self, x):
        return gg.reshape_2d(gg.cont(x), int(np.prod(x.ne)) // x.ne[1], x.ne[1])

    def concat(self, x):
        return gg.concat(x, x, self.pick([0, 1, 2]))

    def get_rows(self, x):
        flat = gg.reshape_2d(gg.cont(x), x.ne[0], int(np.prod(x.ne[1:])))
        return gg.get_rows(flat, ids(self.ctx, self.draw(st.lists(st.integers(0, flat.ne[1] - 1), min_size=1,
                                                                  max_size=5))))

    def set_rows(self, x):
        flat = gg.reshape_2d(gg.cont(x), x.ne[0], int(np.prod(x.ne[1:])))
        row = gg.view_2d(flat, x.ne[0], 1, flat.nb[1], 0)
        return gg.set_rows(gg.dup(flat), gg.scale(gg.cont(row), 2.0), ids(self.ctx, [flat.ne[1] - 1]))

    def acc(self, x):
        y = gg.cont(x)
        part = self.new(1, max(1, y.ne[0] - 1))
        return self.pick([gg.acc, gg.set])(y, part, *y.nb[1:], 4 * (y.ne[0] - part.ne[0]))

    def pad(self, x):
        return self.pick([gg.pad_ext, gg.pad_ext_circular])(x, 1, 0, 0, 1, 0, 0, 0, 0)

    def repeat(self, x):
        return gg.repeat_4d(x, 2 * x.ne[0], *x.ne[1:])

    def cumsum(self, x):
        return gg.cumsum(x)

    def scale(self, x):
        return gg.scale_bias(gg.cont(x), 0.7, 0.2)

    def clamp(self, x):
        return gg.clamp(gg.dup(x), -0.4, 0.6)

    def glu(self, x):
        y = gg.cont(x)
        return self.pick([gg.swiglu_split, gg.geglu_split, gg.reglu_split])(y, gg.scale(y, 0.5))

    def in_place(self, x):
        return gg.add_inplace(gg.dup(x), gg.cont(x))


@given(st.data(), st.integers(5, 60))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_graphs(data, n_ops):
    graph = Random(data.draw)
    for _ in range(n_ops):
        graph.step()
    loss = gg.sum(gg.sqr(gg.cont(graph.pool[-1])))
    for y in graph.pool[-4:-1]:
        loss = gg.add(loss, gg.sum(gg.tanh(gg.cont(y))))
    below = {t.id for t in Float64(loss).leafs}
    leaves = [t for t in graph.leaves if t.id in below]
    if leaves:
        agrees(loss, leaves, n=1)


# ---------------------------------------------------------------- computed
def test_a_network_on_the_device(ctx):
    """Two layers with what makes gradients meet: a tensor read twice, a bias, a view, a frozen quantised weight."""
    x, w, b = leaf(ctx, 5, 32, name="x"), leaf(ctx, 16, 32, name="w"), leaf(ctx, 16, name="b")
    frozen = leaf(ctx, 8, 32, type=gg.Q8_0)
    h = gg.silu(gg.add(gg.mul_mat(w, x), b))
    y = gg.mul_mat(frozen, gg.concat(h, gg.cont(gg.mul(h, h)), 0))
    loss = gg.sum(gg.sqr(y[1:]))
    leaves = [w, b, x]
    found = gg.grad(loss, leaves)
    assert [d.name for d in found] == ["grad of w", "grad of b", "grad of x"]
    agrees(loss, leaves, found=found)
    got, exact = gg.compute(*found), Float64(*found).run()
    for d, value in zip(found, got, strict=True):       # the product with Q8_0 rounds what it multiplies
        assert nmse(value.reshape(exact[d].shape), exact[d]) < 1e-4
    again = gg.compute(loss, *found)                    # beside the loss, and as often as one likes
    assert all((a == b).all() for a, b in zip(again[1:], got, strict=True))


@pytest.mark.parametrize("type", [gg.Q4_0, gg.Q5_1, gg.Q4_K, gg.IQ4_NL],
                         ids=repr)
def test_gradients_pass_through_quantised_weights(ctx, type):
    k = max(type.block, 64)
    w, x = leaf(ctx, 3, k, type=type), leaf(ctx, 2, k)
    agrees(gg.sum(gg.sqr(gg.mul_mat(w, x))), [x])


def test_a_view_beside_a_transposed_reader(ctx):
    x = leaf(ctx, 3, 4)
    y = gg.tanh(x)
    agrees(gg.add(gg.sum(gg.sqr(gg.cont(y[:, ::2]))), gg.sum(gg.sqr(gg.cont(gg.transpose(y))))), [x])
    agrees(gg.add(gg.sum(gg.sqr(gg.cont(gg.transpose(y)))), gg.sum(gg.sqr(y[1:]))), [x])


def test_views_of_views_with_gaps(ctx):
    """What lies between is no array without gaps: the gradient goes to what it is a view of."""
    x = leaf(ctx, 4, 6)
    y = gg.tanh(x)
    for v in (y.T[1:, ::2], y[:, 1:4][1:], y[::2][..., 1::2], gg.permute(gg.reshape_3d(y, 3, 2, 4), 2, 0, 1, 3)[1:]):
        agrees(gg.sum(gg.sqr(gg.cont(v))), [x])


def test_second_derivatives(ctx):
    x = leaf(ctx, 6)
    first = gg.grad(gg.sum(gg.mul(gg.sqr(x), x)), x)
    second = gg.grad(gg.sum(first), x)
    np.testing.assert_allclose(gg.compute(second), 6 * x.numpy(), rtol=1e-6)


def test_a_leaf_that_no_value_reaches_gets_zeros(ctx):
    x = leaf(ctx, 3)
    assert (gg.compute(gg.grad(gg.sum(gg.floor(x)), x)) == 0).all()


def test_axes_are_those_of_the_tensor(ctx):
    w, x = leaf(ctx, 1, 1, 4), leaf(ctx, 2, 3, 4)
    assert gg.grad(gg.sum(gg.mul(x, w)), w).shape == (1, 1, 4)


# ---------------------------------------------------------------- ggml's names
def test_backward_graph_and_accumulators(ctx):
    x, w = leaf(ctx, 2, 4), gg.set_param(leaf(ctx, 3, 4, name="w"))
    acc = gg.from_numpy(ctx, np.zeros((3, 4), np.float32))
    graph = gg.Graph(gg.set_loss(gg.sum(gg.mul_mat(w, x))))
    n = len(graph.nodes)
    plain, adding = gg.build_backward_expand(ctx, graph), gg.build_backward_expand(ctx, graph, {w: acc})
    assert len(graph.nodes) == n and gg.graph_get_grad(graph, w) is None
    assert gg.graph_get_grad_acc(adding, w) is acc and gg.graph_get_grad_acc(plain, w) is None
    want = np.tile(x.numpy().sum(0), (3, 1))
    assert np.allclose(gg.compute(gg.graph_get_grad(plain, w)), want)
    for times in (1, 2):
        gg.compute(gg.graph_get_grad(adding, w))
        assert np.allclose(acc.numpy(), times * want)
    gg.graph_reset(adding)
    assert (acc.numpy() == 0).all()


def test_backward_graph_needs_parameters_and_a_loss(ctx):
    y = gg.sum(leaf(ctx, 3))
    with pytest.raises(gg.ParamError, match="no parameter; mark leaves"):
        gg.build_backward_expand(ctx, gg.Graph(y))
    w = gg.set_param(leaf(ctx, 3))
    with pytest.raises(gg.ParamError, match="no loss; mark a scalar"):
        gg.build_backward_expand(ctx, gg.Graph(gg.sum(w)))
    with pytest.raises(gg.ShapeError, match="cannot collect the gradient"):
        gg.build_backward_expand(ctx, gg.Graph(gg.set_loss(gg.sum(w))), {w: leaf(ctx, 4)})


def test_accumulators_are_memory_of_their_own(ctx):
    v, w, both = gg.set_param(leaf(ctx, 3, name="v")), gg.set_param(leaf(ctx, 3, name="w")), leaf(ctx, 6)
    graph = gg.Graph(gg.set_loss(gg.sum(gg.mul(v, w))))
    halves = gg.view_1d(both, 3, 0), gg.view_1d(both, 3, 12)
    gg.build_backward_expand(ctx, graph, dict(zip((v, w), halves, strict=True)))
    for accumulators, owner in (({v: halves[0], w: halves[0]}, "v"), ({v: halves[0], w: gg.view_1d(both, 3, 8)}, "v"),
                                ({v: w}, "w"), ({v: v}, "v")):
        with pytest.raises(gg.ParamError, match=f"in use for {owner} .*a tensor of its own"):
            gg.build_backward_expand(ctx, graph, accumulators)
    with pytest.raises(gg.TypeMismatch, match="a value of grad_accs takes a Tensor"):
        gg.build_backward_expand(ctx, graph, {v: np.zeros(3)})


# ---------------------------------------------------------------- refused
def test_what_is_no_loss(ctx):
    x = leaf(ctx, 3)
    with pytest.raises(gg.ShapeError, match="must be one element, got .*; take gg.sum"):
        gg.grad(gg.sqr(x), [x])
    with pytest.raises(gg.TypeMismatch, match="must be F32"):
        gg.grad(gg.cast(gg.sum(x), gg.F16), [x])
    with pytest.raises(gg.TypeMismatch, match="loss is a tensor, got int"):
        gg.grad(3, [x])


def test_what_cannot_be_learned(ctx):
    x, other = leaf(ctx, 2, 32, name="x"), leaf(ctx, 3, name="other")
    q, loss = leaf(ctx, 4, 32, type=gg.Q4_0), gg.sum(gg.sqr(x))
    with pytest.raises(gg.ParamError, match="does not depend on other F32"):
        gg.grad(loss, [x, other])
    with pytest.raises(gg.TypeMismatch, match="not of a float type; a quantised weight stays"):
        gg.grad(gg.sum(gg.mul_mat(q, x)), [q])
    with pytest.raises(gg.ParamError, match=r"is a view of x F32 \[32, 2\]"):
        gg.grad(loss, [x[0]])
    with pytest.raises(gg.ParamError, match="no tensor to differentiate"):
        gg.grad(loss, [])
    with pytest.raises(gg.TypeMismatch, match="list of tensors, got int"):
        gg.grad(loss, [1])


def test_an_op_without_gradient_is_named(ctx):
    a, b = leaf(ctx, 3, 3), gg.set_name(leaf(ctx, 3, 2), "right")
    x = gg.set_name(gg.solve_tri(a, b, True, True, False), "solution")
    with pytest.raises(gg.NotSupported, match=r"solution F32 \[2, 3\] = SOLVE_TRI has no gradient"):
        gg.grad(gg.sum(x), [b])
    labels = gg.soft_max(b)
    with pytest.raises(gg.NotSupported, match="CROSS_ENTROPY_LOSS: there is no gradient of the labels"):
        gg.grad(gg.cross_entropy_loss(b, labels), [b])


def test_overwritten_memory_is_not_read(ctx):
    x = leaf(ctx, 4)
    y = gg.scale(x, 2.0)
    loss = gg.sum(gg.mul(gg.sqr(y), gg.relu_inplace(y)))
    with pytest.raises(gg.NotSupported, match="needs .* which .* = UNARY has overwritten; use the op"):
        gg.grad(loss, x)
    cache = gg.from_numpy(ctx, np.zeros((4, 4), np.float32))
    written = gg.set_rows(cache, gg.reshape_2d(gg.scale(x, 2.0), 4, 1), ids(ctx, [1]))
    past = gg.add(gg.sum(written), gg.sum(gg.sqr(cache)))           # reads what was written behind the result's back
    with pytest.raises(gg.NotSupported, match="its gradient would be lost; read the result of SET_ROWS"):
        gg.grad(past, x)
    agrees(gg.add(gg.sum(gg.sqr(written)), gg.sum(x)), [x])


def test_overlapping_views_are_refused(ctx):
    x = leaf(ctx, 8)
    with pytest.raises(gg.NotSupported, match="its elements overlap.*im2col"):
        gg.grad(gg.sum(gg.sqr(gg.cont(gg.view_2d(x, 4, 3, 8, 0)))), x)


def test_refused_gradients_leave_nothing_behind(ctx):
    x = leaf(ctx, 3, 3)
    loss = gg.sum(gg.sqr(gg.solve_tri(x, x, True, True, False)))
    n = len(ctx.tensors)
    with pytest.raises(gg.NotSupported, match="SOLVE_TRI"):
        gg.grad(loss, x)
    assert len(ctx.tensors) == n
