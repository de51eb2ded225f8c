"""Flash attention on a KV cache in which the heads of one token lie side by side.

    decode   one query, all keys visible             prefill   n_batch queries at the end of the context, causal mask
    GQA      several query heads on a K/V head       MHA       one each
"""
import math

import numpy as np

import ggjit as gg
from benchmarks.work import Graph

TARGETS = {"wheel": 1.3, "native": 1.1, "llamafile": None}
CONTEXTS, QUICK_CONTEXTS = (512, 2048, 8192, 16384), (512, 4096)
PREFILL_BATCH = 128


def attention(what, kind, d, heads, kv_heads, n, n_kv, quick):
    def build(new):
        hidden = np.arange(n_kv)[None, :] > np.arange(n)[:, None] + n_kv - n
        mask = np.where(hidden, -np.inf, 0.0).astype(np.float16)
        type = getattr(gg, kind)
        q, k, v = (gg.permute(new(t, (d, h, rows)), 0, 2, 1, 3) for t, h, rows in (
            (gg.F32, heads, n), (type, kv_heads, n_kv), (type, kv_heads, n_kv)))
        return gg.flash_attn_ext(q, k, v, new(gg.F16, (n_kv, n), mask), 1 / math.sqrt(d))
    return Graph(key=f"flash-{what}-{kind.lower()}-{heads}on{kv_heads}x{d}-kv{n_kv}", build=build, cold=True,
                 text=f"flash attention {what}, {kind}, {heads} heads on {kv_heads} of {d}, kv {n_kv}, n = {n}",
                 targets=TARGETS, quick=quick, max_nmse=5e-4)


def _grid():
    for kind in ("F16", "Q8_0"):
        for n_kv in sorted({*CONTEXTS, *QUICK_CONTEXTS}):
            quick = n_kv in QUICK_CONTEXTS if kind == "F16" else n_kv == max(QUICK_CONTEXTS)
            for d, heads, kv_heads in ((128, 32, 8), (128, 32, 32), (64, 32, 4)):
                yield attention("decode", kind, d, heads, kv_heads, 1, n_kv, quick)
            for d, heads, kv_heads in ((128, 8, 2), (128, 8, 8), (64, 32, 4)):
                yield attention("prefill", kind, d, heads, kv_heads, PREFILL_BATCH, n_kv, quick)


WORKS = tuple(_grid())
