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
from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.alias import new_allocation, same_layout
from ggjit.alloc.ggml.graph_record import graph_at, pad, put_event
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import exact, i64s, native

BARRIER = -1
# OWN column here: 0 no data yet, 1 data in this plan, 2 data elsewhere
_UNSET, _OURS, _ELSEWHERE = 0, 1, 2


@exact
def _buffer(g, i):
    """Allocator that holds tensor i, -1: none."""
    return g.allocation[g.tensor[i].alloc].buft if g.tensor[i].own == _OURS else np.int64(-1)


@exact
def _init_view(g, i):
    root = g.tensor[i].view
    if root == col.FOREIGN or g.tensor[root].own == _ELSEWHERE:
        g.tensor[i].own = _ELSEWHERE
        return True
    if g.tensor[root].own == _UNSET:
        return False
    g.tensor[i].own = _OURS
    g.tensor[i].alloc = g.tensor[root].alloc
    g.tensor[i].rel_offs = g.tensor[root].rel_offs + g.tensor[i].view_offs
    return True


@exact
def _reuse(g, i, p):
    """Make node i a view of its source p (or of p's root) if p dies here."""
    root = g.tensor[p].view if g.tensor[p].view != col.NONE else p
    cause = alias.IN_PLACE
    if _buffer(g, p) != g.tensor[i].buft:
        cause = alias.SRC_EXTERNAL
    elif g.tensor[p].kids != 1:
        cause = alias.SRC_SHARED
    elif g.tensor[p].views != 0:
        cause = alias.SRC_VIEWED
    elif not same_layout(g, g.tensor[i].id, g.tensor[p].id):
        cause = alias.SRC_LAYOUT
    elif root != p and (root < 0 or g.tensor[root].views != 1 or g.tensor[root].kids != 0 or
                        g.tensor[root].rel_offs != g.tensor[p].rel_offs):
        cause = alias.SRC_VIEWED
    if cause == alias.IN_PLACE:
        _become_view(g, i, root)
        return True
    if cause > g.tensor[i].cause:
        g.tensor[i].cause = cause
        g.tensor[i].cause_src = p
    return False


@exact
def _become_view(g, i, root):
    g.tensor[i].view = root
    g.tensor[i].view_offs = 0
    g.tensor[root].views += 1
    g.tensor[i].cause = alias.IN_PLACE
    g.tensor[i].cause_src = root
    _init_view(g, i)


@exact
def _allocate(g, i, step):
    """Returns False where ggml's assert fails: a view whose source has no data."""
    if g.tensor[i].own != _UNSET:
        return True
    if g.tensor[i].view != col.NONE:
        return _init_view(g, i)
    if i < g.n_nodes:
        g.tensor[i].cause = alias.OP_CANNOT
        if g.tensor[i].flags & col.CAN_INPLACE:
            g.tensor[i].cause = alias.NO_SOURCE
            for j in range(rec.MAX_SRC):
                p = g.tensor[i].src[j]
                if p == col.NONE:
                    break
                if p >= 0 and _reuse(g, i, p):
                    return True
    buft = g.tensor[i].buft
    new_allocation(g, i, buft, pad(g.tensor[i].size, g.alignment[buft]), step)
    g.tensor[i].own = _OURS
    return True


@exact
def _free(g, i, step):
    """free_node: silently ignores tensors of other allocators; an allocation is given back once.

    As many bytes as tensor i has: where it works in place of a larger one, the tail is lost.
    """
    if _buffer(g, i) != g.tensor[i].buft:
        return
    a = g.tensor[i].alloc
    if g.allocation[a].left < 0:
        return
    nbytes = min(pad(g.tensor[i].size, g.alignment[g.allocation[a].buft]), g.allocation[a].left)
    put_event(g, col.EV_FREE, a, nbytes, step)
    g.allocation[a].left = -1
    g.allocation[a].hi = step + 1


@exact
def _release_sources(g, i, step):
    for j in range(rec.MAX_SRC):
        p = g.tensor[i].src[j]
        if p == col.NONE:
            break
        if p < 0:
            continue
        g.tensor[p].kids -= 1
        if g.tensor[p].kids != 0 or g.tensor[p].views != 0:
            continue
        root = g.tensor[p].view
        if root == col.NONE:
            _free(g, p, step)
        elif root >= 0:
            g.tensor[root].views -= 1
            if g.tensor[root].views == 0 and g.tensor[root].kids == 0:
                _free(g, root, step)


@exact
def _count(g):
    for i in range(g.n_nodes):
        root = g.tensor[i].view
        if root >= 0:
            g.tensor[root].views += 1
        if root != col.NONE and g.tensor[i].own == _UNSET:
            _init_view(g, i)             # only has an effect on views of tensors that were placed beforehand
        for j in range(rec.MAX_SRC):
            p = g.tensor[i].src[j]
            if p == col.NONE:
                break
            if p < 0:
                continue
            g.tensor[p].kids += 1
            if g.tensor[p].view != col.NONE and g.tensor[p].own == _UNSET:
                _init_view(g, p)


@native("i64(i64, i64, i64, i64, i64)")
def alias_2023(address, seq, n_seq, placed, n_placed):
    """Events of the 2023 graph allocator, for a GRAPH record.

    seq: n_seq node positions and barriers; n_seq = 0 means graph order, freeing after every node.
    placed: n_placed pairs (local tensor, padded bytes): tensors the caller put into our allocators beforehand; they
        become the first allocations, without an event.
    count.at: the offending tensor or position.
    """
    g, order, before = graph_at(address), i64s(seq, n_seq), i64s(placed, 2 * n_placed)
    g.count.allocations, g.count.events = n_placed, 0
    for i in range(g.m):
        x = g.tensor[i]
        x.cause, x.cause_src = alias.NOTHING_TO_PLACE, col.NONE
        x.own = _ELSEWHERE if x.flags & col.EXTERNAL else _UNSET
    for k in range(n_placed):
        i, a = before[2 * k], g.allocation[k]
        a.first, a.lo, a.hi, a.buft = i, 0, g.n_steps, g.tensor[i].buft
        a.size = a.left = before[2 * k + 1]
        g.tensor[i].alloc, g.tensor[i].own = k, _OURS
    _count(g)
    start = 0
    for k in range(g.n_steps if g.n_nodes else 0):
        i = order[k] if n_seq else k
        if i != BARRIER:
            g.count.at = k
            if i < 0 or i >= g.n_nodes or (n_seq and g.tensor[i].own == _OURS
                                         and g.tensor[i].cause != alias.NOTHING_TO_PLACE):
                return col.BAD_SEQ
            g.count.at = i
            for j in range(rec.MAX_SRC):
                p = g.tensor[i].src[j]
                if p == col.NONE:
                    break
                if p >= 0 and not _allocate(g, p, k):
                    return col.NO_DATA
            if not _allocate(g, i, k):
                return col.NO_DATA
        if n_seq == 0:
            _release_sources(g, i, k)
        elif i == BARRIER:
            for q in range(start, k):
                _release_sources(g, order[q], k)
            start = k + 1
    return col.OK


def alias_as_in_2023(p, seq=None, placed=()):
    """Run the pass over a Problem.  placed: (local tensor, padded bytes, offs) of tensors already in our allocators."""
    seq = np.ascontiguousarray(() if seq is None else seq, np.int64)
    before = np.array([x[:2] for x in placed], np.int64).reshape(-1, 2)
    p.graph.n_steps = max(len(seq) or p.n_nodes, 1)
    p.raise_for(alias_2023(p.graph, seq, len(seq), before, len(before)))
    for k, x in enumerate(placed):
        p.graph.allocation["chunk"][k], p.graph.allocation["offs"][k] = 0, x[2]
