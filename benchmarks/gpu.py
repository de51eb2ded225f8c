"""Checks and times the CUDA backend on a real GPU, in one call.

    python -m benchmarks.gpu [--quick] [--model PATH ...] [--embed-model PATH] [--only ops walk piped speed models]
        [--share 0.1] [--seconds 400] [--out FILE.md]
    GGJIT_CUDA_COMPILER=simulator GGJIT_CUBLAS=1 GGJIT_CCCL=1 python -m benchmarks.gpu --dry
                                            every measurement once, as small as they go; libraries by their stand-ins

What is worth most comes first, and every line is saved at once:

ops     every case of every op that has a CUDA kernel, against the NumPy reference and the CPU (gpu_suite.py), in each
        way; the first cases of each op under compute-sanitizer, where it is installed and no --seconds are given
walk    launch overhead; a token as a captured graph and as one persistent kernel, by both sets of kernels (gpu_walk.py)
piped   kernels of the second set (GGJIT_PIPED) beside the first one's and torch's (gpu_piped.py)
speed   mat-vec of every weight type against a measured copy, F16 products against torch (cuBLAS), attention against
        torch's scaled_dot_product_attention, own kernels against cuBLAS for few columns and against CCCL for sorts,
        memory taken against gg.measure, every other op on the largest of its cases (gpu_ops.py); by events
models  MiniLM, stories260K and a 1.1B shape: against the CPU, tokens a second, beside llama-bench where one is found

What fails is a row that says so, and the next case begins.  Kernels are compiled first, by all processors
(gpu_compile.py); that needs no card, so it may be done before on another machine.  llama-bench is looked for on PATH:

    cmake -S llama.cpp -B build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 -DLLAMA_BUILD_TESTS=OFF
    cmake --build build -j --target llama-bench && PATH=$PWD/build/bin:$PATH

The table goes to benchmarks/results/gpu.md.  Without a GPU it says why, and exits with 1.
"""
import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np

import ggjit as gg
from benchmarks.catalogue import STORIES
from benchmarks.gpu_compile import compile_all
from benchmarks.gpu_ops import op_rows
from benchmarks.gpu_piped import piped_rows, piping
from benchmarks.gpu_report import Clock, Report, each
from benchmarks.gpu_suite import CUBLAS, OWN, check_ops, check_smallest, nmse, sanitize, sanitizer
from benchmarks.gpu_walk import walk_rows
from benchmarks.report import Row, Spread
from benchmarks.synth import model_path
from benchmarks.worker import Missing
from ggjit.cuda import libraries
from ggjit.models import load_model
from ggjit.models.files.minilm import minilm_path
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.cuda import argsort
from ggjit.ops.cuda.compiler.choice import SIMULATED
from ggjit.ops.cuda.matmul import mul_mat_dense
from ggjit.tools.suite.runner import as_bytes

RESULTS = pathlib.Path(__file__).parent / "results"
WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
           "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "MXFP4",
           "NVFP4")
MIN_NODES = 20                  # one timing runs this many launches, so that events do not count
LLAMA_BENCH_SECONDS = 40
COMPILE_SHARE = 0.25            # of a run's time
FLUSH_NBYTES = 256 << 20        # more than any second-level cache


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the measurements are."""
    repeats: int = 15
    weights: tuple = WEIGHTS
    mat_vec: tuple = (4096, 14336)
    products: tuple = (4096, 8192)
    product_types: tuple = ("F16", "BF16", "F32", "Q8_0", "Q4_0", "Q4_K")
    columns: tuple = (16, 64, 512)              # of products with few columns, and the size of their weights
    attention: tuple = ((128, 32, 1, 4096), (64, 32, 512, 512))
    sorts: tuple = ((32000, 1), (151936, 1), (1 << 20, 1), (4096, 16))
    chain: int = 200
    flush_nbytes: int = FLUSH_NBYTES
    llamas: tuple = ("F16", "Q4_0")             # of the 1.1B shape
    dry: bool = False                           # the smallest cases of ops, and the first error stops
    n_ops: int | None = None                    # a random choice of so many of them


FULL = Scale()
QUICK = dataclasses.replace(FULL, repeats=3, products=(1024,))
DRY = Scale(1, ("F16", "IQ2_XXS"), (256, 4), (16,), ("F16",), (9,), ((16, 1, 1, 16),), ((70, 2),), 3, 1 << 12, (), True)


# ---------------------------------------------------------------- fast
class Timer:
    """Medians by CUDA events of plans on one backend."""

    def __init__(self, gpu, scale):
        self.gpu, self.cuda, self.scale, self.repeats = gpu, gpu.cuda, scale, scale.repeats
        self.start, self.end = self.cuda.cuEventCreate(0), self.cuda.cuEventCreate(0)

    def seconds(self, submit, n=1):
        """Spread of seconds of one of `n` pieces of work that `submit()` puts into the stream."""
        submit()
        submit()
        self.gpu.synchronize()
        out = []
        for _ in range(self.repeats):
            self.cuda.cuEventRecord(self.start, self.gpu.stream)
            submit()
            self.cuda.cuEventRecord(self.end, self.gpu.stream)
            self.gpu.synchronize()
            out.append(float(self.cuda.cuEventElapsedTime(self.start, self.end)) * 1e-3 / n)
        return out

    def wall_seconds(self, work):
        """Seconds of `work()`, which waits for its result."""
        work()
        work()
        out = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            work()
            out.append(time.perf_counter() - start)
        return out

    def plan(self, *outputs):
        return self.planned(gg.Graph(*outputs))

    def planned(self, graph):
        gg.GraphAllocator(self.gpu).alloc_graph(graph)
        return self.gpu.graph_plan_create(graph)

    def copy_bandwidth(self):
        """Bytes a second read and written by a device-to-device copy."""
        n = self.scale.flush_nbytes * 4
        a, b = self.gpu.alloc_buffer(n), self.gpu.alloc_buffer(n)
        times = self.seconds(lambda: self.cuda.cuMemcpyDtoDAsync(b.base, a.base, n, self.gpu.stream))
        return 2 * n / statistics.median(times)


def weights(gpu, *specs):
    """Leaves (type, ne) in GPU memory with seeded values; quantised rows repeat."""
    ctx, rng = gg.Context(), np.random.default_rng(0)
    made = [ctx.new_tensor(type, ne) for type, ne in specs]
    gg.alloc_ctx_tensors(ctx, gpu)
    for t in made:
        raw = np.frombuffer(as_bytes(t, rng.uniform(-1, 1, (64, t.ne[0]))), np.uint8)
        t.set_bytes(np.resize(raw, t.nbytes))
    return made


def rate(seconds, work, unit):
    return Spread([work / s / unit[0] for s in seconds], unit[1])


GBS, TFS = (1e9, "GB/s"), (1e12, "TFLOP/s")


def mat_vec_rows(timer, peak):
    """Weights rotate, so that they come from memory and not from a cache."""
    yield from each([(f"mat-vec {name}", functools.partial(mat_vec_row, timer, peak, name))
                     for name in timer.scale.weights], timer.scale.dry)


def mat_vec_row(timer, peak, name):
    (k, m), type = timer.scale.mat_vec, getattr(gg, name)
    nbytes = type.row_nbytes(k) * m
    copies = max(2, min(MIN_NODES, -(-2 * timer.scale.flush_nbytes // nbytes)))
    *ws, x = weights(timer.gpu, *[(type, (k, m))] * copies, (gg.F32, (k, 1)))
    plan = timer.plan(*[gg.mul_mat(w, x) for w in ws])
    ours = rate(timer.seconds(plan.compute, copies), nbytes, GBS)
    share = ours.median * 1e9 / peak
    yield Row(f"mat-vec {name} {k} x {m}", "85 % of a copy", ours, f"copy {peak / 1e9:,.0f} GB/s", share, share >= 0.85,
              "90 % as well" if share >= 0.9 else "")


def torch_module():
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    return torch if torch.cuda.is_available() else None


def torch_seconds(timer, f):
    torch = torch_module()
    start, end, out = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    f()
    f()
    for _ in range(timer.repeats):
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) * 1e-3)
    return out


@contextlib.contextmanager
def products_by(choice):
    """Plans made inside take cuBLAS for dense products, or our own kernels."""
    before = os.environ.get("GGJIT_CUBLAS")
    os.environ |= choice
    mul_mat_dense.available.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("GGJIT_CUBLAS")
        if before is not None:
            os.environ["GGJIT_CUBLAS"] = before
        mul_mat_dense.available.cache_clear()


def product_rows(timer):
    """Square matrices: weights of each type, float32 columns."""
    yield from each([(f"product {name} {n}", functools.partial(products, timer, name, n)) for n, name in
                     itertools.product(timer.scale.products, timer.scale.product_types)], timer.scale.dry)


def products(timer, name, n):
    choices = {"own kernels": OWN} | ({"cuBLAS": CUBLAS} if mul_mat_dense.available() else {})
    w, x = weights(timer.gpu, (getattr(gg, name), (n, n)), (gg.F32, (n, n)))
    for label, choice in choices.items():
        with products_by(choice):
            yield product_row(timer, f"product {name} {n}, {label}", name, n, gg.mul_mat(w, x))


def product_row(timer, label, name, n, y):
    flops, torch = 2.0 * n ** 3, torch_module()
    ours = rate(timer.seconds(timer.plan(y).compute), flops, TFS)
    if torch is None or name not in ("F16", "BF16"):
        return Row(label, "-", ours)
    a = torch.randn(n, n, device="cuda", dtype=torch.float16 if name == "F16" else torch.bfloat16)
    peer = rate(torch_seconds(timer, lambda: a @ a), flops, TFS)
    ratio = ours.median / peer.median
    return Row(label, "80 % of cuBLAS", ours, peer, ratio, ratio >= 0.8, against="torch")


def few_columns_rows(timer):
    """Where own kernels and cuBLAS change places: what engine/cuda/libraries.py measures and goes by."""
    k, columns = timer.scale.products[0], timer.scale.columns if mul_mat_dense.available() else ()
    for name, n in itertools.product(timer.scale.product_types[::4], columns):          # F16, Q4_0
        w, x = (gg.Context().new_tensor(type, ne) for type, ne in ((getattr(gg, name), (k, k)), (gg.F32, (k, n))))
        yield beside_library(timer, f"product {name} {k}, {n} columns", gg.mul_mat(w, x), "cublas")


def sort_rows(timer):
    """The same of sorts by CCCL: vocabularies, and as many rows of them as are sorted one after the other."""
    for ne in timer.scale.sorts if argsort.available() else ():
        x = gg.Context().new_tensor(gg.F32, ne)
        yield beside_library(timer, f"argsort of {ne[1]} x {ne[0]}", gg.argsort(x, 0), "cccl")


def beside_library(timer, work, t, library):
    seconds = libraries.measure(timer.gpu.device, t)
    own, theirs = (Spread([seconds[way] * 1e6], "us") for way in ("own", library))
    return Row(work, "-", own, theirs, theirs.median / own.median, against=library,
               note=f"{min(seconds, key=seconds.get)} is chosen")


def attention_rows(timer):
    torch = torch_module()
    for d, heads, n, n_kv in timer.scale.attention:
        q, k, v = weights(timer.gpu, (gg.F32, (d, n, heads)), (gg.F16, (d, n_kv, heads)), (gg.F16, (d, n_kv, heads)))
        flops = 4.0 * d * heads * n * n_kv
        y = gg.flash_attn_ext(q, k, v, None, d ** -0.5, 0.0, 0.0)
        ours = rate(timer.seconds(timer.plan(y).compute), flops, TFS)
        peer, ratio = "-", None
        if torch is not None:
            tq, tk = (torch.randn(1, heads, m, d, device="cuda", dtype=torch.float16) for m in (n, n_kv))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            peer = rate(torch_seconds(timer, functools.partial(sdpa, tq, tk, tk)), flops, TFS)
            ratio = ours.median / peer.median
        yield Row(f"attention d={d} heads={heads} n={n} kv={n_kv}", "-", ours, peer, ratio,
                  against="torch SDPA" if torch is not None else "-")


def overhead_rows(timer):
    """A chain of tiny nodes: what a launch costs, one by one and in a captured graph."""
    n_nodes = timer.scale.chain
    for label, params in (("launch by launch", "graphs=0"), ("as a CUDA graph", ""), ("in one kernel", "persistent=1")):
        gpu = timer.gpu.device.init_backend(params)
        x, = weights(gpu, (gg.F32, (64, 1)))
        y = x
        for _ in range(n_nodes):
            y = gg.neg(y)
        own = Timer(gpu, timer.scale)
        seconds = own.seconds(own.plan(y).compute, n_nodes)
        yield Row(f"one tiny node, {label}", "-", Spread([s * 1e6 for s in seconds], "us"))


def memory_rows(timer):
    """What a graph's plan takes of the device's memory, against what gg.measure says it will."""
    device, k = timer.gpu.device, timer.scale.products[0]
    w, x = weights(timer.gpu, (gg.F16, (k, k)), (gg.F32, (k, k)))
    y = x
    for _ in range(max(1, timer.scale.chain // 20)):
        y = gg.silu(gg.mul_mat(w, y))
    graph = gg.Graph(y)
    says = gg.measure(graph, planner="ggml", target=timer.gpu).peak
    gc.collect()
    timer.gpu.synchronize()
    before = device.memory()[0]
    allocator = gg.GraphAllocator(timer.gpu)
    allocator.alloc_graph(graph)
    arena = before - device.memory()[0]
    plan = timer.gpu.graph_plan_create(graph)
    plan.compute()
    plan.compute()                              # captured
    timer.gpu.synchronize()
    both = before - device.memory()[0]
    yield Row("memory of a chain of products", "1.1 of gg.measure", Spread([arena / 1e6], "MB"),
              Spread([says / 1e6], "MB"), arena / says, arena <= 1.1 * says + (2 << 20), against="gg.measure",
              note=f"{both / 1e6:,.0f} MB with scratch memory, rows and the captured graph")


# ---------------------------------------------------------------- models
MODEL_NMSE = 1e-4               # of float weights
PROMPT, SENTENCES = 512, ["the quick brown fox jumps over the lazy dog"] * 8


def default_models(scale):
    """(llamas, embedding model): those of the catalogue that this machine has or can make."""
    def path(make, *args):
        try:
            return make(*args)
        except (Missing, GgjitError) as e:
            print(f"left out: {e}", file=sys.stderr)
            return None
    llamas = [path(STORIES), *(path(model_path, "tinyllama-1.1b", type) for type in scale.llamas)]
    return list(filter(None, llamas)), path(minilm_path, "F16")


def model_rows(timer, llamas, embed):
    cases = [(embed, functools.partial(embedding_rows, timer, embed))] if embed else []
    cases += [(path, functools.partial(llama_rows, timer, path)) for path in llamas]
    yield from each(cases, timer.scale.dry)


def piped_models(timer, llamas):
    """The models with each node in the way that is measured to be faster, beside llama.cpp as before."""
    with piping(libraries.MEASURED):
        for row in model_rows(timer, llamas, None):
            yield dataclasses.replace(row, work=f"{row.work}, piped where faster")


def embedding_rows(timer, path):
    with load_model(path) as cpu, load_model(path, backend=timer.gpu) as m:
        error = nmse(m.embed(SENTENCES), cpu.embed(SENTENCES))
        yield error_row(pathlib.Path(path).stem, "embeddings", error, m)
        times = timer.wall_seconds(lambda: m.embed(SENTENCES))
        yield Row(f"embedding {len(SENTENCES)} sentences", "-", Spread([len(SENTENCES) / s for s in times], "texts/s"))


def error_row(name, what, error, m):
    """With quantised weights both sides round their activations as well, each in its own way: no bound."""
    exact = all(not t.type.quantized for t in m.file.tensors.values())
    return Row(f"{name}: {what}, NMSE to the CPU", f"{MODEL_NMSE:g}" if exact else "-", f"{error:.1e}",
               passed=error <= MODEL_NMSE if exact else None, note="" if exact else "8-bit or BF16 activations")


def llama_rows(timer, path):
    name, ids = pathlib.Path(path).stem, [1, *range(5, 20)]
    with load_model(path) as cpu, load_model(path, backend=timer.gpu, n_gpu_layers=-1) as m:
        error = nmse(m.logits(ids), cpu.logits(ids))
        yield error_row(name, "logits", error, m)
        n = min(PROMPT, m.n_ctx // 2)
        peer = llama_bench(path, n)
        times = timer.wall_seconds(lambda: (m.reset(), m.decode([5] * n)))
        yield beside(f"{name}: prompt of {n}", Spread([n / s for s in times], "tok/s"), peer.get("prompt"))
        m.reset()
        m.decode(ids)
        times = timer.wall_seconds(lambda: m.decode([5]))
        captured = Spread([1 / s for s in times], "tok/s")
        yield beside(f"{name}: decode", captured, peer.get("decode"))
    with load_model(path, backend=timer.gpu.device.init_backend("fuse=1,persistent=1"), n_gpu_layers=-1) as m:
        m.decode(ids)
        times = timer.wall_seconds(lambda: m.decode([5]))
        ours = Spread([1 / s for s in times], "tok/s")
        yield Row(f"{name}: decode as one kernel, fused", "-", ours, captured, ours.median / captured.median,
                  against="captured")


def beside(work, ours, peer):
    if peer is None:
        return Row(work, "-", ours, note="no figure of llama.cpp: see the lines of the run")
    return Row(work, "-", ours, Spread([peer], "tok/s"), ours.median / peer, against="llama.cpp")


def llama_bench(path, n_prompt, n_generated=64):
    """{"prompt": tokens a second, "decode": ...} of llama.cpp's llama-bench, all layers on the GPU; {} without it."""
    program = shutil.which("llama-bench")
    if program is None:
        print("llama-bench is not on PATH: no figures of llama.cpp", file=sys.stderr)
        return {}
    command = [program, "-m", path, "-p", str(n_prompt), "-n", str(n_generated), "-ngl", "99", "-r", "5", "-o", "json"]
    try:
        r = subprocess.run(command, text=True, capture_output=True, timeout=LLAMA_BENCH_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"llama-bench: not done in {LLAMA_BENCH_SECONDS} s", file=sys.stderr)
        return {}
    if r.returncode:
        print(f"llama-bench: exit status {r.returncode}: {r.stderr[-300:]}", file=sys.stderr)
        return {}
    return {"decode" if row["n_gen"] else "prompt": float(row["avg_ts"]) for row in json.loads(r.stdout)}


# ---------------------------------------------------------------- the call
# shares of the time that is left when a part begins, in the order of what is worth most
PARTS = {"ops": 0.35, "walk": 0.35, "piped": 0.5, "speed": 0.5, "models": 1.0}


def rows_of(part, timer, peak, llamas, embed):
    """Generators of the Rows of a part."""
    if part == "walk":
        return overhead_rows(timer), walk_rows(lambda b: Timer(b, timer.scale), timer.gpu.device, timer.scale)
    if part == "piped":
        return piped_rows(timer, peak, torch_seconds),
    if part == "models":
        return model_rows(timer, llamas, embed), piped_models(timer, llamas)
    return (mat_vec_rows(timer, peak), product_rows(timer), few_columns_rows(timer), sort_rows(timer),
            attention_rows(timer), memory_rows(timer), op_rows(timer, peak))


def measured(gpu, scale, llamas, embed, report, clock, parts=tuple(PARTS)):
    """The rows of these parts, to the report."""
    timer = Timer(gpu, scale)
    peak = timer.copy_bandwidth()
    report.add(Row("device-to-device copy", "-", Spread([peak / 1e9], "GB/s")))
    for part in (part for part in parts if part != "ops"):
        until = clock.until(PARTS[part])
        for rows in rows_of(part, timer, peak, llamas, embed):
            report.part(rows.__name__, rows, until, scale.dry)


def check(report, args, clock):
    """The op suite, to the report."""
    found = check_smallest() if args.dry else check_ops(args.jobs, args.share, clock.until(PARTS["ops"]))
    for of_op in found:
        report.found(*of_op)
    program = None if args.dry or args.seconds else sanitizer()
    if program:
        report.sanitized = sanitize(program, args.jobs, args.share)


def arguments(argv):
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="smaller products, fewer repeats")
    p.add_argument("--dry", action="store_true", help="everything as small as it goes, to see that it runs; no file")
    p.add_argument("--seconds", type=float, help="stop after about so many; each part gets a share of what is left, "
                                                 "and compute-sanitizer is left out")
    p.add_argument("--out", type=pathlib.Path, help="the file, saved after every line; benchmarks/results/gpu.md by "
                                                    "default for whole runs")
    p.add_argument("--model", nargs="*", help="llama GGUFs to decode with; by default stories260K and a 1.1B shape")
    p.add_argument("--embed-model", help="a bert GGUF to embed with; by default MiniLM")
    p.add_argument("--only", nargs="*", choices=PARTS, help="these parts alone, in this order")
    p.add_argument("--share", type=float, default=1.0, help="share of the op suite's cases, drawn anew in every run")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes of the op suite")
    return p.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    clock = Clock(args.seconds)
    try:
        gpu = gg.init_backend("CUDA0")
    except GgjitError as e:
        print(f"benchmarks.gpu needs an NVIDIA GPU: {e}", file=sys.stderr)
        return 1
    scale, parts = DRY if args.dry else QUICK if args.quick else FULL, args.only or tuple(PARTS)
    whole = not (args.only or args.share < 1 or args.quick or args.dry)     # a part replaces no whole table
    report = Report(gpu.device, args.out or (RESULTS / "gpu.md" if whole else None))
    if not SIMULATED:
        compile_all(gpu.device.compute_capability, parts, clock.until(COMPILE_SHARE))
    if "ops" in parts:
        check(report, args, clock)
    if set(parts) - {"ops"}:
        llamas, embed = ([], None) if args.dry or "models" not in parts else default_models(scale)
        measured(gpu, scale, llamas if args.model is None else args.model, args.embed_model or embed, report, clock,
                 parts)
    print(report.text())
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
