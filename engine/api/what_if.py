"""What a graph would need if its memory were managed otherwise: the rows of `gg.measure(graph, what_if=...)`.

    step       0    1    2    3    4
    kept      [==== weight =========)     as it is: weights and caches have memory of their own, beside the arena
    freed     [==== weight ==)            in the arena, given back behind the last node that reads it
    streamed       [= weight =)           in the arena, brought `streamed` nodes ahead of the first that reads it

Every row is a plan of numbers (ggjit.alloc.plan_offsets); nothing is moved, allocated or computed.
"""
import collections
import dataclasses

import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.planners import plan_offsets
from ggjit.alloc.report import mib
from ggjit.core.arguments import nearest
from ggjit.core.table import TABLE
from ggjit.cpu.repacked import kernel_of
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import FLAG_INPUT, OP, T_FLAGS, VIEW_OPS
from ggjit.ops.core.spec import in_place_table
from ggjit.ops.core.whole_numbers import is_whole

DEFAULTS = {"freed": True, "streamed": 1, "grown": 4, "devices": 2, "in_place": True, "work": 1}   # what_if="all"
HALVINGS = 40                           # of the interval in which the largest share lies
Outside = collections.namedtuple("Outside", "nbytes first last written is_input")


@dataclasses.dataclass(frozen=True, slots=True)
class WhatIf:
    """name, value: as asked for; before, nbytes: the same bytes as things are and if; parts: bytes, see `measure`."""
    name: str
    value: int
    before: int
    nbytes: int
    parts: tuple
    text: str

    def __str__(self):
        return f"{mib(self.before)} -> {mib(self.nbytes)}: {self.text}"


def checked(what_if):
    """{name: value} of the argument what_if.  Errors: TypeMismatch, ParamError."""
    if isinstance(what_if, str):
        what_if = DEFAULTS if what_if == "all" else [what_if]
    if not isinstance(what_if, dict | list | tuple | set):
        raise TypeMismatch(f"what_if takes names or {{name: value}}, got {what_if!r}; names: {', '.join(DEFAULTS)}")
    asked = what_if if isinstance(what_if, dict) else {name: DEFAULTS.get(name) for name in what_if}
    for name, value in asked.items():
        if name not in DEFAULTS:
            raise ParamError(f"what_if {name!r}{nearest(str(name), DEFAULTS)}; names: all, {', '.join(DEFAULTS)}")
        if value is not True and not is_whole(value, 0 if name == "streamed" else 1, 1 << 20):
            raise ParamError(f"what_if {name}={value!r}: expected a whole number >= {int(name != 'streamed')}")
    return {name: int(DEFAULTS[name] if value is True else value) for name, value in asked.items()}


def _is_input(t):
    return bool(TABLE.words[t.id, T_FLAGS] & FLAG_INPUT)


class Usage:
    """Which memory a graph's nodes touch.

    boxes     (3, n) first step, end and bytes of the arena's allocations
    outside   {id of a tensor with memory of its own: Outside}
    touched   per node: (allocations, ids of outside tensors)
    """

    def __init__(self, plan, nodes, leafs, buft):
        self.plan, self.nodes, self.leafs, self.buft = plan, nodes, leafs, buft
        self.boxes = np.stack([plan.a_lo, plan.a_hi, plan.a_size])
        self.alloc = dict(zip([t.id for t in (*nodes, *leafs)],
                              [*plan.node_alloc.tolist(), *plan.leaf_alloc.tolist()], strict=True))
        self.outside, self.touched = {}, []
        for step, t in enumerate(nodes):
            inside, beyond = set(), set()
            for x in (t, *(s for s in t.src if s is not None)):
                a = self.alloc.get(x.base.id, -1)
                if a >= 0:
                    inside.add(a)
                elif t.op not in VIEW_OPS:
                    beyond.add(x.base.id)
                    self._meet(x.base, step, x is t)
            self.touched.append((inside, beyond))

    def _meet(self, base, step, written):
        now = self.outside.get(base.id) or Outside(self._padded(self.buft.alloc_size(base)), step, step, False,
                                                   _is_input(base))
        self.outside[base.id] = now._replace(last=step, written=now.written or written)

    def _padded(self, nbytes):
        return -(-nbytes // self.buft.alignment()) * self.buft.alignment()

    @property
    def weights(self):
        """Outside tensors that the graph only reads, inputs left out."""
        return [o for o in self.outside.values() if not o.written and not o.is_input]

    def caches(self):
        """Bytes outside that the graph writes."""
        return sum(o.nbytes for o in self.outside.values() if o.written)

    def streamed(self, ahead):
        """The boxes, those of leaves beginning so many nodes ahead of their first reader."""
        boxes = self.boxes.copy()
        first = {}
        for step, (inside, _) in enumerate(self.touched):
            for a in inside:
                first.setdefault(a, step)
        for t in self.leafs:
            a = self.alloc[t.id]
            if a >= 0 and not _is_input(t):
                boxes[0, a] = max(boxes[0, a], first.get(a, 0) - ahead)
        return boxes


def _placed(boxes, seconds):
    return plan_offsets(*boxes, time_limit=seconds).peak


def _with(boxes, more):
    return np.concatenate([boxes, np.array(more, np.int64).reshape(-1, 3).T], axis=1)


def _freed(u, _, seconds):
    weights = sum(o.nbytes for o in u.weights)
    after = _placed(_with(u.boxes, [(0, o.last + 1, o.nbytes) for o in u.weights]), seconds)
    return u.plan.peak + weights, after, (), f"{len(u.weights)} weights in the arena, given back after their last use"


def _streamed(u, ahead, seconds):
    weights = sum(o.nbytes for o in u.weights)
    boxes = _with(u.streamed(ahead), [(max(o.first - ahead, 0), o.last + 1, o.nbytes) for o in u.weights])
    return (u.plan.peak + weights, _placed(boxes, seconds), (),
            f"{len(u.weights)} weights brought {ahead} nodes ahead of their first use")


def _grown(u, n, _):
    kv, arena = u.caches(), u.plan.peak
    steps = tuple(-(-kv * k // n) for k in range(1, n + 1))
    moving = steps[-1] + (steps[-2] if n > 1 else 0)
    return (arena + kv, arena + sum(steps) // n, steps,
            f"what the graph writes into, {mib(kv)}, in {n} steps: the mean while it fills; "
            f"{mib(moving)} while the last step is copied")


def _cut(u, limit, n):
    """[end of each run of nodes] of at most n runs whose share is at most limit, or None."""
    live, ends, held, most = u.plan.live().tolist(), [], set(), 0
    for step, (_, beyond) in enumerate(u.touched):
        new = held | beyond
        top = max(most, live[step])
        if sum(u.outside[i].nbytes for i in new) + top > limit and step > (ends[-1] if ends else 0):
            ends.append(step)
            new, top = set(beyond), live[step]
        if sum(u.outside[i].nbytes for i in new) + top > limit or len(ends) >= n:
            return None
        held, most = new, top
    return [*ends, len(u.touched)]


def _share(u, lo, hi, seconds):
    """Bytes of a device that computes nodes lo..hi - 1: what they touch outside, and an arena of their own."""
    last, held, boxes = {}, set(), []
    for step in range(lo, hi):
        inside, beyond = u.touched[step]
        held |= beyond
        for a in inside:
            last[a] = (last[a][0] if a in last else step, step)
    for a, (first, end) in last.items():
        boxes.append((min(first, max(int(u.boxes[0, a]), lo)), hi if u.boxes[1, a] > hi else end + 1, u.boxes[2, a]))
    return sum(u.outside[i].nbytes for i in held) + _placed(np.array(boxes, np.int64).reshape(-1, 3).T, seconds)


def _devices(u, n, seconds):
    whole = u.plan.peak + sum(o.nbytes for o in u.outside.values())
    low, high, cuts = 0, whole, [len(u.touched)]
    for _ in range(HALVINGS):
        if high - low <= 1:
            break
        limit = (low + high) // 2
        found = _cut(u, limit, n)
        low, high, cuts = (limit, high, cuts) if found is None else (low, limit, found)
    shares = tuple(_share(u, lo, hi, seconds / n) for lo, hi in zip([0, *cuts[:-1]], cuts, strict=True))
    return (whole, max(shares), shares, f"the largest share of {len(shares)} devices, cut behind nodes "
            f"{', '.join(str(c - 1) for c in cuts[:-1]) or 'none'}: {', '.join(map(mib, shares))}")


def _work(u, n_threads, seconds):
    """Work buffers of the CPU's kernels, each live for its own node."""
    work = []
    for step, t in enumerate(u.nodes):
        kernel = kernel_of(t, n_threads) if t.op not in VIEW_OPS and t.op != OP.NONE else None
        if kernel is not None and kernel.work_nbytes:
            work.append((step, step + 1, -(-kernel.work_nbytes // u.buft.alignment()) * u.buft.alignment()))
    most = max((w[2] for w in work), default=0)
    return (u.plan.peak + most, min(_placed(_with(u.boxes, work), seconds), u.plan.peak + most), (),
            f"work buffers of kernels with {n_threads} threads, {mib(most)} at most, in the arena instead of beside it")


ROWS = {"freed": _freed, "streamed": _streamed, "grown": _grown, "devices": _devices, "work": _work}


def rows(asked, plan, nodes, leafs, buft, arguments, time_limit):
    """[WhatIf] for checked(what_if).  arguments: (arguments, options) of the plan_graph call that made `plan`."""
    usage, out = Usage(plan, nodes, leafs, buft), []
    seconds = time_limit / max(len(asked), 1)
    for name, value in asked.items():
        if name == "in_place":
            args, options = arguments
            apart = plan_graph(*args, **options | {"planner": "best", "in_place": np.zeros_like(in_place_table()),
                                                   "time_limit": seconds})
            found = (apart.peak, plan.peak, (), f"{plan.n_in_place} nodes in the memory of a source, none before")
        else:
            found = ROWS[name](usage, value, seconds)
        out.append(WhatIf(name, value, *found))
    return out
