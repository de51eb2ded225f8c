"""Plans on the CPU: NODE rows with the addresses of compiled kernels, which the thread pool walks.

Replaying a plan enters jitted code once (engine/cpu/thread_pool.py).
"""
import weakref

import numpy as np

from ggjit.core.config import debug
from ggjit.core.host_buffer import HostBuffer
from ggjit.core.kernels_ahead import announce
from ggjit.cpu.check import require_right
from ggjit.cpu.fusion import fuse_nodes, still_permitted
from ggjit.cpu.phases import phases
from ggjit.cpu.repacked import RepackBuffer, is_repacked, kernel_of, repacked_ids
from ggjit.cpu.sharing import least_nanoseconds
from ggjit.cpu.thread_choice import choice_of
from ggjit.cpu.thread_pool import the_pool
from ggjit.cpu.walk import BARRIER_AFTER
from ggjit.graphs.graph_plan import Plan
from ggjit.graphs.plan_node import nodes_to_compute, plan_nodes
from ggjit.ops.core.errors import Cancelled, NotSupported, ParamError
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import ABORTED, N_FLAGS, N_INFO, N_TASKS, WORD
from ggjit.ops.core.shape import describe
from ggjit.ops.elementwise.custom_jit import RAISED
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native.jit import address_of, kernel_address

# A plan that would save less than so many of the least nodes worth sharing runs on thread 0 alone: the others sleep
# (waking takes 17-90 us), or spin beside it, which takes a third of its speed where both are threads of one core.
LEAST_SAVED = 3

_work = None                    # scratch memory of all plans of the process, which run one at a time
_earlier = []                   # weak references to smaller ones before it, which earlier plans still use
_growing = ForkLock()


def shared_work(backend, nbytes):
    """The process-wide scratch buffer, grown to `nbytes`; plans keep the one they were resolved with."""
    global _work
    with _growing:
        if _work is None or _work.size < nbytes:
            if _work is not None:
                _earlier[:] = [ref for ref in _earlier if ref() is not None] + [weakref.ref(_work)]
            _work = HostBuffer(backend.device.buffer_type(), nbytes)
        return _work


def work_memory():
    """Memory of the process-wide scratch buffer, and of earlier ones that plans keep."""
    buffers = [_work, *(ref() for ref in _earlier)]
    return [b._arena for b in buffers if b is not None and b._arena is not None]


def reserve_work(backend, graph):
    """Make the scratch buffer large enough for a graph, so that plans of smaller ones share it."""
    nodes, ids = nodes_to_compute(graph)
    kinds = plan_nodes(nodes, ids, lambda t: kernel_of(t, backend.n_threads), repacked_ids(nodes)).likes.values()
    shared_work(backend, max((p.kernel.work_nbytes for p in kinds if p.kernel is not None), default=0))


def likely_parts(graph, n_threads, repacked=frozenset()):
    """The PlanParts that a plan of the graph will most likely have; none where a node has no kernel.

    Runs are fused as if every node had memory of its own.  repacked: ids of leaves that will lie in CPU_REPACK.
    """
    nodes, ids = nodes_to_compute(graph)
    marked = frozenset(repacked) or repacked_ids(nodes)

    def choose(t):
        will_be = repacked and any(s is not None and s.id in repacked for s in t.src)
        return repack.kernel(t, n_threads) if will_be else kernel_of(t, n_threads)
    parts = plan_nodes(nodes, ids, choose, marked)
    return () if any(p.kernel is None for p in parts.likes.values()) else fuse_nodes(parts, graph, None, n_threads)


def needs(parts):
    """(name, modules) of the kernels of PlanNodes; functions of the user's have none."""
    return [(p.kernel.name, (p.module, *p.kernel.modules)) for p in parts if not hasattr(p.kernel, "code")]


class CPUPlan(Plan):
    """`compute()` runs the graph on the thread pool and returns when it is done."""

    def __init__(self, backend, graph, placement, fuse=None):
        self._marked = repacked_ids(graph.nodes)
        super().__init__(backend, graph, placement, fuse)

    # ------------------------------------------------------------ making
    def _choose(self, t):
        kernel = kernel_of(t, self.n_threads)
        if kernel is None:
            if (repacked := next((s for s in t.src if is_repacked(s)), None)) is not None:
                raise NotSupported(f"{describe(repacked)} lies in CPU_REPACK, which only products with F32 columns "
                                   f"(one batch, no gaps) and get_rows read, not {t!r}; load the model with "
                                   f"repack=False, or copy the values: gg.from_numpy(ctx, t.numpy())")
            raise NotSupported(f"the CPU has no kernel for {t!r} with sources {', '.join(describe(s) for s in t.src)}; "
                               f"`ggjit info` lists ops and types")
        return kernel

    def _fused(self, places):
        return fuse_nodes(self._singles, self.graph, places, self.n_threads) if self.fuse else self._singles

    def _codes(self):
        announce(needs(self.parts.used[0]))
        return super()._codes()

    def _code(self, part):
        kernel = part.kernel
        if hasattr(kernel, "code"):             # a function of the user's (ops/elementwise/custom.py)
            return kernel.code()
        return kernel_address(kernel.name, kernel.make, (part.module, *kernel.modules))

    def _lay_out(self, places):
        super()._lay_out(places)
        costs, at = self.parts.each(lambda p: float(p.kernel.cost)), np.array(self._starts[:-1], np.int64)
        tasks = self._tasks(costs)
        self.n_used, self.cost = int(tasks.max(initial=1)), float(costs.sum())
        own = any(hasattr(k, "code") for k in self._distinct())     # functions of users get the threads they asked for
        self.thread_choice = None if own else choice_of(self.n_used, self.cost)
        self._meet = None
        if self.n_used > 1:
            self._share(places, tasks, at)
        self.rows[at + N_TASKS] = tasks

    def _share(self, places, tasks, at):
        """Note where all threads meet, and give the nodes between two meetings work memory of their own."""
        if self._placed_work:
            meet = np.append((tasks[:-1] > 1) | (tasks[1:] > 1), tasks[-1] > 1)
            self.rows[at + N_FLAGS] = np.where(meet, BARRIER_AFTER, 0)
            return
        self._laid, self._shared = self._lines(places), (tasks, self.work_nbytes)
        self._meet, begins = self._phases(places)
        self.rows[at + N_FLAGS] = np.where(self._meet, BARRIER_AFTER, 0)
        sizes = self.parts.each(lambda p: p.kernel.work_nbytes)
        self.work_nbytes = int((begins + sizes).max(initial=0))
        self._work_begins = begins[sizes > 0]

    def _phases(self, places):
        return phases(self.parts, self._uses, self._tensors, places, *self._shared)

    def _still_fits(self, places):
        if not still_permitted(self.parts, places):
            return False
        if self._meet is None or self._lines(places) == self._laid:
            return True
        self._laid = self._lines(places)
        return self._phases(places)[0] == self._meet

    def _lines(self, places):
        """The addresses of its views, as bytes."""
        first = [0 if b is None else b.base for b in places.buffers]
        return places.addresses(self._view_numbers, first).tobytes()

    def _distinct(self):
        """Its kernels, each once."""
        return [p.kernel for p in self.parts.used[0]]

    def _tasks(self, costs):
        """Threads that run each node: all, or one, where the others would find nothing to do or too little.  costs: of
        the nodes."""
        n = self.n_threads
        least = least_nanoseconds(n) if n > 1 else np.inf
        large = (costs >= least) & ~self.parts.each(lambda p: p.kernel.alone)
        shares = float(costs[large].sum()) * (1 - 1 / n) >= LEAST_SAVED * least
        return np.where(large & shares, n, 1)

    def _check_place(self, t, buf):
        if (t.base.id in self._marked) != isinstance(buf, RepackBuffer):
            raise ParamError(f"{describe(t)} moved into or out of CPU_REPACK memory; make the plan again")

    def _is_particular(self, buf):
        return isinstance(buf, RepackBuffer)

    def _memory(self, buf):
        arena = buf._arena
        return arena, 0 if arena is None else address_of(arena)

    def _work_buffer(self):
        return shared_work(self.backend, self.work_nbytes)

    def _rows_written(self, memory):
        if not any(hasattr(kernel, "memory") for kernel in self._distinct()):
            return
        for t, kernel in zip(self.nodes, self.kernels, strict=True):
            if hasattr(kernel, "memory"):       # a function of the user's: its arrays hold on to their memory
                kernel.memory[:] = [(memory[id(b)], o) for b, o in (self.where(x) for x in (t, *t.src))]

    # ------------------------------------------------------------ running
    def _alone(self):
        return the_pool().alone()

    def _compute_in_debug(self):
        if "check" not in debug:
            super()._compute_in_debug()
            return
        if "poison" in debug and not self.graph.placed:
            self._poison()
        require_right(self)

    def _run(self, first, last):
        at, end = self._first + self._starts[first] * WORD, self._first + self._starts[last] * WORD
        status, node = the_pool().run(at, end, self.n_used, self.backend.abort_callback, self, first, last)
        if status == ABORTED:
            raise Cancelled("the computation was cancelled by the abort callback; its outputs are invalid")
        if status:
            at = (node - self._first) // WORD
            raise self._error(status, self._starts.index(at), int(self.rows[at + N_INFO]))

    def _error(self, status, i, value):
        kernel = self.kernels[i]
        if status == RAISED and hasattr(kernel, "error"):       # a function of the user's (ops/elementwise/custom.py)
            return kernel.error()
        return super()._error(status, i, value)
