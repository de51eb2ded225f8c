"""flash_attn_ext of many queries over a float16 cache, with tensor cores (ops/attention/flash_attn.py): online softmax.

    a warp has 16 queries of a head, the block's warps share tiles of KEYS keys

                      keys                               dims of a value
                 8      8      8      8                  8     8     ...
             +------+------+------+------+            +-----+-----+-----
    queries  |  s      s      s      s   |  16    p @ |  v     v          KEYS        s, p, o: mma tiles of 16 x 8,
             +------+------+------+------+            +-----+-----+-----              float32, in registers

A lane holds s and o of rows g and g + 8, columns 2 t and 2 t + 1 of each tile (g = lane / 4, t = lane % 4), which is
how mma takes p as its left operand: it never leaves the registers.  K lies in shared memory by keys, V by dims, two
keys a word.  q and p are rounded to float16, as in llama.cpp; with PREC_F32 flash_attn.py serves.  Hidden
keys are multiplied by zero, so their values have to be numbers.
"""
from numpy import float32 as f32

from ggjit.ops.core.types import F16
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native import views
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch
from ggjit.ops.cuda.native.sums import LOWEST, ZERO
from ggjit.ops.cuda.rows import ONE
from ggjit.ops.cuda.soft_max import slope_of

WARPS = 1 if SMALL_BLOCKS else 4
THREADS = 32 * WARPS
KEYS = 32                       # keys of a tile
V_STRIDE = 2 * KEYS + 16        # bytes between dims of values in shared memory
MAX_HEAD = 128                  # longer heads would not fit the registers
MIN_QUERIES = 9
MAX_NMSE = 5e-4                 # ggml's own bound for this op: q and p are rounded
LOW_HALF, HIGH_HALF = 0xFFFF, -0x10000
ZEROS = (0, 0, 0, 0)
UNIT = f32(1)


def _unrolled(n, body, first=0):
    """run(o, s, p, x, y): body(0, o, s, p, x, y), ... body(n - 1, o, s, p, x, y), without a loop.

    For local arrays o and s, which stay in registers only where every index is a constant.  How long a loop LLVM
    unrolls by itself depends on the GPU's generation.  All bodies take the same: numba-cuda-mlir passes no *args on.
    """
    if n == 1:
        @core.device
        def run(o, s, p, x, y):
            body(first, o, s, p, x, y)
        return run
    low, high = _unrolled(n // 2, body, first), _unrolled(n - n // 2, body, first + n // 2)

    @core.device
    def run_both(o, s, p, x, y):
        low(o, s, p, x, y)
        high(o, s, p, x, y)
    return run_both


# ---------------------------------------------------------------- into shared memory
def _k_stride(d):
    """Bytes between keys."""
    return 2 * d + 16


@core.device
def _row_of_keys(p, first, n_kv, step, piece):
    """16 bytes of a row of the cache, zeros behind its end."""
    if first < n_kv:
        return core.ld_i32x4(p + first * step + 16 * piece)
    return ZEROS


def _make_loads(d, dv):
    """load_k, load_v: a tile's keys, by keys, and its values, by dims, into shared memory."""
    k_stride = _k_stride(d)

    @core.device
    def load_k(sk, p, step, first, n_kv):
        i = core.thread()
        while i < KEYS * (d // 8):
            key, piece = i // (d // 8), i % (d // 8)
            core.sts_i32x4(sk + key * k_stride + 16 * piece, _row_of_keys(p, first + key, n_kv, step, piece))
            i += THREADS

    @core.device
    def load_v(sv, p, step, first, n_kv):
        """Two keys a thread and round, eight dims: low halves from the first, high ones from the second."""
        i = core.thread()
        while i < KEYS // 2 * (dv // 8):
            pair, piece = i % (KEYS // 2), i // (KEYS // 2)
            x = _row_of_keys(p, first + 2 * pair, n_kv, step, piece)
            y = _row_of_keys(p, first + 2 * pair + 1, n_kv, step, piece)
            for w in range(4):
                to = sv + (8 * piece + 2 * w) * V_STRIDE + 4 * pair
                core.sts_i32(to, (x[w] & LOW_HALF) | (y[w] << 16))
                core.sts_i32(to + V_STRIDE, (x[w] >> 16 & LOW_HALF) | (y[w] & HIGH_HALF))
            i += THREADS
    return load_k, load_v


# ---------------------------------------------------------------- rows of scores
def _make_score(has_mask):
    @core.device
    def score(node, s, pm, key, slope):
        """Scaled, capped and masked; -inf behind the end."""
        cap = views.param_f32(node, 2)
        s *= views.param_f32(node, 0)
        if cap != ZERO:
            s = cap * core.tanh(s / cap)
        if key >= views.ne(node + views.SRC1, 1):
            return LOWEST
        if has_mask:
            s += slope * core.ld_f16(pm + 2 * key)
        return s
    return score


@core.device
def over_quad_max(x):
    x = max(x, core.shfl_xor(x, 1))
    return max(x, core.shfl_xor(x, 2))


@core.device
def over_quad_sum(x):
    x += core.shfl_xor(x, 1)
    return x + core.shfl_xor(x, 2)


def make_factor(has_sinks):
    @core.device
    def factor(node, h, top, total):
        """The factor of a row's sums; 0 for a query that sees no key."""
        total, rest = over_quad_sum(total), UNIT
        if has_sinks:
            sink = core.ld_f32(views.addr(node + views.SRC4) + 4 * h)
            both = max(top, sink)
            rest = core.exp(top - both)
            total = total * rest + core.exp(sink - both)
        return rest / total if total > ZERO else ZERO
    return factor


# ---------------------------------------------------------------- tiles of results
@core.device
def _clear_tile(i, o, s, p, x, y):
    o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3] = ZERO, ZERO, ZERO, ZERO


@core.device
def _add_tile(i, o, s, sv, shrink0, shrink1):
    """The tile's share so far, shrunk, and p times these keys' values."""
    c = (o[4 * i] * shrink0, o[4 * i + 1] * shrink0, o[4 * i + 2] * shrink1, o[4 * i + 3] * shrink1)
    p = sv + 8 * i * V_STRIDE
    for j in range(KEYS // 16):
        x = 8 * j
        p0, p1 = core.pack_f16(s[x], s[x + 1]), core.pack_f16(s[x + 2], s[x + 3])
        p2, p3 = core.pack_f16(s[x + 4], s[x + 5]), core.pack_f16(s[x + 6], s[x + 7])
        c = core.mma_f16(p0, p1, p2, p3, core.lds_i32(p + 32 * j), core.lds_i32(p + 32 * j + 16),
                         c[0], c[1], c[2], c[3])
    o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3] = c[0], c[1], c[2], c[3]


def _put_tile(first):
    @core.device
    def put(i, o, s, to, f, y):
        core.st_f32(to + 32 * i, o[4 * i + first] * f)
        core.st_f32(to + 32 * i + 4, o[4 * i + first + 1] * f)
    return put


# ---------------------------------------------------------------- the kernel
def _make(tq, d, dv, has_mask, has_sinks):
    n_steps, n_values, n_scores, k_stride = d // 16, dv // 8, KEYS // 8, _k_stride(d)
    n_q, n_s, n_o = 4 * n_steps, 4 * n_scores, 4 * n_values             # words of q, scores and results of a lane
    get_q, q_size = ONE[tq].get, tq.nbytes
    shared_k, shared_v = core.shared(KEYS * k_stride), core.shared(dv * V_STRIDE)
    (load_k, load_v), score, factor = _make_loads(d, dv), _make_score(has_mask), make_factor(has_sinks)
    clear, add_values, put_row0, put_row1 = (_unrolled(n_values, body) for body in (
        _clear_tile, _add_tile, _put_tile(0), _put_tile(2)))

    def kernel(node):
        q, k, v, out = node + views.SRC0, node + views.SRC1, node + views.SRC2, node + views.DST
        h, i3, n, n_kv, n_head = core.block_y(), core.block_z(), views.ne(q, 1), views.ne(k, 1), views.ne(q, 2)
        g, t = (core.thread() & 31) >> 2, core.thread() & 3
        row0 = (core.block() * WARPS + (core.thread() >> 5)) * 16 + g
        row1 = row0 + 8
        q0, q1 = views.row_addr(q, min(row0, n - 1), h, i3), views.row_addr(q, min(row1, n - 1), h, i3)
        pk = views.row_addr(k, 0, h // (n_head // views.ne(k, 2)), i3)
        pv = views.row_addr(v, 0, h // (n_head // views.ne(v, 2)), i3)
        m0, m1, slope = 0, 0, UNIT
        if has_mask:
            m0 = views.row_addr_mod(node + views.SRC3, min(row0, n - 1), h, i3)
            m1 = views.row_addr_mod(node + views.SRC3, min(row1, n - 1), h, i3)
            if views.param_f32(node, 1) > ZERO:
                slope = slope_of(h, n_head, views.param_f32(node, 1))
        qs = core.local.array(n_q, "int32")
        s = core.local.array(n_s, "float32")
        o = core.local.array(n_o, "float32")
        for i in range(n_steps):
            for half in range(2):
                at = (16 * i + 8 * half + 2 * t) * q_size
                qs[4 * i + 2 * half] = core.pack_f16(get_q(q0 + at), get_q(q0 + at + q_size))
                qs[4 * i + 2 * half + 1] = core.pack_f16(get_q(q1 + at), get_q(q1 + at + q_size))
        clear(o, s, 0, ZERO, ZERO)
        top0, top1, total0, total1 = LOWEST, LOWEST, ZERO, ZERO
        sk, sv, first = shared_k(), shared_v(), 0
        while first < n_kv:
            load_k(sk, pk, views.nb(k, 1), first, n_kv)
            load_v(sv, pv, views.nb(v, 1), first, n_kv)
            core.sync()
            high0, high1 = top0, top1
            for j in range(n_scores):
                c = (ZERO, ZERO, ZERO, ZERO)
                p = sk + (8 * j + g) * k_stride + 4 * t
                for i in range(n_steps):
                    c = core.mma_f16(qs[4 * i], qs[4 * i + 1], qs[4 * i + 2], qs[4 * i + 3], core.lds_i32(p + 32 * i),
                                     core.lds_i32(p + 32 * i + 16), c[0], c[1], c[2], c[3])
                key = first + 8 * j + 2 * t
                s[4 * j], s[4 * j + 1] = score(node, c[0], m0, key, slope), score(node, c[1], m0, key + 1, slope)
                s[4 * j + 2], s[4 * j + 3] = score(node, c[2], m1, key, slope), score(node, c[3], m1, key + 1, slope)
                high0, high1 = max(high0, s[4 * j]), max(high1, s[4 * j + 2])
                high0, high1 = max(high0, s[4 * j + 1]), max(high1, s[4 * j + 3])
            high0, high1 = over_quad_max(high0), over_quad_max(high1)
            # if all keys so far are hidden, 0
            base0, base1 = high0 if high0 > LOWEST else ZERO, high1 if high1 > LOWEST else ZERO
            shrink0, shrink1 = core.exp(top0 - base0), core.exp(top1 - base1)
            top0, top1, total0, total1 = high0, high1, total0 * shrink0, total1 * shrink1
            for j in range(n_scores):
                s[4 * j], s[4 * j + 1] = core.exp(s[4 * j] - base0), core.exp(s[4 * j + 1] - base0)
                s[4 * j + 2], s[4 * j + 3] = core.exp(s[4 * j + 2] - base1), core.exp(s[4 * j + 3] - base1)
                total0 += s[4 * j] + s[4 * j + 1]
                total1 += s[4 * j + 2] + s[4 * j + 3]
            add_values(o, s, sv + g * V_STRIDE + 4 * t, shrink0, shrink1)
            core.sync()
            first += KEYS
        f0, f1 = factor(node, h, top0, total0), factor(node, h, top1, total1)
        if row0 < n:
            put_row0(o, s, views.row_addr(out, h, row0, i3) + 8 * t, f0, ZERO)
        if row1 < n:
            put_row1(o, s, views.row_addr(out, h, row1, i3) + 8 * t, f1, ZERO)
    return kernel


def by_16_bytes(x):
    return x.view_offs % 16 == 0 and all(b % 16 == 0 for b in x.nb[1:])


def launch(t):
    """The Launch of an attention of enough queries over a float16 cache; None for others."""
    q, k, v, mask, sinks = t.src
    d, dv = q.ne[0], v.ne[0]
    if q.ne[1] < MIN_QUERIES or not k.type is v.type is F16 or max(d, dv) > MAX_HEAD or d % 16 or dv % 8:
        return None
    if not by_16_bytes(k) or not by_16_bytes(v):
        return None
    name = f"flash_attn_mma_{q.type.name}_{d}_{dv}{'_mask' * (mask is not None)}{'_sinks' * (sinks is not None)}"
    return Launch(name, lambda: _make(q.type, d, dv, mask is not None, sinks is not None),
                  (-(-q.ne[1] // (16 * WARPS)), q.ne[2], q.ne[3]), THREADS, max_nmse=MAX_NMSE)
