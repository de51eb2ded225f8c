"""The trace buffer of a profiled plan, into which runs write the clock: one page for each run.

    trace_buffer   | page 0                          | page 1           | ...      int64 (pages, threads, nodes, 2)
            | thread 0: start end, start end  | thread 0: ...    |          clock ticks; 0: this thread skipped the node
            | thread 1: start end, start end  | thread 1: ...    |

Run r of the plan writes page r % pages.  A trace buffer begins with two pages and doubles while it may; then it
is written over: its memory stays in the caches, and fresh memory would cost more than the clock does.  What is about to
be written over is added to sums by jitted code, so that a run costs Python no more than an address and a counter.
"""
import numpy as np

from ggjit.ops.core.host_memory import empty, zeros
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import WORD
from ggjit.ops.native.jit import native
from ggjit.ops.native.mem import ld_i64, st_i64

SHEET_NBYTES = 1 << 18
MAX_SPARE = 4                   # trace buffers whose memory is kept for the next profile


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def add_runs(first, end, ticks, n_pages, n_threads, n_nodes, wall, busy):
    """Add runs first..end-1 to wall (nodes), first start to last end, and busy (nodes, threads)."""
    for run in range(first, end):
        page = ticks + run % n_pages * n_threads * n_nodes * 2 * WORD
        for i in range(n_nodes):
            began = ended = 0
            for ith in range(n_threads):
                at = page + (ith * n_nodes + i) * 2 * WORD
                b, e = ld_i64(at), ld_i64(at + WORD)
                if e != 0:
                    began = b if ended == 0 else min(began, b)
                    ended = max(ended, e)
                    spent = busy + (i * n_threads + ith) * WORD
                    st_i64(spent, ld_i64(spent) + e - b)
            st_i64(wall + i * WORD, ld_i64(wall + i * WORD) + ended - began)
    return 0


class TraceBuffer:
    """The runs of some nodes of a plan while profiles are open.

    facts: what the profile that was open first knows of the nodes; rows: the plan's NODE rows, held so that their id is
    not given to others; n_runs: how many; turn_at: the count at which the next page is not free.
    """
    __slots__ = ("rows", "facts", "n_runs", "n_added", "_lock", "wall", "busy", "ticks", "n_pages", "address",
                 "page_nbytes", "thread_nbytes", "turn_at")

    def __init__(self, rows, facts, n_threads, n_nodes, memory):
        """memory: an array of an earlier trace buffer, or None."""
        self.rows, self.facts = rows, facts
        self.n_runs, self.n_added, self._lock = 0, 0, ForkLock()
        self.wall, self.busy = zeros(n_nodes, np.int64, "profile"), np.zeros((n_nodes, n_threads), np.int64)
        page = n_threads * n_nodes * 2
        n = max(2, 0 if memory is None else min(memory.size, SHEET_NBYTES // WORD) // page)
        small = memory is None or memory.size < n * page
        memory = empty(n * page, np.int64, "profile") if small else memory.reshape(-1)
        self._write_to(memory[:n * page].reshape(n, n_threads, n_nodes, 2))
        self.ticks.fill(0)
        self.turn_at = n - 1

    def _write_to(self, ticks):
        self.ticks, self.n_pages = ticks, len(ticks)
        self.address = ticks.__array_interface__["data"][0]
        self.page_nbytes, self.thread_nbytes = ticks.strides[:2]

    def page(self):
        """Address of the page for the next run."""
        return self.address + self.n_runs % self.n_pages * self.page_nbytes

    def turn(self):
        """Called when all pages but one are written: double them, or begin again with the first.  One page stays free
        for a run that may fail."""
        sums = self.sums()[0]
        if self.ticks.nbytes * 2 <= SHEET_NBYTES:
            self._write_to(np.concatenate([self.ticks, np.zeros_like(self.ticks)]))
            self.turn_at = self.n_pages - 1
        else:
            self.turn_at = sums + self.n_pages - 1

    def sums(self):
        """(n_runs, wall, busy) up to now."""
        with self._lock:
            n = self.n_runs
            add_runs(self.n_added, n, self.ticks, *self.ticks.shape[:3], self.wall, self.busy)
            self.n_added = n
            return n, self.wall.copy(), self.busy.copy()

    def kept(self, since):
        """(runs, threads, nodes, 2): the ticks of those after run `since` that are still there one by one."""
        n = self.n_runs
        return self.ticks[np.arange(max(since, n - self.n_pages + 1), n) % self.n_pages]


class Tracing:
    """The thread pool's side of profiles.  watchers: the open ones; trace_buffers: {(id of rows, nodes i, j):
    TraceBuffer}
    """

    def __init__(self, words, at, walk):
        """words[at:at + 2]: where the jitted code finds the bytes of a thread's part of a page, and the address of the
        walk that fills it (a Native, compiled when first watched)."""
        self._words, self._fixed_place, self._walk = memoryview(words), at, walk
        self.watchers, self.trace_buffers, self._last, self._spare = [], {}, None, []

    def watch(self, profile):
        self._words[self._fixed_place + 1] = self._walk.address
        self.watchers.append(profile)

    def leave(self, profile):
        self.watchers = [p for p in self.watchers if p is not profile]
        if not self.watchers:
            self._spare = [s.ticks for s in self.trace_buffers.values()][:MAX_SPARE] or self._spare
            self.trace_buffers, self._last = {}, None

    def trace_buffer(self, plan, i, j):
        """The TraceBuffer of a plan's nodes i..j-1 with a page free for the run that comes next; None: no profile is
        open.
        """
        watchers = self.watchers                # another thread may close its profile while this one gets here
        if not watchers:
            return None
        trace_buffer = self.trace_buffers.get((id(plan.rows), i, j)) or self._new(plan, i, j, watchers[0].facts)
        if trace_buffer is not self._last:      # the words are set before `_last`: a signal may come in between
            self._words[self._fixed_place], self._last = trace_buffer.thread_nbytes, trace_buffer
        if trace_buffer.n_runs == trace_buffer.turn_at:
            trace_buffer.turn()
        return trace_buffer

    def _new(self, plan, i, j, facts_of):
        facts = facts_of(plan, i, j)
        memory = self._spare.pop() if self._spare else None
        trace_buffer = self.trace_buffers[id(plan.rows), i, j] = TraceBuffer(plan.rows, facts, plan.n_threads, j - i,
                                                                             memory)
        return trace_buffer
