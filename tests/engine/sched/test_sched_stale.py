"""Nothing stale comes out: recycled tensor ids, open write blocks, arrays that look read-only, runs that failed."""
import gc
import mmap

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import alone, array, fill, llama_like, two_layers, weight, world

import ggjit as gg
from ggjit.core.host_buffer import ArrayBuffer


def product(x_of, delay=None):
    """A scheduler whose device A computes w x; x lies on the host, so A reads a copy.  x_of(ctx, cpu type) makes it."""
    sched, (a, c) = world(devices.Fake("A", delay=delay))
    ctx = gg.Context()
    w, x = weight(ctx, a, "w"), x_of(ctx, c)
    w.set(np.eye(8))
    graph = gg.Graph(gg.mul_mat(w, x))
    return sched, graph, x


def on_host(ctx, c):
    x = weight(ctx, c, "x")
    x.buffer.set_usage(gg.USAGE_ANY)                # copies of weights would not be kept
    x.set(np.zeros((8, 8)))
    return x


def values(sched, graph):
    sched.graph_compute(graph)
    return sched.numpy(graph.outputs[0])


# ---------------------------------------------------------------- recycled ids
def test_a_recycled_id_is_another_tensor():
    """ctx.free() gives rows back while the scheduler still remembers them; new tensors get the same numbers."""
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    sched.alloc_graph(graph)
    fill(graph)
    for t in graph.nodes:
        sched.set_tensor_backend(t, sched.backends[0])
    sched.graph_compute(graph)
    old = {t.id for t in (*graph.nodes, *graph.leafs)}
    graph.nodes[0].ctx.free()
    new = [gg.Context().new_tensor(gg.F32, (8, 8)) for _ in range(200)]
    again = [t for t in new if t.id in old]
    assert again, "rows are recycled"
    for t in again:
        assert sched.get_tensor_backend(t) is None
        with pytest.raises(gg.NotAllocated, match="not computed by this scheduler"):
            sched.numpy(t)
    x = gg.from_numpy(again[0].ctx, array(8, 8))
    other = gg.Graph(*[gg.add(x, t) for t in again[:3]])
    sched.alloc_graph(other)
    assert {s.backend.name for s in sched.splits} == {"CPU"}, "pins of the dead do not hold for the living"
    with pytest.raises(gg.StaleHandle, match="h belongs to a Context that was freed"):
        sched.get_tensor_backend(graph.nodes[0])


# ---------------------------------------------------------------- writes without a call of the API
def test_every_write_of_an_open_block_is_seen():
    sched, graph, x = product(on_host)
    with x.write() as a:
        for k in (1, 2, 3):
            a[...] = k
            assert (values(sched, graph) == k).all()
    assert (values(sched, graph) == 3).all()
    sched.graph_compute(graph)
    assert sched.copied_nbytes == 0, "closed blocks cost nothing"


def test_views_that_outlive_their_block_are_not_trusted():
    sched, graph, x = product(on_host)
    with x.write() as a:
        row = a[2]
        deep = row.reshape(2, 4)[1]
    for k in (1, 2):
        row[:] = k
        assert (values(sched, graph)[2] == k).all()
    del row
    deep[:] = 7
    assert (values(sched, graph)[2, 4:] == 7).all()
    deep[:] = 8
    del deep                                        # the last one: what it wrote since the copy still counts
    assert (values(sched, graph)[2, 4:] == 8).all()
    sched.graph_compute(graph)
    assert sched.copied_nbytes == 0 and x.buffer.trusted


def frozen(memory):
    memory.flags.writeable = False
    return memory


def flip(a):
    a.flags.writeable = True
    a[...] = 5


@pytest.mark.parametrize("kind", ["flipped flag", "bytearray", "memoryview of a bytearray", "mmap"])
def test_memory_that_only_looks_read_only(kind):
    owner = {"flipped flag": lambda: np.zeros(64, np.float32), "mmap": lambda: mmap.mmap(-1, 256)}.get(
        kind, lambda: bytearray(256))()
    if kind == "flipped flag":
        given = frozen(owner)
    elif kind == "bytearray":
        given = frozen(np.frombuffer(owner, np.float32))
    else:
        given = np.frombuffer(memoryview(owner).toreadonly(), np.float32)
    sched, graph, x = product(lambda ctx, c: gg.from_numpy(ctx, given.reshape(8, 8)))
    assert (values(sched, graph) == 0).all() and (values(sched, graph) == 0).all()
    if kind == "flipped flag":
        flip(owner)
    else:
        owner[:] = np.full(64, 5, np.float32).tobytes()
    assert (values(sched, graph) == 5).all()
    with pytest.raises(gg.ParamError, match="read-only"):
        x.set(np.zeros((8, 8)))


def test_memory_nobody_can_write_is_trusted():
    raw = array(64).tobytes()
    buft = gg.init_backend("CPU").default_buffer_type
    for given in (np.frombuffer(raw, np.float32), np.frombuffer(memoryview(raw), np.uint8)[4:]):
        assert ArrayBuffer(buft, given).trusted
    sched, graph, x = product(lambda ctx, c: gg.from_numpy(ctx, np.frombuffer(raw, np.float32).reshape(8, 8)))
    sched.graph_compute(graph)
    sched.graph_compute(graph)
    assert sched.copied_nbytes == 0


# ---------------------------------------------------------------- runs that did not finish
def failed(sched, graph):
    """Every way of reading the results of a run that did not finish."""
    for read in (lambda t: sched.numpy(t), lambda t: t.numpy(), lambda t: t.bytes()):
        with pytest.raises(gg.Overwritten, match="did not finish"):
            read(graph.outputs[0])


@pytest.mark.parametrize("delay", [None, 1e-4])
@pytest.mark.parametrize("how", ["device", "eval callback", "custom op", "abort callback"])
def test_results_of_a_run_that_failed_cannot_be_read(how, delay):
    fake = devices.Fake("A", delay=delay)
    sched, bufts = world(fake)
    if how in ("custom op", "abort callback"):
        bad, x = [], gg.from_numpy(gg.Context(), array(1000, 1000))

        def fun(dst, a, ith, nth):
            if bad:
                raise LookupError("custom")
            dst[...] = a
        y = gg.map_custom1(x, fun, 1)
        for _ in range(50):
            y = gg.add(y, x)
        graph = gg.Graph(y)
        for t in graph.nodes:                       # the callback is the CPU's, the exception that of a device
            sched.set_tensor_backend(t, sched.backends[how == "abort callback"])
    else:
        graph = llama_like(bufts, 3)[0]
        fill(graph)
    right = values(sched, graph)
    if how == "device":
        fake.fail.add("graph_compute")
    elif how == "eval callback":
        sched.set_eval_callback(lambda t, ask: ask and t is graph.nodes[4])
    elif how == "custom op":
        bad.append(True)
    else:
        sched.backends[1].abort_callback = lambda: True
    error, text = {"device": (devices.DeviceFailed, "A.graph_compute"), "custom op": (LookupError, "^'?custom'?$"),
                   "eval callback": (gg.Cancelled, "the eval callback stopped the computation at"),
                   "abort callback": (gg.Cancelled, "cancelled by the abort callback")}[how]
    with pytest.raises(error, match=text):
        sched.graph_compute(graph)
    failed(sched, graph)
    fake.fail.clear()
    sched.set_eval_callback(None)
    sched.backends[1].abort_callback = None
    if how == "custom op":
        bad.clear()
    np.testing.assert_array_equal(values(sched, graph), right)
    np.testing.assert_array_equal(graph.outputs[0].numpy(), right)


def test_a_submission_that_failed_later_cannot_be_read():
    fake = devices.Fake("A", delay=1e-3)
    sched, bufts = world(fake)
    graph = llama_like(bufts[:1] + bufts[:1], 2)[0]
    fill(graph)
    right = values(sched, graph)
    sched.backends[0].submit(lambda: 1 / 0)
    sched.graph_compute_async(graph)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        sched.synchronize()
    failed(sched, graph)
    np.testing.assert_array_equal(values(sched, graph), right)


def test_what_fails_before_it_starts_leaves_results_alone():
    fake = devices.Fake("A")
    sched, bufts = world(fake)
    graph = llama_like(bufts, 2)[0]
    fill(graph)
    right = values(sched, graph)
    bare = gg.Graph(gg.silu(gg.Context().new_tensor(gg.F32, (1 << 12, 1 << 12))))
    fake.fail.add("supports_op")
    with pytest.raises(devices.DeviceFailed, match="A.supports_op"):
        sched.graph_compute(bare)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), right)


def test_results_of_a_plan_that_failed_cannot_be_read():
    bad, x = [], gg.from_numpy(gg.Context(), array(300, 300))

    def fun(dst, a, ith, nth):
        if bad:
            raise LookupError("custom")
        dst[...] = a
    y = gg.silu(gg.map_custom1(gg.silu(x), fun, 1))
    graph, cpu = gg.Graph(y), gg.init_backend("CPU")
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.compute()
    right = y.numpy()
    bad.append(True)
    with pytest.raises(LookupError, match="custom"):
        plan.compute()
    for read in (lambda: plan.numpy(y), y.numpy, y.bytes):
        with pytest.raises(gg.Overwritten, match="did not finish"):
            read()
    bad.clear()
    plan.compute()
    np.testing.assert_array_equal(plan.numpy(y), right)
    assert gc.collect() >= 0 and (alone(graph) == right).all()
