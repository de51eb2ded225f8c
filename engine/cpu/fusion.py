"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken when its nodes follow each other in the plan and read each other as the pattern says.  Results between:

    left out     only one node of the run reads it; it is neither an output nor a view nor placed by hand
    stored       anything else; the kernel writes it to the memory it has anyway

Some nodes are computed again by each run that reads them: then no run waits for the others.

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
    fusing, out, i = _Fusing(singles, graph, where, n_threads), [], 0
    while i < len(singles):
        found = fusing.at(i) or [singles[i]]
        out += found
        i += sum(len(p.nodes) for p in found)
    return out


class _Fusing:
    """What is looked up for every run.

    apart   ids of tensors whose values must be stored even if only a fused kernel reads them
    times   {id: how many nodes read it} of tensors that several read
    known   what was found for runs before.  Layers repeat: runs of nodes of the same kinds that read each other alike
            and store the same results get one kernel, with other tensors.
    """

    def __init__(self, singles, graph, where, n_threads):
        self.singles, self.where, self.n_threads = singles, where, n_threads
        self.ops, self.fusions, self.known = tuple([p.t.op for p in singles]), all_fusions(), {}
        rows = TABLE.words[graph.node_ids]
        read, times = np.unique(rows[:, T_SRC:T_SRC + MAX_SRC], return_counts=True)
        self.times = dict(zip(read[times > 1].tolist(), times[times > 1].tolist(), strict=True))
        apart = (rows[:, T_VIEW_SRC] >= 0) | (rows[:, T_BUFFER] >= 0) | (rows[:, T_FLAGS] & ~FLAG_COMPUTE != 0)
        self.apart = {*graph.node_ids[apart].tolist(), *graph.output_ids.tolist()}

    def at(self, i):
        """The PlanNodes of the longest run that begins at node i; None if there is none."""
        tried = set()
        for fusion in self.fusions.get(self.ops[i], ()):
            before = fusion.ops[:fusion.again]
            if fusion.again and before not in tried:
                tried.add(before)
                found = self._computed_again(before, i)
            else:
                found = None if fusion.again else self._matched(fusion, self._run(fusion.ops, i))
                found = found and [found]
            if found:
                return found
        return None

    def _run(self, ops, i):
        """The single PlanNodes of these ops from node i on; () if there are others."""
        end = i + len(ops)
        return self.singles[i:end] if self.ops[i:end] == ops else ()

    def _computed_again(self, before, i):
        """PlanNodes of all readers of a result, each of which computes the nodes of the ops `before` that make it."""
        n, first = len(before), self._run(before, i)
        if not first or first[-1].t.id in self.apart:
            return None
        made, at, out = first[-1].t, i + n, []
        left = self.times.get(made.id, 1)
        while left > 0:
            fits = (self._matched(f, [*first, *rest], made.id) for f in self.fusions[before[0]]
                    if f.ops[:f.again] == before and (rest := self._run(f.ops[n:], at)))
            found = next(filter(None, fits), None)
            if found is None:
                return None
            own = found.nodes[n:]
            left -= sum(s.id == made.id for t in own for s in t.src)
            at += len(own)
            out.append(found if not out else found._replace(nodes=own, left_out=frozenset()))
        return out if left == 0 else None

    def _matched(self, fusion, run, free=-1):
        """The fused PlanNode of `run`, or None.  free: id of a tensor that need not be stored although several nodes
        read it."""
        if not run:
            return None
        nodes = tuple([p.t for p in run])
        needed = [t.id in self.apart or t.id in self.times and t.id != free for t in nodes[:-1]]
        tensors = (*nodes, *[s for t in nodes for s in t.src])
        first = {}
        key = (id(fusion), *[p.kind for p in run], *needed,
               *[first.setdefault(id(x), i) for i, x in enumerate(tensors)])
        if key not in self.known:
            self.known[key] = _found(fusion, nodes, [p.kernel for p in run], needed, tensors, self.n_threads)
        if self.known[key] is None:
            return None
        kernel, params, left_out, *places = self.known[key]
        reads, by_row, ahead = (tuple([tensors[i] for i in some]) for some in places)
        fused = PlanNode(nodes[-1], kernel, fusion.module, reads, nodes, params,
                         frozenset(nodes[i].id for i in left_out), by_row, ahead)
        return fused if fused.permitted(self.where) else None


def _found(fusion, nodes, kernels, needed, tensors, n_threads):
    """(kernel, parameters, numbers of the nodes left out, places of reads, by_row, ahead among `tensors`), or None."""
    stored = tuple(t for t, is_needed in zip(nodes, needed, strict=False) if is_needed)
    made = fusion.fused(nodes, stored, kernels, n_threads) if fusion.matches(nodes) else None
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    place = {id(x): i for i, x in enumerate(tensors)}
    places = [[place[id(x)] for x in some] for some in ((*made.reads, *stored), made.by_row, made.ahead)]
    return made.kernel, params, [i for i, is_needed in enumerate(needed) if not is_needed], *places
