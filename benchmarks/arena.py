"""A prompt within an arena: bytes against time.    python -m benchmarks.arena [--tokens N ...] [--picture FILE]

For each network a text of N tokens is read without a limit, then in arenas of shares of what that took: tokens at once,
what else was done, bytes of the arena, processor time of a reading (of one thread, the least of three, all arenas by
turns), and whether every bit of the result is the same.  SmolLM2 and MiniLM where their packages are installed, else
the model that comes with ggjit.
"""
import argparse
import time

import ggjit as gg
from ggjit.models import smollm2_path
from ggjit.models.files.minilm import minilm_path


def networks(tokens):
    """{name: (path, number of tokens)}"""
    smollm2, found = smollm2_path(missing_ok=True), {}
    for n in tokens:
        found[f"{'SmolLM2' if smollm2 else 'the small model'}, {n} tokens"] = smollm2 and str(smollm2), n
    try:
        found["MiniLM, 512 tokens"] = str(minilm_path(progress=False)), 512
    except gg.GgjitError as e:
        print(f"no MiniLM: {e}")
    return found


def rows(name, found):
    for p in found:
        share = "no limit" if p.share is None else f"{p.share:.0%}"
        if p.seconds is None:
            yield name, share, "", f"the least is {p.nbytes / 2**20:.2f} MiB", "", "", ""
        else:
            yield (name, share, f"{p.nbytes / 2**20:.2f}", p.how, f"{p.seconds:.3f}",
                   f"{p.seconds / found[0].seconds - 1:+.1%}", "all" if p.same_bits else "NOT ALL")


def picture(path, results):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, found in results.items():
        points = sorted((p.nbytes / found[0].nbytes, p.seconds / found[0].seconds - 1) for p in found
                        if p.seconds is not None and p.share is not None)
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
    for name, (path, n) in networks(args.tokens).items():
        results[name] = gg.pareto(path, n, clock=time.process_time, n_threads=1)
        for row in rows(name, results[name]):
            print("| " + " | ".join(row) + " |", flush=True)
    if args.picture:
        picture(args.picture, results)


if __name__ == "__main__":
    main()
