"""Pictures of graphs: boxes and arrows, a layer of a network folded into one box.

    graph.draw()                        in a notebook: the folded graph; below it every layer, to unfold
    graph.draw(expand="blk.3")          that layer unfolded in the picture (True: all)
    graph.draw(file="graph.svg")        also .html and .dot; .png and .pdf where graphviz is installed

A box shows name, op, type and ggml's shape; its colour is the backend.  After a profiled run it shows time and
bytes, and the bar at its foot is its share of the whole time.  Layers are found by names: `blk.3.` or
`layers.3.` in front, `-3` behind; nodes without a name belong to the layer of their weights or readers.
"""
import os
import re
import shutil
import subprocess

from ggjit.alloc.plots import where_trusted
from ggjit.core.arguments import expect_slot
from ggjit.core.html_repr import HtmlRepr, drawing_of, escape
from ggjit.display.boxes import Boxes, natural
from ggjit.display.html import folded
from ggjit.display.layered_layout import LayeredLayout
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_file import write_whole
from ggjit.profiling.profile import last_of
from ggjit.tensors.summary import op_name

COLOURS = ("#a9d9f4", "#f2cf80", "#80ceb9", "#eaae80", "#e5bcd3", "#f7f1a0", "#80b8d8")     # tints of plots.PALETTE
PLAIN, LEAF, ELSEWHERE = "#dcdcdc", "#f3f3f3", "#ffffff"
GREY = "#767676"                # arrows and text outside of boxes: as far from white as from black
CHAR, LINE, PAD = 6.3, 14, 8    # pixels


class Drawing(Boxes, HtmlRepr):
    """What `graph.draw()` returns: `.svg` and `.dot` are texts, `save(file)` writes, notebooks show it."""

    def __init__(self, nodes, expand=None, views=False, profile=None, sched=None, engine="auto", fold=True):
        super().__init__(nodes, expand, views, profile, sched, fold)
        self.engine = engine

    # ------------------------------------------------------------ colours
    def _palette(self):
        names = dict.fromkeys(b.backend for b in self.boxes.values() if b.backend and b.kind in ("node", "group"))
        return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}

    def _fill(self, box, palette):
        if box.kind == "outside":
            return ELSEWHERE
        return LEAF if box.kind == "leaf" else palette.get(box.backend, PLAIN)

    def _tooltip(self, box):
        rows = [f"{describe(t)} = {op_name(t)}" if t.op else describe(t) for t in box.tensors[:60]]
        if box.kind != "group":
            t = box.tensors[0]
            rows = [repr(t), f"shape {t.shape}, ne {list(t.ne)}, nb {list(t.nb)}, {t.nbytes:,} bytes"]
        return "\n".join(rows + (["..."] if len(box.tensors) > 60 else []))

    # ------------------------------------------------------------ SVG
    @property
    def svg(self):
        """The picture: by graphviz where it is installed and engine is not "own", else by layered_layout.py."""
        if self.engine != "own" and shutil.which("dot"):
            made = _graphviz(self.dot, "svg")
            if made is not None:
                return re.sub(r"(?s)^.*?(?=<svg)", "", made.decode("utf-8"))
        return self._own_svg()

    def _own_svg(self):
        if not self.boxes:
            return "<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'></svg>"
        sizes = {}
        for k, b in self.boxes.items():         # titles are bold
            width = max(1.12 * len(b.texts[0]), *map(len, b.texts))
            sizes[k] = CHAR * width + 2 * PAD, LINE * len(b.texts) + 2 * PAD - 4
        at = LayeredLayout(sizes, self.arrows, self.leaves)
        palette, legend = self._palette(), 24
        w, h = at.width + 20, at.height + 20 + legend
        out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='-10 -10 {w:.0f} {h:.0f}' width='{w:.0f}' "
               f"height='{h:.0f}' font-family='Helvetica,Arial,sans-serif' font-size='11'>",
               "<defs><marker id='ggjit-arrow' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
               f"orient='auto'><path d='M0 0.5L8 4L0 7.5z' fill='{GREY}'/></marker></defs>"]
        out += [f"<path d='{_curve(points)}' fill='none' stroke='{GREY}' stroke-width='1.1' "
                "marker-end='url(#ggjit-arrow)'/>" for points in at.paths.values()]
        out += [self._box_svg(b, at.x[k], at.y[k], *sizes[k], palette) for k, b in self.boxes.items()]
        x, y = 0.0, at.height + 18
        for name, colour in palette.items():
            out.append(f"<rect x='{x:.0f}' y='{y - 9:.0f}' width='11' height='11' rx='2' fill='{colour}' "
                       f"stroke='#6e6e6e'/><text x='{x + 15:.0f}' y='{y:.0f}' fill='{GREY}'>{escape(name)}</text>")
            x += 30 + CHAR * len(name)
        return "".join([*out, "</svg>"])

    def _box_svg(self, box, x, y, w, h, palette):
        left, top = x - w / 2, y - h / 2
        dash = " stroke-dasharray='4 3'" if box.kind in ("leaf", "outside") else ""
        out = [f"<g><title>{escape(self._tooltip(box))}</title><rect x='{left:.1f}' y='{top:.1f}' width='{w:.1f}' "
               f"height='{h:.1f}' rx='{4 if box.kind != 'group' else 9}' fill='{self._fill(box, palette)}' "
               f"stroke='#6e6e6e' stroke-width='{1 if box.kind != 'group' else 1.6}'{dash}/>"]
        if box.seconds and self.total:
            share = (w - 8) * box.seconds / self.total
            out.append(f"<rect x='{left + 4:.1f}' y='{top + h - 5:.1f}' width='{share:.1f}' height='3' "
                       "fill='#c0392b'/>")
        for i, text in enumerate(box.texts):
            bold = " font-weight='bold'" if i == 0 else ""
            out.append(f"<text x='{x:.1f}' y='{top + PAD + 8 + LINE * i:.1f}' text-anchor='middle' "
                       f"fill='#1c1c1c'{bold}>{escape(text)}</text>")
        return "".join([*out, "</g>"])

    # ------------------------------------------------------------ dot
    @property
    def dot(self):
        """The same boxes and arrows in graphviz's language."""
        palette, name = self._palette(), {k: f"n{i}" for i, k in enumerate(self.boxes)}
        out = ["digraph ggjit {", '  graph [bgcolor="transparent", ranksep=0.35, nodesep=0.25];',
               '  node [shape=box, style="filled,rounded", fontsize=11, fontname="Helvetica", color="#6e6e6e"];',
               f'  edge [color="{GREY}", arrowsize=0.6];']
        for k, b in self.boxes.items():
            style = ', style="filled,dashed"' if b.kind in ("leaf", "outside") else ""
            text = "\\n".join(_quoted(s) for s in b.texts)
            out.append(f'  {name[k]} [label="{text}", tooltip="{_quoted(self._tooltip(b))}", '
                       f'fillcolor="{self._fill(b, palette)}"{style}];')
        return "\n".join([*out, *(f"  {name[a]} -> {name[b]};" for a, b in self.arrows), "}"]) + "\n"

    # ------------------------------------------------------------ notebooks and files
    def html(self):
        """The picture, and below it a drawing of every folded layer, to open."""
        out = [where_trusted(f"<div style='overflow-x:auto'>{self.svg}</div>")]
        for group in sorted(self.folded, key=natural):
            box = self.boxes["group", group]
            inner = Drawing([t for t in self.nodes if self.layer[t.id] == group], True, self.views, self.profile,
                            self.sched, self.engine, fold=False)
            out.append(folded(", ".join([group, *box.lines]),
                              where_trusted(f"<div style='overflow-x:auto'>{inner.svg}</div>")))
        return "".join(out)

    _repr_html_ = html

    def __repr__(self):
        return (f"<Drawing of {len(self.nodes)} nodes: {len(self.boxes)} boxes, {len(self.folded)} of them folded "
                f"layers>")

    def save(self, file):
        """Write .svg, .html or .dot; .png and .pdf need graphviz's `dot`.  Errors: ParamError."""
        file, ext = os.fspath(file), os.path.splitext(os.fspath(file))[1].lower()
        texts = {".svg": lambda: self.svg, ".html": lambda: _page(self.html()), ".dot": lambda: self.dot,
                 ".gv": lambda: self.dot}
        if ext in texts:
            data = texts[ext]().encode("utf-8")
        elif ext in (".png", ".pdf") and shutil.which("dot"):
            data = _graphviz(self.dot, ext[1:])
        else:
            data = None
        if data is None:
            raise ParamError(f"draw: {file!r} must end in .svg, .html or .dot (.png and .pdf where graphviz is "
                             f"installed)")
        write_whole(file, data)


@drawing_of.register
def draw(graph: Graph, file=None, expand=None, views=False, profile=None, sched=None, engine="auto"):
    """A Drawing of the graph; written to `file` if given.

    expand: True, False, a layer's name or a list of them; by default graphs of up to 40 nodes are unfolded.  views:
    draw reshape, view, permute and transpose too.  profile: what `gg.profile()` gave (default: the last one that saw
    this graph).  sched: a Scheduler whose assignment gives the colours.  engine: "auto" (graphviz where installed) or
    "own".  Errors: ParamError, TypeMismatch, OSError.
    """
    if engine not in ("auto", "own"):
        raise ParamError(f"draw: engine {engine!r}: expected 'auto' or 'own'")
    if profile is None:
        profile = last_of(graph)
    else:
        expect_slot(profile, "seconds_by_tensor", "draw: profile is what `with gg.profile() as p:` gives")
    if sched is not None:
        expect_slot(sched, "get_tensor_backend", "draw: sched is a gg.Scheduler")
    drawing = Drawing(graph.nodes, expand, views, profile, sched, engine)
    if file is not None:
        drawing.save(file)
    return drawing


def _quoted(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _curve(points):
    """A path that leaves and enters vertically at every point."""
    out = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        middle = (y0 + y1) / 2
        out.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return "".join(out)


def _graphviz(dot, form):
    """The output of `dot -T<form>` for a text, or None where it fails or takes too long."""
    try:
        done = subprocess.run(["dot", f"-T{form}"], input=dot.encode("utf-8"), capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


def _page(body):
    return (f"<!doctype html><html><head><meta charset='utf-8'><title>ggjit graph</title></head>"
            f"<body style='font-family:sans-serif'>{body}</body></html>")
