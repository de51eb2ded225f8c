"""Buffer types with a maximum: planner "best" cuts chunks of its own; executed, with the validator on and poisoned."""
import dataclasses

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import poison

import ggjit as gg
from ggjit.alloc import graph_alloc
from ggjit.cpu.cpu_plan import CPUPlan
from ggjit.cpu.device import CPU


@pytest.fixture(autouse=True)
def validated(monkeypatch):
    monkeypatch.setattr("ggjit.core.config.debug", {"validate", "poison"})
    for module in ("ggjit.graphs.allocator", "ggjit.sched.layout", "ggjit.graphs.graph_plan", "ggjit.cpu.cpu_plan"):
        monkeypatch.setattr(f"{module}.debug", {"validate", "poison"})


def network(seed):
    """Products of many widths, some of them joined: ggml leaves holes."""
    rng = np.random.default_rng(seed)
    x = gg.tensor(rng.standard_normal((64, 256), dtype=np.float32))
    live = [gg.relu(x)]
    for _ in range(int(rng.integers(8, 30))):
        a = live[rng.integers(max(0, len(live) - 3), len(live))]
        w = rng.standard_normal((int(rng.integers(1, 12)) * 32, a.ne[0]), dtype=np.float32) * np.float32(0.05)
        t = gg.mul_mat(gg.tensor(w), a)
        if rng.random() < 0.4 and len(live) > 2:
            t = gg.concat(t, live[rng.integers(max(0, len(live) - 4), len(live))], 0)
        live.append(gg.silu(t) if rng.random() < 0.3 else t)
    return gg.Graph(live[-1])


def device_with(limit):
    device = devices.Fake("A", host=True, reads=[CPU.buffer_type()], max_size=limit, alignment=32)
    return device, device.init_backend()


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_in_chunks(seed):
    graph = network(seed)
    y, whole = graph.outputs[0], gg.measure(graph, planner="ggml").peak
    want = gg.compute(y).tobytes()
    for limit in (whole // 2, whole // 4):
        taken = {}
        for planner in ("ggml", "best"):
            device, backend = device_with(limit)
            allocator = gg.GraphAllocator(backend, planner)
            allocator.alloc_graph(graph)
            plan = CPUPlan(backend, graph, graph.placement)
            for _ in range(2):
                plan.compute()
                assert plan.numpy(y).tobytes() == want
            chunks, = allocator.last.chunk_sizes
            taken[planner] = allocator.buffer_size()
            assert taken[planner] == sum(chunks) == gg.measure(graph, planner, backend).peak and len(chunks) > 1
            assert max(chunks) <= max(limit, max(t.nbytes for t in graph.nodes) + 31)
            sched = gg.Scheduler(backend, planner=planner)
            assert sched.reserve_size(graph) == [taken[planner]]
            sched.alloc_graph(graph)
            for _ in range(2):
                poison(sched)
                sched.graph_compute(graph)
                assert sched.numpy(y).tobytes() == want
            assert sched.buffer_size(backend) == taken[planner]
            devices.check_guards(device)
        assert taken["best"] <= taken["ggml"]


def test_what_was_announced_is_taken_however_busy_the_machine(monkeypatch):
    """A search that the clock cuts short at random: what was found first stays."""
    search, rng, limits = graph_alloc.best_plan, np.random.default_rng(), []

    def busy(make, chunks, options):
        limits.append(float(rng.choice([0.0, options.time_limit])))
        return search(make, chunks, dataclasses.replace(options, time_limit=limits[-1]))
    monkeypatch.setattr(graph_alloc, "best_plan", busy)
    for seed in range(20, 32):
        graph = network(seed)
        _, backend = device_with(gg.measure(graph, planner="ggml").peak // 3)
        del limits[:]
        announced = gg.measure(graph, target=backend).peak
        allocator = gg.GraphAllocator(backend, "best")
        allocator.reserve(graph)
        assert allocator.buffer_size() == announced
        allocator.alloc_graph(graph)
        assert allocator.buffer_size() == announced == allocator.last.peak
        sched = gg.Scheduler(backend, planner="best")
        said = sched.reserve_size(graph)
        sched.alloc_graph(graph)
        assert [sched.buffer_size(backend)] == said
