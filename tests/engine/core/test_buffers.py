"""Buffer types, buffers and the slots of theirs that allocators and copies call; backends: test_backend.py.

Names of tests carry the rows of ggml's behaviour they check (A2.04 ...); tests/LEDGER.md maps every row.
"""
import mmap
import threading

import numpy as np
import pytest
from helpers import devices
from helpers.placed import CPU, array, placed

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.cpu.device import CPU as CPU_DEVICE


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


def test_a_buffer_that_is_freed_takes_no_memory_from_other_threads_tensors(monkeypatch):
    """A worker of this process frees an arena while tensors are made: between its look for them and its write."""
    gone = placed((4,))
    buf, made, threads = gone.buffer, [], []
    gone.ctx.free()                                     # its row is free: the next tensors take it

    def make():
        while gone.id not in [t.id for t in made[-1:]]:
            made.append(placed((4,)))
        made[-1].set(np.ones(4))

    class Words(np.ndarray):
        def __eq__(self, other):
            found = super().__eq__(other)
            if self.ndim == 1 and not threads:
                threads.append(threading.Thread(target=make))
                threads[0].start()
                threads[0].join(1)                      # it waits for the lock, or it has come in between
            return found
    monkeypatch.setattr(TABLE, "words", TABLE.words.view(Words))
    buf.free()
    threads[0].join()
    np.testing.assert_array_equal(made[-1].numpy(), np.ones(4))


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


# ---------------------------------------------------------------- slots of buffers, called where ggml calls them
class Recording(devices.FakeBuffer):
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


class RecordingType(devices.FakeBufferType):
    def alloc_buffer(self, size):
        return Recording(self, size)


def recording(**options):
    """A device whose buffers are Recording."""
    device = devices.Fake("A", **options)
    device._buft = RecordingType(device, "A", False)
    return device


def test_allocators_reset_buffers_before_they_hand_them_out_anew_A3_11_A3_24():
    buft = recording().buffer_type()
    allocator = gg.GraphAllocator(buft)
    graphs = [gg.Graph(gg.silu(gg.Context().new_tensor(gg.F32, (8,)))) for _ in range(2)]
    for n, graph in enumerate(graphs, 1):
        allocator.alloc_graph(graph)
        buf = allocator.placement(graph.outputs[0])[0]
        assert buf.resets == n and buf.extras == {t.id for t in (*graph.leafs, *graph.nodes)}
    buf.reset()
    assert buf.extras == set() and buf.buft is buft


def test_a_scheduler_resets_its_buffers_when_another_graph_computes_there_A3_11():
    backend = recording().init_backend()
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
