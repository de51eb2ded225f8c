"""HTML of tensors, graphs, contexts, buffers, plans, splits, devices, backends and types for notebooks.

One table of facts each, with what belongs to it below.  No scripts, no files from elsewhere, every text escaped, and no
colours but greys of the text's own colour, so that it reads on dark and light pages.
"""
from ggjit.core.backend import Backend, Device
from ggjit.core.buffer import Buffer, BufferType
from ggjit.core.html_repr import escape, html_of, size_text
from ggjit.graphs.graph import Graph
from ggjit.graphs.graph_plan import Plan
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import FLAG_INPUT, FLAG_LOSS, FLAG_OUTPUT, FLAG_PARAM
from ggjit.ops.core.traits import all_traits
from ggjit.ops.core.types import Type
from ggjit.profiling.profile import Profile
from ggjit.tensors.context import Context
from ggjit.tensors.summary import label, op_name, preview, source_line, state
from ggjit.tensors.tensor import Tensor

MAX_ROWS = 200                  # lines of a table; more are counted
_FLAGS = {FLAG_INPUT: "input", FLAG_OUTPUT: "output", FLAG_PARAM: "parameter", FLAG_LOSS: "loss"}
_LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.35);padding:1px 8px;background:transparent"
_TABLE = "border-collapse:collapse;font-size:12px;margin:4px 0;width:auto"


def table(rows, head=None, numbers=(), more=0):
    """A table of texts; columns whose index is in `numbers` are aligned right.  more: rows that were not given."""
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag} style='{_LINE};text-align:{'right' if i in numbers else 'left'}'>{escape(c)}"
                                f"</{tag}>" for i, c in enumerate(cells)) + "</tr>"
    rows = list(rows)
    more = max(0, more) + max(0, len(rows) - MAX_ROWS)
    body = [line(r, "td") for r in rows[:MAX_ROWS]]
    if more > 0:
        body.append(line([f"... {more:,} more", *[""] * (len(rows[0]) - 1)], "td"))
    return f"<table style='{_TABLE}'>{line(head, 'th') if head else ''}{''.join(body)}</table>"


def facts(title, pairs):
    """A heading and a table of (name, value), empty values left out."""
    lines = "".join(f"<tr><th style='{_LINE};text-align:left;font-weight:600'>{escape(k)}</th>"
                    f"<td style='{_LINE};text-align:left'>{escape(v)}</td></tr>"
                    for k, v in pairs if v not in ("", None))
    return f"<div><b>{escape(title)}</b><table style='{_TABLE}'>{lines}</table></div>"


def folded(summary, content):
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


@html_of.register
def _tensor(t: Tensor):
    flags = t.flags if t.ctx.alive else 0
    view = "" if t.view_src is None else f"{t.view_offs:,} bytes into {label(t.view_src)}"
    values, remark = preview(t)
    about = facts(f"Tensor {label(t)}", (
        ("type", f"{t.type!r}, {t.type.block} values in {t.type.nbytes} bytes" if t.type.block > 1 else repr(t.type)),
        ("shape", f"{t.shape} (NumPy)   ne {list(t.ne)} (ggml)"), ("strides", f"nb {list(t.nb)} bytes"),
        ("bytes", size_text(t.nbytes)), ("lives in", state(t)), ("view", view),
        ("op", f"{op_name(t)}({', '.join(map(label, t.src))})" if t.op else "leaf"),
        ("flags", ", ".join(text for bit, text in _FLAGS.items() if flags & bit)), ("made at", source_line(t)),
        ("values", remark)))
    return about + (table(values, numbers=range(99)) if values else "")


@html_of.register
def _graph(g: Graph):
    ops = {}
    for t in g.nodes:
        n, nbytes = ops.get(op_name(t), (0, 0))
        ops[op_name(t)] = n + 1, nbytes + t.nbytes
    ordered = sorted(ops.items(), key=lambda x: (-x[1][0], x[0]))
    about = facts(f"Graph of {len(g.nodes)} nodes", (
        ("outputs", ", ".join(map(repr, g.outputs))), ("leafs", len(g.leafs)),
        ("bytes of leafs", size_text(sum(t.nbytes for t in g.leafs if t.view_src is None)))))
    counts = table(((op, n, f"{nbytes:,}") for op, (n, nbytes) in ordered), ("op", "nodes", "bytes"), (1, 2))
    return about + folded("ops", counts) + g.draw()._repr_html_()


@html_of.register
def _context(ctx: Context):
    rows = ((label(t), repr(t.type), list(t.ne[:t.ndim]), f"{t.nbytes:,}", op_name(t) if t.op else "leaf", state(t))
            for t in ctx.tensors[:MAX_ROWS])
    return facts(f"Context {ctx.id}", (
        ("state", "" if ctx.alive else "freed"), ("tensors", len(ctx.tensors)),
        ("bytes of leafs", size_text(sum(t.nbytes for t in ctx.tensors if not t.op))),
        ("buffers", ", ".join(map(repr, ctx.buffers))))) + (
        table(rows, ("name", "type", "ne", "bytes", "op", "lives in"), (3,), len(ctx.tensors) - MAX_ROWS)
        if ctx.tensors else "")


@html_of.register
def _buffer(b: Buffer):
    usage = ("any", "weights", "compute")[b.usage]
    return facts(f"Buffer {b.id}", (
        ("type", b.buft.name), ("size", size_text(b.size)), ("usage", usage),
        ("state", "freed" if not b.alive else "read-only" if b.read_only else "writable"),
        ("host memory", "yes" if b.buft.is_host() else "no")))


@html_of.register
def _buffer_type(b: BufferType):
    return facts(f"Buffer type {b.name}", (
        ("device", b.device.name if b.device else ""), ("alignment", f"{b.alignment()} bytes"),
        ("largest buffer", size_text(b.max_size()) if b.max_size() < 1 << 62 else "unlimited"),
        ("host memory", "yes" if b.is_host() else "no")))


@html_of.register
def _device(d: Device):
    try:
        free, total = d.memory()
        memory = f"{size_text(free)} free of {size_text(total)}" if total else ""
    except GgjitError as e:
        memory = str(e)
    return facts(f"Device {d.name}", (("description", d.description), ("type", d.type), ("memory", memory)))


@html_of.register
def _backend(b: Backend):
    return facts(f"Backend {b.name}", (
        ("device", f"{b.device.name}: {b.device.description}"), ("threads", getattr(b, "n_threads", "")),
        ("buffer type", b.default_buffer_type.name)))


@html_of.register
def _plan(p: Plan):
    def row(i, t, kernel):
        where = p.where(t)
        return i, label(t), op_name(t), kernel.name, f"{where[0].id} + {where[1]:,}" if where else ""
    try:
        rows = [row(i, t, k) for i, (t, k) in enumerate(zip(p.nodes, p.kernels, strict=False))]
    except GgjitError:                  # the memory was freed meanwhile
        rows = []
    return facts(f"Plan of {len(p.nodes)} nodes", (
        ("backend", repr(p.backend)), ("threads", p.n_threads), ("work memory", size_text(p.work_nbytes)),
        ("runs", p.runs), ("outputs", ", ".join(map(repr, p.graph.outputs))))) + folded(
        "kernels", table(rows, ("node", "result", "op", "kernel", "buffer + offset"), (0,)) if rows else "")


@html_of.register
def _profile(p: Profile):
    if not p.records:
        return facts("Profile", (("nodes", str(p)),))
    head, lines = p.table()
    return facts("Profile", (("plans", "; ".join(f"{r.title}: {r.n_runs} runs on {r.backend}, "
                                                 f"{r.n_threads} threads" for r in p.records)),
                             ("time in nodes", f"{1e3 * p.seconds:.3f} ms"))) + table(lines, head, range(8)) + "".join(
        f"<small>{escape(remark)}</small>" for remark in p.remarks(lines))


@html_of.register
def _type(t: Type):
    kernels = "yes" if t in all_traits() else "no: files only"
    bits = 8 * t.nbytes / t.block
    return facts(f"Type {t!r}", (
        ("block", f"{t.block} values in {t.nbytes} bytes"), ("bits per value", f"{bits:.4g}"),
        ("NumPy dtype", t.dtype or ("float32 when read" if t.block > 1 or t.name == "bf16" else "")),
        ("ggml number", t.id), ("kernels", kernels), ("row of 4096", f"{t.row_nbytes(4096):,} bytes")))
