"""mul_mat, types against columns: GB/s and GFLOP/s, the limit beside them, and the real ggml of the xllamacpp wheel.

    python -m benchmarks.mul_mat_bench [--types F16,Q4_0] [--columns 1,8,128] [--k 2048] [--rows 2048] [--threads N]

Same bytes on both sides, cycled over more memory than the last-level cache holds, runs alternating; medians with the
minimum in brackets.  One thread is measured in CPU time, several in wall time.  limit: the larger of weight bytes over
the measured read bandwidth and operations over the measured peak of one core times threads (for quantised weights
the peak of 8-bit dots, four times the float one with VNNI).  ratio = ggml's time / ours: above 1 we are faster.
"""
import argparse
import ctypes as C
import importlib.util
import os
import statistics
import time

import numpy as np

import ggjit as gg
from benchmarks.limits import peak_f32, read_bandwidth
from benchmarks.machine import cpu_model, idle_check
from ggjit.ops import isa

TYPES = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q2_K": 10, "Q3_K": 11,
         "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}
COLD_NBYTES = 96 << 20


class _Params(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Peer:
    """ggml_mul_mat out of the wheel's extension module."""

    def __init__(self, n_threads):
        path = os.path.join(importlib.util.find_spec("xllamacpp").submodule_search_locations[0], "xllamacpp.abi3.so")
        self.lib = C.CDLL(path, mode=C.RTLD_LOCAL)
        p, i, i64 = C.c_void_p, C.c_int, C.c_int64
        for name, result, args in (
                ("ggml_cpu_init", None, []), ("ggml_init", p, [_Params]), ("ggml_free", None, [p]),
                ("ggml_new_tensor_2d", p, [p, i, i64, i64]), ("ggml_mul_mat", p, [p, p, p]), ("ggml_get_data", p, [p]),
                ("ggml_new_graph", p, [p]), ("ggml_build_forward_expand", None, [p, p]),
                ("ggml_version", C.c_char_p, []), ("ggml_backend_cpu_init", p, []),
                ("ggml_backend_cpu_set_n_threads", None, [p, i]),
                ("ggml_backend_graph_compute", i, [p, p])):
            f = getattr(self.lib, name)
            f.restype, f.argtypes = result, args
        self.lib.ggml_cpu_init()
        self.backend = self.lib.ggml_backend_cpu_init()
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, n_threads)
        self.version = self.lib.ggml_version().decode()

    def products(self, type_name, weights, k, rows, y):
        """(functions that compute, one per copy of the weights; result of the first; release)."""
        lib, n = self.lib, y.shape[0]
        size = len(weights) * (weights[0].nbytes + 4 * n * rows + 4096) + y.nbytes + (1 << 26)
        ctx = lib.ggml_init(_Params(size, None, False))
        b = lib.ggml_new_tensor_2d(ctx, 0, k, n)
        C.memmove(lib.ggml_get_data(b), y.ctypes.data, y.nbytes)
        runs, outs = [], []
        for w in weights:
            a = lib.ggml_new_tensor_2d(ctx, TYPES[type_name], k, rows)
            C.memmove(lib.ggml_get_data(a), w.ctypes.data, w.nbytes)
            outs.append(lib.ggml_mul_mat(ctx, a, b))
            graph = lib.ggml_new_graph(ctx)
            lib.ggml_build_forward_expand(graph, outs[-1])
            runs.append(lambda graph=graph: lib.ggml_backend_graph_compute(self.backend, graph))

        def result():
            raw = (C.c_float * (n * rows)).from_address(lib.ggml_get_data(outs[0]))
            return np.array(raw, np.float32).reshape(n, rows)
        return runs, result, lambda: lib.ggml_free(ctx)


def our_products(type_name, weights, k, rows, y, n_threads):
    backend = gg.init_backend(f"CPU:n_threads={n_threads}")
    type, ctx = getattr(gg, type_name), gg.Context()
    b = gg.from_numpy(ctx, y)
    leaves = [ctx.new_tensor(type, (k, rows)) for _ in weights]
    gg.alloc_ctx_tensors(ctx, backend)
    plans, outs = [], []
    for leaf, w in zip(leaves, weights, strict=True):
        leaf.set_bytes(w)
        outs.append(gg.mul_mat(leaf, b))
        graph = gg.Graph(outs[-1])
        gg.GraphAllocator(backend).alloc_graph(graph)
        plans.append(backend.graph_plan_create(graph))
    return [p.compute for p in plans], lambda: plans[0].numpy(outs[0]).reshape(y.shape[0], rows)


def medians(candidates, now, seconds):
    """{name: (median, minimum)} of alternating runs, after one untimed round."""
    for runs in candidates.values():
        runs[0]()
    times, end, i = {name: [] for name in candidates}, time.perf_counter() + seconds, 0
    while time.perf_counter() < end or i < 7:
        for name, runs in candidates.items():
            t0 = now()
            runs[i % len(runs)]()
            times[name].append(now() - t0)
        i += 1
    return {name: (statistics.median(t), min(t)) for name, t in times.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(TYPES))
    p.add_argument("--columns", default="1,2,4,8,16,32,128,512")
    p.add_argument("--k", type=int, default=2048)
    p.add_argument("--rows", type=int, default=2048)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--seconds", type=float, default=0.5, help="for each line")
    args = p.parse_args()
    peer = Peer(args.threads) if importlib.util.find_spec("xllamacpp") else None
    now = time.thread_time if args.threads == 1 else time.perf_counter
    bandwidth, peak = read_bandwidth(args.threads), peak_f32(now=now)
    print(f"{cpu_model()}; kernels {isa.ISA}; {idle_check('before')}")
    print(f"limits: {bandwidth / 1e9:.1f} GB/s read, {peak * args.threads / 1e9:.0f} GFLOP/s float32; "
          f"ggml: {peer.version if peer else 'missing (pip install xllamacpp)'}")
    print(f"\nk = {args.k}, {args.rows} rows, {args.threads} thread(s)\n")
    print("| type | n | us | GB/s | GFLOP/s | limit us | ggml us | ratio |\n|---|---|---|---|---|---|---|---|")
    for type_name in args.types.split(","):
        rng = np.random.default_rng(0)
        raw = gg.quantize(getattr(gg, type_name), rng.standard_normal((args.rows, args.k), np.float32) * 0.05)
        weights = [raw.copy() for _ in range(max(1, COLD_NBYTES // raw.nbytes))]
        for n in map(int, args.columns.split(",")):
            y = rng.standard_normal((n, args.k), np.float32)
            ours, result = our_products(type_name, weights, args.k, args.rows, y, args.threads)
            candidates, release = {"ours": ours}, None
            if peer:
                candidates["ggml"], want, release = peer.products(type_name, weights, args.k, args.rows, y)
            t = medians(candidates, now, args.seconds)
            (us, least), flop = t["ours"], 2 * args.k * args.rows * n
            rate = peak * args.threads * (4 if isa.ISA == "avx512" and getattr(gg, type_name).quantized else 1)
            limit = max(raw.nbytes / bandwidth, flop / rate)
            line = (f"| {type_name} | {n} | {us * 1e6:.0f} ({least * 1e6:.0f}) | {raw.nbytes / us / 1e9:.1f} | "
                    f"{flop / us / 1e9:.0f} | {limit * 1e6:.0f} |")
            if peer:
                got, ref = result(), want()
                error = np.square(got - ref).sum() / np.square(ref).sum()
                assert error < 1e-6, f"{type_name} n={n}: the two differ by NMSE {error:.2g}"
                line += f" {t['ggml'][0] * 1e6:.0f} ({t['ggml'][1] * 1e6:.0f}) | {t['ggml'][0] / us:.2f} |"
                release()
            print(line if peer else line + " | |", flush=True)
    print(f"\n{idle_check('after')}")


if __name__ == "__main__":
    main()
