"""How matrix products of one token read weights fastest: all candidates of ggjit.cpu.tuning for every type (rows of a
tile, ways of prefetching; the repacked layout), and what the machine's choice is.

    python -m benchmarks.tuning [--types Q4_0,F16] [-k 2048 5632] [--clock cpu] [--json]
    python -m benchmarks.tuning --keep          # measure all types' choices anew for this machine, as warm-up does

Weights come from memory; the tiles take turns on one thread; medians of the rounds.  A tile whose results differ from
one row's in any byte is marked and could not be chosen.
"""
import argparse
import json

from benchmarks.catalogue import PRODUCT_TYPES
from benchmarks.engines.engine import CLOCKS
from ggjit.cpu import tuning
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul import choices
from ggjit.ops.native import isa

TUNABLE = {t.lower(): BY_NAME[t.lower().replace("_k", "_K")] for t in PRODUCT_TYPES
           if tuning.tunable(BY_NAME[t.lower().replace("_k", "_K")])}
NAMES = (*sorted({str(tile) for type in TUNABLE.values() for tile in choices.candidates(type)}),
         *sorted({choices.layout_name(tile) for type in TUNABLE.values() for tile in choices.layout_candidates(type)}))


def row(type, k, seconds, others):
    """A line of the table."""
    best = min((n for n in seconds if n not in others), key=seconds.get)
    cells = " | ".join(f"{1e6 * seconds[n]:,.0f}{' (other bytes)' * (n in others)}" if n in seconds else "-"
                       for n in NAMES)
    return f"| {type!r} | {k} | {cells} | {best} | {seconds[NAMES[0]] / seconds[best]:.3f} |"


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.tuning", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", type=lambda s: [TUNABLE[t.lower()] for t in s.split(",")], default=list(TUNABLE.values()),
                   help=", ".join(TUNABLE))
    p.add_argument("-k", type=int, nargs="+", default=list(tuning.LENGTHS), help="row lengths")
    p.add_argument("--rounds", type=int, default=tuning.ROUNDS)
    p.add_argument("--clock", choices=CLOCKS, default="wall")
    p.add_argument("--keep", action="store_true", help="measure the machine's choices and keep them")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    if args.keep:
        for type in args.types:
            for choice in tuning.tune([type], again=True).values():
                layout = f", repacked {choice.layout_gain:.3f} x that" if choice.layout_gain else ""
                print(f"{type!r}: {choice.tile} rows, {choice.gain:.3f} x the speed of one row{layout}", flush=True)
        return
    results = []
    if not args.json:
        print(f"| type | k | {', us | '.join(NAMES)}, us | best | 1 / best |\n|{'---|' * (4 + len(NAMES))}")
    for type in args.types:
        for k in args.k:
            seconds, others = tuning.measure(type, lengths=(k,), rounds=args.rounds, now=CLOCKS[args.clock])
            results.append({"type": type.name, "k": k, "isa": isa.ISA, "seconds": seconds, "other_bytes": others})
            if not args.json:
                print(row(type, k, seconds, others), flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
