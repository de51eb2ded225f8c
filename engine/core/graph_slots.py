"""Passes graphs to a backend's methods with the memory of their nodes, whether a scheduler or the user calls.

The user's tensors know nothing of the memory that a GraphAllocator gave a graph.  A backend that looks at `t.buffer`
and `t.offs` gets, in place of the user's graph, the same nodes placed (`PlacedRun` of engine/graphs/placed.py), outside
a scheduler as in one; and what it computed can be read at the user's tensors.  A class that takes the graph's placement
into account itself says `reads_placements = True`.
"""
import functools
import weakref


class _Runs:
    """{plan: its PlacedRun} of a backend; plans are anything.  One that takes no weak reference is kept until it is
    freed."""

    def __init__(self):
        self._of = {}

    def note(self, plan, run):
        try:
            held = weakref.ref(plan, functools.partial(self._of.pop, id(plan)))
        except TypeError:
            held = plan
        self._of[id(plan)] = held, run
        return plan

    def of(self, plan):
        """The run of a plan, or None."""
        return self._of.get(id(plan), (None, None))[1]

    def forget(self, plan):
        self._of.pop(id(plan), None)


def _runs(backend):
    return backend.__dict__.setdefault("_runs_of_plans", _Runs())


def place_graphs(cls, slots=None):
    """Wrap the slots for graphs that a subclass of Backend defines itself; slots: these alone."""
    if not cls.__dict__.get("reads_placements", False):
        for name, wrap in _WRAPPERS.items():
            if slots is not None and name not in slots:
                continue
            slot = cls.__dict__.get(name)
            if callable(slot) and not getattr(slot, "places_graphs", False):
                wrapped = functools.wraps(slot)(wrap(slot))
                wrapped.places_graphs = True
                setattr(cls, name, wrapped)


def _is_users(graph):
    """Is it a Graph whose nodes are the user's tensors?  Other objects are refused by the method itself."""
    return getattr(graph, "placed", None) is False


def _compute(slot):
    def graph_compute(self, graph):
        if not _is_users(graph):
            return slot(self, graph)
        run = graph._given_to(self)
        return run.run(slot, run.graph)
    return graph_compute


def _plan_create(slot):
    def graph_plan_create(self, graph, *args, placement=None, **more):
        if not _is_users(graph):
            return slot(self, graph, *args, **more, **({} if placement is None else {"placement": placement}))
        if args:
            placement, *args = args
        run = graph._given_to(self, placement)
        return _runs(self).note(slot(self, run.graph, **more), run)
    return graph_plan_create


def _plan_update(slot):
    def graph_plan_update(self, plan, graph):
        if not _is_users(graph):
            return slot(self, plan, graph)
        run = graph._given_to(self)
        updated = slot(self, plan, run.graph)
        if updated is not plan:
            _runs(self).forget(plan)
        return _runs(self).note(updated, run)
    return graph_plan_update


def _plan_compute(slot):
    def graph_plan_compute(self, plan):
        run = _runs(self).of(plan)
        return slot(self, plan) if run is None else run.run(slot, plan)
    return graph_plan_compute


def _plan_free(slot):
    def graph_plan_free(self, plan):
        _runs(self).forget(plan)
        return slot(self, plan)
    return graph_plan_free


_WRAPPERS = {"graph_compute": _compute, "graph_plan_create": _plan_create, "graph_plan_update": _plan_update,
             "graph_plan_compute": _plan_compute, "graph_plan_free": _plan_free}
