"""A node of a plan: one kernel, which computes one node of the graph or, fused, several."""
import dataclasses
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_NB, T_NE, T_OP, T_PARAMS, T_TYPE
from ggjit.ops.core.spec import all_specs
from ggjit.tensors.rebuild import CALLS_PYTHON

N_PARAM_WORDS = 8
_NOTHING = frozenset()
_SHAPE = (T_TYPE, *range(T_NE, T_NE + 4), *range(T_NB, T_NB + 4))
_NODE = (T_OP, *_SHAPE, *range(T_PARAMS, T_PARAMS + N_PARAM_WORDS))


@dataclasses.dataclass(slots=True, eq=False)
class PlanNode:
    """One NODE row: the tensor it computes, or the last of those it computes in one kernel."""
    t: object
    kernel: object                  # a Kernel of ops/core/spec.py, or a device's own with name, work_nbytes and cost
    module: str                     # of the kernel
    reads: tuple                    # tensors of the source views, in order
    nodes: tuple                    # all nodes it computes, in order; the last one is t
    params: np.ndarray = None       # the NODE's parameter words; None: those of t
    left_out: frozenset = frozenset()       # ids of those that are never stored
    by_row: tuple = ()
    ahead: tuple = ()
    kind: int = -1                  # equal for single nodes that differ in their tensors alone

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
    specs, kernels, out = all_specs(), {}, []
    for t, signature in zip(nodes, signatures(nodes, marked), strict=True):
        found = kernels.get(signature)
        if found is None or t.op in CALLS_PYTHON:               # a function of the user's belongs to one node
            found = kernels[signature] = choose(t), specs[t.op].module, len(kernels)
        kernel, module, kind = found
        out.append(PlanNode(t, kernel, module, t.src, (t,), None, _NOTHING, (), (), kind))
    return out


def signatures(nodes, marked=frozenset()):
    """For each node a bytes object of all that its kernel is chosen by: equal ones get the same kernel.

    Op, type, sizes, strides and parameters of the node; type, sizes and strides of each source, where it begins in what
    it views, and whether that is one of `marked` (ids).
    """
    most = max((len(t.src) for t in nodes), default=0)
    pads = [(None,) * (most - k) for k in range(most + 1)]
    sources = [s for t in nodes for s in (*t.src, *pads[len(t.src)])]
    ids = np.array([-1 if s is None else s.id for s in sources], np.int64)
    facts = TABLE.words[ids[:, None], _SHAPE]
    facts[ids < 0] = -1
    views = np.array([-1 if s is None or s.view_src is None else s.view_offs for s in sources], np.int64)
    marks = np.array([s is not None and s.base.id in marked for s in sources] if marked else [], np.int64)
    columns = TABLE.words[np.array([t.id for t in nodes], np.int64)[:, None], _NODE], facts, views, marks
    table = np.concatenate([c.reshape(len(nodes), c.size // max(len(nodes), 1)) for c in columns], 1)
    return table.view((np.void, 8 * table.shape[1])).reshape(-1).tolist()
