"""Every request for host memory may be refused: OutOfMemory says what was asked for, and all can be used afterwards."""
import threading

import numpy as np
import pytest
from helpers import devices

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core import host_memory

CPU = gg.init_backend("CPU", n_threads=1)
VALUES = np.linspace(-1, 1, 64 * 8, dtype=np.float32).reshape(8, 64)


class Work:
    """Every kind of step once; each may be repeated."""

    def __init__(self):
        self.ctx = gg.Context()
        self.x = gg.from_numpy(self.ctx, VALUES)
        self.w = self.ctx.new_tensor(gg.Q8_0, (64, 8), "w")
        gg.alloc_ctx_tensors(self.ctx, CPU)

    def steps(self):
        yield lambda: gg.from_numpy(self.ctx, VALUES.astype(np.float64), type=gg.F16)
        yield lambda: gg.from_numpy(self.ctx, VALUES, type=gg.Q4_0)
        yield lambda: self.w.set(VALUES)
        yield lambda: self.w.set_bytes(self.w.bytes())
        yield lambda: gg.dequantize(gg.Q4_K, gg.quantize(gg.Q4_K, VALUES.reshape(2, 256), np.ones(256)), (2, 256))
        yield lambda: gg.compute(gg.soft_max(gg.mul_mat(self.w, self.x)))
        yield self.planned
        yield lambda: gg.measure(gg.Graph(gg.silu(self.x)), planner="ggml").peak
        yield lambda: gg.graph_copy(CPU, gg.Graph(gg.silu(self.x))).free()
        yield self.scheduled

    def planned(self):
        graph = gg.Graph(y := gg.add(gg.mul_mat(self.w, self.x), gg.mul_mat(self.w, self.x)))
        gg.GraphAllocator(CPU).alloc_graph(graph)
        CPU.graph_compute(graph)
        return y.numpy()

    def scheduled(self):
        device = devices.Fake("A")
        sched = gg.Scheduler([device.init_backend(), CPU])
        graph = gg.Graph(y := gg.silu(gg.mul_mat(self.w, self.x)))
        try:
            sched.graph_compute(graph)
            return sched.numpy(y)
        finally:
            device.asked.clear()            # tensors it was asked about


def test_planners_and_tokenizers_ask_too():
    """What they allocate inside comes out typed, wherever it is."""
    graph = gg.Graph(gg.silu(gg.from_numpy(gg.Context(), VALUES)))
    for work in (lambda: gg.alloc.plan_offsets([0], [2], [4]), lambda: gg.measure(graph, order="memory"),
                 lambda: gg.alloc.check_layout([0], [1], [4], [0]),
                 lambda: gg.Allocr.new_measure().alloc_graph(graph),
                 lambda: Tokenizer.encode(None, "text"), lambda: Tokenizer.decode(None, [1])):
        with host_memory.refusing(0), pytest.raises(gg.OutOfMemory, match="cannot allocate host memory"):
            work()


@pytest.mark.parametrize("i", range(len(list(Work().steps()))))
def test_any_request_may_be_refused(i):
    work = Work()
    work.w.set(VALUES)
    step = list(work.steps())[i]
    want = step()
    alive, n = TABLE.n_alive(), len(work.ctx)
    for k in range(100):
        with host_memory.refusing(k) as asked:
            try:
                step()
            except gg.OutOfMemory as e:
                assert "host memory" in str(e) and len(str(e)) > 40
            else:
                break
        assert (TABLE.n_alive(), len(work.ctx)) == (alive, n), f"request {k} left tensors behind"
        np.testing.assert_array_equal(step(), want)
    assert 1 <= asked() == k < 100


def test_numpys_own_errors_are_typed():
    x = gg.from_numpy(gg.Context(), np.ones(4, np.float32))
    with pytest.raises(gg.OutOfMemory, match="dequantize: cannot allocate 4,6.* bytes of host memory"):
        host_memory.empty(1 << 60, np.float32, "dequantize")
    text = r"set tensor F32 \[4\]: cannot allocate 16 bytes of host memory \(Unable"
    with pytest.raises(gg.OutOfMemory, match=text), host_memory.oom_guard("set", x):
        np.empty(1 << 58, np.uint8)
    with pytest.raises(gg.OutOfMemory, match="^the table is full$"), host_memory.oom_guard("set", x):
        raise gg.OutOfMemory("the table is full")


def test_a_thread_that_cannot_be_started(python):
    """In a process without a pool: the computation is refused, and works with fewer threads."""
    ran = python("""
import threading
import numpy as np
import ggjit as gg
x = gg.from_numpy(gg.Context(), np.ones((1000, 1000), np.float32))
y, start, many = gg.mul_mat(x, x), threading.Thread.start, gg.init_backend("CPU", n_threads=3)
def refuse(thread):
    if thread.name == "ggjit-2":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
try:
    gg.compute(y, backend=many)
except gg.OutOfMemory as e:
    assert "thread 3 of 3: can't start new thread; use fewer threads" in str(e), e
else:
    raise SystemExit("no error")
many.n_threads = 2
assert (gg.compute(y, backend=many) == 1000).all()
threading.Thread.start = start
many.n_threads = 3
assert (gg.compute(y, backend=many) == 1000).all()
""")
    assert ran.returncode == 0, ran.stderr


def test_threads_are_requests():
    with host_memory.refusing(0), pytest.raises(gg.OutOfMemory, match="thread 2 of 2: refused; use fewer threads"):
        host_memory.start(threading.Thread(target=print), "thread 2 of 2")
