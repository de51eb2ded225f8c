"""Three ways to a schedule that keeps within `limit` bytes (idea of two: Kirisame et al., ICLR 2021).

    greedy      at the peak, the result that is cheapest to make again per byte makes room; repeated
    executor    run the order with `limit` bytes; when they are full, drop the result of least
                (cost to make it again + c * cost of dropped ones that hang on it) / (size^b * cost to its next read^a)
    polish      delete events whose results are not read, then keep what fits after all, dearest first
"""
import numpy as np
from numba import carray

from ggjit.alloc.orders.schedules import AGAIN, KEEP, SOURCE, TAKE, instances, live_at, recompute_at
from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord, row

EVENTS_PER_NODE = 12                    # longest schedule that is looked for
# greedy gives up after so many steps without a lower peak (plans that were found needed 3)
MAX_STALL = 32

# state of the executor and of greedy beside the schedule
EXECUTOR = JitRecord(
    "ExecutorRecord",
    n="i64", a="f64", b="f64", c="f64",
    here="u8[n] = 0", made="u8[n] = 0", lock="i64[n] = 0",          # alive, made before, readers that wait for it
    use="i64[n] = 0",                           # place in cidx of its next reader
    clock="f64[n + 1]",                         # cost of the nodes before
    stack="i64[n + 1]", source="i64[n + 1]",    # nodes being made, and the place in idx of the source each waits for
    stamp="i64[n] = 0", queue="i64[n + 1]",     # of a walk: when a node was met; the nodes met
    reader="i64[n]", later="i64[n]",            # greedy: first events from the peak on that read, and that make, a node
    count=row("tick", "depth", "held"))
executor_at = EXECUTOR.at


# ---------------------------------------------------------------- executor
@exact
def _meet(x, v, tail):
    """Node v, met in the walk of the current tick, goes to the end of the queue; its new length."""
    x.stamp[v] = x.count.tick
    x.queue[tail] = v
    return tail + 1


@exact
def _closure(s, x, w):
    """Cost of making w and what it needs that is gone; -1: something of it cannot be made again."""
    x.count.tick += 1
    head, tail, total = 0, _meet(x, w, 0), 0.0
    while head < tail:
        y = x.queue[head]
        head += 1
        if not s.flags[y] & AGAIN:
            return -1.0
        total += s.cost[y]
        for k in range(s.ptr[y], s.ptr[y + 1]):
            z = s.idx[k]
            if not x.here[z] and x.stamp[z] != x.count.tick:
                tail = _meet(x, z, tail)
    return total


@exact
def _dependents(s, x, w):
    """(cost of dropped results that hang on w, the next event that needs w or one of them; n: none)."""
    x.count.tick += 1
    need = s.cidx[x.use[w]] if x.use[w] < s.cptr[w + 1] else s.n
    head, tail, total = 0, _meet(x, w, 0), 0.0
    while head < tail:
        y = x.queue[head]
        head += 1
        if y != w:
            total += s.cost[y]
            if x.use[y] < s.cptr[y + 1] and s.cidx[x.use[y]] < need:
                need = s.cidx[x.use[y]]
        for k in range(s.cptr[y], s.cptr[y + 1]):
            z = s.cidx[k]
            if x.made[z] and not x.here[z] and x.stamp[z] != x.count.tick:
                tail = _meet(x, z, tail)
    return total, need


@exact
def _victim(s, x, t):
    """The result to drop so that node t goes on, -1: there is none."""
    best, least = -1, 1e300
    for w in range(t):
        if not x.here[w] or x.lock[w] > 0 or s.size[w] == 0 or s.flags[w] & KEEP:
            continue
        hanging, need = _dependents(s, x, w)
        for f in range(x.count.depth):                  # a node that is being made may read w
            if x.stamp[x.stack[f]] == x.count.tick:
                need = t
        if need == s.n:
            return w
        if not s.flags[w] & AGAIN:
            continue
        again = _closure(s, x, w)
        if again < 0:
            continue
        wait = x.clock[need] - x.clock[t] + s.cost[t] + 1.0
        score = (again + x.c * hanging) / (float(s.size[w]) ** x.b * wait ** x.a)
        if score < least:
            best, least = w, score
    return best


@exact
def _in_place_of(s, x, v, t):
    """An input of v that nothing else reads any more, whose memory v can have; -1."""
    if s.flags[v] & TAKE:
        for k in range(s.ptr[v], s.ptr[v + 1]):
            y = s.idx[k]
            if s.size[y] == s.size[v] and x.here[y] and x.lock[y] == 1 and not s.flags[y] & KEEP \
                    and s.cidx[s.cptr[y + 1] - 1] <= t:
                return y
    return -1


@exact
def _make_room(s, x, v, t):
    """Drop results until v fits, on the way to node t; whether it does."""
    while x.count.held + s.size[v] > s.limit:
        y = _in_place_of(s, x, v, t) if x.count.depth == 0 else -1
        if y < 0 or x.count.held + s.size[v] - s.size[y] > s.limit:
            y = _victim(s, x, t)
        if y < 0:
            return False
        x.here[y] = False
        x.count.held -= s.size[y]
    return True


@exact
def _next_source(s, x):
    """The source of the node on top of the stack that has to be made first; -1 when all are here, and locked."""
    d = x.count.depth
    v = x.stack[d]
    if x.source[d] < 0:
        for k in range(s.ptr[v], s.ptr[v + 1]):
            if x.here[s.idx[k]]:
                x.lock[s.idx[k]] += 1
        x.source[d] = s.ptr[v]
    while x.source[d] < s.ptr[v + 1] and x.here[s.idx[x.source[d]]]:
        x.source[d] += 1
    return s.idx[x.source[d]] if x.source[d] < s.ptr[v + 1] else np.int64(-1)


@exact
def _made(s, x, v):
    """Node v, on top of the stack, has been made: note it and take it off the stack."""
    x.here[v] = x.made[v] = True
    x.count.held += s.size[v]
    for k in range(s.ptr[v], s.ptr[v + 1]):
        x.lock[s.idx[k]] -= 1
    x.count.depth -= 1
    if x.count.depth >= 0:
        x.lock[v] += 1


@exact
def _read(s, x, t):
    """Node t of the order has run: what it read last is gone, unless it may be made again or read then."""
    for k in range(s.ptr[t], s.ptr[t + 1]):
        y = s.idx[k]
        while x.use[y] < s.cptr[y + 1] and s.cidx[x.use[y]] <= t:
            x.use[y] += 1
        if x.use[y] == s.cptr[y + 1] and x.here[y] and not s.flags[y] & (AGAIN | KEEP | SOURCE):
            x.here[y] = False
            x.count.held -= s.size[y]


@native("i64(i64, i64)")
def execute(address, executor):
    """Run the order of a RECOMPUTE record within its limit by rule (a, b, c) of an EXECUTOR record; the number of
    events, 0: impossible for this rule."""
    s, x, m = recompute_at(address), executor_at(executor), np.int64(0)
    x.clock[0] = 0.0
    for v in range(s.n):
        x.clock[v + 1] = x.clock[v] + s.cost[v]
        x.use[v] = s.cptr[v]
    for t in range(s.n):
        x.count.depth, x.stack[0], x.source[0] = 0, t, -1
        while x.count.depth >= 0:
            d = x.count.depth
            v, y = x.stack[d], _next_source(s, x)
            if y >= 0:                                  # a source was dropped: make it first
                if x.made[y] and not s.flags[y] & AGAIN or d == s.n:
                    return 0
                x.count.depth, x.stack[d + 1], x.source[d + 1] = d + 1, y, -1
                continue
            if not _make_room(s, x, v, t) or m == s.max_events:
                return 0
            s.event[m] = v
            m += 1
            _made(s, x, v)
        _read(s, x, t)
    return m


# ---------------------------------------------------------------- greedy
@exact
def _gone(s, x, v, p, b):
    """(how many, cost): v and what has to be made with it just before event b, for room at p; the queue holds them.
    0: impossible."""
    x.count.tick += 1
    head, tail, total = 0, _meet(x, v, 0), 0.0
    while head < tail:
        y = x.queue[head]
        head += 1
        if not s.flags[y] & AGAIN:
            return 0, 0.0
        total += s.cost[y]
        for k in range(s.ptr[y], s.ptr[y + 1]):
            z = s.idx[k]
            if x.stamp[z] != x.count.tick and x.later[z] >= b \
                    and (s.maker[z] < 0 or s.size[z] > 0 and s.end[s.maker[z]] <= p):
                tail = _meet(x, z, tail)
    return tail, total


@exact
def _around(s, x, p, m):
    """For each node: maker, the last event before p that makes it; later, the first from p on that makes it; reader,
    the first from p on, but before `later`, that reads it.  -1 or m: there is none."""
    for v in range(s.n):
        s.maker[v], x.reader[v], x.later[v] = -1, -1, m
    for j in range(p):
        s.maker[s.event[j]] = j
    for j in range(p, m):
        v = s.event[j]
        for k in range(s.ptr[v], s.ptr[v + 1]):
            y = s.idx[k]
            if x.reader[y] < 0 and x.later[y] == m:
                x.reader[y] = j
        x.later[v] = min(x.later[v], j)


@exact
def _cheapest_to_drop(s, x, p):
    """The result alive at event p that costs the least to make again per byte; -1: there is none."""
    best, least = -1, 1e300
    for v in range(s.n):
        if not s.flags[v] & AGAIN or s.flags[v] & KEEP or s.maker[v] < 0 or s.size[v] == 0 or x.reader[v] <= p \
                or s.end[s.maker[v]] <= p:
            continue
        count, total = _gone(s, x, v, p, x.reader[v])
        score = total / min(s.size[v], 2 * (s.live[p] - s.limit))
        if count > 0 and score < least:
            best, least = v, score
    return best


@native("i64(i64, i64)")
def greedy(address, executor):
    """While the peak of a RECOMPUTE record is above its limit: make room at it.  The number of events, 0: no way
    found."""
    s, x = recompute_at(address), executor_at(executor)
    m, lowest, stalled = s.n, np.int64(1) << 60, 0
    for v in range(s.n):
        s.event[v] = v
    while stalled < MAX_STALL:
        instances(s, m)
        live_at(s, m)
        p = np.int64(0)
        for j in range(m):
            p = j if s.live[j] > s.live[p] else p
        if s.live[p] <= s.limit:
            return m
        stalled = 0 if s.live[p] < lowest else stalled + 1
        lowest = min(lowest, s.live[p])
        _around(s, x, p, m)
        best = _cheapest_to_drop(s, x, p)
        if best < 0:
            return 0
        b = x.reader[best]
        count, _t = _gone(s, x, best, p, b)
        if m + count > s.max_events:
            return 0
        for j in range(m - 1, b - 1, -1):
            s.event[j + count] = s.event[j]
        again = np.sort(carray(x.queue, s.n)[:count])
        for j in range(count):
            s.event[b + j] = again[j]
        m += count
    return 0


# ---------------------------------------------------------------- polish
@exact
def _link(s, m, before, unread):
    """before[j]: the event before j that made the same node, -1; unread[j]: whether no event reads what j makes."""
    for v in range(s.n):
        s.maker[v] = -1
    for j in range(m):
        unread[j] = True
        v = s.event[j]
        for k in range(s.ptr[v], s.ptr[v + 1]):
            if s.maker[s.idx[k]] >= 0:
                unread[s.maker[s.idx[k]]] = False
        before[j] = s.maker[v]
        s.maker[v] = j


@exact
def _not_needed(s, m, before):
    """An event, the dearest first, without which all fits since the one before may live on; -1: there is none."""
    key = np.empty(m)
    for j in range(m):
        key[j] = -s.cost[s.event[j]] if before[j] >= 0 else 0.0
    for j in np.argsort(key):
        if before[j] >= 0:
            fits = True
            for k in range(s.end[before[j]], j):
                if s.live[k] + s.size[s.event[j]] > s.limit:
                    fits = False
                    break
            if fits:
                return j
    return np.int64(-1)


@native("i64(i64)")
def polish(address):
    """Delete events of a RECOMPUTE record whose results are not read or that were not needed; the number left."""
    s = recompute_at(address)
    m = s.n_events
    before, unread = np.empty(m, np.int64), np.empty(m, np.bool_)
    while True:
        instances(s, m)
        live_at(s, m)
        _link(s, m, before, unread)
        left = np.int64(0)
        for j in range(m):
            v = s.event[j]
            if not (unread[j] and s.cptr[v] < s.cptr[v + 1] and not (s.flags[v] & KEEP and s.maker[v] == j)):
                s.event[left] = v
                left += 1
        if left == m:
            drop = _not_needed(s, m, before)
            if drop < 0:
                return m
            for j in range(drop, m - 1):
                s.event[j] = s.event[j + 1]
            left = m - 1
        m = left
