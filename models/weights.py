"""Weights: every tensor of a GGUF file as a leaf over the mapped file.  Nothing is copied or read ahead."""
from ggjit.context import Context
from ggjit.ops.errors import ModelError
from ggjit.ops.types.traits import all_traits
from ggjit.table import TABLE

USAGE_WEIGHTS = 1


class Weights:
    """Leaves named as in the file; `want` hands them out after checking their shape."""

    def __init__(self, file, device):
        self.file, self.ctx = file, Context()
        self.buffer = device.buffer_from_host_ptr(file.map(), read_only=True)
        self.buffer.usage = USAGE_WEIGHTS
        self.ctx.buffers.append(self.buffer)
        self._leaves = {}

    @property
    def nbytes(self):
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.file.tensors.values())

    def want(self, name, *ne, optional=False):
        """The leaf `name` with exactly the shape `ne` (ggml order).

        Errors: ModelError for a missing tensor, another shape, or a type without kernels.
        """
        info = self.file.tensors.get(name)
        if info is None:
            if optional:
                return None
            raise ModelError(f"{self.file.path}: tensor {name!r} is missing, the {self.file.arch} architecture "
                             f"needs it; convert the model again")
        found = tuple(info.ne) + (1,) * (4 - len(info.ne))
        wanted = tuple(ne) + (1,) * (4 - len(ne))
        if found != wanted:
            raise ModelError(f"{self.file.path}: tensor {name!r} has shape {list(info.ne)}, the metadata calls for "
                             f"{list(ne)}; convert the model again")
        if info.type not in all_traits():
            raise ModelError(f"{self.file.path}: tensor {name!r} has type {info.type!r}, which has no kernels yet; "
                             f"convert the model to one of {', '.join(map(repr, all_traits()))}")
        if name not in self._leaves:
            leaf = self._leaves[name] = self.ctx.new_tensor(info.type, info.ne, name)
            # mapped memory: the file's alignment is what it is, kernels take any
            TABLE.place(leaf.id, self.buffer.id, info.offs)
        return self._leaves[name]

    def free(self):
        self._leaves.clear()
        self.ctx.free()
        self.buffer.free()
