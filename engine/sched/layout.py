"""Memory for a cut graph: who lies where, as numbers (Layout); the buffers behind it are
engine/core/compute_buffers.py.

Rows of the private table are places: tensor i of the graph is row i, copy c in instance k is row m + c * instances + k.
Leaves without memory get buffers of their own (`place_leaves`): they keep their values from run to run, and two graphs
on one scheduler may share them.  Everything computed shares the scheduler's buffers, one graph at a time.
"""
import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.validate import validate_plan
from ggjit.core.buffer import BufferType
from ggjit.core.config import debug
from ggjit.core.placing import place_tensors
from ggjit.core.slots import checked_int
from ggjit.core.table import TABLE
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import T_BUFFER, T_WORDS
from ggjit.ops.core.spec import in_place_table
from ggjit.sched.columns import BACKEND, NBYTES, VIEW
from ggjit.sched.split import K_BACKEND, K_SRC, U_COPY, planner_graph

_placing = ForkLock()             # two schedulers may find the same leaf without memory


class Layout:
    """Places of all rows: `slot` (index of the buffer type's first backend, -1: memory of its own), `chunk`, `offs`."""

    def __init__(self, cut, n_instances, planner):
        w = cut.world
        n_copies, n_uses = len(cut.copies), len(cut.uses)
        self.n_rows = n_rows = cut.m + n_copies * n_instances + 2 * n_uses
        table = w.scratch("table", n_rows, T_WORDS)
        order, leafs, counts = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64), np.zeros(2, np.int64)
        homes = np.array(w.slots, np.int64)
        planner_graph(TABLE.words, cut.ws, cut.m, cut.n_nodes, homes, cut.split_rows, cut.n_splits, cut.copies,
                      n_copies, cut.uses, n_uses, n_instances, table, order, leafs, counts)
        order, leafs = order[:counts[0]], leafs[:counts[1]]
        marked = np.repeat(cut.copies[cut.uses[:, U_COPY], K_SRC], 2)
        source = np.concatenate([np.arange(cut.m), np.repeat(cut.copies[:, K_SRC], n_instances), marked])
        backend = np.concatenate([cut.col(BACKEND), np.repeat(cut.copies[:, K_BACKEND], n_instances),
                                  cut.col(BACKEND)[marked]])                  # source: row -> tensor it looks like
        slots = homes[backend]
        sizes = self._sizes(cut, source, slots)
        bufts = w.own_bufts
        plan = plan_graph(table, order, leafs, (sizes[order], sizes[leafs]),
                          alignment=[checked_int(b, "alignment") for b in bufts],
                          max_size=[checked_int(b, "max_size") for b in bufts],
                          node_buffers=slots[order], leaf_buffers=slots[leafs], n_buffers=len(bufts), planner=planner,
                          in_place=in_place_table())
        if "validate" in debug:
            validate_plan(plan)
        self.slot, self.chunk, self.offs = (np.full(n_rows, -1, np.int64) for _ in range(3))
        for rows, side in ((order, "node"), (leafs, "leaf")):
            self.slot[rows] = getattr(plan, side + "_buffer")
            self.chunk[rows] = getattr(plan, side + "_chunk")
            self.offs[rows] = getattr(plan, side + "_offs")
        self.order, self.plan, self.sizes = order, plan, sizes
        self.chunk_sizes = [np.asarray(s).tolist() for s in plan.chunk_sizes]

    @staticmethod
    def _sizes(cut, source, slots):
        """Bytes per row; buffer types with an opinion of their own are asked."""
        sizes = cut.col(NBYTES)[source]
        for k, buft in enumerate(cut.world.own_bufts):
            if type(buft).alloc_size is not BufferType.alloc_size and cut.world.slots[k] == k:
                for row in np.flatnonzero((slots == k) & (cut.col(VIEW)[source] < 0)).tolist():
                    sizes[row] = checked_int(buft, "alloc_size", cut.tensors[source[row]], least=sizes[row])
        return sizes


def place_leaves(cut):
    """Give every leaf without memory a place on its backend, in one buffer per buffer type.

    Returns [(buffer, its tensors)], or None if tensors were placed or moved since the cut was made: it counted on
    other places.  Errors leave nothing behind.
    """
    with _placing:
        if cut.placed() != cut.found:
            return None
        wanted, n = {}, cut.n_nodes
        missing = (cut.col(VIEW)[n:] < 0) & (TABLE.words[cut.ids[n:], T_BUFFER] < 0)
        for i in (n + np.flatnonzero(missing)).tolist():
            wanted.setdefault(cut.world.slots[int(cut.col(BACKEND)[i])], []).append(i)
        made = place_tensors([(cut.world.own_bufts[slot], [cut.tensors[i] for i in members])
                              for slot, members in wanted.items()])
        for slot, members in wanted.items():
            for i in members:
                cut.place_leaf(i, cut.world.buft_index(cut.world.own_bufts[slot]))
        return made
