"""Plans kept for the next run, with all that they depend on.

    cache                     owner               key
    Graph.plans               backend             placement, and the backend's settings (threads, fusion ...)
    Scheduler's runs          graph               pins, options, places and usages of what the graph's tensors lie in
    Network's steps           shape of inputs     the backend's settings
"""
import collections

from ggjit.ops.core.weak import WeakKeys


class PlanCache:
    """One plan for each owner, used again while its key is what it was when the plan was made.

    limit None: owners are held weakly, and a plan goes with its owner.  A number: so many plans are kept, those used
    last.
    """

    def __init__(self, limit=None):
        self._limit = limit
        self._kept = WeakKeys() if limit is None else collections.OrderedDict()     # owner: (key, plan)

    def get(self, owner, key, make):
        """The owner's plan; made by `make()` where there is none or its key has changed.  An error of `make` leaves
        the cache as it is.

        key(plan): all that the plan depends on besides its owner, as it is now.
        """
        entry = self._kept.of(owner) if self._limit is None else self._kept.get(owner)
        if entry is None or entry[0] != key(entry[1]):
            plan = make()
            entry = key(plan), plan
            if self._limit is None:
                self._kept.put(owner, entry)
        if self._limit is not None:
            self._kept[owner] = entry
            self._kept.move_to_end(owner)
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        return entry[1]

    def plans(self):
        return [plan for _, plan in list(self._kept.values())]

    def clear(self):
        self._kept.clear()

    def __len__(self):
        return len(self._kept)
