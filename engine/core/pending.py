"""Work in flight: reading memory waits for schedulers that may still write it.

    sched.graph_compute_async(graph)            streams are at work
    y.numpy(), np.asarray(cache), t.bytes()     wait for them
    other.graph_compute(...)                    waits if one of the two graphs writes leaves that both touch
    x.set(...)                                  does not: the next input of a pipeline is set while the last one runs

Work in flight keeps its scheduler alive, and so the memory it works in, until it has been waited for.
"""
import os
import threading

from ggjit.core.run_lock import KERNEL_THREADS
from ggjit.ops.core.locks import ForkLock

IN_FLIGHT = {}                  # scheduler -> (its run,): submitted and not yet waited for
_changing = ForkLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IN_FLIGHT.clear)         # streams do not survive a fork


def submitted(sched, run):
    """Note that `run` was submitted and is not waited for yet."""
    with _changing:
        IN_FLIGHT[sched] = (run,)               # a new object for every submission


def waited_for(sched, flight):
    """Note that `sched` has waited for `flight`, its entry of IN_FLIGHT before the wait.  A run submitted meanwhile
    stays."""
    with _changing:
        if IN_FLIGHT.get(sched) is flight:
            IN_FLIGHT.pop(sched, None)


def wait_for_writers(buf):
    """Block until no work in flight writes `buf`.  Errors of asynchronous work are raised here.

    Threads that run kernels do not wait: they would wait for themselves.
    """
    if IN_FLIGHT and threading.get_ident() not in KERNEL_THREADS:
        for sched, (run,) in list(IN_FLIGHT.items()):
            if buf.id in run.written_buffers or run.memory.holds(buf):
                sched.synchronize()


def wait_for_others(sched, run):
    """Block while runs of other schedulers write leaves that `run` touches, or touch leaves that it writes."""
    for other, (other_run,) in list(IN_FLIGHT.items()):
        if other is not sched and (other_run.written_buffers & run.touched_buffers
                                   or run.written_buffers & other_run.touched_buffers):
            other.synchronize()
