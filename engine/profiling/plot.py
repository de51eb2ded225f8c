"""The plot of a profiled run: the work of every thread, below the layers to which it belongs.

    layers     |  (none) |      blk.0       |      blk.1       | ...
    thread 0   |get_rows|rms|mul_mat|...
    thread 1            .   |mul_mat|...
               +------------------------------------------------> microseconds
"""
import itertools

from ggjit.alloc.plots import OTHER, PALETTE, new_axes, save_figure
from ggjit.ops.core.errors import ParamError


def _one_run(profile, run):
    """The (number, thread, start, end) of one run of the plan that took most time, and its record."""
    records = [r for r in profile.records if len(r.ticks)]
    if not records:
        raise ParamError("plot: no run was kept; compute something inside the `with gg.profile()` block")
    record = max(records, key=lambda r: r.busy.sum())
    n = len(record.ticks)
    if not -n <= run < n:
        raise ParamError(f"plot: run {run} of {n} that were kept")
    found = [(i, ith, a, b) for k, ith, i, a, b in record.events() if k == run % n]
    zero = min(a for _, _, a, _ in found)
    return record, [(i, ith, (a - zero) * 1e6 / profile.hz, (b - zero) * 1e6 / profile.hz) for i, ith, a, b in found]


def plot(profile, ax=None, path=None, run=-1):
    """Draws into ax or a new figure, saves to path if given, returns the axes.  Errors: ParamError."""
    from matplotlib.patches import Patch
    record, bars = _one_run(profile, run)
    ax = new_axes(path, (12, 1.6 + 0.6 * record.n_threads)) if ax is None else ax
    spent = {}
    for i, _, a, b in bars:
        op = record.nodes[i].op
        spent[op] = spent.get(op, 0.0) + b - a
    ranked = sorted(spent, key=lambda o: -spent[o])
    colour = dict(zip(ranked, PALETTE, strict=False))           # the slowest ops; the others share one
    for ith in range(record.n_threads):
        mine = [x for x in bars if x[1] == ith]
        ax.broken_barh([(a, b - a) for _, _, a, b in mine], (-ith - 0.4, 0.8),
                       facecolors=[colour.get(record.nodes[i].op, OTHER) for i, *_ in mine], linewidth=0)
    end = max(b for *_, b in bars)
    _layers(ax, record, bars, end)
    ax.set_yticks([1, *(-i for i in range(record.n_threads))],
                  ["layers", *(f"thread {i}" for i in range(record.n_threads))])
    ax.set_xlim(0, end)
    ax.set_ylim(-record.n_threads + 0.4, 1.5)
    ax.set_xlabel("microseconds")
    ax.set_title(f"{record.title}: {end:,.1f} us in {len({i for i, *_ in bars})} nodes", fontsize=10)
    total, rest = sum(spent.values()), ranked[len(PALETTE):]
    shares = [(f"{op} {spent[op] / total:.0%}", c) for op, c in colour.items()]
    shares += [(f"{len(rest)} others {sum(spent[op] for op in rest) / total:.0%}", OTHER)] if rest else []
    ax.legend(handles=[Patch(color=c, label=text) for text, c in shares], fontsize=7, loc="upper left",
              bbox_to_anchor=(1, 1), frameon=False)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    if path is not None:
        save_figure(ax.figure, path)
    return ax


def _layers(ax, record, bars, end):
    """Spans of consecutive nodes of one layer, labelled where the label fits."""
    nodes = sorted({i: (a, b) for i, ith, a, b in bars if ith == 0}.items())
    for k, (layer, group) in enumerate(itertools.groupby(nodes, key=lambda n: record.nodes[n[0]].layer)):
        group = list(group)
        a, b = group[0][1][0], group[-1][1][1]
        ax.broken_barh([(a, b - a)], (0.6, 0.8), facecolors="#a6a6a6" if k % 2 else "#cccccc", linewidth=0)
        if layer and (b - a) / end > 0.008 * len(layer):
            ax.text((a + b) / 2, 1, layer, ha="center", va="center", fontsize=7, clip_on=True)
