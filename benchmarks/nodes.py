"""The engine's cost for each node: processor time and memory of building, planning and replaying.

    python -m benchmarks.nodes [--only plan,memory,...] [--rounds N]         a minute; targets in brackets

    build       `gg.` calls that make the nodes of a llama-shaped graph
    graph       gg.Graph: the order of the nodes
    place       GraphAllocator.alloc_graph
    plan        the plan of the placed graph, nothing known of its nodes before
    memory      bytes that nodes, graph, placement and plan hold
    prompt      a prompt of a length that was not seen before, computing left out
    token       Python around a decode step
    split       split and layout on three devices, and a replayed split
    profile     how much longer tokens of stories260K take inside gg.profile()

Each figure is the smallest of several rounds, in processor time; of split and replay in time that passed.
"""
import argparse
import gc
import itertools
import time
import tracemalloc

import ggjit as gg
from benchmarks import sched_bench, synth
from benchmarks.catalogue import STORIES
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
        lengths = itertools.count(65)

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


def profile_overhead(rounds, n_tokens=32):
    """(seconds of a token, of a token inside gg.profile()): decoding stories260K, taken in turns."""
    with load_model(STORIES(), n_threads=1, n_ctx=64) as m:
        def work():
            m.text.ids[:] = [0] * 8
            for _ in range(n_tokens):
                m.decode([1])

        def seconds():
            work()                          # the first run in a profile makes the trace buffers of its plans
            t0 = time.process_time()
            work()
            return (time.process_time() - t0) / n_tokens
        m.decode([1] * 8)
        plain, inside = [], []
        for _ in range(24 * rounds):
            plain.append(seconds())
            with gg.profile():
                inside.append(seconds())
    return min(plain), min(inside)


# what is shown of each part, with its target
def show_plan(rounds):
    n, us = steps_of_a_plan(rounds)
    return (f"{n} nodes, us a node: build {us['build']:.1f} (5), graph {us['graph']:.1f}, place {us['place']:.1f}, "
            f"plan {us['plan']:.1f} (10)")


def show_memory(rounds):
    found = memory()
    return ("bytes a node: " + ", ".join(f"{name} {b:.0f}" for name, b in found.items())
            + f"; sum {sum(found.values()):.0f} (2,048)")


def show_prompt(rounds):
    n, seconds = prompt(rounds)
    return f"a prompt of a new length, {n} nodes: {1e3 * seconds:.1f} ms ({15e-3 * n:.0f}: 15 us a node)"


def show_token(rounds):
    return f"Python around a token: {1e6 * token(rounds):.1f} us"


def show_split(rounds):
    n, _, best, _ = sched_bench.plan_time(960, 3 * rounds)
    return (f"split + layout of {n} nodes on three devices: {1e3 * best:.2f} ms (1); a replayed split: "
            f"{1e6 * sched_bench.replay_overhead(rounds)[2]:.1f} us (15)")


def show_profile(rounds):
    plain, inside = profile_overhead(rounds)
    return (f"a token of stories260K: {1e6 * plain:.1f} us, inside gg.profile() {1e6 * inside:.1f}: "
            f"{100 * (inside / plain - 1):+.1f} % (3)")


PARTS = {"plan": show_plan, "memory": show_memory, "prompt": show_prompt, "token": show_token, "split": show_split,
         "profile": show_profile}


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--rounds", type=int, default=10)
    args = p.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        p.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    for part in parts:
        print(PARTS[part](args.rounds), flush=True)


if __name__ == "__main__":
    main()
