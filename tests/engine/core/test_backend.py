"""Backends; buffers: test_buffers.py; devices and registry: test_backend_registry.py; graphs: test_backend_graphs.py.

Names of tests carry the rows of ggml's behaviour they check (A2.04 ...); tests/LEDGER.md maps every row.
"""
import numpy as np
import pytest
from helpers import devices
from helpers.placed import CPU, array, placed

import ggjit as gg
from ggjit.cpu.cpu_plan import shared_work
from ggjit.cpu.device import CPU as CPU_DEVICE
from ggjit.cpu.walk import BARRIER_AFTER
from ggjit.ops.core.record import N_FLAGS


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
