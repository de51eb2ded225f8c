"""Pictures of a memory plan: offset by time, with the live-bytes curve and the lower bound.

    address ^
       peak | - - - - - - - - - - - - - - - - -        one box per allocation: born, freed, from offset to end
            |      +------+        +-----+             chunks are stacked; the curve is the sum of live bytes
            |  +---+--+   +--------+     |
            |  |      |   |              |
            +--+------+---+--------------+---> step

`text_plot` needs nothing, `svg` needs nothing (notebooks), `plot` needs matplotlib.  All three read well at 30 and at
3,000 tensors: a box is coloured by its op or by how long it lives and labelled only where the label fits, above the
curve.  Text takes the page's own colour, lines have a light rim, so that both read on light and dark pages.
"""
import collections
import html
import itertools
import os
import secrets

import numpy as np

from ggjit.ops.core.errors import ParamError, extra
from ggjit.ops.core.whole_file import whole_file

# colours that readers with any colour vision tell apart; source: Okabe and Ito, Color Universal Design, 2008
PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0e442", "#0072b2")
OTHER = "#a6a6a6"               # colour of everything beyond the palette
LIVE, BOUND, RIM = "#000000", "#b3004b", "#ffffff"
LIFETIMES = ("#31446b", "#666970", "#958f78", "#cbba69", "#ffe945")       # short to long: dark to light (cividis)
Box = collections.namedtuple("Box", "lo hi bottom nbytes rows")         # rows: the report's, that lie in it
Key = collections.namedtuple("Key", "text colour")


def unit_of(nbytes):
    """(bytes, name) of the binary unit in which numbers up to `nbytes` are shown."""
    return next(u for u in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
                if nbytes >= u[0] or u[0] == 1)


def boxes_of(report):
    """A Box per allocation, chunks stacked one above the other."""
    base, at = {}, 0
    for b, chunks in enumerate(report.chunk_sizes):
        for c, size in enumerate(chunks):
            base[b, c] = at
            at += size
    return [Box(lo, hi, base[b, c] + offs, size, report.by_alloc.get(a, []))
            for a, (lo, hi, size, offs, b, c) in enumerate(report.boxes.tolist())]


def lifetimes(n_steps):
    """{steps that a buffer lives at most: Key}, short to long; the last class begins below an eighth of all steps."""
    ends = [1, 3, 10, 30]
    while 80 * ends[-2] <= n_steps:
        ends = [*ends[1:], 10 * ends[-2]]
    texts = ["1 step" if ends[0] == 1 else f"up to {ends[0]:,} steps",
             *(f"{a + 1:,} to {b:,} steps" for a, b in itertools.pairwise(ends)), f"more than {ends[-1]:,} steps"]
    return dict(zip((*ends, float("inf")), map(Key, texts, LIFETIMES), strict=True))


def coloured(boxes, colour):
    """(the Key of every box, the Keys in the order of a legend)."""
    if colour == "lifetime":
        classes = lifetimes(max((b.hi for b in boxes), default=0))
        keys = [next(key for end, key in classes.items() if b.hi - b.lo <= end) for b in boxes]
        return keys, [k for k in classes.values() if k in set(keys)]
    if colour != "op":
        raise ParamError(f"colour {colour!r}: expected 'op' or 'lifetime'")
    total, ops = collections.Counter(), [b.rows[0].op if b.rows else "?" for b in boxes]
    for b, op in zip(boxes, ops, strict=True):
        total[op] += b.nbytes * (b.hi - b.lo)
    ranked = sorted(total, key=lambda o: (-total[o], o))
    by_op = {op: Key(op, c) for op, c in zip(ranked, PALETTE, strict=False)}
    rest = Key("others", OTHER)
    legend = [*by_op.values(), *([rest] if len(ranked) > len(PALETTE) else [])]
    return [by_op.get(op, rest) for op in ops], legend


def ink(colour):
    """Black or white, whichever reads better on a colour "#rrggbb"."""
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    luminance = np.dot(linear, (0.2126, 0.7152, 0.0722))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def turned(width, height, length, line):
    """Degrees by which a label of that length is turned to fit into a box; None where it does not."""
    if width > length and height > line:
        return 0
    return 90 if height > length and width > line else None


def round_ticks(end, n=5):
    """About n round numbers from 0 up to `end`: steps of 1, 2 or 5 times a power of ten."""
    rough = max(end, 1e-9) / n
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    return [k * step for k in range(int(end / step + 1e-9) + 1)]


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


# ---------------------------------------------------------------- SVG
FONT = "xmlns='http://www.w3.org/2000/svg' font-family='sans-serif' font-size='10' fill='currentColor'"
STEP = "step (node in the order of computing)"
LEFT, TOP, WIDTH, HEIGHT, FOOT, CHAR = 62, 22, 790, 300, 62, 5.6           # pixels; CHAR: width of a letter
# zoom steps of `zoomable`: factor of the width, of the height
ZOOMS = ((1, 1), (2, 1), (4, 2), (8, 2), (16, 4), (32, 8), (64, 16))
FOOT_HEIGHT = 36                # pixels: steps below a picture that zooms
ROOMY = 3                       # pixels that a step has where the curve of live bytes is drawn as a line on a rim


def where_trusted(picture):
    """The picture; where a notebook that is not trusted drops SVG and styles, a line instead of the picture's texts."""
    return ("<style>.ggjit-drawn{display:block!important}.ggjit-instead{display:none}</style>"
            "<div class='ggjit-instead'>(the picture is drawn when this notebook is trusted)</div>"
            f"<div class='ggjit-drawn' style='display:none'>{picture}</div>")


def svg(report, colour="op", top=None):
    """The picture as one SVG element, with axes, a legend and a tooltip per box.  top: bytes that the axis goes up to,
    the peak by default."""
    boxes = [b for b in boxes_of(report) if b.nbytes]
    if not boxes or report.peak == 0:
        return "<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'></svg>"
    keys, legend = coloured(boxes, colour)
    top = top or report.peak
    sx, sy = WIDTH / report.n_steps, HEIGHT / top
    out = [f"<svg viewBox='0 0 {LEFT + WIDTH + 12} {TOP + HEIGHT + FOOT}' width='{LEFT + WIDTH + 12}' "
           f"style='max-width:100%;height:auto' {FONT}>", _axes(report, sx, sy, top),
           f"<g transform='translate({LEFT} {TOP})'>"]
    labels = []
    for b, key in zip(boxes, keys, strict=True):
        x, w, h = b.lo * sx, max((b.hi - b.lo) * sx, 0.4), max(b.nbytes * sy, 0.3)
        y = HEIGHT - b.bottom * sy - h
        out.append(f"<rect x='{x:.2f}' y='{y:.2f}' width='{w:.2f}' height='{h:.2f}' fill='{key.colour}' stroke='{RIM}' "
                   f"stroke-width='{0.5 if len(boxes) < 500 else 0.1}'><title>{_tooltip(b)}</title></rect>")
        name = b.rows[0].name if b.rows else ""
        turn = turned(w, h, CHAR * len(name) + 4, 11)
        if name and turn is not None:
            at = f"translate({x + w / 2:.2f} {y + h / 2:.2f})" + (" rotate(-90)" if turn else "")
            labels.append(f"<text transform='{at}' y='3.5' {_halo(key)}>{html.escape(name)}</text>")
    out += [_curve(report, sx, sy), *labels, "</g>", _legend(legend, TOP + HEIGHT + 50), "</svg>"]
    return "".join(out)


def _halo(key):
    """Attributes of a label on a box: readable on it and on the curve."""
    return (f"text-anchor='middle' fill='{ink(key.colour)}' stroke='{key.colour}' stroke-width='4' "
            "paint-order='stroke' pointer-events='none'")


def zoomable(report, colour="op", top=None):
    """The picture to be made wider and higher, and moved by scrolling: HTML without a script, so that no page has to
    trust it.  Lengths are shares of the picture, so letters and lines keep their size; labels that fit from a zoom on
    are a group of class `gz<number of the zoom>`, ticks of one zoom a group `gt<number>`."""
    boxes = [b for b in boxes_of(report) if b.nbytes]
    keys, legend = coloured(boxes, colour)
    mark, name = "gz" + secrets.token_hex(6), unit_of(report.peak)[1]
    top = top or report.peak
    rects, labels = _shares_of(report, boxes, keys, top)
    grid, offsets, steps = _ticks_of_zooms(report, top)
    choice = "".join(f"<input type='radio' name='{mark}' id='{mark}{k}'{'' if k else ' checked'}>"
                     f"<label for='{mark}{k}'>{kx} x&#160;</label>" for k, (kx, _) in enumerate(ZOOMS))
    y = 100 - 100 * report.lower_bound / top
    bound = "".join(f"<line x2='100%' y1='{y:.2f}%' y2='{y:.2f}%' {line}/>" for line in (
        f"stroke='{RIM}' stroke-width='3'", f"stroke='{BOUND}' stroke-width='1.4' stroke-dasharray='5 4'"))
    frame = ("<line x2='100%' y1='100%' y2='100%' stroke='currentColor' stroke-width='2'/>"
             "<line y2='100%' stroke='currentColor' stroke-width='2'/>")
    return (
        f"<div style='max-width:{LEFT + WIDTH + 28}px'><style>{_zoom_rules(report, mark)}</style>"
        f"<small>zoom </small>{choice}<div style='font:bold 10px sans-serif;padding:4px 0 8px {LEFT}px'>"
        f"{html.escape(_numbers(report))}</div>"
        # a reversed column scrolls to its end at first: the lowest addresses
        f"<div class='gp' style='display:flex;flex-direction:column-reverse;overflow-y:auto;padding-top:6px;"
        f"max-height:{HEIGHT + FOOT_HEIGHT + 18}px'><div style='display:flex'>"
        f"<svg class='gy' width='{LEFT}' style='flex:none;overflow:visible' {FONT}>{offsets}<text x='13' y='100%' "
        f"dy='-{HEIGHT // 2}' text-anchor='middle' class='ggjit-turned'>offset, {name}</text></svg>"
        f"<div style='flex:1;min-width:0;overflow-x:auto;overflow-y:hidden'><svg class='gx gy' style='display:block' "
        f"{FONT}>{grid}{''.join(rects)}{bound}{_shared_curve(report, mark, top)}{''.join(labels)}{frame}</svg>"
        f"<svg class='gx' height='20' style='display:block' {FONT}>{steps}</svg></div></div></div>"
        f"<svg viewBox='0 0 {LEFT + WIDTH} {FOOT_HEIGHT}' width='{LEFT + WIDTH}' "
        f"style='max-width:100%;height:auto' {FONT}><text "
        f"x='{LEFT + WIDTH / 2}' y='10' text-anchor='middle'>{STEP}</text>{_legend(legend, 30)}</svg></div>")


def _ticks_of_zooms(report, top):
    """(grid, offsets beside it, steps below it): a group for each zoom."""
    unit, parts = unit_of(report.peak)[0], ([], [], [])
    for kx, ky in ZOOMS:
        heights = [(v, 100 - 100 * v * unit / top) for v in round_ticks(top / unit, 5 * ky)]
        steps = [(v, 100 * v / report.n_steps) for v in round_ticks(report.n_steps, 10 * kx) if v == int(v)]
        parts[0].append("".join(f"<line x2='100%' y1='{y:.2f}%' y2='{y:.2f}%' stroke='currentColor' "
                                "stroke-opacity='.25'/>" for _, y in heights))
        parts[1].append("".join(f"<text x='{LEFT - 7}' y='{y:.2f}%' dy='3.5' text-anchor='end'>{v:g}</text>"
                                for v, y in heights))
        parts[2].append("".join(f"<line x1='{x:.3f}%' x2='{x:.3f}%' y2='4' stroke='currentColor'/><text x='{x:.3f}%' "
                                f"y='15' text-anchor='{'middle' if v else 'start'}'>{v:g}</text>" for v, x in steps))
    return ["".join(f"<g class='gt{k}' display='none'>{x}</g>" for k, x in enumerate(part)) for part in parts]


def _zoom_rules(report, mark):
    """CSS: what the chosen zoom shows, and how large."""
    rules = []
    for k, (kx, ky) in enumerate(ZOOMS):
        mine = f"#{mark}{k}:checked~.gp "
        rules += [f"{mine}.gx{{width:{100 * kx}%}}", f"{mine}.gy{{height:{HEIGHT * ky}px}}",
                  f"{mine}.gt{k}{{display:inline}}", *(f"{mine}.gz{z}{{display:inline}}" for z in range(k + 1))]
        if kx * WIDTH / report.n_steps >= ROOMY:
            rules += [f"{mine}.gc{{stroke:{LIVE};stroke-width:1.2;stroke-opacity:1}}", f"{mine}.gb{{display:inline}}",
                      f"{mine}rect{{stroke:{RIM};stroke-width:.5}}"]
    return "".join(rules) + ".ggjit-turned{transform-box:fill-box;transform-origin:center;transform:rotate(-90deg)}"


def _shares_of(report, boxes, keys, top):
    """(rectangles, groups of labels) in shares of the picture."""
    sx, sy, rects, labels = 100 / report.n_steps, 100 / top, [], [[] for _ in ZOOMS]
    for b, key in zip(boxes, keys, strict=True):
        x, w, h = b.lo * sx, (b.hi - b.lo) * sx, b.nbytes * sy
        y = 100 - b.bottom * sy - h
        rects.append(f"<rect x='{x:.4f}%' y='{y:.3f}%' width='{w:.4f}%' height='{h:.3f}%' fill='{key.colour}'>"
                     f"<title>{_tooltip(b)}</title></rect>")
        name = b.rows[0].name if b.rows else ""
        for k, (kx, ky) in enumerate(ZOOMS) if name else ():
            turn = turned(w * kx * WIDTH / 100, h * ky * HEIGHT / 100, CHAR * len(name) + 4, 11)
            if turn is not None:
                turned_round = " class='ggjit-turned'" if turn else ""
                labels[k].append(f"<text x='{x + w / 2:.4f}%' y='{y + h / 2:.3f}%' dy='3.5' {_halo(key)}"
                                 f"{turned_round}>{html.escape(name)}</text>")
                break
    return rects, [f"<g class='gz{k}' display='none'>{''.join(texts)}</g>" for k, texts in enumerate(labels)]


def _shared_curve(report, mark, top):
    """Live bytes in shares of the picture: a faint line where a step is narrower than the line would be."""
    scale = HEIGHT / top
    path = "".join(f"{'V' if k else 'M0 '}{HEIGHT - v * scale:.2f}H{k + 1}"
                   for k, v in enumerate(report.live.tolist()))
    return (f"<svg width='100%' height='100%' viewBox='0 0 {report.n_steps} {HEIGHT}' preserveAspectRatio='none' "
            f"fill='none' pointer-events='none'><defs><path id='{mark}c' d='{path}' "
            f"vector-effect='non-scaling-stroke'/></defs><use class='gb' href='#{mark}c' stroke='{RIM}' "
            f"stroke-width='3' display='none'/><use class='gc' "
            f"href='#{mark}c' stroke='currentColor' stroke-width='.5' stroke-opacity='.5'/></svg>")


def _tooltip(box):
    """Name, shape, bytes, lifetime and source line of what lies in a box, a line each."""
    lines = [f"{r.name}: {r.op} {r.type} {r.shape_text}, {r.nbytes:,} bytes{', ' + r.where if r.where else ''}"
             for r in box.rows[:8]]
    lines += [f"... {len(box.rows) - 8} more in the same memory"] if len(box.rows) > 8 else []
    lines.append(f"steps {box.lo} to {box.hi - 1}, bytes {box.bottom:,} to {box.bottom + box.nbytes:,}")
    return html.escape("\n".join(lines), quote=True)


def _numbers(report):
    unit, name = unit_of(report.peak)
    planner = f", planner {report.planner}" if report.planner else ""
    return f"peak {report.peak / unit:.2f} {name}, lower bound {report.lower_bound / unit:.2f} {name}{planner}"


def _axes(report, sx, sy, top):
    """Ticks, grid, names of the axes and the numbers of the plan above."""
    (unit, name), foot = unit_of(report.peak), TOP + HEIGHT
    out = [f"<text x='{LEFT}' y='13' font-weight='bold'>{html.escape(_numbers(report))}</text>"]
    for v in round_ticks(top / unit):
        y = foot - v * unit * sy
        out.append(f"<path d='M{LEFT - 4} {y:.1f}H{LEFT + WIDTH}' stroke='currentColor' stroke-opacity='.25'/>"
                   f"<text x='{LEFT - 7}' y='{y + 3.5:.1f}' text-anchor='end'>{v:g}</text>")
    for v in round_ticks(report.n_steps, 10):
        if v == int(v):
            x = LEFT + v * sx
            out.append(f"<path d='M{x:.1f} {foot}v4' stroke='currentColor'/>"
                       f"<text x='{x:.1f}' y='{foot + 15}' text-anchor='middle'>{v:g}</text>")
    out.append(f"<path d='M{LEFT} {TOP}V{foot}H{LEFT + WIDTH}' fill='none' stroke='currentColor'/>"
               f"<text x='{LEFT + WIDTH / 2}' y='{foot + 29}' text-anchor='middle'>{STEP}</text><text x='13' "
               f"y='{TOP + HEIGHT / 2}' text-anchor='middle' transform='rotate(-90 13 {TOP + HEIGHT / 2})'>offset, "
               f"{name}</text>")
    return "".join(out)


def _curve(report, sx, sy):
    points = " ".join(f"{k * sx:.1f},{HEIGHT - v * sy:.1f} {(k + 1) * sx:.1f},{HEIGHT - v * sy:.1f}"
                      for k, v in enumerate(report.live.tolist()))
    y, fine = HEIGHT - report.lower_bound * sy, report.n_steps < 300
    bound = f"M0 {y:.1f}H{WIDTH}"
    return (f"<g fill='none' pointer-events='none'><path d='{bound}' stroke='{RIM}' stroke-width='3'/>"
            f"<path d='{bound}' stroke='{BOUND}' stroke-width='1.4' stroke-dasharray='5 4'/>"
            f"<polyline points='{points}' stroke='{RIM}' stroke-width='{3 if fine else 1.6}'/>"
            f"<polyline points='{points}' stroke='{LIVE}' stroke-width='{1.2 if fine else 0.7}'/></g>")


def _legend(keys, y):
    out, x = [], LEFT
    for text, colour, dash in (*((k.text, k.colour, None) for k in keys), ("live bytes", LIVE, ""),
                               ("lower bound", BOUND, "5 4")):
        if dash is None:
            out.append(f"<rect x='{x}' y='{y - 9}' width='11' height='11' fill='{colour}'/>")
        else:
            out.append(f"<path d='M{x - 2} {y - 3.5}h20' stroke='{RIM}' stroke-width='4'/><path d='M{x} {y - 3.5}h16' "
                       f"stroke='{colour}' stroke-width='1.5' stroke-dasharray='{dash}'/>")
        out.append(f"<text x='{x + (15 if dash is None else 22)}' y='{y}'>{html.escape(text)}</text>")
        x += round((30 if dash is None else 37) + (7 if text.isupper() else 5.4) * len(text))
    return "".join(out)


# ---------------------------------------------------------------- matplotlib
class LayoutPicture:
    """A Layout of plan_offsets as `plot` draws it; steps at which nothing begins or ends are left out.  It has no
    planner: there is no graph whose nodes the steps are."""

    def __init__(self, lower, upper, size, layout, title):
        steps, place = np.unique(np.concatenate([lower, upper]).astype(np.int64), return_inverse=True)
        n = len(lower)
        lo, hi, size, zero = place[:n], place[n:], np.array(size, np.int64), np.zeros(n, np.int64)
        self.n_steps, self.by_alloc, self.chunk_sizes = max(len(steps) - 1, 1), {}, [[layout.peak]]
        self.boxes = np.stack([lo, hi, size, layout.offsets, zero, zero], 1)
        self.title, self.planner, self.peak, self.lower_bound = title, "", layout.peak, layout.lower_bound
        change = np.zeros(self.n_steps + 1, np.int64)
        np.add.at(change, lo, size)
        np.add.at(change, hi, -size)
        self.live = np.cumsum(change)[:-1]
        self.peak_step = int(self.live.argmax())


def plot(report, ax=None, path=None, colour="op"):
    """The picture with matplotlib; draws into ax or a new figure, saves to path if given, returns the axes.

    colour: boxes by "op" or by "lifetime".
    """
    extra("matplotlib", "plots")
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
    boxes = boxes_of(report)
    keys, legend = coloured(boxes, colour)
    ax = new_axes(path, (11, 5)) if ax is None else ax
    unit, name = unit_of(report.peak)
    corners = [[(b.lo, y), (b.hi, y), (b.hi, z), (b.lo, z)]
               for b in boxes for y, z in ((b.bottom / unit, (b.bottom + b.nbytes) / unit),)]
    edge, fine = 0.4 if len(boxes) < 500 else 0.1, report.n_steps < 300
    ax.add_collection(PolyCollection(corners, facecolors=[k.colour for k in keys], edgecolors=RIM, linewidths=edge))
    rim = [withStroke(linewidth=2.6 if fine else 1.2, foreground=RIM)]
    live, = ax.step(np.arange(report.n_steps + 1), np.append(report.live, report.live[-1:]) / unit, where="post",
                    color=LIVE, lw=1 if fine else 0.5, label="live bytes", path_effects=rim)
    bound = ax.axhline(report.lower_bound / unit, color=BOUND, ls="--", lw=1.2, label="lower bound", path_effects=rim)
    ax.axvline(report.peak_step + 0.5, color="0.4", ls=":", lw=0.8)
    ax.set_xlim(0, report.n_steps)
    ax.set_ylim(0, max(report.peak, 1) * 1.04 / unit)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    # points; the layout, which comes later, leaves the axes about as large as they are now
    width, height = ax.figure.get_size_inches() * 72 * 0.95 * (ax.get_position().width, ax.get_position().height)
    for b, key in zip(boxes, keys, strict=True):        # a letter of size 7 is 4.2 wide, a line 9 high
        text = b.rows[0].name if b.rows else ""
        turn = turned((b.hi - b.lo) / report.n_steps * width, b.nbytes / report.peak * height, 4.2 * len(text), 9)
        if text and turn is not None:
            ax.text((b.lo + b.hi) / 2, (b.bottom + b.nbytes / 2) / unit, text, ha="center", va="center", fontsize=7,
                    rotation=turn, clip_on=True, color=ink(key.colour),         # above the curve, spaces too
                    bbox={"facecolor": key.colour, "edgecolor": "none", "pad": 0.8})
    ax.set_xlabel(STEP if report.planner else "step (those at which buffers begin or end)")
    ax.set_ylabel(f"offset, {name}")
    ax.set_title(f"{report.title or 'memory plan'}: {_numbers(report)}")
    ax.legend(handles=[*(Patch(color=k.colour, label=k.text) for k in legend), live, bound], fontsize=7,
              loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    if path is not None:
        save_figure(ax.figure, path)
    return ax


def new_axes(path, size):
    """Axes of a new figure, on white whatever the page: shown by pyplot, or, to be saved, without a display."""
    if path is None:
        figure = extra("matplotlib.pyplot", "plots").figure(figsize=size, layout="constrained", facecolor="white")
    else:
        figure = extra("matplotlib.figure", "plots").Figure(figsize=size, layout="constrained", facecolor="white")
    return figure.add_subplot()


def save_figure(figure, path, dpi=130):
    """Write a matplotlib figure; the file's ending is its format, .png where there is none."""
    if not isinstance(path, str | os.PathLike):         # an open file
        figure.savefig(path, dpi=dpi)
        return
    name, ending = os.path.splitext(os.fspath(path))
    with whole_file(name + (ending or ".png")) as f:
        figure.savefig(f, dpi=dpi, format=ending[1:].lower() or "png")
