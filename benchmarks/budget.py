"""The price of fewer bytes: training graphs within shares of their peak, beside PyTorch's activation-memory budget.

    python -m benchmarks.budget [--shares 75 50 35 25] [--networks WORD ...] [--markdown FILE]

ABOUT, at the head of the file that --markdown writes, explains the cells.  Times are processor time, the smallest of
three calls.  Each plan's peak is compared with that of gg.measure.  The rows of PyTorch need torch
(benchmarks/torch_budget.py).
"""
import argparse
import importlib.util
import pathlib
import time

import ggjit as gg
from benchmarks.convnets import ResNet, UNet
from benchmarks.train import Classifier, Llama
from ggjit.api.rematerialize import COSTLY_SHARE

ABOUT = """\
# Training within a byte budget

`python -m benchmarks.budget --markdown FILE` limits training graphs to a share of their peak memory with
`gg.rematerialize`, which runs some nodes twice. Of two node orders, the graph's and `order="memory"`, the better one
gives the peak.

- "0.6 (0.5), 24 ms": the plan runs 0.6 % more operations than the graph without a limit, and planning takes 24 ms. It
  is proved that every plan that recomputes whole nodes runs at least 0.5 % more.
- "0.1 in 4 chunks": the plan runs 0.1 % more operations and computes the largest nodes in 4 chunks of rows. This is
  shown if no plan of whole nodes fits, and beside plans of whole nodes that cost over 20 %.
- "rounded": results are not bit-identical, because sums over rows are split. `-`: no plan fits.
- **least peak**: the smallest peak that can be reached, with whole nodes, with chunks ("cut"), and with split sums.

The rows "PyTorch's budget" are PyTorch's activation-memory budget (`benchmarks/torch_budget.py`).
"""
NETWORKS = {                    # name: (network, rows of a batch)
    "MLP 64-128-64-10, batch 4096": (lambda: Classifier("mlp"), 4096),
    "CNN 16, 32, batch 256": (lambda: Classifier("cnn"), 256),
    "transformer, 4 layers, width 64": (lambda: Llama(64, n_layer=4), 8),
    "transformer, 12 layers, width 128": (lambda: Llama(64, width=128, n_ff=344, n_layer=12), 8),
    "flash, 24 layers, width 128": (lambda: Llama(64, width=128, n_ff=344, n_layer=24, flash=True), 8),
    "U-Net, 3 levels, 64 x 64, batch 4": (lambda: UNet(64, 16), 4),
    "ResNet 3-4-6-3, 32 x 32, batch 8": (lambda: ResNet(32, 16), 8),
}


def training_graph(net, batch):
    x, y, params = net.ours(batch)
    with x.ctx:
        loss = gg.cross_entropy_loss(y, x.ctx.new_tensor(gg.F32, y.ne, name="labels"))
        return gg.Graph(loss, *gg.grad(loss, list(params.values())))


def within(graph, budget):
    """The cell of a budget."""
    seconds = []
    for _ in range(3):
        t0 = time.process_time()
        try:
            small = gg.rematerialize(graph, budget, cut=False)
        except gg.BudgetError:
            return cut(graph, budget)
        seconds.append(time.process_time() - t0)
    assert gg.measure(small).peak <= small.peak <= budget
    cell = f"{100 * small.extra:.1f} ({100 * small.bound:.1f}), {1e3 * min(seconds):.0f} ms"
    hows = (True, "rounded") if small.extra > COSTLY_SHARE else ()
    cheaper = [gg.rematerialize(graph, budget, cut=how) for how in hows]
    cheaper = [g for g in cheaper if g.extra < small.extra]
    return "; ".join([cell, *map(chunks, cheaper[:1])])


def cut(graph, budget):
    """With the same bits where that is enough."""
    for how in (True, "rounded"):
        try:
            small = gg.rematerialize(graph, budget, cut=how)
        except gg.BudgetError:
            continue
        assert gg.measure(small).peak <= small.peak <= budget
        return chunks(small)
    return "-"


def chunks(small):
    return f"{100 * small.extra:.1f} in {small.n_chunks} chunks" + ", rounded" * (not small.same_bits)


def least(graph, **options):
    try:
        gg.rematerialize(graph, 0, **options)
    except gg.BudgetError as e:
        return e.minimum


def row_of_torch(net, batch, shares):
    from benchmarks.torch_budget import cheapest
    extra, smallest = cheapest(net, batch, [share / 100 for share in shares])
    cells = " | ".join("-" if x is None else f"{100 * x:.1f}" for x in extra)
    return f"| PyTorch's budget | | | {cells} | {100 * smallest:.0f} % |"


def table(shares, words):
    rows = ["| graph | nodes | peak, MiB | " + " | ".join(f"{s} %" for s in shares) + " | least peak |",
            "|---|---|---|" + "---|" * len(shares) + "---|"]
    for name, (make, batch) in NETWORKS.items():
        if words and not any(word in name for word in words):
            continue
        graph = training_graph(make(), batch)
        peak = min(gg.measure(graph, order=order).peak for order in ("graph", "memory"))
        cells = [within(graph, peak * share // 100) for share in shares]
        whole, same, rounded = (100 * least(graph, cut=cut) / peak for cut in (False, True, "rounded"))
        rows.append(f"| {name} | {len(graph)} | {peak / 2 ** 20:.1f} | {' | '.join(cells)} | "
                    f"{whole:.0f} %, cut {same:.0f} %, rounded {rounded:.0f} % |")
        print(rows[-1], flush=True)
        if importlib.util.find_spec("torch"):
            rows.append(row_of_torch(make(), batch, shares))
            print(rows[-1], flush=True)
    return "\n".join(rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shares", type=int, nargs="+", default=[75, 50, 35, 25], metavar="PERCENT")
    p.add_argument("--networks", nargs="+", default=[], metavar="WORD", help="those whose names have one of the words")
    p.add_argument("--markdown", type=pathlib.Path, metavar="FILE")
    args = p.parse_args()
    text = table(args.shares, args.networks)
    if args.markdown:
        args.markdown.write_text(f"{ABOUT}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
