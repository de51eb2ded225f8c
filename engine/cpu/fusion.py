"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken when its nodes follow each other in the plan and read each other as the pattern says.  Results between:

    left out     only one node of the run reads it; it is neither an output nor a view nor placed by hand
    stored       anything else; the kernel writes it to the memory it has anyway

and the memory the allocator chose must permit it.  One kernel reads its sources while it writes its results, so no
result may overlap a source, except one that is read as a whole before anything is written, and one that is read row by
row and lies exactly where the result lies.  A run whose memory forbids it stays as it is.
"""
import functools
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.plan_node import N_PARAM_WORDS, PlanNode
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import FLAG_COMPUTE, MAX_SRC, T_BUFFER, T_FLAGS, T_OP, T_SRC, T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

_NEEDED, _USES = 1, 2           # words of what `_describe` says of a node; word 0 is its kind
_WORDS = _USES + 1 + MAX_SRC
_FAR = 16 * _WORDS              # words; no run is longer


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def _describe(table, n_rows, graph_, n_graph, outputs_, n_outputs, ids_, n, out_):
    """For each node `ids_`: is its value needed by others than the node that reads it?  And for its result and each
    source: how many words before does that tensor stand last?  0: nowhere near, -1: there is no source."""
    t, graph, outputs = i64s(table, 1 << 40), i64s(graph_, n_graph), i64s(outputs_, n_outputs)
    ids, out = i64s(ids_, n), i64s(out_, n * _WORDS)
    n_reads, last = np.zeros(n_rows, np.int64), np.full(n_rows, -_FAR, np.int64)
    for i in range(n_graph):
        for j in range(MAX_SRC):
            s = t[graph[i] * T_WORDS + T_SRC + j]
            if s >= 0:
                n_reads[s] += 1
    for i in range(n_outputs):
        n_reads[outputs[i]] = 2
    for i in range(n):
        row, at = ids[i] * T_WORDS, i * _WORDS
        out[at + _NEEDED] = n_reads[ids[i]] > 1 or t[row + T_VIEW_SRC] >= 0 or t[row + T_BUFFER] >= 0 \
            or t[row + T_FLAGS] & ~FLAG_COMPUTE != 0
        for j in range(1 + MAX_SRC):
            x, here = ids[i] if j == 0 else t[row + T_SRC + j - 1], at + _USES + j
            out[here] = -1
            if x >= 0:
                out[here] = here - last[x] if here - last[x] < _FAR else 0
                last[x] = here
    return 0


def fuse_nodes(singles, graph, where, n_threads):
    """`singles` (PlanNodes of one node each, in order) with runs replaced by fused ones.  where(t) -> (buffer, offset).
    """
    ids = np.array([p.t.id for p in singles], np.int64)
    ops = TABLE.words[ids, T_OP]
    starts = np.flatnonzero(_begins_a_run()[ops[:-1], ops[1:]]).tolist()
    if not starts:
        return singles
    find, out, end = _Runs(singles, ids, graph, n_threads).find, [], 0
    for i in starts:
        found = find(i, where) if i >= end else None
        if found is not None:
            out += singles[end:i]
            out.append(found)
            end = i + len(found.nodes)
    return [*out, *singles[end:]] if out else singles


@functools.cache
def _begins_a_run():
    """[op, op of the next node]: does a fusion begin so?"""
    found = np.zeros((256, 256), bool)
    for fusion in itertools.chain(*all_fusions().values()):
        found[fusion.ops[:2]] = True
    return found


class _Runs:
    """Runs of nodes that one kernel may compute.  Layers repeat: runs of nodes of the same kinds that read each other
    alike and store the same results are a kind, too, and get one kernel."""

    def __init__(self, singles, ids, graph, n_threads):
        kinds = [p.kind for p in singles]
        self.singles, self.n_threads, self.n_kinds, self.known = singles, n_threads, 1 + max(kinds), {}
        self.facts = np.empty((len(ids), _WORDS), np.int64)
        _describe(TABLE.words, TABLE.n_rows, graph.node_ids, len(graph.node_ids), graph.output_ids,
                  len(graph.output_ids), ids, len(ids), self.facts)
        self.facts[:, 0] = kinds

    def find(self, i, where):
        """The fused PlanNode of the longest run that begins with node i, or None."""
        for fusion in all_fusions().get(self.singles[i].t.op, ()):
            run = self.singles[i:i + len(fusion.ops)]
            nodes = tuple([p.t for p in run])
            if tuple([t.op for t in nodes]) == fusion.ops:
                fused = self._fused(fusion, i, run, nodes)
                if fused is not None and fused.permitted(where):
                    return fused
        return None

    def _fused(self, fusion, i, run, nodes):
        facts = self.facts[i:i + len(run)]
        key = id(fusion), facts.tobytes()
        if key not in self.known:
            stored = tuple([t for t, needed in zip(nodes[:-1], facts[:, _NEEDED].tolist(), strict=False) if needed])
            self.known[key] = _found(fusion, nodes, [p.kernel for p in run], stored, self.n_threads,
                                     self.n_kinds + len(self.known))
        if self.known[key] is None:
            return None
        kernel, params, kind, left_out, *places = self.known[key]
        reads, by_row, ahead = (tuple([nodes[k] if j < 0 else nodes[k].src[j] for k, j in some]) for some in places)
        return PlanNode(nodes[-1], kernel, fusion.module, reads, nodes, params,
                        frozenset([nodes[k].id for k in left_out]), by_row, ahead, kind)


def _found(fusion, nodes, kernels, stored, n_threads, kind):
    """(kernel, parameters, kind, numbers of the nodes left out; where reads, by_row and ahead stand among the nodes'
    results (number of the node, -1) and sources (number of the node, of its source)), or None."""
    made = fusion.fused(nodes, stored, kernels, n_threads) if fusion.matches(nodes) else None
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    place = {id(s): (k, j) for k, t in enumerate(nodes) for j, s in enumerate(t.src)}
    place |= {id(t): (k, -1) for k, t in enumerate(nodes)}
    places = [[place[id(x)] for x in some] for some in ((*made.reads, *stored), made.by_row, made.ahead)]
    left_out = [k for k, t in enumerate(nodes[:-1]) if not any(t is s for s in stored)]
    return made.kernel, params, kind, left_out, *places
