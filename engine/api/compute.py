"""gg.compute(y): allocate, plan, run and read in one call."""
import functools

from ggjit.api.registry import init_backend
from ggjit.core.run_lock import refuse_nesting
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import NotAllocated, ParamError
from ggjit.ops.core.shape import describe


@functools.cache
def default_backend():
    """The CPU backend that `compute` uses when none is given.  Without fusion: every result can be read afterwards."""
    return init_backend("CPU", fuse=0)


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
    outputs[0].ctx.last_plan = plan             # keeps y.numpy() readable afterwards
    values = tuple(plan.numpy(t) for t in outputs)
    return values[0] if len(values) == 1 else values
