"""A node of a plan: one kernel, which computes one node of the graph or, fused, several."""
import collections
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_NB, T_NE, T_OP, T_PARAMS, T_SRC, T_TYPE, T_VIEW_OFFS, T_VIEW_SRC
from ggjit.ops.core.spec import all_specs, ops_with

N_PARAM_WORDS = 8
_NOTHING = frozenset()
_SHAPE = (T_TYPE, *range(T_NE, T_NE + 4), *range(T_NB, T_NB + 4))
_NODE = (T_OP, *_SHAPE, *range(T_PARAMS, T_PARAMS + N_PARAM_WORDS))


_Fields = collections.namedtuple(
    "_Fields", "t kernel module reads nodes params left_out by_row ahead kind",
    defaults=(None, _NOTHING, (), (), -1))


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
    kind     equal for single nodes that differ in their tensors alone
    """
    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def stored(self):
        """The tensors it writes to memory."""
        return [t for t in self.nodes if t.id not in self.left_out] if self.left_out else self.nodes

    def permitted(self, where):
        """Does the memory allow it?  where(t) -> (buffer, offset)."""
        spans = [(t, *where(t)) for t in self.stored]
        if any(_overlap(p, q) for p, q in itertools.combinations(spans, 2)):
            return False
        free = {t.id for t in (*self.nodes, *self.ahead)}
        sources = [(t, *where(t)) for t in self.reads if t.id not in free]
        by_row = {t.id for t in self.by_row}
        return not any(_overlap(w, s) and not (s[0].id in by_row and _same_place(w, s)) for w in spans for s in sources)


def _overlap(p, q):
    (t, buf, lo), (u, other, start) = p, q
    return buf is other and lo < start + u.nbytes and start < lo + t.nbytes


def _same_place(p, q):
    (t, buf, lo), (u, other, start) = p, q
    return buf is other and lo == start and t.nb == u.nb and t.ne == u.ne


def plan_nodes(nodes, choose, marked=frozenset()):
    """The PlanNode of each node.  choose(t) -> its kernel: asked once for all nodes of a signature, layers repeat."""
    specs, of_users, kernels, out, make = all_specs(), ops_with("calls_python"), {}, [], tuple.__new__
    for t, signature in zip(nodes, signatures(nodes, marked), strict=True):
        found = kernels.get(signature)
        # a node that calls a user's function gets a kernel of its own
        if found is None or t.op in of_users:
            found = kernels[signature] = choose(t), specs[t.op].module, len(kernels)
        kernel, module, kind = found
        out.append(make(PlanNode, (t, kernel, module, t.src, (t,), None, _NOTHING, (), (), kind)))
    return out


def signatures(nodes, marked=frozenset()):
    """For each node a bytes object of all that its kernel is chosen by: equal ones get the same kernel.

    Op, type, sizes, strides and parameters of the node; type, sizes and strides of each source, where it begins in what
    it views, and whether that is one of `marked` (ids).
    """
    rows = TABLE.words[np.array([t.id for t in nodes], np.int64)]
    sources = rows[:, T_SRC:T_SRC + max((len(t.src) for t in nodes), default=0)]
    facts = TABLE.words[sources[..., None], (*_SHAPE, T_VIEW_SRC, T_VIEW_OFFS)]
    view_src, view_offs = facts[..., -2], facts[..., -1]
    view_offs[view_src < 0] = -1
    view_src[...] = np.isin(np.where(view_src < 0, sources, view_src), list(marked)) if marked else 0
    facts[sources < 0] = -1
    table = np.concatenate([rows[:, _NODE], facts.reshape(len(nodes), facts.shape[1] * facts.shape[2])], 1)
    return table.view((np.void, 8 * table.shape[1])).reshape(-1).tolist()
