"""flash_attn_ext (ops/attention/flash_attn.py): online softmax; a block per query row and head.

    keys       0 ... 31   32 ... 63   64 ...          chunks of 32, the block's warps take them in turn
    scores     a lane computes q . k of one key
    values     a lane adds up p v for dimensions lane, lane + 32, ...

Each warp keeps (top score, sum of e^(s - top), sum of e^(s - top) v); in the end the warps' shares are rescaled to one
top and added.  K and V: F32, F16, BF16, Q8_0, Q4_0; other quantised ones are left to the CPU.  Many queries over a
float16 cache go to flash_attn_mma.
"""
from numba import cuda
from numpy import float32 as f32

from ggjit.ops.attention.flash_attn import PREC_F32
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F16, Q4_0, Q8_0
from ggjit.ops.cuda import flash_attn_mma
from ggjit.ops.cuda.native import core, views
from ggjit.ops.cuda.native.launch import SIMULATED, Launch, dense
from ggjit.ops.cuda.native.sums import LOWEST
from ggjit.ops.cuda.rows import FLOATS, ONE
from ggjit.ops.cuda.soft_max import slope_of

THREADS = 64 if SIMULATED else 128
WARPS = THREADS // 32
MAX_HEAD = 576                  # the longest head of a known model (its K; V is 512)
ZERO, UNIT = f32(0), f32(1)
Q8_0_NBYTES, Q4_0_NBYTES = Q8_0.nbytes, Q4_0.nbytes
CACHE_TYPES = (*FLOATS, Q8_0, Q4_0)


@core.device
def _q8_0(row, i):
    p = row + (i >> 5) * Q8_0_NBYTES
    return core.ld_f16(p) * f32(core.ld_i8(p + 2 + (i & 31)))


@core.device
def _q4_0(row, i):
    p = row + (i >> 5) * Q4_0_NBYTES
    return core.ld_f16(p) * f32((core.ld_u8(p + 2 + (i & 15)) >> (4 * (i >> 4 & 1)) & 15) - 8)


def _element(type):
    """get(row, i): element i of the row at address `row`."""
    if type.quantized:
        return {Q8_0: _q8_0, Q4_0: _q4_0}[type]
    get, size = ONE[type].get, type.nbytes

    @core.device
    def element(row, i):
        return get(row + i * size)
    return element


def _make(tq, tk, tv, has_mask, has_sinks, n_pieces):
    get_q, get_k, get_v, get_m = _element(tq), _element(tk), _element(tv), ONE[F16].get
    shared_q, shared_tops, shared_sums = core.shared(4 * MAX_HEAD), core.shared(4 * WARPS), core.shared(4 * WARPS)
    shared_values = core.shared(4 * WARPS * 32 * n_pieces)

    @core.device
    def score(node, q, pk, pm, j, slope):
        """Scaled, capped and masked score of key j for the query in shared memory."""
        scale, cap = views.param_f32(node, 0), views.param_f32(node, 2)
        s, p = ZERO, pk + j * views.nb(node + views.SRC1, 1)
        for i in range(views.ne(node + views.SRC0, 0)):
            s += core.lds_f32(q + 4 * i) * get_k(p, i)
        s *= scale
        if cap != ZERO:
            s = cap * core.tanh(s / cap)
        if has_mask:
            s += slope * get_m(pm + 2 * j)
        return s

    def kernel(node):
        q, k, v, d = node + views.SRC0, node + views.SRC1, node + views.SRC2, node + views.DST
        i1, h, i3 = core.block(), core.block_y(), core.block_z()
        n_kv, n_value, n_head = views.ne(k, 1), views.ne(v, 0), views.ne(q, 2)
        sq = shared_q()
        i = core.thread()
        while i < views.ne(q, 0):
            core.sts_f32(sq + 4 * i, get_q(views.row_addr(q, i1, h, i3), i))
            i += core.n_threads()
        core.sync()
        pk = views.row_addr(k, 0, h // (n_head // views.ne(k, 2)), i3)
        pv = views.row_addr(v, 0, h // (n_head // views.ne(v, 2)), i3)
        pm, slope = 0, UNIT
        if has_mask:
            pm = views.row_addr_mod(node + views.SRC3, i1, h, i3)
            if views.param_f32(node, 1) > ZERO:
                slope = slope_of(h, n_head, views.param_f32(node, 1))
        warp, lane = core.thread() >> 5, core.thread() & 31
        top, total = LOWEST, ZERO
        acc = cuda.local.array(n_pieces, "float32")
        for c in range(n_pieces):
            acc[c] = ZERO
        first = 32 * warp
        while first < n_kv:
            s = LOWEST
            if first + lane < n_kv:
                s = score(node, sq, pk, pm, first + lane, slope)
            higher = max(top, core.warp_max(s))
            if higher > LOWEST:                 # else all keys so far are hidden
                e, shrink = core.exp(s - higher), core.exp(top - higher)
                total = total * shrink + core.warp_sum(e)
                for c in range(n_pieces):
                    acc[c] *= shrink
                for j in range(32):
                    p = core.shfl(e, j)
                    if p > ZERO:                # a value of weight 0 may be inf or NaN
                        at = pv + (first + j) * views.nb(v, 1)
                        for c in range(n_pieces):
                            if 32 * c + lane < n_value:
                                acc[c] += p * get_v(at, 32 * c + lane)
                top = higher
            first += 32 * WARPS
        tops, sums, values = shared_tops(), shared_sums(), shared_values()
        if lane == 0:
            core.sts_f32(tops + 4 * warp, top)
            core.sts_f32(sums + 4 * warp, total)
        for c in range(n_pieces):
            core.sts_f32(values + (warp * n_pieces * 32 + 32 * c + lane) * 4, acc[c])
        core.sync()
        top = LOWEST
        for w in range(WARPS):
            top = max(top, core.lds_f32(tops + 4 * w))
        if has_sinks:
            top = max(top, core.ld_f32(views.addr(node + views.SRC4) + 4 * h))
        total = ZERO
        for w in range(WARPS):
            if core.lds_f32(tops + 4 * w) > LOWEST:
                total += core.lds_f32(sums + 4 * w) * core.exp(core.lds_f32(tops + 4 * w) - top)
        if has_sinks:
            total += core.exp(core.ld_f32(views.addr(node + views.SRC4) + 4 * h) - top)
        factor = ZERO
        if total > ZERO:                        # a query that sees no key gives zeros
            factor = UNIT / total
        i = core.thread()
        while i < n_value:
            y = ZERO
            for w in range(WARPS):
                if core.lds_f32(tops + 4 * w) > LOWEST:
                    y += core.lds_f32(values + (w * n_pieces * 32 + i) * 4) * core.exp(core.lds_f32(tops + 4 * w) - top)
            core.st_f32(views.row_addr(d, h, i1, i3) + 4 * i, y * factor)
            i += core.n_threads()
    return kernel


def _flash_attn(t):
    q, k, v, mask, sinks = t.src
    if q.type not in FLOATS or not {k.type, v.type} <= set(CACHE_TYPES) or not dense(t, q, k, v):
        return None
    if max(q.ne[0], v.ne[0]) > MAX_HEAD or max(q.ne[2], q.ne[3]) > 65535:
        return None
    fast = flash_attn_mma.launch(t) if t.op_params[3] != PREC_F32 else None
    if fast is not None:
        return fast
    pieces = -(-v.ne[0] // 32)
    name = (f"flash_attn_{q.type.name}_{k.type.name}_{v.type.name}_{pieces}"
            f"{'_mask' * (mask is not None)}{'_sinks' * (sinks is not None)}")
    return Launch(name, lambda: _make(q.type, k.type, v.type, mask is not None, sinks is not None, pieces),
                  (q.ne[1], q.ne[2], q.ne[3]), THREADS)


CUDA = {OP.FLASH_ATTN_EXT: _flash_attn}
