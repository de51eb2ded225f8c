"""Nothing grows: exceptions of custom ops, intrinsics of plans, buffers and rows behind schedulers."""
import gc
import weakref

import numpy as np
import pytest
from helpers import devices

import ggjit as gg
from ggjit.core import buffer
from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP


def test_exceptions_that_several_threads_raise_are_not_kept():
    class Failed(Exception):
        pass
    raised = []

    def fail(dst, a, ith, nth):
        e = Failed(ith)
        raised.append(weakref.ref(e))
        raise e
    cpu = gg.init_backend("CPU", n_threads=2)
    x = gg.from_numpy(gg.Context(), np.ones((64, 8), np.float32))
    graph = gg.Graph(gg.map_custom1(x, fail))
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    for _ in range(20):
        with pytest.raises(Failed, match="^[01]$"):
            plan.compute()
    gc.collect()
    assert len(raised) >= 20 and not any(r() for r in raised)


@pytest.mark.parametrize("op", [gg.silu, lambda w: gg.mul_mat(w, w)], ids=["silu", "mul_mat"])
def test_plans_leave_no_objects_behind(op):
    def once():
        w = gg.from_numpy(gg.Context(), np.ones((64, 64), np.float32))
        gg.compute(op(w))

    def n_objects():
        TABLE.n_alive()                     # takes back the rows of all that is gone
        gc.collect()
        return len(gc.get_objects())
    for _ in range(5):
        once()
    before = n_objects()
    for _ in range(20):
        once()
    assert n_objects() - before < 20


def use_scheduler(alloc, parallel, end):
    """A scheduler on a device that remembers the tensors it was asked about, ended in one of several ways."""
    a, cpu = devices.Fake("A", ops={OP.ADD, OP.MUL_MAT}).init_backend(), gg.init_backend("CPU:n_threads=1")
    sched = gg.Scheduler([a, cpu], parallel=parallel)
    ctx = gg.Context()
    w, x = (ctx.new_tensor(gg.F32, (16, 16)) for _ in range(2))
    if alloc:
        gg.alloc_ctx_tensors(ctx, cpu).set_usage(gg.USAGE_WEIGHTS)
    graph = gg.Graph(gg.silu(gg.add(gg.mul_mat(w, x), x)))
    sched.graph_compute(graph)
    assert a.device.asked
    {"drop": lambda: None, "reset": sched.reset, "free": sched.free, "context first": ctx.free}[end]()


@pytest.mark.parametrize("alloc", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("end", ["drop", "reset", "free", "context first"])
def test_schedulers_leave_no_buffers_and_rows_behind(alloc, parallel, end):
    def counts():
        gc.collect()
        return TABLE.n_alive(), len(buffer._buffers)
    use_scheduler(alloc, parallel, end)
    before = counts()
    for _ in range(3):
        use_scheduler(alloc, parallel, end)
    assert counts() == before


def test_leaves_are_freed_with_their_last_context():
    sched = gg.Scheduler([backend := devices.Fake("A").init_backend()])
    x = gg.Context().new_tensor(gg.F32, (8,))
    sched.alloc_graph(gg.Graph(gg.silu(x)))
    place = weakref.ref(x.buffer)
    assert place().alive
    backend.device.asked.clear()
    ctx = weakref.ref(x.ctx)
    del x
    sched.alloc_graph(other := gg.Graph(gg.neg(gg.Context().new_tensor(gg.F32, (4,)))))        # it keeps its last graph
    gc.collect()
    assert ctx() is None and (place() is None or not place().alive)
    assert sum(b.alive for b in backend.device.buffers if b.usage != gg.USAGE_COMPUTE) == len(other.leafs)
