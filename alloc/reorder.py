"""Chooses the order of a graph's nodes for `order="memory"`: one of orders/ if its plan is lower, else the given
one."""
import dataclasses

import numpy as np

from ggjit.alloc.ggml.problem import Problem
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.orders.exact_order import Bytes
from ggjit.alloc.orders.memory_order import legal_edges, memory_order
from ggjit.alloc.orders.order_variants import variants
from ggjit.alloc.plan_request import PlanOptions, PlanRequest
from ggjit.ops.core.host_memory import oom_guard

ALIGNMENT = 32                  # bytes; what plan_graph pads to
PLAN_NODES = 5000               # nodes of the search for offsets of an order; most are at their bound at once
VARIANTS, MOVES = 8, 500        # so many variants of an order are placed if its plan is above the most live bytes


def padded(sizes):
    """(node sizes, leaf sizes) as a plan of them has them."""
    return [-(-np.asarray(z, np.int64) // ALIGNMENT) * ALIGNMENT for z in sizes]


@oom_guard("an order of nodes")
def reorder(request, beam=8, in_place=None):
    """node_ids of a PlanRequest in a legal order whose plan by "best" is below that of the given one, or as given."""
    options = PlanOptions(in_place=in_place)
    searched = dataclasses.replace(options, planner="best", node_limit=PLAN_NODES)
    request = PlanRequest(request.table, np.asarray(request.node_ids, np.int64), request.leaf_ids, request.sizes,
                          request.outputs)
    problem = Problem(dataclasses.replace(request, sizes=padded(request.sizes), alignment=1), options.in_place)
    found = memory_order(problem, beam)

    def planned(pick, options=options):
        return plan_graph(request.in_order(pick), options)
    given, order, nbytes = np.arange(len(request.node_ids)), found.order, Bytes(problem)
    old, new = planned(given), planned(order)
    if found.peak >= old.peak:
        return request.node_ids
    if new.peak > found.peak:
        new = planned(order, searched)
    others = variants(nbytes, legal_edges(problem), order, VARIANTS, min(len(order), MOVES))
    for other in others if new.peak > found.peak else ():
        plan = planned(other, dataclasses.replace(searched, node_limit=PLAN_NODES // 5))
        if plan.peak < new.peak:
            new, order = plan, other
        if new.peak == found.peak:
            break
    if new.peak >= nbytes.peak(given):          # otherwise no search is needed
        old = planned(given, searched)
    return request.node_ids[order] if new.peak < old.peak else request.node_ids
