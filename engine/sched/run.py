"""Run: an assigned and laid out graph made ready for its backends, and the loop over splits.

    for each split:   wait for the backends that share its memory
                      copy what it reads from elsewhere, unless the copy is still good
                      hand the nodes to the backend (asynchronous ones return at once)
                      record an event

The user's tensors stay as they are: backends get PlacedTensors (engine/graphs/placed.py).  Buffers may move between
runs; then places are looked up again.
"""
import bisect
import functools
import time

import numpy as np

from ggjit.core.buffer import init_placed, reset_buffers
from ggjit.core.config import debug
from ggjit.core.events import event_record, event_wait
from ggjit.core.slots import as_bool
from ggjit.core.table import TABLE
from ggjit.core.versions import VERSIONS
from ggjit.graphs.allocator import Placement
from ggjit.graphs.placed import PlacedGraph, PlacedTensor
from ggjit.graphs.requests import work_begin
from ggjit.graphs.results import Results, mark_last
from ggjit.ops.core.errors import Cancelled, NotAllocated
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import OP, T_BUFFER, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.sched import records as rec
from ggjit.sched.experts import expert_ids
from ggjit.sched.input_copies import Copy


class Part:
    """A split in one instance: its backend, copies to look at, nodes to compute."""

    __slots__ = ("backend", "number", "copies", "nodes", "graph", "ranges", "event", "copy_ns", "compute_ns")

    def __init__(self, backend, number, copies, nodes, graph, event):
        self.backend, self.number, self.copies, self.nodes = backend, number, copies, nodes
        self.graph, self.event, self.ranges = graph, event, {}
        self.copy_ns = self.compute_ns = 0


class Run(Results):
    """One graph prepared on one scheduler.  `compute()` may be called any number of times."""

    def __init__(self, assigned, layout, writers, memory, events):
        """memory, events: the scheduler's ComputeBuffers, and its events by backend and instance."""
        self.support, self.memory, self.events = assigned.support, memory, events
        self.assigned, self.layout, self.n_instances = assigned, layout, assigned.support.n_instances
        self.nodes, self.tensors, self._output_ids = assigned.nodes, assigned.tensors, assigned.output_ids
        self.instance = 0
        self.parts = [None] * self.n_instances
        self.copied_nbytes = self.elided_nbytes = 0
        self.runs = 0
        self.failed = None                      # why there are no results: the error of the last run
        self._shown = None                      # the node an eval callback is looking at
        self._handles = {}                      # row -> PlacedTensor, for rows placed by the layout
        self._placement = Placement({}) if layout.work else None        # of the work memory
        self._bound = None
        # version of the table, which buffers the tensors lay in
        self._places = assigned.version, assigned.found
        self.copy_callback = None               # Scheduler.set_copy_callback
        # versions of the table and of compute memory at which the memory was large enough
        self.grown_for = None
        self.writers = writers
        self._written_ids = assigned.ids[self.writers.leaves]
        self.written_buffers = set(TABLE.words[self._written_ids, T_BUFFER].tolist())

    def key_under(self, settings):
        """What the run depends on besides its graph, as it is now.  settings: the scheduler's SchedSettings."""
        usages = tuple([b.usage for b in self.assigned.buffers])
        # kernels' work memory depends on their threads
        threads = settings.work and tuple([b.plan_settings for b in self.support.backends])
        return settings.pin_version, settings.motion, settings.planner, threads, usages, self.places()

    @functools.cached_property
    def touched_buffers(self):
        """Ids of the buffers in which tensors of the graph have memory of their own."""
        return set(TABLE.words[self.assigned.ids, T_BUFFER].tolist()) - {-1}

    # ------------------------------------------------------------ places
    def places(self):
        """Which buffers the graph's tensors lie in; looked up again when something was placed or freed."""
        version = TABLE.placement_version
        if self._places[0] != version:
            self._places = version, self.assigned.placed()
        return self._places[1]

    def place(self, row):
        """(buffer, byte offset) of a row of the layout, or None."""
        buft_id = int(self.layout.buft_id[row])
        if buft_id < 0:
            return self.tensors[row]._where() if row < self.assigned.n else None
        chunks = self.memory.chunks[buft_id]
        if not chunks:                      # the buffers were freed
            return None
        return chunks[int(self.layout.chunk[row])], int(self.layout.offs[row])

    def where(self, t):
        """(buffer, byte offset) of any tensor of the graph, or None."""
        i = self.assigned.number_of(t)
        return None if i is None else self.place(i)

    def backend_of(self, t):
        """Number of the backend that computes a node."""
        return int(self.assigned.rows["backend"][self.assigned.number_of(t)])

    # ------------------------------------------------------------ results
    def _position(self, t):
        i, lay = self.assigned.number_of(t), self.layout
        if i is None or lay.buft_id[i] < 0:
            return None
        at = np.flatnonzero(lay.order == (i if i < self.assigned.n_nodes else -1))
        return at[0] if len(at) else -1, (_memory_number(lay, i), lay.offs[i], lay.offs[i] + t.nbytes)

    def _lost(self, t):
        if self.failed is not None:
            return (f"{describe(t)} holds no result: the last run of its graph did not finish ({self.failed}); compute "
                    f"it again")
        if self.memory.used_by is not self:
            return (f"the memory of {describe(t)} was used by another graph of the same Scheduler, moved or freed "
                    f"since; read results before that, or give each graph its own scheduler")
        return None

    def _overwrites(self, writer, t):
        """What works in place on `t` or a view of it belongs to its values."""
        return writer is None or writer.base is not t.base

    def _n_written(self):
        """Inside an eval callback, what follows the node that is shown was not computed yet."""
        if self._shown is None:
            return None
        shown = np.flatnonzero(self.layout.order == self._shown)[0]
        return bisect.bisect_right(self._spans[0], shown)

    @functools.cached_property
    def _written_rows(self):
        """(places in the layout's order, rows) of nodes, copies and work memory: markers and views write nothing."""
        n, lay = self.assigned.n, self.layout
        writes = np.zeros(lay.n_rows, bool)
        writes[:n] = [t.op not in VIEW_OPS for t in self.tensors]
        writes[n:n + len(self.assigned.copies) * self.n_instances] = writes[list(lay.work.values())] = True
        at = np.flatnonzero(writes[lay.order])
        return at, lay.order[at]

    @functools.cached_property
    def _spans(self):
        (at, rows), lay = self._written_rows, self.layout
        spans = np.stack([_memory_number(lay, rows), lay.offs[rows], lay.offs[rows] + lay.sizes[rows]], 1)
        workers = {row: self.tensors[i] for i, row in lay.work.items()}
        return at.tolist(), spans, [self.tensors[r] if r < self.assigned.n else workers.get(r) for r in rows.tolist()]

    def _undefined(self):
        """Memory of everything that is computed or copied in every run."""
        for b in self.support.backends:
            b.synchronize()
        return [(*self.place(r), int(self.layout.sizes[r])) for r in self._written_rows[1].tolist()
                if self.layout.buft_id[r] >= 0]

    # ------------------------------------------------------------ tensors as backends see them
    def handle(self, row):
        """The tensor a backend sees for a row: the user's own where it has memory of its own."""
        found = self._handles.get(row)
        if found is None:
            t = self.tensors[row]
            found = t if row >= self.assigned.n_nodes else self._placed(row, 0)
        return found

    def _placed(self, i, instance):
        """Node i with the sources it has in that instance."""
        t = self.tensors[i]
        copies = self.assigned.rows["copy"][i, :len(t.src)].tolist()
        src = tuple(None if s is None else self._source(s, c, instance) for s, c in zip(t.src, copies, strict=True))
        x = PlacedTensor(t, src, self.place(i))
        _init(x)
        self._handles.setdefault(i, x)
        return x

    def _source(self, s, copy, instance):
        if copy >= 0:
            return self._copy_handle(copy, instance)
        return self.handle(self.assigned.local[s.id])

    def _copy_handle(self, c, instance):
        row = self.assigned.n + c * self.n_instances + instance
        found = self._handles.get(row)
        if found is None:
            src = self.tensors[int(self.assigned.copies["src"][c])]
            backend = self.support.backends[int(self.assigned.copies["backend"][c])]
            found = PlacedTensor(src, (), self.place(row), f"{backend.name}#{src.name}#{instance}")
            found.op, found.view_src, found.view_offs = OP.NONE, None, 0
            _init(found)
            self._handles[row] = found
        return found

    def _bind(self):
        """Look up all places again after something moved, here or elsewhere."""
        bound = TABLE.placement_version, self.memory.version
        for row, x in self._handles.items():
            if isinstance(x, PlacedTensor):
                x._fixed_place = self.place(row)
                if x._fixed_place is None:
                    raise NotAllocated(f"{describe(x)} lost its memory; allocate it again")
                _init(x)
        for i, row in self.layout.work.items():
            buf, offs = self.place(row)
            begin, end = work_begin(offs), offs + int(self.layout.sizes[row])
            self._placement.work[self.tensors[i].id] = buf, begin, end - begin
        for parts in self.parts:
            for part in parts or ():
                for c in part.copies:
                    c.look_up()
        self._bound = bound                 # set last: after an error places are looked up again

    # ------------------------------------------------------------ making
    def _make(self, instance):
        """The parts of one instance."""
        assigned, made, parts = self.assigned, {}, []
        uses = self._uses()
        for k, (b, start, end, _, _) in enumerate(assigned.split_rows.tolist()):
            copies = []
            for c in uses.get(k, ()):
                if c not in made:
                    made[c] = self._copy(c, instance)
                    copies.append(made[c])
                elif not made[c].kept:
                    copies.append(made[c])
            backend = self.support.backends[b]
            seen = [self._placed(i, instance) for i in range(start, end)]
            graph = PlacedGraph(backend.device, seen, (k, instance), self._placement)
            parts.append(Part(backend, b, copies, self.nodes[start:end], graph, self.events[b][instance]))
            for c in copies:
                c.experts = expert_ids(assigned, c, seen)
        return parts

    def _uses(self):
        """{split: numbers of its copies}: those to be made, those to be made again, and kept ones to be checked"""
        uses, copies = {}, self.assigned.copies
        for split, c, refresh in self.assigned.uses.tolist():
            if refresh or copies["split"][c] == split or copies["kind"][c] == rec.KEPT:
                uses.setdefault(split, []).append(c)
        return uses

    def _copy(self, c, instance):
        s, kept = int(self.assigned.copies["src"][c]), bool(self.assigned.copies["kind"][c] == rec.KEPT)
        t = self.tensors[s]
        return Copy(c, self.handle(s), self._copy_handle(c, instance), kept, *self._waits(s), t.base.id, t.nbytes)

    def _waits(self, s):
        """(writer, waits) of copies of tensor s, see Copy.  Inputs are the user's: copied at once (as in ggml)."""
        support, rows = self.support, self.assigned.rows
        base = self.assigned.base_of(s)
        writers = self.writers.of(base)
        if len(writers) == 1:
            return writers[0], ()
        if writers:
            here = int(rows["backend"][s])
            return here, [b for b in writers if support.is_async[b] and b != here]
        buf = self.tensors[base].buffer
        if rows["bits"][base] & rec.IS_INPUT or buf is None:
            return -1, ()
        k = support.buft_index(buf.buft)
        return -1, [b for b in range(len(support.backends)) if support.is_async[b] and support.reads[b, k]]

    # ------------------------------------------------------------ running
    def compute(self, callback=None):
        """Submit everything; asynchronous backends may still be at work when this returns."""
        self.instance = (self.instance + 1) % self.n_instances if self.runs else 0
        try:
            parts = self._prepared()
        except BaseException:
            self.memory.used_by = self._bound = None        # after an error buffers are told of all tensors again
            raise
        self.copied_nbytes = self.elided_nbytes = 0
        self.failed = ids = None
        try:
            for part in parts:
                t0 = time.perf_counter_ns()
                for a in self.writers.shares[part.number]:
                    self._wait(part, a)
                # weights are copied last, since a copy callback may read the split's other inputs
                copies = part.copies
                for copy in copies if self.copy_callback is None else sorted(copies, key=Copy.is_host_weight):
                    if copy.kept and copy.still_good():
                        self.elided_nbytes += copy.nbytes
                    else:
                        nbytes, ids = copy.make(self, part, ids)
                        self.copied_nbytes += nbytes
                t1 = time.perf_counter_ns()
                if callback is None:
                    part.backend.graph_compute(part.graph)
                else:
                    self._compute_asking(part, callback)
                if part.event is not None:
                    event_record(part.event, part.backend)
                part.copy_ns, part.compute_ns = t1 - t0, time.perf_counter_ns() - t1
        except BaseException as e:
            self.spoil(e)
            raise
        finally:
            if self._written_ids.size:
                VERSIONS[self._written_ids] += 1
            self.runs += 1
            mark_last(self, self.nodes)

    def _prepared(self):
        """The parts of this instance; buffers know which tensors lie in them."""
        moved = self._bound != (TABLE.placement_version, self.memory.version)
        if self.memory.used_by is not self:             # another graph computed in this memory
            moved |= reset_buffers(buf for chunks in self.memory.chunks for buf in chunks)
            self.memory.used_by = self
            self.forget_copies()
        if moved:
            self._bind()
        if "poison" in debug and self.n_instances == 1:
            self._poison()
        parts = self.parts[self.instance]
        if parts is None:
            with oom_guard("the parts of a run"):
                parts = self.parts[self.instance] = self._make(self.instance)
        return parts

    def spoil(self, error):
        """Note an error: there are no results, and copies may hold anything."""
        self.failed = repr(error)
        self.forget_copies()

    def forget_copies(self):
        """Copy everything again in the next run."""
        for parts in self.parts:
            for part in parts or ():
                for copy in part.copies:
                    copy.stamp = None

    def _wait(self, part, a):
        """Backend a may still write or read memory that this split touches."""
        event = self.events[a][self.instance]
        if event is not None and self.support.is_async[part.number]:
            event_record(event, self.support.backends[a])
            event_wait(part.backend, event)
        else:
            self.support.backends[a].synchronize()

    def _compute_asking(self, part, callback):
        """Run up to each node the callback wants to see, then show it.  False from the callback ends the whole run."""
        mark_last(self, self.nodes)
        j0, n = 0, len(part.nodes)
        while j0 < n:
            j1 = j0
            need = as_bool(callback(part.nodes[j1], True), "the eval callback")
            while not need and j1 < n - 1:
                j1 += 1
                need = as_bool(callback(part.nodes[j1], True), "the eval callback")
            piece = part.ranges.get((j0, j1))
            if piece is None:
                piece = PlacedGraph(part.graph.device, part.graph.nodes[j0:j1 + 1], (*part.graph.key, j0, j1),
                                    self._placement)
                part.ranges[j0, j1] = piece
            part.backend.graph_compute(piece)
            part.backend.synchronize()
            if need and not self._show(part, j1, callback):
                raise Cancelled(f"the eval callback stopped the computation at {part.nodes[j1]!r}; what comes after it "
                                f"was not computed")
            j0 = j1 + 1

    def _show(self, part, j, callback):
        """The callback's second call for node j of the part: its value can be read now."""
        self._shown = int(self.assigned.split_rows["start"][part.graph.key[0]]) + j
        try:
            goes_on = callback(part.nodes[j], False)
            return goes_on is None or as_bool(goes_on, "the eval callback")       # None lets the run go on
        finally:
            self._shown = None


def _memory_number(layout, rows):
    """One number for the chunk that each row lies in."""
    return layout.buft_id[rows] << 32 | layout.chunk[rows]


def _init(t):
    """Tell the buffer, if it wants to know, which tensor lies in it now (ggml's init_tensor)."""
    if t._fixed_place is not None:
        init_placed(t._fixed_place[0], t)
