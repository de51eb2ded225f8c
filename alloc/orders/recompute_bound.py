"""What any schedule within a number of bytes pays at least: a minimum cut at each of some nodes."""
import numpy as np

from ggjit.alloc.orders.schedules import AGAIN, KEEP, TAKE
from ggjit.ops.native.jit import exact, i64s, native

MOMENTS = 48                            # parts of the order; in each the node that most bytes wait for is looked at


# ---------------------------------------------------------------- minimum cut
@exact
def _levels(source, sink, n, first, nxt, to, cap, level, queue):
    level[:] = -1
    level[source] = 0
    queue[0] = source
    head, tail = 0, 1
    while head < tail:
        u = queue[head]
        head += 1
        e = first[u]
        while e >= 0:
            if cap[e] > 0 and level[to[e]] < 0:
                level[to[e]] = level[u] + 1
                queue[tail] = to[e]
                tail += 1
            e = nxt[e]
    return level[sink] >= 0


@native("i64(i64, i64, i64, i64, i64)")
def min_cut(n, n_edges, from_, to_, cap_):
    """The least cut between node n - 2 and node n - 1 (Dinic); edges in pairs, each followed by its way back."""
    frm, to, cap = i64s(from_, n_edges), i64s(to_, n_edges), i64s(cap_, n_edges)
    first, nxt, level = np.full(n, -1, np.int64), np.empty(n_edges, np.int64), np.empty(n, np.int64)
    queue, here, path = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for e in range(n_edges):
        nxt[e] = first[frm[e]]
        first[frm[e]] = e
    source, sink, flow = n - 2, n - 1, np.int64(0)
    while _levels(source, sink, n, first, nxt, to, cap, level, queue):
        here[:] = first
        depth, u = 0, source
        while True:
            if u == sink:
                least = cap[path[0]]
                for k in range(depth):
                    least = min(least, cap[path[k]])
                flow += least
                back = depth
                for k in range(depth - 1, -1, -1):
                    cap[path[k]] -= least
                    cap[path[k] ^ 1] += least
                    if cap[path[k]] == 0:
                        back = k
                depth = back
                u = frm[path[depth]]
                continue
            e = here[u]
            while e >= 0 and not (cap[e] > 0 and level[to[e]] == level[u] + 1):
                e = nxt[e]
            here[u] = e
            if e >= 0:
                path[depth] = e
                depth += 1
                u = to[e]
            elif depth == 0:
                break
            else:
                level[u] = -1
                depth -= 1
                u = frm[path[depth]]
    return flow


# ---------------------------------------------------------------- moments
@native("i64(i64, i64, i64, i64, i64, i64)")
def waiting(n, size_, ptr_, idx_, flags_, found_):
    """found[k]: bytes of what led to node k and is read by anything else, k among it, or is an output."""
    size, ptr, flags, found = i64s(size_, n), i64s(ptr_, n + 1), i64s(flags_, n), i64s(found_, n)
    idx, before, waits = i64s(idx_, ptr[n]), np.empty(n, np.bool_), np.empty(n, np.bool_)
    for k in range(n):
        before[:] = False
        before[k] = True
        for v in range(k, -1, -1):
            if before[v]:
                for e in range(ptr[v], ptr[v + 1]):
                    before[idx[e]] = True
        before[k] = False
        for v in range(n):
            waits[v] = flags[v] & KEEP > 0
        for v in range(n):
            if not before[v]:
                for e in range(ptr[v], ptr[v + 1]):
                    waits[idx[e]] = True
        for v in range(k):
            if before[v] and waits[v]:
                found[k] += size[v]
    return 0


def _moments(p):
    """(node, bytes that wait for it), one of each part of the order, the most first."""
    nbytes = np.zeros(p.n, np.int64)
    waiting(p.n, p.size, p.ptr, p.idx, p.flags, nbytes)
    parts = np.array_split(np.arange(p.n), max(min(p.n, MOMENTS), 1))
    ks = [int(part[np.argmax(nbytes[part])]) for part in parts if len(part)]
    return sorted(((k, int(nbytes[k])) for k in ks), key=lambda item: -item[1])


# ---------------------------------------------------------------- bound
def bound(p, limit):
    """The least extra share that any schedule of a Recomputation within `limit` bytes pays, in any order of the nodes.

    When node k runs for the first time, each result that k, or what depends on k, reads is alive or is made later: once
    more if it led to k, and else perhaps for the first time, which costs nothing extra but needs what it reads.  With a
    price on bytes the least cost of that is a minimum cut, less the price of the room there is; every k and every price
    give a bound.
    """
    rough, best = np.geomspace(1e-2, 1e2, 10), 0.0
    for k, nbytes in _moments(p):
        if nbytes + _own_nbytes(p, k) <= limit:
            break
        network = _network(p, k)
        cuts = [_cut(p, network, k, limit, price) for price in rough]
        i = int(np.argmax(cuts))
        if cuts[i] > 0.5 * best:
            finer = np.geomspace(rough[max(i - 1, 0)], rough[min(i + 1, len(rough) - 1)], 10)
            best = max(best, cuts[i], *(_cut(p, network, k, limit, price) for price in finer))
    return best


def _network(p, k):
    """(from, to, cost, bytes) of the edges of the cut at node k; bytes that a price is put on, in place of a cost.

        source --cost--> [make v later] --price of v's bytes--> [v is needed] --> sink, if k or what follows reads v
                              ^------------- [x is needed], for what v reads
    """
    before, behind = np.zeros(p.n, np.bool_), np.zeros(p.n, np.bool_)
    before[p.idx[p.ptr[k]:p.ptr[k + 1]]] = behind[k] = True
    for v in range(k, -1, -1):
        if before[v]:
            before[p.idx[p.ptr[v]:p.ptr[v + 1]]] = True
    for v in range(k, p.n):
        if behind[v]:
            behind[p.cidx[p.cptr[v]:p.cptr[v + 1]]] = True
    reader = np.repeat(np.arange(p.n), np.diff(p.ptr))
    wanted = before & ((p.flags & KEEP) > 0)
    wanted[p.idx[behind[reader]]] = True
    v, source, sink, big = np.flatnonzero(~behind), 2 * p.n, 2 * p.n + 1, 1 << 50
    leaf = (np.diff(p.ptr) == 0) & (p.flags & AGAIN == 0)
    given = (before & (p.flags & AGAIN == 0)) | leaf    # made once, so they have to be alive,
    given[p.idx[p.ptr[k]:p.ptr[k + 1]]] = True          # and so has what k reads now
    unit = 1e9 / p.total                                # 1e9: one run; rounded down, so that it stays a bound
    later = np.where(given, big, np.where(before, (p.cost * unit).astype(np.int64), 0))
    edges, wanted = ~behind[reader], np.flatnonzero(wanted & ~behind)
    parts = [(np.full(len(v), source), 2 * v, later[v], None), (2 * v, 2 * v + 1, None, p.size[v]),
             (2 * p.idx[edges] + 1, 2 * reader[edges], big, None),
             (2 * wanted + 1, np.full(len(wanted), sink), big, None)]
    a, b = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    cost, nbytes = (np.concatenate([np.broadcast_to(0 if part[i] is None else part[i], len(part[0])) for part in parts])
                    for i in (2, 3))
    return a.astype(np.int64), b.astype(np.int64), cost.astype(np.int64), nbytes.astype(np.int64)


def _cut(p, network, k, limit, price):
    """A lower bound of the extra share.  price: of holding all results at once, in runs of the graph."""
    a, b, cost, nbytes = network
    per_byte = price * 1e9 / max(int(p.size.sum()), 1)
    cap = cost + (nbytes * per_byte).astype(np.int64)
    both = [np.stack(x, 1).reshape(-1) for x in ((a, b), (b, a), (cap, np.zeros_like(cap)))]
    flow = min_cut(2 * p.n + 2, len(both[0]), *both)
    return (flow - per_byte * (limit - _own_nbytes(p, k))) / 1e9


def _own_nbytes(p, k):
    """Bytes that node k needs for its result."""
    return 0 if p.flags[k] & TAKE else int(p.size[k])
