"""Scheduler: one graph on several backends (ggml_backend_sched).

    sched = gg.Scheduler([gpu, cpu])            # first = highest priority; the last one takes inputs and what is left
    sched.reserve(largest_graph)                # optional: memory for the largest graph
    sched.graph_compute(graph)
    y = sched.numpy(t)
    print(sched.explain())                      # splits, causes, copies, bytes, times

The work is done elsewhere, in this order: sched_world (what devices can), sched_cut (assign, split), sched_layout
(memory), sched_run (copies and computes).  The user's tensors and graph are never edited, so a graph may be computed
any number of times, on several schedulers, from several threads.
"""
import weakref

from ggjit.events import event_free, event_new
from ggjit.graph import Graph
from ggjit.located import Located
from ggjit.ops.errors import NotAllocated, ParamError, StaleHandle, TypeMismatch
from ggjit.ops.locks import ForkLock
from ggjit.ops.record import T_BUFFER
from ggjit.ops.shape import describe
from ggjit.sched_cut import Cut
from ggjit.sched_layout import Layout, Memory, place_leaves
from ggjit.sched_run import Run
from ggjit.sched_world import World
from ggjit.table import TABLE
from ggjit.tensor import Tensor

PIPELINE_COPIES = 4             # GGML_SCHED_MAX_COPIES
PLANNERS = ("ggml", "best")


class Scheduler:
    """Computes graphs on several backends.

    backends      in order of priority
    bufts         buffer type per backend (None: its default)
    rules         "modern", "2024" or "2023": which ggml's assignment rules (engine/sched_rules.py)
    parallel      pipelining: four instances of every copy, so that the next run may start before the last one ended
    op_offload    large batches may run on a higher-priority backend although their weights lie on the host
    motion        move splits where that copies fewer bytes
    keep_weights  hold copies of weights between runs (fast, but they need the memory)
    planner       memory planner: "ggml" or "best" ("ggml-2023" does not keep outputs apart, which copies need)
    """

    def __init__(self, backends, bufts=None, rules="modern", parallel=False, op_offload=True, motion=False,
                 keep_weights=False, planner="ggml"):
        if planner not in PLANNERS:
            raise ParamError(f"planner {planner!r}: a Scheduler takes {' or '.join(PLANNERS)}")
        self._n_copies = PIPELINE_COPIES if parallel else 1
        self.world = World(backends, bufts, rules, op_offload, self._n_copies, keep_weights)
        self.motion, self.planner = motion, planner
        self.memory = Memory(self.world.own_bufts)
        self.events = [[event_new(b.device) if parallel or a else None for _ in range(self._n_copies)]
                       for b, a in zip(self.world.backends, self.world.is_async, strict=True)]
        self._pins, self._pinned, self._pin_version = {}, {}, 0         # tensor id -> backend number; and the tensors
        self._owned = {}                        # leaves placed here: id -> (tensor, backend number, buffer)
        self._runs = weakref.WeakKeyDictionary()
        self._cut = self._run = None
        self._callback = None
        self._alive = True
        self._lock = ForkLock()

    # ------------------------------------------------------------ facts
    @property
    def backends(self):
        return list(self.world.backends)

    @property
    def n_backends(self):
        return len(self.world.backends)

    @property
    def n_copies(self):
        """Instances of every copy: 1, or 4 with parallel=True."""
        return self._n_copies

    @property
    def n_splits(self):
        """Splits of the last graph."""
        return 0 if self._cut is None else self._cut.n_splits

    @property
    def splits(self):
        """Splits of the last graph: .backend, .nodes, .inputs."""
        return [] if self._cut is None else list(self._cut.splits)

    def buffer_type(self, backend):
        """The buffer type used for `backend`."""
        return self.world.own_bufts[self._number(backend)]

    def buffer_size(self, backend):
        """Bytes of compute memory held for `backend` (shared by backends of equal buffer types)."""
        return self.memory.size(self.world.slots[self._number(backend)])

    def _number(self, backend):
        for i, b in enumerate(self.world.backends):
            if b is backend:
                return i
        raise ParamError(f"{backend!r} is not one of this scheduler's backends "
                         f"({', '.join(b.name for b in self.world.backends)})")

    # ------------------------------------------------------------ pins
    def set_tensor_backend(self, t, backend):
        """Pin a tensor to a backend; holds until `reset`."""
        if not isinstance(t, Tensor):
            raise TypeMismatch(f"set_tensor_backend takes a tensor, got {type(t).__name__}")
        t._check()
        with self._lock:
            self._pins[t.id], self._pinned[t.id] = self._number(backend), t
            self._pin_version += 1

    def get_tensor_backend(self, t):
        """The backend `t` is pinned or was assigned to, or None."""
        if t.id in self._pins:
            return self.world.backends[self._pins[t.id]]
        i = None if self._cut is None else self._cut.local.get(t.id)
        return None if i is None else self._cut.backend_of(i)

    def set_eval_callback(self, callback):
        """callback(t, ask): ask=True: do you want to see this node?  ask=False: here it is; False ends the run.

        None switches it off.  Exceptions of the callback come out of graph_compute.
        """
        if callback is not None and not callable(callback):
            raise TypeMismatch(f"the eval callback must be callable, got {callback!r}")
        self._callback = callback

    # ------------------------------------------------------------ planning
    def split_graph(self, graph):
        """Assign and split only; nothing is allocated.  Errors: NotSupported, GraphError."""
        with self._lock:
            self._cut = self._make_cut(graph)
            return self.splits

    def _check(self, graph):
        if not self._alive:
            raise StaleHandle(f"{self!r} was freed; make a new one")
        if not isinstance(graph, Graph):
            raise TypeMismatch(f"a Scheduler computes graphs (gg.Graph), got {type(graph).__name__}")
        for ctx in graph._contexts:
            ctx._check()

    def _make_cut(self, graph):
        self._check(graph)
        owned = {id_: b for id_, (t, b, buf) in self._owned.items()
                 if buf.alive and int(TABLE.words[id_, T_BUFFER]) == buf.id}
        return Cut.in_order(self.world, graph, self._pins, owned, self.motion)

    def reserve(self, graph):
        """Make the compute buffers large enough for `graph`.  Errors: OutOfMemory; what was held before stays."""
        with self._lock:
            self._cut = self._make_cut(graph)
            self.memory.grow(Layout(self._cut, self._n_copies, self.planner).chunk_sizes, self.synchronize)

    def reserve_size(self, graph):
        """Bytes per backend that `reserve` would hold; allocates nothing."""
        with self._lock:
            sizes = Layout(self._make_cut(graph), self._n_copies, self.planner).chunk_sizes
        return [sum(sizes[slot]) if slot == i else 0 for i, slot in enumerate(self.world.slots)]

    def alloc_graph(self, graph):
        """Split `graph` and give it memory, leaves without any included; afterwards inputs can be set."""
        with self._lock:
            self._prepare(graph)

    def _prepare(self, graph):
        self._check(graph)
        kept = self._runs.get(graph)
        if kept is not None and kept[0] == self._state(kept[1].cut):
            run = kept[1]
        else:
            cut = self._make_cut(graph)
            layout = Layout(cut, self._n_copies, self.planner)
            for t, b, buf in place_leaves(cut):
                self._owned[t.id] = (t, b, buf)
            run = Run(self, graph, cut, layout)
        self.memory.grow(run.layout.chunk_sizes, self.synchronize)
        if kept is None or kept[1] is not run:
            self._runs[graph] = (self._state(run.cut), run)
        self._cut, self._run = run.cut, run
        return run

    def _state(self, cut):
        """What a cut depends on besides the graph: pins, and which buffers of which use the tensors lie in."""
        placed = TABLE.words[cut.ids, T_BUFFER]
        return self._pin_version, self.motion, placed.tobytes(), tuple(b.usage for b in cut.buffers)

    # ------------------------------------------------------------ computing
    def graph_compute(self, graph):
        """Compute `graph` and wait.  Errors: those of alloc_graph and of the backends; Cancelled."""
        with self._lock:
            self.graph_compute_async(graph)
            self.synchronize()

    def graph_compute_async(self, graph):
        """Submit `graph`; asynchronous backends may still be at work when this returns (`synchronize`)."""
        with self._lock:
            run = self._prepare(graph)
            try:
                run.compute(self._callback)
            except BaseException:
                self._settle_down()
                raise

    def _settle_down(self):
        """After an error: let every stream come to rest; their own errors follow from the first."""
        for b in self.world.backends:
            try:
                b.synchronize()
            except Exception as e:
                self.last_secondary_error = e

    def synchronize(self):
        """Wait for all backends.  Errors of asynchronous work come out here."""
        first = None
        for b in self.world.backends:
            try:
                b.synchronize()
            except Exception as e:
                first = first or e
        if first is not None:
            for _, run in list(self._runs.values()):
                run.forget_copies()
            raise first

    def numpy(self, t):
        """The values of `t` as this scheduler's last run left them."""
        with self._lock:
            self.synchronize()
            t._check()
            where = None if self._run is None else self._run.where(t)
            if where is None:
                raise NotAllocated(f"{describe(t)} was not computed by this scheduler")
            self._run.check_intact(t)
            return Located(t, t.src, where).numpy()

    # ------------------------------------------------------------ state
    def reset(self):
        """Forget pins, splits and the places of leaves this scheduler placed; memory stays for the next graph."""
        with self._lock:
            self.synchronize()
            self._pins.clear()
            self._pinned.clear()
            self._pin_version += 1
            for t, _, buf in self._owned.values():
                if t.ctx.alive and int(TABLE.words[t.id, T_BUFFER]) == buf.id:
                    TABLE.place(t.id, -1, 0)
                    t.ctx.buffers = [b for b in t.ctx.buffers if b is not buf]
            for _, _, buf in self._owned.values():      # now: a tensor in a freed buffer counts as lost
                buf.free()
            self._owned.clear()
            self._runs.clear()
            self._cut = self._run = None

    def free(self):
        """Give everything back; a second call does nothing."""
        with self._lock:
            if not self._alive:
                return
            self.reset()
            self._alive = False
            self.memory.free()
            for events in self.events:
                for e in events:
                    event_free(e)

    # ------------------------------------------------------------ showing
    @property
    def copied_nbytes(self):
        """Bytes the last run copied between backends."""
        return 0 if self._run is None else self._run.copied_nbytes

    def explain(self):
        """Splits, causes, copies, bytes and times of the last graph: str() is text, notebooks show HTML, .dot draws."""
        from ggjit.sched_explain import Explanation
        if self._cut is None:
            raise ParamError("explain: no graph was split yet; call split_graph, alloc_graph or graph_compute first")
        return Explanation(self._cut, self._run if self._run is not None and self._run.cut is self._cut else None)

    def __repr__(self):
        return f"<Scheduler {', '.join(b.name for b in self.world.backends)}: rules {self.world.rules}>"
