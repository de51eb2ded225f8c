"""gg.compute(y): allocate, plan, run and read in one call."""
import functools

from ggjit.api.registry import init_backend
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.core.run_lock import refuse_nesting
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.plan import Plan
from ggjit.graphs.results import LeftOver, mark_last
from ggjit.ops.core.errors import NotAllocated, ParamError
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.shape import describe, is_contiguous


@functools.cache
def default_backend():
    """The CPU backend that `compute` uses when none is given.  Without fusion: no result stays inside a kernel."""
    return init_backend("CPU", fuse=0)


@asking("compute")
def compute(*outputs, backend=None, planner="ggml"):
    """Allocate, run and read: the values of the tensors, one array or a tuple.

        y = gg.soft_max(gg.mul_mat(a, b))
        gg.compute(y)                       # ndarray

    Leaves must have memory (from_numpy, alloc_ctx_tensors).  For repeated runs make a Graph and a plan instead.
    """
    if not outputs:
        raise ParamError("compute needs at least one tensor")
    refuse_nesting()
    backend = backend or default_backend()
    graph = Graph(*outputs)
    for t in graph.leafs:
        if t._where() is None:
            raise NotAllocated(f"{describe(t)} has no values; make it with from_numpy, or allocate it with "
                               f"alloc_ctx_tensors and set it")
    GraphAllocator(backend, planner=planner).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    plan.compute()
    values = tuple(plan.numpy(t) for t in outputs)
    left = LeftOver.of(plan) if isinstance(plan, Plan) else LeftOver(
        {t.id: (ArrayBuffer(HOST, a.copy()), 0) for t, a in zip(outputs, values, strict=True)
         if t.type.dtype is not None and is_contiguous(t)})
    # y.numpy() can be read as long as there is y, also where a later graph computed y on its way
    kept = [t for t in graph.nodes if left.where(t) is not None]
    mark_last(left, kept)
    asked = {t.id for t in outputs}
    for t in kept:
        if t.id in asked or (t._holds or {}).get("results") is not None:
            t._hold("results", left)
    return values[0] if len(values) == 1 else values
