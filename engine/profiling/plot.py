"""The picture of a profiled run: what every thread did, below the layers it belonged to.

    layers     |  (none) |      blk.0       |      blk.1       | ...
    thread 0   |get_rows|rms|mul_mat|...
    thread 1            .   |mul_mat|...
               +------------------------------------------------> microseconds
"""
import itertools

from ggjit.alloc.plots import PALETTE, save_figure
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
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    record, bars = _one_run(profile, run)
    if ax is None:
        if path is None:
            import matplotlib.pyplot as plt
            _, ax = plt.subplots(figsize=(12, 1.6 + 0.6 * record.n_threads), layout="constrained")
        else:
            ax = Figure(figsize=(12, 1.6 + 0.6 * record.n_threads), layout="constrained").add_subplot()
    spent = {}
    for i, _, a, b in bars:
        op = record.nodes[i].op
        spent[op] = spent.get(op, 0.0) + b - a
    colour = {op: PALETTE[k % len(PALETTE)] for k, op in enumerate(sorted(spent, key=lambda o: -spent[o]))}
    for ith in range(record.n_threads):
        mine = [x for x in bars if x[1] == ith]
        ax.broken_barh([(a, b - a) for _, _, a, b in mine], (-ith - 0.4, 0.8),
                       facecolors=[colour[record.nodes[i].op] for i, *_ in mine], linewidth=0)
    end = max(b for *_, b in bars)
    _layers(ax, record, bars, end)
    ax.set_yticks([1, *(-i for i in range(record.n_threads))],
                  ["layers", *(f"thread {i}" for i in range(record.n_threads))])
    ax.set_xlim(0, end)
    ax.set_ylim(-record.n_threads + 0.4, 1.5)
    ax.set_xlabel("microseconds")
    ax.set_title(f"{record.title}: {end:,.1f} us in {len({i for i, *_ in bars})} nodes", fontsize=10)
    ax.legend(handles=[Patch(color=c, label=f"{op} {spent[op] / sum(spent.values()):.0%}")
                       for op, c in list(colour.items())[:8]], fontsize=7, loc="upper left", bbox_to_anchor=(1, 1),
              frameon=False)
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
        ax.broken_barh([(a, b - a)], (0.6, 0.8), facecolors="#8c8c8c" if k % 2 else "#b5b5b5", linewidth=0)
        if layer and (b - a) / end > 0.008 * len(layer):
            ax.text((a + b) / 2, 1, layer, ha="center", va="center", fontsize=7, clip_on=True)
