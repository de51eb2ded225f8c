"""The thread pool: one per process, made like ggml's.  N-1 threads sit in one jitted loop; the caller is thread 0.

    Pool.run(first NODE, end)  ->  sync page  ->  engine/cpu/walk.py: thread 0 and the workers walk the NODE rows

The sync page is the memory all threads share (offsets: ops/native/node.py, engine/cpu/walk.py).

Fork: threads do not survive; the child drops the pool and builds a new one at its next compute (`_leave_walk`
for a fork inside a computation).
"""
import atexit
import contextlib
import ctypes
import os
import threading
import time
from threading import get_ident

import numpy as np

from ggjit.core.arguments import expect
from ggjit.core.config import default_threads
from ggjit.core.run_lock import KERNEL_THREADS, acquire_or_raise, refuse_nesting, release_if_held
from ggjit.cpu import walk
from ggjit.cpu.team import S_MILLISECOND, S_POSTED
from ggjit.cpu.ticks import Tracing
from ggjit.ops.core.errors import NotSupported, ParamError
from ggjit.ops.core.host_memory import start
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import N_KERNEL, N_TASKS, OK, WORD
from ggjit.ops.core.whole_numbers import is_whole, whole
from ggjit.ops.elementwise.custom import IN_PYTHON
from ggjit.ops.native import jobs
from ggjit.ops.native.node import S_ABORT, S_COUNT, S_INTERVAL, S_POLL
from ggjit.ops.native.waiting import WAY

POLL_SECONDS = 0.010
SPIN_SECONDS = 150e-6   # how long an idle worker spins before it sleeps, at poll level 50 (ggml's default)

_RUN = ctypes.PYFUNCTYPE(*[ctypes.c_int64] * 7)         # engine/cpu/walk.py: run, called without looking for arrays
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_ABORT_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int)       # called by thread 0 while it holds the GIL


class Pool:
    """The threads and their sync page.  Use `the_pool()`."""

    def __init__(self):
        memory = np.zeros(walk.PAGE_NBYTES + 64, np.uint8)
        start = -memory.__array_interface__["data"][0] % 64
        self._page = memory[start:start + walk.PAGE_NBYTES]
        self.words = memoryview(self._page.view(np.int64))      # a word at a time: faster than through NumPy
        self.sync = self._page.__array_interface__["data"][0]
        self._lock = threading.RLock()          # reentrant, so that only its holder can release it
        self.n_walking = 0                      # threads of the run under way
        self._threads, self._stopped = [], False
        self._native_ids = {}                   # worker number -> the system's thread id
        self._affinity = None
        self.tracing = Tracing(self.words, walk.S_TRACE // WORD + 1, walk.walk_traced)
        self._posting = threading.Condition()   # where idle workers cannot sleep in the system they wait here
        self._posted = 0                        # number of the newest job they may wait for
        self.words[walk.S_CAN_SLEEP // WORD] = bool(WAY)
        self._per_second = _cycles_per_second()
        self.words[S_INTERVAL // WORD] = int(POLL_SECONDS * self._per_second)
        self.words[S_MILLISECOND // WORD] = int(self._per_second / 1000)
        self.words[S_POLL // WORD] = walk.poll.address
        self.poll = 50
        self._enter = _RUN(walk.run.address)         # compiled before any thread starts
        self.open_barrier = _OPEN(walk.open_barrier.address)      # here: a forked child must not compile

    @property
    def poll(self):
        """How eagerly idle workers wait, 0 (asleep at once) to 100 (0.3 ms of spinning); 50 as in ggml."""
        return self._poll

    @poll.setter
    def poll(self, level):
        if not is_whole(level, 0, 100):
            raise ParamError(f"poll must be an integer from 0 to 100, got {level!r}")
        self._poll = int(level)
        self.words[walk.S_SPIN // WORD] = int(SPIN_SECONDS * level / 50 * self._per_second)

    @property
    def affinity(self):
        """Cores of the workers, a list; None: wherever the system likes.  Setting it is `set_affinity`."""
        return self._affinity

    @affinity.setter
    def affinity(self, cores):
        self.set_affinity(cores)

    def __repr__(self):
        where = "any core" if self._affinity is None else f"cores {self._affinity}"
        return f"<Pool of the caller and {len(self._threads)} workers on {where}, poll={self._poll}>"

    def pause(self):
        """Put idle workers to sleep at once; they still answer computes (17-90 us later than spinning ones)."""
        self.words[walk.S_SPIN // WORD] = 0

    def resume(self):
        """Let idle workers spin again as `poll` says."""
        self.poll = self._poll

    def set_affinity(self, cores):
        """Bind the workers to these cores (worker i to the i-th, in turn); None lets them go.  Thread 0 is the caller's
        own and stays as it is.  Errors: ParamError, NotSupported where the system cannot bind threads."""
        if not hasattr(os, "sched_setaffinity"):
            raise NotSupported("this system cannot bind threads to cores")
        allowed = os.sched_getaffinity(0)
        if cores is not None:
            cores = [whole(c, "a core") for c in expect(cores, (list, tuple, set, frozenset, range), "set_affinity")]
        wanted = sorted(allowed) if cores is None else cores
        if not wanted or not set(wanted) <= allowed:
            raise ParamError(f"affinity {cores!r}: this process may use the cores {sorted(allowed)}")
        self._affinity = None if cores is None else wanted
        for ith in list(self._native_ids):
            self._pin(ith)

    def _pin(self, ith):
        cores = {self._affinity[ith % len(self._affinity)]} if self._affinity else os.sched_getaffinity(0)
        os.sched_setaffinity(self._native_ids[ith], cores)

    def _grow(self, n_threads):
        while len(self._threads) < n_threads - 1:
            ith = len(self._threads) + 1
            t = threading.Thread(target=self._live, args=(ith,), daemon=True, name=f"ggjit-{ith}")
            start(t, f"thread {ith + 1} of {n_threads}")
            self._threads.append(t)

    def _live(self, ith):
        self._native_ids[ith] = threading.get_native_id()
        if self._affinity:
            self._pin(ith)
        KERNEL_THREADS.add(threading.get_ident())
        seen = 0
        while (seen := walk.worker(self.sync, ith, seen)) >= 0:
            with self._posting:
                self._posting.wait_for(lambda: self._stopped or self._posted != seen >> walk.JOB_SHIFT)
        self.n_walking = 0                      # 0 also in a process that this thread forked during the run

    def run(self, first, end, n_threads, abort_callback=None, plan=None, i=0, j=0):
        """Run the NODE rows in [first, end) on n_threads threads; returns (status, address of the failing NODE).

        plan, i, j: whose rows i..j-1 these are, for profiles.  Concurrent callers queue.  Exceptions of signal
        handlers (KeyboardInterrupt) and of the callback come out.
        """
        me = get_ident()
        if me in KERNEL_THREADS:
            refuse_nesting()
        lock = self._lock
        try:                                    # the try comes first, since a signal may raise after any call
            KERNEL_THREADS.add(me)
            try:
                if not lock.acquire(False):
                    acquire_or_raise(lock)
                return self._run(first, end, n_threads, abort_callback, plan, i, j)
            finally:
                try:
                    lock.release()          # no call before it, as above
                except RuntimeError:        # a signal came while this waited for the lock
                    lock = None
        finally:
            KERNEL_THREADS.discard(me)

    @contextlib.contextmanager
    def alone(self):
        """Inside it no other thread runs anything on the pool."""
        try:
            acquire_or_raise(self._lock)
            yield
        finally:
            release_if_held(self._lock)

    def _run(self, first, end, n_threads, abort_callback, plan, i, j):
        if self._stopped:
            n_threads = 1                       # the interpreter exits: a new thread would never begin
        if len(self._threads) < n_threads - 1:
            self._grow(n_threads)
        raised, callback = [], None
        try:
            self.n_walking = n_threads
            if abort_callback is not None:
                callback = _ABORT_CALLBACK(lambda: _ask(abort_callback, raised))
                self.words[walk.S_CALLBACK // WORD] = ctypes.cast(callback, ctypes.c_void_p).value
            choice, began = None, 0.0
            if plan is not None:
                plan.begin()
                choice = plan.thread_choice
            if choice is not None and (self.tracing.watchers or j - i != len(plan.nodes)):
                choice = None
            if choice is not None:
                n_threads, began = min(n_threads, choice.n_threads()), time.perf_counter()
                self.n_walking = n_threads
            trace_buffer = self.tracing.trace_buffer(plan, i, j) if self.tracing.watchers and j > i else None
            if n_threads > 1 and not self.words[walk.S_CAN_SLEEP // WORD]:
                self._post()
            # workers that wait in Python cannot be called in the midst of a run
            changes = choice is not None and self.words[walk.S_CAN_SLEEP // WORD]
            status = self._enter(self.sync, first, end, n_threads, changes,
                                 0 if trace_buffer is None else trace_buffer.page())
            if choice is not None and status == OK:
                choice.ran((time.perf_counter() - began) / plan.cost)
            if trace_buffer is not None and status == OK:
                trace_buffer.n_runs += 1        # another run would write over its page
        finally:
            self.n_walking = 0
            self._posted = self.words[walk.S_JOB // WORD] >> walk.JOB_SHIFT         # a signal may have come between
            if callback is not None:            # no call before this: a signal could come in, and the address is stale
                self.words[walk.S_CALLBACK // WORD] = 0
        if raised:
            raise raised[0]
        return status, self.words[walk.S_STATUS // WORD + 1]

    def _post(self):
        """Wake the workers that wait in Python for the job that is about to begin."""
        with self._posting:
            self._posted = (self.words[walk.S_JOB // WORD] >> walk.JOB_SHIFT) + 1
            self._posting.notify_all()

    def stop(self):
        """End the threads (at interpreter exit); what still computes does so on its own thread."""
        self._stopped = True
        if self._threads:
            walk.quit_workers(self.sync)
            with self._posting:
                self._posting.notify_all()
            for t in self._threads:
                t.join(timeout=5)
            self._threads = []


def _ask(callback, raised):
    me = threading.get_ident()
    IN_PYTHON[me] = time.monotonic()
    try:
        return 1 if callback() else 0
    except BaseException as e:          # must not cross jitted frames; raised again by Pool.run
        raised.append(e)
        return 1
    finally:
        IN_PYTHON.pop(me, None)


def _cycles_per_second(seconds=0.002):
    c0, t0 = walk.clock(), time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        pass
    return max((walk.clock() - c0) / (time.perf_counter() - t0), 1e6)


_pool = None
_making = ForkLock()


def the_pool():
    """The process-wide pool, made at the first compute."""
    global _pool
    if _pool is None:
        with _making:
            if _pool is None:
                _pool = Pool()
                atexit.register(_stop)
    return _pool


def threadpool():
    """The process-wide thread pool: `.poll`, `.pause()`, `.resume()`, `.set_affinity(cores)`.

        gg.threadpool().pause()             # its threads sleep until `resume`

    Thread counts belong to backends: `cpu.n_threads = 2`.  Source: ggml_threadpool_params, ggml_threadpool_pause.
    """
    return the_pool()


def _stop():
    if _pool is not None:
        _pool.stop()


def _walk_job(row, share):
    """Walk the NODE row of a job (ops/native/jobs.py): on all threads or this one; inside a computation, whose threads
    are taken, here and now."""
    first = row.__array_interface__["data"][0]
    if get_ident() in KERNEL_THREADS:
        # this job has a page of its own, without a callback to poll
        page = np.zeros(walk.PAGE_NBYTES // WORD, np.int64)
        ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)(int(row[N_KERNEL]))(first, 0, 1, page.__array_interface__["data"][0])
        return
    n_threads = default_threads() if share else 1
    row[N_TASKS] = n_threads
    the_pool().run(first, first + row.nbytes, n_threads)


jobs.walk = _walk_job


# ---------------------------------------------------------------- fork
def _after_fork():
    """In the child: no pool yet."""
    global _pool
    old, walking = _pool, threading.get_ident() in KERNEL_THREADS
    _pool = None
    KERNEL_THREADS.clear()
    IN_PYTHON.clear()
    if old is not None and walking:
        _leave_walk(old)


def _leave_walk(pool):
    """In the child, on the thread that was walking for `pool`: the walk ends without the other threads.

    A function of the user's may fork inside a computation (a custom op that starts a process).  The child comes back
    into the middle of the walk, whose barriers wait for threads that do not exist there: the walk is cancelled, and
    another thread opens every barrier until the child is out of it.
    """
    if pool.n_walking > 1:
        pool.words[S_ABORT // WORD] = pool.words[walk.S_QUIT // WORD] = 1
        pool.words[S_COUNT // WORD], pool.words[walk.S_DONE // WORD] = 0, pool.words[S_POSTED // WORD]
        threading.Thread(target=_open_barriers, args=(pool,), daemon=True).start()


def _open_barriers(pool, seconds=1e-4):
    while pool.n_walking:
        pool.open_barrier(pool.sync)
        time.sleep(seconds)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
