"""Random other orders with no more bytes live at once: where the offsets of one leave a gap, another's often do not.

    step    0  1  2  3  4  5        a node moves to any step between the last it waits for and the first that waits
            a  b  c  d  e  f        for it; the move stays when no more bytes are live at once than before
                     |
            a  b  d  c  e  f        (d waits for b)
"""
import numpy as np

from ggjit.ops.native.jit import exact, i64s, native, u8s


@exact
def _most_live(order, n, ptr, reads, takes, own, needs, stays, uses, left, start, limit):
    """Most bytes live at once, or more than `limit` as soon as that is sure.  left: room for a copy of uses."""
    for s in range(len(uses)):
        left[s] = uses[s]
    live, most = start, start
    for k in range(n):
        i = order[k]
        freed, taken = np.int64(0), False
        for r in range(ptr[i], ptr[i + 1]):
            s = reads[r]
            left[s] -= 1
            if left[s] == 0 and stays[s] == 0:
                freed += own[s]
                taken = taken or takes[r] == 1
        most = max(most, live if taken else live + needs[i])
        if most > limit:
            return most
        live += needs[i] - freed
    return most


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def wander(order, n, m, ptr_, reads_, takes_, own_, needs_, stays_, start, limit, edges_, n_edges, moves, seed):
    """Change `order` by so many random moves that keep it legal and at most `limit` bytes live at once."""
    o, ptr, own, needs = i64s(order, n), i64s(ptr_, n + 1), i64s(own_, m), i64s(needs_, n)
    reads, takes, stays = i64s(reads_, ptr[n]), u8s(takes_, ptr[n]), u8s(stays_, m)
    edges = i64s(edges_, 2 * n_edges).reshape(n_edges, 2)
    uses, left, at, x = np.zeros(m, np.int64), np.empty(m, np.int64), np.empty(n, np.int64), np.uint64(seed + 1)
    for r in range(ptr[n]):
        uses[reads[r]] += 1
    for _ in range(moves):
        for k in range(n):
            at[o[k]] = k
        for _ in range(8):                      # xorshift; the first words of small seeds are alike
            x ^= x << np.uint64(13)
            x ^= x >> np.uint64(7)
            x ^= x << np.uint64(17)
        k = np.int64(x >> np.uint64(33)) % n
        i, lo, hi = o[k], np.int64(0), np.int64(n - 1)
        for e in range(n_edges):
            if edges[e, 1] == i:
                lo = max(lo, at[edges[e, 0]] + 1)
            elif edges[e, 0] == i:
                hi = min(hi, at[edges[e, 1]] - 1)
        to = lo + np.int64(x & np.uint64(0x7FFFFFFF)) % (hi - lo + 1)
        _move(o, k, to)
        if _most_live(o, n, ptr, reads, takes, own, needs, stays, uses, left, start, limit) > limit:
            _move(o, to, k)
    return 0


@exact
def _move(o, k, to):
    """What is at step k comes to step `to`."""
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
    for seed in range(count):
        wander(order, n, len(own), ptr, reads, takes, own, needs, stays, nbytes.start, nbytes.peak(order), edges,
               len(edges), moves, seed)
        yield order.copy()
