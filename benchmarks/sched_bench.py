"""Scheduler figures: planning time, replay overhead, bytes copied against ggml's count.

    python benchmarks/sched_bench.py [--quick]

Devices are CPU-backed stand-ins for accelerators with private memory (tests/helpers/devices.py), so every copy is real.

    plan      split + memory layout of 1,000 and 10,000 nodes on 3 devices; cold: nothing known about the devices yet
    replay    what the scheduler adds to an unchanged graph, per split
    copies    bytes per run of a llama graph on 3 devices with a mask and positions that every layer reads
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from helpers import devices  # noqa: E402

import ggjit as gg  # noqa: E402
from ggjit.sched.assignment import Assignment  # noqa: E402
from ggjit.sched.layout import GraphLayout  # noqa: E402

HEAD, N_HEAD, FF, N_TOKENS, N_CTX = 16, 4, 96, 8, 32


def scheduler(**kwargs):
    cpu = gg.init_backend("CPU:n_threads=1")
    return gg.Scheduler([devices.Fake("GPU0").init_backend(), devices.Fake("GPU1").init_backend(), cpu], **kwargs)


def llama(bufts, n_layers):
    """A llama-shaped graph: attention with rope, mask and a KV cache, gated feed-forward; layers spread over bufts."""
    ctx, width, rng = gg.Context(), HEAD * N_HEAD, np.random.default_rng(0)
    inputs = x, mask, pos, rows = [ctx.new_tensor(t, ne, name) for t, ne, name in (
        (gg.F32, (width, N_TOKENS), "x"), (gg.F32, (N_CTX, N_TOKENS), "mask"), (gg.I32, (N_TOKENS,), "pos"),
        (gg.I64, (N_TOKENS,), "rows"))]
    for t in inputs:
        gg.set_input(t)
    owners = {(buft, usage): gg.Context() for buft in bufts for usage in (gg.USAGE_WEIGHTS, gg.USAGE_ANY)}
    with ctx:                                           # results of ops; weights and caches have contexts of their own
        y = x
        for layer in range(n_layers):
            buft = bufts[layer * len(bufts) // n_layers]
            new = lambda ne, u=gg.USAGE_WEIGHTS, k=buft: owners[k, u].new_tensor(gg.F32, ne)     # noqa: E731
            y = one_layer(new, y, mask, pos, rows)
    for (buft, usage), owner in owners.items():         # one buffer for a device's weights, one for its cache
        gg.alloc_ctx_tensors(owner, buft).set_usage(usage)
        for t in owner.tensors:
            t.set(rng.standard_normal(tuple(reversed(t.ne)), dtype=np.float32) * 0.1)
    return gg.Graph(y), inputs


def one_layer(new, y, mask, pos, rows):
    """new(ne) makes a weight, new(ne, USAGE_ANY) a cache."""
    width = HEAD * N_HEAD
    split = lambda t: gg.reshape_3d(t, HEAD, N_HEAD, N_TOKENS)              # noqa: E731
    rope = lambda t: gg.rope_ext(split(t), pos, None, HEAD, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)     # noqa: E731
    h = gg.mul(gg.rms_norm(y, 1e-5), new((width,)))
    q, k, v = (gg.mul_mat(new((width, width)), h) for _ in range(3))
    keys = gg.set_rows(new((width, N_CTX), gg.USAGE_ANY), gg.reshape_2d(rope(k), width, N_TOKENS), rows)
    values = gg.set_rows(new((width, N_CTX), gg.USAGE_ANY), v, rows)
    q = gg.permute(rope(q), 0, 2, 1, 3)
    keys = gg.permute(gg.reshape_3d(keys, HEAD, N_HEAD, N_CTX), 0, 2, 1, 3)
    values = gg.cont(gg.permute(gg.reshape_3d(values, HEAD, N_HEAD, N_CTX), 1, 2, 0, 3))
    p = gg.soft_max_ext(gg.mul_mat(keys, q), mask, HEAD ** -0.5, 0.0)
    o = gg.cont_2d(gg.permute(gg.mul_mat(values, p), 0, 2, 1, 3), width, N_TOKENS)
    y = gg.add(y, gg.mul_mat(new((width, width)), o))
    h = gg.mul(gg.rms_norm(y, 1e-5), new((width,)))
    gate, up = (gg.mul_mat(new((width, FF)), h) for _ in range(2))
    return gg.add(y, gg.mul_mat(new((FF, width)), gg.swiglu_split(gate, up)))


def best(f, n):
    times = []
    for _ in range(n):
        t0 = time.perf_counter()
        f()
        times.append(time.perf_counter() - t0)
    return min(times), statistics.median(times)


def plan_time(n_nodes, repeats):
    """(cold, best warm, median warm) seconds for split + layout."""
    sched = scheduler()
    n_layers = max(n_nodes // 33, 3)
    graph, _ = llama(sched.support.own_bufts, n_layers)

    def plan():
        return GraphLayout(Assignment(sched.support, graph, {}, {}), "ggml", sched.time_limit)
    t0 = time.perf_counter()
    plan()
    return len(graph), time.perf_counter() - t0, *best(plan, repeats)


def set_inputs(inputs):
    x, mask, pos, rows = inputs
    x.set(np.random.default_rng(1).standard_normal((N_TOKENS, HEAD * N_HEAD), dtype=np.float32))
    mask.set(np.triu(np.full((N_TOKENS, N_CTX), -np.inf, np.float32), 1))
    pos.set(np.arange(N_TOKENS))
    rows.set(np.arange(N_TOKENS))


def replay_overhead(repeats):
    """(splits, seconds per run, seconds per split the scheduler adds to running the parts' plans)"""
    sched = scheduler()
    graph, inputs = llama(sched.support.own_bufts, 12)
    sched.alloc_graph(graph)
    set_inputs(inputs)
    sched.graph_compute(graph)
    parts = sched._run.parts[0]
    plans = [plan for p in parts for plan in p.graph.plans.plans()]

    def bare():
        for p in plans:
            p.compute()
    for _ in range(20):
        bare()
        sched.graph_compute(graph)
    pairs = [(best(lambda: sched.graph_compute(graph), 5)[0], best(bare, 5)[0]) for _ in range(repeats)]
    whole, alone = min(p[0] for p in pairs), min(p[1] for p in pairs)
    return len(parts), whole, (whole - alone) / len(parts)


def copy_bytes():
    """Bytes per run: first run, unchanged replay, new token input, and ggml's count for every run."""
    sched = scheduler()
    graph, inputs = llama(sched.support.own_bufts, 12)
    sched.alloc_graph(graph)
    set_inputs(inputs)
    found = {"splits": 0, "inputs_nbytes": {t.name: t.nbytes for t in inputs}}
    sched.graph_compute(graph)
    found["first"] = sched.copied_nbytes
    sched.graph_compute(graph)
    found["replay"] = sched.copied_nbytes
    inputs[0].set(np.zeros((N_TOKENS, HEAD * N_HEAD), np.float32))
    sched.graph_compute(graph)
    found["new_x"] = sched.copied_nbytes
    found["ggml_every_run"], found["splits"] = sched._assigned.listed_nbytes, sched.n_splits
    moving = scheduler(motion=True)
    moved, inputs_m = llama(moving.support.own_bufts, 12)
    moving.alloc_graph(moved)
    set_inputs(inputs_m)
    for _ in range(2):
        moving.graph_compute(moved)
    found["replay_with_motion"] = moving.copied_nbytes
    found["copies_of_inputs"] = {t.name: sum(c["tensor"] == t.name for c in sched.explain().copies) for t in inputs}
    return found


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args()
    repeats = 5 if args.quick else 30
    plans = [plan_time(n, repeats) for n in (1000, 10000)]
    splits, run, added = replay_overhead(3 if args.quick else 10)
    copies = copy_bytes()
    if args.json:
        print(json.dumps({"plan": [dict(zip(("nodes", "cold", "best", "median"), p, strict=True)) for p in plans],
                          "replay": {"splits": splits, "seconds": run, "added_per_split": added}, "copies": copies}))
        return
    for (n, cold, fastest, median), target in zip(plans, (1.0, 10.0), strict=True):
        print(f"split + layout, {n:6d} nodes, 3 devices: best {fastest * 1e3:6.2f} ms, median {median * 1e3:6.2f} ms, "
              f"cold {cold * 1e3:8.2f} ms   (target {target:.0f} ms warm)")
    print(f"replay: {splits} splits, {run * 1e6:.0f} us, of which the scheduler adds {added * 1e6:.1f} us per split   "
          f"(target 20 us)")
    print(f"bytes copied per run, {copies['splits']} splits: first {copies['first']:,}, unchanged "
          f"{copies['replay']:,} (motion=True: {copies['replay_with_motion']:,}), new x {copies['new_x']:,}; "
          f"ggml copies {copies['ggml_every_run']:,} every run")
    print(f"copies per input: {copies['copies_of_inputs']} (each device that reads it: once)")


if __name__ == "__main__":
    main()
