"""Rewrites a graph so that one region is computed for some rows at a time and needs less memory.

A node with its inputs is the least that any order of whole nodes needs: the logits of a large vocabulary and their
gradient, or the first layer of a large batch.  Where the rows of a node do not meet, it is as good a chunk at a time:

    h --> logits = W h --> loss                     for each chunk k of the rows:
              |  (labels)    |                          logits_k = W h_k     dlogits_k      dh_k = W^T dlogits_k
              +--> dlogits --+--> dh, dW                loss += loss_k        dW += dlogits_k h_k^T
                                                    dh = all dh_k side by side

The `rows` rule of an op (ops/core/spec.py) says along which axis of its sources the rows of its result run.  A region
grows from one node over such edges, as far as nothing outside lies between two of its nodes.  What is read outside is
put together again.  Every kernel of a chunk sums as the one that computes all rows.  Sums that add row after row go on
from the chunk before, to the same bits; other sums over rows lie outside, or, where a region may be rounded otherwise,
are formed by chunks and added.
"""
import dataclasses
import itertools
import math

import numpy as np

from ggjit.core.table import NO_PARAMS, TABLE
from ggjit.cpu.repacked import kernel_of
from ggjit.graphs.graph import Graph
from ggjit.ops.core.record import FLAG_OUTPUT, OP, VIEW_OPS
from ggjit.ops.core.row_axes import SUM, SUM_IN_ORDER, last_axis
from ggjit.ops.core.spec import all_specs, builders
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context

VECTOR = 16                     # rows that a vector of a processor holds at most


# ---------------------------------------------------------------- the region
class Edges:
    """`.node`: {id: node of a graph}, `.readers`: {id: nodes that read it}."""

    def __init__(self, graph):
        self.graph, self.node, self.readers = graph, {t.id: t for t in graph.nodes}, {}
        for t in graph.nodes:
            for s in t.src:
                if s is not None:
                    self.readers.setdefault(s.id, []).append(t)


def region_of(edges, start, hazards, rounded, short=False, around=None):
    """The region of rows around node `start`; None where its rows meet at once, or it holds none of the ids `around`.

    edges: Edges of the graph.  hazards: {id of a node that reads or writes what is written in place: ids of nodes that
    have to come before it}; they stay as they are.  rounded: whether results may be rounded otherwise.
    """
    if start.ne[last_axis(start)] < 2:
        return None
    region = _Region(edges, start, hazards, rounded, short, around)
    return region if region.axis and (around is None or not around.isdisjoint(region.needs)) else None


class _Region:
    """`.axis`: {id of a node: the axis of its rows}, `.sums`: {id of a sum over them: SUM or SUM_IN_ORDER},
    `.needs`: {id: axes of sources}.

    `.level`: {id of a node: 1 where it needs the whole region, else 0}.
    """

    def __init__(self, edges, start, hazards, rounded, short=False, around=None):
        """short: end where the fewest bytes have to be put together again, not as late as possible.  around: ids of
        nodes; a region that holds none of them is left empty."""
        self.graph, self.n, self.hazards, self.rounded = edges.graph, start.ne[last_axis(start)], hazards, rounded
        self.node, self.readers = edges.node, edges.readers
        self.axis, self.sums, self.needs, self.level = {}, {}, {}, {}
        self._grow(start)
        if around is not None and around.isdisjoint(self.needs):        # it only shrinks from here on
            self.axis = {}
        while self.axis and self._shrink(start):
            pass
        if short and self.axis and not self.sums:
            self._end_early(start)
            while self.axis and self._shrink(start):
                pass

    def _fits(self, t, axis):
        """Whether the rows of t can run along an axis: it has as many, or a multiple."""
        return axis is not None and t.ne[axis] % self.n == 0

    def _rule(self, t, result=None, source=None):
        """(axis of the result, those of the sources): with this result, or with source = (number, axis)."""
        rows = None if t.op == OP.NONE else all_specs()[t.op].rows
        if rows is None or t.view_src is not None and t.op not in VIEW_OPS or t.id in self.hazards:
            return None
        for axis, needs in rows(t):
            ok = result is None or axis == result
            ok = ok and (source is None or any(s is not None and s.id == source[0] and n == source[1]
                                               for s, n in zip(t.src, needs, strict=False)))
            ok = ok and (self._fits(t, axis) if axis >= 0 else self.rounded or axis == SUM_IN_ORDER)
            if ok and all(n is None or self._fits(s, n) for s, n in zip(t.src, needs, strict=False)):
                return axis, needs
        return None

    def _grow(self, start):
        todo = [(start, last_axis(start), None)]
        while todo:
            t, axis, source = todo.pop()
            if t.id in self.needs:
                continue
            found = self._rule(t, axis, source)
            if found is None:
                continue
            axis, self.needs[t.id] = found
            if axis < 0:
                self.sums[t.id] = axis
            else:
                self.axis[t.id] = axis
                todo += [(reader, None, (t.id, axis)) for reader in self.readers.get(t.id, ())]
            todo += [(s, n, None) for s, n in zip(t.src, self.needs[t.id], strict=False)
                     if n is not None and s.id in self.node]

    def _source_ok(self, s, need):
        if s.id in self.axis:
            return self.axis[s.id] == need
        return need is None or s.type.block == 1 and s.nb[0] == s.type.nbytes      # a view of some rows of it

    def _shrink(self, start):
        """Remove nodes that cannot stay in the region.  Returns whether any was removed."""
        before = len(self.needs)
        for t in [self.node[i] for i in self.needs]:
            if not all(s is None or self._source_ok(s, n) for s, n in zip(t.src, self.needs[t.id], strict=False)):
                self._drop(t.id)
        if start.id not in self.axis:
            self.axis = {}
            return False
        self._find_levels()
        same = {i for i in self.axis if self.level[i] == self.level[start.id]}
        near, todo = set(), [start.id]
        while todo:
            i = todo.pop()
            if (i in same or i in self.sums) and i not in near:
                near.add(i)
                todo += [t.id for t in self.readers.get(i, ()) if i not in self.sums]
                todo += [s.id for s, n in zip(self.node[i].src, self.needs[i], strict=False) if n is not None]
        # sums are left out, since they would join everything they add up
        near -= set(self.sums)
        for i in list(self.needs):
            if i not in near and not (i in self.sums and self._sum_stays(i, near, self.level[start.id])):
                self._drop(i)
        return len(self.needs) < before

    def _end_early(self, start):
        """Leave out what follows the node behind which the fewest bytes have to be put together again."""
        inside = [t for t in self.graph.nodes if t.id in self.axis]
        behind = {t.id: set() for t in inside}
        for t in reversed(inside):
            for r in self.readers.get(t.id, ()):
                if r.id in behind:
                    behind[t.id] |= {r.id} | behind[r.id]
        ends = [(self._joined_nbytes(behind[t.id]), -k, t.id) for k, t in enumerate(inside)
                if start.id not in behind[t.id]]
        for i in behind[min(ends)[2]]:
            self._drop(i)

    def _joined_nbytes(self, without):
        """Bytes that are read behind the region, if it lacks these nodes."""
        outputs, joined = set(self.graph.output_ids.tolist()), {}
        for i in self.axis.keys() - without:
            t = self.node[i]
            if i in outputs or any(r.id not in self.axis or r.id in without for r in self.readers.get(i, ())):
                while t.op in VIEW_OPS and t.src[0].id in self.axis:
                    t = t.src[0]
                joined[t.id] = t.nbytes
        return sum(joined.values())

    def _sum_stays(self, i, near, level):
        sources = [(s, n) for s, n in zip(self.node[i].src, self.needs[i], strict=False) if s is not None]
        return any(n is not None and s.id in near for s, n in sources) and all(
            s.id in near or self.level.get(s.id, 0) <= level for s, _ in sources)

    def _drop(self, i):
        self.axis.pop(i, None)
        self.sums.pop(i, None)
        del self.needs[i]

    def _find_levels(self):
        """Set `level`: how often the path to a node has left the region."""
        self.level = {}
        for t in self.graph.nodes:
            if is_constant(t):
                self.level[t.id] = 0
                continue
            sources = [s.id for s in (*t.src, t.view_src) if s is not None] + self.hazards.get(t.id, [])
            self.level[t.id] = max((self.level.get(i, 0) + (i in self.axis and t.id not in self.axis)
                                    for i in sources), default=0)


def is_constant(t):
    """A scalar that reads only the shape of its source: the gradient of a loss."""
    return t.op == OP.FILL and math.prod(t.ne) == 1


# ---------------------------------------------------------------- the graph
@dataclasses.dataclass(frozen=True)
class Cut:
    """graph: the new one.  stand_ins: {id: tensor that holds its values}.  came_from: {new id: (id, share of it)}.

    rank: {id: moment}, chunks one after the other.  n_chunks.  same_bits: no sum over rows is formed in another order.
    """
    graph: Graph
    stand_ins: dict
    came_from: dict
    rank: dict
    n_chunks: int
    same_bits: bool

    def then(self, more):
        """This Cut and one of its graph as one."""
        came_from = {i: at for i, at in self.came_from.items() if i in more.rank}
        for i, (j, share) in more.came_from.items():
            first, part = self.came_from.get(j, (j, 1.0))
            came_from[i] = first, share * part
        stand_ins = {i: more.stand_ins[t.id] for i, t in self.stand_ins.items() if t.id in more.stand_ins}
        return Cut(more.graph, stand_ins, came_from, more.rank, max(self.n_chunks, more.n_chunks),
                   self.same_bits and more.same_bits)


def cut(graph, start, n_chunks, rank, hazards, rounded, short=False):
    """The Cut of a graph around node `start` into about n_chunks chunks; None where its rows meet at once.

    rank: {id: moment} of the nodes now.  hazards, rounded, short: as of region_of.
    """
    return cut_region(region_of(Edges(graph), start, hazards, rounded, short), n_chunks, rank)


def cut_region(region, n_chunks, rank):
    """The Cut of a region into about n_chunks chunks; None: there is no region, or it cannot be cut so."""
    bounds = [] if region is None else _bounds(region.n, n_chunks)
    if len(bounds) <= 2:
        return None
    found = _Builder(region.graph, region, bounds, rank).build()
    return found if region.rounded or found.same_bits else None


def cut_alike(graph, start, n_chunks, rank, hazards, rounded):
    """As `cut`, around `start` and all nodes like it, as in a network of many layers, in regions that end early."""
    found = None
    for t in alike(graph, start):
        now = t if found is None else found.stand_ins.get(t.id)
        if now is not None and _is_alike(now, start):
            before, ranks = (graph, rank) if found is None else (found.graph, found.rank)
            more = cut(before, now, n_chunks, ranks, hazards, rounded, short=True)
            if more is not None:
                new = {i: t.id for i, t in more.stand_ins.items()}
                hazards = {new[i]: [new.get(j, j) for j in others] for i, others in hazards.items() if i in new}
                found = more if found is None else found.then(more)
    return found


def alike(graph, start):
    """The nodes of a graph that are as `start` is."""
    return [t for t in graph.nodes if _is_alike(t, start)]


def _is_alike(t, other):
    return (t.op, t.type, t.ne) == (other.op, other.type, other.ne) and [s is not None and s.ne for s in t.src] == [
        s is not None and s.ne for s in other.src]


def _bounds(n, n_chunks):
    """Where about n_chunks chunks of n rows begin and end: parts of vectors are left to the last one, which is larger.

    Products of few columns or of parts of vectors sum in orders of their own.
    """
    size = max(-(-n // n_chunks), 1)
    size += -size % VECTOR if size > VECTOR else 0
    starts = list(range(0, n, size))
    if len(starts) > 1 and size > VECTOR > n - starts[-1]:
        starts.pop()
    return [*starts, n]


class _Builder:
    def __init__(self, graph, region, bounds, rank):
        self.graph, self.region, self.n, self.bounds, self.old_rank = graph, region, bounds[-1], bounds, rank
        self.ctx, self.op, self.nodes, self.leafs = Context(), builders(), [], list(graph.leafs)
        self.whole, self.parts, self.came_from, self.rank = {}, {}, {}, {}
        self.same_bits = SUM not in region.sums.values()

    def build(self):
        region, level, last = self.region, self.region.level, max(self.old_rank.values(), default=0)
        inside = set(region.needs)
        here = next(level[i] for i in region.axis)
        before = [t for t in self.graph.nodes if t.id not in inside and level[t.id] <= here]
        after = [t for t in self.graph.nodes if t.id not in inside and level[t.id] > here]
        cut_nodes = [t for t in self.graph.nodes if t.id in inside]
        with self.ctx:
            for t in before:
                self._put(self._copied(t), self.old_rank.get(t.id, 0))
            for k, (first, end) in enumerate(itertools.pairwise(self.bounds)):
                self._chunk(cut_nodes, first, end - first, last + 1 + k)
            self._moment = last + 2 + k
            for t in after:
                self._put(self._copied(t), self._moment + self.old_rank.get(t.id, 0))
            outputs = [self._now(t) for t in self.graph.outputs]
            for t in cut_nodes:
                if t.flags & FLAG_OUTPUT:
                    self._now(t)
        stand_ins = {t.id: self._now(t) for t in (*self.graph.nodes, *self.graph.leafs)
                     if t.id not in inside or t.id in self.whole}
        graph = Graph._in_order(outputs, self.nodes, self.leafs)
        moments = {moment: i for i, moment in enumerate(sorted(set(self.rank.values())))}  # else each cut doubles them
        rank = {i: moments[moment] for i, moment in self.rank.items()}
        return Cut(graph, stand_ins, self.came_from, rank, k + 1, self.same_bits)

    def _put(self, t, moment):
        if t.id not in self.rank:
            self.rank[t.id] = moment
            self.nodes.append(t)
        return t

    # ------------------------------------------------------------ outside
    def _now(self, t):
        """The tensor that nodes outside the regions read for t: t itself, its copy, or the parts of it put together."""
        if t.id in self.parts and t.id not in self.whole:
            self.whole[t.id] = self._joined(t)
        return self.whole.get(t.id, t)

    def _joined(self, t):
        if t.op in VIEW_OPS:
            return self._put(self._view_op(t, self._now(t.src[0]), t.ne), self._moment)
        parts = self.parts[t.id]
        while len(parts) > 1:                           # pairs of pairs: each row is copied log2(chunks) times
            parts = [self._put(self.op["concat"](*parts[i:i + 2], self.region.axis[t.id]), self._moment)
                     if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]

    def _copied(self, t):
        """A node outside with its sources as they are now; itself where they are the same."""
        if is_constant(t) and self.region.level.get(t.src[0].id, 0) > self.region.level[next(iter(self.region.axis))]:
            self.leafs.append(from_numpy(self.ctx, np.zeros((1,) * max(t.ndim, 1), np.float32)))
            self.whole[t.id] = self._add(t, t.ne, self.leafs[-1:])
            return self.whole[t.id]
        src = tuple(None if s is None else self._now(s) for s in t.src)
        base = None if t.view_src is None else self._now(t.view_src)
        if base is t.view_src and all(a is b for a, b in zip(src, t.src, strict=True)):
            return t
        if t.op in VIEW_OPS:
            base = src[0].base
        made = self.ctx._add(t.type, t.op, t.ne, t.nb, t.ndim, tuple(map(int, t.op_params)), src, base, t.view_offs,
                             t.name)
        TABLE.flag(made.id, t.flags)
        self.whole[t.id] = made
        self.came_from[made.id] = t.id, 1.0
        return made

    # ------------------------------------------------------------ a chunk
    def _chunk(self, nodes, first, size, moment):
        made = {}
        for t in nodes:
            needs = self.region.needs[t.id]
            src = tuple(None if s is None else made[s.id] if s.id in made else
                        self._now(s) if need is None else self._rows(self._now(s), need, first, size, moment)
                        for s, need in zip(t.src, [*needs, *(None,) * len(t.src)], strict=False))
            share = size / self.n
            if t.id in self.region.sums:
                part = self.whole[t.id] = self._sum(t, src, first, size, moment)
            else:
                part = made[t.id] = self._put(self._part(t, src, size), moment)
                self.parts.setdefault(t.id, []).append(part)
                self.same_bits = self.same_bits and _same_kernel(t, part)
            self.came_from[part.id] = t.id, share

    def _sum(self, t, src, first, size, moment):
        """The sum t of all rows up to those of this chunk."""
        chunk, so_far = all_specs()[t.op].chunk, self.whole.get(t.id)
        if chunk is not None:           # the spec's own node, which continues from the sum so far
            return self._put(chunk(t, t.ne, src, so_far, first + size == self.n), moment)
        part = self._put(self._add(t, t.ne, src), moment)
        return part if so_far is None else self._put(self.op["add"](so_far, part), moment)

    def _part(self, t, src, size):
        """Some rows of t."""
        a, chunk = self.region.axis[t.id], all_specs()[t.op].chunk
        ne = (*t.ne[:a], t.ne[a] // self.n * size, *t.ne[a + 1:])
        if t.op in VIEW_OPS:
            return self._view_op(t, src[0], ne)
        return self._add(t, ne, src) if chunk is None else chunk(t, ne, src, None, False)

    def _rows(self, t, axis, first, size, moment):
        """A view of some rows of a tensor outside."""
        k = t.ne[axis] // self.n
        ne = (*t.ne[:axis], k * size, *t.ne[axis + 1:])
        return self._put(self.op["view_4d"](t, *ne, *t.nb[1:], k * first * t.nb[axis]), moment)

    def _view_op(self, t, src, ne):
        if t.op == OP.RESHAPE:
            return self.op["reshape_4d"](src, *ne)
        if t.op == OP.VIEW:
            return self.op["view_4d"](src, *ne, *t.nb[1:], t.view_offs - t.src[0].view_offs)
        if t.op == OP.TRANSPOSE:
            return self.op["transpose"](src)
        return self.op["permute"](src, *map(int, t.op_params[:4]))

    def _add(self, t, ne, src):
        nb = [t.type.nbytes]
        for n in ne[:3]:
            nb.append(nb[-1] * n)
        params = tuple(map(int, t.op_params)) if t.op != OP.NONE else NO_PARAMS
        return self.ctx._add(t.type, t.op, tuple(ne), tuple(nb), t.ndim, params, src, None, 0, t.name)


def _same_kernel(t, part):
    """Whether the part's kernel gives rows the same bits as the kernel of all rows."""
    if t.op in VIEW_OPS:
        return True
    kernels = [kernel_of(x, 1) for x in (t, part)]
    return all(k is not None for k in kernels) and len({k.bits_class or k.name for k in kernels}) == 1

