"""Memory of a meta device: each tensor consists of Parts, one on every device.

    leaf        allocated for the meta device: parts of its own on each device, written and read slice by slice
    result      parts that the run which computed it holds (run.py)
"""
import numpy as np

from ggjit.core.buffer import Buffer, BufferType, as_bytes
from ggjit.core.slots import checked_int
from ggjit.graphs.placed import PlacedTensor
from ggjit.meta.split import given, slice_shape
from ggjit.ops.core.errors import NotAllocated, NotSupported
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import describe
from ggjit.ops.core.split import MIRRORED, PARTIAL, period
from ggjit.tensors.context import Context, alloc_ctx_tensors


class MetaBufferType(BufferType):
    """Memory in which every tensor has a part on each device, in that device's buffer type among `bufts`."""

    def __init__(self, device, name, bufts):
        self.device, self.name, self.bufts = device, name, bufts

    def takes(self, t):
        """Can the parts of this leaf, which has no memory yet, lie here?"""
        state = given(t, self.device.split(t), len(self.bufts))
        return all(buft.takes(t.type, slice_shape(t, state, j)[0]) for j, buft in enumerate(self.bufts))

    def alignment(self):
        return max(checked_int(b, "alignment") for b in self.bufts)

    def max_size(self):
        return min(checked_int(b, "max_size") for b in self.bufts)

    def is_host(self):
        return False

    def alloc_buffer(self, size):
        """A buffer without memory: parts of leaves are allocated when leaves are placed, parts of results by a run."""
        return MetaBuffer(self, size)


class Parts:
    """A tensor's parts: `state`, and a tensor on each device."""

    def __init__(self, state, tensors, kept=()):
        self.state, self.tensors, self.kept = state, tensors, kept

    def read(self, t):
        """The bytes of `t`, contiguous, put together."""
        if self.state == MIRRORED:
            return self.tensors[0].buffer.get_tensor(self.tensors[0])
        raws = [np.frombuffer(x.buffer.get_tensor(x), np.uint8) for x in self.tensors]
        if self.state == PARTIAL:
            raise NotSupported(f"{describe(t)}: its summands were not added")
        whole = period(t, t.nb, self.state)
        return np.concatenate([r.reshape(t.nbytes // whole, -1) for r in raws], 1).tobytes()

    def write(self, t, raw):
        """Bytes of all of `t` to its parts."""
        if self.state == MIRRORED:
            for x in dict.fromkeys(self.tensors):
                x.buffer.set_tensor(x, raw)
            return
        rows, at = np.frombuffer(raw, np.uint8).reshape(-1, period(t, t.nb, self.state)), 0
        for x in self.tensors:
            n = x.nbytes // len(rows)
            x.buffer.set_tensor(x, np.ascontiguousarray(rows[:, at:at + n]).reshape(-1))
            at += n


class MetaBuffer(Buffer):
    """What lies in it is found by tensor: leaves and inputs by init_tensor, results by the run that computed them."""

    n_changes = 0                       # how often parts of any buffer moved

    def __init__(self, buft, size):
        super().__init__(buft, size)
        self._parts = {}                # {(tensor's id, generation): Parts}

    def init_tensor(self, t):
        if t.view_src is None and t.op == OP.NONE:
            device = self.buft.device
            # a scheduler's copies are whole on every device; leaves are cut as the user says
            state = MIRRORED if isinstance(t, PlacedTensor) else given(t, device.split(t), len(device.devices))
            held = self._parts.get((t.id, t.generation))
            if held is None or held.state != state:     # a scheduler calls this whenever it looks up places
                self.computed({(t.id, t.generation): allocated(t, state, device, self.buft.bufts)})

    def init_view(self, t):
        """Nothing to do: a view has the memory of its base."""

    def parts(self, t):
        """Parts of a tensor that is no view.  Errors: NotAllocated."""
        found = self._parts.get((t.id, t.generation))
        if found is None:
            raise NotAllocated(f"{describe(t)} was not computed on {self.buft.device.name}, or its memory was given to "
                               f"another; compute it, or allocate it again")
        return found

    def computed(self, parts):
        """Note where tensors are from now on, such as the results of a run: {(id, generation): Parts}."""
        if any(self._parts.get(key) is not p for key, p in parts.items()):
            self._parts.update(parts)
            MetaBuffer.n_changes += 1

    def get_tensor(self, t, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        direct = self._parts.get((t.id, t.generation))
        if direct is not None:
            return direct.read(t)[offset:offset + nbytes]
        begin = t.view_offs + offset
        return self.parts(t.base).read(t.base)[begin:begin + nbytes]

    def set_tensor(self, t, data, offset=0):
        raw, base = as_bytes(data), t.base
        parts, begin = self.parts(base), t.view_offs + offset
        if raw.size == base.nbytes:
            return parts.write(base, raw)
        whole = bytearray(parts.read(base))
        whole[begin:begin + raw.size] = raw.tobytes()
        return parts.write(base, np.frombuffer(whole, np.uint8))

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        self.set_tensor(t, np.full(t.nbytes - offset if nbytes is None else nbytes, value, np.uint8), offset)

    def copy_tensor(self, src, dst):
        return False

    def clear(self, value):
        for parts in self._parts.values():
            for x in parts.tensors:
                x.buffer.memset_tensor(x, value)

    def free(self):
        self._parts.clear()
        MetaBuffer.n_changes += 1
        super().free()


def allocated(t, state, device, bufts):
    """The Parts of a leaf, in memory of their own, one in each of `bufts`."""
    tensors, kept = [], []
    for j, buft in enumerate(bufts):
        if j and device.is_one and not state.is_cut:
            tensors.append(tensors[0])
            continue
        ctx = Context()
        tensors.append(ctx.new_tensor(t.type, slice_shape(t, state, j)[0], name=t.name))
        kept.append((ctx, alloc_ctx_tensors(ctx, buft)))
    return Parts(state, tensors, kept)
