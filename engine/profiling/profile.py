"""gg.profile: where the time of a run goes.  `with gg.profile() as p:` around any computations.

    with gg.profile() as p:
        model.logits(ids)
    p                           a table: kinds of nodes, time, GB/s, GFLOP/s, balance, share of the roofline
    p.plot()                    threads and layers over time (matplotlib)
    p.to_dict(), p.to_csv()     a row for each node, for pandas
    p.trace("run.json")         for chrome://tracing and ui.perfetto.dev
    graph.draw()                times and bytes in the picture of the graph

Every thread reads the processor's clock at the end of each node, in jitted code (engine/cpu/walk.py), into
memory of its own (engine/cpu/ticks.py): 10-25 ns a node.  Outside a profile the plans run a walk that has no such code.
All runs are in the sums; plots and traces show the last ones, as many as fit 256 KB a plan.

    thread 0   |== mul_mat ==|..|= add =|          balance of a node: mean over its threads of the time they were busy,
    thread 1   |= mul_mat =|....|                  over the longest;  ... waits at the barrier

A node of a plan is a row, whatever it fuses ("rms_norm+mul").  Bytes are what it has to read and write at least,
operations the multiplications and additions of products, convolutions and recurrences (`flops` of the op's spec).  The
roofline is the larger of bytes / bandwidth and operations / float32 peak, measured here with as many threads.
Data in caches and int8 products can be above it: the table says "cached" there.
"""
import collections
import csv
import dataclasses
import io
import json
import time
import weakref

from ggjit.core.arguments import typed_call
from ggjit.core.html_repr import HtmlRepr
from ggjit.cpu.thread_pool import the_pool
from ggjit.cpu.walk import clock
from ggjit.ops.core.errors import GgjitError, ParamError, extra
from ggjit.ops.core.whole_file import whole_file
from ggjit.profiling.machine_limits import roofline
from ggjit.profiling.nodes import NodeTime, Record, facts_of
from ggjit.profiling.plot import plot

MIN_BASELINE_NS = 20_000_000    # clock ticks are converted over at least this span
_last = None                    # weak reference to the profile that was closed last


CACHED = ("cached: faster than memory and float32 products allow, as the data came from a cache or the products are "
          "of int8")


def share_text(roofline):
    """A share of the roofline: "87%"; above it "cached": the roofline is that of the memory, which was not used."""
    return f"{roofline:.0%}" if roofline <= 1.005 else "cached"


class Profile(HtmlRepr):
    """The nodes that ran inside the `with` block.  `rows`: NodeTime per node; `by(key)`: summed; str() and HTML are
    tables."""

    facts = staticmethod(facts_of)      # called by the pool when it first runs a plan (engine/cpu/ticks.py)

    def __init__(self):
        self._closed, self._open, self._hz = [], False, None

    # ------------------------------------------------------------ recording
    def __enter__(self):
        if self._open:
            raise GgjitError("this profile is open already; make another with gg.profile()")
        tracing = the_pool().tracing
        self._open, self._start = True, (clock(), time.perf_counter_ns())
        # sums of trace buffers that profiles around this one opened
        self._before = {s: s.sums() for s in tracing.trace_buffers.values()}
        tracing.watch(self)
        return self

    def __exit__(self, *exc):
        global _last
        self._closed, self._open, _last = self.records, False, weakref.ref(self)
        the_pool().tracing.leave(self)
        self._hz = None
        if time.perf_counter_ns() - self._start[1] >= MIN_BASELINE_NS:
            self._calibrate()           # otherwise done when `hz` is first read, so that closing does not wait

    def _calibrate(self):
        """Ticks per second over the time since the profile was opened, or a little longer where that was too short."""
        c0, t0 = self._start
        while time.perf_counter_ns() - t0 < MIN_BASELINE_NS:
            time.sleep(0.001)
        self._hz = (clock() - c0) * 1e9 / (time.perf_counter_ns() - t0)

    # ------------------------------------------------------------ data
    @property
    def records(self):
        """A Record per plan that ran (engine/profiling/nodes.py), in the order of their first runs."""
        if not self._open:
            return self._closed
        found = [Record(s, self._before.get(s)) for s in list(the_pool().tracing.trace_buffers.values())]
        return self._closed + [r for r in found if r.n_runs]

    @property
    def hz(self):
        """Clock ticks a second."""
        if self._hz is None or self._open:
            self._calibrate()
        return self._hz

    @property
    def rows(self):
        """A NodeTime per node of every plan that ran, in the order of computing."""
        return [row for r in self.records for row in r.rows(self.hz)]

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
        return {f.id: s for r in self.records for f, s in zip(r.nodes, r.seconds(self.hz).tolist(), strict=True)}

    def nbytes_by_tensor(self):
        """{tensor id: bytes its node has to move}"""
        return {f.id: f.nbytes for r in self.records for f in r.nodes}

    def backend_by_tensor(self):
        """{tensor id: name of the backend that computed it}"""
        return {i: r.backend for r in self.records for f in r.nodes for i in f.members}

    def fused_into(self):
        """{tensor id: title, in a picture, of the node whose kernel computes it}"""
        return {i: f.title for r in self.records for f in r.nodes for i in f.members if i != f.id}

    def events(self):
        """(record, node number, thread, start, end) of every node run that was kept; seconds from the first."""
        found = [(r, i, ith, a, b) for r in self.records for _, ith, i, a, b in r.events()]
        zero = min((a for *_, a, _ in found), default=0)
        return [(r, i, ith, (a - zero) / self.hz, (b - zero) / self.hz) for r, i, ith, a, b in found]

    # ------------------------------------------------------------ text
    HEAD = ("%", "ms", "nodes", "us each", "GB/s", "GFLOP/s", "balance", "roofline")

    def table(self, key="kind", limit=25):
        """(header, rows of texts): the slowest first."""
        found = self.by(key)
        total = sum(r.seconds for r in found) or 1.0
        lines = [(f"{100 * r.seconds / total:.1f}", f"{1e3 * r.seconds:.3f}", f"{r.n_nodes}",
                  f"{1e6 * r.seconds / max(r.runs, 1):.2f}", f"{r.gb_per_s:.1f}", f"{r.gflop_per_s:.1f}",
                  f"{r.balance:.0%}" if r.n_threads > 1 else "-", share_text(r.roofline), r.name)
                 for r in found[:limit]]
        if len(found) > limit:
            rest = sum(r.seconds for r in found[limit:])
            lines.append((f"{100 * rest / total:.1f}", f"{1e3 * rest:.3f}", f"{sum(r.n_nodes for r in found[limit:])}",
                          *[""] * 5, f"({len(found) - limit} more)"))
        return (*self.HEAD, key), lines

    def __str__(self):
        if not self.records:
            return "(nothing was computed on the thread pool)"
        head, lines = self.table()
        width = [max(len(x[k]) for x in [head, *lines]) for k in range(len(head))]
        return "\n".join(["  ".join([*(x.rjust(w) for x, w in zip(row[:-1], width, strict=False)), row[-1]])
                          for row in [head, *lines]] + self.remarks(lines))

    @staticmethod
    def remarks(lines):
        """Remarks below the table: why a row stays behind its roofline."""
        return [CACHED] if any("cached" in row for row in lines) else []

    def __repr__(self):
        n = sum(len(r.nodes) for r in self.records)
        return f"<Profile of {len(self.records)} plans, {n} nodes{', open' if self._open else ''}>"

    # ------------------------------------------------------------ files and pictures
    def to_dict(self):
        """{column: [its value for each node]}, the fields of NodeTime: `pandas.DataFrame(p.to_dict())` is a table.

            with gg.profile() as p: gg.compute(y)
            p.to_dict()["seconds"]
        """
        rows = self.rows
        return {f.name: [getattr(r, f.name) for r in rows] for f in dataclasses.fields(NodeTime)}

    def to_csv(self, file=None):
        """The same as lines of comma-separated values, with a head; written to `file`, or the text where none is given.

        Errors: OSError.
        """
        columns, out = self.to_dict(), io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
        if file is None:
            return out.getvalue()
        with whole_file(file, text=True) as f:
            f.write(out.getvalue())

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
        with whole_file(file, text=True) as f:
            json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, f)

    def plot(self, ax=None, path=None, run=-1):
        """Layers and threads over the time of one run (engine/profiling/plot.py); returns the axes."""
        extra("matplotlib", "plots")
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


@typed_call
def profile():
    """A Profile, to be opened with `with`: it sees every compute of this process on the thread pool meanwhile.

        with gg.profile() as p:
            gg.compute(gg.add(t, t))
        print(p)
    """
    return Profile()


def last_of(graph):
    """The profile closed last, if it saw this graph."""
    p = _last() if _last is not None else None
    if p is None:
        return None
    seen = {(f.id, f.generation) for r in p.records for f in r.nodes}
    return p if any((t.id, t.generation) in seen for t in graph.nodes) else None
