"""The current `ggml_tallocr`: offsets for one tensor at a time, by a pointer that only moves up."""
from ggjit.alloc.ggml.problem import check_alignment
from ggjit.ops.core.errors import OutOfMemory, ShapeError


def aligned_offset(base, offs, alignment):
    """offs rounded up so that base + offs is a multiple of alignment; base 0 rounds a size up."""
    alignment = check_alignment(alignment)
    return offs + -(base + offs) % alignment


class Bump:
    """One buffer, filled from its aligned start.

    size, base, alignment in bytes.  alloc(nbytes) returns the offset from base; OutOfMemory leaves it where it was.
    """

    def __init__(self, size, alignment=32, base=0):
        self.size, self.base, self.alignment = int(size), int(base), check_alignment(alignment)
        self.offs = aligned_offset(self.base, 0, self.alignment)

    def alloc(self, nbytes, name="tensor"):
        """Offset of nbytes bytes, padded to the alignment."""
        if nbytes < 0:
            raise ShapeError(f"{name}: {nbytes} bytes")
        need = aligned_offset(0, int(nbytes), self.alignment)
        if self.offs + need > self.size:
            raise OutOfMemory(f"not enough space in the buffer for {name}: needs {need} bytes, "
                              f"{max(self.size - self.offs, 0)} of {self.size} are left")
        offs, self.offs = self.offs, self.offs + need
        return offs
