"""Work in flight: what reads memory waits for schedulers that may still write it.

    sched.graph_compute_async(graph)            streams are at work
    y.numpy(), np.asarray(cache), t.bytes()     wait for them
    x.set(...)                                  does not: the next input of a pipeline is set while the last one runs
"""
import threading
import weakref

from ggjit.nesting import INSIDE

IN_FLIGHT = weakref.WeakSet()           # schedulers that submitted work and did not wait for it


def wait_for_writers(buf):
    """Block until nobody writes `buf`.  Errors of asynchronous work come out here.

    Inside a computation nothing waits: it would wait for itself.
    """
    if threading.get_ident() not in INSIDE:
        for sched in list(IN_FLIGHT):
            if sched.may_write(buf):
                sched.synchronize()
