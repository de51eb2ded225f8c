"""The aliasing pass of ggml's November 2023 sources, word for word.

What differs from `alias.py`:
    - the scan of sources stops at the first absent one;
    - leafs are allocated when first used; no flags: the last node survives because no node consumes it;
    - a reused parent is recorded by making the node a *view* of it, so counts run through views;
    - ops do work in place behind a whole view at offset 0;
    - ownership is "same buffer", so tensors the caller placed with the same tensor allocator may be freed and reused;
    - `parse_seq`: an explicit order with -1 as barrier; memory is given back only at barriers.
"""
import numpy as np

from ggjit.alloc.ggml import alias
from ggjit.alloc.ggml import columns as col
from ggjit.alloc.ggml.alias import new_allocation, same_layout
from ggjit.alloc.ggml.columns import pad, put_event
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import exact, i64s, native

BARRIER = -1
# OWN column here: 0 no data yet, 1 data in this plan, 2 data elsewhere
_UNSET, _OURS, _ELSEWHERE = 0, 1, 2


@exact
def _buffer(w, m, i):
    """Allocator that holds tensor i, -1: none."""
    return w[col.A_BUFT * m + w[col.ALLOC * m + i]] if w[col.OWN * m + i] == _OURS else np.int64(-1)


@exact
def _init_view(w, m, i):
    root = w[col.VIEW * m + i]
    if root == col.FOREIGN or w[col.OWN * m + root] == _ELSEWHERE:
        w[col.OWN * m + i] = _ELSEWHERE
        return True
    if w[col.OWN * m + root] == _UNSET:
        return False
    w[col.OWN * m + i] = _OURS
    w[col.ALLOC * m + i] = w[col.ALLOC * m + root]
    w[col.DREL * m + i] = w[col.DREL * m + root] + w[col.VOFFS * m + i]
    return True


@exact
def _reuse(t, w, m, i, p):
    """Make node i a view of its source p (or of p's root) if p dies here."""
    root = w[col.VIEW * m + p] if w[col.VIEW * m + p] != col.NONE else p
    cause = alias.IN_PLACE
    if _buffer(w, m, p) != w[col.BUFT * m + i]:
        cause = alias.SRC_EXTERNAL
    elif w[col.KIDS * m + p] != 1:
        cause = alias.SRC_SHARED
    elif w[col.VIEWS * m + p] != 0:
        cause = alias.SRC_VIEWED
    elif not same_layout(t, w[col.ID * m + i], w[col.ID * m + p]):
        cause = alias.SRC_LAYOUT
    elif root != p and (root < 0 or w[col.VIEWS * m + root] != 1 or w[col.KIDS * m + root] != 0 or
                        w[col.DREL * m + root] != w[col.DREL * m + p]):
        cause = alias.SRC_VIEWED
    if cause == alias.IN_PLACE:
        _become_view(w, m, i, root)
        return True
    if cause > w[col.CAUSE * m + i]:
        w[col.CAUSE * m + i] = cause
        w[col.CAUSE_SRC * m + i] = p
    return False


@exact
def _become_view(w, m, i, root):
    w[col.VIEW * m + i] = root
    w[col.VOFFS * m + i] = 0
    w[col.VIEWS * m + root] += 1
    w[col.CAUSE * m + i] = alias.IN_PLACE
    w[col.CAUSE_SRC * m + i] = root
    _init_view(w, m, i)


@exact
def _allocate(t, w, m, cnt, i, alignment, step, n_nodes, n_steps):
    """Returns False where ggml's assert fails: a view whose source has no data."""
    if w[col.OWN * m + i] != _UNSET:
        return True
    if w[col.VIEW * m + i] != col.NONE:
        return _init_view(w, m, i)
    if i < n_nodes:
        w[col.CAUSE * m + i] = alias.OP_CANNOT
        if w[col.FLAGS * m + i] & col.CAN_INPLACE:
            w[col.CAUSE * m + i] = alias.NO_SOURCE
            for j in range(rec.MAX_SRC):
                p = w[col.SRC * m + i * rec.MAX_SRC + j]
                if p == col.NONE:
                    break
                if p >= 0 and _reuse(t, w, m, i, p):
                    return True
    buft = w[col.BUFT * m + i]
    new_allocation(w, m, cnt, i, buft, pad(w[col.SIZE * m + i], alignment[buft]), step, n_steps)
    w[col.OWN * m + i] = _OURS
    return True


@exact
def _free(w, m, cnt, i, step):
    """free_node: silently ignores tensors of other allocators; an allocation is given back once."""
    if _buffer(w, m, i) != w[col.BUFT * m + i]:
        return
    a = w[col.ALLOC * m + i]
    if w[col.A_CUR * m + a] < 0:
        return
    put_event(w, m, cnt[1], col.EV_FREE, a, w[col.A_CUR * m + a], step)
    cnt[1] += 1
    w[col.A_CUR * m + a] = -1
    w[col.A_HI * m + a] = step + 1


@exact
def _release_sources(w, m, cnt, i, step):
    for j in range(rec.MAX_SRC):
        p = w[col.SRC * m + i * rec.MAX_SRC + j]
        if p == col.NONE:
            break
        if p < 0:
            continue
        w[col.KIDS * m + p] -= 1
        if w[col.KIDS * m + p] != 0 or w[col.VIEWS * m + p] != 0:
            continue
        root = w[col.VIEW * m + p]
        if root == col.NONE:
            _free(w, m, cnt, p, step)
        elif root >= 0:
            w[col.VIEWS * m + root] -= 1
            if w[col.VIEWS * m + root] == 0 and w[col.KIDS * m + root] == 0:
                _free(w, m, cnt, root, step)


@exact
def _count(w, m, n_nodes):
    for i in range(n_nodes):
        root = w[col.VIEW * m + i]
        if root >= 0:
            w[col.VIEWS * m + root] += 1
        if root != col.NONE and w[col.OWN * m + i] == _UNSET:
            _init_view(w, m, i)             # only takes effect over memory placed beforehand
        for j in range(rec.MAX_SRC):
            p = w[col.SRC * m + i * rec.MAX_SRC + j]
            if p == col.NONE:
                break
            if p < 0:
                continue
            w[col.KIDS * m + p] += 1
            if w[col.VIEW * m + p] != col.NONE and w[col.OWN * m + p] == _UNSET:
                _init_view(w, m, p)


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def alias_2023(table, n_rows, ws, m, n_nodes, seq, n_seq, alignments, n_buffers, placed, n_placed, counts):
    """Events of the 2023 graph allocator.

    seq: n_seq node positions and barriers; n_seq = 0 means graph order, freeing after every node.
    placed: n_placed pairs (local tensor, padded bytes): tensors the caller put into our allocators beforehand; they
        become the first allocations, without an event.
    counts[0..1] return the numbers of allocations and of events; counts[2] the offending tensor or position.
    """
    t = i64s(table, n_rows * rec.T_WORDS)
    w = i64s(ws, col.COLUMNS * m)
    order = i64s(seq, n_seq)
    alignment = i64s(alignments, n_buffers)
    cnt = i64s(counts, 3)
    before = i64s(placed, 2 * n_placed)
    cnt[0] = 0
    cnt[1] = 0
    n_steps = max(n_seq if n_seq else n_nodes, 1)
    for i in range(m):
        w[col.CAUSE * m + i] = alias.NOTHING_TO_PLACE
        w[col.CAUSE_SRC * m + i] = col.NONE
        w[col.OWN * m + i] = _ELSEWHERE if w[col.FLAGS * m + i] & col.EXTERNAL else _UNSET
    for k in range(n_placed):
        i = before[2 * k]
        w[col.A_FIRST * m + k] = i
        w[col.A_LO * m + k] = 0
        w[col.A_HI * m + k] = n_steps
        w[col.A_SIZE * m + k] = before[2 * k + 1]
        w[col.A_CUR * m + k] = before[2 * k + 1]
        w[col.A_BUFT * m + k] = w[col.BUFT * m + i]
        w[col.ALLOC * m + i] = k
        w[col.OWN * m + i] = _OURS
        cnt[0] += 1
    _count(w, m, n_nodes)
    start = 0
    for k in range(n_steps if n_nodes else 0):
        i = order[k] if n_seq else k
        if i != BARRIER:
            cnt[2] = k
            if i < 0 or i >= n_nodes or (n_seq and w[col.OWN * m + i] == _OURS
                                         and w[col.CAUSE * m + i] != alias.NOTHING_TO_PLACE):
                return col.BAD_SEQ
            cnt[2] = i
            for j in range(rec.MAX_SRC):
                p = w[col.SRC * m + i * rec.MAX_SRC + j]
                if p == col.NONE:
                    break
                if p >= 0 and not _allocate(t, w, m, cnt, p, alignment, k, n_nodes, n_steps):
                    return col.NO_DATA
            if not _allocate(t, w, m, cnt, i, alignment, k, n_nodes, n_steps):
                return col.NO_DATA
        if n_seq == 0:
            _release_sources(w, m, cnt, i, k)
        elif i == BARRIER:
            for q in range(start, k):
                _release_sources(w, m, cnt, order[q], k)
            start = k + 1
    return col.OK


def alias_as_in_2023(p, seq=None, placed=()):
    """Run the pass over a Problem.  placed: (local tensor, padded bytes, offs) of tensors already in our allocators."""
    seq = np.ascontiguousarray(() if seq is None else seq, np.int64)
    before = np.array([x[:2] for x in placed], np.int64).reshape(-1, 2)
    counts = np.zeros(3, np.int64)
    p.raise_for(alias_2023(p.table, p.n_rows, p.ws, p.m, p.n_nodes, seq, len(seq), p.alignments, p.n_buffers, before,
                           len(before), counts), counts)
    p.n_alloc, p.n_events, p.n_steps = int(counts[0]), int(counts[1]), max(len(seq) or p.n_nodes, 1)
    for k, x in enumerate(placed):
        p.col(col.A_CHUNK)[k], p.col(col.A_OFFS)[k] = 0, x[2]
