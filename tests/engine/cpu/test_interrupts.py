"""Ctrl-C at any moment: no lock stays taken, whichever thread waited for it."""
import signal
import time

import numpy as np
import pytest

import ggjit as gg

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that signal")

START = """
import random, signal, sys, threading, time
import numpy as np
import ggjit as gg

def planned(n_rows):
    with gg.Context() as ctx:
        y = gg.silu(gg.from_numpy(ctx, np.ones((n_rows, 1024), np.float32)))
    backend = gg.init_backend("CPU", n_threads=1)
    graph = gg.Graph(y)
    gg.GraphAllocator(backend).alloc_graph(graph)
    return backend.graph_plan_create(graph), y, ctx

def repeated(work, seconds):
    end = time.monotonic() + 1                  # an interrupt inside a finalizer is lost
    signal.setitimer(signal.ITIMER_REAL, random.uniform(*seconds))
    while time.monotonic() < end:
        work()

def interrupted(work, seconds):
    try:
        repeated(work, seconds)     # Python 3.13: no try block of its own function holds the jumps of a loop
    except KeyboardInterrupt:
        return

def finishes(work):
    t = threading.Thread(target=work, daemon=True)
    t.start()
    t.join(20)
    return not t.is_alive()

signal.signal(signal.SIGALRM, signal.default_int_handler)
sys.setswitchinterval(1e-4)
"""


def test_while_another_thread_computes(python):
    """The interrupted thread mostly waits for the pool, whose lock passes from thread to thread."""
    ran = python(START + """
p, q = planned(64), planned(64)
p[0].compute()
stop = False
def other():
    while not stop:
        q[0].compute()
t = threading.Thread(target=other, daemon=True)
t.start()
for _ in range(300):
    interrupted(p[0].compute, (1e-5, 3e-4))
stop = True
t.join(20)
assert not t.is_alive() and finishes(p[0].compute) and finishes(q[0].compute)""")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("work", ["compute", "numpy"])
def test_other_threads_can_use_the_plan_afterwards(work, python):
    ran = python(START + f"""
plan, y, _ = planned(1)
plan.compute()
work = plan.compute if {work!r} == "compute" else lambda: plan.numpy(y)
for _ in range(300):
    interrupted(work, (5e-6, 6e-5))
    assert finishes(work)""")
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def ctrl_c_after():
    """ctrl_c_after(seconds): a KeyboardInterrupt so many seconds from now."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_quantising_a_large_array(ctrl_c_after):
    """It takes seconds, also where the array is one row or has to be converted; the tensor keeps what it held."""
    a, weights = np.ones((2048, 4096), np.float32), np.ones(4096, np.float32)
    row, wide = a.reshape(1, -1), np.ones((1024, 4096))
    gg.quantize(gg.Q4_K, a[:1], weights)
    gg.quantize(gg.IQ3_S, a[:1, :256])
    t = gg.Context().new_tensor(gg.Q4_K, (4096, 2048))
    gg.tensor_alloc(gg.init_backend("CPU").alloc_buffer(t.nbytes), t, 0)
    gg.tensor_memset(t, 7)
    for work in (lambda: gg.quantize(gg.Q4_K, a, weights), lambda: t.set(a), lambda: gg.quantize(gg.Q4_K, row),
                 lambda: gg.quantize(gg.Q4_K, row, row[0]), lambda: gg.quantize(gg.IQ3_S, wide)):
        taken = []
        while not taken or min(taken) > 0.2 and len(taken) < 5:         # a busy machine
            ctrl_c_after(0.05)
            start = time.process_time()
            with pytest.raises(KeyboardInterrupt):
                work()
            taken.append(time.process_time() - start - 0.05)
        assert min(taken) < 0.2
    assert set(t.bytes(0, 1000)) == {7}


@pytest.mark.parametrize("type", [gg.Q4_K, gg.Q4_0, gg.Q5_1, gg.IQ4_NL, gg.IQ2_XXS, gg.IQ3_S, gg.F16], ids=repr)
@pytest.mark.parametrize("n_blocks", [67, 128])
def test_long_rows_are_quantised_in_pieces(type, n_blocks):
    """With the same bytes as whole rows, and importances of their own columns."""
    k = 256 * n_blocks
    a = np.random.default_rng(0).standard_normal((2, k), np.float32)
    for weights in (None, np.random.default_rng(1).random(k, np.float32)):
        if weights is None and type is gg.IQ2_XXS or weights is not None and type in (gg.Q4_0, gg.Q5_1):
            continue                            # it needs them; with them these look at the whole row
        parts = [gg.quantize(type, a[:, i:i + 256], None if weights is None else weights[i:i + 256])
                 for i in range(0, k, 256)]
        raw = gg.quantize(type, a, weights)
        np.testing.assert_array_equal(raw, np.concatenate(parts, 1))
        np.testing.assert_array_equal(gg.dequantize(type, raw, a.shape)[:, -256:],
                                      gg.dequantize(type, parts[-1], (2, 256)))


def test_quantising_inside_a_computation():
    """On a thread that runs kernels: by itself, as nothing else may wait for the pool there."""
    values, seen = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32), []
    want = gg.quantize(gg.Q8_0, values)

    def op(dst, a, ith, nth):
        seen.append(gg.quantize(gg.Q8_0, values))
        dst[:] = a
    gg.compute(gg.map_custom1(gg.from_numpy(gg.Context(), np.ones(4, np.float32)), op, 1))
    assert (seen[0] == want).all() and (gg.dequantize(gg.Q8_0, want, values.shape) != 0).any()


def test_a_computation_while_the_interpreter_exits(python):
    """New threads would never begin: the thread that is left computes alone."""
    ran = python("""
import numpy as np
import ggjit as gg

class Last:
    def __init__(self):
        x = gg.from_numpy(gg.Context(), np.ones((500, 500), np.float32))
        graph = gg.Graph(gg.mul_mat(x, x[:300]))
        cpu = gg.init_backend("CPU", n_threads=2)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        self.plan = cpu.graph_plan_create(graph)
        self.show()

    def show(self, print=print):
        self.plan.compute()
        print("computed")

    __del__ = show

last = Last()
""")
    assert ran.stdout == "computed\ncomputed\n" and not ran.stderr, ran.stderr
