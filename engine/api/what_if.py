"""The memory of a graph if its memory were managed in another way: the rows of `gg.measure(graph, what_if=...)`.

    step       0    1    2    3    4
    kept      [==== weight =========)     as it is: weights and caches have memory of their own, beside the arena
    freed     [==== weight ==)            in the arena, given back behind the last node that reads it
    streamed       [= weight =)           in the arena, brought `streamed` nodes ahead of the first that reads it

Every row is planned by what would do it (plan_graph, Scheduler), on a copy of the graph's rows of the tensor table;
nothing is moved, allocated or computed.
"""
import collections
import dataclasses

import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.report import mib
from ggjit.api.null_device import NullDevice
from ggjit.core.arguments import nearest
from ggjit.core.buffer import BufferType
from ggjit.core.table import TABLE
from ggjit.core.versions import written
from ggjit.cpu.device import CPU, MAX_THREADS
from ggjit.graphs.requests import work_nbytes, work_room
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import FLAG_INPUT, OP, T_BUFFER, T_FLAGS, VIEW_OPS
from ggjit.ops.core.spec import in_place_table
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.sched.layout import add_work
from ggjit.sched.scheduler import Scheduler

DEFAULTS = {"freed": True, "streamed": 1, "grown": 4, "devices": 2, "in_place": True, "work": 1}   # what_if="all"
MOST = {"streamed": 1 << 20, "grown": 1 << 20, "devices": 64, "work": MAX_THREADS}
HALVINGS = 40                           # how often the interval that holds the largest share is halved
OPTIMISERS = (OP.OPT_STEP_ADAMW, OP.OPT_STEP_SGD)
# bytes in memory of its own, and in the arena; nodes that touch it, views left out; is it written, as a cache is?
Outside = collections.namedtuple("Outside", "tensor nbytes size first written is_cache")


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
    names = [what_if] if isinstance(what_if, str) else what_if
    if not isinstance(names, dict | list | tuple | set):
        raise TypeMismatch(f"what_if takes names or {{name: value}}, got {what_if!r}; names: all, "
                           f"{', '.join(DEFAULTS)}")
    asked = dict(names) if isinstance(names, dict) else {}
    for name in () if isinstance(names, dict) else names:
        if not isinstance(name, str):
            raise TypeMismatch(f"what_if: {name!r} is not a name; names: all, {', '.join(DEFAULTS)}; with values: "
                               f"what_if={{\"devices\": 4}}")
        asked |= DEFAULTS if name == "all" else {name: True}
    return {name: _checked(name, value) for name, value in asked.items()}


def _checked(name, value):
    if name not in DEFAULTS:
        hint = "; \"all\" stands alone or in a list" if name == "all" else ""
        raise ParamError(f"what_if {name!r}{nearest(str(name), DEFAULTS)}{hint}; names: all, {', '.join(DEFAULTS)}")
    if value is True:
        return DEFAULTS[name]
    if DEFAULTS[name] is True:
        raise ParamError(f"what_if {name}={value!r}: takes no number; give {name}=True, or leave it out")
    least = int(name != "streamed")
    if not is_whole(value, least, MOST[name]):
        raise ParamError(f"what_if {name}={value!r}: expected a whole number from {least} to {MOST[name]:,}; True for "
                         f"{DEFAULTS[name]}")
    return int(value)


def _n(count, thing):
    return f"{count} {thing}{'' if count == 1 else 's'}"


class GraphRows:
    """A PlanRequest on its own copy of the rows of the tensor table, and how it is planned.

    ids: row here -> row of the table; table, node_ids, leaf_ids, sizes: of the request
    """

    def __init__(self, request, options):
        self.request, self.ids = request.snapshot()
        self.table, self.node_ids, self.leaf_ids = self.request.table, self.request.node_ids, self.request.leaf_ids
        self.sizes, self.options = self.request.sizes, dataclasses.replace(options, remember=False)

    def rows_of(self, ids):
        return np.searchsorted(self.ids, np.array(ids, np.int64))

    def copy(self):
        out = object.__new__(GraphRows)
        out.__dict__.update(self.__dict__, table=self.table.copy())
        return out

    def without(self, rows):
        """Take rows out of the nodes and leaves."""
        for name, k in (("node_ids", 0), ("leaf_ids", 1)):
            keep = ~np.isin(getattr(self, name), rows)
            setattr(self, name, getattr(self, name)[keep])
            self.sizes = [s[keep] if j == k else s for j, s in enumerate(self.sizes)]

    def plan(self, seconds, **changes):
        request = dataclasses.replace(self.request, table=self.table, node_ids=self.node_ids, leaf_ids=self.leaf_ids,
                                      sizes=self.sizes)
        return plan_graph(request, dataclasses.replace(self.options, time_limit=seconds, **changes))


class Usage:
    """Which memory a graph's nodes touch.

    outside   {id of a tensor with memory of its own: Outside}
    touched   per node: ids of the outside tensors it touches, views left out
    """

    def __init__(self, graph, plan, buft, rows, repacked):
        self.graph, self.plan, self.nodes, self.buft, self.rows = graph, plan, graph.nodes, buft, rows
        self.repacked = repacked
        nodes, leafs = graph.nodes, graph.leafs
        placed = {t.id for t, a in zip(nodes, plan.node_alloc.tolist(), strict=True) if a >= 0}
        self.placed_leafs = {t.id for t, a in zip(leafs, plan.leaf_alloc.tolist(), strict=True)
                             if a >= 0 and t.view_src is None}
        placed |= self.placed_leafs
        self.outside, self.touched = {}, []
        for step, t in enumerate(nodes):
            beyond = [x for x in (t, *(s for s in t.src if s is not None)) if x.base.id not in placed]
            changed = {x.id for x in written(t)}
            self.touched.append(set() if t.op in VIEW_OPS else {x.base.id for x in beyond})
            for x in beyond if t.op not in VIEW_OPS else ():
                self._meet(x.base, step, x.base.id in changed, t.op not in OPTIMISERS)

    def _meet(self, base, step, is_written, grows):
        now = self.outside.get(base.id)
        if now is None:
            own, target = (self.padded(b, base) for b in (getattr(base.buffer, "buft", self.buft), self.buft))
            now = Outside(base, own, target, step, False, False)
        self.outside[base.id] = now._replace(written=now.written or is_written,
                                             is_cache=now.is_cache or is_written and grows)

    @staticmethod
    def padded(buft, t):
        return -(-buft.alloc_size(t) // buft.alignment()) * buft.alignment()

    @property
    def weights(self):
        """Outside tensors that the graph only reads, inputs left out."""
        return [o for o in self.outside.values() if not o.written and not _is_input(o.tensor)]

    def caches(self):
        """Bytes outside that the graph writes, parameters and their moments left out."""
        return sum(o.nbytes for o in self.outside.values() if o.is_cache)


def _is_input(t):
    return bool(TABLE.words[t.id, T_FLAGS] & FLAG_INPUT)


def _freed(u, _, seconds):
    weights, rows = u.weights, u.rows.copy()
    at = rows.rows_of([o.tensor.id for o in weights])
    rows.table[at, T_BUFFER] = -1
    rows.without(at)
    rows.leaf_ids = np.append(rows.leaf_ids, at)
    rows.sizes[1] = np.append(rows.sizes[1], [o.size for o in weights]).astype(np.int64)
    return (u.plan.peak + sum(o.nbytes for o in weights), rows.plan(seconds).peak, (),
            f"{_n(len(weights), 'weight')} in the arena, given back after their last use")


def _streamed(u, ahead, seconds):
    """Weights, and leaves of the arena that are no inputs, are nodes that stand ahead of their first reader."""
    weights, rows = u.weights, u.rows.copy()
    sizes = {o.tensor.id: o.size for o in weights}
    sizes |= {t.id: n for t, n in zip(u.graph.leafs, rows.sizes[1].tolist(), strict=True)
              if t.id in u.placed_leafs and not _is_input(t)}
    first, viewed = {}, {}
    for step, t in enumerate(u.nodes):
        for x in (t, *(s for s in t.src if s is not None)):
            (viewed if t.op in VIEW_OPS else first).setdefault(x.base.id, step)
    where = {i: min(max(first.get(i, 0) - ahead, 0), viewed.get(i, len(u.nodes))) for i in sizes}
    moved = sorted(sizes, key=where.get)
    at = rows.rows_of(moved)
    steps = np.array([where[i] for i in moved], np.int64)
    steps -= np.searchsorted(np.sort(np.flatnonzero(np.isin(rows.node_ids, at))), steps)        # parameters are nodes
    rows.table[at, T_BUFFER] = -1
    rows.without(at)
    rows.node_ids = np.insert(rows.node_ids, steps, at)
    rows.sizes[0] = np.insert(rows.sizes[0], steps, [sizes[i] for i in moved])
    return (u.plan.peak + sum(o.nbytes for o in weights), rows.plan(seconds).peak, (),
            f"{_n(len(sizes), 'weight')} brought {_n(ahead, 'node')} ahead of their first use")


def _grown(u, n, _):
    kv, arena = u.caches(), u.plan.peak
    if not kv:
        return arena, arena, (0,) * n, "the graph writes into no cache: nothing grows"
    steps = tuple(-(-kv * k // n) for k in range(1, n + 1))
    moving = steps[-1] + (steps[-2] if n > 1 else 0)
    return (arena + kv, arena + sum(steps) // n, steps,
            f"what the graph writes into, {mib(kv)}, in {_n(n, 'step')}: the mean while it fills; "
            f"{mib(moving)} while the last step is copied")


def _cut(u, limit, n):
    """[end of each run of nodes] of at most n runs whose share is about limit at most, or None."""
    live, ends, held, outside, most = u.plan.live().tolist(), [], set(), 0, 0
    for step, beyond in enumerate(u.touched):
        added, top = sum(u.outside[i].nbytes for i in beyond - held), max(most, live[step])
        if outside + added + top > limit and step > (ends[-1] if ends else 0):
            ends.append(step)
            held, outside, top = set(), 0, live[step]
            added = sum(u.outside[i].nbytes for i in beyond)
        if outside + added + top > limit or len(ends) >= n:
            return None
        held |= beyond
        outside, most = outside + added, top
    return [*ends, len(u.touched)]


class _Share(NullDevice):
    """One of several devices: it reads what lies outside, but no other one's arena.  like: the buffer type."""

    def __init__(self, like):
        super().__init__()
        self._buffer_type = _ShareType(self, like)

    def supports_buft(self, buft):
        return buft is self._buffer_type or not isinstance(buft, _ShareType)


class _ShareType(BufferType):
    name = "share"

    def __init__(self, device, like):
        self.device = device
        self.alignment, self.max_size, self.alloc_size = like.alignment, like.max_size, like.alloc_size

    def is_host(self):
        return False


def _shares(u, cuts, seconds):
    """Bytes of each device, the nodes cut behind `cuts`: what they touch outside, and an arena of their own."""
    planner = "best" if u.plan.planner == "best" else "ggml"
    backends = [_Share(u.buft).init_backend() for _ in cuts]
    sched = Scheduler(backends, planner=planner, time_limit=seconds, op_offload=False)
    held, pinned = [{} for _ in cuts], set()
    device_of = np.searchsorted(cuts, np.arange(len(u.nodes)), side="right").tolist()
    for t, k, beyond in zip(u.nodes, device_of, u.touched, strict=True):
        held[k] |= {i: u.outside[i].nbytes for i in beyond}
        for leaf in (s for s in t.src if s is not None and s.id in u.placed_leafs and s.id not in pinned):
            held[k][leaf.id] = u.padded(u.buft, leaf)           # on the first device that reads it; copies elsewhere
            sched.set_tensor_backend(leaf, backends[k])
            pinned.add(leaf.id)
        if t.view_src is None or t.base.id in u.outside:        # others compute in place in the memory of another node
            sched.set_tensor_backend(t, backends[k])
    arenas = sched.reserve_size(u.graph)
    return tuple(sum(own.values()) + arena for own, arena in zip(held, arenas, strict=True))


def _devices(u, n, seconds):
    whole = u.plan.peak + sum(o.nbytes for o in u.outside.values())
    low, high, cuts = 0, whole, [len(u.touched)]
    for _ in range(HALVINGS):
        if high - low <= 1:
            break
        limit = (low + high) // 2
        found = _cut(u, limit, n)
        low, high, cuts = (limit, high, cuts) if found is None else (low, limit, found)
    shares = _shares(u, cuts, seconds) if len(cuts) > 1 else (whole,)
    if max(shares) >= whole:
        cuts, shares = cuts[-1:], (whole,)
    at = f"cut behind {'nodes' if len(cuts) > 2 else 'node'} {', '.join(str(c - 1) for c in cuts[:-1])}: " \
         f"{', '.join(map(mib, shares))}" if len(cuts) > 1 else "no cut makes it smaller"
    return whole, max(shares), shares, f"the largest share of {_n(n, 'device')}, {at}"


def works(nodes, n_threads, repacked=()):
    """[bytes that the CPU's kernel of each node works in]; repacked: ids of leaves that will lie in CPU_REPACK."""
    backend, out = CPU.init_backend(f"n_threads={n_threads}"), []
    for t in nodes:
        if repacked and t.op not in VIEW_OPS and any(s is not None and s.id in repacked for s in t.src):
            kernel = repack.kernel(t, n_threads)
            out.append(0 if kernel is None else kernel.work_nbytes)
        else:
            out.append(work_nbytes(backend, t))
    return out


def _work(u, n_threads, seconds):
    """Work memory of the CPU's kernels, placed for each node by itself."""
    nbytes = works(u.nodes, n_threads, u.repacked)
    most, rows = max(nbytes, default=0), u.rows.copy()
    workers = [i for i, n in enumerate(nbytes) if n]
    first = len(rows.table)
    rows.table = np.concatenate([rows.table, np.empty((2 * len(workers), rows.table.shape[1]), np.int64)])
    room = np.zeros(len(rows.table), np.int64)
    room[rows.node_ids] = rows.sizes[0]
    room[first:] = np.repeat([work_room(nbytes[i], u.buft) for i in workers], 2)
    rows.node_ids = add_work(rows.table, rows.node_ids, rows.node_ids[workers].tolist(), first)
    rows.sizes = [room[rows.node_ids], rows.sizes[1]]
    beside = u.plan.peak + most
    return (beside, min(rows.plan(seconds).peak, beside) if workers else beside, (),
            f"what kernels with {_n(n_threads, 'thread')} work in, {mib(most)} at most, in the arena instead of beside")


def _in_place(u, _, seconds):
    apart = u.rows.plan(seconds, in_place=np.zeros_like(in_place_table()))
    return apart.peak, u.plan.peak, (), f"{_n(u.plan.n_in_place, 'node')} in the memory of a source, none before"


ROWS = {"freed": _freed, "streamed": _streamed, "grown": _grown, "devices": _devices, "in_place": _in_place,
        "work": _work}


def rows(asked, plan, graph, buft, request, options, repacked=()):
    """[WhatIf] for checked(what_if).  request, options: what `plan` was made of; graph: in the order of that plan;
    repacked: ids of leaves that will lie in CPU_REPACK."""
    usage = Usage(graph, plan, buft, GraphRows(request, options), repacked)
    seconds = options.time_limit / max(len(asked), 1)
    return [WhatIf(name, value, *ROWS[name](usage, value, seconds)) for name, value in asked.items()]
