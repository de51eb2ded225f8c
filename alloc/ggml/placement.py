"""From an aliasing pass's events to places: ggml's free list gives allocations their offsets, tensors follow them."""
import numpy as np
from numba import from_dtype

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.alias import IN_PLACE
from ggjit.alloc.ggml.free_list import list_alloc, list_free
from ggjit.alloc.ggml.graph_record import base_of, graph_at, pad
from ggjit.ops.core.record import T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import array_maker, i64s, native
from ggjit.ops.native.records import row

PLACE = row("buffer", "chunk", "offs", "size", "alloc", "root")         # of a tensor; see GraphPlan
_places = array_maker(from_dtype(PLACE))


@native("i64(i64, i64, i64)")
def replay(address, states, words):
    """Run the events of a GRAPH record through its allocators, `words` words each; fills chunk and offs.

    count.a: the allocation that found no room.  On NO_ROOM the states are those at the failure.
    """
    g = graph_at(address)
    st, left = i64s(states, g.n_buffers * words), np.empty(g.m, np.int64)
    for i in range(g.count.allocations):
        left[i] = g.allocation[i].size
    for k in range(g.count.events):
        e = g.event[k]
        i, nbytes = e.alloc, e.nbytes
        a, x = g.allocation[i].buft * words, g.allocation[i]
        g.count.a = i
        if e.kind == col.EV_ALLOC:
            chunk, offs = list_alloc(st, a, nbytes)
            if offs < 0:
                return col.NO_ROOM
            x.chunk, x.offs = chunk, offs
            continue
        start = x.offs
        if e.kind != col.EV_FREE:                   # trim: keep nbytes, give the tail back
            start += nbytes
            nbytes, left[i] = left[i] - nbytes, nbytes
        if not list_free(st, a, x.chunk, start, nbytes):
            return col.NO_ROOM
    return col.OK


@native("i64(i64, i64, i64)")
def resolve(address, views_carry, out):
    """Fill a PLACE for each tensor.  views_carry: views know allocation and offset themselves (the 2023 pass)."""
    g = graph_at(address)
    places = _places(out, g.m)
    for i in range(g.m):
        root, x, at = base_of(g, i), g.tensor[i], places[i]
        a = x.alloc if views_carry else g.tensor[root].alloc
        if a < 0 or x.flags & col.EXTERNAL:
            viewed = g.table[x.id * T_WORDS + T_VIEW_SRC]
            at.buffer = at.chunk = at.offs = at.alloc = -1
            at.size, at.root = 0, viewed if viewed >= 0 else g.tensor[root].id
            continue
        own = x.view == col.NONE or x.cause == IN_PLACE         # a view otherwise: no bytes
        from_start = x.rel_offs if views_carry else x.view_offs
        at.buffer, at.chunk, at.offs = g.allocation[a].buft, g.allocation[a].chunk, g.allocation[a].offs + from_start
        at.size = pad(x.size, g.alignment[g.allocation[a].buft]) if own else 0
        at.alloc, at.root = a, g.tensor[g.allocation[a].first].id
    return 0
