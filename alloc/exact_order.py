"""The order of nodes with the fewest bytes live at once, proved: for small graphs, and as a bound for others.

Branch and bound over sets: the bytes alive after a set of nodes has run do not depend on their order, so each set is
looked at once.  The question is always whether some order stays within a limit, first one byte below the best order
known: yes gives a better one, no proves it the best.

    limit  ---------------------------------
                 +--+     b? would pass the limit: not now
             +---+  |
          ---+      +---  a: within the limit, and no more bytes alive after it than before it: run at once, without
                          alternatives, because doing it first makes no other step worse
"""
import collections

import numpy as np

from ggjit.alloc.columns import CAN_INPLACE, EXTERNAL, FLAGS, NONE, OUTPUT, SIZE, SRC, VIEW
from ggjit.ops.core.record import MAX_SRC

Proof = collections.namedtuple("Proof", "order peak bound states")


class Bytes:
    """What running a node does to the live bytes: its own come, those of sources it reads last go."""

    def __init__(self, p):
        n, m = p.n_nodes, p.m
        flags, view = p.col(FLAGS).tolist(), p.col(VIEW).tolist()
        src = np.asarray(p.ws[SRC * m:(SRC + MAX_SRC) * m]).reshape(m, MAX_SRC)[:n].tolist()
        self.own = [0 if flags[i] & EXTERNAL or view[i] != NONE else z for i, z in enumerate(p.col(SIZE).tolist())]
        self.start = sum(self.own[n:])
        base = lambda i: view[i] if view[i] >= 0 else i                                     # noqa: E731
        self.reads = [sorted({base(s) for s in row if s >= 0 and s != i}) for i, row in enumerate(src)]
        self.readers = [0] * m
        for i, row in enumerate(self.reads):
            for s in row:
                self.readers[s] |= 1 << i
        self.kept = [bool(f & OUTPUT) for f in flags]
        self.may_take = [bool(f & CAN_INPLACE) for f in flags]

    def run(self, i, done, live):
        """(live bytes while node i runs after the set `done`, and behind it)."""
        freed, taken, need = 0, False, self.own[i]
        for s in self.reads[i]:
            if not self.kept[s] and self.readers[s] & ~done == 1 << i:
                if not taken and need and self.may_take[i] and self.own[s] == need:
                    taken = True
                else:
                    freed += self.own[s]
        return (live, live - freed) if taken else (live + need, live + need - freed)


    def peak(self, order):
        """Most bytes live at once when the nodes run in this order."""
        done, live, peak = 0, self.start, self.start
        for i in map(int, order):
            top, live = self.run(i, done, live)
            done, peak = done | 1 << i, max(peak, top)
        return peak

    def floor(self, n):
        """The most bytes of a node with all it reads."""
        return max([self.start, *(sum(self.own[s] for s in self.reads[i]) + (0 if self.may_take[i] else self.own[i])
                                  for i in range(n))])


def _within(limit, n, nbytes, before, after, max_states):
    """(order that stays within limit bytes or None, whether all was looked at, states)."""
    whole, seen = (1 << n) - 1, set()
    stack = [(0, nbytes.start, [i for i in range(n) if not before[i]], None)]
    while stack:
        done, live, ready, way = stack.pop()
        if done == whole:
            order = []
            while way is not None:
                way, i = way
                order.append(i)
            return np.array(order[::-1], np.int64), True, len(seen)
        if done in seen:
            continue
        if len(seen) >= max_states:
            return None, False, len(seen)
        seen.add(done)
        steps = [(left, i) for i in ready for top, left in [nbytes.run(i, done, live)] if top <= limit]
        free = next((s for s in steps if s[0] <= live), None)
        for left, i in sorted(steps, reverse=True) if free is None else [free]:     # the fewest bytes alive come next
            now = done | 1 << i
            come = [j for j in after[i] if before[j] & ~now == 0]
            stack.append((now, left, [j for j in ready if j != i] + come, (way, i)))
    return None, True, len(seen)


def least_peak(p, edges, orders, max_states=10_000):
    """A Proof for Problem p.  edges: pairs (before, after) of node positions; orders: those known.

    order: the best found or known; peak: its bytes; bound: bytes that no order goes below, equal to peak where the
    search came to its end.  max_states: sets of nodes to look at, a quarter of them for one question.
    """
    n, nbytes = p.n_nodes, Bytes(p)
    before, after = [0] * n, [[] for _ in range(n)]
    for a, b in edges.tolist():
        before[b] |= 1 << a
        after[a].append(b)
    peak, k = min((nbytes.peak(order), k) for k, order in enumerate(orders))
    order, bound, states, limit = orders[k], min(nbytes.floor(n), peak), 0, peak - 1
    while bound < peak and states < max_states:
        found, whole, looked = _within(limit, n, nbytes, before, after, -(-max_states // 4))
        states += looked
        if found is not None:
            order, peak = found, nbytes.peak(found)
            limit = peak - 1
        elif whole:
            bound = limit + 1
            limit = (bound + peak) // 2
        elif limit - bound > peak // 256:       # too much to look at: a lower limit is decided sooner
            limit = (bound + limit) // 2
        else:
            break
    return Proof(order, peak, bound, states)
