"""Compute buffers that grow with the graphs they are used for.

    buffer type 0    | chunk 0 |  | chunk 1    |           several where the type has a max size
    buffer type 1    | chunk 0      |
"""
import weakref

from ggjit.core.buffer import USAGE_COMPUTE
from ggjit.core.lifetime import call_all
from ggjit.core.slots import alloc_buffer


class ComputeBuffers:
    """The compute buffers of a scheduler or allocator, by buffer type and chunk.

    `version` goes up whenever a buffer is replaced.
    """

    def __init__(self, bufts):
        self.bufts = bufts
        self.chunks = [[] for _ in bufts]
        self.version = 0
        self.used_by = None

    @property
    def used_by(self):
        """The Run that computed here last, or None.  Held weakly: its graph may refer to the scheduler."""
        return self._used_by()

    @used_by.setter
    def used_by(self, run):
        self._used_by = (lambda: None) if run is None else weakref.ref(run)

    def holds(self, buf):
        """Is `buf` one of these buffers?"""
        return any(buf is b for chunks in self.chunks for b in chunks)

    def grow(self, chunk_sizes, before_moving=lambda: None):
        """Make every chunk large enough.  Errors: those of the buffer types; the old buffers stay then."""
        # at least one byte a chunk: empty tensors have a place too, and some devices refuse buffers of 0 bytes
        todo = [(b, c, max(int(size), 1)) for b, sizes in enumerate(chunk_sizes) for c, size in enumerate(sizes)
                if c >= len(self.chunks[b]) or self.chunks[b][c] is None or self.chunks[b][c].size < size
                or not self.chunks[b][c].alive]
        if not todo:
            return
        before_moving()
        new = []
        try:
            for b, _, size in todo:
                new.append(alloc_buffer(self.bufts[b], size))
                new[-1].set_usage(USAGE_COMPUTE)
        except BaseException as e:
            call_all(*(buf.free for buf in new), after=e)
            raise
        old = []
        for (b, c, _), buf in zip(todo, new, strict=True):
            self.chunks[b] += [None] * (c + 1 - len(self.chunks[b]))
            if self.chunks[b][c] is not None:
                old.append(self.chunks[b][c])
            self.chunks[b][c] = buf
        self.used_by = None                 # results of earlier graphs went with the old chunks
        self.version += 1
        call_all(*(buf.free for buf in old))

    def size(self, slot):
        return sum(buf.size for buf in self.chunks[slot] if buf is not None)

    def free(self):
        buffers = [buf for chunks in self.chunks for buf in chunks if buf is not None]
        for chunks in self.chunks:
            chunks.clear()
        self.used_by = None
        self.version += 1
        call_all(*(buf.free for buf in buffers))
