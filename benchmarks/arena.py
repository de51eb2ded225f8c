"""A prompt within an arena: bytes against time.    python -m benchmarks.arena [--tokens N ...] [--picture FILE]

For each network a text of N tokens is read without a limit, then in arenas of shares of what that took: tokens at once,
what else was done, bytes of the arena, processor time of a reading (of one thread, the least of REPEATS, all arenas by
turns), and whether every bit of the result is the same.  SmolLM2 and MiniLM where their packages are installed, else
the model that comes with ggjit.
"""
import argparse
import time

import numpy as np

import ggjit as gg
from ggjit.api.rematerialize import Rematerialized
from ggjit.models import load_model, smollm2_path
from ggjit.models.files.minilm import minilm_path

SHARES = 1.0, 0.84, 0.5, 0.3, 0.25
REPEATS = 3


def decoder(path, n):
    """(options of load_model, function of a model that reads the text)"""
    def read(m):
        m.reset()
        return m.decode(np.random.default_rng(0).integers(0, m.n_vocab, n))
    return dict(path=path, n_ctx=max(n, 512), n_batch=n), read


def encoder(path, n):
    return dict(path=path), lambda m: m.embed_ids(np.random.default_rng(0).integers(0, m.n_vocab, n))


def networks(tokens):
    """{name: (options, read)}"""
    smollm2, found = smollm2_path(missing_ok=True), {}
    for n in tokens:
        name = "SmolLM2" if smollm2 else "the small model"
        found[f"{name}, {n} tokens"] = decoder(smollm2 and str(smollm2), n)
    try:
        found["MiniLM, 512 tokens"] = encoder(str(minilm_path(progress=False)), 512)
    except gg.GgjitError as e:
        print(f"no MiniLM: {e}")
    return found


def arrangement(m):
    """What the network does to stay inside."""
    graph = m.within_arena(m.largest_graph())
    words = []
    if hasattr(m, "n_batch"):
        words.append(f"{m.n_batch} tokens at once")
    if not isinstance(graph, Rematerialized):
        return ", ".join([*words, "ggml's plan"])
    words.append("best's plan" if not graph.n_again and graph.n_chunks == 1 else "")
    words.append(f"{graph.n_again} results made again, {graph.extra:.1%} more" if graph.n_again else "")
    words.append(f"the largest in {graph.n_chunks} chunks" if graph.n_chunks > 1 else "")
    return ", ".join(filter(None, words))


class Limited:
    """A network within an arena, or, with arena None, without a limit."""

    def __init__(self, options, read, arena):
        t0 = time.process_time()
        self.m, self.read, self.seconds = load_model(**options, n_threads=1, arena=arena), read, []
        self.values = read(self.m)                      # plans, and compiles what is missing
        self.first = time.process_time() - t0

    def again(self):
        t0 = time.process_time()
        self.read(self.m)
        self.seconds.append(time.process_time() - t0)


def measured(options, read):
    """[(share, Limited or the BudgetError)], [the unlimited one first]"""
    whole = Limited(options, read, None)
    peak, found = whole.m.compute_nbytes, []
    for share in SHARES:
        try:
            found.append((share, Limited(options, read, int(share * peak))))
        except gg.BudgetError as e:
            found.append((share, e))
    for _ in range(REPEATS):
        for _, x in [(1, whole), *found]:
            if isinstance(x, Limited):
                x.again()
    return whole, found


def rows(name, whole, found):
    peak, base = whole.m.compute_nbytes, min(whole.seconds)
    yield name, "no limit", f"{peak / 2**20:.2f}", arrangement(whole.m), f"{base:.3f}", "", ""
    for share, x in found:
        if isinstance(x, Limited):
            same = "all" if np.array_equal(x.values, whole.values) else "NOT ALL"
            yield (name, f"{share:.0%}", f"{x.m.compute_nbytes / 2**20:.2f}", arrangement(x.m), f"{min(x.seconds):.3f}",
                   f"{min(x.seconds) / base - 1:+.1%}", same)
        else:
            yield name, f"{share:.0%}", "", f"the least is {x.minimum / 2**20:.2f} MiB", "", "", ""


def picture(path, results):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (whole, found) in results.items():
        points = sorted((x.m.compute_nbytes / whole.m.compute_nbytes, min(x.seconds) / min(whole.seconds) - 1)
                        for _, x in found if isinstance(x, Limited))
        ax.plot([100 * b for b, _ in points], [100 * t for _, t in points], marker="o", label=name)
    ax.set(xlabel="arena, % of that without a limit", ylabel="more processor time, %", xlim=(0, 105))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    p.add_argument("--picture", metavar="FILE")
    args = p.parse_args()
    print("| network | arena | MiB | how | s | more time | equal bits |\n" + "| --- " * 7 + "|")
    results = {}
    for name, (options, read) in networks(args.tokens).items():
        whole, found = results[name] = measured(options, read)
        for row in rows(name, whole, found):
            print("| " + " | ".join(row) + " |", flush=True)
    if args.picture:
        picture(args.picture, results)


if __name__ == "__main__":
    main()
