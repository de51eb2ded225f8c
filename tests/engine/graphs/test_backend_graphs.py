"""Graph copies, comparisons, placing by hand, data versions, devices that raise (rows A15)."""
import gc

import numpy as np
import pytest
from helpers import devices
from helpers.placed import CPU, array, placed, version

import ggjit as gg
from ggjit.core.host_buffer import ArrayBuffer
from ggjit.core.table import TABLE
from ggjit.ops.core.record import VIEW_OPS


# ---------------------------------------------------------------- A15 utilities
def test_view_init_A15_01():
    t = placed((8,), devices.Fake("A").buffer_type())
    inits = t.buffer.inits
    v = gg.view_1d(t, 2, 8)
    gg.view_init(v)
    assert t.buffer.inits == inits + 1 and v.buffer is t.buffer and v.offs == t.offs + 8
    with pytest.raises(gg.ParamError, match="not a view"):
        gg.view_init(t)
    with pytest.raises(gg.NotAllocated, match="which has no memory; allocate it first"):
        gg.view_init(gg.view_1d(gg.Context().new_tensor(gg.F32, (8,)), 2, 8))


def test_tensor_alloc_checks_A15_02():
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (8,), "t")
    buf = CPU.alloc_buffer(64)
    for offs in (-32, 8, 48, 64):
        with pytest.raises(gg.IndexRangeError, match="t F32"):
            gg.tensor_alloc(buf, t, offs)
    assert t.buffer is None
    gg.tensor_alloc(buf, t, 32)
    assert t.offs == 32
    with pytest.raises(gg.ParamError, match="is a view"):
        gg.tensor_alloc(buf, gg.view_1d(t, 2, 0), 0)


def small_graph():
    ctx = gg.Context()
    w, x = gg.from_numpy(ctx, array(16, 32), "w"), gg.from_numpy(ctx, array(4, 32), "x")
    y = gg.mul_mat(w, x)
    z = gg.soft_max(gg.scale(gg.transpose(gg.cont(gg.transpose(y))), 0.5))
    return gg.Graph(gg.add(z, gg.reshape_2d(y, 16, 4)))


@pytest.mark.parametrize("target", ["CPU", "fake"])
def test_graph_copy_A1_11_A15_03_to_A15_06(target):
    graph = small_graph()
    want = gg.compute(*graph.outputs)
    backend = CPU if target == "CPU" else devices.Fake("A").init_backend()
    alive = TABLE.n_alive()
    copy = gg.graph_copy(backend, graph)
    assert len(copy.graph) == len(graph) and [t.op for t in copy.graph.nodes] == [t.op for t in graph.nodes]
    assert [t.name for t in copy.graph.leafs] == [t.name for t in graph.leafs]
    backend.graph_compute(copy.graph)
    np.testing.assert_array_equal(copy.of(graph.outputs[0]).numpy(), want)
    copy.free()
    del copy
    gc.collect()
    assert TABLE.n_alive() <= alive
    bare = gg.Context().new_tensor(gg.F32, (4,), "bare")
    with pytest.raises(gg.NotAllocated, match="bare"):
        gg.graph_copy(backend, gg.Graph(gg.silu(bare)))
    tight = devices.Fake("T", memory=100).init_backend()
    with pytest.raises(gg.OutOfMemory, match="3840 bytes do not fit 100"):
        gg.graph_copy(tight, graph)


def test_a_graph_of_views_alone_copies_A15_05():
    a = gg.from_numpy(gg.Context(), array(4, 2))
    copy = gg.graph_copy(CPU, gg.Graph(gg.transpose(a)))
    np.testing.assert_array_equal(copy.graph.outputs[0].numpy(), a.numpy().T)
    copy.free()


def test_compare_graph_backend_A15_07_B5():
    graph, seen = small_graph(), []
    fake = devices.Fake("A").init_backend()

    def callback(i, t1, t2):
        seen.append(i)
        np.testing.assert_array_equal(t1.numpy(), t2.numpy())
        assert t1.op == graph.nodes[i].op and t1.buffer is not t2.buffer
    assert gg.compare_graph_backend(CPU, fake, graph, callback)
    assert seen == [i for i, t in enumerate(graph.nodes) if t.op not in VIEW_OPS]
    for stop in (False, np.False_, 0):
        for nodes in (None, graph.nodes):
            seen.clear()
            assert gg.compare_graph_backend(CPU, fake, graph, lambda i, *_, stop=stop: seen.append(i) or stop,
                                            test_nodes=nodes) is True
            assert len(seen) == 1
    for bad in (fake.device, CPU.default_buffer_type, None):
        with pytest.raises(gg.TypeMismatch, match="compare_graph_backend takes a Backend"):
            gg.compare_graph_backend(CPU, bad, graph, callback)
    seen.clear()
    assert gg.compare_graph_backend(CPU, fake, graph, callback, test_nodes=[graph.nodes[-1]])
    assert seen == [len(graph.nodes) - 1]
    with pytest.raises(gg.ParamError, match="test_nodes"):
        gg.compare_graph_backend(CPU, fake, graph, callback, test_nodes=[graph.leafs[0]])
    broken = devices.Fake("B", fail={"graph_compute"})
    with pytest.raises(devices.DeviceFailed, match="B.graph_compute"):
        gg.compare_graph_backend(CPU, broken.init_backend(), graph, callback)
    assert broken.used == 0


def test_comparing_a_graph_that_has_memory_gives_its_own_nodes():
    graph, seen = small_graph(), []
    want = {t.id: gg.compute(t) for t in graph.nodes}
    gg.GraphAllocator(CPU).alloc_graph(graph)

    def callback(i, t1, t2):
        seen.append(t1)
        assert t1 is graph.nodes[i] and t2 is not t1
        np.testing.assert_array_equal(t1.numpy(), want[t1.id])
        np.testing.assert_array_equal(t2.numpy(), want[t1.id])
    assert gg.compare_graph_backend(CPU, devices.Fake("A").init_backend(), graph, callback)
    assert seen == [t for t in graph.nodes if t.op not in VIEW_OPS]
    other = devices.Fake("B").init_backend()                        # cannot compute in the CPU's memory: two copies
    assert gg.compare_graph_backend(other, CPU, graph, lambda i, t1, t2: all(t1 is not t for t in graph.nodes))


# ---------------------------------------------------------------- data versions
def test_every_write_counts():
    t = placed((4, 4))
    u = placed((4, 4))
    u.set(array(4, 4))
    old = [version(t)]

    def changed():
        old.append(version(t))
        return old[-1] != old[-2]
    t.numpy()
    t.bytes()
    assert not changed() and t.buffer.trusted
    t.set(array(4, 4))
    assert changed()
    t.set_bytes(b"1234")
    assert changed()
    gg.view_1d(t, 2, 0).set([1, 2])
    assert changed()
    gg.tensor_memset(t, 0)
    assert changed()
    gg.tensor_copy(u, t)
    assert changed()
    t.buffer.clear(0)
    assert changed()
    with t.write() as a:
        a[0] = 1
    assert changed()
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 2
    CPU.graph_compute(gg.Graph(gg.cpy(u, t)))
    assert changed()
    assert t.buffer.trusted and t.buffer.arena is not None and not t.buffer.trusted, "who takes the arena may write it"


def test_third_party_slots_count_too():
    class Mine(gg.HostBuffer):
        def set_tensor(self, t, data, offset=0):
            super().set_tensor(t, data, offset)
    buf = Mine(CPU.default_buffer_type, 64)
    t = gg.Context().new_tensor(gg.F32, (4,))
    gg.tensor_alloc(buf, t, 0)
    before = version(t)
    buf.set_tensor(t, array(4))
    assert version(t) != before


def test_memory_of_the_user_is_not_trusted():
    x = array(4)
    frozen = x.copy()
    frozen.flags.writeable = False
    shadow = x.view()
    shadow.flags.writeable = False
    buft = CPU.default_buffer_type
    assert not any(ArrayBuffer(buft, a).trusted for a in (x, frozen, shadow)), "an owner may flip its flag back"
    assert ArrayBuffer(buft, np.frombuffer(x.tobytes(), np.float32)).trusted
    assert ArrayBuffer(buft, x, read_only=True).trusted
    buf = CPU.alloc_buffer(64)
    ctx = gg.Context()
    for offs in (0, 32, 0):
        gg.tensor_alloc(buf, ctx.new_tensor(gg.F32, (4,)), offs)
    assert not buf.trusted, "tensors on top of each other"


@pytest.mark.parametrize("slot", ["alloc_buffer", "init_backend", "supports_op", "graph_compute"])
def test_a_slot_that_raises_leaves_everything_usable(slot):
    device = devices.Fake("A", fail={slot})
    ctx = gg.Context()
    a = gg.from_numpy(ctx, array(4))
    graph = gg.Graph(gg.silu(a))
    copied = []
    with pytest.raises(devices.DeviceFailed, match=slot):
        backend = device.init_backend()
        backend.supports_op(graph.nodes[0])
        copied.append(gg.graph_copy(backend, graph))
        backend.graph_compute(copied[0].graph)
    for c in copied:
        c.free()
    device.fail.clear()
    copy = gg.graph_copy(device.init_backend(), graph)
    device.init_backend().graph_compute(copy.graph)
    np.testing.assert_array_equal(copy.of(graph.outputs[0]).numpy(), gg.compute(*graph.outputs))
    copy.free()
    assert device.used == 0
    devices.check_guards(device)


def test_a_copied_graph_knows_its_own_tensors():
    x = gg.from_numpy(gg.Context(), np.ones(4, np.float32))
    y = gg.silu(x)
    copy = gg.graph_copy(gg.init_backend("CPU"), gg.Graph(y))
    assert copy.of(y).op == y.op and copy.of(x).ctx is copy.ctx
    for stranger in (copy.of(y), gg.silu(x)):
        with pytest.raises(gg.ParamError, match="not a tensor of the graph that was copied"):
            copy.of(stranger)
    row = y.id
    del y
    TABLE.n_alive()                     # recycles now; otherwise many rows are recycled at once
    later = [gg.silu(x) for _ in range(4)]
    with pytest.raises(gg.ParamError, match="not a tensor of the graph that was copied"):
        copy.of(next(t for t in later if t.id == row))
    with pytest.raises(gg.TypeMismatch, match="takes a Tensor"):
        copy.of("y")
    copy.free()
