"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken when its nodes follow each other in the plan and read each other as the pattern says.  Results between:

    left out     only one node of the run reads it; it is neither an output nor a view nor placed by hand
    stored       anything else; the kernel writes it to the memory it has anyway

and the memory the allocator chose must permit it.  One kernel reads its sources while it writes its results, so no
result may overlap a source, except one that is read as a whole before anything is written, and one that is read row by
row and lies exactly where the result lies.  A run whose memory forbids it stays as it is.
"""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.plan_node import N_PARAM_WORDS, PlanNode
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import FLAG_COMPUTE, MAX_SRC, T_BUFFER, T_FLAGS, T_SRC, T_VIEW_SRC


def fuse_nodes(singles, graph, where, n_threads):
    """`singles` (PlanNodes of one node each, in order) with runs replaced by fused ones."""
    needed, ops = _needed_elsewhere(graph), tuple([p.t.op for p in singles])
    fusions, known, out, i = all_fusions(), {}, [], 0
    while i < len(singles):
        found = None
        for fusion in fusions.get(ops[i], ()):
            end = i + len(fusion.ops)
            if ops[i:end] == fusion.ops:
                found = _matched(fusion, singles[i:end], needed, known, where, n_threads)
                if found is not None:
                    break
        out.append(found or singles[i])
        i += len(out[-1].nodes)
    return out


def _needed_elsewhere(graph):
    """Ids of tensors whose values must be stored even if only a fused kernel reads them."""
    rows = TABLE.words[graph.node_ids]
    read, times = np.unique(rows[:, T_SRC:T_SRC + MAX_SRC], return_counts=True)
    apart = (rows[:, T_VIEW_SRC] >= 0) | (rows[:, T_BUFFER] >= 0) | (rows[:, T_FLAGS] & ~FLAG_COMPUTE != 0)
    return {*read[times > 1].tolist(), *graph.node_ids[apart].tolist(), *graph.output_ids.tolist()}


def _matched(fusion, run, needed, known, where, n_threads):
    """The fused PlanNode of `run`, or None.

    known: what was found for runs before.  Layers repeat: runs of nodes of the same kinds that read each other alike
    and store the same results get one kernel, with other tensors.
    """
    nodes = tuple([p.t for p in run])
    tensors = (*nodes, *[s for t in nodes for s in t.src])
    first = {}
    key = (id(fusion), *[p.kind for p in run], *[t.id in needed for t in nodes[:-1]],
           *[first.setdefault(id(x), i) for i, x in enumerate(tensors)])
    if key not in known:
        known[key] = _found(fusion, nodes, [p.kernel for p in run], needed, tensors, n_threads)
    if known[key] is None:
        return None
    kernel, params, left_out, *places = known[key]
    reads, by_row, ahead = (tuple([tensors[i] for i in some]) for some in places)
    fused = PlanNode(nodes[-1], kernel, fusion.module, reads, nodes, params, frozenset(nodes[i].id for i in left_out),
                     by_row, ahead)
    return fused if fused.permitted(where) else None


def _found(fusion, nodes, kernels, needed, tensors, n_threads):
    """(kernel, parameters, numbers of the nodes left out, places of reads, by_row, ahead among `tensors`), or None."""
    stored = tuple(t for t in nodes[:-1] if t.id in needed)
    made = fusion.fused(nodes, stored, kernels, n_threads) if fusion.matches(nodes) else None
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    place = {id(x): i for i, x in enumerate(tensors)}
    places = [[place[id(x)] for x in some] for some in ((*made.reads, *stored), made.by_row, made.ahead)]
    return made.kernel, params, [i for i, t in enumerate(nodes[:-1]) if t.id not in needed], *places
