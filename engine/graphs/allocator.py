"""GraphAllocator: memory for the computed tensors of a graph (ggml_gallocr).

The plan (who shares memory with whom, at which offsets) comes from `ggjit.alloc`, which knows only numbers; this file
turns graphs into numbers and plans into buffers.
"""
import functools
import weakref

import numpy as np

from ggjit.alloc.ggml.problem import check_time_limit
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PLANNERS
from ggjit.alloc.report import saving
from ggjit.alloc.validate import validate_plan
from ggjit.core.arguments import expect, expect_flag, typed_call
from ggjit.core.backend import Backend
from ggjit.core.buffer import BufferType, init_placed, place, reset_buffers, wants_tensors
from ggjit.core.compute_buffers import ComputeBuffers
from ggjit.core.config import debug
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.graphs.plan_places import PlacedRows
from ggjit.graphs.requests import (
    asked_for,
    options_for,
    with_markers,
    without_markers,
    work_begin,
    work_markers,
    work_nbytes,
    work_room,
)
from ggjit.ops.core.errors import NotAllocated, ParamError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import T_BUFFER, T_GEN, T_OFFS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.tensor import Tensor


class Placement:
    """Where the computed tensors of a graph lie.

    where: {tensor id: (buffer, byte offset)}, views and in-place results included.
    work:  {node's tensor id: (buffer, byte offset, bytes)} of kernels whose work memory lies there too.
    """

    def __init__(self, places, work=()):
        """places: the dictionary, or _Places of which it is made when it is asked for."""
        self._places, self.work = places, dict(work)

    @functools.cached_property
    def where(self):
        return self._places.where() if isinstance(self._places, _Places) else self._places

    @functools.cached_property
    def rows(self):
        """The same as PlacedRows; None where there are none."""
        return self._places.rows() if isinstance(self._places, _Places) else None


class _Places:
    """Where a plan puts tensors: rows of ids, and of the plan's buffers (-1: it has no place), chunks and offsets."""

    def __init__(self, ids, buffers, chunks, offs, held):
        """held: [buffer type][chunk] -> buffer, as they are now."""
        self._all, self._held = (ids, buffers, chunks, offs), [list(x) for x in held]

    @functools.cached_property
    def _placed(self):
        """The rows of tensors that have a place."""
        at = np.flatnonzero(self._all[1] >= 0)
        return [column[at] for column in self._all]

    def where(self):
        """{tensor id: (buffer, byte offset)}"""
        held = self._held
        return {i: (held[b][c], o) for i, b, c, o in zip(*(a.tolist() for a in self._placed), strict=True)}

    def rows(self):
        """The same as PlacedRows; None where there are none."""
        first, (ids, buffers, chunks, offs) = np.cumsum([0, *map(len, self._held)]), self._placed
        return PlacedRows(ids, first[buffers] + chunks, offs, [buf for chunks in self._held for buf in chunks]) \
            if len(ids) else None


class GraphAllocator:
    """Plans and holds the memory of graphs.

    target: a Backend, a BufferType, or a list of buffer types (then `node_ids`/`leaf_ids` of reserve and alloc_graph
    give each tensor's index into it).  planner: "ggml" (the same offsets as ggml), "ggml-2023", "best"; `saving`
    says what "best" would save.  time_limit: seconds "best" may search.
    work: place the work memory of the kernels with the rest, each live for its own node, where that takes fewer bytes
    than a buffer beside it; the target is then one Backend, and every node gets a kernel of its own.
    Source: ggml_gallocr_new_n, _reserve_n, _alloc_graph, _get_buffer_size.
    """

    @typed_call
    def __init__(self, target, planner="ggml", time_limit=1.0, work=False):
        if planner not in PLANNERS:
            raise ParamError(f"planner {planner!r}: expected one of {', '.join(PLANNERS)}")
        targets = target if isinstance(target, list | tuple) else [target]
        if not targets:
            raise ParamError("GraphAllocator needs at least one buffer type")
        expect_flag(work, "GraphAllocator: work")
        if work and not (len(targets) == 1 and isinstance(targets[0], Backend)):
            raise ParamError("GraphAllocator: work=True takes one Backend, whose kernels it asks; e.g. "
                             "GraphAllocator(gg.init_backend('CPU'), work=True)")
        self.bufts = [b.default_buffer_type if isinstance(b, Backend) else b for b in targets]
        for b in self.bufts:
            if not isinstance(b, BufferType):
                raise ParamError(f"GraphAllocator takes a backend or buffer types, got {b!r}")
        check_time_limit(time_limit)
        self.planner, self.time_limit = planner, time_limit
        self._worker = targets[0] if work else None     # the backend whose kernels' work memory is placed
        self._work = {}  # work memory of the last plan: {tensor id: (chunk, byte offset, bytes)}
        self._memory = ComputeBuffers(self.bufts)
        self._owned = []                                # weak references to the leaves this allocator placed
        self._placed = None                             # Placement of the last allocated graph
        self._lives = (np.zeros(0, np.int64),) * 2      # ids of its tensors, and their generations
        self.last = None                                # GraphPlan of the last reserve or alloc_graph

    @oom_guard("a memory plan")
    def plan(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """The memory plan of `graph`; allocates nothing.

        alloc_deps: pairs (tensor, until) of tensors of the graph whose memory is kept until the node `until` has run,
        for kernels that read or write them later than the graph says.
        """
        expect(graph, Graph, "GraphAllocator").check_alive()
        nbytes = [] if self._worker is None else [work_nbytes(self._worker, t) for t in graph.nodes]
        request, options, kept = asked_for(graph, self.bufts, graph.planner or self.planner,
                                           self.time_limit / (1 + any(nbytes)), node_ids, leaf_ids, alloc_deps)
        self._work = {}
        self.last, _ = self._planned(request, options, kept)
        if any(nbytes):
            marks = work_markers([n and work_room(n, self.bufts[0]) for n in nbytes])
            plan, places = self._planned(request, options, [*kept, *marks])
            if plan.peak < self.last.peak + max(nbytes):
                self.last = plan
                self._work = {graph.nodes[i].id: (*places[m.id], nbytes[i]) for i, m in marks if m.view_src is None}
        return self.last

    @oom_guard("a memory plan")
    def saving(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """What planner="best" would save for `graph`: a number, the bytes less that it would take than this allocator's
        planner, shown as a line that also says how long both plan.  Allocates nothing.

            gg.GraphAllocator(backend).saving(graph)
            # 2.31 KiB instead of ggml's 2.81 KiB, 512 B (17.8%) less; planned in 0.8 ms instead of 0.1
        """
        expect(graph, Graph, "GraphAllocator").check_alive()
        planner = graph.planner or self.planner
        request, _, marks = asked_for(graph, self.bufts, planner, self.time_limit, node_ids, leaf_ids, alloc_deps)
        return saving(planner, lambda planner: self._planned(
            request, options_for(graph, planner, self.time_limit), marks)[0])

    def _planned(self, request, options, marks):
        """(the plan, {id of a marker: (chunk, offset)}).  The leaves that lie where this allocator placed them are
        planned again; they stay where they are until alloc_graph."""
        request, at = with_markers(request, marks) if marks else (request, [])
        placed = self._own_leaves()
        before = [TABLE.words[t.id, [T_BUFFER, T_OFFS]].tolist() for t in placed]
        try:
            for t in placed:
                TABLE.place(t.id, -1, 0)
            plan = plan_graph(request, options)
        finally:
            for t, where in zip(placed, before, strict=True):
                TABLE.place(t.id, *where)
        if "validate" in debug:
            validate_plan(plan)
        if not at:
            return plan, {}
        return without_markers(plan, at), {int(request.node_ids[i]): (int(plan.node_chunk[i]), int(plan.node_offs[i]))
                                           for i in at}

    def reserve(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """Plan `graph` and make the buffers large enough for it; call it with the largest graph first."""
        self._memory.grow(self.plan(graph, node_ids, leaf_ids, alloc_deps).chunk_sizes)

    def alloc_graph(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """Give every tensor of `graph` without memory its place; buffers grow when they have to.

        After an error, also one of a buffer's init_tensor, no tensor has a place that it had not before.
        """
        plan = self.plan(graph, node_ids, leaf_ids, alloc_deps)
        self._memory.grow(plan.chunk_sizes)
        held = self._memory.chunks
        leafs = _Places(graph.leaf_ids, plan.leaf_buffer, plan.leaf_chunk, plan.leaf_offs, held)
        nodes = _Places(graph.node_ids, plan.node_buffer, plan.node_chunk, plan.node_offs, held)
        placement = Placement(nodes, {i: (held[0][c], work_begin(o), n) for i, (c, o, n) in self._work.items()})
        where = leafs.where()
        placed = [t for t in graph.leafs if t.id in where and t.view_src is None] if where else []
        self._place_leaves(placed, where, lambda: self._tell_buffers(graph, leafs, placement))
        ids = np.concatenate([graph.leaf_ids, graph.node_ids])
        # of leaves the table knows: what is taken back there must not be found here
        self._placed, self._lives = placement, (ids, TABLE.words[ids, T_GEN])
        graph.placement = placement

    def _place_leaves(self, leafs, where, then):
        """Place the leaves by `where`, take back the places of the previous graph's leaves, and call `then`; after an
        error of `then` all places are as before."""
        before = [(t, TABLE.words[t.id, [T_BUFFER, T_OFFS]].tolist(), t._holds["memory"]) for t in self._own_leaves()]
        owned = list(self._owned)
        self._forget_leaves()
        try:
            for t in leafs:
                place(t, *where[t.id])
                self._owned.append(weakref.ref(t))
            then()
        except BaseException:
            self._forget_leaves()
            self._owned[:] = owned
            for t, at, memory in before:
                TABLE.place(t.id, *at)
                t._hold("memory", memory)
            raise

    def _tell_buffers(self, graph, leafs, placement):
        """Tell the buffers which tensors lie in them now."""
        buffers = [buf for chunks in self._memory.chunks for buf in chunks]
        reset_buffers(buffers)
        if any(map(wants_tensors, buffers)):
            where = leafs.where() | placement.where
            for t in (*graph.leafs, *graph.nodes):
                if t.id in where:
                    init_placed(where[t.id][0], PlacedTensor(t, t.src, where[t.id]))

    def _own_leaves(self):
        """The leaves that lie where an earlier call placed them."""
        mine = {buf.id for chunks in self._memory.chunks for buf in chunks}
        return [t for t in [ref() for ref in self._owned] if t is not None
                if t.ctx.alive and int(TABLE.words[t.id, T_BUFFER]) in mine]

    def _forget_leaves(self):
        """Take the memory of those leaves back; leaves placed elsewhere meanwhile are left alone."""
        for t in self._own_leaves():
            TABLE.place(t.id, -1, 0)
            t._hold("memory", None)
        self._owned.clear()

    def buffer_size(self, i=0):
        """Bytes held for buffer type i (the peak of the largest graph so far); 0 for a type that is listed before."""
        if not is_whole(i, 0, len(self.bufts) - 1):
            raise ParamError(f"buffer_size: buffer type {i!r} of {len(self.bufts)}; they count from 0")
        shared = self.bufts.index(self.bufts[i]) < i            # equal buffer types share one buffer, as in ggml
        return 0 if shared else self._memory.size(i)

    def placement(self, t):
        """(buffer, byte offset) of a tensor of the last allocated graph."""
        expect(t, Tensor, "placement")
        ids, lives = self._lives
        mine = lives[ids == t.id] == t.generation           # else the row of the table belongs to a later tensor
        where = self._placed.where.get(t.id) if mine.any() else None
        where = where or t._where()
        if where is None:
            raise NotAllocated(f"{describe(t)} was not placed by this allocator")
        return where

    def free(self):
        """Give all memory back."""
        self._forget_leaves()
        self._memory.free()

