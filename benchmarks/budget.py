"""The price of fewer bytes: training graphs within shares of their peak.

    python benchmarks/budget.py [--shares 75 50 35 25] [--markdown FILE]

peak: bytes of the graph in its better order, nothing made again.  For each share: operations more than one run, the
bound that is proved for any plan, milliseconds of planning (the smallest of three).  Each plan is laid out, and its
peak is that of gg.measure.
"""
import argparse
import pathlib
import time

from train import Classifier, Llama

import ggjit as gg

NETWORKS = {                    # name: (network, rows of a batch, rows computed at a time; 0: all)
    "MLP 64-128-64-10, batch 4096": (lambda: Classifier("mlp"), 4096, 0),
    "the same, 512 rows at a time": (lambda: Classifier("mlp"), 4096, 512),
    "CNN 16, 32, batch 256": (lambda: Classifier("cnn"), 256, 0),
    "the same, 32 images at a time": (lambda: Classifier("cnn"), 256, 32),
    "transformer, 4 layers, width 64": (lambda: Llama(64, n_layer=4), 8, 0),
    "transformer, 12 layers, width 128": (lambda: Llama(64, width=128, n_ff=344, n_layer=12), 8, 0),
}


def training_graph(net, batch, chunk=0):
    x, y, params = net.ours(batch)
    with x.ctx:
        if chunk:
            def of_rows(x, labels):
                return gg.cross_entropy_loss(net.outputs(params, x), labels)
            labels = x.ctx.new_tensor(gg.F32, y.ne[:2], name="labels")
            loss = gg.train.mean_in_chunks(of_rows, x, labels, chunk=chunk)
            return gg.Graph(loss, *gg.grad(loss, list(params.values())))
        loss = gg.cross_entropy_loss(y, x.ctx.new_tensor(gg.F32, y.ne, name="labels"))
        return gg.Graph(loss, *gg.grad(loss, list(params.values())))


def within(graph, budget):
    """The row of a budget: extra and bound in percent, milliseconds; or that it is not reached."""
    seconds = []
    for _ in range(3):
        t0 = time.perf_counter()
        try:
            small = gg.rematerialize(graph, budget)
        except gg.BudgetError:
            return "-"
        seconds.append(time.perf_counter() - t0)
    assert gg.measure(small).peak <= small.peak <= budget
    return f"{100 * small.extra:.1f} ({100 * small.bound:.1f}), {1e3 * min(seconds):.0f} ms"


def least(graph):
    try:
        gg.rematerialize(graph, 0)
    except gg.BudgetError as e:
        return e.minimum


def table(shares):
    rows = ["| graph | nodes | peak, MiB | " + " | ".join(f"{s} %" for s in shares) + " | least peak |",
            "|---|---|---|" + "---|" * len(shares) + "---|"]
    for name, (make, batch, chunk) in NETWORKS.items():
        graph = training_graph(make(), batch, chunk)
        peak = min(gg.measure(graph, order=order).peak for order in ("graph", "memory"))
        cells = [within(graph, peak * share // 100) for share in shares]
        rows.append(f"| {name} | {len(graph)} | {peak / 2 ** 20:.1f} | " + " | ".join(cells) +
                    f" | {100 * least(graph) / peak:.0f} % |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shares", type=int, nargs="+", default=[75, 50, 35, 25], metavar="PERCENT")
    p.add_argument("--markdown", type=pathlib.Path, metavar="FILE")
    args = p.parse_args()
    text = table(args.shares)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
