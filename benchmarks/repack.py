"""Matrix products over repacked weights (CPU_REPACK) beside the same over weights as in the file.

    python -m benchmarks.repack [--type Q4_0] [-n 1 8 128] [-t 2] [--json]
    python -m benchmarks.repack --experts 32 [--used 8] ...   mul_mat_id: n tokens that use so many experts each

Weights are cycled over more memory than the last-level cache serves fast (many columns: over two copies); the two take
turns; each figure is the median of several rounds: processor time of one thread, wall time of more.  Results of both
are compared first.
"""
import argparse
import json
import statistics
import time

import numpy as np

import ggjit as gg
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa

TYPES = tuple(repack.LAYOUTS)
SHAPES = ((2048, 2048), (2048, 5632), (5632, 2048), (4096, 4096))
EXPERT_SHAPES = ((2048, 1024), (1024, 2048))
CYCLE_NBYTES = 400 << 20


def buffer_types(cpu):
    """{"file": ..., "repacked": ...}"""
    extra = {b.name: b for b in cpu.device.extra_buffer_types()}
    return {"file": cpu.device.buffer_type(), "repacked": extra["CPU_REPACK"]}


def plans(cpu, buft, weights, raw, product, n_copies):
    """Plans of one product each, over copies of the weights, (type, shape), in `buft`; product(ctx, w) builds it."""
    ctx, made = gg.Context(), []
    for _ in range(n_copies):
        w = ctx.new_tensor(*weights)
        gg.alloc_ctx_tensors(ctx, buft)
        w.set_bytes(raw)
        graph = gg.Graph(product(ctx, w))
        gg.GraphAllocator(cpu).alloc_graph(graph)
        made.append(cpu.graph_plan_create(graph))
    return made


def products(rng, k, n, experts, used):
    """product(ctx, w) of `plans`: n columns, or n tokens with `used` of the experts each."""
    if not experts:
        x = rng.standard_normal((n, k)).astype(np.float32)
        return lambda ctx, w: gg.mul_mat(w, gg.from_numpy(ctx, x))
    x = rng.standard_normal((n, 1, k)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32)
    return lambda ctx, w: gg.mul_mat_id(w, gg.from_numpy(ctx, x), gg.from_numpy(ctx, ids))


def measure(type, k, m, n, n_threads, rounds, experts=0, used=0):
    """{"file": seconds, "repacked": seconds} of one product."""
    cpu, rng = gg.init_backend("CPU", n_threads=n_threads), np.random.default_rng(0)
    raw = gg.quantize(type, rng.standard_normal((experts or 1, m, k), np.float32)).tobytes()
    n_copies = max(2, CYCLE_NBYTES // len(raw)) if n < 16 else 2
    product, weights = products(rng, k, n, experts, used), (type, (k, m, experts or 1))
    made = {name: plans(cpu, b, weights, raw, product, n_copies) for name, b in buffer_types(cpu).items()}
    now, times, results = time.process_time if n_threads == 1 else time.perf_counter, {name: [] for name in made}, []
    for group in made.values():
        group[0].compute()
        results.append(group[0].numpy(group[0].nodes[-1]))
    assert np.square(results[0] - results[1]).sum() <= 1e-10 * np.square(results[0]).sum(), "the layouts disagree"
    for _ in range(rounds):
        for name, group in made.items():
            t0 = now()
            for plan in group:
                plan.compute()
            times[name].append((now() - t0) / n_copies)
    return {name: statistics.median(t) for name, t in times.items()}


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.repack", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--type", choices=[t.name.upper() for t in TYPES])
    p.add_argument("-n", type=int, nargs="+", default=[1, 4, 8, 128], help="columns")
    p.add_argument("-t", type=int, default=1, help="threads")
    p.add_argument("--experts", type=int, default=0, help="matrices of a mixture; 0: one matrix")
    p.add_argument("--used", type=int, default=8, help="experts a token uses")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    if not TYPES:
        p.error(f"no type has a layout with {isa.ISA}")
    if args.experts < 0 or args.experts and not 1 <= args.used <= args.experts:
        p.error(f"--experts {args.experts} --used {args.used}: a token uses 1 to all of the experts")
    types = TYPES if args.type is None else (getattr(gg, args.type),)
    results = []
    for type in [t for t in types if not args.experts or t.quantized]:
        for n in args.n:
            for k, m in EXPERT_SHAPES if args.experts else SHAPES if n == 1 else SHAPES[1:3]:
                t = measure(type, k, m, n, args.t, args.rounds, args.experts, args.used)
                results.append({"type": type.name, "k": k, "m": m, "n": n, "threads": args.t, "experts": args.experts,
                                **t})
                if not args.json:
                    print(f"| {type!r} | {k} x {m} | {n} | {args.t} | {1e6 * t['file']:.0f} | "
                          f"{1e6 * t['repacked']:.0f} | {t['file'] / t['repacked']:.2f} |", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
