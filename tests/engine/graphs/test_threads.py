"""Threads that build, plan and compute at once get the numbers they would get alone."""
import sys
import threading

import numpy as np
import pytest

import ggjit as gg

CPU = gg.init_backend("CPU:n_threads=1")
N_THREADS = 4


@pytest.fixture
def at_once():
    """work -> [its results or errors] of N_THREADS calls of work(k) at once, with a switch of threads at any line."""
    def run(work):
        gate, found = threading.Barrier(N_THREADS), [None] * N_THREADS

        def live(k):
            gate.wait()
            try:
                found[k] = work(k)
            except gg.GgjitError as e:
                found[k] = e
        threads = [threading.Thread(target=live, args=(k,)) for k in range(N_THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return found
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(interval)


def matrices(n, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (n, 8, 8)).astype(np.float32)


def network(x, weights):
    for w in weights:
        x = gg.rms_norm(gg.mul_mat(w, x), 1e-5)
        x = gg.reshape_2d(gg.add(x, gg.scale(gg.view_2d(x, 8, 8, x.nb[1], 0), 0.5)), 8, 8)
    return x


def expected(x, weights):
    for w in weights:
        x = x.astype(np.float64) @ w.T
        x = 1.5 * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x


def test_one_graph_that_has_no_plan_yet(at_once):
    """All threads compute with one plan: each reads its own run, or another's of the same plan."""
    for seed in range(80):
        x, *weights = matrices(3, seed)
        y = network(gg.from_numpy(gg.Context(), x), [gg.from_numpy(gg.Context(), w) for w in weights])
        graph = gg.Graph(y)
        gg.GraphAllocator(CPU).alloc_graph(graph)

        def work(k, graph=graph, y=y):
            CPU.graph_compute(graph)
            return y.numpy()
        for got in at_once(work):
            np.testing.assert_allclose(got, expected(x, weights), rtol=1e-4, atol=1e-5)
        assert len(graph.plans) == 1


def test_one_tensor_computed_by_all(at_once):
    for seed in range(20):
        x, w = matrices(2, seed)
        y = network(gg.from_numpy(gg.Context(), x), [gg.from_numpy(gg.Context(), w)])
        for got in at_once(lambda k, y=y: gg.compute(y)):
            np.testing.assert_allclose(got, expected(x, [w]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_graphs_of_their_own_over_shared_weights(at_once, shared):
    """Also while other threads free the contexts of theirs; shared: nodes of all threads go to one context."""
    arrays, one = matrices(4, 0), gg.Context()
    weights = [gg.from_numpy(one, w) for w in arrays]

    def work(k):
        rng, worst = np.random.default_rng(k), 0.0
        for _ in range(40):
            x, order = rng.uniform(-1, 1, (8, 8)).astype(np.float32), rng.integers(0, 4, rng.integers(1, 6)).tolist()
            ctx = one if shared else gg.Context()
            with ctx:
                y = network(gg.from_numpy(ctx, x), [weights[i] for i in order])
            worst = max(worst, np.abs(gg.compute(y) - expected(x, arrays[order])).max())
            if not shared and k % 2:
                ctx.free()
        return worst
    assert max(at_once(work)) < 1e-3
