"""GraphAllocator: memory for the computed tensors of a graph (ggml_gallocr).

The plan (who shares memory with whom, at which offsets) comes from `ggjit.alloc`, which knows only numbers; this file
turns graphs into numbers and plans into buffers.
"""
import dataclasses
import weakref

import numpy as np

from ggjit.alloc.ggml.problem import check_time_limit
from ggjit.alloc.graph_alloc import PLANNERS, plan_graph
from ggjit.alloc.report import saving
from ggjit.alloc.validate import validate_plan
from ggjit.core.arguments import expect, typed_call
from ggjit.core.backend import Backend
from ggjit.core.buffer import BufferType, init_placed, place, reset_buffers, wants_tensors
from ggjit.core.compute_buffers import ComputeBuffers
from ggjit.core.config import debug
from ggjit.core.slots import alloc_sizes, checked_int
from ggjit.core.table import NO_PARAMS, TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.ops.core.errors import NotAllocated, ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import OP, T_BUFFER, T_GEN, T_OFFS, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import in_place_table
from ggjit.ops.core.types import I8
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.context import Context
from ggjit.tensors.tensor import Tensor

WORK_ALIGNMENT = 64             # bytes: a line of the processor's cache


class Placement:
    """Where the computed tensors of a graph lie.

    where: {tensor id: (buffer, byte offset)}, views and in-place results included.
    work:  {node's tensor id: (buffer, byte offset, bytes)} of kernels whose work memory lies there too.
    """

    def __init__(self, where, work=()):
        self.where, self.work = where, dict(work)


def _markers(graph, alloc_deps):
    """[(number of the node it stands before, marker)]: views without op that keep tensors alive (as a scheduler's)."""
    for pair in expect(alloc_deps, (list, tuple), "alloc_deps"):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeMismatch(f"alloc_deps holds pairs of tensors (tensor, until), got {pair!r}")
    if not alloc_deps:
        return []
    at, known, ctx, marks = {t.id: i for i, t in enumerate(graph.nodes)}, set(graph.leaf_ids.tolist()), Context(), []
    for t, until in alloc_deps:
        if until.id not in at or t.id not in known and at.get(t.id, len(at)) > at[until.id]:
            raise ParamError(f"alloc_deps: {t!r} cannot be kept until {until!r}; expected a tensor of the graph and a "
                             f"node that runs after it")
        src = (t,) if t.view_src is None else (t.base, t)
        marker = ctx._add(t.type, OP.NONE, t.ne, t.nb, t.ndim, NO_PARAMS, src, t.base, t.view_offs, "")
        marks.append((at[until.id] + 1, marker))
    return marks


def work_nbytes(backend, node):
    """Bytes that the node's kernel works in and that may lie with the graph's tensors.  Errors: GgjitError."""
    return checked_int(backend, "work_nbytes", node, least=0)


def work_room(nbytes, buft):
    """Bytes to place for `nbytes` of work memory: it begins at a multiple of WORK_ALIGNMENT (`work_begin`)."""
    return nbytes + max(WORK_ALIGNMENT - checked_int(buft, "alignment"), 0)


def work_begin(offs):
    """Where the work memory in a place at `offs` begins, a byte offset as well."""
    return -(-offs // WORK_ALIGNMENT) * WORK_ALIGNMENT


def _work_markers(room):
    """[(number of the node it stands before, marker)]: the work memory of every node that has some, and behind the
    node a view that reads it, so that it lives for that node alone.  room: bytes of each node, 0 for none."""
    ctx, marks = Context(), []
    for i, n in enumerate(room):
        if n:
            work = ctx.new_tensor(I8, (n,))
            end = ctx._add(I8, OP.NONE, work.ne, work.nb, work.ndim, NO_PARAMS, (work,), work, 0, "")
            marks += [(i, work), (i + 1, end)]
    return marks


def _without(plan, at):
    """The plan without the nodes at these places."""
    names = [f.name for f in dataclasses.fields(plan) if f.name.startswith(("node_", "cause"))] if at else []
    return dataclasses.replace(plan, **{name: np.delete(getattr(plan, name), at) for name in names}) if at else plan


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
        if work and not (len(targets) == 1 and isinstance(targets[0], Backend)):
            raise ParamError("GraphAllocator: work=True takes one Backend, whose kernels it asks; e.g. "
                             "GraphAllocator(gg.init_backend('CPU'), work=True)")
        self.bufts = [b.default_buffer_type if isinstance(b, Backend) else b for b in targets]
        for b in self.bufts:
            if not isinstance(b, BufferType):
                raise ParamError(f"GraphAllocator takes a backend or buffer types, got {b!r}")
        check_time_limit(time_limit)
        # equal buffer types share one buffer, as in ggml
        self._index = [self.bufts.index(b) for b in self.bufts]
        self.planner, self.time_limit = planner, time_limit
        self._worker = targets[0] if work else None     # the backend whose kernels' work memory is placed
        self._work = {}                                 # of the last plan: {tensor id: (chunk, byte offset, bytes)}
        self._memory = ComputeBuffers(self.bufts)
        self._owned = []                                # weak references to the leaves this allocator placed
        self._where, self._lives = {}, {}               # placement of the last allocated graph, and its tensors' lives
        self.last = None                                # GraphPlan of the last reserve or alloc_graph

    @oom_guard("a memory plan")
    def plan(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """The memory plan of `graph`; allocates nothing.

        alloc_deps: pairs (tensor, until) of tensors of the graph whose memory is kept until the node `until` has run,
        for kernels that read or write them later than the graph says.
        """
        expect(graph, Graph, "GraphAllocator").check_alive()
        planner, self._work = graph.planner or self.planner, {}
        nbytes = [] if self._worker is None else [work_nbytes(self._worker, t) for t in graph.nodes]
        seconds = self.time_limit / (1 + any(nbytes))
        self.last, _ = self._planned(graph, planner, seconds, node_ids, leaf_ids, _markers(graph, alloc_deps))
        if any(nbytes):
            marks = _work_markers([n and work_room(n, self.bufts[0]) for n in nbytes])
            plan, places = self._planned(graph, planner, seconds, node_ids, leaf_ids,
                                         [*_markers(graph, alloc_deps), *marks])
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
        marks = _markers(graph, alloc_deps)
        return saving(graph.planner or self.planner, lambda planner: self._planned(
            graph, planner, self.time_limit, node_ids, leaf_ids, marks, remember=False)[0])

    def _planned(self, graph, planner, seconds, node_ids, leaf_ids, marks, remember=True):
        """(the plan of a graph that is alive, {id of a marker: (chunk, offset)}); remember: as of plan_graph."""
        which = [self._ids(ids, tensors) for ids, tensors in ((node_ids, graph.nodes), (leaf_ids, graph.leafs))]
        sizes = [alloc_sizes(self.bufts, ids, tensors)
                 for ids, tensors in zip(which, (graph.nodes, graph.leafs), strict=True)]
        marks = sorted(marks, key=lambda m: m[0])
        at = [place for place, _ in marks]
        node_ids = np.insert(graph.node_ids, at, [m.id for _, m in marks]) if marks else graph.node_ids
        node_buffers = np.insert(which[0], at, 0) if marks else which[0]            # views: they lie where they view
        sizes[0] = np.insert(sizes[0], at, [m.nbytes for _, m in marks]) if marks else sizes[0]
        placed = self._own_leaves()                     # planned anew; they stay where they are until alloc_graph
        before = [TABLE.words[t.id, [T_BUFFER, T_OFFS]].tolist() for t in placed]
        try:
            for t in placed:
                TABLE.place(t.id, -1, 0)
            plan = plan_graph(TABLE.words, node_ids, graph.leaf_ids, sizes,
                              alignment=[checked_int(b, "alignment") for b in self.bufts],
                              max_size=[checked_int(b, "max_size") for b in self.bufts],
                              node_buffers=node_buffers, leaf_buffers=which[1], n_buffers=len(self.bufts),
                              planner=planner, in_place=in_place_table(planner != "ggml-2023"),
                              time_limit=seconds, outputs=graph.output_ids, remember=remember,
                              **graph.search if planner == graph.planner else {})
        finally:
            for t, where in zip(placed, before, strict=True):
                TABLE.place(t.id, *where)
        if "validate" in debug:
            validate_plan(plan)
        at = [place + k for k, place in enumerate(at)]
        return _without(plan, at), {m.id: (int(plan.node_chunk[i]), int(plan.node_offs[i]))
                                    for i, (_, m) in zip(at, marks, strict=True)}

    def _ids(self, ids, tensors):
        if ids is None:
            return np.zeros(len(tensors), np.int64)
        if len(expect(ids, (list, tuple, np.ndarray), "buffer ids")) != len(tensors):
            raise ParamError(f"{len(ids)} buffer ids for {len(tensors)} tensors")
        if not all(is_whole(i, 0, len(self.bufts) - 1) for i in ids):
            raise ParamError(f"buffer ids must be integers in 0..{len(self.bufts) - 1}")
        return np.array([self._index[i] for i in ids], np.int64)

    def reserve(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """Plan `graph` and make the buffers large enough for it; call it with the largest graph first."""
        self._memory.grow(self.plan(graph, node_ids, leaf_ids, alloc_deps).chunk_sizes)

    def alloc_graph(self, graph, node_ids=None, leaf_ids=None, alloc_deps=()):
        """Give every tensor of `graph` without memory its place; buffers grow when they have to.

        After an error, also one of a buffer's init_tensor, no tensor has a place that it had not before.
        """
        plan = self.plan(graph, node_ids, leaf_ids, alloc_deps)
        self._memory.grow(plan.chunk_sizes)
        where = {}
        for tensors, bufs, chunks, offs in ((graph.leafs, plan.leaf_buffer, plan.leaf_chunk, plan.leaf_offs),
                                            (graph.nodes, plan.node_buffer, plan.node_chunk, plan.node_offs)):
            for t, b, c, o in zip(tensors, bufs.tolist(), chunks.tolist(), offs.tolist(), strict=True):
                if b >= 0:
                    where[t.id] = (self._memory.chunks[b][c], o)
        self._place_leaves([t for t in graph.leafs if t.id in where and t.view_src is None], where,
                           lambda: self._tell_buffers(graph, where))
        ids = np.concatenate([graph.leaf_ids, graph.node_ids])
        # of leaves the table knows: what is taken back there must not be found here
        self._where = {t.id: where[t.id] for t in graph.nodes if t.id in where}
        self._lives = dict(zip(ids.tolist(), TABLE.words[ids, T_GEN].tolist(), strict=True))
        graph.placement = Placement(self._where, {
            i: (self._memory.chunks[0][c], work_begin(o), n)
            for i, (c, o, n) in self._work.items()})

    def _place_leaves(self, leafs, where, then):
        """The leaves go where `where` says, those of the graph before lose their places; after an error of `then` all
        lie where they lay."""
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

    def _tell_buffers(self, graph, where):
        """Which tensors lie in them now.  Errors: NotAllocated, for a view of what has no memory."""
        for t in graph.nodes:
            if t.op in VIEW_OPS and t.id in where and t.base.id not in where and TABLE.words[t.base.id, T_BUFFER] < 0:
                raise NotAllocated(f"{describe(t)} views {describe(t.base)}, which has no memory; allocate it first")
        buffers = [buf for chunks in self._memory.chunks for buf in chunks]
        reset_buffers(buffers)
        if any(map(wants_tensors, buffers)):
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
        return self._memory.size(i) if self._index[i] == i else 0

    def placement(self, t):
        """(buffer, byte offset) of a tensor of the last allocated graph."""
        expect(t, Tensor, "placement")
        mine = self._lives.get(t.id) == t.generation        # else a later tensor in the same row of the table
        where = self._where.get(t.id) if mine else None
        where = where or t._where()
        if where is None:
            raise NotAllocated(f"{describe(t)} was not placed by this allocator")
        return where

    def free(self):
        """Give all memory back."""
        self._forget_leaves()
        self._memory.free()

