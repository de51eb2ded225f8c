"""gg.rematerialize: a graph that needs less memory, because it computes some results again before a later reader.

    graph --remat_nodes.py--> numbers -- alloc/orders --> schedule
          --remat_graph.py--> nodes, some of them twice --planner--> offsets
"""
import collections
import functools
import itertools

import numpy as np

from ggjit.alloc.report import mib
from ggjit.api.cut import Edges, alike, cut_alike, cut_region, region_of
from ggjit.api.remat_graph import Orders
from ggjit.api.remat_nodes import RematNodes
from ggjit.core.arguments import expect
from ggjit.core.backend import buffer_type_of
from ggjit.core.html_repr import PlotRepr
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import GgjitError, ParamError, extra
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.progress import work
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.whole_numbers import whole

LEAST_NODES = 8000                      # nodes of the search for the least peak: up to a second
MAX_CUTS, MAX_HALVINGS = 3, 6           # regions that are cut, and how often their chunks are halved
MAX_LOOKED_AT = 8                       # so many different numbers of rows are tried as the start of a cut
MAX_ON_TRIAL = 8                        # chunks of such a trial, fewer in large graphs
MAX_UNITS = 3000  # largest number of nodes of a cut graph: planning larger ones takes many seconds
WORTH = 0.9                             # a cut is worth it if the largest node takes at most this share afterwards
_CUTS = {False: (), True: (False,), "rounded": (False, True)}       # option: whether results may be rounded otherwise
COSTLY_SHARE = 0.2                      # extra share of whole nodes from which a cut is tried, too
CHEAP_ENOUGH = 0.95  # a graph is taken if its price times this is at most the cheapest schedule's, else
                                        # one more limit is tried
# limits that are tried where the planner left gaps, and schedules that are laid out for each
MAX_TRIES, QUICK_TRIES, MAX_LAID_OUT = 8, 2, 3
Point = collections.namedtuple("Point", "peak extra")


class BudgetError(GgjitError, MemoryError):
    """A byte budget that cannot be met.  minimum: the fewest bytes for which a plan was found."""

    def __init__(self, message, minimum):
        super().__init__(message)
        self.minimum = minimum

    def __reduce__(self):
        return type(self), (*self.args, self.minimum)


# ---------------------------------------------------------------- what users call
@oom_guard("rematerialize")
def rematerialize(graph, budget, target=None, profile=None, cut=True):
    """A graph that computes the same with a peak of at most `budget` bytes, some results computed twice or more.

        small = gg.rematerialize(graph, 2_000_000)
        gg.measure(small).peak, small.extra             # bytes; more operations, as a share of one run

    Which results are made again, the order of nodes and the offsets are chosen together: the cheapest of some plans in
    each of some orders, or, where none meets the budget, in the first of two more that does.  `small.bound` says how
    much any plan pays at least.  A GraphAllocator uses the planner "best" for it.  Its outputs, in the order of
    graph.outputs, may be new tensors; small.of(t) finds them.  Leaves that lie in memory count nothing.
    cut: where no plan of whole nodes meets the budget, or it costs over 20 % and rows cost less, the largest are
    computed for some rows at a time, as `small.n_chunks` says, with the same bits.  cut="rounded": sums over rows
    (gradients of weights, a mean loss) may be formed by chunks too; that needs fewest bytes, rounds otherwise, and
    `small.same_bits` says whether it was done.  cut=False: only plans of whole nodes.
    target: a backend or buffer type (default the CPU's), whose sizes and alignment count.  profile: a gg.profile() of a
    run, whose measured times are the costs; without it they are the kernels' estimates.
    Errors: BudgetError, whose `.minimum` is the fewest bytes that were reached; TypeMismatch, ParamError.
    Source: Checkmate (arXiv 1910.02653) and Dynamic Tensor Rematerialization (arXiv 2006.09616) for the idea.
    """
    if whole(budget, "rematerialize: budget") < 0:
        raise ParamError(f"rematerialize: budget is a number of bytes, 0 or more, got {budget}")
    if cut not in tuple(_CUTS):
        raise ParamError(f"rematerialize: cut is {cut!r}, expected True, 'rounded' or False")
    units = _units(graph, target, profile)
    new, least = _fitting(units, int(budget), cut)
    if new is not None:
        return new
    raise BudgetError(f"rematerialize: {mib(budget)} are too few for {len(graph)} nodes: the least peak found is "
                      f"{mib(least.peak)} ({least.peak} bytes), at {least.extra:.1%} more operations; "
                      f"{_remedy(units, int(budget), cut)}", least.peak)


@oom_guard("rematerialize")
def within(graph, budget, target, cut=True, quick=False):
    """(graph of `rematerialize`, its peak), or (None, the fewest bytes that were reached): no error, which would look
    for a remedy.  quick: only about the fewest bytes, the same for every budget: every smaller one is refused with
    them, every larger one is met."""
    fitting = _quickly if quick else _fitting
    new, least = fitting(_units(graph, target, None), budget, cut)
    return new, (new or least).peak


def _fitting(units, budget, cut):
    """(a graph that fits into `budget`, None), or (None, the one of the fewest bytes)."""
    problems = Orders(units)
    new = _of_whole_nodes(problems, budget, cut)
    if new is not None:
        return new, None
    least = _least(problems, budget)
    if least.peak <= budget:
        return least, None
    for rounded in _CUTS[cut]:
        new, cut_graph = _in_rows(units, budget, rounded)
        if new is not None:
            return new, None
        least = _less_in_rows(cut_graph, least, budget)
    return (least, None) if least.peak <= budget else (None, least)


def _quickly(units, budget, cut):
    """As _fitting, but in the sorted orders alone, which are made in no time.  The graph of the fewest bytes is sought
    first: it is the same for every budget, and what is taken where nothing cheaper fits."""
    problems = Orders(units)
    new = _as_it_is(problems, budget)
    if new is not None:
        return new, None
    least = _least(problems, 0, quick=True)
    for rounded in _CUTS[cut]:
        if least.peak > budget:
            least = _less_in_rows(_in_rows(units, 0, rounded)[1], least, 0, quick=True)
    if least.peak > budget:
        return None, least
    new = _of_whole_nodes(problems, budget, cut, quick=True)
    for rounded in _CUTS[cut]:
        new = _in_rows(units, budget, rounded, quick=True)[0] if new is None else new
    return (least if new is None else new), None


def _as_it_is(problems, budget):
    """The graph in its order, nothing made again; None where that does not fit into `budget`."""
    given = problems.given
    new = given.graph_of(given.numbers.plain, budget) if given.numbers.plain.peak <= budget else None
    return new if new is not None and new.peak <= budget else None


def _of_whole_nodes(problems, budget, cut, quick=False):
    """The cheapest graph that fits into `budget`, in rows where whole nodes cost much; None where those do not fit."""
    new = _as_it_is(problems, budget)
    if new is None and problems.given.numbers.least_node <= budget:
        new = _cheapest(problems, budget, quick)
        if new is not None and new.extra >= COSTLY_SHARE and cut:
            return _or_in_rows(new, problems.units, budget, cut, quick)
    return new


def _less_in_rows(cut_graph, least, budget, quick=False):
    """`least`, or a graph in the rows of a _CutGraph that needs fewer bytes."""
    smaller = None if cut_graph is None else _least(Orders(cut_graph.units), budget, least.peak, quick)
    return least if smaller is None else cut_graph.of_original(smaller)


def _or_in_rows(new, units, budget, cut, quick):
    """A graph that fits, or the same in rows if that is cheaper."""
    found = [_in_rows(units, budget, rounded, quick)[0] for rounded in _CUTS[cut]]
    return min((new, *(g for g in found if g is not None)), key=lambda g: g.extra)


def _remedy(units, budget, cut):
    """End of an error's text: what the user may change to need fewer bytes."""
    possible = cut != "rounded" and units.numbers.kept_nbytes <= budget
    if possible and _in_rows(units, budget, rounded=True)[0] is not None:
        return "cut='rounded' meets it, where sums over rows may be rounded otherwise"
    return "smaller batches need less"


def _units(graph, target, profile):
    expect(graph, Graph, "rematerialize").check_alive()
    buft = buffer_type_of(target, "rematerialize: target")
    return RematNodes(graph, buft, {} if profile is None else _seconds(profile))


def _least(problems, budget, below=None, quick=False):
    """The graph of the least peak that was found; None where that is not less than `below`."""
    best = None
    for p in itertools.chain.from_iterable(itertools.islice(problems, 1 if quick else None)):
        schedule = p.numbers.least(below, quick)
        new = None if schedule is None else p.graph_of(schedule, budget, LEAST_NODES)
        if new is not None and (below is None or new.peak < below):
            best, below = new, new.peak
    return best


def _in_rows(units, budget, rounded, quick=False):
    """(graph with its largest nodes cut by rows that fits into `budget`, the last _CutGraph); None: there is none.

    The first cut that fits, or the one after it if that is cheaper.
    """
    found = cut_graph = None
    for cut_graph in _cuts(_CutGraph(units, rounded)):
        new = cut_graph.within(budget, quick) if cut_graph.lower_bound <= budget else None
        if found is not None and (new is None or new.extra >= found.extra):
            break
        found = new
    return found, cut_graph


def _cuts(cut_graph):
    """_CutGraphs of falling lower bounds: twice as many chunks each time, then what is largest is cut too."""
    if cut_graph.units.numbers.n > MAX_UNITS:           # a cut only adds nodes
        return
    for _ in range(MAX_CUTS):
        last, start = cut_graph, cut_graph.start
        for k in range(1, MAX_HALVINGS + 1):
            now = None if start is None else cut_graph.cut(*start, 2 ** k)
            if now is None or now.lower_bound > WORTH * last.lower_bound or now.units.numbers.n > MAX_UNITS:
                break
            yield now
            last = now
        if last is cut_graph:
            return
        cut_graph = last


class _CutGraph:
    """A graph of which regions are cut by rows: its units, and the tensors that stand for those of the original."""

    def __init__(self, units, rounded):
        self.units, self.rounded, self.stand_ins, self.n_chunks, self.same_bits = units, rounded, None, 1, True
        self._total, self._regions = units.numbers.total, {}

    @property
    def lower_bound(self):
        """Bytes of the largest node with its inputs."""
        return self.units.numbers.least_node

    @functools.cached_property
    def start(self):
        """(node, everywhere): from where a cut lowers the lower bound most, there alone where that is worth it, else
        around all nodes like it, as layers that repeat need; None: no cut does."""
        n_chunks = max(2, min(MAX_ON_TRIAL, MAX_UNITS // max(self.units.numbers.n, 1)))
        best = self.lower_bound, 0, None
        for everywhere in (False, True):
            if best[0] > WORTH * self.lower_bound:
                found = [(new.lower_bound, k, (t, everywhere)) for k, t in enumerate(self._large())
                         for new in [self._tried(t, everywhere, n_chunks)] if new is not None]
                best = min([best, *(x for x in found if x[0] < best[0])], key=lambda x: x[:2])
        return best[2]

    def _tried(self, start, everywhere, n_chunks):
        """A cut on trial; in fewer chunks where so many have too few rows for the kernel of all rows.  None: it does
        not touch what is largest."""
        at = self._nearest_to_the_largest(start) if everywhere else start
        if self._region(at, everywhere, self._largest) is None:
            return None
        while n_chunks > 1:
            found = self.cut(start, everywhere, n_chunks, self._largest)
            if found is not None or self.rounded:
                return found
            n_chunks //= 2
        return None

    def _nearest_to_the_largest(self, start):
        """The node like `start` that is nearest to the largest one in the graph's order."""
        place = {t.id: k for k, t in enumerate(self.units.graph.nodes)}
        k = place.get(self.units.tensors[self._largest_at].id, 0)
        return min(alike(self.units.graph, start), key=lambda t: abs(place[t.id] - k))

    @functools.cached_property
    def _largest_at(self):
        return int(self.units.numbers.node_nbytes().argmax())

    @functools.cached_property
    def _largest(self):
        """Ids of the largest node and of what it reads: a cut of anything else leaves the lower bound as it is."""
        p, k = self.units.numbers, self._largest_at
        t = self.units.tensors[k]
        return {t.id, *(s.id for s in t.src if s is not None),
                *(self.units.tensors[j].id for j in p.idx[p.ptr[k]:p.ptr[k + 1]].tolist())}

    def cut(self, start, everywhere, n_chunks, around=None):
        """A _CutGraph in which the region around a node, or around all nodes like it, is also cut, into so many chunks;
        None where its rows depend on each other, or a region around one node holds none of the ids `around`."""
        units = self.units
        if everywhere:
            found = cut_alike(units.graph, start, n_chunks, units.ranks, units.hazards, self.rounded)
        else:
            found = cut_region(self._region(start, False, around), n_chunks, units.ranks)
        return None if found is None else self._of(found)

    def _region(self, start, short, around):
        key = start.id, short, around is None
        if key not in self._regions:
            self._regions[key] = region_of(self._edges, start, self.units.hazards, self.rounded, short, around)
        return self._regions[key]

    @functools.cached_property
    def _edges(self):
        return Edges(self.units.graph)

    def _large(self):
        """Nodes that a cut may start from, the largest first: one of each number of rows."""
        seen = set()
        for k in np.argsort(-self.units.numbers.size, kind="stable").tolist():
            t = self.units.tensors[k]
            n_rows = t.ne[last_axis(t)]
            if t.op != OP.NONE and n_rows not in seen and len(seen) < MAX_LOOKED_AT:
                seen.add(n_rows)
                yield t

    def _of(self, found):
        units, new = self.units, object.__new__(_CutGraph)
        seconds = {i: share * units.seconds[j] for i, (j, share) in found.came_from.items() if j in units.seconds}
        new.units = RematNodes(found.graph, units.buft, units.seconds | seconds, found.rank)
        new.stand_ins = found.stand_ins if self.stand_ins is None else {
            i: found.stand_ins[t.id] for i, t in self.stand_ins.items() if t.id in found.stand_ins}
        new.n_chunks, new.same_bits = max(self.n_chunks, found.n_chunks), self.same_bits and found.same_bits
        new._total, new.rounded, new._regions = self._total, self.rounded, {}
        return new

    def within(self, budget, quick):
        """The cheapest graph that fits into `budget`; None."""
        new = _cheapest(Orders(self.units), budget, quick)
        return None if new is None else self.of_original(new)

    def of_original(self, graph):
        """A Rematerialized graph of these units as one of the original."""
        graph.n_chunks, graph.same_bits = self.n_chunks, self.same_bits
        graph._times = self.units.numbers.total / self._total
        graph.extra = max((1 + graph.extra) * graph._times - 1, 0.0)
        stand_ins = {i: graph._stand_ins.get(t.id, t) for i, t in self.stand_ins.items()}
        graph._stand_ins = stand_ins
        return graph


def _seconds(profile):
    if not hasattr(profile, "seconds_by_tensor"):
        raise ParamError(f"rematerialize: profile is a gg.profile() of a run, got {type(profile).__name__}")
    return profile.seconds_by_tensor()


def _cheapest(problems, budget, quick=False):
    """The graph of the cheapest schedule whose plan fits into `budget`, of the sorted orders; else of the first of the
    others, which take longer to make; None.  quick: the first that fits, of the sorted orders."""
    for some in itertools.islice(problems, 1 if quick else None):
        limit, best, least = budget, None, 0.0
        for _ in range(QUICK_TRIES if quick else MAX_TRIES):    # smaller limits: gaps between offsets take some bytes
            new, price = _laid_out(some, limit, budget, quick)
            least, again = least or price, best is not None
            if new is None:
                break
            if new.peak <= budget and (best is None or new.extra < best.extra):
                best = new
            if again or best is not None and (quick or CHEAP_ENOUGH * best.extra <= least):
                break
            limit -= max((new.peak - budget) // 3, budget // 200)
        if best is not None:
            return best
    return None


def _laid_out(problems, limit, budget, quick):
    """(graph of the cheapest schedule within `limit` whose plan fits into `budget`, else of one that nearly does; the
    extra share of the cheapest).  (None, 0): there is no schedule."""
    found = sorted(((s.extra, k, p, s) for k, p in enumerate(problems) for s in p.numbers.fits(limit, quick)),
                   key=lambda x: x[:2])
    best = None
    for _extra, _k, problem, schedule in found[:MAX_LAID_OUT]:
        new = problem.graph_of(schedule, budget)
        best = new if best is None or new.peak < best.peak else best
        if new.peak <= budget:
            break
    return best, found[0][0] if found else 0.0


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
    """The Pareto of a graph: about n budgets from its peak down to the least one that is reached by whole nodes.

    Of points whose peaks are nearly the same, the cheaper one stays.  target, profile and errors as `rematerialize`.
    """
    if whole(n, "pareto: n") < 2:
        raise ParamError(f"pareto: n is a number of points, 2 or more, got {n}")
    problems = list(Orders(_units(graph, target, profile)))
    with work("schedules within fewer bytes", n) as step:
        most = min((p.graph_of(p.numbers.plain, 0) for p in itertools.chain(*problems)), key=lambda new: new.peak)
        step()
        found = [most, _least(problems, 0)]
        step()
        for limit in np.linspace(most.peak, found[-1].peak, n)[1:-1]:
            found.append(_cheapest(problems, int(limit)))
            step()
    return _thinned([Point(new.peak, new.extra) for new in found if new is not None], n)


def _thinned(points, n):
    """Points of which each costs less than the smaller ones, and whose peaks are not nearly the same."""
    points.sort()
    gap, best = (points[-1].peak - points[0].peak) / (3 * n), Pareto()
    for p in points:
        if not best or p.extra < best[-1].extra:
            if best and p.peak - best[-1].peak < gap:
                best.pop()
            best.append(p)
    best.reverse()
    return best
