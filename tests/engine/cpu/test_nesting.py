"""Custom ops that misuse the engine: arrays that are kept, computing inside a computation, functions that do not fit.

What may crash or hang runs in a process of its own.
"""
import os
import re
import threading
import time

import numpy as np
import pytest
from helpers.paths import TESTS_PATH
from numba import cfunc, njit

import ggjit as gg
from ggjit.core import run_lock as nesting

KEEPS = """
import gc
import numpy as np
import ggjit as gg
kept = []
def keep(dst, a, ith, nth):
    dst[:] = a + 1
    kept.extend((dst, a, dst[:, 1:]))
def run(free):
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (1 << 20, 4), "x")
    buf = gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))     # 16 MB: its pages go back to the system when it dies
    x.set(np.ones((4, 1 << 20), np.float32))
    graph = gg.Graph(gg.map_custom1(gg.silu(x), keep, 1), gg.map_custom1(x, keep, 1))
    allocator = gg.GraphAllocator(gg.init_backend("CPU"))
    allocator.alloc_graph(graph)
    gg.init_backend("CPU").graph_compute(graph)
    if free:
        buf.free(); allocator.free(); ctx.free()
for free in (False, True):
    run(free)
    gc.collect()
    total = sum(float(a.sum()) for a in kept)
    print(len(kept), np.isfinite(total), any(a.flags.writeable for a in kept[0::3] + kept[1::3]))
    kept.clear()
"""


def test_arrays_that_a_custom_op_keeps_own_their_memory(python):
    r = python(KEEPS)
    assert (r.returncode, r.stdout.splitlines()) == (0, ["6 True False"] * 2), r.stderr


NESTS = """
import threading
import numpy as np
from helpers import devices
import ggjit as gg
cpu = gg.init_backend("CPU", n_threads=2)
x = gg.from_numpy(gg.Context(), np.ones((64, 64), np.float32))
inner, other = gg.Graph(gg.silu(x)), gg.Graph(gg.scale(x, 2.0))
gg.GraphAllocator(cpu).alloc_graph(inner)
plan = cpu.graph_plan_create(inner)
plan.compute()
found = []
def nest(dst, a, ith, nth):
    dst[:] = a
    if ith == nth - 1:
        try:
            call()
        except gg.GgjitError as e:
            found.append((str(e), threading.current_thread().name))
for who, n_tasks, backend, delay, scheduled, thread_of in (
        ("own thread", 1, 1, None, True, "MainThread"), ("worker", 2, 1, None, True, "ggjit-1"),
        ("worker of a plan", 2, 1, None, False, "ggjit-1"), ("stream", 1, 0, 1e-3, True, "Thread-")):
    fake = devices.Fake("A", delay=delay)
    sched = gg.Scheduler([fake.init_backend(), cpu])
    graph = gg.Graph(gg.silu(gg.map_custom1(x, nest, n_tasks)))
    for name, call in dict(
            sched_numpy=lambda: sched.numpy(other.outputs[0]), sched_compute=lambda: sched.graph_compute(other),
            sched_async=lambda: sched.graph_compute_async(other), alloc=lambda: sched.alloc_graph(inner),
            sched_sync=lambda: sched.synchronize(), reset=lambda: sched.reset(), free=lambda: sched.free(),
            reserve=lambda: sched.reserve(inner), reserve_size=lambda: sched.reserve_size(inner),
            split=lambda: sched.split_graph(inner), pin=lambda: sched.set_tensor_backend(x, cpu),
            compute=lambda: gg.compute(gg.silu(x)), plan_numpy=lambda: plan.numpy(inner.outputs[0]),
            plan_compute=lambda: plan.compute(), backend=lambda: cpu.graph_compute(inner)).items():
        print(who, name, flush=True)                        # the last one printed is the one that hangs
        sched.set_tensor_backend(graph.nodes[0], sched.backends[backend])
        sched.graph_compute(graph) if scheduled else gg.compute(graph.outputs[0], backend=cpu)
        (message, thread), = found
        assert "inside a computation" in message, message
        assert thread.startswith(thread_of), thread
        found.clear()
        sched.graph_compute(other)
        assert (sched.numpy(other.outputs[0]) == 2).all()
    sched.free()
print("done")
"""


def test_computing_inside_a_custom_op_is_refused(python):
    """Each of these calls waited for the computation it was made in."""
    r = python("import faulthandler; faulthandler.dump_traceback_later(120, exit=True)\n" + NESTS,
               PYTHONPATH=TESTS_PATH)
    assert r.stdout.split()[-1:] == ["done"], f"{r.stdout} {r.stderr[-3000:]}"


# ---------------------------------------------------------------- functions that do not fit
@njit
def one_array(dst, ith, nth):
    dst[0] = 1


@njit
def untypable(dst, a, ith, nth):
    dst[0] = a + "text"


@njit
def three_dims(dst, a, ith, nth):
    dst[0, 0, 0, 0, 0] = a[0]


def test_a_function_of_too_few_arguments_is_refused_when_the_node_is_built():
    x = gg.from_numpy(gg.Context(), np.ones((3, 4), np.float32))
    with pytest.raises(gg.TypeMismatch, match=r"one_array\(dst, ith, nth\) is called with 4 arguments"):
        gg.map_custom1(x, one_array)


@pytest.mark.parametrize("fun", [untypable, three_dims], ids=lambda f: f.__name__)
def test_a_jitted_function_that_does_not_fit_is_a_typed_error(fun):
    x = gg.from_numpy(gg.Context(), np.ones((3, 4), np.float32))
    y = gg.map_custom1(x, fun)
    for _ in range(2):
        with pytest.raises(gg.TypeMismatch, match=rf"{fun.__name__} does not compile as f\(dst, source 0, ith, nth\)"):
            gg.compute(y)
    cpu = gg.init_backend("CPU")
    sched = gg.Scheduler([cpu])
    with pytest.raises(gg.TypeMismatch, match="2-d float32"):
        sched.graph_compute(gg.Graph(y))
    sched.graph_compute(gg.Graph(gg.scale(x, 2.0)))


@pytest.mark.parametrize("fun,line", [(untypable, "add.*float32"), (three_dims, "setitem.*float32")])
def test_what_numba_says_of_a_function_is_one_line_with_its_place(fun, line):
    x = gg.from_numpy(gg.Context(), np.ones((3, 4), np.float32))
    with pytest.raises(gg.TypeMismatch, match=line) as e:
        gg.compute(gg.map_custom1(x, fun))
    text, number = str(e.value), fun.py_func.__code__.co_firstlineno + 2
    assert "\x1b" not in text and "\n" not in text and re.search(rf"test_nesting.py\", line {number}\)$", text)


@njit
def refuses_ones(dst, a, ith, nth):
    for i in range(len(a)):
        if a[i] == 1:
            raise ValueError("a one")


def test_an_exception_in_a_jitted_function_says_where():
    y = gg.map_custom1(gg.from_numpy(gg.Context(), np.arange(3, dtype=np.float32)), refuses_ones)
    number = refuses_ones.py_func.__code__.co_firstlineno + 4
    with pytest.raises(gg.GgjitError, match=rf"refuses_ones raised ValueError: a one .*nesting.py, line {number}\)"):
        gg.compute(y)


@pytest.mark.parametrize("signature", ["int64(int64, int64)", "float64(float64, float64, float64, float64)",
                                       "int32(int64, int64, int64, int64)"])
def test_a_cfunc_of_another_signature_is_a_typed_error(signature):
    fun = cfunc(signature)({2: lambda a, b: a, 4: lambda a, b, c, d: a}[signature.count(",") + 1])
    with pytest.raises(gg.TypeMismatch, match="int64 node"):
        gg.map_custom1(gg.from_numpy(gg.Context(), np.ones(4, np.float32)), fun)


def test_a_function_that_died_with_its_context_is_a_typed_error():
    """The graph outlives the context that held the function."""
    ctx = gg.Context()
    graph = gg.Graph(gg.map_custom1(gg.from_numpy(ctx, np.ones(4, np.float32)), lambda dst, a, ith, nth: None))
    ctx.free()
    cpu = gg.init_backend("CPU")
    for call in (lambda: gg.Scheduler([cpu]).graph_compute(graph), lambda: cpu.graph_plan_create(graph)):
        with pytest.raises(gg.StaleHandle, match="was freed; make a new one|is gone with its context"):
            call()


# ---------------------------------------------------------------- in a roundabout way
ROUNDABOUT = """
import threading
import numpy as np
import ggjit as gg
from ggjit.core import run_lock as nesting
nesting.NESTING_TIMEOUT = 1.0
cpu = gg.init_backend("CPU", n_threads=1)
x = gg.from_numpy(gg.Context(), np.ones(8, np.float32))
def silu():
    return gg.compute(gg.silu(gg.from_numpy(gg.Context(), np.ones(3, np.float32))))
{setup}
found = []
def other():
    try: found.append({call})
    except gg.GgjitError as e: found.append(str(e)[:10])
def wait(dst, a, ith, nth):
    t = threading.Thread(target=other, daemon=True)
    t.start()
    t.join()
    dst[:] = a
{run}
print(found)
print(silu()[0] > 0)
"""


@pytest.mark.parametrize("setup,call,run", [
    ("", "silu()", "gg.compute(gg.map_custom1(x, wait, 1))"),
    ("sched = gg.Scheduler([cpu])", "sched.numpy(x)", "sched.graph_compute(gg.Graph(gg.map_custom1(x, wait, 1)))")],
    ids=["another computation", "the scheduler's values"])
def test_an_op_that_waits_for_a_thread_which_computes_is_told(setup, call, run, python):
    r = python(ROUNDABOUT.format(setup=setup, call=call, run=run))
    assert (r.returncode, r.stdout.splitlines()) == (0, ["['waited 1 s']", "True"]), r.stderr


def test_threads_queue_behind_an_op_that_works(monkeypatch):
    """Only waiting counts: an op that computes for longer than anybody's patience is waited for."""
    monkeypatch.setattr(nesting, "NESTING_TIMEOUT", 0.1)
    begun = threading.Event()

    def work(dst, a, ith, nth):
        begun.set()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            dst[:] = a + 1
    x = gg.from_numpy(gg.Context(), np.ones(8, np.float32))
    slow = threading.Thread(target=lambda: gg.compute(gg.map_custom1(x, work)))
    slow.start()
    assert begun.wait(30)
    assert (gg.compute(gg.neg(x)) == -1).all()
    slow.join()


# ---------------------------------------------------------------- fork inside a walk
FORKS = """
import os, signal, time
import numpy as np
import ggjit as gg
main = os.getpid()
x = gg.from_numpy(gg.Context(), np.ones((64, 64), np.float32))
for n_threads, at in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 2)):
    cpu = gg.init_backend("CPU", n_threads=n_threads)
    children = []
    def fork(dst, a, ith, nth):
        if ith == at:
            child = os.fork()
            if child: children.append(child)
        dst[ith::nth] = a[ith::nth]
    w = gg.mul_mat(x, gg.map_custom1(gg.silu(x), fork))
    graph = gg.Graph(gg.soft_max(w))
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    status = 0
    try: plan.compute()
    except gg.GgjitError as e: status = 7 if "forked" in str(e) else 8
    if os.getpid() != main:
        status = status if gg.compute(gg.neg(x))[0, 0] == -1 else 9         # a pool of its own
        os._exit(status)
    end = time.monotonic() + 120
    while True:
        pid, status = os.waitpid(children[0], os.WNOHANG)
        if pid or time.monotonic() > end: break
        time.sleep(0.01)
    if not pid:
        os.kill(children[0], signal.SIGKILL)
        print("the child hangs", flush=True)
    else:
        print(os.waitstatus_to_exitcode(status), flush=True)
    print(gg.compute(gg.neg(x))[0, 0], flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_by_an_op_ends_the_walk(python):
    """Alone it computes on; without its workers it gets an error; a child of a worker has nothing left to do."""
    r = python(FORKS)
    assert (r.returncode, r.stdout.split()) == (0, ["0", "-1.0", "7", "-1.0", "7", "-1.0", "0", "-1.0", "0", "-1.0"]), \
        r.stdout + r.stderr
