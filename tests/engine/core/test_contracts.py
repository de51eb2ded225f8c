"""Third parties that break their contract: slots that raise, answers that are nonsense, frees that never come.

Every one ends in a typed error that names it (or in what the device itself raised); nothing leaks, all objects stay
usable.  How long memory lives: test_lifetimes.py.
"""
import copy
import gc
import importlib.metadata
import pickle
import warnings
import weakref

import numpy as np
import pytest
from helpers import devices
from helpers.devices import Reg
from helpers.schedulers import alone, array, fill, llama_like, world

import ggjit as gg
from ggjit.api.registry import Registry
from ggjit.core.events import event_new
from ggjit.cpu.device import CPU

BOOM = RuntimeError("driver lost")


# ---------------------------------------------------------------- slots that raise
@pytest.mark.parametrize("slot", ["supports_op", "offload_op", "alignment", "max_size", "alloc_size", "alloc_buffer",
                                  "init_tensor", "set_tensor", "copy_tensor_async", "graph_compute", "synchronize",
                                  "event_record", "graph_optimize"])
def test_a_slot_that_raises_leaves_nothing_behind(slot):
    """While the graph is planned, placed and computed.  Afterwards the same scheduler computes the same graph."""
    device = devices.Slots()
    sched, bufts = world(device, parallel=slot == "event_record")
    graph = llama_like([bufts[1], bufts[0]], 4)[0]
    ctx = graph.leafs[0].ctx
    x = ctx.new_tensor(gg.F32, (32, 32), "late")                # the scheduler places it on the device
    whole = gg.Graph(gg.add(gg.mul_mat(graph.leafs[0], x), graph.outputs[0]))
    used = device.used
    sched.set_tensor_backend(x, sched.backends[0])
    device.answers[slot] = BOOM
    for _ in range(2):
        with pytest.raises(RuntimeError, match="driver lost"):
            sched.graph_compute(whole)
        if slot not in ("graph_compute", "synchronize", "event_record", "copy_tensor_async", "set_tensor"):
            assert x.buffer is None, "planning that failed places nothing"
            assert device.used == used or slot == "init_tensor", "and allocates nothing"
    device.answers.clear()
    sched.alloc_graph(whole)
    fill(whole)
    sched.graph_compute(whole)
    np.testing.assert_array_equal(sched.numpy(whole.outputs[0]), alone(whole))
    devices.check_guards(device)
    sched.free()
    assert device.used == used and device.freed_events == device.events


@pytest.mark.parametrize("slot", ["get_tensor", "set_tensor", "copy_tensor"])
def test_data_slots_that_raise(slot):
    device = devices.Slots()
    ctx = gg.Context()
    a, b = (ctx.new_tensor(gg.F32, (8,), n) for n in "ab")
    gg.alloc_ctx_tensors(ctx, device.buffer_type())
    a.set(np.ones(8))
    device.answers[slot] = BOOM
    with pytest.raises(RuntimeError, match="driver lost"):
        gg.tensor_copy(a, b)
        a.numpy()
    device.answers.clear()
    gg.tensor_copy(a, b)
    assert (b.numpy() == 1).all()


def test_init_tensor_that_raises_leaves_tensors_where_they_were():
    device, ctx, calls = devices.Slots(), gg.Context(), []
    ts = [ctx.new_tensor(gg.F32, (8,)) for _ in range(3)]

    def third(t):
        calls.append(t)
        if len(calls) == 3:
            raise BOOM
    device.answers["init_tensor"] = third
    with pytest.raises(RuntimeError, match="driver lost"):
        gg.alloc_ctx_tensors(ctx, device.buffer_type())
    assert device.used == 0 and all(t.buffer is None for t in ts) and not ctx.buffers
    calls[:] = [1, 2]
    with pytest.raises(RuntimeError, match="driver lost"):
        gg.graph_copy(device.init_backend(), gg.Graph(gg.silu(gg.from_numpy(ctx, array(4)))))
    assert device.used == 0
    device.answers.clear()
    gg.alloc_ctx_tensors(ctx, device.buffer_type())
    device.answers["init_tensor"] = BOOM
    buf, new = device.buffer_type().alloc_buffer(64), ctx.new_tensor(gg.F32, (8,))
    with pytest.raises(RuntimeError, match="driver lost"):
        gg.tensor_alloc(buf, new, 0)
    assert new.buffer is None and ts[0].buffer is not None, "a place that was refused changes nothing"


# ---------------------------------------------------------------- answers that are nonsense
@pytest.mark.parametrize("slot,answer", [
    ("alignment", lambda: None), ("alignment", 0), ("alignment", -32), ("alignment", "32"), ("alignment", 2.5),
    ("max_size", lambda: None), ("max_size", 0), ("alloc_size", lambda t: None), ("alloc_size", lambda t: t.nbytes - 1),
    ("alloc_size", lambda t: 1 << 70), ("alloc_size", lambda t: (1 << 63) - 1), ("max_size", 8),
    ("alloc_buffer", lambda size: None), ("alloc_buffer", lambda size: np.zeros(size)),
    ("alloc_buffer", lambda size: gg.HostBuffer(CPU.buffer_type(), size // 2)),
    ("supports_op", lambda t: np.array([True, False])), ("supports_buft", lambda b: np.array([1, 0])),
    ("offload_op", lambda t: np.zeros(3)), ("graph_optimize", lambda ns: None), ("graph_optimize", 3)],
    ids=lambda x: x if isinstance(x, str) else "")
def test_nonsense_is_a_typed_error(slot, answer):
    device = devices.Slots()
    cpu = gg.init_backend("CPU:n_threads=1")
    device.answers[slot] = answer

    def go():
        sched = gg.Scheduler([device.init_backend(), cpu])
        ctx = gg.Context()
        x = ctx.new_tensor(gg.F32, (8, 8), "x")
        y = gg.Graph(gg.silu(x))
        sched.set_tensor_backend(y.nodes[0], sched.backends[0])
        sched.set_tensor_backend(x, sched.backends[0])
        sched.alloc_graph(y)
        x.set(np.zeros((8, 8)))
        sched.graph_compute(y)
        return sched.numpy(y.outputs[0])
    with pytest.raises(gg.GgjitError, match={"graph_optimize": slot, "alloc_size": "A|bytes"}.get(slot, "A")):
        go()
    gc.collect()
    assert device.used == 0
    if slot in ("alignment", "max_size", "alloc_size", "alloc_buffer"):
        ctx = gg.Context()
        x = ctx.new_tensor(gg.F32, (8, 8))
        with pytest.raises(gg.GgjitError, match=f"A: .*{slot}|bytes"):
            gg.alloc_ctx_tensors(ctx, device.buffer_type())
        assert x.buffer is None and device.used == 0
    device.answers.clear()
    assert (go() == 0).all()


def test_an_arena_that_is_no_flat_memory_is_refused():
    class Mine(gg.Buffer):
        def __init__(self, buft, size, arena):
            super().__init__(buft, size)
            self.arena = arena
    buft = CPU.buffer_type()
    for bad in (np.zeros(63, np.uint8), np.zeros(64, np.float32), np.zeros((8, 8), np.uint8), bytearray(64),
                np.zeros(128, np.uint8)[::2]):
        with pytest.raises(gg.TypeMismatch, match="flat uint8"):
            Mine(buft, 64, bad)
    assert Mine(buft, 64, np.zeros(64, np.uint8)).arena.size == 64


@pytest.mark.parametrize("answer", [lambda t: None, lambda t: t.nbytes - 1, lambda t: 1 << 70])
def test_graph_allocators_check_answers_too(answer):
    device = devices.Slots()
    graph = gg.Graph(gg.silu(gg.from_numpy(gg.Context(), array(8))))
    device.answers["alloc_size"] = answer
    with pytest.raises(gg.GgjitError, match="alloc_size|bytes"):
        gg.GraphAllocator(device.buffer_type()).alloc_graph(graph)
    assert device.used == 0 and graph.placement is None


def test_a_graph_allocator_that_cannot_grow_keeps_what_it_has():
    """The first buffer type has memory, the second has none: the small graph's memory is still there."""
    a, b = devices.Slots("A"), devices.Slots("B")
    allocator = gg.GraphAllocator([a.buffer_type(), b.buffer_type()])
    graphs = []
    for n in (64, 4096):
        x = gg.from_numpy(gg.Context(), array(n))
        graphs.append(gg.Graph(gg.silu(x), gg.relu(x)))
        n_leafs = len(graphs[-1].leafs)
    allocator.alloc_graph(graphs[0], [0, 1], [0] * n_leafs)
    held = [allocator.buffer_size(i) for i in (0, 1)]
    b.answers["alloc_buffer"] = gg.OutOfMemory("no more")
    with pytest.raises(gg.OutOfMemory, match="no more"):
        allocator.alloc_graph(graphs[1], [0, 1], [0] * n_leafs)
    assert [allocator.buffer_size(i) for i in (0, 1)] == held and a.used == held[0] and b.used == held[1]
    assert all(allocator.placement(t)[0].alive for t in graphs[0].nodes)
    b.answers.clear()
    allocator.alloc_graph(graphs[1], [0, 1], [0] * n_leafs)
    allocator.free()
    assert (a.used, b.used) == (0, 0)


def test_no_device_is_asked_for_a_buffer_of_no_bytes():
    """Not every driver makes them; empty tensors have a place all the same."""
    device, asked = devices.Slots(), []
    device.answers["alloc_buffer"] = lambda size: (asked.append(size), devices.SlotsBuffer(device._buft, size))[1]
    ctx = gg.Context()
    none = [ctx.new_tensor(gg.F32, (0, 3)) for _ in range(2)]
    gg.alloc_ctx_tensors(ctx, device.buffer_type())
    assert [t.numpy().shape for t in none] == [(3, 0)] * 2
    sched, _ = world(device)
    late = gg.Context().new_tensor(gg.F32, (0, 3))
    sched.set_tensor_backend(late, sched.backends[0])
    with ctx:
        sched.graph_compute(graph := gg.Graph(gg.silu(late), gg.silu(none[0])))
    assert [sched.numpy(t).shape for t in graph.outputs] == [(3, 0)] * 2 and asked and min(asked) > 0


def test_max_sizes_beyond_64_bits_mean_no_limit():
    """SIZE_MAX, say."""
    device, ctx = devices.Slots(), gg.Context()
    device.answers["max_size"] = (1 << 64) - 1
    x = ctx.new_tensor(gg.F32, (8, 8))
    gg.alloc_ctx_tensors(ctx, device.buffer_type())
    x.set(np.ones((8, 8)))
    sched, _ = world(device)
    with ctx:
        sched.graph_compute(graph := gg.Graph(gg.scale(x, 3.0)))
    assert (sched.numpy(graph.outputs[0]) == 3).all()


def test_handles_are_neither_copied_nor_pickled():
    """A second buffer with the number of the first would free its tensors; a second CPU reads none of the first's."""
    sched, _ = world(devices.Fake("A"))
    x = gg.from_numpy(gg.Context(), array(8))
    for handle in (sched, *sched.backends, CPU, CPU.buffer_type(), x.buffer, event_new(devices.Fake("B", delay=1))):
        for again in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(gg.TypeMismatch, match="copied or pickled"):
                again(handle)


# ---------------------------------------------------------------- callbacks
def test_an_eval_callback_cannot_pull_the_run_away():
    sched, bufts = world(devices.Fake("A"))
    graph, other = (llama_like(bufts, 2, n)[0] for n in (8, 64))
    for g in (graph, other):
        fill(g)
    refused = []

    def callback(t, ask):
        if not ask and t is graph.nodes[2]:
            for call in (lambda: sched.graph_compute(other), lambda: sched.graph_compute_async(graph), sched.reset,
                         lambda: sched.reserve(other), lambda: sched.alloc_graph(other), sched.free,
                         lambda: sched.split_graph(other)):
                with pytest.raises(gg.GgjitError, match="is computing"):
                    call()
                refused.append(call)
            assert sched.numpy(t).shape == t.shape and sched.get_tensor_backend(t) is not None and sched.n_splits
        return True
    sched.set_eval_callback(callback)
    sched.graph_compute(graph)
    assert len(refused) == 7
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    sched.set_eval_callback(None)
    sched.graph_compute(other)


def test_callbacks_that_died_or_answer_nonsense():
    class Watcher:
        def see(self, t, ask):
            return True
    sched, bufts = world(devices.Fake("A"))
    graph = llama_like(bufts, 2)[0]
    fill(graph)
    watcher = Watcher()
    dead = weakref.proxy(watcher)
    sched.set_eval_callback(lambda t, ask: dead.see(t, ask))
    sched.graph_compute(graph)
    del watcher
    gc.collect()
    with pytest.raises(ReferenceError, match="no longer exists"):
        sched.graph_compute(graph)
    for bad, error, text in ((lambda: None, TypeError, "takes 0 positional arguments"),
                             (lambda t, ask: np.array([1, 0]), gg.GgjitError, "must answer True or False")):
        sched.set_eval_callback(bad)
        with pytest.raises(error, match=text):
            sched.graph_compute(graph)
    sched.set_eval_callback(None)
    cpu = sched.backends[1]
    big = gg.from_numpy(gg.Context(), np.ones((1000, 1000), np.float32))
    y = big
    for _ in range(100):
        y = gg.add(y, big)
    for bad, error, text in ((lambda: dead.see(1, 2), ReferenceError, "no longer exists"),
                             (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
                             (lambda: np.array([1, 0]), ValueError, "truth value of an array")):
        cpu.abort_callback = bad
        with pytest.raises(error, match=text):
            gg.compute(y, backend=cpu)
    cpu.abort_callback = None
    assert (gg.compute(y, backend=cpu) == 101).all()
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


# ---------------------------------------------------------------- tensors of other devices
def test_leaves_on_a_device_that_is_not_in_the_scheduler():
    """Values come through the slots of their buffer; what would be written there is refused; NULL has no values."""
    stranger = devices.Fake("S")
    sched, (a, c) = world(devices.Fake("A"))
    ctx = gg.Context()
    far, near = ctx.new_tensor(gg.F32, (8, 8), "far"), ctx.new_tensor(gg.F32, (8, 8), "near")
    gg.tensor_alloc(stranger.buffer_type().alloc_buffer(far.nbytes), far, 0)
    gg.tensor_alloc(c.alloc_buffer(near.nbytes), near, 0)
    graph = gg.Graph(gg.add(far, near))
    for _ in range(2):
        fill(graph)
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    with pytest.raises(gg.NotSupported, match="writes into far"):
        sched.graph_compute(gg.Graph(gg.scale_inplace(far, 2.0)))
    nothing = ctx.new_tensor(gg.F32, (8, 8), "nothing")
    gg.tensor_alloc(gg.init_backend("NULL").alloc_buffer(nothing.nbytes), nothing, 0)
    with pytest.raises(gg.NotAllocated, match="NULL"):
        sched.graph_compute(gg.Graph(gg.add(nothing, near)))
    far.buffer.free()
    with pytest.raises(gg.StaleHandle, match="freed"):
        sched.graph_compute(graph)
    other = gg.Graph(gg.silu(near))
    sched.graph_compute(other)
    np.testing.assert_array_equal(sched.numpy(other.outputs[0]), alone(other))


# ---------------------------------------------------------------- the registry
class Broken(gg.Device):
    """A device whose named properties raise."""

    def __init__(self, *broken):
        self.broken = broken

    name = property(lambda self: self._get("name", "B"))
    type = property(lambda self: self._get("type", "cpu"))
    description = property(lambda self: self._get("description", "broken"))

    def _get(self, what, value):
        if what in self.broken:
            raise RuntimeError(f"{what}: driver lost")
        return value

    def memory(self):
        self._get("memory", 0)
        return 0, 0


class RaisingName(Reg):
    asked = 0

    @property
    def name(self):
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("name: driver lost")
        return "third"

    @name.setter
    def name(self, value):
        pass


@pytest.mark.parametrize("make,heard", [
    (lambda: Reg(Broken("name")), "name: driver"), (lambda: Reg(Broken("type")), "type: driver"),
    (lambda: RaisingName(), None), (lambda: Reg(None, 3), "no attribute"),
    (lambda: Reg(Broken(), proc_address=lambda name: 1 / 0), None),
    (lambda: Reg(Broken("memory", "description")), None),
    (lambda: Reg(type("D", (gg.Device,), {"name": 3})()), "a device has .name"),
    (lambda: Reg(type("D", (gg.Device,), {"type": "tpu"})()), "tpu")],
    ids=["name", "type", "registry name", "no device", "proc address", "memory", "number as name", "unknown type"])
def test_a_broken_third_party_breaks_nobody_else(make, heard):
    registry = Registry()
    good = devices.Fake("Good")
    registry.register(make())
    registry.register(Reg(good, name="good"))

    def use():
        assert registry.device("cpu") is CPU and registry.device("GOOD") is good
        assert registry.by_type("gpu") is good and registry.best() is good and registry.by_type("null").name == "NULL"
        assert {"Good", "CPU", "NULL"} <= {d.name for d in registry.devices()}
        assert {"Good", "CPU", "NULL"} <= {p["name"] for p in registry.props()}
        assert registry.registry("Good") and registry.registry("absent") is None and len(registry.registries()) >= 4
        assert registry.proc_address("ggml_backend_get_features") is not None
        with pytest.raises(gg.ParamError, match="there are"):
            registry.device("absent")
    with warnings.catch_warnings(record=True) as said:
        use()
    assert not heard or any("does not work" in str(w.message) for w in said)
    use()
    assert not heard or any(heard in repr(e) for _, e in registry.errors)


def test_broken_metadata_of_packages_is_reported(monkeypatch):
    def broken(group):
        raise ValueError("METADATA is no metadata")
    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    registry = Registry()
    with pytest.warns(UserWarning, match="no metadata"):
        assert registry.device("CPU") is CPU
