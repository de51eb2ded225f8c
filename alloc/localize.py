"""Table ids -> dense local numbers, and every check on the graph's structure, before anything is planned."""
import numpy as np

from ggjit.alloc.work import (
    ALLOC,
    BAD_BUFFER,
    BAD_ID,
    BUFT,
    CAN_INPLACE,
    DREL,
    DUPLICATE,
    EXTERNAL,
    FLAGS,
    FOREIGN,
    FOREIGN_SRC,
    ID,
    INPUT,
    KIDS,
    MARKER,
    NONE,
    OK,
    OUTPUT,
    OWN,
    SRC,
    UNORDERED,
    VIEW,
    VIEW_CYCLE,
    VIEWS,
    VOFFS,
    col,
)
from ggjit.ops.jit import exact, i64s, native, u8s
from ggjit.ops.record import (
    FLAG_INPUT,
    FLAG_OUTPUT,
    MAX_SRC,
    OP,
    T_BUFFER,
    T_FLAGS,
    T_OP,
    T_SRC,
    T_VIEW_OFFS,
    T_VIEW_SRC,
    T_WORDS,
)

OP_NONE = int(OP.NONE)


@exact
def _slot(keys, mask, key):
    """Slot that holds `key`, or the empty slot where it belongs (open addressing, at most half full)."""
    h = (key * np.int64(0x9E3779B97F4A7C1)) & mask
    while keys[h] != -1 and keys[h] != key:
        h = (h + 1) & mask
    return h


@exact
def _root(t, n_rows, i):
    """(root id, bytes from it) of tensor i; root -1 when an id is out of range, -2 when the chain never ends."""
    offs = np.int64(0)
    steps = 0
    while t[i * T_WORDS + T_VIEW_SRC] >= 0:
        offs += t[i * T_WORDS + T_VIEW_OFFS]
        i = t[i * T_WORDS + T_VIEW_SRC]
        steps += 1
        if i >= n_rows:
            return np.int64(-1), offs
        if steps > n_rows:
            return np.int64(-2), offs
    return i, offs


@exact
def _describe(t, inplace, n_inplace, id_, root):
    """FLAGS of one tensor."""
    r = id_ * T_WORDS
    f = 0
    if t[r + T_BUFFER] >= 0 or t[root * T_WORDS + T_BUFFER] >= 0:
        f |= EXTERNAL
    if t[r + T_FLAGS] & FLAG_OUTPUT:
        f |= OUTPUT
    if t[r + T_FLAGS] & FLAG_INPUT:
        f |= INPUT
    op = t[r + T_OP]
    if 0 <= op < n_inplace and inplace[op]:
        f |= CAN_INPLACE
    if op == OP_NONE:
        f |= MARKER
    return f


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def localize(table, n_rows, ws, m, n_nodes, inplace, n_inplace, n_buffers, own_ids, info):
    """Fill the tensor columns and SRC from the table.  ID, SIZE and BUFT are filled in by the caller.

    own_ids: M words, non-zero where a tensor with a buffer belongs to the allocator itself (2023 wrapper), or 0.
    info[0..1]: the offending ids.  Sources that are not in the graph are fine when they have memory elsewhere.
    """
    t = i64s(table, n_rows * T_WORDS)
    w = i64s(ws, (SRC + MAX_SRC) * m)
    ip = u8s(inplace, n_inplace)
    bad = i64s(info, 2)
    ids, view, voffs, flags = col(w, m, ID), col(w, m, VIEW), col(w, m, VOFFS), col(w, m, FLAGS)
    src = w[SRC * m:(SRC + MAX_SRC) * m]
    mask = np.int64(15)
    while mask < 2 * m:
        mask = 2 * mask + 1
    keys = np.full(mask + 1, -1, np.int64)
    local = np.empty(mask + 1, np.int64)
    for i in range(m):
        bad[0] = ids[i]
        bad[1] = ids[i]
        if ids[i] < 0 or ids[i] >= n_rows:
            return BAD_ID
        h = _slot(keys, mask, ids[i])
        if keys[h] != -1:
            return DUPLICATE
        keys[h] = ids[i]
        local[h] = i
        if w[BUFT * m + i] < 0 or w[BUFT * m + i] >= n_buffers:
            return BAD_BUFFER
        w[KIDS * m + i] = 0
        w[VIEWS * m + i] = 0
        w[OWN * m + i] = 0
        w[ALLOC * m + i] = -1
        w[DREL * m + i] = 0
    for i in range(m):
        bad[0] = ids[i]
        root, offs = _root(t, n_rows, ids[i])
        if root < 0:
            return BAD_ID if root == -1 else VIEW_CYCLE
        flags[i] = _describe(t, ip, n_inplace, ids[i], root)
        view[i] = NONE
        voffs[i] = offs
        if root != ids[i]:
            bad[1] = root
            h = _slot(keys, mask, root)
            view[i] = local[h] if keys[h] == root else FOREIGN
            if view[i] == FOREIGN and not flags[i] & EXTERNAL:
                return FOREIGN_SRC
    if own_ids != 0:
        own = i64s(own_ids, m)
        for i in range(m):
            if own[i] or (view[i] >= 0 and own[view[i]]):
                flags[i] &= ~EXTERNAL
    for i in range(n_nodes):
        bad[0] = ids[i]
        for j in range(MAX_SRC):
            s = t[ids[i] * T_WORDS + T_SRC + j]
            k = np.int64(NONE)
            if s >= 0:
                bad[1] = s
                if s >= n_rows:
                    return BAD_ID
                h = _slot(keys, mask, s)
                k = local[h] if keys[h] == s else np.int64(FOREIGN)
                if i < k < n_nodes:                 # k == i: ggml_cast names itself as its destination
                    return UNORDERED
                if k == FOREIGN:
                    root, offs = _root(t, n_rows, s)
                    if root < 0:
                        return VIEW_CYCLE
                    if t[s * T_WORDS + T_BUFFER] < 0 and t[root * T_WORDS + T_BUFFER] < 0:
                        return FOREIGN_SRC
            src[i * MAX_SRC + j] = k
    return OK
