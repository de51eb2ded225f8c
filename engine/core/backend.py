"""Device and Backend (a stream of work on a device): base classes with ggml's slot defaults.

A third party subclasses Device, Backend, BufferType and Buffer, and registers a registry object (`gg.registry`).
Every slot that ggml calls optional has ggml's default here: a device that only computes needs `init_backend`,
`buffer_type`, `supports_op` and a Backend with `graph_compute`.
"""
import numpy as np

from ggjit.core.arguments import buffer_size, expect, expect_slot
from ggjit.core.buffer import BufferType
from ggjit.core.graph_slots import place_graphs
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.core.html_repr import HtmlRepr
from ggjit.core.lifetime import Handle
from ggjit.core.slots import alloc_buffer
from ggjit.core.versions import count_writes
from ggjit.ops.core.errors import GgjitError, NotSupported, ParamError, TypeMismatch

TYPE_CPU, TYPE_GPU, TYPE_IGPU, TYPE_ACCEL, TYPE_NULL = "cpu", "gpu", "igpu", "accel", "null"
DEVICE_TYPES = (TYPE_CPU, TYPE_GPU, TYPE_IGPU, TYPE_ACCEL, TYPE_NULL)


class DeviceLost(GgjitError, RuntimeError):
    """A device that is gone, with all that was in its memory: nothing of it can be used again.

    Of a remote device: `.device`; `.epoch`, which connection it was, from 0; `.last_seq`, the last message it answered.
    """

    def __init__(self, message, device=None, epoch=None, last_seq=None):
        super().__init__(message)
        self.device, self.epoch, self.last_seq = device, epoch, last_seq


class Device(Handle, HtmlRepr):
    """A piece of hardware.  Subclasses give name, description, type, `init_backend` and `buffer_type`."""
    name = "?"
    description = ""
    type = TYPE_CPU
    is_async = False                # do its backends return before their work is done?
    reg = None                      # the registry object that lists it; set when devices are listed

    @property
    def props(self):
        """Capabilities as a dict (ggml_backend_dev_props): "async" is `is_async`, the others are by default True where
        the device defines the slot, "events" where `event_new` gives one."""
        free, total = self.memory()
        overrides = lambda slot: getattr(type(self), slot) is not getattr(Device, slot)     # noqa: E731
        return {"name": self.name, "description": self.description, "type": self.type, "memory_free": free,
                "memory_total": total, "device_id": None, "async": bool(self.is_async),
                "host_buffer": self.host_buffer_type() is not None,
                "buffer_from_host_ptr": overrides("buffer_from_host_ptr"),
                "mmap_support": overrides("buffer_from_host_ptr"), "events": self._has_events()}

    def _has_events(self):
        event = self.event_new()
        if event is not None:
            self.event_free(event)
        return event is not None

    def memory(self):
        """(free, total) bytes; (0, 0) where unknown."""
        return 0, 0

    def init_backend(self, params=""):
        """A new, independent stream.  params: "name=value,name=value"."""
        raise NotSupported(f"device {self.name} cannot make a backend")

    def buffer_type(self):
        """The memory its backends compute in."""
        raise NotSupported(f"device {self.name} has no buffer type")

    def host_buffer_type(self):
        """Host memory this device reaches fast, or None."""
        return None

    def extra_buffer_types(self):
        """More buffer types of this device (ggml_backend_dev_get_extra_bufts)."""
        return []

    def buffer_from_host_ptr(self, array, read_only=False, max_tensor_size=None):
        """A buffer over host memory; nothing is copied.

        max_tensor_size: bytes of the largest tensor that will lie in it (None: any), for devices that reach large
        memory through several windows.
        """
        raise NotSupported(f"device {self.name} cannot use host memory in place")

    def supports_op(self, t):
        """Can this device compute the node?  Called once per distinct signature."""
        return False

    def supports_buft(self, buft):
        """Can this device read tensors in that buffer type?"""
        return buft.device is self

    def offload_op(self, t):
        """Is it worth copying weights here to compute this node (large batches)?"""
        return False

    def event_new(self):
        """A synchronisation point (engine/core/events.py), or None where the device has none."""
        return None

    def event_free(self, event):
        """Nothing to free by default."""

    def event_synchronize(self, event):
        """Block until the event was reached; nothing to wait for by default."""

    def __repr__(self):
        return f"<Device {self.name}: {self.description}>"


_WRITING_SLOTS = {"set_tensor_async": 0, "set_tensor_2d_async": 0, "copy_tensor_async": 1}


class Backend(Handle, HtmlRepr):
    """A stream of work on a device.  The asynchronous slots default to the synchronous ones.

    Contract of the asynchronous slots: what is submitted runs in order; `synchronize` waits for all of it.
    """

    writes_in_order = False         # are writes into its buffers done after what was submitted before, without waiting?
    reads_placements = False        # do its methods that take a graph read the graph's placement themselves?
    plan_settings = ()              # what its plans depend on besides graph and placement (engine/graphs/plan_cache.py)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        count_writes(cls, _WRITING_SLOTS)
        place_graphs(cls)

    def __init__(self, device, name=None):
        self.device, self.name = device, name or device.name

    @property
    def guid(self):
        """Equal for backends of the same implementation."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def default_buffer_type(self):
        """The BufferType of its device's own memory."""
        return self.device.buffer_type()

    def work_nbytes(self, node):
        """Bytes of host memory that the node's kernel works in and that may lie with the graph's tensors."""
        return 0

    def working_buffers(self):
        """{name: buffers on the device beside those of graphs}: what kernels work in, what plans are made of."""
        return {}

    def alloc_buffer(self, size):
        """A buffer of the default type (ggml_backend_alloc_buffer)."""
        return alloc_buffer(self.default_buffer_type, size)

    @property
    def alignment(self):
        """Bytes: tensors in its memory begin at multiples of this."""
        return self.default_buffer_type.alignment()

    @property
    def max_size(self):
        """Bytes that one of its buffers can have at most."""
        return self.default_buffer_type.max_size()

    def free(self):
        """End the stream; synchronous backends hold nothing."""

    def set_tensor_async(self, t, data, offset=0):
        """Write bytes once everything submitted before is done; `data` must stay as it is until `synchronize`."""
        self.synchronize()
        t.buffer.set_tensor(t, data, offset)

    def set_tensor_2d_async(self, t, data, offset, nbytes, n_copies, stride, data_stride):
        """Write strided blocks (Buffer.set_tensor_2d) in this stream's order."""
        self.synchronize()
        t.buffer.set_tensor_2d(t, data, offset, nbytes, n_copies, stride, data_stride)

    def get_tensor_2d_async(self, t, offset, nbytes, n_copies, stride, data_stride):
        """Read strided blocks in this stream's order."""
        self.synchronize()
        return t.buffer.get_tensor_2d(t, offset, nbytes, n_copies, stride, data_stride)

    def get_tensor_async(self, t, offset=0, nbytes=None):
        """Bytes of the tensor after everything submitted before; asynchronous ones are filled in at `synchronize`."""
        self.synchronize()
        return t.buffer.get_tensor(t, offset, nbytes)

    def copy_tensor_async(self, src, dst, src_backend=None):
        """Copy src (on src_backend) into dst (here), in order on both streams; False: not supported, fall back."""
        return False

    def synchronize(self):
        """Wait until everything submitted is done (synchronous backends: nothing to wait for)."""

    def graph_plan_create(self, graph, placement=None):
        """A plan that `graph_plan_compute` runs any number of times.

        The graph's tensors know their memory as in graph_compute.  Buffers may move between two runs; `t.buffer` and
        `t.offs` say where the tensors lie now.
        """
        raise NotSupported(f"backend {self.name} has no plans")

    def graph_plan_update(self, plan, graph):
        """The plan for `graph`, made from an old one where that is cheaper; by default a new one."""
        self.graph_plan_free(plan)
        return self.graph_plan_create(graph)

    def graph_plan_compute(self, plan):
        """Run a plan."""
        expect_slot(plan, "compute", "graph_plan_compute takes what graph_plan_create returned")
        plan.compute()

    def graph_plan_free(self, plan):
        """Nothing to free by default: plans are garbage collected."""

    def graph_compute(self, graph):
        """Run the nodes of `graph` in order; may return before they are done (see synchronize).

        A node's memory is `t.buffer` and `t.offs`, a source's likewise: for whom a GraphAllocator placed the graph, and
        under a scheduler, where sources may be copies (engine/graphs/placed.py).  The results are read at the user's
        tensors, after `synchronize`.  By default made of the plan slots.
        """
        plan = self.graph_plan_create(graph)
        try:
            self.graph_plan_compute(plan)
            self.synchronize()
        finally:
            self.graph_plan_free(plan)

    def graph_optimize(self, nodes):
        """The nodes of a scheduler's split in a better order, sources first.  By default as they are.

        `nodes.add_alloc_dep(tensor, until)`: the memory of `tensor` is kept until the node `until` has run, for kernels
        that compute several nodes at once or out of order (engine/sched/order.py).
        """
        return nodes

    def supports_op(self, t):
        """Can this backend compute the node?"""
        expect_slot(t, "ne", "supports_op takes a tensor")
        return self.device.supports_op(t)

    def supports_buft(self, buft):
        """Can this backend read tensors in that buffer type?"""
        return self.device.supports_buft(expect(buft, BufferType, "supports_buft"))

    def offload_op(self, t):
        """Device.offload_op."""
        return self.device.offload_op(t)

    def event_record(self, event):
        """Nothing to record by default."""

    def event_wait(self, event):
        """Later work of this stream waits for the event; nothing to wait for by default."""

    def __repr__(self):
        return f"<Backend {self.name}>"


count_writes(Backend, _WRITING_SLOTS)
place_graphs(Backend, ("graph_plan_compute", "graph_plan_free"))


def buffer_type_of(target, what):
    """The buffer type a graph is planned for: a backend's default, a buffer type itself, of None host memory.
    Errors: TypeMismatch, which begins with `what`."""
    if target is None:
        return HOST
    return target.default_buffer_type if isinstance(target, Backend) else expect(target, BufferType, what)


class HostMemory:
    """Mixin for devices that compute in host memory."""

    def buffer_from_host_ptr(self, array, read_only=False, max_tensor_size=None):
        """A buffer over memory that exists: an ndarray, a memory map, any object with the buffer protocol.

        Nothing is copied.  read_only=True promises that the memory does not change: plans that would write it are
        refused, and copies of it on other devices are kept.  max_tensor_size does not matter here: the whole memory
        is reached.  Errors: TypeMismatch, ParamError (not C-contiguous, a negative size).
        """
        if max_tensor_size is not None:
            buffer_size(max_tensor_size)
        return ArrayBuffer(self.buffer_type(), host_array(array), read_only)


def host_array(memory):
    """The memory of anything with the buffer protocol as an ndarray.  Errors: TypeMismatch, ParamError."""
    if not isinstance(memory, np.ndarray):
        try:
            memory = np.frombuffer(memory, np.uint8)
        except (TypeError, ValueError):
            raise TypeMismatch(f"buffer_from_host_ptr takes an array or a buffer object, got "
                               f"{memory.__class__.__name__}") from None
    if not memory.flags.c_contiguous:
        raise ParamError("buffer_from_host_ptr: the array is not C-contiguous; pass np.ascontiguousarray(a)")
    return memory
