"""Plans: a graph made ready to run on one backend.  Plan once, replay many times.

Making a plan chooses a kernel for every node, resolves every address and lays the NODE rows out in one int64 array.

    graph.nodes      mul_mat      add      view     soft_max          (views need no code: they are addresses)
                        |          |                   |
    plan.rows      [ NODE row | NODE row         | NODE row ]         int64 words, layout in ops/core/record.py
                     kernel     kernel             kernel             how a kernel is started is the device's
                     dst, src   dst, src           dst, src           buffer's address + offset

Leaves have a placement of their own, in the tensor table.  The placement of computed tensors belongs to the plan: two
plans of one graph may put them in different places, and nothing is ever written into the user's tensors.  If a buffer
or a leaf moved since the last run (`TABLE.placement_version`), the addresses are resolved again.

Plans of a device: engine/cpu/cpu_plan.py, engine/cuda/cuda_plan.py.
"""
import contextlib
import functools
import sys
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING

import numpy as np

from ggjit.core.arguments import expect, expect_slot
from ggjit.core.buffer import Buffer
from ggjit.core.config import debug
from ggjit.core.html_repr import HtmlRepr
from ggjit.core.other_names import of_a_plan
from ggjit.core.run_lock import KERNEL_THREADS, RunLock, acquire_or_raise, refuse_nesting
from ggjit.core.table import TABLE
from ggjit.core.versions import T_VERSION, VERSIONS
from ggjit.graphs.placed import check_writable, place_of
from ggjit.graphs.plan_cache import without_plans
from ggjit.graphs.plan_node import nodes_to_compute, plan_nodes
from ggjit.graphs.plan_places import PlanPlaces
from ggjit.graphs.plan_tensors import PlanTensors, write_rows
from ggjit.graphs.results import Results, mark_last, never_stored, ran_last, used_by_another
from ggjit.ops.core import record as r
from ggjit.ops.core.errors import GgjitError, IndexRangeError, NoSuchAttribute, NotAllocated, NotSupported
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.tensor import Tensor

# words of a NODE row where its views begin: the result, sources
VIEWS = np.array([r.N_DST, *(r.N_SRC + r.V_WORDS * k for k in range(r.MAX_SRC))], np.int64)
MANY = 128                      # tensors whose places are looked up in arrays; fewer are looked up sooner one by one
_NODE_WORDS = np.array([r.node_words(n) for n in range(r.MAX_SRC + 1)], np.int64)


def _user(nodes, x):
    """The first node that reads or writes x."""
    return next(t for t in nodes if any(x is y for y in (t, *t.src)))


class Plan(Results, HtmlRepr):
    """`plan.compute()` runs the graph; `plan.numpy(t)` reads a result of this plan's last run.

    fuse: may runs of nodes become one kernel (engine/cpu/fusion.py)?  None: as the backend says.
    """

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError with a hint."""
            raise NoSuchAttribute(f"a plan has no attribute {name!r}{of_a_plan(name)}", name=name, obj=self)

    _marked = frozenset()               # ids of tensors whose readers get kernels of their own

    def __init__(self, backend, graph, placement, fuse=None):
        if placement is not None:
            expect_slot(placement, "where", "a plan takes the placement of a graph (Graph.placement)")
        self.backend, self.graph, self.placement = backend, without_plans(graph), placement
        # no runs of nodes in a scheduler's part, whose results other parts may read, nor with work memory of each node
        self.fuse = (getattr(backend, "fuse", False) if fuse is None else fuse) and not graph.placed \
            and "check" not in debug and not getattr(placement, "work", None)
        self.n_threads = backend.n_threads
        self._output_ids = graph.output_ids
        self.runs = 0
        self._lock = RunLock()
        self.started = False                # True once a run has begun
        self.failed = False                 # the last run did not finish: there are no results
        self._me = weakref.ref(self)
        computed, ids = nodes_to_compute(graph)
        with oom_guard(f"a plan of {len(computed)} nodes"):
            self._singles = plan_nodes(computed, ids, self._choose, self._marked)
            self._tensors = PlanTensors(self._singles, graph.placed or TABLE.has_strays())
            places = self._check_places()
            self._lay_out(places)
            self._resolve(places)
        if "plan" in debug:
            print(self.dump(), file=sys.stderr)

    # ------------------------------------------------------------ what a device brings
    def _choose(self, t):
        """The kernel of node t: `.name`, `.work_nbytes`, `.cost`.  Errors: NotSupported."""
        raise NotSupported(f"{type(self).__name__} has no kernels")

    def _fused(self, places):
        """The PlanParts, runs of nodes that one kernel computes put together.  places: a PlanPlaces."""
        return self._singles

    def _code(self, part):
        """The word of a NODE row that names the kernel, such as its address; asked once for each kernel."""
        return 0

    def _check_place(self, t, buf):
        """Can `t` be used where it lies?  Asked for marked tensors and for buffers that hold only some tensors."""

    def _is_particular(self, buf):
        """Does the buffer accept only some tensors?"""
        return False

    def _memory(self, buf):
        """(what keeps the buffer's memory alive, None if it was freed; its address)"""
        raise NotSupported(f"{type(self).__name__} has no memory")

    def _check_address(self, t, buf, offs):
        """Can the kernels load from there?"""

    def _work_buffer(self):
        """Scratch memory of `work_nbytes` bytes."""
        raise NotSupported(f"{type(self).__name__} has no memory")

    def _rows_written(self, memory):
        """All addresses are in the rows.  memory: {id of a buffer: what keeps its memory alive}"""

    def _run(self, first, last):
        """Run nodes first..last-1, after `begin`; the lock is held and the plan up to date."""
        raise NotSupported(f"{type(self).__name__} does not run")

    def _alone(self):
        """Context in which no other plan of the device runs."""
        return contextlib.nullcontext()

    # ------------------------------------------------------------ making
    def where(self, t):
        """(buffer, byte offset) of any tensor of the graph, or None."""
        return place_of(self.placement, t)

    def _check_places(self):
        """The PlanPlaces of the tensors that nodes read and write.  A plan that would write into mapped weights, or
        has tensors without memory, is refused as a whole."""
        device = self.graph.device if self.graph.placed else self.backend.device
        tensors = self._tensors
        places = PlanPlaces(tensors, self.where)
        if len(tensors.ids) < MANY or not places.find_all(self.placement, device):
            places.put(self._find_each(device))
        if self._marked or any(map(self._is_particular, places.used(slice(None)))):
            for x in tensors.handles:
                self._check_place(x, places(x)[0])
        if any(buf.read_only for buf in places.used(np.concatenate([tensors.uses[:, 0], tensors.updates[1]]))):
            check_writable(tensors.nodes, places)
        return places

    def _find_each(self, device):
        """The places of the tensors, looked up one after the other.  Errors: NotAllocated, NotSupported, StaleHandle,
        IndexRangeError."""
        sizes, nodes, found = {}, self._tensors.nodes, []
        for x in self._tensors.handles:
            x._check()
            where = self.where(x)
            found.append(where)
            if where is None:
                raise NotAllocated(f"{describe(x)}, needed by {_user(nodes, x)!r}, has no memory; allocate leaves with "
                                   f"alloc_ctx_tensors and the graph with GraphAllocator(...).alloc_graph(graph)")
            buf, offs = where
            size = sizes.get(id(buf))
            if size is None:
                size = buf.size
                if type(buf).is_bound is Buffer.is_bound and device.supports_buft(buf.buft):
                    sizes[id(buf)] = size               # the buffer was checked
                elif not buf.is_bound(x):
                    raise NotAllocated(f"{describe(x)} has a place in {buf!r}, which has not bound it to memory yet; "
                                       f"{_user(nodes, x)!r} needs it")
                elif not device.supports_buft(buf.buft):
                    self._check_place(x, buf)
                    raise NotSupported(f"{describe(x)} lies in {buf!r}, which {device.name} cannot reach; use a "
                                       f"Scheduler")
            if offs < 0 or offs + x.layout.nbytes > size:
                raise IndexRangeError(f"{describe(x)} at {offs} does not fit {buf!r}")
        return found

    def _lay_out(self, places):
        """Choose fusions for the memory as it is and write the NODE rows, all but the addresses."""
        self.parts = parts = self._fused(places)
        n_reads, self._uses = self._numbered_views()
        starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(_NODE_WORDS[n_reads], out=starts[1:])
        placed, work = getattr(self.placement, "work", None), parts.each(lambda p: p.kernel.work_nbytes)
        self._placed_work = {i: p.t.id for i, p in enumerate(parts)
                             if 0 < work[i] <= placed.get(p.t.id, (None, 0, 0))[2]} if placed else {}
        beside = np.delete(work, list(self._placed_work)) if self._placed_work else work
        self.work_nbytes = int(beside.max(initial=0))
        store = np.zeros(starts[-1] + 8, np.int64)
        skip = -(store.__array_interface__["data"][0] // r.WORD) % 8       # rows start at cache lines
        self.rows = store[skip:skip + starts[-1]]
        self._first = self.rows.__array_interface__["data"][0]
        self._starts = starts.tolist()
        self._write_rows(starts, work, self._uses)
        self._work_begins = 0
        self._work_words = starts[:-1][work > 0] + r.N_WORK

    @property
    def nodes(self):
        """The last node of each part."""
        return self.parts.results

    @property
    def kernels(self):
        return self.parts.kernels

    def _numbered_views(self):
        """(how many tensors each part reads; the numbers of its result and of those, -1 for none)"""
        tensors, fused, last = self._tensors, self.parts.fused, self.parts.ends - 1
        n_reads, views = tensors.n_sources[last], tensors.uses[last]
        missing = 1 + max((len(p.reads) for p, _, _ in fused), default=0) - views.shape[1]
        if missing > 0:
            views = np.concatenate([views, np.full((len(views), missing), -1)], 1)
        for p, parts, runs in fused:
            n_reads[parts], views[parts, 1:] = len(p.reads), -1
            nodes, spots = np.array(p.spots.reads, np.int64).reshape(-1, 2).T
            views[parts, 1:1 + len(p.reads)] = tensors.uses[runs[:, nodes], spots]
        return n_reads, views

    def _codes(self):
        """For each part its kernel's word in NODE rows."""
        return self.parts.each(self._code)

    def _write_rows(self, starts, work, views):
        """All rows at once.  starts: of each row, then the end of the last; work: bytes that each kernel works in."""
        rows, at, tensors = self.rows, starts[:-1], self._tensors
        rows[at + r.N_KERNEL] = self._codes()
        rows[at + r.N_NEXT] = (starts[1:] - at) * r.WORD
        rows[at + r.N_TASKS] = 1
        rows[at + r.N_WORK_SIZE] = work
        given = views >= 0
        self._view_numbers = numbers = views[given]
        self._view_words = (at[:, None] + VIEWS[:views.shape[1]])[given]
        write_rows(TABLE.words, rows, at, tensors.ids[views[:, 0]], len(at), self._view_words, tensors.ids[numbers],
                   len(numbers))
        for p, parts, _ in self.parts.fused:
            rows[at[parts, None] + np.arange(r.N_PARAMS, r.N_PARAMS + len(p.params))] = p.params

    @property
    def _views(self):
        """The tensors of the views in the rows, in order."""
        return [self._tensors.handles[k] for k in self._view_numbers.tolist()]

    def _still_fits(self, places):
        """Does the layout hold for the memory as it is now?  A tensor may have moved to where a fused kernel would
        overwrite what it reads."""
        return True

    def _resolve(self, places):
        """Write the address of every view; called again when something moved."""
        self._work_places = [(i, *self.placement.work[id_][:2]) for i, id_ in self._placed_work.items()]
        working = [b for _, b, _ in self._work_places]
        buffers = {id(b): b for b in (*places.used(self._view_numbers), *working)}
        # the memory itself, taken once: freeing a buffer while this plan runs must not take it away
        memory = {k: self._memory(b) for k, b in buffers.items()}
        if any(held is None for held, _ in memory.values()):
            lost = next((t for t in self._views if memory[id(places(t)[0])][0] is None), None)
            raise NotAllocated("the work memory of the graph was freed; allocate it again and make a new plan"
                               if lost is None else f"{describe(lost)} lost its memory; allocate it again")
        if type(self)._check_address is not Plan._check_address:
            for t in self._views:
                self._check_address(t, *places(t))
        first = {k: address for k, (_, address) in memory.items()}
        begin = [first.get(id(b), 0) for b in places.buffers]
        self.rows[self._view_words] = places.addresses(self._view_numbers, begin)
        self._buffers = list(buffers.values())
        self._held = {k: held for k, (held, _) in memory.items()}
        stored_in = places.used(self._tensors.uses[self.parts.is_stored, 0])
        self._written = list({id(b): b for b in (*stored_in, *working)}.values())
        self._work = self._work_buffer()
        self.rows[self._work_words] = self._work.base + self._work_begins
        for i, buf, offs in self._work_places:
            self.rows[self._starts[i] + r.N_WORK] = first[id(buf)] + offs
        self._note_written()
        self.__dict__.pop("_spans", None)
        self._rows_written(self._held)
        self.resolved = places.version      # set last: after an error above the plan is resolved again

    def _note_written(self):
        """The leaves this plan computes into: their versions rise with a run (engine/core/versions.py)."""
        tensors = self._tensors
        ids = tensors.ids[np.concatenate([tensors.uses[:, 0], tensors.updates[1]])] if not self.graph.placed else \
            np.zeros(0, np.int64)
        ids = np.where((viewed := TABLE.words[ids, r.T_VIEW_SRC]) >= 0, viewed, ids)
        placed = set(ids[TABLE.words[ids, r.T_BUFFER] >= 0].tolist())
        ids = np.array(sorted(placed), np.int64)            # np.unique would import numpy.ma
        self._written_ids = ids if len(ids) > 1 else None
        self._written_cell = int(ids[0]) * r.T_WORDS + T_VERSION if len(ids) == 1 else None

    @oom_guard("the addresses of a plan")
    def _up_to_date(self):
        if self.resolved != TABLE.placement_version:
            places = self._check_places()
            if not self._still_fits(places):
                self._lay_out(places)
            self._resolve(places)

    # ------------------------------------------------------------ running
    def compute(self):
        """Run every node.  Errors: IndexRangeError (an id out of range, with the node and the value), Cancelled,
        StaleHandle, whatever a signal handler raises (KeyboardInterrupt).  After an error there is nothing to read."""
        # One long function: kernels empty the caches, and then every Python call is slow (docs/measured.md).
        if get_ident() in KERNEL_THREADS:
            refuse_nesting()
        lock = self._lock
        try:
            if not lock.acquire(False):
                acquire_or_raise(lock)
            if self.resolved != TABLE.placement_version:
                self._up_to_date()
            self.started = self.failed = True
            try:
                if debug:
                    self._compute_in_debug()
                elif self.rows.size:
                    self._run(0, len(self._starts) - 1)
                self.failed = False
                self.runs += 1
            finally:
                # At the end: a copy of a leaf made meanwhile has part of it at most.  After a failure too, which
                # leaves some of it written.  No call stands before the count: a signal could come in and skip it.
                if self._written_cell is not None:      # NumPy takes 6 us
                    TABLE.cells[self._written_cell] += 1
                elif self._written_ids is not None:
                    VERSIONS[self._written_ids] += 1
        finally:
            try:
                lock.release()              # no call before it: a signal could come in
            except RuntimeError:            # a signal came in while this waited for the lock
                lock = None
        if ran_last() is not self._me and self.graph.is_read:
            mark_last(self, self.graph.nodes)

    def _compute_in_debug(self):
        # in a scheduler's split the memory holds results of earlier splits
        if "poison" in debug and not self.graph.placed:
            self._poison()
        if self.nodes:
            self._run(0, len(self.nodes))

    def begin(self):
        """From here on the memory this plan computes into is its own; called by `_run` when no other run is under way
        on the device, so that readers of other plans see it before the first byte changes (`numpy`)."""
        self.started = True
        if not self.graph.placed:           # a scheduler's part does not own the run's results
            for buf in self._written:
                buf.last_plan = self._me

    def compute_and_read(self, *tensors):
        """Run every node and return the values of `tensors`, one array or a tuple, as one step.

        Between a `compute` and a `numpy` another thread may run a plan that uses the same memory (two graphs of one
        GraphAllocator), and `numpy` then raises Overwritten; here the other plan waits.

            y = plan.compute_and_read(logits)

        Errors: those of compute and numpy.
        """
        with self._lock, self._alone():
            self.compute()
            values = tuple(self.numpy(t) for t in tensors)
        return values[0] if len(values) == 1 else values

    def run_nodes(self, first, last):
        """Run nodes first..last-1 alone (profiles, checks, gg.explore)."""
        if not is_whole(first, 0) or not is_whole(last, first, len(self.nodes)):
            raise IndexRangeError(f"run_nodes: nodes {first!r} to {last!r} of {len(self.nodes)}")
        with self._lock:
            self._up_to_date()
            try:
                self._run(first, last)
            finally:                        # as compute does: leaves it may have written are newer than their copies
                if self._written_cell is not None:
                    TABLE.cells[self._written_cell] += 1
                elif self._written_ids is not None:
                    VERSIONS[self._written_ids] += 1

    def timed(self):
        """Run node by node: [(tensor, kernel name, nanoseconds)]; each figure holds one call into jitted code."""
        out = []
        for i, (t, k) in enumerate(zip(self.nodes, self.kernels, strict=True)):
            t0 = time.perf_counter_ns()
            self.run_nodes(i, i + 1)
            out.append((t, k.name, time.perf_counter_ns() - t0))
        return out

    def _error(self, status, i, value):
        """The exception for a run that stopped at node i; value: what its kernel left for the message."""
        t = self.nodes[i]
        if status == r.BAD_INDEX:
            indexed = all_specs()[t.op].indexed
            return IndexRangeError(f"{t!r}: index {value} is out of range for "
                                   f"{describe(t if indexed is None else t.src[indexed])}; sources: "
                                   f"{', '.join(describe(s) for s in t.src)}")
        what = "was given a combination it does not know" if status == r.BAD_ARGUMENT else \
            f"failed with status {status}"
        return GgjitError(f"the kernel of {t!r} {what} (value {value})")

    # ------------------------------------------------------------ reading
    def _position(self, t):
        where = self.where(t)
        if where is None or TABLE.words[t.base.id, r.T_BUFFER] >= 0:
            return None
        position = self._positions.get(t.id)
        return None if position is None else (position, (id(where[0]), where[1], where[1] + t.nbytes))

    def _lost(self, t):
        whole = next((p.t for p in self.parts if t.id in p.left_out), None)
        if whole is not None:
            return never_stored(t, repr(whole))
        if not self.started:
            return f"{describe(t)} was not computed yet; run its plan first (plan.compute())"
        if self.failed:
            return f"{describe(t)} holds no result: the last run of its plan did not finish; compute it again"
        buf = self.where(t)[0]
        if buf.last_plan is not None and buf.last_plan() is not self:
            return used_by_another(t)
        return None

    @functools.cached_property
    def _positions(self):
        """{tensor id: place in the graph's order}"""
        return {t.id: i for i, t in enumerate(self.graph.nodes)}

    @property
    def _stored(self):
        """Every computed tensor that has its values in memory, in order."""
        return [t for p in self.parts for t in p.stored]

    @functools.cached_property
    def _spans(self):
        spans = [(t, id(buf), offs, offs + t.nbytes) for t in self._stored for buf, offs in (self.where(t),)]
        spans += [(self.nodes[i], id(buf), offs, offs + self.kernels[i].work_nbytes) for i, buf, offs in
                  self._work_places]
        spans.sort(key=lambda x: self._positions[x[0].id])
        return ([self._positions[t.id] for t, *_ in spans], np.array([x[1:] for x in spans], np.int64).reshape(-1, 3),
                [t for t, *_ in spans])

    def _undefined(self):
        for t in self.nodes:
            where = self.where(t)
            if t.view_src is None and not any(s is not None and self.where(s) == where for s in t.src):
                yield *where, t.nbytes

    def numpy(self, t):
        """The values of `t` as this plan's last run left them."""
        expect(t, Tensor, "Plan.numpy")
        with self._lock:
            t._check()
            self.check_intact(t)
            where = self.where(t)
            if where is None:
                raise NotAllocated(f"{describe(t)} is not part of this plan's graph")
            with oom_guard("numpy", t):
                values = t._decoded(self._bytes(t, *where))
            self.check_intact(t)            # checked again: another plan may have written while the bytes were read
            return values

    def values(self, t):
        return self.numpy(t)

    def view(self, t):
        """The values of `t` (a scalar type) without a copy where that can be: read-only, valid until this memory is
        used again."""
        a = t._elements(self._bytes(t, *self.where(t))).reshape(t.shape)
        a.flags.writeable = False
        return a

    def _bytes(self, t, buf, offs):
        return buf.host_bytes(offs, t.nbytes)

    def __repr__(self):
        return (f"<Plan of {len(self.nodes)} nodes for {self.backend!r}, work {self.work_nbytes:,} bytes, "
                f"{self.runs} runs>")

    def dump(self):
        """One line per kernel: number, result, kernel, threads, offset; below it the other nodes it computes."""
        lines = [f"plan of {len(self._singles)} nodes in {len(self.parts)} kernels, {self.n_threads} threads, work "
                 f"{self.work_nbytes:,} bytes"]
        for i, (p, at) in enumerate(zip(self.parts, self._starts, strict=False)):
            buf, offs = self.where(p.t)
            lines.append(f"{i:5d}  {p.t!r}  {p.kernel.name}  tasks {int(self.rows[at + r.N_TASKS])}  buffer {buf.id} + "
                         f"{offs}")
            lines += [f"{'':7}fused: {t!r}{', not stored' * (t.id in p.left_out)}" for t in p.nodes[:-1]]
        return "\n".join(lines)
