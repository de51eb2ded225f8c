"""gg.compute(y): allocate, plan, run and read in one call."""
import functools

from ggjit.api.registry import init_backend
from ggjit.core.arguments import expect, typed_call
from ggjit.core.backend import Backend
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.core.run_lock import refuse_nesting
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.graph_plan import Plan
from ggjit.graphs.results import RunResults, mark_last
from ggjit.ops.core.errors import NotAllocated, ParamError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.tensors.tensor import Tensor


@functools.cache
def default_backend():
    """The CPU backend that `compute` uses when none is given.  It does not fuse nodes, so every result can be read."""
    return init_backend("CPU", fuse=0)


@typed_call
@oom_guard("compute")
def compute(*outputs, backend=None, planner="ggml"):
    """Allocate, run and read: the values of the tensors, one array or a tuple.

        y = gg.soft_max(gg.mul_mat(a, b))
        gg.compute(y)                       # ndarray; gg.compute(graph) gives its outputs

    Leaves must have memory (from_numpy, alloc_ctx_tensors).  backend: a Backend that reaches it, or its name,
    "CPU:n_threads=2"; by default the CPU.
    For repeated runs make a Graph and a plan instead.
    """
    if not outputs:
        raise ParamError("compute needs at least one tensor")
    if len(outputs) == 1 and isinstance(outputs[0], Graph):
        outputs = outputs[0].outputs
    refuse_nesting()
    backend = init_backend(backend) if isinstance(backend, str) else backend
    backend = default_backend() if backend is None else expect(backend, Backend, "compute")
    graph = Graph(*outputs)
    # y.numpy() works as long as y lives, even if a later graph computes y as an intermediate result
    before = [t for t in graph.nodes if (t._holds or {}).get("results") is not None]
    graph._keep((*outputs, *before))
    need_values(graph)
    GraphAllocator(backend, planner=planner).alloc_graph(graph)
    left, values = _run(backend, graph, outputs)
    mark_last(left, [t for t in graph.nodes if left.where(t) is not None])
    for t in {t.id: t for t in (*outputs, *before) if left.where(t) is not None}.values():
        t._hold("results", left)
    values = tuple(map(values, outputs))
    return values[0] if len(values) == 1 else values


def need_values(graph):
    """NotAllocated, if a leaf has no memory."""
    for t in graph.leafs:
        if t._where() is None:
            raise NotAllocated(f"{describe(t)} has no values; make it with from_numpy, or allocate it with "
                               f"alloc_ctx_tensors and set it")


def _run(backend, graph, outputs):
    """(what the run left in memory, function that reads a tensor)"""
    plan = None
    if type(backend).graph_plan_create is not Backend.graph_plan_create:
        plan = backend.graph_plan_create(graph)
    if isinstance(plan, Plan) and not plan.graph.placed:
        plan.compute()
        return RunResults.of(plan), plan.numpy
    if isinstance(plan, ScheduledPlan):                 # its memory is the scheduler's: results are kept as copies
        plan.compute()
        copies = [(t, plan.numpy(t)) for t in outputs]
        return RunResults({t.id: (ArrayBuffer(HOST, a.copy()), 0) for t, a in copies
                           if t.type.dtype is not None and is_contiguous(t)}), plan.numpy
    if plan is None:
        backend.graph_compute(graph)
    else:
        try:
            backend.graph_plan_compute(plan)
            backend.synchronize()
        finally:
            backend.graph_plan_free(plan)
    backend.synchronize()
    return RunResults.of_graph(graph), Tensor.numpy
