"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken when its nodes follow each other in the plan and read each other as the pattern says.  Results between:

    left out     only one node of the run reads it; it is neither an output nor a view nor placed by hand
    stored       anything else; the kernel writes it to the memory it has anyway

and the memory the allocator chose must permit it.  One kernel reads its sources while it writes its results, so no
result may overlap a source, except one that is read as a whole before anything is written, and one that is read row by
row and lies exactly where the result lies.  A run whose memory forbids it stays as it is.
"""
import collections

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.plan_node import N_PARAM_WORDS, PlanNode
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import FLAG_COMPUTE, T_BUFFER, T_FLAGS


def fuse_nodes(singles, graph, where, n_threads):
    """`singles` (PlanNodes of one node each, in order) with runs replaced by fused ones."""
    needed = _needed_elsewhere(graph)
    fusions, out, i = all_fusions(), [], 0
    while i < len(singles):
        found = None
        for fusion in fusions.get(singles[i].t.op, ()):
            found = _matched(fusion, singles[i:i + len(fusion.ops)], needed, where, n_threads)
            if found is not None:
                break
        out.append(found or singles[i])
        i += len(out[-1].nodes)
    return out


def _needed_elsewhere(graph):
    """Ids of tensors that must be stored whatever reads them next."""
    readers = collections.Counter(s.id for t in graph.nodes for s in t.src if s is not None)
    words, outputs = TABLE.words, set(graph.output_ids.tolist())
    return {t.id for t in graph.nodes
            if readers[t.id] > 1 or t.view_src is not None or words[t.id, T_BUFFER] >= 0
            or t.id in outputs or words[t.id, T_FLAGS] & ~FLAG_COMPUTE}


def _matched(fusion, run, needed, where, n_threads):
    """The fused PlanNode of `run`, or None."""
    nodes = tuple(p.t for p in run)
    if not fusion.matches(nodes):
        return None
    stored = tuple(t for t in nodes[:-1] if t.id in needed)
    made = fusion.fused(nodes, stored, [p.kernel for p in run], n_threads)
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    left_out = frozenset(t.id for t in nodes[:-1]) - {t.id for t in stored}
    reads = (*made.reads, *stored)
    fused = PlanNode(nodes[-1], made.kernel, fusion.module, reads, nodes, params, left_out, made.by_row, made.ahead)
    return fused if fused.permitted(where) else None
