"""A node of a plan: one kernel, which computes one node of the graph or, fused, several."""
import dataclasses
import itertools

import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_PARAMS

N_PARAM_WORDS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class PlanNode:
    """One NODE row: the tensor it computes, or the last of those it computes in one kernel."""
    t: object
    kernel: object                  # a Kernel of ops/core/spec.py, or a device's own with name, work_nbytes and cost
    module: str                     # of the kernel
    reads: tuple                    # tensors of the source views, in order
    params: np.ndarray              # the NODE's parameter words
    nodes: tuple                    # all nodes it computes, in order; the last one is t
    left_out: frozenset = frozenset()       # ids of those that are never stored
    by_row: tuple = ()
    ahead: tuple = ()

    @property
    def stored(self):
        """The tensors it writes to memory."""
        return [t for t in self.nodes if t.id not in self.left_out]

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


def single(t, spec, kernel):
    """The PlanNode of one node."""
    return PlanNode(t, kernel, spec.module, t.src, TABLE.words[t.id, T_PARAMS:T_PARAMS + N_PARAM_WORDS], (t,))
