"""The memory layout of an assigned graph as numbers (GraphLayout); engine/core/compute_buffers.py has the buffers.

Rows of the private table are places: tensor i of the graph is row i, copy c in instance k is row n + c * instances + k.
Leaves without memory get buffers of their own (`prepare.place_leaves`): they keep their values from run to run, and two
graphs on one scheduler may share them.  Everything computed shares the scheduler's buffers, one graph at a time.
"""
import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PlanRequest
from ggjit.alloc.validate import validate_plan
from ggjit.core.buffer import BufferType
from ggjit.core.config import debug
from ggjit.core.slots import checked_int
from ggjit.core.table import TABLE
from ggjit.graphs.placed import PlacedTensor
from ggjit.graphs.requests import options_for, work_nbytes, work_room
from ggjit.ops.core.record import (
    MAX_SRC,
    T_BUFFER,
    T_FLAGS,
    T_OP,
    T_SRC,
    T_VIEW_OFFS,
    T_VIEW_SRC,
    T_WORDS,
)
from ggjit.sched.planner_graph import planner_graph
from ggjit.sched.records import TRANSIENT


class GraphLayout:
    """Places of all rows: `buft_id` (index of the buffer type's first backend, -1: memory of its own), `chunk`, `offs`.

    work: {number of a node: row of its kernel's work memory}, where that lies with the rest.
    """

    def __init__(self, assigned, planner, time_limit, room=None):
        """room: {number of a node: bytes to place for what its kernel works in}"""
        s, n = assigned.support, assigned.n
        copies, n_instances, rows = assigned.copies, s.n_instances, assigned.rows
        first_kept = n + len(copies) * n_instances + 2 * len(assigned.uses)
        kept, work = _kept_rows(assigned), list(room or ())
        first_work = first_kept + len(kept)
        self.n_rows = n_rows = first_work + 2 * len(work)
        table = s.scratch("table", n_rows, T_WORDS)
        order, leafs, counts = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64), np.zeros(2, np.int64)
        planner_graph(assigned.params.words, table, order, leafs, counts)
        order, leafs = _keep_longer(table, order[:counts[0]], kept, first_kept), leafs[:counts[1]]
        marked = np.repeat(copies["src"][assigned.uses["copy"]], 2)
        kept = np.array(kept, np.int64).reshape(-1, 3)
        worked = np.repeat(np.array(work, np.int64), 2)
        source = np.concatenate([np.arange(n), np.repeat(copies["src"], n_instances), marked, kept[:, 2]])
        backend = np.concatenate([rows["backend"], np.repeat(copies["backend"], n_instances),
                                  rows["backend"][marked], rows["backend"][kept[:, 1]], rows["backend"][worked]])
        # source[row]: number of the tensor whose size a row of the table has, since copies have their original's
        buft_ids = np.array(s.buft_ids, np.int64)[backend]
        sizes = self._sizes(assigned, source, buft_ids[:first_work])
        if work:
            order = add_work(table, order, work, first_work)
            sizes = np.append(sizes, np.repeat(list(room.values()), 2))
        bufts = s.own_bufts
        is_output = np.zeros(TABLE.n_rows, bool)
        is_output[assigned.output_ids] = True
        outputs = np.flatnonzero(is_output[assigned.ids])
        request = PlanRequest(table, order, leafs, (sizes[order], sizes[leafs]), outputs,
                              [checked_int(b, "alignment") for b in bufts], [checked_int(b, "max_size") for b in bufts],
                              buft_ids[order], buft_ids[leafs], len(bufts))
        plan = plan_graph(request, options_for(None, planner, time_limit, remember=True))
        if "validate" in debug:
            validate_plan(plan)
        self.buft_id, self.chunk, self.offs = (np.full(n_rows, -1, np.int64) for _ in range(3))
        for rows, side in ((order, "node"), (leafs, "leaf")):
            self.buft_id[rows] = getattr(plan, side + "_buffer")
            self.chunk[rows] = getattr(plan, side + "_chunk")
            self.offs[rows] = getattr(plan, side + "_offs")
        self.order, self.plan, self.sizes = order, plan, sizes
        self.work = dict(zip(work, range(first_work, n_rows, 2), strict=True))
        self.chunk_sizes = [np.asarray(s).tolist() for s in plan.chunk_sizes]

    @classmethod
    def lowest(cls, assigned, planner, time_limit, work):
        """The GraphLayout; work: with the work memory of the kernels, where that takes fewer bytes than a buffer
        beside.
        """
        nbytes = _work_nbytes(assigned) if work else {}
        if not nbytes:
            return cls(assigned, planner, time_limit)
        backend, bufts = assigned.rows["backend"], assigned.support.own_bufts
        room = {i: work_room(n, bufts[backend[i]]) for i, n in nbytes.items()}
        beside, placed = (cls(assigned, planner, time_limit / 2, x) for x in (None, room))
        return placed if placed.plan.peak < beside.plan.peak + max(nbytes.values()) else beside

    @staticmethod
    def _sizes(assigned, source, buft_ids):
        """Bytes per row; buffer types with an opinion of their own are asked."""
        sizes, is_view = assigned.rows["nbytes"][source], assigned.rows["view"][source] >= 0
        for k, buft in enumerate(assigned.support.own_bufts):
            if type(buft).alloc_size is not BufferType.alloc_size and assigned.support.buft_ids[k] == k:
                for row in np.flatnonzero((buft_ids == k) & ~is_view).tolist():
                    sizes[row] = checked_int(buft, "alloc_size", assigned.tensors[source[row]], least=sizes[row])
        return sizes


def _kept_rows(assigned):
    """(row, node it is kept until, tensor it looks like) of what backends asked to be kept longer: the tensor where it
    is computed, and the backend's copy of it.  Leaves and kept copies have memory of their own anyway."""
    found, copies = [], assigned.copies
    for dep in assigned.alloc_deps:
        i, until = assigned.local[dep.tensor_id], assigned.local[dep.until_id]
        if assigned.base_of(i) < assigned.n_nodes:
            found.append((i, until, i))
        if assigned.support.n_instances == 1:
            mine = (copies["src"] == i) & (copies["backend"] == dep.backend) & (copies["kind"] == TRANSIENT)
            found += [(assigned.n + c, until, i) for c in np.flatnonzero(mine).tolist()]
    return found


def _keep_longer(table, order, kept, first):
    """`order` with a marker behind every node that something is kept until: a view without op that has it as source
    (as in engine/sched/planner_graph.py), in the rows of `table` from `first` on."""
    if not kept:
        return order
    at = {row: k for k, row in enumerate(order.tolist())}
    for marker, (row, _, _) in enumerate(kept, first):
        base = row if table[row, T_VIEW_SRC] < 0 else int(table[row, T_VIEW_SRC])
        table[marker] = table[row]
        table[marker, T_SRC:T_SRC + MAX_SRC] = -1
        table[marker, [T_OP, T_FLAGS, T_BUFFER, T_VIEW_SRC, T_SRC]] = 0, 0, -1, base, base
        table[marker, T_SRC + 1] = -1 if row == base else row
        if row == base:
            table[marker, T_VIEW_OFFS] = 0
    return np.insert(order, [at[until] + 1 for _, until, _ in kept], range(first, first + len(kept)))


def _work_nbytes(assigned):
    """{number of a node: bytes that its kernel works in and that may lie with the graph's tensors}"""
    found = {}
    for i, (t, b) in enumerate(zip(assigned.nodes, assigned.rows["backend"].tolist(), strict=False)):
        copies = assigned.rows["copy"][i, :len(t.src)].tolist()
        if max(copies, default=-1) >= 0:            # a copy lies in plain memory, whatever its original lies in
            t = PlacedTensor(t, tuple(s if c < 0 else PlacedTensor(s, (), None)
                                      for s, c in zip(t.src, copies, strict=True)), None)
        found[i] = work_nbytes(assigned.support.backends[b], t)
    return {i: nbytes for i, nbytes in found.items() if nbytes}


def add_work(table, order, nodes, first):
    """`order` with the work memory of each of these nodes before it and, behind it, a view that reads it, so that it
    lives for that node alone; in the rows of `table` from `first` on, in turn."""
    rows = np.arange(first, first + 2 * len(nodes))
    table[rows] = 0
    table[rows, T_SRC:T_SRC + MAX_SRC] = -1
    table[rows, T_BUFFER] = table[rows, T_VIEW_SRC] = -1
    table[rows[1::2], T_VIEW_SRC] = table[rows[1::2], T_SRC] = rows[::2]
    at = {row: k for k, row in enumerate(order.tolist())}
    return np.insert(order, [at[i] + behind for i in nodes for behind in (0, 1)], rows)
