"""Graph and table -> records; node signatures -> rows of the support matrix.

`supports_op` is a Python call into a device, so it is asked once per distinct *signature*: op, parameters, types,
shapes, strides and memory kinds of a node and its sources.  Signatures are kept as two 64-bit hashes in an open
addressing table that lives as long as the scheduler; a graph of ten thousand nodes has a few dozen.
"""
import numpy as np

from ggjit.core.row_sizes import row_nbytes
from ggjit.ops.core import record as r
from ggjit.ops.core.record import MAX_SRC, OP
from ggjit.ops.native.jit import i64s, inlined, native
from ggjit.sched import records as rec
from ggjit.sched.records import opened, set_backend

OP_NONE, OP_VIEW, OP_RESHAPE, OP_PERMUTE, OP_TRANSPOSE = (
    int(op) for op in (OP.NONE, OP.VIEW, OP.RESHAPE, OP.PERMUTE, OP.TRANSPOSE))
# one row per buffer the graph touches: id, buffer type number, rec.IS_WEIGHT | rec.IS_HOST
B_ID, B_BUFT, B_BITS, B_WORDS = 0, 1, 2, 3


@inlined
def slot_of(keys, mask, key):
    """Slot that holds `key`, or the empty slot where it belongs."""
    h = (key * np.int64(0x9E3779B97F4A7C1)) & mask
    while keys[h] != -1 and keys[h] != key:
        h = (h + 1) & mask
    return h


@native("i64(i64, i64, i64, i64)")
def distinct_buffers(table, ids, n_ids, out):
    """Distinct buffers of the tensors as pairs (buffer id, number of a tensor in it); returns how many."""
    t, a, o = i64s(table, 1 << 40), i64s(ids, n_ids), i64s(out, 2 * n_ids)
    n = 0
    last = np.int64(-1)
    mask = np.int64(15)
    while mask < 2 * n_ids:
        mask = 2 * mask + 1
    keys = np.full(mask + 1, -1, np.int64)
    for i in range(n_ids):
        b = t[a[i] * r.T_WORDS + r.T_BUFFER]
        if b < 0 or b == last:
            continue
        last = b
        h = slot_of(keys, mask, b)
        if keys[h] == -1:
            keys[h] = b
            o[2 * n] = b
            o[2 * n + 1] = i
            n += 1
    return n


@inlined
def _flags(t, at, is_node):
    """IS_... of the tensor whose table row starts at word `at`."""
    op = t[at + r.T_OP]
    bits = 0 if is_node else rec.IS_LEAF
    if op == OP_VIEW or op == OP_RESHAPE or op == OP_PERMUTE or op == OP_TRANSPOSE:
        bits |= rec.IS_VIEW_OP
    elif is_node and op != OP_NONE:
        bits |= rec.IS_COMPUTE
    if t[at + r.T_FLAGS] & r.FLAG_INPUT:
        bits |= rec.IS_INPUT
    return bits


@inlined
def _link(g, i, at, stamped_row, stamp):
    """Base and sources of tensor i by local numbers.  Returns the table id of one that is not in the graph, or NONE."""
    base = g.table[at + r.T_VIEW_SRC]
    if base >= 0:
        if stamped_row[base] >> 32 != stamp:
            return base
        g.rows[i].view = stamped_row[base] & 0xFFFFFFFF
    for j in range(MAX_SRC):
        s = g.table[at + r.T_SRC + j]
        if s >= 0:
            if stamped_row[s] >> 32 != stamp:
                return s
            g.rows[i].src[j] = stamped_row[s] & 0xFFFFFFFF
            g.rows[i].src_end = j + 1
    return rec.NONE


@inlined
def _clear(g, i):
    set_backend(g, i, rec.NONE, 0, 0)
    g.rows[i].own = rec.NONE
    g.rows[i].mem = rec.NONE
    g.rows[i].view = rec.NONE
    g.rows[i].src_end = 0
    for j in range(MAX_SRC):
        g.rows[i].src[j] = rec.NONE
        g.rows[i].copy[j] = rec.NONE


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def gather(params, buffers, n_bufs, block_sizes, update_bits, stamped_rows, stamp):
    """Fill all of ROW but `sig`; `id` is filled in by the caller.  FOREIGN: `failed` needs `missing`, which is not in
    the graph.

    block_sizes: pairs (bytes, elements) by type number.  update_bits: by op, those of the sources that it writes.
    stamped_rows: one word per table row, kept between calls:
    stamp << 32 | local number of the tensor; a word with another stamp is from an earlier call.  (A hash table costs
    three times as much here.)
    """
    g = opened(params)
    t, bufs, sizes = g.table, i64s(buffers, B_WORDS * n_bufs), i64s(block_sizes, 1 << 11)
    updates, stamped_row = i64s(update_bits, 256), i64s(stamped_rows, 1 << 40)
    mask = np.int64(15)
    while mask < 2 * n_bufs:
        mask = 2 * mask + 1
    keys, row = np.full(mask + 1, -1, np.int64), np.empty(mask + 1, np.int64)          # buffer id -> its row in bufs
    for k in range(n_bufs):
        h = slot_of(keys, mask, bufs[k * B_WORDS + B_ID])
        keys[h] = bufs[k * B_WORDS + B_ID]
        row[h] = k * B_WORDS
    for i in range(g.n):
        stamped_row[g.rows[i].id] = stamp << 32 | i
    for i in range(g.n):
        at = g.rows[i].id * r.T_WORDS
        _clear(g, i)
        g.rows[i].nbytes = row_nbytes(t, at, sizes)
        g.rows[i].bits = _flags(t, at, i < g.n_nodes)
        if i < g.n_nodes:
            g.rows[i].bits |= updates[t[at + r.T_OP]]
        missing = _link(g, i, at, stamped_row, stamp)
        if missing >= 0:
            g.results[0].failed = i
            g.results[0].missing = missing
            return rec.FOREIGN
        if t[at + r.T_BUFFER] >= 0:
            k = row[slot_of(keys, mask, t[at + r.T_BUFFER])]
            g.rows[i].own = g.rows[i].mem = bufs[k + B_BUFT]
            g.rows[i].bits |= bufs[k + B_BITS]
        if g.rows[i].view >= 0:
            b = t[g.rows[g.rows[i].view].id * r.T_WORDS + r.T_BUFFER]
            if b >= 0:
                g.rows[i].mem = bufs[row[slot_of(keys, mask, b)] + B_BUFT]
    return rec.OK


@inlined
def _mix(a, b, x):
    """Mix one word into both hashes."""
    x = np.uint64(x)
    a = (a ^ x) * np.uint64(0xFF51AFD7ED558CCD)
    b = (b ^ x) * np.uint64(0xC4CEB9FE1A85EC53)
    return a ^ (a >> np.uint64(29)), b ^ (b >> np.uint64(31))


@inlined
def _shape(t, at):
    """Both hashes of a type and its layout."""
    a, b = _mix(np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344), t[at + r.T_TYPE])
    for k in range(8):
        a, b = _mix(a, b, t[at + r.T_NE + k])              # ne, then nb
    return a, b


@inlined
def _signature(g, i, shapes):
    """shapes: both hashes of each tensor."""
    t = g.table
    at = g.rows[i].id * r.T_WORDS
    a, b = _mix(shapes[2 * i], shapes[2 * i + 1], t[at + r.T_OP])
    for k in range(8):
        if t[at + r.T_PARAMS + k] != 0:
            a, b = _mix(a, b, k)
            a, b = _mix(a, b, t[at + r.T_PARAMS + k])
    a, b = _mix(a, b, g.rows[i].mem * 2 + (1 if g.rows[i].view >= 0 else 0))
    for j in range(g.rows[i].src_end):
        s = g.rows[i].src[j]
        if s >= 0:
            a, b = _mix(a ^ shapes[2 * s], b ^ shapes[2 * s + 1], (
                (g.rows[s].mem + 1) * 64 + (g.rows[s].bits & (rec.IS_WEIGHT | rec.IS_HOST))) * 16 + j)
    return np.int64(a >> np.uint64(1)), np.int64(b >> np.uint64(1))


@native("i64(i64, i64, i64, i64, i64)")
def find_signatures(params, memo, mask, first_new, new_nodes):
    """Give every computing node its `sig`.  memo: mask+1 slots of (hash, hash, row), hash -1: empty.

    Unknown signatures get rows from first_new up; new_nodes lists one node of each.  Returns how many there are.
    The caller sees to it that the memo stays at most half full.
    """
    g = opened(params)
    mem, out = i64s(memo, 3 * (mask + 1)), i64s(new_nodes, g.n_nodes + 1)
    n, shapes = 0, np.empty(2 * g.n, np.uint64)
    for i in range(g.n):
        shapes[2 * i], shapes[2 * i + 1] = _shape(g.table, g.rows[i].id * r.T_WORDS)
    for i in range(g.n):
        g.rows[i].sig = 0
        if not g.rows[i].bits & rec.IS_COMPUTE:
            continue
        a, b = _signature(g, i, shapes)
        h = a & mask
        while mem[3 * h] != -1 and (mem[3 * h] != a or mem[3 * h + 1] != b):
            h = (h + 1) & mask
        if mem[3 * h] == -1:
            mem[3 * h] = a
            mem[3 * h + 1] = b
            mem[3 * h + 2] = first_new + n
            out[n] = i
            n += 1
        g.rows[i].sig = mem[3 * h + 2]
    return n
