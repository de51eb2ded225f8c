"""The walk: the jitted loop in which every thread of the pool executes the NODE rows of a plan.

A replay enters jitted code once.  Every thread walks the NODE rows of the plan:

    thread 0   | node A (rows 0-7, 16-23 ...) | bar | c d e (tiny nodes, alone) | bar | node F ...
    thread 1   | node A (rows 8-15 ...)       | bar |   (waits)                 | bar | node F ...

Rows are taken in chunks from an atomic counter in the NODE.  Threads meet at a spin barrier (0.3 us) between nodes of
which one needs the other (phases.py); tiny nodes belong to thread 0.  Idle workers spin for a moment, then sleep in the
system (ops/native/waiting.py).

Stopping.  Thread 0 polls for signals and the abort callback every 10 ms or so, between row chunks, and asks the
callback before every node; either raises the *abort word*.  Kernels see it between chunks and return early, still
passing every barrier inside them.  Leaving the walk has to be one decision for all threads: thread 0 writes the node at
which to stop *before* that node's barrier, and every thread compares after it.  (A plain flag would be seen one barrier
early by a slow thread, which would then never arrive at the next one.)  In the same way a stretch of the walk ends, and
another one begins with more or fewer threads (team.py).

The GIL is released by the jitted code itself, so that the poll can take it back, call PyErr_CheckSignals, and leave the
exception for the ctypes call that started the run: Ctrl-C comes out as KeyboardInterrupt.
"""
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.cpu import team
from ggjit.cpu.team import S_LEAVE_AT, S_NEXT, S_POSTED
from ggjit.ops.core.record import ABORTED, N_FLAGS, N_KERNEL, N_NEXT, N_TASKS, OK, WORD
from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.mem import atomic_add, call4, call_intrinsic, cycles, ld_i64, load_acquire, st_i64, store_release
from ggjit.ops.native.node import (
    CHUNK,
    CHUNK2,
    S_ABORT,
    S_COUNT,
    S_DEADLINE,
    S_GENERATION,
    S_INTERVAL,
    aborted,
    meet,
)
from ggjit.ops.native.waiting import pause, sched_yield, sleep_while_equal, wake_sleepers

# sync page, continued from ops/native/node.py: byte offsets, hammered words 64 bytes apart
S_JOB = 384             # sequence number << JOB_SHIFT | threads taking part; workers wait for it to change
S_DONE = 448            # workers that finished the job
S_STOP_AT = 512         # NODE at whose barrier all threads leave
S_STATUS = 576          # first bad status, and in the next word its NODE
S_PLAN = 640            # the job: first NODE, end address
S_QUIT = 704            # the process exits
S_SLEEPERS = 768        # workers asleep in the system
S_CAN_SLEEP = 776       # 1: idle workers sleep in the system; 0: they return to Python and wait there
S_THREAD_STATE = 832    # thread 0's saved Python thread state
S_CALLBACK = 840        # address of the abort callback (0: none)
S_SPIN = 848            # cycles an idle worker spins before it sleeps
S_TRACE = 856           # page of the profile to write each node's start and end to (0: none); the next words: bytes a
                        # thread has of it, address of the walk that fills it (engine/cpu/ticks.py); from 896 on:
                        # team.py
PAGE_NBYTES = 1024
JOB_SHIFT = 10          # bits of a job's word below its number

TINY_PER_POLL = 64      # tiny nodes between two looks at the clock
BARRIER_AFTER = 1       # NODE flag: all threads meet after this node


# ---------------------------------------------------------------- C functions of the process, by name
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
    if ld_i64(sync + S_STATUS) == 0:            # where two threads fail, either report will do
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


@exact
def _ready(node, end):
    """Reset the counters of the nodes that several threads run before all meet next."""
    while node < end:
        store_release(node + CHUNK, 0)
        store_release(node + CHUNK2, 0)
        if ld_i64(node + WORD * N_FLAGS) & BARRIER_AFTER:
            return
        node += ld_i64(node + WORD * N_NEXT)


def make_walk(traced):
    """The walk, with or without a look at the clock around every node: without it the compiled code has no trace of
    it."""
    @exact
    def walk(node, end, ith, nth, sync):
        """Run the NODE rows from `node` to `end` as thread ith of nth; returns the next one to run, `end` or where the
        stretch ended."""
        tiny = 0
        at = since = 0
        if traced:
            at = ld_i64(sync + S_TRACE) + ith * ld_i64(sync + S_TRACE + WORD)
            since = cycles()
        while node < end:
            after = node + ld_i64(node + WORD * N_NEXT)
            if ith == 0 and ld_i64(sync + S_CALLBACK) != 0 and load_acquire(sync + S_ABORT) == 0:
                # the deadline is over: the callback is asked before every node, as in ggml
                st_i64(sync + S_DEADLINE, 0)
                aborted(0, sync)
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
                if nth == 1:
                    st_i64(node + CHUNK, 0)
                    st_i64(node + CHUNK2, 0)
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
                        if nth > 1:
                            _ready(after, end)
                        team.leaves(sync, nth, node, sync + S_DONE)
                meet(sync, nth, ith == 0)
                if load_acquire(sync + S_STOP_AT) == node:
                    return end
                if load_acquire(sync + S_LEAVE_AT) == node:
                    return after
                if traced:
                    since = cycles()
            node = after
            if traced:
                at += 2 * WORD
        return end
    return walk


walk = make_walk(traced=False)
walk_with_clock = make_walk(traced=True)


@exact
def _walk_plan(first, end, ith, nth, sync):
    """The job's nodes, traced or not: asked once a stretch."""
    if ld_i64(sync + S_TRACE) == 0:
        return walk(first, end, ith, nth, sync)
    return call4(ld_i64(sync + S_TRACE + 2 * WORD), (first, end, ith << 10 | nth, sync))


@native("i64(i64, i64, i64, i64)")
def walk_traced(node, end, who, sync):
    """The walk of traced runs, thread who >> 10 of who & 1023: every thread notes when it began and ended each node
    (engine/cpu/ticks.py).  Compiled and loaded at the first profile: it is called by address, out of the sync page."""
    return walk_with_clock(node, end, who >> 10, who & 1023, sync)


@native("i64(i64, i64, i64)")
def worker(sync, ith, seen):
    """The life of thread ith, which knows the job `seen` (0: none).  Returns -1 at process exit.

    Where it cannot sleep in the system it returns when it is idle, with the job that it saw last.  The next call is
    given that job: a worker that forgot it would walk a finished job again, whose memory may be free.
    """
    idle_since = cycles()
    while True:
        if load_acquire(sync + S_QUIT) != 0:
            return -1
        job = load_acquire(sync + S_JOB)
        if job == seen:
            if cycles() - idle_since < ld_i64(sync + S_SPIN):
                pause()
            elif ld_i64(sync + S_CAN_SLEEP) != 0:
                atomic_add(sync + S_SLEEPERS, 1)
                sleep_while_equal(sync + S_JOB, seen)
                atomic_add(sync + S_SLEEPERS, -1)
                idle_since = cycles()
            else:
                return seen
            continue
        seen = job
        nth = job & (1 << JOB_SHIFT) - 1
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


@exact
def _all_done(sync, workers):
    n = 0
    while load_acquire(sync + S_DONE) != workers:
        n += 1
        if n < 2000:
            pause()
        else:
            sched_yield()


@exact
def _post(sync, first, end, nth):
    """Give the workers the nodes from `first` on; those of the stretch before have left."""
    _all_done(sync, ld_i64(sync + S_POSTED))
    st_i64(sync + S_POSTED, nth - 1)
    st_i64(sync + S_DONE, 0)
    st_i64(sync + S_PLAN, first)
    st_i64(sync + S_PLAN + 8, end)
    _ready(first, end)
    job = ld_i64(sync + S_JOB)
    # Both are atomic additions, which are never reordered: the count is read after the job is posted.  A worker
    # counts itself before it compares the job, so it sees the job or is seen here.
    atomic_add(sync + S_JOB, (((job >> JOB_SHIFT) + 1) << JOB_SHIFT | nth) - job)
    if atomic_add(sync + S_SLEEPERS, 0) > 0:
        wake_sleepers(sync + S_JOB)


@native("i64(i64, i64, i64, i64, i64, i64)", gil=True)
def run(sync, first, end, nth, changes, page):
    """Run a plan as thread 0, releasing the GIL meanwhile.  Returns the status; the NODE is in the sync page.

    changes: fewer threads may run parts of it (team.py).  page: where to write each node's start and end
    (engine/cpu/ticks.py); 0: nowhere.
    """
    st_i64(sync + S_TRACE, page)
    st_i64(sync + S_ABORT, 0)
    st_i64(sync + S_STOP_AT, 0)
    st_i64(sync + S_STATUS, 0)
    st_i64(sync + S_DONE, 0)
    most, nth = nth, team.begin(sync, nth, changes != 0)
    st_i64(sync + S_DEADLINE, cycles() + ld_i64(sync + S_INTERVAL))
    st_i64(sync + S_THREAD_STATE, save_thread(0))
    while True:
        if nth > 1:
            _post(sync, first, end, nth)
        first = _walk_plan(first, end, 0, nth, sync)
        if first >= end:
            break
        nth = ld_i64(sync + S_NEXT)
    team.end(sync, most)
    _all_done(sync, ld_i64(sync + S_POSTED))
    restore_thread(ld_i64(sync + S_THREAD_STATE))
    status = ld_i64(sync + S_STATUS)
    if status == OK and ld_i64(sync + S_ABORT) != 0:
        status = ABORTED
    return status


@native("i64(i64)")
def quit_workers(sync):
    store_release(sync + S_QUIT, 1)
    atomic_add(sync + S_JOB, 1 << JOB_SHIFT)
    wake_sleepers(sync + S_JOB)
    return 0


@native("i64(i64)")
def open_barrier(sync):
    """Let the threads that wait at a barrier go on although others are missing."""
    if load_acquire(sync + S_COUNT) != 0:
        store_release(sync + S_COUNT, 0)
        atomic_add(sync + S_GENERATION, 1)
    return 0


@native("i64()")
def clock():
    return cycles()
