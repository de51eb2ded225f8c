"""Live bytes over time, maximal live sets, and the lower bound every plan is measured against.

    step      0   1   2   3   4
    buffer a  [-------------)           half-open: a is live at steps 0, 1, 2
    buffer b      [---------)
    buffer c                [---)       c is born where a and b die: they may share memory
    sections  |------0------|-1-|       a live set is maximal where a birth is directly followed by a death

Only maximal live sets constrain offsets: two buffers meet in time exactly when they share a section.  There are far
fewer sections than steps, and everything below runs over sections.
"""
import numpy as np

from ggjit.ops.native.jit import i64s, native


def live_bytes(lo, hi, size, n_steps):
    """Bytes live at each of n_steps steps."""
    d = np.zeros(n_steps + 1, np.int64)
    np.add.at(d, np.minimum(lo, n_steps), size)
    np.subtract.at(d, np.minimum(hi, n_steps), size)
    return np.cumsum(d)[:n_steps]


@native("i64(i64, i64, i64, i64, i64, i64)")
def _totals(slo, shi, size, n, out, ns):
    """out[s] = bytes of section s; returns their maximum."""
    a, b, z, d = i64s(slo, n), i64s(shi, n), i64s(size, n), i64s(out, ns)
    for s in range(ns):
        d[s] = 0
    for i in range(n):
        d[a[i]] += z[i]
        if b[i] < ns:
            d[b[i]] -= z[i]
    top = d[0]
    for s in range(1, ns):
        d[s] += d[s - 1]
        top = max(top, d[s])
    return top


@native("i64(i64, i64, i64, i64, i64, i64)")
def _range_max(slo, shi, n, value, ns, out):
    """out[i] = max of value over [slo[i], shi[i]), by doubling windows: O((n + ns) log ns)."""
    a, b, v, o = i64s(slo, n), i64s(shi, n), i64s(value, ns), i64s(out, n)
    w = v.copy()
    for i in range(n):
        o[i] = 0
    span = 1
    while span <= ns:
        for i in range(n):
            if span <= b[i] - a[i] < 2 * span:
                o[i] = max(w[a[i]], w[b[i] - span])
        for s in range(ns - span):
            w[s] = max(w[s], w[s + span])
        span *= 2
    return 0


class Instance:
    """An offset problem in section form.

    lo, hi      steps, half-open; hi > lo
    size        bytes, positive, multiples of the alignment
    slo, shi    sections, half-open
    totals      bytes per section; lower_bound is their maximum
    breadth     per buffer, the largest total among its sections
    """

    def __init__(self, lo, hi, size):
        self.lo, self.hi, self.size = (np.ascontiguousarray(a, np.int64) for a in (lo, hi, size))
        self.n = n = len(self.lo)
        order = self._by_time()
        born = order < n
        closes = ~born
        closes[1:] &= born[:-1]
        passed = np.cumsum(closes)
        self.slo, self.shi = np.empty(n, np.int64), np.empty(n, np.int64)
        self.slo[order[born]] = passed[born]
        self.shi[order[~born] - n] = passed[~born]
        self.ns = int(passed[-1]) if n else 0
        self.totals = np.empty(self.ns, np.int64)
        self.lower_bound = _totals(self.slo, self.shi, self.size, n, self.totals, self.ns) if n else 0

    @property
    def breadth(self):
        out = np.empty(self.n, np.int64)
        _range_max(self.slo, self.shi, self.n, self.totals, self.ns, out)
        return out

    def events(self):
        """Takes (i + 1) and releases (-i - 1) in time order, deaths first: what an online allocator sees."""
        n, order = self.n, self._by_time()
        return np.where(order < n, order + 1, -(order - n) - 1)

    def _by_time(self):
        """Births 0..n-1 and deaths n..2n-1 in time order; deaths come before births of the same step."""
        times = np.concatenate([self.hi, self.lo])
        return (np.argsort(times, kind="stable") + self.n) % max(2 * self.n, 1)
