"""The cost of the planner `best` beyond ggml's, next to compiling the graph.

    python -m benchmarks.planner_cost [NAME ...]

Per graph, processor time of one thread: planning with each planner, the fastest of REPEATS; making the graph ready to
run (kernels chosen, compiled or loaded, rows written) with an empty cache of kernels, in a new process with a full one,
and once more in that process.  The rule: `best` is GraphAllocator's default where it costs less than 1 % of compiling.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

import ggjit as gg
from benchmarks import synth
from benchmarks.budget import NETWORKS, training_graph
from benchmarks.catalogue import STORIES
from ggjit.models import load_model
from ggjit.models.files.minilm import minilm_path

REPEATS = 9
MODELS = {"stories260K, prompt of 64": (STORIES, 64), "stories260K, a token": (STORIES, 1),
          "MiniLM, 128 tokens": (minilm_path, 128),
          "SmolLM-135M Q8_0, prompt of 128": (lambda: synth.model_path("smollm-135m", "Q8_0"), 128),
          "SmolLM-135M Q8_0, a token": (lambda: synth.model_path("smollm-135m", "Q8_0"), 1)}
TRAINED = ("MLP 64-128-64-10, batch 4096", "CNN 16, 32, batch 256", "transformer, 12 layers, width 128",
           "U-Net, 3 levels, 64 x 64, batch 4", "ResNet 3-4-6-3, 32 x 32, batch 8")
NAMES = (*MODELS, *(f"training of {name}" for name in TRAINED))


def graph_of(name):
    """(graph, what it refers to)"""
    if name in MODELS:
        path, n = MODELS[name]
        m = load_model(str(path()), n_threads=1, n_ctx=128, n_batch=n, repack=False)
        return m.largest_graph(), m
    net, batch = NETWORKS[name.removeprefix("training of ")]
    return training_graph(net(), batch), None


def seconds_of(f):
    t0 = time.process_time()
    f()
    return time.process_time() - t0


def child(name):
    """One process: the figures of a graph."""
    graph, _held = graph_of(name)
    cpu = gg.init_backend("CPU", n_threads=1)
    plans = {p: gg.GraphAllocator(cpu, p) for p in ("ggml", "best")}
    seconds = {p: min(seconds_of(lambda a=a: a.plan(graph)) for _ in range(REPEATS)) for p, a in plans.items()}
    plans["ggml"].alloc_graph(graph)
    made = [seconds_of(lambda: cpu.graph_plan_create(graph)) for _ in range(3)]
    return {"nodes": len(graph), **seconds, "first": made[0], "again": min(made[1:]),
            "peaks": {p: a.last.peak for p, a in plans.items()}}


def measured(name):
    """(figures with an empty cache, with a full one)"""
    with tempfile.TemporaryDirectory() as cache:
        shared = os.environ.get("GGJIT_CACHE_DIR") or os.path.expanduser("~/.cache/ggjit")
        for part in ("bench", "models"):                # files of models are no kernels
            if os.path.isdir(os.path.join(shared, part)):
                os.symlink(os.path.join(shared, part), os.path.join(cache, part))
        env = os.environ | {"GGJIT_CACHE_DIR": cache}
        return [json.loads(subprocess.run([sys.executable, "-m", "benchmarks.planner_cost", "--child", name], env=env,
                                          check=True, text=True, capture_output=True).stdout) for _ in range(2)]


def main(names):
    print("| graph | nodes | arena, best / ggml | plan ggml, ms | plan best, ms | more, ms | compile, empty cache, s "
          "| more / compile | new process, full cache, ms | more / that | same process, ms | more / that |")
    print("| --- " * 12 + "|")
    for name in names or NAMES:
        cold, warm = measured(name)
        more = warm["best"] - warm["ggml"]
        cells = (name, warm["nodes"], f"{warm['peaks']['best'] / warm['peaks']['ggml']:.3f}",
                 *(f"{1e3 * s:.2f}" for s in (warm["ggml"], warm["best"], more)), f"{cold['first']:.2f}",
                 f"{more / cold['first']:.2%}", f"{1e3 * warm['first']:.1f}", f"{more / warm['first']:.0%}",
                 f"{1e3 * warm['again']:.2f}", f"{more / warm['again']:.0%}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2])))
    else:
        main(sys.argv[1:])
