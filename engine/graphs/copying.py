"""Copies a graph with its values to another backend, and compares the results node by node."""
import dataclasses

from ggjit.core.arguments import expect
from ggjit.core.backend import Backend
from ggjit.core.buffer import BufferType
from ggjit.core.lifetime import call_all
from ggjit.core.slots import as_bool
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import place_of
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import OP, T_BUFFER, T_FLAGS, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.tensors.context import Context, alloc_ctx_tensors
from ggjit.tensors.tensor import Tensor
from ggjit.tensors.transfer import tensor_copy, tensor_memset


@dataclasses.dataclass
class GraphCopy:
    """A graph whose tensors all lie in one backend's memory.  `of` finds the copy of a tensor; `free` ends it.

    copies: {(id, generation) of a tensor of the original: its copy}
    """
    graph: Graph
    buffer: object
    ctx: Context
    copies: dict

    def of(self, t):
        """The copy of the original's tensor `t`.  Errors: ParamError for a tensor that was not copied."""
        expect(t, Tensor, "GraphCopy.of")
        found = self.copies.get((t.id, t.generation))
        if found is None:
            raise ParamError(f"{describe(t)} is not a tensor of the graph that was copied")
        return found

    def free(self):
        """Free the copies and their memory; a second call does nothing."""
        if self.buffer is not None:
            self.buffer.free()
        self.ctx.free()


def graph_copy(backend, graph):
    """Every tensor of `graph` with its values, ops, parameters, names and flags, in `backend`'s memory.

        copy = gg.graph_copy(cpu, graph)
        copy.of(t).numpy()

    Leaves need memory; results with memory of their own are copied, others are zero until they are computed.
    Errors: NotAllocated, OutOfMemory; nothing is kept then.  Source: ggml_backend_graph_copy.
    """
    expect(backend, (Backend, BufferType), "graph_copy")
    for t in expect(graph, Graph, "graph_copy").leafs:
        t._checked_range()
    ctx, copies, buffer = Context(), {}, None
    try:
        for t in _creation_order(graph):
            copies[t.id] = _dup(ctx, t, copies)
        buffer = alloc_ctx_tensors(ctx, backend, all=True)
        for t in ctx.tensors:
            if t.view_src is None and t.op != OP.NONE:
                tensor_memset(t, 0)
        for t in (*graph.leafs, *graph.nodes):
            copy = copies[t.id]
            TABLE.words[copy.id, T_FLAGS] = TABLE.words[t.id, T_FLAGS]
            if t.view_src is None and int(TABLE.words[t.id, T_BUFFER]) >= 0:
                tensor_copy(t, copy)
        new = Graph(*[copies[t.id] for t in graph.outputs])
    except BaseException as e:
        call_all(ctx.free, *([buffer.free] if buffer is not None else []), after=e)
        raise
    originals = _creation_order(graph)
    return GraphCopy(new, buffer, ctx, {(t.id, t.generation): copies[t.id] for t in originals})


def _creation_order(graph):
    """Leaves and nodes so that a view comes after what it views (a leaf may view another leaf)."""
    done, order = set(), []
    for t in (*graph.leafs, *graph.nodes):
        for x in (t.base, t):
            if x.id not in done:
                done.add(x.id)
                order.append(x)
    return order


def _dup(ctx, t, copies):
    src = tuple(None if s is None else copies[s.id] for s in t.src)
    view = None if t.view_src is None else copies[t.view_src.id]
    params = tuple(int(p) for p in t.op_params)
    return ctx._add(t.type, t.op, t.ne, t.nb, t.ndim, params, src, view, t.view_offs, t.name)


def compare_graph_backend(backend1, backend2, graph, callback, test_nodes=None):
    """Run `graph` node by node on two backends; callback(i, t1, t2) -> False ends the comparison there.

        gg.compare_graph_backend(cpu, gg.init_backend("CPU", n_threads=2), graph,
                                 lambda i, t1, t2: (t1.numpy() == t2.numpy()).all())

    t2 is a copy of node i.  t1 is the node itself, as in ggml, where the graph has memory (GraphAllocator) in which
    backend1 computes, else a copy, too; so with test_nodes.
    test_nodes: run both graphs whole and compare only these tensors of `graph`; at least one must be in it.
    Returns True, also where the callback ended it, as ggml does; where ggml returns false (the graph could not be
    copied), the error of graph_copy is raised.  Source: ggml_backend_compare_graph_backend.
    """
    expect(graph, Graph, "compare_graph_backend")
    for backend in (backend1, backend2):
        expect(backend, Backend, "compare_graph_backend")
    if not callable(callback):
        raise TypeMismatch(f"compare_graph_backend: the callback must be callable, got {callback!r}")
    wanted = None if test_nodes is None else {expect(t, Tensor, "test_nodes").id
                                                    for t in expect(test_nodes, (list, tuple, set), "test_nodes")}
    if wanted is not None and not any(t.id in wanted for t in graph.nodes):
        raise ParamError("compare_graph_backend: none of test_nodes is in the graph")
    copies = []
    try:
        itself = wanted is None and _computes_in_place(backend1, graph)
        for backend in (backend2,) if itself else (backend1, backend2):
            copies.append(graph_copy(backend, graph))
        for i, t in enumerate(graph.nodes):
            pair = [t] * itself + [c.of(t) for c in copies]
            if wanted is None and t.op not in VIEW_OPS:
                parts = [single_node(x) for x in pair]          # which keep the plans that know the results
                for backend, part in zip((backend1, backend2), parts, strict=True):
                    part.placement = graph.placement if part.outputs[0] is t else None
                    backend.graph_compute(part)
                    backend.synchronize()
                if _stops(callback(i, *pair)):
                    return True
        if wanted is not None:
            for backend, c in zip((backend1, backend2), copies, strict=True):
                backend.graph_compute(c.graph)
                backend.synchronize()
            for i, t in enumerate(graph.nodes):
                if t.id in wanted and _stops(callback(i, *[c.of(t) for c in copies])):
                    return True
        return True
    finally:
        for c in copies:
            c.free()


def _computes_in_place(backend, graph):
    """Does all of the graph have memory, by a GraphAllocator, and memory that this backend reaches?"""
    if graph.placement is None:
        return False
    places = [place_of(graph.placement, t) for t in (*graph.leafs, *graph.nodes)]
    return all(at is not None and backend.supports_buft(at[0].buft) for at in places)


def _stops(answer):
    """Does the callback's answer end the comparison?  None does not."""
    return answer is not None and not as_bool(answer, "the callback of compare_graph_backend")


def single_node(t):
    """A graph of one node; its sources have memory of their own."""
    return Graph._in_order((t,), [t], list({s.id: s for s in t.src if s is not None}.values()))
