"""Scheduler(work=True): what kernels work in lies with the graph's tensors, each for its own node."""
import numpy as np
import pytest
from helpers import devices, sched_graphs
from helpers.schedulers import poison

import ggjit as gg
from ggjit.cpu.cpu_plan import CPUPlan
from ggjit.cpu.device import CPU
from ggjit.graphs.placed import PlacedGraph
from ggjit.graphs.requests import work_begin, work_room
from ggjit.ops.core.record import OP, VIEW_OPS

BYTES_OF_JUNK = 300
POOL = [OP.MUL_MAT, OP.ADD, OP.MUL, OP.UNARY, OP.SCALE, OP.RMS_NORM, OP.CONT, OP.SOFT_MAX, OP.SUB, OP.CPY, OP.CONCAT]


class Scribbles:
    """A backend that fills the work memory of every node with NaN bytes right before and right after it computes it."""

    def __init__(self, device, seed):
        super().__init__(device)
        self.rng, self.wants, self.scribbled = np.random.default_rng(seed), {}, 0

    def work_nbytes(self, node):
        if node.op in VIEW_OPS:
            return 0
        wanted = self.wants.get(node.id)
        if wanted is None:              # one that wants much, so that room beside is not for nothing
            most = BYTES_OF_JUNK if any(n > BYTES_OF_JUNK for n in self.wants.values()) else 20 * BYTES_OF_JUNK
            wanted = self.wants[node.id] = max(int(self.rng.integers(-most // 2, most)), 0)
        return wanted

    def graph_compute(self, graph):
        for k, t in enumerate(graph.nodes):
            self._scribble(graph, t)
            CPUPlan(self, PlacedGraph(graph.device, [t], (*graph.key, k)), None).compute()
            self._scribble(graph, t)

    def _scribble(self, graph, t):
        if graph.placement is not None and t.id in graph.placement.work:
            buf, offs, nbytes = graph.placement.work[t.id]
            assert nbytes >= self.work_nbytes(t) and offs % 64 == 0 and offs + nbytes <= buf.size
            buf._arena[offs:offs + nbytes] = 0xFF
            self.scribbled += 1


def results(graph, work, planner="ggml", n_threads=(1,), device=None):
    """(bytes of the outputs, announced bytes, bytes of work memory beside, the scheduler)"""
    backends = [gg.init_backend("CPU", n_threads=n) for n in n_threads]
    backends = backends if device is None else [device.init_backend(), *backends]
    sched = gg.Scheduler(backends, planner=planner, work=work)
    announced = sched.reserve_size(graph)
    sched.reserve(graph)
    held = [sched.buffer_size(b) for b in backends]
    sched.graph_compute(graph)
    assert announced == held == [sched.buffer_size(b) for b in backends]
    return [sched.numpy(t).tobytes() for t in graph.outputs], sum(held), beside(sched), sched


def beside(sched):
    """Bytes of work memory that the plans of the last graph take beside the compute buffers."""
    plans = [p for part in sched._run.parts[0] for p in part.graph.plans.plans()]
    return max((p.work_nbytes for p in plans), default=0)


class Scribbler(Scribbles, devices.FakeBackend):
    """At once."""


class LateScribbler(Scribbles, devices.AsyncBackend):
    """A stream: the work is done later, by a thread."""

    def graph_compute(self, graph):
        self.submit(lambda: Scribbles.graph_compute(self, graph))


def rows_and_order(n=512):
    """A large tensor, dead when a row is sorted: the kernel, which needs memory for each thread, may work there."""
    rng = np.random.default_rng()
    x, y = (gg.tensor(rng.standard_normal((m, n), dtype=np.float32)) for m in (64, 3))
    square = gg.set_name(gg.sqr(x), "square")
    return gg.Graph(gg.sum_rows(square), gg.set_name(gg.argsort(y, 0), "sorted"))


@pytest.mark.parametrize("planner", ["ggml", "best"])
@pytest.mark.parametrize("n_threads", [(1,), (2,), (1, 2)])
def test_the_same_bits_in_fewer_bytes(planner, n_threads):
    graph = rows_and_order()
    (a, before, apart, _), (b, after, none, sched) = (results(graph, x, planner, n_threads) for x in (False, True))
    assert a == b and apart > 0 == none and after < before + apart
    with pytest.raises(gg.Overwritten, match="the memory of square .* was reused by <sorted"):
        sched.numpy(graph.nodes[0])
    assert sched.reserve_size(graph, work=False) == [before] + [0] * (len(n_threads) - 1)
    assert gg.Scheduler(gg.init_backend("CPU", n_threads=n_threads[0])).reserve_size(graph, planner, True) == [after]


def test_memory_that_nobody_else_reads():
    """Two kinds of memory, work in one of them."""
    device = devices.Fake("A", ops={OP.SQR, OP.SUM_ROWS})
    graph = rows_and_order()
    (a, before, apart, _), (b, after, none, _) = (results(graph, work, device=device) for work in (False, True))
    assert a == b and after + none <= before + apart
    devices.check_guards(device)


def test_threads_that_change_and_larger_graphs():
    """Other threads need other work memory: planned anew, and what is announced is held."""
    small, large = rows_and_order(256), rows_and_order(1024)
    backend = gg.init_backend("CPU", n_threads=1)
    sched = gg.Scheduler(backend, work=True)
    sched.reserve(small)
    for n_threads, graph in ((1, small), (2, small), (1, large), (4, large), (2, small), (1, small), (4, large)):
        backend.n_threads = n_threads
        held = sched.buffer_size(backend)
        announced, = sched.reserve_size(graph)
        sched.graph_compute(graph)
        assert sched.buffer_size(backend) == max(held, announced) and beside(sched) == 0
        assert sched.numpy(graph.outputs[0]).tobytes() == gg.compute(graph.outputs[0]).tobytes()
    other = gg.Scheduler(backend, work=True)
    other.alloc_graph(small)
    sched.free()
    other.graph_compute(small)


def test_work_memory_moves_with_its_buffer():
    """A plan that was made finds its work memory where the larger buffer is."""
    small, large = rows_and_order(512), rows_and_order(4096)
    backend = gg.init_backend("CPU", n_threads=1)
    sched = gg.Scheduler(backend, work=True)
    sched.graph_compute(small)
    plan, = (p for part in sched._run.parts[0] for p in part.graph.plans.plans())
    first = sched.numpy(small.outputs[0]).tobytes()
    sched.reserve(large)
    poisoned = sched.memory.chunks[0][0]
    poisoned._arena[:] = 0xFF
    sched.graph_compute(small)
    again, = (p for part in sched._run.parts[0] for p in part.graph.plans.plans())
    assert plan is again and {id(buf) for _, buf, _ in plan._work_places} == {id(poisoned)}
    assert sched.numpy(small.outputs[0]).tobytes() == first


def test_callbacks_see_nodes_that_work_with_the_rest():
    graph, seen = rows_and_order(), []
    sched = gg.Scheduler(gg.init_backend("CPU", n_threads=1), work=True)

    def callback(t, ask):
        if not ask:
            seen.append(sched.numpy(t).tobytes())
        return True
    sched.set_eval_callback(callback)
    sched.graph_compute(graph)
    assert beside(sched) == 0
    for t, values in zip(graph.nodes, seen, strict=True):
        assert values == gg.compute(t).tobytes()


def draw(seed):
    """(devices, scheduler) that differ in memory, ops and chunks."""
    rng = np.random.default_rng(seed)
    fakes = [devices.Fake(name, ops=None if rng.random() < 0.4 else {op for op in POOL if rng.random() < 0.7},
                          host=bool(rng.random() < 0.25), alignment=int(rng.choice([32, 64, 128])),
                          max_size=4096 if rng.random() < 0.3 else None,
                          delay=1e-4 if rng.random() < 0.4 else None)
             for name in "AB"[:int(rng.integers(1, 3))]]
    last = devices.Fake("C", host=True, reads=[CPU.buffer_type()], type="cpu")
    listed = [*fakes, *fakes[:int(rng.integers(2))], last]       # two backends of one device share its memory
    backends = [(Scribbler if f.delay is None else LateScribbler)(f, seed + k) for k, f in enumerate(listed)]
    sched = gg.Scheduler(backends, rules=("2023", "2024", "modern")[seed % 3],
                         parallel=bool(rng.random() < 0.3), motion=bool(rng.random() < 0.3),
                         keep_weights=bool(rng.random() < 0.3),
                         planner="best" if rng.random() < 0.3 else "ggml", work=True, time_limit=0.05)
    return [*fakes, last], sched


def assert_read_or_refused(plan, sched, alone, drawn):
    """Every result is there or said to be overwritten."""
    for a, b in zip(alone.nodes, drawn.nodes, strict=True):
        try:
            want, got = plan.numpy(a), sched.numpy(b)
        except gg.Overwritten:
            continue
        assert want.tobytes() == got.tobytes(), b


def check(seed):
    """Random graphs on random devices whose kernels spoil all of their work memory: the bits of one device without."""
    cpu, writes = gg.init_backend("CPU:n_threads=1"), bool(seed % 2)
    alone = sched_graphs.random_graph(seed, lambda ctx, *kinds: gg.alloc_ctx_tensors(ctx, cpu), writes=writes)
    gg.alloc_ctx_tensors(alone.graph.nodes[0].ctx, cpu, all=True)       # every node has memory of its own
    plan = cpu.graph_plan_create(alone.graph)
    fakes, sched = draw(seed)
    writer = sched.support.own_bufts[-1]
    drawn = sched_graphs.random_graph(seed, lambda ctx, *kinds: gg.alloc_ctx_tensors(ctx, writer), writes=writes)
    sched.reserve(drawn.graph)
    sizes = [sched.buffer_size(b) for b in sched.backends]
    if sched.planner == "ggml":
        assert sizes == sched.reserve_size(drawn.graph)
    for run in range(2):
        for d in (alone, drawn):
            d.fill(100 * seed + run)
        plan.compute()
        sched.alloc_graph(drawn.graph)
        poison(sched)
        sched.graph_compute_async(drawn.graph)
        sched.synchronize()
        want = [plan.numpy(t).tobytes() for t in alone.graph.outputs] + [t.bytes() for t in alone.caches]
        got = [sched.numpy(t).tobytes() for t in drawn.graph.outputs] + [t.bytes() for t in drawn.caches]
        assert got == want, f"seed {seed} run {run}\n{sched.explain()}"
        if not writes:
            assert_read_or_refused(plan, sched, alone.graph, drawn.graph)
        devices.check_guards(*fakes)
    if sched.planner == "ggml":
        assert sizes == [sched.buffer_size(b) for b in sched.backends]
    sched.free()
    for b in sched.backends:
        b.free()
    return sum(b.scribbled for b in sched.backends)


@pytest.mark.parametrize("seeds", [range(k, 60, 6) for k in range(6)], ids=str)
def test_kernels_that_spoil_their_work_memory(seeds):
    assert sum(bool(check(seed)) for seed in seeds) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_six_hundred_that_spoil_their_work_memory(block):
    assert sum(bool(check(seed)) for seed in range(60 + 60 * block, 120 + 60 * block)) > 20


@pytest.mark.parametrize("alignment", [1, 32, 64, 256])
def test_work_memory_fits_its_room_wherever_it_lies(alignment):
    buft = devices.Fake("A", alignment=alignment).buffer_type()
    for offs in range(0, 4 * max(alignment, 64), alignment):
        assert work_begin(offs) % 64 == 0 and offs <= work_begin(offs)
        assert work_begin(offs) + 1000 <= offs + work_room(1000, buft) <= offs + 1064


def test_a_wrong_answer_about_work_memory_is_named():
    class Wrong(devices.FakeBackend):
        def work_nbytes(self, node):
            return -1
    sched = gg.Scheduler(Wrong(devices.Fake("A", host=True, reads=[CPU.buffer_type()])), work=True)
    with pytest.raises(gg.GgjitError, match="backend A: work_nbytes must be an integer of at least 0, got -1"):
        sched.reserve(rows_and_order())
