"""Less memory for more operations: the same graph, with some results computed again before a later reader.

    graph --units.py--> numbers --alloc/recompute.py--> schedule --> nodes, some of them twice --planner--> offsets
"""
import collections
import functools

import numpy as np

from ggjit.alloc.report import mib
from ggjit.api.registry import init_backend
from ggjit.api.units import Units, plan_of
from ggjit.core.arguments import expect
from ggjit.core.backend import Backend
from ggjit.core.buffer import BufferType
from ggjit.core.html_repr import PlotRepr
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.pickling import dump, load
from ggjit.ops.core.errors import GgjitError, ParamError, extra
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.progress import work
from ggjit.ops.core.record import OP, T_FLAGS, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_numbers import whole
from ggjit.tensors.context import Context

PLAN_SECONDS = 0.1                      # of the search for offsets: it mostly ends at the bound at once, and where it
                                        # does not, users' allocators have more time
MAX_TRIES = 8                           # of a smaller limit, where the planner left gaps
Point = collections.namedtuple("Point", "peak extra")


class BudgetError(GgjitError, MemoryError):
    """A byte budget that cannot be met.  minimum: the fewest bytes for which a plan was found."""

    def __init__(self, message, minimum):
        super().__init__(message)
        self.minimum = minimum

    def __reduce__(self):
        return type(self), (*self.args, self.minimum)


class Rematerialized(Graph):
    """A graph in which some results are computed again.

    peak: bytes the planner "best" needs for it at most.  extra: cost of what is made again, as a share of one run.
    n_again: nodes that are made again.  of(t): the tensor that stands for `t` of the original.
    """
    planner = "best"
    peak, extra, n_again = 0, 0.0, 0

    def of(self, t):
        """The tensor here that holds what `t` of the original graph holds.  Errors: ParamError for another tensor."""
        found = self._stand_ins.get(t.id)
        if found is None:
            raise ParamError(f"{describe(t)} is no result of the graph that was rematerialized")
        return found

    @functools.cached_property
    def bound(self):
        """The least extra share that any schedule within the budget pays, in any order of the nodes."""
        return self._numbers.bound(self._limit)

    def __reduce__(self):
        """Pickled it is a plain Graph, in this order."""
        return load, dump(self)

    def __repr__(self):
        return (f"<Graph {len(self.nodes)} nodes, {self.n_again} of them made again: {mib(self.peak)}, "
                f"{self.extra:.1%} more operations>")


# ---------------------------------------------------------------- from schedules to graphs
class _Problem:
    """The units of a graph in one order, as a Recomputation."""

    def __init__(self, units, order):
        self.graph, self.buft = units.graph, units.buft
        self.units, self.numbers = [units.tensors[k] for k in order.tolist()], units.numbers.in_order(order)

    def graph_of(self, schedule, limit):
        """The Rematerialized graph that runs the schedule."""
        new = _Copy(self.units).run(schedule.events, self.graph)
        new.extra, new.n_again = schedule.extra, len(schedule.events) - len(self.units)
        new._numbers, new._limit = self.numbers, limit
        new.peak = plan_of(new, self.buft, PLAN_SECONDS).peak
        return new


class _Orders:
    """A graph in orders of few live bytes and as it is: _Problems, each made when it is asked for."""

    def __init__(self, units):
        self.units, self._found = units, []

    @functools.cached_property
    def given(self):
        return _Problem(self.units, np.arange(len(self.units.tensors)))

    def __iter__(self):
        yield from self._found
        for make in (self.units.sorted, self.units.memory_order, lambda: None)[len(self._found):]:
            order = make()
            problem = self.given if order is None else _Problem(self.units, order)
            if not any(problem.units == p.units for p in self._found):
                self._found.append(problem)
                yield problem


class _Copy:
    """Nodes for the events of a schedule: those of the graph as they are, and new ones where a source is another."""

    def __init__(self, units):
        self.units, self.ctx, self.nodes = units, Context(), []
        self.current, self.views, self.listed = {}, {}, set()

    def run(self, events, graph):
        self.nodes += [t for t in graph.nodes if t.op == OP.NONE]       # parameters
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
        """What stands for t at this event."""
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


# ---------------------------------------------------------------- what users call
@asking("rematerialize")
def rematerialize(graph, budget, target=None, profile=None):
    """A graph that computes the same bits with a peak of at most `budget` bytes, some results computed twice or more.

        small = gg.rematerialize(graph, 2_000_000)
        gg.measure(small).peak, small.extra             # bytes; more operations, as a share of one run

    Which results are made again, the order of nodes and the offsets are chosen together: the cheapest of three plans in
    the first of three orders that meets the budget.  `small.bound` says how much any plan pays at least.  A
    GraphAllocator uses the planner "best" for it.  Its outputs, in the order of graph.outputs, may be new tensors;
    small.of(t) finds them.  Leaves that lie in memory count nothing.
    target: a backend or buffer type (default the CPU's), whose sizes and alignment count.  profile: a gg.profile() of a
    run, whose measured times are the costs; without it they are the kernels' estimates.
    Errors: BudgetError, whose `.minimum` is the fewest bytes that were reached; TypeMismatch, ParamError.
    Source: Checkmate (arXiv 1910.02653) and Dynamic Tensor Rematerialization (arXiv 2006.09616) for the idea.
    """
    if whole(budget, "rematerialize: budget") < 0:
        raise ParamError(f"rematerialize: budget is a number of bytes, 0 or more, got {budget}")
    problems = _Orders(_units(graph, target, profile))
    given = problems.given
    if given.numbers.plain.peak <= budget:
        as_it_is = given.graph_of(given.numbers.plain, int(budget))
        if as_it_is.peak <= budget:
            return as_it_is
    for p in problems:
        new = _within(p, int(budget))
        if new is not None:
            return new
    least = min((p.graph_of(p.numbers.least(), int(budget)) for p in problems), key=lambda new: new.peak)
    if least.peak <= budget:
        return least
    raise BudgetError(f"rematerialize: {mib(budget)} are too few for {len(graph)} nodes: the least peak found is "
                      f"{mib(least.peak)} ({least.peak} bytes), at {least.extra:.1%} more operations; smaller batches "
                      f"need less", least.peak)


def _units(graph, target, profile):
    expect(graph, Graph, "rematerialize").check_alive()
    target = target if target is not None else init_backend("CPU")
    buft = target.default_buffer_type if isinstance(target, Backend) else expect(target, BufferType,
                                                                                 "rematerialize: target")
    return Units(graph, buft, {} if profile is None else _seconds(profile))


def _seconds(profile):
    if not hasattr(profile, "seconds_by_tensor"):
        raise ParamError(f"rematerialize: profile is a gg.profile() of a run, got {type(profile).__name__}")
    return profile.seconds_by_tensor()


def _within(problem, budget):
    """The graph of the cheapest schedule whose plan fits into `budget`; None."""
    limit = budget
    for _ in range(MAX_TRIES):
        schedule = problem.numbers.fit(limit)
        if schedule is None:
            return None
        new = problem.graph_of(schedule, budget)
        if new.peak <= budget:
            return new
        limit -= max(new.peak - budget, budget // 200)  # what the offsets lose
    return None


class Pareto(PlotRepr, list):
    """Points (peak in bytes, extra operations as a share of one run), from the cheapest plan to the smallest."""

    def plot(self, axes=None):
        """Extra operations over the peak; returns matplotlib's axes.  Errors: MissingExtra."""
        if axes is None:
            axes = extra("matplotlib.pyplot", "plots").subplots(figsize=(6, 3.2))[1]
        axes.plot([p.peak / 2 ** 20 for p in self], [100 * p.extra for p in self], marker="o")
        axes.set_xlabel("peak, MiB")
        axes.set_ylabel("more operations, %")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        return axes



def pareto(graph, n=12, target=None, profile=None):
    """The Pareto of a graph: about n budgets from its peak down to the least one that is reached.

    target, profile and errors as `rematerialize`.
    """
    if whole(n, "pareto: n") < 2:
        raise ParamError(f"pareto: n is a number of points, 2 or more, got {n}")
    problems = list(_Orders(_units(graph, target, profile)))
    least = min(p.numbers.least().peak for p in problems)
    most = min(p.numbers.plain.peak for p in problems)
    found = []
    with work("schedules within fewer bytes", n) as step:
        for limit in np.linspace(most, least, n):
            found += [_within(p, int(limit)) for p in problems]
            step()
    points = [Point(new.peak, new.extra) for new in found if new is not None]
    best, cheapest = Pareto(), float("inf")
    for p in sorted(points):                            # from the smallest peak on: only what is cheaper stays
        if p.extra < cheapest:
            best.append(p)
            cheapest = p.extra
    best.reverse()
    return best
