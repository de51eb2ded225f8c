"""A graph as arrays of numbers, the input for planning recomputation: no loop over nodes runs in Python.

A *unit* is a node with memory of its own, or a leaf that the graph's allocator places; views belong to what they view,
and a node that writes in place is a unit without bytes that keeps what it writes alive.  May be made again: units that
depend on nothing that is written meanwhile, so every value has the same bits; and none behind a scalar: gradients,
which depend on the loss, are read soon after they are made.
"""
import dataclasses
import functools

import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.orders.memory_order import VIEW_OP
from ggjit.alloc.orders.recompute import Recomputation
from ggjit.alloc.orders.schedules import AGAIN, KEEP, TAKE, leads, reaches
from ggjit.alloc.reorder import reorder
from ggjit.core.row_sizes import nbytes_of
from ggjit.core.slots import alloc_sizes, checked_int
from ggjit.core.table import TABLE
from ggjit.cpu.repacked import is_repacked, kernel_of
from ggjit.graphs.requests import options_for, plan_request
from ggjit.ops.core.record import (
    FLAG_OUTPUT,
    MAX_SRC,
    OP,
    T_BUFFER,
    T_FLAGS,
    T_GEN,
    T_NE,
    T_OP,
    T_SRC,
    T_TYPE,
    T_VIEW_SRC,
)
from ggjit.ops.core.spec import in_place_table, ops_with


def plan_of(graph, buft):
    """The plan of the planner "best" for a graph in one buffer type, as a GraphAllocator makes it."""
    return plan_graph(plan_request(graph, [buft]), dataclasses.replace(options_for(graph, "best"), **graph.search))


# ---------------------------------------------------------------- costs
def costs_of(units, words, seconds):
    """Thousandths of a nanosecond: measured (`seconds` by tensor id), else the kernels' estimates.

    Nodes of the same op, shapes and parameters have the same kernel, which is looked up once.
    """
    src = words[:, T_SRC:T_SRC + MAX_SRC]
    about = [T_TYPE, *range(T_NE, T_NE + 8)]
    sources = np.where((src >= 0)[:, :, None], TABLE.words[np.maximum(src, 0)][:, :, about], -1)
    own = np.delete(words[:, :T_SRC], [T_FLAGS, T_GEN], axis=1)
    rows = np.ascontiguousarray(np.concatenate([own, sources.reshape(len(own), MAX_SRC * len(about))], 1))
    found, known = np.zeros(len(units), np.int64), {}
    for k, t in enumerate(units):
        if t.op == OP.NONE:
            continue
        if t.id in seconds:
            found[k] = int(1e12 * seconds[t.id])
            continue
        key = rows[k].tobytes(), any(map(is_repacked, t.src))
        if key not in known:
            kernel = kernel_of(t, 1)
            known[key] = 0 if kernel is None else int(1e3 * kernel.cost)
        found[k] = known[key]
    return found


# ---------------------------------------------------------------- units
class RematNodes:
    """`.tensors`: the units of a graph in its order.  `.numbers`: the Recomputation of that order.

    rank: {tensor id: a number}, units of lower ones first in a sorted order; default: what leads to
    a scalar, a loss that is, then the gradients and what they alone read.
    """

    def __init__(self, graph, buft, seconds, rank=None):
        self.graph, self.buft, self.seconds = graph, buft, seconds
        tensors, ids = [*graph.leafs, *graph.nodes], np.concatenate([graph.leaf_ids, graph.node_ids])
        words, m = TABLE.words[ids], len(ids)
        op, has_memory = words[:, T_OP], words[:, T_BUFFER] >= 0
        number = _Numbers(ids, words[:, T_VIEW_SRC])
        root, base = _roots(words, number), number.of(words[:, T_VIEW_SRC])
        base = np.concatenate([np.where(base < 0, np.arange(m), base), np.arange(m, number.n)])
        views = words[:, T_VIEW_SRC] >= 0
        is_unit = np.where(np.arange(m) < len(graph.leafs), ~views & ~has_memory, VIEW_OP[op] == 0)
        at = np.flatnonzero(is_unit)
        self.tensors, n = [tensors[i] for i in at], len(at)
        unit = np.full(number.n + 1, -1, np.int64)                              # index n stands for no tensor
        unit[at] = np.arange(n)
        own = words[at]
        self.storages = _storages(own, number, root, base)
        self.written = np.zeros(number.n + 1, np.bool_)
        self.written[base[at[views[at]]]] = True
        ptr, idx = _reads(unit[self.storages])
        keep = np.zeros(n + 1, np.bool_)                # outputs and the bases they lie in; index n stands for no unit
        shown = root[np.flatnonzero(np.isin(ids, graph.output_ids) | (words[:, T_FLAGS] & FLAG_OUTPUT > 0))]
        keep[unit[np.concatenate([shown, base[shown]])]] = True
        keep = keep[:n]
        # 1 for nodes that depend on a scalar: gradients, if the scalar is a loss
        self.behind = np.zeros(n, np.int64)
        scalar = (own[:, T_NE:T_NE + 4].prod(1) == 1).astype(np.int64)
        reaches(n, ptr, idx, scalar, self.behind)
        forward, first = np.zeros(n, np.int64), scalar * (self.behind == 0)
        leads(n, ptr, idx, first, forward)
        fixed = OP.NONE, *ops_with("calls_python")      # functions of the user's may have effects of their own
        again = ~(self.behind.astype(bool) | keep | np.isin(op[at], fixed) | views[at] | has_memory[at]
                  | self.written[at] | self.written[self.storages].any(1))
        takes = in_place_table()[op[at]] & ~views[at]
        self.after = self._hazards(at, base, views)
        size = np.zeros(n, np.int64)
        mine = np.flatnonzero(~views[at] & ~has_memory[at])
        alignment = checked_int(buft, "alignment")
        needed = alloc_sizes([buft], None, [self.tensors[k] for k in mine], nbytes_of(ids[at[mine]]))
        size[mine] = -(-needed // alignment) * alignment
        self.numbers = Recomputation(size, costs_of(self.tensors, own, seconds), (ptr, idx),
                                     AGAIN * again | KEEP * keep | TAKE * takes)
        self._ids = ids[at].tolist()
        self.ranks = rank or dict(zip(self._ids, (1 - (forward | first)).tolist(), strict=True))
        self._rank = np.where(op[at] == OP.NONE, -1, np.array([self.ranks.get(i, 0) for i in self._ids], np.int64))

    def _hazards(self, at, base, views):
        """Pairs of units (i, j), i before j, of those that write memory in place and those that read it."""
        touched = np.concatenate([self.storages, base[at][:, None]], 1)
        after, writer, readers = [], {}, {}
        self._touching = np.flatnonzero(self.written[touched].any(1)).tolist()
        for k in self._touching:
            own = int(base[at[k]]) if views[at[k]] else None
            for i in {int(s) for s in touched[k] if self.written[s]}:
                if i in writer:
                    after.append((writer[i], k))
                if i == own:
                    after += [(r, k) for r in readers.pop(i, ())]
                    writer[i] = k
                else:
                    readers.setdefault(i, []).append(k)
        return after

    @property
    def hazards(self):
        """{id of a unit that reads or writes what is written in place: ids of units that have to come before it}."""
        found = {self._ids[k]: [] for k in self._touching}
        for i, j in self.after:
            found[self._ids[j]].append(self._ids[i])
        return found

    def sorted(self):
        """Orders of few live bytes, lower ranks first: as ranked; with all that does not depend on a scalar first; and
        both with `apart` at the end."""
        late = np.where(self._rank == 1, self.behind, self._rank)
        ranks = [self._rank, late]
        if self.apart.any():
            ranks += [np.where(self.apart, rank.max() + 1, rank) for rank in (self._rank, late)]
        return [self.numbers.order(rank, self.after) for rank in ranks]

    @functools.cached_property
    def apart(self):
        """RematNodes that lead to nothing but an output, where that is larger than what they read of others.

        The gradient of a weight is larger than the activations of a deep, narrow layer: those wait in its place.
        """
        p, found = self.numbers, np.zeros(len(self.tensors), np.bool_)
        for k in np.flatnonzero((p.flags & KEEP > 0) & (p.size > 0) & (self.behind > 0)).tolist():
            own, todo, beside = {k}, [k], {}
            while todo:
                v = todo.pop()
                for x in p.idx[p.ptr[v]:p.ptr[v + 1]].tolist():
                    inside = not p.flags[x] & KEEP and all(r in own for r in p.cidx[p.cptr[x]:p.cptr[x + 1]].tolist())
                    if inside and self.tensors[x].op != OP.NONE:
                        own.add(x)
                        todo.append(x)
                        beside.pop(x, None)
                    elif x not in own:
                        beside[x] = int(p.size[x])
            if sum(beside.values()) < p.size[k]:
                found[list(own)] = True
        return found

    def memory_order(self):
        """Positions of the units in the order of Graph(order="memory")."""
        ids = reorder(plan_request(self.graph, [self.buft]), in_place=in_place_table())
        place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        return np.argsort([place.get(i, -1) for i in self._ids], kind="stable")


class _Numbers:
    """Local numbers of table ids: those of `ids` as they come, then the other ones of `more`; -1 for none."""

    def __init__(self, ids, more):
        others = np.setdiff1d(more[more >= 0], ids)
        every = np.concatenate([ids, others])
        self.n, self._order = len(every), np.argsort(every)
        self._sorted = every[self._order]

    def of(self, ids):
        return np.where(ids >= 0, self._order[np.searchsorted(self._sorted, np.maximum(ids, self._sorted[0]))], -1) \
            if self.n else np.full(ids.shape, -1, np.int64)


def _roots(words, number):
    """For each local number the node or leaf whose values it shows: the end of its chain of views."""
    src = number.of(words[:, T_SRC])
    up = np.arange(number.n)
    up[:len(words)] = np.where((VIEW_OP[words[:, T_OP]] > 0) & (src >= 0), src, up[:len(words)])
    while (up[up] != up).any():
        up = up[up]
    return up


def _storages(own, number, root, base):
    """What each unit reads: local numbers of the nodes, leaves, and memory they are in; n x 22, number.n for none."""
    read = number.of(np.concatenate([own[:, T_SRC:T_SRC + MAX_SRC], own[:, T_VIEW_SRC:T_VIEW_SRC + 1]], 1))
    shown = np.where(read >= 0, root[read], -1)
    both = np.concatenate([shown, np.where(shown >= 0, base[shown], -1)], 1)
    return np.where(both >= 0, both, number.n)


def _reads(units):
    """(ptr, idx) of the units in each row, each once, without the row's own number."""
    rows = np.sort(np.where(units == np.arange(len(units))[:, None], -1, units), 1)
    new = rows >= 0
    new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    ptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(new.sum(1), out=ptr[1:])
    return ptr, rows[new]
