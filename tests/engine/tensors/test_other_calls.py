"""Calls as NumPy, PyTorch and ggml's C code have them: they do what was meant, or say what to write, which works."""
import numpy as np
import pytest
from numba import njit

import ggjit as gg

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def t():
    return gg.tensor(X)


@pytest.fixture
def w():
    return gg.from_numpy(gg.Context(), np.random.default_rng(0).random((8, 64), np.float32), "w", gg.Q8_0)


def values(y):
    return gg.compute(y)


def test_a_number_of_a_tensor(t):
    assert float(gg.tensor([2.5])) == 2.5 and int(gg.tensor([2])) == 2
    with pytest.raises(gg.NotAllocated, match=r"float\(gg.compute\(t\).item\(\)\)"):
        float(gg.sum(t))
    assert float(gg.compute(gg.sum(t)).item()) == 15
    y = gg.sum(t)
    gg.compute(y)
    assert float(y) == 15
    with pytest.raises(gg.ShapeError, match=r"gg.compute\(t\)"):
        float(t)


def test_writing_by_index(t):
    t[0] = 5
    t[1, 1:] = [7, 8]
    np.testing.assert_array_equal(t.numpy(), [[5, 5, 5], [3, 7, 8]])
    with pytest.raises(gg.TypeMismatch, match="is a result"):
        gg.neg(t)[0] = 5
    y = gg.tensor(X + 1)
    t[0] = y[0].numpy()
    np.testing.assert_array_equal(t.numpy()[0], X[0] + 1)


def test_writing_into_blocks(w):
    with pytest.raises(gg.TypeMismatch, match=r"t\.set\(values\)"):
        w[0] = 1
    w.set(np.ones((8, 64), np.float32))
    assert abs(w.numpy() - 1).max() < 0.01


def test_floor_division(t):
    np.testing.assert_array_equal(values(t // 2), X // 2)
    np.testing.assert_array_equal(values(7 // (t + 1)), 7 // (X + 1))
    with pytest.raises(gg.TypeMismatch, match=r"t - t // n \* n"):
        t % 2
    np.testing.assert_array_equal(values(t - t // 2 * 2), X % 2)


def test_contexts_and_graphs(t):
    for call in (lambda: gg.Context(10), lambda: gg.Context(mem_size=10)):
        with pytest.raises(gg.TypeMismatch, match=r"write gg.Context\(\)"):
            call()
    graph = gg.Graph(gg.sum(t))
    with pytest.raises(AttributeError, match=r"gg.compute\(graph\)"):
        graph.compute()
    assert gg.compute(graph) == 15


def test_concat(t):
    np.testing.assert_array_equal(values(gg.concat([t, t], axis=0)), np.concatenate([X, X], axis=0))
    np.testing.assert_array_equal(values(gg.concat(t, t, axis=-1)), np.concatenate([X, X], axis=-1))
    with pytest.raises(gg.TypeMismatch, match=r"gg.concat\(a, b, axis=0\)"):
        gg.concat([t, t], 0)
    with pytest.raises(gg.TypeMismatch, match=r"gg.concat\(gg.concat\(a, b, dim\), c, dim\)"):
        gg.concat([t, t, t], 0)
    assert values(gg.concat(gg.concat(t, t, 1), t, 1)).shape == (6, 3)


def test_repeat_permute_arange(t):
    with pytest.raises(gg.TypeMismatch, match=r"gg.repeat_4d\(t, 2 \* t.ne\[0\], \*t.ne\[1:\]\)"):
        gg.repeat(t, 2)
    np.testing.assert_array_equal(values(gg.repeat_4d(t, 2 * t.ne[0], *t.ne[1:]))[0, 0], np.tile(X, 2))
    cube = gg.tensor(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    for call in (lambda: gg.permute(cube, 2, 0, 1), lambda: cube.permute(2, 0, 1)):
        with pytest.raises((gg.TypeMismatch, AttributeError), match="transpose"):
            call()
    np.testing.assert_array_equal(values(gg.cont(cube.transpose(2, 0, 1))), cube.numpy().transpose(2, 0, 1))
    with pytest.raises(gg.TypeMismatch, match=r"gg.tensor\(np.arange\(0, 5, 1, dtype=np.float32\)\)"):
        gg.arange(0, 5, 1)
    np.testing.assert_array_equal(values(gg.arange(gg.Context(), 0, 5, 1)), np.arange(0, 5, 1))


def test_axis_and_dim(t):
    np.testing.assert_array_equal(values(gg.soft_max(t, axis=-1)), values(gg.soft_max(t)))
    np.testing.assert_array_equal(values(gg.soft_max(t, dim=1)), values(gg.soft_max(t)))
    assert values(gg.sum(t, axis=None)) == 15
    with pytest.raises(gg.TypeMismatch, match=r"gg.sum_rows\(gg.cont\(t.T\)\)"):
        gg.sum(t, axis=0)
    np.testing.assert_array_equal(values(gg.sum_rows(gg.cont(t.T))).reshape(-1), X.sum(0))
    with pytest.raises(gg.TypeMismatch, match=r"gg.soft_max\(gg.cont\(t.T\)\).T"):
        gg.soft_max(t, axis=0)
    e = np.exp(X - X.max(0))
    np.testing.assert_allclose(values(gg.cont(gg.soft_max(gg.cont(t.T)).T)), e / e.sum(0), rtol=1e-6)
    with pytest.raises(gg.ParamError, match="from -2 to 1"):
        gg.soft_max(t, axis=2)


def test_strides_of_convolutions():
    rng = np.random.default_rng(1)
    x, k = (gg.tensor(rng.random(s, np.float32)) for s in ((1, 1, 8, 9), (1, 1, 3, 3)))
    same = gg.conv_2d(k, x, stride=2, padding=(1, 0), dilation=1)
    np.testing.assert_array_equal(values(same), values(gg.conv_2d(k, x, 2, 2, 0, 1, 1, 1)))
    with pytest.raises(gg.ParamError, match="2 numbers, s0, s1"):
        gg.conv_2d(k, x, stride=(1, 2, 3), padding=0, dilation=1)
    with pytest.raises(gg.TypeMismatch, match="did you mean n_groups"):
        gg.group_norm(x, groups=1, eps=1e-5)


def test_quantised_operands(t, w):
    with pytest.raises(gg.TypeMismatch, match=r"gg.cast\(t, 'F32'\) \+ 1"):
        w + 1
    np.testing.assert_allclose(values(gg.cast(w, "F32") + 1), w.numpy() + 1)


@pytest.mark.parametrize("shape", [(64,), (2, 64), (3, 2, 64)])
def test_products_with_quantised_w_fold(w, shape):
    x = gg.tensor(np.random.default_rng(2).random(shape, np.float32))
    y = x @ w.T
    assert y.op == gg.mul_mat(w, x).op and y.src[0].id == w.id or y.view_src.src[0].id == w.id
    np.testing.assert_allclose(values(y), x.numpy() @ w.numpy().T, rtol=2e-2)
    assert y.shape == (x.numpy() @ w.numpy().T).shape
    np.testing.assert_array_equal(values(x.numpy() @ w.T), values(y))


def test_quantised_w_transposed_is_nothing_else(w):
    assert w.T.T is w and w.T.shape == (64, 8) and "x @ w.T" in repr(w.T)
    with pytest.raises(AttributeError, match=r"gg.cast\(w, 'F32'\).T"):
        w.T.numpy()
    with pytest.raises(gg.TypeMismatch):
        gg.silu(w.T)
    with pytest.raises(gg.ShapeError, match="rows of 3"):
        gg.tensor(X) @ w.T
    assert values(gg.cont(gg.cast(w, "F32").T)).shape == (64, 8)


def test_arrays_of_64_bits(t):
    for array, to in ((np.ones((2, 3)), "F32"), (np.arange(6).reshape(2, 3), "F32")):
        with pytest.raises(gg.TypeMismatch, match=f"gg.cast\\(t, '{to}'\\), or values.astype"):
            gg.silu(gg.tensor(array))
        np.testing.assert_allclose(values(gg.silu(gg.cast(gg.tensor(array), to))),
                                   values(gg.silu(gg.tensor(array.astype(np.float32)))))
    with pytest.raises(gg.TypeMismatch, match=r"gg.cast\(t, 'I32'\), or values.astype\(np.int32\)"):
        gg.get_rows(t, gg.tensor(np.arange(2)))
    assert values(gg.get_rows(t, gg.cast(gg.tensor(np.arange(2)), "I32"))).shape == (2, 3)
    np.testing.assert_array_equal(values(t + np.arange(3)), X + np.arange(3))


def test_tensor_copies_and_from_numpy_does_not():
    a = np.ones(3, np.float32)
    copied, shared = gg.tensor(a), gg.from_numpy(gg.Context(), a)
    a[0] = 5
    assert copied.numpy()[0] == 1 and shared.numpy()[0] == 5
    assert "copied" in gg.tensor.__doc__ and "gg.tensor(array) copies" in gg.from_numpy.__doc__


@pytest.mark.parametrize("name", ["init", "build_forward_expand", "to_numpy", "graph_compute", "load_model"])
def test_names_of_ggml_are_told(name):
    with pytest.raises(AttributeError, match="; write "):
        getattr(gg, name)


def test_own_ops_of_wrong_arity(t):
    def short(dst, a):
        dst[...] = a
    for fun in (short, njit(short)):
        with pytest.raises(gg.TypeMismatch, match=r"def short\(dst, a, ith, nth\)"):
            gg.map_custom1(t, fun)
    assert values(gg.map_custom1(t, lambda dst, a, ith, nth: dst.__setitem__(..., a))).shape == (2, 3)
    gg.map_custom1(t, lambda *every: None)


@pytest.fixture
def square():
    return gg.tensor(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(("call", "said"), [
    (lambda t: gg.add(t, 1), r"not int: t \+ 1 .* called as gg.add\(a, b\)"),
    (lambda t: gg.mul_mat(np.ones((4, 4)), t), r"gg.tensor\(values\) makes one"),
    (lambda t: gg.rms_norm(t), r"called as gg.rms_norm\(a, eps\)"),
    (lambda t: gg.from_numpy(np.ones(3, np.float32)), r"gg.tensor\(array\)"),
    (lambda t: 2 ** t, r"gg.exp\(t \* math.log\(2\)\)"),
    (lambda t: gg.compute(t + 1, n_threads=2), r"called as compute\("),
    (lambda t: gg.ggml_add(t, t), r"no prefix here: gg.add"),
    (lambda t: gg.ggml_init(), r"gg.Context\(\)"),
    (lambda t: t.half(), r"gg.cast\(t, \"F16\"\)"),
    (lambda t: gg.tensor(np.arange(3)) + 1, r"values.astype\(np.float32\)"),
    (lambda t: gg.get_rows(t, gg.tensor(np.arange(3))), r"values.astype\(np.int32\)"),
    (lambda t: gg.map_custom1(t, lambda a: a), r"def op\(dst, a, ith, nth\)"),
    (lambda t: gg.F32.itemsize, "write type.nbytes"), (lambda t: gg.Q8_0.nothing, "has no attribute 'nothing'$"),
    (lambda t: gg.Q8_0(t), r"gg.cast\(t, gg.Q8_0\)"), (lambda t: gg.plan(t), r"gg.measure\(graph\)"),
    (lambda t: t.plan(), r"gg.measure\(t\)"), (lambda t: gg.Graph(t + 1).plan(), r"graph_plan_create\(graph\)"),
    (lambda t: gg.cast(t, list), "must be a tensor type")])
def test_errors_say_what_to_write(square, call, said):
    with pytest.raises((gg.GgjitError, AttributeError), match=said):
        call(square)


def test_a_name_that_there_is_not_is_a_typed_error(square):
    """So a notebook shows the user's line alone."""
    for x in (gg, square, gg.Graph(square + 1)):
        with pytest.raises(gg.NoSuchAttribute, match="has no attribute 'backward'"):
            _ = x.backward
        assert not hasattr(x, "backward")


def test_types_by_their_numpy_names(square):
    assert gg.cast(square, np.float16).type is gg.F16 and gg.cast(square, np.dtype("f4")).type is gg.F32
    assert gg.cast(square, "bfloat16").type is gg.BF16
