"""A profile of a model: every kind of node, its share of the time, and how near it comes to the machine's limits.

    python -m benchmarks.profile MODEL.gguf                 # decode one token; encoders: a text of 64
    python -m benchmarks.profile MODEL.gguf -p 128          # a prompt of 128 tokens
    python -m benchmarks.profile tinyllama-1.1b:Q4_0        # a synthetic model (benchmarks/synth.py)

Nodes run one by one, the median of several runs each; of small plans, ever longer beginnings are run and
the differences taken.  The whole plan's time stands beside the sum.
"""
import argparse
import collections
import itertools
import pathlib
import statistics
import time

from benchmarks import machine, synth
from benchmarks.engines.engine import CLOCKS
from ggjit.models import load_model
from ggjit.ops.core.spec import flops, moved_nbytes
from ggjit.profiling.machine_limits import peak_f32, read_bandwidth
from ggjit.profiling.nodes import kind

SMALL_SECONDS = 1e-3


def node_times(plan, reps, now):
    """[(tensor, kernel name, seconds)] by the clock `now`."""
    small = best_time(plan.compute, 5, now) < SMALL_SECONDS
    seconds = _by_prefix(plan, now) if small else _one_by_one(plan, reps, now)
    return list(zip(plan.nodes, (k.name for k in plan.kernels), seconds, strict=True))


def _one_by_one(plan, reps, now):
    """Medians, less what it costs to call one node."""
    call = best_time(lambda: plan.run_nodes(0, 0), 200, now)
    runs = [[once(lambda i=i: plan.run_nodes(i, i + 1), now) for i in range(len(plan.nodes))] for _ in range(reps)]
    return [max(0.0, statistics.median(node) - call) for node in zip(*runs, strict=True)]


def _by_prefix(plan, now):
    """Differences of the best times of nodes 0..i: alone, a node of a microsecond would mostly measure cold caches."""
    best = [best_time(lambda i=i: plan.run_nodes(0, i), 200, now) for i in range(len(plan.nodes) + 1)]
    return [b - a for a, b in itertools.pairwise(itertools.accumulate(best, max))]


def once(work, now):
    t0 = now()
    work()
    return now() - t0


def best_time(work, reps, now):
    return min(once(work, now) for _ in range(reps))


def table(nodes, bandwidth, peak):
    """Lines: kinds of nodes, slowest first."""
    kinds = collections.defaultdict(lambda: [0, 0.0, 0, 0])
    for t, kernel, seconds in nodes:
        for i, x in enumerate((1, seconds, moved_nbytes(t), flops(t))):
            kinds[kind(t, kernel)][i] += x
    total = sum(k[1] for k in kinds.values()) or 1e-9
    yield f"{'%':>6} {'us':>10} {'nodes':>5} {'us each':>9} {'GB/s':>6} {'% bw':>5} {'GFLOP/s':>8} {'% peak':>6}  kind"
    for name, (n, seconds, nbytes, n_flops) in sorted(kinds.items(), key=lambda k: -k[1][1]):
        bw, speed = nbytes / max(seconds, 1e-9), n_flops / max(seconds, 1e-9)
        yield (f"{100 * seconds / total:6.1f} {1e6 * seconds:10.1f} {n:5d} {1e6 * seconds / n:9.2f} {bw / 1e9:6.1f} "
               f"{100 * bw / bandwidth:5.0f} {speed / 1e9:8.1f} {100 * speed / peak:6.0f}  {name}")
    yield f"{'':6} {1e6 * total:10.1f} {len(nodes):5d}{'':10}sum over nodes"


def median_time(work, now, seconds=1.0):
    work()
    end, out = time.perf_counter() + seconds, []
    while time.perf_counter() < end or len(out) < 3:
        out.append(once(work, now))
    return statistics.median(out)


def prepare(m, n_prompt):
    """(step that was just run, a function that runs it the way a user does)"""
    if not hasattr(m, "decode"):
        ids = [1000 + i for i in range(n_prompt or 64)]
        m.embed_ids(ids)
        return m._step((len(ids),)), lambda: m.embed_ids(ids)
    ids = [i % m.n_vocab for i in range(n_prompt or 64)]
    m.reset()
    m.decode(ids)
    past = 0 if n_prompt else len(ids)
    batch = ids if n_prompt else ids[:1]

    def work():
        m.text.ids[:] = [0] * past
        m.decode(batch)
    work()
    return m._step((len(batch), m.cells.rounded(past + len(batch)), 1, False, 1)), work


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.profile", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a GGUF file, or SHAPE:TYPE of a synthetic model")
    p.add_argument("-p", type=int, default=0, metavar="N", help="a prompt of N tokens (default: decode one token)")
    p.add_argument("-t", type=int, default=1, metavar="N", help="threads (1)")
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where the machine is not idle")
    args = p.parse_args(argv)
    now = CLOCKS[args.clock]
    path, (shape, _, type) = args.model, args.model.partition(":")
    if shape in synth.SHAPES and type in synth.TYPES:
        path = synth.model_path(shape, type)
    elif not pathlib.Path(path).exists():
        p.error(f"{path} is neither a file nor SHAPE:TYPE; shapes: {', '.join(synth.SHAPES)}; types: "
                f"{', '.join(synth.TYPES)}")
    print(machine.idle_check("before", 0.5))
    bandwidth, peak = read_bandwidth(1, 0.3, now), peak_f32(now=now)
    print(f"one core reads {bandwidth / 1e9:.1f} GB/s, computes {peak / 1e9:.0f} GFLOP/s in float32")
    m = load_model(path, n_threads=args.t)
    step, work = prepare(m, args.p)
    nodes = node_times(step.plan, args.reps, now)
    print(f"\n{path}, {f'prompt of {args.p}' if args.p else 'one step'}, {args.t} thread(s)")
    print("\n".join(table(nodes, bandwidth, peak)))
    whole, replay = median_time(work, now), median_time(step.plan.compute, now)
    print(f"{'':6} {1e6 * replay:10.1f}{'':16}the plan replayed\n{'':6} {1e6 * whole:10.1f}{'':16}the whole call, "
          f"{1e6 * (whole - replay):.1f} us of it Python")
    print(machine.idle_check("after", 0.5))


if __name__ == "__main__":
    main()
