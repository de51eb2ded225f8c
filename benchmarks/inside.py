"""The cost of looking inside a network: a step in which nothing is captured, and steps with more and more captured
tensors.

    python benchmarks/inside.py [MODEL.gguf] [-r ROUNDS]

Two networks of the same file take turns, one thread each; figures are the least processor time of a step.  `before` has
never been looked into; the other one has, and of it nothing is captured first, then a share of its layers' outputs.
"""
import argparse
import contextlib
import time

from ggjit.models import load_model

SHARES = 0, 1, 4, None          # layers whose outputs are captured; None: all tensors that have a name
N_STEPS = 8                     # of a turn
N_CTX = 256


def step_seconds(m, patterns):
    """Seconds of processor time of a decode step."""
    m.reset()
    with m.capturing(patterns) if patterns else contextlib.nullcontext():
        m.decode([1, 2, 3])
        m.decode([4])                           # plans are made
        start = time.process_time()
        for i in range(N_STEPS):
            m.decode([5 + i])
        return (time.process_time() - start) / N_STEPS


def patterns_of(m, n_layers):
    """None where nothing is captured."""
    n = len(m.description.blocks)
    return "*" if n_layers is None else [f"blk.{i}.l_out" for i in range(min(n_layers, n))] or None


def measure(path, rounds):
    """[(what, tensors, bytes a token, least seconds of a step)]"""
    with load_model(path, n_threads=1, n_ctx=N_CTX, reserve=False) as before, \
            load_model(path, n_threads=1, n_ctx=N_CTX, reserve=False) as m:
        specs = {s.name: s for s in m.names()}
        m.capture("blk.0.l_out", [1, 2, 3])
        rows = [("never looked into", before, None)] + [
            ("nothing captured" if share == 0 else "captured", m, patterns_of(m, share)) for share in SHARES]
        least = [float("inf")] * len(rows)
        for _ in range(rounds):
            for i, (_, network, patterns) in enumerate(rows):
                least[i] = min(least[i], step_seconds(network, patterns))
        out = []
        for (what, _, patterns), seconds in zip(rows, least, strict=True):
            names = list(specs) if patterns == "*" else patterns or []
            out.append((what, len(names), sum(specs[name].row_nbytes(N_CTX) for name in names), seconds))
        return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=None, help="a GGUF (the model that comes with ggjit)")
    parser.add_argument("-r", "--rounds", type=int, default=10)
    args = parser.parse_args()
    rows = measure(args.model, args.rounds)
    base = rows[0][-1]
    print("| step | tensors | bytes a token | ms | times |\n|---|---|---|---|---|")
    for what, n, nbytes, seconds in rows:
        print(f"| {what} | {n} | {nbytes:,} | {1000 * seconds:.3f} | {seconds / base:.3f} |")


if __name__ == "__main__":
    main()
