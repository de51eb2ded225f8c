"""Offline plans without search: first fit in a fixed order, and the free canonical descent.

First fit puts buffers, one by one in some order, into the lowest gap left by those already placed that are live at
the same time.  The canonical descent grows the layout from the bottom: every buffer has a least offset (the top of
what is placed under it), and the buffer with the lowest one is placed next, ties by a fixed rank.
"""
import numpy as np

from ggjit.ops.native.jit import exact, i64s, native

BIG = np.int64(1) << np.int64(62)
NEVER = np.zeros(1, np.int64)   # the word of those that no clock stops
DENSE = 3000                    # up to this many buffers a scan of all placed ones beats collecting neighbours


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def first_fit_dense(order, slo, shi, size, n, off, limit, stop_):
    """Place in `order`; stops and returns `limit` once the peak reaches it.  Placed buffers are kept by address."""
    stop = i64s(stop_, 1)
    q, a, b, z, o = i64s(order, n), i64s(slo, n), i64s(shi, n), i64s(size, n), i64s(off, n)
    p_lo, p_hi, p_off, p_end = (np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64),
                                np.empty(n, np.int64))
    peak = np.int64(0)
    for m in range(n):
        i = q[m]
        lo, hi, need, cur = a[i], b[i], z[i], np.int64(0)
        for k in range(m):
            if p_lo[k] < hi and lo < p_hi[k]:
                if p_off[k] - cur >= need:
                    break
                cur = max(cur, p_end[k])
        o[i] = cur
        peak = max(peak, cur + need)
        if peak >= limit or stop[0] != 0:
            return limit
        k = m
        while k > 0 and p_off[k - 1] > cur:
            p_lo[k], p_hi[k], p_off[k], p_end[k] = p_lo[k - 1], p_hi[k - 1], p_off[k - 1], p_end[k - 1]
            k -= 1
        p_lo[k], p_hi[k], p_off[k], p_end[k] = lo, hi, cur, cur + need
    return peak


@exact
def _sort_pairs(key, val, m):
    """Shell sort of the first m (key, val) by key."""
    gap = 1
    while gap < m // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, m):
            x, y, r = key[k], val[k], k
            while r >= gap and key[r - gap] > x:
                key[r], val[r] = key[r - gap], val[r - gap]
                r -= gap
            key[r], val[r] = x, y
        gap //= 3


@exact
def _sort(x, m):
    """Shell sort of x[:m]."""
    gap = 1
    while gap < m // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, m):
            v, r = x[k], k
            while r >= gap and x[r - gap] > v:
                x[r] = x[r - gap]
                r -= gap
            x[r] = v
        gap //= 3


@exact
def members_csr(a, b, n, ns):
    """Buffers per section: sm[sp[s]:sp[s + 1]] in index order."""
    sp = np.zeros(ns + 1, np.int64)
    for i in range(n):
        for s in range(a[i], b[i]):
            sp[s + 1] += 1
    for s in range(ns):
        sp[s + 1] += sp[s]
    sm = np.empty(max(sp[ns], 1), np.int64)
    fill = sp.copy()
    for i in range(n):
        for s in range(a[i], b[i]):
            sm[fill[s]] = i
            fill[s] += 1
    return sp, sm


@exact
def births_csr(a, n, ns):
    """Buffers by first section: by[bp[s]:bp[s + 1]]."""
    bp = np.zeros(ns + 1, np.int64)
    for i in range(n):
        bp[a[i] + 1] += 1
    for s in range(ns):
        bp[s + 1] += bp[s]
    by = np.empty(n, np.int64)
    fill = bp.copy()
    for i in range(n):
        by[fill[a[i]]] = i
        fill[a[i]] += 1
    return bp, by


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def first_fit_sparse(order, slo, shi, size, n, ns, off, limit, stop_):
    """first_fit_dense for many short-lived buffers: neighbours are those live at the birth and those born later."""
    stop = i64s(stop_, 1)
    q, a, b, z, o = i64s(order, n), i64s(slo, n), i64s(shi, n), i64s(size, n), i64s(off, n)
    sp, sm = members_csr(a, b, n, ns)
    bp, by = births_csr(a, n, ns)
    key, end = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        o[i] = -1
    peak = np.int64(0)
    for x in range(n):
        i = q[x]
        m = 0
        for k in range(sp[a[i]], sp[a[i] + 1]):
            j = sm[k]
            if o[j] >= 0:
                key[m], end[m] = o[j], o[j] + z[j]
                m += 1
        for k in range(bp[a[i] + 1], bp[b[i]]):
            j = by[k]
            if o[j] >= 0:
                key[m], end[m] = o[j], o[j] + z[j]
                m += 1
        _sort_pairs(key, end, m)
        cur = np.int64(0)
        for k in range(m):
            if key[k] - cur >= z[i]:
                break
            cur = max(cur, end[k])
        o[i] = cur
        peak = max(peak, cur + z[i])
        if peak >= limit or stop[0] != 0:
            return limit
    return peak


WINDOW = 1 << 13                # sections that share a queue of `descent`
MANY = 16                       # windows from which on that pays
WIDE = 4                        # a buffer that takes this part of a window leaves no windows
STEPS, TURN = 1024, 16          # steps of offsets up to the lower bound, and those a window goes ahead of the others
LARGE = 8192                    # buffers from which on offsets are taken in steps, where none is wide
BLOCK, GROUP = 64, 1024         # sections whose highest top is kept beside the tops
ROW_LO, ROW_HI, ROW_SIZE, ROW_KEY, ROW_NEXT, ROW = range(6)         # of `descent`: a buffer and its place in the queue


@exact
def _highest(top, block, cover, group, above, lo, hi):
    """Largest top of sections lo..hi - 1.  block[k]: that of BLOCK sections; cover[k]: what all of them reach; group[u]
    and above[u]: the same of GROUP sections."""
    out, s = np.int64(0), lo
    while s < hi:
        u = s // GROUP
        if hi - s >= GROUP and s == GROUP * u:
            out = max(out, group[u])
            s += GROUP
            continue
        k = s // BLOCK
        end = min(BLOCK * (k + 1), hi)
        out = max(out, above[u])
        if end - s == BLOCK:
            out = max(out, block[k])
        else:
            out = max(out, cover[k])
            for j in range(s, end):
                out = max(out, top[j])
        s = end
    return out


@exact
def _raise(top, block, cover, group, above, lo, hi, h):
    """Sections lo..hi - 1 get the top h, which is above all of theirs."""
    s = lo
    while s < hi:
        u = s // GROUP
        group[u] = max(group[u], h)
        if hi - s >= GROUP and s == GROUP * u:
            above[u] = h
            s += GROUP
            continue
        k = s // BLOCK
        end = min(BLOCK * (k + 1), hi)
        block[k] = max(block[k], h)
        if end - s == BLOCK:
            cover[k] = h
        else:
            for j in range(s, end):
                top[j] = h
        s = end


@exact
def _slot(key, last):
    """The list of a monotone queue that takes a key: 0 for `last`, else 1 + the highest bit in which they differ."""
    x, k = key ^ last, 0
    while x > 255:
        x >>= 8
        k += 8
    while x > 0:
        x >>= 1
        k += 1
    return k


@exact
def _windows(row, n, ns):
    """(windows, where each begins, ranks by window): buffers by their first section; one window where there
    are not many, or some buffer is wide."""
    span = WINDOW if ns > MANY * WINDOW else max(ns, 1)
    for r in range(n):
        if WIDE * (row[r, ROW_HI] - row[r, ROW_LO]) > WINDOW:
            span = max(ns, 1)
    n_windows = (ns + span - 1) // span
    begin = np.zeros(n_windows + 1, np.int64)
    for r in range(n):
        begin[row[r, ROW_LO] // span + 1] += 1
    for w in range(n_windows):
        begin[w + 1] += begin[w]
    fill, ranks = begin.copy(), np.empty(n, np.int64)
    for r in range(n):
        w = row[r, ROW_LO] // span
        ranks[fill[w]] = r
        fill[w] += 1
    return n_windows, begin, ranks


@exact
def _least_waiting(row, head):
    """(the lowest list that is not empty, the least key in it) of a radix heap; 64 where nothing waits."""
    c = 1
    while c < 64 and head[c] < 0:
        c += 1
    least = BIG
    r = head[c] if c < 64 else np.int64(-1)
    while r >= 0:
        least = min(least, row[r, ROW_KEY])
        r = row[r, ROW_NEXT]
    return c, least


@exact
def _come_out(row, head, c, last, due):
    """Take list c apart now that `last` is the least offset: those that wait for it go to due, by rank."""
    m, r = 0, head[c]
    head[c] = -1
    while r >= 0:
        following = row[r, ROW_NEXT]
        d = _slot(row[r, ROW_KEY], last)
        if d == 0:
            due[m] = r
            m += 1
        else:
            row[r, ROW_NEXT], head[d] = head[d], r
        r = following
    _sort(due, m)
    return m


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def descent(order, slo, shi, size, n, ns, off, coarse, limit, stop_):
    """Free canonical descent: no capacity, no backtracking.  Stops and returns `limit` once the peak reaches it.

    A buffer's least offset is the highest top over its sections.  Least offsets only grow, and those placed never
    fall, so the queue is a radix heap of lists: all that wait for one offset come out together, by rank, and those
    that something was put under meanwhile go back in.

    Problems of more than one window of sections have a queue per window, and those take turns after every TURN steps:
    what one of them reads stays in the processor's cache.  Their queues, and those of many narrow buffers, wait for
    offsets in steps of 1 << coarse, inside which the rank alone decides.
    """
    q, a, b, z, o, stop = i64s(order, n), i64s(slo, n), i64s(shi, n), i64s(size, n), i64s(off, n), i64s(stop_, 1)
    n_blocks, n_groups = ns // BLOCK + 1, ns // GROUP + 1
    top, block, cover = np.zeros(ns, np.int64), np.zeros(n_blocks, np.int64), np.zeros(n_blocks, np.int64)
    group, above = np.zeros(n_groups, np.int64), np.zeros(n_groups, np.int64)
    row = np.empty((n, ROW), np.int64)          # by rank
    for r in range(n):
        row[r, ROW_LO], row[r, ROW_HI], row[r, ROW_SIZE], row[r, ROW_KEY] = a[q[r]], b[q[r]], z[q[r]], 0
    n_windows, begin, ranks = _windows(row, n, ns)
    heads, lasts, due = np.full((n_windows, 64), -1, np.int64), np.zeros(n_windows, np.int64), np.empty(n, np.int64)
    widest = np.int64(0)
    for r in range(n):
        widest = max(widest, row[r, ROW_HI] - row[r, ROW_LO])
    shift = coarse if n_windows > 1 or n > LARGE and WIDE * widest <= WINDOW else np.int64(0)
    peak, left, end = np.int64(0), n, np.int64(0)
    while left > 0:
        for w in range(n_windows):
            head, last, m = heads[w], lasts[w], 0
            if end == 0:                        # at first all wait for offset 0
                m = begin[w + 1] - begin[w]
                for k in range(m):
                    due[k] = ranks[begin[w] + k]
            while True:
                for k in range(m):
                    r = due[k]
                    lo, hi = row[r, ROW_LO], row[r, ROW_HI]
                    least = _highest(top, block, cover, group, above, lo, hi)
                    key = least >> shift
                    if key > last:
                        c = _slot(key, last)
                        row[r, ROW_KEY], row[r, ROW_NEXT], head[c] = key, head[c], r
                        continue
                    h = least + row[r, ROW_SIZE]
                    peak = max(peak, h)
                    if peak >= limit or stop[0] != 0:
                        return limit
                    o[q[r]] = least
                    _raise(top, block, cover, group, above, lo, hi, h)
                    left -= 1
                c, least = _least_waiting(row, head)
                if least >= (end + TURN if n_windows > 1 else BIG):
                    break
                last = least
                m = _come_out(row, head, c, last, due)
            lasts[w] = last
        end += TURN
    return peak


KERNELS = (descent, first_fit_dense, first_fit_sparse)


def _by(*keys):
    """Permutation: keys descending, ties by index."""
    return np.lexsort(tuple(-k for k in reversed(keys))).astype(np.int64)


def orders(inst):
    """Orders worth trying, most promising first: (name, permutation)."""
    width, size = inst.hi - inst.lo, inst.size
    area = size.astype(np.float64) * width
    total = inst.breadth
    yield "size", _by(size, width)
    yield "size*sqrt(width)", _by(size * np.sqrt(width), size)
    yield "breadth", _by(total, size)
    yield "area", _by(area, size)


def ranks(inst):
    """Tie-breaking orders of the canonical search, (name, permutation): total of a section, area, width by turns; first
    the one whose free descent is the lowest most often."""
    width = inst.hi - inst.lo
    area = inst.size.astype(np.float64) * width
    total = inst.breadth
    for name, keys in (("TAW", (total, area, width)), ("TWA", (total, width, area)), ("WAT", (width, area, total))):
        yield name, _by(*keys)


def first_fit(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of first fit in `order`, offsets into off; `limit` when it gets there, or when the word `stop` is set."""
    if inst.n <= DENSE:
        return first_fit_dense(order, inst.slo, inst.shi, inst.size, inst.n, off, int(limit), stop)
    return first_fit_sparse(order, inst.slo, inst.shi, inst.size, inst.n, inst.ns, off, int(limit), stop)


def canonical(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of the free canonical descent with ties by `order`; `limit` as in first_fit."""
    return descent(order, inst.slo, inst.shi, inst.size, inst.n, inst.ns, off,
                   (inst.lower_bound // STEPS).bit_length(), int(limit), stop)
