"""Plans: a graph made ready to run.  Plan once, replay many times.

Making a plan chooses a kernel for every node, resolves every address and lays the NODE rows out in one int64 array;
replaying it enters jitted code once (engine/cpu/thread_pool.py).

    graph.nodes      mul_mat      add      view     soft_max          (views need no code: they are addresses)
                        |          |                   |
    plan.rows      [ NODE row | NODE row         | NODE row ]         int64 words, layout in ops/core/record.py
                     kernel     kernel             kernel             code addresses from the object cache
                     dst, src   dst, src           dst, src           arena base + offset

Leaves have a placement of their own, in the tensor table.  The placement of computed tensors belongs to the plan: two
plans of one graph may put them in different places, and nothing is ever written into the user's tensors.  If a buffer
or a leaf moved since the last run (`TABLE.placement_version`), the addresses are resolved again.
"""
import bisect
import functools
import itertools
import sys
import time
import weakref
from threading import get_ident

import numpy as np

from ggjit.core.buffer import USAGE_COMPUTE, buffer_by_id, freed
from ggjit.core.config import debug
from ggjit.core.run_lock import INSIDE, RunLock, refuse_nesting, take
from ggjit.core.shown import Shown
from ggjit.core.table import FREED, TABLE
from ggjit.core.versions import T_VERSION, written
from ggjit.cpu.check import require_right
from ggjit.cpu.fusion import fuse_nodes, single
from ggjit.cpu.kernel_error import kernel_error
from ggjit.cpu.plan_work import shared_work
from ggjit.cpu.repacked import RepackBuffer, is_repacked, kernel_of
from ggjit.cpu.thread_pool import the_pool
from ggjit.cpu.walk import BARRIER_AFTER
from ggjit.ops.core.errors import Cancelled, IndexRangeError, NotAllocated, NotSupported, Overwritten, ParamError
from ggjit.ops.core.record import (
    ABORTED,
    FLAG_OUTPUT,
    N_DST,
    N_FLAGS,
    N_ID,
    N_INFO,
    N_KERNEL,
    N_NEXT,
    N_PARAMS,
    N_SRC,
    N_TASKS,
    N_WORK,
    N_WORK_SIZE,
    T_BUFFER,
    T_NB,
    T_NE,
    T_OFFS,
    T_TYPE,
    T_WORDS,
    V_NB,
    V_NE,
    V_TYPE,
    V_WORDS,
    VIEW_OPS,
    WORD,
    node_words,
)
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import all_specs
from ggjit.ops.native.jit import address_of, kernel_address

# Nodes cheaper than this run on thread 0 alone: a barrier costs 0.3 us, and waking caches of other cores more.
TINY_NANOSECONDS = 4000.0
# A plan that would save less than so many tiny nodes by sharing runs on thread 0 alone: the others sleep (waking takes
# 17-90 us), or spin beside it, which takes a third of its speed where both are threads of one core.
LEAST_SAVED_TINIES = 3


_ran_last = weakref.ref(set())     # weak reference to the plan that ran last; dead at first


def mark_last(plan, nodes):
    """`t.numpy()` reads the plan that ran last; a plan replayed in a row has marked its tensors already."""
    global _ran_last
    if _ran_last() is not plan:
        _ran_last = weakref.ref(plan)
        for t in nodes:
            t._plan = _ran_last


class Plan(Shown):
    """`plan.compute()` runs the graph; `plan.numpy(t)` reads a result of this plan's last run.

    fuse: may runs of nodes become one kernel (engine/cpu/fusion.py)?  None: as the backend says.
    """

    def __init__(self, backend, graph, placement, fuse=None):
        self.backend, self.graph, self.placement = backend, graph, placement
        # a scheduler's part of a graph is left alone: other parts may read what is computed in between
        self.fuse = (getattr(backend, "fuse", False) if fuse is None else fuse) and not graph.located \
            and "check" not in debug
        self.n_threads = backend.n_threads
        self.runs = 0
        self._lock = RunLock()
        self.failed = False                 # the last run did not finish: there are no results
        computed = [t for t in graph.nodes if t.op not in VIEW_OPS and min(t.ne) > 0]
        self._repacked = {s.base.id for t in computed for s in t.src if is_repacked(s)}
        self._singles = [single(t, all_specs()[t.op], self._choose(t)) for t in computed]
        self._check_written()
        self._lay_out()
        self._resolve()
        if "plan" in debug:
            print(self.dump(), file=sys.stderr)

    # ------------------------------------------------------------ making
    def _choose(self, t):
        kernel = kernel_of(t, self.n_threads)
        if kernel is None:
            if repacked := next((s for s in t.src if is_repacked(s)), None):
                raise NotSupported(f"{describe(repacked)} lies in CPU_REPACK, which only products with F32 columns "
                                   f"read, not {t!r}; load the model with repack=False, or copy the values: "
                                   f"gg.from_numpy(ctx, t.numpy())")
            raise NotSupported(f"the CPU has no kernel for {t!r} with sources {', '.join(describe(s) for s in t.src)}; "
                               f"`ggjit info` lists ops and types")
        return kernel

    def where(self, t):
        """(buffer, byte offset) of any tensor of the graph, or None."""
        if t._at is not None:
            return t._at
        base = t.base
        row = TABLE.words[base.id]
        if row[T_BUFFER] >= 0:
            return buffer_by_id(int(row[T_BUFFER]), base), int(row[T_OFFS]) + t.view_offs
        found = None
        if self.placement is not None:
            found = self.placement.where.get(t.id)
            if found is None and t.view_src is not None:
                found = self.placement.where.get(base.id)
                found = found and (found[0], found[1] + t.view_offs)
        if found is None and row[T_BUFFER] == FREED:
            raise freed(base)
        return found

    def _check_written(self):
        """A plan that would write into mapped weights, or has tensors without memory, is refused as a whole."""
        device = self.graph.device if self.graph.located else self.backend.device
        for t in (p.t for p in self._singles):
            for x in (t, *(s for s in t.src if s is not None)):
                x._check()
                where = self.where(x)
                if where is None:
                    raise NotAllocated(f"{describe(x)}, needed by {t!r}, has no memory; allocate leaves with "
                                       f"alloc_ctx_tensors and the graph with GraphAllocator(...).alloc_graph(graph)")
                buf, offs = where
                if (x.base.id in self._repacked) != isinstance(buf, RepackBuffer):
                    raise ParamError(f"{describe(x)} moved into or out of CPU_REPACK memory; make the plan again")
                if not device.supports_buft(buf.buft):
                    raise NotSupported(f"{describe(x)} lies in {buf!r}, which {device.name} cannot reach; use a "
                                       f"Scheduler")
                if offs < 0 or offs + x.nbytes > buf.size:
                    raise IndexRangeError(f"{describe(x)} at {offs} does not fit {buf!r}")
            for x in (t, *written(t)[1:]):
                if self.where(x)[0].read_only:
                    raise ParamError(f"{t!r} would write into read-only {self.where(x)[0]!r}; work on a copy (gg.dup)")

    def _lay_out(self):
        """Choose fusions for the memory as it is and write the NODE rows, all but the addresses."""
        self.parts = fuse_nodes(self._singles, self.graph, self.where, self.n_threads) if self.fuse else self._singles
        self.nodes, self.kernels = [p.t for p in self.parts], [p.kernel for p in self.parts]
        sizes = [node_words(len(p.reads)) for p in self.parts]
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        self.work_nbytes = max((k.work_nbytes for k in self.kernels), default=0)
        store = np.zeros(starts[-1] + 8, np.int64)
        skip = -(store.__array_interface__["data"][0] // WORD) % 8
        self.rows = rows = store[skip:skip + starts[-1]]
        self._first = rows.__array_interface__["data"][0]
        self._starts = starts
        self._views = []                    # (word of the address in rows, tensor)
        self._work_words = np.array([at + N_WORK for at, k in zip(starts, self.kernels, strict=False)
                                     if k.work_nbytes], np.int64)
        words = TABLE.words
        tasks = self._tasks()
        self.n_used = max(tasks, default=1)
        for p, at, size, n, then in zip(self.parts, starts, sizes, tasks, [*tasks[1:], 1], strict=False):
            rows[at + N_KERNEL] = self._code(p)
            rows[at + N_NEXT] = size * WORD
            rows[at + N_TASKS], rows[at + N_FLAGS] = n, 0 if n == then == 1 else BARRIER_AFTER
            rows[at + N_WORK_SIZE] = p.kernel.work_nbytes
            rows[at + N_ID] = p.t.id
            rows[at + N_PARAMS:at + N_PARAMS + len(p.params)] = p.params
            for k, x in enumerate((p.t, *p.reads)):
                v = at + (N_DST if k == 0 else N_SRC + V_WORDS * (k - 1))
                if x is not None:
                    rows[v + V_NE:v + V_NE + 4] = words[x.id, T_NE:T_NE + 4]
                    rows[v + V_NB:v + V_NB + 4] = words[x.id, T_NB:T_NB + 4]
                    rows[v + V_TYPE] = words[x.id, T_TYPE]
                    self._views.append((v, x))

    def _tasks(self):
        """Threads that run each node: all, or one."""
        n = self.n_threads
        if n == 1:
            return [1] * len(self.kernels)
        large = [k.cost >= TINY_NANOSECONDS for k in self.kernels]
        saved = sum(k.cost for k in itertools.compress(self.kernels, large)) * (1 - 1 / n)
        return [n if x and saved >= LEAST_SAVED_TINIES * TINY_NANOSECONDS else 1 for x in large]

    @staticmethod
    def _code(part):
        kernel = part.kernel
        if hasattr(kernel, "code"):             # a function of the user's (ops/elementwise/custom.py)
            return kernel.code()
        return kernel_address(kernel.name, kernel.make, (part.module, *kernel.modules))

    def _resolve(self):
        """Write the address of every view; called again when something moved."""
        version = TABLE.placement_version
        placed = [self.where(t) for _, t in self._views]
        # the memory itself, taken once: freeing a buffer while this plan runs must not take it away
        memory = {id(b): (b, b._arena) for b, _ in filter(None, placed)}
        for (_, t), where in zip(self._views, placed, strict=True):
            if where is None or memory[id(where[0])][1] is None:
                raise NotAllocated(f"{describe(t)} lost its memory; allocate it again")
        base = {k: address_of(arena) for k, (_, arena) in memory.items()}
        at = np.fromiter((w for w, _ in self._views), np.int64, len(self._views))
        self.rows[at] = np.fromiter((base[id(b)] + o for b, o in placed), np.int64, len(placed))
        self._buffers = [b for b, _ in memory.values()]
        self._arenas = [arena for _, arena in memory.values()]
        for t, kernel in zip(self.nodes, self.kernels, strict=True):
            if hasattr(kernel, "memory"):       # a function of the user's: its arrays hold on to their memory
                kernel.memory[:] = [(memory[id(b)][1], o) for b, o in (self.where(x) for x in (t, *t.src))]
        self._written = [b for b in self._buffers if b.usage == USAGE_COMPUTE]
        self._me = weakref.ref(self)
        self._work = shared_work(self.backend, self.work_nbytes)
        self.rows[self._work_words] = self._work.base
        self._note_written(x.id for t in self._stored if t._at is None for x in written(t))
        self.__dict__.pop("_spans", None)
        self.resolved = version             # last: a failure above leaves the plan to be resolved again

    def _note_written(self, bases):
        """The leaves among them, which this plan computes into: their versions rise with a run
        (engine/core/versions.py)."""
        ids = sorted({i for i in bases if TABLE.words[i, T_BUFFER] >= 0})
        self._written_ids = np.array(ids, np.int64) if len(ids) > 1 else None
        self._written_cell = ids[0] * T_WORDS + T_VERSION if len(ids) == 1 else None

    # ------------------------------------------------------------ running
    def compute(self):
        """Run every node.  Errors: IndexRangeError (an id out of range, with the node and the value), Cancelled,
        StaleHandle, whatever a signal handler raises (KeyboardInterrupt).  After an error there is nothing to read."""
        # Few calls: kernels that work on megabytes empty the caches, and then Python finds every function and object
        # it touches far away.  After a 4 MiB copy of 375 us this takes 26 us; as ten small functions it took 37.
        if get_ident() in INSIDE:
            refuse_nesting()
        lock = self._lock
        try:
            if not lock.acquire(False):
                take(lock)
            if self.resolved != TABLE.placement_version:
                self._up_to_date()
            self.failed = True
            try:
                if debug:
                    self._compute_in_debug()
                elif self.nodes:
                    self._run(0, len(self.nodes))
                self.failed = False
                self.runs += 1
            finally:
                # At the end, for who copied a leaf meanwhile has part of it at most; and after a failure too, which
                # leaves some of it written.  No call stands before the count: a signal could come in and skip it.
                if self._written_cell is not None:      # NumPy takes 6 us
                    TABLE.cells[self._written_cell] += 1
                elif self._written_ids is not None:
                    TABLE.words[self._written_ids, T_VERSION] += 1
                for buf in self._written:
                    buf.last_plan = self._me
        finally:
            try:
                lock.release()              # no call before it: a signal could come in
            except RuntimeError:            # one did, while this waited for the lock
                lock = None
        if _ran_last is not self._me and not self.graph.located:
            mark_last(self, self.graph.nodes)

    def _compute_in_debug(self):
        if "poison" in debug and not self.graph.located:    # a split's memory holds what earlier splits computed
            self._poison()
        if "check" in debug:
            require_right(self)
        elif self.nodes:
            self._run(0, len(self.nodes))

    def _up_to_date(self):
        if self.resolved != TABLE.placement_version:
            self._check_written()
            if not all(p.permitted(self.where) for p in self.parts if len(p.nodes) > 1):
                self._lay_out()             # something moved to where a fused kernel would overwrite what it reads
            self._resolve()

    def _raise(self, status, node):
        if status == ABORTED:
            raise Cancelled("the computation was cancelled by the abort callback; its outputs are invalid")
        at = (node - self._first) // WORD
        t = next(t for t, start in zip(self.nodes, self._starts, strict=False) if start == at)
        value = int(self.rows[at + N_INFO])
        raise kernel_error(status, t, self.kernels[self.nodes.index(t)], value)

    def _poison(self):
        for t in self.nodes:
            buf, offs = self.where(t)
            if t.view_src is None and not any(s is not None and self.where(s) == (buf, offs) for s in t.src):
                buf._arena[offs:offs + t.nbytes] = 0xFF

    # ------------------------------------------------------------ reading
    def check_intact(self, t):
        """Overwritten, if a later node of this plan reused the memory of `t`."""
        where = self.where(t)
        if where is None or TABLE.words[t.base.id, T_BUFFER] >= 0:
            return
        position = self._positions.get(t.id)
        if position is None:
            return
        whole = next((p.t for p in self.parts if t.id in p.left_out), None)
        if whole is not None:
            raise Overwritten(f"{describe(t)} was never stored: one kernel computes {whole!r} from its sources; call "
                              f"gg.set_output on it before building the graph, or plan with fuse=False")
        if self.failed:
            raise Overwritten(f"{describe(t)} holds no result: the last run of its plan did not finish; compute it "
                              f"again")
        buf, lo = where
        if buf.last_plan is not None and buf.last_plan() is not self:
            raise Overwritten(f"the memory of {describe(t)} was used by another graph of the same GraphAllocator; "
                              f"read results before that, or give each graph an allocator of its own")
        ends, spans = self._spans
        later = bisect.bisect_right(ends, position)
        hit = np.flatnonzero((spans[later:, 0] == id(buf)) & (spans[later:, 1] < lo + t.nbytes)
                             & (lo < spans[later:, 2]))
        if hit.size:
            n = self._stored[later + int(hit[0])]
            remedy = "read it in a plan of another planner: this one (ggml-2023) keeps only the last results" \
                if t.flags & FLAG_OUTPUT else "call gg.set_output on it before building the graph"
            raise Overwritten(f"the memory of {describe(t)} was reused by {n!r}; {remedy}")

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
        """(place of each stored tensor in the graph's order, rows of (buffer, first byte, end) it takes)"""
        stored = self._stored
        spans = [(id(buf), offs, offs + t.nbytes) for t in stored for buf, offs in (self.where(t),)]
        return [self._positions[t.id] for t in stored], np.array(spans, np.int64).reshape(-1, 3)

    def numpy(self, t):
        """The values of `t` as this plan's last run left them."""
        with self._lock:
            t._check()
            self.check_intact(t)
            where = self.where(t)
            if where is None:
                raise NotAllocated(f"{describe(t)} is not part of this plan's graph")
            return t._decoded(where[0].host_bytes(where[1], t.nbytes))

    def view(self, t):
        """The values of `t` (a scalar type) without a copy: read-only, valid until this memory is used again."""
        buf, offs = self.where(t)
        a = t._elements(buf.host_bytes(offs, t.nbytes)).reshape(t.shape)
        a.flags.writeable = False
        return a

    def __repr__(self):
        return (f"<Plan of {len(self.nodes)} nodes for {self.backend!r}, work {self.work_nbytes:,} bytes, "
                f"{self.runs} runs>")

    def dump(self):
        """One line per kernel: number, result, kernel, threads, offset; below it the other nodes it computes."""
        lines = [f"plan of {len(self._singles)} nodes in {len(self.parts)} kernels, {self.n_threads} threads, work "
                 f"{self.work_nbytes:,} bytes"]
        for i, (p, at) in enumerate(zip(self.parts, self._starts, strict=False)):
            buf, offs = self.where(p.t)
            lines.append(f"{i:5d}  {p.t!r}  {p.kernel.name}  tasks {int(self.rows[at + N_TASKS])}  buffer {buf.id} + "
                         f"{offs}")
            lines += [f"{'':7}fused: {t!r}{', not stored' * (t.id in p.left_out)}" for t in p.nodes[:-1]]
        return "\n".join(lines)

    def run_nodes(self, first, last):
        """Run nodes first..last-1 alone (profiles and checks)."""
        with self._lock:
            self._up_to_date()
            self._run(first, last)

    def _run(self, first, last):
        """The same for who holds the lock of a plan that is up to date."""
        at, end = self._first + self._starts[first] * WORD, self._first + self._starts[last] * WORD
        status, node = the_pool().run(at, end, self.n_used, self.backend.abort_callback, self, first, last)
        if status:
            self._raise(status, node)

    def timed(self):
        """Run node by node: [(tensor, kernel name, nanoseconds)]; each figure holds one call into jitted code."""
        out = []
        for i, (t, k) in enumerate(zip(self.nodes, self.kernels, strict=True)):
            t0 = time.perf_counter_ns()
            self.run_nodes(i, i + 1)
            out.append((t, k.name, time.perf_counter_ns() - t0))
        return out
