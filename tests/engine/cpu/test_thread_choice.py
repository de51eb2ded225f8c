"""Threads are taken out of a plan where waiting for them costs more than they bring, and back.  Times are simulated."""
import random
from functools import partial

import numpy as np
import pytest

import ggjit as gg
from ggjit.cpu import thread_choice
from ggjit.cpu.thread_choice import ThreadChoice, choice_of
from ggjit.cpu.thread_pool import the_pool


def simulate(choice, n_runs, seconds):
    """Runs with times seconds(n_threads): (all seconds, threads of each run)."""
    total, used = 0.0, []
    for _ in range(n_runs):
        used.append(choice.n_threads())
        s = seconds(used[-1])
        choice.ran(s)
        total += s
    return total, used


def idle(rng, n_threads):
    """A core each: half of the work scales, runs differ by 5 %, one in fifty takes three times as long."""
    return (0.5 + 0.5 / n_threads) * rng.uniform(1, 1.05) * (3 if rng.random() < 0.02 else 1)


def busy(rng, n_threads):
    """Two cores with two other processes: a thread alone gets half of a core; of two, one is often descheduled."""
    if n_threads == 1:
        return rng.uniform(1.6, 2.4)
    return 0.75 if rng.random() < 0.3 else rng.uniform(3.5, 5)


def slower(rng, n_threads):
    """Two threads are always slower than one."""
    return 1.0 if n_threads == 1 else rng.uniform(1.5, 2.5)


def alone(seconds, rng, n_threads, _):
    return seconds(rng, n_threads)


SEEDS = range(20)


@pytest.mark.parametrize("most", (2, 3, 8, 64))
def test_idle_cores_keep_their_threads(most):
    for seed in SEEDS:
        rng = random.Random(seed)
        choice = ThreadChoice(most)
        total, used = simulate(choice, 2000, partial(idle, rng))
        rng = random.Random(seed)
        assert total <= 1.03 * simulate(ThreadChoice(1), 2000, partial(alone, idle, rng, most))[0]
        if most <= 8:                       # of 64 threads for work of which half scales, any number above 8 is as good
            assert min(used) >= (most + 1) // 2 and choice.n == most


def test_a_busy_machine_runs_on_one_thread():
    """From the first run on, at least 0.9 of what one thread alone does, over the tokens of one answer."""
    for seed in SEEDS:
        rng = random.Random(seed)
        choice = ThreadChoice(2)
        total, _ = simulate(choice, 600, partial(busy, rng))
        rng = random.Random(seed)
        assert 0.9 * total <= simulate(ThreadChoice(1), 600, partial(busy, rng))[0]
        assert choice.n == 1


def test_threads_leave_when_it_gets_busy_and_come_back():
    for seed in SEEDS:
        rng = random.Random(seed)
        choice = ThreadChoice(2)
        simulate(choice, 500, partial(idle, rng))
        assert choice.n == 2
        for _ in range(3):
            _, used = simulate(choice, 800, partial(busy, rng))
            assert sum(n == 1 for n in used) > 500
            _, used = simulate(choice, 9000, partial(idle, rng))
            assert choice.n == 2


def test_long_runs_get_their_threads_back_within_seconds():
    """However often a larger number was tried in vain: tokens of 50 ms, after minutes beside other processes."""
    for seed in SEEDS:
        rng, choice = random.Random(seed), ThreadChoice(2, 0.05)
        simulate(choice, 500, partial(idle, rng))
        simulate(choice, 8000, partial(slower, rng))
        assert choice.n == 1
        _, used = simulate(choice, 1000, partial(idle, rng))
        assert used.index(2) <= thread_choice.LONG_RUNS + thread_choice.RECENT and choice.n == 2


def test_a_short_disturbance_costs_a_moment():
    """Runs of 50 ms: a few of them are slow on two threads, then no longer."""
    for seed in SEEDS:
        rng, choice = random.Random(seed), ThreadChoice(2, 0.05)
        simulate(choice, 500, partial(idle, rng))
        while choice.n == 2:
            simulate(choice, 1, partial(slower, rng))
        _, used = simulate(choice, 100, partial(idle, rng))
        assert used.index(2) <= thread_choice.RECENT and choice.n == 2


def test_many_threads_go_by_halves():
    rng, choice = random.Random(0), ThreadChoice(64)
    _, used = simulate(choice, 3000, lambda n: rng.uniform(1, 1.1) * (1 + abs(n - 8)))         # eight are best
    assert choice.n == 8 and min(used) == 4


def test_runs_with_other_numbers_of_threads_have_the_same_bits():
    """A plan of three threads runs on each number from one to three; results are those of a plan of one."""
    rng, ctx = np.random.default_rng(), gg.Context()
    x = gg.from_numpy(ctx, rng.standard_normal((96, 512)).astype(np.float32))
    w = gg.from_numpy(ctx, rng.standard_normal((768, 512)).astype(np.float32))
    y = gg.soft_max(gg.mul_mat(gg.cast(w, gg.Q8_0), gg.rms_norm(x, 1e-5)))
    results = []
    for n_threads in (1, 3):
        cpu = gg.init_backend("CPU", n_threads=n_threads)
        graph = gg.Graph(y)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        plan = cpu.graph_plan_create(graph)
        for n in range(1, n_threads + 1):
            if n_threads > 1:
                plan.thread_choice = ThreadChoice(n)
            plan.compute()
            results.append(plan.numpy(y).tobytes())
    assert len(set(results)) == 1 and len(results) == 4


def test_plans_of_about_the_same_work_share_what_was_found(monkeypatch):
    monkeypatch.setattr(thread_choice, "_choices", {})
    assert choice_of(2, 3e6) is choice_of(2, 3.1e6) is not choice_of(2, 9e6)
    assert choice_of(2, 3e6) is not choice_of(4, 3e6)
    assert choice_of(1, 3e6) is None and choice_of(2, 1e3) is None


def test_the_pool_reports_its_runs():
    """A run of a plan is timed, on as many threads as the choice says; a part of it, or a failed run, is not."""
    ctx, seen = gg.Context(), []
    table = gg.from_numpy(ctx, np.ones((700, 1000), np.float32))
    ids = gg.from_numpy(ctx, np.zeros(2000, np.int32))
    graph = gg.Graph(gg.soft_max(gg.get_rows(table, ids)))
    cpu = gg.init_backend("CPU", n_threads=2)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    assert plan.n_used == 2 and plan.thread_choice is not None

    class Noted(ThreadChoice):
        """Notes what it is told."""

        def n_threads(self):
            return 1

        def ran(self, seconds):
            seen.append((seconds, the_pool().n_walking))
    plan.thread_choice = Noted(2)
    plan.compute()
    assert len(seen) == 1 and seen[0][0] > 0 and seen[0][1] == 1
    ids.set(np.full(2000, 700, np.int32))
    with pytest.raises(gg.IndexRangeError):
        plan.compute()
    assert len(seen) == 1
