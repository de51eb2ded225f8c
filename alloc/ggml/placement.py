"""From the events of an aliasing pass to offsets: ggml's free list places allocations, and tensors follow them."""
import numpy as np

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.alias import IN_PLACE
from ggjit.alloc.ggml.free_list import list_alloc, list_free
from ggjit.alloc.ggml.graph_record import base_of, graph_at, pad
from ggjit.ops.core.record import T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

# what is said of a tensor's place, each in a row of its own; see GraphPlan
PLACE = ("buffer", "chunk", "offs", "size", "alloc", "root")
_BUFFER, _CHUNK, _OFFS, _SIZE, _ALLOC, _ROOT = range(len(PLACE))


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
    """Fill a column for each tensor.  views_carry: views know allocation and offset themselves (the 2023 pass)."""
    g = graph_at(address)
    places, m = i64s(out, g.m * len(PLACE)), g.m
    for i in range(m):
        root, x = base_of(g, i), g.tensor[i]
        a = x.alloc if views_carry else g.tensor[root].alloc
        if a < 0 or x.flags & col.EXTERNAL:
            viewed = g.table[x.id * T_WORDS + T_VIEW_SRC]
            places[_BUFFER * m + i] = places[_CHUNK * m + i] = places[_OFFS * m + i] = places[_ALLOC * m + i] = -1
            places[_SIZE * m + i], places[_ROOT * m + i] = 0, viewed if viewed >= 0 else g.tensor[root].id
            continue
        own = x.view == col.NONE or x.cause == IN_PLACE         # a view otherwise: no bytes
        from_start, made = x.rel_offs if views_carry else x.view_offs, g.allocation[a]
        places[_BUFFER * m + i], places[_CHUNK * m + i], places[_OFFS * m + i] = \
            made.buft, made.chunk, made.offs + from_start
        places[_SIZE * m + i] = pad(x.size, g.alignment[made.buft]) if own else 0
        places[_ALLOC * m + i], places[_ROOT * m + i] = a, g.tensor[made.first].id
    return 0
