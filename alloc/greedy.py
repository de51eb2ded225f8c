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


@exact
def _sift(heap, key, rank, m, p):
    """Move heap[p] down to its place; smallest (key, rank) on top."""
    x = heap[p]
    while True:
        c = 2 * p + 1
        if c >= m:
            break
        if c + 1 < m and (key[heap[c + 1]], rank[heap[c + 1]]) < (key[heap[c]], rank[heap[c]]):
            c += 1
        if (key[x], rank[x]) <= (key[heap[c]], rank[heap[c]]):
            break
        heap[p] = heap[c]
        p = c
    heap[p] = x


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def descent(order, slo, shi, size, n, ns, off, limit, stop_):
    """Free canonical descent: no capacity, no backtracking.  Stops and returns `limit` once the peak reaches it.

    Least offsets only grow, so a heap entry may be stale: then its new key is sifted down instead of placing it.
    """
    stop = i64s(stop_, 1)
    q, a, b, z, o = i64s(order, n), i64s(slo, n), i64s(shi, n), i64s(size, n), i64s(off, n)
    sp, sm = members_csr(a, b, n, ns)
    bp, by = births_csr(a, n, ns)
    rank, least, key, heap = np.empty(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), q.copy()
    for r in range(n):
        rank[q[r]] = r
        o[r] = -1
    m = n
    peak = np.int64(0)
    while m > 0:
        i = heap[0]
        if key[i] < least[i]:
            key[i] = least[i]
            _sift(heap, key, rank, m, 0)
            continue
        o[i] = least[i]
        top = o[i] + z[i]
        peak = max(peak, top)
        if peak >= limit or stop[0] != 0:
            return limit
        m -= 1
        heap[0] = heap[m]
        _sift(heap, key, rank, m, 0)
        for k in range(sp[a[i]], sp[a[i] + 1]):
            least[sm[k]] = max(least[sm[k]], top)
        for k in range(bp[a[i] + 1], bp[b[i]]):
            least[by[k]] = max(least[by[k]], top)
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
    """Tie-breaking orders of the canonical search, (name, permutation): width, area, section total by turns."""
    width = inst.hi - inst.lo
    area = inst.size.astype(np.float64) * width
    total = inst.breadth
    for name, keys in (("TWA", (total, width, area)), ("WAT", (width, area, total)), ("TAW", (total, area, width))):
        yield name, _by(*keys)


def first_fit(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of first fit in `order`, offsets into off; `limit` when it gets there, or when the word `stop` is set."""
    if inst.n <= DENSE:
        return first_fit_dense(order, inst.slo, inst.shi, inst.size, inst.n, off, int(limit), stop)
    return first_fit_sparse(order, inst.slo, inst.shi, inst.size, inst.n, inst.ns, off, int(limit), stop)


def canonical(inst, order, off, limit=BIG, stop=NEVER):
    """Peak of the free canonical descent with ties by `order`; `limit` as in first_fit."""
    return descent(order, inst.slo, inst.shi, inst.size, inst.n, inst.ns, off, int(limit), stop)
