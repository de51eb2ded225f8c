"""Nodes between two meetings of all threads share no memory that one of them writes, and results have equal bits."""
import itertools
import random

import numpy as np
import pytest
from helpers.sample import SEED

import ggjit as gg
from benchmarks import core_traffic
from ggjit.core.buffer import place
from ggjit.cpu import sharing
from ggjit.cpu.phases import LEAST_WORK_NBYTES
from ggjit.ops.core.record import N_WORK, N_WORK_SIZE

CPU = gg.init_backend("CPU")


def plan_of(graph, n_threads, least=1.0):
    cpu = gg.init_backend("CPU", n_threads=n_threads)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    with sharing.forced(least):
        return cpu.graph_plan_create(graph)


def spans(plan, i):
    """([(first byte, end)] that node i writes, those that it reads) by the addresses in its row."""
    part, words = plan.parts[i], plan._view_words
    mine = [(t, int(plan.rows[w])) for t, w in zip(plan._views, words, strict=True)
            if plan._starts[i] <= w < plan._starts[i + 1]]
    stored = {t.id for t in part.stored}
    at = int(plan.rows[plan._starts[i] + N_WORK])
    work = [(at, at + part.kernel.work_nbytes)] if plan.rows[plan._starts[i] + N_WORK_SIZE] else []
    return [(a, a + t.nbytes) for t, a in mine if t.id in stored] + work, [(a, a + t.nbytes) for t, a in mine]


def check(plan):
    """No two nodes of a phase meet in memory; returns how many meetings were saved."""
    phase = []
    for i, meets in enumerate(plan._meet):
        phase.append((i, plan._shared[0][i] == 1, *spans(plan, i)))
        if meets:
            for (i, alone, writes, reads), (k, other_alone, other_writes, other_reads) in \
                    itertools.combinations(phase, 2):
                pairs = [*itertools.product(writes, other_writes + other_reads),
                         *itertools.product(reads, other_writes)]
                bad = [x for x, y in pairs if x[0] < y[1] and y[0] < x[1]]
                assert not bad or alone and other_alone, f"nodes {i} and {k} of {plan.kernels[i].name}"
            phase = []
    return plan._meet.count(False)


def random_graph(rng):
    ctx = gg.Context()
    live = [gg.from_numpy(ctx, rng.standard_normal((n, 64), np.float32)) for n in (48, 1, 1, 1)]
    weights = [gg.from_numpy(ctx, rng.standard_normal((64, 64), np.float32), type=t) for t in (gg.F32, gg.F16, gg.Q8_0)]
    ops = (lambda a, b: gg.mul_mat(weights[rng.integers(3)], a), lambda a, b: gg.add(a, b if a.ne == b.ne else a),
           lambda a, b: gg.rms_norm(a, 1e-5), lambda a, b: gg.soft_max(a),
           lambda a, b: gg.scale_inplace(gg.dup(a), 0.5), lambda a, b: gg.mul(gg.sigmoid(a), a))
    for _ in range(int(rng.integers(5, 40))):
        a, b = (live[k] for k in rng.integers(max(0, len(live) - 6), len(live), 2))
        live.append(ops[rng.integers(len(ops))](a, b))
    return gg.Graph(*live[-2:])


def test_random_graphs():
    rng, saved = np.random.default_rng(SEED), 0
    for _ in range(12):
        graph, results = random_graph(rng), []
        for n, least in ((1, 1.0), (2, 1.0), (2, float(rng.choice([500, 2000]))), (5, 1.0)):
            plan = plan_of(graph, n, least)
            if plan._meet is not None:
                saved += check(plan)
            for _ in range(2):
                plan.compute()
                results.append([plan.numpy(t).tobytes() for t in graph.outputs])
        assert all(r == results[0] for r in results)
    assert saved


@pytest.mark.parametrize("name", ("token, Q4_0", *random.Random(SEED).sample(sorted(core_traffic.GRAPHS), 2)))
def test_the_graphs_that_are_counted(name):
    repacked, build = core_traffic.GRAPHS[name]
    new = core_traffic.Leaves(repacked)
    with new.ctx:
        graph = gg.Graph(*build(new), order="together")
    new.filled(CPU)
    check(plan_of(graph, 2))


def test_tensors_that_move():
    """Two products of one column are one phase; where one begins to read what the other writes, threads meet."""
    ctx, rng = gg.Context(), np.random.default_rng(SEED)
    w = gg.from_numpy(ctx, rng.standard_normal((64, 64), np.float32))
    a, b = (gg.from_numpy(ctx, rng.standard_normal(64, np.float32)) for _ in "ab")
    first, second = gg.mul_mat(w, a), gg.mul_mat(w, b)
    graph = gg.Graph(first, second)
    plan = plan_of(graph, 2)
    plan.compute()
    before = plan.numpy(second)
    assert plan._meet == [False, True]
    place(b, *graph.placement.where[first.id])
    with sharing.forced(1.0):
        plan.compute()
    assert plan._meet == [True, True] and (plan.numpy(second) != before).all()
    np.testing.assert_allclose(plan.numpy(second), w.numpy() @ plan.numpy(first), rtol=1e-3, atol=1e-3)


def test_work_memory_of_any_size():
    """A node's own is larger than phases take, and no whole number of cache lines."""
    x = gg.from_numpy(gg.Context(), np.random.default_rng().random((3, 33333), np.float32))
    y = gg.top_k(x, 100)
    plan = plan_of(gg.Graph(y), 2)
    assert plan.work_nbytes == max(k.work_nbytes for k in plan.kernels) > LEAST_WORK_NBYTES
    plan.compute()
    found = np.take_along_axis(x.numpy(), y.numpy(), -1)
    np.testing.assert_array_equal(np.sort(found), np.sort(x.numpy())[..., -100:])
