"""Pictures of a memory plan: offset by time, with the live-bytes curve and the lower bound.

    address ^
       peak | - - - - - - - - - - - - - - - - -        one box per allocation: born, freed, from offset to end
            |      +------+        +-----+             chunks are stacked; the curve is the sum of live bytes
            |  +---+--+   +--------+     |
            |  |      |   |              |
            +--+------+---+--------------+---> step

`text_plot` needs nothing, `svg` needs nothing (notebooks), `plot` needs matplotlib.  All three read well at 30 and at
3,000 tensors: boxes are coloured by name of the op and labelled only where the label fits.
"""
import html
import os

import numpy as np

from ggjit.ops.core.errors import extra
from ggjit.ops.core.whole_file import whole_file

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")


def _boxes(report):
    """(lo, hi, bottom, height, label, op) per allocation, chunks stacked one above the other."""
    base, at = {}, 0
    for b, chunks in enumerate(report.chunk_sizes):
        for c, size in enumerate(chunks):
            base[b, c] = at
            at += size
    out = []
    for a, (lo, hi, size, offs, b, c) in enumerate(report.boxes.tolist()):
        rows = report.by_alloc.get(a)
        first = rows[0] if rows else None
        out.append((lo, hi, base[b, c] + offs, size, first.name if first else str(a), first.op if first else "?"))
    return out


def _colours(boxes):
    """op -> colour, the ops with most bytes first."""
    total = {}
    for lo, hi, _, size, _, op in boxes:
        total[op] = total.get(op, 0) + size * (hi - lo)
    return {op: PALETTE[k % len(PALETTE)] for k, op in enumerate(sorted(total, key=lambda o: (-total[o], o)))}


def text_plot(report, width=72, height=14):
    """Live bytes over time as text; the peak step is marked, `-` is the lower bound, `=` the plan's size."""
    if not len(report.live) or report.peak == 0:
        return "(nothing to place)"
    edges = np.linspace(0, len(report.live), min(width, len(report.live)) + 1).astype(int)
    top = [int(report.live[a:b].max()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    lines = []
    for r in range(height, 0, -1):
        level, step = report.peak * r / height, report.peak / height
        line = "".join("#" if v > level - step else " " for v in top)
        mark = ""
        if level - step < report.lower_bound <= level:
            line, mark = line.replace(" ", "-"), " lower bound"
        if r == height:
            line = line.replace(" ", "=") if not mark else line
            mark = " peak" + mark
        lines.append(f"|{line}|{mark}")
    at = int(np.searchsorted(edges, report.peak_step, side="right")) - 1
    return "\n".join([*lines, " " + " " * at + f"^ step {report.peak_step} of {report.n_steps}"])


def svg(report, width=860, height=320):
    """The picture as one SVG element, with a tooltip per box."""
    boxes = _boxes(report)
    if not boxes or report.peak == 0:
        return "<svg width='1' height='1'></svg>"
    colour = _colours(boxes)
    sx, sy = width / report.n_steps, height / report.peak
    out = [f"<svg viewBox='0 0 {width} {height + 18}' width='{width}' xmlns='http://www.w3.org/2000/svg' "
           "font-family='sans-serif' font-size='9'>"]
    for lo, hi, bottom, size, name, op in boxes:
        if size == 0:
            continue
        x, w, h = lo * sx, max((hi - lo) * sx, 0.4), max(size * sy, 0.3)
        y = height - bottom * sy - h
        text = html.escape(f"{name} {op} {size:,} bytes, steps {lo}..{hi}, offset {bottom:,}", quote=True)
        out.append(f"<rect x='{x:.2f}' y='{y:.2f}' width='{w:.2f}' height='{h:.2f}' fill='{colour[op]}' "
                   f"fill-opacity='0.75' stroke='white' stroke-width='0.3'><title>{text}</title></rect>")
        if w > 6 * len(name) and h > 10:
            out.append(f"<text x='{x + 2:.1f}' y='{y + h / 2 + 3:.1f}'>{html.escape(name)}</text>")
    points = " ".join(f"{k * sx:.1f},{height - v * sy:.1f} {(k + 1) * sx:.1f},{height - v * sy:.1f}"
                      for k, v in enumerate(report.live.tolist()))
    y = height - report.lower_bound * sy
    out.append(f"<polyline points='{points}' fill='none' stroke='black' stroke-width='1'/>")
    out.append(f"<line x1='0' x2='{width}' y1='{y:.1f}' y2='{y:.1f}' stroke='red' stroke-dasharray='4 3'/>")
    out.append(f"<text x='2' y='{height + 13}'>steps 0..{report.n_steps}; black: live bytes; red: lower bound "
               f"{report.lower_bound:,}; top: peak {report.peak:,}</text></svg>")
    return "".join(out)


def plot(report, ax=None, path=None):
    """The picture with matplotlib; draws into ax or a new figure, saves to path if given, returns the axes."""
    extra("matplotlib", "plots")
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    if ax is None:
        if path is None:
            import matplotlib.pyplot as plt
            _, ax = plt.subplots(figsize=(11, 5), layout="constrained")
        else:                                   # no display, no global state
            ax = Figure(figsize=(11, 5), layout="constrained").add_subplot()
    boxes = _boxes(report)
    colour = _colours(boxes)
    unit = 1 << 20 if report.peak >= 1 << 20 else 1 << 10
    corners = [[(lo, y / unit), (hi, y / unit), (hi, (y + z) / unit), (lo, (y + z) / unit)]
               for lo, hi, y, z, _, _ in boxes]
    edge = 0.4 if len(boxes) < 500 else 0.1
    ax.add_collection(PolyCollection(corners, facecolors=[colour[b[5]] for b in boxes], edgecolors="white",
                                     linewidths=edge, alpha=0.8))
    steps = np.arange(report.n_steps + 1)
    ax.step(steps, np.append(report.live, report.live[-1:]) / unit, where="post", color="black",
            lw=1 if report.n_steps < 300 else 0.5)
    ax.axhline(report.lower_bound / unit, color="red", ls="--", lw=1)
    ax.axvline(report.peak_step + 0.5, color="black", ls=":", lw=0.8)
    ax.set_xlim(0, report.n_steps)
    ax.set_ylim(0, max(report.peak, 1) * 1.04 / unit)
    for lo, hi, y, z, name, _ in boxes:         # a label where it fits: 1 % of the width a character, 3 % of the height
        if (hi - lo) / report.n_steps > 0.009 * len(name) and z > 0.03 * report.peak:
            ax.text((lo + hi) / 2, (y + z / 2) / unit, name, ha="center", va="center", fontsize=7, clip_on=True)
    ax.set_xlabel("step (node in execution order)")
    name = "MiB" if unit > 1024 else "KiB"
    ax.set_ylabel(f"offset [{name}]")
    ax.set_title(f"{report.title or 'memory plan'}: peak {report.peak / unit:.2f} {name}, lower bound "
                 f"{report.lower_bound / unit:.2f} {name}, planner {report.planner}")
    keys = [Patch(color=c, label=op) for op, c in list(colour.items())[:8]]
    keys += [ax.lines[0], ax.lines[1]]
    ax.lines[0].set_label("live bytes")
    ax.lines[1].set_label("lower bound")
    ax.legend(handles=keys, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    if path is not None:
        save_figure(ax.figure, path)
    return ax


def save_figure(figure, path, dpi=130):
    """Write a matplotlib figure; the file's ending is its format, .png where there is none."""
    if not isinstance(path, str | os.PathLike):         # an open file
        figure.savefig(path, dpi=dpi)
        return
    name, ending = os.path.splitext(os.fspath(path))
    with whole_file(name + (ending or ".png")) as f:
        figure.savefig(f, dpi=dpi, format=ending[1:].lower() or "png")
