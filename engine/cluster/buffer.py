"""Memory of a worker: a buffer is the number of an arena in the worker's process."""
from ggjit.cluster import protocol as p
from ggjit.core.arguments import buffer_size
from ggjit.core.buffer import USAGE_WEIGHTS, Buffer, BufferType, as_bytes, require_byte
from ggjit.ops.core.errors import StaleHandle

KEPT_WEIGHTS_NBYTES = 1 << 20   # weights from this size on are asked for before they are sent


class RemoteBuffer(Buffer):
    """A piece of a worker's memory: the number of an arena there."""

    def __init__(self, buft, size):
        size = buffer_size(size)
        super().__init__(buft, size)
        device = self.device = buft.device
        self.stream, self.arena_id = device.new_arena(self.size)

    def at(self, t, offset):
        """(arena, byte) of a byte of a tensor that lies here."""
        self._check()
        return self.arena_id, t.offs + offset

    def _check(self):
        if not self.alive:
            raise StaleHandle(f"{self!r} was freed; allocate the tensor again")
        if self.stream is not self.device.stream:
            raise self.stream.error()

    def set_tensor(self, t, data, offset=0):
        raw = as_bytes(data)
        if raw.size >= KEPT_WEIGHTS_NBYTES and self.usage == USAGE_WEIGHTS and self.device.facts.get("keeps") is True:
            self.device.write_weights(*self.at(t, offset), raw)
        elif raw.size:
            self.device.write(*self.at(t, offset), raw)

    def get_tensor(self, t, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        return self.device.read(*self.at(t, offset), nbytes) if nbytes else b""

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        if nbytes:
            self.device.queue([p.FILL, *self.at(t, offset), nbytes, int(value)])

    def copy_tensor(self, src, dst):
        """Copy within a worker or between workers; False if the workers cannot reach each other, or for other
        memory.
        """
        a = src.buffer
        if not isinstance(a, RemoteBuffer):
            return False
        if not dst.nbytes:
            return True
        source, target = a.at(src, 0), self.at(dst, 0)
        if a.device is not self.device:
            return self.device.copy_from(a.device, source, target, dst.nbytes)
        self.device.queue([p.COPY, *source, *target, dst.nbytes])
        return True

    def clear(self, value=0):
        require_byte(value)
        self._check()
        self.device.queue([p.FILL, self.arena_id, 0, self.size, int(value)])

    def free(self):
        self.device.release(self.stream, self.arena_id)
        super().free()


class RemoteBufferType(BufferType):
    """Memory of one worker."""

    def __init__(self, device):
        self.device, self.name = device, device.name

    def alignment(self):
        return self.device.alignment

    def max_size(self):
        return max(self.device.facts["total"], 1)

    def alloc_buffer(self, size):
        return RemoteBuffer(self, size)
