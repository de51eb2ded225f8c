"""Says whether the result of a run is still in memory, or whether its memory was used again.

Base of the plans of a backend (engine/graphs/graph_plan.py) and of a scheduler's runs (engine/sched/run.py).
"""
import bisect
import weakref

import numpy as np

from ggjit.ops.core.errors import Overwritten
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import FLAG_OUTPUT, VIEW_OPS
from ggjit.ops.core.shape import describe

_none = weakref.ref(set())          # a weak reference to nothing
_ran_last = _none                   # weak reference to what ran last: all its tensors refer to it
_marking = ForkLock()


def mark_last(run, nodes):
    """`t.numpy()` reads what ran last; a plan replayed in a row has marked its tensors already."""
    global _ran_last
    if _ran_last() is not run:
        with _marking:              # graphs of two threads may share tensors
            _ran_last, mine = _none, weakref.ref(run)       # stays None if a signal comes in before the loop has ended
            put = object.__setattr__                        # six times as fast as the tensor's own __setattr__
            for t in nodes:
                put(t, "_plan", mine)
            _ran_last = mine


def ran_last():
    """The weak reference that `mark_last` gave to the tensors."""
    return _ran_last


class Results:
    """Subclasses give the methods and properties that raise or return nothing here, and

    where(t)            (buffer, byte offset) of a tensor of the graph, or None
    _output_ids         tensors kept to the end of a run, beside those that gg.set_output marked
    _spans              (positions, rows, writers) of all that a run writes, in order: places in the graph's order,
                        rows of (memory, first byte, end), and the tensor of each or None for a copy
    """

    _output_ids = ()

    def _position(self, t):
        """(place of `t` in the order of `_spans`, its row there), or None where its memory is its own."""

    def _lost(self, t):
        """The reason, as text, why `t` has no result, or None."""

    def _overwrites(self, writer, t):
        """Does `writer`, computed later in memory of `t`, spoil it?"""
        return True

    def _name(self, writer):
        """A tensor that overwrote another, for the message."""
        return repr(writer)

    def _undefined(self):
        """[(buffer, byte offset, bytes)] of memory that holds nothing before a run."""
        return ()

    def check_intact(self, t):
        """Overwritten, if `t` was not computed or its memory was used again since."""
        found = self._position(t)
        if found is None:
            return
        if why := self._lost(t):
            raise Overwritten(why)
        position, (memory, lo, end) = found
        positions, rows, writers = self._spans
        later = bisect.bisect_right(positions, position)
        rows = rows[later:self._n_written()]
        for k in np.flatnonzero((rows[:, 0] == memory) & (rows[:, 1] < end) & (lo < rows[:, 2])).tolist():
            writer = writers[later + k]
            if self._overwrites(writer, t):
                by = "a copy between backends" if writer is None else self._name(writer)
                raise Overwritten(f"the memory of {describe(t)} was reused by {by}; {self._remedy(t, writer)}")

    def _remedy(self, t, writer):
        """The remedy, as text, that keeps the values of `t`, which `writer` overwrote."""
        writer = writer() if isinstance(writer, weakref.ref) else writer
        if writer is not None and writer.base is t.base:
            return "it works in place: use the op without _inplace to keep both"
        if t.flags & FLAG_OUTPUT or t.id in self._output_ids:
            return "read it in a plan of another planner: this one (ggml-2023) keeps only the last results"
        return "call gg.set_output on it before building the graph"

    def values(self, t):
        """The values of a tensor of the graph as an array: what `t.numpy()` gives."""
        return t._decoded(t._bytes_view())

    def _n_written(self):
        """How many of `_spans` were written; None: all."""

    def _poison(self):
        """Fill memory that holds nothing before a run with NaN bytes, so that elements no kernel writes are seen."""
        for buf, offs, nbytes in self._undefined():
            self._fill(buf, offs, nbytes)

    def _fill(self, buf, offs, nbytes):
        if buf._arena is not None:                      # host memory
            buf._arena[offs:offs + nbytes] = 0xFF


def used_by_another(t):
    """The reason, as text: another graph has computed in the tensor's memory."""
    return (f"the memory of {describe(t)} was used by another graph of the same GraphAllocator; read results before "
            f"that, or give each graph an allocator of its own")


class RunResults(Results):
    """What one run of a plan left in memory, without the plan: it refers to buffers alone and to no tensor, so a tensor
    may hold it.  Nothing else computes in these buffers.

    places: {tensor id: (buffer, byte offset)}
    """
    _positions, _spans, _never_stored = {}, ((), None, ()), frozenset()

    def __init__(self, places):
        self._places = places

    @classmethod
    def of(cls, plan):
        """The Results of a plan of engine/graphs/graph_plan.py that has just run."""
        left = cls(plan.placement.where)
        positions, rows, writers = plan._spans
        left._positions, left._spans = plan._positions, (positions, rows, [weakref.ref(t) for t in writers])
        left._never_stored = frozenset().union(*(p.left_out for p in plan.parts))
        return left

    @classmethod
    def of_graph(cls, graph):
        """The Results of a backend without plans, which stores every node where the graph's placement says."""
        left = cls(graph.placement.where)
        left._set_spans(graph.nodes)
        return left

    def _set_spans(self, nodes):
        """All nodes are computed in this order and stored in their places."""
        self._positions = {t.id: i for i, t in enumerate(nodes)}
        stored = [(t, *self.where(t)) for t in nodes if t.op not in VIEW_OPS and self.where(t) is not None]
        rows = np.array([(id(buf), offs, offs + t.nbytes) for t, buf, offs in stored], np.int64).reshape(-1, 3)
        self._spans = [self._positions[t.id] for t, _, _ in stored], rows, [weakref.ref(t) for t, _, _ in stored]

    def where(self, t):
        """(buffer, byte offset) of a tensor of the graph, or None."""
        found = self._places.get(t.id)
        if found is None and t.view_src is not None:
            found = self._places.get(t.view_src.id)
            found = found and (found[0], found[1] + t.view_offs)
        return found

    def _position(self, t):
        where, position = self.where(t), self._positions.get(t.id)
        return None if where is None or position is None else (position, (id(where[0]), where[1], where[1] + t.nbytes))

    def _lost(self, t):
        return never_stored(t, "a node that reads it") if t.id in self._never_stored else None

    def _name(self, writer):
        t = writer()
        return "a node that is gone" if t is None else repr(t)


class SharedResults(RunResults):
    """What the runs of a graph left in memory; other graphs may compute there as well."""

    def begin(self):
        """Mark the memory as this run's from now on: readers of other runs see it (`_lost`)."""
        for buf in {id(b): b for b, _ in self._places.values()}.values():
            buf.last_plan = weakref.ref(self)

    def _lost(self, t):
        last = self.where(t)[0].last_plan
        return None if last is None or last() is self else used_by_another(t)


def never_stored(t, reader):
    """The reason, as text: a node inside a fused kernel is never stored."""
    return (f"{describe(t)} was never stored: one kernel computes {reader} from its sources; call gg.set_output on it "
            f"before building the graph, or plan with fuse=False")
