"""gg.measure: the memory that a graph will need, computed without allocating anything.

    report = gg.measure(graph)                  # peak, lower bound, what is alive at the peak, pictures
    report.diff(gg.measure(graph, planner="ggml"))
"""
import functools

import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PLANNERS
from ggjit.alloc.reorder import reorder
from ggjit.alloc.report import MeasureReport, saving
from ggjit.api.rematerialize import pareto
from ggjit.api.what_if import checked, rows, works
from ggjit.core.backend import buffer_type_of
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.requests import asked_for, options_for
from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.printable import printable
from ggjit.ops.core.record import T_PARAMS
from ggjit.ops.core.spec import in_place_table
from ggjit.tensors.summary import label, op_name, source_line
from ggjit.tensors.tensor import Tensor


@oom_guard("measure")
def measure(graph, planner="best", target=None, order="graph", time_limit=1.0, kinds=None, title="", what_if=()):
    """A MeasureReport of `graph`, or of a model's largest, for the buffer type of `target` (a backend or buffer type;
    default the CPU's).

    planner: "best" (never above ggml's), "ggml" (ggml's offsets), "ggml-2023".  order: "graph", or "memory" for an
    execution order with a lower peak.  kinds: {"weights": bytes...} to show beside the peak.  time_limit: seconds for
    the search of "best".  Nothing is allocated or computed.  `report.pareto(n=12)` is what less memory costs: pairs
    (peak, extra operations), with a picture (gg.rematerialize).  `report.saving` is what "best" saves beside this
    planner, beside "ggml" where this is "best": bytes, shown as a line that also says how long both plan.  Rows, with
    the source line of each tensor, and `saving` are made when they are first asked for or shown.

    what_if: other ways with the memory, in `report.what_if`: a name, several, {name: value}, or "all".  Each row has
    .before and .nbytes, the bytes as things are and if, planned with this planner by what would do it:
        "freed"      weights lie in the arena too, and are given back after their last use
        "streamed"   the same, and each is brought that many nodes ahead of its first use (1)
        "grown"      what the graph writes into (KV caches) grows in so many steps (4); .nbytes is the mean over a
                     cache that fills evenly, .parts what is held at each step; parameters of a training do not
        "devices"    the nodes run on so many devices one after the other (2); .nbytes is the largest share, .parts all
        "in_place"   .before: without any node in the memory of its source
        "work"       work buffers of kernels with so many threads (1) lie in the arena instead of beside it
    A weight is what the graph reads and never writes, inputs (gg.set_input) left out.

    Errors: ParamError, TypeMismatch.

    >>> report = gg.measure(graph, what_if={"streamed": 2, "devices": 4})
    >>> print(*report.what_if, sep="\\n")
    """
    what_if = checked(what_if) if what_if != () else {}
    return measured(graph, planner, target, order, time_limit, kinds, title, what_if, compared=True)


def graph_of(given, kinds=None):
    """(graph, kinds) of a Graph, a Tensor, or what gives its graph by `as_graph()`: a model."""
    if isinstance(given, Tensor):
        return Graph(given), kinds
    if not isinstance(given, Graph) and hasattr(given, "as_graph"):
        graph, of_model = given.as_graph()
        return graph, of_model if kinds is None else kinds
    return given, kinds


def measured(graph, planner, target=None, order="graph", time_limit=1.0, kinds=None, title="", what_if=(),
             compared=False, repacked=()):
    """As `measure`, of checked(what_if).  compared: plan with "best" and another planner, for `report.saving`;
    repacked: as of kernel_work_nbytes."""
    graph, kinds = graph_of(graph, kinds)
    if not isinstance(graph, Graph):
        raise TypeMismatch(f"measure takes a Graph, tensors' or a model's, got {type(graph).__name__}; use "
                           f"gg.measure(gg.Graph(y))")
    if planner not in PLANNERS:
        raise ParamError(f"planner {planner!r}: expected one of {', '.join(PLANNERS)}")
    if order not in ("graph", "memory"):
        raise ParamError(f"order {order!r}: expected 'graph' or 'memory'")
    buft = buffer_type_of(target, "measure: target")
    ordered, (request, options, _) = graph, asked_for(graph, [buft], planner, time_limit)
    if order == "memory":
        ordered = graph.in_order(reorder(request, in_place=in_place_table(planner != "ggml-2023")))
        request, options, _ = asked_for(ordered, [buft], planner, time_limit)
    now = request.snapshot()[0] if compared else None       # the table as it is, for `saving`
    plan = plan_graph(request, options)
    report = report_of(ordered, plan, kinds, title)
    if compared:
        report.find_saving = functools.partial(_saving, now, planner, time_limit, plan)
    if what_if:
        report.what_if = rows(what_if, plan, ordered, buft, request, options, repacked)
    report._pareto = functools.partial(pareto, graph, target=buft)
    return report


def _saving(request, planner, time_limit, plan):
    """`report.saving` of a request whose table no longer changes; plan: the report's own."""
    best = planner == "best"
    return saving("ggml" if best else planner, lambda name: plan_graph(request, options_for(None, name, time_limit)),
                  plan if best else None)


def report_of(graph, plan, kinds=None, title=""):
    """The MeasureReport of a GraphPlan of `graph`."""
    return MeasureReport.from_plan(plan, graph.node_ids, graph.leaf_ids, _Described(graph), kinds, title)


class _Described:
    """What a report shows of the tensors of a graph, by id; looked up when the first is asked for, also when their
    contexts were freed meanwhile."""

    def __init__(self, graph):
        self.graph = graph
        self.nodes, self.leafs = (graph.nodes, graph.leafs) if graph.visited else visit(graph.outputs)
        ids = graph.node_ids if graph.visited else np.array([t.id for t in self.nodes], np.int64)
        self.functions = TABLE.words[ids, T_PARAMS]             # of OP.UNARY and OP.GLU: which one

    @functools.cached_property
    def tensors(self):
        every = (*self.graph.nodes, *self.graph.leafs)
        return {x.id: x for t in every for x in (t.base, t)}            # bases may lie outside the graph

    @functools.cached_property
    def names(self):
        """{tensor id: name}; a tensor without one is op and number: its place in the depth-first order of the outputs,
        whatever the graph's own order is, so that two plans of one network call it the same."""
        functions = self.functions.astype(np.int32).tolist()
        found = {t.id: printable(t.name) or f"leaf {i}" for i, t in enumerate(self.leafs)}
        return found | {t.id: printable(t.name) or f"{op_name(t, functions[i])} {i}" for i, t in enumerate(self.nodes)}

    def __call__(self, i):
        t = self.tensors[i]
        return {"name": self.names.get(i) or label(t), "op": t.op.name, "type": repr(t.type), "shape": t.shape,
                "nbytes": t.nbytes, "where": source_line(t)}


def graph_labels(graph):
    """{tensor id: name}"""
    return _Described(graph).names


def kernel_work_nbytes(graph, n_threads=1, repacked=()):
    """Scratch memory the CPU kernels of the graph share: the largest of them; nothing is compiled.

    repacked: ids of leaves that will lie in CPU_REPACK, where nothing lies yet.
    """
    return max(works(graph.nodes, n_threads, repacked), default=0)
