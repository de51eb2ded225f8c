"""A lower bound on live bytes for every order of nodes: the bytes that must be live while one node runs.

Before node i runs, all that leads to it has run and nothing that follows from it has.  A storage made by the former and
read by the latter (or by i) is alive then, in every order.  The nodes that are neither may have run or not; the choice
that leaves the fewest bytes is a minimum cut:

    have run -> made --bytes--> freed -> readers -> not yet run        cut: a storage that is alive
                                                                       no cut goes through an arrow without bytes:
                before --------------------------> after               what comes before has run, too

The set on the near side of the cut is also a hint: an order that runs just those nodes before i may be better.
"""
import numpy as np

from ggjit.ops.native.jit import i64s, native

NEVER_CUT = 1 << 61


class Reach:
    """What comes before and after every node, directly (lists) and in the end (sets as whole numbers)."""

    def __init__(self, n, edges):
        self.n, self.before, self.after = n, [[] for _ in range(n)], [[] for _ in range(n)]
        for a, b in edges.tolist():
            self.before[b].append(a)
            self.after[a].append(b)
        self.above, self.below = [0] * n, [0] * n
        for i in range(n):
            for a in self.before[i]:
                self.above[i] |= self.above[a] | 1 << a
        for i in reversed(range(n)):
            for b in self.after[i]:
                self.below[i] |= self.below[b] | 1 << b


def members(bits):
    """Numbers in a set."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def forced(nbytes, reach):
    """(n,) bytes alive in every order while each node runs."""
    n, whole = reach.n, (1 << reach.n) - 1
    out = np.array([nbytes.needs(i) for i in range(n)], np.int64)
    for s, size in enumerate(nbytes.own):
        if not size:
            continue
        until = whole
        if not nbytes.stays[s]:
            until = 0
            for r in members(nbytes.readers[s]):
                until |= reach.above[r] | 1 << r
        at = until & (whole if nbytes.given[s] else reach.below[s])
        if at:
            bits = np.frombuffer(at.to_bytes((n + 7) // 8, "little"), np.uint8)
            out[np.unpackbits(bits, count=n, bitorder="little").view(bool)] += size
    return out


@native("i64(i64, i64, i64, i64, i64, i64)")
def _cut(n, arcs_, n_arcs, ptr_, link_, side_):
    """Least bytes of a cut between 0 and 1 of n points; side[v]: 1 on the side of 0.  Shortest augmenting paths.

    arcs: (to, room) in pairs, arc k and its reverse k ^ 1; ptr, link: lists of the arcs of each point."""
    arcs, ptr, link, side = i64s(arcs_, 2 * n_arcs).reshape(n_arcs, 2), i64s(ptr_, n + 1), i64s(link_, n_arcs), \
        i64s(side_, n)
    came, queue = np.empty(n, np.int64), np.empty(n, np.int64)
    total = np.int64(0)
    while True:
        for v in range(n):
            came[v], side[v] = -1, 0
        side[0], queue[0] = 1, 0
        head, tail = 0, 1
        while head < tail and side[1] == 0:
            v = queue[head]
            head += 1
            for q in range(ptr[v], ptr[v + 1]):
                k = link[q]
                to = arcs[k, 0]
                if arcs[k, 1] > 0 and side[to] == 0:
                    side[to], came[to], queue[tail] = 1, k, to
                    tail += 1
        if side[1] == 0:
            return total
        room, v = np.int64(NEVER_CUT), np.int64(1)
        while v != 0:
            room = min(room, arcs[came[v], 1])
            v = arcs[came[v] ^ 1, 0]
        v = np.int64(1)
        while v != 0:
            arcs[came[v], 1] -= room
            arcs[came[v] ^ 1, 1] += room
            v = arcs[came[v] ^ 1, 0]
        total += room


def fewest_before(i, nbytes, reach):
    """(fewest bytes alive while node i runs, in any order; the nodes that have run by then, as a set)."""
    n, have, not_yet = reach.n, reach.above[i], reach.below[i] | 1 << i
    free = list(members((1 << n) - 1 & ~(have | not_yet)))
    point = dict(zip(free, range(2, 2 + len(free)), strict=True))
    place = lambda v: point[v] if v in point else 0 if have >> v & 1 else 1       # noqa: E731
    arcs, n_points, alive = [], 2 + len(free), nbytes.needs(i)
    for v in free:                              # if a node has run, all nodes before it have
        arcs += [(point[v], place(a), NEVER_CUT) for a in reach.before[v] if place(a) != 0]
        arcs += [(place(b), point[v], NEVER_CUT) for b in reach.after[v] if b not in point and place(b) == 0]
    for s, size in enumerate(nbytes.own):
        made = 0 if nbytes.given[s] else place(s)
        if not size or made == 1:
            continue
        if nbytes.stays[s] or nbytes.readers[s] & not_yet:
            arcs += [(made, 1, size)]
        elif readers := [point[r] for r in members(nbytes.readers[s] & ~have)]:
            arcs += [(made, n_points, size), *((n_points, r, NEVER_CUT) for r in readers)]
            n_points += 1
    alive += sum(size for a, b, size in arcs if (a, b) == (0, 1))
    arcs = [x for x in arcs if x[:2] != (0, 1)]
    if not arcs:
        return alive, have
    ends = np.array([(x[0], x[1]) for x in arcs], np.int64)
    both = np.zeros((2 * len(arcs), 2), np.int64)
    both[::2, 0], both[1::2, 0], both[::2, 1] = ends[:, 1], ends[:, 0], [x[2] for x in arcs]
    start = np.empty(2 * len(arcs), np.int64)
    start[::2], start[1::2] = ends[:, 0], ends[:, 1]
    link = np.argsort(start, kind="stable")
    ptr = np.searchsorted(start[link], np.arange(n_points + 1)).astype(np.int64)
    side = np.zeros(n_points, np.int64)
    alive += _cut(n_points, both, len(both), ptr, link, side)
    for v in free:
        have |= int(side[point[v]]) << v
    return alive, have
