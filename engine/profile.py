"""Where the time goes: `with gg.profile() as p:` around any computes.

    with gg.profile() as p:
        model.logits(ids)
    p                           a table: kinds of nodes, time, GB/s, GFLOP/s, balance, share of the roofline
    p.plot()                    threads and layers over time (matplotlib)
    p.trace("run.json")         for chrome://tracing and ui.perfetto.dev
    graph.draw()                times and bytes in the picture of the graph

Every thread reads the processor's clock at the end of each node, in jitted code (engine/pool.py), into an array of its
own: about 10 ns a node.  Outside a profile the plans run a walk that has no such code.

    thread 0   |== mul_mat ==|..|= add =|          balance of a node: mean over its threads of the time they were busy,
    thread 1   |= mul_mat =|....|                  over the longest;  ... waits at the barrier

A node of a plan is a row, whatever it fuses ("rms_norm+mul").  Bytes are what it has to read and write at least,
operations the multiplications and additions of its products.  The roofline is the larger of bytes / bandwidth and
operations / float32 peak, measured on this machine with as many threads; data in caches and int8 products can be above
it.
"""
import collections
import dataclasses
import json
import os
import time
import weakref

import numpy as np

from ggjit.limits import roofline
from ggjit.ops.errors import GgjitError, ParamError, extra
from ggjit.ops.record import N_TASKS, OP
from ggjit.ops.shape import describe
from ggjit.pool import clock, the_pool
from ggjit.show import Shown

MAX_EVENTS = 1 << 21            # node runs kept one by one (32 MB a thread); older ones are kept as sums
MIN_BASELINE_NS = 20_000_000    # clock ticks are converted over at least this span
_last = None                    # weak reference to the profile that was closed last


# ---------------------------------------------------------------- what a node has to do
def element_nbytes(t):
    """Bytes of the elements of a tensor or view, gaps not counted."""
    n = t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]
    return n // t.type.block * t.type.nbytes


def traffic(t):
    """Bytes a node has to read and write at least."""
    out = element_nbytes(t)
    if t.op == OP.GET_ROWS:
        rows = t.ne[1] * t.ne[2] * t.ne[3]
        return out + rows * t.src[0].type.row_nbytes(t.ne[0]) + t.src[1].nbytes
    if t.op == OP.SET_ROWS:
        x = t.src[0]
        return element_nbytes(x) + element_nbytes(x) // x.type.nbytes * t.type.nbytes // t.type.block
    return out + sum(element_nbytes(s) for s in t.src if s is not None)


def operations(t):
    """Multiplications and additions of the products; other ops count none."""
    if t.op == OP.MUL_MAT:
        return 2 * t.src[0].ne[0] * t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]
    if t.op == OP.FLASH_ATTN_EXT:
        q, k, v = t.src[:3]
        return 2 * (q.ne[0] + v.ne[0]) * k.ne[1] * q.ne[1] * q.ne[2] * q.ne[3]
    return 0


def part_traffic(part):
    """The same of a fused node: results that are left out are neither written nor read, nothing is read twice."""
    if len(part.nodes) == 1:
        return traffic(part.t)
    total, known = 0, {t.id for t in part.nodes}
    for t in part.nodes:
        total += traffic(t) - (element_nbytes(t) if t.id in part.left_out else 0)
        if t.op != OP.GET_ROWS:
            for s in filter(None, t.src[:1] if t.op == OP.SET_ROWS else t.src):
                total -= element_nbytes(s) if s.id in known else 0
                known.add(s.id)
    return total


def kind(t, kernel):
    """Nodes of one kind are summed up: the same kernel, and for products the same matrix."""
    if t.op in (OP.MUL_MAT, OP.FLASH_ATTN_EXT):
        a, b = t.src[:2]
        return f"{kernel} [{a.ne[0]} x {a.ne[1]}] {b.ne[1]}"
    return f"{kernel} [{t.ne[0]} x {t.ne[1] * t.ne[2] * t.ne[3]}]"


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


class _Facts:
    """What is known of one node of a plan (a PlanNode) without keeping its tensors."""
    __slots__ = ("id", "generation", "members", "name", "op", "kernel", "kind", "nbytes", "flops", "layer", "tensor")

    def __init__(self, part, layer):
        t = part.t
        self.id, self.generation, self.members = t.id, t.generation, [x.id for x in part.nodes]
        self.name, self.tensor = t.name or f"%{t.id}", describe(t)
        self.op = "+".join(x.op.name.lower() for x in part.nodes)
        self.kernel, self.kind = part.kernel.name, kind(t, part.kernel.name)
        self.nbytes, self.flops = part_traffic(part), sum(map(operations, part.nodes))
        self.layer = layer.get(t.id) or ""


class Record:
    """The runs of one plan: facts about its nodes, sums of clock ticks, and the last runs one by one."""

    def __init__(self, plan):
        from ggjit.draw import layers
        self.rows_of_plan = plan.rows   # only while the profile is open: so that its id is not given to another
        layer = layers(plan.graph.nodes)
        self.backend, self.n_threads = plan.backend.name, plan.n_threads
        self.title = ", ".join(map(describe, plan.graph.outputs))
        self.nodes = [_Facts(p, layer) for p in plan.parts]
        self.tasks = [int(plan.rows[at + N_TASKS]) for at in plan._starts[:len(self.nodes)]]
        n = len(self.nodes)
        self.runs, self.wall = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.busy = np.zeros((n, self.n_threads), np.int64)
        self.kept = []                  # (first node, ticks)
        self.folded = 0                 # how many of them are in the sums

    def add(self, first, ticks):
        self.kept.append((first, ticks))

    def fold(self, keep):
        """Add kept runs to the sums; all but the newest `keep` are let go."""
        for first, ticks in self.kept[self.folded:]:
            at = slice(first, first + ticks.shape[1])
            start, end = ticks[:, :, 0], ticks[:, :, 1]
            ran = end > 0
            self.runs[at] += ran.any(0)
            self.wall[at] += end.max(0) - np.where(ran, start, np.iinfo(np.int64).max).min(0)
            self.busy[at] += (end - start).T
        self.kept = self.kept[len(self.kept) - keep:] if keep else []
        self.folded = len(self.kept)

    def rows(self, hz):
        """A NodeTime per node that ran."""
        self.fold(len(self.kept))
        for i, f in enumerate(self.nodes):
            n = int(self.runs[i])
            if n:
                busy, used = self.busy[i].sum() / n / hz, min(self.tasks[i], self.n_threads)
                longest = self.busy[i].max() / n / hz
                yield NodeTime(f.name, f.op, f.kernel, f.kind, self.backend, f.layer, 1, n, used,
                               self.wall[i] / n / hz, busy, busy / (used * longest) if longest else 1.0, f.nbytes,
                               f.flops)


class Profile(Shown):
    """What ran inside the `with` block.  `rows`: NodeTime per node; `by(key)`: summed; str() and HTML are tables."""

    def __init__(self):
        self._records, self._n_events, self._open = {}, 0, False
        self._hz, self._spans = None, []

    # ------------------------------------------------------------ recording
    def __enter__(self):
        if self._open:
            raise GgjitError("this profile is open already; make another with gg.profile()")
        self._open, self._start = True, (clock(), time.perf_counter_ns())
        the_pool().tracers.append(self)
        return self

    def __exit__(self, *exc):
        global _last
        pool = the_pool()
        pool.tracers = [t for t in pool.tracers if t is not self]
        self._calibrate()
        self._open, _last = False, weakref.ref(self)
        self._records = {i: r for i, r in enumerate(self.records)}
        for r in self.records:
            r.rows_of_plan = None

    def record(self, plan, first, ticks):
        """Called by the pool after each run: ticks (threads, nodes, 2)."""
        r = self._records.get(id(plan.rows))    # a plan lays its nodes out anew when memory moved
        if r is None:
            r = self._records[id(plan.rows)] = Record(plan)
        r.add(first, ticks)
        self._n_events += ticks.shape[1]
        if self._n_events > MAX_EVENTS:
            for other in self.records:
                other.fold(len(other.kept) // 2)
            self._n_events = sum(t.shape[1] for r in self.records for _, t in r.kept)

    def _calibrate(self):
        """Ticks per second over the time the profile was open, or a little longer where that was too short."""
        c0, t0 = self._start
        while time.perf_counter_ns() - t0 < MIN_BASELINE_NS:
            time.sleep(0.001)
        self._hz = (clock() - c0) * 1e9 / (time.perf_counter_ns() - t0)

    # ------------------------------------------------------------ data
    @property
    def records(self):
        return list(self._records.values())

    @property
    def hz(self):
        """Clock ticks a second."""
        if self._hz is None or self._open:
            self._calibrate()
        return self._hz

    @property
    def rows(self):
        """A NodeTime per node of every plan that ran, in the order of computing."""
        return [row for r in self.records for row in r.rows(self.hz)] if self._records else []

    @property
    def seconds(self):
        """Time inside nodes, all runs."""
        return sum(r.seconds * r.runs for r in self.rows)

    def by(self, key="kind", limits=True):
        """NodeTimes summed by "kind", "op", "kernel", "layer", "backend" or "node" (each on its own), slowest first.

        The figures are totals over all runs.  limits=False leaves the roofline out: it takes half a second to measure
        the first time.
        """
        if key not in ("kind", "op", "kernel", "layer", "backend", "node"):
            raise ParamError(f"by {key!r}: expected kind, op, kernel, layer, backend or node")
        sums = collections.OrderedDict()
        for i, r in enumerate(self.rows):
            sums.setdefault(i if key == "node" else getattr(r, key), []).append(r)
        out = [_summed(rows, key, limits) for rows in sums.values()]
        return sorted(out, key=lambda r: -r.seconds)

    def seconds_by_tensor(self):
        """{tensor id: mean seconds of a run}"""
        return {f.id: r.wall[i] / r.runs[i] / self.hz for r in self._folded() for i, f in enumerate(r.nodes)
                if r.runs[i]}

    def nbytes_by_tensor(self):
        """{tensor id: bytes its node has to move}"""
        return {f.id: f.nbytes for r in self.records for f in r.nodes}

    def backend_by_tensor(self):
        """{tensor id: name of the backend that computed it}"""
        return {i: r.backend for r in self.records for f in r.nodes for i in f.members}

    def fused_into(self):
        """{tensor id: name of the node whose kernel computes it}"""
        return {i: f.name for r in self.records for f in r.nodes for i in f.members if i != f.id}

    def _folded(self):
        for r in self.records:
            r.fold(len(r.kept))
        return self.records

    def events(self):
        """(record, node number, thread, start, end) of every node run that was kept; seconds from the first."""
        everything = [(r, first, ticks) for r in self.records for first, ticks in r.kept]
        if not everything:
            return []
        zero = min(int(t[:, :, 0][t[:, :, 1] > 0].min()) for _, _, t in everything if (t[:, :, 1] > 0).any())
        out = []
        for r, first, ticks in everything:
            for ith, i in zip(*np.nonzero(ticks[:, :, 1]), strict=True):
                a, b = ((int(x) - zero) / self.hz for x in ticks[ith, i])
                out.append((r, first + int(i), int(ith), a, b))
        return out

    # ------------------------------------------------------------ text
    HEAD = ("%", "ms", "nodes", "us each", "GB/s", "GFLOP/s", "balance", "roofline")

    def table(self, key="kind", limit=25):
        """(header, rows of texts): the slowest first."""
        found = self.by(key)
        total = sum(r.seconds for r in found) or 1.0
        lines = [(f"{100 * r.seconds / total:.1f}", f"{1e3 * r.seconds:.3f}", f"{r.n_nodes}",
                  f"{1e6 * r.seconds / max(r.runs, 1):.2f}", f"{r.gb_per_s:.1f}", f"{r.gflop_per_s:.1f}",
                  f"{r.balance:.0%}" if r.n_threads > 1 else "-", f"{r.roofline:.0%}", r.name) for r in found[:limit]]
        if len(found) > limit:
            rest = sum(r.seconds for r in found[limit:])
            lines.append((f"{100 * rest / total:.1f}", f"{1e3 * rest:.3f}", f"{sum(r.n_nodes for r in found[limit:])}",
                          *[""] * 5, f"({len(found) - limit} more)"))
        return (*self.HEAD, key), lines

    def __str__(self):
        if not self._records:
            return "(nothing was computed on the thread pool)"
        head, lines = self.table()
        width = [max(len(x[k]) for x in [head, *lines]) for k in range(len(head))]
        return "\n".join("  ".join([*(x.rjust(w) for x, w in zip(row[:-1], width, strict=False)), row[-1]])
                         for row in [head, *lines])

    def __repr__(self):
        n = sum(len(r.nodes) for r in self.records)
        return f"<Profile of {len(self.records)} plans, {n} nodes{', open' if self._open else ''}>"

    def _repr_html_(self):
        from ggjit.show_html import facts, table
        if not self._records:
            return facts("Profile", (("nodes", str(self)),))
        head, lines = self.table()
        return facts("Profile", (("plans", "; ".join(f"{r.title}: {int(r.runs.max(initial=0))} runs on {r.backend}, "
                                                     f"{r.n_threads} threads" for r in self.records)),
                                 ("time in nodes", f"{1e3 * self.seconds:.3f} ms"))) + table(lines, head, range(8))

    # ------------------------------------------------------------ files and pictures
    def trace(self, file):
        """Write Chrome's trace format: one bar per node and thread; threads of a plan are lanes."""
        events = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": ith, "args": {"name": f"thread {ith}"}}
                  for ith in range(max((r.n_threads for r in self.records), default=1))]
        for r, i, ith, start, end in self.events():
            f = r.nodes[i]
            events.append({"name": f.op if f.name.startswith("%") else f.name, "cat": f.op, "ph": "X", "pid": 1,
                           "tid": ith, "ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3),
                           "args": {"kernel": f.kernel, "tensor": f.tensor, "layer": f.layer, "bytes": f.nbytes,
                                    "operations": f.flops, "backend": r.backend}})
        partial = f"{os.fspath(file)}.{os.getpid()}.part"
        with open(partial, "w", encoding="utf-8") as f:
            json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, f)
        os.replace(partial, file)

    def plot(self, ax=None, path=None, run=-1):
        """Layers and threads over the time of one run (engine/profile_plot.py); returns the axes."""
        extra("matplotlib", "plots")
        from ggjit.profile_plot import plot
        return plot(self, ax, path, run)


def _summed(rows, key, limits):
    """Totals over all runs of some NodeTimes."""
    seconds, busy = (sum(getattr(r, what) * r.runs for r in rows) for what in ("seconds", "busy"))
    first = rows[0]
    out = dataclasses.replace(
        first, name=first.name if key == "node" else getattr(first, key) or "(no layer)", n_nodes=len(rows),
        runs=sum(r.runs for r in rows), n_threads=max(r.n_threads for r in rows), seconds=seconds, busy=busy,
        balance=sum(r.balance * r.seconds * r.runs for r in rows) / seconds if seconds else 1.0,
        nbytes=sum(r.nbytes * r.runs for r in rows), flops=sum(r.flops * r.runs for r in rows))
    if limits and seconds:
        least = 0.0
        for r in rows:
            bandwidth, peak = roofline(r.n_threads)
            least += max(r.nbytes / bandwidth, r.flops / peak) * r.runs
        out.roofline = least / seconds
    return out


def profile():
    """A Profile, to be opened with `with`: it sees every compute of this process on the thread pool meanwhile."""
    return Profile()


def last_of(graph):
    """The profile closed last, if it saw this graph."""
    p = _last() if _last is not None else None
    if p is None:
        return None
    seen = {(f.id, f.generation) for r in p.records for f in r.nodes}
    return p if any((t.id, t.generation) in seen for t in graph.nodes) else None
