"""Which backends write which memory in a run, and so what the others have to wait for."""
import numpy as np

from ggjit.core.versions import written
from ggjit.sched.columns import BACKEND, BITS, IS_COMPUTE, MEM, UPDATES, VIEW


class Writers:
    """The backends that write each base (a tensor that is no view) of a Cut.

    bases, backends     one entry per base and node that writes it: its local number (ascending), where the node runs
    leaves              local numbers of those bases that have memory of their own
    """

    def __init__(self, cut):
        n = cut.n_nodes
        bits, view, backend = cut.col(BITS)[:n], cut.col(VIEW)[:n], cut.col(BACKEND)[:n]
        nodes = np.flatnonzero(bits & IS_COMPUTE)
        bases, backends = np.where(view >= 0, view, np.arange(n))[nodes], backend[nodes]
        for i in np.flatnonzero(bits >> UPDATES).tolist():
            updated = [cut.local[x.id] for x in written(cut.nodes[i])[1:]]
            bases, backends = np.append(bases, updated), np.append(backends, [backend[i]] * len(updated))
        order = np.argsort(bases, kind="stable")
        self.bases, self.backends = bases[order], backends[order]
        self.leaves = np.unique(self.bases[cut.col(MEM)[self.bases] >= 0])

    def of(self, base):
        """Numbers of the backends that write the base."""
        lo, hi = np.searchsorted(self.bases, [base, base + 1])
        return np.unique(self.backends[lo:hi]).tolist()


def sharing(world, cut, writers):
    """Per backend, the asynchronous others that may write memory it touches, or touch memory it writes.

    A backend writes its own compute memory (results, copies), leaves, and what it works on in place elsewhere.
    """
    n, reads = len(world.backends), world.reads
    mem, backend = cut.col(MEM)[writers.bases], cut.col(BACKEND)[writers.bases]
    kinds = np.where(mem >= 0, mem, world.buft_of[backend])
    written = [{int(world.buft_of[b]), *np.unique(kinds[writers.backends == b]).tolist()} for b in range(n)]

    def meet(a, b):
        return any(reads[a, k] and reads[b, k] for k in written[a] | written[b])
    return [[a for a in range(n) if a != b and world.is_async[a] and meet(a, b)] for b in range(n)]
