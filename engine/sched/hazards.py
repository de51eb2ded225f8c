"""Which backends write which memory in a run, so that other backends know what to wait for."""
import functools

import numpy as np

from ggjit.core.versions import written
from ggjit.sched.records import IS_COMPUTE, UPDATES


class Writers:
    """The backends that write each base (a tensor that is no view) of an Assignment.

    leaves              local numbers of those bases that have memory of their own
    """

    def __init__(self, assigned):
        self._assigned = assigned
        self.leaves = np.flatnonzero((assigned.written >= 0) & (assigned.rows["mem"] >= 0))

    @functools.cached_property
    def _pairs(self):
        """(bases, backends): one entry per base and node that writes it: its local number, where the node runs."""
        assigned, n = self._assigned, self._assigned.n_nodes
        bits, view, backend = (assigned.rows[name][:n] for name in ("bits", "view", "backend"))
        nodes = np.flatnonzero(bits & IS_COMPUTE)
        bases, backends = np.where(view >= 0, view, np.arange(n))[nodes], backend[nodes]
        for i in np.flatnonzero(bits >> UPDATES).tolist():
            updated = [assigned.local[x.id] for x in written(assigned.nodes[i])[1:]]
            bases, backends = np.append(bases, updated), np.append(backends, [backend[i]] * len(updated))
        return bases, backends

    def of(self, base):
        """Numbers of the backends that write the base."""
        bases, backends = self._by_base
        lo, hi = np.searchsorted(bases, [base, base + 1])
        return np.unique(backends[lo:hi]).tolist()

    @functools.cached_property
    def _by_base(self):
        """The bases, ascending, and their backends."""
        bases, backends = self._pairs
        order = np.argsort(bases, kind="stable")
        return bases[order], backends[order]

    @functools.cached_property
    def shares(self):
        """For each backend the asynchronous others that read or write memory which it writes or they write.  A backend
        writes its own results and copies, leaves, and what it works on in place elsewhere.
        """
        s = self._assigned.support
        n, reads = len(s.backends), s.reads
        if not any(s.is_async):
            return [[] for _ in range(n)]
        bases, backends = self._pairs
        mem, backend = (self._assigned.rows[name][bases] for name in ("mem", "backend"))
        kinds = np.where(mem >= 0, mem, s.buft_of[backend])
        written = [{int(s.buft_of[b]), *np.unique(kinds[backends == b]).tolist()} for b in range(n)]

        def meet(a, b):
            return any(reads[a, k] and reads[b, k] for k in written[a] | written[b])
        return [[a for a in range(n) if a != b and s.is_async[a] and meet(a, b)] for b in range(n)]
