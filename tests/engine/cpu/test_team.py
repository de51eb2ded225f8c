"""Teams: threads that leave a run and come back change no bit, and how long they stay away."""
from types import SimpleNamespace

import numpy as np
import pytest

import ggjit as gg
from ggjit.cpu import team, walk
from ggjit.cpu.thread_pool import the_pool
from ggjit.ops.core.record import WORD
from ggjit.ops.native.jit import native
from ggjit.ops.native.mem import ld_i64
from ggjit.ops.native.node import S_WAITED


@pytest.fixture
def impatient():
    """The pool, for which a pause takes no time."""
    pool = the_pool()
    kept = pool.words[team.S_MILLISECOND // WORD]
    pool.words[team.S_MILLISECOND // WORD] = 0
    try:
        yield pool
    finally:
        pool.words[team.S_MILLISECOND // WORD] = kept
        pool.words[team.S_TEAM // WORD] = pool.words[S_WAITED // WORD] = 0


def _plan(n_threads, seed, n_columns=16):
    """A plan of layers of two products, a sum and a norm; the products are shared by all threads."""
    ctx, n, rng = gg.Context(), 256, np.random.default_rng(seed)
    weights = [gg.from_numpy(ctx, rng.standard_normal((n, n), np.float32) / 16) for _ in range(12)]
    x = gg.from_numpy(ctx, rng.standard_normal((n_columns, n), np.float32))
    for w in weights:
        x = gg.rms_norm(gg.add(gg.mul_mat(w, x), gg.soft_max(gg.mul_mat(w, x))), 1e-5)
    graph, cpu = gg.Graph(x), gg.init_backend(f"CPU:n_threads={n_threads}")
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.thread_choice = SimpleNamespace(n_threads=lambda: n_threads, ran=lambda seconds: None)
    plan.kept = allocator, x
    return plan


@pytest.mark.parametrize("n_threads", [2, 3, 5])
def test_threads_that_leave_and_come_back_change_no_bit(n_threads, impatient):
    words, seed = impatient.words, int(np.random.default_rng().integers(1 << 30))
    alone, plan = (_plan(n, seed) for n in (1, n_threads))
    alone.compute()
    expected = alone.kept[1].numpy().tobytes()
    before = words[walk.S_JOB // WORD] >> walk.JOB_SHIFT
    for _ in range(60):
        words[S_WAITED // WORD] = 1 << 60           # all threads have been waited for
        plan.compute()
        assert plan.kept[1].numpy().tobytes() == expected
    called = (words[walk.S_JOB // WORD] >> walk.JOB_SHIFT) - before
    assert called > 60, "workers were called once a run: they never left, or never came back"


def test_functions_of_users_keep_their_threads(impatient):
    plan = _plan(2, 0)
    plan.thread_choice = None
    impatient.words[S_WAITED // WORD] = 1 << 60
    before = impatient.words[walk.S_JOB // WORD] >> walk.JOB_SHIFT
    plan.compute()
    assert (impatient.words[walk.S_JOB // WORD] >> walk.JOB_SHIFT) - before == 1


def test_runs_of_one_thread_leave_pauses_as_they_are(impatient):
    """They wait for none, so they say nothing of how busy the machine is."""
    plan, words = _plan(2, 0), impatient.words
    plan.thread_choice = SimpleNamespace(n_threads=lambda: 1, ran=lambda seconds: None)
    words[team.S_PAUSE // WORD], words[S_WAITED // WORD] = 7, 9
    try:
        plan.compute()
        assert (words[team.S_PAUSE // WORD], words[S_WAITED // WORD]) == (7, 9)
    finally:
        words[team.S_PAUSE // WORD] = 0


@native("i64(i64, i64, i64)")
def _ask(sync, nth, node):
    team.leaves(sync, nth, node, sync + walk.S_DONE)
    return ld_i64(sync + team.S_LEAVE_AT)


def test_pauses_double_while_they_are_in_vain():
    page = np.zeros(walk.PAGE_NBYTES // WORD, np.int64)
    sync, ms = page.ctypes.data, 1 << 32            # no clock gets that far meanwhile
    page[team.S_MILLISECOND // WORD], page[team.S_MOST // WORD] = ms, 8

    def ask(nth, waited, node=64):
        """Threads after that; pause in milliseconds."""
        page[team.S_LEAVE_AT // WORD], page[S_WAITED // WORD] = 0, waited * ms
        page[team.S_BEGAN // WORD] = walk.clock()
        left = _ask(sync, nth, node)
        assert left in (0, node)
        return page[team.S_NEXT // WORD] if left else nth, page[team.S_PAUSE // WORD] // ms
    long = team.LEAST_WAITED + 1
    assert ask(8, 0) == (8, 0)
    assert ask(8, team.LEAST_WAITED) == (8, 0), "waits that are short enough"
    assert [ask(8, long) for _ in range(9)] == [(4, min(8 << i, team.MOST_PAUSE)) for i in range(9)]
    assert ask(1, long) == (1, team.MOST_PAUSE), "one thread waits for none"
    page[team.S_SPENT // WORD] = (team.SHARE * long + 1) * ms
    assert ask(8, long) == (8, team.MOST_PAUSE), "less than a third of the time"
    page[team.S_SPENT // WORD] = (team.WINDOW + 1) * ms
    assert ask(8, long) == (8, 0), "a window without long waits"
    page[team.S_UNTIL // WORD] = walk.clock() + 1000 * ms
    assert ask(4, 0) == (4, 0)
    page[team.S_UNTIL // WORD] = 0
    page[team.S_POSTED // WORD] = 3
    assert ask(4, 0) == (4, 0), "workers of the stretch before have not left"
    page[walk.S_DONE // WORD] = 3
    assert ask(4, 0) == (8, 0) and ask(1, 0) == (2, 0)
