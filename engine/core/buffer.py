"""Buffers: one flat uint8 ndarray each, `buf.arena`.  A tensor in a buffer is a byte offset.

    arena   0           offs                offs + nbytes            size
            |-----------|###################|------------------------|
                        buf.arena[t.offs : t.offs + t.nbytes]
"""
import functools
import itertools
import sys
import weakref

import numpy as np

from ggjit.core.fixed import Fixed
from ggjit.core.html_repr import HtmlRepr
from ggjit.core.lifetime import AtEnd, Handle, call_all
from ggjit.core.table import TABLE
from ggjit.core.versions import count_writes
from ggjit.ops.core.errors import (
    GgjitError,
    IndexRangeError,
    NotAllocated,
    NotSupported,
    ParamError,
    ReadOnly,
    StaleHandle,
    TypeMismatch,
)
from ggjit.ops.core.record import T_BUFFER, T_OFFS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.weak import WeakValues
from ggjit.ops.core.whole_numbers import is_whole

_ids = itertools.count()
_buffers = WeakValues()         # id -> Buffer, as the table names them; it is held by the tensors in it

USAGE_ANY, USAGE_WEIGHTS, USAGE_COMPUTE = 0, 1, 2
_WRITING_SLOTS = {"set_tensor": 0, "memset_tensor": 0, "copy_tensor": 1, "set_tensor_2d": 0, "clear": None,
                  "reset": None}


class BufferType(Handle, HtmlRepr):
    """Makes buffers of one kind of memory.  Subclasses give `name`, `device`, `alloc_buffer`; the rest has defaults."""
    name = "?"
    device = None

    def alignment(self):
        """Every tensor offset is a multiple of this (bytes)."""
        return 32

    def max_size(self):
        """Largest buffer in bytes; allocators split into several above it."""
        return (1 << 63) - 1

    def is_host(self):
        """True where tensors can be read and written through `arena`."""
        return False

    def alloc_buffer(self, size):
        """A Buffer of `size` bytes, or OutOfMemory."""
        raise GgjitError(f"buffer type {self.name} does not implement alloc_buffer")

    def alloc_size(self, tensor):
        """Bytes the tensor needs in this type (at least its nbytes)."""
        return tensor.nbytes

    def supports_backend(self, backend):
        """Can `backend` compute on tensors in this type?"""
        return backend.device is self.device

    def __repr__(self):
        return f"<BufferType {self.name}>"


def require_byte(value):
    """ParamError for what is no byte."""
    if not is_whole(value, 0, 255):
        raise ParamError(f"clear: a byte is 0 to 255, got {value!r}")


class Buffer(Handle, HtmlRepr):
    """A piece of memory that holds tensors.  Subclasses without host memory override the tensor slots.

    Slots get byte ranges that were checked (`Tensor.set_bytes` and the like raise IndexRangeError); `t.offs` is the
    tensor's place in this buffer.  Writes are counted for them (engine/core/versions.py).

    `free` of a subclass runs once: when it is called, at the latest when nothing refers to the buffer.
    Tensors, plans and allocators refer to the buffers they use.
    """

    base = 0                        # address of byte 0
    id = Fixed("it is the number by which the table names the buffer")

    _owns_memory = True
    _made = _dying = _free_begun = _free_ended = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        count_writes(cls, _WRITING_SLOTS)
        if "__init__" in vars(cls):
            cls.__init__ = _sets_made(cls.__init__)
        if "free" in vars(cls):
            cls.free = _free_once(cls.free)
            if cls._owns_memory and "__del__" not in vars(cls):
                cls.__del__ = _free_at_death

    def __init__(self, buft, size):
        self.buft, self._size = buft, int(size)
        self.usage = USAGE_ANY
        self.read_only = False
        self.alive = True
        self._trusted = True        # False once the memory can be written without being counted
        self._write_views = []      # arrays of `with t.write()` blocks that are still referenced
        self.version = 0            # counts writes to bytes that belong to no named tensor
        self.last_plan = None  # weak reference to the plan that computed into it last (engine/graphs/graph_plan.py)
        self._arena = None
        self._end = 0               # byte offset at which the last tensor of tensor_alloc ends
        self.id = next(_ids)
        _buffers[self.id] = self

    @property
    def size(self):
        """Bytes."""
        return self._size

    @size.setter
    def size(self, value):
        raise ReadOnly(f"{self!r}: .size is that of its memory and cannot be set; gg.HostBuffer(buft, size) or "
                       f"buft.alloc_buffer(size) makes another buffer")

    @property
    def trusted(self):
        """False: bytes may change without being counted, so no copy of them is reused.  Read it before `version`: a
        write view that is gone counts as a write."""
        if self._write_views:
            left = [view for view in self._write_views if view.is_referenced()]
            self.version += len(left) < len(self._write_views)
            self._write_views = left
        return self._trusted and not self._write_views

    def write_view(self, array):
        """A writable view of `array`, which lies in this memory.  The buffer is untrusted while the view is in use."""
        view = WriteView(array)
        self._write_views.append(view)
        return view.make()

    @property
    def arena(self):
        """uint8 ndarray of the memory, None where it is not host memory.  Reading it makes it untrusted."""
        self._trusted = False
        return self._arena

    @arena.setter
    def arena(self, array):
        flat = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1
        if array is not None and not (flat and array.flags.c_contiguous and array.size >= self.size):
            raise TypeMismatch(f"the arena of {self!r} must be a flat uint8 array of its size, got "
                               f"{type(array).__name__} {getattr(array, 'dtype', '')} {getattr(array, 'shape', '')}")
        if self._arena is not None or not self.alive:
            raise ReadOnly(f"{self!r}: .arena is its memory and cannot be replaced; use tensors' set or arena[...] = ")
        self._arena = array

    # ------------------------------------------------------------ slots
    def init_tensor(self, t):
        """Called once for every tensor placed here."""

    def init_view(self, t):
        """The same for views of tensors that lie here; by default `init_tensor`."""
        self.init_tensor(t)

    def free_tensor(self, t):
        """Called before a tensor allocator gives the place of one tensor back (nothing here)."""

    def is_bound(self, t):
        """Can the tensor, which has a place here, be read and computed with?  Buffers without addresses may say no
        until they have bound it to memory."""
        return True

    def set_tensor(self, t, data, offset=0):
        """Write raw bytes at byte `offset` of the tensor."""
        raw = as_bytes(data)
        self.host_bytes(t.offs + offset, raw.size, write=True)[...] = raw

    def get_tensor(self, t, offset=0, nbytes=None):
        """Read raw bytes."""
        return self.host_bytes(t.offs + offset, t.nbytes - offset if nbytes is None else nbytes).tobytes()

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        """Fill bytes of the tensor."""
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        self.host_bytes(t.offs + offset, nbytes, write=True)[...] = value

    def set_tensor_2d(self, t, data, offset, nbytes, n_copies, stride, data_stride):
        """n_copies blocks of nbytes bytes, `stride` apart in the tensor and `data_stride` in `data`."""
        raw = as_bytes(data)
        for i in range(n_copies):
            self.set_tensor(t, raw[i * data_stride:i * data_stride + nbytes], offset + i * stride)

    def get_tensor_2d(self, t, offset, nbytes, n_copies, stride, data_stride):
        """The blocks of set_tensor_2d, `data_stride` apart in the returned bytes; gaps are zero."""
        out = np.zeros((n_copies - 1) * data_stride + nbytes if n_copies else 0, np.uint8)
        for i in range(n_copies):
            out[i * data_stride:i * data_stride + nbytes] = as_bytes(self.get_tensor(t, offset + i * stride, nbytes))
        return out.tobytes()

    def copy_tensor(self, src, dst):
        """Copy src's bytes into dst, which lies here; False where that cannot be done directly."""
        if self._arena is None or not src.buffer.buft.is_host():
            return False
        self.host_bytes(dst.offs, dst.nbytes, write=True)[...] = src.buffer.host_bytes(src.offs, src.nbytes)
        return True

    def clear(self, value=0):
        """Fill the whole buffer with a byte."""
        require_byte(value)
        self.host_bytes(0, self.size, write=True)[...] = value

    def reset(self):
        """Forget what init_tensor attached to tensors (nothing here).  Allocators call it before they hand out the
        places of this buffer again."""

    def set_usage(self, usage):
        """USAGE_ANY, USAGE_WEIGHTS (the scheduler runs ops where their weights are) or USAGE_COMPUTE."""
        if usage not in (USAGE_ANY, USAGE_WEIGHTS, USAGE_COMPUTE):
            raise ParamError(f"buffer usage must be USAGE_ANY, USAGE_WEIGHTS or USAGE_COMPUTE, got {usage!r}")
        self.usage = usage

    def free(self):
        """Give the memory back.  Tensors that lived here raise when they are used; a second call does nothing."""
        if self.alive:
            self.alive = False
            self._arena = None
            self.base = 0
            if not self._dying:                 # a dying buffer has no tensors left to notify
                TABLE.unplace_all(self.id)

    # ------------------------------------------------------------ for tensors and plans
    def host_bytes(self, offs, nbytes, write=False):
        """uint8 view of arena[offs : offs + nbytes]."""
        if not self.alive:
            raise StaleHandle(f"{self!r} was freed")
        if self._arena is None:
            raise NotAllocated(f"{self!r} is not host memory; copy the tensor to a CPU buffer first")
        if write and self.read_only:
            raise ParamError(f"{self!r} is read-only (mapped weights); copy it: gg.tensor(t.numpy(), type=t.type), or "
                             f"in a graph gg.dup(t)")
        if offs < 0 or nbytes < 0 or offs + nbytes > self.size:
            raise IndexRangeError(f"bytes {offs}..{offs + nbytes} are outside {self!r}")
        return self._arena[offs:offs + nbytes]

    def __repr__(self):
        state = "" if self.alive else " freed"
        return f"<Buffer {self.id} {self.buft.name} {self.size:,} bytes{' read-only' if self.read_only else ''}{state}>"


count_writes(Buffer, _WRITING_SLOTS)


# ---------------------------------------------------------------- the slot `free` of subclasses is called once
def _sets_made(init):
    @functools.wraps(init)
    def init_and_set(self, *args, **kwargs):
        init(self, *args, **kwargs)
        # False while a subclass's __init__ still has to finish
        self._made = type(self).__init__ is init_and_set
    return init_and_set


def _free_once(free):
    @functools.wraps(free)
    def free_once(self):
        if self._free_ended:
            return
        outermost, self._free_begun = not self._free_begun, True        # a nested call is super().free()
        try:
            free(self)
        finally:
            if outermost:
                self._free_ended = True
                Buffer.free(self)
    return free_once


def _free_at_death(self):
    """The `__del__` of a class with a `free` of its own; an object whose __init__ failed is left alone."""
    if self._made and not self._free_begun:
        self._dying = True
        AtEnd(self.free).now()


class WriteView:
    """A writable array given to a caller: in use until it is read-only and no view of it is left.

    NumPy views refer to the root of their chain, not to the array they were taken from: the reference count of the
    root tells whether any is left.  The chain ends at the first object that is no array: _ArrayInterface.

        memory <- _ArrayInterface <- root <- the array
                                  <- views of it, and views of those
    """

    def __init__(self, array):
        self.root = np.asarray(_ArrayInterface(array))
        self.n_refs = sys.getrefcount(self.root)        # reference count while no view of the memory exists
        self.array = None

    def make(self):
        array = self.root.view()
        self.array = weakref.ref(array)
        return array

    def is_referenced(self):
        array = self.array()
        if array is not None and array.flags.writeable:
            return True
        return sys.getrefcount(self.root) > self.n_refs + (array is not None)


class _ArrayInterface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


class MultiBuffer(Buffer):
    """Several buffers under one handle (ggml_backend_multi_buffer): clear, usage and free reach every member.

    It only groups: tensors lie in the members, so it has no address and no tensor slots.  size: the members' sum;
    buffer type: that of the first member.
    """

    _owns_memory = False

    def __init__(self, buffers):
        buffers = tuple(buffers) if isinstance(buffers, list | tuple) else ()
        if not buffers or not all(isinstance(b, Buffer) for b in buffers):
            raise ParamError("a multi-buffer takes a list of at least one Buffer")
        self.buffers = buffers
        super().__init__(buffers[0].buft, sum(b.size for b in buffers))

    def __iter__(self):
        return iter(self.buffers)

    def __len__(self):
        return len(self.buffers)

    def __getitem__(self, i):
        return self.buffers[i]

    @property
    def usage(self):
        """That of its first buffer; setting it sets that of all."""
        return self.buffers[0].usage

    @usage.setter
    def usage(self, usage):
        if "id" in self.__dict__:               # Buffer.__init__ sets the default; members keep theirs
            for b in self.buffers:
                b.set_usage(usage)

    def clear(self, value=0):
        for b in self.buffers:
            b.clear(value)

    def free(self):
        if self.alive:
            call_all(super().free, *(b.free for b in self.buffers))

    def _only_groups(self, *args, **kwargs):
        raise NotSupported(f"{self!r} only groups buffers; use the tensor's own buffer")

    init_tensor = set_tensor = get_tensor = memset_tensor = copy_tensor = _only_groups
    _only_groups.counts_versions = True


def wants_tensors(buf):
    """Does the buffer define init_tensor, and so has to be told which tensors lie in it?"""
    return type(buf).init_tensor is not Buffer.init_tensor or type(buf).init_view is not Buffer.init_view


def init_placed(buf, t):
    """Tell the buffer, if it wants to know, that tensor `t` lies in it now."""
    if wants_tensors(buf):
        (buf.init_tensor if t.view_src is None else buf.init_view)(t)


def reset_buffers(buffers):
    """Before the places in these buffers are handed out again: they forget what init_tensor attached.  Returns whether
    any of them has something to forget."""
    keeping = [buf for buf in buffers if buf is not None and buf.alive and type(buf).reset is not Buffer.reset]
    for buf in keeping:
        buf.reset()
    return bool(keeping)


def as_bytes(data):
    """Any bytes-like object or array as a flat uint8 array."""
    if isinstance(data, np.ndarray) and data.dtype.hasobject:
        raise TypeMismatch(f"an array of {data.dtype} values holds references, not bytes")
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError):
        raise TypeMismatch(f"expected bytes or an array, got {type(data).__name__}") from None


class EmptyBuffer(Buffer):
    """A buffer of 0 bytes: there is nothing that a device would have to allocate."""

    def __init__(self, buft):
        super().__init__(buft, 0)
        self._arena = np.empty(0, np.uint8)

    def clear(self, value=0):
        require_byte(value)


def buffer_by_id(buffer_id, tensor):
    """The live buffer that the table names for `tensor`.  Errors: StaleHandle."""
    buf = _buffers.get(buffer_id)
    if buf is None or not buf.alive:
        raise freed(tensor)
    return buf


def live_buffers(buffer_ids):
    """[the buffer that the table names so, None where it is gone]"""
    found = [_buffers.get(i) for i in buffer_ids]
    return [buf if buf is not None and buf.alive else None for buf in found]


def freed(tensor):
    """The error for a tensor whose memory is gone."""
    return StaleHandle(f"the buffer of {describe(tensor)} was freed; allocate the tensor again")


def place(t, buf, offs):
    """Leaf `t` lies at byte `offs` of `buf` from now on, and keeps it alive.  Nothing is checked."""
    TABLE.place(t.id, buf.id, offs)
    t._hold("memory", buf)


def buffers_of(tensors):
    """The distinct buffers in which these tensors have memory of their own."""
    found = dict.fromkeys(int(TABLE.words[t.id, T_BUFFER]) for t in tensors if t.view_src is None)
    return [buf for buf in map(_buffers.get, found) if buf is not None]


def require_unplaced(t):
    """ParamError for a view, and for a tensor that has memory."""
    t._check()
    if t.view_src is not None:
        raise ParamError(f"{describe(t)} is a view; it follows its base {describe(t.view_src)}")
    holder = _buffers.get(int(TABLE.words[t.id, T_BUFFER]))
    if holder is not None and holder.alive:
        raise ParamError(f"{describe(t)} has memory already, in {holder!r}; free that, or make another tensor")


def tensor_alloc(buf, t, offs):
    """Place `t`, which has no memory, at byte `offs` of `buf`, a multiple of the type's alignment in the buffer or as
    an address.

        gg.tensor_alloc(cpu.default_buffer_type.alloc_buffer(256), ctx.new_tensor(gg.F32, (64,)), 0)

    Errors: ParamError (a view, or it has memory), IndexRangeError, StaleHandle.  Source: ggml_backend_tensor_alloc.
    """
    if not buf.alive:
        raise StaleHandle(f"{buf!r} was freed; allocate another")
    require_unplaced(t)
    need, alignment = buf.buft.alloc_size(t), buf.buft.alignment()
    aligned = offs % alignment == 0 or buf.base and (buf.base + offs) % alignment == 0
    if offs < 0 or not aligned or offs + need > buf.size:
        raise IndexRangeError(f"{describe(t)} needs {need} bytes at a multiple of {alignment}; "
                              f"offset {offs} does not fit {buf!r}")
    before = TABLE.words[t.id, [T_BUFFER, T_OFFS]].tolist()
    TABLE.place(t.id, buf.id, offs)
    try:
        buf.init_tensor(t)
    except BaseException:
        TABLE.place(t.id, *before)
        raise
    buf._trusted &= offs >= buf._end        # tensors on top of each other: a write to one changes another
    buf._end = max(buf._end, offs + need)
    t._hold("memory", buf)
