"""Offline plans without search: first fit in a fixed order, and the free canonical descent.

First fit puts buffers, one by one in some order, into the lowest gap left by those already placed that are live at
the same time.  The canonical descent grows the layout from the bottom: every buffer has a least offset (the top of
what is placed under it), and the buffer with the lowest one is placed next, ties by a fixed rank.
"""
import numpy as np

from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord

BIG = np.int64(1) << np.int64(62)
NEVER = np.zeros(1, np.int64)   # the stop word of searches without a clock
# a scan of all placed buffers beats collecting neighbours up to DENSE buffers, or where 1/LIVE of them live at once
DENSE, LIVE = 3000, 16


FIT = JitRecord(
    "FitRecord",
    n="i64", ns="i64", order="i64[n]", lower="i64[n]", upper="i64[n]", size="i64[n]", offset="i64[n]",
    n_placed="i64",             # the first so many buffers of the order keep their offsets
    coarse="i64",               # of `descent`
    limit="i64", stop="i64[1]")     # a pass ends, and returns the limit, once the peak reaches it or the word is set
fit_at = FIT.at


@native("i64(i64)")
def first_fit_dense(address):
    """Place in order; returns the peak.  Placed buffers are kept by address.

    The first n_placed of the order keep their offsets."""
    r = fit_at(address)
    n, limit, stop, q, a, b, z, o = r.n, r.limit, r.stop, r.order, r.lower, r.upper, r.size, r.offset
    p_lo, p_hi, p_off, p_end = (np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64),
                                np.empty(n, np.int64))
    peak = np.int64(0)
    for m in range(n):
        i = q[m]
        lo, hi, need, cur = a[i], b[i], z[i], o[i] if m < r.n_placed else np.int64(0)
        for k in range(m if m >= r.n_placed else 0):
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
def members_csr(a, b, n, ns, stop):
    """Buffers per section: sm[sp[s]:sp[s + 1]] in index order; not whole where the word `stop` was set meanwhile."""
    sp = np.zeros(ns + 1, np.int64)
    for i in range(n):
        if stop[0] != 0:
            break
        for s in range(a[i], b[i]):
            sp[s + 1] += 1
    for s in range(ns):
        sp[s + 1] += sp[s]
    sm = np.empty(max(sp[ns], 1), np.int64)
    fill = sp.copy()
    for i in range(n):
        if stop[0] != 0:
            break
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


@native("i64(i64)")
def first_fit_sparse(address):
    """first_fit_dense for many short-lived buffers: neighbours are those live at the birth and those born later.

    The first n_placed of the order keep their offsets."""
    r = fit_at(address)
    n, ns, n_placed, limit, stop = r.n, r.ns, r.n_placed, r.limit, r.stop
    q, a, b, z, o = r.order, r.lower, r.upper, r.size, r.offset
    sp, sm = members_csr(a, b, n, ns, stop)
    bp, by = births_csr(a, n, ns)
    key, end = np.empty(n, np.int64), np.empty(n, np.int64)
    peak = np.int64(0)
    for x in range(n):
        if x < n_placed:
            peak = max(peak, o[q[x]] + z[q[x]])
        else:
            o[q[x]] = -1
    if stop[0] != 0:
        return limit
    for x in range(n_placed, n):
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
MANY = 16                       # number of windows from which on a queue per window is faster
WIDE = 4                        # a buffer wider than 1/WIDE of a window makes windows useless
STEPS, TURN = 1024, 16          # steps of offsets up to the lower bound, and those a window goes ahead of the others
LARGE = 8192                    # buffers from which on offsets are taken in steps, where none is wide
BLOCK, GROUP = 64, 1024         # sections of a block, and of a group, whose largest top is kept
FEW = 16                        # lists shorter than 1/FEW of a window are sorted by comparison
PATIENCE = 4096                 # buffers between two looks at the stop word
# of `descent`, by window and in it by rank: a buffer, its place in the queue, the section that was its highest
ROW_LO, ROW_HI, ROW_SIZE, ROW_KEY, ROW_NEXT, ROW_AT, ROW_ID = range(7)
ROW = 8                         # words: a line of the processor's cache

# bit number of a power of two: BIT[(x * DE_BRUIJN) >> 58]; source: Leiserson, Prokop and Randall, 1998
DE_BRUIJN = np.int64(0x03F79D71B4CB0A89)
BIT = np.zeros(64, np.int64)
BIT[[((1 << k) * int(DE_BRUIJN) >> 58) & 63 for k in range(64)]] = np.arange(64)


@exact
def _highest(top, block, cover, group, above, lo, hi, at):
    """(largest top of sections lo..hi - 1, a section that has it or `at`).  block[k]: that of BLOCK sections; cover[k]:
    what all of them reach; group[u] and above[u]: the same of GROUP sections."""
    out, s = _top(top, cover, above, at), lo
    while s < hi:
        u = s // GROUP
        if hi - s >= GROUP and s == GROUP * u:
            if group[u] > out:
                out, at = group[u], s
                for j in range(s, s + GROUP):
                    at = j if _top(top, cover, above, j) == out else at
            s += GROUP
            continue
        k = s // BLOCK
        end = min(BLOCK * (k + 1), hi)
        high = max(above[u], block[k] if end - s == BLOCK else cover[k])
        if end - s < BLOCK:
            for j in range(s, end):
                high = max(high, top[j])
        if high > out:
            out = high
            for j in range(s, end):
                at = j if _top(top, cover, above, j) == out else at
        s = end
    return out, at


@exact
def _top(top, cover, above, s):
    """The top of one section."""
    return max(top[s], cover[s // BLOCK], above[s // GROUP])


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
def _windows(a, b, n, ns):
    """(windows, sections of one): one window where there are not many, or some buffer is wide."""
    span = WINDOW if ns > MANY * WINDOW else max(ns, 1)
    for i in range(n):
        if WIDE * (b[i] - a[i]) > WINDOW:
            span = max(ns, 1)
    return (ns + span - 1) // span, span


@exact
def _rows(q, a, b, z, n, n_windows, span):
    """(row, where each window's rows begin): a window has the buffers whose first section it has."""
    begin, row = np.zeros(n_windows + 1, np.int64), np.zeros((n, ROW), np.int64)
    for i in range(n):
        begin[a[i] // span + 1] += 1
    for w in range(n_windows):
        begin[w + 1] += begin[w]
    fill = begin.copy()
    for k in range(n):
        i = q[k]
        r = fill[a[i] // span]
        fill[a[i] // span] += 1
        row[r, ROW_LO], row[r, ROW_HI], row[r, ROW_SIZE], row[r, ROW_AT], row[r, ROW_ID] = a[i], b[i], z[i], a[i], i
    return row, begin


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
def _come_out(row, head, c, last, due, marks, first, end):
    """Distribute list c anew, `last` being the least offset now: buffers that wait for `last` go to due, by rank.

    first, end: the window's rows; marks: a bit for each, all 0."""
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
    if FEW * m < (end - first) // 64:
        _sort(due, m)
        return m
    for k in range(m):
        marks[(due[k] - first) >> 6] |= np.int64(1) << ((due[k] - first) & 63)
    m = 0
    for k in range((end - first + 63) >> 6):
        x = marks[k]
        marks[k] = 0
        while x != 0:
            due[m] = first + 64 * k + BIT[((x & -x) * DE_BRUIJN >> 58) & 63]
            m += 1
            x &= x - 1
    return m


@native("i64(i64)")
def descent(address):
    """Free canonical descent: no capacity, no backtracking; returns the peak.

    A buffer's least offset is the highest top over its sections.  Least offsets only grow, and those placed never
    fall, so the queue is a radix heap of lists: all that wait for one offset come out together, by rank, and those
    that something was put under meanwhile go back in.  Most often that lies in the section that was the highest
    before, which alone is looked at then: what a buffer waits for may be less than its least offset, never more.

    Problems of more than one window of sections have a queue per window, and those take turns after every TURN steps:
    what one of them reads stays in the processor's cache.  Their queues, and those of many narrow buffers, wait for
    offsets in steps of 1 << coarse, inside which the rank alone decides.
    """
    fit = fit_at(address)
    n, ns, coarse, limit, stop = fit.n, fit.ns, fit.coarse, fit.limit, fit.stop
    q, a, b, z, o = fit.order, fit.lower, fit.upper, fit.size, fit.offset
    n_blocks, n_groups = ns // BLOCK + 1, ns // GROUP + 1
    top, block, cover = np.zeros(ns, np.int64), np.zeros(n_blocks, np.int64), np.zeros(n_blocks, np.int64)
    group, above = np.zeros(n_groups, np.int64), np.zeros(n_groups, np.int64)
    n_windows, span = _windows(a, b, n, ns)
    row, begin = _rows(q, a, b, z, n, n_windows, span)
    heads, lasts, due = np.full((n_windows, 64), -1, np.int64), np.zeros(n_windows, np.int64), np.empty(n, np.int64)
    widest, marks = np.int64(0), np.zeros(n // 64 + 1, np.int64)
    for i in range(n):
        widest = max(widest, b[i] - a[i])
    shift = coarse if n_windows > 1 or n > LARGE and WIDE * widest <= WINDOW else np.int64(0)
    peak, left, end, looks = np.int64(0), n, np.int64(0), PATIENCE
    while left > 0:
        for w in range(n_windows):
            head, last, m, first = heads[w], lasts[w], 0, begin[w]
            if end == 0:                        # at first all buffers wait for offset 0
                m = begin[w + 1] - first
                for k in range(m):
                    due[k] = first + k
            while True:
                looks += m
                if looks > PATIENCE:
                    looks = 0
                    if stop[0] != 0:
                        return limit
                for k in range(m):
                    r = due[k]
                    lo, hi, at = row[r, ROW_LO], row[r, ROW_HI], row[r, ROW_AT]
                    least = _top(top, cover, above, at)
                    key = least >> shift
                    if key <= last:
                        least, at = _highest(top, block, cover, group, above, lo, hi, at)
                        key, row[r, ROW_AT] = least >> shift, at
                    if key > last:
                        c = _slot(key, last)
                        row[r, ROW_KEY], row[r, ROW_NEXT], head[c] = key, head[c], r
                        continue
                    h = least + row[r, ROW_SIZE]
                    peak = max(peak, h)
                    if peak >= limit:
                        return limit
                    o[row[r, ROW_ID]] = least
                    _raise(top, block, cover, group, above, lo, hi, h)
                    left -= 1
                c, least = _least_waiting(row, head)
                if least >= (end + TURN if n_windows > 1 else BIG):
                    break
                last = least
                m = _come_out(row, head, c, last, due, marks, first, begin[w + 1])
            lasts[w] = last
        end += TURN
    return peak


KERNELS = (descent, first_fit_dense, first_fit_sparse)


EXACT = 1 << 53                 # float64 holds every whole number below it


def _by(*keys):
    """Permutation: keys descending, ties by index."""
    n_bits = [int(k.max(initial=0)).bit_length() for k in keys if k.dtype == np.int64]
    if len(n_bits) < len(keys) or sum(n_bits) > 62:
        return np.lexsort(tuple(-k for k in reversed(keys))).astype(np.int64)
    word = np.zeros(len(keys[0]), np.int64)             # all keys in one: a quarter of the time
    for k, bits in zip(keys, n_bits, strict=True):
        word = (word << bits) - k
    return np.argsort(word, kind="stable")


def _area(inst, width):
    """size * width, whole numbers where floats would tell all of them apart too."""
    most = int(inst.size.max(initial=0)) * int(width.max(initial=0))
    return inst.size * width if most <= EXACT else inst.size.astype(np.float64) * width


ORDERS = ("size", "size*sqrt(width)", "breadth", "area")        # of first fit, most promising first


def order(inst, name):
    """The permutation of one of ORDERS."""
    width, size = inst.hi - inst.lo, inst.size
    keys = {"size": lambda: (size, width), "size*sqrt(width)": lambda: (size * np.sqrt(width), size),
            "breadth": lambda: (inst.breadth, size), "area": lambda: (_area(inst, width), size)}
    return _by(*keys[name]())


# tie-breaking orders of the canonical search: T, total of a section, A, area, W, width by turns; first the one whose
# free descent is the lowest most often
RANKS = ("TAW", "TWA", "WAT")


def rank(inst, name):
    """The permutation of one of RANKS."""
    width = inst.hi - inst.lo
    keys = {"T": inst.breadth, "A": _area(inst, width), "W": width}
    return _by(*(keys[letter] for letter in name))


def _fit(inst, order, off, limit, stop, n_placed=0):
    return FIT.of(n=inst.n, ns=inst.ns, order=order, lower=inst.slo, upper=inst.shi, size=inst.size, offset=off,
                  n_placed=n_placed, coarse=(inst.lower_bound // STEPS).bit_length(), limit=int(limit), stop=stop)


def _first_fit(inst, order, off, limit, stop, n_placed=0):
    dense = inst.n <= DENSE or LIVE * int((inst.shi - inst.slo).sum()) > inst.n * inst.ns
    return (first_fit_dense if dense else first_fit_sparse)(_fit(inst, order, off, limit, stop, n_placed))


def first_fit(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of first fit in `order`, offsets into off; `limit` when it gets there, or when the word `stop` is set."""
    return _first_fit(inst, order, off, limit, stop)


def first_fit_around(inst, placed, order, off, limit=BIG, stop=NEVER):
    """first_fit of the others, in `order`, where the buffers `placed` have offsets in off."""
    rest = np.ones(inst.n, bool)
    rest[placed] = False
    order = np.concatenate([placed, order[rest[order]]])
    return _first_fit(inst, order, off, limit, stop, len(placed))


def canonical(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of the free canonical descent with ties by `order`; `limit` as in first_fit."""
    return descent(_fit(inst, order, off, limit, stop))
