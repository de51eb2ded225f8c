"""lightning_indexer: scores that select the cached tokens for an attention (DeepSeek V3.2 and V4).

    d[ik, t, s] = mask[ik, t, s] + sum_h w[h, t, s] max(0, sum_e q[e, h, t, s] k[e, ik, s])

W keys lie in the lanes: a block of keys is converted and transposed once into the thread's scratch, then every query
head is a run of broadcast multiply-adds over it, HEADS heads at a time.

    scratch     | k[0] of W keys | k[1] of W keys | ...        and one float32 row on its way there
"""
import math

import numpy as np

from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import n_elements, require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.traits import all_traits, module_of, traits_of
from ggjit.ops.core.types import BF16, F16, F32, Q4_0, Q8_0, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, addr, nb, ne, work
from ggjit.ops.native.row_loops import over_chunks
from ggjit.ops.native.simd import B, W, fadd, fma, ldf, splat, stf, stf_part, vmax, zerof
from ggjit.ops.types.shared.rows import ROW

HEADS = 4                               # query heads that share each load of the keys


def key_types():
    """Types with a to_float."""
    return tuple(t for t, (traits, _) in all_traits().items() if traits.to_float is not None)


def lightning_indexer(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor | None):
    """Scores of n_kv keys for each of n_batch tokens -> F32 [n_kv, n_batch, 1, n_stream].

    d[j, i] = sum_h relu(q[:, h, i] . k[:, j]) weights[h, i] + mask[j, i].  q [d, n_head, n_batch, n_stream] F32; k [d,
    1, n_kv, n_stream] any type that converts to floats; weights [n_head, n_batch, 1, n_stream] F32; mask [n_kv,
    n_batch, 1, divides n_stream] F16; rows contiguous.  Errors: ShapeError, TypeMismatch.  Source:
    ggml_lightning_indexer.
    """
    require_type("lightning_indexer", q, (F32,), "q")
    require_type("lightning_indexer", k, key_types(), "k")
    require_type("lightning_indexer", weights, (F32,), "weights")
    require_type("lightning_indexer", mask, (F16,), "mask")
    (d, n_head, n_batch, n_stream), n_kv = q.ne, k.ne[2]
    require(k.ne == (d, 1, n_kv, n_stream), "lightning_indexer: k must be [d, 1, n_kv, n_stream]", q, k)
    require(weights.ne == (n_head, n_batch, 1, n_stream), "lightning_indexer: weights must be [n_head, n_batch, 1, "
            "n_stream]", q, weights)
    require(mask.ne[:3] == (n_kv, n_batch, 1) and mask.ne[3] > 0 and n_stream % mask.ne[3] == 0,
            "lightning_indexer: mask must be [n_kv, n_batch, 1, divides n_stream]", k, mask)
    for t in (q, k, weights, mask):
        require(rows_contiguous(t), "lightning_indexer: rows must be contiguous", t, remedy="gg.cont it")
    return q.ctx.node(OP.LIGHTNING_INDEXER, F32, (n_kv, n_batch, 1, n_stream), (q, k, weights, mask))


def reference(t, q, k, w, mask):
    s = np.maximum(np.einsum("sthe,skye->sthk", q.astype(np.float64), k.astype(np.float64)), 0)
    reps = q.shape[0] // mask.shape[0]
    return np.einsum("sthk,syth->sytk", s, w.astype(np.float64)) + np.tile(mask.astype(np.float64), (reps, 1, 1, 1))


@inline
def _score(keys, q, q1, w, n_head, d):
    """Scores of W keys at once: the heads of one query, rectified, weighted and added."""
    total, h = zerof(), 0
    while h + HEADS <= n_head:
        s0, s1, s2, s3 = zerof(), zerof(), zerof(), zerof()
        p = q + h * q1
        for e in range(d):
            x = ldf(keys + B * e)
            s0 = fma(splat(ld_f32(p + 4 * e)), x, s0)
            s1 = fma(splat(ld_f32(p + q1 + 4 * e)), x, s1)
            s2 = fma(splat(ld_f32(p + 2 * q1 + 4 * e)), x, s2)
            s3 = fma(splat(ld_f32(p + 3 * q1 + 4 * e)), x, s3)
        total = fma(splat(ld_f32(w + 4 * h)), vmax(s0, zerof()), total)
        total = fma(splat(ld_f32(w + 4 * h + 4)), vmax(s1, zerof()), total)
        total = fma(splat(ld_f32(w + 4 * h + 8)), vmax(s2, zerof()), total)
        total = fma(splat(ld_f32(w + 4 * h + 12)), vmax(s3, zerof()), total)
        h += HEADS
    while h < n_head:
        s0 = zerof()
        for e in range(d):
            s0 = fma(splat(ld_f32(q + h * q1 + 4 * e)), ldf(keys + B * e), s0)
        total = fma(splat(ld_f32(w + 4 * h)), vmax(s0, zerof()), total)
        h += 1
    return total


@inline
def _blocks(node):
    return (ne(node + SRC1, 2) + W - 1) // W * ne(node + SRC0, 3)


def _make(tk):
    to_float, load_mask, load_mask_part = traits_of(tk).to_float, ROW[F16].load, ROW[F16].load_part

    @inline
    def transpose_keys(dst, k, stride, n, d):
        """n <= W keys at k to the lanes of d vectors at dst; missing lanes repeat the last key."""
        tmp = dst + B * d
        for i in range(W):
            to_float(k + min(i, n - 1) * stride, tmp, d)
            for e in range(d):
                st_f32(dst + B * e + 4 * i, ld_f32(tmp + 4 * e))

    @inline
    def rows(node, ith, start, stop):
        q, k, w, m, out = node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + DST
        d, n_head, n_batch, n_kv = ne(q, 0), ne(q, 1), ne(q, 2), ne(k, 2)
        keys = work(node) + ith * ((B * d + 4 * d + 63) // 64 * 64)
        blocks = (n_kv + W - 1) // W
        for r in range(start, stop):
            s = r // blocks
            i = (r - s * blocks) * W
            n = n_kv - i
            transpose_keys(keys, addr(k) + i * nb(k, 2) + s * nb(k, 3), nb(k, 2), min(n, W), d)
            for t in range(n_batch):
                y = _score(keys, addr(q) + t * nb(q, 2) + s * nb(q, 3), nb(q, 1),
                           addr(w) + t * nb(w, 1) + s * nb(w, 3), n_head, d)
                pm = addr(m) + 2 * i + t * nb(m, 1) + s % ne(m, 3) * nb(m, 3)
                po = addr(out) + 4 * i + t * nb(out, 1) + s * nb(out, 3)
                if n >= W:
                    stf(po, fadd(y, load_mask(pm)))
                else:
                    stf_part(po, fadd(y, load_mask_part(pm, n)), n)
        return OK
    return over_chunks(rows, _blocks)


def kernel(t, n_threads):
    q, k, w, mask = t.src
    if (q.type, w.type, mask.type) != (F32, F32, F16) or k.type not in key_types():
        return None
    scratch_nbytes = -(-(B + 4) * q.ne[0] // 64) * 64
    return Kernel(f"lightning_indexer-{k.type.name}", lambda: _make(k.type),
                  cost=0.03 * n_elements(q) * k.ne[2] + 2.0 * k.ne[2] * k.ne[3] * q.ne[0],
                  work_nbytes=n_threads * scratch_nbytes, modules=(module_of(k.type),))


def cases():
    def make(tk, d, n_kv, n_head, n_batch, n_stream, mask_streams):
        return lambda inp: lightning_indexer(
            inp.new(F32, (d, n_head, n_batch, n_stream)), inp.new(tk, (d, 1, n_kv, n_stream)),
            inp.new(F32, (n_head, n_batch, 1, n_stream)), inp.new(F16, (n_kv, n_batch, 1, mask_streams)))
    for tk in (F32, F16, BF16, Q8_0, Q4_0):
        for d, n_kv, n_head, n_batch, n_stream, mask_streams in ((128, 65, 32, 3, 1, 1), (64, 7, 5, 2, 4, 2)):
            yield Case(f"{tk!r} {d} {n_kv} {n_head} {n_batch} {n_stream} {mask_streams}",
                       make(tk, d, n_kv, n_head, n_batch, n_stream, mask_streams), 1e-6)


SPECS = (Spec(op=OP.LIGHTNING_INDEXER, builders=(lightning_indexer,), reference=reference, kernel=kernel,
              cases=cases,
              flops=lambda t: ((2 * t.src[0].ne[0] + 2) * t.src[0].ne[1] + 1) * math.prod(t.ne)),)
