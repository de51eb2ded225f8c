"""A network within an arena of a given size: its graphs are rearranged until each fits.

    load_model(path, arena="24M")

    arrangement                                     costs
    ggml's plan                                     nothing
    offsets of "best", another order of nodes       planning
    results that are made again                     operations                          gg.rematerialize
    in decoders: fewer tokens at once               weights are read more often
    in others: rows of large nodes at a time        copies of rows                      gg.rematerialize

Of those that fit, the cheapest by the kernels' estimates of their time is taken; results have the same bits in each.
"""
import math

from ggjit.alloc.report import mib
from ggjit.api.remat_graph import Rematerialized
from ggjit.api.rematerialize import BudgetError, rematerialize
from ggjit.core.arguments import nbytes_of
from ggjit.ops.core.errors import ParamError


class ComputeArena:
    """`.nbytes`: the most bytes that results of nodes may take; kernels' work memory, inputs and caches lie outside."""

    def __init__(self, network, nbytes):
        """Errors: ParamError for a network on several devices; BudgetError where a decoder's shortest piece is too
        large."""
        if network.scheduler is not None:
            raise ParamError("arena is of one device; leave out n_gpu_layers and devices, or arena")
        self.network, self.nbytes = network, nbytes_of(nbytes, "arena")
        self._pieces = {}

    def within(self, graph, cut=True):
        """`graph` where ggml's plan of it fits, else a Rematerialized graph that does.  Errors: BudgetError."""
        if self.network._allocator.plan(graph).peak <= self.nbytes:
            return graph
        return rematerialize(graph, self.nbytes, self.network.backend, cut=cut)

    def piece(self, all_rows=False, hidden=False):
        """How many tokens of a prompt a decoder reads at once, where that gives logits or hidden states of all."""
        key = bool(all_rows), hidden
        if key not in self._pieces:
            self._pieces[key] = self._cheapest(*key)
        return self._pieces[key]

    def _cheapest(self, all_rows, hidden):
        """The cheapest of the batch that was asked for, its half, a quarter, ... that fits.  Errors: BudgetError."""
        m, sizes = self.network, _halves(min(self.network.n_batch, self.network.n_ctx), self.network.least_piece)
        best, price, minimum = None, math.inf, 0
        for n in sizes:
            try:
                found = self.within(m.graph(*m.full_batch(n, all_rows, hidden)), cut=False)
            except BudgetError as e:
                minimum = e.minimum     # the error itself would hold this network in a cycle
                continue
            if not isinstance(found, Rematerialized):
                found = None if best is None else rematerialize(found, self.nbytes, m.backend)
            if best is None or found.seconds / n < price:
                best, price = n, math.inf if found is None else found.seconds / n
            if found is None or not found.extra:        # shorter pieces cost no less
                break
        if best is None:
            raise BudgetError(f"arena: {mib(self.nbytes)} are too few for {sizes[-1]} tokens of {m.file.path}"
                              f"{' with all logits' if all_rows and not hidden else ''}: the least found is "
                              f"{mib(minimum)}; use arena={minimum} or more", minimum)
        return best


def _halves(n, least):
    """n, n / 2, ... not below `least`; n alone where that is less."""
    out = [n]
    while out[-1] // 2 >= least:
        out.append(out[-1] // 2)
    return out
