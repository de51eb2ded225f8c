"""Where tensors live: plans of memory, made from numbers alone; no memory is touched here.

Read plan_request.py and graph_alloc.py first.  What a graph's plan passes through, in this order:

    problem.py          checks a graph and holds it in columns.py's columns; localize.py fills them from the table
    alias.py            which tensors share memory, as events over allocations; alias_2023.py: ggml's older rules
    free_list.py        ggml's best-fit list; placement.py runs the events through it and places the tensors;
                        best_fit.py: the same offsets, found quickly
    planners.py         lower offsets: greedy.py (fixed orders), crowded.py (moments near the bound first), search.py
                        (canonical search), tiling.py (full problems), repair.py (local search), sections.py (bound)
    chunked.py          the same where buffers have a largest size
    order.py            execution orders that need less memory; exact_order.py: the best one, proved by search;
                        order_bound.py: what any order needs; order_variants.py: others with as few live bytes
    recompute.py        schedules that make results again (schedules.py), within a number of bytes: recompute_plans.py
                        finds them, recompute_bound.py proves what they cost at least
    validate.py         checks plans, independently of the planners

Beside it: tensor_alloc.py and legacy.py (ggml's allocators of 2023), csvio.py (offset problems as files), report.py and
plots.py (a plan as text and pictures).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

import sys as _sys

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PlanOptions, PlanRequest
from ggjit.alloc.planners import Layout, plan_offsets
from ggjit.alloc.problem import IN_PLACE_2023, IN_PLACE_OPS, GraphError, GraphPlan
from ggjit.alloc.validate import InvalidPlan, check_graph_plan, check_layout

_PLACE_TENSORS = ("Allocr", "TensorAllocator")


def __getattr__(name):
    """The allocators that place tensors are the package's: gg.alloc.TensorAllocator is gg.TensorAllocator."""
    if name in _PLACE_TENSORS:
        return getattr(_sys.modules["ggjit"], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted((*globals(), *_PLACE_TENSORS))
