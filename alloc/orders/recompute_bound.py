"""A lower bound on the cost of every schedule within a number of bytes: a minimum cut at each of some nodes."""
import numpy as np

from ggjit.alloc.orders.schedules import AGAIN, KEEP, TAKE
from ggjit.ops.native.jit import exact, i64s, native
from ggjit.ops.native.records import JitRecord

# the order is cut into so many parts; of each, the node with the most waiting bytes is examined
MOMENTS = 48


# ---------------------------------------------------------------- minimum cut
CUT = JitRecord(
    "CutRecord",
    n="i64", n_edges="i64", start="i64[n_edges]", to="i64[n_edges]", room="i64[n_edges]",       # pairs, there and back
    first="i64[n] = -1", next="i64[n_edges]",           # the edges that start at a point, linked
    level="i64[n]", queue="i64[n]", here="i64[n]",      # steps from the source; the edge that is tried next
    path="i64[n]")                                      # edges from the source to where the search is
cut_at = CUT.at


@exact
def _levels(c):
    """Number the points by their distance from the source, n - 2; whether the sink, n - 1, is reached."""
    for v in range(c.n):
        c.level[v] = -1
    c.level[c.n - 2], c.queue[0] = 0, c.n - 2
    head, tail = 0, 1
    while head < tail:
        u = c.queue[head]
        head += 1
        e = c.first[u]
        while e >= 0:
            if c.room[e] > 0 and c.level[c.to[e]] < 0:
                c.level[c.to[e]] = c.level[u] + 1
                c.queue[tail] = c.to[e]
                tail += 1
            e = c.next[e]
    return c.level[c.n - 1] >= 0


@exact
def _augment(c, depth):
    """Send what the path of `depth` edges has room for: (how much, edges up to the first that is full)."""
    least = c.room[c.path[0]]
    for k in range(depth):
        least = min(least, c.room[c.path[k]])
    back = depth
    for k in range(depth - 1, -1, -1):
        e = c.path[k]
        c.room[e] -= least
        c.room[e ^ 1] += least
        if c.room[e] == 0:
            back = k
    return least, back


@exact
def _blocking_flow(c):
    """The flow that is added, along paths from level to level, until none is left (a phase of Dinic's algorithm)."""
    depth, u, flow = np.int64(0), c.n - 2, np.int64(0)
    for v in range(c.n):
        c.here[v] = c.first[v]
    while True:
        if u == c.n - 1:
            sent, depth = _augment(c, depth)
            flow += sent
            u = c.start[c.path[depth]]
            continue
        e = c.here[u]
        while e >= 0 and not (c.room[e] > 0 and c.level[c.to[e]] == c.level[u] + 1):
            e = c.next[e]
        c.here[u] = e
        if e >= 0:
            c.path[depth] = e
            depth += 1
            u = c.to[e]
        elif depth == 0:
            return flow
        else:
            c.level[u] = -1
            depth -= 1
            u = c.start[c.path[depth]]


@native("i64(i64)")
def min_cut(address):
    """The least cut of a CUT record between point n - 2 and point n - 1 (Dinic)."""
    c, flow = cut_at(address), np.int64(0)
    for e in range(c.n_edges):
        c.next[e] = c.first[c.start[e]]
        c.first[c.start[e]] = e
    while _levels(c):
        flow += _blocking_flow(c)
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
    flow = min_cut(CUT.of(n=2 * p.n + 2, n_edges=len(both[0]), start=both[0], to=both[1], room=both[2]))
    return (flow - per_byte * (limit - _own_nbytes(p, k))) / 1e9


def _own_nbytes(p, k):
    """Bytes that node k needs for its result."""
    return 0 if p.flags[k] & TAKE else int(p.size[k])
