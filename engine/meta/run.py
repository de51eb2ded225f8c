"""Runs a graph on the parts of a meta device: a graph for each device, in stretches that end where devices exchange
results."""
import numpy as np

from ggjit.core.buffer import place
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedRun, PlacedTensor, place_of
from ggjit.graphs.plan_cache import without_plans
from ggjit.meta.parts import MetaBuffer, Parts, allocated
from ggjit.meta.split import result_of, slice_offs, slice_shape
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.split import MIRRORED, PARTIAL
from ggjit.tensors.context import Context
from ggjit.tensors.repeats import builders


def run_of(backend, graph):
    """The MetaRun of a graph of placed tensors, made again where leaves have other memory."""
    return graph.plans.get(backend, lambda run: run.is_current(), lambda: MetaRun(backend, graph))


class MetaPlan:
    """A user's graph on a MetaBackend: `compute()`, `numpy(t)`."""

    def __init__(self, backend, graph, placement):
        self.backend, self.graph = backend, without_plans(graph)
        self._placed = PlacedRun(backend, graph, placement or graph.placement)
        self._placed.bind()
        self.runs = 0

    def compute(self):
        self._placed.run(lambda backend, placed: run_of(backend, placed).compute(), self._placed.graph)
        self.runs += 1

    def numpy(self, t):
        """The values of `t` as the last run left them.  Errors: NotAllocated, Overwritten."""
        self._placed.check_intact(t)
        where = self._placed.where(t)
        return t.numpy() if where is None else PlacedTensor(t, t.src, where).numpy()

    def view(self, t):
        """The same, read-only."""
        a = self.numpy(t)
        a.flags.writeable = False
        return a


class MetaRun:
    """A graph of placed tensors as graphs of the devices, in stretches between which results meet."""

    def __init__(self, backend, graph):
        self.backend, self.graph = backend, graph
        self.n, self.is_one = len(backend.backends), backend.together is not None
        self._backends = [backend.together] if self.is_one else backend.backends
        self._ctxs = [Context() for _ in range(self.n)]
        self._parts, self._leaves = {}, {}      # by tensor's id: Parts
        self._steps, self._gathered = [], {}    # [(first, end)] of stretches and functions between them
        self._host = {}                         # by tensor's id: its summands as arrays, where they are host memory
        # of each backend: (node, number in `_computed` of the node whose result it has, or None)
        self._nodes, self._first = [[] for _ in self._backends], 0
        self._waiting = [[] for _ in range(self.n)]
        self._build()
        self._plan()
        self._n_changes, self._n_published = MetaBuffer.n_changes, -1

    def is_current(self):
        """Are the leaves' parts still the ones it was made with?"""
        if any(t._where() != where for t, where in self._hosted):
            return False
        if self._n_changes == MetaBuffer.n_changes:
            return True
        now = MetaBuffer.n_changes
        if any(t.buffer.parts(t) is not self._leaves[t.id] for t in self._leaf_tensors):
            return False
        self._n_changes = now
        return True

    # ------------------------------------------------------------ making
    def _build(self):
        self._computed = []                     # the user's nodes, in the order of each device's
        self._leaf_tensors, self._hosted = [], []       # the latter: (leaf in host memory, its place)
        for t in self.graph.leafs:
            self._add_leaf(t)
        for t in self.graph.nodes:
            if t.op == OP.NONE:                         # a parameter
                self._add_leaf(t)
                continue
            of = len(self._computed)
            self._computed.append(t)
            try:
                state = result_of(t, [None if s is None else self._parts[s.id].state for s in t.src])
                sources = [None if s is None else self._parts[s.id].tensors for s in t.src]
                self._parts[t.id] = self._part_nodes(t, state, sources, of)
            except NotSupported:
                if t.view_src is not None and self._root(t).state != MIRRORED:
                    raise
                sources = [None if s is None else self._whole(s, t) for s in t.src]
                self._parts[t.id] = self._part_nodes(t, MIRRORED, sources, of)
            if self._parts[t.id].state == PARTIAL and self.is_one:
                self._parts[t.id] = self._added_here(self._parts[t.id], of)
            elif self._parts[t.id].state == PARTIAL:
                self._end_stretch(self._added, t)
                self._parts[t.id].state = MIRRORED
        self._put_waiting()
        self._end_stretch()

    def _add_leaf(self, t):
        """Note the parts of a leaf or parameter.  Errors: NotSupported for one in memory of another device."""
        if self.is_one and not isinstance(t.buffer, MetaBuffer) and t.view_src is None:
            self._parts[t.id] = self._whole_leaf(t)
            return
        if not isinstance(t.buffer, MetaBuffer):
            raise NotSupported(f"{describe(t)} lies in {t.buffer!r}, which {self.backend.name} cannot reach; use a "
                               f"Scheduler")
        if t.view_src is not None:
            raise NotSupported(f"{describe(t)}: a leaf that views another; make the view an op (gg.view_1d)")
        self._leaves[t.id] = self._parts[t.id] = t.buffer.parts(t)
        self._leaf_tensors.append(t)

    def _whole_leaf(self, t):
        """Parts of a leaf in host memory, where all devices read it."""
        buf, offs = where = t._where()
        params = tuple(int(p) for p in t.op_params)
        x = self._ctxs[0]._add(t.type, OP.NONE, t.ne, t.nb, t.ndim, params, (), None, 0, t.name)
        place(x, buf, offs)
        self._hosted.append((t, where))
        return Parts(MIRRORED, [x] * self.n)

    def _root(self, t):
        return self._parts.get(t.view_src.id) or MIRRORED_PARTS

    def _part_nodes(self, t, state, sources, of, root=None):
        """The node of each device for node `t`; of: its number; root: Parts of what it views, if not those of the
        base."""
        of_view = t.view_src is not None
        root = root or (self._parts.get(t.view_src.id) if of_view else None)
        if of_view and (root is None or t.op not in VIEW_OPS and root.state != state):
            raise NotSupported(f"{describe(t)} works in the memory of {describe(t.view_src)}, which is cut otherwise")
        made, of = [], None if state == PARTIAL and self.is_one else of
        for j in range(1 if self.is_one and state == MIRRORED else self.n):
            ne, nb = slice_shape(t, state, j)
            if not of_view and state.is_cut and not is_contiguous(t):
                raise NotSupported(f"{describe(t)} is not contiguous")
            view = root.tensors[j] if of_view else None
            offs = slice_offs(t, t.view_src, root.state, j) if of_view else 0
            src = tuple(None if s is None else s[j] for s in sources)
            made.append(self._ctxs[j]._add(t.type, t.op, ne, nb, t.ndim, tuple(int(p) for p in t.op_params), src, view,
                                           offs, t.name))
        if self.is_one and state == MIRRORED and t.op not in VIEW_OPS:
            self._put_waiting()
        for j, x in enumerate(made):
            (self._waiting if self.is_one and state != MIRRORED else self._nodes)[j].append((x, of))
        return Parts(state, made if len(made) == self.n else made * self.n)

    def _put_waiting(self):
        """Nodes of one device after the other: neighbours may become one kernel."""
        for nodes in self._waiting:
            self._nodes[0] += nodes
            nodes.clear()

    def _here(self, of, x):
        """The Parts of a node of the graph that is computed for all devices."""
        self._put_waiting()
        self._nodes[0].append((x, of))
        return Parts(MIRRORED, [x] * self.n)

    def _added_here(self, parts, of):
        total, *rest = parts.tensors
        with self._ctxs[0]:
            for x in rest:
                total = builders()["add"](total, x)
                last = self._here(of if x is rest[-1] else None, total)
        return last

    def _gathered_here(self, s):
        whole, *rest = self._parts[s.id].tensors
        with self._ctxs[0]:
            for x in rest:
                whole = builders()["concat"](whole, x, self._parts[s.id].state.axis)
                last = self._here(None, whole)
        return last

    def _whole(self, s, reader):
        """The tensors of `s`, whole on every device: gathered where it is cut.  reader: the node that has no rule."""
        parts = self._parts[s.id]
        if parts.state == MIRRORED:
            return parts.tensors
        found = self._gathered.get(s.id)
        if found is not None:
            return found.tensors
        if s.op in VIEW_OPS and s.view_src is not None:                 # the same view of the gathered tensor
            root = Parts(MIRRORED, self._whole(s.view_src, reader))
            sources, of = [self._whole(s.src[0], reader)], len(self._computed)
            self._computed.append(s)
            found = self._gathered[s.id] = self._part_nodes(s, MIRRORED, sources, of, root)
            return found.tensors
        if not is_contiguous(s) or s.id in self._leaves or s.view_src is not None:
            raise NotSupported(f"{describe(s)} is cut, and {reader!r} has no rule for its parts; cut it otherwise")
        if self.is_one:
            found = self._gathered[s.id] = self._gathered_here(s)
        else:
            found = self._gathered[s.id] = allocated(s, MIRRORED, self.backend.device,
                                                          self.backend.default_buffer_type.bufts)
            self._end_stretch(self._gather, s, found)
        return found.tensors

    def _end_stretch(self, then=None, *about):
        end = len(self._nodes[0])
        if end > self._first:
            self._steps.append((self._first, end))
            self._first = end
        if then is not None:
            self._steps.append((then, about))

    def _plan(self):
        """Memory on each device for the results, and plans of the stretches."""
        self._graphs, self._allocators = [], []
        self._stays = self._staying()
        for b, pairs in zip(self._backends, self._nodes, strict=True):
            nodes = [x for x, _ in pairs]
            computed = {x.id for x in nodes}
            leafs = list({s.id: s for x in nodes for s in x.src if s is not None and s.id not in computed}.values())
            whole = Graph._in_order(nodes[-1:], nodes, leafs)
            whole._keep([x for x, of in pairs if of is not None and self._stays[of]])
            whole.is_read = False
            allocator = GraphAllocator(b)
            allocator.alloc_graph(whole)
            self._graphs.append(whole)
            self._allocators.append(allocator)
        self._stretches = [([(self._backends[0], self._graphs[0])], None)] if self.is_one else []
        for step in () if self.is_one else self._steps:
            if callable(step[0]):
                self._stretches.append(step)
                continue
            first, end = step
            parts = []
            for b, whole in zip(self._backends, self._graphs, strict=True):
                nodes = whole.nodes[first:end]
                computed = {x.id for x in nodes}
                leafs = list({s.id: s for x in nodes for s in x.src if s is not None and s.id not in computed}.values())
                part = Graph._in_order(nodes[-1:], nodes, leafs)
                part._keep(nodes)
                part.placement = whole.placement
                parts.append((b, part))
            self._stretches.append((parts, None))
        for parts in self._parts.values():
            parts.placed = [self._at(j, x) for j, x in enumerate(parts.tensors)]

        self._published = [(t.buffer, {(t.id, t.generation): Parts(self._parts[t.id].state, self._parts[t.id].placed,
                                                                   (self,))})
                           for t, stays in zip(self._computed, self._stays, strict=True) if stays]

    def _staying(self):
        """[does the node's result stay to the end, or until it is gathered?] by where the user's graph has it."""
        where = [(id(t.buffer), t.offs, t.offs + t.nbytes) for t in self._computed]
        rows = np.array(where, np.int64).reshape(-1, 3)
        writes = np.array([t.op not in VIEW_OPS for t in self._computed])
        return [t.id in self._gathered or not bool((writes[i + 1:] & (rows[i + 1:, 0] == m) & (rows[i + 1:, 1] < hi)
                                                    & (lo < rows[i + 1:, 2])).any())
                for i, (t, (m, lo, hi)) in enumerate(zip(self._computed, where, strict=True))]

    def _at(self, j, x):
        return PlacedTensor(x, (), place_of(self._graphs[j % len(self._graphs)].placement, x))

    # ------------------------------------------------------------ running
    def compute(self):
        for what, about in self._stretches:
            if callable(what):
                what(*about)
                continue
            for b, part in what:
                b.graph_compute(part)
        if self._n_published != MetaBuffer.n_changes:
            for buf, parts in self._published:
                buf.computed(parts)
            self._n_published = MetaBuffer.n_changes

    def _added(self, t):
        """Every device gets the sum of all summands, added in the order of the devices."""
        self.backend.synchronize()
        placed, in_place = self._parts[t.id].placed, self._host.get(t.id)
        if in_place is None and all(x.buffer.buft.is_host() for x in placed):
            in_place = self._host[t.id] = [
                x.buffer.host_bytes(x.offs, x.nbytes, write=True).view(np.float32) for x in placed]
        first, *rest = in_place or [np.frombuffer(x.buffer.get_tensor(x), np.float32) for x in placed]
        total = first if in_place else first.copy()
        for a in rest:
            total += a
        for x, a in zip(placed[1:], rest, strict=True):
            if in_place:
                a[...] = total
            else:
                x.buffer.set_tensor(x, total.view(np.uint8))
        if not in_place:
            placed[0].buffer.set_tensor(placed[0], total.view(np.uint8))

    def _gather(self, s, into):
        """Every device gets all of `s`."""
        self.backend.synchronize()
        parts = self._parts[s.id]
        into.write(s, np.frombuffer(Parts(parts.state, parts.placed).read(s), np.uint8))


MIRRORED_PARTS = Parts(MIRRORED, ())
