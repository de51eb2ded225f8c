"""Memory planning against its targets: python benchmarks/alloc_bench.py [--quick] [--minimalloc BINARY] [CSV_FOLDER]
The table of hard instances alone, of other seeds: python benchmarks/alloc_bench.py --hard 7000

Single thread, warm.  Times are processor seconds.  Recorded graphs are taken from GGJIT_SHARED/data/graphs when that is
set.  Hard instances come from `alloc_instances.accelerator`, or from the CSV files of a folder (lower, upper, size).
BINARY is MiniMalloc's command, built from its sources (github.com/google/minimalloc); without it its column is empty.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import alloc_families
import alloc_graphs
import alloc_instances
import alloc_recorded

from ggjit.alloc import IN_PLACE_OPS, plan_offsets, validate
from ggjit.alloc.csvio import read_problem, write_problem
from ggjit.alloc.ggml.problem import Problem
from ggjit.alloc.offsets import greedy, planners
from ggjit.alloc.offsets.planners import Clock, Planner
from ggjit.alloc.offsets.sections import Instance
from ggjit.alloc.orders.memory_order import memory_order
from ggjit.alloc.plan_request import PlanRequest
from ggjit.alloc.reorder import padded
from ggjit.alloc.report import mib
from ggjit.models.networks.peak import model_peak

LIMITS = (0.05, 0.2, 1.0)
MINIMALLOC_SECONDS = 2
TIME_LIMITS = (0.01, 0.1, 1.0, 10.0)
LARGEST = {"hard": 1000, "wide": 100_000}       # buffers of those problems in the table of time limits
CHUNKED = ("tinyllama pp128", "densenet121", "inception x8", "randwire 200", "train vit 6L")


def best_of(f, n=5):
    """(seconds of the fastest call, its result)."""
    best = None
    for _ in range(n):
        t = time.process_time()
        out = f()
        t = time.process_time() - t
        best = (t, out) if best is None or t < best[0] else best
    return best


class ProcessorClock(Clock):
    """Processor time of this process: other work on the machine does not count."""

    def __init__(self, limit):
        super().__init__(limit)
        self.p0 = time.process_time()

    @property
    def used(self):
        return time.process_time() - self.p0


def planned(lo, hi, size, seconds):
    """The Planner after so many seconds, and its instance, in the common unit of the sizes."""
    unit = int(np.gcd.reduce(size[size > 0]))
    inst = Instance(lo, hi, size // unit)
    p = Planner(inst, 0, ProcessorClock(seconds))
    p.run()
    return p, inst, unit


def show(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def args(g):
    return g.table, np.array(g.nodes), np.array(g.leafs), g.sizes


def by_size(lo, hi, size):
    """Peak of greedy by size: first fit, the largest first."""
    inst = Instance(lo, hi, size)
    return greedy.first_fit(inst, greedy.order(inst, "size"), np.zeros(inst.n, np.int64))


def graph_table(nets, binary):
    print("\n## Graphs: planner `best` against ggml, greedy by size, the lower bound and MiniMalloc\n")
    print(f"MiniMalloc: wall time until it fits the same buffers into the bound, starting it included; -: not within "
          f"{MINIMALLOC_SECONDS} s.\n")
    show("graph", "nodes", "buffers", "ggml / bound", "by size / bound", "best / bound", "best / ggml", "rule, planner",
         "ms", "MiniMalloc")
    show(*["---"] * 10)
    for name, g in nets:
        a = args(g)
        t, p = best_of(lambda a=a: alloc_graphs.plan_table(*a, planner="best"), 3)
        m = alloc_graphs.plan_table(*a)
        show(name, len(g.nodes), len(p.a_id), f"{m.peak / m.lower_bound:.3f}",
             f"{by_size(p.a_lo, p.a_hi, p.a_size) / p.lower_bound:.3f}", f"{p.peak / p.lower_bound:.4f}",
             f"{p.peak / p.ggml_peak:.3f}", f"{p.rule}, {p.how}", f"{t * 1e3:.1f}",
             minimalloc(binary, p.a_lo, p.a_hi, p.a_size, p.lower_bound) if binary else "")


def chunk_table(nets):
    print("\n## Chunks of at most a third of ggml's peak: bytes in all over the lower bound\n")
    show("graph", "ggml", "best", "chunks of best, MiB", "ms")
    show(*["---"] * 5)
    for name, g in nets:
        limit = alloc_graphs.plan_table(*args(g)).peak // 3
        t, p = best_of(lambda g=g, limit=limit: alloc_graphs.plan_table(*args(g), planner="best", max_size=limit), 1)
        show(name, f"{p.ggml_peak / p.lower_bound:.3f}", f"{p.peak / p.lower_bound:.3f}",
             " ".join(f"{x / 2**20:.2f}" for x in p.chunk_sizes[0]), f"{t * 1e3:.0f}")


def pass_table(nets):
    print("\n## Aliasing pass and ggml's plan (target: 1 ms for 1,000 nodes)\n")
    show("graph", "nodes", "ms")
    show(*["---"] * 3)
    for name, g in nets:
        if 800 < len(g.nodes) < 2000:
            t, _ = best_of(lambda g=g: alloc_graphs.plan_table(*args_cache(g)), 20)
            show(name, len(g.nodes), f"{t * 1e3:.2f}")


_ARGS = {}


def args_cache(g):
    if id(g) not in _ARGS:
        _ARGS[id(g)] = args(g)
    return _ARGS[id(g)]


def random_table(sizes, binary):
    print("\n## Random lifetimes (targets: 10,000 in 1 s at the bound; a million within 0.5 % in 10 s)\n")
    show("problem", "buffers", "peak / bound", "ms", "planner", "MiniMalloc: bound")
    show(*["---"] * 6)
    for name, make in (("pareto", alloc_instances.random_lifetimes), ("uniform", alloc_instances.uniform_lifetimes)):
        for n in sizes:
            lo, hi, size = make(n)
            t, (p, inst, unit) = best_of(lambda lo=lo, hi=hi, size=size: planned(lo, hi, size, 10), 1)
            if n <= 100_000:
                validate.check_layout(lo, hi, size, p.offsets * unit, unit)
            theirs = minimalloc(binary, lo, hi, size, inst.lower_bound * unit) if binary and n <= 100_000 else ""
            show(name, n, f"{p.best / inst.lower_bound:.4f}", f"{t * 1e3:.1f}", p.how, theirs)


def limit_table(sizes):
    print("\n## Time limits: seconds a call took (processor time; the bound is 5 % or 20 ms over the limit)\n")
    print("What a call takes at least is reading the problem and ggml's plan of it, the column `least`: a limit below "
          "that ends right behind it.\n")
    show("problem", "buffers", "least", *[f"{x:g} s" for x in TIME_LIMITS], "most over a limit above `least`", "kept")
    show(*["---"] * (5 + len(TIME_LIMITS)))
    makers = {"uniform": alloc_instances.uniform_lifetimes, "pareto": alloc_instances.random_lifetimes,
              "wide": alloc_instances.wide_lifetimes, "hard": lambda n: alloc_instances.accelerator(n, 1)}
    found = planners.Clock
    planners.Clock = ProcessorClock
    for name, make in makers.items():
        for n in (x for x in sizes if x <= LARGEST.get(name, x)):
            problem, took, ended = make(n), [], False
            for limit in (0, *TIME_LIMITS):
                if not ended:
                    t, lay = best_of(lambda problem=problem, limit=limit: plan_offsets(*problem, time_limit=limit), 1)
                    ended = lay.peak == lay.lower_bound         # more time would change nothing
                took.append(t)
            over = [(t - x, max(0.05 * x, 0.02)) for t, x in zip(took[1:], TIME_LIMITS, strict=True) if x > took[0]]
            show(name, n, *[f"{t:.3f}" for t in took], f"{1e3 * max([0, *(t for t, _ in over)]):.0f} ms",
                 "yes" if all(t <= most for t, most in over) else "NO")
    planners.Clock = found


def hard_problems(folder, seeds=0):
    """(name, problem) of the files in a folder, else of the generator, with `seeds` added to its seeds."""
    if folder is None:
        for n, seed in alloc_instances.HARD:
            for style, kw in alloc_instances.STYLES.items():
                yield f"{style} {n}", alloc_instances.accelerator(n, seed + seeds, **kw)
        return
    for path in sorted(pathlib.Path(folder).glob("*.csv")):
        with open(path, newline="") as f:
            yield path.stem, read_problem(f)[1:]


def minimalloc(binary, lo, hi, size, capacity):
    """"1.234 s", or "-": seconds MiniMalloc takes to fit the buffers into `capacity` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / name for name in ("in.csv", "out.csv")]
        with open(files[0], "w", newline="") as f:
            write_problem(f, [str(i) for i in range(len(lo))], lo, hi, size)
        t = time.perf_counter()
        done = subprocess.run([binary, f"--capacity={capacity}", f"--input={files[0]}", f"--output={files[1]}",
                               f"--timeout={MINIMALLOC_SECONDS}s"], capture_output=True, check=False)
        return f"{time.perf_counter() - t:.3f} s" if done.returncode == 0 else "-"


def hard_table(problems, limits, binary):
    print("\n## Hard problems: peak / bound after so many seconds (targets 1.03 / 1.01 / 1.005)\n")
    print(f"MiniMalloc: seconds until it fits into the bound, and into our last peak; -: not within "
          f"{MINIMALLOC_SECONDS} s.\n")
    show("instance", "buffers", "one unit", "ggml", "by size", *[f"{x} s" for x in limits], "planner",
         "MiniMalloc: bound", "our peak")
    show(*["---"] * (8 + len(limits)))
    total = {}
    for name, (lo, hi, size) in problems:
        p, inst, unit = planned(lo, hi, size, limits[-1])
        validate.check_layout(lo, hi, size, p.offsets * unit)
        at = [min(peak for t, peak, _ in p.trace if t <= x) / inst.lower_bound for x in limits]
        greatest = [p.ggml_peak / inst.lower_bound, by_size(lo, hi, size // unit) / inst.lower_bound]
        total.setdefault(name.split()[0], []).append([*greatest, *at])
        theirs = [minimalloc(binary, lo, hi, size, x * unit) if binary else "" for x in (inst.lower_bound, p.best)]
        show(name, inst.n, f"{1 / inst.lower_bound:.4f}", *[f"{x:.3f}" for x in (*greatest, *at)], p.how, *theirs)
    for style in dict.fromkeys(total):
        show(f"mean of {style}", "", "", *[f"{x:.4f}" for x in np.mean(total[style], axis=0)], "", "", "")


def order_table(nets):
    print("\n## Node order: `order=\"memory\"`, and what is proved: live bytes that no order goes below\n")
    show("graph", "nodes", "best / ggml", "reordered best / ggml", "peak / its own bound", "live / proved bound",
         "sets", "ms")
    show(*["---"] * 8)
    for name, g in nets:
        t, new = best_of(lambda g=g: alloc_graphs.ordered(*args(g)), 1)
        proof = memory_order(Problem(PlanRequest(*args(g), alignment=1), IN_PLACE_OPS))
        size = dict(zip(g.nodes, g.sizes[0], strict=True))
        a = alloc_graphs.plan_table(*args(g), planner="best")
        b = alloc_graphs.plan_table(g.table, new, g.leafs, (np.array([size[i] for i in new.tolist()]), g.sizes[1]),
                                   planner="best")
        show(name, len(g.nodes), f"{a.peak / a.ggml_peak:.3f}", f"{b.peak / a.ggml_peak:.3f}",
             f"{b.peak / b.lower_bound:.4f}", f"{proof.peak / proof.bound:.4f}", proof.states, f"{t * 1e3:.0f}")


def family_table(n_seeds):
    print("\n## Order and offsets of random graphs: is any order's plan lower?\n")
    print("No plan of any order is below the proved bound. Proved: graphs whose order has no more live bytes than it. "
          "First order: graphs that order is placed at its live bytes in; at the bound: graphs whose plan is, after "
          "other orders with as few live bytes were placed where the first had a gap.\n")
    show("family", "graphs", "nodes", "given / bound, mean", "proved", "first order", "at the bound",
         "largest peak / bound", "slowest ms")
    show(*["---"] * 9)
    for name, make in alloc_families.FAMILIES.items():
        rows = []
        for seed in range(n_seeds):
            g = make(seed)
            if len(g.nodes) < 3:
                continue
            p = Problem(PlanRequest(*args(g)[:3], padded(g.sizes), alignment=1), IN_PLACE_OPS)
            proof = memory_order(p)
            t, new = best_of(lambda g=g: alloc_graphs.ordered(*args(g)), 1)
            first, given, peak = (alloc_graphs.plan_table(g.table, order, g.leafs, (g.nbytes(order), g.sizes[1]),
                                                         planner="best", time_limit=0.2).peak
                                  for order in (np.array(g.nodes)[proof.order], g.nodes, new))
            rows.append((len(g.nodes), given / proof.bound, proof.peak == proof.bound, first == proof.peak,
                         peak == proof.bound, peak / proof.bound, 1e3 * t))
        n, given, proved, first, reached, over, ms = map(np.array, zip(*rows, strict=True))
        show(name, len(rows), f"{n.min()}-{n.max()}", f"{given.mean():.3f}", proved.sum(), first.sum(), reached.sum(),
             f"{over.max():.4f}", f"{ms.max():.0f}")


def what_if_table(models):
    print("\n## What if memory were managed otherwise\n")
    show("model", "what if", "before -> after")
    show(*["---"] * 3)
    for name in models:
        for row in model_peak(name, n_ctx=2048, n_batch=128, what_if="all").what_if:
            show(name, f"{row.name}={row.value}", f"{mib(row.before)} -> {mib(row.nbytes)}")


def main(argv):
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("folder", nargs="?")
    parse.add_argument("--quick", action="store_true")
    parse.add_argument("--minimalloc")
    parse.add_argument("--hard", type=int, metavar="SEEDS")
    opts = parse.parse_args(argv)
    plan_offsets(*alloc_instances.accelerator(100, 5), time_limit=0.3)          # compile
    problems = list(hard_problems(opts.folder, opts.hard or 0))[::2 if opts.quick else 1]
    if opts.hard is not None:
        hard_table(problems, LIMITS, opts.minimalloc)
        return
    nets = [(name, make()) for name, make in alloc_graphs.SUITE.items()]
    shared = pathlib.Path(os.environ.get("GGJIT_SHARED", "")) / "data" / "graphs"
    seen = [(g.name, g) for g in alloc_recorded.recorded(shared)] if os.environ.get("GGJIT_SHARED") else []
    chunks = [(name, g) for name, g in nets if name in CHUNKED]
    for _, g in chunks[:1]:
        alloc_graphs.plan_table(*args(g), planner="best", max_size=1 << 20)
        alloc_graphs.ordered(*args(g))
    graph_table(nets + seen, opts.minimalloc)
    chunk_table(chunks)
    pass_table(nets + seen)
    random_table((1000, 10_000, 100_000) if opts.quick else (1000, 10_000, 100_000, 1_000_000), opts.minimalloc)
    limit_table((10, 1000, 10_000, 100_000) if opts.quick else (10, 100, 1000, 10_000, 100_000, 1_000_000))
    hard_table(problems, LIMITS, opts.minimalloc)
    order_table(nets)
    family_table(30 if opts.quick else 100)
    what_if_table(("tinyllama-1.1b",))


if __name__ == "__main__":
    main(sys.argv[1:])
