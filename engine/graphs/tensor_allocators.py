"""Allocators that place tensors one at a time: ggml's of 2023 and its current one.

    TensorAllocator     best fit with free: alloc(t), free_tensor(t), reset()
    BumpAllocator       a pointer that only moves up: alloc(t)
    Allocr              a TensorAllocator and the graph allocator of 2023 over it: measure, allocate, place a graph

Offsets come from `ggjit.alloc`, which knows only ids and sizes (alloc/ggml/bump.py, alloc/ggml/legacy/); here they
become places of tensors in buffers.  New programs use `alloc_ctx_tensors` and `GraphAllocator`.
"""
import weakref

import numpy as np

from ggjit.alloc.ggml.bump import Bump
from ggjit.alloc.ggml.legacy.graph_alloc_2023 import GraphAllocator2023
from ggjit.alloc.ggml.legacy.tensor_alloc import BestFit
from ggjit.core.arguments import buffer_size, expect
from ggjit.core.backend import Backend, host_array
from ggjit.core.buffer import Buffer, BufferType, as_bytes, init_placed, place, require_unplaced, tensor_alloc
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.core.lifetime import Handle
from ggjit.core.placing import unplace
from ggjit.core.slots import alloc_buffer, checked_int
from ggjit.core.table import TABLE
from ggjit.graphs.allocator import Placement
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.ops.core.errors import IndexRangeError, OutOfMemory, ParamError, StaleHandle
from ggjit.ops.core.record import OP, T_BUFFER
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.tensor import Tensor


class BumpAllocator:
    """Places tensors one after the other in a buffer that the caller owns (ggml_tallocr since 2024).

        tallocr = gg.BumpAllocator(buf)
        tallocr.alloc(t)                        t.buffer is buf
    """

    def __init__(self, buffer):
        self.buffer = expect(buffer, Buffer, "BumpAllocator")
        self._places = Bump(buffer.size, checked_int(buffer.buft, "alignment"), buffer.base)

    @property
    def offs(self):
        """Bytes used so far, padding included."""
        return self._places.offs

    def alloc(self, t):
        """Place `t` behind the tensors before it.  Errors: ParamError (a view, or it has memory), OutOfMemory."""
        require_unplaced(expect(t, Tensor, "alloc"))
        before = self._places.offs
        offs = self._places.alloc(checked_int(self.buffer.buft, "alloc_size", t, least=t.nbytes), describe(t))
        try:
            tensor_alloc(self.buffer, t, offs)
        except BaseException:
            self._places.offs = before
            raise


class TensorAllocator(Handle):
    """Best fit with free over one buffer (ggml_tallocr of 2023).

    target      a Buffer of the caller's; or a Backend or BufferType: with `size` it allocates a buffer of that many
                bytes and owns it, without it measures: tensors get no memory, `max_size` says what they would take
    alignment   bytes, a multiple of the buffer type's (the default)

        talloc = gg.TensorAllocator(cpu, 1 << 20)
        talloc.alloc(t)
        talloc.free_tensor(t)
    """

    def __init__(self, target, size=None, alignment=None):
        buft = target.default_buffer_type if isinstance(target, Backend) else target
        if isinstance(target, Buffer):
            if size is not None:
                raise ParamError(f"TensorAllocator: {target!r} has a size already; give a backend or buffer type")
            buft = target.buft
        self.buft = expect(buft, BufferType, "TensorAllocator")
        least = checked_int(buft, "alignment")
        alignment = least if alignment is None else alignment
        if not is_whole(alignment, 1) or alignment % least:
            raise ParamError(f"alignment {alignment!r}: expected a multiple of {least}, which {buft.name} needs")
        self.owned = size is not None
        self.buffer = target if isinstance(target, Buffer) else \
            alloc_buffer(buft, buffer_size(size)) if self.owned else None
        where = dict(base=None) if self.buffer is None else dict(size=self.buffer.size, base=self.buffer.base)
        self._places = BestFit(alignment=alignment, **where)
        self._tensors = {}                      # id -> weak reference to the tensor placed under it
        # id -> weak reference to a tensor that was given back and not placed again
        self._given_back = {}

    is_measure = property(lambda self: self._places.is_measure, doc="True: it counts bytes and gives no memory.")
    max_size = property(lambda self: self._places.max_size, doc="Highest end of any tensor so far, in bytes.")
    blocks = property(lambda self: self._places.blocks, doc="Free blocks as (offs, size), by address.")
    alignment = property(lambda self: self._places.alignment, doc="Bytes: places are multiples of this.")

    def _check(self):
        if not self.is_measure and (self.buffer is None or not self.buffer.alive):
            raise StaleHandle("the buffer of this allocator was freed; make another allocator")

    def needed_nbytes(self, t):
        """Bytes that the buffer type asks for the tensor."""
        return checked_int(self.buft, "alloc_size", t, least=t.nbytes)

    def alloc(self, t):
        """Give `t` the smallest free block that holds it, the untouched tail last; its buffer's init_tensor is called.

        Errors: ParamError (a view, or it has memory), OutOfMemory; nothing changes then.
        """
        self._check()
        require_unplaced(expect(t, Tensor, "alloc"))
        need = self.needed_nbytes(t)
        try:
            offs = self._places.alloc(t.id, need)
        except (OutOfMemory, ParamError):
            if not self._drop_dead():
                raise
            offs = self._places.alloc(t.id, need)
        try:
            if not self.is_measure:
                tensor_alloc(self.buffer, t, offs)
        except BaseException:
            self._places.free_id(t.id)
            raise
        self._tensors[t.id] = weakref.ref(t)
        self._given_back.pop(t.id, None)

    def _drop_dead(self):
        """Give back the places of tensors whose contexts are gone.  Returns whether there was any."""
        dead = [i for i in self._places.live if not _is_alive(self._tensors.get(i))]
        for i in dead:
            self._places.free_id(i)
            self._tensors.pop(i, None)
        return bool(dead)

    def is_own(self, t):
        """Does `t` lie in this allocator's buffer?"""
        held = self._tensors.get(t.id)
        return held is not None and _is_alive(held) and held().generation == t.generation and \
            (self.is_measure or int(TABLE.words[t.id, T_BUFFER]) == self.buffer.id)

    def free_tensor(self, t):
        """Give the place of `t` back; tensors of other buffers are left alone.

        Its buffer's free_tensor is called first.  Errors: IndexRangeError for a tensor that was given back.
        """
        self._check()
        expect(t, Tensor, "free_tensor")._check()
        if not self.is_own(t):
            given = self._given_back.get(t.id)
            if given is not None and given() is t and int(TABLE.words[t.id, T_BUFFER]) < 0:
                raise IndexRangeError(f"{describe(t)} was given back already")
            return
        if not self.is_measure:
            self.buffer.free_tensor(t)
            unplace(t, self.buffer.id)
        self._places.free_id(t.id)
        self._given_back[t.id] = self._tensors.pop(t.id)

    def reset(self):
        """All tensors lose their places, the buffer forgets what it knew about them; `max_size` stays."""
        self._check()
        for ref in self._tensors.values():
            if _is_alive(ref) and not self.is_measure:
                unplace(ref(), self.buffer.id)
        self._tensors.clear()
        self._given_back.clear()
        self._places.reset()
        if not self.is_measure:
            self.buffer.reset()

    def free(self):
        """Free the buffer if it is this allocator's own; a second call does nothing."""
        buffer, self.buffer = self.buffer, None
        if self.owned and buffer is not None:
            buffer.free()


def _is_alive(ref):
    t = None if ref is None else ref()
    return t is not None and t.ctx.alive


class Allocr(Handle):
    """`ggml_allocr`: a TensorAllocator and ggml's graph allocator of 2023 that goes on from its state.

        measure = gg.Allocr.new_measure_from_backend(cpu)
        size = measure.alloc_graph(graph)               how much the graph needs; nothing gets memory
        allocr = gg.Allocr.new_from_backend(cpu, size)
        allocr.alloc(x)                                 optional: inputs whose values are set first
        allocr.alloc_graph(graph)
        cpu.graph_compute(graph)

    Inputs that were allocated here belong to the plan: an op may overwrite them once nothing else reads them.
    """

    def __init__(self, talloc):
        self.talloc = expect(talloc, TensorAllocator, "Allocr")
        self._graphs, self._placed = GraphAllocator2023(), weakref.WeakKeyDictionary()

    @classmethod
    def new(cls, data, size=None, alignment=32):
        """An allocator over the caller's memory: an array or object with the buffer protocol; `size` bytes are used."""
        memory = as_bytes(host_array(data))
        size = memory.size if size is None else buffer_size(size)
        if size > memory.size:
            raise ParamError(f"Allocr.new: {size} bytes of a memory that has {memory.size}")
        buffer = ArrayBuffer(HOST, memory[:size])
        return cls(TensorAllocator(buffer, alignment=alignment))

    @classmethod
    def new_measure(cls, alignment=32):
        """An allocator for host memory that is not there yet: it measures."""
        return cls(TensorAllocator(HOST, alignment=alignment))

    @classmethod
    def new_from_buffer(cls, buffer):
        """An allocator over a buffer that is the caller's."""
        return cls(TensorAllocator(expect(buffer, Buffer, "new_from_buffer")))

    @classmethod
    def new_from_backend(cls, backend, size):
        """A buffer of `size` bytes of the backend's default type, freed by `free`."""
        return cls(TensorAllocator(backend, size))

    @classmethod
    def new_measure_from_backend(cls, backend):
        """An allocator that measures for the backend's default type, or for a buffer type."""
        return cls(TensorAllocator(expect(backend, (Backend, BufferType), "new_measure_from_backend")))

    buffer = property(lambda self: self.talloc.buffer, doc="Where tensors are placed; None where it measures.")
    is_measure = property(lambda self: self.talloc.is_measure, doc=TensorAllocator.is_measure.__doc__)
    max_size = property(lambda self: self.talloc.max_size, doc=TensorAllocator.max_size.__doc__)

    def alloc(self, t):
        """TensorAllocator.alloc."""
        self.talloc.alloc(t)

    def set_parse_seq(self, seq):
        """An explicit order: positions of nodes, -1 for barriers before which nothing is given back; []: off."""
        self._graphs.set_parse_seq(seq)

    def alloc_graph(self, graph):
        """Give every tensor of `graph` without memory its place.  Returns max_size.

        A measuring allocator only counts.  Errors: OutOfMemory, GraphError; nothing changes then.
        """
        talloc = self.talloc
        talloc._check()
        tensors = (*expect(graph, Graph, "alloc_graph").nodes, *graph.leafs)
        for t in tensors:
            t._check()
        if any(t.id in talloc._places.live and not talloc.is_own(t) for t in graph.leafs):
            talloc._drop_dead()                         # rows of dead tensors may belong to others by now
        for t in graph.leafs:
            if talloc.is_own(t) and t.id not in talloc._places.live:
                raise ParamError(f"the memory of {describe(t)} was given back by an earlier alloc_graph; call reset, "
                                 f"then alloc it again")
        sizes = [np.array([talloc.needed_nbytes(t) for t in part], np.int64) for part in (graph.nodes, graph.leafs)]
        before = talloc._places.state()
        size, plan = self._graphs.alloc_graph(talloc._places, TABLE.words, graph.node_ids, graph.leaf_ids, sizes)
        if not self.is_measure:
            try:
                self._place(graph, plan)
            except BaseException:
                talloc._places.restore(before)
                raise
        for t in tensors:
            if t.id in talloc._places.live:
                talloc._tensors.setdefault(t.id, weakref.ref(t))
        return size

    def _place(self, graph, plan):
        """Tensors of `graph` into the buffer; after an error of the buffer they have no memory, as before."""
        buffer, where = self.buffer, {}
        for tensors, held, offs in ((graph.leafs, plan.leaf_buffer, plan.leaf_offs),
                                    (graph.nodes, plan.node_buffer, plan.node_offs)):
            for t, b, o in zip(tensors, held.tolist(), offs.tolist(), strict=True):
                if b >= 0:
                    where[t.id] = buffer, o
        new = [t for t in (*graph.leafs, *graph.nodes) if t.id in where and int(TABLE.words[t.id, T_BUFFER]) < 0]
        leafs = [t for t in new if t.op == OP.NONE and t.view_src is None]
        try:
            for t in leafs:
                place(t, buffer, where[t.id][1])
            for t in new:
                init_placed(buffer, PlacedTensor(t, t.src, where[t.id]))
        except BaseException:
            for t in leafs:
                unplace(t, buffer.id)
            raise
        for t in leafs:
            self.talloc._tensors[t.id] = weakref.ref(t)
        graph.placement = self._placed[graph] = Placement({t.id: where[t.id] for t in graph.nodes if t.id in where})

    def reset(self):
        """Forget all tensors and graphs placed here; `max_size` stays."""
        self.talloc.reset()
        self._forget_graphs()

    def _forget_graphs(self):
        for graph, placement in list(self._placed.items()):
            if graph.placement is placement:
                graph.placement = None
        self._placed.clear()

    def free(self):
        """End it; the buffer is freed if it was allocated here."""
        self._forget_graphs()
        self.talloc.free()
