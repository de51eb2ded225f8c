"""The buffer type CPU_REPACK: weights in the layout their products read fastest (ops/matmul/repack).

What goes in and comes out are a tensor's own bytes; inside they lie rearranged, so only matrix products and get_rows of
the CPU can use them.  Matrices the layout cannot take do not belong here.

    buf.set_tensor(t, raw)    raw -> layout             plan: mul_mat(t, x) gets the kernel of the layout
    buf.get_tensor(t)         layout -> raw             any other op that reads t is refused
    views of t                the same, of a part
"""
import numpy as np

from ggjit.core.buffer import BufferType, as_bytes, require_byte
from ggjit.core.host_buffer import HostBuffer
from ggjit.ops.core.errors import NotAllocated, NotSupported
from ggjit.ops.core.host_memory import empty
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import Kernel, all_specs
from ggjit.ops.core.weak import WeakKeys
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa

_NONE = int(OP.NONE)                    # as an int: looking an enum member up would double the time of `is_repacked`
_alive = WeakKeys()                     # live repack buffers; while this is empty no tensor is checked


def _layouts():
    """What can be repacked on this machine, in words."""
    return "; ".join("{} matrices of {} n columns and {} n rows".format(type.name, *repack.unit(type))
                     for type in repack.LAYOUTS) or f"no type can, with {isa.ISA}"


class RepackBuffer(HostBuffer):
    """Host memory whose matrices lie in the layout; reads and writes see the bytes of the file."""

    def __init__(self, buft, size, memory=None):
        super().__init__(buft, size, memory)
        self._shapes = {}                       # byte offset -> (type, k, m)
        _alive.put(self)

    def init_tensor(self, t):
        if not repack.takes(t.type, t.ne) or t.view_src is not None:
            raise NotSupported(f"{describe(t)} cannot be repacked: {_layouts()}; put it into a CPU buffer")
        self.hold(t.offs, t.type, t.ne[0], t.ne[1] * t.ne[2])

    def hold(self, offs, type, k, m):
        """Note that a [k, m] matrix lies at byte `offs`, in place of whatever lay there.  m: of all experts."""
        end = offs + type.row_nbytes(k) * m
        self._shapes = {at: shape for at, shape in self._shapes.items() if at >= end or at + _nbytes(shape) <= offs}
        self._shapes[offs] = type, k, m

    def put(self, offs, type, k, m, raw):
        """Repack the file's bytes of a [k, m] matrix to byte `offs`."""
        super().host_bytes(offs, type.row_nbytes(k) * m, write=True)
        self.hold(offs, type, k, m)
        self.pack(offs, raw)

    def pack(self, offs, raw):
        """The file's bytes of the matrix that lies at byte `offs`; several threads may each pack one."""
        type, k, m = self._shapes[offs]
        super().host_bytes(offs, type.row_nbytes(k) * m, write=True)
        repack.pack(type, raw, self.base + offs, k, m)

    def layout(self):
        """All bytes as they lie here, a view."""
        return super().host_bytes(0, self.size)

    def _unpacked(self, offs, nbytes):
        """(where the matrix that holds these bytes begins, its own bytes: a copy)"""
        for start, (type, k, m) in self._shapes.items():
            if start <= offs and offs + nbytes <= start + _nbytes((type, k, m)):
                out = empty(_nbytes((type, k, m)), np.uint8, "a matrix of CPU_REPACK as it is in the file")
                repack.unpack(type, out, self.base + start, k, m)
                return start, out
        raise NotAllocated(f"bytes {offs}..{offs + nbytes} of {self!r} belong to no tensor")

    def set_tensor(self, t, data, offset=0):
        """Bytes of a matrix or of a view of it: the whole is unpacked and packed again."""
        raw, offs = as_bytes(data), t.offs + offset
        super().host_bytes(offs, raw.size, write=True)
        start, own = self._unpacked(offs, raw.size)
        own[offs - start:offs - start + raw.size] = raw
        self.put(start, *self._shapes[start], own)

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        self.set_tensor(t, np.full(t.nbytes - offset if nbytes is None else nbytes, value, np.uint8), offset)

    def copy_tensor(self, src, dst):
        """Copy by way of the tensor's own bytes, since layouts may differ."""
        return False

    def host_bytes(self, offs, nbytes, write=False):
        """The bytes of a tensor or of a part of it, unpacked: a copy."""
        super().host_bytes(offs, nbytes, write)
        if write:
            raise NotSupported(f"{self!r} holds repacked weights; write tensors with set_tensor")
        start, own = self._unpacked(offs, nbytes)
        return own[offs - start:offs - start + nbytes]

    def clear(self, value=0):
        """Fill every matrix with a byte."""
        require_byte(value)
        super().host_bytes(0, self.size, write=True)[...] = value
        for offs, shape in list(self._shapes.items()):
            self.put(offs, *shape, np.full(_nbytes(shape), value, np.uint8))


def _nbytes(shape):
    type, k, m = shape
    return type.row_nbytes(k) * m


class CPURepackBufferType(BufferType):
    """Weights of matrix products, rearranged.  Not host memory: its bytes are not the tensors'."""
    name = "CPU_REPACK"

    def __init__(self, device):
        self.device = device

    def alignment(self):
        return 64

    def takes(self, type, ne):
        """Has a matrix of this type and shape (ggml order), or that of several experts, a layout?"""
        return repack.takes(type, ne)

    def alloc_buffer(self, size):
        return RepackBuffer(self, size)

    def buffer_over(self, memory):
        """A buffer over a uint8 array that holds matrices in the layout; `hold` says where each lies."""
        return RepackBuffer(self, memory.size, memory)


def is_repacked(t):
    """Does `t`, or what it is a view of, lie in a CPU_REPACK buffer?"""
    return bool(_alive) and t is not None and t.base.op == _NONE and isinstance(t.buffer, RepackBuffer)


NOTHING = Kernel("nothing", None, 0.0)              # of a node without elements; no plan holds it


def repacked_ids(nodes):
    """Ids of the matrices in CPU_REPACK buffers that `nodes` read."""
    sources = {id(s): s for t in nodes for s in t.src if s is not None}.values() if _alive else ()
    return frozenset(s.base.id for s in sources if is_repacked(s))


def kernel_of(t, n_threads):
    """The CPU's kernel of node `t`, None where there is none: the layout's where it reads repacked weights."""
    if 0 in t.ne:
        return NOTHING
    if any(is_repacked(s) for s in t.src):
        return None if any(is_repacked(s) for s in t.src[1:]) else repack.kernel(t, n_threads)
    spec = all_specs().get(t.op)
    return spec.kernel(t, n_threads) if spec is not None and spec.kernel is not None else None
