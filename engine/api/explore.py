"""gg.explore: an interactive view of a graph's memory and run, in a notebook cell or a saved page.

    gg.explore(graph)                                   planners side by side, who lives at which step
    gg.explore(graph, run=True)                         and the values, times and addresses of one run
    gg.explore(lambda batch: graph_of(batch), batch=(1, 8, 32))             a slider

Everything is computed before: a plan for each combination of settings.  The page only shows it (display/explorer.py).
"""
import itertools
from collections.abc import Iterable

import numpy as np

from ggjit.alloc.plots import boxes_of
from ggjit.api.compute import default_backend, need_values
from ggjit.api.measure_memory import graph_labels, graph_of, measured, report_of
from ggjit.core.arguments import expect, typed_call
from ggjit.core.backend import Backend
from ggjit.display.explorer import Explorer
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.graph_plan import Plan
from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.printable import printable
from ggjit.ops.core.progress import work
from ggjit.profiling.profile import profile
from ggjit.tensors.summary import array_statistics, op_name, source_line, value_text

MAX_NBYTES = 8 << 20            # largest page: a notebook with a larger one is slow to open
EDGE = 2                        # values shown at each end of a row and a column
MAX_READ_NBYTES = 64 << 20      # results with more are not read for their values


@typed_call
@oom_guard("explore")
def explore(graph, planner=("best", "ggml"), run=False, backend=None, time_limit=0.5, title="", **settings):
    """An Explorer: an interactive view of a graph's memory plan and, with run=True, of its run node by node.

    graph: a Graph, a model (its largest graph), or a function that makes one from `settings`: each is a number or text,
    or a sequence of them, which becomes a slider or buttons.  The function may return (graph, {"weights": bytes,
    ...}) to show numbers beside the
    peak.  planner: one or several of gg.measure's.  run: compute the graph once, on `backend` (by default the CPU), and
    keep values, times and addresses of every node; what the graph writes into leaves is written.  time_limit: seconds
    that the search of "best" may take for each plan.

        gg.explore(graph, run=True)                                     # in a notebook
        gg.explore(graph_of, batch=(1, 8, 32), context=(512, 2048)).save("plans.html")

    The page needs no network and is at most 8 MiB.  Errors: TypeMismatch, ParamError (settings without a function, a
    graph without nodes, a page that would be larger), NotAllocated (run=True, and leaves without values), NotSupported.
    """
    graph, kinds = graph_of(graph)
    if kinds is not None and not settings:
        model_graph = graph
        graph = model_graph if run else lambda: (model_graph, kinds)
    planners = _values(planner, "planner")
    expect(title, str, "explore: title")
    axes = {k: _values(v, k) for k, v in settings.items()} | {"planner": planners}
    if not isinstance(graph, Graph) and not callable(graph):
        raise TypeMismatch(f"explore takes a Graph or a function that makes one, got {type(graph).__name__}; "
                           f"use gg.explore(gg.Graph(y))")
    if run and not isinstance(graph, Graph):
        raise ParamError("explore: run=True takes one Graph; a function of settings is shown without values")
    if isinstance(graph, Graph) and settings:
        raise ParamError(f"explore: the settings {', '.join(settings)} go to a function that makes the graph; give "
                         f"it in place of the graph, e.g. gg.explore(lambda batch: gg.Graph(...), batch=(1, 8))")
    page = _Page()
    every = list(itertools.product(*(axes[k] for k in settings)))
    with work("planning", len(every)) as step:
        for chosen in every:
            made = graph(**dict(zip(settings, chosen, strict=True))) if callable(graph) else graph
            made, kinds = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
            expect(made, Graph, "explore: what the function returns")
            kinds = _numbers(kinds)
            if not made.nodes:
                raise ParamError(f"explore: {made!r} computes nothing; give the graph of a result")
            number = page.add_graph(made)
            for name in planners:
                if run and not page.data["plans"]:
                    report = page.run(made, name, backend, time_limit)
                else:
                    report = measured(made, name, time_limit=time_limit)
                page.add_plan(number, report, name, kinds)
            step()
    page.data["axes"] = [{"name": k, "values": v} for k, v in axes.items() if len(v) > 1]
    found = Explorer(page.finished(), printable(title) or "Memory plan")
    if found.nbytes > MAX_NBYTES:
        raise ParamError(f"explore: the page would have {found.nbytes / 2**20:.1f} MiB, {MAX_NBYTES >> 20} at most; "
                         + "; ".join(_smaller(page.data, run)))
    return found


def _smaller(data, run):
    """The remedy, as text, for a page that is too large."""
    names = [axis["name"] for axis in data["axes"]]
    if names:
        yield f"give fewer values of {', '.join(names)}"
    if run:
        yield "leave out run=True"
    if len(data["plans"]) == 1:
        yield "explore a part, the graph of a tensor inside, or draw the whole: gg.measure(graph).plot()"


def _values(value, what):
    """A setting as a list: one value, or all values of a sequence."""
    alone = isinstance(value, str | int | float | np.generic) or value is None
    found = [value] if alone else list(value) if isinstance(value, Iterable) else []
    found = [x.item() if isinstance(x, np.generic) else x for x in found]
    if not found or not all(isinstance(x, str | int | float) or x is None for x in found):
        raise ParamError(f"explore: {what} is a number or text, or a sequence of them, got {value!r}")
    return found


def _numbers(kinds):
    """{"weights": bytes, ...} beside a graph, or none."""
    if kinds is None:
        return {}
    if not isinstance(kinds, dict) or not all(isinstance(v, int | float | np.number) for v in kinds.values()):
        raise TypeMismatch(f"explore: beside a graph its function returns a dict of numbers, {{'weights': 1000}}, got "
                           f"{kinds!r}")
    return {printable(k): int(v) for k, v in kinds.items()}


class _Page:
    """The data of the page; explore.js says what each part holds."""

    def __init__(self):
        self.data = {"graphs": [], "plans": [], "run": None}
        self._strings = {}

    def _text(self, text):
        """The number of a text in `strings`."""
        return self._strings.setdefault(text, len(self._strings))

    def finished(self):
        return self.data | {"strings": [*self._strings]}

    def add_graph(self, graph):
        """Number of the graph: a column each of names, ops, types and shapes, bytes, source lines, sources."""
        tensors, names = [*graph.leafs, *graph.nodes], graph_labels(graph)
        place = {t.id: i for i, t in enumerate(tensors)}
        self.data["graphs"].append({
            "first": len(graph.leafs), "name": [self._text(names[t.id]) for t in tensors],
            "op": [self._text(op_name(t) if t.op else "leaf") for t in tensors],
            "kind": [self._text(f"{t.type!r} {list(t.ne[:t.ndim])}") for t in tensors],
            "nbytes": [t.nbytes for t in tensors], "where": [self._text(source_line(t)) for t in tensors],
            "src": [[place[s.id] for s in t.src if s is not None and s.id in place] for t in tensors]})
        self._places = place
        return len(self.data["graphs"]) - 1

    def add_plan(self, number, report, planner, kinds):
        """The plan of the graph that was added last."""
        boxes, alloc = boxes_of(report), [-1] * len(self._places)
        for row in report.rows:
            alloc[self._places[row.id]] = row.alloc
        self.data["plans"].append({
            "graph": number, "peak": report.peak, "bound": report.lower_bound, "planner": planner, "alloc": alloc,
            "kinds": kinds,
            "lo": [b.lo for b in boxes], "hi": [b.hi for b in boxes], "size": [b.nbytes for b in boxes],
            "bottom": [b.bottom for b in boxes]})

    def run(self, graph, planner, backend, time_limit):
        """The report of the plan that was run; the run is kept."""
        need_values(graph)
        backend = default_backend() if backend is None else expect(backend, Backend, "explore: backend")
        allocator = GraphAllocator(backend, planner=planner, time_limit=time_limit)
        allocator.alloc_graph(graph)
        plan = backend.graph_plan_create(graph)
        if not isinstance(plan, Plan):
            raise NotSupported(f"explore: {backend!r} has no plans whose nodes run one by one; run it on the CPU")
        seen = {}
        with profile() as p:
            seen = _stepped(plan, graph)
        spent = p.seconds_by_tensor()
        self.data["run"] = [seen[t.id] | {"seconds": spent.get(t.id)} for t in graph.nodes]
        return report_of(graph, allocator.last)


def _stepped(plan, graph):
    """Run the plan node by node: {tensor id: what _look saw when it had just been computed}."""
    seen, parts = {}, {p.nodes[0].id: (i, p) for i, p in enumerate(plan.parts)}
    for t in graph.nodes:
        if t.id in parts:
            i, part = parts[t.id]
            plan.run_nodes(i, i + 1)
            inside = {"at": "nowhere", "values": [], "about": f"computed inside the kernel of {part.t!r}"}
            seen |= {x.id: inside if x.id in part.left_out else _look(plan, x) for x in part.nodes}
        elif t.id not in seen:                          # a view, or a tensor without elements
            seen[t.id] = _look(plan, t)
    return seen


def _look(plan, t):
    """Where a tensor lies in a run and what its values are, as texts."""
    buf, offs = plan.where(t)
    at = f"{buf.buft.name} buffer {buf.id}, byte {offs:,}, address {plan._memory(buf)[1] + offs:#x}"
    if t.nbytes > MAX_READ_NBYTES or 0 in t.ne:
        return {"at": at, "values": [], "about": "no elements" if 0 in t.ne else "too many to be read here"}
    a = t._decoded(plan._bytes(t, buf, offs))
    matrix = a.reshape(-1, *a.shape[-2:])[0] if a.ndim > 1 else a.reshape(1, -1)
    rows, columns = ([*range(n)] if n <= 2 * EDGE + 1 else [*range(EDGE), None, *range(n - EDGE, n)]
                     for n in matrix.shape)
    values = [["..." if r is None or c is None else value_text(matrix[r, c]) for c in columns] for r in rows]
    return {"at": at, "values": values, "about": array_statistics(a)}
