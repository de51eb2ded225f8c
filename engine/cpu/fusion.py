"""Fusion: which runs of nodes of a plan become one kernel (ops/core/fusion_pattern.py says what can).

A run is taken if its nodes follow each other in the plan, read each other as the pattern says, and lie where the
memory permits it.  Results in between:

    left out     one node of the run reads it and no other; it is neither an output nor a view nor placed by hand
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
from ggjit.cpu.fusion_walk import (
    APART,
    APART_WORDS,
    FAR,
    READS,
    TOOK_WORDS,
    USES,
    all_permitted,
    describe,
    number_windows,
    take_runs,
)
from ggjit.graphs.node_kinds import N_PARAM_WORDS
from ggjit.graphs.plan_node import PlanNode, PlanParts, Spots
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import T_OP
from ggjit.ops.native.jit import address_of


def fuse_nodes(singles, graph, places, n_threads, table=None):
    """The PlanParts of a plan, one node each, with runs replaced by fused ones.  places: their PlanPlaces; None: every
    tensor has memory of its own.  table() -> {first OP: its Fusions} of another device; None: the CPU's."""
    ops, table = TABLE.words[singles.ids, T_OP].astype(np.uint8), table or all_fusions
    starts = np.flatnonzero(_begins_a_run(table)[ops[:-1], ops[1:]])
    if not len(starts):
        return singles
    _ = all_permitted.address       # compiled now: a run whose memory has moved should not wait for that
    return _Fusing(singles, ops.tobytes(), graph, n_threads, table()).parts(starts, places)


def still_permitted(parts, places):
    """Does the memory, as it is now, permit the fused parts?"""
    uses, (first, last) = places.tensors.uses, places.spans()
    return all(all_permitted(like.spots.apart, len(like.spots.apart), runs, *runs.shape, uses, uses.shape[1],
                             first, last) for like, _, runs in parts.fused)


@functools.cache
def _begins_a_run(table):
    """[op, op of the next node]: does a fusion of the table begin so?"""
    found = np.zeros((256, 256), bool)
    for fusion in itertools.chain(*table().values()):
        found[fusion.ops[:2]] = True
    return found


class _Fusing:
    """What is looked up for every run; nodes are numbers of `singles`.

    ops     of the nodes, as bytes
    facts   what `fusion_walk.describe` says of them
    likes   {kind: a PlanNode of it}, of fused ones too.  Layers repeat: runs of nodes of the same kinds that read each
            other alike and store the same results are a kind, and get one kernel, with other tensors.
    known   {what a run is like: its kind, None: no kernel computes it}
    """

    def __init__(self, singles, ops, graph, n_threads, fusions):
        self.singles, self.ops, self.n_threads = singles, ops, n_threads
        self.fusions, self.likes, self.known = fusions, dict(singles.likes), {}
        self.facts, self.n_kinds = describe(graph, singles.ids, singles.kinds), 1 + max(singles.likes)

    def parts(self, starts, places):
        """The PlanParts.  starts: nodes with which a run may begin."""
        n, windows = len(self.ops), np.empty(len(starts), np.int64)
        number_windows(self.facts, n, starts, len(starts), windows)
        first = dict(zip(windows[::-1].tolist(), starts[::-1].tolist(), strict=True))
        tries = _Tries([self._tries(first[w]) for w in range(len(first))], self.likes)
        took = tries.taken(starts, windows, n, places)
        if not len(took):
            return self.singles
        end, n_own, kind, run, at = took.T
        inside = np.zeros(n, np.int64)                      # of a part, but not its last node
        inside[end - n_own] += 1
        inside[end - 1] -= 1
        ends = np.flatnonzero(np.cumsum(inside) == 0) + 1
        kinds, part = self.singles.kinds[ends - 1], np.searchsorted(ends, end)
        kinds[part] = kind
        again = {i: tuple([k + first for k in tries.nodes_of[r]]) for i, r, first, n in
                 zip(*(a.tolist() for a in (part, run, at, n_own)), strict=True) if n < len(tries.nodes_of[r])}
        return PlanParts(self.singles.nodes, self.singles.ids, self.likes, kinds, ends, again)

    def _tries(self, i):
        """What fits node i and its like where memory permits it: [[(nodes of a run, counted from i; how many are its
        own, its kind)]]."""
        tries, seen = [], set()
        for fusion in self.fusions.get(self.singles.nodes[i].op, ()):
            before = fusion.ops[:fusion.again]
            run = self._run(before or fusion.ops, i)
            if run and before and before not in seen:
                seen.add(before)
                is_apart, n_reads = self.facts[run[-1], [APART, READS]].tolist()
                if not is_apart:
                    tries += self._computed_again(before, run, i + len(run), max(n_reads, 1))
            elif run and not before and (kind := self._kind(fusion, run)) is not None:
                tries.append([(run, len(run), kind)])
        return [[(tuple([k - i for k in run]), n, kind) for run, n, kind in one] for one in tries]

    def _run(self, ops, i):
        """The nodes of these ops from node i on; () if there are others."""
        end = i + len(ops)
        return range(i, end) if self.ops[i:end] == bytes(ops) else ()

    def _computed_again(self, before, first, at, left):
        """The ways in which readers of a result, each of which computes the nodes `first`, of the ops `before`, that
        make it, are runs from node `at` on: [[(run, how many are its own, kind)]].  left: reads of it that are left."""
        made, ways = self.singles.nodes[first[-1]], []
        for fusion in self.fusions[before[0]]:
            rest = self._run(fusion.ops[len(before):], at) if fusion.ops[:fusion.again] == before else ()
            if not rest or rest[-1] >= first[0] + FAR:
                continue
            kind = self._kind(fusion, (*first, *rest), first[-1])
            if kind is None:
                continue
            others = left - sum(s.id == made.id for k in rest for s in self.singles.nodes[k].src if s is not None)
            n_own = len(rest) + (len(first) if rest[0] == first[-1] + 1 else 0)
            one = (*first, *rest), n_own, kind
            ways += [[one]] if others == 0 else [[one, *way] for way in self._computed_again(
                before, first, rest[-1] + 1, others)] if others > 0 else []
        return ways

    def _kind(self, fusion, run, free=-1):
        """The kind of a run; None where it does not fit.  free: a node that need not be stored, though several nodes
        read it."""
        key = id(fusion), free >= 0, self._alike(run)
        if key not in self.known:
            nodes = tuple([self.singles.nodes[k] for k in run])
            inside = {s.id for t in nodes for s in t.src if s is not None}
            needed = [is_apart or t.id not in inside or n_reads > 1 and k != free for t, k, (is_apart, n_reads) in
                      zip(nodes, run, self.facts[list(run[:-1])][:, [APART, READS]].tolist(), strict=False)]
            kernels = [self.likes[int(self.singles.kinds[k])].kernel for k in run]
            found = _found(fusion, nodes, kernels, needed, self.n_threads)
            self.known[key] = None if found is None else self.n_kinds + len(self.known)
            self.likes |= {} if found is None else {self.known[key]: found}
        return self.known[key]

    def _alike(self, run):
        """Equal for runs of equal kinds that read each other alike and whose results are read alike."""
        if run[-1] - run[0] == len(run) - 1:
            return self.facts[run[0]:run[-1] + 1].tobytes()
        nodes = [self.singles.nodes[k] for k in run]
        first, tensors = {}, (*nodes, *[s for t in nodes for s in t.src])
        return (*[first.setdefault(id(x), k) for k, x in enumerate(tensors)],
                self.facts[list(run), :USES].tobytes())


class _Tries:
    """The tries of all windows, as numbers (engine/cpu/fusion_walk.py).

    nodes_of   [number of a run]: its nodes, counted from the first node of the window
    """

    def __init__(self, tries, likes):
        """tries: of each window what `_Fusing._tries` found."""
        runs = [run for window in tries for one in window for run in one]
        self.nodes_of = [nodes for nodes, _, _ in runs]
        apart = {kind: likes[kind].spots.apart for _, _, kind in runs}
        starts = dict(zip(apart, itertools.accumulate(map(len, apart.values()), initial=0), strict=False))
        ends, rows = list(itertools.accumulate(map(len, self.nodes_of), initial=0)), []
        for (nodes, n, kind), begin, end in zip(runs, ends, ends[1:], strict=False):
            rows.append((kind, n, nodes[-1] + 1, starts[kind], starts[kind] + len(apart[kind]), begin, end))
        self.runs, self.nodes = (np.array(x, np.int64) for x in (rows, list(itertools.chain(*self.nodes_of))))
        self.apart = np.concatenate([*apart.values(), np.zeros((0, APART_WORDS), np.int64)])
        ends = list(itertools.accumulate((len(one) for window in tries for one in window), initial=0))
        covered = [one[-1][0][-1] + 1 for window in tries for one in window]
        self.tries = np.array(list(zip(ends, ends[1:], covered, strict=False)), np.int64)
        self.begins = np.array(list(itertools.accumulate(map(len, tries), initial=0)), np.int64)

    def taken(self, starts, windows, n_nodes, places):
        """The runs that are taken, a row of TOOK_ words each."""
        out, uses, spans = np.empty((n_nodes, TOOK_WORDS), np.int64), np.zeros((0, 0), np.int64), ()
        if places is not None:
            uses, spans = places.tensors.uses, places.spans()
        where = np.array([address_of(a) for a in spans] or [0, 0], np.int64)
        n = take_runs(starts, windows, len(starts), self.begins, self.tries, self.runs, self.nodes, self.apart,
                      uses, uses.shape[1], where, out)
        return out[:n]


def _found(fusion, nodes, kernels, needed, n_threads):
    """The PlanNode of the run, or None.  needed: must the result be stored?"""
    stored = tuple(t for t, is_needed in zip(nodes, needed, strict=False) if is_needed)
    made = fusion.fused(nodes, stored, kernels, n_threads) if fusion.matches(nodes) else None
    if made is None:
        return None
    params = np.zeros(N_PARAM_WORDS, np.int64)
    params.view(np.int32)[:len(made.params)] = made.params
    spot = {id(s): (k, 1 + j) for k, t in enumerate(nodes) for j, s in enumerate(t.src)}
    spot |= {id(t): (k, 0) for k, t in enumerate(nodes)}
    reads = (*made.reads, *stored)
    apart = [(*spot[id(t)], *spot[id(s)], unless) for t, s, unless in _apart(nodes, stored, reads, made)]
    spots = Spots(tuple(k for k, is_needed in enumerate(needed) if not is_needed),
                  *(tuple([spot[id(x)] for x in some]) for some in (reads, made.by_row, made.ahead)),
                  np.array(apart, np.int64).reshape(-1, APART_WORDS))
    return PlanNode(nodes[-1], made.kernel, fusion.module, reads, nodes, params,
                    frozenset([nodes[k].id for k in spots.left_out]), made.by_row, made.ahead, spots)


def _apart(nodes, stored, reads, made):
    """[(result, other tensor, unless)] that may not overlap; unless: they may where they begin at the same byte."""
    written, found, free = [*stored, nodes[-1]], [], {x.id for x in (*nodes, *made.ahead)}
    for k, t in enumerate(written):
        found += [(t, other, False) for other in written[k + 1:]]
        found += [(t, s, t.nb == s.nb and t.ne == s.ne and any(s.id == x.id for x in made.by_row))
                  for s in reads if s.id not in free]
    return found
