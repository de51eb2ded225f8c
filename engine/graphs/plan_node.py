"""A node of a plan: one kernel, which computes one node of the graph or, fused, several."""
import collections
import functools
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.node_kinds import kinds_of
from ggjit.ops.core.record import T_NE, T_OP, VIEW_OPS
from ggjit.ops.core.spec import all_specs, ops_with

_NOTHING = frozenset()
_COMPUTES = np.array([op not in VIEW_OPS for op in range(256)])         # by op


_Fields = collections.namedtuple(
    "_Fields", "t kernel module reads nodes params left_out by_row ahead kind numbers",
    defaults=(None, _NOTHING, (), (), -1, None))


class PlanNode(_Fields):
    """One NODE row: the tensor it computes, or the last of those it computes in one kernel.

    t        tensor
    kernel   a Kernel of ops/core/spec.py, or a device's own with name, work_nbytes and cost
    module   of the kernel
    reads    tensors of the source views, in order
    nodes    all nodes it computes, in order; the last one is t
    params   the NODE's parameter words; None: those of t
    left_out ids of those that are never stored
    by_row, ahead   sources that are read as fusion_pattern.py says
    kind     a number, equal for those that differ in their tensors alone
    numbers  of the reads among the plan's tensors, None: not looked up
    """
    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def stored(self):
        """The tensors it writes to memory."""
        return [t for t in self.nodes if t.id not in self.left_out] if self.left_out else self.nodes

    def apart(self):
        """[(result, other tensor, unless)] that may not overlap; unless: they may where they begin at the same byte."""
        stored, found = self.stored, []
        for k, t in enumerate(stored):
            found += [(t, other, False) for other in stored[k + 1:]]
            free = {x.id for x in (*self.nodes, *self.ahead)}
            found += [(t, s, t.nb == s.nb and t.ne == s.ne and any(s.id == x.id for x in self.by_row))
                      for s in self.reads if s.id not in free]
        return found

    def permitted(self, where):
        """Does the memory allow it?  where(t) -> (buffer, offset)."""
        for t, s, unless in self.apart():
            (buf, lo), (other, start) = where(t), where(s)
            if buf is other and lo < start + s.nbytes and start < lo + t.nbytes and not (unless and lo == start):
                return False
        return True


def nodes_to_compute(nodes):
    """(those that have elements and are no views, their rows of the table)"""
    ids = np.array([t.id for t in nodes], np.int64)
    rows = TABLE.words[ids]
    chosen = _COMPUTES[rows[:, T_OP]] & (rows[:, T_NE:T_NE + 4] > 0).all(1)
    return list(itertools.compress(nodes, chosen.tolist())), ids[chosen]


@functools.cache
def _calls_python():
    """[op]: does it call a function of the user's?"""
    return np.isin(np.arange(256), list(ops_with("calls_python")))


def plan_nodes(nodes, ids, choose, marked=frozenset()):
    """The PlanNode of each node.  ids: their rows.  choose(t) -> its kernel: asked once for all nodes of a kind, layers
    repeat."""
    kinds = kinds_of(ids, marked)
    own = np.flatnonzero(_calls_python()[TABLE.words[ids, T_OP]])      # a user's function gets a kernel for each node
    kinds[own] = len(kinds) + np.arange(len(own))
    kinds, specs = kinds.tolist(), all_specs()
    first = dict(zip(reversed(kinds), reversed(nodes), strict=True))
    chosen = {kind: choose(first[kind]) for kind in sorted(first)}
    kernels = map(chosen.__getitem__, kinds)
    modules = map({kind: specs[t.op].module for kind, t in first.items()}.__getitem__, kinds)
    make, same = functools.partial(tuple.__new__, PlanNode), itertools.repeat
    return list(map(make, zip(nodes, kernels, modules, [t.src for t in nodes], zip(nodes, strict=True), same(None),
                              same(_NOTHING), same(()), same(()), kinds, same(None), strict=False)))
