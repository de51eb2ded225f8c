"""Graphs: the nodes that lead to some results, each after its sources.  Graphs are immutable."""
import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from ggjit.alloc.plan_request import PlanRequest
from ggjit.alloc.reorder import reorder
from ggjit.core.arguments import typed_call
from ggjit.core.fixed import Fixed, FixedList, fixed_array
from ggjit.core.html_repr import HtmlRepr, drawing_of
from ggjit.core.other_names import of_a_graph
from ggjit.core.row_sizes import nbytes_of
from ggjit.core.table import TABLE
from ggjit.graphs.placed import PlacedRun
from ggjit.graphs.plan_cache import PlanCache
from ggjit.graphs.together import together
from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import NoSuchAttribute, NoSuchName, ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import FLAG_COMPUTE, T_BUFFER, T_CTX, T_FLAGS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import in_place_table
from ggjit.tensors.tensor import Tensor


class Graph(HtmlRepr):
    """The graph that computes `outputs` (ggml_build_forward_expand on each, in order).

    Its outputs, and tensors that `gg.set_output` marked, keep their memory to the end of a run: they can be read after
    it.  Each graph has outputs of its own.

    `.nodes`: tensors to compute, sources first.  `.leafs`: the other tensors they read.  Both in the order of ggml's
    depth-first visit, which its allocator's offsets depend on.

    order="memory": the nodes in an order that needs less memory (branchy and training graphs; chains stay as they are).
    order="together": products of one column that read the same one next to each other, so that threads do not meet
    between them; such a graph may need a little more memory.

    Both respect every read and write of every storage, so the results are the same bit for bit.
    """
    outputs, nodes, leafs, node_ids, leaf_ids, output_ids = (
        Fixed("a graph never changes: make another, gg.Graph(*tensors)") for _ in range(6))
    # the planner that GraphAllocator must use, where the graph was made for its offsets
    planner = None
    search = {}                         # and how it searches: capacity, node_limit of PlanOptions  # noqa: RUF012
    visited = False                     # nodes and leafs as `visit` finds them from the outputs?
    placed = False                      # True for what a scheduler hands to a backend (engine/graphs/placed.py)
    is_read = True                      # False for parts of another graph: their nodes' results are not read

    @typed_call
    def __init__(self, *outputs, order="graph"):
        if order not in ("graph", "memory", "together"):
            raise ParamError(f"order {order!r}: expected 'graph', 'memory' or 'together'")
        with oom_guard("Graph"):
            self._make(outputs, order)

    def _make(self, outputs, order):
        if not outputs:
            raise ParamError("Graph needs at least one tensor to compute")
        for y in outputs:
            if not isinstance(y, Tensor):
                several = "; of a list, write *list" if isinstance(y, list | tuple) else \
                    "; m.graph(32) is the graph of a text of 32 tokens" if hasattr(y, "as_graph") else ""
                raise TypeMismatch(f"Graph takes tensors, got {type(y).__name__}{several}")
            y._check()
        self._set_up(outputs, *visit(outputs), order)
        self.visited = order == "graph"

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError with a hint; called for names that a graph lacks."""
            raise NoSuchAttribute(f"a Graph has no attribute {name!r}{of_a_graph(name)}", name=name, obj=self)

    def __iter__(self):
        return iter(self.nodes)

    def __getitem__(self, index):
        """A node by its place in the order, a slice of nodes, or the first node or leaf of a name.

        Errors: NoSuchName; IndexError.
        """
        if not isinstance(index, str):
            return self.nodes[index]
        for t in (*self.nodes, *self.leafs):
            if t.name == index:
                return t
        raise NoSuchName(f"the graph has no node or leaf of the name {index!r}; it has "
                         f"{', '.join(t.name for t in (*self.nodes, *self.leafs) if t.name) or 'none with a name'}")

    @classmethod
    def _in_order(cls, outputs, nodes, leafs):
        """A graph whose order is known (engine/graphs/pickling.py)."""
        graph = cls.__new__(cls)
        graph._set_up(tuple(outputs), nodes, leafs)
        return graph

    def in_order(self, node_ids):
        """A graph of the same tensors, its nodes in another order, in which sources still come first."""
        by_id = {t.id: t for t in self.nodes}
        graph = Graph._in_order(self.outputs, [by_id[i] for i in node_ids.tolist()], self.leafs)
        graph.__dict__["output_ids"] = self.output_ids
        return graph

    def _set_up(self, outputs, nodes, leafs, order="graph"):
        self._keep(outputs)
        if order != "graph":
            nodes = together(nodes) if order == "together" else _in_memory_order(nodes, leafs, self.output_ids)
        self.outputs, self.nodes, self.leafs = tuple(outputs), FixedList(nodes), FixedList(leafs)
        self.node_ids, self.leaf_ids = (fixed_array(_ids(tensors)) for tensors in (nodes, leafs))
        TABLE.words[self.node_ids, T_FLAGS] |= FLAG_COMPUTE
        self.placement = None           # where computed tensors lie: set by GraphAllocator.alloc_graph
        self.plans = PlanCache()        # by backend, for Backend.graph_compute
        # strong references: the tensors, and through them their contexts
        self._contexts = {tensors[i].ctx for tensors, ids in ((self.nodes, self.node_ids), (self.leafs, self.leaf_ids))
                          for i in np.unique(TABLE.words[ids, T_CTX], return_index=True)[1].tolist()}

    def _keep(self, tensors):
        """Keep the tensors' values to the end of a run; of views, the memory of their bases is kept."""
        ids = {x.id for t in tensors for x in (t, t.base)}
        self.__dict__["output_ids"] = fixed_array(np.array(sorted(ids), np.int64))

    def check_alive(self):
        """StaleHandle, if a context of its tensors was freed."""
        for ctx in self._contexts:
            ctx._check()

    def _given_to(self, backend, placement=None):
        """The PlacedRun by which a backend that looks for places at the tensors runs this graph."""
        placement = placement or self.placement
        run = self.plans.get(backend, lambda run: placement, lambda: PlacedRun(backend, self, placement))
        run.bind()
        return run

    @functools.cached_property
    def key(self):
        """Topology key: ops, types, shapes, strides, views, parameters, flags and source identities of all tensors."""
        h = hashlib.blake2b(digest_size=16)
        h.update(b"|".join(ids.tobytes() for ids in (self.node_ids, self.leaf_ids, self.output_ids)))
        for ids in (self.node_ids, self.leaf_ids):
            h.update(TABLE.words[ids, :T_BUFFER].tobytes())
        return h.hexdigest()

    def __len__(self):
        return len(self.nodes)

    def __repr__(self):
        return f"<Graph {len(self.nodes)} nodes, {len(self.leafs)} leafs -> {', '.join(map(describe, self.outputs))}>"

    def draw(self, file=None, expand=None, views=False, profile=None, sched=None, engine="auto"):
        """A picture of the graph (engine/display/drawing.py): `.svg`, `.dot`, HTML; written to `file` if given.

        expand: True, False, or names of layers to unfold; views: draw reshape, view, permute and transpose too;
        profile: times and bytes of a `gg.profile()` (default: the last that saw this graph); sched: a Scheduler whose
        assignment gives the colours; engine: "auto" (graphviz where installed) or "own".
        """
        return drawing_of(self, file=file, expand=expand, views=views, profile=profile, sched=sched, engine=engine)

    def dot(self, expand=None, views=False):
        """The picture in graphviz's language."""
        return self.draw(expand=expand, views=views).dot


def _ids(tensors):
    return np.array([t.id for t in tensors], np.int64)


def _in_memory_order(nodes, leafs, output_ids):
    """The nodes in an order that needs less memory."""
    node_ids, leaf_ids = _ids(nodes), _ids(leafs)
    request = PlanRequest(TABLE.words, node_ids, leaf_ids, [nbytes_of(node_ids), nbytes_of(leaf_ids)], output_ids)
    by_id = {t.id: t for t in nodes}
    return [by_id[i] for i in reorder(request, in_place=in_place_table()).tolist()]
