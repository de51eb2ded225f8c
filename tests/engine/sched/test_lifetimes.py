"""How long memory and events live: schedulers that are dropped, contexts that end, frees that raise."""
import gc
import weakref

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import alone, fill, llama_like, two_layers, world

import ggjit as gg
from ggjit.core.buffer import MultiBuffer

BOOM = RuntimeError("driver lost")


@pytest.mark.parametrize("n_good", range(5))
def test_events_made_before_one_that_failed_are_freed(n_good):
    device, made = devices.Slots(delay=1e-3), []

    def event_new():
        if len(made) == n_good:
            raise BOOM
        made.append(object())
        return made[-1]
    device.answers["event_new"] = event_new
    backends = [device.init_backend(), device.init_backend(), gg.init_backend("CPU")]
    with pytest.raises(RuntimeError, match="driver lost"):
        gg.Scheduler(backends, parallel=True)
    assert device.freed_events == made
    device.answers.clear()
    gg.Scheduler(backends, parallel=True).free()


def test_a_free_that_raises_does_not_keep_the_others():
    device = devices.Slots()
    sched, bufts = world(device, parallel=True)
    graph = two_layers(*bufts)
    sched.alloc_graph(graph)
    used = [b for b in device.buffers if b.alive and b.usage == gg.USAGE_COMPUTE]
    assert used
    device.answers.update(free=BOOM, event_free=RuntimeError("event"), synchronize=RuntimeError("stream"))
    with pytest.raises(RuntimeError, match="stream"):
        sched.free()
    assert not any(b.alive for b in used) and device.freed_events == device.events
    assert sched.buffer_size(sched.backends[1]) == 0 and graph.leafs[0].ctx.alive
    sched.free()
    device.answers.clear()
    other, _ = world(devices.Slots("B"))
    other.graph_compute(graph)


def test_a_multi_buffer_frees_all_its_members():
    device = devices.Slots()
    bufs = [device.buffer_type().alloc_buffer(64) for _ in range(3)]
    group = MultiBuffer(bufs)
    device.answers["free"] = BOOM
    with pytest.raises(RuntimeError, match="driver lost"):
        group.free()
    assert not any(b.alive for b in (*bufs, group)) and device.used == 0
    group.free()


def test_growing_goes_on_when_freeing_the_old_memory_fails():
    device = devices.Slots()
    sched, bufts = world(device)
    small, large = (llama_like(bufts, 2, n)[0] for n in (8, 32))
    for g in (small, large):
        fill(g)
    sched.graph_compute(small)
    device.answers["free"] = BOOM
    with pytest.raises(RuntimeError, match="driver lost"):
        sched.graph_compute(large)
    device.answers.clear()
    for g in (large, small):
        sched.graph_compute(g)
        np.testing.assert_array_equal(sched.numpy(g.outputs[0]), alone(g))


# ---------------------------------------------------------------- who lives how long
def test_a_scheduler_keeps_no_leaves_alive():
    device = devices.Slots()
    sched, bufts = world(device)
    keep = two_layers(*bufts)
    watch, used = [], device.used
    for _ in range(3):
        ctx = gg.Context()
        x = ctx.new_tensor(gg.F32, (8, 8), "x")
        graph = gg.Graph(gg.silu(x))
        sched.set_tensor_backend(x, sched.backends[0])
        sched.alloc_graph(graph)
        watch.append(weakref.ref(ctx))
        assert device.used > used
        sched.alloc_graph(keep)                     # another graph is the last one
        sched.settings.pins.clear()              # pins are the user's wish and hold what they name until reset
        device.asked.clear()
        del ctx, x, graph
        gc.collect()
    assert [w() for w in watch] == [None] * 3
    sched.free()
    assert device.used == used, "their memory went with them"


def test_memory_of_leaves_ends_with_their_context():
    device = devices.Slots()
    sched, _ = world(device)
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (8, 8), "x")
    sched.set_tensor_backend(x, sched.backends[0])
    sched.alloc_graph(gg.Graph(gg.silu(x)))
    buf = x.buffer
    ctx.free()
    assert not buf.alive
    sched.reset()
    sched.free()
    assert device.used == 0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_dropped_scheduler_gives_everything_back(parallel):
    device = devices.Slots()
    sched, bufts = world(device, parallel=parallel)
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (8, 8), "x")
    graph = gg.Graph(gg.silu(x), gg.scale(x, 3.0))
    sched.set_tensor_backend(x, sched.backends[0])
    sched.graph_compute(graph)
    x.set(np.ones((8, 8)))
    assert device.used > x.nbytes
    del sched
    device.asked.clear()
    gc.collect()
    assert device.freed_events == device.events and [b for b in device.buffers if b.alive] == [x.buffer]
    assert (x.numpy() == 1).all(), "leaves live as long as their context"
    del ctx, x, graph
    gc.collect()
    assert device.used == 0


def test_a_custom_op_may_know_its_scheduler():
    """An object with a scheduler whose graph calls a method of that object: both end together."""
    class Model:
        def __init__(self, device):
            self.sched, _ = world(device)
            self.factor = 2
            self.graph = gg.Graph(gg.map_custom1(gg.from_numpy(gg.Context(), np.ones(8, np.float32)), self.op, 1))

        def op(self, dst, a, ith, nth):
            dst[...] = self.factor * a
    device = devices.Slots()
    model = Model(device)
    model.sched.graph_compute(model.graph)
    assert (model.sched.numpy(model.graph.outputs[0]) == 2).all()
    watch = weakref.ref(model)
    del model
    device.asked.clear()
    gc.collect()
    assert watch() is None and device.used == 0
