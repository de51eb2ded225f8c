"""The report of a memory plan: its tensors, those alive at the peak, why, and what would lower it.

A MeasureReport is made from a GraphPlan and a function that describes tensors; it holds numbers and texts, so it can be
kept, compared and exported; that of gg.measure also keeps its graph, for `pareto`.  Pictures are in `plots.py`.
"""
import collections
import csv
import dataclasses
import functools
import html
import json
import time
from typing import TYPE_CHECKING

import numpy as np

from ggjit.alloc import plots
from ggjit.alloc.csvio import defused, write_problem
from ggjit.alloc.ggml.alias import CAUSE_TEXT, IN_PLACE, NOTHING_TO_PLACE
from ggjit.alloc.ggml.problem import live_bytes
from ggjit.ops.core.errors import ParamError, no_attribute
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.printable import printable
from ggjit.ops.core.whole_file import whole_file, write_whole

MAX_TWICE = 500                 # buffers of a plan whose picture a notebook gets in both colourings
CROWDED = 60                    # plans with more buffers get a picture that zooms
LISTED, MOVES = 10, 200         # tensors that a Diff names one by one in a text, and in a notebook


@dataclasses.dataclass(slots=True)
class Row:
    """One tensor of the plan.  lo, hi: half-open steps; offs: bytes in its chunk; why: text about in-place reuse."""
    id: int
    name: str
    op: str
    type: str
    shape: tuple
    nbytes: int
    lo: int
    hi: int
    buffer: int
    chunk: int
    offs: int
    alloc: int
    alias_of: str
    why: str
    where: str

    @property
    def shape_text(self):
        """The shape as ggml and pictures of graphs write it: [ne0, ne1]."""
        return str([*reversed(self.shape)])


def mib(nbytes):
    """Bytes in a binary unit: "1.50 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


class Saving(int):
    """Bytes less that planner "best" takes than another one; shown as a line that says so, and what planning costs.

    planner: the other; peaks, seconds: of both, {planner: bytes}, {planner: seconds to plan}
    """

    def __new__(cls, planner, peaks, seconds):
        out = super().__new__(cls, max(peaks[planner] - peaks["best"], 0))
        out.planner, out.peaks, out.seconds = planner, peaks, seconds
        return out

    def __getnewargs__(self):
        return self.planner, self.peaks, self.seconds       # for copies and pickles

    def __str__(self):
        if self.planner == "best":
            return f"in use: {mib(self.peaks['best'])}, nothing more to save"
        now, best, ms = self.peaks[self.planner], self.peaks["best"], {k: 1e3 * s for k, s in self.seconds.items()}
        found = f"{mib(best)} instead of {self.planner}'s {mib(now)}"
        less = f"{mib(int(self))} ({self / now:.1%}) less" if self else "nothing less"
        return f"{found}, {less}; planned in {ms['best']:.1f} ms instead of {ms[self.planner]:.1f}"

    __repr__ = __str__


def saving(planner, plan_with, best=None):
    """The Saving of "best" over `planner`.  plan_with(planner) -> GraphPlan; best: that of "best" where it is known."""
    best = plan_with("best") if best is None else best
    if planner == "best":
        return Saving(planner, {"best": best.peak}, {"best": best.seconds})
    plans, seconds = {planner: plan_with(planner), "best": best}, {"best": best.seconds}
    # if the peak is above it, the search used all its time
    for name in (planner, "best")[:1 + (best.peak == best.lower_bound)]:
        t0 = time.thread_time()                 # the second call is timed: the first loads code
        plan_with(name)
        seconds[name] = time.thread_time() - t0
    return Saving(planner, {name: plan.peak for name, plan in plans.items()}, seconds)


def _rows(plan, node_ids, leaf_ids, describe):
    """[Row] of a GraphPlan.  describe: as of MeasureReport.from_plan."""
    seen = {}

    def about(i):
        if i not in seen:
            found = describe(int(i))
            seen[i] = {**found, "name": printable(found["name"])}
        return seen[i]
    rows = []
    for side, ids in (("leaf", leaf_ids), ("node", node_ids)):
        col = {k: getattr(plan, f"{side}_{k}").tolist() for k in ("buffer", "chunk", "offs", "root", "alloc")}
        for k, i in enumerate(np.asarray(ids, np.int64).tolist()):
            if col["alloc"][k] < 0:
                continue
            d, a = about(i), col["alloc"][k]
            root, why = col["root"][k], ""
            if side == "node":
                why, src = plan.why_not_in_place(k)
                why += f": {about(src)['name']}" if src >= 0 else ""
            rows.append(Row(i, d["name"], d["op"], d["type"], tuple(d["shape"]), int(d["nbytes"]),
                            k if side == "node" else 0, int(plan.a_hi[a]), col["buffer"][k], col["chunk"][k],
                            col["offs"][k], a, about(root)["name"] if root != i else "", why, d.get("where", "")))
    return rows


class MeasureReport:
    """peak, lower_bound, ggml_peak: bytes; live: bytes at every step; kinds: {"weights": bytes, ...}; chunk_sizes:
    bytes per buffer and chunk; seconds: planning time."""

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError that lists the names there are."""
            raise no_attribute(self, name)

    find_saving = staticmethod(lambda: None)        # gg.measure's: what makes `saving`

    def __init__(self, plan, make_rows, kinds=None, title=""):
        """make_rows() -> [Row], asked once, when they are looked at."""
        self._make_rows, self.kinds, self.title, self._pareto = make_rows, dict(kinds or {}), title, None
        self.what_if = []               # results of gg.measure(graph, what_if=...)
        self.planner, self.rule, self.how = plan.planner, plan.rule, plan.how
        self.peak, self.lower_bound, self.ggml_peak = plan.peak, plan.lower_bound, plan.ggml_peak
        self.chunk_sizes, self.seconds = [list(c) for c in plan.chunk_sizes], plan.seconds
        self.n_steps, self.n_nodes, self.n_buffers = plan.n_steps, len(plan.node_buffer), len(plan.a_id)
        self.boxes = np.stack([plan.a_lo, plan.a_hi, plan.a_size, plan.a_offs, plan.a_buffer, plan.a_chunk], axis=1)
        self.causes = {text: int((plan.cause == k).sum()) for k, text in enumerate(CAUSE_TEXT)
                       if k != NOTHING_TO_PLACE and (plan.cause == k).any()}
        self.n_in_place = self.causes.get(CAUSE_TEXT[IN_PLACE], 0)

    @functools.cached_property
    def live(self):
        """Bytes live at every step, (n_steps,)."""
        return live_bytes(*self.boxes[:, :3].T, self.n_steps)

    @functools.cached_property
    def rows(self):
        """The planned tensors, in order of birth."""
        with oom_guard("a report of a memory plan"):
            return self._make_rows()

    @functools.cached_property
    def by_alloc(self):
        """{number of an allocation: its rows}"""
        found = {}
        for r in self.rows:
            found.setdefault(r.alloc, []).append(r)
        return found

    @functools.cached_property
    def saving(self):
        """In a report of gg.measure: the Saving of planner "best" over ggml's or this one.  Else None."""
        return self.find_saving()

    @classmethod
    @oom_guard("a report of a memory plan")
    def from_plan(cls, plan, node_ids, leaf_ids, describe, kinds=None, title=""):
        """describe(id) -> {"name", "op", "type", "shape", "nbytes", "where"} for any tensor of the graph, asked when
        the rows are looked at."""
        return cls(plan, functools.partial(_rows, plan, node_ids, leaf_ids, describe), kinds, printable(title))

    def pareto(self, n=12, profile=None):
        """What less memory costs: about n pairs (peak, extra operations) with a picture.  profile: whose times count.

        The report of gg.measure knows its graph for this.  Errors: ParamError for a report of numbers alone.
        """
        if self._pareto is None:
            raise ParamError("pareto: this report is of numbers alone; take gg.measure(graph).pareto()")
        return self._pareto(n, profile=profile)

    # ---- figures
    @property
    def gap(self):
        """peak / lower_bound."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    @property
    def peak_step(self):
        """The first step at which the most bytes are live."""
        return int(np.argmax(self.live)) if len(self.live) else 0

    def alive_at(self, step):
        """Rows that hold memory at a step, largest first; of an in-place chain the one computed last."""
        out = []
        for a, (lo, hi, size, *_) in enumerate(self.boxes.tolist()):
            if lo <= step < hi and size:
                holders = [r for r in self.by_alloc.get(a, []) if r.lo <= step] or self.by_alloc.get(a, [])
                if holders:
                    out.append((size, max(holders, key=lambda r: (r.lo, not r.alias_of))))
        return [r for _, r in sorted(out, key=lambda x: -x[0])]

    @property
    def at_peak(self):
        return self.alive_at(self.peak_step)

    def node_at(self, step):
        """The row computed at a step, or None when that node has no memory here."""
        return next((r for r in self.rows if r.lo == step and r.op != "NONE"), None)

    def advice(self):
        """Sentences about the peak and what would lower it."""
        if not self.rows:
            return ["Nothing to place."]
        node, alive, step = self.node_at(self.peak_step), self.at_peak, self.peak_step
        out = [f"The peak is at step {step}" + (f", {node.op} {node.name!r}" if node else "") +
               f": {mib(int(self.live[step]))} live in {len(alive)} tensors."]
        if self.peak > self.lower_bound:
            out.append(f"{mib(self.peak - self.lower_bound)} ({self.gap - 1:.1%}) above the lower bound is "
                       "fragmentation; planner='best' or more time may remove it.")
        if alive:
            lo, hi, size = self.boxes[alive[0].alloc, :3].tolist()
            rest = self.live.copy()
            rest[lo:hi] -= size
            out.append(f"Largest then: {alive[0].name!r} {alive[0].op} {mib(alive[0].nbytes)}; without it the bound "
                       f"would be {mib(int(rest.max()))}.")
            if any(r.op == "SOFT_MAX" or "kq" in r.name for r in alive[:3]):
                out.append("Attention scores are among the largest: flash attention does without them.")
            longest = max(alive[:5], key=lambda r: r.hi - r.lo)
            if longest.hi - longest.lo > self.n_steps // 2:
                out.append(f"{longest.name!r} stays alive for {longest.hi - longest.lo} of {self.n_steps} steps.")
        return out

    # ---- text
    def table(self, rows=None, limit=20):
        """(header, lines) of strings for the rows alive at the peak, or the given ones."""
        rows = self.at_peak if rows is None else rows
        head = ("name", "op", "type", "shape", "size", "steps", "offset", "in the memory of", "where")
        lines = [(r.name, r.op, r.type, r.shape_text, mib(r.nbytes), f"{r.lo}..{r.hi}", f"{r.offs:,}",
                  r.alias_of, r.where) for r in rows[:limit]]
        if len(rows) > limit:
            lines.append((f"... {len(rows) - limit} more", *[""] * (len(head) - 1)))
        return head, lines

    def summary(self):
        """(key, value) strings of the numbers."""
        out = [("peak", f"{mib(self.peak)} ({self.peak:,} bytes)"), ("lower bound", f"{mib(self.lower_bound)}"),
               ("gap", f"{self.gap:.4f}"),
               ("ggml's plan", mib(self.ggml_peak)) if self.saving is None else ("planner best", str(self.saving)),
               ("planner", f"{self.planner} ({self.how}, aliasing {self.rule})"),
               ("nodes / allocations / in place", f"{self.n_nodes} / {self.n_buffers} / {self.n_in_place}"),
               ("chunks", "; ".join(" + ".join(map(mib, c)) or "none" for c in self.chunk_sizes))]
        return out + [(f"memory: {k}", mib(v)) for k, v in self.kinds.items()] + (
            [("memory: total", mib(sum(self.kinds.values())))] if self.kinds else []) + [
            (f"what if: {w.name}{'' if w.value is True else f'={w.value}'}", str(w)) for w in self.what_if]

    def __str__(self):
        head, lines = self.table()
        width = [max(len(x[k]) for x in [head, *lines]) for k in range(len(head))]
        rule = lambda row: "  ".join(x.ljust(w) for x, w in zip(row, width, strict=True)).rstrip()     # noqa: E731
        parts = [self.title] if self.title else []
        parts += [f"{k:32s}{v}" for k, v in self.summary()]
        parts += ["", *self.advice(), "", plots.text_plot(self), "", rule(head), *map(rule, lines)]
        return "\n".join(parts)

    def __repr__(self):
        return (f"<MeasureReport peak={mib(self.peak)} lower_bound={mib(self.lower_bound)} planner={self.planner} "
                f"nodes={self.n_nodes}>")

    def __rich__(self):
        """Rendering for `rich.print(report)`."""
        from rich.console import Group
        from rich.table import Table
        numbers = Table(title=self.title or "Memory", show_header=False)
        for k, v in self.summary():
            numbers.add_row(k, v)
        head, lines = self.table()
        alive = Table(*head, title=f"alive at the peak (step {self.peak_step})")
        for line in lines:
            alive.add_row(*line)
        return Group(numbers, *self.advice(), plots.text_plot(self), alive)

    def _repr_html_(self):
        """Rendering in a notebook: numbers, pictures, table; no script, no server."""
        e, lifetimes, closer = html.escape, "", ""
        if self.rows and len(self.boxes) > CROWDED:
            closer = "<p><small>To step through it: <code>gg.explore(graph)</code></small></p>"
        if self.rows and len(self.boxes) <= MAX_TWICE:
            lifetimes = f"<details><summary>coloured by lifetime</summary>{self.drawing('lifetime')}</details>"
        head, lines = self.table()
        numbers = "".join(f"<tr><th style='text-align:left'>{e(k)}</th><td>{e(v)}</td></tr>" for k, v in self.summary())
        # the last column holds file names, which browsers break nowhere
        cells = "".join("<tr>" + "".join(f"<td>{e(x)}</td>" for x in line[:-1])
                        + f"<td style='overflow-wrap:anywhere'>{e(line[-1])}</td></tr>" for line in lines)
        heads, auto = "".join(f"<th>{e(h)}</th>" for h in head), "<table style='width:auto'>"
        return (f"<div><b>{e(self.title or 'Memory')}</b>{auto}{numbers}</table>"
                f"<p>{'<br>'.join(map(e, self.advice()))}</p>{self.drawing()}"
                f"{closer}{lifetimes}{auto}<tr>{heads}</tr>{cells}</table></div>")

    # ---- pictures and files
    def drawing(self, colour="op", top=None):
        """The picture for a page, as HTML: one that zooms where there is more to see than fits beside each other.

        top: bytes that the axis goes up to, the peak by default.
        """
        draw = plots.zoomable if self.rows and len(self.boxes) > CROWDED else plots.svg
        return plots.where_trusted(draw(self, colour, top))

    def plot(self, ax=None, path=None, colour="op"):
        """Offset by time with the live-bytes curve and the lower bound (matplotlib); returns the axes.

        colour: boxes by "op" or by "lifetime".  Errors: ParamError, MissingExtra.
        """
        return plots.plot(self, ax, path, colour)

    def svg(self, colour="op"):
        """The same picture as the text of one SVG element, with a tooltip per box.  Errors: ParamError."""
        return plots.svg(self, colour)

    def to_csv(self, path):
        """One line per tensor.  Names that a table program would take for a formula have an apostrophe in front."""
        names = [f.name for f in dataclasses.fields(Row)]
        with whole_file(path, text=True) as f:
            w = csv.writer(f, lineterminator="\n")
            w.writerow(names)
            w.writerows(["x".join(map(str, r.shape)) if n == "shape" else defused(getattr(r, n)) for n in names]
                        for r in self.rows)

    def to_minimalloc(self, path, buffer=0):
        """The allocations of one buffer as an offset problem: id,lower,upper,size,offset."""
        keep = np.flatnonzero(self.boxes[:, 4] == buffer)
        with whole_file(path, text=True) as f:
            lo, hi, size, offs = self.boxes[keep, :4].T
            write_problem(f, [f"{k}" for k in keep.tolist()], lo, hi, size, offs)

    def to_dict(self):
        """Everything, as plain Python values."""
        keys = ("title", "planner", "rule", "how", "peak", "lower_bound", "ggml_peak", "chunk_sizes", "seconds",
                "n_nodes", "n_buffers", "n_in_place", "n_steps", "kinds", "causes")
        return {**{k: getattr(self, k) for k in keys}, "live": self.live.tolist(),
                "peak_step": self.peak_step, "rows": [dataclasses.asdict(r) for r in self.rows]}

    def to_json(self, path=None):
        """JSON text; written to path if given."""
        text = json.dumps(self.to_dict())
        if path is not None:
            write_whole(path, text)
        return text

    def diff(self, other):
        """What changed from this report to `other`."""
        return Diff(self, other)


def _by_name(report):
    """{name: row}; of tensors with one name the second is "x (2)", and so on."""
    seen, out = collections.Counter(), {}
    for r in report.rows:
        seen[r.name] += 1
        out[r.name if seen[r.name] == 1 else f"{r.name} ({seen[r.name]})"] = r
    return out


class Diff:
    """Two reports side by side, tensors matched by name: .peak (bytes, other - this); .added, .removed (names);
    .resized {name: (bytes, bytes)}; .moved {name: (offset, offset)} of those that lie elsewhere, largest first;
    .at_peak (names alive at the peak only before, names only after)."""

    def __init__(self, before, after):
        self.before, self.after = before, after
        self.peak = after.peak - before.peak
        a, b = _by_name(before), _by_name(after)
        self.added = sorted(b.keys() - a.keys(), key=lambda n: -b[n].nbytes)
        self.removed = sorted(a.keys() - b.keys(), key=lambda n: -a[n].nbytes)
        both = sorted((n for n in a if n in b), key=lambda n: -a[n].nbytes)
        self.resized = {n: (a[n].nbytes, b[n].nbytes) for n in both if a[n].nbytes != b[n].nbytes}
        place = lambda r: (r.buffer, r.chunk, r.offs)                                       # noqa: E731
        self.moved = {n: (a[n].offs, b[n].offs) for n in both if place(a[n]) != place(b[n])}
        self._own = [n for n in self.moved if not a[n].alias_of or not b[n].alias_of]       # the rest lies in those
        peaks = []
        for rows, report in ((a, before), (b, after)):
            alive = set(map(id, report.at_peak))
            peaks.append({n for n, r in rows.items() if id(r) in alive})
        self.at_peak = tuple(sorted(x - y) for x, y in (peaks, peaks[::-1]))

    def __str__(self):
        a, b = self.before, self.after
        sign = "+" if self.peak >= 0 else "-"
        out = [f"peak         {mib(a.peak)} -> {mib(b.peak)} ({sign}{mib(abs(self.peak))})",
               f"lower bound  {mib(a.lower_bound)} -> {mib(b.lower_bound)}",
               f"planner      {a.planner} -> {b.planner}", f"nodes        {a.n_nodes} -> {b.n_nodes}",
               f"in place     {a.n_in_place} -> {b.n_in_place}"]
        for what, names in (("new", self.added), ("gone", self.removed)):
            if names:
                out.append(f"{what:12s} {len(names)}: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")
        for what, names in zip(("peak left", "peak joined"), self.at_peak, strict=True):
            if names:
                out.append(f"{what:12s} {len(names)}: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")
        grown = sorted(self.resized.items(), key=lambda x: -abs(x[1][1] - x[1][0]))
        out += [f"resized      {n}: {mib(x)} -> {mib(y)}" for n, (x, y) in grown[:6]]
        out += [f"moved        {self._move(n)}" for n in self._own[:LISTED]]
        out += [f"moved        {rest}"] if (rest := self._not_listed(LISTED)) else []
        return "\n".join(out)

    __repr__ = __str__

    def _move(self, name):
        before, after = self.moved[name]
        return f"{name}: offset {before:,} -> {after:,}"

    def _not_listed(self, limit):
        more, inside = len(self._own) - limit, len(self.moved) - len(self._own)
        parts = [f"... {more} more"] if more > 0 else []
        return ", ".join([*parts, f"{inside} in the memory of others"] if inside else parts)

    def _repr_html_(self):
        """Rendering in a notebook: the text, what moved, and both pictures."""
        e, names = html.escape, self._own[:MOVES]
        rows = "".join(f"<li>{e(self._move(n))}</li>" for n in names)
        rest = self._not_listed(MOVES)
        text = "\n".join(line for line in str(self).splitlines() if not line.startswith("moved "))
        moved = f"<details><summary>{len(self.moved)} moved</summary><ul>{rows}</ul>{e(rest)}</details>" if rows else ""
        both, top = (("before", self.before), ("after", self.after)), max(self.before.peak, self.after.peak)
        pictures = "".join(f"<p><b>{what}</b></p>{r.drawing(top=top)}" for what, r in both if r.rows)
        return f"<div><pre>{e(text)}</pre>{moved}{pictures}</div>"
