"""Three ways to a schedule that keeps within `limit` bytes (idea of two: Kirisame et al., ICLR 2021).

    greedy      at the peak, the result that is cheapest to make again per byte makes room; repeated
    executor    run the order with `limit` bytes; when they are full, drop the result of least
                (cost to make it again + c * cost of dropped ones that hang on it) / (size^b * cost to its next read^a)
    polish      delete events whose results are not read, then keep what fits after all, dearest first
"""
import numpy as np

from ggjit.alloc.orders.schedules import AGAIN, KEEP, SOURCE, TAKE, instances, live_at
from ggjit.ops.native.jit import exact, i64s, native

EVENTS_PER_NODE = 12                    # longest schedule that is looked for
MAX_STALL = 32                          # rooms made without a lower peak: greedy goes in circles (found plans: 3)


# ---------------------------------------------------------------- executor
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


# ---------------------------------------------------------------- greedy
@exact
def _gone(v, p, b, at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue):
    """(how many, cost): v and what has to be made with it just before event b; queue holds them.  0: impossible.

    at, later: the last event before p that makes a node, and the first from p on."""
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
            if stamp[x] != tick and later[x] >= b and (at[x] < 0 or size[x] > 0 and end[at[x]] <= p):
                stamp[x] = tick
                queue[tail] = x
                tail += 1
    return tail, total


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def greedy(limit, n, size_, cost_, ptr_, idx_, flags_, events, cap):
    """While the peak is above `limit`: make room at it.  The number of events, 0: no way found."""
    size, cost, ptr, flags, ev = i64s(size_, n), i64s(cost_, n), i64s(ptr_, n + 1), i64s(flags_, n), i64s(events, cap)
    idx, stamp, queue, tick = i64s(idx_, ptr[n]), np.zeros(n, np.int64), np.empty(n + 1, np.int64), 0
    end, live, later = np.empty(cap, np.int64), np.empty(cap + 1, np.int64), np.empty(n, np.int64)
    at, nxt = np.empty(n, np.int64), np.empty(n, np.int64)
    m, lowest, stalled = np.int64(n), np.int64(1) << 60, 0
    for v in range(n):
        ev[v] = v
    while stalled < MAX_STALL:
        instances(ev, m, n, size, ptr, idx, flags, end)
        live_at(ev, m, size, end, live)
        p = np.argmax(live[:m])
        if live[p] <= limit:
            return m
        stalled = 0 if live[p] < lowest else stalled + 1
        lowest = min(lowest, live[p])
        at[:], nxt[:], later[:] = -1, -1, m
        for j in range(p):
            at[ev[j]] = j
        for j in range(p, m):
            for k in range(ptr[ev[j]], ptr[ev[j] + 1]):
                x = idx[k]
                if nxt[x] < 0 and later[x] == m:
                    nxt[x] = j
            later[ev[j]] = min(later[ev[j]], j)
        best, least = -1, 1e300
        for v in range(n):
            if not flags[v] & AGAIN or flags[v] & KEEP or at[v] < 0 or size[v] == 0 or nxt[v] <= p or end[at[v]] <= p:
                continue
            tick += 1
            count, total = _gone(v, p, nxt[v], at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue)
            score = total / min(size[v], 2 * (live[p] - limit))
            if count > 0 and score < least:
                best, least = v, score
        if best < 0:
            return 0
        tick += 1
        b = nxt[best]
        count, _t = _gone(best, p, b, at, end, later, flags, ptr, idx, size, cost, stamp, tick, queue)
        if m + count > cap:
            return 0
        for j in range(m - 1, b - 1, -1):
            ev[j + count] = ev[j]
        ev[b:b + count] = np.sort(queue[:count])
        m += count
    return 0


# ---------------------------------------------------------------- polish
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
        instances(ev, m, n, size, ptr, idx, flags, end)
        live_at(ev, m, size, end, live)
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
