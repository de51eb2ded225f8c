"""Random other orders with as few live bytes: if the plan of one order has a gap, that of another often has none.

    step    0  1  2  3  4  5        a node moves to any step between the last it waits for and the first that waits
            a  b  c  d  e  f        for it; the move stays when no more bytes are live at once than before
                     |
            a  b  d  c  e  f        (d waits for b)
"""
import numpy as np

from ggjit.alloc.orders.memory_order import EDGE
from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord

WANDER = JitRecord(
    "WanderRecord",
    n="i64", m="i64", order="i64[n]",                   # nodes, storages
    ptr="i64[n + 1]", reads="i64[ptr[n]]", takes="u8[ptr[n]]",      # storages a node reads, and may lie in
    own="i64[m]", needs="i64[n]", stays="u8[m]",        # bytes of a storage, of a node's result; alive to the end
    start="i64", limit="i64",                           # bytes alive before the first node, and at most
    n_edges="i64", edge=(EDGE, "n_edges"), moves="i64", seed="i64",
    uses="i64[m]", left="i64[m]", at="i64[n]")          # readers of a storage, readers still to come; step of a node
wander_at = WANDER.at


@exact
def _most_live(w):
    """Most bytes live at once, or more than the limit as soon as that is sure."""
    for s in range(w.m):
        w.left[s] = w.uses[s]
    live, most = w.start, w.start
    for k in range(w.n):
        i = w.order[k]
        freed, taken = np.int64(0), False
        for r in range(w.ptr[i], w.ptr[i + 1]):
            s = w.reads[r]
            w.left[s] -= 1
            if w.left[s] == 0 and w.stays[s] == 0:
                freed += w.own[s]
                taken = taken or w.takes[r] == 1
        most = max(most, live if taken else live + w.needs[i])
        if most > w.limit:
            return most
        live += w.needs[i] - freed
    return most


@exact
def _steps_of(w, i):
    """(first, last) step to which node i may move: behind all that it waits for, before all that wait for it."""
    lo, hi = np.int64(0), w.n - 1
    for e in range(w.n_edges):
        if w.edge[e].after == i:
            lo = max(lo, w.at[w.edge[e].before] + 1)
        elif w.edge[e].before == i:
            hi = min(hi, w.at[w.edge[e].after] - 1)
    return lo, hi


@native("i64(i64)")
def wander(address):
    """Change the order by so many random moves that keep it legal and at most `limit` bytes live at once."""
    w = wander_at(address)
    x = np.uint64(w.seed + 1)
    for s in range(w.m):
        w.uses[s] = 0
    for r in range(w.ptr[w.n]):
        w.uses[w.reads[r]] += 1
    for _ in range(w.moves):
        for k in range(w.n):
            w.at[w.order[k]] = k
        # xorshift: the first words are skipped, since small seeds give similar ones
        for _ in range(8):
            x ^= x << np.uint64(13)
            x ^= x >> np.uint64(7)
            x ^= x << np.uint64(17)
        k = np.int64(x >> np.uint64(33)) % w.n
        lo, hi = _steps_of(w, w.order[k])
        to = lo + np.int64(x & np.uint64(0x7FFFFFFF)) % (hi - lo + 1)
        _move(w.order, k, to)
        if _most_live(w) > w.limit:
            _move(w.order, to, k)
    return 0


@exact
def _move(o, k, to):
    """Move the node at step k to step `to`."""
    i = o[k]
    while k < to:
        o[k] = o[k + 1]
        k += 1
    while k > to:
        o[k] = o[k - 1]
        k -= 1
    o[k] = i


def variants(nbytes, edges, order, count, moves):
    """`count` orders, one by one, with at most the live bytes of `order`, each so many moves from the last."""
    n, order = len(nbytes.reads), np.array(order, np.int64)
    ptr = np.concatenate([[0], np.cumsum([len(row) for row in nbytes.reads])]).astype(np.int64)
    reads = np.array([s for row in nbytes.reads for s in row], np.int64)
    takes = np.array([s in nbytes.takes[i] for i, row in enumerate(nbytes.reads) for s in row], np.uint8)
    needs = np.array([0 if nbytes.given[i] else nbytes.own[i] for i in range(n)], np.int64)
    own, stays = np.array(nbytes.own, np.int64), np.array(nbytes.stays, np.uint8)
    w = WANDER.of(n=n, m=len(own), order=order, ptr=ptr, reads=reads, takes=takes, own=own, needs=needs, stays=stays,
                  start=nbytes.start, limit=0, n_edges=len(edges), moves=moves, seed=0,
                  edge=np.ascontiguousarray(edges).view(EDGE).reshape(-1))
    for seed in range(count):
        w.seed, w.limit = seed, nbytes.peak(order)
        wander(w)
        yield order.copy()
