"""An order of a graph's nodes for `order="memory"`: one of orders/, where its plan is below the given one's."""
import numpy as np

from ggjit.alloc.ggml.problem import IN_PLACE_OPS, Problem
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.orders.exact_order import Bytes
from ggjit.alloc.orders.memory_order import legal_edges, memory_order
from ggjit.alloc.orders.order_variants import variants
from ggjit.ops.core.host_memory import oom_guard

ALIGNMENT = 32                  # bytes; what plan_graph pads to
PLAN_NODES = 5000               # of the search for offsets of an order; most are at their bound at once
VARIANTS, MOVES = 8, 500        # orders with as few live bytes that are placed where the first has a gap


def padded(sizes):
    """(node sizes, leaf sizes) as a plan of them has them."""
    return [-(-np.asarray(z, np.int64) // ALIGNMENT) * ALIGNMENT for z in sizes]


@oom_guard("an order of nodes")
def reorder(table, node_ids, leaf_ids, sizes, beam=8, in_place=None, outputs=()):
    """node_ids in a legal order whose plan by "best" is below that of the given one, or the given one.

    Arguments as plan_graph's; sizes = (node sizes, leaf sizes).
    """
    in_place = np.ascontiguousarray(IN_PLACE_OPS if in_place is None else in_place, np.uint8)
    node_ids, node_sizes = np.asarray(node_ids, np.int64), np.asarray(sizes[0], np.int64)
    problem = Problem(table, node_ids, leaf_ids, padded(sizes), [1], None, None, in_place, outputs=outputs)
    found = memory_order(problem, beam)

    def planned(pick, **settings):
        return plan_graph(table, node_ids[pick], leaf_ids, (node_sizes[pick], sizes[1]), in_place=in_place,
                          outputs=outputs, **settings)
    given, order, nbytes = np.arange(len(node_ids)), found.order, Bytes(problem)
    old, new = planned(given), planned(order)
    if found.peak >= old.peak:
        return node_ids
    if new.peak > found.peak:
        new = planned(order, planner="best", node_limit=PLAN_NODES)
    others = variants(nbytes, legal_edges(problem), order, VARIANTS, min(len(order), MOVES))
    for other in others if new.peak > found.peak else ():
        plan = planned(other, planner="best", node_limit=PLAN_NODES // 5)
        if plan.peak < new.peak:
            new, order = plan, other
        if new.peak == found.peak:
            break
    if new.peak >= nbytes.peak(given):          # else sure without a search
        old = planned(given, planner="best", node_limit=PLAN_NODES)
    return node_ids[order] if new.peak < old.peak else node_ids
