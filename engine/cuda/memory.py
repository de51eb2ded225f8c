"""Memory of CUDA devices: buffers on the device, and pinned memory on the host.

A device buffer is a range of device addresses; it has no arena.  Its slots are synchronous: they wait for all streams
of the device first, so what they read is complete and what they overwrite is no longer needed.

    base                  base + offs
    |---------------------|##########|---------|        one cuMemAlloc; offsets are multiples of ALIGNMENT
"""
import ctypes
import weakref

import numpy as np

from ggjit.core.buffer import Buffer, BufferType, as_bytes, require_byte
from ggjit.core.host_buffer import HostBuffer
from ggjit.ops.core.errors import IndexRangeError, ParamError, StaleHandle

ALIGNMENT = 128                 # bytes: a cache line, and more than any vector load asks for


class CUDABuffer(Buffer):
    """Memory of one device."""

    def __init__(self, buft, size):
        if size < 0:
            raise ParamError(f"buffer size must not be negative, got {size}")
        super().__init__(buft, size)
        self.base = buft.device.allocate("cuMemAlloc", max(self.size, 1))
        # the memory lives as long as something holds it: this buffer, or a plan that computes in it
        self.memory = Allocation(buft.device, self.base)

    def _range(self, t, offset, nbytes):
        """Device address of a byte range that lies in the buffer."""
        if not self.alive:
            raise StaleHandle(f"{self!r} was freed; allocate the tensor again")
        offs = t.offs + offset
        if offs < 0 or offs + nbytes > self.size:
            raise IndexRangeError(f"bytes {offs}..{offs + nbytes} are outside {self!r}")
        return self.base + offs

    def set_tensor(self, t, data, offset=0):
        raw = as_bytes(data)
        if raw.size:
            self.buft.device.copy_in(self._range(t, offset, raw.size), raw)

    def get_tensor(self, t, offset=0, nbytes=None):
        raw = np.empty(t.nbytes - offset if nbytes is None else nbytes, np.uint8)
        if raw.size:
            self.buft.device.copy_out(raw, self._range(t, offset, raw.size))
        return raw.tobytes()

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        if nbytes:
            self.buft.device.fill(self._range(t, offset, nbytes), value, nbytes)

    def copy_tensor(self, src, dst):
        """Copy from a buffer of any CUDA device.  Returns False for other buffers, from which nothing is copied."""
        if not isinstance(src.buffer, CUDABuffer):
            return False
        if dst.nbytes:
            self.buft.device.copy_from(src.buffer.buft.device, self._range(dst, 0, dst.nbytes),
                                       src.buffer._range(src, 0, src.nbytes), src.nbytes)
        return True

    def clear(self, value=0):
        require_byte(value)
        if not self.alive:
            raise StaleHandle(f"{self!r} was freed; allocate another")
        if self.size:
            self.buft.device.fill(self.base, value, self.size)

    def free(self):
        super().free()
        self.memory = None


class Allocation:
    """Owns one cuMemAlloc; it is freed with the last reference to it."""

    def __init__(self, device, address):
        self.address = address
        self._finalizer = weakref.finalize(self, device.release, "cuMemFree", address)
        self._finalizer.atexit = False          # the driver may be gone by then; it frees everything itself


class CUDABufferType(BufferType):
    """Memory of one CUDA device."""

    def __init__(self, device):
        self.device, self.name = device, device.name

    def alignment(self):
        return ALIGNMENT

    def max_size(self):
        return self.device.memory()[1]

    def alloc_buffer(self, size):
        return CUDABuffer(self, size)


class PinnedBuffer(HostBuffer):
    """Page-locked host memory: the GPU copies from and to it by itself, without a detour."""

    def __init__(self, buft, size):
        if size < 0:
            raise ParamError(f"buffer size must not be negative, got {size}")
        Buffer.__init__(self, buft, size)
        self.base = buft.device.allocate("cuMemHostAlloc", max(self.size, 1), 0)
        raw = (ctypes.c_uint8 * self.size).from_address(self.base)
        self._arena = np.ctypeslib.as_array(raw) if self.size else np.empty(0, np.uint8)
        # views of the memory keep `raw` alive
        weakref.finalize(raw, buft.device.release, "cuMemFreeHost", self.base).atexit = False


class PinnedBufferType(BufferType):
    """Page-locked host memory of a CUDA device; the CPU computes in it like in any host memory."""

    def __init__(self, device):
        self.device, self.name = device, "CUDA_Host"

    def is_host(self):
        return True

    def alignment(self):
        return 64

    def alloc_buffer(self, size):
        return PinnedBuffer(self, size)
