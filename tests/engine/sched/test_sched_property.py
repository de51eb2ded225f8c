"""Random graphs on random devices with random pins are bit-identical to the single-device run.

Compute memory is poisoned with NaN bytes before every run (copies that may be reused are spared), guard bytes surround
every buffer, inputs change between some runs and stay between others, caches are written by the graph.
"""
import numpy as np
import pytest
from helpers import devices, sched_graphs
from helpers.paths import TESTS_PATH
from helpers.schedulers import RULES, poison

import ggjit as gg
from ggjit.cpu.device import CPU
from ggjit.ops.core.record import OP

CI_SEEDS, ALL_SEEDS = range(0, 1000, 25), range(1000)
N_RUNS = 4
HOST = CPU.buffer_type()
POOL = [OP.MUL_MAT, OP.ADD, OP.MUL, OP.UNARY, OP.SCALE, OP.RMS_NORM, OP.CONT, OP.SOFT_MAX, OP.SUB, OP.CPY, OP.CONCAT]


def draw(rng, reach=False):
    """Random devices, then the CPU; everything but values random.  reach: devices may read each other's memory."""
    fakes = []
    for name in "ABC"[:int(rng.integers(1, 4))]:
        ops = None if rng.random() < 0.4 else {op for op in POOL if rng.random() < 0.7}
        delay = 1e-5 if rng.random() < 0.25 else None
        host = bool(rng.random() < 0.25)
        reads = [buft for buft in (HOST, *(f.buffer_type() for f in fakes)) if reach and rng.random() < 0.5]
        fakes.append(devices.Fake(name, ops=ops, host=host, delay=20 * delay if delay and reach else delay, reads=reads,
                                  max_size=4096 if rng.random() < 0.2 else None,
                                  offload=(lambda t: t.op == OP.MUL_MAT) if rng.random() < 0.4 else None))
    cpu = gg.init_backend("CPU", n_threads=1 + int(rng.random() < 0.2))
    sched = gg.Scheduler([*(f.init_backend() for f in fakes), cpu], rules=RULES[int(rng.integers(3))],
                         parallel=bool(rng.random() < 0.3), motion=bool(rng.random() < 0.3),
                         keep_weights=bool(rng.random() < 0.3), planner="best" if rng.random() < 0.2 else "ggml")
    return fakes, sched


def places(rng, sched, reach=False):
    bufts = sched.support.own_bufts
    writers = [k for b, k in zip(sched.backends, bufts, strict=True)
               if getattr(b.device, "ops", None) is None or OP.CPY in b.device.ops]

    def place(ctx, weights, inputs, caches):
        for t in (*weights, *caches, *inputs):
            if t in inputs and rng.random() < 0.6:
                if rng.random() < 0.7:
                    gg.set_input(t)
                continue
            choice = writers if t in caches else bufts          # a cache lies where a backend can write it
            choice = [HOST] if reach and t in caches and rng.random() < 0.6 else choice
            buf = choice[int(rng.integers(len(choice)))].alloc_buffer(t.nbytes)
            buf.set_usage(gg.USAGE_WEIGHTS if t in weights and rng.random() < 0.8 else gg.USAGE_ANY)
            gg.tensor_alloc(buf, t, 0)
    return place


def pin(rng, sched, graph):
    """Pins that can be honoured: no node that writes another's memory, no base of one, supported ops."""
    bases = {t.view_src.id for t in graph.nodes if t.view_src is not None}
    for t in graph.nodes:
        if t.view_src is None and t.id not in bases and rng.random() < 0.15:
            b = sched.backends[int(rng.integers(len(sched.backends)))]
            if b.supports_op(t):
                sched.set_tensor_backend(t, b)


def read(graph, drawn, get):
    return [get(t).tobytes() for t in graph.outputs] + [t.bytes() for t in drawn.caches]


def check(seed, reach=False):
    rng = np.random.default_rng(seed)
    alone = sched_graphs.random_graph(seed, lambda ctx, *kinds: gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU")))
    cpu = gg.init_backend("CPU:n_threads=1")
    gg.GraphAllocator(cpu).alloc_graph(alone.graph)
    plan = cpu.graph_plan_create(alone.graph)
    fakes, sched = draw(rng, reach)
    drawn = sched_graphs.random_graph(seed, places(rng, sched, reach))
    graph = drawn.graph
    pin(rng, sched, graph)
    sched.alloc_graph(graph)
    for run in range(N_RUNS):
        if run == 0:
            changed = None
        else:
            changed = [i for i in range(len(drawn.leaves)) if rng.random() < 0.4]
        for d in (alone, drawn):
            d.fill(100 * seed + run, only=None if changed is None else [d.leaves[i] for i in changed])
        poison(sched)
        plan.compute()
        sched.graph_compute(graph)
        want, got = read(alone.graph, alone, plan.numpy), read(graph, drawn, sched.numpy)
        assert got == want, f"seed {seed} run {run}\n{sched.explain()}"
        devices.check_guards(*fakes)
    sched.free()
    for b in sched.backends:
        b.free()


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_sampled(seed):
    check(seed)


@pytest.mark.parametrize("seeds", [range(8), range(8, 16), range(16, 24), (1073, 1174, 1816)], ids=str)
def test_devices_that_read_each_others_memory(seeds):
    """Results computed in place, leaves and intermediate memory that several devices touch, some of them late."""
    for seed in seeds:
        check(seed, reach=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_that_read_each_others_memory(block):
    for seed in ALL_SEEDS[100 * block:100 * block + 100]:
        check(seed, reach=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_a_thousand(block):
    for seed in ALL_SEEDS[50 * block:50 * (block + 1)]:
        check(seed)


@pytest.mark.parametrize("seed", range(0, 150, 6))
def test_pipelined(seed):
    """Six runs are submitted without waiting, inputs overwritten after each; streams have real delays."""
    rng = np.random.default_rng(seed)
    cpu = gg.init_backend("CPU:n_threads=1")
    alone = sched_graphs.random_graph(seed, lambda ctx, *kinds: gg.alloc_ctx_tensors(ctx, cpu))
    gg.GraphAllocator(cpu).alloc_graph(alone.graph)
    plan = cpu.graph_plan_create(alone.graph)
    fakes = [devices.Fake(name, ops=None if rng.random() < 0.4 else {op for op in POOL if rng.random() < 0.7},
                          host=bool(rng.random() < 0.25), delay=rng.random() * 3e-4 if rng.random() < 0.8 else None)
             for name in "ABC"[:int(rng.integers(1, 4))]]
    sched = gg.Scheduler([*(f.init_backend() for f in fakes), cpu], rules=RULES[int(rng.integers(3))], parallel=True)
    placed = places(rng, sched)

    def place(ctx, weights, inputs, caches):
        placed(ctx, weights, [], caches)
        for t in inputs:
            gg.set_input(t)
    drawn = sched_graphs.random_graph(seed, place)
    pin(rng, sched, drawn.graph)
    sched.alloc_graph(drawn.graph)
    for d in (alone, drawn):
        d.fill(seed)
    for run in range(6):
        for d in (alone, drawn):
            d.fill(1000 * seed + run, only=d.inputs)
        plan.compute()
        sched.graph_compute_async(drawn.graph)
    sched.synchronize()
    assert read(drawn.graph, drawn, sched.numpy) == read(alone.graph, alone, plan.numpy), str(sched.explain())
    devices.check_guards(*fakes)
    sched.free()
    for b in sched.backends:
        b.free()


def test_under_the_debug_switches(python):
    """GGJIT_DEBUG=poison,validate: runs start in NaN bytes, memory plans are judged; results stay the same."""
    code = "import test_sched_property as p\nfor seed in range(0, 40): p.check(seed)\nprint('right')"
    r = python(code, GGJIT_DEBUG="poison,validate", PYTHONPATH=TESTS_PATH)
    assert r.stdout.split() == ["right"], r.stderr[-2000:]
