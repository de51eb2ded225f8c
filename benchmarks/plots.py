"""The plot of the comparison: our speed over each peer's, one panel a section, one column a number of threads."""
import math
import re

import numpy as np

MISS, PASS, SHOWN = "#c23b22", "#2e7d32", "#777777"
PEER_MARKS = {"wheel": "o", "native": "s", "llamafile": "D", "onnxruntime": "^", "numpy": "v", "torch": "<",
              "ik": "P", "openvino": "X",
              "limit": "|"}
PRODUCT = re.compile(r"mul_mat (\S+) \[2048 x 2048\], n = (\d+)")
ROW_HEIGHT, HEAD_HEIGHT, WIDTH = 0.2, 1.1, 8.5          # inches


def pyplot():
    """matplotlib without a screen; MissingExtra where it is not installed."""
    try:
        import matplotlib
    except ImportError as e:
        from ggjit.ops.core.errors import MissingExtra
        raise MissingExtra("plots need matplotlib: pip install 'ggjit[plots]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def plot_ratios(sections, path):
    """sections: {name: rows}.  Rows without a ratio are left out; returns whether there were others, and a plot."""
    plt = pyplot()
    rows = [r for rs in sections.values() for r in rs if r.ratio is not None and r.against != "-"]
    threads = sorted({r.n_threads for r in rows})
    panels = [(f"mul_mat, weights [2048 x 2048]: {against}", [r for r in rows if _is_product(r, against)], _heat)
              for against in ("wheel", "native")]
    panels += [(name, [r for r in rs if r in rows and not any(_is_product(r, a) for a in ("wheel", "native"))], _dots)
               for name, rs in sections.items()]
    panels = [p for p in panels if p[1]]
    if not panels:
        return False
    heights = [HEAD_HEIGHT + ROW_HEIGHT * _n_lines(p) for p in panels]
    figure, axes = plt.subplots(len(panels), len(threads), squeeze=False, height_ratios=heights,
                                figsize=(WIDTH * len(threads), sum(heights)), layout="constrained")
    for (name, rs, draw), line in zip(panels, axes, strict=True):
        for t, ax in zip(threads, line, strict=True):
            here = [r for r in rs if r.n_threads == t]
            if not here:                        # a run that was stopped
                ax.set_axis_off()
                continue
            ax.set_title(f"{name}, {t} thread{'s' if t > 1 else ''}")
            draw(ax, here)
    figure.suptitle("ggjit's speed over the peer's (above 1: ggjit is faster)")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True


def _is_product(row, against):
    return row.against == against and PRODUCT.match(row.work) is not None


def _n_lines(panel):
    _, rows, draw = panel
    return len({PRODUCT.match(r.work)[1] if draw is _heat else r.work for r in rows})


def _heat(ax, rows):
    """Types against columns, the ratio in every cell; green reaches the target."""
    cells = {PRODUCT.match(r.work).groups(): r for r in rows}
    types = list(dict.fromkeys(t for t, _ in cells))
    columns = sorted({n for _, n in cells}, key=int)
    grid = np.array([[math.log2(cells[t, n].ratio) if (t, n) in cells else math.nan for n in columns] for t in types])
    ax.imshow(grid, cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(types)), types)
    ax.set_xlabel("columns n")
    for (t, n), r in cells.items():
        ax.text(columns.index(n), types.index(t), f"{r.ratio:.2f}", ha="center", va="center", fontsize=8,
                weight="bold" if r.passed is False else "normal", color=MISS if r.passed is False else "black")


def _dots(ax, rows):
    """A line for each work, a mark for each peer, a tick at its target."""
    works = list(dict.fromkeys(r.work for r in rows))
    for peer in dict.fromkeys(r.against for r in rows):
        rs = [r for r in rows if r.against == peer]
        at = [works.index(r.work) for r in rs]
        colours = [{True: PASS, False: MISS, None: SHOWN}[r.passed] for r in rs]
        ax.scatter([r.ratio for r in rs], at, marker=PEER_MARKS.get(peer, "o"), c=colours, s=28, label=peer, zorder=3)
        wanted = [(float(r.target.split()[0]), i) for r, i in zip(rs, at, strict=True) if r.target.endswith(" x")]
        if wanted:
            ax.scatter(*zip(*wanted, strict=True), marker="|", c="black", s=60, zorder=2)
    ax.axvline(1.0, color="black", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_yticks(range(len(works)), works, fontsize=8)
    ax.set_ylim(len(works) - 0.5, -0.5)
    ax.grid(axis="x", which="both", color="#dddddd", linewidth=0.6)
    ax.set_xlabel("ratio; green reaches its target (black tick), red misses")
    ax.legend(loc="lower right", fontsize=8)
