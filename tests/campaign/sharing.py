"""Threads that use one graph, one allocator or one scheduler at once: values are exact or refused, never mixed."""
import sys
import threading

import numpy as np

import ggjit as gg
from campaign.runner import Find
from ggjit.ops.core.errors import GgjitError


def threads(rng):
    """Two to four threads, each with a kind of work of its own, on shared objects."""
    n = int(rng.integers(2, 5))
    x = gg.from_numpy(gg.Context(), np.full(int(rng.integers(1, 5000)), 2.0, np.float32))
    cpu = gg.init_backend(f"CPU:n_threads={int(rng.integers(1, 3))}")
    shared = gg.GraphAllocator(cpu)
    outputs = [gg.scale(gg.add(x, x), float(k + 1)) for k in range(n)]
    graphs = [gg.Graph(y) for y in outputs]
    scheduler = gg.Scheduler([cpu])
    plans = []
    for graph in graphs:
        shared.alloc_graph(graph)
        plans.append(cpu.graph_plan_create(graph))
    works = [_work(str(rng.choice(["plan", "at once", "scheduler", "alone", "backend"])), k, outputs[k], graphs[k],
                   plans[k], cpu, scheduler, x) for k in range(n)]
    wrong, interval = [], sys.getswitchinterval()

    def loop(k):
        for _ in range(20):
            try:
                got = works[k]()
            except GgjitError:
                continue
            except BaseException as e:
                wrong.append(repr(e))
                return
            if got is not None and (got != 4.0 * (k + 1)).any():
                wrong.append(f"thread {k}: {got[:3]}, expected {4.0 * (k + 1)}")
                return
    sys.setswitchinterval(float(rng.choice([1e-6, 1e-5, 5e-3])))
    started = [threading.Thread(target=loop, args=(k,)) for k in range(n)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    sys.setswitchinterval(interval)
    if wrong:
        raise Find(wrong[0])
    return "right"


def _work(kind, k, y, graph, plan, cpu, scheduler, x):
    def compute_then_read():
        plan.compute()
        return plan.numpy(y)

    def on_the_backend():
        cpu.graph_compute(graph)
        return y.numpy() if y._plan is not None else None
    return {"plan": compute_then_read, "at once": lambda: plan.compute_and_read(y),
            "scheduler": lambda: scheduler.compute_and_read(graph, y),
            "alone": lambda: gg.compute(gg.scale(gg.add(x, x), float(k + 1))), "backend": on_the_backend}[kind]


CASES = {"threads": threads}
