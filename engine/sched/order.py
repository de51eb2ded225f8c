"""Backends may put the nodes of their splits into a better order before memory is planned (ggml's graph_optimize).

The order is checked, not trusted: sources come first, and everything that touches a tensor which is written in place
keeps its order.  The user's graph stays as it is; only the scheduler's own list of nodes changes.
"""
import numpy as np

from ggjit.core.backend import Backend
from ggjit.core.versions import written
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import VIEW_OPS


class Reordered:
    """Nodes and leafs in an order of the scheduler's: what an Assignment reads of a Graph."""

    def __init__(self, nodes, leafs):
        self.nodes, self.leafs = nodes, leafs
        self.node_ids = np.array([t.id for t in nodes], np.int64)
        self.leaf_ids = np.array([t.id for t in leafs], np.int64)


def reordered(assigned, leafs):
    """The graph in the order its backends want, or None where none wants another.  Errors: GgjitError."""
    if all(type(b).graph_optimize is Backend.graph_optimize for b in assigned.support.backends):
        return None
    nodes = []
    for s in assigned.splits:
        wanted = s.backend.graph_optimize(list(s.nodes))
        if not isinstance(wanted, list | tuple):
            raise GgjitError(f"{s.backend!r}: graph_optimize must return a list of nodes, got {wanted!r}")
        if [id(t) for t in wanted] != [id(t) for t in s.nodes]:
            _check(s.backend, s.nodes, wanted)
        nodes += wanted
    return None if all(a is b for a, b in zip(nodes, assigned.nodes, strict=True)) else Reordered(nodes, leafs)


def _check(backend, old, new):
    if sorted(map(id, old)) != sorted(map(id, new)):
        raise GgjitError(f"{backend!r}: graph_optimize must return the nodes it was given, each once")
    at = {id(t): i for i, t in enumerate(new)}
    for i, t in enumerate(new):
        for s in (*t.src, t.view_src):
            if s is not None and s is not t and at.get(id(s), -1) > i:
                raise GgjitError(f"{backend!r}: graph_optimize put {t!r} before its source {s!r}")
    bases = {t.view_src.id for t in old if t.view_src is not None and t.op not in VIEW_OPS}
    bases |= {x.id for t in old for x in written(t)[1:]}
    for base in bases:
        touching = [[t for t in nodes if any(x is not None and x.base.id == base for x in (t, *t.src))]
                    for nodes in (old, new)]
        if any(a is not b for a, b in zip(*touching, strict=True)):
            raise GgjitError(f"{backend!r}: graph_optimize changed the order of nodes around {touching[0][0].base!r}, "
                             f"which is written in place")
