"""Live bytes over time, maximal live sets, and the lower bound every plan is measured against.

    step      0   1   2   3   4
    buffer a  [-------------)           half-open: a is live at steps 0, 1, 2
    buffer b      [---------)
    buffer c                [---)       c is born where a and b die: they may share memory
    sections  |------0------|-1-|       a live set is maximal where a birth is directly followed by a death

Only maximal live sets constrain offsets: two buffers meet in time exactly when they share a section.  There are far
fewer sections than steps, and everything below runs over sections.
"""
import functools

import numpy as np

from ggjit.ops.native.jit import i64s, native
from ggjit.ops.native.records import JitRecord

SPARSE = 4                      # steps per buffer from which on steps without birth or death are left out


SECTIONS = JitRecord("SectionsRecord", n="i64", n_steps="i64", lo="i64[n]", hi="i64[n]", size="i64[n]",
                     lower="i64[n]", upper="i64[n]", event="i64[2 * n]", total="i64[n]")
sections_at = SECTIONS.at


@native("i64(i64)")
def _sections(address):
    """Steps 0..n_steps -> sections, events in time order (deaths first) and bytes per section; returns their number."""
    r = sections_at(address)
    n, n_steps, born, dead, ev = r.n, r.n_steps, r.lo, r.hi, r.event
    at = np.zeros(2 * n_steps + 4, np.int64)    # of a step's deaths, then of its births: where they begin in ev
    for i in range(n):
        at[2 * dead[i] + 1] += 1
        at[2 * born[i] + 2] += 1
    for k in range(2 * n_steps + 3):
        at[k + 1] += at[k]
    for i in range(n):
        k = 2 * dead[i]
        ev[at[k]] = -i - 1
        at[k] += 1
    for i in range(n):
        k = 2 * born[i] + 1
        ev[at[k]] = i + 1
        at[k] += 1
    ns, live, fresh = 0, np.int64(0), False
    for k in range(2 * n):
        i = abs(ev[k]) - 1
        if ev[k] > 0:
            r.lower[i], fresh = ns, True
            live += r.size[i]
            continue
        if fresh:
            r.total[ns], fresh = live, False
            ns += 1
        r.upper[i] = ns
        live -= r.size[i]
    return ns


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
        lo, hi, n_steps = self._steps()
        r = SECTIONS.of(n=n, n_steps=n_steps, lo=lo, hi=hi, size=self.size)
        self.ns = _sections(r) if n else 0
        self.slo, self.shi, self._events, self.totals = r.lower, r.upper, r.event, r.total[:self.ns].copy()
        self.lower_bound = int(self.totals.max(initial=0))

    def _steps(self):
        """(lo, hi, last step) counted from 0; where steps are many, those at which nothing is born or dies left out."""
        first, last = (int(self.lo.min()), int(self.hi.max())) if self.n else (0, 0)
        if last - first <= SPARSE * self.n:
            return self.lo - first, self.hi - first, last - first
        steps, place = np.unique(np.concatenate([self.lo, self.hi]), return_inverse=True)
        return place[:self.n].astype(np.int64), place[self.n:].astype(np.int64), len(steps)

    @functools.cached_property
    def breadth(self):
        out = np.empty(self.n, np.int64)
        _range_max(self.slo, self.shi, self.n, self.totals, self.ns, out)
        return out

    def events(self):
        """Takes (i + 1) and releases (-i - 1) in time order, deaths first: what an online allocator sees."""
        return self._events
