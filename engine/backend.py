"""What a device brings: Device and Backend (a stream of work on it), base classes with ggml's slot defaults.

A third party subclasses Device, Backend, BufferType and Buffer, and registers a registry object (`gg.registry`).
"""
from ggjit.buffer import ArrayBuffer
from ggjit.ops.errors import NotSupported

TYPE_CPU, TYPE_GPU, TYPE_ACCEL = "cpu", "gpu", "accel"


class Device:
    """A piece of hardware.  Subclasses give name, description, type, `init_backend` and `buffer_type`."""
    name = "?"
    description = ""
    type = TYPE_CPU

    @property
    def props(self):
        """Capabilities as a dict (ggml_backend_dev_props)."""
        free, total = self.memory()
        return {"name": self.name, "description": self.description, "type": self.type, "memory_free": free,
                "memory_total": total, "async": False, "host_buffer": self.host_buffer_type() is not None,
                "buffer_from_host_ptr": False, "events": False}

    def memory(self):
        """(free, total) bytes; (0, 0) where unknown."""
        return 0, 0

    def init_backend(self, params=""):
        raise NotSupported(f"device {self.name} cannot make a backend")

    def buffer_type(self):
        raise NotSupported(f"device {self.name} has no buffer type")

    def host_buffer_type(self):
        """Host memory this device reaches fast, or None."""
        return None

    def buffer_from_host_ptr(self, array, read_only=False):
        raise NotSupported(f"device {self.name} cannot use host memory in place")

    def supports_op(self, t):
        """Can this device compute the node?  Asked once per distinct signature."""
        return False

    def supports_buft(self, buft):
        """Can this device read tensors in that buffer type?"""
        return buft.device is self

    def offload_op(self, t):
        """Worth copying weights here for (large batches)?"""
        return False

    def event_new(self):
        return None

    def event_free(self, event):
        """Nothing to free by default."""

    def event_synchronize(self, event):
        """Nothing to wait for by default."""

    def __repr__(self):
        return f"<Device {self.name}: {self.description}>"


class Backend:
    """A stream of work on a device.  The asynchronous slots default to the synchronous ones."""

    def __init__(self, device, name=None):
        self.device, self.name = device, name or device.name

    @property
    def guid(self):
        """Equal for backends of the same implementation."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def default_buffer_type(self):
        return self.device.buffer_type()

    def set_tensor_async(self, t, data, offset=0):
        t.buffer.set_tensor(t, data, offset)

    def get_tensor_async(self, t, offset=0, nbytes=None):
        return t.buffer.get_tensor(t, offset, nbytes)

    def copy_tensor_async(self, src, dst, src_backend=None):
        return dst.buffer.copy_tensor(src, dst)

    def synchronize(self):
        """Wait until everything submitted is done (synchronous backends: nothing to wait for)."""

    def graph_plan_create(self, graph, placement=None):
        raise NotSupported(f"backend {self.name} has no plans")

    def graph_compute(self, graph):
        raise NotSupported(f"backend {self.name} does not compute")

    def supports_op(self, t):
        return self.device.supports_op(t)

    def offload_op(self, t):
        return self.device.offload_op(t)

    def event_record(self, event):
        """Nothing to record by default."""

    def event_wait(self, event):
        """Nothing to wait for by default."""

    def __repr__(self):
        return f"<Backend {self.name}>"


class HostMemory:
    """Mixin for devices that compute in host memory."""

    def buffer_from_host_ptr(self, array, read_only=False):
        """A buffer over `array`'s own memory; nothing is copied."""
        return ArrayBuffer(self.buffer_type(), array, read_only)
