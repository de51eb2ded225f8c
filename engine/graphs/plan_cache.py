"""Plans kept for the next run, with the state on which they depend.

    cache                     owner               key
    Graph.plans               backend             placement, and the backend's settings (threads, fusion ...)
    Scheduler's runs          graph               pins, options, places and usages of what the graph's tensors lie in
    Network's steps           shape of inputs     the backend's settings
"""
import collections

from ggjit.core.run_lock import RunLock
from ggjit.ops.core.weak import WeakKeys


def without_plans(graph):
    """The graph without the plans it keeps: a plan refers to this, or the two would hold each other."""
    copy = object.__new__(type(graph))
    copy.__dict__.update(graph.__dict__, plans=None)
    return copy


class PlanCache:
    """One plan for each owner, used again while its key is what it was when the plan was made.

    limit None: owners are held weakly, and a plan goes with its owner.  A number: so many plans are kept, those used
    last; `get` is called under a lock of the cache's user then.
    """

    def __init__(self, limit=None):
        self._limit = limit
        self._kept = WeakKeys() if limit is None else collections.OrderedDict()     # owner: (key, plan)
        self._making = RunLock()

    def get(self, owner, key, make):
        """The owner's plan; made by `make()` where there is none or its key has changed.  An error of `make` leaves
        the cache as it is.  Threads that ask for one plan at once get the same: all but one wait until it is made.

        key(plan): all that the plan depends on besides its owner, as it is now.
        """
        entry = self._valid(owner, key)
        if entry is None:
            with self._making:
                entry = self._valid(owner, key)
                if entry is None:
                    plan = make()
                    entry = key(plan), plan
                    if self._limit is None:
                        self._kept.put(owner, entry)
        if self._limit is not None:
            self._kept[owner] = entry
            self._kept.move_to_end(owner)
            self._keep(self._limit)
        return entry[1]

    def make_room(self):
        """Of a limited number of plans, let go of the one used longest ago where another has no room."""
        self._keep(self._limit - 1)

    def _keep(self, n):
        while len(self._kept) > n:
            self._kept.popitem(last=False)

    def _valid(self, owner, key):
        """(key, plan) of the owner; None if there is none or its key has changed."""
        entry = self._kept.of(owner) if self._limit is None else self._kept.get(owner)
        return entry if entry is not None and entry[0] == key(entry[1]) else None

    def plans(self):
        return [plan for _, plan in list(self._kept.values())]

    def clear(self):
        self._kept.clear()

    def __len__(self):
        return len(self._kept)
