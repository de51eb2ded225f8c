"""The nodes of a plan in a profile, with the times measured for them.

    PlanFacts(plan, i, j)       names, kernels, bytes and operations of nodes i..j-1, without keeping their tensors
    Record(trace_buffer, before)    the runs of these nodes while one profile was open: sums of clock ticks, the last
                                    runs
    record.rows(hz)                 a NodeTime per node
"""
import dataclasses

import numpy as np

from ggjit.graphs.layers import layers
from ggjit.ops.core.printable import printable
from ggjit.ops.core.record import N_TASKS, OP
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import elements_nbytes, flops, moved_nbytes
from ggjit.ops.core.weak import WeakKeys
from ggjit.tensors.summary import label, op_name


def part_traffic(part):
    """(bytes, operations) of a fused node: intermediate results do not count, and sources count once."""
    if len(part.nodes) == 1:
        return moved_nbytes(part.t)
    total, known = 0, {t.id for t in part.nodes}
    for t in part.nodes:
        total += moved_nbytes(t) - (elements_nbytes(t) if t.id in part.left_out else 0)
        if t.op != OP.GET_ROWS:
            for s in [s for s in (t.src[:1] if t.op == OP.SET_ROWS else t.src) if s is not None]:
                total -= elements_nbytes(s) if s.id in known else 0
                known.add(s.id)
    return total


def kind(t, kernel):
    """Nodes of one kind are summed up: the same kernel, and for products the same matrix."""
    if t.op in (OP.MUL_MAT, OP.FLASH_ATTN_EXT):
        a, b = t.src[:2]
        return f"{kernel} [{a.ne[0]}, {a.ne[1]}] {b.ne[1]}"
    return f"{kernel} [{t.ne[0]}, {t.ne[1] * t.ne[2] * t.ne[3]}]"


@dataclasses.dataclass(slots=True)
class NodeTime:
    """One node of one plan, or the sum over nodes of one kind.

    n_nodes: how many; runs: times computed; seconds: mean per run, first start to last end; busy: mean per run, summed
    over threads; balance: 0..1; nbytes, flops: per run; roofline: share of what the machine can do at most, None
    without a measurement.
    """
    name: str
    op: str
    kernel: str
    kind: str
    backend: str
    layer: str
    n_nodes: int
    runs: int
    n_threads: int
    seconds: float
    busy: float
    balance: float
    nbytes: int
    flops: int
    roofline: float | None = None

    @property
    def gb_per_s(self):
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gflop_per_s(self):
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0


class NodeFacts:
    """One node of a plan (engine/cpu/fusion.py: PlanNode)."""

    def __init__(self, part, layer):
        t = part.t
        self.id, self.generation, self.members = t.id, t.generation, [x.id for x in part.nodes]
        self.name, self.title, self.tensor = label(t), printable(t.name) or op_name(t), describe(t)
        self.op = "+".join(map(op_name, part.nodes))
        self.kernel, self.kind = part.kernel.name, kind(t, part.kernel.name)
        self.nbytes, self.flops = part_traffic(part), sum(map(flops, part.nodes))
        self.layer = layer.get(t.id) or ""


class PlanFacts:
    """nodes: NodeFacts; tasks: threads each may use; title: the graph's outputs."""

    def __init__(self, plan, i, j):
        layer = layers(plan.graph.nodes)
        self.backend, self.n_threads = plan.backend.name, plan.n_threads
        self.title = ", ".join(map(describe, plan.graph.outputs))
        self.nodes = [NodeFacts(p, layer) for p in plan.parts[i:j]]
        self.tasks = [int(plan.rows[at + N_TASKS]) for at in plan._starts[i:j]]


_facts = WeakKeys()     # {plan: (its rows, its nodes' names, {(i, j): PlanFacts})}


def facts_of(plan, i, j):
    """The PlanFacts of a plan's nodes i..j-1, made again when rows were laid out again or names given since."""
    names = [t.name for t in plan.nodes]
    rows, before, known = _facts.of(plan) or (None, None, None)
    if rows is not plan.rows or before != names:
        known = {}
        _facts.put(plan, (plan.rows, names, known))
    if (i, j) not in known:
        known[i, j] = PlanFacts(plan, i, j)
    return known[i, j]


class Record:
    """The runs of one plan in one profile.

    n_runs: how many; wall (nodes), busy (nodes, threads): sums of clock ticks; ticks (runs, threads, nodes, 2): start
    and end in the last runs, 0 where a thread skipped the node.
    """

    def __init__(self, trace_buffer, before=None):
        """before: sums of the trace buffer when the profile was opened."""
        facts = self.facts = trace_buffer.facts
        self.nodes, self.backend, self.n_threads, self.title = facts.nodes, facts.backend, facts.n_threads, facts.title
        n0, wall, busy = before or (0, 0, 0)
        n, self.wall, self.busy = trace_buffer.sums()
        self.n_runs = n - n0
        self.wall, self.busy = self.wall - wall, self.busy - busy
        self.ticks = trace_buffer.kept(n0)

    def seconds(self, hz):
        """Mean of a run per node."""
        return self.wall / self.n_runs / hz

    def rows(self, hz):
        """A NodeTime per node."""
        n = self.n_runs
        for f, tasks, seconds, ticks in zip(self.nodes, self.facts.tasks, self.seconds(hz), self.busy, strict=True):
            busy, longest, used = ticks.sum() / n / hz, ticks.max() / n / hz, min(tasks, self.n_threads)
            yield NodeTime(f.name, f.op, f.kernel, f.kind, self.backend, f.layer, 1, n, used, seconds, busy,
                           busy / (used * longest) if longest else 1.0, f.nbytes, f.flops)

    def events(self):
        """(run, thread, node number, start, end in ticks) of every node run that is kept."""
        for run, ith, i in np.argwhere(self.ticks[..., 1]).tolist():
            yield run, ith, i, *self.ticks[run, ith, i].tolist()
