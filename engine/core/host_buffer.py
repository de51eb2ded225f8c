"""Host memory: the CPU's buffer type, buffers with an arena of their own, buffers over memory that exists."""
import numpy as np

from ggjit.core.arguments import buffer_size
from ggjit.core.buffer import Buffer, BufferType, as_bytes
from ggjit.ops.core.host_memory import pages
from ggjit.ops.native.jit import address_of

ARENA_ALIGNMENT = 64            # bytes: a cache line and the widest vector


class HostBufferType(BufferType):
    """Plain host memory.  Leaves need it before there is a device: cpu/device.py sets `device` when it is imported."""
    name = "CPU"

    def __init__(self, device=None):
        self.device = device

    def is_host(self):
        return True

    def alloc_buffer(self, size):
        return HostBuffer(self, size)


HOST = HostBufferType()         # the only one: buffer types are compared by identity


class HostBuffer(Buffer):
    """`size` bytes of host memory, 64-byte aligned; the system gives pages when they are first written.

    memory: uint8 array of so many bytes to take instead.
    """

    def __init__(self, buft, size, memory=None):
        size = buffer_size(size)
        super().__init__(buft, size)
        if memory is None:
            raw = pages(size + ARENA_ALIGNMENT, f"{buft.name} buffer")
            start = -address_of(raw) % ARENA_ALIGNMENT
            memory = raw[start:start + size]
        self._arena = memory
        self.base = address_of(self._arena)


class ArrayBuffer(Buffer):
    """A buffer over memory that exists, such as a user's array or a mapped file; nothing is copied."""

    def __init__(self, buft, array, read_only=False):
        flat = as_bytes(array)
        super().__init__(buft, flat.size)
        self._arena = flat
        self.base = address_of(flat)
        self.read_only = read_only or not flat.flags.writeable
        self._trusted = read_only or _is_immutable(array)


def _is_immutable(memory):
    """Is the memory that of a `bytes` object?  NumPy's flags do not tell: owners flip them, bases are writable."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return isinstance(memory, bytes)
