"""Compute buffers that grow with the graphs they are used for.

    buffer type 0    | chunk 0 |  | chunk 1    |           several where the type has a max size
    buffer type 1    | chunk 0      |
"""
import weakref

from ggjit.core.buffer import USAGE_COMPUTE
from ggjit.core.lifetime import finish
from ggjit.core.slots import allocate


class Memory:
    """The compute buffers of a scheduler or allocator, per buffer type and chunk.  Growing replaces buffers and raises
    `version`."""

    def __init__(self, bufts):
        self.bufts = bufts
        self.chunks = [[] for _ in bufts]
        self.version = 0
        self.used_by = None

    @property
    def used_by(self):
        """The Run that computed here last, or None.  Held weakly: what it computes may know the scheduler."""
        return self._used_by()

    @used_by.setter
    def used_by(self, run):
        self._used_by = (lambda: None) if run is None else weakref.ref(run)

    def holds(self, buf):
        """Is that one of these buffers?"""
        return any(buf is b for chunks in self.chunks for b in chunks)

    def grow(self, chunk_sizes, before_moving=lambda: None):
        """Make every chunk large enough.  Errors: whatever a buffer type raises; the old buffers stay then."""
        # empty tensors have a place as well: in a chunk of one byte, since not every device makes buffers of none
        todo = [(b, c, max(int(size), 1)) for b, sizes in enumerate(chunk_sizes) for c, size in enumerate(sizes)
                if c >= len(self.chunks[b]) or self.chunks[b][c] is None or self.chunks[b][c].size < size
                or not self.chunks[b][c].alive]
        if not todo:
            return
        before_moving()
        new = []
        try:
            for b, _, size in todo:
                new.append(allocate(self.bufts[b], size))
                new[-1].set_usage(USAGE_COMPUTE)
        except BaseException as e:
            finish(*(buf.free for buf in new), after=e)
            raise
        old = []
        for (b, c, _), buf in zip(todo, new, strict=True):
            self.chunks[b] += [None] * (c + 1 - len(self.chunks[b]))
            if self.chunks[b][c] is not None:
                old.append(self.chunks[b][c])
            self.chunks[b][c] = buf
        self.used_by = None                 # results of earlier graphs went with the old chunks
        self.version += 1
        finish(*(buf.free for buf in old))

    def size(self, slot):
        return sum(buf.size for buf in self.chunks[slot] if buf is not None)

    def free(self):
        buffers = [buf for chunks in self.chunks for buf in chunks if buf is not None]
        for chunks in self.chunks:
            chunks.clear()
        self.used_by = None
        self.version += 1
        finish(*(buf.free for buf in buffers))
