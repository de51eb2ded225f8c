"""Asynchronous streams on one scheduler: graphs in flight that share leaves or memory, and reads that do not wait."""
import threading

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import RULES
from helpers.streams import N, leaf, world

import ggjit as gg
from ggjit.core.pending import IN_FLIGHT
from ggjit.ops.core.record import OP
from ggjit.sched.scheduled_plan import ScheduledPlan


def two_streams(rules="modern", parallel=False, delay=5e-3):
    """A scales and copies, B adds; both late."""
    a = devices.Fake("A", ops={OP.CPY, OP.SCALE}, delay=delay)
    b = devices.Fake("B", ops={OP.ADD}, delay=delay)
    return world(a, b, rules=rules, parallel=parallel)


def adds_to(cache):
    with gg.Context() as ctx:
        return gg.Graph(gg.add(gg.from_numpy(ctx, np.ones(N, np.float32)), cache))


def value(sched, graph):
    got = np.unique(sched.numpy(graph.outputs[0]))
    assert got.size == 1
    return float(got[0])


# ---------------------------------------------------------------- leaves that a stream still writes
@pytest.mark.parametrize("rules", RULES)
def test_a_graph_waits_for_the_leaf_another_graph_writes(rules):
    sched, (a, b, _) = two_streams(rules)
    cache, x = leaf(a, 0, "cache"), leaf(a, 3, "x")
    with x.ctx:
        writes = gg.Graph(gg.cpy(gg.scale(x, 2.0), cache))
    reads = adds_to(cache)
    for graph in (writes, reads, writes, reads):
        sched.graph_compute(graph)
    assert value(sched, reads) == 7
    x.set(np.full(N, 30, np.float32))
    sched.graph_compute_async(writes)
    sched.graph_compute_async(reads)
    assert value(sched, reads) == 61
    sched.graph_compute(reads)
    assert value(sched, reads) == 61, "a copy made too early must not count as good later"


@pytest.mark.parametrize("rules", RULES)
def test_a_copy_waits_for_tensor_set_async(rules):
    sched, (a, b, _) = two_streams(rules)
    c = leaf(a, 0)
    reads = adds_to(c)
    sched.graph_compute(reads)
    for new in (5, 6):
        gg.tensor_set_async(a, c, np.full(N, new, np.float32))
        sched.graph_compute(reads)
        assert value(sched, reads) == new + 1
        sched.graph_compute(reads)
        assert value(sched, reads) == new + 1
        sched.graph_compute(reads)              # the write counted twice: when it was submitted, when it was done
        assert sched._run.elided_nbytes == c.nbytes, "c was not written again: its copy is still good"


def test_weights_that_nobody_writes_are_copied_without_a_wait():
    """Copies of weights are made in every run; their stream is waited for once, not in every run."""
    sched, (a, b, _) = two_streams()
    w = leaf(a, 2)
    w.buffer.set_usage(gg.USAGE_WEIGHTS)
    reads = adds_to(w)
    sched.graph_compute(reads)
    waits, real = [], a.synchronize
    a.synchronize = lambda: (waits.append(1), real())
    for _ in range(3):
        sched.graph_compute_async(reads)
        assert sched.copied_nbytes >= w.nbytes
    assert not waits
    del a.synchronize
    assert value(sched, reads) == 3


# ---------------------------------------------------------------- memory that two graphs share
def sums(sched, a, n, depth):
    """acc = (1 + 2 + ... + depth + 1) x, and the factor; acc lies on the device."""
    ctx, own = gg.Context(), gg.Context()
    x = gg.set_input(ctx.new_tensor(gg.F32, (n,)))
    acc = own.new_tensor(gg.F32, (n,), "acc")
    gg.alloc_ctx_tensors(own, a)
    with ctx:
        terms = [gg.scale(x, float(i + 1)) for i in range(depth)]
        y = terms[0]
        for t in terms[1:]:
            y = gg.add(y, t)
        graph = gg.Graph(gg.cpy(gg.add(y, x), acc))
    sched.alloc_graph(graph)
    return graph, x, acc, depth * (depth + 1) // 2 + 1


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("sizes", [(64, 6, 256, 3), (1024, 2, 64, 12), (256, 20, 300, 2)], ids=str)
def test_two_graphs_in_flight_share_memory_with_different_layouts(parallel, sizes):
    sched, (a, _) = world(devices.Fake("A", ops={OP.ADD, OP.SCALE, OP.CPY}, delay=4e-3), parallel=parallel)
    one, x1, acc1, f1 = sums(sched, a, *sizes[:2])
    two, x2, acc2, f2 = sums(sched, a, *sizes[2:])
    for graph, x in ((one, x1), (two, x2)):
        x.set(np.zeros(x.ne[0], np.float32))
        sched.graph_compute(graph)
    for k in range(1, 4):
        x1.set(np.full(x1.ne[0], k, np.float32))
        sched.graph_compute_async(one)
    x2.set(np.full(x2.ne[0], 7, np.float32))
    sched.graph_compute_async(two)
    sched.synchronize()
    assert (acc1.numpy() == 3 * f1).all()
    assert (acc2.numpy() == 7 * f2).all()


@pytest.mark.parametrize("change", ["pin", "motion"])
def test_a_graph_cut_anew_waits_for_its_own_last_run(change):
    sched, (a, cpu) = world(devices.Fake("A", ops={OP.ADD, OP.SCALE, OP.CPY}, delay=4e-3), parallel=True)
    graph, x, acc, factor = sums(sched, a, 256, 8)
    x.set(np.zeros(256, np.float32))
    sched.graph_compute(graph)
    x.set(np.full(256, 2, np.float32))
    sched.graph_compute_async(graph)
    waits, real = [], a.synchronize
    a.synchronize = lambda: (waits.append(1), real())
    if change == "pin":
        sched.set_tensor_backend(graph.nodes[1], cpu)
    else:
        sched.motion = not sched.motion
    x.set(np.full(256, 3, np.float32))
    sched.graph_compute_async(graph)
    assert waits
    del a.synchronize
    assert (acc.numpy() == 3 * factor).all()


# ---------------------------------------------------------------- reads
@pytest.mark.parametrize("read", [lambda t: t.numpy(), np.asarray, lambda t: np.frombuffer(t.bytes(), np.float32)])
def test_reads_wait_for_what_is_in_flight(read):
    sched, (a, _) = world(devices.Fake("A", delay=2e-2))
    x, cache = leaf(a, 1), leaf(a, 0)
    with x.ctx:
        y = gg.scale(x, 2.0)
        graph = gg.Graph(gg.cpy(y, cache))
    gg.set_output(y)
    sched.graph_compute(graph)
    for t in (y, cache):
        x.set(x.numpy() + 4)
        want = 2 * x.numpy()
        sched.graph_compute_async(graph)
        assert sched in IN_FLIGHT
        assert (read(t) == want).all()
        assert sched not in IN_FLIGHT
    sched.graph_compute_async(graph)
    read(gg.from_numpy(gg.Context(), np.ones(3, np.float32)))
    assert sched in IN_FLIGHT, "memory that the streams do not reach is read at once"
    sched.free()
    assert sched not in IN_FLIGHT


def test_errors_of_the_stream_come_out_of_the_read():
    device = devices.Fake("A", delay=1e-3)
    sched, (a, _) = world(device)
    x = leaf(a, 1)
    with x.ctx:
        y = gg.scale(x, 2.0)
    sched.graph_compute(gg.Graph(y))
    sched.graph_compute_async(graph := gg.Graph(y))
    a.submit(lambda: (_ for _ in ()).throw(devices.DeviceFailed("late")))
    with pytest.raises(devices.DeviceFailed, match="late"):
        y.numpy()
    with pytest.raises(gg.Overwritten, match="did not finish .DeviceFailed"):
        sched.numpy(y)
    sched.graph_compute(graph)
    assert (sched.numpy(y) == 2).all()


# ---------------------------------------------------------------- sources that a node updates
def adamw(w_on, m_on):
    """opt_step_adamw with w, its gradient and the parameters in one place, the moments in another."""
    rng = np.random.default_rng(0)
    here, there = gg.Context(), gg.Context()
    w, grad = (here.new_tensor(gg.F32, (N,), name) for name in ("w", "grad"))
    p = here.new_tensor(gg.F32, (7,), "p")
    m, v = (there.new_tensor(gg.F32, (N,), name) for name in ("m", "v"))
    for ctx, target in ((here, w_on), (there, m_on)):
        if target is not None:
            gg.alloc_ctx_tensors(ctx, target)
    gg.set_param(w)
    with here:
        graph = gg.Graph(gg.opt_step_adamw(w, grad, m, v, p))

    def fill():
        w.set(rng.standard_normal(N))
        grad.set(rng.standard_normal(N))
        m.set(np.zeros(N)), v.set(np.zeros(N))
        p.set(np.array([0.1, 0.9, 0.999, 1e-8, 0.01, 10, 1000]))
    return graph, (w, m, v), fill


def three_steps(sched, graph, state, fill):
    sched.alloc_graph(graph)
    fill()
    for _ in range(3):
        sched.graph_compute(graph)
    return [t.numpy() for t in state]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("w_on,m_on", [("A", "CPU"), ("CPU", "A"), ("A", None), ("CPU", None)])
def test_moments_are_updated_where_they_lie(rules, w_on, m_on):
    """A reads and writes host memory, the CPU does not reach A's."""
    sched, (a, cpu) = world(devices.Fake("A", reads=(gg.init_backend("CPU").default_buffer_type,)), rules=rules)
    where = {"A": a, "CPU": cpu, None: None}
    got = three_steps(sched, *adamw(where[w_on], where[m_on]))
    alone = gg.Scheduler([cpu])
    for x, y in zip(got, three_steps(alone, *adamw(cpu, cpu)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("swap", [False, True])
def test_moments_out_of_reach_are_refused(rules, swap):
    sched, (a, cpu) = world(devices.Fake("A"), rules=rules)
    graph, (w, m, v), fill = adamw(*((cpu, a) if swap else (a, cpu)))
    fill()
    with pytest.raises(gg.NotSupported, match=r"writes into w .* m .* v .*reaches that memory"):
        sched.graph_compute(graph)
    assert not m.numpy().any()


def test_copies_of_moments_are_not_kept():
    """Another node reads m elsewhere: its copy is made again after every step."""
    device = devices.Fake("A", ops={OP.SCALE})
    sched, (a, cpu) = world(device)
    graph, (w, m, v), fill = adamw(cpu, cpu)
    with w.ctx:
        y = gg.scale(m, 1.0)
    both = gg.Graph(graph.outputs[0], y)
    sched.set_tensor_backend(y, a)
    fill()
    for _ in range(3):
        sched.graph_compute(both)
        np.testing.assert_array_equal(sched.numpy(y), m.numpy())


# ---------------------------------------------------------------- empty graphs
@pytest.mark.parametrize("rules", RULES)
def test_graphs_of_empty_tensors(rules):
    sched, _ = world(devices.Fake("A", ops={OP.ADD}), rules=rules)
    x = gg.Context().new_tensor(gg.F32, (0, 3))
    with x.ctx:
        z = gg.add(gg.silu(x), x)
    for _ in range(2):
        sched.graph_compute(gg.Graph(z))
        assert sched.numpy(z).shape == (3, 0)


def test_reading_threads_do_not_disturb_a_pipeline():
    """x.set and graph_compute_async here, cache.numpy() there: every value read is one that some run left."""
    sched, (a, _) = world(devices.Fake("A", delay=1e-3), parallel=True)
    ctx, cache = gg.Context(), leaf(a, 0)
    x = gg.set_input(ctx.new_tensor(gg.F32, (N,)))
    with ctx:
        graph = gg.Graph(gg.cpy(gg.scale(x, 2.0), cache))
    sched.alloc_graph(graph)
    seen, stop = [], threading.Event()

    def reader():
        while not stop.is_set():
            seen.append(cache.numpy()[0])
    thread = threading.Thread(target=reader)
    thread.start()
    for k in range(1, 30):
        x.set(np.full(N, k, np.float32))
        sched.graph_compute_async(graph)
    sched.synchronize()
    stop.set()
    thread.join()
    assert set(seen) <= {2.0 * k for k in range(30)}
    assert (cache.numpy() == 58).all()


@pytest.mark.parametrize("type", [gg.F32, gg.F16, gg.BF16, gg.Q8_0])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 1, 3, 64)])
def test_what_is_submitted_is_read_as_numpy_reads_it(shape, type):
    """Shapes, types and values of `numpy`, of a graph and of a plan."""
    x = gg.from_numpy(gg.Context(), np.random.default_rng(3).standard_normal(shape, np.float32))
    y = gg.scale(x, 2.0) if type is gg.F32 else gg.cast(x, type)
    sched, graph = gg.Scheduler([gg.init_backend("CPU")]), gg.Graph(y)
    plan = ScheduledPlan(sched, graph)
    for read in (sched.submit_and_read(graph, y), plan.submit(y)):
        got = read()
        want = sched.numpy(y)
        assert got.shape == want.shape == shape and got.dtype == want.dtype and np.array_equal(got, want)
        assert np.array_equal(plan.numpy(y), want)
