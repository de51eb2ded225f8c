"""The NULL device: it plans, measures and schedules graphs, but holds no memory and computes nothing.

    null = gg.init_backend("NULL")
    buf = gg.alloc_ctx_tensors(ctx, null)       # buf.size is what it would take
    gg.Scheduler([null, cpu]).reserve(graph)    # splits, copies, buffer sizes
    null.graph_compute(graph)
    null.report                                 # [{"what": "compute", "nodes": 12, "written_nbytes": ...}, ...]

One with a name and a size stands for a device that is not here: gg.init_backend("NULL:name=GPU0,memory=24G").
"""
import numpy as np

from ggjit.core.arguments import buffer_size, nbytes_of
from ggjit.core.backend import TYPE_NULL, Backend, Device, host_array
from ggjit.core.buffer import Buffer, BufferType, as_bytes
from ggjit.ops.core.errors import NotAllocated, OutOfMemory, ParamError
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.tensors.summary import label


class NullBuffer(Buffer):
    """A buffer that has a size but no memory.  Writes are counted and dropped; reads raise."""

    def __init__(self, buft, size):
        size = buffer_size(size)
        super().__init__(buft, size)
        self.written_nbytes = 0
        buft.device.took(size)

    def free(self):
        if self.alive:
            self.buft.device.took(-self.size)
        super().free()

    def set_tensor(self, t, data, offset=0):
        self.written_nbytes += as_bytes(data).size

    def get_tensor(self, t, offset=0, nbytes=None):
        raise NotAllocated(f"{describe(t)} lies on the NULL device, which holds no data; compute it on a real one")

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        self.written_nbytes += t.nbytes - offset if nbytes is None else nbytes

    def copy_tensor(self, src, dst):
        self.written_nbytes += dst.nbytes
        return True

    def clear(self, value=0):
        self.written_nbytes += self.size


class NullBufferType(BufferType):
    def __init__(self, device):
        self.device, self.name = device, device.name

    def alignment(self):
        return 64

    def alloc_buffer(self, size):
        free = self.device.memory()[0]
        if self.device.size is not None and size > free:
            raise OutOfMemory(f"{self.name}: a buffer of {size:,} bytes does not fit, {free:,} of {self.device.size:,} "
                              f"bytes are free; put less of the network there")
        return NullBuffer(self, size)


class NullDevice(Device):
    """A device without hardware: plans and measures, computes nothing."""
    description, type = "plans, measures and schedules; computes nothing", TYPE_NULL

    def __init__(self, name="NULL", size=None, host=False):
        """size: bytes of its memory, None: no limit; host: it reads the memory of this process, as a CPU does."""
        self.name, self.size, self.host, self._used = name, size, host, 0
        self._buffer_type = NullBufferType(self)

    def init_backend(self, params=""):
        """params: "name=GPU0,memory=24G": a device of that name and size."""
        given = dict(part.strip().partition("=")[::2] for part in str(params).split(",") if part.strip())
        if given.keys() - {"name", "memory"}:
            raise ParamError(f"the NULL device has the parameters name=... and memory=..., got {params!r}")
        if not given:
            return NullBackend(self)
        size = nbytes_of(given["memory"], "NULL: memory") if "memory" in given else None
        return NullBackend(NullDevice(given.get("name") or "NULL", size))

    def memory(self):
        """(free, total) bytes; 0 where it has no size."""
        return (0, 0) if self.size is None else (self.size - self._used, self.size)

    def took(self, nbytes):
        self._used += nbytes

    def buffer_type(self):
        return self._buffer_type

    def buffer_from_host_ptr(self, array, read_only=False, max_tensor_size=None):
        """A size without memory: mapped weights can be planned without being read."""
        array = array if isinstance(array, np.ndarray) else host_array(array)       # never read: strides do not matter
        return NullBuffer(self._buffer_type, array.nbytes)

    def supports_op(self, t):
        return True

    def supports_buft(self, buft):
        return isinstance(buft, NullBufferType) and buft.device is self or self.host and buft.is_host()


class NullBackend(Backend):
    """`report`: a list of dicts, one for each computation and copy."""
    reads_placements = True         # it does not use placements at all

    def __init__(self, device):
        super().__init__(device)
        self.report = []

    def graph_compute(self, graph):
        nodes = [t for t in graph.nodes if t.op not in VIEW_OPS]
        ops = {}
        for t in nodes:
            ops[t.op.name] = ops.get(t.op.name, 0) + 1
        self.report.append({
            "what": "compute", "nodes": len(nodes), "ops": ops, "written_nbytes": sum(t.nbytes for t in nodes),
            "read_nbytes": sum(s.nbytes for t in nodes for s in t.src if s is not None)})

    def copy_tensor_async(self, src, dst, src_backend=None):
        self.report.append({"what": "copy", "tensor": label(src), "nbytes": src.nbytes})
        return True


NULL = NullDevice()
