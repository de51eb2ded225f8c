"""Memory for a cut graph: who lies where, as numbers (Layout), and the buffers behind it (Memory).

Rows of the private table are places: tensor i of the graph is row i, copy c in instance k is row m + c * instances + k.
Leaves without memory get buffers of their own (`place_leaves`): they keep their values from run to run, and two graphs
on one scheduler may share them.  Everything computed shares the scheduler's buffers, one graph at a time.
"""
import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.answers import allocate, number
from ggjit.buffer import USAGE_COMPUTE, BufferType
from ggjit.config import debug
from ggjit.ops.locks import ForkLock
from ggjit.ops.record import T_BUFFER, T_WORDS
from ggjit.ops.spec import in_place_table
from ggjit.placing import finish, place_tensors
from ggjit.sched_split import K_BACKEND, K_SRC, U_COPY, planner_graph
from ggjit.sched_work import BACKEND, NBYTES, VIEW
from ggjit.table import TABLE

_placing = ForkLock()             # two schedulers may find the same leaf without memory


class Layout:
    """Places of all rows: `slot` (index of the buffer type's first backend, -1: memory of its own), `chunk`, `offs`."""

    def __init__(self, cut, n_instances, planner):
        w = cut.world
        n_copies, n_uses = len(cut.copies), len(cut.uses)
        self.n_rows = n_rows = cut.m + n_copies * n_instances + 2 * n_uses
        table = w.scratch("table", n_rows, T_WORDS)
        order, leafs, counts = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64), np.zeros(2, np.int64)
        planner_graph(TABLE.words, cut.ws, cut.m, cut.n_nodes, cut.split_rows, cut.n_splits, cut.copies, n_copies,
                      cut.uses, n_uses, n_instances, table, order, leafs, counts)
        order, leafs = order[:counts[0]], leafs[:counts[1]]
        marked = np.repeat(cut.copies[cut.uses[:, U_COPY], K_SRC], 2)
        source = np.concatenate([np.arange(cut.m), np.repeat(cut.copies[:, K_SRC], n_instances), marked])
        backend = np.concatenate([cut.col(BACKEND), np.repeat(cut.copies[:, K_BACKEND], n_instances),
                                  cut.col(BACKEND)[marked]])                  # source: row -> tensor it looks like
        slots = np.array(w.slots)[backend]
        sizes = self._sizes(cut, source, slots)
        bufts = w.own_bufts
        plan = plan_graph(table, order, leafs, (sizes[order], sizes[leafs]),
                          alignment=[number(b, "alignment") for b in bufts],
                          max_size=[number(b, "max_size") for b in bufts],
                          node_buffers=slots[order], leaf_buffers=slots[leafs], n_buffers=len(bufts), planner=planner,
                          in_place=in_place_table())
        if "validate" in debug:
            from ggjit.alloc.validate import validate_plan
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
                    sizes[row] = number(buft, "alloc_size", cut.tensors[source[row]], least=sizes[row])
        return sizes


class Memory:
    """The compute buffers of a scheduler, per slot and chunk.  Growing replaces buffers and raises `version`."""

    def __init__(self, bufts):
        self.bufts = bufts
        self.chunks = [[] for _ in bufts]
        self.version = 0
        self.used_by = None             # the Run that computed here last

    def grow(self, chunk_sizes, before_moving=lambda: None):
        """Make every chunk large enough.  Errors: whatever a buffer type raises; the old buffers stay then."""
        # empty tensors have a place as well: in a chunk of one byte, since not every device makes buffers of none
        todo = [(b, c, max(size, 1)) for b, sizes in enumerate(chunk_sizes) for c, size in enumerate(sizes)
                if c >= len(self.chunks[b]) or self.chunks[b][c] is None or self.chunks[b][c].size < size
                or not self.chunks[b][c].alive]
        if not todo:
            return
        before_moving()
        new = []
        try:
            for b, _, size in todo:
                new.append(allocate(self.bufts[b], size))
                new[-1].set_usage(USAGE_COMPUTE)
        except BaseException as e:
            finish(*(buf.free for buf in new), after=e)
            raise
        old = []
        for (b, c, _), buf in zip(todo, new, strict=True):
            self.chunks[b] += [None] * (c + 1 - len(self.chunks[b]))
            if self.chunks[b][c] is not None:
                old.append(self.chunks[b][c])
            self.chunks[b][c] = buf
        self.used_by = None                 # results of earlier graphs went with the old chunks
        self.version += 1
        finish(*(buf.free for buf in old))

    def size(self, slot):
        return sum(buf.size for buf in self.chunks[slot] if buf is not None)

    def free(self):
        buffers = [buf for chunks in self.chunks for buf in chunks if buf is not None]
        for chunks in self.chunks:
            chunks.clear()
        self.used_by = None
        self.version += 1
        finish(*(buf.free for buf in buffers))


def place_leaves(cut):
    """Give every leaf without memory a place on its backend, in one buffer per buffer type.

    Returns [(buffer, its tensors)].  Errors leave nothing behind.
    """
    def missing():
        return [i for i in range(cut.n_nodes, cut.m)
                if cut.col(VIEW)[i] < 0 and TABLE.words[cut.ids[i], T_BUFFER] < 0]
    if not missing():
        return []
    with _placing:
        wanted = {}
        for i in missing():
            wanted.setdefault(cut.world.slots[int(cut.col(BACKEND)[i])], []).append(i)
        made = place_tensors([(cut.world.own_bufts[slot], [cut.tensors[i] for i in members])
                              for slot, members in wanted.items()])
        for slot, members in wanted.items():
            for i in members:
                cut.place_leaf(i, cut.world.buft_index(cut.world.own_bufts[slot]))
        return made
