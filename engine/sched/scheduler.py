"""Scheduler: one graph on several backends (ggml_backend_sched).

    sched = gg.Scheduler([gpu, cpu])            # first = highest priority; the last one takes inputs and what is left
    sched.reserve(largest_graph)                # optional: memory for the largest graph
    sched.graph_compute(graph)
    y = sched.numpy(t)
    print(sched.explain())                      # splits, causes, copies, bytes, times

The work is done elsewhere, one way (`prepare`): `assignment` (assign, split), `layout` (places), `run` (copies and
computes).  This class owns what outlives a run: compute memory, events, the cache of runs.  The user's tensors and
graph are never edited, so a graph may be computed any number of times, on several schedulers, from several threads.
"""
import contextlib
import dataclasses
import functools
import operator

import numpy as np

from ggjit.alloc.ggml.problem import check_time_limit
from ggjit.core.arguments import expect, expect_flag, typed_call
from ggjit.core.compute_buffers import ComputeBuffers
from ggjit.core.events import event_free, event_new, event_record, event_synchronize
from ggjit.core.lifetime import AtEnd, Handle, call_all
from ggjit.core.pending import IN_FLIGHT, submitted, wait_for_others, waited_for
from ggjit.core.run_lock import RunLock, refuse_nesting
from ggjit.core.table import TABLE
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.graphs.plan_cache import PlanCache
from ggjit.ops.core.errors import GgjitError, NotAllocated, ParamError, StaleHandle, TypeMismatch
from ggjit.ops.core.shape import describe
from ggjit.sched.explain import Explanation, scheduler_html
from ggjit.sched.prepare import SchedSettings, assign, lay_out, prepare
from ggjit.sched.support import Support
from ggjit.tensors.tensor import Tensor

PIPELINE_COPIES = 4             # GGML_SCHED_MAX_COPIES
PLANNERS = ("ggml", "best")


def _check_planner(planner):
    if planner not in PLANNERS:
        raise ParamError(f"planner {planner!r}: a Scheduler takes {' or '.join(PLANNERS)}")


class _Setting:
    """A setting of a Scheduler that may be changed between runs."""

    def __init__(self, check):
        self.check = check

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, sched, owner=None):
        return self if sched is None else getattr(sched.settings, self.name)

    def __set__(self, sched, value):
        self.check(value)
        setattr(sched.settings, self.name, value)


class Scheduler(Handle):
    """Computes graphs on several backends.

    backends      in order of priority
    bufts         buffer type per backend (None: its default)
    rules         "modern", "2024" or "2023": which ggml's assignment rules (engine/sched/rules.py)
    parallel      pipelining: four instances of every copy, so that the next run may start before the last one ended
    op_offload    large batches may run on a higher-priority backend although their weights lie on the host
    motion        move splits where that copies fewer bytes
    keep_weights  hold copies of weights between runs (fast, but they need the memory)
    planner       memory planner: "ggml" or "best" ("ggml-2023" does not keep outputs apart, which copies need);
                  `reserve_size(graph, "best")` says what "best" would take
    time_limit    seconds "best" may search
    work          place the work memory of the kernels with the rest, each live for its own node, where that takes
                  fewer bytes than a buffer beside it (that of backends whose `work_nbytes` says so: the CPU's)
    """

    motion, work = (_Setting(functools.partial(expect_flag, what=f"Scheduler: {name}")) for name in ("motion", "work"))
    planner, time_limit = _Setting(_check_planner), _Setting(check_time_limit)

    @typed_call
    def __init__(self, backends, bufts=None, rules="modern", parallel=False, op_offload=True, motion=False,
                 keep_weights=False, planner="ggml", time_limit=1.0, work=False):
        for name, value in dict(parallel=parallel, op_offload=op_offload, motion=motion, keep_weights=keep_weights,
                                work=work).items():
            expect_flag(value, f"Scheduler: {name}")
        _check_planner(planner)
        check_time_limit(time_limit)
        self._n_copies = PIPELINE_COPIES if parallel else 1
        self.support = Support(backends, bufts, rules, op_offload, self._n_copies, keep_weights)
        self.settings = SchedSettings(self.support, motion, planner, time_limit, work)
        self.memory = ComputeBuffers(self.support.own_bufts)
        self.events = []
        self._end = AtEnd(functools.partial(_release, self.memory, self.events))
        self._make_events(parallel)
        self._runs = PlanCache()
        self._assigned = self._run = None
        self._callback = self._copy_callback = None
        self._alive, self._computing = True, False
        self._lock = RunLock()

    def _make_events(self, parallel):
        try:
            for b, is_async in zip(self.support.backends, self.support.is_async, strict=True):
                self.events.append([])
                for _ in range(self._n_copies):
                    self.events[-1].append(event_new(b.device) if parallel or is_async else None)
        except BaseException as e:
            call_all(self._end.now, after=e)
            raise

    # ------------------------------------------------------------ facts
    @property
    def backends(self):
        """Its backends, first the one that is preferred."""
        return list(self.support.backends)

    @property
    def n_backends(self):
        """How many backends it has."""
        return len(self.support.backends)

    @property
    def n_copies(self):
        """Instances of every copy: 1, or 4 with parallel=True."""
        return self._n_copies

    @property
    def n_splits(self):
        """Splits of the last graph."""
        return 0 if self._assigned is None else self._assigned.n_splits

    @property
    def splits(self):
        """Splits of the last graph: .backend, .nodes, .inputs."""
        return [] if self._assigned is None else list(self._assigned.splits)

    def buffer_type(self, backend):
        """The buffer type used for `backend`."""
        return self.support.own_bufts[self._number(backend)]

    def buffer_size(self, backend):
        """Bytes of compute memory held for `backend`; backends of equal buffer types share it, the first one counts."""
        i = self._number(backend)
        return self.memory.size(i) if self.support.buft_ids[i] == i else 0

    def _number(self, backend):
        for i, b in enumerate(self.support.backends):
            if b is backend:
                return i
        raise ParamError(f"{backend!r} is not one of this scheduler's backends "
                         f"({', '.join(b.name for b in self.support.backends)})")

    # ------------------------------------------------------------ pins
    def set_tensor_backend(self, t, backend):
        """Pin a tensor to a backend; holds until `reset`."""
        expect(t, Tensor, "set_tensor_backend")
        t._check()
        with self._lock:
            self.settings.pins[t.id] = t, self._number(backend)
            self.settings.pin_version += 1

    def get_tensor_backend(self, t):
        """The backend `t` is pinned or was assigned to, or None."""
        expect(t, Tensor, "get_tensor_backend")
        t._check()
        pinned, b = self.settings.pins.get(t.id, (None, -1))
        if pinned is not None and pinned.generation == t.generation:
            return self.support.backends[b]
        i = None if self._assigned is None else self._assigned.number_of(t)
        return None if i is None else self._assigned.backend_of(i)

    def set_eval_callback(self, callback):
        """callback(t, ask): ask=True: do you want to see this node?  ask=False: here it is; False ends the run.

        None switches it off.  Exceptions of the callback come out of graph_compute.
        """
        if callback is not None and not callable(callback):
            raise TypeMismatch(f"the eval callback must be callable, got {callback!r}")
        self._callback = callback

    def set_copy_callback(self, callback):
        """callback(backend, src, dst, nodes): weights in host memory are about to be copied for a split.

        src: the weight; dst: its copy on `backend`; nodes: those of the split.  The split's other inputs were copied
        before.  True: the callback wrote into dst what the nodes need (gg.tensor_set); False: all of it is copied.
        None switches it off.  Bytes that a callback copies are not in `copied_nbytes`.
        Source: ggml_backend_sched_set_copy_callback.
        """
        if callback is not None and not callable(callback):
            raise TypeMismatch(f"the copy callback must be callable, got {callback!r}")
        self._copy_callback = callback

    # ------------------------------------------------------------ planning
    def split_graph(self, graph):
        """Assign and split only; nothing is allocated.  Errors: NotSupported, GraphError."""
        with self._lock:
            self._check(graph)
            self._assigned = assign(self.settings, graph)
            return self.splits

    def _refuse_callbacks(self):
        """Callbacks of a run of this scheduler would change the run under way."""
        if self._computing:
            raise GgjitError(f"{self!r} is computing: its eval callback may read results, but must not plan, compute "
                             f"or reset; return False to end the run, and do it afterwards")

    def _check(self, graph):
        if self._computing:
            self._refuse_callbacks()
        self._check_graph(graph)

    def _check_graph(self, graph):
        if not self._alive:
            raise StaleHandle(f"{self!r} was freed; make a new one")
        if not isinstance(graph, Graph):
            raise TypeMismatch(f"a Scheduler computes graphs (gg.Graph), got {type(graph).__name__}")
        graph.check_alive()

    def reserve(self, graph):
        """Make the compute buffers large enough for `graph`.  Errors: OutOfMemory; what was held before stays."""
        with self._lock:
            self._check(graph)
            self._assigned = assign(self.settings, graph)
            self.memory.grow(lay_out(self.settings, self._assigned).chunk_sizes, self.synchronize)

    def reserve_size(self, graph, planner=None, work=None):
        """Bytes per backend that `reserve` would hold; allocates nothing.  planner, work: as if they were these."""
        settings = dataclasses.replace(self.settings, planner=planner or self.planner,
                                       work=self.work if work is None else expect_flag(work, "reserve_size: work"))
        _check_planner(settings.planner)
        with self._lock:
            self._check_graph(graph)
            sizes = lay_out(settings, assign(settings, graph)).chunk_sizes
        return [sum(sizes[buft_id]) if buft_id == i else 0 for i, buft_id in enumerate(self.support.buft_ids)]

    def alloc_graph(self, graph):
        """Split `graph` and give it memory, leaves without any included; afterwards inputs can be set."""
        with self._lock:
            self._prepared(graph)

    def _prepared(self, graph):
        """The Run of the graph, with memory for it."""
        self._check(graph)
        run = self._runs.get(graph, operator.methodcaller("key_under", self.settings), functools.partial(
            prepare, self.settings, self.memory, self.events, self.synchronize, graph))
        now = TABLE.placement_version, self.memory.version
        if run.grown_for != now:                            # chunks may have been replaced or freed
            self.memory.grow(run.layout.chunk_sizes, self.synchronize)
            run.grown_for = now
        self._assigned, self._run = run.assigned, run
        return run

    # ------------------------------------------------------------ computing
    def graph_compute(self, graph):
        """Compute `graph` and wait.  Errors: those of alloc_graph and of the backends; Cancelled."""
        with self._lock:
            self._submit(graph)
            self.synchronize()

    def graph_compute_async(self, graph):
        """Submit `graph`; asynchronous backends may still be at work when this returns (`synchronize`).

        Reading values (`t.numpy()`, `t.bytes()`, np.asarray) waits for them; `t.set` does not.
        """
        with self._lock:
            self._submit(graph)
            submitted(self, self._run)

    def _submit(self, graph):
        run = self._prepared(graph)
        if self.memory.used_by is not run:      # another run has used this memory: wait for it first
            self.synchronize()
        wait_for_others(self, run)
        self._computing = True
        run.copy_callback = self._copy_callback
        try:
            run.compute(self._callback)
        except BaseException:
            self._bring_to_rest()
            raise
        finally:
            self._computing = False

    def _bring_to_rest(self):
        """After an error, let every stream come to rest.  Errors of streams are dropped: they follow from the first."""
        for b in self.support.backends:
            with contextlib.suppress(Exception):
                b.synchronize()

    def synchronize(self):
        """Wait for all backends.  Errors of asynchronous work come out here."""
        refuse_nesting()
        flight, first = IN_FLIGHT.get(self), None
        for b in self.support.backends:
            try:
                b.synchronize()
            except Exception as e:
                first = first or e
        waited_for(self, flight)
        if first is not None:
            for run in {*self._runs.plans(), *(flight or ()), *filter(None, [self._run])}:
                run.spoil(first)
            raise first

    def numpy(self, t):
        """The values of `t` as this scheduler's last run left them."""
        expect(t, Tensor, "Scheduler.numpy")
        with self._lock:
            self.synchronize()
            t._check()
            runs = [self._run, *self._runs.plans()]            # of the last graph, of those before
            run = next((r for r in runs if r is not None and r.where(t) is not None), None)
            if run is None:
                raise NotAllocated(f"{describe(t)} was not computed by this scheduler")
            run.check_intact(t)
            return PlacedTensor(t, t.src, run.where(t)).numpy()

    def compute_and_read(self, graph, *tensors):
        """Run `graph` and return the values of `tensors`, one array or a tuple, as one step: another thread's graph on
        this scheduler, which would use the same memory, waits.

            y = sched.compute_and_read(graph, logits)

        Errors: those of graph_compute and numpy.
        """
        with self._lock:
            self.graph_compute(graph)
            values = tuple(self.numpy(t) for t in tensors)
        return values[0] if len(values) == 1 else values

    def submit_and_read(self, graph, t):
        """Submit `graph`; returns a function that waits for the values of `t` and gives them as `numpy` does.  Other
        graphs may be submitted before it is called, and are then under way at once (a pipeline) where devices work
        asynchronously.

            reads = []
            for values in batches:
                x.set(values)
                reads.append(sched.submit_and_read(graph, y))
            results = [read() for read in reads]

        Errors: those of graph_compute_async; of `t`, NotAllocated; those of the run come out of the function.
        """
        expect(t, Tensor, "Scheduler.submit_and_read")
        with self._lock:
            self.graph_compute_async(graph)
            where = self._run.where(t)
            if where is None:
                raise NotAllocated(f"{describe(t)} was not computed by this scheduler")
            backend, x = self.backends[self._run.backend_of(t)], PlacedTensor(t, t.src, where)
            raw, event = backend.get_tensor_async(x), event_new(backend.device)
            if event is not None:
                event_record(event, backend)

        def read():
            if event is None:
                backend.synchronize()
            elif event.alive:
                event_synchronize(event)
                event_free(event)
            return t._decoded(np.frombuffer(raw, np.uint8))
        return read

    # ------------------------------------------------------------ state
    def reset(self):
        """Forget pins, splits and the places of leaves this scheduler placed; memory stays for the next graph.

        Errors of streams and buffers come out after everything was forgotten.
        """
        with self._lock:
            self._refuse_callbacks()
            call_all(self.synchronize, self._forget)

    def _forget(self):
        self._runs.clear()
        self._assigned = self._run = None
        self.settings.forget()

    def free(self):
        """Give everything back; a second call does nothing.  Errors come out after all of it was tried."""
        with self._lock:
            self._refuse_callbacks()
            if self._alive:
                self._alive = False
                call_all(self.reset, self._end.now)

    # ------------------------------------------------------------ showing
    @property
    def copied_nbytes(self):
        """Bytes the last run copied between backends."""
        return 0 if self._run is None else self._run.copied_nbytes

    def explain(self):
        """Splits, causes, copies, bytes and times of the last graph: str() is text, notebooks show HTML, .dot draws."""
        if self._assigned is None:
            raise ParamError("explain: no graph was split yet; call split_graph, alloc_graph or graph_compute first")
        run = self._run
        return Explanation(self._assigned, run if run is not None and run.assigned is self._assigned else None)

    def __repr__(self):
        return f"<Scheduler {', '.join(b.name for b in self.support.backends)}: rules {self.support.rules}>"

    def _repr_html_(self):
        return scheduler_html(self)


def _release(memory, events):
    """Free the memory and events that a scheduler holds of its devices.  Also called when one is dropped without
    `free`."""
    call_all(memory.free, *(functools.partial(event_free, e) for of_backend in events for e in of_backend))
