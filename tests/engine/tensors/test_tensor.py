"""Table, contexts, tensors, views and buffers."""
import gc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.core.table import TABLE, Table
from ggjit.ops.core.record import OP, T_WORDS, TENSOR, WORD
from ggjit.ops.core.weak import NumberedRef

CPU = gg.init_backend("CPU:n_threads=1")


def leaf(ctx, ne, type=gg.F32, name=""):
    return ctx.new_tensor(type, ne, name)


def test_the_two_views_of_a_record_agree():
    assert TENSOR.itemsize == T_WORDS * WORD
    ctx = gg.Context()
    a = leaf(ctx, (64, 8), gg.Q4_0)
    row = TABLE.records[a.id]
    assert row["type"] == 2 and list(row["ne"]) == [64, 8, 1, 1] and list(row["nb"]) == [18, 36, 288, 288]
    assert list(row["src"]) == [-1] * 10 and row["view_src"] == -1 and row["buffer"] == -1


@pytest.mark.parametrize("type,ne,nb", [
    (gg.F32, (5, 3, 2), (4, 20, 60, 120)), (gg.F16, (7,), (2, 14, 14, 14)), (gg.Q8_0, (96, 2), (34, 102, 204, 204)),
    (gg.I64, (3, 1, 4), (8, 24, 24, 96)), (gg.F32, (0, 3), (4, 0, 0, 0))])
def test_strides_and_sizes(type, ne, nb):
    t = leaf(gg.Context(), ne, type)
    assert t.nb == nb
    assert t.nbytes == (0 if 0 in ne else nb[3])


def test_arena_bytes_are_the_tensors_bytes():
    ctx = gg.Context()
    a, b = leaf(ctx, (5, 3), name="a"), leaf(ctx, (64, 2), gg.Q8_0, "b")
    buf = gg.alloc_ctx_tensors(ctx, CPU)
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    a.set(values)
    b.set(np.linspace(-1, 1, 128).reshape(2, 64))
    assert bytes(buf.arena[a.offs:a.offs + a.nbytes]) == values.tobytes() == a.bytes()
    assert bytes(buf.arena[b.offs:b.offs + b.nbytes]) == b.bytes()
    assert a.offs % 32 == 0 and b.offs % 32 == 0 and a.buffer is buf
    np.testing.assert_array_equal(a.numpy(), values)
    assert abs(b.numpy() - np.linspace(-1, 1, 128).reshape(2, 64)).max() < 1 / 127
    buf.arena[a.offs:a.offs + 4] = np.frombuffer(np.float32(9).tobytes(), np.uint8)
    assert a.numpy()[0, 0] == 9


def test_from_numpy_aliases_contiguous_arrays_and_copies_others():
    ctx = gg.Context()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    a, b = gg.from_numpy(ctx, x), gg.from_numpy(ctx, x.T)
    x[0, 0] = 7
    assert a.ne == (3, 2, 1, 1) and a.numpy()[0, 0] == 7 and b.numpy()[0, 0] == 0
    np.testing.assert_array_equal(b.numpy(), np.arange(6, dtype=np.float32).reshape(2, 3).T)
    q = gg.from_numpy(ctx, np.ones((2, 32)), type=gg.Q4_0)
    np.testing.assert_allclose(q.numpy(), 1, rtol=0.07)


@pytest.mark.parametrize("type", [gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_0, gg.I32, gg.I64])
def test_set_and_read_back(type):
    ctx, rng = gg.Context(), np.random.default_rng(1)
    t = leaf(ctx, (64, 3, 2), type)
    gg.alloc_ctx_tensors(ctx, CPU)
    x = rng.integers(-5, 5, (2, 3, 64)) if type.dtype is not None and type.dtype.kind == "i" \
        else rng.standard_normal((2, 3, 64)).astype(np.float32)
    t.set(x)
    tolerance = {gg.F32: 0, gg.I32: 0, gg.I64: 0, gg.F16: 2e-3, gg.BF16: 2e-2, gg.Q8_0: 0.02, gg.Q4_0: 0.3}[type]
    np.testing.assert_allclose(t.numpy(), x, atol=tolerance)


def test_set_refuses_what_does_not_fit():
    ctx = gg.Context()
    t, i = leaf(ctx, (4, 2), name="t"), leaf(ctx, (4,), gg.I32, "i")
    with pytest.raises(gg.NotAllocated, match="t F32"):
        t.set(np.zeros((2, 4)))
    gg.alloc_ctx_tensors(ctx, CPU)
    before = t.bytes()
    with pytest.raises(gg.ShapeError, match=r"\(4, 2\)"):
        t.set(np.zeros((4, 2)))
    with pytest.raises(gg.TypeMismatch, match="float"):
        i.set(np.ones(4))
    with pytest.raises(gg.IndexRangeError, match="32"):
        t.set_bytes(b"12345678", offset=28)
    assert t.bytes() == before


# ---------------------------------------------------------------- views
def test_views_follow_ggmls_rules():
    ctx = gg.Context()
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    a = gg.from_numpy(ctx, x, "a")                                  # ne (5, 4, 3, 2)
    p = gg.permute(a, 1, 2, 0, 3)                                   # axis i goes to axes[i]
    assert p.ne == (3, 5, 4, 2)
    np.testing.assert_array_equal(p.numpy(), np.transpose(x, (0, 2, 3, 1)))
    t = gg.transpose(a)
    np.testing.assert_array_equal(t.numpy(), x.swapaxes(-1, -2))
    r = gg.reshape_2d(a, 20, 6)
    np.testing.assert_array_equal(r.numpy(), x.reshape(6, 20))
    v = gg.view_2d(r, 3, 2, r.nb[1] * 2, 8)
    np.testing.assert_array_equal(v.numpy(), x.reshape(6, 20)[0:3:2, 2:5])
    w = gg.view_1d(v, 2, 4)                                         # chains collapse to the base
    assert w.view_src is a and w.view_offs == 12 and w.src == (v,)
    np.testing.assert_array_equal(w.numpy(), [3, 4])
    v.set(np.zeros((2, 3)))
    assert (x.reshape(6, 20)[0:3:2, 2:5] == 0).all()


@pytest.mark.parametrize("make,error,text", [
    (lambda a: gg.reshape_1d(a, 7), gg.ShapeError, r"a F32 \[5, 4\] has 20 elements, \[7\] has 7"),
    (lambda a: gg.reshape_2d(gg.transpose(a), 2, 10), gg.ShapeError, "must be contiguous"),
    (lambda a: gg.view_1d(a, 21, 0), gg.IndexRangeError, "bytes 0..84 are outside a"),
    (lambda a: gg.view_1d(a, 4, 68), gg.IndexRangeError, "bytes 68..84 are outside a"),
    (lambda a: gg.view_2d(a, 5, 4, 24, 0), gg.IndexRangeError, "bytes 0..92 are outside a"),
    (lambda a: gg.view_1d(a, 2, -4), gg.ParamError, "offset -4 .* must not be negative"),
    (lambda a: gg.permute(a, 0, 0, 1, 2), gg.ParamError, "not a permutation"),
    (lambda a: gg.view_1d(a, 1 << 62, 0), gg.GgjitError, f"bytes 0..{1 << 64} are outside a")])
def test_bad_views_raise_and_change_nothing(make, error, text):
    ctx = gg.Context()
    a = leaf(ctx, (5, 4), name="a")
    n, alive = len(ctx), TABLE.n_alive()
    with pytest.raises(error, match=text):
        make(a)
    assert len(ctx) - n <= 1 and TABLE.n_alive() - alive <= 1       # at most the inner transpose


@settings(max_examples=60, deadline=None)
@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_permute_is_numpys_inverse_transpose(axes, ne):
    ctx = gg.Context()
    x = np.arange(np.prod(ne), dtype=np.float32).reshape(ne[::-1])
    y = gg.permute(gg.from_numpy(ctx, x), *axes)
    order = [3 - axes.index(3 - i) for i in range(4)]               # result NumPy axis i comes from this input axis
    np.testing.assert_array_equal(y.numpy(), np.transpose(x, order))


# ---------------------------------------------------------------- errors and lifetimes
@pytest.mark.parametrize("ne,type,error,text", [
    ((-1, 2), gg.F32, gg.ShapeError, "must not be negative"), ((1,) * 5, gg.F32, gg.ShapeError, "1 to 4 dimensions"),
    ((33,), gg.Q8_0, gg.ShapeError, "blocks of 32 elements, ne0 = 33"),
    ((1 << 31, 1 << 31, 4), gg.F32, gg.ShapeError, r"more than 2\^62 bytes"),
    ((), gg.F32, gg.ShapeError, "1 to 4 dimensions"), ((4,), 0, gg.TypeMismatch, "a tensor type such as gg.Q8_0"),
    ((4,), "F31", gg.TypeMismatch, "no tensor type 'F31' .did you mean f32")])
def test_bad_shapes(ne, type, error, text):
    ctx = gg.Context()
    with pytest.raises(error, match=text):
        ctx.new_tensor(type, ne)
    assert len(ctx) == 0


def test_a_freed_context_makes_stale_handles():
    ctx, other = gg.Context(), gg.Context()
    a = leaf(ctx, (4,), name="a")
    ctx.free()
    ctx.free()
    with pytest.raises(gg.StaleHandle, match="a belongs"):
        a.numpy()
    with pytest.raises(gg.StaleHandle, match="this Context was freed"):
        gg.add(a, a)
    with pytest.raises(gg.StaleHandle, match="this Context was freed"):
        ctx.new_tensor(gg.F32, (1,))
    b = leaf(other, (4,))
    with pytest.raises(gg.StaleHandle, match="a belongs to a Context that was freed"):
        other.node(2, gg.F32, (4,), (b, a))


def test_rows_are_recycled_with_a_new_generation():
    gc.collect()
    ctx = gg.Context()
    a = leaf(ctx, (4,))
    row, generation = a.id, a.generation
    alive = TABLE.n_alive()
    ctx.free()
    assert TABLE.n_alive() == alive - 1
    again = gg.Context()
    ids = [leaf(again, (4,)) for _ in range(TABLE.n_alive() + 8)]
    mine = next(t for t in ids if t.id == row)
    assert mine.generation == generation + 1


def test_garbage_collected_contexts_give_their_rows_back():
    gc.collect()
    alive = TABLE.n_alive()
    for _ in range(50):
        ctx = gg.Context()
        a = leaf(ctx, (4,))
        for _ in range(20):
            a = gg.add(a, a)
        del ctx, a
    gc.collect()
    assert TABLE.n_alive() <= alive + 21


def test_a_full_table_says_so():
    small = Table(capacity=2)
    row = (0, 0, 0, (1,) * 4, (4,) * 4, (0,) * 16, (-1,) * 10, -1, 0, -1, 0, 0)
    handle = set()
    gone = NumberedRef(handle, small.note_dead)
    gone.number = small.new(*row)[0]
    small.new(*row)
    with pytest.raises(gg.OutOfMemory, match="2 tensors"):
        small.new(*row)
    del handle
    assert small.new(*row) == (0, 1)


def test_results_live_in_the_innermost_context():
    weights, outer, inner = gg.Context(), gg.Context(), gg.Context()
    a = leaf(weights, (4,))
    assert gg.add(a, a).ctx is weights
    with outer:
        with inner:
            assert gg.add(a, a).ctx is inner
        assert gg.add(a, a).ctx is outer
    assert gg.add(a, a).ctx is weights


def test_sources_keep_their_context_alive():
    compute = gg.Context()
    with compute:
        y = gg.add(*(2 * [gg.from_numpy(gg.Context(), np.ones(4, np.float32))]))
    gc.collect()
    np.testing.assert_array_equal(gg.compute(y), 2)


def test_freed_and_foreign_buffers():
    ctx = gg.Context()
    a = leaf(ctx, (4,), name="a")
    buf = gg.alloc_ctx_tensors(ctx, CPU)
    a.set(np.ones(4))
    buf.free()
    buf.free()
    with pytest.raises(gg.StaleHandle, match="buffer of a"):
        a.numpy()
    b = leaf(ctx, (4,), name="b")
    small = gg.HostBuffer(CPU.default_buffer_type, 40)
    with pytest.raises(gg.IndexRangeError, match="does not fit"):
        gg.tensor_alloc(small, b, 32)
    gg.tensor_alloc(small, b, 0)
    with pytest.raises(gg.OutOfMemory, match="cannot allocate"):
        gg.HostBuffer(CPU.default_buffer_type, 1 << 60)


def test_alloc_ctx_tensors_splits_by_max_size():
    class Small(type(CPU.default_buffer_type)):
        def max_size(self):
            return 100
    ctx = gg.Context()
    ts = [leaf(ctx, (10,)) for _ in range(5)]
    bufs = gg.alloc_ctx_tensors(ctx, Small(CPU.device))
    assert [b.size for b in bufs] == [64] * 5
    large = leaf(ctx, (26,))
    with pytest.raises(gg.OutOfMemory, match="at most 100"):
        gg.alloc_ctx_tensors(ctx, Small(CPU.device))
    assert len({t.buffer.id for t in ts}) == 5 and large.buffer is None


def test_only_leaves_unless_all():
    ctx = gg.Context()
    a = leaf(ctx, (8,))
    y = gg.add(a, a)
    gg.alloc_ctx_tensors(ctx, CPU)
    assert a.buffer is not None and y.buffer is None
    assert gg.alloc_ctx_tensors(ctx, CPU) is None
    gg.alloc_ctx_tensors(ctx, CPU, all=True)
    assert y.buffer is not None
    a.set(np.arange(8))
    CPU.graph_compute(gg.Graph(y))
    np.testing.assert_array_equal(y.numpy(), 2 * np.arange(8))


def test_bf16_views_read_at_any_strides():
    ctx = gg.Context()
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    t = gg.from_numpy(ctx, x, type=gg.BF16)
    np.testing.assert_array_equal(gg.transpose(t).numpy(), x.T)
    np.testing.assert_array_equal(gg.view_2d(t, 3, 2, t.nb[1] * 2, 4).numpy(), x[::2, 2:5])


def test_a_tensor_can_be_allocated_again():
    ctx = gg.Context()
    a, cpu = ctx.new_tensor(gg.F32, (8,), "a"), gg.init_backend("CPU")
    gg.alloc_ctx_tensors(ctx, cpu).free()
    with pytest.raises(gg.StaleHandle, match="allocate the tensor again"):
        a.numpy()
    gg.alloc_ctx_tensors(ctx, cpu)
    a.set(np.ones(8))
    np.testing.assert_array_equal(gg.compute(gg.scale(a, 2.0)), 2)


def test_integers_that_do_not_fit_are_refused():
    ctx = gg.Context()
    t = gg.from_numpy(ctx, np.arange(3, dtype=np.int32))
    with pytest.raises(gg.ParamError, match="do not fit"):
        t.set([2**40, 0, 0])
    np.testing.assert_array_equal(t.numpy(), [0, 1, 2])


def test_contexts_are_true_and_leave_their_own_block():
    a, b = gg.Context(), gg.Context()
    assert a and not len(a)

    def inside():
        with a:
            yield
    block, x = inside(), gg.from_numpy(gg.Context(), np.ones(2, np.float32))
    next(block)
    with b:
        block.close()
        assert gg.sqr(x).ctx is b
    assert gg.sqr(x).ctx is x.ctx


@pytest.mark.parametrize("use", [
    lambda x: x.transpose(0.5, 1), lambda x: x.transpose("ab"), lambda x: x.reshape(None), lambda x: x.reshape("ab"),
    lambda x: x["1":], lambda x: x[::0]], ids=range(6))
def test_axes_sizes_and_cuts_are_whole_numbers(use):
    with pytest.raises((gg.ParamError, gg.TypeMismatch), match="whole number|an integer|cannot be cut"):
        use(gg.Context().new_tensor(gg.F32, (3, 2)))


def test_parameters_of_nodes_made_by_hand_keep_their_values():
    x = gg.from_numpy(gg.Context(), np.ones(4, np.float32))
    y = x.ctx.node(OP.SCALE, gg.F32, (4,), (x,), (np.float32(0.5), 0.0))
    assert (gg.compute(y) == 0.5).all()


def test_a_name_is_text():
    x = gg.Context().new_tensor(gg.F32, (3,))
    with pytest.raises(gg.TypeMismatch, match="a name is a str"):
        x.name = 5


def drops(source, **names):
    """The warnings of a program that calls a builder as a statement."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(source, "program.py", "exec"), {"gg": gg, **names})
    return [str(w.message) for w in seen if w.filename == "program.py"]


def test_a_dropped_result_of_what_c_writes_into_its_argument_warns():
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (8, 4)), ctx.new_tensor(gg.F32, (8, 4))
    sinks = ctx.new_tensor(gg.F32, (1,))
    q = ctx.new_tensor(gg.F32, (8, 4, 1))
    k, v = (ctx.new_tensor(gg.F16, (8, 4, 1)) for _ in range(2))
    pos = ctx.new_tensor(gg.I32, (1,))
    y, p, at = gg.mul_mat(a, b), gg.soft_max(q), gg.flash_attn_ext(q, k, v, None, 1.0, 0.0, 0.0)
    r = gg.rope(ctx.new_tensor(gg.F32, (8, 4, 1)), pos, 4, 0)
    for call in ("mul_mat_set_prec(y, 10)", "mul_mat_set_hint(y, 0)", "soft_max_add_sinks(p, sinks)",
                 "flash_attn_ext_set_prec(at, 10)", "rope_set_offset(r, 4)"):
        found = drops(f"gg.{call}", y=y, p=p, sinks=sinks, at=at, r=r)
        name = call.partition("(")[0]
        assert len(found) == 1 and f"gg.{name} returns a new tensor, which is dropped here" in found[0]
        for kept in (f"z = gg.{call}", f"z = [gg.{call}]", f"print(gg.{call}.name, end='')",
                     f"def f():\n    return gg.{call}\nz = f()"):
            assert drops(kept, y=y, p=p, sinks=sinks, at=at, r=r) == []
        model = {"__name__": "ggjit.models.own", "gg": gg, "y": y, "p": p, "sinks": sinks, "at": at, "r": r}
        exec(f"def f():\n    z = gg.{call}\n    return z", model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec("f()", {"f": model["f"]})                          # kept by the model, whose result is dropped
