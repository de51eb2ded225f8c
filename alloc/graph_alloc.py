"""The memory plan of a graph: an aliasing pass, then a planner of offsets.  No memory is touched.

    plan = plan_graph(PlanRequest(table, node_ids, leaf_ids, (node_sizes, leaf_sizes)), PlanOptions())
    plan.node_buffer, plan.node_chunk, plan.node_offs      # one entry per node, in graph order; buffer -1: elsewhere

planner="best" is the lowest plan over both aliasing rules and never above ggml's own.  More reuse usually helps, but an
online free list can get worse with it and even the lower bound may differ, so both rules are planned and the better
result is returned together with its own bound.
"""
import collections
import copy
import functools
import hashlib

import numpy as np

from ggjit.alloc.ggml.alias import MODERN, THROUGH_VIEWS
from ggjit.alloc.ggml.graph_record import EV_ALLOC, EV_TRIM
from ggjit.alloc.ggml.legacy.graph_alloc_2023 import plan_2023
from ggjit.alloc.ggml.problem import Problem, ggml_plan
from ggjit.alloc.offsets.chunked import plan_chunks
from ggjit.alloc.offsets.planners import Clock, plan_offsets
from ggjit.alloc.plan_request import PlanOptions
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.progress import busy
from ggjit.ops.core.record import T_NB, T_NE, T_TYPE

_GGML = PlanOptions()
REMEMBERED = 8                  # plans of "best" that are kept
ASKED = ("id", "view", "view_offs", "flags", "size", "buft")
# words of a table row that the aliasing pass reads
LAYOUT = [T_TYPE, *range(T_NE, T_NE + 4), *range(T_NB, T_NB + 4)]

_remembered = collections.OrderedDict()         # {request and options: GraphPlan}, the most recently used last
_remembering = ForkLock()


@oom_guard("a memory plan")
def plan_graph(request, options=_GGML):
    """The GraphPlan of a PlanRequest: a place for every tensor that has no memory yet.

        plan_graph(request, PlanOptions("best")).chunk_sizes        # bytes of the chunks of each buffer

    Errors: GraphError (cycle, foreign or repeated tensor), ShapeError (sizes), IndexRangeError (ids), ParamError.
    """
    make = functools.partial(Problem, request, options.in_place)
    if options.planner == "ggml-2023":
        return plan_2023(make(), options.parse_seq)
    if options.planner == "ggml":
        p = make()
        plan = ggml_plan(p, "ggml", request.max_size)
        p.graph.give_back()
        return plan
    search = functools.partial(best_plan, make, request.max_size, options)
    with busy("planning memory", options.time_limit):
        return _once(make(), request, options, search) if options.remember else search()


def _once(p, request, options, search):
    """The plan that was found for an equal Problem and options, else that of search(); a copy, which may be changed."""
    asked = (*(p.tensors[field] for field in ASKED), p.table[p.tensors["id"]][:, LAYOUT],
             p.tensors["src"][:p.n_nodes])
    key = hashlib.blake2b(repr((p.n_nodes, request.alignment, request.max_size, options.time_limit, options.capacity,
                               options.node_limit)).encode() + b"|".join(a.tobytes() for a in asked)).digest()
    with _remembering:
        plan = _remembered.get(key)
    plan = search() if plan is None else plan
    with _remembering:
        plan = _remembered.setdefault(key, plan)        # another thread may have found one meanwhile
        _remembered.move_to_end(key)
        while len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    return copy.deepcopy(plan)


def best_plan(make, limits, options):
    """GraphPlan of the lowest peak.  make() gives a fresh Problem; limits are the chunk limits per buffer."""
    clock, capacity = Clock(options.time_limit), options.capacity
    best, ggml_peak = None, None
    for rule in (MODERN, THROUGH_VIEWS):
        p = make()
        online = ggml_plan(p, "best", limits, rule=rule)
        ggml_peak = online.peak if ggml_peak is None else ggml_peak
        if best is not None and online.lower_bound >= best.peak:
            break
        plan = _improve(p, online, limits, clock, capacity or 0, options.node_limit)
        if best is None or plan.peak < best.peak:
            best = plan
        if capacity is not None and best.peak <= capacity:
            break
    best.ggml_peak, best.seconds = ggml_peak, clock.used
    return best


def _improve(p, plan, limits, clock, goal, node_limit):
    """Plan every buffer of `plan` offline; returns a plan that is nowhere above it."""
    sizes, how = [list(c) for c in plan.chunk_sizes], set()
    chunk, offs = p.graph.allocation["chunk"], p.graph.allocation["offs"]
    for b in range(p.n_buffers):
        keep = np.flatnonzero(plan.a_buffer == b)
        if not len(keep) or sum(sizes[b]) <= max(plan.lower_bounds[b], goal if p.n_buffers == 1 else 0):
            how.add("ggml")
            continue
        problem, alignment = (plan.a_lo[keep], plan.a_hi[keep], plan.a_size[keep]), int(p.alignments[b])
        left = max(clock.left, 0.0)
        lay = plan_offsets(*problem, alignment, time_limit=left if limits[b] is None else left / 2,
                           events=_signed_events(plan, keep), node_limit=node_limit,
                           capacity=max(goal, plan.lower_bounds[b]) if goal and p.n_buffers == 1 else None)
        found, by = (0, lay.offsets, [lay.peak]), lay.planner
        if limits[b] is not None and lay.peak > limits[b]:
            found, by = plan_chunks(*problem, lay.offsets, limits[b], alignment, max(clock.left, 0.0)), "chunks"
        if found is not None and sum(found[2]) < sum(sizes[b]):
            chunk[keep], offs[keep], sizes[b] = found
        else:
            by = "ggml"
        how.add(by)
    out = p.plan("best", plan.rule, sizes)
    out.how = " + ".join(sorted(how))
    return out


def _signed_events(plan, keep):
    """plan.events of the allocations in `keep` as signed numbers into keep, trims left out."""
    number = np.zeros(len(plan.a_id) + 1, np.int64)
    number[keep] = np.arange(1, len(keep) + 1)
    kind, a = plan.events[:, 0], plan.events[:, 1]
    signed = np.where(kind == EV_ALLOC, number[a], -number[a])
    return signed[(number[a] > 0) & (kind != EV_TRIM)]
