"""From the events of an aliasing pass to offsets: ggml's free list places allocations, and tensors follow them."""
import numpy as np

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.alias import IN_PLACE
from ggjit.alloc.ggml.free_list import list_alloc, list_free
from ggjit.alloc.ggml.graph_record import base_of, graph_at, pad
from ggjit.ops.core.record import T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

# what is said of a tensor, and of an allocation, each in a row of its own; see GraphPlan
PLACE = ("buffer", "chunk", "offs", "size", "alloc", "root", "cause", "cause_src")
MADE = ("id", "lo", "hi", "size", "buffer", "chunk", "offs")
_BUFFER, _CHUNK, _OFFS, _SIZE, _ALLOC, _ROOT, _CAUSE, _CAUSE_SRC = range(len(PLACE))
_EVENT_WORDS = len(col.EVENT)


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
    """Fill a column of PLACE for each tensor, then one of MADE for each allocation, then the events.

    views_carry: views know allocation and offset themselves (the 2023 pass).
    """
    g = graph_at(address)
    m, n_made, n_events = g.m, g.count.allocations, g.count.events
    made_at = m * len(PLACE)
    events_at = made_at + n_made * len(MADE)
    places = i64s(out, events_at + n_events * _EVENT_WORDS)
    for i in range(m):
        root, x = base_of(g, i), g.tensor[i]
        if i < g.n_nodes:
            places[_CAUSE * m + i], places[_CAUSE_SRC * m + i] = \
                x.cause, g.tensor[x.cause_src].id if x.cause_src >= 0 else -1
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
    for a in range(n_made):
        x, at = g.allocation[a], made_at + a
        places[at], places[at + n_made], places[at + 2 * n_made] = g.tensor[x.first].id, x.lo, x.hi
        places[at + 3 * n_made], places[at + 4 * n_made] = x.size, x.buft
        places[at + 5 * n_made], places[at + 6 * n_made] = x.chunk, x.offs
    for k in range(n_events):
        e, at = g.event[k], events_at + k * _EVENT_WORDS
        places[at], places[at + 1], places[at + 2], places[at + 3] = e.kind, e.alloc, e.nbytes, e.step
    return 0
