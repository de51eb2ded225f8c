"""Would register tiles tuned per machine be faster?  Tiles of the dot kernels with equal bytes, against the fixed rule.

    python -m benchmarks.tuning [--type Q4_0] [--json]

A tile is rows x columns x unroll.  Another unroll sums in another order, so only rows and columns may vary freely: a
row's sum does not depend on its neighbours.  Weights come from memory; the variants take turns; processor time of one
thread, medians.  Tiles whose results differ from the rule's in any byte are named: they could not be chosen.
"""
import argparse
import json
import statistics
import time

import numpy as np

import ggjit as gg
from ggjit.ops import isa, mul_mat

TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K")
ROWS = (1, 2, 4)
SHAPES = ((2048, 5632), (8192, 2048))
CYCLE_NBYTES = 200 << 20


def variants(type, k, m, n):
    """Tiles with the rule's columns and unroll; the rule's own tile first."""
    from ggjit.ops.types.traits import traits_of
    rule = mul_mat.dot_shape(traits_of(type).dot, k, m, n)
    return [rule] + [(r, *rule[1:]) for r in ROWS if r != rule[0]]


def plans(cpu, tile, weights, x):
    """One product a copy of the weights, all with `tile`."""
    usual, mul_mat.dot_shape = mul_mat.dot_shape, lambda *shape: tile
    try:
        made = []
        for w in weights:
            graph = gg.Graph(gg.mul_mat(w, x))
            gg.GraphAllocator(cpu).alloc_graph(graph)
            made.append(cpu.graph_plan_create(graph))
        return made
    finally:
        mul_mat.dot_shape = usual


def measure(type, k, m, n, rounds):
    """({tile: seconds}, tiles with other bytes than the rule's)"""
    cpu, ctx, rng = gg.init_backend("CPU", n_threads=1), gg.Context(), np.random.default_rng(0)
    raw = gg.quantize(type, rng.standard_normal((m, k), np.float32)) if type.quantized else None
    values = rng.standard_normal((m, k), np.float32) if raw is None else None
    weights = []
    for _ in range(max(2, CYCLE_NBYTES // (m * type.row_nbytes(k)))):
        w = ctx.new_tensor(type, (k, m))
        gg.alloc_ctx_tensors(ctx, cpu)
        w.set(values) if raw is None else w.set_bytes(raw.tobytes())
        weights.append(w)
    x = gg.from_numpy(ctx, rng.standard_normal((n, k)).astype(np.float32))
    made = {tile: plans(cpu, tile, weights, x) for tile in variants(type, k, m, n)}
    answers = {}
    for tile, group in made.items():
        group[0].compute()
        answers[tile] = group[0].numpy(group[0].nodes[-1]).tobytes()
    want = next(iter(answers.values()))
    times = {tile: [] for tile in made}
    for _ in range(rounds):
        for tile, group in made.items():
            t0 = time.process_time()
            for plan in group:
                plan.compute()
            times[tile].append((time.process_time() - t0) / len(group))
    return ({tile: statistics.median(t) for tile, t in times.items()},
            [tile for tile, got in answers.items() if got != want])


def _name(tile):
    return "x".join(map(str, tile))


def main(argv=None):
    p = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--type", choices=TYPES)
    p.add_argument("-n", type=int, nargs="+", default=[1, 4], help="columns")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    results = []
    for name in TYPES if args.type is None else (args.type,):
        for k, m in SHAPES:
            for n in args.n:
                t, others = measure(getattr(gg, name), k, m, n, args.rounds)
                rule = next(iter(t))
                best = min((tile for tile in t if tile not in others), key=t.get)
                results.append({"type": name, "k": k, "m": m, "n": n, "isa": isa.ISA,
                                "tiles": {_name(tile): s for tile, s in t.items()},
                                "other_bytes": [_name(tile) for tile in others]})
                if not args.json:
                    cells = ", ".join(f"{_name(tile)} {1e6 * s:.0f}{' (other bytes)' * (tile in others)}"
                                      for tile, s in t.items())
                    print(f"| {name} | {k} x {m} | {n} | {cells} | {t[rule] / t[best]:.3f} |", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
