"""How many axes a tensor has: NumPy's answer for what is written in NumPy's way, ggml's sizes for builders."""
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ggjit as gg
from ggjit.models import load_gguf, load_safetensors, save_gguf, save_safetensors

CPU = gg.init_backend("CPU:n_threads=1")
SHAPES = [(), (1,), (3,), (1, 4), (4, 1), (1, 1), (1, 3, 4), (2, 1, 4), (1, 1, 1), (1, 2, 1, 3), (1, 1, 1, 1),
          (1, 0, 2)]
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=3)


def filled(shape):
    return np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)


def leaf(shape, ctx=None, type=None):
    """(tensor, its values in an array of NumPy's)"""
    x = filled(shape)
    return gg.from_numpy(ctx or gg.Context(), x, type=type), x.copy()


def same(t, x):
    """t is x: shape, axes and values by every way out."""
    x = np.asarray(x)
    assert (t.shape, t.ndim, t.size) == (x.shape, x.ndim, x.size)
    assert t.ne == (x.shape[::-1] + (1,) * 4)[:4]
    for a in (t.numpy(), np.asarray(t), np.array(t, copy=True), np.from_dlpack(t)):
        assert a.shape == x.shape
        np.testing.assert_array_equal(a, x)


# ---------------------------------------------------------------- in and out
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_come_back_with_their_shape(shape):
    t, x = leaf(shape)
    same(t, x)
    same(gg.from_dlpack(x), x)
    same(gg.from_dlpack(t), x)
    t.set(x + 1)
    with t.write() as a:
        assert a.shape == shape
        a[...] += 1
    same(t, x + 2)
    assert gg.compute(gg.sqr(t)).shape == gg.compute(t + 1).shape == shape
    for type in (gg.F16, gg.BF16):
        assert leaf(shape, type=type)[0].numpy().shape == shape


def test_single_numbers_have_no_axes():
    ctx = gg.Context()
    for number, type in ((np.float32(3), gg.F32), (np.int32(3), gg.I32), (np.array(3, np.float16), gg.F16)):
        t = gg.from_numpy(ctx, number)
        assert t.type is type and t.shape == () and t.item() == 3
        assert repr(t).startswith(f"<tensor {type!r} [], CPU buffer") and "()" in t._repr_html_()
    assert gg.new_f32(ctx, 3.0).shape == gg.new_i32(ctx, 3).shape == (1,)      # ggml's: one size


@pytest.mark.parametrize("ne,shape", [((4,), (4,)), ((4, 1), (1, 4)), ((4, 1, 1), (1, 1, 4)), ((1,), (1,)),
                                      ((1, 4, 1, 1), (1, 1, 4, 1)), (4, (4,))])
def test_new_tensors_have_as_many_axes_as_sizes_are_given(ne, shape):
    t = gg.Context().new_tensor(gg.F32, ne, "t")
    assert t.shape == shape and t.ne == (shape[::-1] + (1, 1, 1))[:4]
    assert repr(t) == f"<t F32 {list(shape[::-1])}, no data>" and str(shape) in t._repr_html_()


@given(shapes)
def test_lengths_iteration_and_single_values(shape):
    t, x = leaf(shape)
    if not shape:
        for refused in (len, iter):
            with pytest.raises(TypeError, match=r"tensor F32 \[\] has no axes"):
                refused(t)
    else:
        assert len(t) == len(x)
        for row, want in zip(t, x, strict=True):
            same(row, want)
    if x.size == 1:
        assert t.item() == x.item()
    with pytest.raises(gg.TypeMismatch, match="neither true nor false"):
        bool(t)


def test_a_strided_view_is_written_in_its_own_shape():
    t, x = leaf((1, 3, 4))
    with t[:, ::2, 1:].write() as a:
        assert a.shape == (1, 2, 3)
        a[0] = 0
    x[:, ::2, 1:] = 0
    same(t, x)


# ---------------------------------------------------------------- views
@st.composite
def indices(draw, shape):
    """An index NumPy takes, with steps ggml's strides can express."""
    def one(n):
        ends = st.none() | st.integers(-4, 4)
        return draw(st.one_of(st.builds(slice, ends, ends, st.none() | st.integers(1, 3)),
                              *([st.integers(-n, n - 1)] if n else [])))
    first = draw(st.integers(0, len(shape)))
    parts = [one(n) for n in shape[:first]]
    if draw(st.booleans()):
        last = draw(st.integers(first, len(shape)))
        parts += [..., *(one(n) for n in shape[last:])]
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_chain_of_views_is_numpys(data):
    t, x = leaf(data.draw(shapes))
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.sampled_from(("index", "index", "transpose", "T", "reshape")))
        if step == "index":
            index = data.draw(indices(x.shape))
            if x[index].ndim > 4:
                with pytest.raises(gg.ShapeError, match="at most 4"):
                    t[index]
                continue
            t, x = t[index], x[index]
        elif step == "transpose":
            axes = data.draw(st.permutations(range(x.ndim)))
            t, x = t.transpose(*axes), x.transpose(*axes)
        elif step == "T":
            t, x = t.T, x.T
        elif x.flags.c_contiguous and x.size:
            shape = data.draw(st.permutations(x.shape)) + [1] * data.draw(st.integers(0, 4 - x.ndim))
            if data.draw(st.booleans()) and shape:
                shape[data.draw(st.integers(0, len(shape) - 1))] = -1
            t, x = t.reshape(shape), x.reshape(shape)
        same(t, x)


@pytest.mark.parametrize("view", [
    lambda t: t.reshape(()), lambda t: t.reshape(1), lambda t: t.reshape(1, 1, 1), lambda t: t.reshape(np.int64(-1)),
    lambda t: t[...], lambda t: t[0], lambda t: t[0, 0], lambda t: t[None], lambda t: t[None, 0, :, None],
    lambda t: t.transpose(), lambda t: t.transpose(None), lambda t: t.transpose((1, 0)), lambda t: t.T[0, ..., None]])
def test_single_values_keep_the_axes_they_are_given(view):
    t, x = leaf((1, 1))
    same(view(t), view(x))


@pytest.mark.parametrize("bad,text", [
    (lambda t: t[0], "has 0 axes"), (lambda t: t.reshape(2), "has 1 elements"), (lambda t: t @ t, "no axes"),
    (lambda t: t.reshape(1, 1, 1, 1, 1), "at most 4"), (lambda t: t.transpose(0), "permutation of the 0 axes"),
    (lambda t: np.ones((3, 4), np.float32) @ t, "no axes"), (lambda t: t @ np.ones((3, 4), np.float32), "no axes")])
def test_what_a_tensor_without_axes_cannot_do(bad, text):
    with pytest.raises(gg.GgjitError, match=text):
        bad(leaf(())[0])


def test_indexing_rows_of_blocks_keeps_the_axes():
    t = gg.from_numpy(gg.Context(), filled((1, 2, 64)), type=gg.Q8_0)
    x = t.numpy()
    assert x.shape == (1, 2, 64)
    for index in (0, np.s_[0, 1], np.s_[:, 1:, 32:], np.s_[None, 0], np.s_[..., :32]):
        assert t[index].shape == x[index].shape
        np.testing.assert_array_equal(t[index].numpy(), x[index])


# ---------------------------------------------------------------- operators
@settings(max_examples=60, deadline=None)
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=1, max_side=3),
       st.sampled_from([lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b]),
       st.sampled_from(["tensors", "left", "right"]))
def test_operators_broadcast_as_numpy(drawn, op, which):
    (a, x), (b, y) = map(leaf, drawn.input_shapes)
    got = gg.compute(op(a if which != "left" else x, b if which != "right" else y))
    want = np.asarray(op(x, y))
    assert got.shape == want.shape == drawn.result_shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("type", [gg.F32, gg.F16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 3), (2, 1, 1, 1)], ids=str)
def test_numbers_beside_a_tensor_keep_its_axes(shape, type):
    t, x = leaf(shape, type=type)
    for make in (lambda v: v + 1, lambda v: 2 * v, lambda v: 1 - v, lambda v: v / 4, lambda v: 4 / v, lambda v: -v,
                 lambda v: abs(v), lambda v: v**2, lambda v: np.float32(2) * v):
        assert gg.compute(make(t)).shape == shape
        np.testing.assert_allclose(gg.compute(make(t)), make(x), rtol=2e-3)


@settings(max_examples=60, deadline=None)
@given(hnp.mutually_broadcastable_shapes(signature="(m?,n),(n,p?)->(m?,p?)", max_dims=2, min_side=1, max_side=3))
def test_products_are_numpys(drawn):
    (a, x), (b, y) = map(leaf, drawn.input_shapes)
    got = gg.compute(a @ b)
    assert got.shape == np.matmul(x, y).shape == drawn.result_shape
    np.testing.assert_allclose(got, x @ y, rtol=1e-5)
    assert (a @ y).shape == (x @ b).shape == drawn.result_shape


# ---------------------------------------------------------------- ggml's builders
def build(builder, *operands):
    """The shape of builder's result; tuples become tensors of that shape, and lists of sizes ids."""
    ctx = gg.Context()
    return builder(*(leaf(x, ctx)[0] if isinstance(x, tuple) else
                     gg.from_numpy(ctx, np.zeros(x, np.int32)) if isinstance(x, list) else x for x in operands)).shape


@pytest.mark.parametrize("row", [
    # elementwise: the axes of the operands together
    (gg.add, (1, 3), (3,), (1, 3)), (gg.add, (3,), (1, 1, 3), (1, 1, 3)), (gg.mul, (1, 1, 3, 4), (4,), (1, 1, 3, 4)),
    (gg.sqr, (), ()), (gg.silu, (1, 1, 3), (1, 1, 3)), (gg.scale, (1, 4), 2.0, (1, 4)), (gg.cont, (1, 4), (1, 4)),
    (gg.rms_norm, (1, 1, 4), 1e-6, (1, 1, 4)), (gg.soft_max, (1, 4), (1, 4)), (gg.swiglu, (1, 1, 8), (1, 1, 4)),
    (gg.add_inplace, (1, 3), (3,), (1, 3)), (gg.cpy, (1, 3), (3,), (3,)), (gg.cast, (1, 3), gg.F16, (1, 3)),
    (gg.rope, (1, 1, 1, 4), [1], 4, 0, (1, 1, 1, 4)), (gg.concat, (1, 3), (1, 3), 1, (2, 3)),
    (gg.repeat, (3,), (1, 2, 3), (1, 2, 3)), (gg.repeat, (1, 1, 3), (3,), (3,)), (gg.argsort, (1, 4), 0, (1, 4)),
    (gg.soft_max_ext, (1, 4), None, 1.0, 0.0, (1, 4)), (gg.set_1d, (6,), (1, 3), 0, (6,)),
    # reductions keep the axis they reduce, as keepdims
    (gg.sum, (1, 3), (1,)), (gg.sum_rows, (1, 3, 4), (1, 3, 1)), (gg.mean, (4,), (1,)), (gg.argmax, (1, 4), (1,)),
    # products: the axes of the right side
    (gg.mul_mat, (3, 4), (4,), (3,)), (gg.mul_mat, (3, 4), (1, 4), (1, 3)), (gg.mul_mat, (4,), (1, 1, 4), (1, 1, 1)),
    (gg.mul_mat, (1, 3, 4), (2, 4), (2, 3)), (gg.mul_mat_id, (2, 3, 4), (1, 1, 4), [1, 2], (1, 2, 3)),
    (gg.out_prod, (3,), (1,), (1, 3)),
    # rows: one axis more than the ids
    (gg.get_rows, (5, 4), [1], (1, 4)), (gg.get_rows, (5, 4), [], (4,)), (gg.get_rows, (1, 5, 4), [1, 1], (1, 1, 4)),
    (gg.get_rows, (5, 4), [1, 1, 1, 2], (1, 1, 2, 4)),
    # sizes that are given say how many axes there are
    (gg.reshape_1d, (1, 4), 4, (4,)), (gg.reshape_2d, (4,), 4, 1, (1, 4)), (gg.reshape_3d, (4,), 4, 1, 1, (1, 1, 4)),
    (gg.reshape_4d, (4,), 4, 1, 1, 1, (1, 1, 1, 4)), (gg.reshape, (4,), (1, 1, 4), (1, 1, 4)),
    (gg.view_1d, (1, 4), 4, 0, (4,)), (gg.view_2d, (4,), 4, 1, 16, 0, (1, 4)), (gg.view_tensor, (1, 4), (1, 4)),
    (gg.cont_2d, (4,), 4, 1, (1, 4)), (gg.cont_4d, (4,), 4, 1, 1, 1, (1, 1, 1, 4)), (gg.diag, (1,), (1, 1)),
    (gg.repeat_4d, (4,), 4, 1, 1, 1, (1, 1, 1, 4)),
    # axes that move take theirs along, whatever their lengths
    (gg.transpose, (1, 4), (4, 1)), (gg.transpose, (4,), (4, 1)), (gg.transpose, (1, 1, 4), (1, 4, 1)),
    (gg.permute, (1, 3, 4), 0, 2, 1, 3, (3, 1, 4)), (gg.permute, (3, 4), 0, 2, 1, 3, (3, 1, 4)),
    (gg.permute, (1, 4), 0, 2, 1, 3, (1, 1, 4)), (gg.permute, (4,), 3, 0, 1, 2, (4, 1, 1, 1)),
    (gg.flash_attn_ext, (2, 1, 4), (2, 3, 4), (2, 3, 4), None, 1.0, (1, 2, 4)),
    (gg.flash_attn_ext, (1, 1, 4), (1, 3, 4), (1, 3, 4), None, 1.0, (1, 1, 4)),
    (gg.conv_1d, (2, 3, 3), (1, 3, 8), 1, 1, 1, (1, 2, 8)), (gg.pool_1d, (1, 1, 8), 0, 2, 2, 0, (1, 1, 4)),
    (gg.pad, (1, 4), 1, 0, 0, 0, (1, 5)), (gg.pad, (4,), 0, 1, 0, 0, (2, 4)),
    (gg.timestep_embedding, (1,), 4, 100, (1, 4)), (gg.glu_split, (1, 4), (1, 4), 2, (1, 4))],
    ids=lambda row: f"{row[0].__name__} {row[1:]}")
def test_builders(row):
    builder, *operands, want = row
    assert build(builder, *operands) == want


def test_builders_that_make_a_result_anew_keep_its_axes():
    ctx = gg.Context()
    y = gg.mul_mat(leaf((1, 4), ctx)[0], leaf((4,), ctx)[0])
    assert gg.mul_mat_set_prec(y, 10).shape == gg.mul_mat_set_hint(y, 0).shape == y.shape == (1,)
    q, k = leaf((1, 1, 4), ctx)[0], leaf((1, 3, 4), ctx)[0]
    y = gg.flash_attn_ext(q, k, k, None, 1.0)
    sinks = gg.flash_attn_ext_add_sinks(y, leaf((1,), ctx)[0])
    assert gg.flash_attn_ext_set_prec(y, 10).shape == sinks.shape == y.shape == (1, 1, 4)


@pytest.mark.parametrize("ne", [(4,), (4, 1), (4, 1, 1, 1)])
def test_custom_ops_have_as_many_axes_as_sizes_are_given(ne):
    assert gg.custom(gg.F32, ne, [leaf((4,))[0]], lambda dst, a, ith, nth: None).shape == ne[::-1]


def test_axes_do_not_depend_on_the_lengths():
    """A chunk of one token goes through attention with the axes of a chunk of many."""
    def axes(n):
        ctx = gg.Context()
        x, w, ids = leaf((7, 8), ctx)[0], leaf((8, 8), ctx)[0], gg.from_numpy(ctx, np.zeros(n, np.int32))
        q = gg.reshape_3d(gg.mul_mat(w, gg.get_rows(x, ids)), 4, 2, n)
        k = gg.permute(gg.rope(q, ids, 4, 0), 0, 2, 1, 3)
        scores = gg.soft_max(gg.mul_mat(k, k))
        values = gg.cont(gg.permute(gg.mul_mat(gg.cont(gg.transpose(k)), scores), 0, 2, 1, 3))
        chain = (q, k, scores, values, gg.add(gg.cont_2d(values, 8, n), gg.get_rows(x, ids)))
        return [t.ndim for t in chain]
    assert axes(1) == axes(3) == [3, 3, 3, 3, 2]


def test_a_function_of_ones_own_sees_the_axes():
    seen = []

    def double(dst, a, ith, nth):
        seen.append((dst.shape, a.shape))
        dst[...] = 2 * a
    for shape in ((1, 3), (1, 1, 1), (3,), ()):
        t, x = leaf(shape)
        np.testing.assert_array_equal(gg.compute(gg.map_custom1(t, double, 1), backend=CPU), 2 * x)
    assert seen == [((1, 3),) * 2, ((1, 1, 1),) * 2, ((3,),) * 2, ((1,),) * 2]      # one axis at least


# ---------------------------------------------------------------- graphs and files
@pytest.mark.parametrize("shape", [(), (1, 1, 3)], ids=str)
def test_graphs_keep_the_axes(shape):
    t, x = leaf(shape)
    graph = gg.Graph(gg.sqr(t[None]))
    back = pickle.loads(pickle.dumps(graph))
    assert [t.shape for t in (*back.leafs, *back.nodes)] == [t.shape for t in (*graph.leafs, *graph.nodes)]
    copy = gg.graph_copy(CPU, graph)
    CPU.graph_compute(copy.graph)
    assert copy.of(graph.outputs[0]).numpy().shape == (1, *shape)
    copy.free()
    sched = gg.Scheduler([CPU])
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), np.square(x)[None])


def test_files_keep_the_axes(tmp_path):
    ctx = gg.Context()
    tensors = {str(s): leaf(s, ctx)[0] for s in SHAPES}
    save_gguf(tmp_path / "a.gguf", tensors)
    save_safetensors(tmp_path / "a.safetensors", tensors)
    stored = {name: t.shape for name, t in tensors.items()}
    assert {name: t.shape for name, t in load_safetensors(tmp_path / "a.safetensors").items()} == stored
    stored["()"] = (1,)                             # GGUF has one dimension at least
    assert {name: t.shape for name, t in load_gguf(tmp_path / "a.gguf")[0].items()} == stored
    arrays = {str(s): filled(s) for s in SHAPES}
    save_gguf(tmp_path / "b.gguf", arrays)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
