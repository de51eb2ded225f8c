"""From an aliasing pass's events to places: ggml's free list gives allocations their offsets, tensors follow them."""
import numpy as np

from ggjit.alloc.ggml import columns as col
from ggjit.alloc.ggml.alias import IN_PLACE
from ggjit.alloc.ggml.columns import base_of, pad
from ggjit.alloc.ggml.free_list import CAP_BLOCKS, CHUNK_HEAD, HEAD, N_CHUNKS, list_alloc, list_free
from ggjit.ops.core.record import T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

# rows of what `resolve` fills; see GraphPlan
P_BUFFER, P_CHUNK, P_OFFS, P_SIZE, P_ALLOC, P_ROOT = range(6)
P_ROWS = 6


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def replay(ws, m, n_ev, states, words, n_buffers, info):
    """Run n_ev events through n_buffers allocators of `words` words each; fills A_CHUNK and A_OFFS.

    info[0]: the allocation that found no room.  On NO_ROOM the states are those at the failure.
    """
    w = i64s(ws, col.COLUMNS * m)
    st = i64s(states, n_buffers * words)
    bad = i64s(info, 1)
    cur = np.empty(m, np.int64)
    for i in range(m):
        cur[i] = w[col.A_SIZE * m + i]
    for k in range(n_ev):
        e = col.EV * m + col.EV_WORDS * k
        kind, i, nbytes = w[e], w[e + 1], w[e + 2]
        a = w[col.A_BUFT * m + i] * words
        if kind == col.EV_ALLOC:
            chunk, offs = list_alloc(st, a, nbytes)
            if offs < 0:
                bad[0] = i
                return col.NO_ROOM
            w[col.A_CHUNK * m + i] = chunk
            w[col.A_OFFS * m + i] = offs
            continue
        start = w[col.A_OFFS * m + i]
        if kind != col.EV_FREE:                     # trim: keep nbytes, give the tail back
            start += nbytes
            nbytes, cur[i] = cur[i] - nbytes, nbytes
        if not list_free(st, a, w[col.A_CHUNK * m + i], start, nbytes):
            bad[0] = i
            return col.NO_ROOM
    return col.OK


def chunk_sizes(states, words, n_buffers):
    """High-water mark of every chunk of every allocator, bytes."""
    out = []
    for b in range(n_buffers):
        st = states[b * words:(b + 1) * words]
        step = CHUNK_HEAD + 2 * int(st[CAP_BLOCKS])
        out.append([int(st[HEAD + c * step + 1]) for c in range(int(st[N_CHUNKS]))])
    return out


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def resolve(table, n_rows, ws, m, views_carry, alignments, n_buffers, out):
    """Fill P_ROWS rows of m words.  views_carry: views know allocation and offset themselves (the 2023 pass)."""
    t, w = i64s(table, n_rows * T_WORDS), i64s(ws, col.COLUMNS * m)
    alignment, o = i64s(alignments, n_buffers), i64s(out, P_ROWS * m)
    for i in range(m):
        root = base_of(w, m, i)
        a = w[col.ALLOC * m + (i if views_carry else root)]
        if a < 0 or w[col.FLAGS * m + i] & col.EXTERNAL:
            viewed = t[w[col.ID * m + i] * T_WORDS + T_VIEW_SRC]
            o[P_BUFFER * m + i] = o[P_CHUNK * m + i] = o[P_OFFS * m + i] = o[P_ALLOC * m + i] = -1
            o[P_SIZE * m + i] = 0
            o[P_ROOT * m + i] = viewed if viewed >= 0 else w[col.ID * m + root]
            continue
        own = w[col.VIEW * m + i] == col.NONE or w[col.CAUSE * m + i] == IN_PLACE      # a view otherwise: no bytes
        o[P_BUFFER * m + i] = w[col.A_BUFT * m + a]
        o[P_CHUNK * m + i] = w[col.A_CHUNK * m + a]
        o[P_OFFS * m + i] = w[col.A_OFFS * m + a] + w[(col.DREL if views_carry else col.VOFFS) * m + i]
        o[P_SIZE * m + i] = pad(w[col.SIZE * m + i], alignment[w[col.A_BUFT * m + a]]) if own else 0
        o[P_ALLOC * m + i] = a
        o[P_ROOT * m + i] = w[col.ID * m + w[col.A_FIRST * m + a]]
    return 0
