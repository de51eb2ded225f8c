"""Graphs that make some results again, from schedules: in some orders of the nodes, with the planner's offsets."""
import functools
import itertools

import numpy as np

from ggjit.alloc.report import mib
from ggjit.api.remat_nodes import plan_of
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.pickling import dump, load
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP, T_FLAGS, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.tensors.context import Context

PLAN_NODES = 2000  # search nodes for offsets, about 10 ms; the search mostly reaches the budget at once


class Rematerialized(Graph):
    """A graph in which some results are computed again.

    peak: bytes of its arena; the planner "best" finds the same offsets for it everywhere.  extra: cost of what is made
    again, as a share of one run.  n_again: nodes that are made again.  n_chunks: parts that the largest nodes are
    computed in, 1 where none is cut.
    seconds: of one run, by the costs that were planned with.
    same_bits: results are those of the original bit for bit; False where sums over rows are formed by chunks.
    of(t): the tensor that stands for `t` of the original.
    """
    planner = "best"
    peak, extra, n_again, n_chunks, same_bits = 0, 0.0, 0, 1, True
    _times = 1.0                        # cost of one run of the cut graph, in runs of the original

    def of(self, t):
        """The tensor here that holds what `t` of the original graph holds.  Errors: ParamError for another tensor."""
        found = self._stand_ins.get(t.id)
        if found is None:
            raise ParamError(f"{describe(t)} is not a result of the graph that was rematerialized, or is computed for "
                             f"some rows at a time; name it among the outputs of the graph to keep it whole")
        return found

    @property
    def seconds(self):
        """Processor time of one run, by the kernels' estimates or the profile that the costs are from."""
        return (1 + self.extra) * self._numbers.total / self._times / 1e12

    @functools.cached_property
    def bound(self):
        """The least extra share that any schedule within the budget pays, in any order of the nodes."""
        return max((1 + self._numbers.bound(self._limit)) * self._times - 1, 0.0)

    def __reduce__(self):
        """Pickled it is a plain Graph, in this order."""
        return load, dump(self)

    def __repr__(self):
        cut = f", the largest in {self.n_chunks} chunks" * (self.n_chunks > 1)
        cut += ", sums rounded otherwise" * (not self.same_bits)
        return (f"<Graph {len(self.nodes)} nodes, {self.n_again} of them made again{cut}: {mib(self.peak)}, "
                f"{self.extra:.1%} more operations>")


class _Problem:
    """The units of a graph in one order, as a Recomputation."""

    def __init__(self, units, order):
        self.graph, self.buft = units.graph, units.buft
        self.units, self.numbers = [units.tensors[k] for k in order.tolist()], units.numbers.in_order(order)

    def graph_of(self, schedule, limit, n_nodes=PLAN_NODES):
        """The Rematerialized graph that runs the schedule."""
        new = _Copy(self.units).run(schedule.events, self.graph)
        new.extra, new.n_again = schedule.extra, len(schedule.events) - len(self.units)
        new._numbers, new._limit = self.numbers, limit
        new.search = {"capacity": limit, "node_limit": n_nodes}
        new.peak = plan_of(new, self.buft).peak
        return new


class Orders:
    """A graph in orders of few live bytes and as it is: lists of _Problems, each list made when it is asked for."""

    def __init__(self, units):
        self.units, self._found = units, []
        self._makers = iter((units.sorted, lambda: [units.memory_order()], lambda: [None]))

    @functools.cached_property
    def given(self):
        return _Problem(self.units, np.arange(len(self.units.tensors)))

    def __iter__(self):
        yield from self._found
        for make in self._makers:
            new = []
            for order in make():
                problem = self.given if order is None else _Problem(self.units, order)
                if not any(problem.units == p.units for p in itertools.chain(*self._found, new)):
                    new.append(problem)
            self._found.append(new)
            yield new


class _Copy:
    """Nodes for the events of a schedule: those of the graph as they are, and new ones where a source is another."""

    def __init__(self, units):
        self.units, self.ctx, self.nodes = units, Context(), []
        self.current, self.views, self.listed = {}, {}, set()

    def run(self, events, graph):
        # parameters come first, since they are not recomputed
        self.nodes += [t for t in graph.nodes if t.op == OP.NONE]
        for k in events.tolist():
            t = self.units[k]
            if t.op != OP.NONE:
                first = t.id not in self.current
                made = self._node(t, may_be_itself=first)
                self.current[t.id] = made
                self._list(made)
        stand_ins = {t.id: self.now(t) for t in graph.nodes if t.op not in VIEW_OPS}
        stand_ins |= {t.id: self.now(t) for t in graph.outputs}
        new = Rematerialized._in_order([stand_ins[t.id] for t in graph.outputs], self.nodes, graph.leafs)
        new._stand_ins = stand_ins
        return new

    def now(self, t):
        """The tensor that holds the values of t at this event."""
        if t.op == OP.NONE or t.op not in VIEW_OPS:
            return self.current.get(t.id, t)
        shown = self.now(t.src[0])
        if shown is t.src[0]:
            view = t
        else:
            key = t.id, shown.id
            if key not in self.views:
                self.views[key] = self._node(t, may_be_itself=False)
            view = self.views[key]
        self._list(view)
        return view

    def _node(self, t, may_be_itself):
        src = tuple(None if s is None else self.now(s) for s in t.src)
        if may_be_itself and all(a is b for a, b in zip(src, t.src, strict=True)):
            return t
        view = None if t.view_src is None else self.now(t.view_src)
        made = self.ctx._add(t.type, t.op, t.ne, t.nb, t.ndim, tuple(map(int, t.op_params)), src, view, t.view_offs,
                             t.name)
        TABLE.words[made.id, T_FLAGS] = TABLE.words[t.id, T_FLAGS]
        return made

    def _list(self, t):
        if t.id not in self.listed and t.op != OP.NONE:
            self.listed.add(t.id)
            self.nodes.append(t)
