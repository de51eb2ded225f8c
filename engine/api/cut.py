"""A graph in which one region is computed for some rows at a time, so that its nodes lie in memory in parts.

A node with its inputs is the least that any order of whole nodes needs: the logits of a large vocabulary and their
gradient, or the first layer of a large batch.  Where the rows of a node do not meet, it is as good a chunk at a time:

    h --> logits = W h --> loss                     for each chunk k of the rows:
              |  (labels)    |                          logits_k = W h_k     dlogits_k      dh_k = W^T dlogits_k
              +--> dlogits --+--> dh, dW                loss += loss_k        dW += dlogits_k h_k^T
                                                    dh = all dh_k side by side

RULES says for each op along which axis of its sources the rows of its result run.  A region grows from one node over
such edges, as far as nothing outside lies between two of its nodes.  What is read outside is put together again.
Where a region may be rounded otherwise, sums over rows become sums over chunks; else they lie outside, and every
kernel of a chunk is the one that computes all rows.
"""
import dataclasses
import math

import numpy as np

from ggjit.core.table import NO_PARAMS, TABLE
from ggjit.cpu.repacked import kernel_of
from ggjit.graphs.graph import Graph
from ggjit.ops.core.record import FLAG_OUTPUT, OP, VIEW_OPS
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.spec import builders
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context

SUM = -1                        # in place of an axis: the result is a sum over the rows


# ---------------------------------------------------------------- where rows run
def last_axis(t):
    """The last axis that is longer than 1."""
    return max((i for i in range(4) if t.ne[i] != 1), default=0)


def _along(least):
    """Rules of ops whose rows do not meet from axis `least` on; sources of one row are read whole."""
    def rule(t):
        a = last_axis(t)
        needs = [None if s is None or s.ne[a] == 1 else a for s in t.src]
        if a >= least and all(n is None or s.ne[a] == t.ne[a] for s, n in zip(t.src, needs, strict=True)):
            yield a, needs
    return rule


def _reshape(t):
    yield last_axis(t), [last_axis(t.src[0])]


def _view(t):
    """The same part of each row."""
    s, a = t.src[0], last_axis(t)
    if a >= 1 and a == last_axis(s) and (s.ne[a], s.nb[a]) == (t.ne[a], t.nb[a]) and is_contiguous(s) \
            and t.view_offs - s.view_offs < s.nb[a]:
        yield a, [a]


def _transpose(t):
    a = last_axis(t.src[0])
    yield {0: 1, 1: 0}.get(a, a), [a]


def _permute(t):
    a = last_axis(t.src[0])
    yield int(t.op_params[a]), [a]


def _mul_mat(t):
    (w, _), a = t.src[:2], last_axis(t)
    if a == 1 or a > 1 and w.ne[a] in (1, t.ne[a]):
        yield a, [None if a == 1 or w.ne[a] == 1 else a, a]


def _out_prod(t):
    (a, b), last = t.src[:2], last_axis(t)
    if last == 1:
        yield 1, [None, 0]
    elif last > 1 and b.ne[last] == t.ne[last] and a.ne[last] in (1, t.ne[last]):
        yield last, [None if a.ne[last] == 1 else last, last]
    if last_axis(a) == last_axis(b) == 1:
        yield SUM, [1, 1]


def _pictures(t):
    """A kernel, and pictures along axis 3."""
    if last_axis(t) == 3:
        yield 3, [None, 3]


def _conv_2d(t):
    """Pictures; or, where it is the gradient of a kernel, those are the channels that are summed."""
    yield from _pictures(t)
    if last_axis(t.src[0]) == 3 and t.src[0].ne[2] > 1:
        yield SUM, [2, 2]


def _im2col_back(t):
    if last_axis(t) == 3 and t.src[0].ne[3] == t.ne[3]:
        yield 3, [3, None]


def _get_rows(t):
    if last_axis(t) == 1:
        yield 1, [None, 0]


def _rope(t):
    a = last_axis(t)
    if a >= 2:
        yield a, [a, 0 if a == 2 else None, *(None for _ in t.src[2:])]


def _get_rows_back(t):
    if t.src[0].ne[1] == t.src[1].ne[0]:
        yield SUM, [1, 0]


def _soft_max(t):
    """A mask is that of all heads and texts, or has one for each."""
    a, mask = last_axis(t), t.src[1] if len(t.src) > 1 else None
    slopes = t.op_params[1] != 0                        # which differ from head to head, axis 2
    if a >= 1 and not (slopes and a == 2) and all(s is None for s in t.src[2:]):
        if mask is None:
            yield a, [a]
        elif a >= 2 and mask.ne[a] in (1, t.ne[a]):
            yield a, [a, None if mask.ne[a] == 1 else a]


def _concat(t):
    a = last_axis(t)
    if int(t.op_params[0]) != a:
        yield a, [a, a]


def _repeat_back(t):
    a = last_axis(t.src[0])
    yield (SUM, [a]) if t.ne[a] == 1 else (a, [a])


def _sum(t):
    yield SUM, [last_axis(t.src[0])]


def _cross_entropy(t):
    a = last_axis(t.src[0])
    if a >= 1:
        yield SUM, [a, a]


def _cross_entropy_back(t):
    a = last_axis(t)
    if a >= 1:
        yield a, [None, a, a]


RULES = {
    **dict.fromkeys((OP.ADD, OP.SUB, OP.MUL, OP.DIV, OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS, OP.UNARY, OP.SCALE,
                     OP.CLAMP, OP.LEAKY_RELU, OP.CONT, OP.DUP, OP.REPEAT), _along(0)),
    **dict.fromkeys((OP.NORM, OP.RMS_NORM, OP.RMS_NORM_BACK, OP.L2_NORM, OP.SOFT_MAX_BACK, OP.SILU_BACK, OP.GLU,
                     OP.SUM_ROWS, OP.MEAN), _along(1)),
    **dict.fromkeys((OP.POOL_2D, OP.POOL_2D_BACK, OP.UPSCALE), _along(2)), OP.GROUP_NORM: _along(3),
    **dict.fromkeys((OP.CONV_2D_DW, OP.IM2COL), _pictures), OP.CONV_2D: _conv_2d,
    OP.IM2COL_BACK: _im2col_back, **dict.fromkeys((OP.ROPE, OP.ROPE_BACK), _rope),
    OP.RESHAPE: _reshape, OP.VIEW: _view, OP.TRANSPOSE: _transpose, OP.PERMUTE: _permute, OP.MUL_MAT: _mul_mat,
    OP.OUT_PROD: _out_prod, OP.GET_ROWS: _get_rows, OP.GET_ROWS_BACK: _get_rows_back, OP.SOFT_MAX: _soft_max,
    OP.CONCAT: _concat, OP.REPEAT_BACK: _repeat_back, OP.SUM: _sum,
    OP.CROSS_ENTROPY_LOSS: _cross_entropy, OP.CROSS_ENTROPY_LOSS_BACK: _cross_entropy_back}


# ---------------------------------------------------------------- the region
class _Region:
    """`.axis`: {id of a node: the axis of its rows}, `.sums`: ids of sums over them, `.needs`: {id: axes of sources}.

    `.level`: {id of a node: 1 where it needs the whole region, else 0}.
    """

    def __init__(self, graph, start, hazards, rounded):
        self.graph, self.n, self.hazards, self.rounded = graph, start.ne[last_axis(start)], hazards, rounded
        self.node = {t.id: t for t in graph.nodes}
        self.readers = {}
        for t in graph.nodes:
            for s in t.src:
                if s is not None:
                    self.readers.setdefault(s.id, []).append(t)
        self.axis, self.sums, self.needs, self.level = {}, set(), {}, {}
        self._grow(start)
        while self.axis and self._shrink(start):
            pass

    def _fits(self, t, axis):
        """Whether the rows of t can run along an axis: it has as many, or a multiple."""
        return axis is not None and t.ne[axis] % self.n == 0

    def _rule(self, t, result=None, source=None):
        """(axis of the result, those of the sources): with this result, or with source = (number, axis)."""
        if t.op not in RULES or t.view_src is not None and t.op not in VIEW_OPS or t.id in self.hazards:
            return None
        for axis, needs in RULES[t.op](t):
            ok = result is None or axis == result
            ok = ok and (source is None or any(s is not None and s.id == source[0] and n == source[1]
                                               for s, n in zip(t.src, needs, strict=False)))
            if ok and (self.rounded if axis == SUM else self._fits(t, axis)) and all(
                    n is None or self._fits(s, n) for s, n in zip(t.src, needs, strict=False)):
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
            if axis == SUM:
                self.sums.add(t.id)
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
        """Take out what cannot stay; whether there was anything."""
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
        near -= self.sums                               # which tie together what they sum
        for i in list(self.needs):
            if i not in near and not (i in self.sums and self._sum_stays(i, near, self.level[start.id])):
                self._drop(i)
        return len(self.needs) < before

    def _sum_stays(self, i, near, level):
        sources = [(s, n) for s, n in zip(self.node[i].src, self.needs[i], strict=False) if s is not None]
        return any(n is not None and s.id in near for s, n in sources) and all(
            s.id in near or self.level.get(s.id, 0) <= level for s, _ in sources)

    def _drop(self, i):
        self.axis.pop(i, None)
        self.sums.discard(i)
        del self.needs[i]

    def _find_levels(self):
        """How often the way to a node has left the region."""
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


def cut(graph, start, n_chunks, rank, hazards, rounded):
    """The Cut of a graph around node `start` into about n_chunks chunks; None where its rows meet at once.

    rank: {id: moment} of the nodes now.  hazards: {id of a node that reads or writes what is written in place: ids of
    nodes that have to come before it}; they stay as they are.  rounded: whether results may be rounded otherwise.
    """
    n = start.ne[last_axis(start)]
    size = -(-n // n_chunks)
    if size >= n:
        return None
    region = _Region(graph, start, hazards, rounded)
    found = _Builder(graph, region, n, size, rank).build() if region.axis else None
    return found if rounded or found and found.same_bits else None


class _Builder:
    def __init__(self, graph, region, n, size, rank):
        self.graph, self.region, self.n, self.size, self.old_rank = graph, region, n, size, rank
        self.ctx, self.op, self.nodes, self.leafs = Context(), builders(), [], list(graph.leafs)
        self.whole, self.parts, self.came_from, self.rank = {}, {}, {}, {}
        self.same_bits = not region.sums

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
            for k, first in enumerate(range(0, self.n, self.size)):
                self._chunk(cut_nodes, first, min(self.size, self.n - first), last + 1 + k)
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
        return Cut(graph, stand_ins, self.came_from, self.rank, k + 1, self.same_bits)

    def _put(self, t, moment):
        if t.id not in self.rank:
            self.rank[t.id] = moment
            self.nodes.append(t)
        return t

    # ------------------------------------------------------------ outside
    def _now(self, t):
        """What stands for a tensor outside: itself, a copy, or the parts of a region's node put together."""
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
            if t.op == OP.CROSS_ENTROPY_LOSS_BACK:      # it divides by the rows of its chunk
                src = (self._put(self.op["scale"](src[0], share), moment), *src[1:])
            if t.id in self.region.sums:
                part = self._put(self._add(t, t.ne, src), moment)
                scaled = self._put(self.op["scale"](part, share), moment) if t.op == OP.CROSS_ENTROPY_LOSS else part
                total = self.whole.get(t.id)
                self.whole[t.id] = scaled if total is None else self._put(self.op["add"](total, scaled), moment)
            else:
                a = self.region.axis[t.id]
                ne = (*t.ne[:a], t.ne[a] // self.n * size, *t.ne[a + 1:])
                made[t.id] = self._view_op(t, src[0], ne) if t.op in VIEW_OPS else self._add(t, ne, src)
                self._put(made[t.id], moment)
                self.parts.setdefault(t.id, []).append(made[t.id])
                self.same_bits = self.same_bits and _same_kernel(t, made[t.id])
                part = made[t.id]
            self.came_from[part.id] = t.id, share

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
    """Whether rows come out bit for bit alike: the kernel is the one that computes all rows."""
    if t.op in VIEW_OPS:
        return True
    if t.op == OP.CROSS_ENTROPY_LOSS_BACK:              # it divides by the rows, of its chunk
        return False
    kernels = [kernel_of(x, 1) for x in (t, part)]
    return all(k is not None for k in kernels) and kernels[0].name == kernels[1].name

