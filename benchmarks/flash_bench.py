"""Flash attention against the real ggml of the xllamacpp wheel.

    python -m benchmarks.flash_bench [--quick] [--threads N] [--only WORD]

Same bytes on both sides, laid out as a KV cache (heads of one token side by side), runs alternating, minimum and median
of the rounds; one thread is measured in CPU time.  ratio = ggml's time / ours: above 1 we are faster.

    decode   n_batch 1, all keys visible         prefill   n_batch rows at the end of the context, causal mask
    GQA      32 query heads on 8 K/V heads       MHA       32 on 32
"""
import argparse
import ctypes as C
import importlib.util
import math
import os
import time

import numpy as np

import ggjit as gg
from ggjit.ops.record import OP

TYPES = {"F32": (gg.F32, 0), "F16": (gg.F16, 1), "Q8_0": (gg.Q8_0, 8), "Q4_0": (gg.Q4_0, 2)}


class _Params(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Peer:
    """The few ggml functions this needs, out of the wheel's extension module."""

    def __init__(self):
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None:
            raise SystemExit("the peer is missing: pip install xllamacpp")
        path = os.path.join(spec.submodule_search_locations[0], "xllamacpp.abi3.so")
        self.lib = C.CDLL(path, mode=C.RTLD_LOCAL)
        p, i, f = C.c_void_p, C.c_int, C.c_float
        n4 = [C.c_int64] * 4
        for name, res, args in (
                ("ggml_cpu_init", None, []), ("ggml_init", p, [_Params]), ("ggml_free", None, [p]),
                ("ggml_new_tensor_4d", p, [p, i, *n4]), ("ggml_permute", p, [p, p, i, i, i, i]),
                ("ggml_get_data", p, [p]), ("ggml_new_graph", p, [p]), ("ggml_build_forward_expand", None, [p, p]),
                ("ggml_flash_attn_ext", p, [p, p, p, p, p, f, f, f]), ("ggml_version", C.c_char_p, []),
                ("ggml_backend_cpu_init", p, []), ("ggml_backend_cpu_set_n_threads", None, [p, i]),
                ("ggml_backend_graph_compute", i, [p, p])):
            function = getattr(self.lib, name)
            function.restype, function.argtypes = res, args
        self.lib.ggml_cpu_init()
        self.backend = self.lib.ggml_backend_cpu_init()

    def attention(self, arrays, types, scale):
        """run() and result(); arrays: raw bytes of q, k, v [D, heads, tokens], mask [n_kv, n]."""
        lib, keep = self.lib, []
        ctx = lib.ggml_init(_Params(sum(a.nbytes for a, _ in arrays) * 2 + (1 << 26), None, False))
        for (raw, ne), t in zip(arrays, types, strict=True):
            x = lib.ggml_new_tensor_4d(ctx, t, *ne, *(1,) * (4 - len(ne)))
            C.memmove(lib.ggml_get_data(x), raw.ctypes.data, raw.nbytes)
            keep.append(lib.ggml_permute(ctx, x, 0, 2, 1, 3) if len(keep) < 3 else x)
        y = lib.ggml_flash_attn_ext(ctx, *keep, scale, 0.0, 0.0)
        graph = lib.ggml_new_graph(ctx)
        lib.ggml_build_forward_expand(graph, y)
        (_, (d, heads, n)) = arrays[0]
        data = lib.ggml_get_data(y)
        self.free = lambda: lib.ggml_free(ctx)
        return (lambda: lib.ggml_backend_graph_compute(self.backend, graph),
                lambda: np.ctypeslib.as_array((C.c_float * (d * heads * n)).from_address(data)).copy())


def inputs(kind, d, heads, kv_heads, n, n_kv, seed=0):
    """[(array, ne)] of q, k, v, mask; K and V in the bytes of type `kind`."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n, heads, d), np.float32)
    kv = []
    for _ in range(2):
        x = rng.standard_normal((n_kv, kv_heads, d), np.float32)
        raw = x if kind == "F32" else x.astype(np.float16) if kind == "F16" else gg.quantize(TYPES[kind][0], x)
        kv.append((np.ascontiguousarray(raw), (d, kv_heads, n_kv)))
    hidden = np.arange(n_kv)[None, :] > np.arange(n)[:, None] + n_kv - n
    mask = np.where(hidden, -np.inf, 0.0).astype(np.float16)
    return [(q, (d, heads, n)), *kv, (mask, (n_kv, n))]


def ours(arrays, types, scale):
    """plan, result tensor."""
    ctx = gg.Context()
    leaves = [ctx.new_tensor(t, ne) for (_, ne), t in zip(arrays, types, strict=True)]
    cpu = gg.init_backend("CPU:n_threads=1")
    gg.alloc_ctx_tensors(ctx, cpu)
    for t, (raw, _) in zip(leaves, arrays, strict=True):
        t.set_bytes(raw)
    q, k, v = (t.ctx.node(OP.PERMUTE, t.type, (t.ne[0], t.ne[2], t.ne[1], 1), (t,), (0, 2, 1, 3), view_of=t,
                          nb=(t.nb[0], t.nb[2], t.nb[1], t.nb[3])) for t in leaves[:3])
    y = gg.flash_attn_ext(q, k, v, leaves[3], scale)
    graph = gg.Graph(y)
    ga = gg.GraphAllocator(cpu)
    ga.alloc_graph(graph)

    def plan_for(n_threads):
        backend = gg.init_backend(f"CPU:n_threads={n_threads}")
        return backend.graph_plan_create(graph, graph.placement)
    return plan_for, y, (ctx, ga)


def measure(peer, kind, d, heads, kv_heads, n, n_kv, n_threads, seconds):
    """(ours, ggml's) lists of seconds per run, and the NMSE between the two."""
    arrays, scale = inputs(kind, d, heads, kv_heads, n, n_kv), 1 / math.sqrt(d)
    g = TYPES[kind]
    run, result = peer.attention(arrays, (0, g[1], g[1], 1), scale)
    plan_for, y, _keep = ours(arrays, (gg.F32, g[0], g[0], gg.F16), scale)
    plan = plan_for(n_threads)
    plan.compute()
    peer.lib.ggml_backend_cpu_set_n_threads(peer.backend, n_threads)
    run()
    a, b = plan.numpy(y).reshape(-1), result()
    nmse = float(np.square(a - b).sum() / np.square(b).sum())
    clock = time.thread_time if n_threads == 1 else time.perf_counter       # CPU time: the machine may be shared
    times = [], []
    t0 = time.perf_counter()
    fns = (plan.compute, run)
    once = []
    for f in fns:
        s = clock()
        f()
        once.append(clock() - s)
    reps = [max(1, int(0.01 / max(t, 1e-6))) for t in once]
    while time.perf_counter() - t0 < seconds or len(times[0]) < 3:
        for f, out, k in zip(fns, times, reps, strict=True):
            f()                                             # untimed: wakes this engine's threads
            s = clock()
            for _ in range(k):
                f()
            out.append((clock() - s) / k)
    peer.free()
    return times, nmse


def cases(quick):
    """(what, kind, d, heads, kv heads, n_batch, n_kv)"""
    yield "stories260K decode", "F32", 8, 8, 4, 1, 256
    yield "MiniLM, one sentence", "F32", 32, 12, 12, 64, 64
    kvs = (512, 2048) if quick else (512, 2048, 8192, 16384)
    for kind in ("F16", "Q8_0"):
        for d, heads, kv_heads in ((128, 32, 8), (128, 32, 32), (64, 32, 4)):
            for n_kv in kvs:
                yield "decode", kind, d, heads, kv_heads, 1, n_kv
        for d, heads, kv_heads in ((128, 8, 2), (128, 8, 8), (64, 32, 4)):
            for n_kv in kvs:
                yield "prefill", kind, d, heads, kv_heads, min(n_kv, 512 if n_kv < 8192 else 64), n_kv


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short contexts only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--only", default="", help="word that the case's line must contain, e.g. prefill or Q8_0")
    args = parser.parse_args()
    peer = Peer()
    print(f"ggml {peer.lib.ggml_version().decode()} (xllamacpp), {args.threads} thread(s)\n")
    print("| work | K, V | D | heads | n_batch | n_kv | ours us (median) | ggml us (median) | ratio (median) | NMSE |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for what, kind, d, heads, kv_heads, n, n_kv in cases(args.quick):
        head = f"| {what} | {kind} | {d} | {heads}/{kv_heads} | {n} | {n_kv} |"
        if args.only and args.only not in head:
            continue
        (a, b), nmse = measure(peer, kind, d, heads, kv_heads, n, n_kv, args.threads, args.seconds)
        lo, mid = [1e6 * min(x) for x in (a, b)], [1e6 * float(np.median(x)) for x in (a, b)]
        print(f"{head} {lo[0]:.1f} ({mid[0]:.1f}) | {lo[1]:.1f} ({mid[1]:.1f}) | {lo[1] / lo[0]:.2f} "
              f"({mid[1] / mid[0]:.2f}) | {nmse:.1e} |", flush=True)


if __name__ == "__main__":
    main()
