"""flash_attn_ext by tensor cores, keys and values copied ahead of the products (ops/attention/flash_attn.py).

    rows        pairs of a query and a head that share keys     q0 h0 | q0 h1 | q1 h0 | q1 h1 | ...
    warp        16 rows; the warps of a block share tiles of keys, blocks share the keys where rows are few

                      keys                               dims of a value
                 8      8      8      8                  8     8     ...
             +------+------+------+------+            +-----+-----+-----
    rows     |  s      s      s      s   |  16    p @ |  v     v          KEYS        s, p, o: mma tiles of 16 x 8,
             +------+------+------+------+            +-----+-----+-----              float32, in registers

Heads of 80 and 112 dims are filled up with zeros to steps of 32; beyond LONG_HEAD two warps have the same rows, each a
half of the values.  A tile has FEW_KEYS keys there and where one warp has all rows, or registers would not do: the
kernel that walks over a plan has 128 of a thread.

One query of a model with grouped heads so fills rows of a tile that one head alone would leave empty: a key is read
once for all of them.  q k takes dims in the order of mul_mat_piped.py: eight that lie side by side.  Values lie by keys
as well; ldmatrix_t turns them.  Keys and values: F16, copied a tile ahead, or blocks of 32, made float16 on their way
to shared memory (eights.py).  A warp whose keys of a tile are all hidden does nothing with it.

Blocks that share keys leave records as those of flash_attn.py, which its second kernel adds.
"""
from numpy import float32 as f32

from ggjit.ops.attention.flash_attn import PREC_F32, flash_attn_ext, flash_attn_ext_add_sinks
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F16
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.eights import EIGHTS
from ggjit.ops.cuda.flash_attn import make_merge, make_records_of, own, with_records
from ggjit.ops.cuda.flash_attn_mma import MAX_NMSE, by_16_bytes, make_factor, over_quad_max, over_quad_sum
from ggjit.ops.cuda.native import views
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch, NodeWays, dense, rounded
from ggjit.ops.cuda.native.sums import LOWEST, ZERO
from ggjit.ops.cuda.native.unrolled import unrolled
from ggjit.ops.cuda.rows import FLOATS, ONE
from ggjit.ops.cuda.soft_max import slope_of

KEYS, STAGES = 32, 2
LONG_HEAD, FEW_KEYS = 128, 16
MAX_HEAD, MAX_WARPS = 256, 1 if SMALL_BLOCKS else 4
MAX_SHARES, ENOUGH_WARPS = 64, 8 if SMALL_BLOCKS else 1024
K_PAD, V_PAD = 64, 16           # bytes behind a row in shared memory: no two lanes of a load meet in a bank
ZEROS = (0, 0, 0, 0)
UNIT = f32(1)


# ---------------------------------------------------------------- rows, shares
def _halves(dv):
    """Warps that share 16 rows: each adds a half of a long head's values, which one has no registers for."""
    return 2 if dv > LONG_HEAD else 1


def _blocks_of_rows(n_rows, warps):
    return (n_rows + 16 * warps - 1) // (16 * warps)


def _shares(n_kv, n_warps, keys):
    """Blocks that share the keys of the same rows, where so many warps would have them alone."""
    return max(1, min(min((n_kv + 2 * keys - 1) // (2 * keys), MAX_SHARES), ENOUGH_WARPS // n_warps))


shares, blocks_of_rows = core.device(_shares), core.device(_blocks_of_rows)


def _keys_of(warps):
    """Of a tile, as far as rows say."""
    return FEW_KEYS if warps == 1 else KEYS


def _make_shares_of(warps):
    keys = _keys_of(warps)

    @core.device
    def shares_of(node):
        q, k = node + views.SRC0, node + views.SRC1
        n_rows = views.ne(q, 1) * (views.ne(q, 2) // views.ne(k, 2))
        return shares(views.ne(k, 1), warps * blocks_of_rows(n_rows, warps) * views.ne(k, 2) * views.ne(q, 3),
                      keys)
    return shares_of


@core.device
def place_of(node, row):
    """(query, head) of a row of this block's group of heads."""
    rep = views.ne(node + views.SRC0, 2) // views.ne(node + views.SRC1, 2)
    i1 = row // rep
    return i1, core.block_y() * rep + row - i1 * rep


# ---------------------------------------------------------------- keys and values into shared memory
def _make_fill(type, d, padded, stride, threads, keys):
    """fill(to, base, step, first, n_kv): a tile's rows of d values, as float16; zeros behind them, up to `padded`, and
    behind the last key."""
    pieces, of_values, copies = padded // 8, d // 8, type is F16
    raw, words = EIGHTS[type].raw, EIGHTS[type].words

    @core.device
    def fill(to, base, step, first, n_kv):
        i = core.thread()
        while i < keys * pieces:
            key, piece = i // pieces, i % pieces
            at = to + key * stride + 16 * piece
            if copies:
                core.copy_16(at, base + (first + key) * step + 16 * piece,
                             16 if first + key < n_kv and piece < of_values else 0)
            elif first + key < n_kv:
                core.sts_i32x4(at, words(raw(base + (first + key) * step, piece)))
            else:
                core.sts_i32x4(at, ZEROS)
            i += threads
    return fill


# ---------------------------------------------------------------- scores
def _make_hidden(has_mask):
    @core.device
    def hidden(node, pm, key, slope):
        """What is added to a score: -inf behind the last key."""
        if key >= views.ne(node + views.SRC1, 1):
            return LOWEST
        if has_mask:
            return slope * core.ld_f16(pm + 2 * key)
        return ZERO
    return hidden


@core.device
def score(node, c, s):
    """Scaled, capped and masked: c is q k, s what is added."""
    cap = views.param_f32(node, 2)
    c *= views.param_f32(node, 0)
    if cap != ZERO:
        c = cap * core.tanh(c / cap)
    return c + s


def _make_slope(has_mask):
    @core.device
    def slope(node, h):
        if has_mask and views.param_f32(node, 1) > ZERO:
            return slope_of(h, views.ne(node + views.SRC0, 2), views.param_f32(node, 1))
        return UNIT
    return slope


def _make_queries(tq, d):
    """load(qs, q, at): eight values of a row of queries in each step of 32 dims, as float16, to words at, at + 2 ...;
    zeros behind the last dim."""
    get, size, steps, whole = ONE[tq].get, tq.nbytes, _padded(d) // 32, d % 32 == 0

    @core.device
    def load(qs, q, at):
        for i in range(steps):
            for w in range(4):
                dim = 32 * i + 8 * (core.thread() & 3) + 2 * w
                if whole or dim < d:
                    qs[8 * i + 2 * w + at] = core.pack_f16(get(q + dim * size), get(q + dim * size + size))
                else:
                    qs[8 * i + 2 * w + at] = 0
    return load


def _padded(d):
    """Dims of queries and keys as they are multiplied: steps of 32."""
    return -(-d // 32) * 32


def _make_scores(d, k_stride, keys):
    """scores(s, qs, node, at): s becomes the scores of a tile; at: this lane's eight of its first key."""
    steps = d // 32

    @core.device
    def of_keys(j, s, qs, node, at):
        c = (ZERO, ZERO, ZERO, ZERO)
        for i in range(steps):
            b0, b1, b2, b3 = core.lds_i32x4(at + 8 * j * k_stride + 64 * i)
            x = 8 * i
            c = core.mma_f16(qs[x], qs[x + 1], qs[x + 2], qs[x + 3], b0, b1, c[0], c[1], c[2], c[3])
            c = core.mma_f16(qs[x + 4], qs[x + 5], qs[x + 6], qs[x + 7], b2, b3, c[0], c[1], c[2], c[3])
        for i in range(4):
            s[4 * j + i] = score(node, c[i], s[4 * j + i])

    @core.device
    def scores(s, qs, node, at):
        of_keys(0, s, qs, node, at)
        of_keys(1, s, qs, node, at)
        if keys > FEW_KEYS:
            of_keys(2, s, qs, node, at)
            of_keys(3, s, qs, node, at)
    return scores


def _make_add_values(v_stride, keys):
    """add(jj, o, p, at): p times the values of 16 dims, to the results; at: this lane's row of matrices."""
    @core.device
    def add(j, o, p, at):
        for i in range(keys // 16):
            v0, v1, v2, v3 = core.ldmatrix_t(at + 16 * i * v_stride + 32 * j)
            x, y = 4 * i, 8 * j
            c = core.mma_f16(p[x], p[x + 1], p[x + 2], p[x + 3], v0, v1, o[y], o[y + 1], o[y + 2], o[y + 3])
            e = core.mma_f16(p[x], p[x + 1], p[x + 2], p[x + 3], v2, v3, o[y + 4], o[y + 5], o[y + 6], o[y + 7])
            for z in range(4):
                o[y + z], o[y + 4 + z] = c[z], e[z]
    return add


# ---------------------------------------------------------------- results
def _make_put(dv, halves, coded):
    """put(node, row, first, o, top, total, n, share, half): a row's results, times `total`, or its share's record."""
    n_eights, n_dims, records_of = dv // 8 // halves, dv // halves, make_records_of(coded)

    @core.device
    def put(node, row, first, o, top, total, n, share, half):
        i1, h = place_of(node, row)
        i3, t = core.block_z(), core.thread() & 3
        to, f = views.row_addr(node + views.DST, h, i1, i3), total
        if n > 1:
            to, f = records_of(node, i1, h, i3, n) + 4 * share * (dv + 2), UNIT
            if t == 0 and half == 0:
                core.st_f32(to + 4 * dv, top)
                core.st_f32(to + 4 * dv + 4, total)
        to += 4 * half * n_dims + 8 * t
        for i in range(n_eights):
            core.st_f32(to + 32 * i, o[4 * i + first] * f)
            core.st_f32(to + 32 * i + 4, o[4 * i + first + 1] * f)
    return put


# ---------------------------------------------------------------- the kernel
def _make(types, d, dv, warps, has_mask, has_sinks, coded):
    (tq, tk, tv), keys, padded = types, _keys_of(warps) if max(d, dv) <= LONG_HEAD else FEW_KEYS, _padded(d)
    halves = _halves(dv)
    k_stride, v_stride, threads = 2 * padded + K_PAD, 2 * dv + V_PAD, 32 * warps * halves
    v_at, stage_nbytes = keys * k_stride, keys * (k_stride + v_stride)
    n_o, n_q, n_s, n_p = dv // 2 // halves, padded // 4, keys // 2, keys // 4   # words of a lane
    shared, await_copies = core.shared(STAGES * stage_nbytes), core.copies_but(0)
    fill_k, fill_v = (_make_fill(*x, threads, keys) for x in ((tk, d, padded, k_stride), (tv, dv, dv, v_stride)))
    hidden, slope, load_q, scores = _make_hidden(has_mask), _make_slope(has_mask), _make_queries(tq, d), _make_scores(
        padded, k_stride, keys)
    factor = make_factor(has_sinks)
    add_values, put, shares_of = unrolled(dv // 16 // halves, _make_add_values(v_stride, keys)), _make_put(
        dv, halves, coded), _make_shares_of(warps)
    half_nbytes = 2 * dv // halves

    @core.device
    def fill(node, to, first):
        k, v, n_kv = node + views.SRC1, node + views.SRC2, views.ne(node + views.SRC1, 1)
        if first < n_kv:
            fill_k(to, views.row_addr(k, 0, core.block_y(), core.block_z()), views.nb(k, 1), first, n_kv)
            fill_v(to + v_at, views.row_addr(v, 0, core.block_y(), core.block_z()), views.nb(v, 1), first, n_kv)
        core.copies_end()

    @core.device
    def mask_of(node, row):
        i1, h = place_of(node, row)
        return (views.row_addr_mod(node + views.SRC3, i1, h, core.block_z()) if has_mask else 0), slope(node, h)

    def kernel(node):
        q, n_kv, n = node + views.SRC0, views.ne(node + views.SRC1, 1), shares_of(node)
        n_rows = views.ne(q, 1) * (views.ne(q, 2) // views.ne(node + views.SRC1, 2))
        block, lane = core.block() // n, core.thread() & 31
        share, g, t = core.block() - block * n, lane >> 2, lane & 3
        half = (core.thread() >> 5) % halves
        row0 = (block * warps + (core.thread() >> 5) // halves) * 16 + g
        row1 = row0 + 8
        (i0, h0), (i1, h1) = place_of(node, min(row0, n_rows - 1)), place_of(node, min(row1, n_rows - 1))
        m0, slope0 = mask_of(node, min(row0, n_rows - 1))
        m1, slope1 = mask_of(node, min(row1, n_rows - 1))
        qs, p = core.local.array(n_q, "int32"), core.local.array(n_p, "int32")
        s, o = core.local.array(n_s, "float32"), core.local.array(n_o, "float32")
        load_q(qs, views.row_addr(q, i0, h0, core.block_z()), 0)
        load_q(qs, views.row_addr(q, i1, h1, core.block_z()), 1)
        for i in range(n_o):
            o[i] = ZERO
        top0, top1, total0, total1 = LOWEST, LOWEST, ZERO, ZERO
        n_tiles, base, stage = (n_kv + keys - 1) // keys, shared(), 0
        first, end = n_tiles * share // n * keys, n_tiles * (share + 1) // n * keys
        fill(node, base, first)
        while first < end:
            await_copies()
            core.sync()
            if first + keys < end:
                fill(node, base + (1 - stage) * stage_nbytes, first + keys)
            seen = LOWEST
            for j in range(keys // 8):
                key, x = first + 8 * j + 2 * t, 4 * j
                s[x], s[x + 1] = hidden(node, m0, key, slope0), hidden(node, m0, key + 1, slope0)
                s[x + 2], s[x + 3] = hidden(node, m1, key, slope1), hidden(node, m1, key + 1, slope1)
                seen = max(seen, max(max(s[x], s[x + 1]), max(s[x + 2], s[x + 3])))
            if core.ballot(seen > LOWEST) != 0:
                sk = base + stage * stage_nbytes
                scores(s, qs, node, sk + g * k_stride + 16 * t)
                high0, high1 = top0, top1
                for j in range(keys // 8):
                    x = 4 * j
                    high0, high1 = max(high0, max(s[x], s[x + 1])), max(high1, max(s[x + 2], s[x + 3]))
                high0, high1 = over_quad_max(high0), over_quad_max(high1)
                # if all keys so far are hidden, 0
                base0, base1 = high0 if high0 > LOWEST else ZERO, high1 if high1 > LOWEST else ZERO
                shrink0, shrink1 = core.exp(top0 - base0), core.exp(top1 - base1)
                top0, top1, total0, total1 = high0, high1, total0 * shrink0, total1 * shrink1
                for j in range(keys // 8):
                    x = 4 * j
                    e0, e1 = core.exp(s[x] - base0), core.exp(s[x + 1] - base0)
                    e2, e3 = core.exp(s[x + 2] - base1), core.exp(s[x + 3] - base1)
                    total0, total1 = total0 + (e0 + e1), total1 + (e2 + e3)
                    p[2 * j], p[2 * j + 1] = core.pack_f16(e0, e1), core.pack_f16(e2, e3)
                for i in range(n_o // 4):
                    x = 4 * i
                    o[x], o[x + 1], o[x + 2], o[x + 3] = (o[x] * shrink0, o[x + 1] * shrink0, o[x + 2] * shrink1,
                                                          o[x + 3] * shrink1)
                add_values(o, p, sk + v_at + (lane & 15) * v_stride + 16 * (lane >> 4) + half * half_nbytes)
            stage, first = 1 - stage, first + keys
        if n > 1:
            total0, total1 = over_quad_sum(total0), over_quad_sum(total1)
        else:
            total0, total1 = factor(node, h0, top0, total0), factor(node, h1, top1, total1)
        if row0 < n_rows:
            put(node, row0, 0, o, top0, total0, n, share, half)
        if row1 < n_rows:
            put(node, row1, 2, o, top1, total1, n, share, half)
    return kernel


# ---------------------------------------------------------------- launches
def _serves(t):
    q, k, v = t.src[:3]
    d, dv = q.ne[0], v.ne[0]
    if q.type not in FLOATS or not dense(t, q, k, v) or t.op_params[3] == PREC_F32 or min(q.ne) == 0 or k.ne[1] == 0:
        return False
    if max(d, dv) > MAX_HEAD or d % 16 or dv % (16 * _halves(dv)):
        return False
    if k.ne[2] != v.ne[2] or max(k.ne[2], q.ne[3]) > 65535:
        return False
    return all(x.type is F16 and by_16_bytes(x) or x.type in BLOCKS and BLOCKS[x.type].pair is not None for x in (k, v))


def launch(t, coded=False):
    """The Launches of an attention, or None; coded: of those that leave the codes of its result, too."""
    if not _serves(t):
        return None
    q, k, v, mask, sinks = t.src
    n_rows = q.ne[1] * (q.ne[2] // k.ne[2])
    warps = min(MAX_WARPS, 1 if n_rows <= 16 else 2 if n_rows <= 32 else 4)
    blocks = _blocks_of_rows(n_rows, warps)
    n = _shares(k.ne[1], warps * blocks * k.ne[2] * q.ne[3], _keys_of(warps))
    if coded and n == 1:
        return None
    types, options = (q.type, k.type, v.type), (mask is not None, sinks is not None)
    name = (f"flash_attn_piped_{'_'.join(x.name for x in types)}_{q.ne[0]}_{v.ne[0]}_{warps}{'_mask' * options[0]}"
            f"{'_sinks' * options[1]}{'_coded' * coded}")
    part = Launch(name, lambda: _make(types, q.ne[0], v.ne[0], warps, *options, coded), (blocks * n, k.ne[2], q.ne[3]),
                  32 * warps * _halves(v.ne[0]), max_nmse=MAX_NMSE)
    merge = Launch(f"flash_attn_piped_merge_{warps}{'_sinks' * options[1]}{'_coded' * coded}",
                   lambda: make_merge(options[1], _make_shares_of(warps), coded), (q.ne[1], q.ne[2], q.ne[3]), 128)
    return with_records(t, part, merge, n, launch, coded)


def _class_of(t):
    q, k, v, mask, _ = t.src
    return (f"attention {k.type.name} {v.type.name} {q.ne[0]}-{v.ne[0]} {rounded(q.ne[1])}x{rounded(k.ne[1])} "
            f"{q.ne[2]}x{k.ne[2]}x{rounded(q.ne[3])}{' mask' * (mask is not None)}")


def _again(t, q, k, v, mask, sinks):
    return flash_attn_ext_add_sinks(flash_attn_ext(q, k, v, mask, *t.param_floats[:3].tolist()), sinks)


WAYS = {OP.FLASH_ATTN_EXT: NodeWays(own, _class_of, _again, piped=launch)}
