"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken if its nodes follow each other in the plan, read each other as the pattern says, and lie where the
memory permits it.  Results in between:

    left out     only one node of the run reads it; it is neither an output nor a view nor placed by hand
    stored       anything else; the kernel writes it to the memory it has anyway

Some nodes are computed again by each run that reads them.  Then no run waits for the others.

One kernel reads its sources while it writes its results, so no result may overlap a source, except one that is read as
a whole before anything is written, and one that is read row by row and lies exactly where the result lies.  A run whose
memory forbids it stays as it is.
"""
import functools
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.node_kinds import N_PARAM_WORDS
from ggjit.graphs.plan_node import PlanNode
from ggjit.graphs.plan_places import PlanPlaces
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import FLAG_COMPUTE, MAX_SRC, T_BUFFER, T_FLAGS, T_OP, T_SRC, T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

# words of what `_describe` says of a node; word 0 is its kind
_APART, _READS, _USES = 1, 2, 3
_WORDS = _USES + 1 + MAX_SRC
_NBYTES = _WORDS * 8
_FAR = 16 * _WORDS              # words; no run is longer


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def _describe(table, n_rows, graph_, n_graph, outputs_, n_outputs, ids_, n, out_):
    """For each node `ids_`: must its value be stored even if only a fused kernel reads it?  How often is it read?  And
    for its result and each source: how many words before does that tensor stand last?  0: nowhere near, -1: there is
    no source."""
    t, graph, outputs = i64s(table, 1 << 40), i64s(graph_, n_graph), i64s(outputs_, n_outputs)
    ids, out = i64s(ids_, n), i64s(out_, n * _WORDS)
    n_reads, last = np.zeros(n_rows, np.int64), np.full(n_rows, -_FAR, np.int64)
    is_output = np.zeros(n_rows, np.uint8)
    for i in range(n_graph):
        for j in range(MAX_SRC):
            s = t[graph[i] * T_WORDS + T_SRC + j]
            if s >= 0:
                n_reads[s] += 1
    for i in range(n_outputs):
        is_output[outputs[i]] = 1
    for i in range(n):
        row, at = ids[i] * T_WORDS, i * _WORDS
        out[at + _APART] = is_output[ids[i]] or t[row + T_VIEW_SRC] >= 0 or t[row + T_BUFFER] >= 0 \
            or t[row + T_FLAGS] & ~FLAG_COMPUTE != 0
        out[at + _READS] = n_reads[ids[i]]
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
    ops = TABLE.words[ids, T_OP].astype(np.uint8)
    starts = np.flatnonzero(_begins_a_run()[ops[:-1], ops[1:]]).tolist()
    if not starts:
        return singles
    fusing, out, end = _Fusing(singles, ids, ops.tobytes(), graph, where, n_threads), [], 0
    for i in starts:
        found = fusing.at(i) if i >= end else None
        if found:
            out += [*singles[end:i], *found]
            end = i + sum([len(p.nodes) for p in found])
    return [*out, *singles[end:]] if out else singles


@functools.cache
def _begins_a_run():
    """[op, op of the next node]: does a fusion begin so?"""
    found = np.zeros((256, 256), bool)
    for fusion in itertools.chain(*all_fusions().values()):
        found[fusion.ops[:2]] = True
    return found


class _Fusing:
    """What is looked up for every run; nodes are numbers of `singles`.

    ops     of the nodes, as bytes
    apart   must the node's value be stored even if only a fused kernel reads it?
    reads   how often it is read
    known   what was found for runs before.  Layers repeat: runs of nodes of the same kinds that read each other alike
            and store the same results are a kind, too, and get one kernel, with other tensors.
    tries   what `_tries` said of nodes before
    """

    def __init__(self, singles, ids, ops, graph, where, n_threads):
        self.singles, self.ops, self.where, self.n_threads = singles, ops, where, n_threads
        self.fusions, self.known, self.facts = all_fusions(), {}, np.empty((len(ids), _WORDS), np.int64)
        kinds = [p.kind for p in singles]
        _describe(TABLE.words, TABLE.n_rows, graph.node_ids, len(graph.node_ids), graph.output_ids,
                  len(graph.output_ids), ids, len(ids), self.facts)
        self.facts[:, 0], self.n_kinds = kinds, 1 + max(kinds)
        self.apart, self.reads = (self.facts[:, word].tolist() for word in (_APART, _READS))
        self.as_bytes, self.tries = self.facts.tobytes(), {}
        self.longest = _NBYTES * max(len(f.ops) for f in itertools.chain(*self.fusions.values()))

    @functools.cached_property
    def places(self):
        """(numbers among the plan's tensors, first bytes, ends) [node][0: its result, 1 + j: source j]; None where
        `where` looks tensors up one by one."""
        if not isinstance(self.where, PlanPlaces):
            return None
        uses, (first, end) = self.where.tensors.uses, self.where.spans()
        return [a.tolist() for a in (uses, first[uses], end[uses])]

    def at(self, i):
        """The PlanNodes of the longest run that begins at node i; None if there is none."""
        window = self.as_bytes[i * _NBYTES:i * _NBYTES + self.longest]
        if window not in self.tries:
            self.tries[window] = self._tries(i)
        for before, kind, n in self.tries[window]:
            found = self._computed_again(before, i) if before else self._made(range(i, i + n), *kind)
            if found:
                return found if before else [found]
        return None

    def _tries(self, i):
        """What fits node i and its like where memory permits it: [(None, kind, number of nodes)], or (ops that are
        computed again, None, 0)."""
        tries = []
        for fusion in self.fusions.get(self.singles[i].t.op, ()):
            before = fusion.ops[:fusion.again]
            run = self._run(before or fusion.ops, i)
            if run and before:
                tries += [(before, None, 0)] if (before, None, 0) not in tries and not self.apart[run[-1]] else []
            elif run and (kind := self._kind(fusion, run)):
                tries.append((None, kind, len(run)))
        return tries

    def _run(self, ops, i):
        """The nodes of these ops from node i on; () if there are others."""
        end = i + len(ops)
        return range(i, end) if self.ops[i:end] == bytes(ops) else ()

    def _computed_again(self, before, i):
        """PlanNodes of all readers of a result, each of which computes the nodes of the ops `before` that make it."""
        n, first = len(before), self._run(before, i)
        if not first or self.apart[first[-1]]:
            return None
        made, at, out = self.singles[first[-1]].t, i + n, []
        left = max(self.reads[first[-1]], 1)
        while left > 0:
            fits = (self._matched(f, (*first, *rest), first[-1]) for f in self.fusions[before[0]]
                    if f.ops[:f.again] == before and (rest := self._run(f.ops[n:], at)))
            found = next(filter(None, fits), None)
            if found is None:
                return None
            own = found.nodes[n:]
            left -= sum(s.id == made.id for t in own for s in t.src)
            at += len(own)
            out.append(found if not out else found._replace(nodes=own, left_out=found.left_out & {t.id for t in own}))
        return out if left == 0 else None

    def _matched(self, fusion, run, free=-1):
        """The fused PlanNode of `run`, or None.  free: a node that need not be stored, though several nodes read it."""
        kind = self._kind(fusion, run, free)
        return kind and self._made(run, *kind)

    def _kind(self, fusion, run, free=-1):
        """What `_found` says of such a run."""
        key = id(fusion), free >= 0, self._alike(run)
        if key not in self.known:
            nodes = tuple([self.singles[k].t for k in run])
            needed = [self.apart[k] or self.reads[k] > 1 and k != free for k in run[:-1]]
            kernels = [self.singles[k].kernel for k in run]
            self.known[key] = _found(fusion, nodes, kernels, needed, self.n_threads, self.n_kinds + len(self.known))
        return self.known[key]

    def _made(self, run, like, left_out, reads, by_row, ahead, apart):
        """The PlanNode of `run`, which is `like` another one; None where its memory forbids it."""
        if self.places is not None:
            numbers, first, end = self.places
            for (k, j), (m, n), unless in apart:
                a, b = first[run[k]][j], first[run[m]][n]
                if a < end[run[m]][n] and b < end[run[k]][j] and not (unless and a == b):
                    return None
        nodes = tuple([self.singles[k].t for k in run])
        reads_, by_row, ahead = (tuple([nodes[k].src[j - 1] if j else nodes[k] for k, j in some])
                                 for some in (reads, by_row, ahead))
        made = PlanNode(nodes[-1], like.kernel, like.module, reads_, nodes, like.params,
                        frozenset([nodes[k].id for k in left_out]), by_row, ahead, like.kind,
                        self.places and [numbers[run[k]][j] for k, j in reads])
        return made if self.places is not None or made.permitted(self.where) else None

    def _alike(self, run):
        """Equal for runs of equal kinds that read each other alike and whose results are read alike."""
        if run[-1] - run[0] == len(run) - 1:
            return self.as_bytes[run[0] * _NBYTES:(run[-1] + 1) * _NBYTES]
        nodes = [self.singles[k].t for k in run]
        first, tensors = {}, (*nodes, *[s for t in nodes for s in t.src])
        return (*[first.setdefault(id(x), k) for k, x in enumerate(tensors)], self.facts[list(run), :_USES].tobytes())


def _found(fusion, nodes, kernels, needed, n_threads, kind):
    """(PlanNode of the run, numbers of the nodes left out; where reads, by_row, ahead and what must be apart stand:
    (number of the node, 0 for its result, 1 + j for its source j)), or None."""
    stored = tuple(t for t, is_needed in zip(nodes, needed, strict=False) if is_needed)
    made = fusion.fused(nodes, stored, kernels, n_threads) if fusion.matches(nodes) else None
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    place = {id(s): (k, 1 + j) for k, t in enumerate(nodes) for j, s in enumerate(t.src)}
    place |= {id(t): (k, 0) for k, t in enumerate(nodes)}
    left_out = [k for k, is_needed in enumerate(needed) if not is_needed]
    part = PlanNode(nodes[-1], made.kernel, fusion.module, (*made.reads, *stored), nodes, params,
                    frozenset([nodes[k].id for k in left_out]), made.by_row, made.ahead, kind)
    places = [[place[id(x)] for x in some] for some in (part.reads, part.by_row, part.ahead)]
    return part, left_out, *places, [(place[id(t)], place[id(s)], unless) for t, s, unless in part.apart()]
