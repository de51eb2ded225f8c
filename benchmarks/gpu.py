"""Proof and speed of the CUDA backend on a real GPU, in one call.

    python -m benchmarks.gpu [--quick] [--model PATH] [--embed-model PATH]

1. the op suite: every case of every op that has a CUDA kernel, CUDA0 against the CPU backend and the NumPy reference;
2. timings by events: a measured copy, mat-vec of every weight type against it, F16 products against torch or cupy
   (cuBLAS), int8 prefill, attention against torch's scaled_dot_product_attention;
3. launch overhead with and without CUDA graphs, and a decode-like chain of nodes.

The table goes to benchmarks/results/gpu-<card>.md.  Without a GPU it says why, and exits with 1.
"""
import argparse
import datetime
import functools
import importlib.util
import pathlib
import re
import statistics
import sys

import numpy as np

import ggjit as gg
from benchmarks.report import Row, Spread, markdown
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.spec import Inputs, all_specs

RESULTS = pathlib.Path(__file__).parent / "results"
WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
MIN_NODES = 20                  # one timing runs this many launches, so that events do not count
FLUSH_NBYTES = 256 << 20        # more than any second-level cache


# ---------------------------------------------------------------- right
def nmse(got, want):
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):             # infinities that differ
        wrong = np.where(same, 0, got - want)
    size = np.square(np.where(np.isfinite(want), want, 0)).sum()
    return float(np.square(wrong).sum() / max(size, 1e-30))


def on(backend, case, seed):
    """(node, its sources' values, its own) of a case computed on `backend`; leaves are the same on every backend."""
    ctx = gg.Context()
    inputs = Inputs(ctx, np.random.default_rng(seed))
    y = case.build(inputs)
    gg.alloc_ctx_tensors(ctx, backend)
    for t, values in inputs.data:
        t.set(values)
    return y, [None if s is None else exact(s) for s in y.src], gg.compute(y, backend=backend)


def exact(t):
    """A tensor's values as a reference takes them: floats as float64, all four dimensions."""
    a = t.numpy().reshape(tuple(reversed(t.ne)))
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def bound(case, y):
    """The largest NMSE that is right: the case's; ggml's for the op where a kernel rounds what the CPU's does not."""
    from ggjit.ops.cuda.native.launch import launches
    return max(case.max_nmse, *(launch.max_nmse for launch in launches(y)))


def check_ops(gpu, cpu):
    """[(op, n cases, n without a kernel, [what went wrong])]"""
    from ggjit.ops.cuda.native.launch import launches, makers
    out = []
    for op in makers():
        n = absent = 0
        wrong = []
        for seed, case in enumerate(all_specs()[op].cases()):
            y = case.build(Inputs(gg.Context(), np.random.default_rng(seed)))
            if launches(y) is None:
                absent += 1
                continue
            n += 1
            try:
                y, sources, got = on(gpu, case, seed)
                want = np.reshape(all_specs()[op].reference(y, *sources), got.shape)
                errors = nmse(got, want), nmse(got, on(cpu, case, seed)[2])
                if not min(errors) <= bound(case, y):
                    wrong.append(f"{case.name}: NMSE {errors[0]:.1e} to float64, {errors[1]:.1e} to the CPU")
            except GgjitError as e:
                wrong.append(f"{case.name}: {e}")
        print(f"{op.name}: {n} cases, {absent} without a kernel, {len(wrong)} wrong", file=sys.stderr, flush=True)
        out.append((op, n, absent, wrong))
    return out


# ---------------------------------------------------------------- fast
class Timer:
    """Medians by CUDA events of plans on one backend."""

    def __init__(self, gpu, repeats):
        self.gpu, self.cuda, self.repeats = gpu, gpu.cuda, repeats
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

    def plan(self, *outputs):
        graph = gg.Graph(*outputs)
        gg.GraphAllocator(self.gpu).alloc_graph(graph)
        return self.gpu.graph_plan_create(graph)

    def copy_bandwidth(self):
        """Bytes a second read and written by a device-to-device copy."""
        n = FLUSH_NBYTES * 4
        a, b = self.gpu.alloc_buffer(n), self.gpu.alloc_buffer(n)
        times = self.seconds(lambda: self.cuda.cuMemcpyDtoDAsync(b.base, a.base, n, self.gpu.stream))
        return 2 * n / statistics.median(times)


def weights(gpu, *specs):
    """Leaves (type, ne) in GPU memory with seeded values; quantised rows repeat."""
    ctx, rng = gg.Context(), np.random.default_rng(0)
    made = [ctx.new_tensor(type, ne) for type, ne in specs]
    gg.alloc_ctx_tensors(ctx, gpu)
    for t in made:
        rows = np.asarray(rng.uniform(-1, 1, (64, t.ne[0])), np.float32)
        raw = np.frombuffer(gg.quantize(t.type, rows), np.uint8) if t.type.quantized or t.type is gg.BF16 \
            else rows.astype(t.type.dtype).view(np.uint8).ravel()
        t.set_bytes(np.resize(raw, t.nbytes))
    return made


def rate(seconds, work, unit):
    return Spread([work / s / unit[0] for s in seconds], unit[1])


GBS, TFS = (1e9, "GB/s"), (1e12, "TFLOP/s")


def mat_vec_rows(timer, peak, k=4096, m=14336):
    """Weights rotate, so that they come from memory and not from a cache."""
    for name in WEIGHTS:
        type = getattr(gg, name)
        nbytes = type.row_nbytes(k) * m
        copies = max(2, min(MIN_NODES, -(-2 * FLUSH_NBYTES // nbytes)))
        *ws, x = weights(timer.gpu, *[(type, (k, m))] * copies, (gg.F32, (k, 1)))
        plan = timer.plan(*[gg.mul_mat(w, x) for w in ws])
        ours = rate(timer.seconds(plan.compute, copies), nbytes, GBS)
        share = ours.median * 1e9 / peak
        yield Row(f"mat-vec {name} {k} x {m}", "75 % of a copy", ours, f"copy {peak / 1e9:,.0f} GB/s", share,
                  share >= 0.75)


def torch_module():
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    return torch if torch.cuda.is_available() else None


def torch_seconds(timer, f):
    torch = torch_module()
    start, end, out = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    f()
    for _ in range(timer.repeats):
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) * 1e-3)
    return out


def product_rows(timer, sizes):
    torch = torch_module()
    for n in sizes:
        for name in ("F16", "BF16", "F32", "Q8_0", "Q4_0", "Q4_K"):
            w, x = weights(timer.gpu, (getattr(gg, name), (n, n)), (gg.F32, (n, n)))
            flops = 2.0 * n ** 3
            ours = rate(timer.seconds(timer.plan(gg.mul_mat(w, x)).compute), flops, TFS)
            if torch is None or name not in ("F16", "BF16"):
                yield Row(f"product {name} {n}", "-", ours)
                continue
            a = torch.randn(n, n, device="cuda", dtype=torch.float16 if name == "F16" else torch.bfloat16)
            peer = rate(torch_seconds(timer, lambda a=a: a @ a), flops, TFS)
            ratio = ours.median / peer.median
            yield Row(f"product {name} {n}", "60 % of cuBLAS", ours, peer, ratio, ratio >= 0.6, against="torch")


def attention_rows(timer, shapes):
    torch = torch_module()
    for d, heads, n, n_kv in shapes:
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


def overhead_rows(timer, n_nodes=200):
    """A chain of tiny nodes: what a launch costs, one by one and in a captured graph."""
    for label, graphs in (("launch by launch", 0), ("as a CUDA graph", 1)):
        gpu = gg.init_backend(timer.gpu.device.name, graphs=graphs)
        x, = weights(gpu, (gg.F32, (64, 1)))
        y = x
        for _ in range(n_nodes):
            y = gg.neg(y)
        own = Timer(gpu, timer.repeats)
        seconds = own.seconds(own.plan(y).compute, n_nodes)
        yield Row(f"one tiny node, {label}", "-", Spread([s * 1e6 for s in seconds], "us"))


# ---------------------------------------------------------------- models
def model_rows(timer, llama, embed):
    from ggjit.models import load_model
    if embed:
        with load_model(embed, backend=timer.gpu) as m:
            out = statistics.median(timer.seconds(lambda: m.embed(["the quick brown fox jumps over the lazy dog"] * 8)))
            yield Row("embedding 8 sentences", "-", Spread([1 / out], "batches/s"))
    if llama:
        with load_model(llama, backend=timer.gpu) as m:
            m.decode([1] * 8)
            seconds = timer.seconds(lambda: m.decode([5]))
            yield Row(f"decode {pathlib.Path(llama).name}", "-", Spread([1 / s for s in seconds], "tok/s"))


# ---------------------------------------------------------------- the call
def measured(gpu, args):
    timer = Timer(gpu, 3 if args.quick else 15)
    peak = timer.copy_bandwidth()
    rows = [Row("device-to-device copy", "-", Spread([peak / 1e9], "GB/s"))]
    parts = (mat_vec_rows(timer, peak), product_rows(timer, (1024,) if args.quick else (4096, 8192)),
             attention_rows(timer, ((128, 32, 1, 4096), (64, 32, 512, 512))), overhead_rows(timer),
             model_rows(timer, args.model, args.embed_model))
    for part in parts:
        try:
            for row in part:
                print(" | ".join(map(str, row.cells())), file=sys.stderr, flush=True)
                rows.append(row)
        except GgjitError as e:                 # the rest is still worth having
            rows.append(Row(f"{part.__name__} stopped", "-", str(e)))
    return rows


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="smaller products, fewer repeats")
    p.add_argument("--model", help="a llama GGUF to decode with")
    p.add_argument("--embed-model", help="a bert GGUF to embed with")
    args = p.parse_args(argv)
    try:
        gpu = gg.init_backend("CUDA0")
    except GgjitError as e:
        print(f"benchmarks.gpu needs an NVIDIA GPU: {e}", file=sys.stderr)
        return 1
    device = gpu.device
    checked = check_ops(gpu, gg.init_backend("CPU"))
    rows = measured(gpu, args)
    wrong = [f"- {op.name} {w}" for op, *_, ws in checked for w in ws]
    n = sum(n for _, n, *_ in checked)
    text = (f"# {device.description}, {datetime.date.today()}\n\n"
            f"Compute capability {'.'.join(map(str, device.compute_capability))}, "
            f"{device.n_multiprocessors} multiprocessors, {device.memory()[1] / 1e9:.0f} GB.\n\n"
            f"Op suite: {n} cases of {len(checked)} ops, {len(wrong)} wrong.\n\n" + "\n".join(wrong)
            + "\n\n" + markdown(rows) + "\n")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', device.description).strip('-').lower()}.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
