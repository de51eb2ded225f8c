"""The second set of CUDA kernels (GGJIT_PIPED, engine/cuda/libraries.py) beside the first one, torch and a copy, by
events: is it right, how fast is it, what is that of the most that the card does?  What matters most comes first.

A product of one column is held against the bytes that a copy moves, one of many columns and attention of many queries
against the best product of float16 matrices by torch; attention of one query against a copy again.
"""
import dataclasses
import functools
import importlib.util
import os
from unittest import mock

import numpy as np

import ggjit as gg
from benchmarks.gpu_report import each
from benchmarks.report import Row, Spread
from ggjit.cuda import libraries
from ggjit.tools.suite.runner import as_bytes

MAX_NMSE = libraries.MAX_NMSE


@dataclasses.dataclass(frozen=True)
class PipedWork:
    """One node that is timed.

    build(*leaves), leaves      the node, and its leaves' (type, ne)
    amount, unit                what it does: bytes, or multiplications and additions
    target                      of the most that the card does
    copies                      so many nodes with weights of their own: they come from memory, not from a cache
    torch                       (heads, heads of keys, queries, keys, dims) of an attention that torch can compute
    """
    label: str
    build: object
    leaves: tuple
    amount: float
    unit: str
    target: float
    copies: int = 1
    torch: tuple | None = None


def _product(type, k, m, n, flush_nbytes=0):
    nbytes, few = type.row_nbytes(k) * m, n <= 32
    return PipedWork(f"{'mat-vec' if n == 1 else 'product'} {type!r} {k} x {m}, {n} columns", gg.mul_mat,
                ((type, (k, m)), (gg.F32, (k, n))), nbytes if few else 2.0 * k * m * n, "GB/s" if few else "TFLOP/s",
                0.85 if n == 1 else 0.6, max(2, min(20, -(-2 * flush_nbytes // nbytes))) if few else 1)


def _attention(type, d, n, n_kv, heads, heads_kv):
    def build(q, k, v, *mask):
        return gg.flash_attn_ext(q, k, v, mask[0] if mask else None, d ** -0.5, 0.0, 0.0)
    cache, few = (type, (d, n_kv, heads_kv)), n <= 16
    nbytes = 2 * type.row_nbytes(d) * n_kv * heads_kv
    return PipedWork(f"attention {type!r} d={d} heads={heads}/{heads_kv} n={n} kv={n_kv}", build,
                ((gg.F32, (d, n, heads)), cache, cache), nbytes if few else 4.0 * d * heads * n * n_kv,
                "GB/s" if few else "TFLOP/s", 0.85 if few else 0.5, torch=(heads, heads_kv, n, n_kv, d))


def works(scale):
    """All PipedWorks, what matters most first."""
    if scale.dry:
        return [_product(gg.Q4_0, 64, 5, 1), _product(gg.Q8_0, 64, 5, 33), _attention(gg.F16, 32, 1, 40, 2, 1)]
    flush = scale.flush_nbytes
    columns = functools.partial(_product, k=4096, m=14336)
    first, rest = (gg.Q4_0, gg.Q8_0, gg.Q4_K, gg.Q6_K), [t for t in map(functools.partial(getattr, gg), scale.weights)
                                                          if t.quantized]
    return [*(columns(t, n=1, flush_nbytes=flush) for t in first),
            *(_attention(t, 128, 1, 4096, 32, 8) for t in (gg.F16, gg.Q8_0)),
            *(columns(t, n=512) for t in (gg.F16, *first)),
            *(_attention(gg.F16, d, 512, 512, 32, 8) for d in (64, 128)),
            *(columns(t, n=n, flush_nbytes=flush) for n in (8, 32, 128) for t in (gg.F16, *first)),
            _product(gg.F16, 4096, 4096, 4096), _product(gg.F16, 8192, 8192, 8192),
            *(_attention(t, 64, n, 4096, 32, 8) for t in (gg.F16, gg.Q4_0) for n in (1, 512)),
            *(columns(t, n=1, flush_nbytes=flush) for t in rest if t not in first),
            *(columns(t, n=512) for t in (gg.BF16, gg.Q4_1, gg.Q5_0, gg.Q5_1))]


# ---------------------------------------------------------------- rows
def leaves(gpu, work):
    """[leaves of a node] for each of work.copies nodes; the first leaf is its own, a few rows again and again."""
    ctx, rng = gg.Context(), np.random.default_rng(0)
    firsts = [ctx.new_tensor(*work.leaves[0]) for _ in range(work.copies)]
    others = [ctx.new_tensor(*leaf) for leaf in work.leaves[1:]]
    gg.alloc_ctx_tensors(ctx, gpu)
    for t in (*firsts, *others):
        t.set_bytes(np.resize(np.frombuffer(as_bytes(t, rng.uniform(-1, 1, (64, t.ne[0]))), np.uint8), t.nbytes))
    return [(first, *others) for first in firsts]


def timed(timer, work, way, made):
    """(Spread of the rate, the first node's result) of a way."""
    factor = 1e9 if work.unit == "GB/s" else 1e12
    nodes = [work.build(*x) for x in made]
    with libraries.forced(way):
        plan = timer.plan(*nodes)
    seconds = timer.seconds(plan.compute, len(nodes))
    return Spread([work.amount / s / factor for s in seconds], work.unit), plan.numpy(nodes[0]).astype(np.float64)


def torch_attention(timer, work, torch_seconds):
    """Spread of torch's scaled_dot_product_attention over a float16 cache, or None without torch."""
    if timer.scale.dry or importlib.util.find_spec("torch") is None:
        return None
    import torch
    if not torch.cuda.is_available() or work.torch is None or work.leaves[1][0] is not gg.F16:
        return None
    heads, heads_kv, n, n_kv, d = work.torch
    q, k = (torch.randn(1, h, m, d, device="cuda", dtype=torch.float16) for h, m in ((heads, n), (heads_kv, n_kv)))
    f = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, k, enable_gqa=heads != heads_kv)
    factor = 1e9 if work.unit == "GB/s" else 1e12
    return Spread([work.amount / s / factor for s in torch_seconds(timer, f)], work.unit)


def rows_of(timer, work, most, torch_seconds):
    """A Row for each way of the second set.  most: {unit: the most that the card does}."""
    made, found, capability = leaves(timer.gpu, work), {}, timer.gpu.device.compute_capability
    for way in libraries.ways(work.build(*made[0]), capability):
        found[way] = timed(timer, work, way, made)
    (own, right), said = found["own"], [f"cuBLAS {found['cublas'][0]}"] if "cublas" in found else []
    peer = torch_attention(timer, work, torch_seconds)
    for way in (way for way in (libraries.PIPED, libraries.WARPGROUPS) if way in found):
        ours, got = found[way]
        error = float(np.square(got - right).sum() / max(np.square(right).sum(), 1e-30))
        share = ours.median / most[work.unit] if most.get(work.unit) else None
        note = [f"NMSE to own {error:.1e}{'' if error <= MAX_NMSE else ' WRONG'}", *said]
        note += [f"{share:.0%} of {most[work.unit]:,.0f} {work.unit}"] if share is not None else []
        note += [f"torch {peer}, {ours.median / peer.median:.2f} of it"] if peer is not None else []
        passed = error <= MAX_NMSE and (share is None or share >= work.target)
        yield Row(f"{way} {work.label}", f"{work.target:.0%} of the most", ours, own, ours.median / own.median, passed,
                  "; ".join(note), against="own kernels")


def piped_rows(timer, peak, torch_seconds):
    """Rows for each work.  peak: bytes a second of a copy; torch_seconds(timer, f): of f by torch's events."""
    with piping(libraries.YES):
        most = {"GB/s": peak / 1e9, "TFLOP/s": _torch_peak(timer, torch_seconds)}
        yield from each([(work.label, functools.partial(rows_of, timer, work, most, torch_seconds))
                         for work in works(timer.scale)], timer.scale.dry)


def _torch_peak(timer, torch_seconds, n=8192):
    """TFLOP/s of torch's product of float16 matrices, None without torch."""
    if timer.scale.dry or importlib.util.find_spec("torch") is None:
        return None
    import torch
    if not torch.cuda.is_available():
        return None
    a = torch.randn(n, n, device="cuda", dtype=torch.float16)
    return 2e-12 * n ** 3 / float(np.median(torch_seconds(timer, lambda: a @ a)))


def piping(said):
    """Plans made inside are piped as GGJIT_PIPED says then."""
    return mock.patch.dict(os.environ, GGJIT_PIPED=said)

