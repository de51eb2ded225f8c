"""Graph and table -> columns; node signatures -> rows of the support matrix.

`supports_op` is a Python call into a device, so it is asked once per distinct *signature*: op, parameters, types,
shapes, strides and memory kinds of a node and its sources.  Signatures are kept as two 64-bit hashes in an open
addressing table that lives as long as the scheduler; a graph of ten thousand nodes has a few dozen.
"""
import numpy as np

from ggjit.ops.core.record import (
    FLAG_INPUT,
    MAX_SRC,
    OP,
    T_BUFFER,
    T_FLAGS,
    T_NB,
    T_NE,
    T_OP,
    T_PARAMS,
    T_SRC,
    T_TYPE,
    T_VIEW_SRC,
    T_WORDS,
)
from ggjit.ops.native.jit import i64s, inlined, native
from ggjit.sched.columns import (
    BACKEND,
    BITS,
    CAUSE,
    CAUSE_ARG,
    COLUMNS,
    COPY,
    FOREIGN,
    ID,
    IS_COMPUTE,
    IS_HOST,
    IS_INPUT,
    IS_LEAF,
    IS_VIEW_OP,
    IS_WEIGHT,
    MEM,
    NBYTES,
    NONE,
    OK,
    OWN,
    SIG,
    SRC,
    SRC_END,
    VIEW,
)

OP_NONE, OP_VIEW, OP_RESHAPE, OP_PERMUTE, OP_TRANSPOSE = (
    int(op) for op in (OP.NONE, OP.VIEW, OP.RESHAPE, OP.PERMUTE, OP.TRANSPOSE))
# one row per buffer the graph touches: id, buffer type number, IS_WEIGHT | IS_HOST
B_ID, B_BUFT, B_BITS, B_WORDS = 0, 1, 2, 3


@inlined
def slot_of(keys, mask, key):
    """Slot that holds `key`, or the empty slot where it belongs."""
    h = (key * np.int64(0x9E3779B97F4A7C1)) & mask
    while keys[h] != -1 and keys[h] != key:
        h = (h + 1) & mask
    return h


@inlined
def _nbytes(t, r, block_nbytes, block_size):
    """ggml_nbytes of the table row that starts at word r."""
    n = t[r + T_NE] // block_size[t[r + T_TYPE]]
    if block_size[t[r + T_TYPE]] == 1:
        total = block_nbytes[t[r + T_TYPE]] + (t[r + T_NE] - 1) * t[r + T_NB]
    else:
        total = n * t[r + T_NB]
    for k in range(1, 4):
        total += (t[r + T_NE + k] - 1) * t[r + T_NB + k]
    for k in range(4):
        if t[r + T_NE + k] <= 0:
            return np.int64(0)
    return total


@native("i64(i64, i64, i64, i64)")
def distinct_buffers(table, ids, m, out):
    """Distinct buffers of the tensors, as pairs (buffer id, number of a tensor in it), room for m; returns how many."""
    t, a, o = i64s(table, 1 << 40), i64s(ids, m), i64s(out, 2 * m)
    n = 0
    last = np.int64(-1)
    mask = np.int64(15)
    while mask < 2 * m:
        mask = 2 * mask + 1
    keys = np.full(mask + 1, -1, np.int64)
    for i in range(m):
        b = t[a[i] * T_WORDS + T_BUFFER]
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


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def gather(table, ws, m, n_nodes, buffers, n_bufs, block_nbytes, block_size, slots, stamp, info):
    """Fill all columns but SIG; ID is filled in by the caller.  FOREIGN: info[0] needs info[1], not in the graph.

    slots: one word per table row, kept between calls: stamp << 32 | local number of the tensor; a word with another
    stamp is from an earlier call.  (A hash table costs three times as much here.)
    """
    t, w, bad = i64s(table, 1 << 40), i64s(ws, COLUMNS * m), i64s(info, 2)
    bufs, nb, bs = i64s(buffers, B_WORDS * n_bufs), i64s(block_nbytes, 64), i64s(block_size, 64)
    slot = i64s(slots, 1 << 40)
    small = np.int64(15)
    while small < 2 * n_bufs:
        small = 2 * small + 1
    buffer_keys = np.full(small + 1, -1, np.int64)
    buffer_row = np.empty(small + 1, np.int64)
    for k in range(n_bufs):
        h = slot_of(buffer_keys, small, bufs[k * B_WORDS + B_ID])
        buffer_keys[h] = bufs[k * B_WORDS + B_ID]
        buffer_row[h] = k
    for i in range(m):
        slot[w[ID * m + i]] = stamp << 32 | i
    for i in range(m):
        r = w[ID * m + i] * T_WORDS
        op = t[r + T_OP]
        bits = IS_LEAF if i >= n_nodes else 0
        if op == OP_VIEW or op == OP_RESHAPE or op == OP_PERMUTE or op == OP_TRANSPOSE:
            bits |= IS_VIEW_OP
        elif i < n_nodes and op != OP_NONE:
            bits |= IS_COMPUTE
        if t[r + T_FLAGS] & FLAG_INPUT:
            bits |= IS_INPUT
        w[BACKEND * m + i] = NONE
        w[CAUSE * m + i] = 0
        w[CAUSE_ARG * m + i] = 0
        w[NBYTES * m + i] = _nbytes(t, r, nb, bs)
        w[OWN * m + i] = NONE
        w[MEM * m + i] = NONE
        w[VIEW * m + i] = NONE
        if t[r + T_BUFFER] >= 0:
            k = buffer_row[slot_of(buffer_keys, small, t[r + T_BUFFER])]
            w[OWN * m + i] = w[MEM * m + i] = bufs[k * B_WORDS + B_BUFT]
            bits |= bufs[k * B_WORDS + B_BITS]
        base = t[r + T_VIEW_SRC]
        bad[0] = w[ID * m + i]
        if base >= 0:
            bad[1] = base
            if slot[base] >> 32 != stamp:
                return FOREIGN
            w[VIEW * m + i] = slot[base] & 0xFFFFFFFF
            b = t[base * T_WORDS + T_BUFFER]
            if b >= 0:
                k = buffer_row[slot_of(buffer_keys, small, b)]
                w[MEM * m + i] = bufs[k * B_WORDS + B_BUFT]
        w[BITS * m + i] = bits
        w[SRC_END * m + i] = 0
        for j in range(MAX_SRC):
            s = t[r + T_SRC + j]
            w[COPY * m + i * MAX_SRC + j] = NONE
            w[SRC * m + i * MAX_SRC + j] = NONE
            if s >= 0:
                if slot[s] >> 32 != stamp:
                    bad[1] = s
                    return FOREIGN
                w[SRC * m + i * MAX_SRC + j] = slot[s] & 0xFFFFFFFF
                w[SRC_END * m + i] = j + 1
    return OK


@inlined
def _mix(a, b, x):
    """One word into both hashes."""
    x = np.uint64(x)
    a = (a ^ x) * np.uint64(0xFF51AFD7ED558CCD)
    b = (b ^ x) * np.uint64(0xC4CEB9FE1A85EC53)
    return a ^ (a >> np.uint64(29)), b ^ (b >> np.uint64(31))


@inlined
def _mix_shape(a, b, t, r):
    a, b = _mix(a, b, t[r + T_TYPE])
    for k in range(8):
        a, b = _mix(a, b, t[r + T_NE + k])              # ne, then nb
    return a, b


@inlined
def _signature(t, w, m, i):
    r = w[ID * m + i] * T_WORDS
    a, b = _mix_shape(np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344), t, r)
    a, b = _mix(a, b, t[r + T_OP])
    for k in range(8):
        if t[r + T_PARAMS + k] != 0:
            a, b = _mix(a, b, k)
            a, b = _mix(a, b, t[r + T_PARAMS + k])
    a, b = _mix(a, b, w[MEM * m + i] * 2 + (1 if w[VIEW * m + i] >= 0 else 0))
    for j in range(w[SRC_END * m + i]):
        s = w[SRC * m + i * MAX_SRC + j]
        if s >= 0:
            a, b = _mix_shape(a, b, t, w[ID * m + s] * T_WORDS)
            a, b = _mix(a, b, ((w[MEM * m + s] + 1) * 64 + (w[BITS * m + s] & (IS_WEIGHT | IS_HOST))) * 16 + j)
    return np.int64(a >> np.uint64(1)), np.int64(b >> np.uint64(1))


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def find_signatures(table, ws, m, n_nodes, memo, mask, first_new, new_nodes):
    """Give every computing node its SIG.  memo: mask+1 slots of (hash, hash, row), hash -1: empty.

    Unknown signatures get rows from first_new up; new_nodes lists one node of each.  Returns how many there are.
    The caller sees to it that the memo stays at most half full.
    """
    t, w = i64s(table, 1 << 40), i64s(ws, COLUMNS * m)
    mem, out = i64s(memo, 3 * (mask + 1)), i64s(new_nodes, n_nodes + 1)
    n = 0
    for i in range(m):
        w[SIG * m + i] = 0
        if not w[BITS * m + i] & IS_COMPUTE:
            continue
        a, b = _signature(t, w, m, i)
        h = a & mask
        while mem[3 * h] != -1 and (mem[3 * h] != a or mem[3 * h + 1] != b):
            h = (h + 1) & mask
        if mem[3 * h] == -1:
            mem[3 * h] = a
            mem[3 * h + 1] = b
            mem[3 * h + 2] = first_new + n
            out[n] = i
            n += 1
        w[SIG * m + i] = mem[3 * h + 2]
    return n
