"""Computations that are cancelled, interrupted, nested or forked."""
import os
import signal
import threading
import time

import pytest
from helpers.chains import PREAMBLE, array, chain, planned
from helpers.timing import interrupted

import ggjit as gg


# ---------------------------------------------------------------- stopping
def slow_graph():
    """About half a second on one thread."""
    return chain(1200, (1000, 1000))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_ctrl_c_stops_within_a_fifth_of_a_second(n_threads):
    _, y = slow_graph()
    plan = planned(y, n_threads=n_threads)
    with interrupted(0.1) as spent:
        for _ in range(50):
            plan.compute()
    assert spent.seconds < 0.2 * n_threads
    plan.compute()


def test_ctrl_c_stops_inside_a_chunk_of_dear_rows():
    """Rows of megabytes of work each: a chunk of them takes seconds."""
    x = gg.from_numpy(gg.Context(), array(400, 220, 220))
    y = gg.pool_2d(x, 1, 120, 120, 1, 1, 0, 0)
    plan = planned(y, n_threads=1)
    with interrupted(0.1) as spent:
        plan.compute()
    assert spent.seconds < 0.2


def test_other_signal_handlers_run_during_a_compute():
    _, y = slow_graph()
    plan, seen = planned(y, n_threads=2), []
    old = signal.signal(signal.SIGUSR1, lambda *a: seen.append(time.perf_counter()))
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        for _ in range(50):
            plan.compute()
            if seen:
                break
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_abort_callback_cancels(n_threads):
    _, y = slow_graph()
    plan = planned(y, n_threads=n_threads)
    plan.backend.abort_callback = lambda: True
    with pytest.raises(gg.Cancelled, match="cancelled by the abort callback"):
        plan.compute()
    plan.backend.abort_callback = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        plan.compute()
    plan.backend.abort_callback = None
    plan.compute()


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("shape", [(2,), (700, 700)])       # on one thread, shared by all
def test_the_abort_callback_is_asked_before_every_node(shape, n_threads):
    _, y = chain(5, shape)
    plan, asked = planned(y, n_threads=n_threads), []
    plan.backend.abort_callback = lambda: asked.append(0)
    plan.compute()
    assert len(asked) >= len(plan.nodes) > 3
    plan.backend.abort_callback = lambda: asked.append(1) or asked.count(1) == 3
    with pytest.raises(gg.Cancelled, match="cancelled by the abort callback"):
        plan.compute()
    assert asked.count(1) == 3


def test_computing_inside_a_computation_is_refused():
    ctx = gg.Context()
    plan, small = planned(chain(400, (1000, 1000))[1], n_threads=2), planned(gg.silu(gg.from_numpy(ctx, array(10))))
    for use in (small.compute, plan.compute, lambda: plan.numpy(plan.graph.outputs[0])):
        plan.backend.abort_callback = use
        with pytest.raises(gg.GgjitError, match="inside a computation"):
            plan.compute()
    plan.backend.abort_callback = None
    plan.compute()
    small.compute()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this system")
def test_a_signal_handler_that_computes_gets_an_error():
    ctx = gg.Context()
    plan, small = planned(chain(400, (1000, 1000))[1], n_threads=2), planned(gg.silu(gg.from_numpy(ctx, array(10))))
    old = signal.signal(signal.SIGALRM, lambda *a: small.compute())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)          # again, should the first come between two computes
        with pytest.raises(gg.GgjitError, match="inside a computation"):
            for _ in range(100):
                plan.compute()
            raise AssertionError("the signal never came during a compute")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    plan.compute()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_rebuilds_the_pool(python):
    r = python(PREAMBLE + """
p, y = plan(); p.compute()
pid = os.fork()
if pid == 0:
    p.compute(); q, z = plan(); q.compute()
    os._exit(0 if (q.numpy(z) == 11).all() and (p.numpy(y) == 11).all() else 3)
_, status = os.waitpid(pid, 0)
p.compute()
print(os.waitstatus_to_exitcode(status), (p.numpy(y) == 11).all())
""")
    assert r.stdout.split() == ["0", "True"], r.stderr


def test_the_interpreter_exits_cleanly_with_threads_asleep_or_spinning(python):
    r = python(PREAMBLE + "p, y = plan(); p.compute(); import time; time.sleep(0.05); p.compute()")
    assert r.returncode == 0 and r.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_while_another_thread_computes(python):
    r = python("""
import os, signal, threading, time, numpy as np, ggjit as gg
ctx = gg.Context()
y = a = gg.from_numpy(ctx, np.ones((500, 1000), np.float32))
for _ in range(50): y = gg.add(y, a)
b, g = gg.init_backend("CPU:n_threads=2"), gg.Graph(y)
gg.GraphAllocator(b).alloc_graph(g)
p = b.graph_plan_create(g)
p.compute()
stop = []
t = threading.Thread(target=lambda: [p.compute() for _ in iter(lambda: bool(stop), True)])
t.start()
codes = []
for _ in range(5):
    time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        p.compute()
        gg.compute(gg.silu(a))
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.append(1)
t.join()
print(codes)
""")
    assert r.stdout.strip() == "[0, 0, 0, 0, 0]", r.stderr
