"""Operators, slices, NumPy and DLPack: the tensors of a notebook."""
import gc
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.core import other_names

CPU = gg.init_backend("CPU:n_threads=1")
RNG = np.random.default_rng()


def leaf(shape, type=None, name="", ctx=None):
    a = RNG.standard_normal(shape).astype(np.float32)
    return gg.from_numpy(ctx or gg.Context(), a, name, type), a


# ---------------------------------------------------------------- operators
@pytest.mark.parametrize("make", [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: -a, lambda a, b: +a,
    lambda a, b: abs(a), lambda a, b: a + 2, lambda a, b: 2 + a, lambda a, b: a - 2.5, lambda a, b: 2.5 - a,
    lambda a, b: a * 3, lambda a, b: 3 * a, lambda a, b: a / 3, lambda a, b: 1 / a, lambda a, b: np.float32(2) * a,
    lambda a, b: a - np.int64(2), lambda a, b: (1 - a) / (b + 2) * 0.5,
    lambda a, b: a**2, lambda a, b: abs(a)**0.5, lambda a, b: (a**2 + b**np.int32(2))**0.5])
def test_operators_mean_what_numpys_mean(make):
    (a, x), (b, y) = leaf((2, 3, 4)), leaf((2, 3, 4))
    np.testing.assert_allclose(gg.compute(gg.cont(make(a, b))), make(x, y), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("left,right", [((2, 3, 4), (4,)), ((4,), (2, 3, 4)), ((3, 1), (4,)), ((2, 1, 4), (3, 1)),
                                        ((5, 2, 3, 4), (2, 1, 1)), ((1,), (3, 4))])
@pytest.mark.parametrize("op", [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b])
def test_broadcasting_is_numpys(left, right, op):
    (a, x), (b, y) = leaf(left), leaf(right)
    np.testing.assert_allclose(gg.compute(op(a, b)), op(x, y), rtol=1e-6, atol=1e-7)


def test_arrays_are_operands_on_both_sides():
    a, x = leaf((3, 4))
    y = RNG.standard_normal((3, 4))                     # float64, as notebooks make them
    np.testing.assert_allclose(gg.compute(a * y), x * y.astype(np.float32), rtol=1e-6)
    np.testing.assert_allclose(gg.compute(y - a), y.astype(np.float32) - x, rtol=1e-6)
    np.testing.assert_allclose(gg.compute(y[:2] @ a.T), y[:2] @ x.T, rtol=1e-5, atol=1e-6)


def test_half_precision_and_scalars():
    a, x = leaf((3, 8), gg.F16)
    half = x.astype(np.float16).astype(np.float32)
    for make in (lambda v: v + 1, lambda v: 2 * v, lambda v: 1 - v, lambda v: v / 4):
        y = make(a)
        assert y.type is gg.F16
        np.testing.assert_allclose(gg.compute(y), make(half), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("make,error,text", [
    (lambda a: a + leaf((2, 4))[0], gg.ShapeError, "do not broadcast"),
    (lambda a: a @ leaf((3, 4))[0], gg.ShapeError, "rows of 4, .* has 3 rows"),
    (lambda a: a + "x", TypeError, "'Tensor' and 'str'"), (lambda a: a @ 3, gg.ShapeError, "has no axes"),
    (lambda a: a * 10**400, gg.ParamError, "too large for a float"),
    (lambda a: a + None, TypeError, "'Tensor' and 'NoneType'"),
    (lambda a: gg.from_numpy(a.ctx, np.ones(4, np.int32)) + 1, gg.TypeMismatch, "add: a tensor I32"),
    (lambda a: a**3, gg.ParamError, "2 and 0.5 are served"), (lambda a: a**a, TypeError, "'Tensor' and 'Tensor'")])
def test_operands_that_do_not_fit(make, error, text):
    a, _ = leaf((3, 4), name="a")
    with pytest.raises(error, match=text):
        make(a)


@pytest.mark.parametrize("left,right", [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)),
                                        ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 5)),
                                        ((2, 3, 4), (4,)), ((4,), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2))])
def test_matmul_is_numpys(left, right):
    (a, x), (b, y) = leaf(left), leaf(right)
    want = x @ y
    got = gg.compute(a @ b)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_transposed_right_operand_is_used_as_it_lies():
    (x, a), (w, b) = leaf((3, 64)), leaf((5, 64), name="w")
    y = x @ w.T
    assert y.op.name == "MUL_MAT" and y.src == (w, x)
    np.testing.assert_allclose(gg.compute(y), a @ b.T, rtol=1e-5, atol=1e-5)
    q = gg.from_numpy(w.ctx, b, type=gg.Q8_0)
    with pytest.raises(gg.ShapeError, match=r"gg.mul_mat\(w, x\)"):
        leaf((3, 5))[0] @ q


def test_results_go_to_the_innermost_context():
    a, _ = leaf((3,))
    with gg.Context() as ctx:
        y = 2 / (a + np.ones(3, np.float32))
    assert y.ctx is ctx and all(s.ctx is ctx for s in y.src) and len(a.ctx) == 1


# ---------------------------------------------------------------- slices and shapes
INDICES = [np.s_[0], np.s_[-1], np.s_[1:], np.s_[:, 1], np.s_[..., 2], np.s_[:, :, 1:3], np.s_[::2, ::2, ::2],
           np.s_[1, 2, 3], np.s_[:, None, 1:], np.s_[1:1], np.s_[..., ::3], np.s_[:, 2:0], np.s_[np.int64(1), ..., -2]]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_are_views_with_numpys_meaning(index):
    a, x = leaf((2, 4, 6))
    v, want = a[index], x[index]
    assert v.view_src is a and v.shape == want.shape
    np.testing.assert_array_equal(v.numpy(), want)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_slices_of_slices(data):
    a, x = leaf(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    for _ in range(2):
        n = len(a.shape)
        index = tuple(data.draw(st.one_of(
            st.integers(-a.shape[i], a.shape[i] - 1) if a.shape[i] else st.just(slice(None)),
            st.builds(slice, st.one_of(st.none(), st.integers(-6, 6)), st.one_of(st.none(), st.integers(-6, 6)),
                      st.one_of(st.none(), st.integers(1, 3))))) for i in range(data.draw(st.integers(0, n))))
        a, x = a[index], x[index]
        assert a.shape == x.shape
        np.testing.assert_array_equal(a.numpy(), x)


def test_a_slice_feeds_an_op_and_its_bytes_are_the_bases():
    a, x = leaf((4, 8))
    np.testing.assert_allclose(gg.compute(gg.cont(a[1:, ::2]) + 1), x[1:, ::2] + 1, rtol=1e-6)
    a[2].set(np.zeros(8))
    assert (x[2] == 0).all()
    np.testing.assert_array_equal(gg.compute(gg.cont(a.T[1:3])), x.T[1:3])


def test_quantised_rows_are_cut_at_blocks():
    a, x = leaf((3, 128), gg.Q8_0, "a")
    np.testing.assert_array_equal(a[1:, 32:96].numpy(), a.numpy()[1:, 32:96])
    np.testing.assert_array_equal(a[2, 64:].numpy(), a.numpy()[2, 64:])
    for index in (np.s_[:, 3:], np.s_[:, 0], np.s_[:, ::2], np.s_[:, :31]):
        with pytest.raises(gg.ShapeError, match="block"):
            a[index]


@pytest.mark.parametrize("index,error", [
    (np.s_[2], gg.IndexRangeError), (np.s_[0, 0, 0], gg.IndexRangeError), (np.s_[::-1], gg.ParamError),
    (np.s_[[0, 1]], gg.TypeMismatch), (np.s_[np.array([True, False])], gg.TypeMismatch), (np.s_["x"], gg.TypeMismatch),
    (np.s_[True], gg.TypeMismatch), (np.s_[None, None, None], gg.ShapeError), (np.s_[1.5], gg.TypeMismatch),
    (np.s_[..., ...], gg.IndexRangeError)], ids=str)
def test_bad_indices(index, error):
    a, _ = leaf((2, 3), name="a")
    n = len(a.ctx)
    with pytest.raises(error, match="a F32"):
        a[index]
    assert len(a.ctx) == n


def test_lengths_and_single_values():
    a, x = leaf((2, 3, 4))
    assert (len(a), a.ndim, a.size) == (len(x), x.ndim, x.size) == (2, 3, 24)
    assert a[1, 2, 3].item() == x[1, 2, 3] and isinstance(a[0, 0, 0].item(), float)
    assert len(list(a)) == 2
    with pytest.raises(gg.ShapeError, match="24 values, not one"):
        a.item()
    y = a[0, 0, 0] + 1
    with pytest.raises(gg.NotAllocated, match="compute it first"):
        y.item()
    gg.compute(y)
    assert y.item() == x[0, 0, 0] + np.float32(1)


def test_transposes_and_reshapes():
    a, x = leaf((2, 3, 4))
    np.testing.assert_array_equal(a.T.numpy(), x.T)
    np.testing.assert_array_equal(a.transpose(1, 0, 2).numpy(), x.transpose(1, 0, 2))
    np.testing.assert_array_equal(a.transpose((1, 2, 0)).numpy(), x.transpose(1, 2, 0))
    np.testing.assert_array_equal(a.reshape(4, -1).numpy(), x.reshape(4, -1))
    np.testing.assert_array_equal(a.reshape((6, 4)).numpy(), x.reshape(6, 4))
    for bad in (lambda: a.transpose(0, 0, 1), lambda: a.reshape(5, -1), lambda: a.reshape(-1, -1)):
        with pytest.raises(gg.GgjitError, match="transpose: axes|does not fit"):
            bad()
    assert [t.shape for t in a] == [(3, 4), (3, 4)]


# ---------------------------------------------------------------- NumPy
def test_numpy_sees_a_leafs_memory_read_only():
    a, x = leaf((2, 3, 4))
    for view in (np.asarray(a), np.array(a, copy=False), np.asarray(a[:, 1:])):
        assert np.shares_memory(view, x) and not view.flags.writeable
    np.testing.assert_array_equal(np.asarray(a[:, ::2, 1:]), x[:, ::2, 1:])
    assert not np.shares_memory(np.array(a), x)
    assert np.asarray(a, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(a)[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        np.asarray(a).flags.writeable = True
    np.testing.assert_allclose(np.exp(a), np.exp(x), rtol=1e-6)


def test_an_array_outlives_its_tensor_and_buffer():
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (1 << 16,), "t")
    buf = gg.alloc_ctx_tensors(ctx, CPU)
    x = RNG.standard_normal(1 << 16).astype(np.float32)
    t.set(x)
    views = [np.asarray(t), np.array(t, copy=False), np.from_dlpack(t)]
    buf.free()
    ctx.free()
    del t, buf, ctx
    gc.collect()
    filler = [np.full(1 << 16, 7.0, np.float32) for _ in range(20)]
    for v in views:
        np.testing.assert_array_equal(v, x)
    assert len(filler) == 20


def test_writes_through_the_engine_are_seen_in_the_view_and_counted():
    from ggjit.core.versions import stamp
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (4,), "t")
    gg.alloc_ctx_tensors(ctx, CPU)
    view, before = np.asarray(t), stamp(t.id, t.buffer)
    t.set(np.arange(4))
    assert stamp(t.id, t.buffer) != before
    np.testing.assert_array_equal(view, np.arange(4))


def test_results_come_as_copies_that_the_next_run_leaves_alone():
    a, x = leaf((4,))
    y = a + 1
    graph = gg.Graph(y)
    gg.GraphAllocator(CPU).alloc_graph(graph)
    plan = CPU.graph_plan_create(graph)
    plan.compute()
    first, memory = np.asarray(y), np.array(y, copy=False)
    a.set(x * 2)
    plan.compute()
    assert not np.array_equal(first, plan.numpy(y))
    np.testing.assert_array_equal(memory, plan.numpy(y))
    assert not memory.flags.writeable


@pytest.mark.parametrize("type", [gg.Q8_0, gg.Q4_K, gg.BF16])
def test_types_numpy_does_not_know_come_as_float32(type):
    a, x = leaf((2, 256), type)
    np.testing.assert_array_equal(np.asarray(a), a.numpy())
    assert np.asarray(a).dtype == np.float32
    with pytest.raises(ValueError, match="copy=False"):
        np.array(a, copy=False)
    with pytest.raises((BufferError, RuntimeError), match="no DLPack type here; export t.numpy|[Uu]nsupported dtype"):
        np.from_dlpack(a)


def test_tensors_without_data_say_so():
    t = gg.Context().new_tensor(gg.F32, (4,), "t")
    for read in (np.asarray, np.from_dlpack):
        with pytest.raises(gg.NotAllocated, match="t F32"):
            read(t)
    assert not hasattr(t, "__array_interface__")


def test_device_memory_is_copied():
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (4,), "t")
    gg.alloc_ctx_tensors(ctx, CPU.device.extra_buffer_types()[0])
    t.set(np.arange(4))
    np.testing.assert_array_equal(np.asarray(t), np.arange(4))
    with pytest.raises(ValueError, match="not host memory"):
        np.array(t, copy=False)


# ---------------------------------------------------------------- DLPack
def test_dlpack_out_shares_memory_or_copies_for_old_consumers():
    a, x = leaf((3, 5))
    assert a.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(a[:, 1:4]), x[:, 1:4])
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        view = np.from_dlpack(a)
        assert np.shares_memory(view, x) and not view.flags.writeable
        assert not np.shares_memory(np.from_dlpack(a, copy=True), x)

    class Old:                          # a consumer from before DLPack 1.0 knows no max_version and no read-only
        def __dlpack__(self, stream=None):
            return a.__dlpack__()

        def __dlpack_device__(self):
            return a.__dlpack_device__()
    assert not np.shares_memory(np.from_dlpack(Old()), x)
    with pytest.raises(BufferError, match="CPU"):
        a.__dlpack__(dl_device=(2, 0))


def test_dlpack_in_aliases():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = gg.from_dlpack(x, name="t")
    x[0, 0] = 7
    assert t.name == "t" and t.shape == (2, 3) and t.numpy()[0, 0] == 7
    with gg.Context() as ctx:
        assert gg.from_dlpack(x).ctx is ctx
    again = gg.from_dlpack(t)
    assert np.shares_memory(np.asarray(again), x) or np.lib.NumpyVersion(np.__version__) < "2.1.0"
    for bad, text in (([1, 2], "got list"), ("x", "got str"), (np.array(["a"]), "cannot be read as host memory"),
                      (np.zeros(2, np.uint64), "no tensor type for dtype uint64")):
        with pytest.raises(gg.TypeMismatch, match=text):
            gg.from_dlpack(bad)


def test_numbers_in_lists_and_formats():
    a = gg.tensor([[1.0, 2.0], [3.0, 4.0]], name="a")
    np.testing.assert_array_equal(gg.compute(a + [1, 2]), a.numpy() + [1, 2])
    np.testing.assert_array_equal(gg.compute((1, 2) - a), (1, 2) - a.numpy())
    with pytest.raises(gg.TypeMismatch, match="a list beside a tensor"):
        a + ["x"]
    assert f"{a[1, 0]:.2f}" == "3.00" and f"{a}" == str(a)
    with pytest.raises(gg.TypeMismatch, match=r"holds 4 values, '.2f' formats one; write np.array2string"):
        f"{a:.2f}"
    with pytest.raises(gg.NotAllocated, match=r"with t.write\(\) as a: a\[i\] \+= 1"):
        a[0, 0] += 1


# ---------------------------------------------------------------- values, types and other libraries
def test_a_tensor_is_compared_by_identity_and_never_by_value():
    a, x = leaf((3,), name="a")
    b = gg.tensor(x)
    assert a == a and a != b and not a == b and a != "a" and a is not None and b not in [a, None] and len({a, b}) == 2
    for wrong in (lambda: a == x, lambda: x == a, lambda: a != 3, lambda: np.float32(3) == a, lambda: a == [1, 2, 3],
                  lambda: a < b, lambda: a >= 2, lambda: x > a, lambda: 2 <= a):
        with pytest.raises(gg.TypeMismatch, match=r"a F32 \[3\] (==|[<>]=?) .*compare the values"):
            wrong()
    with pytest.raises(gg.TypeMismatch, match="a F32.*neither true nor false"):
        bool(a)


def test_str_is_numpys_where_there_are_values():
    a, x = leaf((40, 50), name="a")
    assert str(a) == str(x) and str(a[0]) == str(x[0]) and repr(a).startswith("<a F32 [50, 40], CPU")
    y = a + 1
    assert str(y) == repr(y) and "no data" in str(y)
    gg.compute(y)
    assert str(y) == str(x + 1)
    a.ctx.free()
    assert "freed context" in str(a)


def test_types_are_given_by_name():
    ctx = gg.Context()
    for name, type in (("Q4_0", gg.Q4_0), ("q4_k", gg.Q4_K), ("bf16", gg.BF16)):
        assert gg.from_numpy(ctx, np.ones((2, 256), np.float32), type=name).type is type
        assert ctx.new_tensor(name, (256,)).type is type and gg.quantize(name, np.ones((1, 256), np.float32)).size
    a, _ = leaf((2, 32))
    assert gg.cast(a, "F16").type is gg.cast(a, type="f16").type is gg.F16
    assert gg.cast(a, "F16").made_at[0] == __file__
    for wrong in (lambda: gg.cast(a, "Q4"), lambda: ctx.new_tensor("Q4", (32,)),
                  lambda: gg.from_numpy(ctx, np.ones(32), type="Q4")):
        with pytest.raises(gg.TypeMismatch, match="type: no tensor type 'Q4'.*there are F32, F16"):
            wrong()
    with pytest.raises(gg.GgjitError, match="tri"):
        gg.tri(a, "F16")


@pytest.mark.parametrize("values,type,shape", [
    ([1, 2], gg.I32, (2,)), ([[1.0, 2], [3, 4]], gg.F32, (2, 2)), (3, gg.I32, ()), (2.5, gg.F32, ()),
    ([2**40], gg.I64, (1,)), (np.ones(3, np.float16), gg.F16, (3,)), ([np.float32(1), 2], gg.F32, (2,))], ids=str)
def test_tensor_makes_a_leaf_of_values(values, type, shape):
    t = gg.tensor(values, name="t")
    assert (t.type, t.shape, t.name) == (type, shape, "t")
    np.testing.assert_array_equal(t.numpy(), np.asarray(values))
    with gg.Context() as ctx:
        assert gg.tensor(values).ctx is ctx


def test_tensor_refuses_what_is_no_numbers():
    x = np.ones(32, np.float32)
    assert gg.tensor(x).buffer.base != x.ctypes.data and gg.tensor(x, type="Q8_0").type is gg.Q8_0    # a copy
    for wrong in ("text", [[1], [2, 3]], [None], object(), NeedsDetach()):
        with pytest.raises(gg.TypeMismatch, match="^tensor"):
            gg.tensor(wrong)
    with pytest.raises(gg.TypeMismatch, match="^from_numpy: not an array: NeedsDetach.*detach"):
        gg.from_numpy(gg.Context(), NeedsDetach())
    halves = NeedsDetach()
    halves.dtype = "torch.bfloat16"
    with pytest.raises(gg.TypeMismatch, match="gg.from_dlpack takes bfloat16$"):
        gg.tensor(halves)


class NeedsDetach:
    """Refuses as a torch tensor that requires a gradient does."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    def __dlpack__(self, **asked):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __dlpack_device__(self):
        return 1, 0


class Foreign:
    """Another library's array."""

    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **asked):
        return self.a.__dlpack__()

    def __dlpack_device__(self):
        return 1, 0


def test_arrays_of_other_libraries_are_operands():
    a, x = leaf((3, 4))
    y = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(gg.compute(a + Foreign(y)), x + y)
    np.testing.assert_array_equal(gg.compute(Foreign(y) - a), y - x)
    np.testing.assert_allclose(gg.compute(Foreign(y) @ a.T), y @ x.T, rtol=1e-6, atol=1e-6)
    for wrong in (lambda: a + NeedsDetach(), lambda: NeedsDetach() * a):
        with pytest.raises(gg.TypeMismatch, match=r"requires? grad.*x\.detach\(\)\.cpu\(\)"):
            wrong()
    with pytest.raises(TypeError, match="unsupported operand"):
        a + "text"


def test_bf16_goes_through_dlpack():
    x = np.arange(-3, 9, dtype=np.float32).reshape(3, 4)
    t = gg.tensor(x, type="BF16")
    u = gg.from_dlpack(t)
    assert u.type is gg.BF16 and u.shape == (3, 4)
    np.testing.assert_array_equal(u.numpy(), x)
    np.testing.assert_array_equal(gg.from_dlpack(Foreign(t)).numpy(), x)
    np.testing.assert_array_equal(gg.from_dlpack(t[:, 1:3]).numpy(), x[:, 1:3])
    np.testing.assert_array_equal(gg.compute(gg.cast(u, "F32")), x)


# ---------------------------------------------------------------- names of other libraries
def test_names_of_other_libraries_are_answered_with_ours():
    t = gg.tensor([1.0, 2.0])
    for names, thing in ((other_names.OF_TENSORS, t), (other_names.OF_MODULE, gg)):
        for name, instead in names.items():
            with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}; write {instead}")):
                getattr(thing, name)
            for ours in re.findall(r"\b(gg|t)\.(\w+)", instead):
                assert hasattr({"gg": gg, "t": t}[ours[0]], ours[1]), instead
    with pytest.raises(AttributeError, match=r"no attribute 'relu'; write gg.relu\(t\)"):
        t.relu()
    with pytest.raises(AttributeError, match=r"no attribute 'softmax' \(did you mean soft_max\?\)"):
        gg.softmax(t)
    for thing, name in ((t, "_private"), (gg, "_private"), (gg, "no_such_name")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
            getattr(thing, name)
