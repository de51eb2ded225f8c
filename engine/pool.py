"""The thread pool: one per process, made like ggml's.  N-1 threads sit in one jitted loop; the caller is thread 0.

A replay enters jitted code once.  Every thread walks the NODE rows of the plan:

    thread 0   | node A (rows 0-7, 16-23 ...) | bar | c d e (tiny nodes, alone) | bar | node F ...
    thread 1   | node A (rows 8-15 ...)       | bar |   (waits)                 | bar | node F ...

Rows are taken in chunks from an atomic counter in the NODE.  Nodes meet at a spin barrier (0.3 us); a run of tiny nodes
belongs to thread 0 and has one barrier at its end.  Idle workers spin for a moment, then sleep in the kernel (futex).

Stopping.  Thread 0 polls for signals and the abort callback every 10 ms or so, between row chunks, and raises the
*abort word*; kernels see it between chunks and return early, still passing every barrier inside them.  Leaving the walk
has to be one decision for all threads: thread 0 writes the node at which to stop *before* that node's barrier, and
every thread compares after it.  (A plain flag would be seen one barrier early by a slow thread, which would then never
arrive at the next one.)

The GIL is released by the jitted code itself, so that the poll can take it back, call PyErr_CheckSignals, and leave the
exception for the ctypes call that started the run: Ctrl-C comes out as KeyboardInterrupt.

Fork: threads do not survive; the child drops the pool and builds a new one at its next compute.
"""
import atexit
import ctypes
import os
import sys
import threading
import time

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.arguments import expect, whole
from ggjit.nesting import INSIDE, refuse_nesting, take
from ggjit.ops.custom import IN_PYTHON
from ggjit.ops.errors import NotSupported, ParamError
from ggjit.ops.jit import exact, native
from ggjit.ops.mem import atomic_add, call4, call_intrinsic, cycles, ld_i64, load_acquire, st_i64, store_release
from ggjit.ops.node import (
    CHUNK,
    CHUNK2,
    S_ABORT,
    S_COUNT,
    S_DEADLINE,
    S_GENERATION,
    S_INTERVAL,
    S_POLL,
    aborted,
    barrier,
    pause,
    sched_yield,
)
from ggjit.ops.record import ABORTED, N_FLAGS, N_KERNEL, N_NEXT, N_TASKS, OK, WORD

# sync page, continued from ops/node.py: byte offsets, hammered words 64 bytes apart
S_JOB = 384             # sequence number << 10 | threads taking part; workers wait for it to change
S_DONE = 448            # workers that finished the job
S_STOP_AT = 512         # NODE at whose barrier everybody leaves
S_STATUS = 576          # first bad status, and in the next word its NODE
S_PLAN = 640            # the job: first NODE, end address
S_QUIT = 704            # the process exits
S_SLEEPERS = 768        # workers asleep in the kernel
S_THREAD_STATE = 832    # thread 0's saved Python thread state
S_SPIN = 848            # cycles an idle worker spins before it sleeps
S_CALLBACK = 840        # address of the abort callback (0: none)
S_TRACE = 856           # int64 (threads, nodes, 2) of the clock at each node's start and end (0: none); the next
                        # words: bytes a thread has of it, address of the walk that fills it
PAGE_NBYTES = 1024

POLL_SECONDS = 0.010
SPIN_SECONDS = 150e-6   # how long an idle worker spins before it sleeps, at poll level 50 (ggml's default)
TINY_PER_POLL = 64      # tiny nodes between two looks at the clock

BARRIER_AFTER = 1       # NODE flag: all threads meet after this node

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine) if sys.platform == "linux" else None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


# ---------------------------------------------------------------- C functions of the process, by name
@intrinsic
def futex(typingctx, addr, op, value):
    """libc's variadic syscall(SYS_futex, ...): sleep while the 32-bit word at addr equals value, or wake sleepers."""
    def codegen(context, b, sig, args):
        i64 = ir.IntType(64)
        fnty = ir.FunctionType(i64, [i64], var_arg=True)
        f = b.module.globals.get("syscall") or ir.Function(b.module, fnty, "syscall")
        zero = ir.Constant(i64, 0)
        return b.call(f, [ir.Constant(i64, _SYS_FUTEX or 0), args[0], args[1], args[2], zero, zero, zero])
    return types.int64(types.int64, types.int64, types.int64), codegen


def _python_call(name, ret, takes_pointer):
    i8p = ir.IntType(8).as_pointer()

    @intrinsic
    def call(typingctx, arg):
        def codegen(context, b, sig, args):
            r = {"void": ir.VoidType(), "ptr": i8p, "int": ir.IntType(32)}[ret]
            v = call_intrinsic(b, name, r, [b.inttoptr(args[0], i8p)] if takes_pointer else [])
            if ret == "ptr":
                return b.ptrtoint(v, ir.IntType(64))
            return b.sext(v, ir.IntType(64)) if ret == "int" else ir.Constant(ir.IntType(64), 0)
        return types.int64(types.int64), codegen
    return call


save_thread = _python_call("PyEval_SaveThread", "ptr", False)           # releases the GIL
restore_thread = _python_call("PyEval_RestoreThread", "void", True)     # takes it back
check_signals = _python_call("PyErr_CheckSignals", "int", False)


@intrinsic
def call_callback(typingctx, address):
    """int (*)(void)"""
    def codegen(context, b, sig, args):
        fnty = ir.FunctionType(ir.IntType(32), [])
        return b.sext(b.call(b.inttoptr(args[0], fnty.as_pointer()), []), ir.IntType(64))
    return types.int64(types.int64), codegen


# ---------------------------------------------------------------- the walk
@exact
def _fail(sync, status, node):
    if ld_i64(sync + S_STATUS) == 0:            # two failing threads: either report is right
        st_i64(sync + S_STATUS + 8, node)
        st_i64(sync + S_STATUS, status)
    store_release(sync + S_ABORT, 1)


@exact
def _note(at, start):
    """Write a node's start and end for one thread; the end is the next node's start."""
    now = cycles()
    st_i64(at, start)
    st_i64(at + WORD, now)
    return now


def _make_walk(traced):
    """The walk, with or without a look at the clock around every node: without, nothing is left of it."""
    @exact
    def walk(node, end, ith, nth, sync):
        """Run the NODE rows from `node` to `end` as thread ith of nth."""
        tiny = 0
        at = since = 0
        if traced:
            at = ld_i64(sync + S_TRACE) + ith * ld_i64(sync + S_TRACE + WORD)
            since = cycles()
        while node < end:
            after = node + ld_i64(node + WORD * N_NEXT)
            if ld_i64(node + WORD * N_TASKS) == 1:
                if ith == 0 and load_acquire(sync + S_ABORT) == 0:
                    st_i64(node + CHUNK, 0)
                    st_i64(node + CHUNK2, 0)
                    status = call4(ld_i64(node + WORD * N_KERNEL), (node, 0, 1, sync))
                    if status != OK:
                        _fail(sync, status, node)
                    if traced:
                        since = _note(at, since)
                    tiny += 1
                    if tiny == TINY_PER_POLL:
                        tiny = 0
                        aborted(0, sync)
            else:
                status = call4(ld_i64(node + WORD * N_KERNEL), (node, ith, nth, sync))
                if status != OK:
                    _fail(sync, status, node)
                if traced:
                    since = _note(at, since)
                if ith == 0:
                    aborted(0, sync)
            if ld_i64(node + WORD * N_FLAGS) & BARRIER_AFTER or after >= end:
                if ith == 0:
                    if load_acquire(sync + S_ABORT) != 0:
                        store_release(sync + S_STOP_AT, node)
                    elif after < end:
                        store_release(after + CHUNK, 0)
                        store_release(after + CHUNK2, 0)
                barrier(sync, nth)
                if load_acquire(sync + S_STOP_AT) == node:
                    return
                if traced:
                    since = cycles()
            node = after
            if traced:
                at += 2 * WORD
    return walk


walk, _walk_traced = _make_walk(False), _make_walk(True)


@native("i64(i64, i64, i64, i64)")
def walk_traced(node, end, who, sync):
    """The walk of thread who >> 10 of who & 1023 in a profile; by address, so that nobody else compiles it."""
    _walk_traced(node, end, who >> 10, who & 1023, sync)
    return 0


@exact
def _walk_plan(first, end, ith, nth, sync):
    """The job's nodes, traced or not: asked once a run."""
    if ld_i64(sync + S_TRACE) == 0:
        walk(first, end, ith, nth, sync)
    else:
        call4(ld_i64(sync + S_TRACE + 2 * WORD), (first, end, ith << 10 | nth, sync))


@native("i64(i64, i64)")
def worker(sync, ith):
    """The life of thread ith; returns at process exit, or (no futex) whenever it ran out of things to spin for."""
    seen = 0
    idle_since = cycles()
    while True:
        if load_acquire(sync + S_QUIT) != 0:
            return 1
        job = load_acquire(sync + S_JOB)
        if job == seen:
            if cycles() - idle_since < ld_i64(sync + S_SPIN):
                pause()
            elif _SYS_FUTEX is not None:
                atomic_add(sync + S_SLEEPERS, 1)
                futex(sync + S_JOB, _FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
                atomic_add(sync + S_SLEEPERS, -1)
                idle_since = cycles()
            else:
                return 0
            continue
        seen = job
        nth = job & 1023
        if ith < nth:
            _walk_plan(ld_i64(sync + S_PLAN), ld_i64(sync + S_PLAN + 8), ith, nth, sync)
            atomic_add(sync + S_DONE, 1)
        idle_since = cycles()


@native("i64(i64)")
def poll(sync):
    """Called by thread 0 without the GIL: look for signals, ask the abort callback.  Nonzero: stop."""
    restore_thread(ld_i64(sync + S_THREAD_STATE))
    stop = check_signals(0)
    callback = ld_i64(sync + S_CALLBACK)
    if stop == 0 and callback != 0:
        stop = call_callback(callback)
    st_i64(sync + S_THREAD_STATE, save_thread(0))
    return stop


@native("i64(i64, i64, i64, i64)", gil=True)
def run(sync, first, end, nth):
    """Run a plan as thread 0, releasing the GIL meanwhile.  Returns the status; the NODE is in the sync page."""
    st_i64(sync + S_ABORT, 0)
    st_i64(sync + S_STOP_AT, 0)
    st_i64(sync + S_STATUS, 0)
    st_i64(sync + S_DONE, 0)
    st_i64(sync + S_PLAN, first)
    st_i64(sync + S_PLAN + 8, end)
    st_i64(first + CHUNK, 0)
    st_i64(first + CHUNK2, 0)
    st_i64(sync + S_DEADLINE, cycles() + ld_i64(sync + S_INTERVAL))
    st_i64(sync + S_THREAD_STATE, save_thread(0))
    if nth > 1:
        job = ld_i64(sync + S_JOB)
        # an atomic add, not a store: the check for sleepers must not move above it
        atomic_add(sync + S_JOB, (((job >> 10) + 1) << 10 | nth) - job)
        if load_acquire(sync + S_SLEEPERS) > 0 and _SYS_FUTEX is not None:
            futex(sync + S_JOB, _FUTEX_WAKE_PRIVATE, 1 << 30)
    _walk_plan(first, end, 0, nth, sync)
    n = 0
    while load_acquire(sync + S_DONE) != nth - 1:
        n += 1
        if n < 2000:
            pause()
        else:
            sched_yield()
    restore_thread(ld_i64(sync + S_THREAD_STATE))
    status = ld_i64(sync + S_STATUS)
    if status == OK and ld_i64(sync + S_ABORT) != 0:
        status = ABORTED
    return status


@native("i64(i64)")
def quit_workers(sync):
    store_release(sync + S_QUIT, 1)
    atomic_add(sync + S_JOB, 1 << 10)
    if _SYS_FUTEX is not None:
        futex(sync + S_JOB, _FUTEX_WAKE_PRIVATE, 1 << 30)
    return 0


@native("i64()")
def clock():
    return cycles()


# ---------------------------------------------------------------- the pool
_ABORT_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int)       # called by thread 0 while it holds the GIL


class Pool:
    """The threads and their sync page.  Use `the_pool()`."""

    def __init__(self):
        memory = np.zeros(PAGE_NBYTES + 64, np.uint8)
        start = -memory.__array_interface__["data"][0] % 64
        self._page = memory[start:start + PAGE_NBYTES]
        self.words = self._page.view(np.int64)
        self.sync = self._page.__array_interface__["data"][0]
        self._lock = threading.Lock()
        self.n_walking = 0                      # threads of the run under way
        self._threads = []
        self._native_ids = {}                   # worker number -> the system's thread id
        self.affinity = None                    # cores of the workers; None: wherever the system likes
        self.tracers = []                       # open profiles (engine/profile.py)
        self._work = threading.Event()          # only where there is no futex
        self._per_second = _cycles_per_second()
        self.words[S_INTERVAL // 8] = int(POLL_SECONDS * self._per_second)
        self.words[S_POLL // 8] = poll.address
        self.poll = 50
        self._ready = run.address               # compiled before any thread starts

    @property
    def poll(self):
        """How eagerly idle workers wait, 0 (asleep at once) to 100 (0.3 ms of spinning); 50 as in ggml."""
        return self._poll

    @poll.setter
    def poll(self, level):
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 100:
            raise ParamError(f"poll must be an integer from 0 to 100, got {level!r}")
        self._poll = level
        self.words[S_SPIN // 8] = int(SPIN_SECONDS * level / 50 * self._per_second)

    def pause(self):
        """Put idle workers to sleep at once; they still answer computes (17-90 us later than spinning ones)."""
        self.words[S_SPIN // 8] = 0

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
        self.affinity = None if cores is None else wanted
        for ith in list(self._native_ids):
            self._pin(ith)

    def _pin(self, ith):
        cores = {self.affinity[ith % len(self.affinity)]} if self.affinity else os.sched_getaffinity(0)
        os.sched_setaffinity(self._native_ids[ith], cores)

    def _grow(self, n_threads):
        while len(self._threads) < n_threads - 1:
            ith = len(self._threads) + 1
            t = threading.Thread(target=self._live, args=(ith,), daemon=True, name=f"ggjit-{ith}")
            t.start()
            self._threads.append(t)

    def _live(self, ith):
        self._native_ids[ith] = threading.get_native_id()
        if self.affinity:
            self._pin(ith)
        INSIDE.add(threading.get_ident())
        while not worker(self.sync, ith):
            self._work.wait()
        self.n_walking = 0                      # in a process forked by this thread: the walk is over

    def run(self, first, end, n_threads, abort_callback=None, plan=None, i=0, j=0):
        """Run the NODE rows in [first, end) on n_threads threads; returns (status, address of the failing NODE).

        plan, i, j: whose rows i..j-1 these are, for profiles.  Concurrent callers queue.  Exceptions of signal
        handlers (KeyboardInterrupt) and of the callback come out.
        """
        refuse_nesting()
        me = threading.get_ident()
        try:                                    # first: a signal may raise between any two statements
            INSIDE.add(me)
            if self._lock.locked():
                take(self._lock)                # patiently; given back, so that no signal can come between
                self._lock.release()
            with self._lock:
                if self.tracers and j > i:
                    return self._traced(plan, i, j, first, end, n_threads, abort_callback)
                return self._run(first, end, n_threads, abort_callback)
        finally:
            INSIDE.discard(me)

    def _traced(self, plan, i, j, first, end, n_threads, abort_callback):
        """A run whose clock readings go to the open profiles; one that failed is not counted."""
        ticks = np.zeros((n_threads, j - i, 2), np.int64)
        at = S_TRACE // WORD
        self.words[at:at + 3] = ticks.__array_interface__["data"][0], ticks.strides[0], walk_traced.address
        try:
            result = self._run(first, end, n_threads, abort_callback)
        finally:
            self.words[at] = 0
        if result[0] == OK:
            for tracer in self.tracers:
                tracer.record(plan, i, ticks)
        return result

    def _run(self, first, end, n_threads, abort_callback):
        self._grow(n_threads)
        raised = []
        callback = _ABORT_CALLBACK(lambda: _ask(abort_callback, raised)) if abort_callback else None
        self.words[S_CALLBACK // 8] = ctypes.cast(callback, ctypes.c_void_p).value if callback else 0
        if _SYS_FUTEX is None:
            self._work.set()
        self.n_walking = n_threads
        try:
            status = run(self.sync, first, end, n_threads)
        finally:
            self.n_walking = 0
            if _SYS_FUTEX is None:
                self._work.clear()
        if raised:
            raise raised[0]
        return status, int(self.words[S_STATUS // 8 + 1])

    def stop(self):
        """End the threads (at interpreter exit)."""
        if self._threads:
            quit_workers(self.sync)
            self._work.set()
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
    c0, t0 = clock(), time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        pass
    return max((clock() - c0) / (time.perf_counter() - t0), 1e6)


_pool = None
_making = threading.Lock()


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
    """The process-wide thread pool: `.poll`, `.pause()`, `.resume()`, `.set_affinity(cores)`.  Thread counts belong to
    backends: `cpu.n_threads = 2`.  Source: ggml_threadpool_params, ggml_threadpool_pause."""
    return the_pool()


def _stop():
    if _pool is not None:
        _pool.stop()


def _after_fork():
    """In the child: no pool yet.  Where it was forked inside a walk, by a user's function, that walk has to end."""
    global _pool, _making
    old, walking = _pool, threading.get_ident() in INSIDE
    _pool, _making = None, threading.Lock()
    INSIDE.clear()
    IN_PYTHON.clear()
    if old is not None and walking and old.n_walking > 1:
        old.words[S_ABORT // 8] = old.words[S_QUIT // 8] = 1
        old.words[S_COUNT // 8], old.words[S_DONE // 8] = 0, old.n_walking - 1
        threading.Thread(target=_let_pass, args=(old,), daemon=True).start()


def _let_pass(pool, seconds=1e-4):
    """Open every barrier for the one thread that is left, until it has left the walk."""
    while pool.n_walking:
        if pool.words[S_COUNT // 8]:
            pool.words[S_COUNT // 8] = 0
            pool.words[S_GENERATION // 8] += 1
        time.sleep(seconds)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
