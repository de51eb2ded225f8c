"""The same calls of builders on every instruction set, values that are not finite among them.

    cd tests; python -m campaign.levels --first 0 --cases 2000

A process for each level computes cases by number and notes the results; the parent compares them with the first
level's.  Two results are alike if they hold NaN and infinities in the same places and differ elsewhere by rounding:
MAX_NMSE of the whole, and no value by more than FAR of the largest.
"""
import argparse
import collections
import os
import pickle
import subprocess
import sys
import tempfile

import numpy as np

import ggjit as gg
from campaign import calls
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import OP
from ggjit.ops.native import isa

SSE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2,+cx16,+sahf,+popcnt,+sse3,+ssse3,+sse4.1,+sse4.2"
LEVELS = {"generic, SSE": {"GGJIT_CPU": "generic", "NUMBA_CPU_FEATURES": SSE},
          "generic, AVX": {"GGJIT_CPU": "generic", "NUMBA_CPU_FEATURES": SSE + ",+avx,+xsave"},
          "avx2": {"GGJIT_CPU": "avx2"}, "avx512": {"GGJIT_CPU": "avx512"}}
MAX_NMSE, FAR = 5e-4, 0.05
SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-40], np.float32)
LARGEST = 1 << 13                       # elements of a tensor: many cases rather than large ones


# ---------------------------------------------------------------- a level's process
def _values(rng, t, specials):
    a = rng.standard_normal(t.shape).astype(np.float32)
    if specials and a.size:
        n = max(1, a.size // 100)
        a.reshape(-1)[rng.integers(a.size, size=n)] = rng.choice(SPECIALS, n)
    return a


def _fill(rng, graph, specials):
    """Other values than builder_calls gives: normal ones, blocks of such, and now and then special ones."""
    for t in {x.base.id: x.base for x in graph.leafs}.values():
        if t.type.block > 1:
            a = rng.standard_normal((t.nrows, t.ne[0])).astype(np.float32)
            t.set_bytes(gg.quantize(t.type, a, np.ones(t.ne[0])).tobytes())
        elif t.type.dtype is None or t.type.dtype.kind == "f":
            t.set(_values(rng, t, specials))


def result(number):
    """(builder and arguments, with special values?, result or None) of a case."""
    rng = np.random.default_rng([7, number])
    name = calls.names()[int(rng.integers(len(calls.names())))]
    some = calls.calls()[name]
    args = list(some[int(rng.integers(len(some)))])
    for _ in range(int(rng.integers(3)) if args else 0):
        i = int(rng.integers(len(args)))
        args[i] = calls.changed(args[i], *calls.change(rng))
    told, specials = f"{name}{args}", bool(rng.random() < 0.3)
    try:
        out = calls.build(name, args, int(rng.integers(10)))
        return told, specials, _computed(rng, out, specials) if isinstance(out, gg.Tensor) else None
    except GgjitError:
        return told, specials, None


def _computed(rng, out, specials):
    graph = gg.Graph(out)
    nodes = [t for t in graph.nodes if t.op not in calls.VIEW_OPS]
    if max(np.prod(t.ne, dtype=float) for t in (*graph.nodes, *graph.leafs)) > LARGEST or not min(out.ne) or any(
            t.op in (*calls.USERS, OP.ACC, OP.SET) for t in nodes):
        return None
    if not calls.kernels_of(graph) <= calls.known_kernels():
        return None
    _fill(rng, graph, specials)
    return np.asarray(gg.compute(out, backend=calls.cpu()), np.float64)


def serve(first, n, path):
    done = {}
    for number in range(first, first + n):
        done[number] = result(number)
    with open(path, "wb") as f:
        pickle.dump((isa.LEVEL, done), f)


# ---------------------------------------------------------------- parent
def outputs(level, first, n):
    """{number: what `result` gives} of a level."""
    with tempfile.NamedTemporaryFile() as f:
        subprocess.run([sys.executable, "-m", "campaign.levels", "--child", str(first), str(n), f.name], check=True,
                       env={**os.environ, **LEVELS[level]})
        return pickle.load(f)[1]


def difference(a, b):
    """"" where two results are alike, else in what they differ."""
    if a.shape != b.shape:
        return "shape"
    for what, f in (("NaN", np.isnan), ("infinities", np.isinf)):
        if (f(a) != f(b)).any():
            return f"{what} in {int((f(a) != f(b)).sum())} other places"
    finite = np.isfinite(a)
    a, b = a[finite], b[finite]
    size = np.abs(a).max(initial=0.0)
    if not size:
        return "" if not b.any() else f"{np.abs(b).max()} for zeros"
    far = np.abs(a / size - b / size).max()
    nmse = np.square(a / size - b / size).sum() / np.square(a / size).sum()
    return f"by {far:.2g} of the largest value" if far > FAR or nmse > MAX_NMSE else ""


def compared(first, n, levels=tuple(LEVELS)):
    """(Counter, [(number, level, specials?, difference, call)])"""
    base, *others = levels
    want, counts, finds = outputs(base, first, n), collections.Counter(), []
    for level in others:
        for number, (told, specials, got) in outputs(level, first, n).items():
            ours = want[number][2]
            if (ours is None) != (got is None):
                finds.append((number, level, specials, "refused by one", told))
            elif got is not None:
                counts[level] += 1
                what = difference(ours, got)
                if what:
                    finds.append((number, level, specials, what, told))
    return counts, finds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--child", nargs=3, metavar=("FIRST", "CASES", "FILE"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    args = parser.parse_args()
    if args.child:
        serve(int(args.child[0]), int(args.child[1]), args.child[2])
        return
    counts, finds = compared(args.first, args.cases, args.levels)
    print(dict(counts))
    for find in finds:
        print(*find, sep=" | ")


if __name__ == "__main__":
    main()
