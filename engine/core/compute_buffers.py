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
        self.chunks = [[] for _ in bufts]           # [buffer type][chunk]
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
        """Make every chunk large enough.  Errors: those of the buffer types; the old buffers stay then.

        Where one chunk is too small all chunks of its buffer type are replaced, by the sizes asked for, as in ggml.
        """
        todo = [b for b, sizes in enumerate(chunk_sizes) if not self._suffices(self.chunks[b], sizes)]
        if not todo:
            return
        before_moving()
        new, made = {}, []
        try:
            for b in todo:
                new[b] = []
                for size in chunk_sizes[b]:
                    # at least one byte: empty tensors have a place too, and some devices refuse buffers of 0 bytes
                    made.append(alloc_buffer(self.bufts[b], max(int(size), 1)))
                    made[-1].set_usage(USAGE_COMPUTE)
                    new[b].append(made[-1])
        except BaseException as e:
            call_all(*(buf.free for buf in made), after=e)
            raise
        old = [buf for b in todo for buf in self.chunks[b]]
        for b, chunks in new.items():
            self.chunks[b] = chunks
        self.used_by = None                 # results of earlier graphs were in the old chunks and are gone
        self.version += 1
        call_all(*(buf.free for buf in old))

    @staticmethod
    def _suffices(chunks, sizes):
        return len(chunks) >= len(sizes) and all(buf.alive and buf.size >= size
                                                 for buf, size in zip(chunks, sizes, strict=False))

    def size(self, buft_id):
        return sum(buf.size for buf in self.chunks[buft_id])

    def free(self):
        buffers = [buf for chunks in self.chunks for buf in chunks]
        for chunks in self.chunks:
            chunks.clear()
        self.used_by = None
        self.version += 1
        call_all(*(buf.free for buf in buffers))
