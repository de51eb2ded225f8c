"""MetaDevice: several devices as one, each with a part of every tensor (tensor parallelism).

    meta = gg.meta_device([cl.devices[0], cl.devices[1]], split)
    backend = meta.init_backend()

    the user's graph      h = mul_mat(up, x)       y = mul_mat(down, silu(h))      z = norm(y)
    device 0              rows 0..n/2 of h         its columns' sum of y     \\     z
    device 1              rows n/2..n              its columns' sum of y     / add  z

A device's graph has one node for each node of the user's, of its part of the tensor.  It runs in stretches that end
where results have to meet: summands are added, in the order of the devices, and parts that an op needs whole are
gathered; both pass through the host.  Memory of results is planned on each device by itself.

Where all devices are the same one (parts of the host's memory), they run one graph together: what is whole is there
once, sums and gathered results are nodes of it.
Source: ggml-backend-meta.cpp.
"""
import numpy as np

from ggjit.core.arguments import expect, expect_slot
from ggjit.core.backend import Backend, Device
from ggjit.core.buffer import Buffer, BufferType, as_bytes, place
from ggjit.core.slots import checked_int
from ggjit.cpu.device import CPU
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedRun, PlacedTensor, place_of
from ggjit.graphs.plan_cache import without_plans
from ggjit.meta.split import given, result_of, slice_offs, slice_shape
from ggjit.ops.core import machine
from ggjit.ops.core.errors import NotAllocated, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.split import MIRRORED, PARTIAL, period
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.context import Context, alloc_ctx_tensors
from ggjit.tensors.repeats import builders

TYPE_META = "meta"
MAX_DEVICES = 16


def meta_device(devices, split=None, name="META"):
    """One Device made of 2 to 16 others, tensors cut between them.

    split(t): how a leaf is cut: None, on every device whole; an axis 0 to 3, evenly; or (axis, sizes), elements for
    each device.  How a result is cut follows from that (`split` of ops/core/spec.py); where an op has no rule for parts
    it gets whole tensors on every device.  Products cut along axis 1 of their weights give the bits of one device where
    its kernels give a row the same bits in any number of rows; summands of those cut along axis 0 are added in the
    order of the devices.

        gg.meta_device(cl.devices, lambda t: {"up": 1, "down": 0}.get(t.name))

    Errors: ParamError, TypeMismatch.  Source: ggml_backend_meta_device.
    """
    devices = tuple(devices)
    for d in devices:
        expect(d, Device, "meta_device")
    if not 2 <= len(devices) <= MAX_DEVICES:
        raise ParamError(f"meta_device takes 2 to {MAX_DEVICES} devices, got {len(devices)}")
    if split is not None and not callable(split):
        raise TypeMismatch(f"meta_device: split is a function of a tensor, got {split!r}")
    return MetaDevice(devices, split or (lambda t: None), name)


class MetaDevice(Device):
    """`devices`: what it is made of; split(t): how a leaf is cut."""
    type = TYPE_META

    def __init__(self, devices, split, name):
        self.devices, self.split, self.name = devices, split, name
        self.is_async = any(d.is_async for d in devices)
        self.description = " + ".join(d.name for d in devices)
        # do they share all memory, so that one graph may compute the parts of all?
        self.is_one = all(d is devices[0] for d in devices) and devices[0].buffer_type().is_host()
        self._buffer_type = MetaBufferType(self)

    def memory(self):
        """Sums of the devices'."""
        return tuple(map(sum, zip(*(d.memory() for d in self.devices), strict=True)))

    def init_backend(self, params=""):
        together = self.devices[0].init_backend(params) if self.is_one else None
        return MetaBackend(self, [d.init_backend(params) for d in self.devices], together)

    def buffer_type(self):
        return self._buffer_type

    def supports_op(self, t):
        return all(d.supports_op(t) for d in self.devices)

    def supports_buft(self, buft):
        return buft is self._buffer_type or self.is_one and self.devices[0].supports_buft(buft)


class MetaBufferType(BufferType):
    """Memory in which every tensor has a part on each device."""

    def __init__(self, device):
        self.device, self.name = device, device.name
        self.bufts = [d.buffer_type() for d in device.devices]

    def alignment(self):
        return max(checked_int(b, "alignment") for b in self.bufts)

    def max_size(self):
        return min(checked_int(b, "max_size") for b in self.bufts)

    def is_host(self):
        return False

    def alloc_buffer(self, size):
        """A buffer without memory: parts of leaves are allocated when leaves are placed, parts of results by a run."""
        return MetaBuffer(self, size)


class Parts:
    """A tensor's parts: `state`, and a tensor on each device."""

    def __init__(self, state, tensors, kept=()):
        self.state, self.tensors, self.kept = state, tensors, kept

    def read(self, t):
        """The bytes of `t`, contiguous, put together."""
        if self.state == MIRRORED:
            return self.tensors[0].buffer.get_tensor(self.tensors[0])
        raws = [np.frombuffer(x.buffer.get_tensor(x), np.uint8) for x in self.tensors]
        if self.state == PARTIAL:
            raise NotSupported(f"{describe(t)}: its summands were not added")
        whole = period(t, t.nb, self.state)
        return np.concatenate([r.reshape(t.nbytes // whole, -1) for r in raws], 1).tobytes()

    def write(self, t, raw):
        """Bytes of all of `t` to its parts."""
        if self.state == MIRRORED:
            for x in dict.fromkeys(self.tensors):
                x.buffer.set_tensor(x, raw)
            return
        rows, at = np.frombuffer(raw, np.uint8).reshape(-1, period(t, t.nb, self.state)), 0
        for x in self.tensors:
            n = x.nbytes // len(rows)
            x.buffer.set_tensor(x, np.ascontiguousarray(rows[:, at:at + n]).reshape(-1))
            at += n


class MetaBuffer(Buffer):
    """What lies in it is found by tensor: leaves and inputs by init_tensor, results by the run that computed them."""

    n_changes = 0                       # how often parts of any buffer moved

    def __init__(self, buft, size):
        super().__init__(buft, size)
        self._parts = {}                # {(tensor's id, generation): Parts}

    def init_tensor(self, t):
        if t.view_src is None and t.op == OP.NONE:
            device = self.buft.device
            # a scheduler's copies are whole on every device; leaves are cut as the user says
            state = MIRRORED if isinstance(t, PlacedTensor) else given(t, device.split(t), len(device.devices))
            held = self._parts.get((t.id, t.generation))
            if held is None or held.state != state:     # a scheduler calls this whenever it looks up places
                self.computed({(t.id, t.generation): _allocated(t, state, device)})

    def init_view(self, t):
        """Nothing to do: a view has the memory of its base."""

    def parts(self, t):
        """Parts of a tensor that is no view.  Errors: NotAllocated."""
        found = self._parts.get((t.id, t.generation))
        if found is None:
            raise NotAllocated(f"{describe(t)} was not computed on {self.buft.device.name}, or its memory was given to "
                               f"another; compute it, or allocate it anew")
        return found

    def computed(self, parts):
        """Note where tensors are from now on, such as the results of a run: {(id, generation): Parts}."""
        if any(self._parts.get(key) is not p for key, p in parts.items()):
            self._parts.update(parts)
            MetaBuffer.n_changes += 1

    def get_tensor(self, t, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        direct = self._parts.get((t.id, t.generation))
        if direct is not None:
            return direct.read(t)[offset:offset + nbytes]
        begin = t.view_offs + offset
        return self.parts(t.base).read(t.base)[begin:begin + nbytes]

    def set_tensor(self, t, data, offset=0):
        raw, base = as_bytes(data), t.base
        parts, begin = self.parts(base), t.view_offs + offset
        if raw.size == base.nbytes:
            return parts.write(base, raw)
        whole = bytearray(parts.read(base))
        whole[begin:begin + raw.size] = raw.tobytes()
        return parts.write(base, np.frombuffer(whole, np.uint8))

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        self.set_tensor(t, np.full(t.nbytes - offset if nbytes is None else nbytes, value, np.uint8), offset)

    def copy_tensor(self, src, dst):
        return False

    def clear(self, value):
        for parts in self._parts.values():
            for x in parts.tensors:
                x.buffer.memset_tensor(x, value)

    def free(self):
        self._parts.clear()
        MetaBuffer.n_changes += 1
        super().free()


def _allocated(t, state, device):
    """The Parts of a leaf, in memory of their own."""
    tensors, kept = [], []
    for j, buft in enumerate(device.buffer_type().bufts):
        if j and device.is_one and not state.is_cut:
            tensors.append(tensors[0])
            continue
        ctx = Context()
        tensors.append(ctx.new_tensor(t.type, slice_shape(t, state, j)[0], name=t.name))
        kept.append((ctx, alloc_ctx_tensors(ctx, buft)))
    return Parts(state, tensors, kept)


class MetaBackend(Backend):
    """`backends`: one on each device; `together`: computes the parts of all, on all their threads, or None."""
    n_threads, abort_callback = 1, None
    reads_placements = True

    def __init__(self, device, backends, together):
        super().__init__(device)
        self.backends, self.together = backends, together
        if hasattr(together, "n_threads"):
            asked = [b.n_threads for b in backends]
            together.n_threads = max(*asked, min(sum(asked), machine.available_cores()))

    def graph_plan_create(self, graph, placement=None):
        """A plan: `compute()` runs the graph on every device.  A graph that reads host memory gets a Scheduler of this
        backend and the CPU, where not all devices are the CPU.  Errors: NotAllocated, NotSupported."""
        if self.together is None and not graph.placed and any(_is_host(t) for t in graph.leafs):
            return ScheduledPlan(Scheduler([self, CPU.init_backend()]), graph)
        return MetaPlan(self, graph, placement)

    def graph_compute(self, graph):
        """Run the graph.  Its plan is kept with it."""
        expect_slot(graph, "plans", "graph_compute takes a Graph; use gg.Graph(y)")
        if graph.placed:
            _run_of(self, graph).compute()
        else:
            graph.plans.get(self.device, lambda plan: graph.placement, lambda: self.graph_plan_create(graph)).compute()

    def synchronize(self):
        for b in self.backends:
            b.synchronize()

    def free(self):
        for b in self.backends:
            b.free()


def _is_host(t):
    where = t._where()
    return where is not None and where[0].buft.is_host()


def _run_of(backend, graph):
    """The MetaRun of a graph of placed tensors, made anew where leaves have other memory."""
    return graph.plans.get(backend, lambda run: run.is_current(), lambda: MetaRun(backend, graph))


class MetaPlan:
    """A user's graph on a MetaBackend: `compute()`, `numpy(t)`."""

    def __init__(self, backend, graph, placement):
        self.backend, self.graph = backend, without_plans(graph)
        self._placed = PlacedRun(backend, graph, placement or graph.placement)
        self._placed.bind()
        self.runs = 0

    def compute(self):
        self._placed.run(lambda backend, placed: _run_of(backend, placed).compute(), self._placed.graph)
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
            if self.is_one and not isinstance(t.buffer, MetaBuffer) and t.view_src is None:
                self._parts[t.id] = self._whole_leaf(t)
                continue
            if not isinstance(t.buffer, MetaBuffer):
                raise NotSupported(f"{describe(t)} lies in {t.buffer!r}, which {self.backend.name} cannot reach; use a "
                                   f"Scheduler")
            if t.view_src is not None:
                raise NotSupported(f"{describe(t)}: a leaf that views another; make the view an op (gg.view_1d)")
            self._leaves[t.id] = self._parts[t.id] = t.buffer.parts(t)
            self._leaf_tensors.append(t)
        for t in self.graph.nodes:
            if t.op == OP.NONE:                         # a parameter
                self._parts[t.id] = self._leaves[t.id] = t.buffer.parts(t)
                self._leaf_tensors.append(t)
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
            found = self._gathered[s.id] = _allocated(s, MIRRORED, self.backend.device)
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
