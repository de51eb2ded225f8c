"""Backends may put the nodes of their splits into a better order before memory is planned (ggml's graph_optimize), and
ask for tensors to be kept longer than the order says: kernels that compute several nodes at once, or out of order, read
and write earlier or later than the nodes they stand for.

The order is checked, not trusted: sources come first, and everything that touches a tensor which is written in place
keeps its order.  The user's graph stays as it is; only the scheduler's own list of nodes changes.
"""
import dataclasses

import numpy as np

from ggjit.core.backend import Backend
from ggjit.core.versions import written
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import VIEW_OPS


class Reordered:
    """Nodes and leafs in an order of the scheduler's: what an Assignment reads of a Graph."""

    def __init__(self, nodes, leafs, output_ids):
        self.nodes, self.leafs, self.output_ids = nodes, leafs, output_ids
        self.node_ids = np.array([t.id for t in nodes], np.int64)
        self.leaf_ids = np.array([t.id for t in leafs], np.int64)


@dataclasses.dataclass(frozen=True)
class AllocDep:
    """A request of the backend with this number: a tensor's memory is kept until a node has run."""
    backend: int
    tensor_id: int
    until_id: int


class SplitNodes(list):
    """What `graph_optimize` gets: the nodes of a split, as a list, and `add_alloc_dep`."""

    def __init__(self, backend, nodes):
        super().__init__(nodes)
        self._backend, self._nodes, self.deps = backend, tuple(nodes), []

    def add_alloc_dep(self, tensor, until):
        """Keep the memory of `tensor`, a node of the split or a source of one, until the node `until` has run: nothing
        else gets its place before.  On other backends' results it keeps this backend's copy.

        Errors: GgjitError for tensors that are not in the split.
        """
        known = {id(x) for t in self._nodes for x in (t, *t.src)} - {id(None)}
        if id(tensor) not in known or not any(t is until for t in self._nodes):
            raise GgjitError(f"{self._backend!r}: add_alloc_dep takes a tensor and a node of the split, got {tensor!r} "
                             f"and {until!r}")
        self.deps.append((tensor, until))


def reordered(assigned, leafs):
    """(the graph in the order its backends want, None where none wants another; their AllocDeps).  Errors: GgjitError.
    """
    if all(type(b).graph_optimize is Backend.graph_optimize for b in assigned.support.backends):
        return None, ()
    nodes, deps = [], []
    for s, b in zip(assigned.splits, assigned.split_rows["backend"].tolist(), strict=True):
        given = SplitNodes(s.backend, s.nodes)
        wanted = s.backend.graph_optimize(given)
        if not isinstance(wanted, list | tuple):
            raise GgjitError(f"{s.backend!r}: graph_optimize must return a list of nodes, got {wanted!r}")
        if [id(t) for t in wanted] != [id(t) for t in s.nodes]:
            _check(s.backend, s.nodes, wanted)
        at = {id(t): i for i, t in enumerate(wanted)}
        for t, until in given.deps:
            if at.get(id(t), -1) > at[id(until)]:
                raise GgjitError(f"{s.backend!r}: add_alloc_dep keeps {t!r} until {until!r}, which runs before it")
            deps.append(AllocDep(b, t.id, until.id))
        nodes += wanted
    same = all(a is b for a, b in zip(nodes, assigned.nodes, strict=True))
    return None if same else Reordered(nodes, leafs, assigned.output_ids), tuple(deps)


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
