"""The steps from a graph to its Run; each step gets the result of the one before it.

    SchedSettings, graph --assign--> Assignment --lay_out--> GraphLayout --prepare--> Run --Run.compute--> results
"""
import dataclasses
import sys
import weakref

import numpy as np

from ggjit.core.config import debug
from ggjit.core.lifetime import call_all
from ggjit.core.placing import free_after, place_tensors, unplace
from ggjit.core.table import TABLE
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import T_BUFFER
from ggjit.sched.assignment import Assignment
from ggjit.sched.explain import Explanation
from ggjit.sched.hazards import Writers
from ggjit.sched.layout import GraphLayout
from ggjit.sched.run import Run

_placing = ForkLock()           # two schedulers may find the same leaf without memory


@dataclasses.dataclass(slots=True, eq=False)
class SchedSettings:
    """What a Scheduler wants, as it is now; the names are those of its arguments.

    pins      {tensor id: (tensor, backend number)}; pin_version goes up whenever they change
    leaves    the OwnedLeaves it placed
    """
    support: object
    motion: bool
    planner: str
    time_limit: float
    work: bool
    pins: dict = dataclasses.field(default_factory=dict)
    pin_version: int = 0
    leaves: list = dataclasses.field(default_factory=list)

    def forget(self):
        """Forget all pins and take the memory of the leaves back."""
        leaves = self.leaves[:]
        self.leaves.clear()
        self.pins.clear()
        self.pin_version += 1
        call_all(*(mine.take_back for mine in leaves))


@oom_guard("the assignment of a graph to backends")
def assign(settings, graph):
    """The Assignment of a graph that is alive.  Errors: NotSupported, GraphError."""
    settings.leaves[:] = [mine for mine in settings.leaves if mine.alive]
    owned = {t.id: b for mine in settings.leaves for t, b in mine.placed()}
    for id_ in [id_ for id_, (t, _) in settings.pins.items() if not t.ctx.alive]:
        del settings.pins[id_]
    pins = {id_: b for id_, (_, b) in settings.pins.items()}
    assigned = Assignment.in_order(settings.support, graph, pins, owned, settings.motion)
    if "sched" in debug:
        print(Explanation(assigned, None), file=sys.stderr)
    return assigned


def lay_out(settings, assigned):
    """The GraphLayout of an Assignment."""
    return GraphLayout.lowest(assigned, settings.planner, settings.time_limit, settings.work)


@oom_guard("a run of a graph")
def prepare(settings, memory, events, rest, graph):
    """The Run of a graph, with memory for all of it.  rest(): called before compute buffers move."""
    made = None
    while made is None:                                     # repeated while another thread moves a leaf meanwhile
        assigned = assign(settings, graph)
        layout = lay_out(settings, assigned)
        memory.grow(layout.chunk_sizes, rest)
        # done after everything that may fail, since the user can see it
        made = place_leaves(assigned)
    for buf, tensors in made:
        backends = assigned.rows["backend"][[assigned.local[t.id] for t in tensors]]
        settings.leaves.append(OwnedLeaves(buf, list(zip(tensors, backends.tolist(), strict=True))))
    return Run(assigned, layout, Writers(assigned), memory, events)


def place_leaves(assigned):
    """Give every leaf without memory a place on its backend, in one buffer per buffer type.

    Returns [(buffer, its tensors)], or None if tensors were placed or moved since the assignment was made: it counted
    on other places.  Errors leave nothing behind.
    """
    s, n = assigned.support, assigned.n_nodes
    with _placing:
        if assigned.version != TABLE.placement_version and assigned.placed() != assigned.found:
            return None
        wanted = {}
        missing = (assigned.rows["view"][n:] < 0) & (TABLE.words[assigned.ids[n:], T_BUFFER] < 0)
        for i in (n + np.flatnonzero(missing)).tolist():
            wanted.setdefault(s.buft_ids[int(assigned.rows["backend"][i])], []).append(i)
        made = place_tensors([(s.own_bufts[buft_id], [assigned.tensors[i] for i in members])
                              for buft_id, members in wanted.items()])
        for buft_id, members in wanted.items():
            for i in members:
                assigned.place_leaf(i, s.buft_index(s.own_bufts[buft_id]))
        return made


class OwnedLeaves:
    """The tensors a scheduler placed in one buffer.  Keeps neither alive: the buffer is freed with the last of them."""

    def __init__(self, buf, placed):
        self.buf_id = buf.id
        self._tensors = [(weakref.ref(t), b) for t, b in placed]
        self._owner = free_after(buf, [t for t, _ in placed])

    @property
    def alive(self):
        owner = self._owner()
        return owner is not None and owner.buf.alive

    def placed(self):
        """(tensor, backend number) of those that still lie here."""
        found = ((ref(), b) for ref, b in self._tensors)
        return [(t, b) for t, b in found if t is not None and int(TABLE.words[t.id, T_BUFFER]) == self.buf_id]

    def take_back(self):
        """The tensors have no memory again, as before."""
        for t, _ in self.placed():              # before the buffer is freed: a tensor in a freed buffer counts as lost
            unplace(t, self.buf_id)
        owner = self._owner()
        if owner is not None:
            owner.now()
