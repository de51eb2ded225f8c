"""Table ids -> dense local numbers, and every check on the graph's structure, before anything is planned."""
import numpy as np

from ggjit.alloc.ggml import columns as col
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import i64s, inlined, native, u8s

OP_NONE = int(rec.OP.NONE)


@inlined
def _slot(slots, mask, id_):
    """Slot that holds an id, or the empty slot where it belongs (open addressing, at most half full).

    A slot is id << 32 | local number, -1 while empty: one word, for a large graph's table misses the cache.
    """
    h = (id_ * np.int64(0x9E3779B97F4A7C1)) & mask
    while slots[h] != -1 and slots[h] >> 32 != id_:
        h = (h + 1) & mask
    return h


@inlined
def _local(slots, mask, id_):
    """Local number of an id, FOREIGN where it is not in the graph."""
    word = slots[_slot(slots, mask, id_)]
    return word & 0xFFFFFFFF if word >= 0 else np.int64(col.FOREIGN)


@inlined
def _root(t, n_rows, i):
    """(root id, bytes from it) of tensor i; root -1 when an id is out of range, -2 when the chain never ends."""
    offs = np.int64(0)
    steps = 0
    while t[i * rec.T_WORDS + rec.T_VIEW_SRC] >= 0:
        offs += t[i * rec.T_WORDS + rec.T_VIEW_OFFS]
        i = t[i * rec.T_WORDS + rec.T_VIEW_SRC]
        steps += 1
        if i >= n_rows:
            return np.int64(-1), offs
        if steps > n_rows:
            return np.int64(-2), offs
    return i, offs


@inlined
def _describe(t, inplace, n_inplace, id_, root):
    """FLAGS of one tensor."""
    r = id_ * rec.T_WORDS
    f = 0
    if t[r + rec.T_BUFFER] >= 0 or t[root * rec.T_WORDS + rec.T_BUFFER] >= 0:
        f |= col.EXTERNAL
    if t[r + rec.T_FLAGS] & rec.FLAG_OUTPUT:
        f |= col.OUTPUT
    if t[r + rec.T_FLAGS] & rec.FLAG_INPUT:
        f |= col.INPUT
    op = t[r + rec.T_OP]
    if 0 <= op < n_inplace and inplace[op]:
        f |= col.CAN_INPLACE
    if op == OP_NONE:
        f |= col.MARKER
    return f


@inlined
def _number(w, m, n_rows, n_buffers, slots, mask, bad):
    """Ids into the slots; columns start at nothing."""
    for i in range(m):
        id_ = w[col.ID * m + i]
        bad[0] = bad[1] = id_
        if id_ < 0 or id_ >= n_rows:
            return col.BAD_ID
        h = _slot(slots, mask, id_)
        if slots[h] != -1:
            return col.DUPLICATE
        slots[h] = id_ << 32 | i
        if w[col.BUFT * m + i] < 0 or w[col.BUFT * m + i] >= n_buffers:
            return col.BAD_BUFFER
        w[col.KIDS * m + i] = w[col.VIEWS * m + i] = w[col.OWN * m + i] = w[col.DREL * m + i] = 0
        w[col.ALLOC * m + i] = -1
    return col.OK


@inlined
def _find_roots(t, w, m, n_rows, inplace, n_inplace, slots, mask, bad):
    """VIEW, VOFFS and FLAGS."""
    for i in range(m):
        id_ = w[col.ID * m + i]
        bad[0] = id_
        root, offs = _root(t, n_rows, id_)
        if root < 0:
            return col.BAD_ID if root == -1 else col.VIEW_CYCLE
        w[col.FLAGS * m + i] = _describe(t, inplace, n_inplace, id_, root)
        w[col.VIEW * m + i] = col.NONE
        w[col.VOFFS * m + i] = offs
        if root != id_:
            bad[1] = root
            w[col.VIEW * m + i] = _local(slots, mask, root)
            if w[col.VIEW * m + i] == col.FOREIGN and not w[col.FLAGS * m + i] & col.EXTERNAL:
                return col.FOREIGN_SRC
    return col.OK


@inlined
def _find_sources(t, w, m, n_nodes, n_rows, slots, mask, bad):
    """SRC of the nodes; those that are not in the graph must have memory."""
    for i in range(n_nodes):
        r = w[col.ID * m + i] * rec.T_WORDS
        bad[0] = w[col.ID * m + i]
        for j in range(rec.MAX_SRC):
            s = t[r + rec.T_SRC + j]
            k = np.int64(col.NONE)
            if s >= 0:
                bad[1] = s
                if s >= n_rows:
                    return col.BAD_ID
                k = _local(slots, mask, s)
                if i < k < n_nodes:                 # k == i: ggml_cast names itself as its destination
                    return col.UNORDERED
                if k == col.FOREIGN:
                    root, offs = _root(t, n_rows, s)
                    if root < 0:
                        return col.VIEW_CYCLE
                    if t[s * rec.T_WORDS + rec.T_BUFFER] < 0 and t[root * rec.T_WORDS + rec.T_BUFFER] < 0:
                        return col.FOREIGN_SRC
            w[col.SRC * m + i * rec.MAX_SRC + j] = k
    return col.OK


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def localize(table, n_rows, ws, m, n_nodes, inplace, n_inplace, n_buffers, own_ids, outputs, n_outputs, info):
    """Fill the tensor columns and SRC from the table.  ID, SIZE and BUFT are filled in by the caller.

    own_ids: M words, non-zero where a tensor with a buffer belongs to the allocator itself (2023 wrapper), or 0.
    outputs: ids of tensors that are kept to the end; those that are not in the graph do not matter.
    info[0..1]: the offending ids.  Sources that are not in the graph are fine when they have memory elsewhere.
    """
    t, w, bad = i64s(table, n_rows * rec.T_WORDS), i64s(ws, (col.SRC + rec.MAX_SRC) * m), i64s(info, 2)
    mask = np.int64(15)
    while mask < 2 * m:
        mask = 2 * mask + 1
    slots = np.full(mask + 1, -1, np.int64)
    status = _number(w, m, n_rows, n_buffers, slots, mask, bad)
    if status != col.OK:
        return status
    status = _find_roots(t, w, m, n_rows, u8s(inplace, n_inplace), n_inplace, slots, mask, bad)
    if status != col.OK:
        return status
    kept = i64s(outputs, n_outputs)
    for k in range(n_outputs):
        i = _local(slots, mask, kept[k])
        if i >= 0:
            w[col.FLAGS * m + i] |= col.OUTPUT
    if own_ids != 0:
        own = i64s(own_ids, m)
        for i in range(m):
            view = w[col.VIEW * m + i]
            if own[i] or (view >= 0 and own[view]):
                w[col.FLAGS * m + i] &= ~col.EXTERNAL
    return _find_sources(t, w, m, n_nodes, n_rows, slots, mask, bad)
