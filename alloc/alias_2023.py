"""The aliasing pass of ggml's November 2023 sources, word for word (rows A10.02-A10.18).

What differs from `alias.py`:
    - the scan of sources stops at the first absent one;
    - leafs are allocated when first used; no flags: the last node survives because nobody consumes it;
    - a reused parent is recorded by making the node a *view* of it, so counts run through views;
    - ops do work in place behind a whole view at offset 0;
    - ownership is "same buffer", so tensors the caller placed with the same tensor allocator may be freed and reused;
    - `parse_seq`: an explicit order with -1 as barrier; memory is given back only at barriers.
"""
import numpy as np

from ggjit.alloc.alias import (
    IN_PLACE,
    NO_SOURCE,
    NOTHING_TO_PLACE,
    OP_CANNOT,
    SRC_EXTERNAL,
    SRC_LAYOUT,
    SRC_SHARED,
    SRC_VIEWED,
    new_allocation,
    same_layout,
)
from ggjit.alloc.work import (
    A_BUFT,
    A_CUR,
    A_FIRST,
    A_HI,
    A_LO,
    A_SIZE,
    ALLOC,
    BAD_SEQ,
    BUFT,
    CAN_INPLACE,
    CAUSE,
    CAUSE_SRC,
    COLUMNS,
    DREL,
    EV_FREE,
    EXTERNAL,
    FLAGS,
    FOREIGN,
    ID,
    KIDS,
    NO_DATA,
    NONE,
    OK,
    OWN,
    SIZE,
    SRC,
    VIEW,
    VIEWS,
    VOFFS,
    pad,
    put_event,
)
from ggjit.ops.core.record import MAX_SRC, T_WORDS
from ggjit.ops.native.jit import exact, i64s, native

BARRIER = -1
# OWN column here: 0 no data yet, 1 data in this plan, 2 data elsewhere
_UNSET, _OURS, _ELSEWHERE = 0, 1, 2


@exact
def _buffer(w, m, i):
    """Allocator that holds tensor i, -1: none."""
    return w[A_BUFT * m + w[ALLOC * m + i]] if w[OWN * m + i] == _OURS else np.int64(-1)


@exact
def _init_view(w, m, i):
    root = w[VIEW * m + i]
    if root == FOREIGN or w[OWN * m + root] == _ELSEWHERE:
        w[OWN * m + i] = _ELSEWHERE
        return True
    if w[OWN * m + root] == _UNSET:
        return False
    w[OWN * m + i] = _OURS
    w[ALLOC * m + i] = w[ALLOC * m + root]
    w[DREL * m + i] = w[DREL * m + root] + w[VOFFS * m + i]
    return True


@exact
def _reuse(t, w, m, i, p):
    """Make node i a view of its source p (or of p's root) if p dies here."""
    root = w[VIEW * m + p] if w[VIEW * m + p] != NONE else p
    cause = IN_PLACE
    if _buffer(w, m, p) != w[BUFT * m + i]:
        cause = SRC_EXTERNAL
    elif w[KIDS * m + p] != 1:
        cause = SRC_SHARED
    elif w[VIEWS * m + p] != 0:
        cause = SRC_VIEWED
    elif not same_layout(t, w[ID * m + i], w[ID * m + p]):
        cause = SRC_LAYOUT
    elif root != p and (root < 0 or w[VIEWS * m + root] != 1 or w[KIDS * m + root] != 0 or
                        w[DREL * m + root] != w[DREL * m + p]):
        cause = SRC_VIEWED
    if cause == IN_PLACE:
        _become_view(w, m, i, root)
        return True
    if cause > w[CAUSE * m + i]:
        w[CAUSE * m + i] = cause
        w[CAUSE_SRC * m + i] = p
    return False


@exact
def _become_view(w, m, i, root):
    w[VIEW * m + i] = root
    w[VOFFS * m + i] = 0
    w[VIEWS * m + root] += 1
    w[CAUSE * m + i] = IN_PLACE
    w[CAUSE_SRC * m + i] = root
    _init_view(w, m, i)


@exact
def _allocate(t, w, m, cnt, i, alignment, step, n_nodes, n_steps):
    """Returns False where ggml's assert fails: a view whose source has no data."""
    if w[OWN * m + i] != _UNSET:
        return True
    if w[VIEW * m + i] != NONE:
        return _init_view(w, m, i)
    if i < n_nodes:
        w[CAUSE * m + i] = OP_CANNOT
        if w[FLAGS * m + i] & CAN_INPLACE:
            w[CAUSE * m + i] = NO_SOURCE
            for j in range(MAX_SRC):
                p = w[SRC * m + i * MAX_SRC + j]
                if p == NONE:
                    break
                if p >= 0 and _reuse(t, w, m, i, p):
                    return True
    buft = w[BUFT * m + i]
    new_allocation(w, m, cnt, i, buft, pad(w[SIZE * m + i], alignment[buft]), step, n_steps)
    w[OWN * m + i] = _OURS
    return True


@exact
def _free(w, m, cnt, i, step):
    """free_node: silently ignores tensors of other allocators; an allocation is given back once."""
    if _buffer(w, m, i) != w[BUFT * m + i]:
        return
    a = w[ALLOC * m + i]
    if w[A_CUR * m + a] < 0:
        return
    put_event(w, m, cnt[1], EV_FREE, a, w[A_CUR * m + a], step)
    cnt[1] += 1
    w[A_CUR * m + a] = -1
    w[A_HI * m + a] = step + 1


@exact
def _release_sources(w, m, cnt, i, step):
    for j in range(MAX_SRC):
        p = w[SRC * m + i * MAX_SRC + j]
        if p == NONE:
            break
        if p < 0:
            continue
        w[KIDS * m + p] -= 1
        if w[KIDS * m + p] != 0 or w[VIEWS * m + p] != 0:
            continue
        root = w[VIEW * m + p]
        if root == NONE:
            _free(w, m, cnt, p, step)
        elif root >= 0:
            w[VIEWS * m + root] -= 1
            if w[VIEWS * m + root] == 0 and w[KIDS * m + root] == 0:
                _free(w, m, cnt, root, step)


@exact
def _count(w, m, n_nodes):
    for i in range(n_nodes):
        root = w[VIEW * m + i]
        if root >= 0:
            w[VIEWS * m + root] += 1
        if root != NONE and w[OWN * m + i] == _UNSET:
            _init_view(w, m, i)             # only takes effect over memory placed beforehand
        for j in range(MAX_SRC):
            p = w[SRC * m + i * MAX_SRC + j]
            if p == NONE:
                break
            if p < 0:
                continue
            w[KIDS * m + p] += 1
            if w[VIEW * m + p] != NONE and w[OWN * m + p] == _UNSET:
                _init_view(w, m, p)


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def alias_2023(table, n_rows, ws, m, n_nodes, seq, n_seq, alignments, n_buffers, placed, n_placed, counts):
    """Events of the 2023 graph allocator.

    seq: n_seq node positions and barriers; n_seq = 0 means graph order, freeing after every node.
    placed: n_placed pairs (local tensor, padded bytes): tensors the caller put into our allocators beforehand; they
        become the first allocations, without an event.
    counts[0..1] return the numbers of allocations and of events; counts[2] the offending tensor or position.
    """
    t = i64s(table, n_rows * T_WORDS)
    w = i64s(ws, COLUMNS * m)
    order = i64s(seq, n_seq)
    alignment = i64s(alignments, n_buffers)
    cnt = i64s(counts, 3)
    before = i64s(placed, 2 * n_placed)
    cnt[0] = 0
    cnt[1] = 0
    n_steps = max(n_seq if n_seq else n_nodes, 1)
    for i in range(m):
        w[CAUSE * m + i] = NOTHING_TO_PLACE
        w[CAUSE_SRC * m + i] = NONE
        w[OWN * m + i] = _ELSEWHERE if w[FLAGS * m + i] & EXTERNAL else _UNSET
    for k in range(n_placed):
        i = before[2 * k]
        w[A_FIRST * m + k] = i
        w[A_LO * m + k] = 0
        w[A_HI * m + k] = n_steps
        w[A_SIZE * m + k] = before[2 * k + 1]
        w[A_CUR * m + k] = before[2 * k + 1]
        w[A_BUFT * m + k] = w[BUFT * m + i]
        w[ALLOC * m + i] = k
        w[OWN * m + i] = _OURS
        cnt[0] += 1
    _count(w, m, n_nodes)
    start = 0
    for k in range(n_steps if n_nodes else 0):
        i = order[k] if n_seq else k
        if i != BARRIER:
            cnt[2] = k
            if i < 0 or i >= n_nodes or (n_seq and w[OWN * m + i] == _OURS and w[CAUSE * m + i] != NOTHING_TO_PLACE):
                return BAD_SEQ
            cnt[2] = i
            for j in range(MAX_SRC):
                p = w[SRC * m + i * MAX_SRC + j]
                if p == NONE:
                    break
                if p >= 0 and not _allocate(t, w, m, cnt, p, alignment, k, n_nodes, n_steps):
                    return NO_DATA
            if not _allocate(t, w, m, cnt, i, alignment, k, n_nodes, n_steps):
                return NO_DATA
        if n_seq == 0:
            _release_sources(w, m, cnt, i, k)
        elif i == BARRIER:
            for q in range(start, k):
                _release_sources(w, m, cnt, order[q], k)
            start = k + 1
    return OK
