"""Buffers: one flat uint8 ndarray each, `buf.arena`.  A tensor in a buffer is a byte offset.

    arena   0           offs                offs + nbytes            size
            |-----------|###################|------------------------|
                        buf.arena[t.offs : t.offs + t.nbytes]
"""
import itertools
import weakref

import numpy as np

from ggjit.ops.errors import GgjitError, IndexRangeError, NotAllocated, OutOfMemory, ParamError, StaleHandle
from ggjit.ops.jit import address_of
from ggjit.ops.shape import describe
from ggjit.table import TABLE

ARENA_ALIGNMENT = 64            # bytes: a cache line and the widest vector
_ids = itertools.count()
_buffers = weakref.WeakValueDictionary()        # id -> Buffer, as the table names them

USAGE_ANY, USAGE_WEIGHTS, USAGE_COMPUTE = 0, 1, 2


class BufferType:
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


class Buffer:
    """A piece of memory that holds tensors.  Subclasses without host memory override the tensor slots."""

    arena = None                    # uint8 ndarray where the memory is host memory
    base = 0                        # address of byte 0

    def __init__(self, buft, size):
        self.buft, self.size = buft, int(size)
        self.usage = USAGE_ANY
        self.read_only = False
        self.alive = True
        self.id = next(_ids)
        _buffers[self.id] = self

    # ------------------------------------------------------------ slots
    def init_tensor(self, t):
        """Called once for every tensor placed here."""

    def set_tensor(self, t, data, offset=0):
        t.set_bytes(data, offset)

    def get_tensor(self, t, offset=0, nbytes=None):
        return t._bytes_view(offset, nbytes).tobytes()

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        t._bytes_view(offset, nbytes)
        t._writable()[offset:None if nbytes is None else offset + nbytes] = value

    def copy_tensor(self, src, dst):
        """Copy src's bytes into dst if both can be reached; False where they cannot."""
        if src.nbytes != dst.nbytes or not (src.buffer.buft.is_host() and self.buft.is_host()):
            return False
        dst.set_bytes(src._bytes_view())
        return True

    def clear(self, value=0):
        """Fill the whole buffer with a byte."""
        self.host_bytes(0, self.size, write=True)[...] = value

    def reset(self):
        """Forget what init_tensor attached to tensors (nothing here)."""

    def free(self):
        """Give the memory back.  Tensors that lived here raise when they are used; a second call does nothing."""
        if self.alive:
            self.alive = False
            self.arena = None
            self.base = 0
            TABLE.placement_version += 1

    # ------------------------------------------------------------ for tensors and plans
    def host_bytes(self, offs, nbytes, write=False):
        """uint8 view of arena[offs : offs + nbytes]."""
        if not self.alive:
            raise StaleHandle(f"{self!r} was freed")
        if self.arena is None:
            raise NotAllocated(f"{self!r} is not host memory; copy the tensor to a CPU buffer first")
        if write and self.read_only:
            raise ParamError(f"{self!r} is read-only (mapped weights); copy the tensor with gg.dup first")
        if offs < 0 or nbytes < 0 or offs + nbytes > self.size:
            raise IndexRangeError(f"bytes {offs}..{offs + nbytes} are outside {self!r}")
        return self.arena[offs:offs + nbytes]

    def __repr__(self):
        state = "" if self.alive else " freed"
        return f"<Buffer {self.id} {self.buft.name} {self.size:,} bytes{' read-only' if self.read_only else ''}{state}>"


class HostBuffer(Buffer):
    """The ready-made arena buffer: `size` bytes of host memory, 64-byte aligned, pages untouched until used."""

    def __init__(self, buft, size):
        size = int(size)
        if size < 0:
            raise ParamError(f"buffer size must not be negative, got {size}")
        super().__init__(buft, size)
        try:
            raw = np.empty(size + ARENA_ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise OutOfMemory(f"{buft.name}: cannot allocate {size:,} bytes; use a smaller context or batch, or a "
                              f"smaller weight type") from None
        start = -address_of(raw) % ARENA_ALIGNMENT
        self.arena = raw[start:start + size]
        self.base = address_of(self.arena)


class ArrayBuffer(Buffer):
    """A buffer over memory that belongs to somebody else: a user's array or a mapped file; nothing is copied."""

    def __init__(self, buft, array, read_only=False):
        flat = array.reshape(-1).view(np.uint8)
        super().__init__(buft, flat.size)
        self.arena = flat
        self.base = address_of(flat)
        self.read_only = read_only or not flat.flags.writeable


def buffer_by_id(buffer_id, tensor):
    """The live buffer the table names for `tensor`."""
    buf = _buffers.get(buffer_id)
    if buf is None or not buf.alive:
        raise StaleHandle(f"the buffer of {describe(tensor)} was freed; allocate the tensor again")
    return buf


def tensor_alloc(buf, t, offs):
    """Place leaf `t` at byte `offs` of `buf` (ggml_backend_tensor_alloc)."""
    t._check()
    if t.view_src is not None:
        raise ParamError(f"{describe(t)} is a view; it follows its base {describe(t.view_src)}")
    need = buf.buft.alloc_size(t)
    if offs < 0 or offs % buf.buft.alignment() or offs + need > buf.size:
        raise IndexRangeError(f"{describe(t)} needs {need} bytes at a multiple of {buf.buft.alignment()}; "
                              f"offset {offs} does not fit {buf!r}")
    TABLE.place(t.id, buf.id, offs)
    buf.init_tensor(t)
    if not any(b is buf for b in t.ctx.buffers):
        t.ctx.buffers.append(buf)
