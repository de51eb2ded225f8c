"""The gain of fusion at plan time: each pattern alone and all together beside the plan without fusion, and an upper
bound of the gain of patterns that ggjit does not have.

    python -m benchmarks.fusion [NETWORK ...] [-t 1 2] [--seconds 5]

Patterns: one graph of a network planned several times; the plans take turns in an order drawn anew each round.
Bounds: the same network with nodes left out altogether, work and all: a fusion that computes them too gains less.
Wall time, 10th percentile and median of the pairwise ratios; below 1 is faster.
"""
import argparse
import dataclasses
import time
import types
from collections.abc import Callable
from unittest import mock

import numpy as np

from benchmarks import synth
from benchmarks.catalogue import STORIES
from benchmarks.worker import Missing
from ggjit.cpu import cpu_plan, fusion
from ggjit.graphs import graph_plan
from ggjit.models import load_model
from ggjit.models.files.minilm import minilm_path
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import OP

LEFT_OUT = {"rope and set_rows": (OP.ROPE, OP.SET_ROWS)}


@dataclasses.dataclass(frozen=True)
class Net:
    """file: gives the path; shape: arguments of the network's graph; text: how it is called in the table."""
    text: str
    file: Callable
    shape: tuple


def _llama(name, type):
    return lambda: synth.model_path(name, type)


NETWORKS = {
    "minilm-64": Net("MiniLM F32, 64 tokens", minilm_path, (64,)),
    "minilm-16": Net("MiniLM F32, 16 tokens", minilm_path, (16,)),
    "stories260k": Net("stories260K F32, one token", STORIES, (1, 256, 1)),
    "smollm": Net("SmolLM-135M shape Q4_0, one token", _llama("smollm-135m", "Q4_0"), (1, 256, 1)),
    "tinyllama": Net("TinyLlama-1.1B shape Q4_0, one token", _llama("tinyllama-1.1b", "Q4_0"), (1, 256, 1)),
    "tinyllama-64": Net("TinyLlama-1.1B shape Q4_0, 64 tokens", _llama("tinyllama-1.1b", "Q4_0"), (64, 256, 1)),
}


# ---------------------------------------------------------------- plans
def with_patterns(m, step, chosen):
    """The step's graph planned with the fusions `chosen` alone."""
    table = {}
    for f in chosen:
        table.setdefault(f.ops[0], []).append(f)
    with mock.patch.object(fusion, "all_fusions", lambda: table):
        return _plan(m, step, fuse=bool(table))


def _plan(m, step, fuse=True):
    """Another plan of the step's graph; all threads run it, whatever they cost."""
    plan = cpu_plan.CPUPlan(m.backend, step.plan.graph, step.plan.placement, fuse)
    plan.thread_choice = None
    return plan


def without_nodes(m, step, ops):
    """The step's graph planned without the nodes of these ops: its results are wrong, its time is a bound."""
    real = graph_plan.nodes_to_compute

    def some(graph):
        return real(types.SimpleNamespace(nodes=[t for t in graph.nodes if t.op not in ops]))
    with mock.patch.object(graph_plan, "nodes_to_compute", some):
        return _plan(m, step)


# ---------------------------------------------------------------- timing
def ratios(plans, seconds):
    """[(10th percentile, median of the pairwise ratios)] of each plan's time against the first one's."""
    for p in plans:
        p.compute()
    t0 = time.perf_counter()
    for p in plans:
        p.compute()
    reps = max(1, int(0.002 * len(plans) / (time.perf_counter() - t0)))
    rng, times, end = np.random.default_rng(0), [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        row = [0.0] * len(plans)
        for i in rng.permutation(len(plans)):
            t0 = time.perf_counter()
            for _ in range(reps):
                plans[i].compute()
            row[i] = (time.perf_counter() - t0) / reps
        times.append(row)
    times = np.array(times)
    low = np.quantile(times, 0.1, axis=0)
    return list(zip(low / low[0], np.median(times / times[:, :1], axis=0), strict=True))


def variants(m, step):
    """{name: plan}, the one without fusion first."""
    every = [f for fusions in all_fusions().values() for f in fusions]
    plans = {"none": with_patterns(m, step, ()), "all": with_patterns(m, step, every)}
    for f in every:
        p = with_patterns(m, step, (f,))
        if len(p.parts) < len(plans["none"].parts):
            plans[f.name] = p
    return plans


def measure(net, n_threads, seconds):
    """Lines of the table for one network: text, threads, pattern, kernels, 10th percentile, paired median."""
    with load_model(net.file(), n_threads=n_threads) as m:
        step = m._step(net.shape)
        if "mask" in step.inputs:
            step.inputs["mask"][:] = 0                      # as if all positions had been written
        plans = variants(m, step)
        for (name, p), ratio in zip(plans.items(), ratios(list(plans.values()), seconds), strict=True):
            yield net.text, n_threads, name, len(p.parts), *ratio
        for name, ops in LEFT_OUT.items():
            bound = without_nodes(m, step, ops)
            if len(bound.parts) < len(plans["all"].parts):
                _, ratio = ratios([plans["all"], bound], seconds)
                yield net.text, n_threads, f"bound: all, {name} left out", len(bound.parts), *ratio


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.fusion", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("networks", nargs="*", metavar="NETWORK", default=list(NETWORKS), help=", ".join(NETWORKS))
    p.add_argument("-t", type=int, nargs="+", default=[1, 2], help="thread counts (1 2)")
    p.add_argument("--seconds", type=float, default=5.0, help="of each comparison (5)")
    args = p.parse_args(argv)
    unknown = [n for n in args.networks if n not in NETWORKS]
    if unknown:
        p.error(f"no NETWORK {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    print(f"| network | threads | pattern | kernels | p10 | paired median |\n|{'---|' * 6}")
    for key in args.networks:
        for n_threads in args.t:
            try:
                for line in measure(NETWORKS[key], n_threads, args.seconds):
                    print("| {} | {} | {} | {} | {:.3f} | {:.3f} |".format(*line), flush=True)
            except Missing as e:
                print(f"| {NETWORKS[key].text} | {n_threads} | missing: {e} | | | |")


if __name__ == "__main__":
    main()
