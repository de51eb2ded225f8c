"""Which results to compute again, and when, so that a graph runs within a number of bytes.

Wanted: a schedule (schedules.py) with at most `limit` bytes alive at every event, at the least extra cost.  Three plans
are made (recompute_plans.py), seven where greedy's is not the best, and the cheapest is taken; `bound` proves how much
any schedule pays at least (recompute_bound.py).
"""
import dataclasses
import functools

import numpy as np

from ggjit.alloc.orders import recompute_bound
from ggjit.alloc.orders.recompute_plans import EVENTS_PER_NODE, EXECUTOR, execute, greedy, polish
from ggjit.alloc.orders.schedules import AGAIN, KEEP, RECOMPUTE, SOURCE, TAKE, list_order, live_bytes
from ggjit.ops.core.errors import ParamError

RULES = ((0.0, 0.5, 0.5), (1.0, 0.5, 0.5))      # settings (a, b, c) of recompute_plans.execute
# settings tried where greedy is not the best
MORE = ((0.0, 0.15, 0.0), (0.0, 0.5, 0.0), (0.0, 1.0, 0.25), (0.25, 0.15, 0.25))
LEAST_STEP, QUICK_STEP = 500, 50        # the least reachable peak is found to 1 / this of the peak


@dataclasses.dataclass(frozen=True)
class Schedule:
    """events: node numbers; peak: most bytes alive; extra: cost of what is made again, as a share of one run."""
    events: np.ndarray
    peak: int
    extra: float


class Recomputation:
    """A graph as numbers: per node in order bytes, cost, the nodes it reads, and flags AGAIN, KEEP, TAKE."""

    def __init__(self, size, cost, reads, flags):
        """reads: a list for each node, or (ptr, idx), all of them end to end."""
        self.n = len(size)
        self.size, self.cost, self.flags = (np.array(x, np.int64) for x in (size, cost, flags))
        self.ptr, self.idx = reads if isinstance(reads, tuple) else _csr(reads)
        reader = np.repeat(np.arange(self.n), np.diff(self.ptr))
        self.cptr = np.zeros(self.n + 1, np.int64)
        np.cumsum(np.bincount(self.idx, minlength=self.n), out=self.cptr[1:])
        self.cidx = reader[np.argsort(self.idx, kind="stable")]
        self.flags[self.idx[self.flags[reader] & AGAIN > 0]] |= SOURCE
        self.total = max(int(self.cost.sum()), 1)

    def in_order(self, order):
        """The same nodes in another order: node order[k] becomes node k."""
        place, counts = np.argsort(order), np.diff(self.ptr)[order]
        ptr = np.zeros(self.n + 1, np.int64)
        np.cumsum(counts, out=ptr[1:])
        idx = self.idx[np.repeat(self.ptr[order] - ptr[:-1], counts) + np.arange(ptr[-1])]
        return Recomputation(self.size[order], self.cost[order], (ptr, place[idx]), self.flags[order])

    @functools.cached_property
    def plain(self):
        """The schedule that makes nothing again."""
        return self._schedule(np.arange(self.n))

    def _schedule(self, events):
        record = self._record(0, event=events, max_events=len(events), n_events=len(events))
        return Schedule(events, live_bytes(record), int(self.cost[events].sum()) / self.total - 1)

    def order(self, rank, after):
        """Node numbers in an order of few live bytes, lower ranks first; after: pairs (i, j), i before j."""
        order = np.empty(self.n, np.int64)
        pairs = np.append(len(after), np.array(after, np.int64).reshape(-1))
        if list_order(self.n, self.size, self.ptr, self.idx, self.flags, np.asarray(rank, np.int64), pairs, order):
            raise ParamError("the order of nodes has a circle")
        return order

    def fit(self, limit):
        """The cheapest Schedule found whose peak is at most `limit` bytes; None: none was found."""
        return next(iter(self.fits(limit)), None)

    def fits(self, limit, quick=False):
        """Schedules whose peak is at most `limit` bytes, the cheapest first; quick: fewer are tried."""
        if self.plain.peak <= limit:
            return [self.plain]
        record = self._record(limit)
        greedy = self._polished(record, self._greedy)
        found = [greedy, *(self._polished(record, self._rule(rule)) for rule in RULES)]
        # MORE settings help where sizes differ much
        if not quick and (greedy is None or any(s is not None and s.extra < greedy.extra for s in found)):
            found += [self._polished(record, self._rule(rule)) for rule in MORE]
        return sorted((s for s in found if s is not None), key=lambda s: s.extra)

    def least(self, below=None, quick=False):
        """The Schedule of the least peak that was found, by bisection; None where that is not less than `below`.
        quick: about that peak, at any cost."""
        step = max(self.plain.peak // (QUICK_STEP if quick else LEAST_STEP), 1)
        low, high = self.least_node, self.plain.peak
        if below is not None and high >= below:
            if below - step < low or not self._can(below - step):
                return None
            high = below - step
        while high - low > step:
            middle = (low + high) // 2
            if self._can(middle):
                high = middle
            else:
                low = middle
        return self._first(high) if quick else self.fit(high)

    def _first(self, limit):
        """The first Schedule that is found within `limit` bytes: its peak is wanted, not its cost."""
        if self.plain.peak <= limit:
            return self.plain
        record = self._record(limit)
        return next(filter(None, (self._polished(record, make) for make in self._makers())), None)

    def _makers(self):
        return *map(self._rule, RULES + MORE[:1]), self._greedy

    def _can(self, limit):
        """Whether a schedule of at most `limit` bytes is found."""
        record = self._record(limit)
        return any(make(record) for make in self._makers())

    def node_nbytes(self):
        """Bytes of each node with its inputs."""
        inputs = np.add.reduceat(np.append(self.size[self.idx], 0), self.ptr[:-1]) * (np.diff(self.ptr) > 0)
        return inputs + np.where(self.flags & TAKE, 0, self.size)

    @functools.cached_property
    def least_node(self):
        """Bytes of the largest node with its inputs: no schedule needs less."""
        return int(self.node_nbytes().max(initial=0))

    @property
    def kept_nbytes(self):
        """Bytes of the outputs, which are alive together at the end: no schedule needs less."""
        return int(self.size[self.flags & KEEP > 0].sum())

    def _record(self, limit, **schedule):
        """The graph as the passes take it, with room for a schedule."""
        return RECOMPUTE.of(n=self.n, size=self.size, cost=self.cost, flags=self.flags, ptr=self.ptr, idx=self.idx,
                            cptr=self.cptr, cidx=self.cidx, limit=limit,
                            **({"max_events": EVENTS_PER_NODE * self.n + 1, "n_events": 0} | schedule))

    def _greedy(self, record):
        return greedy(record, EXECUTOR.of(n=self.n, a=0.0, b=0.0, c=0.0))

    def _rule(self, rule):
        a, b, c = rule
        return lambda record: execute(record, EXECUTOR.of(n=self.n, a=a, b=b, c=c))

    def _polished(self, record, make):
        """The Schedule that `make` finds within the record's limit, polished; None: it finds none."""
        record.n_events = make(record)
        if record.n_events == 0:
            return None
        schedule = self._schedule(record.event[:polish(record)].copy())
        return schedule if schedule.peak <= record.limit else None

    def bound(self, limit):
        """The least extra share that any schedule within `limit` bytes pays, in any order of the nodes."""
        return recompute_bound.bound(self, limit)


def _csr(lists):
    ptr = np.zeros(len(lists) + 1, np.int64)
    ptr[1:] = np.cumsum([len(x) for x in lists])
    return ptr, np.array([i for x in lists for i in x], np.int64)
