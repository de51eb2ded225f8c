"""Processor time that ggjit spends outside the kernels, for graphs, plans and schedules, and the moves of a call
between source files.

    python -m benchmarks.overheads                      # a table with the targets, for results/overheads.md
    python -m benchmarks.overheads --beside CHECKOUT    # another checkout by turns, in the same minutes

Times are processor seconds of one thread, the fastest tenth of the calls in each process, the median over processes; so
they hold beside other work.  The graph has 1,000 nodes: norms, products, activations, sums and views.

Stays: a profile hook sees every call of a function of ggjit and every return; the trip is the file one is in after each
of them, equal neighbours are one stay.  A second call of a function from one frame counts nothing (a loop over nodes is
one trip), and neither do the floors below: values, errors, the table (core/, tensors/, display/, ops/).  Between rooms:
alloc/ is one room, and so is a backend with its plans.
"""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import ggjit as gg

ROOT = pathlib.Path(__file__).resolve().parents[1]
N_NODES, PROCESSES, CALLS, REPLAYS = 1000, 5, 40, 50
FLOORS = ("core/", "tensors/", "ops/", "display/")
ROOMS = {"alloc/": "alloc", "cpu/": "backend", "graphs/plan": "backend", "graphs/graph_plan": "backend",
         "graphs/results": "backend"}
# {what: (target of issue or None, unit)}
TARGETS = {"gg.measure": (2, "ms"), "gg.measure, planner ggml": (None, "ms"), "a report, shown": (None, "ms"),
           "GraphAllocator.alloc_graph": (0.2, "ms"), "alloc_graph, best": (None, "ms"), "Scheduler, split and memory":
           (0.4, "ms"), "Scheduler, replay of 3 splits": (None, "us"), "a plan, each node": (2, "us"),
           "Graph(), each node": (0.3, "us")}
STAYS = {"gg.measure": 9, "GraphAllocator.alloc_graph": 11, "Scheduler, first run": 14, "Scheduler, replay": None}


def network(n):
    """(context, result, input) of a graph of n nodes."""
    ctx, owner = gg.Context(), gg.Context()
    x = ctx.new_tensor(gg.F32, (64, 8), "x")
    gg.set_input(x)
    weights, y = [owner.new_tensor(gg.F32, (64, 64), f"w{i}") for i in range(8)], x
    gg.alloc_ctx_tensors(owner, gg.init_backend("CPU").default_buffer_type)
    with ctx:
        for k in range(0, n, 8):
            a, b = (gg.mul_mat(weights[(k + j) % 8], gg.rms_norm(y, 1e-5)) for j in range(2))
            c = gg.mul(gg.silu(gg.reshape_2d(a, 64, 8)), b)
            y = gg.add(y, gg.mul_mat(weights[(k + 2) % 8], c))
    return ctx, y, x


def fastest(f, calls=CALLS):
    """Processor seconds of a call: the fastest tenth."""
    f()
    found = []
    for _ in range(calls):
        t0 = time.thread_time()
        f()
        found.append(time.thread_time() - t0)
    return sorted(found)[calls // 10]


def spread(sched, graph):
    """Pin the nodes to two backends by turns of eight."""
    for i, t in enumerate(graph.nodes):
        if t.view_src is None:
            sched.set_tensor_backend(t, sched.backends[i // 8 % 2])


def cpus(n):
    return [gg.init_backend("CPU", n_threads=1) for _ in range(n)]


def times():
    """{what: milliseconds, or microseconds}"""
    _ctx, y, _ = network(N_NODES)
    graph, cpu = gg.Graph(y), cpus(1)[0]
    n, out, allocators = len(graph), {}, {p: gg.GraphAllocator(cpu, p) for p in ("ggml", "best")}
    out["Graph(), each node"] = 1e6 / n * fastest(lambda: gg.Graph(y))
    out["gg.measure"] = 1e3 * fastest(lambda: gg.measure(graph))
    out["gg.measure, planner ggml"] = 1e3 * fastest(lambda: gg.measure(graph, planner="ggml"))
    out["a report, shown"] = 1e3 * fastest(lambda: str(gg.measure(graph)), 10)
    out["alloc_graph, best"] = 1e3 * fastest(lambda: allocators["best"].alloc_graph(graph))
    out["GraphAllocator.alloc_graph"] = 1e3 * fastest(lambda: allocators["ggml"].alloc_graph(graph))
    out["a plan, each node"] = 1e6 / n * fastest(lambda: cpu.graph_plan_create(graph))
    sched, (_ctx2, y2, _) = gg.Scheduler(cpus(2)), network(N_NODES)
    whole = gg.Graph(y2)

    def again():
        sched._runs.clear()
        sched.alloc_graph(whole)
    out["Scheduler, split and memory"] = 1e3 * fastest(again)
    sched, (_ctx3, y3, x) = gg.Scheduler(cpus(2)), network(24)
    small = gg.Graph(y3)
    spread(sched, small)
    sched.alloc_graph(small)
    x.set(np.ones(x.shape, np.float32))
    out["Scheduler, replay of 3 splits"] = 1e6 / REPLAYS * fastest(
        lambda: [sched.graph_compute(small) for _ in range(REPLAYS)])
    return out


def trip(f):
    """The files of a call of f, in order."""
    package = pathlib.Path(gg.__file__).parent
    roots = {str(package)} | {str(pathlib.Path(sys.modules[f"ggjit.{part}"].__file__).parents[1])
                              for part in ("alloc", "ops", "graphs")}
    seen, stack, frames, known, muted = [], [], [], set(), 0

    def file_of(code):
        root = next((r for r in roots if code.co_filename.startswith(r + os.sep)), None)
        found = root and code.co_filename[len(root) + 1:]
        return None if not found or found.startswith(FLOORS) else found

    def watch(frame, event, _):
        nonlocal muted
        if event == "call":
            key = id(frame.f_back), frame.f_code
            if muted or stack and key in known:
                muted += 1
                return
            known.add(key)
            frames.append(frame.f_back)             # alive, or its number would come again
            stack.append(file_of(frame.f_code))
        elif event == "return":
            if muted:
                muted -= 1
                return
            if stack:
                stack.pop()
        else:
            return
        here = next((x for x in reversed(stack) if x), None)
        if here and seen[-1:] != [here]:
            seen.append(here)
    sys.setprofile(watch)
    try:
        f()
    finally:
        sys.setprofile(None)
    return seen


def counted(files):
    """(stays in files, stays in rooms, times that the first file is entered)"""
    rooms = [next((room for start, room in ROOMS.items() if f.startswith(start)), f) for f in files]
    rooms = [r for i, r in enumerate(rooms) if i == 0 or r != rooms[i - 1]]
    return len(files), len(rooms), rooms.count(rooms[0])


def stays():
    """{what: counted()} of small graphs; what a first call loads is loaded before."""
    for _ in range(2):
        (_ctx, y, _), cpu = network(8), cpus(1)[0]
        graph, allocator, sched = gg.Graph(y), gg.GraphAllocator(cpu), gg.Scheduler(cpus(2))
        out = {"gg.measure": counted(trip(lambda g=graph: gg.measure(g))),
               "GraphAllocator.alloc_graph": counted(trip(lambda a=allocator, g=graph: a.alloc_graph(g)))}
        _ctx, y, _ = network(24)
        graph = gg.Graph(y)
        spread(sched, graph)
        for name in ("Scheduler, first run", "Scheduler, replay"):
            out[name] = counted(trip(lambda s=sched, g=graph: s.graph_compute(g)))
    return out


@contextlib.contextmanager
def package_of(checkout):
    """A folder for PYTHONPATH that holds the checkout as the package ggjit."""
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder, "ggjit")
        package.mkdir()
        for x in pathlib.Path(checkout, "engine").resolve().iterdir():
            (package / x.name).symlink_to(x)
        for part in ("ops", "alloc", "models", "tools"):
            (package / part).symlink_to(pathlib.Path(checkout, part).resolve())
        yield folder


def child(folder):
    run = subprocess.run([sys.executable, __file__, "--child"], env=os.environ | {"PYTHONPATH": folder}, check=True,
                         text=True, capture_output=True)
    return json.loads(run.stdout)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--beside", metavar="CHECKOUT", help="another checkout, measured by turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"times": times(), "stays": stays()}))
        return
    with contextlib.ExitStack() as held:
        folders = [held.enter_context(package_of(c)) for c in ([args.beside] if args.beside else []) + [ROOT]]
        runs = [[child(folder) for folder in folders] for _ in range(PROCESSES)]
    names = ["before", "now"][-len(folders):]
    print(f"| processor time | {' | '.join(names)} | target |\n{'| --- ' * (len(names) + 2)}|")
    for what, (target, unit) in TARGETS.items():
        found = [statistics.median(r[k]["times"][what] for r in runs) for k in range(len(names))]
        print(f"| {what} | {' | '.join(f'{x:.3g} {unit}' for x in found)} | {f'{target} {unit}' if target else ''} |")
    print(f"\n| stays: files / rooms / entries of the first | {' | '.join(names)} | target |\n"
          f"{'| --- ' * (len(names) + 2)}|")
    for what, target in STAYS.items():
        print(f"| {what} | {' | '.join('{} / {} / {}'.format(*runs[-1][k]['stays'][what]) for k in range(len(names)))}"
              f" | {target or ''} |")


if __name__ == "__main__":
    main()
