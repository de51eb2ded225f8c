"""flash_attn_ext (ops/attention/flash_attn.py) of few queries: online softmax, keys shared among lanes and blocks.

    keys       0 1 2 3 | 4 5 6 7 | ...         a group of lanes takes four at a time, the groups of a block in turn
    lanes      |---|---|---|---|               of a group: 8 elements of a head each, 16 bytes of float16 at once
    blocks     0 ........ | 1 ........         shares of the keys, where there are many of them

Each group keeps a record (sum of e^(s - top) v, top score, sum of e^(s - top)).  The records of a block, then those of
the blocks, are rescaled to one top and added.  `coded`: the result's 8-bit codes are left as well, in front of the
blocks' records (ops/cuda/matmul/with_codes.py).  K and V: F32, F16, BF16 and quantised blocks of 32.  Many queries over
a float16 cache go to flash_attn_mma.
"""
import dataclasses
import math

from numpy import float32 as f32

from ggjit.ops.attention.flash_attn import PREC_F32
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F16, F32
from ggjit.ops.cuda import flash_attn_mma, quantize_columns
from ggjit.ops.cuda.blocks import BLOCKS, byte_of
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native import views
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch, dense
from ggjit.ops.cuda.native.sums import LOWEST
from ggjit.ops.cuda.rows import FLOATS, ONE, WIDE
from ggjit.ops.cuda.soft_max import slope_of

THREADS = 64 if SMALL_BLOCKS else 128
SHARE_KEYS = 16 if SMALL_BLOCKS else 128           # of a block, where there are several
MAX_SHARES, ENOUGH_BLOCKS = 64, 1024
MAX_HEAD = 576                  # the longest head of a known model (its K; V is 512)
ZERO, UNIT = f32(0), f32(1)
codes_nbytes, nbytes_of_codes = quantize_columns.nbytes, core.device(quantize_columns.nbytes)


# ---------------------------------------------------------------- eight elements of a row
def _eight_alone(element):
    """eight(row, c, n): elements 8 c ... 8 c + 7 of a row of n, one by one; 0 beyond its end."""
    @core.device
    def one(row, i, n):
        return element(row, i) if i < n else ZERO

    @core.device
    def eight(row, c, n):
        i = 8 * c
        return (one(row, i, n), one(row, i + 1, n), one(row, i + 2, n), one(row, i + 3, n), one(row, i + 4, n),
                one(row, i + 5, n), one(row, i + 6, n), one(row, i + 7, n))
    return eight


def _eight_wide(type):
    if type is F32:
        @core.device
        def eight(row, c, n):
            a0, a1, a2, a3 = core.ld_f32x4(row + 32 * c)
            a4, a5, a6, a7 = core.ld_f32x4(row + 32 * c + 16)
            return a0, a1, a2, a3, a4, a5, a6, a7
        return eight
    load = WIDE[type]

    @core.device
    def eight(row, c, n):
        return load(row + 16 * c)
    return eight


def _eight_codes(blocks):
    """eight of a quantised type; see block_bits.py."""
    nbytes, pair, scale, mins = blocks.type.nbytes, blocks.pair, blocks.scale, blocks.mins

    @core.device
    def eight(row, c, n):
        p = row + (c >> 2) * nbytes
        w0, w1 = pair(p, c & 3)
        d, m = scale(p, 0, (c & 3) >> 1)
        x0, x1, x2, x3 = d * byte_of(w0, 0), d * byte_of(w0, 1), d * byte_of(w0, 2), d * byte_of(w0, 3)
        x4, x5, x6, x7 = d * byte_of(w1, 0), d * byte_of(w1, 1), d * byte_of(w1, 2), d * byte_of(w1, 3)
        if mins:
            return x0 + m, x1 + m, x2 + m, x3 + m, x4 + m, x5 + m, x6 + m, x7 + m
        return x0, x1, x2, x3, x4, x5, x6, x7
    return eight


QUANTIZED = {type: _eight_codes(blocks) for type, blocks in BLOCKS.items() if blocks.pair is not None}


def _float_element(type):
    get, size = ONE[type].get, type.nbytes

    @core.device
    def element(row, i):
        return get(row + i * size)
    return element


def _eight(type, wide):
    if type.quantized:
        return QUANTIZED[type]
    return _eight_wide(type) if wide else _eight_alone(_float_element(type))


def _is_wide(t):
    """16-byte loads reach eight elements at a time."""
    return not t.type.quantized and t.ne[0] % 8 == 0 and t.view_offs % 16 == 0 and all(s % 16 == 0 for s in t.nb[1:])


# ---------------------------------------------------------------- records: values, top, total
def _merging(load):
    """top(records, n, n_value) and scaled(records, n, n_value, i, top): word i of n records, rescaled and added."""
    @core.device
    def top(records, n, n_value):
        highest = LOWEST
        for r in range(n):
            highest = max(highest, load(records + 4 * (r * (n_value + 2) + n_value)))
        return highest

    @core.device
    def scaled(records, n, n_value, i, top):
        s = ZERO
        for r in range(n):
            at = records + 4 * r * (n_value + 2)
            own = load(at + 4 * n_value)
            if own > LOWEST:
                s += load(at + 4 * i) * core.exp(own - top)
        return s
    return top, scaled


@core.device
def put_coded(node, i1, h, i3, i, x):
    """The code of element i of a query and head: a column is all heads of a query."""
    d = node + views.DST
    k, n = views.ne(d, 0) * views.ne(d, 1), views.ne(d, 2) * views.ne(d, 3)
    at, codes = (i3 * views.ne(d, 2) + i1) * k + h * views.ne(d, 0) + i, views.work(node)
    quantize_columns.put_code(codes + at, codes + n * k + (at >> 5) * 4, x)


def _result(load, has_sinks, coded):
    """put(node, i1, h, i3, records, n): the result of one query and head from n records."""
    top_of, scaled = _merging(load)

    @core.device
    def put(node, i1, h, i3, records, n):
        d, n_value = node + views.DST, views.ne(node + views.DST, 0)
        top, sink = top_of(records, n, n_value), LOWEST
        if has_sinks:
            sink = core.ld_f32(views.addr(node + views.SRC4) + 4 * h)
            top = max(top, sink)
        total = scaled(records, n, n_value, n_value + 1, top)
        if has_sinks:
            total += core.exp(sink - top)
        factor = ZERO
        if total > ZERO:                        # a query that sees no key gives zeros
            factor = UNIT / total
        i = core.thread()
        while i < n_value:
            x = scaled(records, n, n_value, i, top) * factor
            core.st_f32(views.row_addr(d, h, i1, i3) + 4 * i, x)
            if coded:
                put_coded(node, i1, h, i3, i, x)
            i += core.n_threads()
    return put


def n_shares(n_kv, n_rows):
    """Blocks that share the keys of one of n_rows pairs of query and head."""
    return max(1, min(min(-(-n_kv // SHARE_KEYS), MAX_SHARES), ENOUGH_BLOCKS // n_rows))


shares_of = core.device(n_shares)


@core.device
def _shares_of_node(node):
    q = node + views.SRC0
    return shares_of(views.ne(node + views.SRC1, 1), views.ne(q, 1) * views.ne(q, 2) * views.ne(q, 3))


def make_records_of(coded):
    """records_of(node, i1, h, i3, n): address of the n records of a query and head in the node's scratch memory."""
    @core.device
    def records_of(node, i1, h, i3, n):
        q, d = node + views.SRC0, node + views.DST
        row = (i3 * views.ne(q, 2) + h) * views.ne(q, 1) + i1
        first = views.work(node)
        if coded:
            first += nbytes_of_codes(views.ne(d, 0) * views.n_rows(d), 1)
        return first + 4 * row * n * (views.ne(d, 0) + 2)
    return records_of


def make_merge(has_sinks, shares, coded):
    """The kernel that adds the records of each query and head; shares(node): how many they are."""
    put, records_of = _result(core.ld_f32, has_sinks, coded), make_records_of(coded)

    def kernel(node):
        i1, h, i3, n = core.block(), core.block_y(), core.block_z(), shares(node)
        put(node, i1, h, i3, records_of(node, i1, h, i3, n), n)
    return kernel


# ---------------------------------------------------------------- one share of the keys
def _group_sum(lanes):
    """Sum over a group of 1, 2, 4, 8, 16 or 32 lanes, in each of them."""
    @core.device
    def total(x):
        if lanes > 16:
            x += core.shfl_xor(x, 16)
        if lanes > 8:
            x += core.shfl_xor(x, 8)
        if lanes > 4:
            x += core.shfl_xor(x, 4)
        if lanes > 2:
            x += core.shfl_xor(x, 2)
        if lanes > 1:
            x += core.shfl_xor(x, 1)
        return x
    return total


def _make_steps(key, value, lanes, pieces_k, pieces_v, ragged, has_mask):
    """product, score and add_value of a lane; see _make."""
    get_m = ONE[F16].get

    @core.device
    def product(q, pk, j, node, lane):
        """This lane's part of q . k of key j; lanes beyond the end read the last eight again and count for nothing."""
        s, length = ZERO, views.ne(node + views.SRC1, 0)
        for c in range(pieces_k):
            i = c * lanes + lane
            if ragged:
                i = min(i, (length - 1) >> 3)
            x = key(pk + j * views.nb(node + views.SRC1, 1), i, length)
            y = ((q[8 * c] * x[0] + q[8 * c + 1] * x[1]) + (q[8 * c + 2] * x[2] + q[8 * c + 3] * x[3])) \
                + ((q[8 * c + 4] * x[4] + q[8 * c + 5] * x[5]) + (q[8 * c + 6] * x[6] + q[8 * c + 7] * x[7]))
            s += y if not ragged or i == c * lanes + lane else ZERO
        return s

    @core.device
    def score(node, s, pm, j, slope):
        """Scaled, capped and masked."""
        cap = views.param_f32(node, 2)
        s *= views.param_f32(node, 0)
        if cap != ZERO:
            s = cap * core.tanh(s / cap)
        if has_mask:
            s += slope * get_m(pm + 2 * j)
        return s

    @core.device
    def add_value(acc, p, pv, j, node, lane):
        """acc += p v of key j; a value of weight 0 may be inf or NaN."""
        length, counts = views.ne(node + views.SRC2, 0), p > ZERO
        for c in range(pieces_v):
            i = c * lanes + lane
            if ragged:
                i = min(i, (length - 1) >> 3)
            x = value(pv + j * views.nb(node + views.SRC2, 1), i, length)
            acc[8 * c] += p * x[0] if counts else ZERO
            acc[8 * c + 1] += p * x[1] if counts else ZERO
            acc[8 * c + 2] += p * x[2] if counts else ZERO
            acc[8 * c + 3] += p * x[3] if counts else ZERO
            acc[8 * c + 4] += p * x[4] if counts else ZERO
            acc[8 * c + 5] += p * x[5] if counts else ZERO
            acc[8 * c + 6] += p * x[6] if counts else ZERO
            acc[8 * c + 7] += p * x[7] if counts else ZERO
    return product, score, add_value


def _make(tq, key, value, lanes, pieces_k, pieces_v, ragged, has_mask, has_sinks, coded):
    """key, value: eight() of K and V; pieces_k, pieces_v: eights of a lane; ragged: some lanes have fewer.

    The loop has no branches, so that the loads of four keys and values are under way together.
    """
    get_q, group_sum = _float_element(tq), _group_sum(lanes)
    n_groups = THREADS // lanes
    n_q, n_acc = 8 * pieces_k, 8 * pieces_v
    shared_records = core.shared(4 * n_groups * (8 * lanes * pieces_v + 2))
    put_result, (top_of, scaled) = _result(core.lds_f32, has_sinks, coded), _merging(core.lds_f32)
    records_of = make_records_of(coded)
    product, score, add_value = _make_steps(key, value, lanes, pieces_k, pieces_v, ragged, has_mask)

    def kernel(node):
        q, k, v = node + views.SRC0, node + views.SRC1, node + views.SRC2
        n_kv, n_value, n_head = views.ne(k, 1), views.ne(v, 0), views.ne(q, 2)
        n = _shares_of_node(node)
        i1, h, i3 = core.block() // n, core.block_y(), core.block_z()
        share = core.block() - i1 * n
        group, lane = core.thread() // lanes, core.thread() % lanes
        own_q, acc = core.local.array(n_q, "float32"), core.local.array(n_acc, "float32")
        pq = views.row_addr(q, i1, h, i3)
        for c in range(pieces_k):
            for i in range(8):
                at = 8 * (c * lanes + lane) + i
                own_q[8 * c + i] = get_q(pq, at) if at < views.ne(q, 0) else ZERO
        for i in range(n_acc):
            acc[i] = ZERO
        pk = views.row_addr(k, 0, h // (n_head // views.ne(k, 2)), i3)
        pv = views.row_addr(v, 0, h // (n_head // views.ne(v, 2)), i3)
        pm, slope = 0, UNIT
        if has_mask:
            pm = views.row_addr_mod(node + views.SRC3, i1, h, i3)
            if views.param_f32(node, 1) > ZERO:
                slope = slope_of(h, n_head, views.param_f32(node, 1))
        first, end = n_kv * share // n, n_kv * (share + 1) // n
        top, total = LOWEST, ZERO
        while first < end:                      # all lanes go round together: they exchange their parts
            j = first + 4 * group
            j0, j1, j2, j3 = min(j, end - 1), min(j + 1, end - 1), min(j + 2, end - 1), min(j + 3, end - 1)
            s0, s1 = product(own_q, pk, j0, node, lane), product(own_q, pk, j1, node, lane)
            s2, s3 = product(own_q, pk, j2, node, lane), product(own_q, pk, j3, node, lane)
            s0, s1, s2, s3 = group_sum(s0), group_sum(s1), group_sum(s2), group_sum(s3)
            s0 = score(node, s0, pm, j0, slope) if j < end else LOWEST
            s1 = score(node, s1, pm, j1, slope) if j + 1 < end else LOWEST
            s2 = score(node, s2, pm, j2, slope) if j + 2 < end else LOWEST
            s3 = score(node, s3, pm, j3, slope) if j + 3 < end else LOWEST
            higher = max(max(top, max(s0, s1)), max(s2, s3))
            base = higher if higher > LOWEST else ZERO          # if all keys so far are hidden, 0
            shrink = core.exp(top - base)
            e0, e1, e2, e3 = core.exp(s0 - base), core.exp(s1 - base), core.exp(s2 - base), core.exp(s3 - base)
            total = total * shrink + ((e0 + e1) + (e2 + e3))
            for i in range(n_acc):
                acc[i] *= shrink
            add_value(acc, e0, pv, j0, node, lane)
            add_value(acc, e1, pv, j1, node, lane)
            add_value(acc, e2, pv, j2, node, lane)
            add_value(acc, e3, pv, j3, node, lane)
            top = higher
            first += 4 * n_groups
        records = shared_records()
        own = records + 4 * group * (n_value + 2)
        for c in range(pieces_v):
            for i in range(8):
                at = 8 * (c * lanes + lane) + i
                if at < n_value:
                    core.sts_f32(own + 4 * at, acc[8 * c + i])
        if lane == 0:
            core.sts_f32(own + 4 * n_value, top)
            core.sts_f32(own + 4 * n_value + 4, total)
        core.sync()
        if n == 1:
            put_result(node, i1, h, i3, records, n_groups)
        else:
            top = top_of(records, n_groups, n_value)
            to = records_of(node, i1, h, i3, n) + 4 * share * (n_value + 2)
            i = core.thread()
            while i < n_value + 2:
                if i == n_value:
                    core.st_f32(to + 4 * i, top)
                else:
                    core.st_f32(to + 4 * i, scaled(records, n_groups, n_value, i, top))
                i += core.n_threads()
    return kernel


def own(t, coded=False):
    """The Launches of an attention, or None; coded: of those that leave the codes of its result, too."""
    q, k, v, mask, sinks = t.src
    cached = {*FLOATS, *QUANTIZED}
    if q.type not in FLOATS or not {k.type, v.type} <= cached or not dense(t, q, k, v):
        return None
    n_rows = q.ne[1] * q.ne[2] * q.ne[3]
    if max(q.ne[0], v.ne[0]) > MAX_HEAD or max(q.ne[2], q.ne[3]) > 65535 or n_rows == 0:
        return None
    fast = flash_attn_mma.launch(t) if t.op_params[3] != PREC_F32 else None
    if fast is not None:
        return None if coded else fast
    eights = max(-(-q.ne[0] // 8), -(-v.ne[0] // 8))
    lanes = min(32, 1 << (eights - 1).bit_length())
    pieces_k, pieces_v = (-(-x.ne[0] // (8 * lanes)) for x in (q, v))
    wide = [_is_wide(x) for x in (k, v)]
    ragged = any(-(-x.ne[0] // 8) % lanes for x in (q, v))
    name = (f"flash_attn_{q.type.name}_{k.type.name}_{v.type.name}_{lanes}x{pieces_k}x{pieces_v}{'_ragged' * ragged}"
            f"{'_wide_k' * wide[0]}{'_wide_v' * wide[1]}{'_mask' * (mask is not None)}{'_sinks' * (sinks is not None)}"
            f"{'_coded' * coded}")
    n = n_shares(k.ne[1], n_rows)
    part = Launch(name, lambda: _make(q.type, _eight(k.type, wide[0]), _eight(v.type, wide[1]), lanes, pieces_k,
                                      pieces_v, ragged, mask is not None, sinks is not None, coded),
                  (q.ne[1] * n, q.ne[2], q.ne[3]), THREADS)
    merge = Launch(f"flash_attn_merge{'_sinks' * (sinks is not None)}{'_coded' * coded}",
                   lambda: make_merge(sinks is not None, _shares_of_node, coded), (q.ne[1], q.ne[2], q.ne[3]), THREADS)
    return with_records(t, part, merge, n, own, coded)


def with_records(t, part, merge, n, maker, coded):
    """The Launches of an attention whose keys n blocks share: scratch memory of the codes, then of the records.
    maker(t, True): those that leave codes."""
    nbytes, leaves = (codes_nbytes(math.prod(t.ne), 1), quantize_columns.CODES) if coded else (0, "")
    made = [part]
    if n > 1:
        nbytes += 4 * t.ne[1] * t.ne[2] * t.ne[3] * n * (t.ne[0] + 2)
        made = [dataclasses.replace(part, work_nbytes=nbytes), merge]
    last = dataclasses.replace(made[-1], work_nbytes=nbytes if coded else 0, leaves_result=leaves,
                               coded=lambda: maker(t, True))
    return *made[:-1], last


CUDA = {OP.FLASH_ATTN_EXT: own}
