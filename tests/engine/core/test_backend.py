"""Buffer types, buffers and backends; devices and registry: test_backend_registry.py; graphs: test_backend_graphs.py.

Names of tests carry the rows of ggml's behaviour they check (A2.04 ...); tests/LEDGER.md maps every row.
"""
import mmap

import numpy as np
import pytest
from helpers import devices
from helpers.placed import CPU, array, placed

import ggjit as gg
from ggjit.cpu.device import CPU as CPU_DEVICE
from ggjit.cpu.plan import shared_work
from ggjit.cpu.walk import BARRIER_AFTER
from ggjit.ops.core.record import N_FLAGS


# ---------------------------------------------------------------- A2 buffer types
def test_buffer_type_defaults_A2_01_A2_04_A2_05_A2_06_A2_07_A2_09():
    class Plain(gg.BufferType):
        name = "plain"
    buft = Plain()
    t = gg.Context().new_tensor(gg.Q8_0, (64, 3))
    assert (buft.name, buft.alignment(), buft.max_size(), buft.is_host()) == ("plain", 32, (1 << 63) - 1, False)
    assert buft.alloc_size(t) == t.nbytes and not buft.supports_backend(CPU)
    with pytest.raises(gg.GgjitError, match="alloc_buffer"):
        buft.alloc_buffer(10)


def test_cpu_buffer_type_A2_02_A2_03_A2_08_A2_10_A2_11_A5_02_A5_13_A8_08():
    buft = CPU.default_buffer_type
    assert buft is gg.init_backend("CPU").default_buffer_type, "a type's identity is the object"
    assert (buft.name, buft.alignment(), buft.is_host(), buft.supports_backend(CPU)) == ("CPU", 32, True, True)
    buf = CPU.alloc_buffer(100)
    assert buf.size == 100 and buf.base % 64 == 0 and buf.buft is buft and buf.base == buf.arena.ctypes.data
    assert CPU.alignment == 32 and CPU.max_size == buft.max_size()
    assert CPU.alloc_buffer(0).size == 0
    with pytest.raises(gg.OutOfMemory, match="use smaller tensors or batches"):
        buft.alloc_buffer(1 << 60)
    with pytest.raises(gg.ParamError, match="size must not be negative, got -1"):
        buft.alloc_buffer(-1)


def test_a_second_private_buffer_type_A2_12():
    private, _ = CPU_DEVICE.extra_buffer_types()
    assert not private.is_host() and CPU_DEVICE.supports_buft(private) and private.device is CPU_DEVICE
    t = placed((8,), private)
    t.set(np.arange(8))
    np.testing.assert_array_equal(t.numpy(), np.arange(8))
    ctx = t.ctx
    y = gg.scale(t, 2.0)
    np.testing.assert_array_equal(gg.compute(y), 2 * np.arange(8))
    fake = devices.Fake("A").init_backend()
    graph = gg.Graph(y)
    gg.GraphAllocator(fake).alloc_graph(graph)
    with pytest.raises(gg.NotSupported, match="A cannot reach"):
        fake.graph_compute(graph)
    assert ctx.alive


# ---------------------------------------------------------------- A3 buffers
def test_buffer_state_A3_13_A3_14_A3_15_A3_17_A3_18_A3_21_A3_24():
    buf = CPU.alloc_buffer(64)
    assert (buf.usage, buf.buft.name, buf.size, buf.alive) == (gg.USAGE_ANY, "CPU", 64, True)
    assert "CPU 64 bytes" in repr(buf)
    buf.reset()


def test_free_is_idempotent_and_stale_after_A3_02_A3_16():
    t = placed((4,))
    buf = t.buffer
    buf.free()
    buf.free()
    with pytest.raises(gg.StaleHandle, match="the buffer of t .* was freed"):
        t.numpy()


def test_init_tensor_is_called_for_every_tensor_once_A3_05_A3_19():
    ctx = gg.Context()
    ts = [ctx.new_tensor(gg.F32, (4,)) for _ in range(3)]
    buf = gg.alloc_ctx_tensors(ctx, devices.Fake("A").buffer_type())
    assert buf.inits == len(ts)


def test_set_get_memset_with_exact_bounds_A3_07_A3_12_A5_15():
    for target in (CPU, devices.Fake("A").buffer_type()):
        t = placed((5, 3), target)
        x = array(3, 5)
        gg.tensor_set(t, x.tobytes())
        gg.tensor_set(t, b"\x00" * 4, 56)
        x[2, 4] = 0
        assert gg.tensor_get(t) == x.tobytes() and gg.tensor_get(t, 4, 8) == x.tobytes()[4:12]
        gg.tensor_memset(t, 0, 20, 20)
        x[1] = 0
        np.testing.assert_array_equal(t.numpy(), x)
        gg.tensor_memset(t, 255)
        assert np.isnan(t.numpy()).all() and gg.tensor_get(t, 60, 0) == b""
        for bad in (lambda t=t: gg.tensor_set(t, b"12345678", 56), lambda t=t: gg.tensor_get(t, -1, 4),
                    lambda t=t: gg.tensor_get(t, 0, 61), lambda t=t: gg.tensor_memset(t, 0, 60, 1)):
            with pytest.raises(gg.IndexRangeError, match="60 bytes"):
                bad()
        with pytest.raises(gg.ParamError, match="0..255"):
            gg.tensor_memset(t, 256)
    bare = gg.Context().new_tensor(gg.F32, (2,), "bare")
    for bad in (lambda: gg.tensor_set(bare, b"1234"), lambda: gg.tensor_get(bare), lambda: gg.tensor_memset(bare, 0)):
        with pytest.raises(gg.NotAllocated, match="bare"):
            bad()


@pytest.mark.parametrize("type", [gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.I32])
def test_values_move_through_slots_where_memory_is_private_A3_07(type):
    there, here = placed((64, 3), devices.Fake("A").buffer_type(), type), placed((64, 3), CPU, type)
    x = np.round(array(3, 64) * 4)
    x = x.astype(np.int32) if type is gg.I32 else x
    for t in (there, here):
        t.set(x)
    np.testing.assert_array_equal(there.numpy(), here.numpy())
    if type is gg.F32:
        v = gg.view_2d(there, 2, 3, there.nb[1], 8)
        v.set(np.zeros((3, 2)))
        x[:, 2:4] = 0
        np.testing.assert_array_equal(there.numpy(), x)
        with there.write() as a:
            a[1] = 7
        assert (there.numpy()[1] == 7).all()


def test_two_d_copies_B5():
    for target in (CPU, devices.Fake("A").buffer_type()):
        t = placed((4, 4), target)
        t.set(np.zeros((4, 4)))
        data = np.arange(12, dtype=np.float32)
        gg.tensor_set_2d(t, data, 4, 8, 3, 16, 12)          # two floats of every three, into columns 1..2 of rows 0..2
        want = np.zeros((4, 4), np.float32)
        want[:3, 1:3] = data.reshape(4, 3)[:3, :2]
        np.testing.assert_array_equal(t.numpy(), want)
        back = np.frombuffer(gg.tensor_get_2d(t, 4, 8, 3, 16, 12), np.float32)
        np.testing.assert_array_equal(back, [0, 1, 0, 3, 4, 0, 6, 7])
        assert gg.tensor_get_2d(t, 0, 8, 0, 16, 8) == b""
        gg.tensor_set_2d_async(CPU, t, data[::-1], 4, 8, 3, 16, 12)
        assert gg.tensor_get_2d_async(CPU, t, 4, 8, 1, 0, 0) == data[::-1][:2].tobytes()
        with pytest.raises(gg.IndexRangeError, match="bytes 68..76 are outside t"):
            gg.tensor_get_2d_async(CPU, t, 4, 8, 5, 16, 8)
        with pytest.raises(gg.IndexRangeError, match="bytes 68..76 are outside t"):
            gg.tensor_set_2d(t, data, 4, 8, 5, 16, 8)
        with pytest.raises(gg.IndexRangeError, match="48 bytes given"):
            gg.tensor_set_2d(t, data, 4, 8, 4, 16, 16)
        with pytest.raises(gg.ParamError, match="sizes, counts and strides of zero or more"):
            gg.tensor_get_2d(t, 0, -1, 1, 4, 4)


def test_copy_tensor_slot_A3_08_A3_09_A3_25():
    private = devices.Fake("A").buffer_type()
    a, b, c = placed((8,)), placed((8,)), placed((8,), private)
    for t in (a, b, c):
        t.set(array(8))
    assert b.buffer.copy_tensor(a, b) and b.bytes() == a.bytes()
    c.set(array(8))
    assert not b.buffer.copy_tensor(c, b), "the source cannot be read directly"
    assert b.bytes() == a.bytes()


def test_clear_fills_the_whole_buffer_A3_10_A3_22():
    buf = CPU.alloc_buffer(70)
    buf.clear(7)
    assert (buf.arena == 7).all()


def test_usage_A1_12_A3_23_and_bad_values():
    buf = CPU.alloc_buffer(8)
    buf.set_usage(gg.USAGE_WEIGHTS)
    assert buf.usage == 1 == gg.USAGE_WEIGHTS and (gg.USAGE_ANY, gg.USAGE_COMPUTE) == (0, 2)
    with pytest.raises(gg.ParamError, match="usage must be USAGE_ANY"):
        buf.set_usage("weights")


def test_buffers_over_foreign_memory_A3_26_A3_27_A6_05(tmp_path):
    x = array(16)
    buf = CPU_DEVICE.buffer_from_host_ptr(x)
    t = gg.Context().new_tensor(gg.F32, (16,))
    gg.tensor_alloc(buf, t, 0)
    x[3] = 5
    assert t.numpy()[3] == 5 and buf.base == x.ctypes.data and buf.size == 64
    path = tmp_path / "weights"
    path.write_bytes(x.tobytes())
    with open(path, "rb") as f:
        mapped = CPU_DEVICE.buffer_from_host_ptr(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    w = gg.Context().new_tensor(gg.F32, (16,), "w")
    gg.tensor_alloc(mapped, w, 0)
    np.testing.assert_array_equal(w.numpy(), x)
    with pytest.raises(gg.ParamError, match="read-only"):
        w.set(x)
    with pytest.raises(gg.ParamError, match="C-contiguous"):
        CPU_DEVICE.buffer_from_host_ptr(array(4, 4).T)
    with pytest.raises(gg.TypeMismatch, match="takes an array or a buffer object, got int"):
        CPU_DEVICE.buffer_from_host_ptr(17)
    with pytest.raises(gg.NotSupported, match="cannot use host memory in place"):
        gg.Device().buffer_from_host_ptr(x)


# ---------------------------------------------------------------- A4 multi-buffers
def test_multi_buffer_A4_01_to_A4_08():
    members = [CPU.alloc_buffer(n) for n in (10, 20)]
    multi = gg.MultiBuffer(members)
    assert multi.size == 30 and multi.buft is members[0].buft and list(multi) == members and len(multi) == 2
    multi.usage = gg.USAGE_WEIGHTS
    assert {b.usage for b in members} == {gg.USAGE_WEIGHTS} == {multi.usage}
    multi.clear(3)
    assert all((b.arena == 3).all() for b in members)
    t = placed((1,))
    for slot in (lambda: multi.set_tensor(t, b"1234"), lambda: multi.get_tensor(t), lambda: multi.memset_tensor(t, 0)):
        with pytest.raises(gg.NotSupported, match="only groups"):
            slot()
    assert multi.base == 0 and multi.arena is None
    multi.free()
    assert not any(b.alive for b in (*members, multi))
    with pytest.raises(gg.ParamError, match="at least one Buffer"):
        gg.MultiBuffer([])


def test_alloc_ctx_tensors_splits_and_is_atomic_A15_08():
    device = devices.Fake("A", max_size=256, memory=600)
    ctx = gg.Context()
    ts = [ctx.new_tensor(gg.F32, (32,)) for _ in range(4)]
    multi = gg.alloc_ctx_tensors(ctx, device.buffer_type())
    assert isinstance(multi, gg.MultiBuffer) and [b.size for b in multi] == [256, 256]
    assert {t.buffer for t in ts} == set(multi.buffers) and device.used == 512
    more = gg.Context()
    many = [more.new_tensor(gg.F32, (16,)) for _ in range(8)]
    with pytest.raises(gg.OutOfMemory, match="256 bytes do not fit 600"):
        gg.alloc_ctx_tensors(more, device.buffer_type())
    assert device.used == 512 and all(t.buffer is None for t in many), "nothing leaks, nothing is half placed"
    multi.free()
    assert isinstance(gg.alloc_ctx_tensors(more, device.buffer_type()), gg.MultiBuffer)


# ---------------------------------------------------------------- A5, A7 backends
def test_backend_identity_A5_01_A5_10_A5_11_A7_02_A7_03_A7_05():
    a, b = gg.init_backend("CPU"), gg.init_backend("cpu")
    assert a is not b and a.name == "CPU" and a.guid == b.guid != devices.Fake("A").init_backend().guid
    assert a.device is CPU_DEVICE
    a.free()


def test_slot_defaults_A5_03_A5_04_A5_05_A5_06_A5_07_A5_08_A5_09_A5_16_A7_08_A7_09():
    class Bare(gg.Device):
        name = "bare"
    device = Bare()
    backend = gg.Backend(device)
    t, u = placed((4,)), placed((4,))
    x = array(4)
    gg.tensor_set_async(backend, t, x)
    assert gg.tensor_get_async(backend, t) == x.tobytes()
    assert backend.copy_tensor_async(t, u) is False and not backend.supports_op(t) and not backend.offload_op(t)
    backend.synchronize()
    assert device.event_new() is None and gg.event_new(device) is None and device.memory() == (0, 0)
    assert backend.graph_optimize([t]) == [t] and device.host_buffer_type() is None
    for call in (lambda: backend.graph_compute(None), lambda: backend.graph_plan_create(None),
                 lambda: backend.default_buffer_type, device.init_backend):
        with pytest.raises(gg.NotSupported, match="bare"):
            call()
    with pytest.raises(gg.IndexRangeError, match="bytes 0..20 are outside t"):
        gg.tensor_set_async(backend, t, array(5))
    with pytest.raises(gg.IndexRangeError, match="bytes 4..20 are outside t"):
        gg.tensor_get_async(backend, t, 4, 16)


def test_async_slots_run_in_order_A5_14():
    backend = devices.Fake("A", delay=2e-3).init_backend()
    t = placed((4,), backend)
    t.set(np.zeros(4))
    data = array(4)
    gg.tensor_set_async(backend, t, data)
    assert (t.numpy() == 0).all(), "not yet"
    assert gg.tensor_get_async(backend, t) == data.tobytes()
    backend.free()


def test_plans_through_the_backend_slots_A5_06_A5_17_A7_06_A7_07():
    ctx = gg.Context()
    x = array(300, 64)
    a = gg.from_numpy(ctx, x)
    graph = gg.Graph(gg.soft_max(a))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    plan = CPU.graph_plan_create(graph)
    CPU.graph_plan_compute(plan)
    first = plan.numpy(graph.outputs[0])
    np.testing.assert_allclose(first.sum(-1), 1, rtol=1e-5)
    other = gg.Graph(gg.scale(a, 2.0))
    gg.GraphAllocator(CPU).alloc_graph(other)
    plan = CPU.graph_plan_update(plan, other)
    CPU.graph_plan_compute(plan)
    np.testing.assert_allclose(plan.numpy(other.outputs[0]), 2 * x)
    CPU.graph_plan_free(plan)


def test_n_threads_A1_13_A7_01_A7_04():
    backend = gg.init_backend("CPU", n_threads=3)
    assert backend.n_threads == 3
    for bad in (0, -1, 2.0, 1 << 20):
        with pytest.raises(gg.ParamError, match="n_threads"):
            backend.n_threads = bad
    set_threads = gg.registry.proc_address("ggml_backend_set_n_threads")
    set_threads(backend, 2)
    assert backend.n_threads == 2


def test_copies_between_all_kinds_of_memory_A5_18_A5_19_A5_20_A7_10():
    kinds = [CPU.default_buffer_type, devices.Fake("A").buffer_type(), devices.Fake("B").buffer_type()]
    for src_kind in kinds:
        for dst_kind in kinds:
            src, dst = placed((6, 2), src_kind), placed((6, 2), dst_kind)
            src.set(array(2, 6))
            gg.tensor_copy(src, dst)
            assert dst.bytes() == src.bytes()
            src.set(array(2, 6))
            gg.tensor_copy_async(CPU, CPU, src, dst)
            assert dst.bytes() == src.bytes()
            gg.tensor_copy(src, src)
    with pytest.raises(gg.ShapeError, match="layouts differ"):
        gg.tensor_copy(src, placed((12,)))
    assert gg.same_layout(src, dst) and not gg.same_layout(src, placed((6, 2), type=gg.F16))
    with pytest.raises(gg.NotAllocated, match="has no memory; use alloc_ctx_tensors"):
        gg.tensor_copy(src, gg.Context().new_tensor(gg.F32, (6, 2)))


def test_async_copy_between_streams_keeps_the_order_A5_20():
    a, b = (devices.Fake(n, delay=2e-3).init_backend() for n in "AB")
    src, dst = placed((4,), a), placed((4,), b)
    src.set(np.zeros(4))
    x, y = array(4), array(4)
    gg.tensor_set_async(a, src, x)
    gg.tensor_copy_async(a, b, src, dst)
    gg.tensor_set_async(a, src, y)              # must not overtake the copy
    b.synchronize()
    assert dst.bytes() == x.tobytes()
    a.synchronize()
    assert src.bytes() == y.tobytes()
    a.free()
    b.free()


def test_cpu_supports_op_A7_11_B5():
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (32, 4))
    q = ctx.new_tensor(gg.Q4_0, (32, 4))
    assert CPU.supports_op(gg.mul_mat(q, a)) and CPU.supports_op(gg.add(a, a)) and CPU.supports_op(a)
    assert CPU.supports_buft(CPU.default_buffer_type) and not CPU.supports_buft(devices.Fake("A").buffer_type())
    assert CPU.supports_buft(devices.Fake("H", host=True).buffer_type())
    for type in (gg.IQ2_XXS, gg.IQ2_XS, gg.IQ1_S, gg.IQ1_M, gg.IQ3_XXS, gg.IQ3_S, gg.IQ2_S):
        t = ctx.new_tensor(type, (256, 4))
        x, ids = ctx.new_tensor(gg.F32, (256, 4)), ctx.new_tensor(gg.I64, (4,))
        assert not CPU.supports_op(gg.cpy(x, t)) and not CPU.supports_op(gg.set_rows(t, x, ids)), "nothing writes them"
    assert CPU.supports_op(gg.cpy(a, q)) and CPU.supports_op(gg.mul_mat(q, ctx.new_tensor(gg.F16, (32, 4))))
    assert CPU.supports_op(gg.mul_mat(q, ctx.new_tensor(gg.Q8_0, (32, 4)))), "the dot product's own type"
    with pytest.raises(gg.TypeMismatch, match="b tensor Q4_0 .* must be one of F32, F16, BF16"):
        gg.mul_mat(q, ctx.new_tensor(gg.Q4_0, (32, 4)))
    with pytest.raises(gg.ParamError, match="max_bias must be 0"):
        gg.soft_max_ext_back(a, a, 1.0, 8.0)


# ---------------------------------------------------------------- slots of buffers, called where ggml calls them
class Told(devices.FakeBuffer):
    """Notes resets and the tensors that were initialised since."""

    def __init__(self, buft, size):
        super().__init__(buft, size)
        self.extras, self.resets = set(), 0

    def init_tensor(self, t):
        super().init_tensor(t)
        self.extras.add(t.id)

    def reset(self):
        self.extras.clear()
        self.resets += 1


class ToldType(devices.FakeBufferType):
    def alloc_buffer(self, size):
        return Told(self, size)


def told(**options):
    """A device whose buffers are Told."""
    device = devices.Fake("A", **options)
    device._buft = ToldType(device, "A", False)
    return device


def test_allocators_reset_buffers_before_they_hand_them_out_anew_A3_11_A3_24():
    buft = told().buffer_type()
    allocator = gg.GraphAllocator(buft)
    graphs = [gg.Graph(gg.silu(gg.Context().new_tensor(gg.F32, (8,)))) for _ in range(2)]
    for n, graph in enumerate(graphs, 1):
        allocator.alloc_graph(graph)
        buf = allocator.placement(graph.outputs[0])[0]
        assert buf.resets == n and buf.extras == {t.id for t in (*graph.leafs, *graph.nodes)}
    buf.reset()
    assert buf.extras == set() and buf.buft is buft


def test_a_scheduler_resets_its_buffers_when_another_graph_computes_there_A3_11():
    backend = told().init_backend()
    sched, ctx = gg.Scheduler([backend, CPU]), gg.Context()
    x = ctx.new_tensor(gg.F32, (8,), "x")
    gg.alloc_ctx_tensors(ctx, backend)
    x.set(np.arange(8))
    one, two = gg.Graph(gg.scale(x, 2.0)), gg.Graph(gg.scale(gg.scale(x, 3.0), 5.0))
    sched.reserve(two)
    buf = sched.memory.chunks[0][0]
    for graph, factor, resets in ((one, 2, 1), (one, 2, 1), (two, 15, 2), (one, 2, 3)):
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), factor * np.arange(8))
        assert buf.resets == resets and buf.extras == {t.id for t in graph.nodes}, "those of the graph at hand"
    sched.free()


def test_base_and_type_of_a_buffer_A3_17_A3_21():
    device = devices.Fake("A", alignment=128, max_size=4096)
    t = placed((10,), device.buffer_type())
    buf = t.buffer
    assert buf.base == buf._arena.ctypes.data > 0 and CPU.alloc_buffer(8).base % 64 == 0
    assert gg.init_backend("NULL").alloc_buffer(8).base == 0, "no address"
    buft = buf.buft
    assert (buft.alignment(), buft.max_size(), buft.alloc_size(t), buft.is_host()) == (128, 4096, 40, False)
    buf.free()
    assert buf.base == 0


def test_copies_use_the_slot_of_the_destination_also_for_views_A3_25():
    a, b = devices.Slots("A"), devices.Slots("B")
    seen = []
    for device in (a, b):
        device.answers["copy_tensor"] = lambda name=device.name: seen.append(name)
    src, dst = placed((8,), a.buffer_type()), placed((8,), b.buffer_type())
    src.set(np.arange(8))
    dst.set(np.zeros(8))
    gg.tensor_copy(gg.view_1d(src, 4, 0), gg.view_1d(dst, 4, 16))
    assert seen == ["B"], "of the buffer that the viewed tensor lies in"
    np.testing.assert_array_equal(dst.numpy(), [0, 0, 0, 0, 0, 1, 2, 3])
    t = placed((8,), a.buffer_type())
    gg.tensor_copy(src, t)
    assert seen == ["B", "A"] and t.bytes() == src.bytes()


def test_placed_tensors_are_not_placed_again_A15_02():
    t, buf = placed((8,)), CPU.alloc_buffer(64)
    old = t.buffer
    with pytest.raises(gg.ParamError, match="t F32 .* has memory already, in <Buffer"):
        gg.tensor_alloc(buf, t, 0)
    assert t.buffer is old
    old.free()
    gg.tensor_alloc(buf, t, 0)
    assert t.buffer is buf


def test_buffers_of_no_bytes_ask_no_device_A2_09():
    device = devices.Slots()
    device.answers["alloc_buffer"] = RuntimeError("asked")
    buf = device.init_backend().alloc_buffer(0)
    buf.clear(3)
    assert buf.size == 0 and buf.buft is device.buffer_type() and not device.buffers
    t = placed((0, 4), device.buffer_type())
    assert t.numpy().shape == (4, 0) and t.buffer.size == 0
    t.set(np.zeros((4, 0)))


def test_the_size_of_the_largest_tensor_A6_05():
    x = array(16)
    assert CPU_DEVICE.buffer_from_host_ptr(x, max_tensor_size=32).size == 64
    with pytest.raises(gg.ParamError, match="must not be negative"):
        CPU_DEVICE.buffer_from_host_ptr(x, max_tensor_size=-1)


def test_slow_copies_are_told_when_asked(monkeypatch, capsys):
    src, dst = placed((8,), devices.Fake("A").buffer_type(), name="s"), placed((8,), devices.Fake("B").buffer_type())
    src.set(np.ones(8))
    monkeypatch.setattr("ggjit.tensors.transfer.debug", {"copies"})
    gg.tensor_copy(src, dst)
    gg.tensor_copy(src, placed((8,)))
    assert capsys.readouterr().err.splitlines() == [
        "slow copy of s F32 [8] from A to B: 32 bytes by way of the host",
        "slow copy of s F32 [8] from A to CPU: 32 bytes by way of the host"]


def test_event_slots_A5_09():
    seen = []

    class Stream(gg.Backend):
        def event_record(self, event):
            seen.append(("record", self.name, event))

        def event_wait(self, event):
            seen.append(("wait", self.name, event))

    class Events(gg.Device):
        name = "E"

        def event_new(self):
            return "point"

        def event_synchronize(self, event):
            seen.append(("synchronize", event))
    device = Events()
    a, b = Stream(device, "a"), Stream(device, "b")
    event = gg.event_new(device)
    gg.event_record(event, a)
    gg.event_wait(b, event)
    gg.event_synchronize(event)
    assert seen == [("record", "a", "point"), ("wait", "b", "point"), ("synchronize", "point")]
    bare = gg.Backend(gg.Device())
    bare.event_record(None)
    bare.event_wait(None)
    assert gg.event_new(bare.device) is None, "optional slots"


def test_backends_are_freed_any_number_of_times_A5_11():
    for backend in (gg.init_backend("CPU"), gg.Backend(CPU_DEVICE, "mine")):
        backend.free()
        backend.free()
    assert backend.name == "mine" and gg.Backend(CPU_DEVICE).name == "CPU"


# ---------------------------------------------------------------- what users were hurt by
def test_reserve_waits_before_it_moves_memory_E1():
    """Work under way still writes into the buffers that a larger graph replaces."""
    device = devices.Fake("A", delay=2e-3)
    backend, freed = device.init_backend(), []
    sched, ctx = gg.Scheduler([backend, CPU]), gg.Context()
    x = ctx.new_tensor(gg.F32, (64, 64), "x")
    gg.alloc_ctx_tensors(ctx, backend)
    x.set(np.ones((64, 64)))
    small, large = gg.Graph(gg.scale(x, 2.0)), gg.Graph(gg.repeat_4d(gg.scale(x, 2.0), 64, 64, 4, 1))
    sched.alloc_graph(small)
    buf = sched.memory.chunks[0][0]
    free = buf.free
    buf.free = lambda: (freed.append(backend.jobs.empty() and bool((buf.guarded[devices.GUARD:-devices.GUARD]
                                                                    .view(np.float32)[:4096] == 2).all())), free())
    sched.graph_compute_async(small)
    sched.reserve(large)
    assert freed == [True], "all work was done before the old memory went"
    sched.free()
    backend.free()


def test_work_memory_is_shared_and_grows_without_a_copy_E2():
    small = shared_work(CPU, 64)
    assert shared_work(CPU, 32) is small, "large enough"
    larger = shared_work(CPU, small.size + 64)
    assert larger is not small and larger.size == small.size + 64 and small.alive, "plans keep the one they have"


def test_small_nodes_share_a_barrier_E3():
    ctx = gg.Context()
    y = gg.from_numpy(ctx, array(8))
    for _ in range(6):
        y = gg.scale(y, 1.5)
    big = gg.from_numpy(ctx, array(512, 1024))
    for _ in range(4):
        big = gg.scale(big, 1.5)
    graph = gg.Graph(y, big)
    gg.GraphAllocator(CPU).alloc_graph(graph)
    plan = gg.init_backend("CPU", n_threads=2).graph_plan_create(graph, fuse=False)
    barriers = [bool(plan.rows[at + N_FLAGS] & BARRIER_AFTER) for at in plan._starts[:len(plan.nodes)]]
    assert barriers == [False] * 5 + [True] * 5, "one thread runs what is small, and the others wait once"


def test_unloaded_devices_live_on_while_they_are_used_E3():
    reg = devices.Reg(devices.Fake("Mine"))
    gg.registry.register(reg)
    backend = gg.init_backend("mine")
    t = placed((4,), backend)
    gg.registry.unregister(reg)
    with pytest.raises(gg.ParamError, match="no device 'mine'"):
        gg.init_backend("mine")
    t.set(np.ones(4))
    graph = gg.Graph(gg.scale(t, 3.0))
    gg.GraphAllocator(backend).alloc_graph(graph)
    backend.graph_compute(graph)
    assert (graph.outputs[0].numpy() == 3).all() and backend.device.reg is reg


def test_all_buffer_types_of_the_cpu_have_a_device_E3():
    for buft in (CPU.default_buffer_type, *CPU_DEVICE.extra_buffer_types()):
        assert buft.device is CPU_DEVICE and buft.supports_backend(CPU)
