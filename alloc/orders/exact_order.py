"""The order of nodes with the fewest live bytes, with a proof: for small graphs, and as a bound for others.

Branch and bound over sets: the bytes alive after a set of nodes has run do not depend on their order, so each set is
looked at once.  The question is always whether some order stays within a limit, first one byte below the best order
known: yes gives a better one, no proves it the best.

    limit  ---------------------------------
                 +--+     b? would pass the limit: not now
             +---+  |
          ---+      +---  a: within the limit, and no more bytes alive after it than before it: run at once, without
                          alternatives, because doing it first makes no other step worse.  The same holds for a run
                          of nodes, each waiting for the one before, if no more bytes are alive after the last
"""
import collections

import numpy as np

from ggjit.alloc.ggml.graph_record import CAN_INPLACE, EXTERNAL, INPUT, MARKER, NONE, OUTPUT
from ggjit.alloc.orders.order_bound import NEVER_CUT, Reach, fewest_before, forced
from ggjit.ops.core.record import T_NB, T_NE, T_TYPE

Proof = collections.namedtuple("Proof", "order peak bound states")
# longest run of nodes that is looked for behind which no more bytes are alive than before
DEEP = 64
CUTS = 16                       # nodes at the peaks of an order to look at for a better one, fewer in large graphs
LAYOUT = [T_TYPE, *range(T_NE, T_NE + 4), *range(T_NB, T_NB + 4)]
MAX_STATES = 60_000             # sets of nodes that a search may visit
LOOKS = 400_000                 # divided by the number of nodes: how many nodes are examined for a higher bound


class Bytes:
    """What running a node does to the live bytes: its own come, those of sources it reads last go.

    Storages are local numbers: a tensor and all views of it.  own: bytes; given: whether it is there before the first
    node runs; reads: storages of a node; readers: nodes of a storage, as a set; stays: whether it is alive to the end,
    as an output, as a result that no node reads, or under a view that none reads; takes: sources a node may be computed
    in.
    """

    def __init__(self, p):
        n, m = p.n_nodes, p.m
        flags, view, sizes = (p.tensors[field].tolist() for field in ("flags", "view", "size"))
        src = p.tensors["src"][:n].tolist()
        self.own = [0 if flags[i] & EXTERNAL or view[i] != NONE else z for i, z in enumerate(sizes)]
        self.given = [i >= n or flags[i] & (INPUT | CAN_INPLACE) == INPUT for i in range(m)]
        self.start = sum(z for z, given in zip(self.own, self.given, strict=True) if given)
        base = lambda i: view[i] if view[i] >= 0 else i                                     # noqa: E731
        slots = [[s for s in row if s >= 0 and s != i] for i, row in enumerate(src)]
        self.reads = [sorted(set(map(base, row))) for row in slots]
        self.readers = [0] * m
        for i, row in enumerate(self.reads):
            for s in row:
                self.readers[s] |= 1 << i
        read = {s for row in slots for s in row}
        self.stays = [bool(f & OUTPUT) or i not in read and view[i] < 0 for i, f in enumerate(flags)]
        for i in range(m):
            if view[i] >= 0 and i not in read and (i >= n or not flags[i] & MARKER):
                self.stays[view[i]] = True
        layout = p.table[p.tensors["id"]][:, LAYOUT].tolist()
        offs, size = p.tensors["view_offs"].tolist(), sizes

        def may_take(i, s):
            return (self.own[base(s)] and not (flags[s] | flags[base(s)]) & OUTPUT and layout[s] == layout[i]
                    and [base(x) for x in slots[i]].count(base(s)) == 1
                    and (s == base(s) or offs[s] == 0 and size[i] <= self.own[base(s)]))
        self.takes = [{base(s) for s in slots[i] if may_take(i, s)}
                      if flags[i] & CAN_INPLACE and self.own[i] and not self.given[i] else () for i in range(n)]

    def needs(self, i):
        """The fewest bytes that come with node i."""
        return 0 if self.given[i] or self.takes[i] else self.own[i]

    def run(self, i, done, live):
        """(live bytes while node i runs after the set `done`, and behind it)."""
        freed, taken, need = 0, False, 0 if self.given[i] else self.own[i]
        for s in self.reads[i]:
            if not self.stays[s] and self.readers[s] & ~done == 1 << i:
                freed += self.own[s]
                taken = taken or s in self.takes[i]
        return (live if taken else live + need), live + need - freed

    def tops(self, order):
        """Bytes alive while each node runs, in this order."""
        done, live, out = 0, self.start, np.zeros(len(order), np.int64)
        for k, i in enumerate(map(int, order)):
            out[k], live = self.run(i, done, live)
            done |= 1 << i
        return out

    def peak(self, order):
        """Most bytes live at once when the nodes run in this order."""
        return max(self.start, int(self.tops(order).max(initial=0)))


def _run_down(limit, nbytes, done, live, ready, before, after):
    """(nodes, each waiting for the one before, after which no more bytes are alive than now; those bytes), or None."""
    looks, stack = DEEP, [((i,), done, live) for i in ready]
    while stack and looks:
        path, was, now_live = stack.pop()
        i, looks = path[-1], looks - 1
        top, left = nbytes.run(i, was, now_live)
        if top > limit:
            continue
        if left <= live:
            return path, left
        now = was | 1 << i
        stack += [((*path, j), now, left) for j in after[i] if before[j] & ~now == 0]
    return None


def _within(limit, n, nbytes, before, after, max_states):
    """(order that stays within limit bytes or None, whether all was looked at, states)."""
    whole, seen = (1 << n) - 1, set()
    stack = [(0, nbytes.start, [i for i in range(n) if not before[i]], None)]
    while stack:
        done, live, ready, way = stack.pop()
        if done == whole:
            order = []
            while way is not None:
                way, path = way
                order += reversed(path)
            return np.array(order[::-1], np.int64), True, len(seen)
        if done in seen:
            continue
        if len(seen) >= max_states:
            return None, False, len(seen)
        seen.add(done)
        free = _run_down(limit, nbytes, done, live, ready, before, after)
        steps = [free] if free else [((i,), left) for i in ready for top, left in [nbytes.run(i, done, live)]
                                     if top <= limit]
        # states with the fewest live bytes are continued first
        for path, left in sorted(steps, key=lambda x: (x[1], x[0]), reverse=True):
            now = done | sum(1 << i for i in path)
            come = {j for i in path for j in after[i] if before[j] & ~now == 0 and not now >> j & 1}
            stack.append((now, left, [j for j in ready if not now >> j & 1] + sorted(come), (way, path)))
    return None, True, len(seen)


def _anew(nbytes, reach, order, i, first):
    """The order in which the nodes of the set `first`, and no others, have run before node i.

    Nodes of the set that stood behind i run together, at the step before i at which the fewest bytes are alive."""
    order = order.tolist()
    at = order.index(i)
    early, held = [j for j in order[:at] if first >> j & 1], [j for j in order[:at] if not first >> j & 1]
    moved, rest = [j for j in order[at + 1:] if first >> j & 1], [j for j in order[at + 1:] if not first >> j & 1]
    done, live, lives, own, needed = 0, nbytes.start, [], 0, 0
    for j in moved:
        own, needed = own | 1 << j, needed | reach.above[j]
    for j in early:
        lives.append(NEVER_CUT if needed & ~(done | own) else live)
        done, live = done | 1 << j, nbytes.run(j, done, live)[1]
    k = int(np.argmin([*lives, live]))
    return np.array([*early[:k], *moved, *early[k:], i, *held, *rest], np.int64)


def _by_cuts(nbytes, reach, order, bound):
    """(order, bound): what must be alive at the peak of an order proves it, or says what to run sooner and later."""
    best, looks, k = _height(nbytes.tops(order)), min(CUTS, LOOKS // (40 * len(order) + 1)), 0
    while k < best[1] and max(best[0], nbytes.start) > bound and looks:
        i = int(order[np.flatnonzero(nbytes.tops(order) == best[0])[k]])
        least, first = fewest_before(i, nbytes, reach)
        new = _anew(nbytes, reach, order, i, first)
        bound, height, k, looks = max(bound, least), _height(nbytes.tops(new)), k + 1, looks - 1
        if height < best:
            order, best, k = new, height, 0
    return order, bound


def _height(tops):
    """(the most bytes, the number of nodes at which they are alive)."""
    most = tops.max(initial=0)
    return int(most), int((tops == most).sum())


def _higher(nbytes, reach, orders, bound):
    """A bound that is `bound` or higher, from the nodes at which every known order has more bytes alive."""
    tops = np.full(reach.n, np.iinfo(np.int64).max)
    for order in orders:
        tops[order] = np.minimum(tops[order], nbytes.tops(order))
    for i in np.argsort(-tops)[:LOOKS // max(reach.n, 1)].tolist():
        if tops[i] <= bound:
            break
        bound = max(bound, fewest_before(i, nbytes, reach)[0])
    return bound


def least_peak(nbytes, edges, orders, max_states=MAX_STATES):
    """A Proof for the Bytes of a problem.  edges: pairs (before, after) of node positions; orders: those known.

    order: the best found or known; peak: its bytes; bound: bytes that no order goes below, equal to peak where that
    was proved.  max_states: sets of nodes to look at, a quarter of them for one question but the last.
    """
    n = len(nbytes.reads)
    reach = Reach(n, edges)
    bound = max([nbytes.start, *forced(nbytes, reach).tolist()])
    orders = sorted(orders, key=nbytes.peak)
    for k, order in enumerate(orders):
        orders[k], bound = _by_cuts(nbytes, reach, order, bound)
        if nbytes.peak(orders[k]) == bound:
            break
    order = min(orders, key=nbytes.peak)
    if bound < nbytes.peak(order):
        bound = _higher(nbytes, reach, orders, bound)
    before, after = [sum(1 << a for a in x) for x in reach.before], reach.after
    peak, states = nbytes.peak(order), 0
    limit, share = peak - 1, -(-max_states // 4)
    while bound < peak and states < max_states:
        found, whole, looked = _within(limit, n, nbytes, before, after, min(share, max_states - states))
        states += looked
        if found is not None:
            order, peak = found, nbytes.peak(found)
            limit = peak - 1
        elif whole:
            bound = limit + 1
            limit = (bound + peak) // 2
        elif limit - bound > peak // 256:       # too many states: a lower limit is decided with fewer
            limit = (bound + limit) // 2
        else:
            limit, share = peak - 1, max_states
    return Proof(order, peak, bound, states)
