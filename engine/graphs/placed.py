"""Placed tensors: the view of a graph's tensors that a backend gets.

The user's tensors and graph are never edited.  A scheduler gives every backend its own view of its nodes instead, and a
backend that runs a graph without a scheduler gets it likewise (`PlacedRun`):

    the user's node        y = add(a, b)         a lies on the GPU, b on the CPU, y runs on the CPU
    the CPU's view of it   y' = add(a', b)       a' the CPU's copy of a; each of y', a', b knows (buffer, offset)

A PlacedTensor has the id, op, shape and parameters of the original, its own sources and its own place.  Backends
use it like any tensor: `t.buffer`, `t.offs`, `t.src`.
"""
import numpy as np

from ggjit.core.buffer import buffer_by_id, freed
from ggjit.core.table import FREED, TABLE
from ggjit.core.versions import VERSIONS, written
from ggjit.graphs.plan_cache import PlanCache
from ggjit.graphs.results import SharedResults, mark_last
from ggjit.ops.core.errors import NotAllocated, NotSupported, ParamError
from ggjit.ops.core.record import T_BUFFER, T_OFFS, T_WORDS, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import ops_with
from ggjit.tensors.tensor import Tensor


class PlacedTensor(Tensor):
    """`t` at (buffer, byte offset) with sources of its own.  Writing it leaves the original's data version alone."""

    __slots__ = ("_fixed_place",)
    __setattr__, __delattr__ = object.__setattr__, object.__delattr__       # the scheduler's own, made by thousands

    def __init__(self, t, src, at, name=None):
        super().__init__(t.id, t.generation, t.ctx, t.op, t.layout, src, t.view_src, t.view_offs,
                         t.name if name is None else name)
        self._fixed_place = at
        self._hold("original", t)  # `original` holds the only reference to the tensor whose table row this uses

    def _where(self):
        return self._fixed_place

    def _count_write(self):
        """The scheduler keeps the versions of what it computes and copies."""


class PlacedGraph:
    """Nodes for one backend, with the attributes of a Graph that backends read.

    device: the device whose memory was chosen; placed: its tensors are not the user's handles; is_read: nor are results
    asked of them.
    """
    placed, is_read, output_ids = True, False, ()

    def __init__(self, device, nodes, key, placement=None, outputs=None):
        """placement: where the work memory of its kernels lies, if not beside the tensors (Placement.work)."""
        self.device, self.nodes, self.key, self.placement = device, nodes, key, placement
        seen = {id(t) for t in nodes}
        self.leafs = []
        for t in nodes:
            for s in t.src:
                if s is not None and id(s) not in seen:
                    seen.add(id(s))
                    self.leafs.append(s)
        self.outputs = tuple(nodes[-1:] if outputs is None else outputs)
        self.plans = PlanCache()

    def __len__(self):
        return len(self.nodes)

    def __repr__(self):
        return f"<PlacedGraph of {len(self.nodes)} nodes on {self.device.name}>"


class PlacedRun(SharedResults):
    """The user's graph as a backend gets it that looks for places at the tensors, and what its runs left.

    graph: a PlacedGraph of it; its tensors stay the same and know the places of the coming run (`bind`).
    """

    def __init__(self, backend, graph, placement):
        super().__init__({} if placement is None else placement.where)
        self._set_spans(graph.nodes)
        self.backend, self._placement, self._users = backend, placement, (*graph.leafs, *graph.nodes)
        self._nodes, self.failed, self._version = graph.nodes, False, None
        placed = {}
        for t in graph.leafs:
            placed[t.id] = PlacedTensor(t, (), None)
        for t in graph.nodes:
            placed[t.id] = PlacedTensor(t, tuple(None if s is None else placed[s.id] for s in t.src), None)
        self._tensors = list(placed.values())
        self.graph = PlacedGraph(backend.device, [placed[t.id] for t in graph.nodes], graph.key,
                                 outputs=[placed[t.id] for t in graph.outputs])
        leaves = {x.id for t in graph.nodes if t.op not in VIEW_OPS for x in written(t)}
        self._written_ids = np.array([i for i in leaves if TABLE.words[i, T_BUFFER] >= 0], np.int64)

    def bind(self):
        """Look up the places if something moved.  Errors: NotAllocated, NotSupported, ParamError, StaleHandle."""
        if self._version == TABLE.placement_version:
            return
        version, where = TABLE.placement_version, {}
        for t in self._users:
            t._check()
            found = place_of(self._placement, t)
            if found is None:
                raise NotAllocated(f"{describe(t)} has no memory; allocate leaves with alloc_ctx_tensors and the graph "
                                   f"with GraphAllocator(...).alloc_graph(graph)")
            if not found[0].alive:
                raise freed(t)
            if not self.backend.supports_buft(found[0].buft):
                raise NotSupported(f"{describe(t)} lies in {found[0]!r}, which {self.backend.name} cannot reach; use a "
                                   f"Scheduler")
            where[t.id] = found
        check_writable([t for t in self._nodes if t.op not in VIEW_OPS], lambda t: where.get(t.id) or
                       place_of(self._placement, t))
        for x in self._tensors:
            x._fixed_place = where[x.id]
        self._version = version

    def run(self, slot, work):
        """slot(backend, work): a run of the graph.  Errors: those of the slot; there is nothing to read then."""
        self.bind()
        self.begin()
        self.failed = True
        try:
            result = slot(self.backend, work)
            if len(self._written_ids):          # leaves do not know what is under way
                self.backend.synchronize()
            self.failed = False
        finally:
            VERSIONS[self._written_ids] += 1
        mark_last(self, self._nodes)
        return result

    def check_intact(self, t):
        self.backend.synchronize()
        super().check_intact(t)

    def _lost(self, t):
        if self.failed:
            return f"{describe(t)} holds no result: the last run of its graph did not finish; compute it again"
        return super()._lost(t)


def place_of(placement, t):
    """(buffer, byte offset) of a tensor of a graph that lies where the Placement (or None) says; None without memory.

    What an earlier run left of the tensor elsewhere is no place for this one.  Errors: StaleHandle.
    """
    if t._fixed_place is not None:
        return t._fixed_place
    base, cells = t.view_src, TABLE.cells
    if base is None:
        base = t
    row = base.id * T_WORDS
    buffer_id = cells[row + T_BUFFER]
    if buffer_id >= 0:
        return buffer_by_id(buffer_id, base), cells[row + T_OFFS] + t.view_offs
    found = None
    if placement is not None:
        found = placement.where.get(t.id)
        if found is None and t.view_src is not None:
            found = placement.where.get(base.id)
            found = found and (found[0], found[1] + t.view_offs)
    if found is None and buffer_id == FREED:
        raise freed(base)
    return found


def check_writable(nodes, where):
    """ParamError, if a node would write into mapped weights.  where(t): (buffer, byte offset)."""
    updating = ops_with("updates")
    for t in nodes:
        for x in (t, *written(t)[1:]) if t.op in updating else (t,):
            if where(x)[0].read_only:
                raise ParamError(f"{t!r} would write into read-only {where(x)[0]!r}; work on a copy (gg.dup)")
