"""Where every tensor of a graph lives: an aliasing pass, then an offset policy.  No memory is touched.

    plan = plan_graph(table, node_ids, leaf_ids, (node_sizes, leaf_sizes))
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

from ggjit.alloc.ggml import columns as col
from ggjit.alloc.ggml.alias import MODERN, THROUGH_VIEWS
from ggjit.alloc.ggml.legacy.graph_alloc_2023 import plan_2023
from ggjit.alloc.ggml.problem import IN_PLACE_2023, IN_PLACE_OPS, Problem, check_alignment, check_time_limit, ggml_plan
from ggjit.alloc.offsets.chunked import plan_chunks
from ggjit.alloc.offsets.planners import Clock, plan_offsets
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.progress import busy
from ggjit.ops.core.record import MAX_SRC, T_NB, T_NE, T_TYPE
from ggjit.ops.core.whole_numbers import is_whole

PLANNERS = ("ggml", "ggml-2023", "best")
REMEMBERED = 8                  # plans of "best" that are kept
LAYOUT = [T_TYPE, *range(T_NE, T_NE + 4), *range(T_NB, T_NB + 4)]       # what aliasing reads of a table row

_remembered = collections.OrderedDict()         # {what was asked: GraphPlan}, the one used last at the end
_remembering = ForkLock()


def _per_buffer(value, n, name):
    out = [value] * n if value is None or np.isscalar(value) else list(value)
    if len(out) != n:
        raise ShapeError(f"{name}: expected one value or {n}, got {len(out)}")
    return out


@oom_guard("a memory plan")
def plan_graph(table, node_ids, leaf_ids, sizes, *, alignment=32, max_size=None, node_buffers=None, leaf_buffers=None,
               n_buffers=1, planner="ggml", in_place=None, parse_seq=None, time_limit=1.0, outputs=(), capacity=None,
               node_limit=None, remember=False):
    """Place every tensor of a graph that has no memory yet.

    table        int64 matrix, one TENSOR record per row (ggjit.ops.core.record); a tensor is external when it, or the
                 tensor it views, has a buffer there
    node_ids, leaf_ids   table rows, nodes in execution order
    sizes        (node sizes, leaf sizes): bytes each tensor needs from its buffer type; padded here
    alignment, max_size  bytes, one value or one per buffer; max_size None means chunks without limit
    node_buffers, leaf_buffers   buffer index per node and leaf (reserve_n's ids), None: all 0
    planner      "ggml" (current ggml, offset for offset), "ggml-2023" (its November sources), "best" (never above ggml)
    in_place     bool array by op number; default: the set of the chosen ggml version
    parse_seq    "ggml-2023" only: node positions, -1 for barriers
    time_limit   seconds "best" may search
    capacity     bytes; "best" stops at the first plan that fits
    node_limit   search nodes of "best" in place of time: the same call gives the same plan everywhere
    outputs      table rows that are kept to the end, as those with FLAG_OUTPUT are
    remember     "best": the plan found when the same was asked last, so that what was announced is what is taken,
                 however busy the machine was in either search

    Errors: GraphError (cycle, foreign or repeated tensor), ShapeError (sizes), IndexRangeError (ids), ParamError.
    """
    if planner not in PLANNERS:
        raise ParamError(f"planner {planner!r}: expected one of {', '.join(PLANNERS)}")
    check_time_limit(time_limit)
    if parse_seq is not None and planner != "ggml-2023":
        raise ParamError(f"parse_seq belongs to planner 'ggml-2023', not to {planner!r}")
    alignments = [check_alignment(a) for a in _per_buffer(alignment, n_buffers, "alignment")]
    limits = _per_buffer(max_size, n_buffers, "max_size")
    if not all(x is None or is_whole(x, 1) for x in limits):
        raise ParamError(f"max_size {max_size!r}: expected positive bytes")
    for name, value, unit in (("capacity", capacity, "bytes"), ("node_limit", node_limit, "nodes of the search")):
        if value is not None and not is_whole(value, 0):
            raise ParamError(f"{name} {value!r}: expected {unit}, a whole number >= 0, or None")
    if in_place is None:
        in_place = IN_PLACE_2023 if planner == "ggml-2023" else IN_PLACE_OPS
    in_place = np.ascontiguousarray(in_place, np.uint8)
    make = functools.partial(Problem, table, node_ids, leaf_ids, sizes, alignments, node_buffers, leaf_buffers,
                             in_place, outputs=outputs)
    if planner == "best":
        search = functools.partial(best_plan, make, limits, time_limit, capacity, node_limit)
        with busy("planning memory", time_limit):
            options = alignments, limits, time_limit, capacity, node_limit
            return _once(make(), options, search) if remember else search()
    return plan_2023(make(), parse_seq) if planner == "ggml-2023" else ggml_plan(make(), planner, limits)


def _once(p, options, search):
    """The plan that was found for an equal Problem and options, else that of search(); a copy, which may be changed."""
    asked = (col.column(p.ws, p.m, col.ID, col.BUFT + 1 - col.ID), p.table[p.col(col.ID)][:, LAYOUT],
             col.column(p.ws, p.m, col.SRC, MAX_SRC)[:p.n_nodes * MAX_SRC])
    key = hashlib.blake2b(repr((p.n_nodes, options)).encode() + b"|".join(a.tobytes() for a in asked)).digest()
    with _remembering:
        plan = _remembered.get(key)
    plan = search() if plan is None else plan
    with _remembering:
        plan = _remembered.setdefault(key, plan)        # another thread may have found one meanwhile
        _remembered.move_to_end(key)
        while len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    return copy.deepcopy(plan)


def best_plan(make, limits, time_limit, capacity=None, node_limit=None):
    """GraphPlan of the lowest peak.  make() gives a fresh Problem; limits are the chunk limits per buffer."""
    clock = Clock(time_limit)
    best, ggml_peak = None, None
    for rule in (MODERN, THROUGH_VIEWS):
        p = make()
        online = ggml_plan(p, "best", limits, rule=rule)
        ggml_peak = online.peak if ggml_peak is None else ggml_peak
        if best is not None and online.lower_bound >= best.peak:
            break
        plan = _improve(p, online, limits, clock, capacity or 0, node_limit)
        if best is None or plan.peak < best.peak:
            best = plan
        if capacity is not None and best.peak <= capacity:
            break
    best.ggml_peak, best.seconds = ggml_peak, clock.used
    return best


def _improve(p, plan, limits, clock, goal, node_limit):
    """Plan every buffer of `plan` offline; returns a plan that is nowhere above it."""
    sizes, how = [list(c) for c in plan.chunk_sizes], set()
    chunk, offs = p.col(col.A_CHUNK), p.col(col.A_OFFS)
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
    signed = np.where(kind == col.EV_ALLOC, number[a], -number[a])
    return signed[(number[a] > 0) & (kind != col.EV_TRIM)]
