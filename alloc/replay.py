"""Events through ggml's free list: the offsets ggml itself would choose."""
import numpy as np

from ggjit.alloc.free_list import CAP_BLOCKS, CHUNK_HEAD, HEAD, N_CHUNKS, list_alloc, list_free
from ggjit.alloc.work import A_BUFT, A_CHUNK, A_OFFS, A_SIZE, COLUMNS, EV, EV_ALLOC, EV_FREE, EV_WORDS, NO_ROOM, OK
from ggjit.ops.native.jit import i64s, native


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def replay(ws, m, n_ev, states, words, n_buffers, info):
    """Run n_ev events through n_buffers allocators of `words` words each; fills A_CHUNK and A_OFFS.

    info[0]: the allocation that found no room.  On NO_ROOM the states are those at the failure.
    """
    w = i64s(ws, COLUMNS * m)
    st = i64s(states, n_buffers * words)
    bad = i64s(info, 1)
    cur = np.empty(m, np.int64)
    for i in range(m):
        cur[i] = w[A_SIZE * m + i]
    for k in range(n_ev):
        e = EV * m + EV_WORDS * k
        kind, i, nbytes = w[e], w[e + 1], w[e + 2]
        a = w[A_BUFT * m + i] * words
        if kind == EV_ALLOC:
            chunk, offs = list_alloc(st, a, nbytes)
            if offs < 0:
                bad[0] = i
                return NO_ROOM
            w[A_CHUNK * m + i] = chunk
            w[A_OFFS * m + i] = offs
            continue
        start = w[A_OFFS * m + i]
        if kind != EV_FREE:                     # trim: keep nbytes, give the tail back
            start += nbytes
            nbytes, cur[i] = cur[i] - nbytes, nbytes
        if not list_free(st, a, w[A_CHUNK * m + i], start, nbytes):
            bad[0] = i
            return NO_ROOM
    return OK


def chunk_sizes(states, words, n_buffers):
    """High-water mark of every chunk of every allocator, bytes."""
    out = []
    for b in range(n_buffers):
        st = states[b * words:(b + 1) * words]
        step = CHUNK_HEAD + 2 * int(st[CAP_BLOCKS])
        out.append([int(st[HEAD + c * step + 1]) for c in range(int(st[N_CHUNKS]))])
    return out
