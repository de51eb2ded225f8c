"""Are weights in the layout of CPU_REPACK faster?  The same product over the file's blocks and over repacked ones.

    python -m benchmarks.repack [--type Q4_0] [-n 1 8 128] [-t 2] [--json]

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
from ggjit.ops.matmul import repack
from ggjit.ops.native import isa

TYPES = tuple(repack.LAYOUTS)
SHAPES = ((2048, 2048), (2048, 5632), (5632, 2048), (4096, 4096))
CYCLE_NBYTES = 400 << 20


def buffer_types(cpu):
    """{"file": ..., "repacked": ...}"""
    extra = {b.name: b for b in cpu.device.extra_buffer_types()}
    return {"file": cpu.device.buffer_type(), "repacked": extra["CPU_REPACK"]}


def plans(cpu, buft, type, raw, k, m, x, n_copies):
    """Plans of one product each, over copies of the weights in `buft`."""
    ctx, made = gg.Context(), []
    b = gg.from_numpy(ctx, x)
    for _ in range(n_copies):
        w = ctx.new_tensor(type, (k, m))
        gg.alloc_ctx_tensors(ctx, buft)
        w.set_bytes(raw)
        graph = gg.Graph(gg.mul_mat(w, b))
        gg.GraphAllocator(cpu).alloc_graph(graph)
        made.append(cpu.graph_plan_create(graph))
    return made


def measure(type, k, m, n, n_threads, rounds):
    """{"file": seconds, "repacked": seconds} of one product."""
    cpu, rng = gg.init_backend("CPU", n_threads=n_threads), np.random.default_rng(0)
    raw = gg.quantize(type, rng.standard_normal((m, k), np.float32)).tobytes()
    x = rng.standard_normal((n, k)).astype(np.float32)
    n_copies = max(2, CYCLE_NBYTES // len(raw)) if n < 16 else 2
    made = {name: plans(cpu, b, type, raw, k, m, x, n_copies) for name, b in buffer_types(cpu).items()}
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
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    if not TYPES:
        p.error(f"no type has a layout with {isa.ISA}")
    results = []
    for type in TYPES if args.type is None else (getattr(gg, args.type),):
        for n in args.n:
            for k, m in SHAPES if n == 1 else SHAPES[1:3]:
                t = measure(type, k, m, n, args.t, args.rounds)
                results.append({"type": type.name, "k": k, "m": m, "n": n, "threads": args.t, **t})
                if not args.json:
                    print(f"| {type!r} | {k} x {m} | {n} | {args.t} | {1e6 * t['file']:.0f} | "
                          f"{1e6 * t['repacked']:.0f} | {t['file'] / t['repacked']:.2f} |", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
