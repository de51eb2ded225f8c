"""Graphs as bytes without data: `pickle.dumps(graph)`.

What travels: types, shapes, strides, ops, parameters, sources, views, flags and names, and the order of the nodes.
What does not: memory, placements, plans.  `pickle.loads` makes the tensors again in a context of their own; leaves have
no data there until they are allocated and set.

    rows    0: (F32, NONE, ne, nb, ndim, params, (), view none, ...)     leaves and bases of views first,
            1: (Q4_0, NONE, ...)                                         then every tensor after its sources
            2: (F32, MUL_MAT, ..., src (1, 0))
"""
import copyreg

from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import BadFile, NotSupported
from ggjit.ops.core.record import FLAG_COMPUTE, MAX_PARAMS, OP, T_FLAGS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import ops_with
from ggjit.ops.core.types import Type
from ggjit.tensors.context import Context, check_ne
from ggjit.tensors.rebuild import check_node

FORMAT = 2
MAX_FLAGS = 2 * FLAG_COMPUTE - 1


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
    if t.op in ops_with("calls_python"):
        raise NotSupported(f"{describe(t)} calls a function of yours, which a file cannot hold; pickle a graph without "
                           f"custom ops")
    src = tuple(None if s is None else number[s.id] for s in t.src)
    view = None if t.view_src is None else number[t.view_src.id]
    return (t.type, int(t.op), t.ne, t.nb, t.ndim, tuple(t.op_params.tolist()), src, view, t.view_offs,
            t.flags & ~FLAG_COMPUTE, t.name)


def load(version, rows, leafs, nodes, outputs):
    """The Graph of `dump`'s arguments, in a new Context.

    What comes from a file is not trusted: every row must be what the op's builder makes of its sources.  Errors:
    NotSupported (another format), BadFile (rows that were changed or damaged); nothing is kept then.
    """
    if version != FORMAT:
        raise NotSupported(f"a graph pickled in format {version!r}; this version reads {FORMAT}: pickle it again")
    ctx = Context()
    try:
        tensors = []
        for row in rows:
            tensors.append(tensor_of_row(ctx, tensors, row))
        return Graph._in_order(*_in_order(tensors, leafs, nodes, outputs))
    except Exception as e:
        ctx.free()
        raise BadFile(f"a pickled graph that was changed or damaged: {e}; pickle it again") from e


def _require(ok, what):
    if not ok:
        raise ValueError(what)


def tensor_of_row(ctx, tensors, row):
    """The tensor of one row (`_row`), checked by the builder of its op.  Errors: ValueError, those of the builder."""
    type, op, ne, nb, ndim, params, src, view, view_offs, flags, name = row
    at = [i for i in (*src, view) if i is not None]
    _require(isinstance(type, Type) and isinstance(name, str), "a row without a type or a name")
    numbers = (op, view_offs, flags, ndim, *ne, *nb, *params, *at)
    _require(all(isinstance(i, int) for i in numbers) and len(ne) == len(nb) == 4 and len(params) == MAX_PARAMS
             and 0 <= ndim <= 4 and tuple(ne[ndim:]) == (1,) * (4 - ndim)
             and all(0 <= i < len(tensors) for i in at) and 0 <= flags <= MAX_FLAGS,
             f"row {len(tensors)} {name!r}")
    view = None if view is None else tensors[view]
    _require(view is None or view.view_src is None, f"row {len(tensors)} {name!r} views a view")
    t = ctx._add(type, OP(op), check_ne(type, ne)[0], tuple(nb), ndim, tuple(params),
                 tuple(None if i is None else tensors[i] for i in src), view, view_offs, name)
    TABLE.words[t.id, T_FLAGS] = flags
    scratch = Context()
    try:
        check_node(t, scratch)
    finally:
        scratch.free()
    return t


def _in_order(tensors, leafs, nodes, outputs):
    """(outputs, nodes, leafs) as tensors: each once, and after what it reads."""
    numbers = (*leafs, *nodes, *outputs)
    _require(outputs and all(type(i) is int and 0 <= i < len(tensors) for i in numbers), "the order names no such row")
    _require(len({*leafs, *nodes}) == len(leafs) + len(nodes) and {*leafs, *nodes} >= {*outputs}, "the order repeats")
    outputs, nodes, leafs = ([tensors[i] for i in x] for x in (outputs, nodes, leafs))
    known = {t.id for t in leafs}
    _require(all(t.op == OP.NONE for t in leafs), "a leaf that is computed")
    for t in nodes:
        _require(all(s is None or s.id in known for s in t.src), f"{describe(t)} comes before its sources")
        known.add(t.id)
    return outputs, nodes, leafs


copyreg.pickle(Graph, lambda graph: (load, dump(graph)))
