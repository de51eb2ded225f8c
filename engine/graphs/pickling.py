"""Graphs as bytes without data: `pickle.dumps(graph)`.

What travels: types, shapes, strides, ops, parameters, sources, views, flags and names, and the order of the nodes.
What does not: memory, placements, plans.  `pickle.loads` makes the tensors anew in a context of their own; leaves have
no data there until they are allocated and set.

    rows    0: (F32, NONE, ne, nb, ndim, params, (), view none, ...)     leaves and bases of views first,
            1: (Q4_0, NONE, ...)                                         then every tensor after its sources
            2: (F32, MUL_MAT, ..., src (1, 0))
"""
import copyreg

from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import FLAG_COMPUTE, OP, T_FLAGS
from ggjit.ops.core.shape import describe
from ggjit.tensors.context import Context

_CALLS_PYTHON = {OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM}
FORMAT = 2


def dump(graph):
    """The arguments of `load` for this graph.  Errors: NotSupported (functions of the user's), StaleHandle."""
    rows, number = [], {}

    def add(t):
        """Number of t's row; what it needs comes before it, without recursion: graphs may be deep."""
        stack = [t]
        while stack:
            x = stack[-1]
            if x.id in number:
                stack.pop()
                continue
            needs = [s for s in (*x.src, x.view_src) if s is not None and s.id not in number]
            if needs:
                stack += needs
                continue
            x._check()
            number[x.id] = len(rows)
            rows.append(_row(x, number))
            stack.pop()
        return number[t.id]
    leafs, nodes = [add(t) for t in graph.leafs], [add(t) for t in graph.nodes]
    return FORMAT, rows, leafs, nodes, [number[t.id] for t in graph.outputs]


def _row(t, number):
    if t.op in _CALLS_PYTHON:
        raise NotSupported(f"{describe(t)} calls a function of yours, which a file cannot hold; pickle a graph without "
                           f"custom ops")
    src = tuple(None if s is None else number[s.id] for s in t.src)
    view = None if t.view_src is None else number[t.view_src.id]
    return (t.type, int(t.op), t.ne, t.nb, t.ndim, tuple(t.op_params.tolist()), src, view, t.view_offs,
            t.flags & ~FLAG_COMPUTE, t.name)


def load(version, rows, leafs, nodes, outputs):
    """The Graph of `dump`'s arguments, in a new Context."""
    if version != FORMAT:
        raise NotSupported(f"a graph pickled in format {version}; this version reads {FORMAT}: pickle it again")
    ctx, tensors = Context(), []
    at = lambda i: None if i is None else tensors[i]                # noqa: E731
    for type, op, ne, nb, ndim, params, src, view, view_offs, flags, name in rows:
        t = ctx._add(type, op, ne, nb, ndim, params, tuple(map(at, src)), at(view), view_offs, name)
        TABLE.words[t.id, T_FLAGS] = flags
        tensors.append(t)
    return Graph._in_order([tensors[i] for i in outputs], [tensors[i] for i in nodes], [tensors[i] for i in leafs])


copyreg.pickle(Graph, lambda graph: (load, dump(graph)))
