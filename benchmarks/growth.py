"""How the time of matrix products, tokens, prompts and plans grows with their size: plots and tables of ggjit alone.

    python -m benchmarks.growth                     # about eight minutes; writes results/growth.md and .png
    python -m benchmarks.growth --only columns,plan # parts of: columns, layers, context, batch, plan

    columns   mul_mat throughput against n = 1 ... 64: no cliff where a kernel switches path
    layers    time of a token against the layers of a model
    context   time of a token against the tokens before it
    batch     time of a prompt against its tokens
    plan      time of the allocators and of the scheduler against nodes
"""
import argparse
import dataclasses
import datetime
import math
import pathlib
import statistics
import sys
import time

import numpy as np

import ggjit as gg
from benchmarks import alloc_graphs, machine, report, sched_bench, synth
from benchmarks.engines.our_graphs import column_speeds
from benchmarks.plots import pyplot
from benchmarks.worker import ROOT
from ggjit.models import load_model
from ggjit.ops.native import isa

ABOUT = """\
# How cost grows

`python -m benchmarks.growth` measures how time grows with the size of a problem. The slope is the exponent between the
two largest sizes: at 1, time is proportional to the size. In the first table n is the number of tokens that a matrix
product multiplies at once. A "cliff" is an n at which the throughput falls below 95 % of the throughput with fewer
tokens.
"""
RESULTS = ROOT / "benchmarks" / "results" / "growth"
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
SHAPE, TYPE = "smollm-135m", "Q4_0"
COLUMN_ROUNDS = 5
SHOWN = 1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 20, 24, 32, 33, 48, 64, 65           # of the columns, in the table
CLIFF = 0.95                # throughput at n + 1 columns over that at n, at least


@dataclasses.dataclass
class Curve:
    """points: {size: seconds or speed}; grows: what size counts."""
    name: str
    points: dict

    @property
    def exponent(self):
        (a, s), (b, t) = sorted(self.points.items())[-2:]
        return math.log(t / s) / math.log(b / a)


def median_seconds(work, seconds=0.25):
    work()
    end, out = time.perf_counter() + seconds, []
    while time.perf_counter() < end or len(out) < 3:
        t0 = time.perf_counter()
        work()
        out.append(time.perf_counter() - t0)
    return statistics.median(out)


# ---------------------------------------------------------------- what is measured
def columns(n_threads):
    """GFLOP/s of mul_mat for each type and every n."""
    for type in TYPES:
        sizes = (*range(1, 34), 40, 48, 49, 56, 64, 65)
        yield Curve(type, column_speeds(getattr(gg, type), sizes, n_threads, COLUMN_ROUNDS))


def _decoder(shape, n_threads, work):
    """work(model) on a synthetic model."""
    path = synth.model_path(shape, TYPE)
    with load_model(path, n_threads=n_threads, n_ctx=synth.SHAPES[shape].n_ctx) as m:
        return work(m)


def layers(n_threads):
    def one(m):
        m.reset()
        m.decode(np.arange(8))

        def work():
            m.text.ids[:] = [0] * 8
            m.decode([1])
        return median_seconds(work)
    yield Curve("a token", {n: _decoder(f"layers-{n}", n_threads, one) for n in synth.LAYERS})


def context(n_threads):
    def all_(m):
        out = {}
        for past in (128, 256, 512, 1024, 2047):
            m.reset()
            for at in range(0, past, 512):
                m.decode(np.zeros(min(512, past - at), np.int32))

            def work(past=past):
                m.text.ids[:] = [0] * past
                m.decode([1])
            out[past] = median_seconds(work)
        return out
    yield Curve("a token", _decoder(SHAPE, n_threads, all_))


def batch(n_threads):
    def all_(m):
        out = {}
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            ids = np.arange(n, dtype=np.int32)

            def work(ids=ids):
                m.reset()
                m.decode(ids)
            out[n] = median_seconds(work)
        return out
    yield Curve("a prompt", _decoder(SHAPE, n_threads, all_))


def plan(n_threads):
    """Planning alone, nothing computed; single-threaded."""
    ggml, best, split = {}, {}, {}
    for n in (3, 8, 24, 80, 240):                   # layers; about forty nodes each
        net = alloc_graphs.llama(n, 256, 8, 4, 512, 1000, 4, 64)
        args = net.table, np.array(net.nodes), np.array(net.leafs), net.sizes
        ggml[len(net.nodes)] = median_seconds(lambda a=args: alloc_graphs.plan_table(*a))
        best[len(net.nodes)] = median_seconds(lambda a=args: alloc_graphs.plan_table(*a, planner="best"))
        nodes, _, _, median = sched_bench.plan_time(33 * n, 5)
        split[nodes] = median
    yield from (Curve("allocator, ggml's plan", ggml), Curve("allocator, best plan", best),
                Curve("scheduler, 3 devices", split))


PARTS = {"columns": (columns, "tokens n", "GFLOP/s", 1), "layers": (layers, "layers", "ms", 1e3),
         "context": (context, "tokens before", "ms", 1e3), "batch": (batch, "tokens of the prompt", "ms", 1e3),
         "plan": (plan, "nodes", "ms", 1e3)}
TITLES = {"columns": "Throughput of a matrix product by n", "layers": "Time of a token by the layers of the model",
          "context": "Time of a token by the tokens before it", "batch": "Time of a prompt by its tokens",
          "plan": "Time of planning by the nodes of the graph"}


# ---------------------------------------------------------------- what is shown
def cliffs(curve):
    """[(n, the next n, share of the throughput that is left)] where it falls below CLIFF."""
    steps = zip(sorted(curve.points), sorted(curve.points)[1:], strict=False)
    return [(a, b, curve.points[b] / curve.points[a]) for a, b in steps if curve.points[b] < CLIFF * curve.points[a]]


def table(part, curves):
    _, grows, unit, factor = PARTS[part]
    sizes = sorted({n for c in curves for n in c.points})
    if part == "columns":
        sizes = [n for n in sizes if n in SHOWN]
    yield f"\n## {TITLES[part]}\n"
    yield "| " + " | ".join([grows, *map(str, sizes), "cliffs" if part == "columns" else "slope"]) + " |"
    yield "|" + "---|" * (len(sizes) + 2)
    for c in curves:
        cells = [report.number(c.points[n] * factor) if n in c.points else "" for n in sizes]
        last = "; ".join(f"{a} to {b}: {x:.2f}" for a, b, x in cliffs(c)) or "none" if part == "columns" else (
            f"{c.exponent:.2f}")
        yield f"| {c.name}, {unit} | " + " | ".join(cells) + f" | {last} |"


def plot(parts, path):
    plt = pyplot()
    figure, axes = plt.subplots(1, len(parts), figsize=(5.2 * len(parts), 4.6), layout="constrained", squeeze=False)
    for ax, (part, curves) in zip(axes[0], parts.items(), strict=True):
        _, grows, unit, factor = PARTS[part]
        for c in curves:
            x, y = zip(*sorted(c.points.items()), strict=True)
            ax.plot(x, [v * factor for v in y], marker=".", label=c.name)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        if part != "columns":
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        ax.set(title=part, xlabel=grows, ylabel=unit)
        ax.grid(which="major", color="#dddddd")
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.growth", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=pathlib.Path, help="where table and plot go, without suffix (default: "
                   "benchmarks/results/growth; with --only nothing is written)")
    args = p.parse_args(argv)
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        p.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    lines, done = [machine.idle_check("before the run")], {}
    for part in chosen:
        with machine.same_cores(args.threads):
            done[part] = list(PARTS[part][0](args.threads))
        print("\n".join(table(part, done[part])), flush=True)
    lines.append(machine.idle_check("after the run"))
    print("\n".join(["", *lines]))
    out = args.out or (RESULTS if chosen == list(PARTS) else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        plot(done, out.with_suffix(".png"))
        about = [f"{datetime.date.today()}, {machine.cpu_model()}, kernels {isa.ISA}, {args.threads} thread(s)",
                 f"models: {SHAPE} shape {TYPE}; products: weights [2048 x 2048] from memory", *lines]
        body = "\n".join(line for part, curves in done.items() for line in table(part, curves))
        out.with_suffix(".md").write_text(ABOUT + body + "\n\n"
                                          + "\n".join(f"- {line}" for line in about) + "\n", "utf-8")
        print(f"written to {out}.md and .png")


if __name__ == "__main__":
    sys.exit(main())
