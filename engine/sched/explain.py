"""Text, HTML and Graphviz dot that explain an assigned graph: what the scheduler did, and why.

Content as ggml's debug print: splits with inputs and sizes, then every node with op, name, size, backend,
cause, and the same for its sources; plus what was copied, what was not, and how long it took.
"""
import html

from ggjit.display.html import facts, folded, table
from ggjit.ops.core.record import VIEW_OPS
from ggjit.sched.records import KEPT
from ggjit.tensors.summary import label, op_name

COLOURS = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#e9c46a", "#a8dadc", "#d4a373")


def fmt_size(nbytes):
    """As ggml prints sizes: 3K, 12M."""
    return f"{nbytes >> 20}M" if nbytes >= 1 << 20 else f"{nbytes >> 10}K"


class Explanation:
    """`str(e)`, `e.to_html()` (shown by notebooks), `e.dot`; `e.rows` and `e.copies` are the data behind them."""

    def __init__(self, assigned, run):
        self.assigned, self.run = assigned, run
        self.backends = assigned.support.backends
        self.times = {k: (p.copy_ns, p.compute_ns) for k, p in enumerate(run.parts[run.instance] or ())} if run else {}

    # ------------------------------------------------------------ data
    @property
    def rows(self):
        """One dict per node: split, op, name, nbytes, backend, cause, why, sources."""
        out = []
        for k, s in enumerate(self.assigned.splits):
            for i, t in enumerate(s.nodes, s.start):
                cause, why = self.assigned.cause_of(i)
                out.append({"split": k, "node": i, "op": t.op.name, "name": label(t), "nbytes": t.nbytes,
                            "backend": self._backend(i), "cause": cause, "why": why,
                            "sources": [self._source(i, j) for j, x in enumerate(t.src) if x is not None]})
        return out

    def _backend(self, i):
        b = self.assigned.backend_of(i)
        return b.name if b else "none"

    def _source(self, i, j):
        t = self.assigned.tensors[i].src[j]
        s = self.assigned.local[t.id]
        copied = bool(self.assigned.rows["copy"][i, j] >= 0)
        return {"name": label(t), "nbytes": t.nbytes, "backend": self._backend(s),
                "cause": self.assigned.cause_of(s)[0], "copied": copied}

    @property
    def copies(self):
        """One dict per copy: tensor, nbytes, from, to, split, kept (reused while the original does not change)."""
        return [{"tensor": label(self.assigned.tensors[src]), "nbytes": self.assigned.tensors[src].nbytes,
                 "from": self._backend(src), "to": self.backends[backend].name, "split": split, "kept": kind == KEPT}
                for src, backend, split, kind in self.assigned.copies.tolist()]

    @property
    def totals(self):
        """Splits, copies, bytes of all copies, and of the last run: bytes copied, bytes not copied again."""
        copies = self.copies
        run = {} if self.run is None else {"copied_nbytes": self.run.copied_nbytes,
                                           "elided_nbytes": self.run.elided_nbytes, "runs": self.run.runs}
        return {"rules": self.assigned.support.rules, "splits": self.assigned.n_splits, "copies": len(copies),
                "copy_nbytes": sum(c["nbytes"] for c in copies), **run}

    # ------------------------------------------------------------ text
    def __str__(self):
        lines = ["  ".join(f"{k} {v}" for k, v in self.totals.items())]
        rows = iter(self.rows)
        for k, s in enumerate(self.assigned.splits):
            inputs = " ".join(f"[{label(t)} ({fmt_size(t.nbytes)})]" for t in s.inputs)
            took = "" if k not in self.times else "  copy {:.1f} us, compute {:.1f} us".format(
                *(ns / 1e3 for ns in self.times[k]))
            lines.append(f"\n## SPLIT #{k}: {s.backend.name} # {len(s.inputs)} inputs: {inputs}{took}")
            for t in s.nodes:
                row = next(rows)
                if t.op in VIEW_OPS:
                    continue
                sources = "".join(f" {x['name']:>12.12} ({fmt_size(x['nbytes'])}) [{x['backend']:>5.5} {x['cause']}"
                                  f"{' copy' if x['copied'] else ''}]" for x in row["sources"])
                lines.append(f"node #{row['node']:3d} ({row['op']:>10.10}): {row['name']:>16.16} "
                             f"({fmt_size(row['nbytes'])}) [{row['backend']:>5.5} {row['cause']:>6}]:{sources}")
        return "\n".join(lines)

    def __repr__(self):
        return f"<Explanation: {self.totals}>"

    # ------------------------------------------------------------ html
    def _totals_text(self):
        t = self.totals
        text = f"{t['splits']} splits by the rules {t['rules']}; {t['copies']} copies, {t['copy_nbytes']:,} bytes"
        return text if self.run is None else (f"{text}; run {t['runs']} copied {t['copied_nbytes']:,} bytes and spared "
                                              f"{t['elided_nbytes']:,} that had not changed")

    def to_html(self):
        """A page fragment: one table of splits with their nodes, one of copies."""
        e = html.escape
        out = ["<div class='ggjit-sched'><p>", e(self._totals_text()), "</p>"]
        rows = iter(self.rows)
        for k, s in enumerate(self.assigned.splits):
            colour = COLOURS[self.assigned.split_rows["backend"][k] % len(COLOURS)]
            took = self.times.get(k, (0, 0))
            style = f"border-left:14px solid {colour};padding-left:6px"
            out.append(f"<details><summary style='{style}'>split {k}: {e(s.backend.name)}, {len(s.nodes)} nodes, "
                       f"{len(s.inputs)} inputs, copy {took[0] / 1e3:.1f} us, compute {took[1] / 1e3:.1f} us"
                       f"</summary><table><tr><th>node<th>op<th>bytes<th>cause<th>sources</tr>")
            for _ in s.nodes:
                r = next(rows)
                sources = ", ".join(f"{x['name']}{' (copy)' if x['copied'] else ''}" for x in r["sources"])
                out.append(f"<tr><td>{e(r['name'])}<td>{r['op']}<td align=right>{r['nbytes']:,}<td title="
                           f"'{e(r['why'], quote=True)}'>{e(r['cause'])}<td>{e(sources)}</tr>")
            out.append("</table></details>")
        out.append("<table><tr><th>copy of<th>bytes<th>from<th>to<th>split<th>kept</tr>")
        for c in self.copies:
            out.append(f"<tr><td>{e(c['tensor'])}<td align=right>{c['nbytes']:,}<td>{e(c['from'])}<td>{e(c['to'])}"
                       f"<td>{c['split']}<td>{'yes' if c['kept'] else 'no'}</tr>")
        out.append("</table></div>")
        return "".join(out)

    _repr_html_ = to_html

    # ------------------------------------------------------------ dot
    @property
    def dot(self):
        """Graphviz: one box per node, coloured by backend, grouped by split (with its times once it ran); copies are
        dashed edges with their bytes."""
        assigned = self.assigned
        lines = lambda s: quote(s).replace("\n", "\\n")                                        # noqa: E731
        quote = lambda s: '"' + str(s).replace("\\", "\\\\").replace('"', '\\"') + '"'       # noqa: E731
        colour = lambda i: COLOURS[max(int(assigned.rows["backend"][i]), 0) % len(COLOURS)]               # noqa: E731
        out = ["digraph sched {", "  rankdir=TB; node [shape=box, style=filled, fontsize=10];"]
        for k, s in enumerate(assigned.splits):
            took = "" if k not in self.times else "\ncopy {:.1f} us, compute {:.1f} us".format(
                *(ns / 1e3 for ns in self.times[k]))
            text = f"split {k}: {s.backend.name}, {len(s.inputs)} inputs{took}"
            out.append(f"  subgraph cluster_{k} {{ label={lines(text)};")
            for i, t in enumerate(s.nodes, s.start):
                text = f"{label(t)}\n{t.op.name} {fmt_size(t.nbytes)}\n{assigned.cause_of(i)[0]}"
                out.append(f"    n{i} [label={lines(text)}, fillcolor={quote(colour(i))}];")
            out.append("  }")
        for i in range(assigned.n_nodes, assigned.n):
            out.append(f"  n{i} [label={quote(label(assigned.tensors[i]))}, shape=ellipse, "
                       f"fillcolor={quote(colour(i))}];")
        for i in range(assigned.n_nodes):
            for j, x in enumerate(assigned.tensors[i].src):
                if x is not None and x is not assigned.tensors[i]:
                    copied = assigned.rows["copy"][i, j] >= 0
                    copy = f" [style=dashed, label={quote(f'copy {x.nbytes:,} bytes')}]" if copied else ""
                    out.append(f"  n{assigned.local[x.id]} -> n{i}{copy};")
        out.append("}")
        return "\n".join(out)


def split_html(s):
    """HTML of one of a scheduler's splits."""
    rows = ((label(t), op_name(t), repr(t.type), t.shape, f"{t.nbytes:,}") for t in s.nodes)
    return facts(f"Split on {s.backend.name}", (
        ("nodes", f"{len(s.nodes)}, from number {s.start} of the graph"),
        ("inputs copied", ", ".join(f"{label(t)} ({t.nbytes:,} bytes)" for t in s.inputs)))) + folded(
        "nodes", table(rows, ("name", "op", "type", "shape", "bytes"), (4,)))


def scheduler_html(s):
    """A scheduler, and what its last graph was split into."""
    return facts(f"Scheduler on {', '.join(b.name for b in s.backends)}", (
        ("rules", s.support.rules), ("splits", s.n_splits), ("instances of copies", s.n_copies),
        ("compute memory", ", ".join(f"{b.name} {s.buffer_size(b):,} bytes" for b in s.backends)))) + (
        s.explain().to_html() if s.n_splits else "")
