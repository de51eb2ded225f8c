"""Which results to compute again, and when, so that a graph runs within a number of bytes.

A *schedule* is a list of node numbers: every node for the first time in the graph's order, and some once more before a
later reader.  An instance of a result lives from the event that makes it to the last event that reads it before it is
made anew:

    events      a  b  c  d  a' e         e reads a: made again as a', the first a need not outlive b
    a           |--|                     bytes alive at an event: its inputs, its output, and what is read later; an
    a'                      |--|         output that lies in place of an input counts once

Wanted: at most `limit` bytes alive at every event, at the least extra cost.  Three plans are made and the cheapest is
taken (idea of two of them: eviction by cost, size and age, Kirisame et al., ICLR 2021):

    greedy      at the peak, the result that is cheapest to make again per byte makes room; repeated
    executor    run the order with `limit` bytes; when they are full, drop the result of least
                (cost to make it again + c * cost of dropped ones that hang on it) / (size^b * cost to its next read^a)
    polish      delete events whose results are not read, then keep what fits after all, dearest first

`bound` proves how much any such schedule pays at least.
"""
import dataclasses
import functools

import numpy as np

from ggjit.ops.core.errors import ParamError
from ggjit.ops.native.jit import exact, i64s, native

# flags: may be made again; an output; may lie in place of an input; read by a node that may be made again
AGAIN, KEEP, TAKE, SOURCE = 1, 2, 4, 8
RULES = ((0.0, 0.5, 0.5), (1.0, 0.5, 0.5))      # (a, b, c) of the executor
EVENTS_PER_NODE = 12                    # longest schedule that is looked for
LEAST_STEP = 500                        # the least reachable peak is found to 1 / this of the peak


# ---------------------------------------------------------------- jitted: bytes alive
@exact
def _instances(ev, m, n, size, ptr, idx, flags, end):
    """end[j]: the first event at which what event j makes is gone."""
    at = np.full(n, -1, np.int64)
    for j in range(m):
        v = ev[j]
        end[j] = j + 1
        for k in range(ptr[v], ptr[v + 1]):
            end[at[idx[k]]] = j + 1
        at[v] = j
    for v in range(n):
        if flags[v] & KEEP and at[v] >= 0:
            end[at[v]] = m
    at[:] = -1
    for j in range(m):
        v, taken = ev[j], flags[ev[j]] & TAKE == 0
        for k in range(ptr[v], ptr[v + 1]):
            i = at[idx[k]]
            if not taken and end[i] == j + 1 and size[idx[k]] == size[v] and not flags[idx[k]] & KEEP:
                end[i], taken = j, True
        at[v] = j


@exact
def _live(ev, m, size, end, live):
    """live[j]: bytes alive at event j."""
    live[:m + 1] = 0
    for j in range(m):
        live[j] += size[ev[j]]
        live[end[j]] -= size[ev[j]]
    for j in range(m):
        live[j + 1] += live[j]


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def live_bytes(events, m, n, size_, ptr_, idx_, flags_, live_):
    """Fills live[m + 1]; returns the most of it."""
    ptr = i64s(ptr_, n + 1)
    end, live, ev, size = np.empty(m, np.int64), i64s(live_, m + 1), i64s(events, m), i64s(size_, n)
    _instances(ev, m, n, size, ptr, i64s(idx_, ptr[n]), i64s(flags_, n), end)
    _live(ev, m, size, end, live)
    most = np.int64(0)
    for j in range(m):
        most = max(most, live[j])
    return most


# ---------------------------------------------------------------- jitted: order
@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def list_order(n, size_, ptr_, idx_, flags_, rank_, after_, order_):
    """The next node is the ready one of least rank, then of the least bytes made less bytes freed, then the oldest.

    after_: pairs (i, j), node i before node j, behind a count of them; they and the reads hold.  An output makes
    nothing: its bytes are taken sooner or later, and what it reads can go.
    """
    size, ptr, flags, rank = i64s(size_, n), i64s(ptr_, n + 1), i64s(flags_, n), i64s(rank_, n)
    idx, order, n_after = i64s(idx_, ptr[n]), i64s(order_, n), i64s(after_, 1)[0]
    pairs, waits, left = i64s(after_, 1 + 2 * n_after), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for v in range(n):
        for k in range(ptr[v], ptr[v + 1]):
            left[idx[k]] += 1
    n_edges = ptr[n] + n_after
    head, link, who = np.full(n, -1, np.int64), np.empty(n_edges, np.int64), np.empty(n_edges, np.int64)
    e = 0
    for v in range(n):
        for k in range(ptr[v], ptr[v + 1]):
            who[e], link[e], head[idx[k]] = v, head[idx[k]], e
            waits[v] += 1
            e += 1
    for k in range(n_after):
        i, j = pairs[1 + 2 * k], pairs[2 + 2 * k]
        who[e], link[e], head[i] = j, head[i], e
        waits[j] += 1
        e += 1
    ready, n_ready = np.empty(n, np.int64), 0
    for v in range(n):
        if waits[v] == 0:
            ready[n_ready] = v
            n_ready += 1
    for step in range(n):
        if n_ready == 0:
            return 1
        best, at, least = np.int64(-1), 0, np.int64(0)
        for r in range(n_ready):
            v = ready[r]
            change = np.int64(0) if flags[v] & KEEP else size[v]
            for k in range(ptr[v], ptr[v + 1]):
                if left[idx[k]] == 1 and not flags[idx[k]] & KEEP:
                    change -= size[idx[k]]
            if best < 0 or (rank[v], change, v) < (rank[best], least, best):
                best, at, least = v, r, change
        ready[at] = ready[n_ready - 1]
        n_ready -= 1
        order[step] = best
        for k in range(ptr[best], ptr[best + 1]):
            left[idx[k]] -= 1
        e = head[best]
        while e >= 0:
            waits[who[e]] -= 1
            if waits[who[e]] == 0:
                ready[n_ready] = who[e]
                n_ready += 1
            e = link[e]
    return 0


# ---------------------------------------------------------------- jitted: executor
@exact
def _closure(w, here, ptr, idx, cost, flags, stamp, tick, queue):
    """Cost of making w and what it needs that is gone; -1: something of it cannot be made again."""
    head, tail, total = 0, 1, 0.0
    queue[0] = w
    stamp[w] = tick
    while head < tail:
        y = queue[head]
        head += 1
        if not flags[y] & AGAIN:
            return -1.0
        total += cost[y]
        for k in range(ptr[y], ptr[y + 1]):
            z = idx[k]
            if not here[z] and stamp[z] != tick:
                stamp[z] = tick
                queue[tail] = z
                tail += 1
    return total


@exact
def _dependents(w, need, n, here, made, cptr, cidx, use, cost, stamp, tick, queue):
    """(cost of dropped results that hang on w, the next event that needs w or one of them; n: none)."""
    head, tail, total = 0, 1, 0.0
    queue[0] = w
    stamp[w] = tick
    while head < tail:
        y = queue[head]
        head += 1
        if y != w:
            total += cost[y]
            if use[y] < cptr[y + 1] and cidx[use[y]] < need:
                need = cidx[use[y]]
        for k in range(cptr[y], cptr[y + 1]):
            z = cidx[k]
            if made[z] and not here[z] and stamp[z] != tick:
                stamp[z] = tick
                queue[tail] = z
                tail += 1
    return total, need


@exact
def _victim(t, n, stack, sp, a, b, c, size, cost, clock, ptr, idx, cptr, cidx, flags, here, made, lock, use, stamp,
            tick, queue):
    """The result to drop so that node t goes on, -1: there is none."""
    best, least = -1, 1e300
    for w in range(t):
        if not here[w] or lock[w] > 0 or size[w] == 0 or flags[w] & KEEP:
            continue
        need = cidx[use[w]] if use[w] < cptr[w + 1] else n
        tick[0] += 1
        hanging, need = _dependents(w, need, n, here, made, cptr, cidx, use, cost, stamp, tick[0], queue)
        for f in range(sp):                             # nodes that are being made right now may read w
            if stamp[stack[f]] == tick[0]:
                need = t
        if need == n:
            return w
        if not flags[w] & AGAIN:
            continue
        tick[0] += 1
        again = _closure(w, here, ptr, idx, cost, flags, stamp, tick[0], queue)
        if again < 0:
            continue
        score = (again + c * hanging) / (float(size[w]) ** b * (clock[need] - clock[t] + cost[t] + 1.0) ** a)
        if score < least:
            best, least = w, score
    return best


@exact
def _in_place_of(v, t, ptr, idx, cptr, cidx, size, flags, here, lock):
    """An input of v that nothing else reads any more, whose memory v can have; -1."""
    if flags[v] & TAKE:
        for k in range(ptr[v], ptr[v + 1]):
            x = idx[k]
            if size[x] == size[v] and here[x] and lock[x] == 1 and not flags[x] & KEEP and cidx[cptr[x + 1] - 1] <= t:
                return x
    return -1


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, f64, f64, f64, i64, i64)")
def execute(limit, n, size_, cost_, ptr_, idx_, cptr_, cidx_, flags_, a, b, c, events, cap):
    """Run the order within `limit` bytes by rule (a, b, c); the number of events, 0: impossible for this rule."""
    size, cost, flags = i64s(size_, n), i64s(cost_, n), i64s(flags_, n)
    ptr, cptr = i64s(ptr_, n + 1), i64s(cptr_, n + 1)
    idx, cidx, ev = i64s(idx_, ptr[n]), i64s(cidx_, cptr[n]), i64s(events, cap)
    here, made, lock, use = np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.zeros(n, np.int64), cptr[:n].copy()
    stamp, tick, queue = np.zeros(n, np.int64), np.zeros(1, np.int64), np.empty(n + 1, np.int64)
    clock, stack, at = np.zeros(n + 1), np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    for v in range(n):
        clock[v + 1] = clock[v] + cost[v]
    m, held = np.int64(0), np.int64(0)
    for t in range(n):
        sp = 0
        stack[0], at[0] = t, -1
        while sp >= 0:
            v = stack[sp]
            if at[sp] < 0:
                for k in range(ptr[v], ptr[v + 1]):
                    if here[idx[k]]:
                        lock[idx[k]] += 1
                at[sp] = ptr[v]
            while at[sp] < ptr[v + 1] and here[idx[at[sp]]]:
                at[sp] += 1
            if at[sp] < ptr[v + 1]:                     # a source is gone: make it first
                x = idx[at[sp]]
                if made[x] and not flags[x] & AGAIN or sp == n:
                    return 0
                sp += 1
                stack[sp], at[sp] = x, -1
                continue
            while held + size[v] > limit:
                x = _in_place_of(v, t, ptr, idx, cptr, cidx, size, flags, here, lock) if sp == 0 else -1
                if x < 0 or held + size[v] - size[x] > limit:
                    x = _victim(t, n, stack, sp, a, b, c, size, cost, clock, ptr, idx, cptr, cidx, flags, here, made,
                                lock, use, stamp, tick, queue)
                if x < 0:
                    return 0
                here[x] = False
                held -= size[x]
            if m == cap:
                return 0
            ev[m] = v
            m += 1
            here[v] = made[v] = True
            held += size[v]
            for k in range(ptr[v], ptr[v + 1]):
                lock[idx[k]] -= 1
            sp -= 1
            if sp >= 0:
                lock[v] += 1
        for k in range(ptr[t], ptr[t + 1]):
            x = idx[k]
            while use[x] < cptr[x + 1] and cidx[use[x]] <= t:
                use[x] += 1
            if use[x] == cptr[x + 1] and here[x] and not flags[x] & (AGAIN | KEEP | SOURCE):
                here[x] = False
                held -= size[x]
    return m


# ---------------------------------------------------------------- jitted: greedy
@exact
def _gone(v, p, b, ev, at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue):
    """(how many, cost): v and what has to be made with it just before event b; queue holds them.  0: impossible."""
    head, tail, total = 0, 1, 0.0
    queue[0] = v
    stamp[v] = tick
    while head < tail:
        y = queue[head]
        head += 1
        if not flags[y] & AGAIN:
            return 0, 0.0
        total += cost[y]
        for k in range(ptr[y], ptr[y + 1]):
            x = idx[k]
            if stamp[x] == tick or size[x] == 0 and at[x] >= 0 or at[x] >= 0 and end[at[x]] > p:
                continue
            found = False
            if later[x]:
                for j in range(p, b):
                    if ev[j] == x:
                        found = True
                        break
            if not found:
                stamp[x] = tick
                queue[tail] = x
                tail += 1
    return tail, total


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def greedy(limit, n, size_, cost_, ptr_, idx_, flags_, events, cap):
    """While the peak is above `limit`: make room at it.  The number of events, 0: no way found."""
    size, cost, ptr, flags, ev = i64s(size_, n), i64s(cost_, n), i64s(ptr_, n + 1), i64s(flags_, n), i64s(events, cap)
    idx, stamp, queue, tick = i64s(idx_, ptr[n]), np.zeros(n, np.int64), np.empty(n + 1, np.int64), 0
    end, live, later = np.empty(cap, np.int64), np.empty(cap + 1, np.int64), np.empty(n, np.bool_)
    at, nxt = np.empty(n, np.int64), np.empty(n, np.int64)
    m = np.int64(n)
    for v in range(n):
        ev[v] = v
    for _ in range(EVENTS_PER_NODE * n):
        _instances(ev, m, n, size, ptr, idx, flags, end)
        _live(ev, m, size, end, live)
        p = np.argmax(live[:m])
        if live[p] <= limit:
            return m
        at[:], nxt[:], later[:] = -1, -1, False
        for j in range(p):
            at[ev[j]] = j
        for j in range(p, m):
            for k in range(ptr[ev[j]], ptr[ev[j] + 1]):
                x = idx[k]
                if nxt[x] < 0 and not later[x]:
                    nxt[x] = j
            later[ev[j]] = True
        best, least = -1, 1e300
        for v in range(n):
            if not flags[v] & AGAIN or flags[v] & KEEP or at[v] < 0 or size[v] == 0 or nxt[v] <= p or end[at[v]] <= p:
                continue
            tick += 1
            count, total = _gone(v, p, nxt[v], ev, at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue)
            score = total / min(size[v], 2 * (live[p] - limit))
            if count > 0 and score < least:
                best, least = v, score
        if best < 0:
            return 0
        tick += 1
        b = nxt[best]
        count, _t = _gone(best, p, b, ev, at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue)
        if m + count > cap:
            return 0
        for j in range(m - 1, b - 1, -1):
            ev[j + count] = ev[j]
        ev[b:b + count] = np.sort(queue[:count])
        m += count
    return 0


# ---------------------------------------------------------------- jitted: polish
@exact
def _compact(ev, m, keep):
    k = 0
    for j in range(m):
        if keep[j]:
            ev[k] = ev[j]
            k += 1
    return k


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def polish(limit, n, size_, cost_, ptr_, idx_, cptr_, flags_, events, m):
    """Delete events whose results are not read or that were not needed; the number left."""
    size, cost, flags = i64s(size_, n), i64s(cost_, n), i64s(flags_, n)
    ptr, cptr = i64s(ptr_, n + 1), i64s(cptr_, n + 1)
    idx, ev, end, live = i64s(idx_, ptr[n]), i64s(events, m), np.empty(m, np.int64), np.empty(m + 1, np.int64)
    before, at, keep, key = np.empty(m, np.int64), np.empty(n, np.int64), np.empty(m, np.bool_), np.empty(m)
    unread = np.empty(m, np.bool_)
    while True:
        _instances(ev, m, n, size, ptr, idx, flags, end)
        _live(ev, m, size, end, live)
        at[:], keep[:], unread[:] = -1, True, True
        for j in range(m):
            for k in range(ptr[ev[j]], ptr[ev[j] + 1]):
                unread[at[idx[k]]] = False
            before[j] = at[ev[j]]
            at[ev[j]] = j
        changed = False
        for j in range(m):
            if unread[j] and cptr[ev[j]] < cptr[ev[j] + 1] and not (flags[ev[j]] & KEEP and at[ev[j]] == j):
                keep[j], changed = False, True
        if not changed:
            for j in range(m):
                key[j] = -cost[ev[j]] if before[j] >= 0 else 0.0
            for j in np.argsort(key[:m]):
                i = before[j]
                if i < 0:
                    continue
                fits = True
                for k in range(end[i], j):
                    if live[k] + size[ev[j]] > limit:
                        fits = False
                        break
                if fits:
                    keep[j], changed = False, True
                    break
        if not changed:
            return m
        m = _compact(ev, m, keep)


# ---------------------------------------------------------------- jitted: bound
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


# ---------------------------------------------------------------- what engine/api/rematerialize.py calls
@dataclasses.dataclass(frozen=True)
class Schedule:
    """events: node numbers; peak: most bytes alive; extra: cost of what is made again, as a share of one run."""
    events: np.ndarray
    peak: int
    extra: float


class Recomputation:
    """A graph as numbers: per node in order bytes, cost, the nodes it reads, and flags AGAIN, KEEP, TAKE."""

    def __init__(self, size, cost, reads, flags):
        self.n = len(size)
        self.size, self.cost, self.flags = (np.ascontiguousarray(x, np.int64) for x in (size, cost, flags))
        readers = [[] for _ in reads]
        for v, sources in enumerate(reads):
            for x in sources:
                readers[x].append(v)
        (self.ptr, self.idx), (self.cptr, self.cidx) = _csr(reads), _csr(readers)
        again = np.repeat(self.flags & AGAIN, np.diff(self.ptr)) > 0
        self.flags[self.idx[again]] |= SOURCE
        self.total = max(int(self.cost.sum()), 1)

    @functools.cached_property
    def plain(self):
        """The schedule that makes nothing again."""
        return self._schedule(np.arange(self.n))

    def _schedule(self, events):
        live = np.empty(len(events) + 1, np.int64)
        peak = live_bytes(events, len(events), self.n, self.size, self.ptr, self.idx, self.flags, live)
        return Schedule(events, peak, int(self.cost[events].sum()) / self.total - 1)

    def order(self, rank, after):
        """Node numbers in an order of few live bytes, lower ranks first; after: pairs (i, j), i before j."""
        order = np.empty(self.n, np.int64)
        pairs = np.array([len(after), *(k for pair in after for k in pair)], np.int64)
        if list_order(self.n, self.size, self.ptr, self.idx, self.flags, np.asarray(rank, np.int64), pairs, order):
            raise ParamError("the order of nodes has a circle")
        return order

    def fit(self, limit):
        """The cheapest Schedule found whose peak is at most `limit` bytes; None: none was found."""
        if self.plain.peak <= limit:
            return self.plain
        found = [s for s in (self._polished(limit, make) for make in (self._greedy, *map(self._rule, RULES)))
                 if s is not None and s.peak <= limit]
        return min(found, key=lambda s: s.extra, default=None)

    def least(self):
        """The Schedule of the least peak that was found, by bisection."""
        best, low, high = self.plain, self.least_node, self.plain.peak
        while high - low > max(self.plain.peak // LEAST_STEP, 1):
            middle = (low + high) // 2
            found = self.fit(middle)
            if found is None:
                low = middle
            else:
                best, high = found, found.peak
        return best

    @functools.cached_property
    def least_node(self):
        """Inputs and output of the largest node: no schedule needs less."""
        inputs = np.add.reduceat(np.append(self.size[self.idx], 0), self.ptr[:-1]) * (np.diff(self.ptr) > 0)
        in_place = np.where(self.flags & TAKE, 0, self.size)
        return int((inputs + in_place).max(initial=0))

    def _greedy(self, limit, events):
        return greedy(limit, self.n, self.size, self.cost, self.ptr, self.idx, self.flags, events, len(events))

    def _rule(self, rule):
        return lambda limit, events: execute(limit, self.n, self.size, self.cost, self.ptr, self.idx, self.cptr,
                                             self.cidx, self.flags, *rule, events, len(events))

    def _polished(self, limit, make):
        events = np.empty(EVENTS_PER_NODE * self.n + 1, np.int64)
        m = make(limit, events)
        if m == 0:
            return None
        m = polish(limit, self.n, self.size, self.cost, self.ptr, self.idx, self.cptr, self.flags, events, m)
        return self._schedule(events[:m].copy())

    def bound(self, limit):
        """The least extra share that any schedule within `limit` bytes pays, in any order of the nodes.

        When node k runs for the first time, each result that led to it and that k, or what depends on k, reads is alive
        or is made again later.  With a price on bytes the least cost of that is a minimum cut, less the price of the
        room there is; every k and every price give a bound.
        """
        live = np.empty(self.n + 1, np.int64)
        live_bytes(np.arange(self.n), self.n, self.n, self.size, self.ptr, self.idx, self.flags, live)
        parts = np.array_split(np.arange(self.n), max(min(self.n, 16), 1))
        moments = {int(part[np.argmax(live[part])]) for part in parts if len(part)}
        rough, best = np.geomspace(1e-2, 1e2, 10), 0.0
        for k in moments:
            if live[k] <= limit:
                continue
            network = self._network(k)
            cuts = [self._cut(network, k, limit, price) for price in rough]
            i = int(np.argmax(cuts))
            if cuts[i] > 0.5 * best:
                finer = np.geomspace(rough[max(i - 1, 0)], rough[min(i + 1, len(rough) - 1)], 10)
                best = max(best, cuts[i], *(self._cut(network, k, limit, price) for price in finer))
        return best

    def _network(self, k):
        """(from, to, cost, bytes) of the edges of the cut at node k; bytes that a price is put on, in place of a cost.

            source --cost--> [make v again] --price of v's bytes--> [v is needed] --> sink, if k or what follows reads v
                                  ^------------- [x is needed], for what v reads
        """
        before, behind = np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_)
        before[self.idx[self.ptr[k]:self.ptr[k + 1]]] = behind[k] = True
        for v in range(k, -1, -1):
            if before[v]:
                before[self.idx[self.ptr[v]:self.ptr[v + 1]]] = True
        reader = np.repeat(np.arange(self.n), np.diff(self.ptr))
        for v in range(k, self.n):
            if behind[v]:
                behind[self.cidx[self.cptr[v]:self.cptr[v + 1]]] = True
        needed = (self.flags & KEEP) > 0
        needed[self.idx[behind[reader]]] = True
        v, source, sink, big = np.flatnonzero(before), 2 * self.n, 2 * self.n + 1, 1 << 50
        given = (self.ptr[v] == self.ptr[v + 1]) & (self.flags[v] & AGAIN == 0)         # a leaf: nothing makes it
        edges = before[reader]
        wanted = np.flatnonzero(before & needed)
        unit = 1e9 / self.total                         # 1e9: one run; rounded down, so that it stays a bound
        parts = [(np.full(len(v), source), 2 * v, np.where(given, big, (self.cost[v] * unit).astype(np.int64)), None),
                 (2 * v, 2 * v + 1, None, self.size[v]),
                 (2 * self.idx[edges] + 1, 2 * reader[edges], big, None),
                 (2 * wanted + 1, np.full(len(wanted), sink), big, None)]
        a, b = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
        cost, nbytes = (np.concatenate([np.broadcast_to(0 if p[i] is None else p[i], len(p[0])) for p in parts])
                        for i in (2, 3))
        return a.astype(np.int64), b.astype(np.int64), cost.astype(np.int64), nbytes.astype(np.int64)

    def _cut(self, network, k, limit, price):
        """A lower bound of the extra share.  price: of holding all results at once, in runs of the graph."""
        a, b, cost, nbytes = network
        per_byte = price * 1e9 / max(int(self.size.sum()), 1)
        cap = cost + (nbytes * per_byte).astype(np.int64)
        both = [np.stack(x, 1).reshape(-1) for x in ((a, b), (b, a), (cap, np.zeros_like(cap)))]
        flow = min_cut(2 * self.n + 2, len(both[0]), *both)
        return (flow - per_byte * (limit - (0 if self.flags[k] & TAKE else int(self.size[k])))) / 1e9


def _csr(lists):
    ptr = np.zeros(len(lists) + 1, np.int64)
    ptr[1:] = np.cumsum([len(x) for x in lists])
    return ptr, np.array([i for x in lists for i in x], np.int64)
