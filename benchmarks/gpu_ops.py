"""How fast each op with a CUDA kernel is, timed by events: on the largest of ggml's own cases of it that fits, or of
ours where ggml's suite has none of the op by itself.

A rate counts every byte of the result and its sources once, or multiplications and additions where they are what takes
the time (tools/suite/flops.py).
"""
import contextlib
import functools
import math
import random
import statistics

import numpy as np

import ggjit as gg
from benchmarks.gpu_report import each
from benchmarks.report import Row, Spread
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.ops.cuda.native.launch import launches, makers
from ggjit.tools.suite.cases.case import all_cases
from ggjit.tools.suite.flops import counted, flops, touched
from ggjit.tools.suite.runner import Arena, Built


class Suite:
    """A case of ggml's suite in the memory of a GPU."""

    def __init__(self, case, gpu):
        self.name, self._built = case.params, Built(case, gpu, 0, None)
        self._built.fill()
        self._built.own = Arena(gpu, [t for t in self._built.nodes if t.view_src is None])
        self._built.own.place()
        self.graph, self.free = self._built.graph, self._built.close


class Own:
    """A case of the op's Spec."""

    def __init__(self, case, gpu):
        self.name, ctx = case.name, gg.Context()
        inputs = Inputs(ctx, np.random.default_rng(0))
        self.graph, self.free = gg.Graph(case.build(inputs)), ctx.free
        gg.alloc_ctx_tensors(ctx, gpu)
        for t, values in inputs.data:
            t.set(values)
        self._memory = gg.GraphAllocator(gpu)
        self._memory.alloc_graph(self.graph)


@contextlib.contextmanager
def suites_node(case):
    """The last node of a case of ggml's suite, or None where it is refused; it is freed at the end."""
    try:
        built = Built(case, None, 0, None)
        nodes = built.nodes
    except GgjitError:
        yield None
        return
    try:
        yield nodes[-1] if nodes else None
    finally:
        built.close()


@contextlib.contextmanager
def own_node(case):
    with gg.Context() as ctx:
        yield case.build(Inputs(ctx, np.random.default_rng(0)))


def picked(cases, node_of, largest, most_nbytes=math.inf):
    """{op: case}: the largest case of at most that many bytes, or the smallest of them, of each op that has kernels."""
    found = {}
    for case in cases:
        with node_of(case) as t:
            if t is None or min(t.ne) == 0 or launches(t) is None:
                continue
            nbytes, have = touched(t), found.get(t.op)
            if nbytes <= most_nbytes and (have is None or (nbytes > have[0]) == largest):
                found[t.op] = nbytes, case
    return {op: case for op, (_, case) in found.items()}


def op_rows(timer, peak):
    """One row an op; `peak`: bytes a second of a copy."""
    scale, ops = timer.scale, list(makers())
    cases = random.sample(all_cases(), 100) if scale.dry else all_cases()
    theirs = picked(cases, suites_node, not scale.dry, scale.flush_nbytes)
    chosen = ops if scale.n_ops is None else random.sample(ops, scale.n_ops)
    yield from each([(f"op {op.name}", functools.partial(_rows, timer, op, theirs, peak)) for op in chosen], scale.dry)


def _rows(timer, op, theirs, peak):
    made = Suite(theirs[op], timer.gpu) if op in theirs else \
        Own(picked(all_specs()[op].cases(), own_node, not timer.scale.dry)[op], timer.gpu)
    try:
        yield _row(timer, made, op.name, peak)
    finally:
        made.free()


def _row(timer, made, name, peak):
    plan = timer.gpu.graph_plan_create(made.graph)
    plan.compute()
    last, t = len(plan.nodes) - 1, plan.nodes[-1]
    seconds = timer.seconds(lambda: plan.run_nodes(last, last + 1))
    amount, unit = (flops(t), "GFLOP/s") if counted(t) else (touched(t), "GB/s")
    rate = amount / statistics.median(seconds)
    share = "" if counted(t) else f", {rate / peak:.0%} of a copy"
    return Row(f"op {name}, {made.name}", "-", Spread([s * 1e6 for s in seconds], "us"),
               note=f"{rate / 1e9:,.1f} {unit}{share}")
