"""Memory planning: offsets and lifetimes of tensors, computed from numbers alone; no memory is touched here.

Read plan_request.py and graph_alloc.py first.  Three rooms, which do not know them:

    ggml/               ggml's allocators, offset for offset: aliasing, free list, the checked problem; legacy/: of 2023
    offsets/            lower offsets for buffers of a lifetime and a size, by search
    orders/             orders of nodes that need less memory, and results that are computed again

On top of them:

    graph_alloc.py      one graph -> the place of every tensor
    reorder.py          one graph -> an order whose plan is lower
    validate.py         checks plans, independently of the planners
    csvio.py            offset problems as files; traces.py: those that other programs' allocations are, of PyTorch
                        (torch_trace.py, torch_profile.py), ggml (ggml_log.py) and ONNX graphs (onnx_graph.py)
    report.py           a plan as text; plots.py: as pictures
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

import sys as _sys

from ggjit.alloc.ggml.problem import GraphError, GraphPlan
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.offsets.planners import Layout, SearchOptions, plan_offsets
from ggjit.alloc.plan_request import PlanOptions, PlanRequest
from ggjit.alloc.validate import InvalidPlan, check_graph_plan, check_layout
from ggjit.ops.core.spec import in_place_table as _in_place_table

_PLACE_TENSORS = ("Allocr", "TensorAllocator")
_IN_PLACE = {"IN_PLACE_OPS": True, "IN_PLACE_2023": False}     # ops that may write over a source: today, in 2023


def __getattr__(name):
    """The allocators that place tensors are the package's: gg.alloc.TensorAllocator is gg.TensorAllocator."""
    if name in _PLACE_TENSORS:
        return getattr(_sys.modules["ggjit"], name)
    if name in _IN_PLACE:
        return _in_place_table(_IN_PLACE[name]).astype("u1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted((*globals(), *_PLACE_TENSORS, *_IN_PLACE))
