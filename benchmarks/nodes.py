"""What stands between the nodes: processor time and memory of building, planning and replaying, for each node.

    python -m benchmarks.nodes [--only build,plan,...] [--rounds N]

    build       `gg.` calls that make the nodes of a llama-shaped graph
    graph       gg.Graph: the order of the nodes
    place       GraphAllocator.alloc_graph
    plan        the plan of the placed graph, nothing known of its nodes before
    memory      bytes that nodes, graph, placement and plan hold
    prompt      a prompt of a length that was not seen before, computing left out
    token       Python around a decode step
    split       split and layout on three devices, and a replayed split

Each figure is the smallest of several rounds, in processor time.
"""
import argparse
import gc
import time
import tracemalloc

import ggjit as gg
from benchmarks import sched_bench, synth
from ggjit.models import load_model

N_LAYERS = 30
HEAD, N_HEAD, FF, N_TOKENS, N_CTX = 16, 4, 96, 8, 32


def least(work, rounds, before=lambda: ()):
    """The least processor seconds of work(*before())."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            args = before()
            t0 = time.process_time()
            kept = work(*args)
            found.append(time.process_time() - t0)
            del kept, args
            gc.collect(0)
    finally:
        gc.enable()
    return min(found)


class Llama:
    """Weights and inputs of a llama-shaped graph on the CPU."""

    def __init__(self, n_layers=N_LAYERS):
        self.cpu, self.leaves = gg.init_backend("CPU:n_threads=1"), gg.Context()
        self.n_layers, self.weights, self.width = n_layers, [], HEAD * N_HEAD
        new = self.leaves.new_tensor
        self.inputs = [new(t, ne, name) for t, ne, name in (
            (gg.F32, (self.width, N_TOKENS), "x"), (gg.F32, (N_CTX, N_TOKENS), "mask"), (gg.I32, (N_TOKENS,), "pos"),
            (gg.I64, (N_TOKENS,), "rows"))]
        self.build(self._made)
        gg.alloc_ctx_tensors(self.leaves, self.cpu)

    def _made(self, ne, usage=None):
        self.weights.append(self.leaves.new_tensor(gg.F32, ne))
        return self.weights[-1]

    def build(self, new=None):
        """The result, of nodes in a context of their own."""
        weights = iter(self.weights)
        with gg.Context():
            y = self.inputs[0]
            for _ in range(self.n_layers):
                y = sched_bench.one_layer(new or (lambda ne, usage=None: next(weights)), y, *self.inputs[1:])
        return y

    def placed(self):
        graph, allocator = gg.Graph(self.build()), gg.GraphAllocator(self.cpu)
        allocator.alloc_graph(graph)
        return graph, allocator


def steps_of_a_plan(rounds):
    """{name: microseconds a node}"""
    net = Llama()
    n = len(net.placed()[0])
    one = {"build": least(net.build, rounds),
           "graph": least(gg.Graph, rounds, lambda: (net.build(),)),
           "place": least(lambda graph: gg.GraphAllocator(net.cpu).alloc_graph(graph), rounds,
                          lambda: (gg.Graph(net.build()),)),
           "plan": least(lambda graph, _: net.cpu.graph_plan_create(graph), rounds, net.placed)}
    return n, {name: 1e6 * seconds / n for name, seconds in one.items()}


def memory():
    """{name: bytes a node}"""
    net, out = Llama(), {}
    net.cpu.graph_plan_create(net.placed()[0])
    gc.collect()
    tracemalloc.start()
    try:
        kept, last = [], 0
        for name, make in (("nodes", lambda: net.build()), ("graph", lambda: gg.Graph(kept[-1])),
                           ("placement", lambda: _allocated(net, kept[-1])),
                           ("plan", lambda: net.cpu.graph_plan_create(kept[1]))):
            kept.append(make())
            gc.collect()
            now = tracemalloc.get_traced_memory()[0]
            out[name], last = now - last, now
    finally:
        tracemalloc.stop()
    n = len(kept[1])
    out["rows of the table"] = 320 * n
    return {name: nbytes / n for name, nbytes in out.items()}


def _allocated(net, graph):
    allocator = gg.GraphAllocator(net.cpu)
    allocator.alloc_graph(graph)
    return allocator


def prompt(rounds, shape="smollm-135m"):
    """(nodes, seconds without computing) of a prompt of a new length."""
    with load_model(synth.model_path(shape, "Q4_0"), n_threads=1, n_ctx=256) as m:
        lengths = iter(range(65, 65 + 2 * rounds))

        def step():
            return (next(lengths), m.cells.rounded(128), 1, False, 1)
        m._step(step())
        seconds = least(lambda shape: m._step(shape), rounds, lambda: (step(),))
        return len(m._step(step()).plan.graph.nodes), seconds


def token(rounds, path=None):
    """Seconds of Python around a decode step: the step with a plan that computes nothing."""
    with load_model(path or synth.model_path("smollm-135m", "Q4_0"), n_threads=1, n_ctx=256) as m:
        def work():
            for _ in range(50):
                m.text.ids[:] = [0] * 8
                m.decode([1])
        m.decode([1] * 8)
        m.decode([1])
        m._step((1, m.cells.rounded(9), 1, False, 1)).plan.compute = lambda: None
        return least(work, rounds) / 50


PARTS = "plan", "memory", "prompt", "token", "split"


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--rounds", type=int, default=10)
    args = p.parse_args()
    only = args.only.split(",")
    if "plan" in only:
        n, figures = steps_of_a_plan(args.rounds)
        print(f"{n} nodes, us a node: " + ", ".join(f"{name} {us:.1f}" for name, us in figures.items()))
    if "memory" in only:
        found = memory()
        print("bytes a node: " + ", ".join(f"{name} {b:.0f}" for name, b in found.items())
              + f"; sum {sum(found.values()):.0f}")
    if "prompt" in only:
        n, seconds = prompt(args.rounds)
        print(f"a prompt of a new length, {n} nodes: {1e3 * seconds:.1f} ms")
    if "token" in only:
        print(f"Python around a token: {1e6 * token(args.rounds):.1f} us")
    if "split" in only:
        n, _, best, _ = sched_bench.plan_time(960, args.rounds)
        print(f"split + layout of {n} nodes on three devices: {1e3 * best:.2f} ms; a replayed split: "
              f"{1e6 * sched_bench.replay_overhead(args.rounds)[2]:.1f} us")


if __name__ == "__main__":
    main()
