"""Converts table ids to dense local numbers, and checks the structure of a graph before anything is planned."""
import numpy as np

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.graph_record import graph_at
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import exact, native

OP_NONE = int(rec.OP.NONE)


@exact
def _slot(slots, mask, id_):
    """Slot that holds an id, or the empty slot where it belongs (open addressing, at most half full).

    A slot is id << 32 | local number, -1 while empty: one word, for a large graph's table misses the cache.
    """
    h = (id_ * np.int64(0x9E3779B97F4A7C1)) & mask
    while slots[h] != -1 and slots[h] >> 32 != id_:
        h = (h + 1) & mask
    return h


@exact
def _local(slots, mask, id_):
    """Local number of an id, FOREIGN where it is not in the graph."""
    word = slots[_slot(slots, mask, id_)]
    return word & 0xFFFFFFFF if word >= 0 else np.int64(col.FOREIGN)


@exact
def _root(g, i):
    """(root id, bytes from it) of tensor i; root -1 when an id is out of range, -2 when the chain never ends."""
    offs = np.int64(0)
    steps = 0
    while g.table[i * rec.T_WORDS + rec.T_VIEW_SRC] >= 0:
        offs += g.table[i * rec.T_WORDS + rec.T_VIEW_OFFS]
        i = g.table[i * rec.T_WORDS + rec.T_VIEW_SRC]
        steps += 1
        if i >= g.n_rows:
            return np.int64(-1), offs
        if steps > g.n_rows:
            return np.int64(-2), offs
    return i, offs


@exact
def _describe(g, id_, root):
    """FLAGS of one tensor."""
    r = id_ * rec.T_WORDS
    f = 0
    if g.table[r + rec.T_BUFFER] >= 0 or g.table[root * rec.T_WORDS + rec.T_BUFFER] >= 0:
        f |= col.EXTERNAL
    if g.table[r + rec.T_FLAGS] & rec.FLAG_OUTPUT:
        f |= col.OUTPUT
    if g.table[r + rec.T_FLAGS] & rec.FLAG_INPUT:
        f |= col.INPUT
    op = g.table[r + rec.T_OP]
    if 0 <= op < g.n_in_place and g.in_place[op]:
        f |= col.CAN_INPLACE
    if op == OP_NONE:
        f |= col.MARKER
    return f


@exact
def _number(g, slots, mask):
    """Enter the ids into the slots, and set all columns to their initial values."""
    for i in range(g.m):
        id_ = g.tensor[i].id
        g.count.a = g.count.b = id_
        if id_ < 0 or id_ >= g.n_rows:
            return col.BAD_ID
        h = _slot(slots, mask, id_)
        if slots[h] != -1:
            return col.DUPLICATE
        slots[h] = id_ << 32 | i
        if g.tensor[i].buft < 0 or g.tensor[i].buft >= g.n_buffers:
            return col.BAD_BUFFER
        g.tensor[i].kids = g.tensor[i].views = g.tensor[i].own = g.tensor[i].rel_offs = 0
        g.tensor[i].alloc = -1
    return col.OK


@exact
def _find_roots(g, slots, mask):
    """Fill VIEW, VOFFS and FLAGS."""
    for i in range(g.m):
        id_ = g.tensor[i].id
        g.count.a = id_
        root, offs = _root(g, id_)
        if root < 0:
            return col.BAD_ID if root == -1 else col.VIEW_CYCLE
        g.tensor[i].flags = _describe(g, id_, root)
        g.tensor[i].view = col.NONE
        g.tensor[i].view_offs = offs
        if root != id_:
            g.count.b = root
            g.tensor[i].view = _local(slots, mask, root)
            if g.tensor[i].view == col.FOREIGN and not g.tensor[i].flags & col.EXTERNAL:
                return col.FOREIGN_SRC
    return col.OK


@exact
def _find_sources(g, slots, mask):
    """Fill SRC of the nodes; sources that are not in the graph must have memory."""
    for i in range(g.n_nodes):
        r = g.tensor[i].id * rec.T_WORDS
        g.count.a = g.tensor[i].id
        for j in range(rec.MAX_SRC):
            s = g.table[r + rec.T_SRC + j]
            k = np.int64(col.NONE)
            if s >= 0:
                g.count.b = s
                if s >= g.n_rows:
                    return col.BAD_ID
                k = _local(slots, mask, s)
                if i < k < g.n_nodes:                 # k == i: ggml_cast names itself as its destination
                    return col.UNORDERED
                if k == col.FOREIGN:
                    root, offs = _root(g, s)
                    if root < 0:
                        return col.VIEW_CYCLE
                    if g.table[s * rec.T_WORDS + rec.T_BUFFER] < 0 and g.table[root * rec.T_WORDS + rec.T_BUFFER] < 0:
                        return col.FOREIGN_SRC
            g.tensor[i].src[j] = k
    return col.OK


@native("i64(i64)")
def localize(address):
    """Fill the tensors of a GRAPH record from its table; id, size and buft are filled in by the caller.

    count.a, count.b: the offending ids.  Sources that are not in the graph are fine when they have memory elsewhere.
    """
    g = graph_at(address)
    mask = np.int64(15)
    while mask < 2 * g.m:
        mask = 2 * mask + 1
    slots = np.full(mask + 1, -1, np.int64)
    status = _number(g, slots, mask)
    if status != col.OK:
        return status
    status = _find_roots(g, slots, mask)
    if status != col.OK:
        return status
    for k in range(g.n_outputs):
        i = _local(slots, mask, g.outputs[k])
        if i >= 0:
            g.tensor[i].flags |= col.OUTPUT
    if g.has_own:
        for i in range(g.m):
            view = g.tensor[i].view
            if g.own[i] or (view >= 0 and g.own[view]):
                g.tensor[i].flags &= ~col.EXTERNAL
    return _find_sources(g, slots, mask)
